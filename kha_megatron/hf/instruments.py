"""Measure attention sinks, massive activations, gates and the load of heads in a transformers model
(arXiv 2505.06708, section 4)."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kha_megatron.heads.gate import observe_gate
from kha_megatron.heads.ranks import Ranks

GATED_QUERIES = ("qwen3_next", "qwen3_5_text")
"""Stock architectures whose ``q_proj`` also computes a gate, behind the query of each head."""


@dataclass(kw_only=True)
class LayerFigures:
    """Figures of one layer over the tokens of a text."""

    layer: int
    sinks: list[float] = field(default_factory=list)
    """Attention weight of each head on the first token, as a mean over all later tokens. Empty for
    layers without softmax attention."""
    peak: float = 0.0
    """Largest absolute value of the layer's output."""
    peak_feature: int = 0
    peak_token: int = 0
    """Indices of this value."""
    median: float = 0.0
    """Median absolute value. A massive activation is hundreds of times as large."""
    figures: dict[str, float | list[float]] = field(default_factory=dict)
    """Figures of head mechanisms (``Ranks.observe``). ``gate-score/output``: mean of a gate.
    ``gate-shut/output``: fraction of its scores below 0.1. ``moh-load``: fraction of tokens that
    use each head."""

    @property
    def gates(self) -> dict[str, float]:
        """Figures of gates."""
        found = self.figures.items()
        return {k: v for k, v in found if k.startswith("gate-") and isinstance(v, float)}

    @property
    def load(self) -> list[float]:
        """Fraction of tokens that use each head. Empty if all tokens use all heads."""
        load = self.figures.get("moh-load", [])
        return load if isinstance(load, list) else []


@torch.no_grad()
def measure(model: Any, ids: Tensor) -> list[LayerFigures]:
    """Run one text through a model with eager attention and measure every layer.

    Args:
        model: a decoder with an output layer, in evaluation mode.
        ids: ``[1, S]`` token ids on its device. A layer's attention weights are ``[H, S, S]``.

    Returns:
        Figures of every layer.
    """
    layers, kind = model.get_decoder().layers, model.config.get_text_config().model_type
    found = [LayerFigures(layer=layer) for layer in range(len(layers))]
    before = model.config._attn_implementation
    with ExitStack() as stack:
        model.set_attn_implementation("eager")
        stack.callback(model.set_attn_implementation, before)
        for figures, layer in zip(found, layers, strict=True):
            stack.enter_context(layer.register_forward_hook(partial(_measure_output, figures)))
            if (attention := getattr(layer, "self_attn", None)) is None:
                continue
            stack.enter_context(attention.register_forward_hook(partial(_measure_sinks, figures)))
            if (listeners := getattr(attention, "listeners", None)) is not None:
                listeners.append(_Reports(figures).observe)
                stack.callback(listeners.pop)
            elif kind in GATED_QUERIES:
                hook = partial(_measure_gate, figures, attention.head_dim)
                stack.enter_context(attention.q_proj.register_forward_hook(hook))
        model(ids, use_cache=False)
    return found


def _measure_sinks(figures: LayerFigures, module: nn.Module, inputs: Any, result: Any) -> None:
    weights = result[1]
    if weights is not None and weights.shape[-1] > 1:
        figures.sinks = weights[0, :, 1:, 0].float().mean(-1).tolist()


def _measure_output(figures: LayerFigures, layer: nn.Module, inputs: Any, result: Any) -> None:
    hidden = (result[0] if isinstance(result, tuple) else result)[0].float().abs()
    figures.peak = hidden.max().item()
    token, feature = torch.unravel_index(hidden.argmax(), hidden.shape)
    figures.peak_token, figures.peak_feature = int(token), int(feature)
    figures.median = hidden.median().item()


def _measure_gate(
    figures: LayerFigures, head_dim: int, module: nn.Module, inputs: Any, result: Tensor
) -> None:
    score = result.unflatten(-1, (-1, 2 * head_dim))[..., head_dim:].float().sigmoid()
    observe_gate("output", lambda: score, _Reports(figures))


class _Reports(Ranks):
    """Store what head mechanisms report."""

    def __init__(self, figures: LayerFigures) -> None:
        self.figures = figures

    def observe(self, name: str, figure: Callable[[], Tensor]) -> None:
        """Compute and store a figure."""
        self.figures.figures[name] = figure().tolist()
