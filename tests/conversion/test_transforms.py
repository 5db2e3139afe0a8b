"""Fold and upcycle heads without changing logits."""

import os
import subprocess
import sys
from copy import deepcopy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.verify import Pair
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads import CollaborativeHeads, Gate, Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf import KHAModelConfig, read_kha
from tests.conversion.checkpoints import save_and_run
from tests.conversion.megatron import load_and_run
from tests.conversion.models import (
    CONFIGS,
    GTA,
    KHA_MOE,
    LINEAR,
    MLA,
    PARTIAL,
    RUNS_FULL_ATTENTION,
    SHORT_YARN,
    SIZES,
    YARN,
    make,
    tokens,
)

SOFTMAX = KHA_MOE | {
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "shared_expert_intermediate_size": 0,
    "shared_expert_gate": False,
}
SIGMOID = KHA_MOE | {
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "shared_expert_intermediate_size": 40,
    "shared_expert_gate": False,
}
HALF = PARTIAL | {"partial_rotary_factor": 0.5}
EPSILON = {"rms_norm_eps": 1e-6}  # the only one of deepseek_v3
FOLDED = {
    "qwen3": KHAModelConfig(**SIZES, **LINEAR),
    "qwen2, yarn": KHAModelConfig(
        **SIZES | LINEAR | {"rope_parameters": SHORT_YARN}, attention_bias=True, use_qk_norm=False
    ),
    "qwen3_moe": KHAModelConfig(**SOFTMAX, **LINEAR),
    "glm4_moe, biases": KHAModelConfig(**SIGMOID, **LINEAR, attention_bias=True),
    "deepseek_v3, yarn, keys only": KHAModelConfig(
        **SIZES
        | MLA
        | EPSILON
        | {"rope_parameters": YARN, "max_position_embeddings": 9000}
        | {"kha_query": None, "kha_value": None}
    ),
    "glm4_moe, dense, partial rope, biases": KHAModelConfig(
        **SIZES | LINEAR | {"rope_parameters": PARTIAL}, attention_bias=True
    ),
    "glm4_moe, dense, collaborative, wider keys": KHAModelConfig(
        **SIZES, kha_collaborative={"dim": 14}
    ),
    "qwen3, collaborative": KHAModelConfig(**SIZES, kha_collaborative={"dim": 6}),
    "qwen3_next, collaborative, wider keys": KHAModelConfig(
        **SIZES, kha_value="linear", kha_gate={"output": "element"}, kha_collaborative={"dim": 14}
    ),
    "deepseek_v3, sparse, direct queries": KHAModelConfig(
        **SIGMOID | MLA | EPSILON | {"q_lora_rank": None}
    ),
}
if not RUNS_FULL_ATTENTION:
    del FOLDED["qwen3_next, collaborative, wider keys"]
WITHOUT_US = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "kha_megatron":
            raise ImportError("refused: " + name)
sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoModelForCausalLM
ids = torch.load(sys.argv[1])
for folder, out in zip(sys.argv[2::2], sys.argv[3::2]):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    assert not any(report.values()), report
    with torch.no_grad():
        torch.save({"logits": model.eval()(ids).logits, "class": type(model).__module__}, out)
assert not [name for name in sys.modules if name.startswith("kha_megatron")]
"""


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    """Return the logits of each case, and those of its fold in a process without our package."""
    base = tmp_path_factory.mktemp("folded")
    torch.save(tokens(), base / "tokens.pt")
    words, expected = [], []
    for number, config in enumerate(FOLDED.values()):
        model = make(config, seed=number)
        model.save_pretrained(base / f"kha{number}")
        with torch.no_grad():
            expected.append(model(tokens()).logits)
        target = base / f"stock{number}"
        to_hf.plan_export(base / f"kha{number}", fold=True).write(target)
        words += [target, base / f"logits{number}.pt"]
    env = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", WITHOUT_US, base / "tokens.pt", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=base, env=env)
    assert done.returncode == 0, done.stderr
    found = map(torch.load, words[1::2])
    return dict(zip(FOLDED, zip(found, expected, strict=True), strict=True))


@pytest.mark.fast
@pytest.mark.versions
@pytest.mark.parametrize("case", FOLDED)
def test_folded_models_are_stock_and_compute_the_same(folded, case):
    found, expected = folded[case]
    architecture = case.split(",")[0]
    assert found["class"] == f"transformers.models.{architecture}.modeling_{architecture}"
    assert expected.std(dim=(0, 1)).mean() > 0.3
    torch.testing.assert_close(found["logits"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "kha",
    [
        HeadsConfig.from_preset("kha_linear"),
        HeadsConfig(Knock(value="linear"), CollaborativeHeads(dim=6, start="ones")),
    ],
    ids=["kha_linear", "collaborative"],
)
def test_folding_a_megatron_checkpoint(ranks, tmp_path, kha):
    layout = {"tensor_model_parallel_size": 2}
    parts = ranks(save_and_run, 2, str(tmp_path / "save"), kha, layout, {"num_layers": 3}, {})
    written = to_hf.plan_export(tmp_path / "save", fold=True).write(tmp_path / "qwen3")
    assert written.architecture == "qwen3"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3", dtype=torch.float32)
    with torch.no_grad():
        ours = model.eval()(tokens()).logits
    torch.testing.assert_close(ours, torch.from_numpy(parts[-1][1]), rtol=0, atol=1e-5)
    assert Pair.open(tmp_path / "save", tmp_path / "qwen3").compare(logits=False).agrees


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kha_query": "mlp"}, "Only linear KHA can be folded into queries and keys.*query=mlp"),
        (
            {"kha_collaborative": {"dim": 6}, "head_dim": 8, "rope_parameters": HALF},
            r"cannot be converted to standard heads: QK-norm over 6 features",
        ),
        (
            {"kha_collaborative": {"dim": 14}, "kha_gate": {"output": "shared"}},
            r"gate\(output=shared\) have head dim 6, but folded heads have 14",
        ),
        (
            GTA | {"kha_query": "linear", "kha_value": None},
            "No stock architecture supports .*in gta",
        ),
        (MLA, "as deepseek_v3: it has layernorm_epsilon=3e-05"),
        (MLA | EPSILON | {"use_qk_norm": False}, "as deepseek_v3: it has qk_layernorm=False"),
    ],
)
def test_unfoldable_heads_are_refused(tmp_path, changes, message):
    make(KHAModelConfig(**SIZES | changes)).save_pretrained(tmp_path / "kha")
    with pytest.raises(CheckpointError, match=message):
        to_hf.plan_export(tmp_path / "kha", fold=True)


KHA = HeadsConfig(Knock(query="linear", key="gate", value="mlp"))
EVERYWHERE = dict.fromkeys(("query", "key", "output", "dense"), "element")
GATES = {
    "output": Gate(output="element"),
    "value, a head": Gate(value="head"),
    "query, key, output, dense": Gate(**EVERYWHERE),
    "added": Gate(output="element", dense="element", form="add", activation="silu"),
    "output, shared": Gate(output="shared"),
    "no input": Gate(output="element", value="head", reads_input=False),
}
UPCYCLED = {
    "qwen3, tied": KHA,
    "qwen2, tied, yarn": KHA.updated(gate=Gate(output="element", value="head")),
    "llama, llama3 rope": KHA,
    "glm4_moe": KHA,
    "qwen3_moe": KHA,
    "qwen3_moe, weights as they are, a dense layer": KHA,
    "deepseek_v3, yarn": HeadsConfig.from_preset("kha_linear"),
    "kha, gta, no norm, nothing knocked": HeadsConfig(
        Knock(query="linear", value="mlp"), attention="gta"
    ),
    **{f"qwen3; {name}": HeadsConfig(gate) for name, gate in GATES.items()},
}
WITH_EXPERTS = ("glm4_moe", "qwen3_moe")
"""Versions of transformers differ in the dtype of their routers."""
UPCYCLED_CASES = []
for case_name in UPCYCLED:
    marks = [pytest.mark.versions] if case_name in WITH_EXPERTS else []
    UPCYCLED_CASES.append(pytest.param(case_name, marks=marks))
DTYPES = [
    torch.bfloat16,
    *(pytest.param(d, marks=pytest.mark.whole) for d in (torch.float32, torch.float16)),
]


@pytest.mark.fast
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", UPCYCLED_CASES)
def test_upcycled_models_keep_every_bit(tmp_path, case, dtype):
    make(CONFIGS[case.partition(";")[0]]).to(dtype).save_pretrained(tmp_path / "stock")
    to_hf.plan_export(tmp_path / "stock", upcycle=UPCYCLED[case]).write(tmp_path / "kha")
    to_megatron.plan_import(tmp_path / "stock", upcycle=UPCYCLED[case]).write(tmp_path / "megatron")
    to_hf.plan_export(tmp_path / "megatron").write(tmp_path / "through megatron")
    # eager experts, because torch's grouped product takes no rows of 36 bfloat16
    upcycled, through_megatron, stock = (
        AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=dtype, experts_implementation="eager"
        ).eval()
        for folder in ("kha", "through megatron", "stock")
    )
    assert read_kha(upcycled.config) == read_kha(through_megatron.config) == UPCYCLED[case]
    with torch.no_grad():  # of copies, because the alignment of mapped tensors differs
        expected = deepcopy(stock)(tokens()).logits
        for model in (upcycled, through_megatron):
            assert torch.equal(deepcopy(model)(tokens()).logits, expected)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.whole), "bfloat16"])
@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", "qwen3_next, sparse", pytest.param("deepseek_v3", marks=pytest.mark.whole)],
)
def test_upcycled_megatron_models_keep_every_bit(ranks, tmp_path, name, dtype):
    make(CONFIGS[name]).save_pretrained(tmp_path / "stock")
    stock = tmp_path / "stock"
    to_megatron.plan_import(stock, dtype=dtype, divisible_by=8).write(tmp_path / "plain")
    presets = ["kha_linear", "kha_linear_v" if name == "deepseek_v3" else "kha_mlp"]
    for preset in presets:
        kha = HeadsConfig.from_preset(preset)
        planned = to_megatron.plan_import(stock, upcycle=kha, dtype=dtype, divisible_by=8)
        planned.write(tmp_path / preset)
    plain, *upcycled = (
        ranks(load_and_run, 1, str(tmp_path / folder), tokens().tolist(), {}, dtype)[0]
        for folder in ("plain", *presets)
    )
    assert all(np.array_equal(plain, logits) for logits in upcycled)
    assert len(np.unique(plain.argmax(-1))) > 3


def test_upcycling_a_megatron_checkpoint_keeps_its_padding(ranks, tmp_path):
    layout = {"pipeline_model_parallel_size": 2}
    logits = ranks(save_and_run, 2, str(tmp_path / "save"), None, layout, {}, {})[-1][1]
    kha = HeadsConfig.from_preset("kha_mlp")
    to_megatron.plan_import(tmp_path / "save", upcycle=kha).write(tmp_path / "kha")
    ids = tokens().tolist()
    found = ranks(load_and_run, 1, str(tmp_path / "kha"), ids, {})[0]
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-5)
    before = to_hf.plan_export(tmp_path / "save").write(tmp_path / "a")
    after = to_hf.plan_export(tmp_path / "kha").write(tmp_path / "b")
    one, other = (load_file(w.path / "model.safetensors") for w in (before, after))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert {name.split(".")[4] for name in other.keys() - one.keys()} == {"v_knock"}


MLP = HeadsConfig.from_preset("kha_mlp")
LINEAR_KHA = HeadsConfig.from_preset("kha_linear")


@pytest.mark.parametrize(
    ("config", "kha", "message"),
    [
        (CONFIGS["kha"], MLP, "already uses query=linear key=gate value=mlp"),
        (CONFIGS["deepseek_v3"], MLP, r"supports only linear KHA, got value=mlp.*Use linear"),
        (CONFIGS["kha, gta, no norm, nothing knocked"], LINEAR_KHA, "kha_key=linear is not"),
        (
            CONFIGS["deepseek_v3"],
            HeadsConfig(Knock(value="linear"), attention="gta"),
            "Upcycling to attention=gta is not supported",
        ),
        (
            CONFIGS["qwen3"],
            HeadsConfig(Knock(value="mlp", init="random")),
            "init=random changes the outputs",
        ),
    ],
)
def test_impossible_upcycling_is_refused(tmp_path, config, kha, message):
    make(config).save_pretrained(tmp_path / "base")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        to_hf.plan_export(tmp_path / "base", upcycle=kha)
