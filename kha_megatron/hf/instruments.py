"""Measure attention sinks, massive activations, gate scores and head load.

See section 4 of https://huggingface.co/papers/2505.06708 for background.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kha_megatron.heads.ranks import Ranks
from kha_megatron.heads.registry import observe_output_gate

GATED_QUERIES = ("qwen3_next", "qwen3_5_text")
"""Model types with an output gate in `q_proj`, which returns `[query, gate]` for each head."""


@dataclass(kw_only=True)
class LayerStatistics:
    """Statistics of a decoder layer for one input."""

    layer: int
    sinks: list[float] = field(default_factory=list)
    """Average attention weight on the first token, for each head. Empty if there is no softmax."""
    peak: float = 0.0
    """Largest absolute value in the layer output (hundreds of times `median` if massive)."""
    peak_feature: int = 0
    peak_token: int = 0
    median: float = 0.0
    figures: dict[str, float | list[float]] = field(default_factory=dict)
    """Metrics reported by head mechanisms, e.g. `gate-score/output`."""

    @property
    def means(self) -> dict[str, float]:
        """Metrics that are a single number."""
        return {k: v for k, v in self.figures.items() if isinstance(v, float)}

    @property
    def per_head(self) -> dict[str, list[float]]:
        """Metrics with a number for each head, e.g. the fraction of tokens that use it."""
        return {k: v for k, v in self.figures.items() if isinstance(v, list)}


@torch.no_grad()
def measure_layers(model: Any, ids: Tensor) -> list[LayerStatistics]:
    """
    Run a forward pass and collect statistics of every layer.

    This temporarily switches the model to eager attention, which needs a lot of memory for long
    inputs, as it materializes all attention weights.

    Args:
        model (`PreTrainedModel`): Causal language model in eval mode.
        ids (`torch.LongTensor` of shape `(1, seq_len)`): Token ids.
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


def _measure_sinks(
    figures: LayerStatistics,
    module: nn.Module,
    inputs: Any,
    result: Any,
) -> None:
    weights = result[1]
    if weights is not None and weights.shape[-1] > 1:
        figures.sinks = weights[0, :, 1:, 0].float().mean(-1).tolist()


def _measure_output(
    figures: LayerStatistics,
    layer: nn.Module,
    inputs: Any,
    result: Any,
) -> None:
    hidden = (result[0] if isinstance(result, tuple) else result)[0].float().abs()
    figures.peak = hidden.max().item()
    token, feature = torch.unravel_index(hidden.argmax(), hidden.shape)
    figures.peak_token, figures.peak_feature = int(token), int(feature)
    figures.median = hidden.median().item()


def _measure_gate(
    figures: LayerStatistics,
    head_dim: int,
    module: nn.Module,
    inputs: Any,
    result: Tensor,
) -> None:
    score = result.unflatten(-1, (-1, 2 * head_dim))[..., head_dim:].float().sigmoid()
    observe_output_gate(lambda: score, _Recorder(figures))


class _Recorder(Ranks):
    def __init__(self, figures: LayerStatistics) -> None:
        self.figures = figures

    def observe(self, name: str, figure: Callable[[], Tensor]) -> None:
        self.figures.figures[name] = figure().tolist()
