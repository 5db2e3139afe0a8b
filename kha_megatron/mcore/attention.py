"""Self-attention (MHA, MQA or GQA) with Knocking-Heads Attention.

KHA runs right after the QKV projection, before QK-norm (section 4.5.2 of the paper). In this order,
linear matrices of a trained model can be folded into the projection.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import mpu
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.transformer.attention import Attention, SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank
from torch import Tensor
from torch.nn import Module

from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadSizes, HeadTensor, Knock, Mechanism, Projection
from kha_megatron.heads.config import AttentionKind, HeadsConfig
from kha_megatron.heads.mechanism import Stage, apply_stage
from kha_megatron.heads.registry import observe_output_gate
from kha_megatron.mcore.head_inputs import InputProjection, NormedInput
from kha_megatron.mcore.head_ranks import HeadRanks, layers_per_attention
from kha_megatron.mcore.hooks import ProjectionHook
from kha_megatron.mcore.knocking import KnockingHeads, MechanismWeight, MechanismWeights
from kha_megatron.mcore.qkv import QKVSplit
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.layout import Layout
from kha_megatron.model.megatron import model_from_config
from kha_megatron.model.qkv import QKVLayout
from kha_megatron.model.rules import check_layout

type Output = tuple[Tensor, Tensor | None]
"""Output and bias of a linear layer. Megatron adds the bias later."""


class KnockedAttention(Attention):
    """Mixin that adds KHA and other head mechanisms to Megatron's attention classes."""

    kind: AttentionKind | None = None
    """The :attr:`HeadsConfig.attention` that this class implements."""
    first_projection = "linear_qkv"
    """Name of the module that the input norm may be fused into."""
    folded_projections: tuple[Projection, ...] = ()
    """Projections that need no KHA, because ``step_folding`` has currently folded it."""
    kha: HeadsConfig

    def _add_knocking(self, kha: HeadsConfig) -> None:
        """Build the modules of all mechanisms. Must be called after Megatron's constructor."""
        self.kha = kha
        self._earlier_outputs: dict[str, Tensor] = {}  # activations needed by later stages
        self.head_ranks = HeadRanks(
            self.config,
            self.pg_collection,
            is_training=lambda: self.training,
            adds_loss=any(mechanism.adds_loss for mechanism in kha.mechanisms),
        )
        sizes = model_from_config(self.config, kha).head_sizes
        self.value_dim = sizes.dim("value")
        self._add_mechanisms(sizes)
        self.projection_hooks: list[ProjectionHook] = []
        if self._acts_at("output"):
            hook = ProjectionHook(self, "linear_proj", self._before_projection, before=True)
            self.projection_hooks.append(hook)

    def _add_mechanisms(self, sizes: HeadSizes) -> None:
        """Build the weights of all mechanisms, except for a gate that Megatron applies."""
        self.knockings: dict[Projection, KnockingHeads] = {}
        self.mechanisms: list[tuple[Mechanism, MechanismWeights]] = []
        self.input_projections: list[str] = []
        for mechanism in _without_stock_gate(self.kha, self.config).mechanisms:
            tensors = mechanism.tensors(sizes)
            if isinstance(mechanism, Knock):
                self._add_knock(mechanism, tensors)
            else:
                self._add_mechanism(mechanism, tensors)
        if self.input_projections:
            self.normed_input = NormedInput(self, self.first_projection)

    def _add_knock(self, knock: Knock, tensors: Iterable[HeadTensor]) -> None:
        for tensor in tensors:
            projection = tensor.heads
            build = partial(KnockingHeads, variant=knock.variants[projection])
            self.knockings[projection] = self._add_weight(tensor, build)

    def _add_mechanism(self, mechanism: Mechanism, tensors: Iterable[HeadTensor]) -> None:
        weights = self._add_mechanism_weights(tensors)
        attention_layer = (self.layer_number - 1) // layers_per_attention(self.config)
        layer_mechanism = mechanism.for_layer(attention_layer)
        self.mechanisms.append((layer_mechanism, weights))
        if layer_mechanism.acts_at("core"):
            self.core_attention.set_mechanism(layer_mechanism, weights)

    def _add_mechanism_weights(self, tensors: Iterable[HeadTensor]) -> MechanismWeights:
        weights = MechanismWeights()
        for tensor in tensors:
            if tensor.reads_input:
                self._add_weight(tensor, InputProjection)
                self.input_projections.append(tensor.name)
            else:
                weights[tensor.name] = self._add_weight(tensor, MechanismWeight)
        return weights

    def _add_weight(self, tensor: HeadTensor, build: Callable[..., Any]) -> Any:
        """Build the module of a parameter and register it under the parameter's name."""
        module = build(
            self.config,
            tensor,
            layer_number=self.layer_number,
            init_seed=self.kha.init_seed,
            tp_group=self.tp_group,
        )
        setattr(self, tensor.name, module)
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        for hook in self.projection_hooks:
            hook.follow(self)
        output, bias = super().forward(*args, **kwargs)
        if self.mechanisms:
            return self._after_projection(output, bias)
        return output, bias

    def _acts_at(self, stage: Stage) -> bool:
        return any(mechanism.acts_at(stage) for mechanism, _ in self.mechanisms)

    def _read_input(self, hidden_states: Tensor, mechanism_heads: Mapping[str, Tensor]) -> None:
        """Compute the projections of the layer input that mechanisms need (e.g. for gates).

        Must run after ``linear_qkv``, which may contain the input norm. ``mechanism_heads`` are the
        outputs of its rows for mechanisms, by name.
        """
        self._earlier_outputs = dict(mechanism_heads)
        if self.input_projections:
            normed = self.normed_input(hidden_states)
            for name in self.input_projections:
                projection = getattr(self, name)
                self._earlier_outputs[name] = projection(normed)

    def _apply_stage(self, stage: Stage, **tensors: Tensor) -> Iterable[Tensor]:
        return apply_stage(
            stage,
            self.mechanisms,
            tensors,
            self._earlier_outputs,
            self.head_ranks,
        )

    def _before_projection(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        core_output, *others = inputs
        heads = core_output.unflatten(-1, (-1, self.value_dim))
        (heads,) = self._apply_stage("output", output=heads)
        core_output = heads.flatten(-2)
        return core_output, *others

    def _after_projection(self, output: Tensor, bias: Tensor | None) -> Output:
        if self._acts_at("dense"):
            if bias is not None:  # the gate applies to the bias, too
                output = output + bias
                bias = None
            (output,) = self._apply_stage("dense", dense=output)
        self._earlier_outputs = {}  # free the activations
        return output, bias

    def flash_decode_and_prefill(self, *args: Any, **kwargs: Any) -> Tensor:
        for mechanism, _ in self.mechanisms:
            if mechanism.acts_at("core"):
                raise ConfigError(
                    f"{mechanism} does not support dynamic batching, which requires fused "
                    "attention kernels. Please use static batching."
                )
        return super().flash_decode_and_prefill(*args, **kwargs)

    def _copy_views(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Clone views of a larger buffer (only with ``offload_core_attention``).

        Offloading frees the buffer's storage, but gates and KHA need it in their backward pass.
        """
        if not getattr(self, "offload_core_attention", False):
            return tensors
        copies = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() > tensor.nbytes:
                tensor = tensor.clone()
            copies.append(tensor)
        return tuple(copies)

    def _knock(self, projection: Projection, x: Tensor) -> Tensor:
        if projection in self.knockings:
            return self.knockings[projection](x)
        return x


def _without_stock_gate(kha: HeadsConfig, config: TransformerConfig) -> HeadsConfig:
    """Remove the output gate if Megatron applies it."""
    if config.attention_output_gate:
        return kha.without_output_gate()
    return kha


class KHASelfAttention(KnockedAttention, SelfAttention):
    """Drop-in replacement for Megatron's ``SelfAttention`` that applies KHA.

    Raises:
        ConfigError: If the Transformer config is incompatible with ``kha``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *args: Any,
        kha: HeadsConfig,
        **kwargs: Any,
    ) -> None:
        kha = kha.with_output_gate(config.attention_output_gate)
        attention_layers = config.num_layers // layers_per_attention(config)
        check_config(config, kha, layers=attention_layers)
        model = model_from_config(config, kha)
        layout = model.qkv
        if kha.own_projections:
            submodules = _set_key_width(submodules, config, model.normed_dim)
        if not _is_built_by_megatron(layout, config):
            linear_qkv = _with_rows(submodules.linear_qkv, layout)
            submodules = replace(submodules, linear_qkv=linear_qkv)
        super().__init__(config, submodules, *args, **kwargs)
        self.linear_qkv_out_dim = layout.rows
        self.key_hidden_size = model.normed_dim
        self._add_knocking(kha)
        self.split = QKVSplit(layout, self.tp_group)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, ...]:
        """Project the hidden states to query, key and value, and apply KHA.

        Also returns the gate if ``output_gate`` is True. All shapes are as in ``SelfAttention``,
        i.e. ``[sequence, batch, heads, head_dim]``.
        """
        heads = self._project(hidden_states)
        layout = self.split.layout
        mechanism_heads = {}
        for rows in layout.mechanism_rows:
            mechanism_heads[rows.name] = heads[rows.name]
        self._read_input(hidden_states, mechanism_heads)
        self._use_own_projections(heads)
        query, key, value = self._apply_stage(
            "qkv",
            query=heads["query"],
            key=heads["key"],
            value=heads["value"],
        )
        query = self._normed(self.q_layernorm, query)
        key = self._normed(self.k_layernorm, key)
        query, key, value = self._copy_views(query, key, value)
        if self.config.test_mode:
            self.run_realtime_tests()
        if not output_gate:
            return query, key, value
        assert layout.stock_gate is not None
        gate = heads[layout.stock_gate]
        if self.head_ranks.listeners:  # Megatron applies this gate, so report it here
            observe_output_gate(gate.sigmoid, self.head_ranks)
        return query, key, value, gate

    def _project(self, hidden_states: Tensor) -> dict[str, Tensor]:
        """Return the heads of each part of ``linear_qkv``, with KHA."""
        mixed_qkv, _ = self.linear_qkv(hidden_states)
        groups = self.split.groups(mixed_qkv)
        heads = self.split(groups)
        for projection, knocking in self.knockings.items():
            if projection not in self.folded_projections:
                heads[projection] = knocking(heads[projection])
        return heads

    def _use_own_projections(self, heads: dict[str, Tensor]) -> None:
        """Replace queries or keys by those that a mechanism projects itself."""
        for mechanism, _ in self.mechanisms:
            for projection in mechanism.own_projections:
                name = f"{mechanism.name}_{projection}"
                projected = self._earlier_outputs[name]
                if projection == "key":  # all heads share one key
                    key_heads = heads["value"].shape[2]
                    projected = projected.expand(-1, -1, key_heads, -1)
                heads[projection] = projected

    @staticmethod
    def _normed(norm: Any, heads: Tensor) -> Tensor:
        if norm is None:
            return heads
        return norm(heads)


def _is_built_by_megatron(layout: QKVLayout, config: TransformerConfig) -> bool:
    """Return whether Megatron builds ``linear_qkv`` with exactly the rows of ``layout``."""
    builds_gate = bool(config.attention_output_gate)
    has_gate = layout.stock_gate is not None
    return layout.is_stock and builds_gate == has_gate


def _set_key_width(
    submodules: SelfAttentionSubmodules,
    config: TransformerConfig,
    width: int,
) -> SelfAttentionSubmodules:
    """Change the head dim of queries and keys in core attention and QK-norms.

    The softmax scale becomes ``width ** -0.5`` unless it is set explicitly.
    """
    default_norm = TENorm if config.qk_layernorm else None
    query_norm = submodules.q_layernorm or default_norm
    key_norm = submodules.k_layernorm or default_norm
    resized_norms = {}
    if query_norm not in (None, IdentityOp):
        resized_norms["q_layernorm"] = _resize_norm(query_norm, width)
    if key_norm not in (None, IdentityOp):
        resized_norms["k_layernorm"] = _resize_norm(key_norm, width)
    core_attention = _resize_core(submodules.core_attention, width)
    return replace(submodules, core_attention=core_attention, **resized_norms)


def _resize_norm(build_norm: Callable[..., Module], width: int) -> Callable[..., Module]:
    """Wrap the builder of a QK-norm to use ``width`` instead of the head dim."""

    def build_resized(*, hidden_size: int, **options: Any) -> Module:
        return build_norm(hidden_size=width, **options)

    return build_resized


def _resize_core(build_core: Callable[..., Any], width: int) -> Callable[..., Any]:
    """Wrap the builder of core attention to use ``width`` as head dim of queries and keys."""

    def build_resized(
        *,
        config: TransformerConfig,
        softmax_scale: float | None,
        **options: Any,
    ) -> Any:
        if softmax_scale is None:
            softmax_scale = width**-0.5
        options["k_channels"] = width
        options["v_channels"] = config.kv_channels
        return build_core(
            config=config,
            softmax_scale=softmax_scale,
            **options,
        )

    return build_resized


def _with_rows(build: Callable[..., Module], layout: QKVLayout) -> Callable[..., Module]:
    """Wrap a ``linear_qkv`` builder to create the rows of ``layout``, with zeros as padding."""

    def build_linear(
        inputs: int,
        outputs: int,
        *,
        init_method: Any,
        tp_group: Any,
        **options: Any,
    ) -> Any:
        def initialize(weight: Tensor) -> None:
            init_method(weight)
            rows = len(weight)
            is_shard = rows < layout.rows  # CPU initialization passes the rows of all ranks
            first_row = get_pg_rank(tp_group) * rows if is_shard else 0
            _zero_padding(weight, first_row, layout)

        return build(
            inputs,
            layout.rows,
            init_method=initialize,
            tp_group=tp_group,
            **options,
        )

    return build_linear


@torch.no_grad()
def _zero_padding(weight: Tensor, first_row: int, layout: QKVLayout) -> None:
    """Zero the padding of all groups in some rows of ``linear_qkv``, starting at ``first_row``."""
    padding = layout.padding
    for group in range(layout.groups):
        group_start = group * layout.group_rows - first_row  # negative if on an earlier rank
        start = max(0, group_start + padding.start)
        stop = max(0, group_start + padding.stop)
        weight[start:stop] = 0


_UNSUPPORTED_OPTIONS: dict[str | None, tuple[str, ...]] = {
    "gta": ("attention_output_gate", "add_bias_linear", "add_qkv_bias", "no_rope_freq"),
    "gla": ("layernorm_zero_centered_gamma", "cache_mla_latents"),
}
"""Fields of ``TransformerConfig`` that an attention kind does not support."""


def check_config(
    config: TransformerConfig,
    kha: HeadsConfig,
    *,
    layers: int = 0,
) -> None:
    """Raise ConfigError if ``config`` and ``kha`` cannot be combined.

    Args:
        layers (int): Number of layers in the model (0 if unknown).
    """
    model = model_from_config(config, kha)
    facts = replace(model.head_facts, layers=layers)
    kha.check(facts)
    check_layout(model, Layout.from_config(config))
    if config.fused_single_qkv_rope:
        raise ConfigError(
            "fused_single_qkv_rope is not supported, because KHA must be applied before RoPE. "
            "Remove fused_single_qkv_rope."
        )
    if config.qk_clip and not _is_supported_by_qk_clip(model, kha):
        raise ConfigError(
            f"--qk-clip does not support {kha}, because it requires the rows of Megatron's QKV "
            "weight and linear matrices. Remove --qk-clip."
        )
    if kha.own_projections and (config.add_bias_linear or config.add_qkv_bias):
        raise ConfigError(
            f"The projections of {kha} have no biases. Remove --add-qkv-bias and --add-bias-linear."
        )
    if kha.attention == "gla" and config.qk_layernorm and config.normalization != "RMSNorm":
        raise ConfigError(
            f"attention=gla does not support normalization={config.normalization}. Use RMSNorm."
        )
    for option in _UNSUPPORTED_OPTIONS.get(kha.attention, ()):
        value = getattr(config, option)
        if value:
            raise ConfigError(
                f"attention={kha.attention} does not support {option}={value}. Disable it."
            )


def _is_supported_by_qk_clip(model: ModelConfig, kha: HeadsConfig) -> bool:
    """Return whether queries and keys are linear in the rows of Megatron's QKV weight."""
    for projection in ("query", "key"):
        if kha.variants.get(projection) not in (None, "linear"):
            return False
    if model.multi_latent_attention:
        return True
    return model.qkv.is_stock and not model.qkv.mechanism_rows


def describe_model(models: list[Any], kha: HeadsConfig) -> str:
    """Summarize the KHA layers of a model in one line, e.g. for logging::

        knocks value=mlp in 12 of 12 layers: 589,824 parameters added

    The numbers are summed over pipeline stages, so all ranks must call this function.

    Raises:
        ConfigError: If some attention layer was not built with ``kha``.
    """
    local_counts = _count_layers(models, kha)
    totals = torch.tensor(local_counts, device=torch.cuda.current_device())
    torch.distributed.all_reduce(totals, group=mpu.get_pipeline_model_parallel_group())
    counts = _LayerCounts(*totals.tolist())
    is_requested = len(kha.mechanisms) > 0 or kha.attention is not None
    if counts.wrong or (is_requested and not counts.layers):
        raise ConfigError(
            f"{counts.wrong} of {counts.layers} layers were built without the requested KHA config "
            f"({kha}). Check --spec and pre-wrap hooks."
        )
    return (
        f"knocks {kha} in {counts.knocked} of {counts.layers} layers: "
        f"{counts.added_parameters:,} parameters added"
    )


class _LayerCounts(NamedTuple):
    layers: int  # with attention
    knocked: int  # with head mechanisms
    wrong: int  # without the requested config
    added_parameters: int


def _count_layers(models: list[Any], kha: HeadsConfig) -> _LayerCounts:
    """Count the attention layers of a pipeline stage."""
    attentions = attention_layers(models)
    knocked = 0
    wrong = 0
    added_parameters = 0
    for attention in attentions:
        if not _is_as_requested(attention, kha):
            wrong += 1
        if isinstance(attention, KnockedAttention):
            sizes = model_from_config(attention.config).head_sizes
            added_parameters += attention.kha.parameters(sizes)
            if kha.mechanisms:
                knocked += 1
    return _LayerCounts(
        layers=len(attentions),
        knocked=knocked,
        wrong=wrong,
        added_parameters=added_parameters,
    )


def attention_layers(models: Iterable[Any]) -> list[Attention]:
    """List the attention of all layers of a pipeline stage, without multi-token prediction."""
    attentions = []
    for model in models:
        for layer in model.decoder.layers:
            attention = getattr(layer, "self_attention", None)
            if isinstance(attention, Attention):
                attentions.append(attention)
    return attentions


def _is_as_requested(attention: Attention, kha: HeadsConfig) -> bool:
    """Return whether a layer was built with ``kha``, or is Megatron's and needs no more."""
    requested = kha.with_output_gate(attention.config.attention_output_gate)
    if isinstance(attention, KnockedAttention):
        is_same_kind = attention.kind == requested.attention
        return is_same_kind and attention.kha == requested
    missing = _without_stock_gate(requested, attention.config)
    return not missing.mechanisms and not missing.attention
