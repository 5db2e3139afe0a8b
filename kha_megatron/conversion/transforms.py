"""Sources around sources: what a conversion does to a model besides moving it."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.dialects import Dialect
from kha_megatron.conversion.packing import QKVRows
from kha_megatron.conversion.sources import Source, not_finite
from kha_megatron.conversion.table import (
    ATTENTION_OUTPUT,
    EXPERT_BIAS,
    SHARED_EXPERT,
    SHARED_EXPERT_GATE,
    Knocked,
    Place,
    head_row,
)
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads import Knock
from kha_megatron.ops import fold, initial_weight
from kha_megatron.ops.heads.collaborative import fold as fold_shared


class _Around(Source):
    def __init__(self, source: Source, model: Architecture) -> None:
        super().__init__(source.checkpoint, source.companions, model)
        self.source, self.padding_arguments = source, source.padding_arguments

    def verifying(self) -> AbstractContextManager[None]:
        """See :class:`Source`."""
        return self.source.verifying()

    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """See :class:`Source`."""
        return self.source.read(place, meta=meta)


class Cast(_Around):
    """In another dtype, all but the router's correction biases.

    Args:
        source: the tensors.
        dtype: what to round them to.
        allow_overflow: whether numbers may become infinite. Otherwise that is an error at the end
            of :meth:`verifying`, which counts them.
    """

    def __init__(self, source: Source, dtype: torch.dtype, *, allow_overflow: bool = False) -> None:
        super().__init__(source, source.model)
        self._dtype, self._allowed = dtype, allow_overflow
        self._overflows: dict[str, tuple[int, int]] = {}

    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """See :class:`Source`."""
        parts = self.source.read(place, meta=meta)
        if place.row is EXPERT_BIAS:
            return parts
        rounded = [part.to(self._dtype) for part in parts]
        for name, part, short in zip(place.hf_names(self.model), parts, rounded, strict=True):
            if count := not_finite(short) - not_finite(part):
                self._overflows[name] = count, part.numel()
        return rounded

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """See :class:`Source`.

        Raises:
            CheckpointError: at the end, where numbers became infinite.
        """
        self._overflows.clear()
        with super().verifying():
            yield
        if self._overflows and not self._allowed:
            counts = [f"{n} {c:,} of {size:,}" for n, (c, size) in sorted(self._overflows.items())]
            raise CheckpointError(
                f"{str(self._dtype).removeprefix('torch.')} ends at "
                f"{torch.finfo(self._dtype).max:g}, and larger numbers would become infinite in "
                f"{len(counts)} tensors: {', '.join(counts[:5])}: choose bfloat16 or float32, or "
                "--allow-overflow"
            )


def folded(source: Source, kha: KHAConfig) -> Source:
    """The source with what ``kha`` has of its mechanisms folded into projections.

    Raises:
        CheckpointError: there is nothing to fold, or what does not fold.
    """
    if not (kha.variants or kha.collaborative):
        raise CheckpointError(
            f"{source.path} has no knocking heads to fold away, and no collaborative ones"
        )
    if kha.variants:
        source = Folded(source)
    return Apart(source) if kha.collaborative else source


class Folded(_Around):
    """Without linear knocks: ``W' = W T`` in the projections before them, biases too (eq. 8).

    Computed in float64 and rounded once to the stored dtype. QK-norm and RoPE come after the knock,
    so that queries and keys fold as well as values.

    Raises:
        CheckpointError: a variant that does not fold.
    """

    def __init__(self, source: Source) -> None:
        kha = source.model.kha
        if not kha.knock.folds:
            raise CheckpointError(
                f"{source.path} has {kha.knock}: only linear knocking heads can be folded into "
                "the projection before them; export it as kha"
            )
        super().__init__(source, replace(source.model, kha=kha.without(Knock.name)))
        knocks = kha.knock.tensors(source.model.head_sizes)
        self._matrices = {tensor.heads: head_row(tensor) for tensor in knocks}

    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """See :class:`Source`."""
        parts, model = self.source.read(place, meta=meta), self.source.model
        knocked = place.row.knocked(model)
        if meta or not knocked:
            return parts
        return [
            self._fold(part, place.layer, of_part)
            for part, of_part in zip(parts, knocked, strict=True)
        ]

    def _fold(self, part: Tensor, layer: int | None, knocked: Sequence[Knocked]) -> Tensor:
        for projection, head_rows, start in knocked:
            if projection in self._matrices:
                (weight,) = self.source.read(Place(self._matrices[projection], layer))
                part = fold(part, weight.T[None], head_rows=head_rows, start=start)
        return part


class Apart(_Around):
    """With ordinary heads for collaborative ones: ``W_Q diag(m_i)`` each, and the one key again
    for every key/value head.

    Heads are as wide as keys or values, the wider of the two, and zeros fill up the other. RoPE
    turns the features that it turned. Queries of keys that were narrower than values are multiplied
    by what the wider head changes of the logits' scale.

    Raises:
        CheckpointError: QK-norm would count the zeros, a router would see the scale, or parameters
            of other mechanisms are as wide as values were.
    """

    def __init__(self, source: Source) -> None:
        model = source.model
        assert model.kha.collaborative is not None
        self._shared, values = model.kha.collaborative, model.kv_channels
        keys = self._shared.dim
        if model.qk_layernorm and keys < values:
            raise CheckpointError(
                f"{source.path} has QK-norm over collaborative.dim={keys} features, and heads as "
                f"wide as its values have {values}, of which a norm counts the zeros too: export "
                "it as kha"
            )
        moh = model.kha.moh
        by_norms = moh and moh.router == "query_norm" and not moh.quantized
        if moh and by_norms and moh.scale == "paper" and keys < values:
            raise CheckpointError(
                f"{source.path} has {moh}, which weighs heads by the norms of their queries, and "
                f"folding collaborative.dim={keys} into heads of {values} features scales these: "
                "export it as kha"
            )
        width = max(keys, values)
        turned = int(values * model.rotary_percent)
        kha = model.kha.without(self._shared.name)
        share = turned / width
        if int(width * share) != turned:  # as everyone computes it
            share = math.nextafter(share, 1.0)
        apart = replace(model, kha=kha, kv_channels=width, rotary_percent=share)
        if set(apart.head_tensors) - set(model.head_tensors):
            raise CheckpointError(
                f"{source.path} has parameters of {kha} for heads of {values} features, and "
                f"folded collaborative heads have {width}: export it as kha"
            )
        super().__init__(source, apart)
        self._scale = (width / keys) ** 0.5
        self._rows = {t.name: head_row(t) for t in self._shared.tensors(model.head_sizes)}

    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """See :class:`Source`."""
        parts, model = self.source.read(place, meta=meta), self.model
        if place.row is ATTENTION_OUTPUT:
            return [_filled(parts[0], model.num_attention_heads, model.kv_channels, dim=1)]
        if not isinstance(place.row.packing, QKVRows):
            return parts
        held = dict(zip(self.source.model.qkv.parts, parts, strict=True))
        held |= self._made(place.layer, meta)
        return [
            _filled(held[name], model.qkv.groups * part.heads, part.features)
            for name, part in model.qkv.parts.items()
        ]

    def _made(self, layer: int | None, meta: bool) -> dict[str, Tensor]:
        """The projections of queries and keys, heads as wide as the shared ones."""
        query, key, mixing = (
            self.source.read(Place(self._rows[f"{self._shared.name}_{part}"], layer), meta=meta)[0]
            for part in ("query", "key", "mixing")
        )
        return {
            "query": fold_shared(query, mixing.double() * self._scale),
            "key": key.repeat(self.model.num_query_groups, 1),
        }


def _filled(part: Tensor, heads: int, features: int, dim: int = 0) -> Tensor:
    """With heads of so many features along ``dim``, by zeros behind those that they have."""
    apart = part.unflatten(dim, (heads, -1))
    zeros = features - apart.shape[dim + 1]
    if not zeros:
        return part
    return pad(apart, (0, 0) * (apart.dim() - dim - 2) + (0, zeros)).flatten(dim, dim + 1)


class Upcycled(_Around):
    """With more mechanisms of the heads, which change no bit of what the model computes.

    Matrices begin at the identity, and what reads the input at zero; where a mechanism halves
    something then, the projection before it is doubled (``Mechanism.doubled``).

    Raises:
        ConfigError: nothing would be added, or what has no such start, or what the model's
            attention cannot carry, or a knock that is not linear stands behind what is doubled.
        CheckpointError: the model has one of them already.
    """

    def __init__(self, source: Source, kha: KHAConfig) -> None:
        before, added = source.model.kha, [mechanism.name for mechanism in kha.mechanisms]
        if not added:
            raise ConfigError(
                f"KHA on {kha}: upcycling adds mechanisms: choose a --kha-preset, --kha-query, "
                "--kha-key, --kha-value or --heads"
            )
        doubled = [name for mechanism in kha.mechanisms for name in mechanism.doubled()]
        if twice := [m for m in before.mechanisms if m.name in added]:
            raise CheckpointError(f"{source.path} has {twice[0]} already: go on training it")
        if kha.attention not in (None, before.attention):
            raise ConfigError(
                f"attention={kha.attention} with {source.path}, which was trained with another "
                "kind: upcycling keeps the attention, leave it out"
            )
        bent = [(n, v) for n, v in before.variants.items() if v != "linear" and n in doubled]
        for name, variant in bent:  # a trained one gives of twice the input not twice the output
            raise ConfigError(
                f"{kha} behind the trained {name}={variant} of {source.path}: what halves the "
                f"{name} needs twice its projection, which only a linear knock passes on: leave "
                f"gate.{name} out, or train with it from the start"
            )
        super().__init__(source, replace(source.model, kha=before.joined(kha)))
        was = set(source.model.head_tensors)
        self._added = {head_row(t): t for t in self.model.head_tensors if t not in was}
        self._doubled = Counter(_MODULES[name] for name in doubled)

    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """See :class:`Source`."""
        device = "meta" if meta else "cpu"
        if place.row in self._added:
            tensor, dtype = self._added[place.row], _weights_dtype(self.source, place)
            weight = torch.zeros(tensor.shape, dtype=dtype, device=device)
            if not meta and not tensor.reads_input:
                initial_weight(weight if tensor.matrices else weight[None], tensor.starts)
            return place.row.packing.split(weight, self.model)
        names = place.hf_names(self.model)
        held = self.source.read(place, meta=meta)
        there = dict(zip(place.hf_names(self.source.model), held, strict=True))
        if len(names) > len(there):  # rows beside queries, keys and values
            whole = torch.empty(place.row.shape(self.model), dtype=held[0].dtype, device="meta")
            parts = place.row.packing.split(whole, self.model)
            for name, part in zip(names, parts, strict=True):
                there.setdefault(name, torch.zeros_like(part, device=device))
        return [self._times(name, there[name]) for name in names]

    def _times(self, name: str, part: Tensor) -> Tensor:
        times = sum(count for module, count in self._doubled.items() if module in name)
        return part * 2**times if times else part


_MODULES = {
    "query": ".q_proj.",
    "key": ".k_proj.",
    "value": ".v_proj.",
    "output": ".o_proj.",
}
"""In names of tensors, the projections that a mechanism may want doubled."""


class Expressed(_Around):
    """As another architecture has the same model: with zeros for the expert biases, the shared
    expert and its gate that the source does without (``hf_configs.expressed``)."""

    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """See :class:`Source`."""
        if not self._added(place):
            return self.source.read(place, meta=meta)
        is_bias = place.row is EXPERT_BIAS
        dtype = torch.float32 if is_bias else _weights_dtype(self.source, place)
        shape = place.row.shape(self.model)
        zeros = torch.zeros(shape, dtype=dtype, device="meta" if meta else "cpu")
        return place.row.packing.split(zeros, self.model)

    def _added(self, place: Place) -> bool:
        if place.layer is None or place.row not in (
            EXPERT_BIAS,
            *SHARED_EXPERT,
            SHARED_EXPERT_GATE,
        ):
            return False
        return not place.row.when(self.source.model, place.layer)


def _weights_dtype(source: Source, place: Place) -> torch.dtype:
    """The dtype of the layer's other weights."""
    return source.read(Place(ATTENTION_OUTPUT, place.layer), meta=True)[0].dtype


class AsStored(_Around):
    """With what an architecture's files round: weights of norms that lie far from one."""

    def __init__(self, source: Source, dialect: Dialect) -> None:
        super().__init__(source, source.model)
        self._dialect = dialect

    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """See :class:`Source`."""
        parts = self.source.read(place, meta=meta)
        return self._dialect.read(
            place, self.model, self._dialect.written(place, self.model, parts)
        )


class Padded(_Around):
    """With a vocabulary that is padded to a number of rows."""

    def __init__(self, source: Source, rows: int) -> None:
        super().__init__(source, replace(source.model, padded_vocab_size=rows))
