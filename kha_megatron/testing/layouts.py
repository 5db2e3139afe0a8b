"""Compare an attention layer under several parallel layouts with the unsharded layer.

:func:`kha_megatron.testing.check_mechanism` runs this module in a new process. It imports Megatron
once and then forks the ranks of each layout.
"""

import gc
import json
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kha_megatron.heads import HeadTensor
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.mcore import cpu
from kha_megatron.testing import SIZES, TOLERANCE, is_supported

_TIMEOUT = 60  # seconds for a layout
_TOKENS = 12
_BATCH = 2
_SEED = 5  # of weights and inputs
_FINITE_STEP = 1e-6  # for finite differences
_LEAST_EFFECT = 1e-4  # relative to the norm; QK-norm cancels a scale up to its epsilon of 1e-5


@dataclass(frozen=True)
class Layout:
    """A parallel layout, and the options of the layer that is tested with it."""

    tp: int
    sp: bool
    groups: int  # KV heads
    qk_norm: bool = True

    def __str__(self) -> str:
        norm = "" if self.qk_norm else " without QK-norm"
        sp = " with SP" if self.sp else ""
        return f"TP {self.tp}{sp} and {self.groups} KV heads{norm}"


# with two KV heads on four ranks, ranks share a KV head; with eight, no KV head is repeated
UNSHARDED = [
    Layout(tp=1, sp=False, groups=4),
    Layout(tp=1, sp=False, groups=2),
    Layout(tp=1, sp=False, groups=8, qk_norm=False),
]
SHARDED = [
    Layout(tp=2, sp=False, groups=4),
    Layout(tp=2, sp=True, groups=4),
    Layout(tp=4, sp=False, groups=4),
    Layout(tp=4, sp=True, groups=4),
    Layout(tp=4, sp=True, groups=2),
    Layout(tp=2, sp=False, groups=8, qk_norm=False),
]


@dataclass(frozen=True)
class Shard:
    """A tensor of one rank in float64, and its offset in the unsharded tensor."""

    offset: tuple[int, ...]
    tensor: Tensor


Shards = dict[str, dict[str, Shard]]
"""Shards of a rank by check (a key of ``_MESSAGES``) and by parameter name."""


@dataclass(frozen=True)
class RankResult:
    shards: Shards
    mistakes: list[str]
    """Messages about mistakes that a rank finds without comparing it with others."""


class RankError(Exception):
    """An exception on a rank, or no result in time."""


_MESSAGES = {
    "initial": "Initial value of `{name}` differs between ranks under {layout}. It must not depend "
    "on the random state of a rank.",
    "loaded": "TP split of `{name}`: {layout} loads other values from a checkpoint.",
    "gradient": "Gradient of `{name}` {why} under {layout}.",
    "output": "Outputs differ from those of one rank under {layout}. Check `per_head` and `ranks`.",
    "input gradient": "The gradient of the layer input differs from that of one rank under "
    "{layout}. Check `gradient` of the parameters with `reads_input`.",
}


def find_mistakes(
    kha: HeadsConfig,
    scratch: Path,
    smooth: bool,
) -> Iterator[str]:
    """Yield a message for each broken rule."""
    unsharded: dict[int, Shards] = {}
    for layout in (*UNSHARDED, *SHARDED):
        if not is_supported(kha, qk_norm=layout.qk_norm):
            layout = replace(layout, qk_norm=not layout.qk_norm)
        try:
            results = _run_ranks(kha, layout, scratch, smooth)
        except RankError as error:
            yield _explain_failure(kha, layout, error)
            return
        shards_of_ranks = []
        for result in results:
            yield from result.mistakes
            shards_of_ranks.append(result.shards)
        if layout.groups not in unsharded:  # the layouts in UNSHARDED come first
            unsharded[layout.groups] = shards_of_ranks[0]
        expected = unsharded[layout.groups]
        yield from _compare(kha, layout, shards_of_ranks, expected)


def _explain_failure(kha: HeadsConfig, layout: Layout, error: RankError) -> str:
    """Explain an exception. A tensor that is split without ``per_head`` is its likely cause."""
    global_tensors = kha.tensors(SIZES)
    local_tensors = kha.tensors(SIZES.on_rank(2))
    sharded_names = []
    for tensor, local_tensor in zip(global_tensors, local_tensors, strict=True):
        is_sharded = local_tensor.shape != tensor.shape
        if is_sharded and not tensor.per_head:
            sharded_names.append(f"`{tensor.name}`")
    hint = ""
    if sharded_names:
        names = ", ".join(sharded_names)
        hint = f" Set `per_head` if {names} is split along the heads."
    subject = "TP split: the layer" if layout.tp > 1 else "The layer"
    return f"{subject} fails under {layout}.{hint} The error is: {error}"


def _compare(
    kha: HeadsConfig,
    layout: Layout,
    shards_of_ranks: list[Shards],
    unsharded: Shards,
) -> Iterator[str]:
    """Yield a message for each tensor that differs from that of one rank."""
    tensors = {f"{tensor.name}.weight": tensor for tensor in kha.tensors(SIZES)}
    for check, message in _MESSAGES.items():
        for name in _list_compared_names(check, unsharded[check], tensors):
            expected = unsharded[check][name].tensor
            shards = [rank_shards[check][name] for rank_shards in shards_of_ranks]
            if all(_is_shard_of(shard, expected) for shard in shards):
                continue
            title = name
            difference = "differs from that of one rank"
            if name in tensors:  # belongs to the mechanism
                tensor = tensors[name]
                title = tensor.name
                if check == "gradient":
                    explanation = _explain_gradient(tensor, shards, expected)
                    difference = f"is declared `{tensor.gradient}`, but {explanation}"
            yield message.format(name=title, layout=layout, why=difference)


def _list_compared_names(
    check: str,
    names: Iterable[str],
    tensors: Mapping[str, HeadTensor],
) -> list[str]:
    """Return the names to compare: first those of the mechanism, then those of Megatron."""
    mechanism_names = []
    other_names = []
    for name in names:
        if "layernorm" in name:
            continue
        if name in tensors:
            mechanism_names.append(name)
        elif check not in ("initial", "loaded"):
            other_names.append(name)
    return mechanism_names + other_names


def _explain_gradient(
    tensor: HeadTensor,
    shards: list[Shard],
    expected: Tensor,
) -> str:
    """Explain how gradients on TP ranks differ from the expected gradient."""
    is_sharded = len({shard.offset for shard in shards}) > 1
    if is_sharded:
        return "its shards differ from those of one rank"
    gradients = [shard.tensor for shard in shards]
    total = torch.stack(gradients).sum(0)
    if not _differs(total, expected):
        summed_over = "tokens" if tensor.gradient == "heads" else "heads"
        return f"differs between TP ranks: it is a sum over {summed_over}"
    ranks = len(gradients)
    if not any(_differs(gradient, expected * ranks) for gradient in gradients):
        return f"is {ranks} times too large: it is the same on all ranks"
    return "differs from that of one rank"


def _is_shard_of(shard: Shard, unsharded: Tensor) -> bool:
    slices = []
    for start, size in zip(shard.offset, shard.tensor.shape, strict=True):
        slices.append(slice(start, start + size))
    expected = unsharded[tuple(slices)]
    return not _differs(shard.tensor, expected)


def _differs(
    actual: Tensor,
    expected: Tensor,
    tolerance: float = TOLERANCE,
) -> bool:
    difference = (actual - expected).norm()
    limit = tolerance * expected.norm().clamp_min(1e-12)
    return not difference <= limit  # also for NaN


def _run_ranks(
    kha: HeadsConfig,
    layout: Layout,
    scratch: Path,
    smooth: bool,
) -> list[RankResult]:
    """Fork the ranks of a layout, and return their results.

    Raises:
        RankError: If a rank fails or takes too long.
    """
    context = multiprocessing.get_context("fork")
    parent = os.getpid()
    folder = scratch / f"{layout.tp}-{layout.sp}-{layout.groups}"
    folder.mkdir()
    weights = scratch / f"weights-{layout.groups}"

    def run_rank(rank: int) -> None:
        os.setpgrp()  # so that its own processes, which write checkpoints, end with it
        try:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=layout.tp,
                timeout=timedelta(seconds=_TIMEOUT),
            )
            result: RankResult | str = _run_layer(kha, layout, weights, smooth)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        partial_file = folder / f"{rank}.tmp"
        torch.save(result, partial_file)
        partial_file.rename(folder / f"{rank}.pt")
        # wait for the parent to kill this process, because other ranks may still need it
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(1)

    processes = [context.Process(target=run_rank, args=(rank,)) for rank in range(layout.tp)]
    for process in processes:
        process.start()
    try:
        return _collect_results(folder, layout.tp)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()


def _collect_results(folder: Path, ranks: int) -> list[RankResult]:
    """Wait until all ranks have written a result. Raises RankError."""
    results: dict[int, RankResult] = {}
    deadline = time.monotonic() + _TIMEOUT
    while len(results) < ranks:
        if time.monotonic() >= deadline:
            raise RankError(f"no result within {_TIMEOUT} s")
        time.sleep(0.02)
        for rank in range(ranks):
            file = folder / f"{rank}.pt"
            if rank in results or not file.exists():
                continue
            result = torch.load(file, weights_only=False)
            if isinstance(result, str):
                raise RankError(result)
            results[rank] = result
    return [results[rank] for rank in range(ranks)]


def _run_layer(
    kha: HeadsConfig,
    layout: Layout,
    weights: Path,
    smooth: bool,
) -> RankResult:
    """Run all checks on one rank.

    Args:
        weights: Directory of a checkpoint with random weights. The ranks of an unsharded layout
            save it, and those of a sharded layout load it.
    """
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout.tp)
    rank = parallel_state.get_tensor_model_parallel_rank()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(rank)  # initial values must not depend on it

    layer = _build(kha, layout)
    shards: Shards = {"initial": _list_shards(layer)}
    mistakes: list[str] = []
    if layout.tp == 1:
        mistakes += _find_inexact_start(kha, layout, layer)
        _randomize(layer)
        weights.mkdir()
        dist_checkpointing.save(layer.sharded_state_dict(), str(weights))
    else:
        loaded = dist_checkpointing.load(layer.sharded_state_dict(), str(weights))
        layer.load_state_dict(loaded)
    shards["loaded"] = _list_shards(layer)

    rotary = _rotary_embedding()
    hidden, output_gradient = _inputs()
    first_token = 0
    if layout.sp:
        tokens_per_rank = _TOKENS // layout.tp
        first_token = rank * tokens_per_rank
        hidden = hidden.narrow(0, first_token, tokens_per_rank)
        output_gradient = output_gradient.narrow(0, first_token, tokens_per_rank)
    hidden = hidden.clone().requires_grad_()
    output = _forward(layer, hidden, rotary)
    output.backward(output_gradient)
    shards["gradient"] = _list_shards(layer, gradients=True)
    assert hidden.grad is not None
    offset = (first_token, 0, 0)
    shards["output"] = {"": Shard(offset, output.detach())}
    shards["input gradient"] = {"": Shard(offset, hidden.grad)}

    mistakes += _find_wrong_masking(
        layout,
        layer,
        output.detach(),
        hidden.detach(),
        rotary,
    )
    if layout.tp == 1:
        mistakes += _find_dependent_tokens(layer, rotary)
        mistakes += _find_missing_effects(kha, layout, layer, rotary)

    layer.eval()
    if layout.tp == 1 and smooth:
        mistakes += _find_wrong_derivatives(kha, layer, rotary)
    if not layout.sp:
        mistakes += _find_wrong_decoding(layout, layer, rotary)
    return RankResult(shards, mistakes)


def _rotary_embedding() -> dict[str, Tensor]:
    """Return the keyword argument of the layer for RoPE."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = RotaryEmbedding(SIZES.head_dim, 1.0, use_cpu_initialization=True)
    return {"rotary_pos_emb": embedding(_TOKENS).double()}


@torch.no_grad()
def _randomize(layer: Any) -> None:
    """Draw random weights, with a mean of 1 for norms."""
    generator = torch.Generator().manual_seed(_SEED)
    for name, parameter in layer.named_parameters():
        noise = torch.randn(
            parameter.shape,
            generator=generator,
            dtype=torch.float64,
        )
        mean = 1 if "layernorm" in name else 0
        parameter.copy_(0.4 * noise + mean)


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad


def _build(kha: HeadsConfig, layout: Layout) -> Any:
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from kha_megatron.mcore.gpt import kha_layer_spec

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=2,
            hidden_size=SIZES.hidden_size,
            num_attention_heads=SIZES.query_heads,
            num_query_groups=layout.groups,
            kv_channels=SIZES.head_dim,
            tensor_model_parallel_size=layout.tp,
            sequence_parallel=layout.sp,
            normalization="RMSNorm",
            qk_layernorm=layout.qk_norm,
            add_bias_linear=False,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            params_dtype=torch.float64,
            transformer_impl="local",
            persist_layer_norm=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
        )
    spec = kha_layer_spec(config, kha).layer_specs[0].submodules.self_attention
    return build_module(spec, config=config, layer_number=1).double()


def _forward(
    layer: Any,
    hidden: Tensor,
    options: Mapping[str, Any],
    mask: Tensor | None = None,
) -> Tensor:
    output, _ = layer(hidden, mask, **options)
    return output


def _inputs() -> tuple[Tensor, Tensor]:
    """Return random hidden states, and random gradients of the outputs.

    Both are float64 ``[tokens, batch, hidden]``.
    """
    shape = (_TOKENS, _BATCH, SIZES.hidden_size)
    generator = torch.Generator().manual_seed(_SEED)
    both = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
    hidden, output_gradient = both.unbind()
    return hidden, output_gradient


def _list_shards(layer: Any, *, gradients: bool = False) -> dict[str, Shard]:
    """Return the shards of all parameters, or of their gradients."""
    from megatron.core.dist_checkpointing import ShardedTensor

    shards = {}
    state = layer.sharded_state_dict()
    for name, parameter in layer.named_parameters():
        tensor = _gradient(parameter) if gradients else parameter
        offset = (0,) * tensor.dim()
        entry = state.get(name)
        if isinstance(entry, ShardedTensor):
            offset = entry.global_offset or offset
        shards[name] = Shard(offset, tensor.detach().clone())
    return shards


def _find_inexact_start(
    kha: HeadsConfig,
    layout: Layout,
    layer: Any,
) -> Iterator[str]:
    """Compare outputs at initialization with those of plain attention, if they must be equal."""
    if not all(mechanism.is_exact_at_start for mechanism in kha.mechanisms):
        return
    weights = layer.state_dict()
    plain_layer = _build(HeadsConfig(), layout)
    plain_weights = {name: weights[name] for name in plain_layer.state_dict()}
    plain_layer.load_state_dict(plain_weights)
    hidden, _ = _inputs()
    with torch.no_grad():
        output = _forward(layer, hidden, {})
        plain_output = _forward(plain_layer, hidden, {})
    replaces_core_attention = any(mechanism.acts_at("core") for mechanism in kha.mechanisms)
    if replaces_core_attention:  # rounds differently
        is_exact = not _differs(output, plain_output)
    else:
        is_exact = torch.equal(output, plain_output)
    if not is_exact:
        yield (
            "The initial values change the outputs of a model, although `projections_to_double` "
            "returns without an error. Change `initial` or remove the method."
        )


def _find_wrong_derivatives(
    kha: HeadsConfig,
    layer: Any,
    options: dict[str, Any],
) -> Iterator[str]:
    """Compare gradients with finite differences of the loss, without auxiliary losses."""
    hidden, output_gradient = _inputs()

    def compute_loss() -> Tensor:
        output = _forward(layer, hidden, options)
        return (output * output_gradient).sum()

    layer.zero_grad()
    compute_loss().backward()
    for tensor in kha.tensors(SIZES):
        weight = layer.get_parameter(f"{tensor.name}.weight")
        direction = torch.randn(weight.shape, dtype=torch.float64)
        direction /= direction.norm()
        step = _FINITE_STEP * direction
        with torch.no_grad():
            weight += step
            loss_after = compute_loss().item()
            weight -= 2 * step
            loss_before = compute_loss().item()
            weight += step
        expected = (loss_after - loss_before) / (2 * _FINITE_STEP)
        directional_gradient = _gradient(weight) * direction
        actual = directional_gradient.sum().item()
        if not math.isclose(actual, expected, rel_tol=1e-4, abs_tol=1e-5):
            yield (
                f"Gradient of `{tensor.name}` differs from finite differences ({actual:.6g} "
                f"against {expected:.6g}). Check its backward pass."
            )


def _find_wrong_masking(
    layout: Layout,
    layer: Any,
    output: Tensor,
    hidden: Tensor,
    options: dict[str, Tensor],
) -> Iterator[str]:
    """Pass the causal mask explicitly, which disables fused attention, and then use dropout."""
    is_later_token = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).triu(1)
    mask = is_later_token[None, None]  # [batch, heads, queries, keys]
    dropout = layer.core_attention.attention_dropout
    try:
        masked = _forward(layer, hidden, options, mask).detach()
        dropout.p = 0.1
        _forward(layer, hidden, options, mask).sum().backward()
    except RuntimeError as error:
        yield (
            f"Attention with a mask and dropout fails under {layout}: {error} If the error is "
            "about `view`, make the results of `apply` contiguous."
        )
        return
    finally:
        dropout.p = 0.0
    if _differs(masked, output):
        yield f"An explicit causal mask changes the outputs under {layout}."


def _find_dependent_tokens(
    layer: Any,
    options: dict[str, Tensor],
) -> Iterator[str]:
    """Check that outputs do not depend on later tokens or other sequences during training.

    Gradients are enabled, because ``ranks.trains`` is otherwise False.
    """
    hidden, other_hidden = _inputs()
    output = _forward(layer, hidden, options)
    half = _TOKENS // 2
    with_other_end = hidden.clone()
    with_other_end[half:] = other_hidden[half:]
    changed_output = _forward(layer, with_other_end, options)
    if _differs(changed_output[:half], output[:half]):
        yield (
            "Future tokens: during training, the outputs of a token depend on later tokens. "
            "`apply` must treat all tokens independently."
        )
    with_other_sequence = hidden.clone()
    with_other_sequence[:, 1] = other_hidden[:, 1]
    changed_output = _forward(layer, with_other_sequence, options)
    if _differs(changed_output[:, 0], output[:, 0]):
        yield (
            "During training, the outputs of a sequence depend on the other sequences of the "
            "microbatch. `apply` must treat all tokens independently."
        )


@torch.no_grad()
def _find_missing_effects(
    kha: HeadsConfig,
    layout: Layout,
    layer: Any,
    options: dict[str, Tensor],
) -> Iterator[str]:
    """Change each parameter, and then remove the mechanism."""
    hidden, _ = _inputs()
    output = _forward(layer, hidden, options)
    norm = "with" if layout.qk_norm else "without"
    remedy = "Remove it, or return a message from `unsupported_reason` for such models."
    for tensor in kha.tensors(SIZES):
        weight = layer.get_parameter(f"{tensor.name}.weight")
        original_weight = weight.clone()
        weight.copy_(torch.randn_like(weight))
        changed_output = _forward(layer, hidden, options)
        weight.copy_(original_weight)
        if not _differs(changed_output, output, _LEAST_EFFECT):
            yield f"`{tensor.name}` has no effect on the outputs {norm} QK-norm. {remedy}"
    (mechanism,) = kha.mechanisms
    if mechanism.own_projections or mechanism.acts_at("core"):
        return  # the layer needs the mechanism
    mechanisms = layer.mechanisms
    layer.mechanisms = []
    plain_output = _forward(layer, hidden, options)
    layer.mechanisms = mechanisms
    if not _differs(plain_output, output, _LEAST_EFFECT):
        yield f"The mechanism has no effect on the outputs {norm} QK-norm. {remedy}"


@torch.no_grad()
def _find_wrong_decoding(
    layout: Layout,
    layer: Any,
    options: dict[str, Tensor],
) -> Iterator[str]:
    """Compare the outputs of a prompt and three decoding steps with those of one forward pass."""
    from megatron.core.inference.contexts import StaticInferenceContext

    length = 7
    inputs, _ = _inputs()
    hidden = inputs[:length]
    rotary = options["rotary_pos_emb"][:length]
    expected = _forward(layer, hidden, {"rotary_pos_emb": rotary})
    context = StaticInferenceContext(_BATCH, length)
    decoded = []
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 7)):
        context.sequence_len_offset = start
        chunk = hidden[start:end]
        output = _forward(
            layer,
            chunk,
            {"rotary_pos_emb": rotary, "inference_context": context},
        )
        decoded.append(output)
    if _differs(torch.cat(decoded), expected):
        yield (
            f"KV cache: decoding under {layout} gives other outputs than the whole sequence. "
            "`apply` must treat all tokens independently."
        )


def main() -> None:
    request = json.loads(sys.argv[1])
    os.environ |= cpu.ENVIRONMENT
    cpu.install(despite_cuda=True, quiet=True)
    torch.set_num_threads(1)
    from kha_megatron.mcore import gpt, patches  # noqa: F401, so that forked ranks do not have to

    patches.use_forked_writers()
    gc.freeze()  # so that no garbage collection of a rank visits what torch and Megatron hold
    kha = HeadsConfig.from_dict(request["kha"])
    scratch = Path(request["scratch"])
    mistakes = find_mistakes(kha, scratch, request["smooth"])
    first_mistake = next(mistakes, None)
    sys.stdout.write(json.dumps(first_mistake))


if __name__ == "__main__":
    main()
