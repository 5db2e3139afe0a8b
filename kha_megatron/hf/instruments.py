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
        means = {}
        for name, figure in self.figures.items():
            if isinstance(figure, float):
                means[name] = figure
        return means

    @property
    def per_head(self) -> dict[str, list[float]]:
        """Metrics with a number for each head, e.g. the fraction of tokens that use it."""
        per_head = {}
        for name, figure in self.figures.items():
            if isinstance(figure, list):
                per_head[name] = figure
        return per_head


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
    has_gated_queries = model.config.get_text_config().model_type in GATED_QUERIES
    previous_implementation = model.config._attn_implementation
    statistics = []
    with ExitStack() as stack:
        model.set_attn_implementation("eager")
        stack.callback(model.set_attn_implementation, previous_implementation)
        for index, layer in enumerate(model.get_decoder().layers):
            layer_statistics = LayerStatistics(layer=index)
            statistics.append(layer_statistics)
            hook = partial(_measure_output, layer_statistics)
            stack.enter_context(layer.register_forward_hook(hook))
            attention = getattr(layer, "self_attn", None)
            if attention is None:
                continue
            hook = partial(_measure_sinks, layer_statistics)
            stack.enter_context(attention.register_forward_hook(hook))
            listeners = getattr(attention, "listeners", None)
            if listeners is not None:
                listeners.append(_Recorder(layer_statistics).observe)
                stack.callback(listeners.pop)
            elif has_gated_queries:
                hook = partial(
                    _measure_gate,
                    layer_statistics,
                    attention.head_dim,
                )
                stack.enter_context(attention.q_proj.register_forward_hook(hook))
        model(ids, use_cache=False)
    return statistics


def _measure_sinks(
    statistics: LayerStatistics,
    module: nn.Module,
    inputs: Any,
    result: Any,
) -> None:
    weights = result[1]
    if weights is None:
        return
    key_length = weights.shape[-1]
    if key_length > 1:
        # Skip the query of the first token, which can only attend to itself.
        first_key_weights = weights[0, :, 1:, 0].float()
        statistics.sinks = first_key_weights.mean(-1).tolist()


def _measure_output(
    statistics: LayerStatistics,
    layer: nn.Module,
    inputs: Any,
    result: Any,
) -> None:
    hidden_states = result[0] if isinstance(result, tuple) else result
    activations = hidden_states[0].float().abs()
    token, feature = torch.unravel_index(activations.argmax(), activations.shape)
    statistics.peak = activations.max().item()
    statistics.peak_token = int(token)
    statistics.peak_feature = int(feature)
    statistics.median = activations.median().item()


def _measure_gate(
    statistics: LayerStatistics,
    head_dim: int,
    module: nn.Module,
    inputs: Any,
    result: Tensor,
) -> None:
    features = 2 * head_dim
    query_and_gate = result.unflatten(-1, (-1, features))
    gate = query_and_gate[..., head_dim:]
    score = gate.float().sigmoid()
    observe_output_gate(lambda: score, _Recorder(statistics))


class _Recorder(Ranks):
    def __init__(self, statistics: LayerStatistics) -> None:
        self.statistics = statistics

    def observe(
        self,
        name: str,
        compute_figure: Callable[[], Tensor],
    ) -> None:
        figure = compute_figure()
        self.statistics.figures[name] = figure.tolist()
