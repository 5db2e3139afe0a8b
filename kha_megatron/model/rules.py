"""Which spreads of a model over ranks Megatron can make.

:func:`check_layout` is asked before anything is allocated: by the training entry point (from
Megatron's arguments), by the attention layer (from a ``TransformerConfig``, whoever built it), by
the launcher and by the planner (from a recipe). It refuses what Megatron-Core would refuse later,
or run wrongly, and nothing else; each message names both numbers and a legal neighbour.
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

FP8_MULTIPLE = {"mxfp8": 32}
"""Feature sizes must be multiples of this in FP8; 16 for every other recipe."""


_ELSEWHERE = (
    "use_checkpoint_args",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)
"""Arguments after which a model's sizes are not those of the command line."""


def check_arguments(
    arguments: Mapping[str, Any], world_size: int | None, kha: KHAConfig | None = None
) -> None:
    """Refuse what Megatron's arguments cannot make, before Megatron looks at them.

    What comes from elsewhere (``--use-checkpoint-args``, a heterogeneous model's file), and sizes
    that Megatron demands and are missing, are left to Megatron.

    Args:
        arguments: by name, all or only some.
        world_size: ranks in all.
        kha: what the model's heads have, where that is known.

    Raises:
        ConfigError: see :func:`check_layout` and :func:`check_sharding`.
    """
    model = Model.of(arguments, kha)
    if model is None or any(arguments.get(name) for name in _ELSEWHERE):
        return
    layout = Layout.of(arguments, world_size)
    check_layout(model, layout, Batch.of(arguments))
    training = Training.of(arguments)
    check_sharding(model, layout, training)
    _check_optimizer(model, arguments)
    length = arguments.get("lr_decay_iters") or training.train_iters
    if length and training.lr_warmup_iters >= int(length):
        raise ConfigError(
            f"--lr-warmup-iters {training.lr_warmup_iters} leaves nothing of {length} iterations: "
            f"use fewer than {length}"
        )


def head_facts(model: Model, batch: Batch | None = None) -> HeadFacts:
    """Return what the head mechanisms need to know about a model and its batch.

    Args:
        batch: None if unknown; sequences are then not checked for their length.
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
    if arguments.get("multi_latent_attention") and arguments.get("attention_output_gate"):
        raise ConfigError(
            "--attention-output-gate on multi-latent attention, for which Megatron has none: use "
            "--heads gate.output=element"
        )
    if (model := Model.of(arguments, kha)) is not None:
        model.kha.check(head_facts(model, Batch.of(arguments)))
    if arguments.get("kha_upcycle"):
        _check_start(kha)
    position = arguments.get("position_embedding_type", Model.position_embedding_type)
    percent = arguments.get("rotary_percent", Model.rotary_percent)
    restored = arguments.get("use_checkpoint_args")  # the rotary embedding is Megatron's to restore
    if kha.attention == "gta" and not restored and (position != "rope" or percent != 0.5):
        raise ConfigError(
            f"--kha-attention gta rotates half of a head, and --position-embedding-type is "
            f"{position} with --rotary-percent {percent}: give "
            "--position-embedding-type rope --rotary-percent 0.5"
        )


def _check_start(kha: KHAConfig) -> None:
    """What a trained model gains must leave it what it computes, without a change of its weights.

    Megatron's own output gate is one of the model that is started from.
    """
    added = kha.without_output_gate()
    if not added.mechanisms or not all(m.is_exact_at_start for m in added.mechanisms):
        raise ConfigError(
            f"--kha-upcycle with KHA on {kha}: what it adds must start at the identity, as shared "
            "matrices do: choose another --kha-preset, and no --kha-init random (for gates: "
            "kha-megatron convert upcycle)"
        )


def check_layout(
    model: Model,
    layout: Layout,
    batch: Batch | None = None,
    *,
    trains: bool = True,
) -> None:
    """Refuse a spread of the model that cannot be made, or that Megatron would run wrongly.

    Args:
        batch: None where it is not known.
        trains: False for a model that may only be evaluated.

    Raises:
        ConfigError: naming both numbers, and what would be legal.
    """
    check_head_layout(model.num_attention_heads, model.num_query_groups, layout.tp)
    _check_tied_keys(model)
    _check_pattern(model)
    _check_whole(model.latent_heads, "latent heads", model.num_attention_heads, layout.tp)
    _check_widths(model, layout)
    _check_sequence_parallel(model, layout, trains)
    _check_pipeline(model, layout)
    _check_world(layout)
    if batch is not None:
        _check_batch(layout, batch)
    if model.fp8:
        _check_fp8(model, layout)
        if batch is not None:
            _check_fp8_tokens(model, layout, batch)


def excluded(own: Collection[str], new: Mapping[str, Any]) -> dict[str, str]:
    """Which arguments of a recipe's own a user's words put out of use, with the reason.

    Args:
        own: names of the recipe's arguments.
        new: the user's, by name.
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


def _check_optimizer(model: Model, arguments: Mapping[str, Any]) -> None:
    """Muon takes the rows of queries, keys and values apart, where Megatron has them."""
    name = str(arguments.get("optimizer") or "adam")
    splits = name.endswith("muon") and arguments.get("muon_split_qkv", True)
    if splits and not (model.multi_latent_attention or model.qkv.is_stock):
        raise ConfigError(
            f"--optimizer {name} splits the QKV projection as Megatron lays it out, and that of "
            f"{model.kha} has other rows: add --muon-no-split-qkv, or use --optimizer adam"
        )


def check_sharding(model: Model, layout: Layout, training: Training) -> None:
    """Refuse what PyTorch's FSDP2 cannot be combined with, before Megatron's assertions do.

    Raises:
        ConfigError: naming what to remove or to add.
    """
    if not training.use_torch_fsdp2:
        return
    remedies = {
        "MCore's distributed optimizer: remove --use-distributed-optimizer": (
            training.use_distributed_optimizer
        ),
        "tied embeddings: add --untie-embeddings-and-output-weights": model.tied_embeddings,
        f"expert parallelism over {layout.ep} ranks: use --expert-model-parallel-size 1": (
            layout.ep > 1
        ),
        f"pipeline parallelism over {layout.pp} ranks: use --pipeline-model-parallel-size 1": (
            layout.pp > 1
        ),
        "fused accumulation of gradients: add --no-gradient-accumulation-fusion": (
            training.gradient_accumulation_fusion
        ),
        "fp16: use --bf16": training.fp16,
    }
    for remedy, refused in remedies.items():
        if refused:
            raise ConfigError(f"--use-torch-fsdp2 does not go with {remedy}")


def check_head_layout(num_attention_heads: int, num_query_groups: int, tp: int) -> None:
    """Refuse a split of heads over tensor-parallel ranks that Megatron cannot make.

    Args:
        num_attention_heads: query heads of the whole layer.
        num_query_groups: key/value heads of the whole layer.
        tp: tensor-parallel size.

    Raises:
        ConfigError: naming both numbers and the nearest legal sizes.
    """
    heads, groups = num_attention_heads, num_query_groups
    if groups < 1 or heads % groups:
        raise ConfigError(
            f"{heads} query heads are not a multiple of {groups} key/value heads: "
            f"choose --num-query-groups from {divisors(heads)}"
        )
    _check_whole(groups, "key/value heads", heads, tp)


def _check_whole(count: int, what: str, heads: int, tp: int) -> None:
    """A rank must hold whole heads of a kind, or be one of several that share one."""
    legal = [n for n in divisors(heads) if count % n == 0 or n % count == 0]
    if tp in legal:
        return
    problem = f"{count} {what} neither divide {tp} tensor-parallel ranks nor are divided by them"
    if heads % tp:
        problem = f"{heads} query heads cannot be divided over {tp} tensor-parallel ranks"
    raise ConfigError(f"{problem}: choose --tensor-model-parallel-size from {legal}")


def _check_tied_keys(model: Model) -> None:
    if model.kha_attention == "gta" and model.kv_channels % 4:
        raise ConfigError(
            f"--kv-channels {model.kv_channels}: grouped-tied attention rotates half of a key, in "
            f"pairs of features: use {_multiples(model.kv_channels, 4)}"
        )


def _check_pattern(model: Model) -> None:
    freq = model.moe_layer_freq
    if model.num_layers and not isinstance(freq, int) and len(freq) != model.num_layers:
        raise ConfigError(
            f"--moe-layer-freq names {len(freq)} layers, the model has {model.num_layers}: "
            f"name {model.num_layers}"
        )


def _check_widths(model: Model, layout: Layout) -> None:
    """What latent heads, tensor and expert parallelism cut, besides the heads themselves."""
    rows = model.qkv.rows
    if rows % layout.tp:  # only with fewer key/value heads than ranks
        raise ConfigError(
            f"the {rows} rows of the QKV projection cannot be divided over {layout.tp} "
            f"tensor-parallel ranks: choose --tensor-model-parallel-size from "
            f"{_near(divisors(rows), layout.tp)}"
        )
    latent = ("latent heads", "--kha-latent-heads", model.latent_heads)
    tensor = ("tensor-parallel ranks", "--tensor-model-parallel-size", layout.tp)
    experts = ("expert-parallel ranks", "--expert-model-parallel-size", layout.ep)
    expert = (
        "expert-tensor-parallel ranks",
        "--expert-tensor-parallel-size",
        layout.expert_tp,
    )
    joint = model.kv_lora_rank + model.qk_pos_emb_head_dim
    # with Transformer Engine every rank has a latent's down-projections whole
    cut = model.transformer_impl != "transformer_engine" or model.mla_down_proj_fusion
    cut &= model.multi_latent_attention
    for holds, flag, width, (parts, size_flag, size) in (
        (model.multi_latent_attention, "--kv-lora-rank", model.kv_lora_rank, latent),
        (True, "--num-attention-heads", model.num_attention_heads, latent),
        (cut, "--q-lora-rank", model.q_lora_rank, tensor),
        (cut, "--kv-lora-rank plus --qk-pos-emb-head-dim", joint, tensor),
        (model.has_dense_layers, "--ffn-hidden-size", model.dense_width, tensor),
        (model.experts, "--moe-ffn-hidden-size", model.expert_width, expert),
        (model.experts, "--moe-shared-expert-intermediate-size", model.shared_width, tensor),
        (True, "--num-experts", model.experts, experts),
        (True, "--padded-vocab-size", model.padded_vocab_size, tensor),
    ):
        if holds and width and width % size:
            raise ConfigError(
                f"{flag} {width} cannot be divided over {size} {parts}: use "
                f"{_multiples(width, size)}, or {size_flag} "
                f"{_either(_near(divisors(width), size))}"
            )
    if layout.ep > 1 and not model.experts:
        raise ConfigError(
            f"--expert-model-parallel-size {layout.ep} on a model without experts: "
            "use 1, or give --num-experts"
        )


def _check_sequence_parallel(model: Model, layout: Layout, trains: bool) -> None:
    if layout.sequence_parallel and layout.tp == 1:
        raise ConfigError(
            "--sequence-parallel with --tensor-model-parallel-size 1 has no ranks to split the "
            "sequence over: remove it, or use --tensor-model-parallel-size 2"
        )
    if trains and model.num_experts and layout.tp > 1 and not layout.sequence_parallel:
        raise ConfigError(
            f"{model.num_experts} experts with --tensor-model-parallel-size {layout.tp} train only "
            "with sequence parallelism: add --sequence-parallel, or use "
            "--tensor-model-parallel-size 1"
        )


def _check_pipeline(model: Model, layout: Layout) -> None:
    pp, vpp = layout.pp, layout.vpp
    if vpp is not None:
        if pp == 1:
            raise ConfigError(
                f"{vpp} virtual pipeline stages on --pipeline-model-parallel-size 1: "
                "use 2, or remove the virtual stages"
            )
        if pp == 2 and not layout.overlap_p2p:
            # Megatron's command line asserts it; a model built by hand trains to other losses
            raise ConfigError(
                f"{vpp} virtual stages on 2 pipeline ranks without overlapped point-to-point "
                "communication mix up the messages between the two: set overlap_p2p_comm, or use "
                "--pipeline-model-parallel-size 3 or more"
            )
    if model.num_layers is None:
        return
    if layout.stages is not None:
        _check_stages(model.num_layers, layout.stages, pp)
    else:
        _check_split(model.num_layers, layout)


def _check_split(layers: int, layout: Layout) -> None:
    """Layers over pipeline ranks, the first and last of which may have a number of their own."""
    ends = {"first": layout.first_stage_layers, "last": layout.last_stage_layers}
    own = {name: count for name, count in ends.items() if count is not None}
    extra = {"embedding": layout.embedding_as_layer, "loss": layout.loss_as_layer}
    names = [f"the {name}" for name, counted in extra.items() if counted]
    if own and names:
        raise ConfigError(
            f"a number of layers for the {' and '.join(own)} pipeline stage together with counting "
            f"{' and '.join(names)} as a layer: use one of the two"
        )
    for name, count in own.items():
        if count < 1:
            raise ConfigError(f"{count} layers in the {name} pipeline stage: use 1 or more")
    left, ranks = layers - sum(own.values()) + len(names), layout.pp - len(own)
    what = f"{left} layers"
    if names:
        what = f"{layers} layers and {' and '.join(names)}, {left} in all,"
    elif own:
        what = f"the {left} layers that are left of {layers}"
    if left < 0 or ranks < 0 or bool(left) != bool(ranks):
        raise ConfigError(
            f"{what} for {ranks} pipeline ranks beside the {' and '.join(own)} stage: change "
            f"{' or '.join(f'--decoder-{name}-pipeline-num-layers' for name in own)} or "
            "--pipeline-model-parallel-size"
        )
    if ranks and left % ranks:
        legal = _either([n + len(own) for n in _near(divisors(left), ranks)])
        hint = (
            ""
            if own or names or (left + 1) % ranks
            else (", or count the loss as a layer (--account-for-loss-in-pipeline-split)")
        )
        raise ConfigError(
            f"{what} cannot be divided over {ranks} pipeline ranks: use "
            f"--pipeline-model-parallel-size {legal}, or --num-layers "
            f"{_multiples(left, ranks, layers - left)}{hint}"
        )
    for count in {*own.values(), *([left // ranks] if ranks else [])}:
        if layout.vpp and count % layout.vpp:
            raise ConfigError(
                f"{count} layers on a pipeline rank cannot be divided into {layout.vpp} virtual "
                f"stages: use {_either(_near(divisors(count), layout.vpp))} virtual stages"
            )


def _check_stages(layers: int, stages: tuple[str, ...], pp: int) -> None:
    text = "|".join(stages)
    if len(stages) % pp:
        raise ConfigError(
            f"the pipeline layout {text} has {len(stages)} stages, which cannot be divided over "
            f"{pp} pipeline ranks: write {_multiples(len(stages), pp)} stages, or use "
            f"--pipeline-model-parallel-size {_either(_near(divisors(len(stages)), pp))}"
        )
    letters = "".join(stages)
    if letters.count("t") != layers:
        raise ConfigError(
            f"the pipeline layout {text} has {letters.count('t')} layers, the model {layers}: "
            f"write {layers} t"
        )
    if letters.count("E") != 1 or letters.count("L") != 1 or letters.strip("EL") != letters[1:-1]:
        raise ConfigError(
            f"the pipeline layout {text} must begin with its only E (embedding) and end with its "
            f"only L (loss), not {letters[:1]} and {letters[-1:]}"
        )


def _check_world(layout: Layout) -> None:
    world = layout.world_size
    if world is None:
        return
    dense = {"tensor": layout.tp, "pipeline": layout.pp, "context": layout.cp}
    experts = {"expert-tensor": layout.expert_tp, "expert": layout.ep, "pipeline": layout.pp}
    for sizes, other in (
        (dense, "other parallel sizes"),
        (experts, "another --expert-model-parallel-size or --expert-tensor-parallel-size"),
    ):
        if world % (ranks := math.prod(sizes.values())):
            product = " x ".join(f"{name} {size}" for name, size in sizes.items())
            raise ConfigError(
                f"{world} ranks cannot be divided by {product} = {ranks}: use "
                f"{_multiples(world, ranks)} ranks, or {other}"
            )


def _check_batch(layout: Layout, batch: Batch) -> None:
    length = batch.seq_length
    # halves, because context parallelism gives each rank an early and a late piece
    pieces = layout.cp * (2 if layout.cp > 1 else 1)
    if length % pieces:
        raise ConfigError(
            f"--seq-length {length} is no multiple of 2 x --context-parallel-size {layout.cp} = "
            f"{pieces}: use {_multiples(length, pieces)}"
        )
    if layout.sequence_parallel and length // layout.cp % layout.tp:
        raise ConfigError(
            f"the {length // layout.cp} tokens that each context-parallel rank has of --seq-length "
            f"{length} cannot be divided over {layout.tp} tensor-parallel ranks, as "
            f"--sequence-parallel asks: use {_multiples(length, layout.tp * pieces)}"
        )
    if layout.world_size is None or batch.global_batch_size is None:
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


def _check_fp8(model: Model, layout: Layout) -> None:
    unit = FP8_MULTIPLE.get(model.fp8_recipe, 16)
    sizes = [("--kv-channels", model.head_dim, 16), ("--hidden-size", model.hidden_size, unit)]
    if model.has_dense_layers and model.ffn_hidden_size:
        sizes.append(("--ffn-hidden-size", model.ffn_hidden_size, unit * layout.tp))
    if model.num_experts and model.moe_ffn_hidden_size:
        sizes.append(("--moe-ffn-hidden-size", model.moe_ffn_hidden_size, unit * layout.expert_tp))
    for flag, size, multiple in sizes:
        if size % multiple:
            ranks = multiple // (16 if flag == "--kv-channels" else unit)
            what = f"{multiple}" if ranks == 1 else f"{unit} on each of {ranks} ranks = {multiple}"
            raise ConfigError(
                f"{flag} {size} is no multiple of {what}, which FP8 needs: use "
                f"{_multiples(size, multiple)}, or train in bf16"
            )
    if model.multi_latent_attention or not model.qkv.extra:
        return
    rows, tp = model.qkv.rows, layout.tp
    if rows % (unit * tp):
        legal = [n for n in divisors(model.num_attention_heads) if rows % (unit * n) == 0]
        fewer = (
            f"use --tensor-model-parallel-size {_either(_near(legal, tp))}, or " if legal else ""
        )
        raise ConfigError(
            f"the {rows} rows of the QKV projection with {model.kha} over {tp} tensor-parallel "
            f"ranks are no multiple of {unit} on each, which FP8 needs: {fewer}train in bf16"
        )


def _check_fp8_tokens(model: Model, layout: Layout, batch: Batch) -> None:
    """Transformer Engine pads the tokens of experts, and no others: it stops at the first layer."""
    unit = FP8_MULTIPLE.get(model.fp8_recipe, 8)  # E8M0 scales lie along tokens too
    ranks = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    tokens = batch.micro_batch_size * batch.seq_length // ranks
    if tokens % unit:
        over = f" over {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"{batch.micro_batch_size} x {batch.seq_length} tokens of a microbatch{over} are no "
            f"multiple of {unit} on each, which FP8 needs: use a --seq-length of "
            f"{_multiples(batch.seq_length, unit * ranks)}, or train in bf16"
        )


def _near(legal: Iterable[int], value: int) -> list[int]:
    """The nearest legal values below and above."""
    legal = sorted(legal)
    return [n for n in legal if n < value][-1:] + [n for n in legal if n > value][:1]


def _multiples(value: int, unit: int, offset: int = 0) -> str:
    """The multiples of ``unit`` around ``value``, ``offset`` added to each."""
    low = value // unit * unit
    return _either([n + offset for n in (low, low + unit) if n > 0])


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))
