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
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kha_megatron.config import KHAConfig
from kha_megatron.heads import HeadTensor
from kha_megatron.mcore import cpu
from kha_megatron.testing import SIZES, TOLERANCE, is_supported

_TIMEOUT = 60  # seconds for a layout
_TOKENS, _BATCH = 12, 2
_RANDOM = 5  # seed of weights and inputs
_LEAST_EFFECT = 1e-4  # relative to the norm; QK-norm cancels a scale up to its epsilon of 1e-5


@dataclass(frozen=True)
class Layout:
    tp: int
    sp: bool
    groups: int
    qk_norm: bool = True

    def __str__(self) -> str:
        norm = "" if self.qk_norm else " without QK-norm"
        return f"TP {self.tp}{' with SP' * self.sp} and {self.groups} KV heads{norm}"


# with two KV heads on four ranks, ranks share a KV head; with eight, no KV head is repeated
UNSHARDED = [Layout(1, False, 4), Layout(1, False, 2), Layout(1, False, 8, qk_norm=False)]
SHARDED = [
    *(Layout(tp, sp, 4) for tp in (2, 4) for sp in (False, True)),
    Layout(4, True, 2),
    Layout(2, False, 8, qk_norm=False),
]

Parts = dict[tuple[str, str], tuple[tuple[int, ...], Tensor]]
"""Results of a rank in float64, by kind and name: offset in the whole tensor, and this part."""

Result = tuple[Parts, list[str]]  # with the messages of a rank

_MESSAGES = {
    "initial": "Initial value of `{name}` differs between ranks under {layout}. It must not depend "
    "on the random state of a rank.",
    "loaded": "TP split of `{name}`: {layout} loads other values from a checkpoint.",
    "gradient": "Gradient of `{name}` {why} under {layout}.",
    "output": "Outputs differ from those of one rank under {layout}. Check `per_head` and `ranks`.",
    "input gradient": "The gradient of the layer input differs from that of one rank under "
    "{layout}. Check `gradient` of the parameters with `reads_input`.",
}


def find_mistakes(kha: KHAConfig, scratch: Path, smooth: bool) -> Iterator[str]:
    """Yield a message for each broken rule."""
    wholes: dict[int, Parts] = {}
    for layout in [_supported(kha, layout) for layout in (*UNSHARDED, *SHARDED)]:
        ranks = _run(kha, layout, scratch, smooth)
        if isinstance(ranks, str):
            sizes = (SIZES, SIZES.on_rank(2))
            some = [t for t in zip(*map(kha.tensors, sizes), strict=True) if not t[0].per_head]
            hint = ", ".join(f"`{one.name}`" for one, other in some if one.shape != other.shape)
            hint = f" Set `per_head` if {hint} is split along the heads." if hint else ""
            split = "TP split: t" if layout.tp > 1 else "T"
            yield f"{split}he layer fails under {layout}.{hint} The error is: {ranks}"
            return
        for parts, mistakes in ranks:
            yield from mistakes
            wholes.setdefault(layout.groups, parts)
        yield from _compare(kha, layout, [parts for parts, _ in ranks], wholes[layout.groups])


def _supported(kha: KHAConfig, layout: Layout) -> Layout:
    """Change ``qk_norm`` if the mechanism only supports models with, or without, QK-norm."""
    if is_supported(kha, qk_norm=layout.qk_norm):
        return layout
    return replace(layout, qk_norm=not layout.qk_norm)


def _compare(kha: KHAConfig, layout: Layout, ranks: list[Parts], whole: Parts) -> Iterator[str]:
    tensors = {f"{tensor.name}.weight": tensor for tensor in kha.tensors(SIZES)}
    kinds = [*_MESSAGES]
    for kind, name in sorted(whole, key=lambda key: (kinds.index(key[0]), key[1] not in tensors)):
        found, expected = [parts[kind, name] for parts in ranks], whole[kind, name][1]
        is_theirs = kind in ("initial", "loaded") and name not in tensors  # Megatron's own
        pairs = [(own, _slice(expected, at, own.shape)) for at, own in found]
        if is_theirs or "layernorm" in name or not any(_error(*pair) for pair in pairs):
            continue
        why, tensor = "differs from that of one rank", tensors.get(name)
        if kind == "gradient" and tensor:
            why = f"is declared `{tensor.gradient}`, but {_explain(tensor, found, expected)}"
        title = tensor.name if tensor else name
        yield _MESSAGES[kind].format(name=title, layout=layout, why=why)


def _explain(tensor: HeadTensor, found: list[Any], whole: Tensor) -> str:
    """Explain how gradients on TP ranks differ from the whole gradient."""
    owns = [own for _, own in found]
    if len({at for at, _ in found}) > 1:
        return "its shards differ from those of one rank"
    if not _error(torch.stack(owns).sum(0), whole):
        over = "heads" if tensor.gradient != "heads" else "tokens"
        return f"differs between TP ranks: it is a sum over {over}"
    if not any(_error(own, whole * len(owns)) for own in owns):
        return f"is {len(owns)} times too large: it is the same on all ranks"
    return "differs from that of one rank"


def _slice(whole: Tensor, at: tuple[int, ...], shape: torch.Size) -> Tensor:
    return whole[tuple(slice(first, first + n) for first, n in zip(at, shape, strict=True))]


def _error(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    return not (found - expected).norm() <= tolerance * expected.norm().clamp_min(1e-12)


def _run(kha: KHAConfig, layout: Layout, scratch: Path, smooth: bool) -> list[Result] | str:
    """Fork the ranks of a layout. Returns the results, or the error of a rank."""
    context, parent = multiprocessing.get_context("fork"), os.getpid()
    folder = scratch / f"{layout.tp}-{layout.sp}-{layout.groups}"
    folder.mkdir()

    def work(rank: int) -> None:
        os.setpgrp()  # so that its own processes, which write checkpoints, end with it
        try:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=layout.tp,
                timeout=timedelta(seconds=_TIMEOUT),
            )
            result: Any = _run_layer(kha, layout, scratch / f"weights-{layout.groups}", smooth)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        torch.save(result, folder / f"{rank}.tmp")
        (folder / f"{rank}.tmp").rename(folder / f"{rank}.pt")
        while os.getppid() == parent:  # which kills it
            time.sleep(0.1)
        os._exit(1)

    processes = [context.Process(target=work, args=(rank,)) for rank in range(layout.tp)]
    for process in processes:
        process.start()
    files = [folder / f"{rank}.pt" for rank in range(layout.tp)]
    found: dict[Path, Any] = {}
    deadline = time.monotonic() + _TIMEOUT
    while len(found) < len(files) and time.monotonic() < deadline:
        time.sleep(0.02)
        found |= {f: torch.load(f, weights_only=False) for f in files if f.exists()}
        if errors := [result for result in found.values() if isinstance(result, str)]:
            break
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
    if len(found) < len(files):
        return errors[0] if errors else f"no result within {_TIMEOUT} s"
    return errors[0] if errors else [found[file] for file in files]


def _run_layer(kha: KHAConfig, layout: Layout, weights: Path, smooth: bool) -> Result:
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout.tp)
    rank = parallel_state.get_tensor_model_parallel_rank()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(rank)
    layer = _build(kha, layout)
    parts = _shards("initial", layer, lambda parameter: parameter)
    mistakes: list[str] = []
    if layout.tp == 1:
        mistakes += _find_inexact_start(kha, layout, layer)
        generator = torch.Generator().manual_seed(_RANDOM)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.4 * noise + ("layernorm" in name))
        weights.mkdir()
        dist_checkpointing.save(layer.sharded_state_dict(), str(weights))
    else:
        layer.load_state_dict(dist_checkpointing.load(layer.sharded_state_dict(), str(weights)))
    parts |= _shards("loaded", layer, lambda parameter: parameter)
    embedding = RotaryEmbedding(SIZES.head_dim, 1.0, use_cpu_initialization=True)
    rotary = {"rotary_pos_emb": embedding(_TOKENS).double()}
    hidden, upstream = (x.chunk(layout.tp)[rank] if layout.sp else x for x in _inputs())
    hidden = hidden.clone().requires_grad_()
    output, _ = layer(hidden, None, **rotary)
    output.backward(upstream)
    parts |= _shards("gradient", layer, _gradient)
    at = (rank * len(hidden) if layout.sp else 0, 0, 0)
    assert hidden.grad is not None
    parts |= {("output", ""): (at, output.detach()), ("input gradient", ""): (at, hidden.grad)}
    mistakes += _find_wrong_masking(layout, layer, output.detach(), hidden.detach(), rotary)
    if layout.tp == 1:
        mistakes += _find_dependent_tokens(layer, rotary)
        mistakes += _find_missing_effects(kha, layout, layer, rotary)
    layer.eval()
    if layout.tp == 1 and smooth:
        mistakes += _find_wrong_derivatives(kha, layer, rotary)
    if not layout.sp:
        mistakes += _find_wrong_decoding(layout, layer, rotary)
    return parts, mistakes


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _build(kha: KHAConfig, layout: Layout) -> Any:
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from kha_megatron.mcore.specs import kha_layer_spec

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


def _inputs() -> tuple[Tensor, Tensor]:
    shape = 2, _TOKENS, _BATCH, SIZES.hidden_size
    generator = torch.Generator().manual_seed(_RANDOM)
    hidden, upstream = torch.randn(shape, dtype=torch.float64, generator=generator).unbind(0)
    return hidden, upstream


def _shards(kind: str, layer: Any, select: Callable[[Any], Tensor]) -> Parts:
    from megatron.core.dist_checkpointing import ShardedTensor

    held: Parts = {}
    state = layer.sharded_state_dict()
    for name, parameter in layer.named_parameters():
        at = state[name].global_offset if isinstance(state.get(name), ShardedTensor) else None
        part = select(parameter).detach().clone()
        held[kind, name] = (at or (0,) * part.dim(), part)
    return held


def _find_inexact_start(kha: KHAConfig, layout: Layout, layer: Any) -> Iterator[str]:
    """Compare outputs at initialization with those of plain attention, if they must be equal."""
    if not all(mechanism.is_exact_at_start for mechanism in kha.mechanisms):
        return
    plain, own = _build(KHAConfig(), layout), layer.state_dict()
    plain.load_state_dict({name: own[name] for name in plain.state_dict()})
    with torch.no_grad():
        ours, theirs = (each(_inputs()[0], None)[0] for each in (layer, plain))
    rounds = any(mechanism.acts_at("core") for mechanism in kha.mechanisms)
    if _error(ours, theirs) if rounds else not torch.equal(ours, theirs):
        yield (
            "The initial values change the outputs of a model, although `projections_to_double` "
            "returns without an error. Change `initial` or remove the method."
        )


def _find_wrong_derivatives(kha: KHAConfig, layer: Any, options: dict[str, Any]) -> Iterator[str]:
    """Compare gradients with finite differences of the loss, without auxiliary losses."""
    hidden, upstream = _inputs()

    def loss() -> Tensor:
        return (layer(hidden, None, **options)[0] * upstream).sum()

    layer.zero_grad()
    loss().backward()
    for tensor in kha.tensors(SIZES):
        weight = layer.get_parameter(f"{tensor.name}.weight")
        direction = torch.randn(weight.shape, dtype=torch.float64)
        direction, step = direction / direction.norm(), 1e-6
        with torch.no_grad():
            ends = []
            for sign in (1, -2):
                weight += sign * step * direction
                ends.append(loss().item())
            weight += step * direction
        expected = (ends[0] - ends[1]) / (2 * step)
        found = (_gradient(weight) * direction).sum().item()
        if not math.isclose(found, expected, rel_tol=1e-4, abs_tol=1e-5):
            yield (
                f"Gradient of `{tensor.name}` differs from finite differences ({found:.6g} against "
                f"{expected:.6g}). Check its backward pass."
            )


def _find_wrong_masking(
    layout: Layout, layer: Any, output: Tensor, hidden: Tensor, options: dict[str, Tensor]
) -> Iterator[str]:
    """Pass the causal mask explicitly, which disables fused attention, and then use dropout."""
    mask = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).triu(1)[None, None]
    dropout = layer.core_attention.attention_dropout
    try:
        masked = layer(hidden, mask, **options)[0].detach()
        dropout.p = 0.1
        layer(hidden, mask, **options)[0].sum().backward()
    except RuntimeError as error:
        yield (
            f"Attention with a mask and dropout fails under {layout}: {error} If the error is "
            "about `view`, make the results of `apply` contiguous."
        )
        return
    finally:
        dropout.p = 0.0
    if _error(masked, output):
        yield f"An explicit causal mask changes the outputs under {layout}."


def _find_dependent_tokens(layer: Any, options: dict[str, Tensor]) -> Iterator[str]:
    """Check that outputs do not depend on later tokens or other sequences during training.

    Gradients are enabled, because ``ranks.trains`` is otherwise False.
    """
    hidden, others = _inputs()
    output, _ = layer(hidden, None, **options)
    later, sequence = hidden.clone(), hidden.clone()
    later[_TOKENS // 2 :] = others[_TOKENS // 2 :]
    sequence[:, 1] = others[:, 1]
    changed, _ = layer(later, None, **options)
    if _error(changed[: _TOKENS // 2], output[: _TOKENS // 2]):
        yield (
            "Future tokens: during training, the outputs of a token depend on later tokens. "
            "`apply` must treat all tokens independently."
        )
    changed, _ = layer(sequence, None, **options)
    if _error(changed[:, 0], output[:, 0]):
        yield (
            "During training, the outputs of a sequence depend on the other sequences of the "
            "microbatch. `apply` must treat all tokens independently."
        )


@torch.no_grad()
def _find_missing_effects(
    kha: KHAConfig, layout: Layout, layer: Any, options: dict[str, Tensor]
) -> Iterator[str]:
    """Change each parameter, and then remove the mechanism."""
    hidden, _ = _inputs()
    output, _ = layer(hidden, None, **options)
    norm = "with" if layout.qk_norm else "without"
    remedy = "Remove it, or return a message from `unsupported_reason` for such models."
    for tensor in kha.tensors(SIZES):
        weight = layer.get_parameter(f"{tensor.name}.weight")
        before = weight.clone()
        weight.copy_(torch.randn_like(weight))
        changed, _ = layer(hidden, None, **options)
        weight.copy_(before)
        if not _error(changed, output, _LEAST_EFFECT):
            yield f"`{tensor.name}` has no effect on the outputs {norm} QK-norm. {remedy}"
    (mechanism,) = kha.mechanisms
    if mechanism.own_projections or mechanism.acts_at("core"):
        return  # the layer needs the mechanism
    used, layer.mechanisms = layer.mechanisms, []
    changed, _ = layer(hidden, None, **options)
    layer.mechanisms = used
    if not _error(changed, output, _LEAST_EFFECT):
        yield f"The mechanism has no effect on the outputs {norm} QK-norm. {remedy}"


@torch.no_grad()
def _find_wrong_decoding(layout: Layout, layer: Any, options: dict[str, Tensor]) -> list[str]:
    from megatron.core.inference.contexts import StaticInferenceContext

    hidden, options = _inputs()[0][:7], {"rotary_pos_emb": options["rotary_pos_emb"][:7]}
    whole, _ = layer(hidden, None, **options)
    context = StaticInferenceContext(_BATCH, 7)
    steps = []
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 7)):
        context.sequence_len_offset = start
        steps.append(layer(hidden[start:end], None, inference_context=context, **options)[0])
    message = (
        f"KV cache: decoding under {layout} gives other outputs than the whole sequence. `apply` "
        "must treat all tokens independently."
    )
    return [message] if _error(torch.cat(steps), whole) else []


def main() -> None:
    request = json.loads(sys.argv[1])
    os.environ |= cpu.ENVIRONMENT
    cpu.install(despite_cuda=True, quiet=True)
    torch.set_num_threads(1)
    from kha_megatron.mcore import compat, specs  # noqa: F401, so that forked ranks don't have to

    compat.use_forked_writers()
    gc.freeze()  # so that no garbage collection of a rank visits what torch and Megatron hold
    kha = KHAConfig.from_dict(request["kha"])
    mistakes = find_mistakes(kha, Path(request["scratch"]), request["smooth"])
    sys.stdout.write(json.dumps(next(mistakes, None)))


if __name__ == "__main__":
    main()
