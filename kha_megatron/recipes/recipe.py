"""What a recipe is: one training run as data, and the command line it stands for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from kha_megatron.config import KHAConfig
from kha_megatron.data.paths import CORPUS, TOKENIZER
from kha_megatron.model.words import Arguments, parse, render

Value = str | int | float | Literal[True] | tuple[str | int | float, ...]
"""What follows a flag: one value, several, or True for a flag that stands alone."""

CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
"""Folders that a run writes inside its output folder."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run: Megatron's arguments, the KHA choice and where it is meant to run.

    Paths are no part of it: :meth:`arguments_for` adds them.
    """

    name: str
    """Name on the command line, and title of the NeMo-Run experiment."""

    description: str
    """One line for lists and logs."""

    megatron: Mapping[str, Value]
    """Megatron's own arguments in the order they are written, keyed by flag with its dashes."""

    ranks: int
    """Processes on one machine, unless the caller says otherwise."""

    vocab_size: int
    """Entries of the tokenizer it is meant for. Megatron takes the number from the tokenizer; only
    the planner needs it here."""

    kha_preset: str = "kha_mlp"
    """A key of :data:`kha_megatron.config.PRESETS`."""

    kha_overrides: Mapping[Literal["query", "key", "value", "init"], str] = field(
        default_factory=dict
    )
    """Settings that replace the preset's, as words of the command line (``"none"`` included)."""

    device: Literal["cuda", "cpu"] = "cuda"
    """Device it is meant for, unless the caller says otherwise."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables the ranks need; one that the user has set already is left alone."""

    paper: Mapping[str, str | float] = field(default_factory=dict)
    """What the paper prints of this run: ``total`` and ``active`` parameters without KHA's, as it
    writes them, and the final ``loss``."""

    entry: str = "kha_megatron.training"
    """What every rank runs: a module, or the path of a script that ends in ``.py``."""

    def arguments_for(
        self,
        *,
        data: Path | None = None,
        output: Path | None = None,
        overrides: Sequence[str] = (),
    ) -> Arguments:
        """The whole command line as a mapping; what comes later replaces the same flag before it.

        A recipe's own ``--sequence-parallel`` goes with its tensor parallelism: overriding
        ``--tensor-model-parallel-size`` with 1 takes it out, as no flag of Megatron's does.

        Args:
            data: folder made by ``kha-megatron data prepare``.
            output: folder for checkpoints and TensorBoard files.
            overrides: words in Megatron's own syntax.

        Raises:
            ConfigError: a word of ``overrides`` belongs to no flag.
        """
        own = {flag: _words(value) for flag, value in self.megatron.items()}
        own |= {"--device": (self.device,), "--kha-preset": (self.kha_preset,)}
        own |= {f"--kha-{name}": (word,) for name, word in self.kha_overrides.items()}
        if data is not None:
            own |= {
                "--data-path": (str(data.absolute() / CORPUS),),
                "--tokenizer-type": ("HuggingFaceTokenizer",),
                "--tokenizer-model": (str(data.absolute() / TOKENIZER),),
            }
        if output is not None:
            own |= {
                "--save": (str(output.absolute() / CHECKPOINTS),),
                "--tensorboard-dir": (str(output.absolute() / TENSORBOARD),),
            }
        given = parse(overrides)
        if given.get("--tensor-model-parallel-size") == ("1",):
            own.pop("--sequence-parallel", None)
        return own | given

    def command_line(self, overrides: Sequence[str] = ()) -> list[str]:
        """Arguments for ``python -m kha_megatron.training``, without data and output folders."""
        return render(self.arguments_for(overrides=overrides))


def kha_of(arguments: Arguments) -> KHAConfig:
    """The configuration that a command line's ``--kha-*`` flags ask for.

    Raises:
        ConfigError: a preset, variant, init or kind of attention is unknown.
    """
    names = {f"--kha-{f.name.replace('_', '-')}": f.name for f in fields(KHAConfig)}
    names["--kha-preset"] = "preset"
    given = {name: " ".join(arguments[flag]) for flag, name in names.items() if flag in arguments}
    return KHAConfig.asked({"preset": "baseline", "heads": arguments.get("--heads")} | given)


def _words(value: Value) -> tuple[str, ...]:
    if value is True:
        return ()
    return tuple(str(v) for v in value) if isinstance(value, tuple) else (str(value),)
