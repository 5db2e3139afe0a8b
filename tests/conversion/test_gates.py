"""Convert gated attention."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb

from kha_megatron.conversion import to_hf
from kha_megatron.conversion.verify import Pair
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Gate
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf import KHAModelConfig
from tests.conversion.fixtures import write_tokenizer
from tests.conversion.models import CONFIGS, SIZES, assert_same_tensors, load, make, tokens


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
        logits = model(tokens()).logits
    monkeypatch.undo()
    return tmp_path / "theirs", logits


@pytest.mark.parametrize(
    ("published", "architecture"),
    [("element", "qwen3_next"), ("head", "kha"), ("none", "qwen3")],
    indirect=["published"],
)
def test_published_models_become_stock_ones(published, tmp_path, architecture):
    folder, expected = published
    written = to_hf.plan_export(folder, architecture="auto").write(tmp_path / "hf")
    assert written.architecture == architecture
    with torch.no_grad():
        found = load(tmp_path / "hf")(tokens()).logits
    assert expected.std(dim=(0, 1)).mean() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    verification = Pair.open(folder, tmp_path / "hf").compare()
    assert verification.tensors.agrees
    assert verification.logits is None  # their code is never run


@pytest.mark.parametrize(
    ("smallest", "dtype", "exact"), [(0.5, None, True), (0.1, None, False), (0.1, "float32", True)]
)
def test_rounded_norm_weights_are_reported(run, tmp_path, smallest, dtype, exact):
    """``qwen3_next`` stores ``w - 1``, which bfloat16 holds exactly for weights from 1/2 up."""
    model = make(CONFIGS["kha, output gate"]).bfloat16()
    norms = [name for name, _ in model.named_parameters() if name.endswith("norm.weight")]
    with torch.no_grad():
        for name in norms:
            weight = model.get_parameter(name)
            weight.copy_(torch.linspace(smallest, 2, len(weight)))
    model.save_pretrained(tmp_path / "kha")
    words = ["--architecture", "qwen3_next", *(("--dtype", dtype) if dtype else ())]
    code, stdout, stderr = run("convert", "to-hf", tmp_path / "kha", tmp_path / "stock", *words)
    assert code == 0
    assert ("all equal" in stdout) == exact
    assert ("Rounding norm weights to torch.bfloat16" in " ".join(stderr.split())) != exact
    found = Pair.open(tmp_path / "kha", tmp_path / "stock").compare()
    assert found.tensors.rounded == ([] if exact else sorted(norms))
    stored = load_file(tmp_path / "stock" / "model.safetensors")
    errors = [(1 + stored[n].double() - model.get_parameter(n).double()).abs().max() for n in norms]
    assert all((error == 0) == exact for error in errors)


def test_gates_after_a_trained_knock(tmp_path):
    """Doubling the projection doubles the output of a linear knock, but not of others."""
    kha = HeadsConfig(Gate(value="element"))
    for variant in ("linear", "mlp"):
        config = KHAModelConfig(**SIZES, kha_value=variant)
        make(config).save_pretrained(tmp_path / variant)
    with pytest.raises(ConfigError, match=r"gate\.value cannot be added .*trained value=mlp"):
        to_hf.plan_export(tmp_path / "mlp", upcycle=kha)
    to_hf.plan_export(tmp_path / "linear", upcycle=kha).write(tmp_path / "gated")
    found = Pair.open(tmp_path / "linear", tmp_path / "gated").compare()
    assert found.agrees
    assert found.logits.max_difference == 0.0


def test_the_loss_of_a_text_includes_bos(run, tmp_path):
    model = make(CONFIGS["qwen3"])
    model.save_pretrained(tmp_path / "base")
    folder = write_tokenizer(tmp_path / "tokenizer", 50)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = {"single": "w7 $A", "special_tokens": [("w7", 7)]}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**template)
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "text").write_text("w3 w17 w40 w5 w22")
    words = ("--heads", "gate.output=element", "--to", "hf", "--text", tmp_path / "text", "--json")
    code, stdout, stderr = run("convert", "upcycle", tmp_path / "base", tmp_path / "out", *words)
    assert code == 0, stderr
    ids = torch.tensor([[7, 3, 17, 40, 5, 22]])
    with torch.no_grad():
        loss = model.float()(ids, labels=ids).loss
    losses = json.loads(stdout)["loss"]
    assert losses["tokens"] == ids.numel()
    assert losses["before"] == pytest.approx(loss.item(), rel=1e-6)


def test_upcycling_from_the_command_line(run, tmp_path, tokenizer):
    make(CONFIGS["qwen3"]).save_pretrained(tmp_path / "base")
    (tmp_path / "text").write_text("w3 w17 w40 w5 w5 w22 " * 40)
    words = ("--to", "hf", "--tokenizer", tokenizer, "--text", tmp_path / "text", "--json")

    def upcycle(name, *asked):
        code, stdout, stderr = run("convert", "upcycle", tmp_path / "base", tmp_path / name, *asked)
        return code, stdout, " ".join(stderr.split())

    code, stdout, _ = upcycle("gated", "--heads", "gate.output=element", *words)
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
        ([*heads, "--text", tmp_path / "text"], "Token ID 57 from"),
    ):
        code, _, stderr = upcycle("none", *words, "--no-verify")
        assert (code, message in stderr) == (2, True)
    assert not (tmp_path / "none").exists()
