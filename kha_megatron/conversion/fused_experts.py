"""Read experts that are stored as 3-D tensors.

transformers 5 holds the experts of a layer in memory as two tensors

    gate_up_proj   [experts, 2 * intermediate_size, hidden_size]   gate first
    down_proj      [experts, hidden_size, intermediate_size]

and ``save_pretrained(..., save_original_format=False)`` writes them like this. We present them as
one tensor per expert and projection, which is how all models are published.
"""

from typing import NamedTuple

from torch import Tensor

from kha_megatron.checkpoint.hf_reader import HFCheckpoint
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.errors import CheckpointError

_PARTS_BY_SUFFIX = {
    ".mlp.experts.gate_up_proj": (
        ".mlp.experts.{expert}.gate_proj.weight",
        ".mlp.experts.{expert}.up_proj.weight",
    ),
    ".mlp.experts.down_proj": (".mlp.experts.{expert}.down_proj.weight",),
}
"""End of the name of a fused tensor, and of the names of its parts, in the order of their rows."""


class _ExpertWeight(NamedTuple):
    """Position of an expert's weight in a fused tensor."""

    fused_name: str
    expert: int
    first_row: int
    rows: int


class SplitExperts:
    """Tensors of a Hugging Face model with one weight per expert and projection."""

    def __init__(self, checkpoint: HFCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._positions: dict[str, _ExpertWeight] = {}
        self.entries: dict[str, TensorEntry] = {}
        """Metadata of all tensors by name."""
        for entry in checkpoint.keys().values():
            suffix = _fused_suffix(entry)
            if suffix is None:
                self._add(entry)
            else:
                self._split(entry, suffix)

    def tensor(self, name: str) -> Tensor:
        """Load a tensor to CPU. Only reads the rows of a single expert from a fused tensor."""
        position = self._positions.get(name)
        if position is None:
            return self._checkpoint.tensor(name)
        experts = self._checkpoint.tensor(position.fused_name)
        expert = experts[position.expert]
        return expert.narrow(0, position.first_row, position.rows)

    def _split(self, fused: TensorEntry, suffix: str) -> None:
        layer = fused.name.removesuffix(suffix)
        part_suffixes = _PARTS_BY_SUFFIX[suffix]
        experts, fused_rows, columns = fused.shape
        rows = fused_rows // len(part_suffixes)
        for expert in range(experts):
            first_row = 0
            for part_suffix in part_suffixes:
                name = layer + part_suffix.format(expert=expert)
                self._add(TensorEntry(name, fused.dtype, (rows, columns)))
                self._positions[name] = _ExpertWeight(fused.name, expert, first_row, rows)
                first_row += rows

    def _add(self, entry: TensorEntry) -> None:
        if entry.name in self.entries:
            raise CheckpointError(
                f"{self._checkpoint.path} contains {entry.name} twice: on its own, and as part of "
                "a tensor with all experts. Remove one of them."
            )
        self.entries[entry.name] = entry


def _fused_suffix(entry: TensorEntry) -> str | None:
    """Return the end of the name if a tensor contains all experts."""
    if len(entry.shape) != 3:
        return None
    for suffix in _PARTS_BY_SUFFIX:
        if entry.name.endswith(suffix):
            return suffix
    return None
