"""Translate Megatron's arguments to an architecture."""

import pytest

from kha_megatron import announcements
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion.hf_configs import to_hf_config
from kha_megatron.errors import CheckpointError, KHAError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.megatron import SUPPORTED_ARGUMENTS, model_from_checkpoint


def hf_config(args, kha, rows):
    """Return the ``kha`` configuration of a Megatron model."""
    return to_hf_config(model_from_checkpoint(args, kha, rows), "kha")


@pytest.fixture(scope="module")
def args(sparse):
    return MegatronCheckpoint.open(sparse[0]).args


@pytest.mark.parametrize("name", SUPPORTED_ARGUMENTS)
def test_unsupported_arguments_are_refused(args, name):
    assert name in args
    with pytest.raises(CheckpointError, match=rf"^The checkpoint .* {name}=something new"):
        hf_config(args | {name: "something new"}, HeadsConfig(), 51)


LATENT = {"multi_latent_attention": True, "q_lora_rank": 8}
PLAIN_ROPE = LATENT | {"rope_type": "rope"}
STOCK = {"spec": ["kha_megatron.training.stock", "spec"]}
SCALED_HYBRID = STOCK | {"use_rope_scaling": True, "hybrid_layer_pattern": "*-*E*E"}
YARN = PLAIN_ROPE | {"rotary_scaling_factor": 4.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("changes", "heads", "message"),
    [
        (
            {"rotary_percent": 1.0, "kv_channels": 8},
            {"attention": "gta"},
            "partial_rotary_factor must be 0.5 .*1.0",
        ),
        (SCALED_HYBRID, {}, "use_rope_scaling=True.*stock hybrid models ignore it"),
        ({}, {"attention": "gla"}, "multi-latent-attention"),
        (LATENT, {"value": "mlp"}, "supports only linear KHA, got value=mlp"),
        (LATENT | {"q_lora_rank": None}, {"value": "linear"}, "q_lora_rank=None.*qk_layernorm"),
        (YARN, {"value": "linear"}, "mscale_all_dim=1.0.*rope_type=rope"),
        (PLAIN_ROPE | {"rotary_percent": 0.5}, {"value": "linear"}, "rotary_percent=0.5"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, {}, "load_balancing_type=sinkhorn"),
        ({"moe_router_score_function": "sqrtsoftplus"}, {}, "score_function=sqrtsoftplus"),
        ({"moe_router_score_function": "softmax"}, {}, "moe_router_enable_expert_bias=True"),
    ],
)
def test_unsupported_combinations_are_refused(args, changes, heads, message):
    with pytest.raises(KHAError, match=message):
        hf_config(args | changes, HeadsConfig.from_dict(heads), 51)


@pytest.mark.parametrize(
    ("kha", "spec", "factor"),
    [
        ({}, None, 8.0),
        ({}, ["kha_megatron.mcore.specs", "kha_mlp"], 8.0),
        ({"kha_query": "linear"}, ["kha_megatron.training.stock", "layer_spec"], 8.0),
        ({"kha_query": "linear"}, None, 4.0),
        ({}, "none recorded", 4.0),
    ],
    ids=["stock", "stock with our spec", "patched", "our entry point", "converted"],
)
def test_rope_scaling_factor_is_that_of_the_training_script(args, capsys, kha, spec, factor):
    announcements._logged.clear()
    rest = {n: v for n, v in args.items() if n != "spec" and not n.startswith("kha_")}
    given = {} if spec == "none recorded" else {"spec": spec}
    scaled = {"use_rope_scaling": True, "rope_scaling_factor": 4.0, "max_position_embeddings": 9000}
    saved = rest | scaled | kha | given
    config = hf_config(saved, HeadsConfig.from_entries_or_empty(saved), 51)
    assert config.rope_parameters["factor"] == factor
    notice = "Using a RoPE scaling factor of 8"
    assert (notice in capsys.readouterr().err) == (factor == 8.0)


def dropped(changes):
    """Return the factors of Megatron's own scripts and of our entry point."""
    from argparse import ArgumentParser, Namespace

    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import add_megatron_arguments

    from kha_megatron.conversion.megatron_model import _CPU_ARGUMENTS
    from kha_megatron.mcore.building import model_config

    args = vars(add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args([]))
    args = Namespace(**args | changes | _CPU_ARGUMENTS)
    configs = gpt_config_from_args(args), model_config(args, HeadsConfig())
    return [config.rope_scaling_factor for config in configs]


@pytest.mark.whole
def test_megatrons_own_scripts_ignore_the_factor(ranks, args):
    plain = {n: v for n, v in args.items() if v is None or type(v) in (bool, int, float, str)}
    plain |= {"use_rope_scaling": True, "rope_scaling_factor": 4.0}
    assert ranks(dropped, 1, plain)[0] == [8.0, 4.0]


def test_hybrid_layer_patterns(args):
    for pattern in ("M*M*", "*-*", "-*-*", "*-*E|*", "**", 7):
        with pytest.raises(CheckpointError, match="hybrid_layer_pattern="):
            model_from_checkpoint(args | {"hybrid_layer_pattern": pattern}, HeadsConfig(), 51)
    model = model_from_checkpoint(args | {"hybrid_layer_pattern": "*-*E|*E"}, HeadsConfig(), 51)
    assert (model.num_layers, model.moe_layer_freq) == (3, (0, 1, 1))
