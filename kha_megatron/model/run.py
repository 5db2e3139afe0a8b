"""Typed config of a training run, which can be converted to a Megatron command line.

Example::

    run = Run.from_values(num_layers=4, swiglu=True).updated(["--lr", "1e-3"])
    run.words()  # ["--num-layers", "4", "--swiglu", "--lr", "1e-3"]

Flags that we do not know are passed to Megatron as they are.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any, Literal, Self

from kha_megatron.errors import ConfigError
from kha_megatron.heads import Knock
from kha_megatron.heads.config import INIT_SEED, LATENT_HEADS, HeadsConfig
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.fields import Field, flag, read_arguments, rows
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.model.megatron import model_from_arguments
from kha_megatron.model.pattern import check_no_gpt_arguments

Arguments = dict[str, tuple[str, ...]]
"""Maps flags (including the dashes) to their values."""

REPEATED = frozenset({"--heads", "--heads-from"})
"""Flags that you can repeat to add more values."""

_option = partial(flag, attribute=None, most=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Optimizer, precision, data, logging and checkpoint arguments."""

    train_iters: int | None = _option(None)
    train_samples: int | None = _option(None)
    lr: float | None = _option(None)
    min_lr: float = _option(0.0)
    lr_decay_style: str = _option("linear")
    lr_warmup_fraction: float | None = _option(None)
    lr_warmup_iters: int = _option(0, least=0)
    lr_warmup_init: float = _option(0.0)
    optimizer: str = _option("adam")
    muon_split_qkv: bool = _option(True, "--muon-no-split-qkv", argument="muon_split_qkv")
    adam_beta1: float = _option(0.9)
    adam_beta2: float = _option(0.999)
    weight_decay: float = _option(0.01)
    clip_grad: float = _option(1.0)
    seed: int = _option(1234, least=-(2**63))
    bf16: bool = _option(False)
    fp16: bool = _option(False)
    use_distributed_optimizer: bool = _option(False)
    use_torch_fsdp2: bool = _option(False)
    use_megatron_fsdp: bool = _option(False)
    overlap_grad_reduce: bool = _option(False)
    overlap_param_gather: bool = _option(False)
    gradient_accumulation_fusion: bool = _option(
        True, "--no-gradient-accumulation-fusion", argument="gradient_accumulation_fusion"
    )
    recompute_granularity: Literal["selective", "full"] | None = _option(None)
    decrease_batch_size_if_needed: bool = _option(False)
    moe_grouped_gemm: bool = _option(False)
    moe_permute_fusion: bool = _option(False)
    log_throughput: bool = _option(False)
    split: str | None = _option(None)
    data_cache_path: str | None = _option(None)
    num_workers: int = _option(2, least=0)
    eval_interval: int = _option(1000)
    eval_iters: int = _option(100, least=0)
    log_interval: int = _option(100)
    log_timers_to_tensorboard: bool = _option(False)
    log_memory_to_tensorboard: bool = _option(False)
    tensorboard_log_interval: int = _option(1)
    save_interval: int | None = _option(None)
    save_interval_in_mins: float | None = _option(None)
    save_retain_interval: int | None = _option(None)
    ckpt_format: str = _option("torch_dist")
    exit_duration_in_mins: int | None = _option(None)
    exit_signal_handler: bool = _option(False)
    use_checkpoint_args: bool = _option(False)
    heterogeneous_layers_config_path: str | None = _option(None)
    heterogeneous_layers_config_encoded_json: str | None = _option(None)
    data_path: tuple[str, ...] | None = _option(None)
    train_data_path: tuple[str, ...] | None = _option(None)
    valid_data_path: tuple[str, ...] | None = _option(None)
    test_data_path: tuple[str, ...] | None = _option(None)
    data_args_path: str | None = _option(None)
    per_split_data_args_path: str | None = _option(None)
    mock_data: bool = _option(False)
    tokenizer_type: str | None = _option(None)
    tokenizer_model: str | None = _option(None)
    save: str | None = _option(None)
    load: str | None = _option(None)
    tensorboard_dir: str | None = _option(None)
    device: str = _option("cuda")
    kha_upcycle: bool = _option(False)
    kha_perturb_embedding: float = _option(0.0)


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Command-line form of ``HeadsConfig``. ``Run.kha`` is the parsed version."""

    kha_preset: str | None = _option(None)
    kha_query: str | None = _option(None)
    kha_key: str | None = _option(None)
    kha_value: str | None = _option(None)
    kha_init: str = _option(Knock.init)
    kha_init_seed: int = _option(INIT_SEED, least=-(2**63))
    kha_attention: str | None = _option(None)
    kha_latent_heads: int = _option(LATENT_HEADS)
    kha_heads: tuple[str, ...] | None = _option(None, "--heads", argument="kha_heads")
    kha_heads_from: tuple[str, ...] | None = _option(
        None, "--heads-from", argument="kha_heads_from"
    )


TABLE: tuple[Field, ...] = rows(ModelConfig, Layout, Batch, Training, HeadOptions)
"""Every argument that this package reads or writes."""

HEAD_FIELDS = rows(HeadOptions)


_TE_ONLY = ("moe_grouped_gemm", "moe_permute_fusion")
_EXCLUDES: Mapping[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "tensor_model_parallel_size": (lambda size: size == 1, ("sequence_parallel",)),
    "use_torch_fsdp2": (
        bool,
        ("use_distributed_optimizer", "overlap_param_gather", "expert_model_parallel_size"),
    ),
    "multi_latent_attention": (bool, ("group_query_attention", "num_query_groups")),
    "fp16": (bool, ("bf16",)),
    "device": (lambda device: device == "cpu", _TE_ONLY),
    "transformer_impl": (lambda layers: layers == "local", _TE_ONLY),
    "train_samples": (bool, ("train_iters",)),
}
"""Format: ``{argument: (condition, others)}``. If an argument's new value meets the condition, we
drop the other arguments (they are mutually exclusive)."""


@cache
def _by(name: str) -> Mapping[str, Field]:
    return {getattr(row, name): row for row in TABLE}


def parse(words: Sequence[str]) -> Arguments:
    """Parse a command line like argparse.

    Supports ``--flag``, ``--flag value ...`` and ``--flag=value``. If a flag is repeated, the last
    one wins (except for :data:`REPEATED`). Flags start with two dashes and a letter, so ``-1e-3``
    is a value.

    Raises:
        ConfigError: If there is a value without a flag.
    """
    found: Arguments = {}
    name, closed = "", True
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word.partition("=")
            closed = bool(equals)  # as in argparse, --flag=value cannot be followed by more values
            before = found.get(name, ()) if name in REPEATED else ()
            found[name] = (*before, value) if closed else before
        elif closed:
            raise ConfigError(f"Unexpected argument {word!r}. Pass arguments as --name value.")
        else:
            found[name] += (word,)
    return found


def render(arguments: Arguments) -> list[str]:
    """Inverse of :func:`parse`."""
    words: list[str] = []
    for name, values in arguments.items():
        if name in REPEATED:
            words += [word for value in values for word in (name, value)]
        elif len(values) == 1 and (not values[0] or values[0].startswith("-")):
            words.append(f"{name}={values[0]}")
        else:
            words += [name, *values]
    return words


@dataclass(frozen=True)
class Argument:
    """A command-line argument and its typed value."""

    flag: str
    words: tuple[str, ...]
    value: Any


def as_arguments(**values: Any) -> dict[str, Argument]:
    """Convert typed values to arguments. Omits those that do not need a flag (``swiglu=False``)."""
    named = ((name, _by("argument")[name], value) for name, value in values.items())
    return {
        name: Argument(row.flag, words, value)
        for name, row, value in named
        if (words := row.format_words(value)) is not None
    }


def _fit_retained(interval: int, retained: Argument | None) -> dict[str, Argument]:
    """Round ``--save-retain-interval`` to a multiple of ``--save-interval`` (Megatron's rule)."""
    if retained is None or interval < 1:
        return {}
    multiple = max(1, retained.value // interval)
    return as_arguments(save_retain_interval=multiple * interval)


def parse_arguments(words: Sequence[str]) -> dict[str, Argument]:
    """Parse a command line into arguments by name. Unknown flags are their own name."""
    found = {}
    for name, values in parse(words).items():
        row = _by("flag").get(name)
        value = row.parse_words(values) if row else values
        found[row.argument if row else name] = Argument(name, values, value)
    return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """Config of a training run. It does not depend on the number of ranks."""

    given: Mapping[str, Argument]
    """All arguments by name, in command-line order."""
    vocab_size: int | None = None
    """Expected vocab size of the tokenizer. We do not pass this on the command line."""
    dropped: tuple[str, ...] = field(default=(), compare=False)
    """Recipe flags that conflict with the user's arguments, and why."""

    @classmethod
    def from_values(cls, *, vocab_size: int | None = None, **values: Any) -> Self:
        """Build a run from keyword arguments with Megatron's names, e.g. ``num_layers=4``."""
        return cls(given=as_arguments(**values), vocab_size=vocab_size)

    def updated(self, words: Sequence[str] = (), **values: Any) -> Self:
        """Return a copy with new values and additional command-line arguments.

        When you change ``lr``, ``min_lr`` is scaled by the same factor, and likewise for
        ``train_iters`` and ``lr_warmup_iters``. ``save_retain_interval`` is rounded to a multiple
        of a new ``save_interval``. Arguments that are excluded by the new ones end up in
        :attr:`dropped`.
        """
        new = as_arguments(**values) | parse_arguments(words)
        own = {n: one for n, one in self.given.items() if n in new or n not in values}
        excluded = {
            name: other
            for other, (holds, names) in _EXCLUDES.items()
            if other in new and holds(new[other].value)
            for name in names
            if name in own and name not in new
        }
        for name in excluded:
            del own[name]
        for name, base in (("min_lr", "lr"), ("lr_warmup_iters", "train_iters")):
            if base in new and name not in new and base in own and name in own:
                before, value = own[base].value, own[name].value
                scaled = value * new[base].value / before if before else value
                scaled = int(scaled) if isinstance(value, int) else float(f"{scaled:.6g}")
                new |= as_arguments(**{name: scaled})
        if "save_interval" in new and "save_retain_interval" not in new:
            new |= _fit_retained(new["save_interval"].value, own.get("save_retain_interval"))
        dropped = (
            f"{self.given[name].flag}: excluded by {new[other].flag}"
            for name, other in excluded.items()
        )
        return replace(self, given=own | new, dropped=(*self.dropped, *dropped))

    def with_defaults(self, **values: Any) -> Self:
        """Return a copy that uses these values for all arguments that are not set."""
        return replace(self, given=as_arguments(**values) | dict(self.given))

    def as_hybrid(self) -> Self:
        """Return the same run with a HybridModel, see :func:`as_hybrid`."""
        changes = as_hybrid(self.arguments)
        kept = {name: one for name, one in self.given.items() if name not in changes}
        pattern = {name: value for name, value in changes.items() if name == HYBRID}
        return replace(self, given=as_arguments(**pattern) | kept)

    @property
    def flags(self) -> Arguments:
        return {one.flag: one.words for one in self.given.values()}

    def words(self) -> list[str]:
        """Format the command line, including ``--heads-from`` if a mechanism needs it."""
        files = as_arguments(kha_heads_from=self.kha.files or None)
        return render(replace(self, given=files | dict(self.given)).flags)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        return {name: one.value for name, one in self.given.items()}

    @cached_property
    def model(self) -> ModelConfig | None:
        """None if there are no model sizes on the command line."""
        sizes = {"vocab_size": self.vocab_size} if self.vocab_size else {}
        return model_from_arguments(self.arguments | sizes, self.kha)

    def layout(self, ranks: int | None) -> Layout:
        return Layout.from_arguments(self.arguments, ranks)

    @cached_property
    def batch(self) -> Batch | None:
        return Batch.from_arguments(self.arguments)

    @cached_property
    def kha(self) -> HeadsConfig:
        return parse_kha_config({"kha_preset": "baseline"} | self.arguments) or HeadsConfig()

    @cached_property
    def training(self) -> Training:
        return Training(**read_arguments(Training, self.arguments))


HYBRID = "hybrid_layer_pattern"
_DESCRIBED_BY_PATTERN = (
    *("num_layers", "moe_layer_freq", "mtp_num_layers"),
    *(
        row.argument
        for row in rows(Layout)
        if row.field in ("vpp", "virtual_stage_layers", "stages")
        or row.field.endswith(("_stage_layers", "_as_layer"))
    ),
)


def as_hybrid(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes to Megatron's arguments that turn a GPTModel into a HybridModel.

    ``--num-layers`` and the arguments of pipeline stages are replaced by
    ``--hybrid-layer-pattern``. The result is empty if there is a pattern already, or if
    ``--gpt-model`` is set. The arguments must have been checked.

    Raises:
        ConfigError: If an argument only works with GPTModel.
    """
    model = model_from_arguments(arguments)
    if model and model.gpt_model and model.hybrid_layer_pattern:
        raise ConfigError("--gpt-model cannot be combined with --hybrid-layer-pattern.")
    if model is None or model.gpt_model or model.hybrid_layer_pattern:
        return {}
    check_no_gpt_arguments(arguments)
    stages = Layout.from_arguments(arguments, None).chunk_layers(model.layers)
    pattern = model.layer_pattern(chain.from_iterable(stages))
    changes = {name: _by("argument")[name].default for name in _DESCRIBED_BY_PATTERN}
    return changes | {HYBRID: str(pattern)}


def parse_kha_config(arguments: Mapping[str, Any]) -> HeadsConfig | None:
    """Build the KHA config from Megatron's arguments. None if there are not any for KHA."""
    names = {row.argument: row.argument.removeprefix("kha_") for row in HEAD_FIELDS}
    kha = HeadsConfig.from_options(
        {setting: arguments.get(name) for name, setting in names.items()}
    )
    return kha and kha.with_output_gate(bool(arguments.get("attention_output_gate")))
