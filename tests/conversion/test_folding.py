"""Fold KHA-MLP and KHA-Gate on the values."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file

from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.verify import Pair, decode_with_cache
from kha_megatron.errors import CheckpointError
from kha_megatron.heads import Gate, Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf import KHAModelConfig, read_kha
from tests.conversion.models import (
    CONFIGS,
    GTA,
    KHA_MOE,
    SIZES,
    assert_same_tensors,
    edit_tensors,
    load,
    make,
    make_bfloat16,
    tokens,
)
from tests.hf.conftest import HIDE_PACKAGE

MLP = SIZES | {"kha_value": "mlp"}
BOTH = ["value", "output"]
ONLY_VALUE = ["value"]
UNEVEN = {
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 80,
}
QUICKSTART = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
CASES = {
    "five layers, 3 heads of 80": (KHAModelConfig(**MLP | UNEVEN), BOTH),
    "quickstart": (KHAModelConfig(**MLP | QUICKSTART), BOTH),
    "linear queries and keys": (
        KHAModelConfig(**MLP, kha_query="linear", kha_key="linear"),
        BOTH,
    ),
    "mlp on queries, gate on keys": (
        KHAModelConfig(**MLP, kha_query="mlp", kha_key="gate"),
        BOTH,
    ),
    "gate": (KHAModelConfig(**SIZES, kha_value="gate"), ONLY_VALUE),
    "gate, biases": (
        KHAModelConfig(**SIZES, kha_value="gate", attention_bias=True),
        ONLY_VALUE,
    ),
    "biases, no norm": (KHAModelConfig(**MLP, attention_bias=True, use_qk_norm=False), BOTH),
    "sparse": (KHAModelConfig(**KHA_MOE, kha_value="mlp"), BOTH),
    "output gate": (KHAModelConfig(**MLP, kha_gate={"output": "element"}), ONLY_VALUE),
    "output gate per head": (KHAModelConfig(**MLP, kha_gate={"output": "head"}), ONLY_VALUE),
    "value gate": (KHAModelConfig(**MLP, kha_gate={"value": "element"}), ONLY_VALUE),
    "query gate": (
        KHAModelConfig(**MLP, kha_gate={"query": "element", "dense": "element"}),
        BOTH,
    ),
    "moh": (KHAModelConfig(**MLP, kha_moh={"shared": 2, "active": 2}), BOTH),
    "talking": (KHAModelConfig(**MLP, kha_talking={}), BOTH),
    "collaborative": (KHAModelConfig(**MLP, kha_collaborative={"dim": 6}), BOTH),
    "collaborative, wider keys": (
        KHAModelConfig(**MLP, kha_collaborative={"dim": 14}),
        BOTH,
    ),
    "gta": (KHAModelConfig(**SIZES | GTA), ONLY_VALUE),
    "gta, biases, no norm": (
        KHAModelConfig(
            **SIZES | GTA | {"kha_query": None},
            attention_bias=True,
            use_qk_norm=False,
        ),
        ONLY_VALUE,
    ),
}
"""Configs of models, and the projections into which ``value`` should be folded."""
UNFOLDED_VARIANTS = {
    "mlp on queries, gate on keys": {"query": "mlp", "key": "gate"},
    "gta": {"query": "gate"},
}

# Generates with every model in a directory, in a process where kha_megatron cannot be imported.
GENERATE = (
    HIDE_PACKAGE
    + """
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for directory in sorted(Path(sys.argv[1]).iterdir()):
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, output_loading_info=True
    )
    assert not any(info.values()), info
    assert type(model).__module__.split(".")[0] == "transformers_modules"
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.load(sys.argv[2])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        new = model.generate(ids, **settings)
    torch.save((logits, new), directory / "generated.pt")
"""
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a directory with the unfolded models, and one with the folded models."""
    root = tmp_path_factory.mktemp("folding")
    for number, (name, (config, _)) in enumerate(CASES.items()):
        make(config, seed=number).save_pretrained(root / "unfolded" / name)
        plan = to_hf.plan_export(root / "unfolded" / name, fold=True)
        assert plan.config.model_type == "kha"
        plan.write(root / "folded" / name)
    return root / "unfolded", root / "folded"


def generate(model):
    return model.generate(
        tokens(),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )


@pytest.mark.fast
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_folded_models_compute_the_same(folders, name, tmp_path):
    unfolded, folded = (load(folder / name) for folder in folders)
    assert unfolded.config.kha_folded is None
    assert folded.config.kha_folded == CASES[name][1]
    expected = unfolded(tokens(), use_cache=False).logits
    assert expected.std(dim=(0, 1)).mean() > 0.3, "similar logits prove nothing"
    logits = folded(tokens(), use_cache=False).logits
    # rounded weights, 36 to 128 features and up to 5 layers
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    decoded = decode_with_cache(folded, tokens())
    torch.testing.assert_close(decoded, expected, rtol=0, atol=2e-5)
    new_tokens = generate(folded)
    assert torch.equal(new_tokens, generate(unfolded))
    assert new_tokens.unique().numel() > 3
    folded.save_pretrained(tmp_path / "again")
    assert_same_tensors(folders[1] / name, tmp_path / "again")
    assert torch.equal(load(tmp_path / "again")(tokens(), use_cache=False).logits, logits)


@pytest.mark.parametrize("name", CASES)
def test_no_folded_matrix_remains(folders, name):
    unfolded, folded = (load_file(folder / name / "model.safetensors") for folder in folders)
    variants = dict(UNFOLDED_VARIANTS.get(name, {}))
    config, kha_folded = CASES[name]
    variants["value"] = config.kha_value
    assert read_kha(load(folders[1] / name).config).variants == variants
    remaining = {key for key in folded if ".v_knock." in key}
    if config.kha_value == "mlp" and kha_folded == ONLY_VALUE:
        expected = {f"model.layers.{i}.self_attn.v_knock.down_proj.weight" for i in range(2)}
        assert remaining == expected
    else:
        assert not remaining
    if "collaborative" not in name:  # which has other projections
        assert unfolded.keys() >= folded.keys()


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.10"),
    reason="exported code needs transformers 5.10",
)
def test_exported_code_runs_folded_models(folders, tmp_path):
    torch.save(tokens(), tmp_path / "ids.pt")
    copies = shutil.copytree(folders[1], tmp_path / "models")
    subprocess.run(
        [sys.executable, "-c", GENERATE, copies, tmp_path / "ids.pt"],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
    )
    for name in CASES:
        logits, new_tokens = torch.load(copies / name / "generated.pt")
        unfolded = load(folders[0] / name)
        with torch.no_grad():
            expected = unfolded(tokens(), use_cache=False).logits
            assert torch.equal(new_tokens, generate(unfolded))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_verify_folds_the_other_model(folders, name):
    unfolded, folded = (folder / name for folder in folders)
    compared = Pair.open(unfolded, folded).compare(logits=False)
    assert compared.agrees
    assert compared.tensors.remark == "the first folded"
    compared = Pair.open(folded, unfolded).compare(logits=False)
    assert compared.agrees
    assert compared.tensors.remark == "the second folded"
    assert Pair.open(folded, folded).compare(logits=False).agrees


@pytest.mark.parametrize("part", ["v_proj", "o_proj"])
def test_verify_notices_a_wrong_weight(folders, run, tmp_path, part):
    unfolded, folded = (folder / "quickstart" for folder in folders)
    wrong = shutil.copytree(folded, tmp_path / "wrong")
    (wrong / "manifest.json").unlink()
    name = f"model.layers.2.self_attn.{part}.weight"
    edit_tensors(wrong, lambda tensors: tensors[name].mul_(1.01))
    code, stdout, _ = run("verify", unfolded, wrong, "--json")
    report = json.loads(stdout)
    assert (code, report["tensors"]["different"]) == (1, [name])
    assert report["logits"]["first_layer"] == 2


@pytest.mark.parametrize("bias", [False, True])
def test_folded_weights_are_exact_products_rounded_once(tmp_path, bias):
    config = KHAModelConfig(**MLP | UNEVEN | {"num_hidden_layers": 2}, attention_bias=bias)
    make_bfloat16(config).save_pretrained(tmp_path / "kha")
    to_hf.plan_export(tmp_path / "kha", fold=True).write(tmp_path / "folded")
    before, after = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("kha", "folded")
    )
    for layer in ("model.layers.0.self_attn.", "model.layers.1.self_attn."):
        up, gate, down = (
            before[f"{layer}v_knock.{matrix}_proj.weight"].double()
            for matrix in ("up", "gate", "down")
        )
        for suffix in ("weight", "bias") if bias else ("weight",):
            value = before[f"{layer}v_proj.{suffix}"].double().unflatten(0, (3, 80))
            exact = torch.stack([2 * torch.tensordot(up, head, 1) for head in value])
            gates = torch.stack([torch.tensordot(gate, head, 1) for head in value])
            exact = torch.cat([exact, gates], dim=1).flatten(0, 1)
            torch.testing.assert_close(
                after[f"{layer}v_proj.{suffix}"],
                exact.bfloat16(),
                rtol=2**-8,  # another order of summation can round to the other neighbor
                atol=0,
            )
        output = before[f"{layer}o_proj.weight"].double().unflatten(1, (6, 80))
        exact = torch.einsum("xhe,ed->xhd", output, down).flatten(1)
        torch.testing.assert_close(
            after[f"{layer}o_proj.weight"],
            exact.bfloat16(),
            rtol=2**-8,
            atol=0,
        )


@pytest.mark.parametrize("name", ["five layers, 3 heads of 80", "gate", "output gate"])
@torch.no_grad()
def test_bfloat16_is_as_close_to_exact_logits_as_without_folding(tmp_path, name):
    config, _ = CASES[name]
    model = make_bfloat16(config)
    model.save_pretrained(tmp_path / "kha")
    to_hf.plan_export(tmp_path / "kha", fold=True).write(tmp_path / "folded")
    folded = load(tmp_path / "folded").bfloat16()
    # with 22 tokens, the ratio of the distances is up to 1.27, depending on the processor
    ids = torch.randint(0, model.config.vocab_size, (64, 7))
    exact = load(tmp_path / "kha").double()(ids).logits

    def distance(model):
        difference = model(ids).logits.double() - exact
        return difference.norm().item()

    assert 0 < distance(folded) < 1.25 * distance(model)  # 0.98 to 1.07 times


def test_folding_a_megatron_checkpoint(dense, tmp_path):
    """Queries are linear, keys have a gate, which is not folded, and values an MLP."""
    to_hf.plan_export(dense[0]).write(tmp_path / "kha")
    to_hf.plan_export(dense[0], fold=True).write(tmp_path / "folded")
    to_hf.plan_export(tmp_path / "kha", fold=True).write(tmp_path / "again")
    assert_same_tensors(tmp_path / "folded", tmp_path / "again")
    assert Pair.open(dense[0], tmp_path / "folded").compare().agrees


def test_dtypes_change_after_folding(folders, tmp_path):
    source = folders[0] / "quickstart"
    to_hf.plan_export(source, fold=True, dtype="bfloat16").write(tmp_path / "direct")
    to_hf.plan_export(folders[1] / "quickstart", dtype="bfloat16").write(tmp_path / "later")
    assert_same_tensors(tmp_path / "direct", tmp_path / "later")


UNFOLDED = r"Convert the unfolded model instead, i\.e\. the one that was passed to `kha-megatron"


def test_folded_models_are_for_inference_only(folders, run, tmp_path):
    folded = folders[1] / "quickstart"
    with pytest.raises(CheckpointError, match=UNFOLDED):
        to_megatron.plan_import(folded)
    gate = HeadsConfig(Gate(output="element"))
    for plan in (to_megatron.plan_import, to_hf.plan_export):
        with pytest.raises(CheckpointError, match=r"add gate\(output=element\) to the unfolded"):
            plan(folded, upcycle=gate)
    with pytest.raises(CheckpointError, match="is folded already"):
        to_hf.plan_export(folded, fold=True)
    with pytest.raises(CheckpointError, match="as qwen3_moe: it has kha_folded="):
        to_hf.plan_export(folded, architecture="qwen3_moe")
    words = ("convert", "to-megatron", folded, tmp_path / "megatron")
    code, stdout, stderr = run(*words)
    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert not (tmp_path / "megatron").exists()
    code, _, stderr = run("inspect", folded, tmp_path / "pictures")
    assert code == 2
    assert "are folded into the projections. Please use the unfolded model" in stderr


def test_inspect_runs_folded_models_on_a_text(folders, run, tokenizer, tmp_path):
    folded = shutil.copytree(folders[1] / "quickstart", tmp_path / "folded")
    shutil.copytree(tokenizer, folded, dirs_exist_ok=True)
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 w6 w7")
    words = ("--text", tmp_path / "text.txt", "--json")
    code, stdout, _ = run("inspect", folded, tmp_path / "pictures", *words)
    report = json.loads(stdout)
    assert (code, report["matrices"], len(report["layers"])) == (0, [], 4)


def test_what_cannot_be_folded(tmp_path, capsys):
    nonlinear = KHAModelConfig(**SIZES, kha_query="mlp", kha_key="gate")
    make(nonlinear).save_pretrained(tmp_path / "nonlinear")
    message = "Only linear KHA can be folded into queries and keys.*query=mlp key=gate"
    with pytest.raises(CheckpointError, match=message):
        to_hf.plan_export(tmp_path / "nonlinear", fold=True)
    make(CASES["mlp on queries, gate on keys"][0]).save_pretrained(tmp_path / "kha")
    to_hf.plan_export(tmp_path / "kha", fold=True)
    assert "(query=mlp, key=gate) was not folded, because only" in capsys.readouterr().err
    make(CONFIGS["qwen3"]).save_pretrained(tmp_path / "stock")
    with pytest.raises(CheckpointError, match="Nothing to fold"):
        to_hf.plan_export(tmp_path / "stock", fold=True)


def test_architectures_that_refuse_a_config_are_skipped(tmp_path):
    """transformers refuses a Llama config if the hidden size is no multiple of the heads."""
    sizes = {"hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 3}
    config = KHAModelConfig(**SIZES | sizes, kha_query="linear", use_qk_norm=False)
    model = make(config)
    model.save_pretrained(tmp_path / "kha")
    with pytest.raises(CheckpointError, match=r"cannot be exported as llama: .*hidden size"):
        to_hf.plan_export(tmp_path / "kha", fold=True, architecture="llama")
    to_hf.plan_export(tmp_path / "kha", fold=True).write(tmp_path / "folded")
    folded = load(tmp_path / "folded")
    assert folded.config.model_type != "kha"
    with torch.no_grad():
        expected = model(tokens()).logits
        torch.testing.assert_close(folded(tokens()).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["quickstart", "output gate"])
def test_the_card_counts_folded_parameters(folders, name):
    config, kha_folded = CASES[name]
    card = (folders[1] / name / "README.md").read_text()
    dim = config.head_dim
    added = config.num_key_value_heads * dim * config.hidden_size
    if kha_folded == ONLY_VALUE:
        added += dim**2
    count = config.num_hidden_layers * added
    assert f", including {count:,} in `knock`" in card
    assert "after folding `value=mlp" in card
    assert "(inference only)" in card
    assert "import kha_megatron.hf" in card


def test_a_stock_model_agrees_with_its_folded_upcycled_model(tmp_path):
    make(CONFIGS["qwen3"]).save_pretrained(tmp_path / "stock")
    kha = HeadsConfig(Knock(value="mlp"))
    to_hf.plan_export(tmp_path / "stock", upcycle=kha).write(tmp_path / "kha")
    to_hf.plan_export(tmp_path / "kha", fold=True).write(tmp_path / "folded")
    assert Pair.open(tmp_path / "kha", tmp_path / "folded").compare().agrees
    before, after = (load(tmp_path / folder) for folder in ("stock", "folded"))
    with torch.no_grad():
        expected = before(tokens()).logits
        torch.testing.assert_close(after(tokens()).logits, expected, rtol=0, atol=1e-5)
