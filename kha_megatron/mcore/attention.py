"""Self-attention with KHA (MHA, MQA, GQA), its base class, and a check of built models.

Order in the layer: QKV projection, split, knock q, k and v, QK-norm, RoPE, core attention. The
knock precedes QK-norm (paper section 4.5.2), so that KHA-Linear folds into the projection.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.transformer.attention import Attention, SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank
from torch import Tensor
from torch.nn import Module

from kha_megatron.config import AttentionKind, KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadTensor, Mechanism, Projection
from kha_megatron.heads.gate import observe_gate
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.heads.mechanism import Stage, apply_stage
from kha_megatron.mcore.folding import Folding
from kha_megatron.mcore.head_inputs import InputProjection, NormedInput
from kha_megatron.mcore.head_ranks import HeadRanks
from kha_megatron.mcore.hooks import PlacedHook
from kha_megatron.mcore.knocking import HeadWeight, HeadWeights, KnockingHeads
from kha_megatron.mcore.qkv import QKVSplit
from kha_megatron.model.layout import Layout
from kha_megatron.model.model import Model
from kha_megatron.model.qkv import QKVLayout
from kha_megatron.model.rules import check_layout, head_facts


class KnockedAttention(Attention):
    """Mixin for Megatron's attentions: knocks projections and calls head mechanisms.

    The modules are named like their tensors: ``knock_query``, ``knock_key``, ``knock_value``.
    """

    kind: AttentionKind | None = None
    """Value of ``KHAConfig.attention``; None for kinds that Megatron's flags choose."""

    first_projection = "linear_qkv"
    """Module that reads the input, possibly with a fused norm."""

    kha: KHAConfig

    def _add_knocking(self, kha: KHAConfig) -> None:
        self.kha = kha
        config = self.config
        sizes = Model.from_config(config, kha).head_sizes
        self.value_dim = sizes.dim("value")
        common = {
            "layer_number": self.layer_number,
            "init_seed": kha.init_seed,
            "tp_group": self.tp_group,
        }
        knocks = kha.knock.tensors(sizes)
        self.knock_names = {tensor.heads: tensor.name for tensor in knocks}
        for tensor in knocks:
            variant = kha.variants[tensor.heads]
            setattr(self, tensor.name, KnockingHeads(config, tensor, variant=variant, **common))
        self.mechanisms: list[tuple[Mechanism, HeadWeights]] = []
        self.placed_hooks: list[PlacedHook] = []
        self.input_projections: list[str] = []
        for mechanism in _left_to_us(kha, config).other_mechanisms:
            tensors = mechanism.tensors(sizes)
            for tensor in tensors:
                kind = InputProjection if tensor.reads_input else HeadWeight
                setattr(self, tensor.name, kind(config, tensor, **common))
            read = [tensor.name for tensor in tensors if tensor.reads_input]
            modules = {t.name: getattr(self, t.name) for t in tensors if not t.reads_input}
            mine = mechanism.for_layer(self.layer_number - 1)
            self.mechanisms.append((mine, HeadWeights(modules)))
            if "core" in mechanism.stages:
                self.core_attention.act_for(*self.mechanisms[-1])
            self.input_projections += read
        self.head_ranks = HeadRanks(
            config,
            self.layer_number,
            self.pg_collection,
            is_training=lambda: self.training,
            adds_loss=any(mechanism.adds_loss for mechanism in kha.other_mechanisms),
        )
        self._kept: dict[str, Tensor] = {}  # from the input and each stage to the next
        if self.input_projections:
            self.normed_input = NormedInput(self, self.first_projection)
        if self._acts_at("output"):
            hook = PlacedHook(self, "linear_proj", self._before_projection, before=True)
            self.placed_hooks.append(hook)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Call Megatron's forward with the mechanisms around its output projection."""
        for hook in self.placed_hooks:
            hook.follow(self)
        output, bias = super().forward(*args, **kwargs)
        return self._after_projection(output, bias) if self.mechanisms else (output, bias)

    def _acts_at(self, stage: Stage) -> bool:
        return any(mechanism.acts_at(stage) for mechanism, _ in self.mechanisms)

    def _read_input(self, hidden_states: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Start a pass: compute what the mechanisms read from the input.

        Args:
            hidden_states: ``[s, b, h]``, the attention's input, after ``linear_qkv`` was called.
            rows: output of the extra rows of ``linear_qkv``, ``[s, b, heads, features]``.
        """
        self._kept = dict(rows)
        if self.input_projections:
            normed = self.normed_input(hidden_states)
            self._kept |= {name: getattr(self, name)(normed) for name in self.input_projections}

    def _applied(self, stage: Stage, **tensors: Tensor) -> Iterable[Tensor]:
        """Return ``[s, b, heads, D]`` each, after the mechanisms of a stage."""
        return apply_stage(stage, self.mechanisms, tensors, self._kept, self.head_ranks)

    def _before_projection(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        heads = inputs[0].unflatten(-1, (-1, self.value_dim))
        (output,) = self._applied("output", output=heads)
        return output.flatten(-2), *inputs[1:]

    def _after_projection(
        self, output: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self._acts_at("dense"):
            if bias is not None:  # of the projection, which Megatron adds later: it is gated too
                output, bias = output + bias, None
            (output,) = self._applied("dense", dense=output)
        self._kept = {}  # or the pass would live until the next
        return output, bias

    def flash_decode_and_prefill(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call Megatron's core attention for dynamic batching.

        Raises:
            ConfigError: a mechanism replaces the core attention.
        """
        for mechanism, _ in self.mechanisms:
            if "core" in mechanism.stages:
                raise ConfigError(
                    f"{mechanism} with dynamic batching, which attends in fused kernels: generate "
                    "with a static batch"
                )
        return super().flash_decode_and_prefill(*args, **kwargs)

    @property
    def knockings(self) -> dict[Projection, KnockingHeads]:
        """Modules of the knocked projections."""
        return {p: getattr(self, name) for p, name in self.knock_names.items()}

    def _apart(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copy views if Megatron offloads the core attention.

        It frees the whole storage of its inputs, which gates and knocks still read in backward.
        """
        if not getattr(self, "offload_core_attention", False):
            return tensors
        return tuple(x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for x in tensors)

    def _knocked(self, projection: Projection, x: Tensor) -> Tensor:
        """Knock ``x`` ``[..., D]`` if the projection is knocked."""
        name = self.knock_names.get(projection)
        return x if name is None else getattr(self, name)(x)


def _left_to_us(kha: KHAConfig, config: TransformerConfig) -> KHAConfig:
    """Return the config without the output gate if Megatron applies it."""
    return kha.without_output_gate() if config.attention_output_gate else kha


class KHASelfAttention(KnockedAttention, SelfAttention):
    """``SelfAttention`` with KHA. Same inputs and outputs (``[s, b, h]``).

    Raises:
        ConfigError: the sizes cannot be divided over the ranks, or ``config`` has an option that is
            not supported with ``kha``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *args: Any,
        kha: KHAConfig,
        **kwargs: Any,
    ) -> None:
        kha = kha.with_output_gate(config.attention_output_gate)
        check_config(config, kha, layers=config.num_layers)
        layout = Model.from_config(config, kha).qkv
        if not (layout.is_stock and len(layout.extra) == config.attention_output_gate):
            submodules = replace(submodules, linear_qkv=_of_rows(submodules.linear_qkv, layout))
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.linear_qkv_out_dim = layout.rows
        self._add_knocking(kha)
        self.split = QKVSplit(layout, self.tp_group)
        self.folding = Folding(self, kha, layout, self.knockings)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, ...]:
        """Return query, key, value (and output gate), knocked between split and norm.

        Returns:
            query ``[s, b, heads, D]``, key and value ``[s, b, groups, D]``, and the gate
            ``[s, b, heads, D]`` if ``output_gate``; heads and groups of this rank.

        Raises:
            ConfigError: ``split_qkv`` is False.
        """
        if not split_qkv:
            raise ConfigError(UNSPLIT)
        parts = self._project(hidden_states)
        layout = self.split.layout
        self._read_input(hidden_states, {row.name: parts[row.name] for row in layout.extra})
        parts |= self._made(parts["value"].shape[2])
        query, key, value = self._applied("qkv", **{p: parts[p] for p in PROJECTIONS})
        query = self._normed(self.q_layernorm, query)
        key = self._normed(self.k_layernorm, key)
        query, key, value = self._apart(query, key, value)
        if self.config.test_mode:
            self.run_realtime_tests()
        if not output_gate:
            return query, key, value
        assert layout.stock_gate is not None, "a gate that the configuration has not asked for"
        gate = parts[layout.stock_gate]
        if self.head_ranks.listeners:  # Megatron applies it, and says nothing of it
            observe_gate("output", gate.sigmoid, self.head_ranks)
        return query, key, value, gate

    def _project(self, hidden_states: Tensor) -> dict[str, Tensor]:
        """Project ``[s, b, h]`` and return the parts of :class:`QKVSplit`, knocked."""
        mixed, folded = self.folding(hidden_states)
        parts = self.split(self.split.groups(mixed))
        for projection in self.knock_names:
            if projection not in folded:
                parts[projection] = self._knocked(projection, parts[projection])
        return parts

    def _made(self, groups: int) -> dict[str, Tensor]:
        """Return projections that mechanisms compute: a query of one head, keys of ``groups``."""
        made: dict[str, Tensor] = {
            p: self._kept[f"{m.name}_{p}"] for m, _ in self.mechanisms for p in m.own_projections
        }
        if "key" in made:
            made["key"] = made["key"].expand(-1, -1, groups, -1)
        return made

    @staticmethod
    def _normed(norm: Any, x: Tensor) -> Tensor:
        return x if norm is None else norm(x)


def _of_rows(build: Callable[..., Module], layout: QKVLayout) -> Callable[..., Module]:
    """Return a builder of ``linear_qkv`` with the rows of ``layout``; padding rows are zero."""

    def built(inputs: int, outputs: int, *, init_method: Any, tp_group: Any, **options: Any) -> Any:
        def initialised(weight: Tensor) -> None:
            init_method(weight)
            rows, first = len(weight), 0
            if rows < layout.rows:  # this rank's, where they are not cut from a whole
                first = get_pg_rank(tp_group) * rows
            for group in range(layout.groups):
                before = group * layout.group_rows - first
                begin, end = before + layout.padding.start, before + layout.padding.stop
                with torch.no_grad():
                    weight[max(0, begin) : max(0, end)] = 0

        options |= {"init_method": initialised, "tp_group": tp_group}
        return build(inputs, layout.rows, **options)

    return built


UNSPLIT = (
    "fused_single_qkv_rope=True rotates the unsplit QKV buffer and passes by the place where KHA "
    "knocks on q, k and v: remove fused_single_qkv_rope"
)


def check_config(config: TransformerConfig, kha: KHAConfig, *, layers: int = 0) -> None:
    """Raise ConfigError if the attention does not support ``config``. Allocates nothing.

    Args:
        layers: number of layers of the model, if known to be ``config.num_layers``.
    """
    model = Model.from_config(config, kha)
    kha.check(replace(head_facts(model), layers=layers))
    check_layout(model, Layout.from_config(config), trains=False)
    if config.fused_single_qkv_rope:
        raise ConfigError(UNSPLIT)
    clips = config.qk_clip and not config.multi_latent_attention
    rows = model.qkv
    if clips and (rows.extra or not rows.is_stock):
        raise ConfigError(
            f"qk_clip=True scales rows of queries and keys that Megatron counts without {kha}: "
            "remove --qk-clip"
        )
    if config.multi_latent_attention and config.num_query_groups != config.num_attention_heads:
        raise ConfigError(
            f"num_query_groups={config.num_query_groups} with multi-latent attention, each of "
            f"whose {config.num_attention_heads} query heads has a key: leave it out"
        )


def describe_model(models: list[Any], kha: KHAConfig) -> str:
    """One line on what is knocked, in how many layers, and what it adds. Call it on every rank.

    Args:
        models: the virtual pipeline stages of this rank.
        kha: what was asked for.

    Returns:
        For example ``knocks value=mlp in 12 of 12 layers: 589,824 parameters added``, counted over
        all pipeline stages. Layers of a hybrid model without attention do not count.

    Raises:
        ConfigError: a requested matrix is missing, or one is there that was not requested. Raised
            on every rank, whichever pipeline stage the layer is on.
    """
    layers = [layer for model in models for layer in model.decoder.layers]
    every = [a for x in layers if isinstance(a := getattr(x, "self_attention", None), Attention)]
    attentions = [attention for attention in every if isinstance(attention, KnockedAttention)]
    wrong = sum(not _is_as_asked(attention, kha) for attention in every)
    added = sum(_added(attention) for attention in attentions)
    totals = torch.tensor(
        [len(attentions) if kha.mechanisms else 0, len(every), added, wrong],
        dtype=torch.int64,
        device=torch.cuda.current_device(),
    )
    torch.distributed.all_reduce(totals, group=mpu.get_pipeline_model_parallel_group())
    knocked, total, added, wrong = totals.tolist()
    if wrong or ((kha.mechanisms or kha.attention) and not total):
        raise ConfigError(
            f"{wrong} of {total} layers were built without the asked-for KHA on {kha}: another "
            "layer spec was used (check --spec and pre-wrap hooks)"
        )
    return f"knocks {kha} in {knocked} of {total} layers: {added:,} parameters added"


def _weights(attention: Attention) -> list[HeadWeight]:
    return [module for module in attention.children() if isinstance(module, HeadWeight)]


def _is_as_asked(attention: Attention, kha: KHAConfig) -> bool:
    if attention.config.attention_output_gate:  # which any attention of Megatron's has
        kha = kha.with_output_gate(True)
    if not isinstance(attention, KnockedAttention):
        return not (_left_to_us(kha, attention.config).mechanisms or kha.attention)
    sizes = Model.from_config(attention.config, kha).head_sizes
    built = {_kind(weight.tensor) for weight in _weights(attention)}
    return (
        built == {_kind(tensor) for tensor in kha.tensors(sizes)}
        and attention.kha.rows(sizes) == kha.rows(sizes)
        and attention.kind == kha.attention
    )


def _kind(tensor: HeadTensor) -> tuple[str, ...]:
    """Return what distinguishes tensors of different configurations."""
    return (tensor.name, *tensor.matrices)


def _added(attention: KnockedAttention) -> int:
    sizes = Model.from_config(attention.config, attention.kha).head_sizes
    rows = sum(row.size(sizes) for row in attention.kha.rows(sizes))
    return rows + sum(weight.tensor.size for weight in _weights(attention))
