"""What a recipe is: one training run as typed data, and where it is meant to run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from kha_megatron.config import KHAConfig
from kha_megatron.data.paths import CORPUS, TOKENIZER
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.model.run import Run

CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
"""Folders that a run writes inside its output folder."""

DECIDED = tuple(f"kha_{name}" for name in ("preset", *PROJECTIONS, "init", "heads"))
"""Arguments that say which mechanisms heads have, and how they start."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run: what Megatron and KHA are told, and where it is meant to run.

    Paths are no part of it: :meth:`run_for` adds them.
    """

    name: str
    """Name on the command line, and title of the NeMo-Run experiment."""

    description: str
    """One line for lists and logs."""

    run: Run
    """Model, layout, batch, training and heads, in the order in which they are written."""

    ranks: int
    """Processes on one machine, unless the caller says otherwise."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables the ranks need; one that the user has set already is left alone."""

    paper: Mapping[str, str | float] = field(default_factory=dict)
    """What its paper prints of this run: ``total`` and ``active`` parameters, as it writes them and
    without the knock's, the final ``loss``, or the mean ``accuracy`` over its tasks in percent."""

    note: str = ""
    """In what, besides its name, it is not like the recipes that it is compared with, and why."""

    entry: str = "kha_megatron.training"
    """What every rank runs: a module, or the path of a script that ends in ``.py``."""

    def updated(self, words: Sequence[str] = (), **values: Any) -> Self:
        """The recipe with other values: see :meth:`kha_megatron.model.run.Run.updated`."""
        return replace(self, run=self.run.updated(words, **values))

    def having(self, kha: KHAConfig) -> Self:
        """The recipe with other mechanisms in the place of its own; its kind of attention stays."""
        asking = kha.asking()
        return self.updated(**{name: asking[name.removeprefix("kha_")] for name in DECIDED})

    def run_for(
        self,
        words: Sequence[str] = (),
        *,
        data: Path | None = None,
        output: Path | None = None,
        **values: Any,
    ) -> Run:
        """The run with its folders; what comes later replaces the same value before it.

        Args:
            words: in Megatron's own syntax; they come last.
            data: folder made by ``kha-megatron data prepare``.
            output: folder for checkpoints and TensorBoard files.
            values: others, by the names of Megatron's arguments.

        Raises:
            ConfigError: a word that belongs to no flag, or that is no value of its flag.
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
