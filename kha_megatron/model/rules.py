"""Check that model, parallel layout, batch and head mechanisms fit together.

This is used by ``launch``, ``plan``, the training entry point and the attention layer. We only
check KHA and divisibility here, and leave everything else to Megatron.
"""

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

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
_BUILT_IN_OPTIMIZERS = ("adam", "sgd")
"""Optimizers that do not require the package emerging-optimizers."""
_REPLICAS = "replicas"
"""Name of the data-parallel size in :class:`_DividedSize`."""
_FP8_MULTIPLE = 16
"""Transformer Engine requires features (and head dims) to be divisible by this for FP8 GEMMs."""
_FP8_TOKENS_MULTIPLE = 8
_MXFP8_MULTIPLE = 32
"""Number of values that share a scale in MXFP8."""


def check_arguments(
    arguments: Mapping[str, Any],
    world_size: int | None,
    kha: HeadsConfig | None = None,
) -> None:
    """Check the layout, batch and optimizer in Megatron's arguments."""
    model = model_from_arguments(arguments, kha)
    if model is None or any(arguments.get(name) for name in _READ_SIZES_FROM_FILE):
        return
    layout = Layout.from_arguments(arguments, world_size)
    batch = Batch.from_arguments(arguments)
    check_layout(model, layout, batch)
    if not arguments.get("kv_channels"):  # derived from the hidden size, as in Megatron
        heads = {"attention heads": model.num_attention_heads}
        _DividedSize("--hidden-size", model.hidden_size, heads).check()
    _check_query_norm(model)
    _check_selected_experts(model)
    training = Training(**read_arguments(Training, arguments))
    _check_optimizer(model, training)
    if training.cross_entropy_loss_fusion and not training.bf16:
        raise ConfigError(
            "--cross-entropy-loss-fusion rounds the gradients of logits to bfloat16 in every "
            "precision. Add --bf16, or remove --cross-entropy-loss-fusion."
        )


def _check_query_norm(model: ModelConfig) -> None:
    if not model.multi_latent_attention or model.transformer_impl != "local":
        return
    has_compressed_queries = model.q_lora_rank is not None
    if model.qk_layernorm and not has_compressed_queries:
        raise ConfigError(
            "--qk-layernorm normalizes compressed queries in local layers with "
            "--multi-latent-attention, but there are none. Add --q-lora-rank, or remove "
            "--qk-layernorm."
        )


def _check_selected_experts(model: ModelConfig) -> None:
    if model.experts and model.moe_router_topk > model.experts:
        raise ConfigError(
            f"--moe-router-topk {model.moe_router_topk} selects more experts than --num-experts "
            f"{model.experts}. Pass at most {model.experts}."
        )


def _check_optimizer(model: ModelConfig, training: Training) -> None:
    name = training.optimizer
    is_built_in = name in _BUILT_IN_OPTIMIZERS
    if training.fp16 and not is_built_in:
        raise ConfigError(f"--optimizer {name} does not support --fp16. Use --bf16.")
    is_distributed = name.startswith("dist_") or training.use_distributed_optimizer
    if is_distributed and not is_built_in and not training.bf16:
        local_optimizer = name.removeprefix("dist_")
        raise ConfigError(
            f"--optimizer {name} requires --bf16 to distribute its state. Add --bf16, or use "
            f"--optimizer {local_optimizer} without --use-distributed-optimizer."
        )
    splits_qkv = name.endswith("muon") and training.muon_split_qkv
    has_stock_qkv = model.multi_latent_attention or model.qkv.is_stock
    if splits_qkv and not has_stock_qkv:
        raise ConfigError(
            f"--optimizer {name} does not support splitting the QKV weight with {model.kha}, which "
            "adds rows to this weight. Please add --muon-no-split-qkv."
        )


def check_optimizer_package(optimizer: str) -> None:
    """Raise MissingDependencyError if ``optimizer`` requires a package that is not installed."""
    if optimizer not in _BUILT_IN_OPTIMIZERS and find_spec("emerging_optimizers") is None:
        raise MissingDependencyError("emerging-optimizers", f"--optimizer {optimizer}", "muon")


def check_attention(arguments: Mapping[str, Any], kha: HeadsConfig) -> None:
    """Check that Megatron's arguments are compatible with the head mechanisms.

    Note: if the arguments do not include the model size, only the ranks can check the mechanisms.
    """
    # building the model raises an error if it does not support the mechanisms
    model_from_arguments(arguments, kha)
    if not arguments.get("kha_upcycle"):
        return
    added_mechanisms = kha.without_output_gate().mechanisms
    is_exact = all(mechanism.is_exact_at_start for mechanism in added_mechanisms)
    if not added_mechanisms or not is_exact:
        raise ConfigError(
            "--kha-upcycle requires mechanisms that do not change the model at initialization, got "
            f"{kha}. Choose another --kha-preset and remove --kha-init random. To add gates, use "
            "`kha-megatron convert upcycle`."
        )


def check_layout(
    model: ModelConfig,
    layout: Layout,
    batch: Batch | None = None,
) -> None:
    """Check that all sizes are divisible as needed, e.g. attention heads by TP ranks."""
    _check_weight_shards("--tensor-parallel-num-weight-shards", layout.weight_shards, layout.tp)
    _check_weight_shards(
        "--expert-tensor-parallel-num-weight-shards",
        layout.expert_weight_shards,
        layout.expert_tp,
    )
    _check_tensor_parallel_size(model, layout)
    if layout.vpp and layout.pp == 2 and not layout.overlap_p2p:
        # Megatron only checks its command line, and models built in Python would get wrong losses
        raise ConfigError(
            "Interleaved pipeline parallelism on 2 ranks requires overlap_p2p_comm, because "
            "messages between the ranks would be mixed up otherwise."
        )
    for divided_size in _list_divided_sizes(model, layout, batch):
        divided_size.check()
    if model.num_layers is not None:
        layout.chunk_layers(model.num_layers)  # raises if this is not possible


def _check_weight_shards(flag: str, shards: int | None, ranks: int) -> None:
    if shards not in (None, ranks):
        raise ConfigError(
            f"{flag} {shards} is not supported, because it shards weights (e.g. linear_qkv) in a "
            "way that KHA does not support. Remove this flag."
        )


def _check_tensor_parallel_size(model: ModelConfig, layout: Layout) -> None:
    heads = model.num_attention_heads
    groups = model.num_query_groups
    if heads % groups:
        return
    valid_sizes = []
    for tp in divisors(heads):
        # several ranks may share a key/value head or a latent head
        splits_groups = groups % tp == 0 or tp % groups == 0
        splits_latent = model.latent_heads % tp == 0 or tp % model.latent_heads == 0
        if splits_groups and splits_latent:
            valid_sizes.append(tp)
    if layout.tp not in valid_sizes:
        raise ConfigError(
            f"Cannot split {heads} query heads and {groups} key/value heads over {layout.tp} "
            f"tensor-parallel ranks. Valid values of --tensor-model-parallel-size: {valid_sizes}."
        )


class _DividedSize(NamedTuple):
    """A size that must be divisible by the product of all factors."""

    name: str
    size: int
    factors: Mapping[str, int]
    """Values by name, e.g. ``{"tensor-parallel ranks": 2}``."""

    def check(self) -> None:
        divisor = math.prod(self.factors.values())
        remainder = self.size % divisor
        if remainder == 0:
            return
        descriptions = []
        for name, count in self.factors.items():
            if count > 1:
                descriptions.append(f"{count} {name}")
        next_smaller = self.size - remainder
        next_larger = next_smaller + divisor
        nearest = f"{next_smaller} or {next_larger}" if next_smaller else f"{next_larger}"
        advice = self._advise_larger_replicas(divisor)
        raise ConfigError(
            f"{self.name} ({self.size}) must be divisible by {divisor} "
            f"({' x '.join(descriptions)}).{advice} Nearest valid values: {nearest}."
        )

    def _advise_larger_replicas(self, divisor: int) -> str:
        """Return how to keep a global batch size by changing the parallel layout, if possible."""
        replicas = self.factors.get(_REPLICAS, 1)
        for scale in divisors(replicas):
            # if each replica has `scale` times as many ranks, there are fewer replicas
            divisor_with_larger_replicas = divisor // scale
            if self.size % divisor_with_larger_replicas == 0:
                return (
                    f" To keep this value, use {scale} times as many ranks per replica, e.g. with "
                    "--pipeline-model-parallel-size or --tensor-model-parallel-size, "
                    f"or {scale} times fewer ranks."
                )
        return ""


def _list_divided_sizes(
    model: ModelConfig,
    layout: Layout,
    batch: Batch | None,
) -> Iterator[_DividedSize]:
    pipeline = {"pipeline": layout.pp}
    if layout.world_size is not None:
        dense = {"tensor": layout.tp, "context": layout.cp}
        experts = {"expert-tensor": layout.expert_tp, "expert": layout.ep}
        yield _DividedSize(
            "The number of ranks",
            layout.world_size,
            dense | pipeline,
        )
        yield _DividedSize(
            "The number of ranks",
            layout.world_size,
            experts | pipeline,
        )
        if batch and batch.global_batch_size is not None:
            factors = {"--micro-batch-size": batch.micro_batch_size, _REPLICAS: layout.dp}
            if layout.vpp and layout.microbatch_group is None:
                # by default, the interleaved schedule works on groups of pp microbatches
                factors |= pipeline
            yield _DividedSize(
                "--global-batch-size",
                batch.global_batch_size,
                factors,
            )
    yield from _list_attention_sizes(model, layout)
    yield from _list_mlp_sizes(model, layout)
    tensor = {"tensor-parallel ranks": layout.tp}
    yield _DividedSize("--padded-vocab-size", model.padded_vocab_size or 0, tensor)
    if batch is not None:
        yield from _list_batch_sizes(model, layout, batch)


def _fp8_factors(model: ModelConfig) -> dict[str, int]:
    if not model.fp8:
        return {}
    is_mxfp8 = model.fp8_recipe == "mxfp8"
    return {"for FP8": _MXFP8_MULTIPLE if is_mxfp8 else _FP8_MULTIPLE}


def _list_attention_sizes(
    model: ModelConfig,
    layout: Layout,
) -> Iterator[_DividedSize]:
    heads = model.num_attention_heads
    tensor = {"tensor-parallel ranks": layout.tp}
    latent_heads = {"latent heads": model.latent_heads}
    yield _DividedSize(
        "--num-attention-heads",
        heads,
        {"key/value heads": model.num_query_groups},
    )
    yield _DividedSize("--num-attention-heads", heads, latent_heads)
    if model.multi_latent_attention:
        yield _DividedSize("--kv-lora-rank", model.kv_lora_rank, latent_heads)
        # Transformer Engine replicates the down-projections on every rank
        if model.transformer_impl != "transformer_engine" or model.mla_down_proj_fusion:
            yield _DividedSize("--q-lora-rank", model.query_rank, tensor)
            rows = model.kv_lora_rank + model.qk_pos_emb_head_dim
            yield _DividedSize(
                "--kv-lora-rank plus --qk-pos-emb-head-dim",
                rows,
                tensor,
            )
    else:
        row_factors = tensor
        if model.kha.rows(model.head_sizes):
            row_factors = tensor | _fp8_factors(model)
        yield _DividedSize(
            "The number of rows of the QKV projection",
            model.qkv.rows,
            row_factors,
        )
    if model.kha.attention == "gta":
        # half of each key has RoPE, which rotates pairs of features
        rotary_factor = {"for RoPE on half of each key": 4}
        yield _DividedSize("--kv-channels", model.kv_channels, rotary_factor)
    yield _DividedSize(
        "--kv-channels",
        model.head_dim,
        {"for FP8": _FP8_MULTIPLE if model.fp8 else 1},
    )


def _list_mlp_sizes(
    model: ModelConfig,
    layout: Layout,
) -> Iterator[_DividedSize]:
    tensor = {"tensor-parallel ranks": layout.tp}
    fp8 = _fp8_factors(model)
    yield _DividedSize("--hidden-size", model.hidden_size, fp8)
    if model.has_dense_layers:
        yield _DividedSize("--ffn-hidden-size", model.dense_width, tensor | fp8)
    if model.experts:
        expert_tensor = {"expert-tensor-parallel ranks": layout.expert_tp}
        yield _DividedSize(
            "--moe-ffn-hidden-size",
            model.expert_width,
            expert_tensor | fp8,
        )
    yield _DividedSize(
        "--moe-shared-expert-intermediate-size",
        model.shared_width,
        tensor,
    )
    expert_ranks = {"expert-parallel ranks": layout.ep}
    yield _DividedSize("--num-experts", model.experts or 1, expert_ranks)


def _list_batch_sizes(
    model: ModelConfig,
    layout: Layout,
    batch: Batch,
) -> Iterator[_DividedSize]:
    context = {"context-parallel ranks": layout.cp}
    # for load balancing, each context-parallel rank has an early and a late chunk
    chunks = {"parts": 2 if layout.cp > 1 else 1}
    yield _DividedSize("--seq-length", batch.seq_length, context | chunks)
    sequence_ranks = context
    if layout.sequence_parallel:
        sequence_ranks = context | {"tensor-parallel ranks": layout.tp}
    yield _DividedSize("--seq-length", batch.seq_length, sequence_ranks)
    if model.fp8:  # Transformer Engine pads the tokens of experts only
        tokens = batch.micro_batch_size * batch.seq_length
        is_mxfp8 = model.fp8_recipe == "mxfp8"
        multiple = {"for FP8": _MXFP8_MULTIPLE if is_mxfp8 else _FP8_TOKENS_MULTIPLE}
        yield _DividedSize(
            "The number of tokens of a microbatch",
            tokens,
            sequence_ranks | multiple,
        )
