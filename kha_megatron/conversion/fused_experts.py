"""Read experts that are stored as 3-D tensors.

transformers 5 holds the experts of a layer in memory as two tensors

    gate_up_proj   [experts, 2 * intermediate_size, hidden_size]   gate first
    down_proj      [experts, hidden_size, intermediate_size]

and ``save_pretrained(..., save_original_format=False)`` writes them like this. We present them as
one tensor per expert and projection, which is how all models are published.
"""

import re
from typing import NamedTuple

from torch import Tensor

from kha_megatron.checkpoint.hf_reader import HFCheckpoint
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.errors import CheckpointError

_FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj")
_PROJECTIONS = {"gate_up": ("gate", "up"), "down": ("down",)}


class _ExpertWeight(NamedTuple):
    """Position of an expert's weight in a fused tensor."""

    fused: str
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
        for name, entry in checkpoint.keys().items():
            match = _FUSED.fullmatch(name)
            if match and len(entry.shape) == 3:
                self._split(match[1], _PROJECTIONS[match[2]], entry)
            else:
                self._add(entry)

    def tensor(self, name: str) -> Tensor:
        """Load a tensor to CPU. Only reads the rows of a single expert from a fused tensor."""
        position = self._positions.get(name)
        if position is None:
            return self._checkpoint.tensor(name)
        experts = self._checkpoint.tensor(position.fused)
        return experts[position.expert].narrow(0, position.first_row, position.rows)

    def _split(self, prefix: str, projections: tuple[str, ...], fused: TensorEntry) -> None:
        experts, fused_rows, columns = fused.shape
        rows = fused_rows // len(projections)
        for expert in range(experts):
            for number, projection in enumerate(projections):
                name = f"{prefix}.{expert}.{projection}_proj.weight"
                self._add(TensorEntry(name, fused.dtype, (rows, columns)))
                self._positions[name] = _ExpertWeight(fused.name, expert, number * rows, rows)

    def _add(self, entry: TensorEntry) -> None:
        if entry.name in self.entries:
            raise CheckpointError(
                f"{self._checkpoint.path} contains {entry.name} twice: on its own, and as part of "
                "a tensor with all experts. Remove one of them."
            )
        self.entries[entry.name] = entry
