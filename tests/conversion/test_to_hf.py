"""Convert sharded Megatron checkpoints to Hugging Face and back."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion import sources, to_hf, to_megatron
from kha_megatron.conversion.sources import FLOAT_DTYPES
from kha_megatron.conversion.verify import Pair
from kha_megatron.errors import CheckpointError
from kha_megatron.heads import CollaborativeHeads, Gate, Knock, TalkingHeads
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.recorded import read_kha_config
from tests.conversion.checkpoints import VOCAB, check_back, save_and_run, tokens
from tests.conversion.fixtures import write_tokenizer
from tests.conversion.models import load

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
TIED = {"untie_embeddings_and_output_weights": False, "vocab_size": VOCAB}
MOE = {"num_moe_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20}
SIGMOID = MOE | {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}

LINEAR = {"query": "linear", "key": "linear", "value": "linear"}
LATENT = {"multi_latent_attention": True}
HALF = {"rotary_percent": 0.5}
ONE_EXPERT_RANK = {"expert_tensor_parallel_size": 1}
GATED = {"attention_output_gate": True, "num_layers": 3}
BASE = {"rotary_base": 300}

CASES = {
    "plain Megatron": (None, {}, {}, {}),
    "TP2, MQA, half of the rotary features": (
        HeadsConfig(Knock(query="mlp")),
        TP2,
        {"num_query_groups": 1, "kv_channels": 8},
        HALF,
    ),
    "TP2, MHA, biases, no QK-norm": (
        HeadsConfig(Knock(query="linear", key="gate", value="mlp")),
        TP2,
        {"num_query_groups": None, "add_qkv_bias": True, "qk_layernorm": False},
        {},
    ),
    "TP2, softmax before the choice": (
        HeadsConfig.from_preset("kha_mlp_qkv"),
        TP2 | ONE_EXPERT_RANK,
        MOE | {"moe_router_pre_softmax": True, "moe_router_topk": 3, "num_layers": 3},
        {},
    ),
    "PP2, pattern, shared experts, sigmoid": (
        HeadsConfig(Knock(key="gate", value="mlp")),
        PP2,
        SIGMOID
        | {
            "num_layers": 4,
            "moe_layer_freq": [0, 1, 1, 0],
            "moe_shared_expert_intermediate_size": 28,
        },
        {},
    ),
    "EP2, gated shared expert, sigmoid top-1": (
        HeadsConfig(),
        EP2,
        SIGMOID
        | {
            "moe_router_topk": 1,
            "moe_shared_expert_intermediate_size": 28,
            "moe_shared_expert_gate": True,
        },
        {},
    ),
    "TP2, GTA, sparse, one state for both ranks": (
        HeadsConfig(Knock(value="mlp"), attention="gta"),
        TP2 | ONE_EXPERT_RANK,
        SIGMOID | {"kv_channels": 12, "num_query_groups": 1},
        HALF,
    ),
    "TP2, MLA, YaRN": (
        HeadsConfig(Knock(**LINEAR)),
        TP2,
        LATENT
        | {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0},
        {},
    ),
    "TP2, GLA, sparse": (
        HeadsConfig(Knock(**LINEAR), attention="gla"),
        TP2 | ONE_EXPERT_RANK,
        LATENT | SIGMOID,
        {},
    ),
    "TP2, GLA of 4, tied embeddings": (
        HeadsConfig(Knock(key="linear"), attention="gla", latent_heads=4),
        TP2,
        LATENT,
        TIED,
    ),
    "TP2, hybrid, multi-token prediction": (
        HeadsConfig(Knock(value="mlp")),
        TP2 | ONE_EXPERT_RANK,
        SIGMOID | {"num_layers": 4, "is_hybrid_model": True, "mtp_num_layers": 1},
        {"hybrid_layer_pattern": "*-*E/*E"},
    ),
    "TP2, talking": (HeadsConfig(Knock(value="mlp"), TalkingHeads(post=False)), TP2, {}, {}),
    "TP2, collaborative, gates": (
        HeadsConfig(CollaborativeHeads(dim=10), Gate(output="head", value="element")),
        TP2,
        {},
        {},
    ),
    "TP2, gated": (None, TP2, GATED, BASE, "qwen3_next"),
    "TP2, gated, qwen3_5": (None, TP2, GATED, BASE, "qwen3_5_text"),
    "TP2, gated, softmax experts": (
        None,
        TP2 | ONE_EXPERT_RANK,
        MOE | GATED | {"moe_layer_freq": [0, 1, 1]},
        BASE,
        "qwen3_next",
    ),
    "TP2, gated, gated shared expert": (
        None,
        TP2 | ONE_EXPERT_RANK,
        MOE | GATED | {"moe_shared_expert_intermediate_size": 28, "moe_shared_expert_gate": True},
        BASE,
        "qwen3_next",
    ),
}
"""Head mechanisms, layout, configuration, arguments, and the architecture if it is not ``kha``."""
WHOLE = (
    "plain Megatron",
    "TP2, softmax before the choice",
    "EP2, gated shared expert, sigmoid top-1",
    "TP2, GLA of 4, tied embeddings",
    "TP2, gated, gated shared expert",
)


@torch.no_grad()
def in_two_steps(model, ids, first=7):
    """Return the logits of the first tokens, then those of the others with a cache."""
    begun = model(ids[:, :first], use_cache=True)
    rest = model(ids[:, first:], past_key_values=begun.past_key_values, use_cache=True)
    return torch.cat([begun.logits, rest.logits], dim=1)


def _tensors(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.fast
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.whole] * (c in WHOLE)) for c in CASES]
)
def test_logits_equal_those_of_the_sharded_model(ranks, tmp_path, case, capsys):
    kha, layout, config, args, architecture = (*CASES[case], "kha")[:5]
    is_stock = architecture != "kha"
    world = int(np.prod([n for name, n in layout.items() if n > 1]))
    save = tmp_path / "save"
    logits = ranks(save_and_run, world, str(save), kha, layout, config, args)[-1][1]
    asked = "auto" if architecture == "qwen3_next" else architecture
    planned = to_hf.plan_export(save, architecture=asked)
    is_hybrid = "hybrid_layer_pattern" in args
    assert ("multi-token prediction layers" in capsys.readouterr().err) == is_hybrid
    read = []
    written = planned.write(tmp_path / "hf", on_bytes=read.append)
    assert written.architecture == architecture
    model = load(tmp_path / "hf")
    assert type(model).__module__.startswith("transformers.models.") == is_stock
    with torch.no_grad():
        ours = model(tokens()).logits
    theirs = torch.from_numpy(logits)[..., : ours.shape[-1]]
    assert theirs.std(dim=(0, 1)).mean() > (0.1 if kha and kha.get(CollaborativeHeads) else 0.3)
    for found in (ours, in_two_steps(model, tokens())):
        torch.testing.assert_close(found, theirs, rtol=0, atol=1e-5)
        assert torch.equal(found.argmax(-1), theirs.argmax(-1))
    assert Pair.open(save, tmp_path / "hf").compare(logits=is_hybrid).agrees

    stored = _tensors(tmp_path / "hf")
    assert (written.tensors, written.shards, written.dtype) == (len(stored), 1, "float32")
    trained = {name: t for name, t in stored.items() if not name.endswith("correction_bias")}
    assert written.parameters == sum(tensor.numel() for tensor in trained.values())
    assert written.size == sum(tensor.nbytes for tensor in stored.values())
    assert sum(read) == planned.size == written.size
    rows = VOCAB if "vocab_size" in args else 56
    assert stored["model.embed_tokens.weight"].shape[0] == rows
    tied = not args.get("untie_embeddings_and_output_weights", True)
    assert ("lm_head.weight" in stored) == (not tied)

    planned = to_megatron.plan_import(tmp_path / "hf", divisible_by=8, gpt_model=not is_hybrid)
    written = planned.write(tmp_path / "back")
    assert ("--attention-output-gate" in written.arguments) == is_stock
    back = MegatronCheckpoint.open(tmp_path / "back")
    heads = HeadsConfig(Gate(output="element")) if is_stock else kha
    assert read_kha_config(back) == (None if heads == HeadsConfig() else heads)
    assert not is_stock or not [name for name in back.args if name.startswith("kha_")]
    if "vocab_size" not in args:  # else the rows that pad the vocabulary are not kept
        check_back(save, tmp_path / "back")


def test_dtype_casts_everything_but_expert_biases(ranks, tmp_path):
    config = SIGMOID | {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    kha, save = HeadsConfig(Knock(value="mlp")), tmp_path / "save"
    ranks(save_and_run, 1, str(save), kha, {}, config, {}, run=False)
    original = None
    for dtype in ("bfloat16", "float16"):
        folder = tmp_path / dtype
        written = to_hf.plan_export(save, dtype=None if dtype == "bfloat16" else dtype).write(
            folder
        )
        assert written.dtype == dtype
        assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
        tensors = _tensors(folder)
        original = original or tensors
        for name, tensor in tensors.items():
            is_bias = name.endswith("e_score_correction_bias")
            assert tensor.dtype == (torch.float32 if is_bias else FLOAT_DTYPES[dtype]), name
            assert torch.equal(tensor, original[name].to(tensor.dtype)), name
    assert original["model.layers.1.mlp.gate.e_score_correction_bias"].abs().max() > 0.1


def test_tokenizer_and_special_tokens_are_copied(sparse, tokenizer, tmp_path):
    written = to_hf.plan_export(sparse[0]).write(tmp_path / "hf")
    assert written.tokenizer == str(tokenizer)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert loaded("w7 w9")["input_ids"] == [7, 9]
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / "hf" / name).read_text())
        assert (values["eos_token_id"], values["pad_token_id"]) == (VOCAB - 2, VOCAB - 1)
    assert load(tmp_path / "hf").config.vocab_size == VOCAB == len(loaded)


def test_trained_rows_are_not_taken_for_padding(sparse, tmp_path):
    for entries, rows in ((47, 56), (49, 49)):
        folder = write_tokenizer(tmp_path / str(entries), entries)
        assert to_hf.plan_export(sparse[0], tokenizer=folder).config.vocab_size == rows


LAYERS = "decoder.layers."
EXTRA = [
    LAYERS + "1.self_attention.new.weight",
    LAYERS + "3.mlp.router.weight",  # one layer too many
    LAYERS + "0.mlp.router.weight",  # this layer is dense
]
LOST = ["embedding.word_embeddings.weight", LAYERS + "1.mlp.router.expert_bias"]


@pytest.mark.parametrize(
    ("extra", "lost", "args", "message"),
    [
        *((name, None, {}, rf"\(1 tensors\): unexpected {name}") for name in EXTRA),
        *((None, name, {}, f"(missing|Tensor) {name}") for name in LOST),
        (None, None, {"num_layers": 2, "moe_layer_freq": [0, 1]}, "unexpected decoder.layers.2"),
        (None, None, {"qk_layernorm": False}, "unexpected .*self_attention.k_layernorm"),
        (None, None, {"add_qkv_bias": True}, r"\(3 tensors\): missing .*linear_qkv\.bias"),
    ],
)
def test_tensors_that_contradict_the_arguments_are_refused(
    sparse, monkeypatch, extra, lost, args, message
):
    checkpoint = MegatronCheckpoint.open(sparse[0])
    tensors = checkpoint._folder.tensors
    if extra:
        tensors[extra] = tensors["decoder.final_layernorm.weight"]
    tensors.pop(lost, None)
    checkpoint.__dict__["args"] = checkpoint.args | args
    monkeypatch.setattr(sources.MegatronCheckpoint, "open", lambda path: checkpoint)
    with pytest.raises(CheckpointError, match=message):
        to_hf.plan_export(sparse[0])
