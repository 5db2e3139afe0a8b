"""Compare two checkpoints: tensors, settings and logits.

We do not use our conversion code for logits. Instead, Megatron checkpoints are loaded by Megatron,
and Hugging Face models by transformers. The latter are also compared with themselves: decoding with
a KV cache has to give the same logits as one forward pass.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.hf_reader import HFCheckpoint, is_hf_folder
from kha_megatron.conversion import megatron_model
from kha_megatron.conversion.engine import transfer
from kha_megatron.conversion.folding import fold_heads
from kha_megatron.conversion.hf_configs import family_of, with_zero_tensors
from kha_megatron.conversion.megatron_model import Outputs, record_layers
from kha_megatron.conversion.sources import ModelSource, open_source
from kha_megatron.conversion.tensor_mappings import TensorSlot
from kha_megatron.conversion.transforms import (
    add_zero_tensors,
    center_norms,
    count_not_finite,
    drop_predictions,
    truncate_vocabulary,
)
from kha_megatron.conversion.upcycling import upcycle_heads
from kha_megatron.errors import CheckpointError, in_one_line
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf.modeling_kha import find_cache
from kha_megatron.model.config import ModelConfig

BATCH_SIZE = 2
MAX_LENGTH = 64
"""Batch size and sequence length for the comparison of logits (less for models with a smaller
``max_position_embeddings``)."""
LOGIT_TOLERANCE = 1e-4
"""Float32 logits may differ by this much due to rounding errors."""
_MAY_DIFFER = (
    "max_position_embeddings",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "init_method_std",
    "attention_dropout",
)
"""Only used for training, or implied by tensor shapes."""


class HeadAdjustment(StrEnum):
    """Which of two models was changed so that both have the same head mechanisms."""

    NONE = "as they are"
    FIRST_FOLDED = "the first folded"
    SECOND_FOLDED = "the second folded"
    FIRST_UPCYCLED = "the first upcycled"
    SECOND_UPCYCLED = "the second upcycled"

    @property
    def is_folded(self) -> bool:
        return self in (HeadAdjustment.FIRST_FOLDED, HeadAdjustment.SECOND_FOLDED)


@dataclass(frozen=True)
class TensorComparison:
    """Result of :func:`compare_tensors`."""

    tensors: int
    """Number of tensors that both checkpoints have."""
    parameters: tuple[int, int]
    missing: list[str] = field(default_factory=list)
    """Tensors that are only in the first checkpoint."""
    unexpected: list[str] = field(default_factory=list)
    """Tensors that are only in the second checkpoint."""
    mismatched: list[str] = field(default_factory=list)
    """Tensors with different shapes."""
    different: list[str] = field(default_factory=list)
    """Tensors with different values (after rounding to the smaller dtype)."""
    rounded: list[str] = field(default_factory=list)
    """Tensors that are only equal after rounding to the smaller dtype."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """NaN/Inf counts by tensor name, added up over both checkpoints."""
    remark: HeadAdjustment = HeadAdjustment.NONE
    """What we did to make the checkpoints comparable."""

    @property
    def has_same_shapes(self) -> bool:
        """True if both checkpoints have the same tensors, regardless of their values."""
        return not (self.missing or self.unexpected or self.mismatched)

    @property
    def agrees(self) -> bool:
        return self.has_same_shapes and not self.different


@dataclass(frozen=True)
class Agreement:
    """How much the float32 logits of two models differ on the same batch."""

    max_difference: float
    mean_difference: float
    kl: float
    """Mean KL divergence of the token distributions (second model from first), in nats."""
    argmax: float
    """Fraction of positions where both models predict the same token."""
    tokens: int
    first_layer: int | None = None
    """First layer (0-based) where the outputs differ by more than ``LOGIT_TOLERANCE``."""
    limit: float | None = LOGIT_TOLERANCE
    """None if we cannot expect the logits to match, because weights were rounded for the comparison
    or only one of the models drops heads."""

    @property
    def agrees(self) -> bool:
        return self.limit is None or self.max_difference < self.limit


@dataclass(frozen=True)
class Decoding:
    """How much decoding with a KV cache differs from one forward pass of a Hugging Face model."""

    path: Path
    max_difference: float
    """Largest difference between float32 logits."""
    limit: float = LOGIT_TOLERANCE

    @property
    def agrees(self) -> bool:
        return self.max_difference < self.limit


@dataclass(frozen=True)
class Verification:
    """Result of :meth:`Pair.compare`."""

    tensors: TensorComparison
    logits: Agreement | None = None
    """None if we did not compare logits."""
    settings: list[str] = field(default_factory=list)
    """Settings that differ, e.g. ``rotary_base 500.0 against 10000.0``."""
    decoding: list[Decoding] = field(default_factory=list)
    """One entry for each Hugging Face model. Empty if we did not compare logits."""

    @property
    def agrees(self) -> bool:
        if self.settings or not self.tensors.agrees:
            return False
        if self.logits is not None and not self.logits.agrees:
            return False
        return all(decoding.agrees for decoding in self.decoding)


@dataclass(frozen=True)
class Pair:
    """Two models whose tensors can be compared one by one.

    For example, if only one of the models uses KHA, :meth:`open` either folds it or upcycles the
    other model. It also removes vocab padding and adds optional tensors that are zero.
    """

    first: ModelSource
    second: ModelSource
    adjustment: HeadAdjustment
    exact: bool
    """Whether we expect the logits to match (see ``Agreement.limit``)."""

    @classmethod
    def open(cls, first: Path, second: Path) -> Self:
        """Open and validate two checkpoints."""
        opened = _Sources(
            open_source(first, with_tokenizer=False),
            open_source(second, with_tokenizer=False),
        )
        same_vocabulary = opened.transform(_truncate_vocabulary)
        same_layers = same_vocabulary.transform(_drop_predictions)
        same_heads, adjustment = _adjust_heads(same_layers)
        same_experts = same_heads.transform(_add_zero_experts)
        same_norms = same_experts.transform(_center_norms)
        return cls(
            first=same_norms.first,
            second=same_norms.second,
            adjustment=adjustment,
            exact=_expects_same_logits(opened, adjustment),
        )

    @property
    def needed_bytes(self) -> int:
        """Rough estimate of the memory we need to run both models in float32."""
        parameters = 0
        for _, entries in self.first.entries():
            for entry in entries:
                parameters += math.prod(entry.shape)
        model_bytes = parameters * torch.float32.itemsize
        return int(2.5 * model_bytes)  # both models, and half a model for activations

    def compare(self, *, logits: bool = True, workers: int | None = None) -> Verification:
        """Compare tensors and settings. Also compares logits if both models fit in memory."""
        tensors = compare_tensors(self, workers=workers)
        settings = []
        differing = self.first.model.differences(self.second.model, _MAY_DIFFER)
        for name, (first_value, second_value) in differing.items():
            settings.append(f"{name} {first_value} against {second_value}")
        verification = Verification(tensors, settings=settings)
        if not logits or not tensors.has_same_shapes:
            return verification
        if not self._can_run():
            return verification
        agreement, decoding = compare_logits(self)
        return replace(verification, logits=agreement, decoding=decoding)

    def _can_run(self) -> bool:
        """Check if we can run both models. Otherwise, log the reason."""
        for checkpoint in (self.first.checkpoint, self.second.checkpoint):
            if isinstance(checkpoint, HFCheckpoint) and not family_of(checkpoint.config).causal_lm:
                announce(
                    "Skipping the logit comparison: transformers does not support "
                    f"{checkpoint.path}."
                )
                return False
        needed_bytes = self.needed_bytes
        if needed_bytes >= psutil.virtual_memory().available:
            announce(
                f"Skipping the logit comparison, which needs {needed_bytes / 10**9:.1f} GB of free "
                "memory."
            )
            return False
        return True


@dataclass(frozen=True)
class _Sources:
    """The checkpoints of a :class:`Pair` before they have the same tensors."""

    first: ModelSource
    second: ModelSource

    def transform(self, step: Callable[[ModelSource, ModelConfig], ModelSource]) -> "_Sources":
        """Call ``step`` for each source, together with the model of the other one."""
        return _Sources(
            step(self.first, self.second.model),
            step(self.second, self.first.model),
        )


def _truncate_vocabulary(source: ModelSource, counterpart: ModelConfig) -> ModelSource:
    """Remove vocab padding, which only Megatron checkpoints include."""
    if is_hf_folder(source.path):
        return source
    vocab_size = min(source.model.vocabulary, counterpart.vocabulary)
    return truncate_vocabulary(source, vocab_size)


def _drop_predictions(source: ModelSource, counterpart: ModelConfig) -> ModelSource:
    if source.model.predictions == counterpart.predictions:
        return source
    return drop_predictions(source, "the other model differs")


def _adjust_heads(sources: _Sources) -> tuple[_Sources, HeadAdjustment]:
    """Make sure that both models have the same head mechanisms, and that KHA is folded in both.

    This folds the model with more head mechanisms. If that is not possible, it upcycles the other
    one.
    """
    sources, adjustment = _fold_if_other_is_folded(sources)
    first = sources.first
    second = sources.second
    first_names = _mechanism_names(first.model.kha)
    second_names = _mechanism_names(second.model.kha)
    if first_names > second_names:
        first, second, is_folded = _fold_or_upcycle(larger=first, smaller=second)
        adjustment = HeadAdjustment.FIRST_FOLDED if is_folded else HeadAdjustment.SECOND_UPCYCLED
    elif second_names > first_names:
        second, first, is_folded = _fold_or_upcycle(larger=second, smaller=first)
        adjustment = HeadAdjustment.SECOND_FOLDED if is_folded else HeadAdjustment.FIRST_UPCYCLED
    return _Sources(first, second), adjustment


def _fold_if_other_is_folded(sources: _Sources) -> tuple[_Sources, HeadAdjustment]:
    """Fold one of the models if KHA-MLP or KHA-Gate is only folded in the other one."""
    first = sources.first
    second = sources.second
    first_value = first.model.kha.variants.get("value")
    second_value = second.model.kha.variants.get("value")
    is_first_folded = bool(first.model.kha_folded)
    is_second_folded = bool(second.model.kha_folded)
    if first_value != second_value or is_first_folded == is_second_folded:
        return sources, HeadAdjustment.NONE
    if is_second_folded:
        first = fold_heads(first, first.model.kha)
        return _Sources(first, second), HeadAdjustment.FIRST_FOLDED
    second = fold_heads(second, second.model.kha)
    return _Sources(first, second), HeadAdjustment.SECOND_FOLDED


def _fold_or_upcycle(
    larger: ModelSource,
    smaller: ModelSource,
) -> tuple[ModelSource, ModelSource, bool]:
    """Fold the head mechanisms that only ``larger`` has, or add them to ``smaller``.

    Returns:
        ``larger``, ``smaller``, and whether ``larger`` was folded.
    """
    common_types = map(type, smaller.model.kha.mechanisms)
    added_heads = larger.model.kha.without(*common_types)
    if added_heads.is_foldable:
        return fold_heads(larger, added_heads), smaller, True
    return larger, upcycle_heads(smaller, added_heads.updated(init="identity")), False


def _mechanism_names(kha: HeadsConfig) -> set[str]:
    return {mechanism.name for mechanism in kha.mechanisms}


def _add_zero_experts(source: ModelSource, counterpart: ModelConfig) -> ModelSource:
    """Add expert biases and shared experts, which only one of the models may have, as zeros."""
    model = source.model
    if not (model.experts and counterpart.experts):
        return source
    models = (model, counterpart)
    with_zeros = with_zero_tensors(
        model,
        router_bias=any(each.moe_router_enable_expert_bias for each in models),
        shared_width=max(each.shared_width for each in models),
        shared_gate=any(each.moe_shared_expert_gate for each in models),
    )
    return add_zero_tensors(source, with_zeros)


def _center_norms(source: ModelSource, counterpart: ModelConfig) -> ModelSource:
    if not _stores_norms_differently(source.model, counterpart):
        return source
    return center_norms(source)


def _stores_norms_differently(first: ModelConfig, second: ModelConfig) -> bool:
    return first.layernorm_zero_centered_gamma != second.layernorm_zero_centered_gamma


def _expects_same_logits(opened: _Sources, adjustment: HeadAdjustment) -> bool:
    """Return whether the logits can only differ by rounding errors in float32."""
    if _drops_heads(opened.first) != _drops_heads(opened.second):
        return False
    is_first_float32 = _embedding_dtype(opened.first) == torch.float32
    is_second_float32 = _embedding_dtype(opened.second) == torch.float32
    if is_first_float32 and is_second_float32:
        return True
    norms_differ = _stores_norms_differently(opened.first.model, opened.second.model)
    weights_were_rounded = adjustment.is_folded or norms_differ
    return not weights_were_rounded


def _drops_heads(source: ModelSource) -> bool:
    return any(mechanism.is_sparse for mechanism in source.model.kha.mechanisms)


def _embedding_dtype(source: ModelSource) -> torch.dtype:
    _, entries = next(source.entries())
    return entries[0].dtype


@dataclass(frozen=True)
class _LocatedTensor:
    """Where to find a tensor with a given HF name."""

    slot: TensorSlot
    position: int
    """Index in the tensors of the slot."""
    shape: tuple[int, ...]


def _locate_tensors(source: ModelSource) -> dict[str, _LocatedTensor]:
    located = {}
    for slot, entries in source.entries():
        for position, entry in enumerate(entries):
            located[entry.name] = _LocatedTensor(slot, position, entry.shape)
    return located


def _count_parameters(located: dict[str, _LocatedTensor]) -> int:
    count = 0
    for tensor in located.values():
        if tensor.slot.mapping.trained:
            count += math.prod(tensor.shape)
    return count


def compare_tensors(pair: Pair, *, workers: int | None = None) -> TensorComparison:
    """Compare all tensors by HF name (multi-threaded)."""
    first_located = _locate_tensors(pair.first)
    second_located = _locate_tensors(pair.second)
    common_names = first_located.keys() & second_located.keys()
    mismatched = set()
    for name in common_names:
        if first_located[name].shape != second_located[name].shape:
            mismatched.add(name)
    comparable_names = common_names - mismatched
    different: list[str] = []
    rounded: list[str] = []
    second_not_finite: dict[str, int] = {}

    def compare_slot(slot: TensorSlot, first_tensors: list[Tensor]) -> None:
        names = [name for name in slot.hf_names(pair.first.model) if name in comparable_names]
        if not names:
            return
        # both models group their tensors into the same slots
        second_slot = second_located[names[0]].slot
        second_tensors = pair.second.read(second_slot)
        for name in names:
            first = first_tensors[first_located[name].position]
            second = second_tensors[second_located[name].position]
            if count := count_not_finite(second):
                second_not_finite[name] = count
            if _equal(first, second):
                continue
            if _equal_after_rounding(first, second):
                rounded.append(name)
            else:
                different.append(name)

    first_not_finite = transfer(pair.first, compare_slot, workers=workers)
    not_finite = Counter(first_not_finite) + Counter(second_not_finite)
    copies_missing_in_first = missing_copies(pair.first)
    copies_missing_in_second = missing_copies(pair.second)
    missing = first_located.keys() - second_located.keys()
    missing |= copies_missing_in_second - copies_missing_in_first
    unexpected = second_located.keys() - first_located.keys()
    unexpected |= copies_missing_in_first - copies_missing_in_second
    return TensorComparison(
        tensors=len(common_names),
        parameters=(_count_parameters(first_located), _count_parameters(second_located)),
        missing=sorted(missing),
        unexpected=sorted(unexpected),
        mismatched=sorted(mismatched),
        different=sorted(different),
        rounded=sorted(rounded),
        not_finite=dict(sorted(not_finite.items())),
        remark=pair.adjustment,
    )


def missing_copies(source: ModelSource) -> set[str]:
    """Return the copies of the embedding and LM head that the MTP layers of a HF model lack.

    Servers load these layers separately. transformers ignores them, and Megatron has no copies.
    """
    stored_tensors = source.checkpoint.keys()
    copies = source.file_format.copies(source.model)
    return copies.keys() - stored_tensors.keys()


def _equal_after_rounding(first: Tensor, second: Tensor) -> bool:
    if count_not_finite(first) != count_not_finite(second):  # rounding may overflow
        return False
    if first.dtype == second.dtype:
        return False
    smaller = _smaller_dtype(first.dtype, second.dtype)
    return _equal(first.to(smaller), second.to(smaller))


def _smaller_dtype(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    return first if first.itemsize < second.itemsize else second


def _equal(first: Tensor, second: Tensor) -> bool:
    """Like ``torch.equal``, but compares different dtypes and treats NaNs as equal."""
    wider = torch.promote_types(first.dtype, second.dtype)
    first = first.to(wider)
    second = second.to(wider)
    if torch.equal(first, second):
        return True
    both_nan = first.isnan() & second.isnan()
    return bool(((first == second) | both_nan).all())


def compare_logits(pair: Pair) -> tuple[Agreement, list[Decoding]]:
    """Run both models on the same random tokens and compare their logits.

    Hugging Face models also decode these tokens with a KV cache.
    """
    first = pair.first
    second = pair.second
    vocab_size = min(first.model.vocabulary, second.model.vocabulary)
    length = min(
        MAX_LENGTH,
        first.model.max_length,
        second.model.max_length,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (BATCH_SIZE, length), generator=generator)
    smaller_dtype = _smaller_dtype(_embedding_dtype(first), _embedding_dtype(second))
    first_outputs = run_model(first.path, tokens, smaller_dtype, decode=True)
    second_outputs = run_model(second.path, tokens, smaller_dtype, decode=True)

    agreement = compare_outputs(first_outputs, second_outputs)
    if not pair.exact:
        agreement = replace(agreement, limit=None)
    decoding = []
    for source, outputs in ((first, first_outputs), (second, second_outputs)):
        if outputs.decoded is not None:
            differences = (outputs.decoded - outputs.logits).abs()
            max_difference = differences.max().item()
            decoding.append(Decoding(source.path, max_difference))
    return agreement, decoding


def loss_of(path: Path, tokens: Tensor) -> float:
    """Return the cross-entropy loss on a batch of token IDs, in nats per token."""
    source = open_source(path, with_tokenizer=False)
    outputs = run_model(source.path, tokens, torch.float32)
    logits = outputs.logits[:, :-1].double()
    next_tokens = tokens[:, 1:]
    loss = cross_entropy(
        logits.flatten(0, 1),
        next_tokens.flatten(),
    )
    return loss.item()


def run_model(
    path: Path,
    tokens: Tensor,
    rounded_to: torch.dtype,
    *,
    decode: bool = False,
) -> Outputs:
    """Run a checkpoint in float32.

    Args:
        path: Hugging Face model, or Megatron checkpoint of a single iteration.
        tokens: Token IDs, ``[batch, seq]``.
        rounded_to: Round the weights to this dtype first.
        decode: Run Hugging Face models a second time with a KV cache.
    """
    if not is_hf_folder(path):
        return megatron_model.run_megatron(path, tokens, rounded_to=rounded_to)
    # torch's grouped GEMM needs row sizes that are multiples of 16 bytes
    model = load_hf_model(path, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(rounded_to))
        recorded_layers = record_layers(model.model.layers)
        logits = model.eval()(tokens, use_cache=False).logits
        layers = list(recorded_layers)  # decoding appends to recorded_layers
        decoded = decode_with_cache(model, tokens) if decode else None
        return Outputs(logits, layers, decoded)


def decode_with_cache(model: Any, tokens: Tensor) -> Tensor:
    """Compute the logits of a prompt, a chunk and two single tokens with a KV cache."""
    parameters = inspect.signature(model.forward).parameters
    # transformers 5.24 renamed past_key_values
    cache_argument = "cache" if "cache" in parameters else "past_key_values"
    arguments: dict[str, Any] = {"use_cache": True}
    logits = []
    for chunk in _split_for_decoding(tokens):
        output = model(chunk, **arguments)
        logits.append(output.logits)
        arguments[cache_argument] = find_cache(output.values())
    return torch.cat(logits, dim=1)


def _split_for_decoding(tokens: Tensor) -> Iterator[Tensor]:
    """Split a batch along the sequence, e.g. 8 tokens into chunks of 4, 2, 1 and 1."""
    length = tokens.shape[1]
    ends = {
        max(1, length // 2),
        max(1, length - 2),
        max(1, length - 1),
        length,
    }
    start = 0
    for end in sorted(ends):
        yield tokens[:, start:end]
        start = end


def load_hf_model(path: Path, **settings: Any) -> Any:
    """Load a Hugging Face model with transformers. Never executes remote code.

    Raises:
        CheckpointError: If the model cannot be loaded or the weights do not match the config.
    """
    disable_progress_bar()
    set_verbosity_error()  # we check the loading report ourselves
    try:
        only_local_files: dict[str, Any] = {
            "local_files_only": True,
            "trust_remote_code": False,
        }
        config = AutoConfig.from_pretrained(path, **only_local_files)
        # config.json can select an attention or experts package that is not installed
        config._attn_implementation = None
        config._experts_implementation = None
        config.return_dict = True
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # mismatches are in the report
            **only_local_files,
            **settings,
        )
    except Exception as error:  # transformers can raise almost anything
        raise CheckpointError(
            f"Could not load {path} with transformers ({type(error).__name__}: "
            f"{in_one_line(error)})."
        ) from error
    _check_loading_report(path, model.config, report)
    return model


def _check_loading_report(path: Path, config: Any, report: Mapping[str, Any]) -> None:
    """Raise CheckpointError if transformers reports a problem with a weight.

    Args:
        config: Config of the loaded model.
        report: Lists of weights by problem, e.g. ``missing_keys``.
    """
    ignored_prefixes = _prediction_layer_prefixes(config)
    for problem, keys in report.items():
        names = []
        for key in keys:
            name = str(key)
            is_ignored = problem == "unexpected_keys" and name.startswith(ignored_prefixes)
            if not is_ignored:
                names.append(name)
        if names:
            problem_name = problem.replace("_", " ")
            raise CheckpointError(
                f"The weights in {path} do not match its config.json: {len(names)} {problem_name}, "
                f"e.g. {min(names)}."
            )


def _prediction_layer_prefixes(config: Any) -> tuple[str, ...]:
    """Return how the names of weights for multi-token prediction start.

    transformers does not load these layers, except when it drafts tokens.
    """
    first_layer = config.num_hidden_layers
    layers = getattr(config, "num_nextn_predict_layers", 0)
    prefixes = []
    for layer in range(first_layer, first_layer + layers):
        prefixes.append(f"model.layers.{layer}.")
    return tuple(prefixes)


def compare_outputs(first: Outputs, second: Outputs) -> Agreement:
    """Compare two outputs, ignoring vocab entries that only one of the models has."""
    first_vocab_size = first.logits.shape[-1]
    second_vocab_size = second.logits.shape[-1]
    vocab_size = min(first_vocab_size, second_vocab_size)
    first_logits = first.logits[..., :vocab_size]
    second_logits = second.logits[..., :vocab_size]
    difference = (first_logits - second_logits).abs()
    first_log_probs = first_logits.double().log_softmax(-1)
    second_log_probs = second_logits.double().log_softmax(-1)
    probabilities = first_log_probs.exp()
    kl = (probabilities * (first_log_probs - second_log_probs)).sum(-1)
    same_token = first_logits.argmax(-1) == second_logits.argmax(-1)
    return Agreement(
        max_difference=difference.max().item(),
        mean_difference=difference.mean().item(),
        kl=kl.mean().item(),
        argmax=same_token.double().mean().item(),
        tokens=same_token.numel(),
        first_layer=_find_first_differing_layer(first.layers, second.layers),
    )


def _find_first_differing_layer(first: list[Tensor], second: list[Tensor]) -> int | None:
    outputs = zip(first, second, strict=False)
    for layer, (first_output, second_output) in enumerate(outputs):
        difference = (first_output - second_output).abs()
        if not difference.max() < LOGIT_TOLERANCE:  # also catches NaN
            return layer
    return None
