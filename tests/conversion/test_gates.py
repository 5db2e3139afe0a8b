"""Convert gated attention."""

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.config import KHAConfig
from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.verify import Pair
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Gate
from kha_megatron.hf import KHAModelConfig, read_kha
from tests.conversion.checkpoints import check_back, save_and_run, tokens
from tests.conversion.fixtures import write_tokenizer
from tests.conversion.models import CONFIGS, SIZES, assert_same_tensors, make
from tests.conversion.models import tokens as ids

GATED = {"attention_output_gate": True, "num_layers": 3}


def load(folder):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=False,
        experts_implementation="eager",  # torch's grouped product takes no rows of 20 features
    )
    assert not any(report.values()), report
    return model.eval()


@torch.no_grad()
def in_two_steps(model, ids, first=7):
    """Return logits of seven tokens, then of the others with a cache."""
    begun = model(ids[:, :first], use_cache=True)
    rest = model(ids[:, first:], past_key_values=begun.past_key_values, use_cache=True)
    return torch.cat([begun.logits, rest.logits], dim=1)


class Published(Qwen3Attention):
    """Attention of github.com/qiuzh20/gated_attention.

    ``q_proj`` has the queries of each KV head, then their gates.
    """

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        width = 1 if config.headwise_attn_output_gate else config.head_dim
        rows = config.num_attention_heads * (config.head_dim + width)
        self.q_proj = torch.nn.Linear(config.hidden_size, rows, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        config, shape = self.config, hidden_states.shape[:-1]
        groups, dim = config.num_key_value_heads, config.head_dim
        mixed = self.q_proj(hidden_states).view(*shape, groups, -1)
        query, gate = mixed.tensor_split([self.num_key_value_groups * dim], dim=-1)
        query = self.q_norm(query.reshape(*shape, -1, dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(*shape, -1, dim)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(*shape, -1, dim).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).transpose(1, 2)
        gate = gate.reshape(*shape, config.num_attention_heads, -1)
        return self.o_proj((output * gate.sigmoid()).flatten(2)), None


SWITCHES = {
    "element": {"elementwise_attn_output_gate": True, "headwise_attn_output_gate": False},
    "head": {"elementwise_attn_output_gate": False, "headwise_attn_output_gate": True},
    "none": {"elementwise_attn_output_gate": False, "headwise_attn_output_gate": False},
}


@pytest.fixture
def published(request, tmp_path, monkeypatch):
    """Return a directory in the published layout, and its logits."""
    monkeypatch.setattr(modeling_qwen3, "Qwen3Attention", Published)
    config = Qwen3Config(**SIZES | SWITCHES[request.param] | {"qkv_bias": False})
    if request.param == "none":
        monkeypatch.undo()
    model = make(config)
    config = model.config.to_dict() | {"model_type": "qwen3", "use_qk_norm": True}
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_qwen3.Qwen3ForCausalLM"}}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config, default=str))
    save_file(model.state_dict(), tmp_path / "theirs" / "model.safetensors")
    with torch.no_grad():
        logits = model(ids()).logits
    monkeypatch.undo()
    return tmp_path / "theirs", logits


@pytest.mark.parametrize(
    ("published", "architecture"),
    [("element", "qwen3_next"), ("head", "kha"), ("none", "qwen3")],
    indirect=["published"],
)
def test_published_models_become_stock_ones(published, tmp_path, architecture):
    folder, expected = published
    written = to_hf.plan(folder, architecture="auto").write(tmp_path / "hf")
    assert written.architecture == architecture
    with torch.no_grad():
        found = load(tmp_path / "hf")(ids()).logits
    assert expected.std(dim=(0, 1)).mean() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    verification = Pair.open(folder, tmp_path / "hf").verify()
    assert verification.tensors.agrees
    assert verification.logits is None  # their code is never run


GATES = {
    "output": Gate(output="element"),
    "value, a head": Gate(value="head"),
    "query, key, output, dense": Gate(
        query="element", key="element", output="element", dense="element"
    ),
    "added": Gate(output="element", dense="element", form="add", activation="silu"),
    "output, shared": Gate(output="shared"),
    "no input": Gate(output="element", value="head", reads_input=False),
}
DTYPES = [
    torch.bfloat16,
    *(pytest.param(d, marks=pytest.mark.whole) for d in (torch.float32, torch.float16)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", GATES)
def test_upcycled_gates_keep_every_bit(tmp_path, case, dtype):
    model = make(CONFIGS["qwen3"]).to(dtype)
    model.save_pretrained(tmp_path / "base")
    to_hf.plan(tmp_path / "base", upcycle=KHAConfig(gate=GATES[case])).write(tmp_path / "gated")
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype).eval()
        for name in ("base", "gated")
    )
    assert read_kha(after.config).gate == GATES[case]
    with torch.no_grad():  # of copies, because the alignment of mapped tensors differs
        assert torch.equal(deepcopy(after)(ids()).logits, deepcopy(before)(ids()).logits)


def test_norm_weights_from_one_half_up_are_exact(tmp_path):
    """``qwen3_next`` stores ``w - 1``, which bfloat16 holds exactly for these weights."""
    model = make(CONFIGS["kha, output gate"]).bfloat16()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(torch.linspace(0.5, 2, len(weight)))
    model.save_pretrained(tmp_path / "kha")
    to_hf.plan(tmp_path / "kha", architecture="qwen3_next").write(tmp_path / "stock")
    assert Pair.open(tmp_path / "kha", tmp_path / "stock").verify().agrees
    to_hf.plan(tmp_path / "stock").write(tmp_path / "back")
    assert_same_tensors(tmp_path / "kha", tmp_path / "back")


def test_gates_after_a_trained_knock(tmp_path):
    """Doubling the projection doubles the output of a linear knock, but not of others."""
    kha = KHAConfig(gate=Gate(value="element"))
    for variant in ("linear", "mlp"):
        config = KHAModelConfig(**SIZES, kha_value=variant)
        make(config).save_pretrained(tmp_path / variant)
    with pytest.raises(ConfigError, match=r"trained value=mlp.*Leave gate\.value out"):
        to_hf.plan(tmp_path / "mlp", upcycle=kha)
    to_hf.plan(tmp_path / "linear", upcycle=kha).write(tmp_path / "gated")
    found = Pair.open(tmp_path / "linear", tmp_path / "gated").verify()
    assert found.agrees
    assert found.logits.max_difference == 0.0


def test_upcycling_from_the_command_line(run, tmp_path, tokenizer):
    make(CONFIGS["qwen3"]).save_pretrained(tmp_path / "base")
    (tmp_path / "text").write_text("w3 w17 w40 w5 w5 w22 " * 40)
    words = ("--to", "hf", "--tokenizer", tokenizer, "--text", tmp_path / "text", "--json")

    def upcycle(name, *asked):
        code, stdout, stderr = run("convert", "upcycle", tmp_path / "base", tmp_path / name, *asked)
        return code, stdout, " ".join(stderr.split())

    code, stdout, _ = upcycle("gated", "--gate", "output=element", *words)
    report = json.loads(stdout)
    assert code == 0
    assert report["loss"] == dict.fromkeys(("before", "after"), report["loss"]["after"]) | {
        "tokens": 8 * 24
    }
    moh = ("moh.shared=2", "moh.active=2", "moh.router=query_norm")
    heads = [word for setting in (*moh, "moh.quantized=true") for word in ("--heads", setting)]
    code, stdout, _ = upcycle("moh", *heads, *words)
    report = json.loads(stdout)
    assert code == 0
    assert report["verification"]["tensors"]["different"] == []
    assert report["verification"]["logits"]["max_difference"] > 0.01
    assert abs(report["loss"]["before"] - report["loss"]["after"]) > 1e-3
    assert_same_tensors(tmp_path / "base", tmp_path / "moh")
    write_tokenizer(tmp_path / "base", 60)  # of another model
    (tmp_path / "text").write_text("w3 w57 " * 40)
    for words, message in (
        (heads[:-2], "Set moh.router=query_norm and moh.quantized=true"),
        ([*heads, "--text", tmp_path / "text"], "gives token 57, but the model has 51"),
    ):
        code, _, stderr = upcycle("none", *words, "--no-verify")
        assert (code, message in stderr) == (2, True)
    assert not (tmp_path / "none").exists()


MOE = {"num_moe_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "num_layers": 2}
SHARED = {"moe_shared_expert_intermediate_size": 28, "moe_shared_expert_gate": True}
FITS = {
    "no experts": (GATED, "auto", "qwen3_next"),
    "no experts, qwen3_5": (GATED, "qwen3_5_text", "qwen3_5_text"),
    "softmax experts": (MOE | GATED | {"moe_layer_freq": [0, 1, 1]}, "auto", "qwen3_next"),
    "gated shared expert": (MOE | GATED | SHARED | {"num_layers": 2}, "auto", "qwen3_next"),
}
"""Configuration, ``--architecture`` and the architecture of the written model."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.whole] * (c == "gated shared expert")) for c in FITS],
)
def test_stock_classes_compute_the_same_and_convert_back(ranks, tmp_path, case):
    config, architecture, expected_architecture = FITS[case]
    layout = {"tensor_model_parallel_size": 2}
    if "num_moe_experts" in config:
        layout["expert_tensor_parallel_size"] = 1
    save, args = tmp_path / "save", {"rotary_base": 300}
    expected = torch.from_numpy(
        ranks(save_and_run, 2, str(save), None, layout, config, args)[-1][1]
    )
    written = to_hf.plan(save, architecture=architecture).write(tmp_path / "hf")
    assert written.architecture == expected_architecture
    model, words = load(tmp_path / "hf"), tokens()
    assert type(model).__module__.startswith("transformers.models.")
    assert expected.std(dim=(0, 1)).mean() > 0.3
    with torch.no_grad():
        at_once = model(words).logits
    for found in (at_once, in_two_steps(model, words)):
        torch.testing.assert_close(found, expected[..., : found.shape[-1]], rtol=0, atol=1e-5)
    assert Pair.open(save, tmp_path / "hf").verify(logits=False).agrees
    written = to_megatron.plan(tmp_path / "hf", divisible_by=8).write(tmp_path / "back")
    assert "--attention-output-gate" in written.arguments
    args = MegatronCheckpoint.open(tmp_path / "back").args
    assert args["attention_output_gate"] is True
    assert not [name for name in args if name.startswith("kha_")]
    check_back(save, tmp_path / "back")
