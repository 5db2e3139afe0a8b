"""The :class:`Recipe` dataclass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from kha_megatron.data import CORPUS, TOKENIZER
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.model.run import Run

CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
INDICES = "indices"
"""Subdirectories of a run's output directory."""

HEAD_ARGUMENTS = tuple(f"kha_{name}" for name in ("preset", *PROJECTIONS, "init", "heads"))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named training run. Data and output paths are filled in by :meth:`run_for`."""

    name: str
    description: str
    run: Run
    ranks: int
    """Default number of ranks on one machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the ranks. In local runs, the user's values win."""
    paper: Mapping[str, str | float] = field(default_factory=dict)
    """Published results. Keys are ``total`` and ``active`` (parameters excluding KHA, e.g. "6.6B"),
    ``loss`` (final loss) and ``accuracy`` (mean, in percent)."""
    note: str = ""
    """Differences from comparable recipes."""
    entry: str = "kha_megatron.training"
    """Training script: a module name or a path to a ``.py`` file."""

    def updated(self, words: Sequence[str] = (), **values: Any) -> Self:
        """Return a copy with changed arguments. See :meth:`kha_megatron.model.run.Run.updated`."""
        return replace(self, run=self.run.updated(words, **values))

    def with_heads(self, kha: HeadsConfig) -> Self:
        """Return a copy with different head mechanisms but the same attention type."""
        options = kha.to_options()
        arguments = {name: options[name.removeprefix("kha_")] for name in HEAD_ARGUMENTS}
        return self.updated(**arguments)

    def run_for(
        self,
        words: Sequence[str] = (),
        *,
        data: Path | None = None,
        output: Path | None = None,
        **values: Any,
    ) -> Run:
        """Return the run with paths and overrides filled in.

        Args:
            words: Command-line arguments, e.g. ``["--lr", "1e-3"]``.
            data: Output directory of ``kha-megatron data prepare``.
            output: Directory for checkpoints and TensorBoard files.
            values: Arguments as Python values, e.g. ``lr=1e-3``.
        """
        paths: dict[str, Any] = {}
        if data is not None:
            paths |= {
                "data_path": (str(data.absolute() / CORPUS),),
                "tokenizer_type": "HuggingFaceTokenizer",
                "tokenizer_model": str(data.absolute() / TOKENIZER),
            }
        if output is not None:
            paths |= {
                "save": str(output.absolute() / CHECKPOINTS),
                "tensorboard_dir": str(output.absolute() / TENSORBOARD),
            }
        return self.run.updated(words, **paths, **values)
