"""One training run as it is said to Megatron: typed values in the order of the command line.

``Run.of(num_layers=4, hidden_size=128, swiglu=True)`` holds Megatron's arguments under the names
of its parser. Words of a user's go through the same table: ``run.updated(["--lr", "1e-3"])``. What
the table does not know is carried along as it was said. :class:`~kha_megatron.model.model.Model`,
``Layout``, ``Batch``, ``Training`` and ``Files`` are views of the values, and the command line is
made from them.
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
"""Every argument of Megatron's and ours that this package gives or reads."""

OF_HEADS = tuple(row for row in rows(Model, Heads) if row.argument.startswith("kha_"))
"""Those that say what heads have."""


@cache
def _by(name: str) -> Mapping[str, Field]:
    return {getattr(row, name): row for row in TABLE}


@dataclass(frozen=True)
class Said:
    """One value as the command line has it."""

    flag: str
    words: tuple[str, ...]
    """As the user spelt them, where a user did."""
    value: Any


def say(**values: Any) -> dict[str, Said]:
    """Typed values by the names of Megatron's arguments, as a command line says them.

    What needs no word, like False for a flag that switches on, is left out.

    Raises:
        KeyError: the table has no such argument.
    """
    spoken = {}
    for name, value in values.items():
        row = _by("argument")[name]
        words = row.words_of(value)
        if words is not None:
            spoken[name] = Said(row.flag, words, value)
    return spoken


def hear(words: Sequence[str]) -> dict[str, Said]:
    """A user's words as typed values, by argument; unknown flags by themselves, with their words.

    Raises:
        ConfigError: a word that belongs to no flag, or that is no value of its flag.
    """
    heard = {}
    for flag, behind in parse(words).items():
        row = _by("flag").get(flag)
        value = row.value_of(behind) if row else behind
        heard[row.argument if row else flag] = Said(flag, behind, value)
    return heard


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run, without the number of its ranks."""

    said: Mapping[str, Said]
    """By argument, in the order of the command line."""
    vocab_size: int | None = None
    """Entries of the tokenizer it is meant for, which Megatron takes from the tokenizer itself."""
    dropped: tuple[str, ...] = field(default=(), compare=False)
    """Flags of the run's own that a user's words have put out of use, each with the reason."""

    @classmethod
    def of(cls, *, vocab_size: int | None = None, **values: Any) -> Self:
        """A run of typed values, by the names of Megatron's arguments, in their order.

        Raises:
            KeyError: the table has no such argument.
        """
        return cls(said=say(**values), vocab_size=vocab_size)

    def updated(self, words: Sequence[str] = (), **values: Any) -> Self:
        """The run with other values and then a user's words, each in the place of its own.

        A smallest learning rate of the run's own keeps its share of the largest, and a warm-up its
        share of the iterations. Words of its own that the new ones exclude are left out, and named
        in :attr:`dropped`.

        Raises:
            ConfigError: a word that belongs to no flag, or that is no value of its flag.
        """
        new = say(**values) | hear(words)
        own = {n: one for n, one in self.said.items() if n in new or n not in values}
        reasons = rules.excluded(own, {name: one.value for name, one in new.items()})
        for name in reasons:
            del own[name]
        rate, least = (own[name].value if name in own else 0 for name in ("lr", "min_lr"))
        if "lr" in new and "min_lr" not in new and rate and least:
            new |= say(min_lr=float(f"{least / rate * new['lr'].value:.6g}"))
        length, warm_up = (
            own[name].value if name in own else 0 for name in ("train_iters", "lr_warmup_iters")
        )
        if "train_iters" in new and "lr_warmup_iters" not in new and length and warm_up:
            new |= say(lr_warmup_iters=warm_up * new["train_iters"].value // length)
        dropped = (f"{self.said[name].flag}: {why}" for name, why in reasons.items())
        return replace(self, said=own | new, dropped=(*self.dropped, *dropped))

    def loading(self) -> Self:
        """The run as one that goes on from its own checkpoints, unless it loads others."""
        return replace(self, said=say(load=self.files.save) | dict(self.said))

    @property
    def flags(self) -> Arguments:
        """The command line: every flag once, with its words."""
        return {one.flag: one.words for one in self.said.values()}

    def words(self) -> list[str]:
        """The command line, for ``argparse``."""
        return render(self.flags)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Typed values by argument, of those that the run says."""
        return {name: one.value for name, one in self.said.items()}

    @cached_property
    def model(self) -> Model | None:
        """Its model; None where the sizes come from elsewhere."""
        sizes = {"vocab_size": self.vocab_size} if self.vocab_size else {}
        return Model.of(self.arguments | sizes, self.kha)

    def layout(self, ranks: int) -> Layout:
        """Its parallel sizes on so many ranks.

        Raises:
            ConfigError: virtual stages that the layers do not fill.
        """
        return Layout.of(self.arguments, ranks)

    @cached_property
    def batch(self) -> Batch | None:
        """What a step trains on; None where Megatron decides."""
        return Batch.of(self.arguments)

    @cached_property
    def kha(self) -> KHAConfig:
        """What it knocks.

        Raises:
            ConfigError: a preset, variant, init or kind of attention is unknown.
        """
        return kha_asked({"kha_preset": "baseline"} | self.arguments) or KHAConfig()

    @cached_property
    def training(self) -> Training:
        """How it trains."""
        return Training.of(self.arguments)

    @cached_property
    def files(self) -> Files:
        """What it reads and writes."""
        return Files.of(self.arguments)


def kha_asked(arguments: Mapping[str, Any]) -> KHAConfig | None:
    """What Megatron's and our arguments, by name, ask of heads; None if nothing.

    Raises:
        ConfigError: a name or a value is unknown.
    """
    names = {row.argument: row.argument.removeprefix("kha_") for row in OF_HEADS}
    kha = KHAConfig.asked({setting: arguments.get(name) for name, setting in names.items()})
    return kha and kha.with_output_gate(bool(arguments.get("attention_output_gate")))
