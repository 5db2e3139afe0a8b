"""A training run as typed values, from which its command line is generated.

``Run.of(num_layers=4, hidden_size=128, swiglu=True)`` takes Megatron's arguments by name. A user's
words go through the same table: ``run.updated(["--lr", "1e-3"])``. Flags that are not in the table
are passed on unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Self

from kha_megatron.config import KHAConfig
from kha_megatron.model import rules
from kha_megatron.model.fields import Field, rows
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.model.model import Model
from kha_megatron.model.training import Files, Heads, Training
from kha_megatron.model.words import Arguments, parse, render

TABLE: tuple[Field, ...] = rows(Model, Layout, Batch, Training, Files, Heads)
"""Every argument that this package writes or reads."""

OF_HEADS = tuple(row for row in rows(Model, Heads) if row.argument.startswith("kha_"))
"""Arguments of the head mechanisms."""


@cache
def _by(name: str) -> Mapping[str, Field]:
    return {getattr(row, name): row for row in TABLE}


@dataclass(frozen=True)
class Argument:
    """One argument of a command line."""

    flag: str
    words: tuple[str, ...]
    value: Any


def as_arguments(**values: Any) -> dict[str, Argument]:
    """Convert typed values, by argument, to arguments of a command line.

    Values that need no flag, such as False for ``--swiglu``, are left out.
    """
    named = ((name, _by("argument")[name], value) for name, value in values.items())
    return {
        name: Argument(row.flag, words, value)
        for name, row, value in named
        if (words := row.words_of(value)) is not None
    }


def parse_arguments(words: Sequence[str]) -> dict[str, Argument]:
    """Parse a user's words to arguments by name. An unknown flag is its own name.

    Raises:
        ConfigError: a word belongs to no flag, or cannot be parsed.
    """
    found = {}
    for flag, behind in parse(words).items():
        row = _by("flag").get(flag)
        value = row.value_of(behind) if row else behind
        found[row.argument if row else flag] = Argument(flag, behind, value)
    return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run, without the number of ranks."""

    given: Mapping[str, Argument]
    """Arguments by name, in the order of the command line."""
    vocab_size: int | None = None
    """Vocabulary size of the intended tokenizer, from which Megatron takes it."""
    dropped: tuple[str, ...] = field(default=(), compare=False)
    """Flags of the recipe that a user's arguments exclude, each with the reason."""

    @classmethod
    def of(cls, *, vocab_size: int | None = None, **values: Any) -> Self:
        """Build a run from typed values, by the names of Megatron's arguments."""
        return cls(given=as_arguments(**values), vocab_size=vocab_size)

    def updated(self, words: Sequence[str] = (), **values: Any) -> Self:
        """Return the run with other values, and then a user's words.

        The recipe's minimum learning rate keeps its ratio to the maximum, and its warm-up the ratio
        to the iterations. Arguments that the new ones exclude are moved to :attr:`dropped`.

        Raises:
            ConfigError: a word belongs to no flag, or cannot be parsed.
        """
        new = as_arguments(**values) | parse_arguments(words)
        own = {n: one for n, one in self.given.items() if n in new or n not in values}
        reasons = rules.excluded(own, {name: one.value for name, one in new.items()})
        for name in reasons:
            del own[name]
        rate, least = (own[name].value if name in own else 0 for name in ("lr", "min_lr"))
        if "lr" in new and "min_lr" not in new and rate and least:
            new |= as_arguments(min_lr=float(f"{least / rate * new['lr'].value:.6g}"))
        length, warm_up = (
            own[name].value if name in own else 0 for name in ("train_iters", "lr_warmup_iters")
        )
        if "train_iters" in new and "lr_warmup_iters" not in new and length and warm_up:
            new |= as_arguments(lr_warmup_iters=warm_up * new["train_iters"].value // length)
        dropped = (f"{self.given[name].flag}: {why}" for name, why in reasons.items())
        return replace(self, given=own | new, dropped=(*self.dropped, *dropped))

    def with_defaults(self, **values: Any) -> Self:
        """Return the run with values for arguments that it does not give."""
        return replace(self, given=as_arguments(**values) | dict(self.given))

    @property
    def flags(self) -> Arguments:
        """The command line as a dict."""
        return {one.flag: one.words for one in self.given.values()}

    def words(self) -> list[str]:
        """Return the command line."""
        return render(self.flags)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Typed values by argument."""
        return {name: one.value for name, one in self.given.items()}

    @cached_property
    def model(self) -> Model | None:
        """The model; None if the sizes are not on the command line."""
        sizes = {"vocab_size": self.vocab_size} if self.vocab_size else {}
        return Model.of(self.arguments | sizes, self.kha)

    def layout(self, ranks: int | None) -> Layout:
        """Return the parallel sizes on a number of ranks."""
        return Layout.of(self.arguments, ranks)

    @cached_property
    def batch(self) -> Batch | None:
        """The batch; None if Megatron decides."""
        return Batch.of(self.arguments)

    @cached_property
    def kha(self) -> KHAConfig:
        """The head mechanisms. Raises ``ConfigError`` for unknown names."""
        return kha_asked({"kha_preset": "baseline"} | self.arguments) or KHAConfig()

    @cached_property
    def training(self) -> Training:
        """Optimisation, precision and checkpoints."""
        return Training.of(self.arguments)

    @cached_property
    def files(self) -> Files:
        """Files that the run reads and writes."""
        return Files.of(self.arguments)


def kha_asked(arguments: Mapping[str, Any]) -> KHAConfig | None:
    """Return the KHA configuration of a command line's arguments by name; None if none is given.

    Raises:
        ConfigError: a name or a value is unknown.
    """
    names = {row.argument: row.argument.removeprefix("kha_") for row in OF_HEADS}
    kha = KHAConfig.from_options({setting: arguments.get(name) for name, setting in names.items()})
    return kha and kha.with_output_gate(bool(arguments.get("attention_output_gate")))
