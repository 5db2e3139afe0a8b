"""A recipe's command line in the terms of :mod:`kha_megatron.model.layout`."""

import ast
from typing import Any

from kha_megatron.errors import ConfigError
from kha_megatron.model.layout import Batch, Layout, Model, latents, moe_pattern
from kha_megatron.model.words import Arguments, integer_of, word_of
from kha_megatron.plan.family import kind_of, latent_sizes


def model_of(arguments: Arguments, vocab_size: int | None = None) -> Model | None:
    """The model that the command line names; None where it leaves the sizes to Megatron.

    Raises:
        ConfigError: a size is no positive integer.
    """
    if not {"--num-layers", "--hidden-size", "--num-attention-heads"} <= arguments.keys():
        return None
    layers, hidden, heads = (
        integer_of(arguments, flag, 1)
        for flag in ("--num-layers", "--hidden-size", "--num-attention-heads")
    )
    swiglu = "--swiglu" in arguments
    ffn = int(hidden * 8 / 3 / 64) * 64 if swiglu else 4 * hidden  # Megatron's own defaults
    ffn = integer_of(arguments, "--ffn-hidden-size", ffn)
    grouped = "--group-query-attention" in arguments
    shared = "--moe-shared-expert-intermediate-size"
    kind = kind_of(arguments)
    experts = integer_of(arguments, "--num-experts", 1) if "--num-experts" in arguments else None
    return Model(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=integer_of(arguments, "--num-query-groups", 1) if grouped else heads,
        kv_channels=(
            integer_of(arguments, "--qk-head-dim", 128)  # Megatron's default
            if kind in ("mla", "gla")
            else integer_of(arguments, "--kv-channels", max(1, hidden // heads))
        ),
        tied_keys=kind == "gta",
        **(_latent(arguments) if kind in ("mla", "gla") else {}),
        ffn_hidden_size=ffn,
        num_experts=experts,
        moe_ffn_hidden_size=integer_of(arguments, "--moe-ffn-hidden-size", ffn),
        moe_shared_expert_intermediate_size=(
            integer_of(arguments, shared, 1) if shared in arguments else None
        ),
        moe_router_topk=integer_of(arguments, "--moe-router-topk", 2),
        moe_layers=_moe_layers(word_of(arguments, "--moe-layer-freq") or "1", layers),
        vocab_size=vocab_size,
        vocab_padding=integer_of(arguments, "--make-vocab-size-divisible-by", 128),
        swiglu=swiglu,
        qk_layernorm="--qk-layernorm" in arguments,
        attention_output_gate="--attention-output-gate" in arguments,
        tied_embeddings="--untie-embeddings-and-output-weights" not in arguments,
        norm_parameters=1 if word_of(arguments, "--normalization") == "RMSNorm" else 2,
    )


def _latent(arguments: Arguments) -> dict[str, Any]:
    """The fields of :class:`Model` that only latent attention has."""
    sizes = latent_sizes(arguments)
    local = word_of(arguments, "--transformer-impl") == "local"
    cut = local or "--mla-down-proj-fusion" in arguments
    cut |= word_of(arguments, "--device") == "cpu"  # which brings the local modules
    return {
        "latents": latents(
            sizes["query_rank"], sizes["rank"], sizes["position"], down_projections_cut=cut
        ),
        "latent_width": sizes["rank"],
        "latent_heads": sizes["groups"],
    }


def layout_of(arguments: Arguments, ranks: int) -> Layout:
    """The parallel sizes of the command line on ``ranks`` ranks.

    Virtual stages and custom pipeline layouts are left to the entry point, which has Megatron's
    parser for them.

    Raises:
        ConfigError: a size is no positive integer.
    """
    uneven = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    first, last = (integer_of(arguments, f, 1) if f in arguments else None for f in uneven)
    tensor = integer_of(arguments, "--tensor-model-parallel-size", 1)
    return Layout(
        world_size=ranks,
        tp=tensor,
        pp=integer_of(arguments, "--pipeline-model-parallel-size", 1),
        cp=integer_of(arguments, "--context-parallel-size", 1),
        ep=integer_of(arguments, "--expert-model-parallel-size", 1),
        etp=integer_of(arguments, "--expert-tensor-parallel-size", tensor),
        sequence_parallel="--sequence-parallel" in arguments,
        first_stage_layers=first,
        last_stage_layers=last,
        embedding_as_layer="--account-for-embedding-in-pipeline-split" in arguments,
        loss_as_layer="--account-for-loss-in-pipeline-split" in arguments,
    )


def batch_of(arguments: Arguments) -> Batch | None:
    """What one step trains on; None where the command line leaves it to Megatron.

    Raises:
        ConfigError: a size is no positive integer.
    """
    if not {"--seq-length", "--micro-batch-size"} <= arguments.keys():
        return None
    whole = "--global-batch-size"
    shrinks = "--decrease-batch-size-if-needed" in arguments
    return Batch(
        seq_length=integer_of(arguments, "--seq-length", 1),
        micro_batch_size=integer_of(arguments, "--micro-batch-size", 1),
        global_batch_size=(
            integer_of(arguments, whole, 1) if whole in arguments and not shrinks else None
        ),
    )


def _moe_layers(text: str, layers: int) -> tuple[bool, ...]:
    """Megatron's ``--moe-layer-freq``: ``2``, or an expression of lists like ``[0]*1+[1]*3``."""

    def value(node: ast.AST) -> int | list[int]:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.List(elts=items):
                return [value(item) for item in items]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
        raise ValueError

    try:
        frequency = value(ast.parse(text, mode="eval").body)
        pattern = moe_pattern(frequency, layers)
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError):
        raise ConfigError(
            f"--moe-layer-freq {text}: give a whole number from 1 up, or lists of 0 and 1 as in "
            "[0]*1+[1]*3"
        ) from None
    if len(pattern) != layers:
        raise ConfigError(
            f"--moe-layer-freq {text} names {len(pattern)} layers, the model has {layers}: "
            f"name {layers}"
        )
    return pattern
