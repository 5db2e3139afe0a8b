"""What attention does in a transformers model while text passes through it, ours or a stock one:
what the paper on gated attention compares (arXiv 2505.06708, section 4).

Torch's fused attention does not say where it looks, so the scores of
``ops.diagnostics.SINK_QUERIES`` tokens are computed anew: of the work of all scores of ``S`` tokens
``2 SINK_QUERIES / S``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError
from kha_megatron.ops.diagnostics import sink_queries, sink_terms
from kha_megatron.ops.heads.gate import observe as observe_gate
from kha_megatron.ops.heads.ranks import Ranks

Score = Callable[[Any, Tensor], Tensor]
"""A gate's score, before its activation, from an attention and what its projection gives."""


def _whole(attention: Any, given: Tensor) -> Tensor:
    return given


def _behind_queries(attention: Any, given: Tensor) -> Tensor:
    """The rows behind those of each head's query."""
    latent = hasattr(attention, "qk_head_dim")
    query = attention.qk_head_dim if latent else attention.head_dim
    gate = attention.v_head_dim if latent else attention.head_dim
    return given.unflatten(-1, (-1, query + gate))[..., query:]


def _with_bias_of_heads(attention: Any, given: Tensor) -> Tensor:
    return given.unflatten(-1, (-1, attention.head_dim)) + attention.gate_bias[:, None]


class StockGate(NamedTuple):
    """How the attention of a stock class makes the gate on its output."""

    projection: str
    """Its module."""
    score: Score = _whole
    activation: Callable[[Tensor], Tensor] = torch.sigmoid


_AMONG_QUERIES, _OF_HEADS, _OF_FEATURES = (
    StockGate("q_proj", _behind_queries),
    StockGate("g_proj"),
    StockGate("gate_proj"),
)
STOCK_GATES: Mapping[str, StockGate] = MappingProxyType(
    {
        "qwen3_next": _AMONG_QUERIES,
        "qwen3_5_text": _AMONG_QUERIES,
        "qwen3_5_moe_text": _AMONG_QUERIES,
        "qwen4_exp_text": _AMONG_QUERIES,
        "axk2": StockGate("q_gate_proj", _behind_queries),
        "lfm3": _OF_HEADS,
        "step3p5": _OF_HEADS,  # the text model of step3p7
        "bailing_hybrid": _OF_HEADS,
        "dots3_note_text": _OF_HEADS,
        "laguna": StockGate("g_proj", activation=nn.functional.softplus),
        "afmoe": _OF_FEATURES,
        "hy_v4": _OF_FEATURES,
        "inkling2_text": _OF_FEATURES,
        "muse_glimmer_text": _OF_FEATURES,
        "muse_spark_text": _OF_FEATURES,
        "beam": StockGate("gate_proj", _with_bias_of_heads),
    }
)
"""By ``model_type`` of the text model, those of transformers 5.23 that multiply what attention
gives by a learnt gate; ``hrm_text``, the other one, has no figures at all (:func:`measure`)."""
_LOOKS_LIKE_A_GATE = tuple({gate.projection for gate in STOCK_GATES.values()} - {"q_proj"})


@dataclass(kw_only=True)
class LayerFigures:
    """One layer, over the tokens of a text."""

    layer: int
    sinks: list[float] = field(default_factory=list)
    """Of each head, the share of its attention that the first token gets, 0 to 1, a mean over the
    tokens behind it. Empty where attention does not look at all tokens so far, has sinks of its own
    or other scores (talking heads), and for what is no attention."""
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


@torch.no_grad()
def measure(model: Any, ids: Tensor) -> list[LayerFigures]:
    """Pass one text through a model and measure every layer.

    Args:
        model: a decoder of transformers with an output layer, in evaluation mode. Sinks are those
            of a model with ``attn_implementation="sdpa"``.
        ids: ``[1, S]`` token ids on its device.

    Raises:
        ConfigError: its layers are no list, each of which text passes once.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise ConfigError(
            f"{model.config.get_text_config().model_type} has no list of layers that text passes "
            "once each: measure another architecture"
        )
    found = [LayerFigures(layer=layer) for layer in range(len(layers))]
    with _listening(model, layers, found):
        model(ids, use_cache=False)
    return found


_OTHER_SCORES = ("softcap", "s_aux", "sinks", "position_bias")
"""What attention functions are given where scores are more than products."""


@contextmanager
def _listening(model: Any, layers: Any, found: list[LayerFigures]) -> Iterator[None]:
    kind = model.config.get_text_config().model_type

    def heard(module: Any, query: Tensor, key: Tensor, mask: Any, settings: dict[str, Any]) -> None:
        other = any(settings.get(name) is not None for name in _OTHER_SCORES)
        if not other and _sees_all_before(mask, query.shape[-2]):
            scale = settings.get("scaling") or query.shape[-1] ** -0.5
            found[module.layer_idx].sinks = _sinks(query[0], key[0], scale)

    with ExitStack() as stack:
        stack.enter_context(_fused_attention_tells(heard))
        for figures, layer in zip(found, layers, strict=True):
            stack.enter_context(layer.register_forward_hook(partial(_hear_peak, figures)))
            attention = getattr(layer, "self_attn", None)
            if (listeners := getattr(attention, "listeners", None)) is not None:
                listeners.append(partial(_hear_figure, figures))
                stack.callback(listeners.pop)
            elif (gate := _stock_gate(kind, attention)) is not None:
                hear = partial(_hear_gate, figures, gate, attention)
                projection = getattr(attention, gate.projection)
                stack.enter_context(projection.register_forward_hook(hear))
        yield


@contextmanager
def _fused_attention_tells(heard: Callable[..., None]) -> Iterator[None]:
    """``sdpa`` of every model hands its queries, keys, mask and settings to ``heard`` meanwhile.

    An implementation under a name of its own would not do: classes that choose tokens, or have
    sinks of their own, ask for the name, and compute something else under another.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        heard(module, query, key, attention_mask, settings)
        return before(module, query, key, value, attention_mask, **settings)

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", attend)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", before)


def _sees_all_before(mask: Tensor | None, tokens: int) -> bool:
    """Whether each token sees itself and all before it, and no other: no window, no choice."""
    if mask is None:
        return True
    seen = mask if mask.dtype == torch.bool else mask == 0
    return bool((seen == torch.ones_like(seen[..., :tokens, :tokens]).tril()).all())


def _sinks(query: Tensor, key: Tensor, scale: float) -> list[float]:
    """From ``[heads, S, D]`` and ``[groups, S, D]``."""
    at, held = sink_queries(query.shape[1], query.device), torch.arange(key.shape[1])
    first, total = sink_terms(
        query.transpose(0, 1)[at], key.transpose(0, 1), scale, at, held.to(query.device)
    )
    return (first - total).exp().mean(-1).tolist() if len(at) else []


def _hear_peak(figures: LayerFigures, layer: nn.Module, inputs: Any, result: Any) -> None:
    hidden = (result[0] if isinstance(result, tuple) else result)[0].float().abs()
    figures.peak = hidden.max().item()
    place = torch.unravel_index(hidden.argmax(), hidden.shape)
    # between tokens and features there may be streams (hy_v4)
    figures.peak_token, *_, figures.peak_feature = map(int, place)
    figures.median = hidden.median().item()


def _hear_figure(figures: LayerFigures, name: str, figure: Callable[[], Tensor]) -> None:
    figures.figures[name] = figure().tolist()


def _stock_gate(kind: str, attention: Any) -> StockGate | None:
    """The gate of an attention, if there is one; says so if it is not known."""
    if not hasattr(attention, "num_key_value_groups"):  # recurrent, or none
        return None
    if (gate := STOCK_GATES.get(kind)) is not None:
        return gate if getattr(attention, gate.projection, None) is not None else None
    for name in _LOOKS_LIKE_A_GATE:
        if isinstance(getattr(attention, name, None), nn.Module):
            announce(
                f"{name} of {type(attention).__name__} is not measured: what {kind} does with it "
                "is not known",
                once=("gate", kind),
            )
    return None


def _hear_gate(
    figures: LayerFigures,
    gate: StockGate,
    attention: Any,
    projection: nn.Module,
    inputs: Any,
    result: Tensor,
) -> None:
    score = gate.activation(gate.score(attention, result).float())
    observe_gate("output", lambda: score, _Figures(figures))


class _Figures(Ranks):
    """Keeps what is observed."""

    def __init__(self, figures: LayerFigures) -> None:
        self.figures = figures

    def observe(self, name: str, figure: Callable[[], Tensor]) -> None:
        _hear_figure(self.figures, name, figure)
