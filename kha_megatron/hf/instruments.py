"""Measure attention sinks, massive activations, gate scores and head load in a transformers model
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
"""Model types whose ``q_proj`` also computes an output gate, located after each head's query."""


@dataclass(kw_only=True)
class LayerStatistics:
    """Statistics of one layer over the tokens of a text."""

    layer: int
    sinks: list[float] = field(default_factory=list)
    """Mean attention weight of each head on the first token. Empty without softmax attention."""
    peak: float = 0.0
    """Largest absolute value of the layer output. For massive activations, it is hundreds of times
    larger than ``median``."""
    peak_feature: int = 0
    peak_token: int = 0
    median: float = 0.0
    figures: dict[str, float | list[float]] = field(default_factory=dict)
    """Metrics of head mechanisms, e.g. ``gate-score/output`` or ``moh-load``."""

    @property
    def gates(self) -> dict[str, float]:
        found = self.figures.items()
        return {k: v for k, v in found if k.startswith("gate-") and isinstance(v, float)}

    @property
    def load(self) -> list[float]:
        """Fraction of tokens routed to each head, or an empty list without MoH."""
        load = self.figures.get("moh-load", [])
        return load if isinstance(load, list) else []


@torch.no_grad()
def measure_layers(model: Any, ids: Tensor) -> list[LayerStatistics]:
    """Run a forward pass with eager attention and return statistics for each layer.

    Args:
        model: Causal language model in evaluation mode.
        ids: Token ids ``[1, S]``. Note that eager attention materializes ``[H, S, S]`` weights.
    """
    layers, kind = model.get_decoder().layers, model.config.get_text_config().model_type
    found = [LayerStatistics(layer=layer) for layer in range(len(layers))]
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
                listeners.append(_Recorder(figures).observe)
                stack.callback(listeners.pop)
            elif kind in GATED_QUERIES:
                hook = partial(_measure_gate, figures, attention.head_dim)
                stack.enter_context(attention.q_proj.register_forward_hook(hook))
        model(ids, use_cache=False)
    return found


def _measure_sinks(figures: LayerStatistics, module: nn.Module, inputs: Any, result: Any) -> None:
    weights = result[1]
    if weights is not None and weights.shape[-1] > 1:
        figures.sinks = weights[0, :, 1:, 0].float().mean(-1).tolist()


def _measure_output(figures: LayerStatistics, layer: nn.Module, inputs: Any, result: Any) -> None:
    hidden = (result[0] if isinstance(result, tuple) else result)[0].float().abs()
    figures.peak = hidden.max().item()
    token, feature = torch.unravel_index(hidden.argmax(), hidden.shape)
    figures.peak_token, figures.peak_feature = int(token), int(feature)
    figures.median = hidden.median().item()


def _measure_gate(
    figures: LayerStatistics, head_dim: int, module: nn.Module, inputs: Any, result: Tensor
) -> None:
    score = result.unflatten(-1, (-1, 2 * head_dim))[..., head_dim:].float().sigmoid()
    observe_gate("output", lambda: score, _Recorder(figures))


class _Recorder(Ranks):
    """Record the metrics of head mechanisms."""

    def __init__(self, figures: LayerStatistics) -> None:
        self.figures = figures

    def observe(self, name: str, figure: Callable[[], Tensor]) -> None:
        self.figures.figures[name] = figure().tolist()
