"""Which spreads of a model over ranks are legal, and what a refusal says."""

from dataclasses import replace

import pytest

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import CollaborativeHeads, Gate
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.model.model import Model
from kha_megatron.model.rules import (
    check_arguments,
    check_attention,
    check_head_layout,
    check_layout,
)
from kha_megatron.model.run import Run

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
EXPERTS = replace(DENSE, num_experts=12, moe_ffn_hidden_size=80)
BATCH = Batch(seq_length=96, micro_batch_size=3, global_batch_size=48)


def layout(**sizes):
    return Layout(**{"sequence_parallel": sizes.get("tp", 1) > 1} | sizes)


@pytest.mark.parametrize(("heads", "groups", "tp"), [(8, 8, 4), (8, 1, 8), (32, 4, 16), (6, 3, 3)])
def test_legal_head_layouts(heads, groups, tp):
    assert check_head_layout(heads, groups, tp) is None
    with pytest.raises(ConfigError):
        check_head_layout(heads, groups, heads + 1)


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "words"),
    [
        (8, 4, 3, ["8 query heads", "3 tensor", "[1, 2, 4, 8]"]),
        (12, 6, 4, ["6 key/value heads", "4 tensor", "[1, 2, 3, 6, 12]"]),
        (8, 3, 1, ["8 query heads", "3 key/value heads", "[1, 2, 4, 8]"]),
    ],
)
def test_illegal_head_layouts_name_legal_ones(heads, groups, tp, words):
    with pytest.raises(ConfigError) as caught:
        check_head_layout(heads, groups, tp)
    assert all(word in str(caught.value) for word in words)


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
    ],
)
def test_what_megatron_can_make_passes(model, sizes, batch):
    assert check_layout(model, layout(**sizes), batch) is None


ILLEGAL = [
    (DENSE, {"tp": 3}, "8 query heads cannot be divided over 3", "[1, 2, 4, 8]"),
    (
        replace(DENSE, num_query_groups=1, kv_channels=6),
        {"tp": 8},
        "60 rows of the QKV projection cannot be divided over 8",
        "[6, 10]",
    ),
    (replace(DENSE, ffn_hidden_size=190), {"tp": 4}, "190 cannot be divided over 4", "188 or 192"),
    (EXPERTS, {"tp": 8, "etp": 3}, "--moe-ffn-hidden-size 80 .* over 3", "78 or 81, or .* 2 or 4"),
    (
        replace(EXPERTS, moe_shared_expert_intermediate_size=50),
        {"tp": 4, "etp": 1},
        "--moe-shared-expert-intermediate-size 50 .* over 4",
        "48 or 52",
    ),
    (replace(DENSE, padded_vocab_size=57), {"tp": 4}, "57 .* over 4", "56 or 60"),
    (DENSE, {"sequence_parallel": True}, "--tensor-model-parallel-size 1", "remove it"),
    (EXPERTS, {"tp": 2, "sequence_parallel": False}, "12 experts .* 2", "add --sequence-parallel"),
    (DENSE, {"ep": 2}, "--expert-model-parallel-size 2 .* without experts", "use 1"),
    (EXPERTS, {"ep": 5}, "--num-experts 12 cannot be divided over 5", "10 or 15, or .* 4 or 6"),
    (DENSE, {"pp": 5}, "12 layers cannot be divided over 5", "4 or 6, or --num-layers 10 or 15"),
    (
        replace(DENSE, num_layers=23),
        {"pp": 4},
        "23 layers cannot be divided over 4",
        "--account-for-loss-in-pipeline-split",
    ),
    (
        DENSE,
        {"pp": 4, "loss_as_layer": True},
        "the loss, 13 in all, .* over 4",
        "--num-layers 11 or 15",
    ),
    (
        DENSE,
        {"pp": 4, "first_stage_layers": 2},
        "10 layers that are left of 12 .* over 3",
        "3 or 6",
    ),
    (
        DENSE,
        {"pp": 2, "first_stage_layers": 12, "last_stage_layers": 1},
        "-1 layers .* 0",
        "change",
    ),
    (DENSE, {"pp": 2, "last_stage_layers": 0}, "0 layers in the last", "1 or more"),
    (
        DENSE,
        {"pp": 3, "last_stage_layers": 2, "loss_as_layer": True},
        "the last pipeline stage together with counting the loss",
        "one of the two",
    ),
    (DENSE, {"pp": 3, "vpp": 3}, "4 layers on a pipeline rank .* 3 virtual", "2 or 4"),
    (DENSE, {"pp": 1, "vpp": 2}, "2 virtual pipeline stages .*-size 1", "use 2"),
    (DENSE, {"pp": 2, "vpp": 2, "overlap_p2p": False}, "2 virtual stages on 2", "3 or more"),
    (DENSE, {"pp": 2, "stages": ("Ett", "tt", "tL")}, "3 stages, .* 2 pipeline", "2 or 4 stages"),
    (DENSE, {"pp": 2, "stages": ("Ett", "ttL")}, "4 layers, the model 12", "write 12 t"),
    (
        replace(DENSE, num_layers=4),
        {"pp": 2, "stages": ("tt", "EttL")},
        "must begin with its only E",
        "not t and L",
    ),
    (DENSE, {"tp": 2, "pp": 3, "world_size": 16}, "16 ranks .* = 6", "12 or 18 ranks"),
    (EXPERTS, {"ep": 6, "pp": 2, "world_size": 16}, "16 ranks .* expert 6 .* = 12", "12 or 24"),
]
ILLEGAL_BATCHES = [
    ({"cp": 5}, "--seq-length 96 is no multiple of 2 x .* 5 = 10", "90 or 100"),
    ({"tp": 4, "cp": 16}, "6 tokens .* over 4 tensor-parallel", "use 128"),
    ({"world_size": 5}, "48 is no multiple of --micro-batch-size 3 x 5 .* = 15", "45 or 60"),
    ({"pp": 6, "vpp": 2, "world_size": 12}, "8 microbatches .* groups of 6 over 6", "36 or 72"),
]


def refused(match, remedy, *arguments, **options):
    with pytest.raises(ConfigError, match=match) as caught:
        check_layout(*arguments, **options)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=remedy if "[" not in remedy else None):
        check_layout(*arguments, **options)
    if "[" in remedy:
        assert remedy in str(caught.value)


@pytest.mark.parametrize(("model", "sizes", "match", "remedy"), ILLEGAL, ids=lambda v: None)
def test_an_illegal_layout_names_both_numbers_and_a_neighbour(model, sizes, match, remedy):
    refused(match, remedy, model, layout(**sizes))


@pytest.mark.parametrize(("sizes", "match", "remedy"), ILLEGAL_BATCHES, ids=lambda v: None)
def test_an_illegal_batch_names_both_numbers_and_a_neighbour(sizes, match, remedy):
    refused(match, remedy, DENSE, layout(**sizes), BATCH)


@pytest.mark.parametrize(
    ("changes", "tp", "recipe", "match", "remedy"),
    [
        ({"kv_channels": 40}, 1, "delayed", "--kv-channels 40 is no multiple of 16", "32 or 48"),
        ({"hidden_size": 104}, 1, "tensorwise", "--hidden-size 104 .* 16", "96 or 112"),
        ({"hidden_size": 112}, 1, "mxfp8", "--hidden-size 112 .* 32", "96 or 128"),
        ({}, 8, "delayed", "192 is no multiple of 16 on each of 8 ranks = 128", "128 or 256"),
    ],
)
def test_fp8_needs_multiples(changes, tp, recipe, match, remedy):
    refused(
        match, remedy, replace(DENSE, **changes, fp8="hybrid", fp8_recipe=recipe), layout(tp=tp)
    )


@pytest.mark.parametrize(
    ("length", "tp", "recipe", "match", "remedy"),
    [
        (7, 1, "delayed", "1 x 7 tokens of a microbatch are no multiple of 8", "of 8, or train"),
        (48, 4, "tensorwise", "1 x 48 tokens .* over 4 ranks .* 8 on each", "32 or 64"),
        (48, 1, "mxfp8", "1 x 48 tokens .* 32 on each", "32 or 64"),
    ],
)
def test_fp8_needs_whole_groups_of_tokens(length, tp, recipe, match, remedy):
    model = replace(DENSE, fp8="hybrid", fp8_recipe=recipe)
    refused(match, remedy, model, layout(tp=tp), Batch(seq_length=length, micro_batch_size=1))
    check_layout(model, layout(tp=tp), Batch(seq_length=64, micro_batch_size=1))


def test_fp8_takes_what_fits():
    assert check_layout(replace(DENSE, fp8="hybrid"), layout(tp=4)) is None
    assert check_layout(replace(DENSE, fp8="hybrid", fp8_recipe="mxfp8"), layout(tp=2)) is None


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


@pytest.mark.parametrize(
    ("model", "tp"), [(TIED, 1), (TIED, 8), (LATENT, 8), (GROUPED, 2), (GROUPED, 8)]
)
def test_legal_layouts_of_the_attention_family(model, tp):
    assert check_layout(model, layout(tp=tp)) is None


@pytest.mark.parametrize(
    ("model", "tp", "words"),
    [
        (replace(TIED, kv_channels=6), 1, ["--kv-channels 6", "use 4 or 8"]),
        # 8 query heads and 2 tied states of 4 features are 40 rows
        (replace(TIED, kv_channels=4), 16, ["8 query heads", "16 tensor-parallel ranks"]),
        (replace(LATENT, q_lora_rank=18), 4, ["--q-lora-rank 18", "16 or 20"]),
        (
            replace(LATENT, q_lora_rank=None, qk_pos_emb_head_dim=2),
            4,
            ["--kv-lora-rank plus --qk-pos-emb-head-dim 22", "20 or 24"],
        ),
        (
            replace(GROUPED, kha_latent_heads=3),
            1,
            ["--kv-lora-rank 20", "3 latent heads", "18 or 21"],
        ),
        (
            replace(GROUPED, kha_latent_heads=3, kv_lora_rank=21, num_attention_heads=8),
            1,
            ["--num-attention-heads 8", "3 latent heads", "--kha-latent-heads 2 or 4"],
        ),
        (
            replace(
                GROUPED,
                num_attention_heads=12,
                num_query_groups=12,
                kha_latent_heads=3,
                kv_lora_rank=21,
            ),
            2,
            ["3 latent heads neither divide 2", "[1, 3, 6, 12]"],
        ),
    ],
)
def test_illegal_layouts_of_the_attention_family(model, tp, words):
    with pytest.raises(ConfigError) as caught:
        check_layout(model, layout(tp=tp))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_transformer_engine_has_whole_down_projections():
    assert None is check_layout(replace(WHOLE, q_lora_rank=18), layout(tp=4))


def test_the_largest_sizes_are_judged_at_once():
    """Their divisors are looked for: two billion, one after another, took minutes."""
    with pytest.raises(ConfigError, match="2147483647 query heads are not a multiple of 2 key"):
        check_head_layout(2**31 - 1, 2, 1)


SIZES = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "kv_channels": 16}
OF_HEADS = KHAConfig(gate=Gate(output="head"))


@pytest.mark.parametrize("name", ["muon", "dist_muon", "adaptive_muon"])
def test_an_optimizer_that_takes_the_projection_apart_must_know_its_rows(name):
    asked = SIZES | {"optimizer": name}
    with pytest.raises(ConfigError, match=rf"--optimizer {name} .*gate\(output=head\).*--muon-no-"):
        check_arguments(asked, None, OF_HEADS)
    check_arguments(asked | {"muon_split_qkv": False}, None, OF_HEADS)
    check_arguments(asked, None, KHAConfig(gate=Gate(output="element")))  # Megatron's own
    check_arguments(asked, None, KHAConfig(gate=Gate(dense="element")))


def test_it_is_heard_on_a_command_line():
    words = ["--optimizer", "muon"]
    with pytest.raises(ConfigError, match="--optimizer muon splits the QKV projection"):
        check_arguments(Run.of(**SIZES).updated(words).arguments, None, OF_HEADS)
    words.append("--muon-no-split-qkv")
    check_arguments(Run.of(**SIZES).updated(words).arguments, None, OF_HEADS)


def test_rows_of_gates_are_whole_in_fp8_or_refused():
    """8 queries, a key and a value of 16 rows, and 8 gates filled up to 16: 176 are 11 times 16."""
    asked = SIZES | {"fp8": "hybrid", "num_attention_heads": 8, "ffn_hidden_size": 256}
    asked |= {"group_query_attention": True, "num_query_groups": 1, "sequence_parallel": True}
    asked |= {"transformer_impl": "transformer_engine"}
    check_arguments(asked | {"sequence_parallel": False}, 1, OF_HEADS)
    with pytest.raises(ConfigError) as caught:
        check_arguments(asked | {"tensor_model_parallel_size": 8}, 8, OF_HEADS)
    for word in ("176 rows", "gate(output=head)", "over 8", "16 on each", "size 1", "bf16"):
        assert word in str(caught.value)


def test_latent_attention_has_no_flag_for_its_gate():
    asked = SIZES | {"multi_latent_attention": True, "attention_output_gate": True}
    with pytest.raises(ConfigError, match=r"use --heads gate.output=element"):
        check_attention(asked, KHAConfig())


@pytest.mark.parametrize(
    ("kha", "asked", "words"),
    [
        (KHAConfig(value="mlp"), {"flash_decode": True}, ["value=mlp", "remove --flash-decode"]),
        (KHAConfig(value="mlp"), {"mtp_num_layers": 2}, ["=2", "remove --mtp-num-layers"]),
        (
            KHAConfig(collaborative=CollaborativeHeads(dim=14)),
            {"position_embedding_type": "rope"},
            ["dim=14", "16 features", "collaborative.dim=16 or more", "--rotary-percent"],
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
def test_what_heads_cannot_have_is_refused_from_the_command_line(kha, asked, words):
    """Before a rank starts, and one step short of it all is well."""
    with pytest.raises(ConfigError) as caught:
        check_attention(SIZES | asked, kha)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    check_attention(SIZES, kha)


def test_a_rotary_embedding_that_a_checkpoint_will_say_is_left_to_it():
    tied = KHAConfig(attention="gta")
    with pytest.raises(ConfigError, match=r"give --position-embedding-type rope"):
        check_attention(SIZES, tied)
    check_attention(SIZES | {"use_checkpoint_args": True}, tied)


def test_what_begins_at_the_identity_or_turns_less_is_let_through():
    check_attention(SIZES | {"kha_upcycle": True}, KHAConfig(value="mlp"))
    turned = {"position_embedding_type": "rope", "rotary_percent": 0.5}
    check_attention(SIZES | turned, KHAConfig(collaborative=CollaborativeHeads(dim=14)))
    check_attention(SIZES | {"mtp_num_layers": 2, "flash_decode": True}, KHAConfig())
