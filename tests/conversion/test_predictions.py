"""Convert the layers of multi-token prediction (MTP)."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.hf_configs import can_predict, from_hf_config
from kha_megatron.conversion.verify import Pair
from kha_megatron.heads import Gate, Knock
from kha_megatron.heads.config import HeadsConfig
from tests.conversion.checkpoints import check_back, save_and_run, tokens
from tests.conversion.megatron import load_and_run
from tests.conversion.models import CONFIGS, assert_same_tensors, edit_config, edit_tensors, load
from tests.conversion.test_to_hf import BASE, GATED, LINEAR, MOE, SIGMOID

TP2 = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
SHARED = {"moe_shared_expert_intermediate_size": 40}
HYBRID = {"is_hybrid_model": True}
LATENT = {"multi_latent_attention": True, "layernorm_epsilon": 1e-6}


def sizes(layers, predictions):
    return {"num_layers": layers, "mtp_num_layers": predictions}


CASES = {
    "glm4_moe, hybrid": (
        HeadsConfig(Knock(**LINEAR)),
        SIGMOID | SHARED | HYBRID | sizes(2 * 46, 1),
        {"hybrid_layer_pattern": 45 * "*-" + "*E/*E"},
    ),
    "glm4_moe, gpt, two layers, tied": (
        None,
        SIGMOID | SHARED | sizes(3, 2) | {"moe_layer_freq": [0, 1, 1]},
        {"untie_embeddings_and_output_weights": False},
    ),
    "deepseek_v3, hybrid": (
        HeadsConfig(Knock(key="linear", value="linear")),
        LATENT | SIGMOID | SHARED | HYBRID | sizes(2 * 61, 1),
        {"hybrid_layer_pattern": 60 * "+-" + "+E/+E"},
    ),
    "qwen3_next, hybrid": (
        HeadsConfig(Knock(**LINEAR), Gate(output="element")),
        MOE | HYBRID | sizes(6, 1) | {"attention_output_gate": True},
        {"hybrid_layer_pattern": "*E*E*E/*E"},
    ),
    "qwen3_next, gpt, dense": (None, GATED | sizes(3, 1), BASE),
}
"""Head mechanisms, configuration and arguments by architecture and model class."""


EXTRA = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head")
COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
QWEN = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}


def predict(folder, scratch, ids):
    """Compute the logits of all MTP layers with transformers' decoder layers.

    A copy of the model in which MTP layers are ordinary layers makes transformers load them.
    """
    shutil.copytree(folder, scratch)
    config = json.loads((folder / "config.json").read_text())
    first = config["num_hidden_layers"]
    own = {}

    def edit(held):
        for name in sorted(held):
            short = name.replace("mtp.layers.0.", f"model.layers.{first}.")
            tensor = held.pop(name)
            for old, new in QWEN.items():
                short = short.replace(old, f"model.layers.{first}.{new}")
            layer = int(short.split(".")[2]) if "layers." in short else 0
            if layer >= first and short.split(".")[3] in EXTRA:
                own[layer, short.split(".", 3)[3]] = tensor
            else:
                held[short] = tensor

    edit_tensors(scratch, edit)
    count = max(layer for layer, _ in own) - first + 1
    changes = {"num_hidden_layers": first + count, "num_nextn_predict_layers": 0}
    if "layer_types" in config:
        changes["layer_types"] = ["full_attention"] * (first + count)
    if dense := config.get("mlp_only_layers"):
        changes["mlp_only_layers"] = [*dense, first]
    edit_config(scratch, **changes)
    model, zero = load(scratch), config["model_type"] == "qwen3_next"
    decoder, eps = model.model, config["rms_norm_eps"]

    def norm(x, name):
        return rms_norm(x, x.shape[-1:], own[layer, name] + zero, eps)

    layers, decoder.layers = decoder.layers, decoder.layers[:first]
    decoder.config.num_hidden_layers = first
    hidden = decoder(ids).last_hidden_state
    positions = torch.arange(ids.shape[1])[None]
    mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf).triu(1)[None, None]
    found = [model.lm_head(hidden)]
    for layer in range(first, first + count):
        ids = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
        both = norm(decoder.embed_tokens(ids), "enorm.weight"), norm(hidden, "hnorm.weight")
        x = torch.cat(both, dim=-1) @ own[layer, "eh_proj.weight"].T
        rotary = decoder.rotary_emb(x, positions)
        x = layers[layer](x, attention_mask=mask, position_embeddings=rotary)
        hidden = norm(x, "shared_head.norm.weight")
        found.append(model.lm_head(hidden))
    return torch.stack(found)


@torch.no_grad()
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.whole if c == "deepseek_v3, hybrid" else ()) for c in CASES],
)
def test_layers_for_multi_token_prediction(ranks, tmp_path, case, capsys):
    architecture, (kha, config, args) = case.split(", ")[0], CASES[case]
    save, hf, back = tmp_path / "save", tmp_path / "hf", tmp_path / "back"
    run = ranks(save_and_run, 1, str(save), kha, {}, config, args, steps=2)
    fold = bool(kha and kha.without_output_gate().mechanisms)
    to_hf.plan_export(save, architecture=architecture, fold=fold).write(hf)
    assert "multi-token" not in capsys.readouterr().err

    model, report = AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    layers = model.config.num_hidden_layers
    extra = {name for name in report["unexpected_keys"] if int(name.split(".")[2]) < layers}
    assert extra == set() == set(report["missing_keys"])
    # transformers ignores the MTP layers of qwen3_next and those of published sizes
    assert bool(report["unexpected_keys"]) == ("two layers" in case)
    theirs = torch.from_numpy(run[-1][1])[..., : model.config.vocab_size]
    assert theirs.std(dim=(1, 2)).mean() > 0.3
    torch.testing.assert_close(model(tokens()).logits, theirs[0], rtol=0, atol=1e-5)
    ours = predict(hf, tmp_path / "scratch", tokens())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)

    count = config["mtp_num_layers"]
    before, stored = MegatronCheckpoint.open(save), load_file(hf / "model.safetensors")
    projection = "mtp.fc" if architecture == "qwen3_next" else f"model.layers.{layers}.eh_proj"
    same = before.tensor("mtp.layers.0.eh_proj.weight"), stored[f"{projection}.weight"]
    assert torch.equal(*same)

    copies = {}
    for layer in range(layers, layers + (count if architecture != "qwen3_next" else 0)):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = (
            "model.embed_tokens.weight" if "tied" in case else "lm_head.weight"
        )
    assert {name for name in stored if "layers." in name and name.endswith(COPIES)} == copies.keys()
    assert all(torch.equal(stored[name], stored[copies[name]]) for name in copies)

    # Megatron's local norm, which GPTModel uses in MTP layers, has no --apply-layernorm-1p
    gpt = "hybrid_layer_pattern" not in args and architecture != "qwen3_next"
    to_megatron.plan_import(hf, divisible_by=8, gpt_model=gpt).write(back)
    if not fold and gpt == ("hybrid_layer_pattern" not in args):
        check_back(save, back)
    case = str(back), tokens().tolist(), TP2
    loaded = ranks(load_and_run, 2, *case, predictions=count)
    again = torch.from_numpy(loaded[-1])[..., : model.config.vocab_size]
    torch.testing.assert_close(again, theirs, rtol=0, atol=1e-5)
    to_megatron.plan_import(hf, divisible_by=8, gpt_model=not gpt).write(tmp_path / "other")
    to_hf.plan_export(tmp_path / "other", architecture=architecture).write(tmp_path / "again")
    assert_same_tensors(hf, tmp_path / "again")
    assert Pair.open(save, hf).compare(logits="two layers" in case).agrees

    (hf / "manifest.json").unlink()
    if copies:
        edit_tensors(hf, lambda held: [held.pop(name) for name in copies])
        assert Pair.open(save, hf).compare(logits=False).tensors.missing == sorted(copies)
        assert Pair.open(hf, save).compare(logits=False).tensors.unexpected == sorted(copies)
        assert Pair.open(hf, hf).compare(logits=False).agrees

    # transformers saves no MTP layers, but keeps their number in config.json
    extra = ("mtp.", *(f"model.layers.{layers + n}." for n in range(count)))
    edit_tensors(hf, lambda held: [held.pop(name) for name in list(held) if name.startswith(extra)])
    assert not capsys.readouterr().err.count("Ignoring")
    assert Pair.open(save, hf).compare(logits=False).agrees
    assert "Ignoring the multi-token prediction layers" in capsys.readouterr().err


def test_layers_that_servers_would_build_differently_are_dropped():
    model = from_hf_config(CONFIGS["qwen3_next, sparse"].to_dict())
    for layers, fits in ((1, True), (2, False)):
        assert can_predict(replace(model, mtp_num_layers=layers), "qwen3_next") == fits
    mixed = replace(model, mtp_num_layers=1, moe_layer_freq=(0, 1))
    assert not can_predict(mixed, "qwen3_next")
    dense = from_hf_config(CONFIGS["glm4_moe"].to_dict() | {"first_k_dense_replace": 2})
    assert not can_predict(replace(dense, mtp_num_layers=1), "glm4_moe")
