"""Sources around sources: what a conversion does to a model besides moving it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.sources import Source, not_finite
from kha_megatron.conversion.table import (
    ATTENTION_OUTPUT,
    EXPERT_BIAS,
    SHARED_EXPERT,
    Knocked,
    Place,
    head_row,
)
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.ops import fold, initial_weight

KEPT_IN_FLOAT32 = (EXPERT_BIAS,)
"""Rows whose tensors are not cast."""


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
        if place.row in KEPT_IN_FLOAT32:
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


class Folded(_Around):
    """Without linear knocks: ``W' = W T`` in the projections before them, biases too (eq. 8).

    Computed in float64 and rounded once to the stored dtype. QK-norm and RoPE come after the knock,
    so that queries and keys fold as well as values.

    Raises:
        CheckpointError: there is nothing to fold, or a variant that does not fold.
    """

    def __init__(self, source: Source) -> None:
        kha = source.model.kha
        if not kha.mechanisms:
            raise CheckpointError(f"{source.path} has no knocking heads to fold away")
        for mechanism in kha.mechanisms:
            if not mechanism.folds:
                raise CheckpointError(
                    f"{source.path} has {mechanism}: only linear knocking heads can be folded into "
                    "the projection before them; export it as kha"
                )
        rest = KHAConfig(attention=kha.attention, latent_heads=kha.latent_heads)
        super().__init__(source, replace(source.model, kha=rest))
        self._matrices = {tensor.heads: head_row(tensor) for tensor in source.model.head_tensors}

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


class Upcycled(_Around):
    """With knocking heads at the identity, which change no bit of what the model computes.

    Raises:
        ConfigError: nothing would be knocked, or not from the identity, or with a variant or a
            kind of attention that the model's attention cannot carry.
        CheckpointError: the model has knocking heads already.
    """

    def __init__(self, source: Source, kha: KHAConfig) -> None:
        if not kha.mechanisms or kha.init != "identity":
            raise ConfigError(
                f"KHA on {kha}: upcycling adds matrices at the identity: choose a --kha-preset or "
                "--kha-query, --kha-key, --kha-value"
            )
        if source.model.kha.mechanisms:
            raise CheckpointError(
                f"{source.path} has knocking heads on {source.model.kha} already: go on training it"
            )
        before = source.model.kha
        if kha.attention not in (None, before.attention):
            raise ConfigError(
                f"attention={kha.attention} with {source.path}, which was trained with another "
                "kind: upcycling keeps the attention, leave it out"
            )
        kha = replace(kha, attention=before.attention, latent_heads=before.latent_heads)
        super().__init__(source, replace(source.model, kha=kha))
        self._added = {head_row(tensor): tensor for tensor in self.model.head_tensors}

    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """See :class:`Source`."""
        if place.row not in self._added:
            return self.source.read(place, meta=meta)
        tensor, dtype = self._added[place.row], _weights_dtype(self.source, place)
        weight = torch.empty(tensor.shape, dtype=dtype, device="meta" if meta else "cpu")
        if not meta:
            initial_weight(weight if tensor.matrices else weight[None], tensor.starts)
        return place.row.packing.split(weight, self.model)


class Expressed(_Around):
    """As another architecture has the same model: with zeros for the expert biases and the shared
    expert that the source does without (``hf_configs.expressed``)."""

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
        if place.layer is None or place.row not in (EXPERT_BIAS, *SHARED_EXPERT):
            return False
        return not place.row.when(self.source.model, place.layer)


def _weights_dtype(source: Source, place: Place) -> torch.dtype:
    """The dtype of the layer's other weights."""
    return source.read(Place(ATTENTION_OUTPUT, place.layer), meta=True)[0].dtype


class Padded(_Around):
    """With a vocabulary that is padded to a number of rows."""

    def __init__(self, source: Source, rows: int) -> None:
        super().__init__(source, replace(source.model, padded_vocab_size=rows))
