"""Layouts, batches and head mechanisms that a model cannot be trained with.

The launcher and the planner check a run before any rank starts, the training entry point checks
Megatron's arguments, and the attention layer checks its ``TransformerConfig``. Sizes that do not
divide evenly are refused with the nearest sizes that do. Everything else that Megatron refuses
itself is left to Megatron.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadFacts
from kha_megatron.model.layout import Batch, Layout, divisors
from kha_megatron.model.model import Model
from kha_megatron.model.training import Training

_ELSEWHERE = (
    "use_checkpoint_args",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)
"""Arguments with which the sizes of the model are not on the command line."""


def check_arguments(
    arguments: Mapping[str, Any], world_size: int | None, kha: KHAConfig | None = None
) -> None:
    """Check the layout, the batch and the optimizer of Megatron's arguments.

    Args:
        arguments: by name, all or only some.
        world_size: number of ranks.
        kha: the head mechanisms, if known.

    Raises:
        ConfigError: the run is impossible or would compute something wrong.
    """
    model = Model.of(arguments, kha)
    if model is None or any(arguments.get(name) for name in _ELSEWHERE):
        return
    check_layout(model, Layout.of(arguments, world_size), Batch.of(arguments))
    training = Training.of(arguments)
    splits = training.optimizer.endswith("muon") and training.muon_split_qkv
    if splits and not (model.multi_latent_attention or model.qkv.is_stock):
        raise ConfigError(
            f"--optimizer {training.optimizer} splits the QKV projection as Megatron lays it out, "
            f"and that of {model.kha} has other rows: add --muon-no-split-qkv, or use --optimizer "
            "adam"
        )


def head_facts(model: Model, batch: Batch | None = None) -> HeadFacts:
    """Return what the head mechanisms need to know about a model and its batch.

    Args:
        batch: None if unknown; the sequence length is then not checked.
    """
    turned = model.position_embedding_type == "rope" and not model.multi_latent_attention
    return HeadFacts(
        multi_latent=model.multi_latent_attention,
        attention=model.kha_attention,
        qk_norm=model.qk_layernorm or model.qk_l2_norm,
        flash_decode=model.flash_decode,
        rotary_features=int(model.kv_channels * model.rotary_percent) if turned else 0,
        predictions=model.mtp_num_layers or 0,
        layers=model.num_layers or 0,
        query_heads=model.num_attention_heads,
        tokens=batch.seq_length if batch else 0,
        fused_attention=model.transformer_impl == "transformer_engine"
        and model.attention_backend not in ("unfused", "local"),
    )


def check_attention(arguments: Mapping[str, Any], kha: KHAConfig) -> None:
    """Check the head mechanisms and the kind of attention against the other arguments.

    If the arguments leave the sizes of the model open, the ranks check the mechanisms.

    Args:
        arguments: Megatron's arguments by name, all or only some.

    Raises:
        ConfigError: naming the arguments to change.
    """
    if (model := Model.of(arguments, kha)) is not None:
        model.kha.check(head_facts(model, Batch.of(arguments)))
    if arguments.get("kha_upcycle"):
        added = kha.without_output_gate()
        if not added.mechanisms or not all(m.is_exact_at_start for m in added.mechanisms):
            raise ConfigError(
                f"--kha-upcycle with KHA on {kha}: what it adds must start at the identity, as "
                "shared matrices do: choose another --kha-preset, and no --kha-init random (for "
                "gates: kha-megatron convert upcycle)"
            )
    position = arguments.get("position_embedding_type", Model.position_embedding_type)
    percent = arguments.get("rotary_percent", Model.rotary_percent)
    restored = arguments.get("use_checkpoint_args")  # Megatron restores the rotary embedding
    if kha.attention == "gta" and not restored and (position != "rope" or percent != 0.5):
        raise ConfigError(
            f"--kha-attention gta rotates half of a head, and --position-embedding-type is "
            f"{position} with --rotary-percent {percent}: give "
            "--position-embedding-type rope --rotary-percent 0.5"
        )


def check_layout(
    model: Model, layout: Layout, batch: Batch | None = None, *, trains: bool = True
) -> None:
    """Check that a model can be divided over the ranks of a layout.

    Args:
        batch: None if unknown.
        trains: False for a model that is only evaluated.

    Raises:
        ConfigError: naming both numbers and the nearest possible sizes.
    """
    _check_heads(model, layout.tp)
    _check_sizes(model, layout)
    if trains and model.num_experts and layout.tp > 1 and not layout.sequence_parallel:
        raise ConfigError(
            f"{model.num_experts} experts with --tensor-model-parallel-size {layout.tp} train only "
            "with sequence parallelism: add --sequence-parallel, or use "
            "--tensor-model-parallel-size 1"
        )
    if layout.vpp and layout.pp == 2 and not layout.overlap_p2p:
        # Megatron's parser refuses this; a model built by hand would train to other losses
        raise ConfigError(
            f"{layout.vpp} virtual stages on 2 pipeline ranks without overlapped point-to-point "
            "communication mix up the messages between the two: set overlap_p2p_comm, or use "
            "--pipeline-model-parallel-size 3 or more"
        )
    if model.num_layers is not None:
        _check_pipeline(model.num_layers, layout)
    if layout.world_size is not None:
        _check_ranks(layout, layout.world_size, batch)
    if batch is not None:
        _check_tokens(model, layout, batch)


def excluded(own: Collection[str], new: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments of a recipe that a user's arguments exclude, with the reason.

    Args:
        own: names of the recipe's arguments.
        new: the user's arguments by name.
    """
    chosen: dict[str, tuple[bool, tuple[str, ...]]] = {
        "--tensor-model-parallel-size 1 leaves it nothing to split": (
            new.get("tensor_model_parallel_size") == 1,
            ("sequence_parallel",),
        ),
        "--use-torch-fsdp2 shards without it": (
            bool(new.get("use_torch_fsdp2")),
            ("use_distributed_optimizer", "overlap_param_gather", "expert_model_parallel_size"),
        ),
        "--multi-latent-attention has a key for each query head": (
            bool(new.get("multi_latent_attention")),
            ("group_query_attention", "num_query_groups"),
        ),
        "--fp16 is another precision": (bool(new.get("fp16")), ("bf16",)),
        "--train-samples says how long": (bool(new.get("train_samples")), ("train_iters",)),
    }
    return {
        name: why
        for why, (holds, names) in chosen.items()
        for name in names
        if holds and name in own and name not in new
    }


def _check_heads(model: Model, tp: int) -> None:
    """Check that each rank has whole heads, or is one of several that share one head."""
    heads, groups = model.num_attention_heads, model.num_query_groups
    if groups < 1 or heads % groups:
        raise ConfigError(
            f"{heads} query heads are not a multiple of {groups} key/value heads: "
            f"choose --num-query-groups from {divisors(heads)}"
        )
    for count, what in ((groups, "key/value heads"), (model.latent_heads, "latent heads")):
        legal = [n for n in divisors(heads) if count % n == 0 or n % count == 0]
        if tp in legal:
            continue
        problem = f"{count} {what} neither divide {tp} tensor-parallel ranks nor are divided by it"
        if heads % tp:
            problem = f"{heads} query heads cannot be divided over {tp} tensor-parallel ranks"
        raise ConfigError(f"{problem}: choose --tensor-model-parallel-size from {legal}")


def _check_sizes(model: Model, layout: Layout) -> None:
    """Check everything that is divided over ranks, apart from heads, layers and tokens."""
    tp, expert_tp = layout.tp, layout.expert_tp
    tensor, latent_heads = "tensor-parallel ranks", model.latent_heads
    latent = model.multi_latent_attention
    # with Transformer Engine every rank has the whole down-projections
    cut = latent and (model.transformer_impl != "transformer_engine" or model.mla_down_proj_fusion)
    rows = 0 if latent else model.qkv.rows
    fp8 = (32 if model.fp8_recipe == "mxfp8" else 16) if model.fp8 else 1
    sizes = [
        ("--kv-lora-rank", model.kv_lora_rank * latent, latent_heads, "latent heads", 1),
        ("--num-attention-heads", model.num_attention_heads, latent_heads, "latent heads", 1),
        ("--q-lora-rank", (model.q_lora_rank or 0) * cut, tp, tensor, 1),
        (
            "--kv-lora-rank plus --qk-pos-emb-head-dim",
            (model.kv_lora_rank + model.qk_pos_emb_head_dim) * cut,
            tp,
            tensor,
            1,
        ),
        (
            "the number of rows of the QKV projection,",
            rows,
            tp,
            tensor,
            fp8 if model.kha.rows(model.head_sizes) else 1,
        ),
        ("--kv-channels", model.head_dim, 1, "", 16 if model.fp8 else 1),
        ("--hidden-size", model.hidden_size, 1, "", fp8),
        ("--ffn-hidden-size", model.dense_width * model.has_dense_layers, tp, tensor, fp8),
        (
            "--moe-ffn-hidden-size",
            model.expert_width * bool(model.experts),
            expert_tp,
            "expert-tensor-parallel ranks",
            fp8,
        ),
        ("--moe-shared-expert-intermediate-size", model.shared_width, tp, tensor, 1),
        ("--num-experts", model.experts or 1, layout.ep, "expert-parallel ranks", 1),
        ("--padded-vocab-size", model.padded_vocab_size or 0, tp, tensor, 1),
    ]
    _check_multiples(sizes)
    if model.kha_attention == "gta" and model.kv_channels % 4:
        raise ConfigError(
            f"--kv-channels {model.kv_channels}: grouped-tied attention rotates half of a key, in "
            f"pairs of features: use {_multiples(model.kv_channels, 4)}"
        )


def _check_tokens(model: Model, layout: Layout, batch: Batch) -> None:
    """Check that context parallelism, sequence parallelism and FP8 can divide the tokens."""
    cp, length = layout.cp, batch.seq_length
    ranks = cp * (layout.tp if layout.sequence_parallel else 1)
    sizes = [
        # context parallelism gives each rank an early and a late part of the sequence
        ("--seq-length", length, 2 * cp if cp > 1 else 1, "halves of context-parallel ranks", 1),
        ("--seq-length", length, ranks, "context- and tensor-parallel ranks", 1),
    ]
    if model.fp8:  # Transformer Engine pads the tokens of experts only
        unit = 32 if model.fp8_recipe == "mxfp8" else 8
        tokens = batch.micro_batch_size * length
        sizes.append(("tokens of a microbatch", tokens, ranks, "ranks", unit))
    _check_multiples(sizes)


def _check_multiples(sizes: list[tuple[str, int, int, str, int]]) -> None:
    """Check sizes: name, size, number of parts, what the parts are, unit of each part in FP8."""
    for name, size, count, what, unit in sizes:
        if size % (count * unit):
            problem = f"be divided over {count} {what}" if count > 1 else "be used"
            why = f" in multiples of {unit}, which FP8 needs" if unit > 1 else ""
            raise ConfigError(
                f"{name} {size} cannot {problem}{why}: use {_multiples(size, count * unit)}"
                + (", or train in bf16" if unit > 1 else "")
            )


def _check_pipeline(layers: int, layout: Layout) -> None:
    """Check that the layers fill the pipeline ranks and their virtual stages."""
    if layout.stages is not None:
        found = "".join(layout.stages).count("t")
        if found != layers or len(layout.stages) % layout.pp:
            raise ConfigError(
                f"the pipeline layout {'|'.join(layout.stages)} has {found} layers in "
                f"{len(layout.stages)} stages: expected {layers} layers (t), and a multiple of "
                f"{layout.pp} stages"
            )
        return
    counted = layers + layout.embedding_as_layer + layout.loss_as_layer
    ends = [n for n in (layout.first_stage_layers, layout.last_stage_layers) if n is not None]
    left, ranks = counted - sum(ends), layout.pp - len(ends)
    if left < 0 or ranks < 0 or bool(left) != bool(ranks) or (ranks and left % ranks):
        near = _either([n + len(ends) for n in _near(divisors(max(1, left)), ranks)])
        raise ConfigError(
            f"{left} layers cannot be divided over {ranks} pipeline ranks: use "
            f"--pipeline-model-parallel-size {near}, or another --num-layers"
        )
    for count in (*ends, *([left // ranks] if ranks else [])):
        if count % (layout.vpp or 1):
            raise ConfigError(
                f"{count} layers on a pipeline rank cannot be divided into {layout.vpp} virtual "
                f"stages: use {_either(_near(divisors(count), layout.vpp or 1))}"
            )


def _check_ranks(layout: Layout, world: int, batch: Batch | None) -> None:
    """Check that the parallel sizes divide the ranks, and the replicas the batch."""
    dense = {"tensor": layout.tp, "pipeline": layout.pp, "context": layout.cp}
    experts = {"expert-tensor": layout.expert_tp, "expert": layout.ep, "pipeline": layout.pp}
    for sizes in (dense, experts):
        if world % (ranks := math.prod(sizes.values())):
            product = " x ".join(f"{name} {size}" for name, size in sizes.items())
            raise ConfigError(
                f"{world} ranks cannot be divided by {product} = {ranks}: use "
                f"{_multiples(world, ranks)} ranks, or other parallel sizes"
            )
    if batch is None or batch.global_batch_size is None:
        return
    unit = batch.micro_batch_size * layout.dp
    if batch.global_batch_size % unit:
        raise ConfigError(
            f"--global-batch-size {batch.global_batch_size} is no multiple of --micro-batch-size "
            f"{batch.micro_batch_size} x {layout.dp} data-parallel ranks = {unit}: use "
            f"{_multiples(batch.global_batch_size, unit)}"
        )
    count, group = batch.microbatches(layout.dp), layout.microbatch_group or layout.pp
    if layout.vpp and (count < group or 0 < count % group < layout.pp):
        raise ConfigError(
            f"{count} microbatches cannot fill groups of {group} over {layout.pp} pipeline ranks "
            f"with virtual stages: use a --global-batch-size of "
            f"{_multiples(batch.global_batch_size, unit * group)}"
        )


def _near(legal: Iterable[int], value: int) -> list[int]:
    """Return the nearest legal values below and above."""
    legal = sorted(legal)
    return [n for n in legal if n < value][-1:] + [n for n in legal if n > value][:1]


def _multiples(value: int, unit: int) -> str:
    """Return the positive multiples of ``unit`` around ``value``."""
    low = value // unit * unit
    return _either([n for n in (low, low + unit) if n > 0])


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))
