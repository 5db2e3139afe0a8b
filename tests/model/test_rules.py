"""Test which layouts, batches and head mechanisms are refused before a rank starts."""

from dataclasses import replace

import pytest

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import CollaborativeHeads, Gate
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.model.model import Model
from kha_megatron.model.rules import check_arguments, check_attention, check_layout

DENSE = Model(
    num_layers=12,
    hidden_size=96,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=192,
)
TIED = replace(DENSE, kha_attention="gta")
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
GROUPED = replace(WHOLE, kha_attention="gla", kha_latent_heads=4)
FP8 = replace(DENSE, fp8="hybrid")
EXPERTS = replace(DENSE, num_experts=12, moe_ffn_hidden_size=80)
BATCH = Batch(seq_length=96, micro_batch_size=3, global_batch_size=48)


def layout(**sizes):
    return Layout(**{"sequence_parallel": sizes.get("tp", 1) > 1} | sizes)


@pytest.mark.parametrize(
    ("model", "sizes", "batch"),
    [
        (DENSE, {}, BATCH),
        (DENSE, {"tp": 8, "world_size": 8}, BATCH),  # more ranks than key/value heads
        (
            DENSE,
            {"tp": 4, "sequence_parallel": False, "world_size": 4},
            replace(BATCH, seq_length=97),
        ),
        (DENSE, {"cp": 3, "world_size": 6}, BATCH),
        (DENSE, {"pp": 6, "vpp": 2, "world_size": 6}, replace(BATCH, global_batch_size=18)),
        (DENSE, {"pp": 2, "vpp": 3, "world_size": 4}, BATCH),
        (DENSE, {"pp": 3, "vpp": 2, "overlap_p2p": False}, BATCH),
        (DENSE, {"pp": 4, "first_stage_layers": 2, "last_stage_layers": 4}, None),
        (DENSE, {"pp": 2, "first_stage_layers": 5, "last_stage_layers": 7}, None),
        (replace(DENSE, num_layers=11), {"pp": 4, "loss_as_layer": True}, None),
        (replace(DENSE, num_layers=5), {"pp": 2, "stages": ("Ett", "tttL")}, None),
        (replace(DENSE, num_layers=2), {"pp": 2, "vpp": 2, "stages": ("E", "t", "t", "mL")}, None),
        (
            EXPERTS,
            {"tp": 2, "ep": 6, "etp": 1, "world_size": 12},
            replace(BATCH, global_batch_size=36),
        ),
        # the dense width is not used, so it need not be divisible
        (replace(EXPERTS, ffn_hidden_size=7), {"tp": 2}, BATCH),
        (replace(DENSE, vocab_size=57), {"tp": 4}, None),  # Megatron pads it
        (replace(DENSE, num_layers=None, ffn_hidden_size=None), {"pp": 5, "tp": 4}, None),
        (TIED, {"tp": 8}, None),
        (LATENT, {"tp": 8}, None),
        (GROUPED, {"tp": 8}, None),
        (replace(WHOLE, q_lora_rank=18), {"tp": 4}, None),  # every rank has all of it
        (replace(DENSE, fp8="hybrid"), {"tp": 4}, BATCH),
        (replace(DENSE, fp8="hybrid", fp8_recipe="mxfp8"), {"tp": 2}, None),
    ],
)
def test_layouts_that_megatron_trains_are_accepted(model, sizes, batch):
    assert check_layout(model, layout(**sizes), batch) is None


ILLEGAL = [
    (DENSE, {"tp": 3}, None, r"8 query heads .* over 3 .* \[1, 2, 4, 8\]"),
    (replace(DENSE, num_query_groups=3), {}, None, r"8 query heads .* 3 key/value heads"),
    (
        replace(DENSE, num_attention_heads=12, num_query_groups=6),
        {"tp": 4},
        None,
        r"6 key/value heads neither divide 4 .* \[1, 2, 3, 6, 12\]",
    ),
    (replace(DENSE, num_query_groups=1, kv_channels=6), {"tp": 8}, None, "rows .* 60 .* over 8"),
    (replace(DENSE, ffn_hidden_size=190), {"tp": 4}, None, "190 .* over 4 .* 188 or 192"),
    (EXPERTS, {"tp": 8, "etp": 3}, None, "--moe-ffn-hidden-size 80 .* over 3 .* 78 or 81"),
    (
        replace(EXPERTS, moe_shared_expert_intermediate_size=50),
        {"tp": 4, "etp": 1},
        None,
        "--moe-shared-expert-intermediate-size 50 .* over 4 .* 48 or 52",
    ),
    (replace(DENSE, padded_vocab_size=57), {"tp": 4}, None, "57 .* over 4 .* 56 or 60"),
    (EXPERTS, {"tp": 2, "sequence_parallel": False}, None, "12 experts .* add --sequence-par"),
    (DENSE, {"ep": 2}, None, "--num-experts 1 .* over 2"),
    (EXPERTS, {"ep": 5}, None, "--num-experts 12 .* over 5 .* 10 or 15"),
    (replace(TIED, kv_channels=6), {}, None, "--kv-channels 6.* use 4 or 8"),
    (replace(LATENT, q_lora_rank=18), {"tp": 4}, None, "--q-lora-rank 18 .* 16 or 20"),
    (replace(LATENT, qk_pos_emb_head_dim=2), {"tp": 4}, None, "--kv-lora-rank plus .* 20 or 24"),
    (replace(GROUPED, kha_latent_heads=3), {}, None, "--kv-lora-rank 20 .* 3 latent .* 18 or 21"),
    (DENSE, {"pp": 5}, None, "12 layers .* over 5 .* 4 or 6"),
    (DENSE, {"pp": 4, "loss_as_layer": True}, None, "13 layers .* over 4 .* 1 or 13"),
    (DENSE, {"pp": 4, "first_stage_layers": 2}, None, "10 layers .* over 3 .* 3 or 6"),
    (DENSE, {"pp": 3, "vpp": 3}, None, "4 layers on a .* 3 virtual stages: use 2 or 4"),
    (DENSE, {"pp": 10**20}, None, "12 layers .* 12, or"),  # at once
    (DENSE, {"pp": 2, "vpp": 2, "overlap_p2p": False}, None, "2 virtual stages on 2 .* 3 or more"),
    (DENSE, {"pp": 2, "stages": ("Ett", "ttL")}, None, "4 layers in 2 stages: expected 12"),
    (DENSE, {"tp": 2, "pp": 3, "world_size": 16}, None, "16 ranks .* = 6.* 12 or 18 ranks"),
    (EXPERTS, {"ep": 6, "pp": 2, "world_size": 16}, None, "16 ranks .* expert 6 .* 12 or 24"),
    (DENSE, {"cp": 5}, BATCH, "--seq-length 96 .* over 10 .* 90 or 100"),
    (DENSE, {"tp": 4, "cp": 16}, BATCH, "--seq-length 96 .* over 64 .* 64 or 128"),
    (DENSE, {"world_size": 5}, BATCH, "48 is no multiple of .* 3 x 5 .* = 15.* 45 or 60"),
    (DENSE, {"pp": 6, "vpp": 2, "world_size": 12}, BATCH, "8 microbatches .* 6 over 6.* 36 or 72"),
    (replace(FP8, kv_channels=40), {}, None, "--kv-channels 40 .* multiples of 16.* 32 or 48"),
    (replace(FP8, hidden_size=112, fp8_recipe="mxfp8"), {}, None, "112 .* of 32.* 96 or 128"),
    (FP8, {"tp": 8}, None, "192 .* over 8 .* in multiples of 16.* 128 or 256, or train in bf16"),
    (FP8, {}, replace(BATCH, seq_length=7), "21 .* of 8.* 16 or 24"),
    # 2 groups of 4 queries, a key and a value of 16 rows, and gates filled up to 16
    (
        replace(FP8, kha=KHAConfig(gate=Gate(output="head")), ffn_hidden_size=256),
        {"tp": 8},
        None,
        "rows of the QKV projection, 224 .* over 8 .* in multiples of 16",
    ),
    # at once, although the sizes have two billion possible divisors
    (replace(DENSE, num_attention_heads=2**31 - 1), {}, None, "2147483647 query heads"),
]


@pytest.mark.parametrize(("model", "sizes", "batch", "match"), ILLEGAL, ids=lambda v: None)
def test_impossible_layouts_are_refused_with_the_nearest_sizes(model, sizes, batch, match):
    with pytest.raises(ConfigError, match=match) as caught:
        check_layout(model, layout(**sizes), batch)
    assert "\n" not in str(caught.value)


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


SIZES = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "kv_channels": 16}
OF_HEADS = KHAConfig(gate=Gate(output="head"))


@pytest.mark.parametrize("name", ["muon", "adaptive_muon"])
def test_muon_must_not_split_a_projection_with_other_rows(name):
    asked = SIZES | {"optimizer": name}
    with pytest.raises(ConfigError, match=rf"--optimizer {name} .*gate\(output=head\).*--muon-no-"):
        check_arguments(asked, None, OF_HEADS)
    check_arguments(asked | {"muon_split_qkv": False}, None, OF_HEADS)
    check_arguments(asked, None, KHAConfig(gate=Gate(output="element")))  # Megatron's own
    check_arguments(asked, None, KHAConfig(gate=Gate(dense="element")))


@pytest.mark.parametrize(
    ("kha", "asked", "words"),
    [
        (KHAConfig(value="mlp"), {"flash_decode": True}, ["value=mlp", "Remove --flash-decode"]),
        (KHAConfig(value="mlp"), {"mtp_num_layers": 2}, ["got 2", "Remove --mtp-num-layers"]),
        (
            KHAConfig(collaborative=CollaborativeHeads(dim=14)),
            {"position_embedding_type": "rope"},
            ["collaborative.dim of at least 16", "got 14", "--rotary-percent"],
        ),
        (KHAConfig(), {"kha_upcycle": True}, ["nothing", "start at the identity"]),
        (
            KHAConfig(value="mlp", init="random"),
            {"kha_upcycle": True},
            ["init=random", "no --kha-init random"],
        ),
        (
            KHAConfig(gate=Gate(output="element", form="add")),
            {"kha_upcycle": True},
            ["form=add", "start at the identity", "convert upcycle"],
        ),
    ],
    ids=["decode", "predictions", "rotary", "nothing added", "random", "no such start"],
)
def test_head_mechanisms_are_checked_against_the_arguments(kha, asked, words):
    with pytest.raises(ConfigError) as caught:
        check_attention(SIZES | asked, kha)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    check_attention(SIZES, kha)


def test_gta_needs_half_a_rotary_head_unless_a_checkpoint_restores_it():
    tied = KHAConfig(attention="gta")
    with pytest.raises(ConfigError, match=r"give --position-embedding-type rope"):
        check_attention(SIZES, tied)
    check_attention(SIZES | {"use_checkpoint_args": True}, tied)


def test_mechanisms_that_fit_are_accepted():
    check_attention(SIZES | {"kha_upcycle": True}, KHAConfig(value="mlp"))
    turned = {"position_embedding_type": "rope", "rotary_percent": 0.5}
    check_attention(SIZES | turned, KHAConfig(collaborative=CollaborativeHeads(dim=14)))
    check_attention(SIZES | {"mtp_num_layers": 2, "flash_decode": True}, KHAConfig())
