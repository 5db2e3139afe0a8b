"""Parallel layout and batch size. They are validated in :mod:`kha_megatron.model.rules`."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kha_megatron.errors import ConfigError
from kha_megatron.model.fields import MAX_LAYERS, flag, read_arguments, read_attributes
from kha_megatron.model.pattern import LayerPattern


def parse_pipeline_layout(text: str) -> tuple[str, ...]:
    """Parse ``--pipeline-model-parallel-layout`` into one string per stage.

    >>> parse_pipeline_layout("Ett|(t|)*2L")
    ('Ett', 't', 't', 'L')
    """
    plain = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        if any(int(found[1]) > MAX_LAYERS for found in re.findall(repeated, plain)):
            break
        plain = re.sub(repeated, lambda found: found[1] * int(found[2]), plain)
    if not set(plain) <= set("EtmL|"):
        raise ValueError(
            "composed of E (embedding), t (layer), m (multi-token prediction), L (loss) and | "
            f"(stage separator), with at most {MAX_LAYERS} repetitions"
        )
    return tuple(plain.split("|"))


def divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


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
    overlap_p2p: bool = flag(True, "--no-overlap-p2p-communication", argument="overlap_p2p_comm")
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
    embedding_as_layer: bool = flag(False, "--account-for-embedding-in-pipeline-split")
    loss_as_layer: bool = flag(False, "--account-for-loss-in-pipeline-split")
    stages: tuple[str, ...] | None = flag(
        None,
        "--pipeline-model-parallel-layout",
        attribute=None,
        reads=parse_pipeline_layout,
        writes="|".join,
    )
    """Custom pipeline layout. See :func:`parse_pipeline_layout`."""
    weight_shards: int | None = flag(None, "--tensor-parallel-num-weight-shards")
    expert_weight_shards: int | None = flag(None, "--expert-tensor-parallel-num-weight-shards")

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], world_size: int | None) -> Self:
        given = read_arguments(cls, arguments)
        pattern = LayerPattern.parse(arguments.get("hybrid_layer_pattern") or "")
        if pattern and len(pattern.stages) > 1:
            given["stages"] = tuple(count * "t" for count in pattern.stages)
        if given["stages"] is not None:
            given["vpp"] = len(given["stages"]) // given["pp"]
        elif given["virtual_stage_layers"]:
            extra = given["embedding_as_layer"] + given["loss_as_layer"]
            layers = (arguments.get("num_layers") or 0) + extra
            given["vpp"] = layers // given["pp"] // given["virtual_stage_layers"]
        if (given["vpp"] or 1) == 1:
            given["vpp"] = None
        return cls(world_size=world_size, **given)

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
        counts = self._split(num_layers, chunks)
        if sum(map(sum, counts)) != num_layers or min(map(min, counts)) < 0:
            raise ConfigError(
                f"Cannot split {num_layers} layers over {self.pp} pipeline ranks with {chunks} "
                "stages each. Change --num-layers or the pipeline layout."
            )
        return counts

    def _split(self, num_layers: int, chunks: int) -> list[list[int]]:
        if self.stages is not None:
            words = [word.count("t") for word in self.stages]
            return [words[c * self.pp : (c + 1) * self.pp] for c in range(chunks)]
        if self.pp * chunks > num_layers + 2:  # 2 for the embedding and the loss
            return [[0]]
        own = {0: self.first_stage_layers, self.pp - 1: self.last_stage_layers}
        ends = {rank: layers for rank, layers in own.items() if layers is not None}
        left = num_layers - sum(ends.values()) + self.embedding_as_layer + self.loss_as_layer
        even = left // max(1, self.pp - len(ends))
        counts = [
            [ends.get(rank, even) // chunks for rank in range(self.pp)] for _ in range(chunks)
        ]
        counts[0][0] -= self.embedding_as_layer
        counts[-1][-1] -= self.loss_as_layer
        return counts

    def stage_layers(self, num_layers: int, stage: int) -> list[list[int]]:
        """Layer indices on pipeline rank ``stage``, as one list per virtual stage."""
        result, start = [], 0
        for counts in self.chunk_layers(num_layers):
            first = start + sum(counts[:stage])
            result.append(list(range(first, first + counts[stage])))
            start += sum(counts)
        return result


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequence length and batch sizes (in sequences)."""

    seq_length: int = flag(attribute=None)
    micro_batch_size: int = flag(attribute=None)
    global_batch_size: int | None = flag(None, attribute=None)

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self | None:
        """Build the batch from Megatron's arguments. Returns None if sizes are missing."""
        given = read_arguments(cls, arguments)
        given["seq_length"] = given["seq_length"] or arguments.get("encoder_seq_length")
        if not given["seq_length"] or not given["micro_batch_size"]:
            return None
        if arguments.get("decrease_batch_size_if_needed"):
            given["global_batch_size"] = None  # Megatron rounds it
        return cls(**given)

    def microbatches(self, dp: int) -> int:
        assert self.global_batch_size is not None
        return self.global_batch_size // (self.micro_batch_size * dp)
