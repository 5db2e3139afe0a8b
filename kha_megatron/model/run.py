"""Typed config of a training run, which can be converted to a Megatron command line.

Example::

    run = Run.from_values(num_layers=4, swiglu=True).updated(["--lr", "1e-3"])
    run.words()  # ["--num-layers", "4", "--swiglu", "--lr", "1e-3"]

Flags that we do not know are passed to Megatron as they are.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any, Literal, Self

from kha_megatron.errors import ConfigError
from kha_megatron.heads import Knock
from kha_megatron.heads.config import INIT_SEED, LATENT_HEADS, HeadsConfig
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.fields import Field, as_flag, declared_fields, flag, read_arguments
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.model.megatron import model_from_arguments
from kha_megatron.model.pattern import PATTERN_ARGUMENT, check_no_gpt_arguments

Arguments = dict[str, tuple[str, ...]]
"""Maps flags (including the dashes) to their values."""

REPEATED = frozenset({"--heads", "--heads-from"})
"""Flags that you can repeat to add more values."""

_option = partial(flag, attribute=None, maximum=2**63 - 1)
"""Declare an argument that is not an attribute of ``TransformerConfig``."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Optimizer, precision, data, logging and checkpoint arguments."""

    train_iters: int | None = _option(None)
    train_samples: int | None = _option(None)
    lr: float | None = _option(None)
    min_lr: float = _option(0.0)
    lr_decay_style: str = _option("linear")
    lr_warmup_fraction: float | None = _option(None)
    lr_warmup_iters: int = _option(0, minimum=0)
    lr_warmup_init: float = _option(0.0)
    optimizer: str = _option("adam")
    muon_split_qkv: bool = _option(
        True,
        "--muon-no-split-qkv",
        argument="muon_split_qkv",
    )
    adam_beta1: float = _option(0.9)
    adam_beta2: float = _option(0.999)
    weight_decay: float = _option(0.01)
    clip_grad: float = _option(1.0)
    seed: int = _option(1234, minimum=-(2**63))
    bf16: bool = _option(False)
    fp16: bool = _option(False)
    use_distributed_optimizer: bool = _option(False)
    use_torch_fsdp2: bool = _option(False)
    use_megatron_fsdp: bool = _option(False)
    overlap_grad_reduce: bool = _option(False)
    overlap_param_gather: bool = _option(False)
    gradient_accumulation_fusion: bool = _option(
        True,
        "--no-gradient-accumulation-fusion",
        argument="gradient_accumulation_fusion",
    )
    recompute_granularity: Literal["selective", "full"] | None = _option(None)
    decrease_batch_size_if_needed: bool = _option(False)
    moe_grouped_gemm: bool = _option(False)
    moe_permute_fusion: bool = _option(False)
    moe_router_fusion: bool = _option(False)
    overlap_moe_expert_parallel_comm: bool = _option(False)
    cross_entropy_loss_fusion: bool = _option(False)
    manual_gc: bool = _option(False)
    manual_gc_interval: int = _option(0, minimum=0)
    log_throughput: bool = _option(False)
    split: str | None = _option(None)
    data_cache_path: str | None = _option(None)
    num_workers: int = _option(2, minimum=0)
    eval_interval: int = _option(1000)
    eval_iters: int = _option(100, minimum=0)
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
    kha_init_seed: int = _option(INIT_SEED, minimum=-(2**63))
    kha_attention: str | None = _option(None)
    kha_latent_heads: int = _option(LATENT_HEADS)
    kha_heads: tuple[str, ...] | None = _option(
        None,
        "--heads",
        argument="kha_heads",
    )
    kha_heads_from: tuple[str, ...] | None = _option(
        None,
        "--heads-from",
        argument="kha_heads_from",
    )


TABLE: tuple[Field, ...] = declared_fields(
    ModelConfig,
    Layout,
    Batch,
    Training,
    HeadOptions,
)
"""Every argument that this package reads or writes."""

HEAD_FIELDS = declared_fields(HeadOptions)


@cache
def _fields_by_flag() -> Mapping[str, Field]:
    return {field.flag: field for field in TABLE}


@cache
def _fields_by_argument() -> Mapping[str, Field]:
    return {field.argument: field for field in TABLE}


_REQUIRE_TE = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
"""Arguments that require Transformer Engine."""


def _excluded_by(argument: str, value: Any) -> tuple[str, ...]:
    """Return the arguments that are dropped if this one is set (they are mutually exclusive)."""
    match argument, value:
        case "tensor_model_parallel_size", 1:
            return ("sequence_parallel",)
        case "use_torch_fsdp2", True:
            return (
                "use_distributed_optimizer",
                "overlap_param_gather",
                "expert_model_parallel_size",
            )
        case "multi_latent_attention", True:
            return ("group_query_attention", "num_query_groups")
        case "fp16", True:
            return ("bf16", "cross_entropy_loss_fusion")
        case "device", "cpu":
            return _REQUIRE_TE
        case "transformer_impl", "local":
            return _REQUIRE_TE
        case "train_samples", samples if samples:
            return ("train_iters",)
    return ()


def parse(words: Sequence[str]) -> Arguments:
    """Parse a command line like argparse.

    Supports ``--flag``, ``--flag value ...`` and ``--flag=value``. If a flag is repeated, the last
    one wins (except for :data:`REPEATED`). Flags start with two dashes and a letter, so ``-1e-3``
    is a value.

    Raises:
        ConfigError: If there is a value without a flag.
    """
    arguments: Arguments = {}
    current_flag = ""
    accepts_values = False
    for word in words:
        is_flag = re.match(r"--[A-Za-z]", word)
        if is_flag:
            current_flag, equals_sign, value = word.partition("=")
            values: tuple[str, ...] = ()
            if current_flag in REPEATED:
                values = arguments.get(current_flag, ())
            if equals_sign:
                values += (value,)
            arguments[current_flag] = values
            # as in argparse, --flag=value cannot be followed by more values
            accepts_values = not equals_sign
        elif accepts_values:
            arguments[current_flag] += (word,)
        else:
            raise ConfigError(f"Unexpected argument {word!r}. Pass arguments as --name value.")
    return arguments


def render(arguments: Arguments) -> list[str]:
    """Inverse of :func:`parse`."""
    words: list[str] = []
    for flag_name, values in arguments.items():
        if flag_name in REPEATED:
            for value in values:
                words += [flag_name, value]
        elif len(values) == 1 and _needs_equals_sign(values[0]):
            words.append(f"{flag_name}={values[0]}")
        else:
            words += [flag_name, *values]
    return words


def _needs_equals_sign(value: str) -> bool:
    """Whether argparse would not accept a value as a separate word."""
    return not value or value.startswith("-")


@dataclass(frozen=True)
class Argument:
    """A command-line argument and its typed value."""

    flag: str
    words: tuple[str, ...]
    value: Any


def as_arguments(**values: Any) -> dict[str, Argument]:
    """Convert typed values to arguments by name. Omits those without a flag (``swiglu=False``)."""
    arguments = {}
    for name, value in values.items():
        field = _fields_by_argument().get(name)
        if field is None:
            raise ConfigError(
                f"Unknown argument {name}={value!r}. Pass other arguments of Megatron as words, "
                f"e.g. updated(['{as_flag(name)}', ...])."
            )
        words = field.format_words(value)
        if words is not None:
            arguments[name] = Argument(flag=field.flag, words=words, value=value)
    return arguments


def parse_arguments(words: Sequence[str]) -> dict[str, Argument]:
    """Parse a command line into arguments by name. Unknown flags are their own name."""
    arguments = {}
    for flag_name, values in parse(words).items():  # values are still strings
        field = _fields_by_flag().get(flag_name)
        if field is None:
            arguments[flag_name] = Argument(flag=flag_name, words=values, value=values)
        else:
            value = field.parse_words(values)
            arguments[field.argument] = Argument(flag=flag_name, words=values, value=value)
    return arguments


def list_unknown_flags(words: Sequence[str]) -> list[str]:
    """Return the flags of a command line that are not in :data:`TABLE`."""
    return [flag_name for flag_name in parse(words) if flag_name not in _fields_by_flag()]


def _find_excluded(
    old: Mapping[str, Argument],
    new: Mapping[str, Argument],
) -> dict[str, str]:
    """Return the names of old arguments that new ones exclude, with the flags of the latter."""
    excluding_flags = {}
    for name, argument in new.items():
        for excluded in _excluded_by(name, argument.value):
            if excluded in old and excluded not in new:
                excluding_flags[excluded] = argument.flag
    return excluding_flags


_PROPORTIONAL_TO = {"min_lr": "lr", "lr_warmup_iters": "train_iters"}


def _dependent_values(
    old: Mapping[str, Argument],
    new: Mapping[str, Argument],
) -> dict[str, Any]:
    """Return the values that follow from new values of other arguments."""
    values = {}
    for name, base in _PROPORTIONAL_TO.items():
        if name in old and base in old and base in new:
            values[name] = _rescale(
                old[name].value,
                old_base=old[base].value,
                new_base=new[base].value,
            )
    if "save_interval" in new and "save_retain_interval" in old:
        interval = new["save_interval"].value
        old_retain_interval = old["save_retain_interval"].value
        if interval >= 1:  # Megatron requires a multiple
            saves_per_retained_one = max(1, old_retain_interval // interval)
            values["save_retain_interval"] = saves_per_retained_one * interval
    return values


def _rescale(value: Any, *, old_base: Any, new_base: Any) -> Any:
    """Change a value such that its ratio to another one remains the same."""
    if not old_base:
        return value
    scaled = value * new_base / old_base
    if isinstance(value, int):
        return int(scaled)
    return float(f"{scaled:.6g}")  # no rounding errors on the command line


@dataclass(frozen=True, kw_only=True)
class Run:
    """Config of a training run. It does not depend on the number of ranks."""

    explicit: Mapping[str, Argument]
    """All arguments by name, in command-line order."""
    vocab_size: int | None = None
    """Expected vocab size of the tokenizer. We do not pass this on the command line."""
    dropped: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """Recipe flags that conflict with the user's arguments, and why."""

    @classmethod
    def from_values(
        cls,
        *,
        vocab_size: int | None = None,
        **values: Any,
    ) -> Self:
        """Build a run from keyword arguments with Megatron's names, e.g. ``num_layers=4``."""
        return cls(explicit=as_arguments(**values), vocab_size=vocab_size)

    def updated(self, words: Sequence[str] = (), **values: Any) -> Self:
        """Return a copy with new values and additional command-line arguments.

        When you change ``lr``, ``min_lr`` is scaled by the same factor, and likewise for
        ``train_iters`` and ``lr_warmup_iters``. ``save_retain_interval`` is rounded to a multiple
        of a new ``save_interval``. Arguments that are excluded by the new ones end up in
        :attr:`dropped`.
        """
        new = as_arguments(**values) | parse_arguments(words)
        old = {}
        for name, argument in self.explicit.items():
            # a value without a flag, e.g. swiglu=False
            is_removed = name in values and name not in new
            if not is_removed:
                old[name] = argument
        dropped = list(self.dropped)
        for name, excluding_flag in _find_excluded(old, new).items():
            dropped.append(f"{old[name].flag}: excluded by {excluding_flag}")
            del old[name]
        dependent = as_arguments(**_dependent_values(old, new))
        return replace(self, explicit=old | dependent | new, dropped=tuple(dropped))

    def with_defaults(self, **values: Any) -> Self:
        """Return a copy that uses these values for all arguments that are not set."""
        return replace(self, explicit=as_arguments(**values) | dict(self.explicit))

    def as_hybrid(self) -> Self:
        """Return the same run with a HybridModel, see :func:`as_hybrid`."""
        changes = as_hybrid(self.arguments)
        if not changes:
            return self
        # all changed arguments but the pattern have default values, i.e. no flags
        arguments = as_arguments(**{PATTERN_ARGUMENT: changes[PATTERN_ARGUMENT]})
        for name, argument in self.explicit.items():
            if name not in changes:
                arguments[name] = argument
        return replace(self, explicit=arguments)

    @property
    def flags(self) -> Arguments:
        return {argument.flag: argument.words for argument in self.explicit.values()}

    def words(self) -> list[str]:
        """Format the command line, including ``--heads-from`` if a mechanism needs it."""
        files = self.kha.files or None
        return render(self.with_defaults(kha_heads_from=files).flags)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        return {name: argument.value for name, argument in self.explicit.items()}

    @cached_property
    def model(self) -> ModelConfig | None:
        """None if there are no model sizes on the command line."""
        arguments = dict(self.arguments)
        if self.vocab_size:
            arguments["vocab_size"] = self.vocab_size
        return model_from_arguments(arguments, self.kha)

    def layout(self, ranks: int | None) -> Layout:
        return Layout.from_arguments(self.arguments, ranks)

    @cached_property
    def batch(self) -> Batch | None:
        return Batch.from_arguments(self.arguments)

    @cached_property
    def kha(self) -> HeadsConfig:
        arguments = {"kha_preset": "baseline"} | self.arguments
        return parse_kha_config(arguments) or HeadsConfig()

    @cached_property
    def training(self) -> Training:
        return Training(**read_arguments(Training, self.arguments))


_DESCRIBED_BY_PATTERN = (
    "num_layers",
    "moe_layer_freq",
    "mtp_num_layers",
    "vpp",
    "virtual_stage_layers",
    "first_stage_layers",
    "last_stage_layers",
    "embedding_as_layer",
    "loss_as_layer",
    "stages",
)
"""Fields of ModelConfig and Layout that a layer pattern replaces."""


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
    changes = {}
    for field in declared_fields(ModelConfig, Layout):
        if field.name in _DESCRIBED_BY_PATTERN:
            changes[field.argument] = field.default
    changes[PATTERN_ARGUMENT] = str(pattern)
    return changes


def parse_kha_config(arguments: Mapping[str, Any]) -> HeadsConfig | None:
    """Build the KHA config from Megatron's arguments. None if there are none for KHA."""
    options = {}
    for field in HEAD_FIELDS:
        setting = field.argument.removeprefix("kha_")
        options[setting] = arguments.get(field.argument)
    kha = HeadsConfig.from_options(options)
    if kha is None:
        return None
    return kha.with_output_gate(bool(arguments.get("attention_output_gate")))
