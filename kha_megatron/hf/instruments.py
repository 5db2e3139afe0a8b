"""What attention does in a transformers model while text passes through it, ours or a stock one:
what the paper on gated attention compares (arXiv 2505.06708, section 4).

Load the model with ``attn_implementation=MEASURED``, which is torch's fused attention and hands its
queries and keys to :func:`measure`. Fused attention does not say where it looks, so the scores of
``ops.diagnostics.SINK_QUERIES`` tokens are computed anew: of the work of all scores of ``S`` tokens
``2 SINK_QUERIES / S``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kha_megatron.ops.diagnostics import sink_queries, sink_terms
from kha_megatron.ops.heads.gate import observe as observe_gate
from kha_megatron.ops.heads.ranks import Ranks

MEASURED = "kha_measured"
"""Name of the attention implementation that can be listened to."""

_GATE_IN_QUERIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Stock models whose ``q_proj`` gives a sigmoid gate behind each head's query."""
_GATE_OF_HEADS = ("lfm3",)
"""Stock models whose ``g_proj`` gives one number for each head."""


@dataclass(kw_only=True)
class LayerFigures:
    """One layer, over the tokens of a text."""

    layer: int
    sinks: list[float] = field(default_factory=list)
    """Of each head, the share of its attention that the first token gets, 0 to 1, a mean over the
    tokens behind it. Empty for attention with a window, sinks of its own or other scores (talking
    heads), and for what is no attention."""
    peak: float = 0.0
    """Largest absolute value of what the layer hands on."""
    peak_feature: int = 0
    peak_token: int = 0
    """Where it was found."""
    median: float = 0.0
    """Of the absolute values: a massive activation is hundreds of times as large."""
    figures: dict[str, float | list[float]] = field(default_factory=dict)
    """What head mechanisms observe (``Ranks.observe``): ``gate-score/output``, the mean of a gate,
    ``gate-shut/output``, the share of it below 0.1, ``moh-load``, the share of tokens that have a
    head; of stock models with a gate on the output the gate's."""

    @property
    def gates(self) -> dict[str, float]:
        """Of ``figures`` those of gates."""
        found = self.figures.items()
        return {k: v for k, v in found if k.startswith("gate-") and isinstance(v, float)}

    @property
    def load(self) -> list[float]:
        """Of each head, the share of tokens that have it; empty where all have all."""
        load = self.figures.get("moh-load", [])
        return load if isinstance(load, list) else []


_Heard = Callable[[Any, Tensor, Tensor, dict[str, Any]], None]
_HEARD: ContextVar[_Heard | None] = ContextVar("heard", default=None)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    if (heard := _HEARD.get()) is not None:
        heard(module, query, key, kwargs)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


AttentionInterface.register(MEASURED, _attend)
AttentionMaskInterface.register(MEASURED, sdpa_mask)


@torch.no_grad()
def measure(model: Any, ids: Tensor) -> list[LayerFigures]:
    """Pass one text through a model and measure every layer.

    Args:
        model: a decoder of transformers with an output layer, in evaluation mode.
        ids: ``[1, S]`` token ids on its device.
    """
    layers = model.get_decoder().layers
    found = [LayerFigures(layer=layer) for layer in range(len(layers))]
    with _listening(model, layers, found):
        model(ids, use_cache=False)
    return found


@contextmanager
def _listening(model: Any, layers: Any, found: list[LayerFigures]) -> Iterator[None]:
    kind, hooks, listeners = model.config.get_text_config().model_type, [], []

    def heard(module: Any, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
        other = ("sliding_window", "softcap", "s_aux")
        if not any(kwargs.get(name) is not None for name in other):
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            found[module.layer_idx].sinks = _sinks(query[0], key[0], scale)

    for figures, layer in zip(found, layers, strict=True):
        attention = getattr(layer, "self_attn", None)
        hooks.append(layer.register_forward_hook(partial(_hear_peak, figures)))
        if (ours := getattr(attention, "listeners", None)) is not None:
            listeners.append(ours)
            ours.append(partial(_hear_figure, figures))
        elif attention is not None and (gate := _stock_gate(kind, attention)) is not None:
            projection, score_of = gate
            hooks.append(projection.register_forward_hook(partial(_hear_gate, figures, score_of)))
    token = _HEARD.set(heard)
    try:
        yield
    finally:
        _HEARD.reset(token)
        for hook in hooks:
            hook.remove()
        for each in listeners:
            each.pop()


def _sinks(query: Tensor, key: Tensor, scale: float) -> list[float]:
    """From ``[heads, S, D]`` and ``[groups, S, D]``."""
    at, held = sink_queries(query.shape[1], query.device), torch.arange(key.shape[1])
    first, total = sink_terms(
        query.transpose(0, 1)[at], key.transpose(0, 1), scale, at, held.to(query.device)
    )
    return (first - total).exp().mean(-1).tolist() if len(at) else []


def _hear_peak(figures: LayerFigures, layer: nn.Module, inputs: Any, result: Any) -> None:
    hidden = (result[0] if isinstance(result, tuple) else result)[0].float().abs()
    figures.peak, place = hidden.max().item(), int(hidden.argmax())
    figures.peak_token, figures.peak_feature = divmod(place, hidden.shape[-1])
    figures.median = hidden.median().item()


def _hear_figure(figures: LayerFigures, name: str, figure: Callable[[], Tensor]) -> None:
    figures.figures[name] = figure().tolist()


def _stock_gate(kind: str, attention: Any) -> tuple[nn.Module, Callable[[Tensor], Tensor]] | None:
    """The projection of a stock model that makes its gate, and how to find the gate in it."""
    if kind in _GATE_IN_QUERIES and hasattr(attention, "q_proj"):
        return attention.q_proj, lambda x: x.unflatten(-1, (-1, 2, attention.head_dim))[..., 1, :]
    if kind in _GATE_OF_HEADS and getattr(attention, "g_proj", None) is not None:
        return attention.g_proj, lambda x: x
    return None


def _hear_gate(
    figures: LayerFigures,
    score_of: Callable[[Tensor], Tensor],
    projection: nn.Module,
    inputs: Any,
    result: Tensor,
) -> None:
    observe_gate("output", score_of(result).float().sigmoid(), _Figures(figures))


class _Figures(Ranks):
    """Keeps what is observed."""

    def __init__(self, figures: LayerFigures) -> None:
        self.figures = figures

    def observe(self, name: str, figure: Callable[[], Tensor]) -> None:
        _hear_figure(self.figures, name, figure)
