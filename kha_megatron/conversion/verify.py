"""Are two checkpoints the same model? Of either side: tensor by tensor, then by what they compute.

Tensors are compared under one naming, whatever the layout on disk, and so is what no tensor tells:
RoPE, epsilons, routing, the heads' settings. Then both models run on the same
tokens: Megatron's own, loaded by Megatron's own loader, and transformers' own, so that nothing of
the conversion is trusted.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.hf_reader import HFCheckpoint, is_hf_folder
from kha_megatron.conversion import megatron_model
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.engine import transfer
from kha_megatron.conversion.hf_configs import family_of, with_zeros
from kha_megatron.conversion.megatron_model import Outputs, record_layers
from kha_megatron.conversion.sources import (
    HFSource,
    MegatronSource,
    Source,
    not_finite,
    open_source,
)
from kha_megatron.conversion.table import Place
from kha_megatron.conversion.transforms import AsStored, Expressed, Upcycled, folded
from kha_megatron.errors import CheckpointError, in_one_line

BATCH, LENGTH = 2, 64
TOLERANCE = 1e-4
"""Largest difference of a logit in float32 that rounding explains."""
_ORDER = ("first", "second")
_MAY_DIFFER = (
    "vocab_size",
    "padded_vocab_size",
    "max_position_embeddings",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "init_method_std",
    "attention_dropout",
    "hidden_dropout",
    "kha",
    "kha_attention",
    "kha_latent_heads",
)
"""Of a model's fields, those of its training, those that shapes of tensors tell where they matter,
and those of the heads, which are compared one by one."""
_OF_TRAINING = ("start", "balance", "balance_scale", "anneal")
"""Of the settings of a mechanism of the heads, those that a trained model computes nothing with."""


@dataclass(frozen=True)
class TensorComparison:
    """Two checkpoints tensor by tensor, by their Hugging Face names."""

    tensors: int
    """How many both have."""
    parameters: tuple[int, int]
    missing: list[str] = field(default_factory=list)
    """The second lacks them."""
    unexpected: list[str] = field(default_factory=list)
    """Only the second has them."""
    mismatched: list[str] = field(default_factory=list)
    """Of another shape."""
    different: list[str] = field(default_factory=list)
    """Other values, after rounding to the smaller dtype of the two; or numbers that are finite in
    one of them only."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """Tensors with NaN or infinities in one of the two at least, and how many in both together."""
    remark: str = "as they are"
    """What was done to one of them before."""

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.unexpected or self.mismatched or self.different)


@dataclass(frozen=True)
class Agreement:
    """Logits of two models, in float32, over all positions of the batch."""

    max_difference: float
    mean_difference: float
    kl: float
    """Mean Kullback-Leibler divergence of the second model from the first, in nats."""
    argmax: float
    """Share of positions where both prefer the same token."""
    tokens: int
    first_layer: int | None = None
    """The first layer, from 0, whose output differs by more than ``TOLERANCE``."""
    limit: float | None = TOLERANCE
    """What ``max_difference`` must stay below; None where weights were rounded to fold them, or to
    store norms as their distance from one, and where one model drops heads of the other."""

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.limit is None or self.max_difference < self.limit


@dataclass(frozen=True)
class Verification:
    """The tensors, what no tensor tells, and the logits if both models ran."""

    tensors: TensorComparison
    logits: Agreement | None = None
    settings: list[str] = field(default_factory=list)
    """What differs of the two configurations, such as ``rotary_base 500.0 against 10000.0``."""

    @property
    def agrees(self) -> bool:
        """Whether the two are the same model."""
        same = self.tensors.agrees and not self.settings
        return same and (self.logits is None or self.logits.agrees)


@dataclass(frozen=True)
class Pair:
    """Two open checkpoints, brought to one form."""

    one: Source
    other: Source
    paths: tuple[Path, Path]
    remark: str
    rounded: bool
    """Whether bringing them to one form rounds weights that are not float32."""
    changed: bool
    """Whether one of them drops heads that the other has: only their tensors can be the same."""

    @classmethod
    def open(cls, one: Path, other: Path) -> "Pair":
        """Open two checkpoints of either side.

        Raises:
            CheckpointError: one is damaged, or its configuration and its tensors disagree.
        """
        first, second = (open_source(path, comparing=True) for path in (one, other))
        for source, beside in ((first, second), (second, first)):
            size = min(source.model.vocab_size, beside.model.vocab_size)
            if isinstance(source, MegatronSource):  # who knows the padding shall tell
                source.model = replace(source.model, vocab_size=size)
        paths = first.path, second.path
        dialects = [s.dialect for s in (first, second) if isinstance(s, HFSource)]
        configs = [source.model.kha for source in (first, second)]
        first, second, remark, rounded = _same_kha(first, second)
        first, second = _with_zeros(first, second)
        for dialect in (d for d in dialects if d.norms_minus_one):
            first, second = AsStored(first, dialect), AsStored(second, dialect)
            rounded = True
        drop = [any(m.drops_heads for m in kha.mechanisms) for kha in configs]
        return cls(first, second, paths, remark, rounded, drop[0] != drop[1])

    @property
    def needed_bytes(self) -> int:
        """Memory of both models in float32, with some room to work."""
        parameters = sum(math.prod(entry.shape) for _, held in self.one.entries() for entry in held)
        return int(parameters * 4 * 2.5)

    @property
    def fits_in_memory(self) -> bool:
        """Whether :func:`compare_logits` can run on this machine now."""
        return self.needed_bytes < psutil.virtual_memory().available

    def verify(self, *, logits: bool = True, workers: int | None = None) -> Verification:
        """Compare tensors, settings, and logits; says so where both models do not fit into memory.

        Raises:
            CheckpointError: a tensor is damaged, or a library does not load its own model.
        """
        compared = Verification(
            compare_tensors(self, workers=workers),
            settings=compare_settings(self.one.model, self.other.model),
        )
        tensors = compared.tensors
        if brings_code := [p for p in self.paths if logits and not _has_class(p)]:
            announce(
                f"logits not verified: {brings_code[0]} brings its own code, which is never run, "
                "and transformers has no class for it"
            )
            return compared
        if not logits or tensors.missing or tensors.unexpected or tensors.mismatched:
            return compared
        if not self.fits_in_memory:
            needed = self.needed_bytes / 10**9
            announce(f"logits not verified: both models need {needed:.1f} GB of free memory")
            return compared
        return replace(compared, logits=compare_logits(self))


def _has_class(path: Path) -> bool:
    return not is_hf_folder(path) or family_of(HFCheckpoint.open(path).config).causal_lm is not None


def _same_kha(one: Source, other: Source) -> tuple[Source, Source, str, bool]:
    """Fold or upcycle one of two models if only the other has more mechanisms of the heads."""
    pair: list[Source] = [one, other]
    has = [{m.name for m in source.model.kha.mechanisms} for source in pair]
    at = int(has[0] < has[1])
    if not has[at] > has[1 - at]:
        return one, other, "as they are", False
    kha = pair[at].model.kha.without(*has[1 - at])
    if kha.folds:
        pair[at] = folded(pair[at], kha)
        return pair[0], pair[1], f"the {_ORDER[at]} folded", True
    pair[1 - at] = Upcycled(pair[1 - at], replace(kha, init="identity"))
    return pair[0], pair[1], f"the {_ORDER[1 - at]} upcycled", False


def _with_zeros(one: Source, other: Source) -> tuple[Source, Source]:
    """Give both the expert biases and the shared expert that one of them does without."""
    models = [source.model for source in (one, other)]
    if not all(model.num_experts for model in models):
        return one, other
    zeros: dict[str, Any] = {
        "bias": any(model.moe_router_enable_expert_bias for model in models),
        "shared": max(model.shared_width for model in models),
        "gate": any(model.moe_shared_expert_gate for model in models),
    }
    first, second = (
        Expressed(source, with_zeros(source.model, **zeros)) for source in (one, other)
    )
    return first, second


def compare_settings(one: Architecture, other: Architecture) -> list[str]:
    """What two models compute differently with equal tensors: each setting and its two values."""
    ours, theirs = _settings(one), _settings(other)
    return [
        f"{name} {ours.get(name)} against {theirs.get(name)}"
        for name in (ours | theirs)
        if ours.get(name) != theirs.get(name)
    ]


def _settings(model: Architecture) -> dict[str, Any]:
    found = {f.name: getattr(model, f.name) for f in fields(model) if f.name not in _MAY_DIFFER}
    for name, value in model.kha.to_dict(start=False).items():
        of_one = value.items() if isinstance(value, dict) else ()
        found |= {f"kha {name}.{word}": held for word, held in of_one if word not in _OF_TRAINING}
        if not isinstance(value, dict):
            found[f"kha {name}"] = value
    return found


def compare_tensors(pair: Pair, *, workers: int | None = None) -> TensorComparison:
    """Compare every tensor, some at a time."""
    ours, theirs = _names(pair.one), _names(pair.other)
    both = ours.keys() & theirs.keys()
    mismatched = {name for name in both if ours[name][2] != theirs[name][2]}
    different: list[str] = []
    also: dict[str, int] = {}
    lock = threading.Lock()

    def put(place: Place, parts: list[Tensor]) -> None:
        names = place.hf_names(pair.one.model)
        todo = [n for n in names if n in both and n not in mismatched]
        if not todo:
            return
        counterpart = pair.other.read(theirs[todo[0]][0])
        for name in todo:
            one, other = parts[ours[name][1]], counterpart[theirs[name][1]]
            if count := not_finite(other):
                also[name] = count
            if not _equal(one, other):
                with lock:
                    different.append(name)

    wrong = transfer(pair.one, put, workers=workers)
    return TensorComparison(
        tensors=len(both),
        parameters=(_parameters(ours), _parameters(theirs)),
        missing=sorted(ours.keys() - theirs.keys()),
        unexpected=sorted(theirs.keys() - ours.keys()),
        mismatched=sorted(mismatched),
        different=sorted(different),
        not_finite=dict(sorted((Counter(wrong) + Counter(also)).items())),
        remark=pair.remark,
    )


def _names(source: Source) -> Mapping[str, tuple[Place, int, tuple[int, ...]]]:
    """Place, number in it and shape of every tensor."""
    return {
        entry.name: (place, number, entry.shape)
        for place, held in source.entries()
        for number, entry in enumerate(held)
    }


def _parameters(names: Mapping[str, tuple[Place, int, tuple[int, ...]]]) -> int:
    return sum(math.prod(shape) for place, _, shape in names.values() if place.row.trained)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether one is the other rounded, or the same; a NaN equals a NaN in the same place."""
    if not_finite(one) != not_finite(other):  # before rounding, which may make infinities
        return False
    if one.dtype != other.dtype:
        smaller = min(other, one, key=lambda tensor: tensor.dtype.itemsize).dtype
        one, other = one.to(smaller), other.to(smaller)
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def compare_logits(pair: Pair) -> Agreement:
    """Run both models, each by its own library, on the same tokens.

    Raises:
        CheckpointError: a library does not load its own model completely.
    """
    models = pair.one.model, pair.other.model
    tokens = torch.randint(
        0,
        min(model.vocab_size for model in models),
        (BATCH, min(LENGTH, *(model.max_position_embeddings for model in models))),
        generator=torch.Generator().manual_seed(0),
    )
    dtypes = [next(source.entries())[1][0].dtype for source in (pair.one, pair.other)]
    smaller = min(dtypes[::-1], key=lambda dtype: dtype.itemsize)
    runs = [run_model(path, tokens, smaller) for path in pair.paths]
    agreement = compare(*runs)
    excused = pair.changed or (pair.rounded and smaller != torch.float32)
    return replace(agreement, limit=None if excused else TOLERANCE)


def loss_of(path: Path, tokens: Tensor) -> float:
    """Mean cross-entropy of the next token, in nats, in float32.

    Args:
        path: a checkpoint of either side.
        tokens: ``[B, S]``, each row read from its beginning.

    Raises:
        CheckpointError: the library does not load its own model completely.
    """
    logits = run_model(open_source(path, comparing=True).path, tokens, torch.float32).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), tokens[:, 1:].flatten()
    ).item()


def run_model(path: Path, tokens: Tensor, rounded_to: torch.dtype) -> Outputs:
    """Logits and the layers' outputs of a checkpoint of either side, in float32.

    Raises:
        CheckpointError: the library does not load its own model, or not completely.
    """
    if not is_hf_folder(path):
        return megatron_model.run_megatron(path, tokens, rounded_to=rounded_to)
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            # torch's grouped product takes no rows that are not a multiple of 16 bytes
            experts_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # what transformers lacks, or does not expect, raises many kinds
        raise CheckpointError(
            f"transformers does not load {path} ({type(error).__name__}): {in_one_line(error)}"
        ) from error
    if wrong := {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}:
        raise CheckpointError(f"{path} does not load completely: {wrong}")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(rounded_to))
        layers = record_layers(model.model.layers)
        return Outputs(model.eval()(tokens).logits, layers)


def compare(one: Outputs, other: Outputs) -> Agreement:
    """Agreement of two runs, over the entries of the vocabulary that both have."""
    entries = min(one.logits.shape[-1], other.logits.shape[-1])
    ours, theirs = one.logits[..., :entries], other.logits[..., :entries]
    difference = (ours - theirs).abs()
    log_ours, log_theirs = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    apart = (
        number
        for number, (a, b) in enumerate(zip(one.layers, other.layers, strict=False))
        if not (a - b).abs().max() < TOLERANCE
    )
    return Agreement(
        max_difference=difference.max().item(),
        mean_difference=difference.mean().item(),
        kl=(log_ours.exp() * (log_ours - log_theirs)).sum(-1).mean().item(),
        argmax=(ours.argmax(-1) == theirs.argmax(-1)).double().mean().item(),
        tokens=ours[..., 0].numel(),
        first_layer=next(apart, None),
    )
