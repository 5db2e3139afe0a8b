"""Recipes: named training runs from which Megatron's command line is generated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from kha_megatron.config import KHAConfig
from kha_megatron.data import CORPUS, TOKENIZER
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.model.run import Run

CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
"""Subdirectories of a run's output directory."""

HEAD_ARGUMENTS = tuple(f"kha_{name}" for name in ("preset", *PROJECTIONS, "init", "heads"))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Named training run without data and output paths, which are added by :meth:`run_for`."""

    name: str
    description: str
    run: Run
    ranks: int
    """Default number of ranks on one machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks, which a user can override for local runs."""
    paper: Mapping[str, str | float] = field(default_factory=dict)
    """Published results: ``total`` and ``active`` parameters as text (excluding KHA), the final
    ``loss``, or the mean ``accuracy`` in percent."""
    note: str = ""
    """Differences from comparable recipes."""
    entry: str = "kha_megatron.training"
    """Training script: a module, or a path that ends in ``.py``."""

    def updated(self, words: Sequence[str] = (), **values: Any) -> Self:
        """Return a copy with other arguments. See :meth:`kha_megatron.model.run.Run.updated`."""
        return replace(self, run=self.run.updated(words, **values))

    def with_heads(self, kha: KHAConfig) -> Self:
        """Return a copy with other head mechanisms. The attention type does not change."""
        options = kha.to_options()
        return self.updated(**{name: options[name.removeprefix("kha_")] for name in HEAD_ARGUMENTS})

    def run_for(
        self,
        words: Sequence[str] = (),
        *,
        data: Path | None = None,
        output: Path | None = None,
        **values: Any,
    ) -> Run:
        """Return the run with paths, typed ``values`` and command-line arguments (``words``).

        Args:
            data: Output directory of ``kha-megatron data prepare``.
            output: Directory for checkpoints and TensorBoard files.
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
