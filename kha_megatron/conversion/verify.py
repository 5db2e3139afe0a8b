"""Compare two checkpoints: tensors, settings, and logits for the same tokens.

Tensors are compared under their Hugging Face names. For the logits, Megatron loads a Megatron
checkpoint and transformers a Hugging Face one, independently of the conversion code.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.hf_reader import HFCheckpoint, is_hf_folder
from kha_megatron.conversion import megatron_model
from kha_megatron.conversion.engine import transfer
from kha_megatron.conversion.hf_configs import family_of, with_zero_tensors
from kha_megatron.conversion.megatron_model import Outputs, record_layers
from kha_megatron.conversion.rows import TensorSlot
from kha_megatron.conversion.sources import ModelSource, open_source, truncate_vocabulary
from kha_megatron.conversion.transforms import (
    add_zero_tensors,
    count_not_finite,
    fold_heads,
    round_as_stored,
    upcycle_heads,
)
from kha_megatron.errors import CheckpointError, in_one_line

BATCH, LENGTH = 2, 64
LOGIT_TOLERANCE = 1e-4
"""Largest difference of float32 logits due to rounding."""
_MAY_DIFFER = (
    "max_position_embeddings",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "init_method_std",
    "attention_dropout",
)
"""Settings that only affect training, or that shapes of tensors determine."""


@dataclass(frozen=True)
class TensorComparison:
    """Names of tensors that differ between two checkpoints."""

    tensors: int
    """Number of tensors that both have."""
    parameters: tuple[int, int]
    missing: list[str] = field(default_factory=list)
    """Tensors of the first checkpoint only."""
    unexpected: list[str] = field(default_factory=list)
    """Tensors of the second checkpoint only."""
    mismatched: list[str] = field(default_factory=list)
    """Tensors of different shapes."""
    different: list[str] = field(default_factory=list)
    """Tensors that differ after rounding to the smaller dtype, or are finite in only one."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """Number of NaN and infinite elements in both checkpoints together."""
    remark: str = "as they are"
    """Transformation of one checkpoint before the comparison."""

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.unexpected or self.mismatched or self.different)


@dataclass(frozen=True)
class Agreement:
    """Difference of the float32 logits of two models over all positions of a batch."""

    max_difference: float
    mean_difference: float
    kl: float
    """Mean Kullback-Leibler divergence of the second model from the first, in nats."""
    argmax: float
    """Fraction of positions with the same most likely token."""
    tokens: int
    first_layer: int | None = None
    """First layer, from 0, whose output differs by more than ``LOGIT_TOLERANCE``."""
    limit: float | None = LOGIT_TOLERANCE
    """Upper bound of ``max_difference``. None if weights were rounded for the comparison, or if
    only one model drops heads."""

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.limit is None or self.max_difference < self.limit


@dataclass(frozen=True)
class Verification:
    """Result of a comparison."""

    tensors: TensorComparison
    logits: Agreement | None = None
    """None if the models were not run."""
    settings: list[str] = field(default_factory=list)
    """Settings that differ, such as ``rotary_base 500.0 against 10000.0``."""

    @property
    def agrees(self) -> bool:
        """Whether the two models are the same."""
        same = self.tensors.agrees and not self.settings
        return same and (self.logits is None or self.logits.agrees)


@dataclass(frozen=True)
class Pair:
    """Two open checkpoints with the same mechanisms, vocabulary and optional tensors."""

    one: ModelSource
    other: ModelSource
    remark: str
    exact: bool
    """Whether the logits must agree: no 16-bit weights were rounded for the comparison, and both or
    neither of the models drop heads."""

    @classmethod
    def open(cls, one: Path, other: Path) -> "Pair":
        """Open two checkpoints.

        Raises:
            CheckpointError: One is damaged, or its configuration and its tensors disagree.
        """
        pair = [open_source(path, comparing=True) for path in (one, other)]
        # Megatron's vocabulary includes padding
        size = min(source.model.vocab_size for source in pair)
        pair = [s if is_hf_folder(s.path) else truncate_vocabulary(s, size) for s in pair]
        drops = [any(m.is_sparse for m in source.model.kha.mechanisms) for source in pair]
        pair, remark = _same_heads(pair)
        rounded = remark.endswith("folded")
        if all(source.model.num_experts for source in pair):
            models = [source.model for source in pair]
            zeros = partial(
                with_zero_tensors,
                bias=any(model.moe_router_enable_expert_bias for model in models),
                shared=max(model.shared_width for model in models),
                gate=any(model.moe_shared_expert_gate for model in models),
            )
            pair = [add_zero_tensors(source, zeros(source.model)) for source in pair]
        for files in [source.files for source in pair if source.files.norms_minus_one]:
            pair, rounded = [round_as_stored(source, files) for source in pair], True
        dtypes = {_dtype(source) for source in pair}
        exact = drops[0] == drops[1] and not (rounded and dtypes != {torch.float32})
        return cls(pair[0], pair[1], remark, exact)

    @property
    def needed_bytes(self) -> int:
        """Memory for both models in float32 and their work space."""
        parameters = sum(math.prod(entry.shape) for _, held in self.one.entries() for entry in held)
        return int(parameters * 4 * 2.5)

    @property
    def fits_in_memory(self) -> bool:
        """Whether :func:`compare_logits` can run on this machine now."""
        return self.needed_bytes < psutil.virtual_memory().available

    def verify(self, *, logits: bool = True, workers: int | None = None) -> Verification:
        """Compare tensors, settings and, if both models fit into memory, logits.

        Raises:
            CheckpointError: A tensor is damaged, or a library cannot load its model.
        """
        tensors = compare_tensors(self, workers=workers)
        differing = self.one.model.differences(self.other.model, _MAY_DIFFER)
        settings = [f"{name} {ours} against {theirs}" for name, (ours, theirs) in differing.items()]
        compared = Verification(tensors, settings=settings)
        if not logits or tensors.missing or tensors.unexpected or tensors.mismatched:
            return compared
        for checkpoint in (self.one.checkpoint, self.other.checkpoint):
            if isinstance(checkpoint, HFCheckpoint) and not family_of(checkpoint.config).causal_lm:
                path = checkpoint.path
                announce(f"Logits are not compared: transformers has no class for {path}.")
                return compared
        if not self.fits_in_memory:
            needed = self.needed_bytes / 10**9
            announce(f"Logits are not compared: both models need {needed:.1f} GB of free memory.")
            return compared
        return replace(compared, logits=compare_logits(self))


def _dtype(source: ModelSource) -> torch.dtype:
    return next(source.entries())[1][0].dtype


def _same_heads(pair: list[ModelSource]) -> tuple[list[ModelSource], str]:
    """Fold the model with more head mechanisms, or upcycle the other one."""
    has = [{m.name for m in source.model.kha.mechanisms} for source in pair]
    more = int(has[0] < has[1])
    less, order = 1 - more, ("first", "second")
    if not has[more] > has[less]:
        return pair, "as they are"
    kha, pair = pair[more].model.kha.without(*has[less]), list(pair)
    if kha.is_foldable:
        pair[more] = fold_heads(pair[more], kha)
        return pair, f"the {order[more]} folded"
    pair[less] = upcycle_heads(pair[less], replace(kha, init="identity"))
    return pair, f"the {order[less]} upcycled"


def compare_tensors(pair: Pair, *, workers: int | None = None) -> TensorComparison:
    """Compare all tensors with several threads."""
    ours, theirs = (
        {e.name: (slot, n, e.shape) for slot, held in source.entries() for n, e in enumerate(held)}
        for source in (pair.one, pair.other)
    )
    both = ours.keys() & theirs.keys()
    mismatched = {name for name in both if ours[name][2] != theirs[name][2]}
    different: list[str] = []
    not_finite: dict[str, int] = {}

    def put(slot: TensorSlot, parts: list[Tensor]) -> None:
        names = [n for n in slot.hf_names(pair.one.model) if n in both and n not in mismatched]
        if not names:
            return
        counterpart = pair.other.read(theirs[names[0]][0])
        for name in names:
            one, other = parts[ours[name][1]], counterpart[theirs[name][1]]
            if count := count_not_finite(other):
                not_finite[name] = count
            if not _equal(one, other):
                different.append(name)

    wrong = transfer(pair.one, put, workers=workers)
    ours_trained, theirs_trained = (
        sum(math.prod(shape) for slot, _, shape in named.values() if slot.row.trained)
        for named in (ours, theirs)
    )
    return TensorComparison(
        tensors=len(both),
        parameters=(ours_trained, theirs_trained),
        missing=sorted(ours.keys() - theirs.keys()),
        unexpected=sorted(theirs.keys() - ours.keys()),
        mismatched=sorted(mismatched),
        different=sorted(different),
        not_finite=dict(sorted((Counter(wrong) + Counter(not_finite)).items())),
        remark=pair.remark,
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal after rounding to the smaller dtype. NaN equals NaN."""
    if count_not_finite(one) != count_not_finite(other):  # rounding may create infinities
        return False
    if one.dtype != other.dtype:
        smaller = min(other, one, key=lambda tensor: tensor.dtype.itemsize).dtype
        one, other = one.to(smaller), other.to(smaller)
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def compare_logits(pair: Pair) -> Agreement:
    """Run both models, each with its own library, on the same random tokens."""
    models, paths = (pair.one.model, pair.other.model), (pair.one.path, pair.other.path)
    tokens = torch.randint(
        0,
        min(model.vocab_size for model in models),
        (BATCH, min(LENGTH, *(model.max_position_embeddings for model in models))),
        generator=torch.Generator().manual_seed(0),
    )
    smaller = min(_dtype(pair.other), _dtype(pair.one), key=lambda dtype: dtype.itemsize)
    agreement = compare_outputs(*(run_model(path, tokens, smaller) for path in paths))
    return agreement if pair.exact else replace(agreement, limit=None)


def loss_of(path: Path, tokens: Tensor) -> float:
    """Return the mean next-token cross-entropy of ``tokens``, ``[B, S]``, in nats."""
    logits = run_model(open_source(path, comparing=True).path, tokens, torch.float32).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), tokens[:, 1:].flatten()
    ).item()


def run_model(path: Path, tokens: Tensor, rounded_to: torch.dtype) -> Outputs:
    """Return the float32 logits and layer outputs of a checkpoint.

    Args:
        path: A Megatron or Hugging Face checkpoint.
        tokens: ``[B, S]`` token ids.
        rounded_to: Dtype to round the weights to first.

    Raises:
        CheckpointError: transformers does not load its model completely.
    """
    if not is_hf_folder(path):
        return megatron_model.run_megatron(path, tokens, rounded_to=rounded_to)
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            # torch's grouped GEMM needs rows that are a multiple of 16 bytes
            experts_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # transformers raises many exception types
        raise CheckpointError(
            f"transformers cannot load {path} ({type(error).__name__}): {in_one_line(error)}"
        ) from error
    if wrong := {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}:
        raise CheckpointError(f"transformers does not load {path} completely: {wrong}")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(rounded_to))
        layers = record_layers(model.model.layers)
        return Outputs(model.eval()(tokens).logits, layers)


def compare_outputs(one: Outputs, other: Outputs) -> Agreement:
    """Compare two runs on the common part of the vocabulary."""
    entries = min(one.logits.shape[-1], other.logits.shape[-1])
    ours, theirs = one.logits[..., :entries], other.logits[..., :entries]
    difference = (ours - theirs).abs()
    log_ours, log_theirs = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    differing = (
        number
        for number, (a, b) in enumerate(zip(one.layers, other.layers, strict=False))
        if not (a - b).abs().max() < LOGIT_TOLERANCE
    )
    return Agreement(
        max_difference=difference.max().item(),
        mean_difference=difference.mean().item(),
        kl=(log_ours.exp() * (log_ours - log_theirs)).sum(-1).mean().item(),
        argmax=(ours.argmax(-1) == theirs.argmax(-1)).double().mean().item(),
        tokens=ours[..., 0].numel(),
        first_layer=next(differing, None),
    )
