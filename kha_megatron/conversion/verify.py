"""Comparison of two checkpoints by tensors, settings and logits.

Logits are computed independently of the conversion code, i.e. Megatron checkpoints are loaded with
Megatron and Hugging Face models with transformers.
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
"""Maximum difference of float32 logits that is attributed to rounding errors."""
_MAY_DIFFER = (
    "max_position_embeddings",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "init_method_std",
    "attention_dropout",
)
"""Settings that only affect training or are determined by tensor shapes."""


@dataclass(frozen=True)
class TensorComparison:
    """Result of :func:`compare_tensors`."""

    tensors: int
    """Number of tensors in both checkpoints."""
    parameters: tuple[int, int]
    missing: list[str] = field(default_factory=list)
    """Names of tensors that only the first checkpoint has."""
    unexpected: list[str] = field(default_factory=list)
    """Names of tensors that only the second checkpoint has."""
    mismatched: list[str] = field(default_factory=list)
    """Names of tensors with different shapes."""
    different: list[str] = field(default_factory=list)
    """Names of tensors whose values differ after rounding to the smaller dtype."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """Total number of NaN and infinite elements in both checkpoints, by tensor name."""
    remark: str = "as they are"
    """Transformation that was applied to one of the checkpoints before the comparison."""

    @property
    def agrees(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched or self.different)


@dataclass(frozen=True)
class Agreement:
    """Difference between the float32 logits of two models on the same batch."""

    max_difference: float
    mean_difference: float
    kl: float
    """Mean KL divergence in nats between the token distributions of the first and second model."""
    argmax: float
    """Fraction of positions at which both models predict the same token."""
    tokens: int
    first_layer: int | None = None
    """First layer (starting at 0) whose outputs differ by more than ``LOGIT_TOLERANCE``."""
    limit: float | None = LOGIT_TOLERANCE
    """Maximum accepted difference. There is no limit if weights were rounded for the comparison or
    only one of the models drops heads."""

    @property
    def agrees(self) -> bool:
        return self.limit is None or self.max_difference < self.limit


@dataclass(frozen=True)
class Verification:
    """Result of :meth:`Pair.verify`."""

    tensors: TensorComparison
    logits: Agreement | None = None
    """None if logits were not compared."""
    settings: list[str] = field(default_factory=list)
    """Descriptions of different settings, e.g. ``rotary_base 500.0 against 10000.0``."""

    @property
    def agrees(self) -> bool:
        same = self.tensors.agrees and not self.settings
        return same and (self.logits is None or self.logits.agrees)


@dataclass(frozen=True)
class Pair:
    """Two open checkpoints to compare.

    To make the tensors comparable, :meth:`open` may fold or upcycle one of the models, truncate the
    vocabulary and add optional tensors that are zero.
    """

    one: ModelSource
    other: ModelSource
    remark: str
    exact: bool
    """Whether logits must agree up to rounding errors, see ``Agreement.limit``."""

    @classmethod
    def open(cls, one: Path, other: Path) -> "Pair":
        """Open two checkpoints.

        Raises:
            CheckpointError: If a checkpoint is corrupted or does not match its configuration.
        """
        pair = [open_source(path, comparing=True) for path in (one, other)]
        # Megatron checkpoints include the vocabulary padding
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
        """Estimated memory to run both models in float32."""
        parameters = sum(math.prod(entry.shape) for _, held in self.one.entries() for entry in held)
        return int(parameters * 4 * 2.5)

    def verify(self, *, logits: bool = True, workers: int | None = None) -> Verification:
        """Compare tensors and settings, and also logits if both models fit in memory.

        Raises:
            CheckpointError: If a tensor is corrupted or a model cannot be loaded.
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
                announce(f"Skipping the logit comparison: transformers does not support {path}.")
                return compared
        if self.needed_bytes >= psutil.virtual_memory().available:
            needed = f"{self.needed_bytes / 10**9:.1f} GB"
            announce(f"Skipping the logit comparison, which needs {needed} of free memory.")
            return compared
        return replace(compared, logits=compare_logits(self))


def _dtype(source: ModelSource) -> torch.dtype:
    return next(source.entries())[1][0].dtype


def _same_heads(pair: list[ModelSource]) -> tuple[list[ModelSource], str]:
    """Fold the model with more head mechanisms or, if this is not possible, upcycle the other."""
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
    """Compare all tensors by their Hugging Face names, using several threads."""
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
    """Check whether two tensors are equal after rounding to the smaller dtype, as are two NaNs."""
    if count_not_finite(one) != count_not_finite(other):  # rounding may cause overflow
        return False
    if one.dtype != other.dtype:
        smaller = min(other, one, key=lambda tensor: tensor.dtype.itemsize).dtype
        one, other = one.to(smaller), other.to(smaller)
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def compare_logits(pair: Pair) -> Agreement:
    """Run both models on the same random tokens and compare their logits."""
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
    """Compute the mean next-token cross-entropy on ``tokens`` ``[B, S]`` in nats."""
    logits = run_model(open_source(path, comparing=True).path, tokens, torch.float32).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), tokens[:, 1:].flatten()
    ).item()


def run_model(path: Path, tokens: Tensor, rounded_to: torch.dtype) -> Outputs:
    """Run a Megatron or Hugging Face checkpoint in float32; see :func:`run_megatron`."""
    if not is_hf_folder(path):
        return megatron_model.run_megatron(path, tokens, rounded_to=rounded_to)
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            # torch's grouped GEMM requires rows with a multiple of 16 bytes
            experts_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # mismatches are in the report
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # transformers raises many kinds of exceptions
        raise CheckpointError(
            f"Could not load {path} with transformers ({type(error).__name__}: "
            f"{in_one_line(error)})."
        ) from error
    if problems := {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}:
        raise CheckpointError(f"Some weights of {path} were not loaded by transformers: {problems}")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(rounded_to))
        layers = record_layers(model.model.layers)
        return Outputs(model.eval()(tokens).logits, layers)


def compare_outputs(one: Outputs, other: Outputs) -> Agreement:
    """Compare two outputs over the vocabulary that both models have."""
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
