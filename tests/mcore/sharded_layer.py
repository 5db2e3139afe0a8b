"""One layer's attention on tensor-parallel ranks, put together as one process would hold it.

The weights, the input and what comes back from above are those of every layout; with sequence
parallelism a rank has its part of the tokens. Sizes are ugly on purpose, 7 tokens where they need
not divide.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from kha_megatron.config import KHAConfig
from tests.distributed.pieces import assemble, pieces

HIDDEN, BATCH, BASE = 28, 2, 10000.0


class Pass(NamedTuple):
    """Forward and backward pass of a layer: whole tensors, float32 of float64."""

    output: np.ndarray
    input_gradient: np.ndarray
    weights: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


def draw(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The input ``[s, b, h]`` and the gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    shape = 2, tokens, BATCH, HIDDEN
    return torch.randn(shape, dtype=torch.float64, generator=generator).unbind(0)


def build(kha: KHAConfig, tp: int, sp: bool, tokens: int, sizes: dict[str, Any]) -> tuple[Any, Any]:
    """This rank's layer in float64, filled, and the rotary embedding of a model."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from tests.distributed import models
    from tests.distributed.pieces import fill

    models.initialize(tensor_model_parallel_size=tp)
    config = models.transformer_config(
        hidden_size=HIDDEN,
        tensor_model_parallel_size=tp,
        sequence_parallel=sp,
        params_dtype=torch.float64,
        **sizes,
    )
    layer = models.attention(config, kha).double()
    fill([layer])
    rotary = RotaryEmbedding(config.kv_channels, 1.0, rotary_base=BASE, use_cpu_initialization=True)
    return layer, rotary(tokens).double()


def decoded(kha: KHAConfig, tp: int, sizes: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs for seven tokens at once, and from Megatron's static cache in pieces."""
    layer, rotary = build(kha, tp, False, 7, sizes)
    layer.eval()
    hidden, _ = draw(7)
    return decode(layer, hidden, None, rotary_pos_emb=rotary)


@torch.no_grad()
def decode(
    layer: Any, hidden: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs for seven tokens ``[7, b, h]`` at once, and from Megatron's static cache."""
    from megatron.core.inference.contexts import StaticInferenceContext

    whole, _ = layer(hidden, mask, **options)
    context = StaticInferenceContext(hidden.shape[1], 7)
    steps = []
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 7)):
        context.sequence_len_offset = start
        part = None if mask is None else mask[..., start:end, :end]
        step, _ = layer(hidden[start:end], part, inference_context=context, **options)
        steps.append(step)
    return whole, torch.cat(steps)


def on_rank(
    kha: KHAConfig, tp: int, sp: bool, tokens: int, sizes: dict[str, Any], mutate: Any = None
) -> tuple[Any, ...]:
    """This rank's part of a :class:`Pass`; ``mutate`` gives a context that breaks something."""
    from megatron.core import parallel_state

    layer, rotary = build(kha, tp, sp, tokens, sizes)
    rank = parallel_state.get_tensor_model_parallel_rank()
    hidden, upstream = (x.chunk(tp)[rank] if sp else x for x in draw(tokens))
    hidden = hidden.clone().requires_grad_()
    with mutate() if mutate else nullcontext():
        output, _ = layer(hidden, None, rotary_pos_emb=rotary)
        output.backward(upstream)
    return (
        rank * len(hidden) if sp else 0,
        output.detach().float().numpy(),
        hidden.grad.float().numpy(),
        list(pieces([layer])),
        list(pieces([layer], lambda p: p.grad)),
    )


def put_together(ranks: list[tuple[Any, ...]], tokens: int) -> Pass:
    """What the ranks of :func:`on_rank` hold.

    Raises:
        AssertionError: ranks that hold the same differ, or something is not a number.
    """
    assert all(np.isfinite(part).all() for rank in ranks for part in rank[1:3]), "not finite"
    wholes = np.full((2, tokens, BATCH, HIDDEN), np.nan, np.float32)
    for first, *parts, _, _ in ranks:
        for whole, part in zip(wholes, parts, strict=True):
            place = whole[first : first + len(part)]
            same = np.isnan(place) | (place == part)
            assert same.all(), "replicas of activations differ"
            place[...] = part
    return Pass(*wholes, *(assemble([rank[i] for rank in ranks]) for i in (3, 4)))


def errors(found: Pass, twin: Any) -> dict[str, float]:
    """Relative errors, of norms, against the oracle's layer ``twin(hidden [B, S, K], weights)``."""
    weights = {n: torch.from_numpy(w).double().requires_grad_() for n, w in found.weights.items()}
    hidden, upstream = draw(len(found.output))
    hidden.requires_grad_()
    expected = twin(hidden.transpose(0, 1), weights).transpose(0, 1)
    expected.backward(upstream)
    pairs = {
        "output": (found.output, expected),
        "input gradient": (found.input_gradient, hidden.grad),
    }
    pairs |= {name: (found.gradients[name], w.grad) for name, w in weights.items()}
    with torch.no_grad():
        return {
            name: float((torch.from_numpy(ours).double() - theirs).norm() / theirs.norm())
            for name, (ours, theirs) in pairs.items()
        }
