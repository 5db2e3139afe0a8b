"""Gated attention travels: Megatron's own gate to stock classes of transformers, and back."""

import json
from copy import deepcopy
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.config import KHAConfig
from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.hf_configs import to_hf_config
from kha_megatron.conversion.megatron_arguments import from_arguments
from kha_megatron.conversion.verify import Pair
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads import Gate
from kha_megatron.hf import KHAModelConfig, read_kha
from tests.conversion.checkpoints import check_back, save_and_run, tokens
from tests.conversion.fixtures import write_tokenizer
from tests.conversion.models import CONFIGS, SIZES, make
from tests.conversion.models import tokens as ids

TP2 = {"tensor_model_parallel_size": 2}
GATED = {"attention_output_gate": True, "num_layers": 3}


@pytest.fixture(scope="module")
def stock(ranks, tmp_path_factory):
    """Plain Megatron with ``--attention-output-gate`` on two ranks: its folder and its logits."""
    folder = tmp_path_factory.mktemp("stock") / "save"
    parts = ranks(save_and_run, 2, str(folder), None, TP2, GATED, {"rotary_base": 300})
    return folder, torch.from_numpy(parts[-1][1])


def load(folder):
    """Load by transformers' own class."""
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
    """Logits with a cache: seven tokens, then the others."""
    begun = model(ids[:, :first], use_cache=True)
    rest = model(ids[:, first:], past_key_values=begun.past_key_values, use_cache=True)
    return torch.cat([begun.logits, rest.logits], dim=1)


@pytest.mark.parametrize("architecture", ["auto", "qwen3_5_text"])
def test_a_stock_class_computes_what_megatron_does(stock, tmp_path, architecture):
    folder, expected = stock
    written = to_hf.plan(folder, architecture=architecture).write(tmp_path / "hf")
    assert written.architecture == {"auto": "qwen3_next"}.get(architecture, architecture)
    model, words = load(tmp_path / "hf"), tokens()
    assert type(model).__module__.startswith("transformers.models.")
    assert written.tensors == len(load_file(tmp_path / "hf" / "model.safetensors"))
    assert expected.std(dim=(0, 1)).mean() > 0.3
    with torch.no_grad():
        at_once = model(words).logits
    for found in (at_once, in_two_steps(model, words)):
        theirs = expected[..., : found.shape[-1]]
        torch.testing.assert_close(found, theirs, rtol=0, atol=1e-5)
    assert Pair.open(folder, tmp_path / "hf").verify(logits=False).agrees


def test_it_comes_back_as_plain_megatron(stock, tmp_path):
    """All tensors bit for bit, the gate in Megatron's own argument, and nothing of ours."""
    to_hf.plan(stock[0], architecture="qwen3_next").write(tmp_path / "hf")
    planned = to_megatron.plan(tmp_path / "hf", divisible_by=8)
    written = planned.write(tmp_path / "back")
    assert "--attention-output-gate" in written.arguments
    before, after = (MegatronCheckpoint.open(path) for path in (stock[0], tmp_path / "back"))
    assert after.args["attention_output_gate"] is True
    assert not [name for name in after.args if name.startswith("kha_")]
    for key, _ in before.keys().items():
        assert torch.equal(before.tensor(key), after.tensor(key)), key


class Published(Qwen3Attention):
    """Written after github.com/qiuzh20/gated_attention: ``q_proj`` gives for each key/value head
    its queries, then their gates."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        width = 1 if config.headwise_attn_output_gate else config.head_dim
        rows = config.num_attention_heads * (config.head_dim + width)
        self.q_proj = torch.nn.Linear(config.hidden_size, rows, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        """Attend without a cache, then gate."""
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
    """A folder as its authors publish it, and its logits."""
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


EXACT = {
    "output": Gate(output="element"),
    "output, a head": Gate(output="head"),
    "output, shared": Gate(output="shared"),
    "value": Gate(value="element"),
    "value, a head": Gate(value="head"),
    "query, key, output, dense": Gate(
        query="element", key="element", output="element", dense="element"
    ),
    "no input": Gate(output="element", value="head", reads_input=False),
    "added": Gate(output="element", dense="element", form="add", activation="silu"),
}


QUICK = ("output", "value, a head", "query, key, output, dense", "added")


def starts():
    """Every gate in every dtype on both; ``make test`` takes each of them once, and one always."""
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for case, base, dtype in product(EXACT, ("qwen3", "llama, llama3 rope"), dtypes):
        quick = case in QUICK and base == "qwen3" and dtype is torch.bfloat16
        marks = () if quick else pytest.mark.whole
        yield pytest.param(case, base, dtype, marks=marks, id=f"{case}-{base}-{dtype}")


@pytest.mark.parametrize(("case", "base", "dtype"), list(starts()))
def test_a_gated_model_begins_as_the_pretrained_one(tmp_path, case, base, dtype):
    """Bit for bit; with a stock class where one has the gate, with ours otherwise."""
    model = make(CONFIGS[base]).to(dtype)
    model.save_pretrained(tmp_path / "base")
    planned = to_hf.plan(tmp_path / "base", upcycle=KHAConfig(gate=EXACT[case]))
    planned.write(tmp_path / "gated")
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype).eval()
        for name in ("base", "gated")
    )
    assert read_kha(after.config).gate == EXACT[case]
    with torch.no_grad():  # of copies, because mapped tensors begin where the file's header ends
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
    one, other = (load_file(tmp_path / f / "model.safetensors") for f in ("kha", "back"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("knock", "position", "begins"),
    [
        ({"kha_value": "mlp"}, "value", False),
        ({"kha_value": "linear"}, "value", True),
    ],
)
def test_a_gate_behind_a_trained_knock(tmp_path, knock, position, begins):
    """Twice a projection is twice what a linear knock makes of it, but not what others do."""
    make(KHAModelConfig(**SIZES, **knock)).save_pretrained(tmp_path / "knocked")
    kha = KHAConfig(gate=Gate(**{position: "element"}))
    if not begins:
        with pytest.raises(ConfigError, match=rf"trained {position}=.*Leave gate\.{position} out"):
            to_hf.plan(tmp_path / "knocked", upcycle=kha)
        return
    to_hf.plan(tmp_path / "knocked", upcycle=kha).write(tmp_path / "gated")
    found = Pair.open(tmp_path / "knocked", tmp_path / "gated").verify()
    assert found.agrees
    assert found.logits.max_difference == 0.0


def test_upcycling_from_the_command_line(run, tmp_path, tokenizer):
    """``--gate``, a text whose loss does not change, and one whose does because heads are lost."""
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
    one, other = (load_file(tmp_path / f / "model.safetensors") for f in ("base", "moh"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    code, _, stderr = upcycle("none", *heads[:-2], "--no-verify")
    assert code == 2
    assert "Set moh.router=query_norm and moh.quantized=true" in stderr
    write_tokenizer(tmp_path / "base", 60)  # of another model
    words = (*heads, "--text", tmp_path / "text", "--no-verify")
    (tmp_path / "text").write_text("w3 w57 " * 40)
    code, _, stderr = upcycle("none", *words)
    assert code == 2
    assert "gives token 57, but the model has 51" in stderr
    code, _, stderr = upcycle("none", *heads, "--text", tmp_path / "lost", "--no-verify")
    assert code == 2
    assert f"Cannot read {tmp_path / 'lost'}" in stderr
    assert not (tmp_path / "none").exists()


MOE = {"num_moe_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "num_layers": 2}
SHARED = {"moe_shared_expert_intermediate_size": 28, "moe_shared_expert_gate": True}
LINEAR = KHAConfig.from_preset("kha_linear_gate_output")
FITS = {
    "softmax experts": (None, MOE | GATED | {"moe_layer_freq": [0, 1, 1]}, "qwen3_next"),
    "gated shared expert": (None, MOE | GATED | SHARED | {"num_layers": 2}, "qwen3_next"),
    "kha_linear, folded": (LINEAR, {}, "qwen3_next"),
}


@pytest.mark.parametrize("case", FITS)
def test_what_fits_a_stock_class(ranks, tmp_path, case):
    """From the ranks that trained it, and back."""
    kha, config, architecture = FITS[case]
    layout = {"tensor_model_parallel_size": 2}
    if "num_moe_experts" in config:
        layout["expert_tensor_parallel_size"] = 1
    parts = ranks(save_and_run, 2, str(tmp_path / "save"), kha, layout, config, {})
    expected = torch.from_numpy(parts[-1][1])
    planned = to_hf.plan(tmp_path / "save", architecture="auto", fold="folded" in case)
    assert planned.write(tmp_path / "hf").architecture == architecture
    model, words = load(tmp_path / "hf"), tokens()
    with torch.no_grad():
        at_once = model(words).logits
    for found in (at_once, in_two_steps(model, words)):
        torch.testing.assert_close(found, expected[..., : found.shape[-1]], rtol=0, atol=1e-5)
    assert Pair.open(tmp_path / "save", tmp_path / "hf").verify(logits=False).agrees
    if "folded" in case:
        return
    to_megatron.plan(tmp_path / "hf", divisible_by=8).write(tmp_path / "back")
    check_back(tmp_path / "save", tmp_path / "back")


def test_what_no_stock_class_has_is_refused_by_name(stock):
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 20}
    for args, message in (
        ({"qk_layernorm": False}, "qk_layernorm=False"),
        (
            experts | {"moe_router_score_function": "sigmoid"},
            "moe_router_score_function='sigmoid', it has 'softmax'",
        ),
        (
            experts | {"moe_shared_expert_intermediate_size": 20},
            "moe_shared_expert_gate=False, it has True",
        ),
    ):
        held = MegatronCheckpoint.open(stock[0]).args
        model = from_arguments(held | args, KHAConfig.from_entries(held), 56)
        with pytest.raises(CheckpointError, match=f"qwen3_next cannot express {message}"):
            to_hf_config(model, "qwen3_next")
