"""Compare two checkpoints: tensors, settings and logits.

We don't use our conversion code for logits. Instead, Megatron checkpoints are loaded by Megatron,
and Hugging Face models by transformers. The latter are also compared with themselves: decoding with
a KV cache has to give the same logits as one forward pass.
"""

import inspect
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.hf_reader import HFCheckpoint, is_hf_folder
from kha_megatron.conversion import megatron_model
from kha_megatron.conversion.engine import transfer
from kha_megatron.conversion.hf_configs import family_of, with_zero_tensors
from kha_megatron.conversion.megatron_model import Outputs, record_layers
from kha_megatron.conversion.rows import TensorSlot
from kha_megatron.conversion.sources import ModelSource, open_source
from kha_megatron.conversion.table import tensor_slots
from kha_megatron.conversion.transforms import (
    add_zero_tensors,
    center_norms,
    count_not_finite,
    drop_predictions,
    fold_heads,
    truncate_vocabulary,
    upcycle_heads,
)
from kha_megatron.errors import CheckpointError, in_one_line
from kha_megatron.hf.modeling_kha import find_caches

BATCH, LENGTH = 2, 64
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
    remark: str = "as they are"
    """What we did to make the checkpoints comparable, e.g. ``the first folded``."""

    @property
    def agrees(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched or self.different)


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
    """None if we can't expect the logits to match, because weights were rounded for the comparison
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
    """None if we didn't compare logits."""
    settings: list[str] = field(default_factory=list)
    """Settings that differ, e.g. ``rotary_base 500.0 against 10000.0``."""
    decoding: list[Decoding] = field(default_factory=list)
    """One entry for each Hugging Face model. Empty if we didn't compare logits."""

    @property
    def agrees(self) -> bool:
        same = self.tensors.agrees and not self.settings
        decodes = all(decoding.agrees for decoding in self.decoding)
        return same and decodes and (self.logits is None or self.logits.agrees)


@dataclass(frozen=True)
class Pair:
    """Two models whose tensors can be compared one by one.

    For example, if only one of the models uses KHA, :meth:`open` either folds it or upcycles the
    other model. It also removes vocab padding and adds optional tensors that are zero.
    """

    one: ModelSource
    other: ModelSource
    remark: str
    exact: bool
    """Whether we expect the logits to match (see ``Agreement.limit``)."""

    @classmethod
    def open(cls, one: Path, other: Path) -> "Pair":
        """Open and validate two checkpoints."""
        pair = [open_source(path, comparing=True) for path in (one, other)]
        # Megatron checkpoints include the vocabulary padding
        size = min(source.model.vocab_size for source in pair)
        pair = [s if is_hf_folder(s.path) else truncate_vocabulary(s, size) for s in pair]
        drops = [any(m.is_sparse for m in source.model.kha.mechanisms) for source in pair]
        if pair[0].model.predictions != pair[1].model.predictions:
            pair = [drop_predictions(source, "the other model differs") for source in pair]
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
        if len({source.model.layernorm_zero_centered_gamma for source in pair}) > 1:
            pair, rounded = [center_norms(source) for source in pair], True
        dtypes = {_dtype(source) for source in pair}
        exact = drops[0] == drops[1] and not (rounded and dtypes != {torch.float32})
        return cls(pair[0], pair[1], remark, exact)

    @property
    def needed_bytes(self) -> int:
        """Rough estimate of the memory we need to run both models in float32."""
        parameters = sum(math.prod(entry.shape) for _, held in self.one.entries() for entry in held)
        return int(parameters * 4 * 2.5)

    def compare(self, *, logits: bool = True, workers: int | None = None) -> Verification:
        """Compare tensors and settings. Also compares logits if both models fit in memory."""
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
        logit_comparison, decoding = compare_logits(self)
        return replace(compared, logits=logit_comparison, decoding=decoding)


def _dtype(source: ModelSource) -> torch.dtype:
    return next(source.entries())[1][0].dtype


def _same_heads(pair: list[ModelSource]) -> tuple[list[ModelSource], str]:
    """Fold the model with more head mechanisms. If that's not possible, upcycle the other one."""
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
    """Compare all tensors by HF name (multi-threaded)."""
    ours, theirs = (
        {e.name: (slot, n, e.shape) for slot, held in source.entries() for n, e in enumerate(held)}
        for source in (pair.one, pair.other)
    )
    both = ours.keys() & theirs.keys()
    mismatched = {name for name in both if ours[name][2] != theirs[name][2]}
    different: list[str] = []
    rounded: list[str] = []
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
            if _equal(one, other):
                continue
            (rounded if _equal_after_rounding(one, other) else different).append(name)

    wrong = transfer(pair.one, put, workers=workers)
    ours_trained, theirs_trained = (
        sum(math.prod(shape) for slot, _, shape in named.values() if slot.row.trained)
        for named in (ours, theirs)
    )
    our_copies, their_copies = missing_copies(pair.one), missing_copies(pair.other)
    return TensorComparison(
        tensors=len(both),
        parameters=(ours_trained, theirs_trained),
        missing=sorted(ours.keys() - theirs.keys() | their_copies - our_copies),
        unexpected=sorted(theirs.keys() - ours.keys() | our_copies - their_copies),
        mismatched=sorted(mismatched),
        different=sorted(different),
        rounded=sorted(rounded),
        not_finite=dict(sorted((Counter(wrong) + Counter(not_finite)).items())),
        remark=pair.remark,
    )


def missing_copies(source: ModelSource) -> set[str]:
    """Return the copies of the embedding and LM head that the MTP layers of a HF model lack.

    Servers load these layers separately. transformers ignores them, and Megatron has no copies.
    """
    expected = set[str]()
    for slot in tensor_slots(source.model):
        expected.update(source.files.copies(slot, source.model))
    return expected - source.checkpoint.keys().keys()


def _equal_after_rounding(one: Tensor, other: Tensor) -> bool:
    if count_not_finite(one) != count_not_finite(other):  # check this first, rounding may overflow
        return False
    smaller = min(other, one, key=lambda tensor: tensor.dtype.itemsize).dtype
    return one.dtype != other.dtype and _equal(one.to(smaller), other.to(smaller))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Like ``torch.equal``, but compares different dtypes and treats NaNs as equal."""
    wider = torch.promote_types(one.dtype, other.dtype)
    one, other = one.to(wider), other.to(wider)
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def compare_logits(pair: Pair) -> tuple[Agreement, list[Decoding]]:
    """Run both models on the same random tokens and compare their logits.

    Hugging Face models also decode these tokens with a KV cache.
    """
    models, paths = (pair.one.model, pair.other.model), (pair.one.path, pair.other.path)
    tokens = torch.randint(
        0,
        min(model.vocab_size for model in models),
        (BATCH, min(LENGTH, *(model.max_position_embeddings for model in models))),
        generator=torch.Generator().manual_seed(0),
    )
    smaller = min(_dtype(pair.other), _dtype(pair.one), key=lambda dtype: dtype.itemsize)
    outputs = [run_model(path, tokens, smaller, decode=True) for path in paths]
    agreement = compare_outputs(*outputs)
    decoding = [
        Decoding(path, (output.decoded - output.logits).abs().max().item())
        for path, output in zip(paths, outputs, strict=True)
        if output.decoded is not None
    ]
    return agreement if pair.exact else replace(agreement, limit=None), decoding


def loss_of(path: Path, tokens: Tensor) -> float:
    """Return the cross-entropy loss on a batch of token IDs, in nats per token."""
    logits = run_model(open_source(path, comparing=True).path, tokens, torch.float32).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), tokens[:, 1:].flatten()
    ).item()


def run_model(
    path: Path, tokens: Tensor, rounded_to: torch.dtype, *, decode: bool = False
) -> Outputs:
    """Run a checkpoint in float32. See :func:`run_megatron` for the arguments.

    With ``decode``, Hugging Face models run a second time with a KV cache.
    """
    if not is_hf_folder(path):
        return megatron_model.run_megatron(path, tokens, rounded_to=rounded_to)
    # torch's grouped GEMM needs row sizes that are multiples of 16 bytes
    model = load_hf_model(path, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(rounded_to))
        layers = record_layers(model.model.layers)
        logits = model.eval()(tokens, use_cache=False).logits
        layers = list(layers)  # without those of decoding
        decoded = decode_with_cache(model, tokens) if decode else None
        return Outputs(logits, layers, decoded)


def decode_with_cache(model: Any, tokens: Tensor) -> Tensor:
    """Compute the logits of a prompt, a chunk and two single tokens with a KV cache."""
    parameters = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in parameters else "past_key_values"  # since transformers 5.24
    arguments: dict[str, Any] = {"use_cache": True}
    logits = []
    for chunk in _split_for_decoding(tokens):
        output = model(chunk, **arguments)
        logits.append(output.logits)
        arguments[argument] = find_caches(output.values())[0]
    return torch.cat(logits, dim=1)


def _split_for_decoding(tokens: Tensor) -> Iterator[Tensor]:
    length = tokens.shape[1]
    ends = sorted({max(1, length // 2), max(1, length - 2), max(1, length - 1), length})
    start = 0
    for end in ends:
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
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        config = AutoConfig.from_pretrained(path, **local)
        # config.json can select an attention or experts package that is not installed
        config._attn_implementation = config._experts_implementation = None
        config.return_dict = True
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # mismatches are in the report
            **local,
            **settings,
        )
    except Exception as error:  # transformers can raise almost anything
        raise CheckpointError(
            f"Could not load {path} with transformers ({type(error).__name__}: "
            f"{in_one_line(error)})."
        ) from error
    # transformers loads layers for multi-token prediction only when it drafts tokens
    first = model.config.num_hidden_layers
    last = first + getattr(model.config, "num_nextn_predict_layers", 0)
    drafting = tuple(f"model.layers.{layer}." for layer in range(first, last))
    unexpected = report["unexpected_keys"]
    report["unexpected_keys"] = [name for name in unexpected if not name.startswith(drafting)]
    for kind, keys in report.items():
        if keys:
            raise CheckpointError(
                f"The weights in {path} do not match its config.json: {len(keys)} "
                f"{kind.replace('_', ' ')}, e.g. {min(map(str, keys))}."
            )
    return model


def compare_outputs(one: Outputs, other: Outputs) -> Agreement:
    """Compare two outputs, ignoring vocab entries that only one of the models has."""
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
