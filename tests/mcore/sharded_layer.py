"""Compare one layer's attention on tensor-parallel ranks with the oracle.

Weights, input and upstream gradient are the same under every layout. With sequence parallelism a
rank has its part of the tokens. Sizes are awkward on purpose: 7 tokens where they need not divide.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from kha_megatron.heads import MixtureOfHeads
from kha_megatron.heads.config import HeadsConfig
from tests.distributed.pieces import Piece, assemble, fill, pieces
from tests.mcore import twins

HIDDEN = 28
BATCH = 2
TOLERANCE = 1e-6  # results travel in float32, and Megatron's rotary frequencies are float32
SIZES = {"num_attention_heads": 6, "num_query_groups": 3, "kv_channels": 10}
ON_RANKS = {"num_attention_heads": 8, "num_query_groups": 4}
LATENT = {"multi_latent_attention": True}


class Pass(NamedTuple):
    """Forward and backward pass of a layer: whole tensors, float32 of float64."""

    output: np.ndarray
    input_gradient: np.ndarray
    weights: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


def draw(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the input ``[s, b, h]`` and the gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    shape = 2, tokens, BATCH, HIDDEN
    return torch.randn(shape, dtype=torch.float64, generator=generator).unbind(0)


def build(
    kha: HeadsConfig,
    tp: int,
    sp: bool,
    tokens: int,
    sizes: dict[str, Any],
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return this rank's layer in float64, filled, and the options of its forward pass."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from tests.distributed import models

    models.initialize(tensor_model_parallel_size=tp)
    config = models.transformer_config(
        hidden_size=HIDDEN,
        num_layers=twins.LAYERS,
        tensor_model_parallel_size=tp,
        sequence_parallel=sp,
        params_dtype=torch.float64,
        **sizes,
    )
    layer = models.attention(config, kha, layer_number=2).double()
    if kha.get(MixtureOfHeads):  # as Megatron's schedules do
        scale = torch.tensor([twins.LOSS_SCALE])
        layer.config.experimental_attention_variant_loss_scale_func(scale)
    fill([layer])
    if config.multi_latent_attention:
        return layer, {}
    percent = 0.5 if kha.attention == "gta" else 1.0
    rotary = RotaryEmbedding(
        config.kv_channels,
        percent,
        rotary_base=twins.BASE,
        use_cpu_initialization=True,
    )
    return layer, {"rotary_pos_emb": rotary(tokens).double()}


@torch.no_grad()
def decoded(kha: HeadsConfig, tp: int, sizes: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs for seven tokens ``[7, b, h]`` at once, and from Megatron's static cache."""
    from megatron.core.inference.contexts import StaticInferenceContext

    layer, options = build(kha, tp, False, 7, sizes)
    layer.eval()
    hidden, _ = draw(7)
    whole, _ = layer(hidden, None, **options)
    context = StaticInferenceContext(BATCH, 7)
    steps = []
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 7)):
        context.sequence_len_offset = start
        step, _ = layer(
            hidden[start:end],
            None,
            inference_context=context,
            **options,
        )
        steps.append(step)
    return whole, torch.cat(steps)


class RankPass(NamedTuple):
    """The part of a :class:`Pass` on one rank."""

    first_token: int
    output: np.ndarray
    input_gradient: np.ndarray
    weights: list[Piece]
    gradients: list[Piece]


def on_rank(
    kha: HeadsConfig,
    tp: int,
    sp: bool,
    tokens: int,
    sizes: dict[str, Any],
    mutate: Any = None,
) -> RankPass:
    """Run the layer on this rank. ``mutate`` returns a context that breaks something."""
    from megatron.core import parallel_state

    layer, options = build(kha, tp, sp, tokens, sizes)
    rank = parallel_state.get_tensor_model_parallel_rank()
    hidden, upstream = draw(tokens)
    if sp:
        hidden = hidden.chunk(tp)[rank]
        upstream = upstream.chunk(tp)[rank]
    hidden = hidden.clone().requires_grad_()
    with mutate() if mutate else nullcontext():
        output, _ = layer(hidden, None, **options)
        output.backward(upstream)
    for name, parameter in layer.named_parameters():
        if "layernorm" in name and tp > 1:  # as Megatron's finalize_model_grads does
            torch.distributed.all_reduce(parameter.grad)
    return RankPass(
        first_token=rank * len(hidden) if sp else 0,
        output=output.detach().float().numpy(),
        input_gradient=hidden.grad.float().numpy(),
        weights=list(pieces([layer])),
        gradients=list(pieces([layer], lambda p: p.grad)),
    )


def put_together(ranks: list[RankPass], tokens: int) -> Pass:
    """Assemble the results of all ranks.

    Raises:
        AssertionError: replicas differ, or something is not finite.
    """
    output = np.full((tokens, BATCH, HIDDEN), np.nan, np.float32)
    input_gradient = np.full((tokens, BATCH, HIDDEN), np.nan, np.float32)
    for rank in ranks:
        _write_tokens(output, rank.output, rank.first_token)
        _write_tokens(input_gradient, rank.input_gradient, rank.first_token)
    return Pass(
        output,
        input_gradient,
        assemble([rank.weights for rank in ranks]),
        assemble([rank.gradients for rank in ranks]),
    )


def _write_tokens(target: np.ndarray, tokens: np.ndarray, first: int) -> None:
    """Write the tokens of a rank. What another rank wrote there before must be equal."""
    assert np.isfinite(tokens).all(), "not finite"
    region = target[first : first + len(tokens)]
    same = np.isnan(region) | (region == tokens)
    assert same.all(), "replicas of activations differ"
    region[...] = tokens


def differences(
    ranks: Any,
    kha: HeadsConfig,
    tp: int = 1,
    sp: bool = False,
    *,
    twin: Any = twins.twin,
    mutate: Any = None,
    **sizes: Any,
) -> dict[str, float] | str:
    """Return relative errors, of norms, beyond ``TOLERANCE``, or how replicas differ."""
    tokens = 12 if sp else 7
    sizes = SIZES | (ON_RANKS if tp > 1 else {}) | sizes
    passes = ranks(on_rank, tp, kha, tp, sp, tokens, sizes, mutate)
    try:
        sharded = put_together(passes, tokens)
    except AssertionError as difference:
        return str(difference)
    weights = {}
    for name, weight in sharded.weights.items():
        weights[name] = torch.from_numpy(weight).double().requires_grad_()
    hidden, upstream = draw(tokens)
    hidden.requires_grad_()
    output, loss = twin(kha, sizes, hidden.transpose(0, 1), weights)
    expected = output.transpose(0, 1)
    ((expected * upstream).sum() + loss).backward()
    pairs = {
        "output": (sharded.output, expected.detach()),
        "input gradient": (sharded.input_gradient, hidden.grad),
    }
    for name, weight in weights.items():
        pairs[name] = (sharded.gradients[name], weight.grad)
    too_large = {}
    for name, (actual, wanted) in pairs.items():
        difference = torch.from_numpy(actual).double() - wanted
        error = float(difference.norm() / wanted.norm())
        if not error < TOLERANCE:
            too_large[name] = error
    return too_large
