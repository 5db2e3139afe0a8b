"""Parallel layout and batch size. They are validated in :mod:`kha_megatron.model.rules`."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from kha_megatron.errors import ConfigError
from kha_megatron.model.fields import MAX_LAYERS, flag, read_arguments, read_attributes
from kha_megatron.model.pattern import PATTERN_ARGUMENT, LayerPattern

_REPEATED_GROUP = r"\(([^)]+)\)\*(\d+)"
"""E.g. ``(t|)*2``."""
_REPEATED_SYMBOL = r"(.)\*(\d+)"
"""E.g. ``t*2``."""


def parse_pipeline_layout(text: str) -> tuple[str, ...]:
    """Parse ``--pipeline-model-parallel-layout`` into one string per stage.

    >>> parse_pipeline_layout("Ett|(t|)*2L")
    ('Ett', 't', 't', 'L')
    """
    symbols = text.replace(",", "")
    for repetition in (_REPEATED_GROUP, _REPEATED_SYMBOL):
        counts = [int(count) for _, count in re.findall(repetition, symbols)]
        if any(count > MAX_LAYERS for count in counts):
            break  # the remaining * is refused below
        symbols = re.sub(repetition, _repeat, symbols)
    if not set(symbols) <= set("EtmL|"):
        raise ValueError(
            "composed of E (embedding), t (layer), m (multi-token prediction), L (loss) and | "
            f"(stage separator), with at most {MAX_LAYERS} repetitions"
        )
    return tuple(symbols.split("|"))


def _repeat(match: re.Match[str]) -> str:
    symbols, count = match.groups()
    return symbols * int(count)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order, including 1 and the number itself."""
    found_divisors = set()
    for candidate in range(1, math.isqrt(number) + 1):
        if number % candidate == 0:
            found_divisors |= {candidate, number // candidate}
    return sorted(found_divisors)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes. If the world size is known, this also gives us ``dp``."""

    world_size: int | None = None
    tp: int = flag(1, "--tensor-model-parallel-size")
    pp: int = flag(1, "--pipeline-model-parallel-size")
    vpp: int | None = flag(
        None,
        "--num-virtual-stages-per-pipeline-rank",
        attribute="virtual_pipeline_model_parallel_size",
    )
    """Virtual stages per pipeline rank. If None, the 1F1B schedule is not interleaved."""
    virtual_stage_layers: int | None = flag(
        None,
        "--num-layers-per-virtual-pipeline-stage",
        attribute=None,
    )
    """Megatron's other way to set ``vpp``. We only use it to compute ``vpp``."""
    cp: int = flag(1, "--context-parallel-size")
    ep: int = flag(1, "--expert-model-parallel-size")
    etp: int | None = flag(None, "--expert-tensor-parallel-size")
    sequence_parallel: bool = flag(False)
    overlap_p2p: bool = flag(
        True,
        "--no-overlap-p2p-communication",
        argument="overlap_p2p_comm",
    )
    microbatch_group: int | None = flag(
        None,
        "--microbatch-group-size-per-virtual-pipeline-stage",
        argument="microbatch_group_size_per_vp_stage",
    )
    first_stage_layers: int | None = flag(
        None,
        "--decoder-first-pipeline-num-layers",
        attribute="num_layers_in_first_pipeline_stage",
    )
    last_stage_layers: int | None = flag(
        None,
        "--decoder-last-pipeline-num-layers",
        attribute="num_layers_in_last_pipeline_stage",
    )
    embedding_as_layer: bool = flag(
        False,
        "--account-for-embedding-in-pipeline-split",
    )
    loss_as_layer: bool = flag(False, "--account-for-loss-in-pipeline-split")
    stages: tuple[str, ...] | None = flag(
        None,
        "--pipeline-model-parallel-layout",
        attribute=None,
        parser=parse_pipeline_layout,
        formatter="|".join,
    )
    """Custom pipeline layout. See :func:`parse_pipeline_layout`."""
    weight_shards: int | None = flag(None, "--tensor-parallel-num-weight-shards")
    expert_weight_shards: int | None = flag(
        None,
        "--expert-tensor-parallel-num-weight-shards",
    )

    @classmethod
    def from_arguments(
        cls,
        arguments: Mapping[str, Any],
        world_size: int | None,
    ) -> Self:
        """Build the layout from Megatron's arguments.

        ``stages`` is also set if the layer pattern of a hybrid model has several stages, and
        ``vpp`` follows from ``stages`` or ``virtual_stage_layers``.
        """
        layout = cls(world_size=world_size, **read_arguments(cls, arguments))
        stages = layout.stages
        pattern = LayerPattern.parse(arguments.get(PATTERN_ARGUMENT) or "")
        if pattern and len(pattern.stages) > 1:
            stages = tuple(count * "t" for count in pattern.stages)
        vpp = layout.vpp
        if stages is not None:
            vpp = len(stages) // layout.pp
        elif layout.virtual_stage_layers:
            layers = arguments.get("num_layers") or 0
            layers += layout.embedding_as_layer + layout.loss_as_layer
            vpp = layers // layout.pp // layout.virtual_stage_layers
        if vpp in (0, 1):  # not interleaved
            vpp = None
        return replace(layout, stages=stages, vpp=vpp)

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Build the layout from a ``TransformerConfig``. The world size is unknown."""
        return cls(**read_attributes(cls, config))

    @property
    def expert_tp(self) -> int:
        """TP size of the experts (same as ``tp`` unless ``etp`` is set)."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        assert self.world_size is not None
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        assert self.world_size is not None
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    def chunk_layers(self, num_layers: int) -> list[list[int]]:
        """Number of layers per stage, indexed by ``[vpp][pp]``.

        Raises:
            ConfigError: If the layers cannot be split like this.
        """
        chunks = self.vpp or 1
        if self.stages is not None:
            counts = self._count_custom_stages(self.stages, chunks)
        else:
            # at most two stages have no layers, but only the embedding or the loss
            if self.pp * chunks > num_layers + 2:
                raise self._cannot_split(num_layers, chunks)
            counts = self._split_evenly(num_layers, chunks)
        all_counts = list(itertools.chain.from_iterable(counts))
        if sum(all_counts) != num_layers or min(all_counts) < 0:
            raise self._cannot_split(num_layers, chunks)
        return counts

    def _cannot_split(self, num_layers: int, chunks: int) -> ConfigError:
        return ConfigError(
            f"Cannot split {num_layers} layers over {self.pp} pipeline ranks with {chunks} "
            "stages each. Change --num-layers or the pipeline layout."
        )

    def _count_custom_stages(self, stages: Sequence[str], chunks: int) -> list[list[int]]:
        """Count the layers of a custom layout. Its stages are ordered by chunk, then by rank."""
        counts = []
        for chunk in range(chunks):
            first_stage = chunk * self.pp
            chunk_stages = stages[first_stage : first_stage + self.pp]
            counts.append([stage.count("t") for stage in chunk_stages])
        return counts

    def _split_evenly(self, num_layers: int, chunks: int) -> list[list[int]]:
        """Split layers like Megatron. Divisions are rounded down, so layers can be missing."""
        last_rank = self.pp - 1
        fixed_counts: dict[int, int] = {}
        if self.first_stage_layers is not None:
            fixed_counts[0] = self.first_stage_layers
        if self.last_stage_layers is not None:
            fixed_counts[last_rank] = self.last_stage_layers
        remaining_layers = num_layers - sum(fixed_counts.values())
        remaining_layers += self.embedding_as_layer
        remaining_layers += self.loss_as_layer
        remaining_ranks = self.pp - len(fixed_counts)
        even_count = remaining_layers // max(1, remaining_ranks)
        chunk_counts = []
        for rank in range(self.pp):
            rank_count = fixed_counts.get(rank, even_count)
            chunk_counts.append(rank_count // chunks)
        counts = [list(chunk_counts) for _ in range(chunks)]
        # the first and the last stage have fewer layers if they count as one themselves
        counts[0][0] -= self.embedding_as_layer
        counts[-1][-1] -= self.loss_as_layer
        return counts

    def stage_layers(self, num_layers: int, stage: int) -> list[list[int]]:
        """Layer indices on pipeline rank ``stage``, as one list per virtual stage."""
        chunks = []
        chunk_start = 0
        for counts in self.chunk_layers(num_layers):
            layers_before = sum(counts[:stage])
            start = chunk_start + layers_before
            end = start + counts[stage]
            chunks.append(list(range(start, end)))
            chunk_start += sum(counts)
        return chunks


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequence length and batch sizes (in sequences)."""

    seq_length: int = flag(attribute=None)
    micro_batch_size: int = flag(attribute=None)
    global_batch_size: int | None = flag(None, attribute=None)

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self | None:
        """Build the batch from Megatron's arguments. Returns None if sizes are missing."""
        sizes = read_arguments(cls, arguments)
        if not sizes["seq_length"]:
            sizes["seq_length"] = arguments.get("encoder_seq_length")
        if not sizes["seq_length"] or not sizes["micro_batch_size"]:
            return None
        if arguments.get("decrease_batch_size_if_needed"):
            sizes["global_batch_size"] = None  # Megatron rounds it
        return cls(**sizes)

    def microbatches(self, dp: int) -> int:
        """Number of microbatches of each rank per global batch."""
        assert self.global_batch_size is not None
        sequences = self.micro_batch_size * dp
        return self.global_batch_size // sequences
