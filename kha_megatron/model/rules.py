"""Check that model, parallel layout, batch and head mechanisms fit together.

This is used by ``launch``, ``plan``, the training entry point and the attention layer. We only
check KHA and divisibility here, and leave everything else to Megatron.
"""

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from kha_megatron.errors import ConfigError, MissingDependencyError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.fields import read_arguments
from kha_megatron.model.layout import Batch, Layout, divisors
from kha_megatron.model.megatron import model_from_arguments
from kha_megatron.model.run import Training

_READ_SIZES_FROM_FILE = (
    "use_checkpoint_args",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)
_BUILT_IN = ("adam", "sgd")
"""Optimizers that do not require the package emerging-optimizers."""
_REPLICAS = "replicas"


def check_arguments(
    arguments: Mapping[str, Any], world_size: int | None, kha: HeadsConfig | None = None
) -> None:
    """Check the layout, batch and optimizer in Megatron's arguments."""
    model = model_from_arguments(arguments, kha)
    if model is None or any(arguments.get(name) for name in _READ_SIZES_FROM_FILE):
        return
    layout, batch = Layout.from_arguments(arguments, world_size), Batch.from_arguments(arguments)
    check_layout(model, layout, batch)
    has_query_norm = model.multi_latent_attention and model.qk_layernorm
    if has_query_norm and model.q_lora_rank is None and model.transformer_impl == "local":
        raise ConfigError(
            "--qk-layernorm normalizes compressed queries in local layers with "
            "--multi-latent-attention, but there are none. Add --q-lora-rank, or remove "
            "--qk-layernorm."
        )
    training = Training(**read_arguments(Training, arguments))
    name = training.optimizer
    is_distributed = name.startswith("dist_") or training.use_distributed_optimizer
    if name not in _BUILT_IN and is_distributed and not training.bf16:
        raise ConfigError(
            f"--optimizer {name} requires --bf16 to distribute its state. Add --bf16, or use "
            f"--optimizer {name.removeprefix('dist_')} without --use-distributed-optimizer."
        )
    splits = name.endswith("muon") and training.muon_split_qkv
    if splits and not (model.multi_latent_attention or model.qkv.is_stock):
        raise ConfigError(
            f"--optimizer {name} does not support splitting the QKV weight with {model.kha}, which "
            "adds rows to this weight. Please add --muon-no-split-qkv."
        )


def check_optimizer_package(optimizer: str) -> None:
    """Raise MissingDependencyError if ``optimizer`` requires a package that is not installed."""
    if optimizer not in _BUILT_IN and find_spec("emerging_optimizers") is None:
        raise MissingDependencyError("emerging-optimizers", f"--optimizer {optimizer}", "muon")


def check_attention(arguments: Mapping[str, Any], kha: HeadsConfig) -> None:
    """Check that Megatron's arguments are compatible with the head mechanisms.

    Note: if the arguments do not include the model size, only the ranks can check the mechanisms.
    """
    model_from_arguments(arguments, kha)
    added = kha.without_output_gate().mechanisms
    if arguments.get("kha_upcycle") and not (added and all(m.is_exact_at_start for m in added)):
        raise ConfigError(
            "--kha-upcycle requires mechanisms that do not change the model at initialization, got "
            f"{kha}. Choose another --kha-preset and remove --kha-init random. To add gates, use "
            "`kha-megatron convert upcycle`."
        )


def check_layout(model: ModelConfig, layout: Layout, batch: Batch | None = None) -> None:
    """Check that all sizes are divisible as needed, e.g. attention heads by TP ranks."""
    shards = {
        "--tensor-parallel": (layout.weight_shards, layout.tp),
        "--expert-tensor-parallel": (layout.expert_weight_shards, layout.expert_tp),
    }
    for prefix, (count, ranks) in shards.items():
        if count not in (None, ranks):
            raise ConfigError(
                f"{prefix}-num-weight-shards {count} is not supported, because it shards weights "
                "(e.g. linear_qkv) in a way that KHA does not support. Remove this flag."
            )
    heads, groups = model.num_attention_heads, model.num_query_groups
    shared = (groups, model.latent_heads)  # several ranks may share one of these heads
    valid = [n for n in divisors(heads) if all(c % n == 0 or n % c == 0 for c in shared)]
    if heads % groups == 0 and layout.tp not in valid:
        raise ConfigError(
            f"Cannot split {heads} query heads and {groups} key/value heads over {layout.tp} "
            f"tensor-parallel ranks. Valid values of --tensor-model-parallel-size: {valid}."
        )
    if layout.vpp and layout.pp == 2 and not layout.overlap_p2p:
        # Megatron only checks its command line, and models built in Python would get wrong losses
        raise ConfigError(
            "Interleaved pipeline parallelism on 2 ranks requires overlap_p2p_comm, because "
            "messages between the ranks would be mixed up otherwise."
        )
    for name, size, factors in _divided(model, layout, batch):
        unit = math.prod(factors.values())
        if size % unit:
            low = size // unit * unit
            product = " x ".join(f"{count} {what}" for what, count in factors.items() if count > 1)
            nearest = " or ".join(str(multiple) for multiple in (low, low + unit) if multiple)
            raise ConfigError(
                f"{name} ({size}) must be divisible by {unit} ({product})."
                f"{_advise_larger_replicas(size, factors)} Nearest valid values: {nearest}."
            )
    if model.num_layers is not None:
        layout.chunk_layers(model.num_layers)  # raises if this is not possible


def _advise_larger_replicas(size: int, factors: Mapping[str, int]) -> str:
    """Return how to keep the global batch size by changing the parallel layout, if possible."""
    replicas = factors.get(_REPLICAS, 1)
    other_factors = math.prod(factors.values()) // replicas
    for scale in divisors(replicas):
        if size % (other_factors * (replicas // scale)) == 0:
            return (
                f" To keep this value, use {scale} times as many ranks per replica, e.g. with "
                "--pipeline-model-parallel-size or --tensor-model-parallel-size, "
                f"or {scale} times fewer ranks."
            )
    return ""


def _divided(
    model: ModelConfig, layout: Layout, batch: Batch | None
) -> Iterator[tuple[str, int, dict[str, int]]]:
    """Yield ``(name, size, factors)``. The size must be divisible by all factors combined."""
    pipeline = {"pipeline": layout.pp}
    if layout.world_size is not None:
        dense = {"tensor": layout.tp, "context": layout.cp}
        experts = {"expert-tensor": layout.expert_tp, "expert": layout.ep}
        for sizes in (dense, experts):
            yield "The number of ranks", layout.world_size, sizes | pipeline
        if batch and batch.global_batch_size is not None:
            parts = {"--micro-batch-size": batch.micro_batch_size, _REPLICAS: layout.dp}
            if layout.vpp and layout.microbatch_group is None:
                parts |= pipeline
            yield "--global-batch-size", batch.global_batch_size, parts

    block = 32 if model.fp8_recipe == "mxfp8" else 16
    latent, latent_heads = model.multi_latent_attention, {"latent heads": model.latent_heads}
    tensor, fp8 = {"tensor-parallel ranks": layout.tp}, {"for FP8": block if model.fp8 else 1}
    heads, groups = model.num_attention_heads, model.num_query_groups
    yield "--num-attention-heads", heads, {"key/value heads": groups}
    yield "--num-attention-heads", heads, latent_heads
    if latent:
        yield "--kv-lora-rank", model.kv_lora_rank, latent_heads
    # Transformer Engine replicates the down-projections on every rank
    if latent and (model.transformer_impl != "transformer_engine" or model.mla_down_proj_fusion):
        yield "--q-lora-rank", model.q_lora_rank or 0, tensor
        down = model.kv_lora_rank + model.qk_pos_emb_head_dim
        yield "--kv-lora-rank plus --qk-pos-emb-head-dim", down, tensor
    if not latent:
        added = fp8 if model.kha.rows(model.head_sizes) else {}
        yield "The number of rows of the QKV projection", model.qkv.rows, tensor | added
    if model.kha.attention == "gta":
        yield "--kv-channels", model.kv_channels, {"for RoPE on half of each key": 4}
    yield "--kv-channels", model.head_dim, {"for FP8": 16 if model.fp8 else 1}
    yield "--hidden-size", model.hidden_size, fp8
    if model.has_dense_layers:
        yield "--ffn-hidden-size", model.dense_width, tensor | fp8
    if model.experts:
        expert_tensor = {"expert-tensor-parallel ranks": layout.expert_tp}
        yield "--moe-ffn-hidden-size", model.expert_width, expert_tensor | fp8
    yield "--moe-shared-expert-intermediate-size", model.shared_width, tensor
    yield "--num-experts", model.experts or 1, {"expert-parallel ranks": layout.ep}
    yield "--padded-vocab-size", model.padded_vocab_size or 0, tensor

    if batch is not None:
        sequence = {"context-parallel ranks": layout.cp}
        # for load balancing, each context-parallel rank has an early and a late chunk
        yield "--seq-length", batch.seq_length, sequence | {"parts": 2 if layout.cp > 1 else 1}
        sequence |= tensor if layout.sequence_parallel else {}
        yield "--seq-length", batch.seq_length, sequence
        if model.fp8:  # Transformer Engine pads the tokens of experts only
            tokens = batch.micro_batch_size * batch.seq_length
            unit = {"for FP8": 32 if model.fp8_recipe == "mxfp8" else 8}
            yield "The number of tokens of a microbatch", tokens, sequence | unit
