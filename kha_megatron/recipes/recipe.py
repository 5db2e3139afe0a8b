"""A recipe: one training run as typed data, from which the command line is generated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from kha_megatron.config import KHAConfig
from kha_megatron.data import CORPUS, TOKENIZER
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.model.run import Run

CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
"""Names of the directories that a run writes in its output directory."""

HEAD_ARGUMENTS = tuple(f"kha_{name}" for name in ("preset", *PROJECTIONS, "init", "heads"))
"""Arguments that select head mechanisms and their initial values."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run without paths, which :meth:`run_for` adds."""

    name: str
    description: str
    run: Run
    """Model, layout, batch, training and heads."""
    ranks: int
    """Default number of processes on one machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks. On this machine the user's own values take precedence."""
    paper: Mapping[str, str | float] = field(default_factory=dict)
    """Printed numbers: ``total`` and ``active`` parameters as text, without KHA's; the final
    ``loss``; or the mean ``accuracy`` over the paper's tasks in percent."""
    note: str = ""
    """Difference from the recipes that this one is compared with."""
    entry: str = "kha_megatron.training"
    """Entry point of the ranks: a module, or the path of a script that ends in ``.py``."""

    def updated(self, words: Sequence[str] = (), **values: Any) -> Self:
        """Return the recipe with other values; see :meth:`kha_megatron.model.run.Run.updated`."""
        return replace(self, run=self.run.updated(words, **values))

    def with_heads(self, kha: KHAConfig) -> Self:
        """Return the recipe with other mechanisms and the same kind of attention."""
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
        """Return the run with its paths, with ``values`` and with a user's ``words``.

        Args:
            data: directory made by ``kha-megatron data prepare``.
            output: directory for checkpoints and TensorBoard files.

        Raises:
            ConfigError: a word follows no flag, or cannot be parsed.
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
