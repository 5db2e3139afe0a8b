"""Test which layouts, batches and head mechanisms are refused before a rank starts."""

from dataclasses import replace

import pytest

from kha_megatron.errors import ConfigError
from kha_megatron.heads import CollaborativeHeads, Gate, Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.model.rules import check_arguments, check_attention, check_layout

DENSE = ModelConfig(
    num_layers=12,
    hidden_size=96,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=192,
)
TIED = replace(DENSE, kha=HeadsConfig(attention="gta"))
LATENT = replace(
    DENSE,
    num_query_groups=8,
    multi_latent_attention=True,
    q_lora_rank=24,
    kv_lora_rank=20,
    qk_pos_emb_head_dim=4,
    transformer_impl="local",
)
WHOLE = replace(LATENT, transformer_impl="transformer_engine")
GROUPED = replace(WHOLE, kha=HeadsConfig(attention="gla", latent_heads=4))
FP8 = replace(DENSE, fp8="hybrid")
EXPERTS = replace(DENSE, num_experts=12, moe_ffn_hidden_size=80)
BATCH = Batch(seq_length=96, micro_batch_size=3, global_batch_size=48)


def layout(**sizes):
    return Layout(**{"sequence_parallel": sizes.get("tp", 1) > 1} | sizes)


def check(model, sizes, batch):
    """Check a layout with a batch that differs from ``BATCH``, or without one."""
    batch = None if batch is None else replace(BATCH, **batch)
    return check_layout(model, layout(**sizes), batch)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("model", "sizes", "batch"),
    [
        (DENSE, {}, {}),
        (DENSE, {"tp": 8, "world_size": 8}, {}),  # more ranks than key/value heads
        (DENSE, {"tp": 4, "sequence_parallel": False, "world_size": 4}, {"seq_length": 97}),
        (DENSE, {"cp": 3, "world_size": 6}, {}),
        (DENSE, {"pp": 6, "vpp": 2, "world_size": 6}, {"global_batch_size": 18}),
        (DENSE, {"pp": 2, "vpp": 3, "world_size": 4}, {}),
        (DENSE, {"pp": 3, "vpp": 2, "overlap_p2p": False}, {}),
        (DENSE, {"pp": 4, "first_stage_layers": 2, "last_stage_layers": 4}, None),
        (DENSE, {"pp": 2, "first_stage_layers": 5, "last_stage_layers": 7}, None),
        (replace(DENSE, num_layers=11), {"pp": 4, "loss_as_layer": True}, None),
        (replace(DENSE, num_layers=5), {"pp": 2, "stages": ("Ett", "tttL")}, None),
        (replace(DENSE, num_layers=2), {"pp": 2, "vpp": 2, "stages": ("E", "t", "t", "mL")}, None),
        (EXPERTS, {"tp": 2, "ep": 6, "etp": 1, "world_size": 12}, {"global_batch_size": 36}),
        # the dense width is not used, so it need not be divisible
        (replace(EXPERTS, ffn_hidden_size=7), {"tp": 2}, {}),
        (replace(DENSE, vocab_size=57), {"tp": 4}, None),  # Megatron pads it
        (replace(DENSE, num_layers=None, ffn_hidden_size=None), {"pp": 5, "tp": 4}, None),
        (TIED, {"tp": 8}, None),
        (LATENT, {"tp": 8}, None),
        (GROUPED, {"tp": 8}, None),
        (replace(WHOLE, q_lora_rank=18), {"tp": 4}, None),  # every rank has all of it
        (replace(DENSE, fp8="hybrid"), {"tp": 4}, {}),
        (replace(DENSE, fp8="hybrid", fp8_recipe="mxfp8"), {"tp": 2}, None),
    ],
)
def test_layouts_that_megatron_trains_are_accepted(model, sizes, batch):
    assert check(model, sizes, batch) is None


ILLEGAL = [
    (DENSE, {"tp": 3}, None, r"8 query heads .* over 3 .* \[1, 2, 4, 8\]"),
    (replace(DENSE, num_query_groups=3), {}, None, r"--num-attention-heads \(8\) .* by 3 "),
    (
        replace(DENSE, num_attention_heads=12, num_query_groups=6),
        {"tp": 4},
        None,
        r"6 key/value heads over 4 .* \[1, 2, 3, 6, 12\]",
    ),
    (
        replace(DENSE, num_query_groups=1, kv_channels=6),
        {"tp": 8},
        None,
        r"rows .* \(60\) .* by 8 ",
    ),
    (replace(DENSE, ffn_hidden_size=190), {"tp": 4}, None, r"\(190\) .* by 4 .* 188 or 192"),
    (EXPERTS, {"tp": 8, "etp": 3}, None, "--moe-ffn-hidden-size .* by 3 .* 78 or 81"),
    (replace(DENSE, padded_vocab_size=57), {"tp": 4}, None, r"\(57\) .* by 4 .* 56 or 60"),
    (DENSE, {"ep": 2}, None, r"--num-experts \(1\) .* by 2 "),
    (EXPERTS, {"ep": 5}, None, r"--num-experts \(12\) .* by 5 .* 10 or 15"),
    (replace(TIED, kv_channels=6), {}, None, r"--kv-channels \(6\) .* 4 or 8"),
    (replace(LATENT, q_lora_rank=18), {"tp": 4}, None, "--q-lora-rank .* 16 or 20"),
    (replace(LATENT, qk_pos_emb_head_dim=2), {"tp": 4}, None, "--kv-lora-rank plus .* 20 or 24"),
    (
        replace(GROUPED, kha=HeadsConfig(attention="gla", latent_heads=3)),
        {},
        None,
        "by 3 .3 latent heads",
    ),
    (DENSE, {"pp": 5}, None, "12 layers over 5"),
    (DENSE, {"pp": 4, "loss_as_layer": True}, None, "12 layers over 4"),
    (DENSE, {"pp": 3, "vpp": 3}, None, "12 layers over 3 pipeline ranks with 3 stages"),
    (DENSE, {"pp": 10**20}, None, "12 layers"),  # at once
    (DENSE, {"pp": 2, "vpp": 2, "overlap_p2p": False}, None, "on 2 .* overlap_p2p_comm"),
    (DENSE, {"pp": 2, "stages": ("Ett", "ttL")}, None, "12 layers"),
    (DENSE, {"tp": 2, "pp": 3, "world_size": 16}, None, r"ranks \(16\) .* by 6 .* 12 or 18"),
    (EXPERTS, {"ep": 6, "pp": 2, "world_size": 16}, None, "6 expert x 2 .* 12 or 24"),
    (DENSE, {"cp": 5}, {}, "--seq-length .* by 10 .* 90 or 100"),
    (DENSE, {"world_size": 5}, {}, r"\(48\) .* by 15 .3 --micro-batch-size x 5 .* 45 or 60"),
    (DENSE, {"pp": 6, "vpp": 2, "world_size": 12}, {}, r"\(48\) .* by 36 .* 36 or 72"),
    (replace(FP8, kv_channels=40), {}, None, "--kv-channels .*16 for FP8.* 32 or 48"),
    (replace(FP8, hidden_size=112, fp8_recipe="mxfp8"), {}, None, "by 32 .* 96 or 128"),
    (FP8, {"tp": 8}, None, r"\(192\) .*8 .* ranks x 16 for FP8.* 128 or 256"),
    (FP8, {}, {"seq_length": 7}, r"\(21\) .* by 8 .* 16 or 24"),
    # 2 groups of 4 queries, a key and a value of 16 rows, and gates padded to 16
    (
        replace(FP8, kha=HeadsConfig(Gate(output="head")), ffn_hidden_size=256),
        {"tp": 8},
        None,
        r"rows of the QKV projection \(224\) .*8 .* x 16 for FP8",
    ),
    # at once, although the sizes have two billion possible divisors
    (replace(DENSE, num_attention_heads=2**31 - 1), {}, None, "2147483647"),
]


@pytest.mark.fast
@pytest.mark.parametrize(("model", "sizes", "batch", "match"), ILLEGAL, ids=lambda v: None)
def test_impossible_layouts_are_refused_with_the_nearest_sizes(model, sizes, batch, match):
    with pytest.raises(ConfigError, match=match):
        check(model, sizes, batch)


@pytest.mark.parametrize(
    ("sizes", "layers", "expected"),
    [
        ({"pp": 3}, 12, [[4, 4, 4]]),
        ({"pp": 2, "vpp": 3}, 12, [[2, 2]] * 3),
        ({"pp": 4, "first_stage_layers": 2, "last_stage_layers": 4}, 12, [[2, 3, 3, 4]]),
        ({"pp": 2, "vpp": 2, "last_stage_layers": 4}, 12, [[4, 2], [4, 2]]),
        ({"pp": 4, "vpp": 2, "embedding_as_layer": True, "loss_as_layer": True}, 14, None),
        ({"pp": 2, "vpp": 2, "stages": ("Et", "tt", "ttt", "L")}, 6, [[1, 2], [3, 0]]),
    ],
)
def test_layers_of_each_virtual_stage(sizes, layers, expected):
    expected = expected or [[1, 2, 2, 2], [2, 2, 2, 1]]
    assert layout(**sizes).chunk_layers(layers) == expected


SIZES = {
    "num_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "kv_channels": 16,
}
OF_HEADS = HeadsConfig(Gate(output="head"))


@pytest.mark.parametrize("name", ["muon", "adaptive_muon"])
def test_muon_must_not_split_a_projection_with_other_rows(name):
    asked = SIZES | {"optimizer": name}
    with pytest.raises(ConfigError, match=rf"{name} .*gate\(output=head\).*--muon-no-"):
        check_arguments(asked, None, OF_HEADS)
    check_arguments(asked | {"muon_split_qkv": False}, None, OF_HEADS)
    check_arguments(asked, None, HeadsConfig(Gate(output="element")))  # Megatron's own
    check_arguments(asked, None, HeadsConfig(Gate(dense="element")))


def test_optimizers_of_other_packages_do_not_support_fp16():
    with pytest.raises(ConfigError, match=r"--optimizer lion does not support --fp16. Use --bf16"):
        check_arguments(SIZES | {"optimizer": "lion", "fp16": True}, None)
    check_arguments(SIZES | {"optimizer": "lion", "bf16": True}, None)
    check_arguments(SIZES | {"optimizer": "sgd", "fp16": True}, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_channels": None, "num_attention_heads": 7}, r"--hidden-size \(96\) .* by 7 \(7 att"),
        ({"num_experts": 4, "moe_router_topk": 5}, "--moe-router-topk 5 selects more .* at most 4"),
    ],
)
def test_impossible_models_are_refused(settings, message):
    check_arguments(SIZES | settings | {"num_attention_heads": 4, "moe_router_topk": 4}, None)
    with pytest.raises(ConfigError, match=message):
        check_arguments(SIZES | settings, None)


def test_local_layers_cannot_normalize_queries_that_are_not_compressed():
    asked = SIZES | {"multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 8}
    local = {"transformer_impl": "local"}
    with pytest.raises(ConfigError, match="Add --q-lora-rank, or remove --qk-layernorm"):
        check_arguments(asked | local | {"q_lora_rank": None}, None)
    check_arguments(asked | {"q_lora_rank": None}, None)  # Transformer Engine has no norm there
    check_arguments(asked | local, None)
    check_arguments(asked | local | {"q_lora_rank": None, "qk_layernorm": False}, None)


@pytest.mark.parametrize(
    ("kha", "asked", "words"),
    [
        (
            HeadsConfig(Knock(value="mlp")),
            {"flash_decode": True},
            ["value=mlp", "does not support --flash-decode"],
        ),
        (
            HeadsConfig(Knock(value="mlp")),
            {"mtp_num_layers": 2, "gpt_model": True},
            ["requires a hybrid"],
        ),
        (
            HeadsConfig(CollaborativeHeads(dim=14)),
            {"position_embedding_type": "rope"},
            ["collaborative.dim (14)", "per head (16)", "--rotary-percent"],
        ),
        (
            HeadsConfig(CollaborativeHeads(dim=14)),
            {"position_embedding_type": "yarn", "rotary_percent": 0.5},
            ["per head (16)"],
        ),
        (HeadsConfig(), {"kha_upcycle": True}, ["nothing", "at initialization"]),
        (HeadsConfig(Knock(value="mlp", init="random")), {"kha_upcycle": True}, ["init=random"]),
        (
            HeadsConfig(Gate(output="element", form="add")),
            {"kha_upcycle": True},
            ["form=add", "convert upcycle"],
        ),
    ],
)
def test_head_mechanisms_are_checked_against_the_arguments(kha, asked, words):
    with pytest.raises(ConfigError) as caught:
        check_attention(SIZES | asked, kha)
    for word in words:
        assert word in str(caught.value)
    check_attention(SIZES, kha)


def test_mechanisms_that_fit_are_accepted():
    check_attention(SIZES | {"kha_upcycle": True}, HeadsConfig(Knock(value="mlp")))
    turned = {"position_embedding_type": "rope", "rotary_percent": 0.5}
    check_attention(SIZES | turned, HeadsConfig(CollaborativeHeads(dim=14)))
    check_attention(SIZES | {"mtp_num_layers": 2, "flash_decode": True}, HeadsConfig())
