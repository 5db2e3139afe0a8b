"""Parameters, key/value cache and FLOPs of a recipe, in closed form. Nothing is built.

*Active* are the parameters that one token passes through: everything but the experts that it is not
routed to, with the embedding (tied to the output layer) counted once, and the router, the norms and
KHA included. This reading gives what the paper prints: 880M in Table 3, 1.01B in section 4.1.
"""

import re
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.model.layout import Layout
from kha_megatron.model.model import Model
from kha_megatron.model.run import Run
from kha_megatron.plan.family import Attention, attention_of
from kha_megatron.plan.memory import active_parameters, parameters

_CACHE_BYTES = 2  # bf16
_UNITS = {"M": 10**6, "B": 10**9}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A recipe's whole model."""

    model: Model
    attention: Attention
    kha: KHAConfig


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters, and what decoding keeps."""

    total: int
    """All parameters, KHA's included."""
    active: int
    """Those that one token passes through, KHA's included."""
    kha: int
    """KHA's own; the paper prints its counts without them."""
    cache_per_layer: int
    """Numbers that one layer keeps of one token (Table 3's cache)."""
    cache_bytes: int
    """Bytes that the whole model keeps of one token, in bf16. KHA adds none."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Matrix-multiplication FLOPs of one sequence in the forward pass, over all layers.

    Backward takes twice as many, training three times. Scores are counted for every pair of
    positions, as in the paper; causal kernels skip half of them.
    """

    projections: int
    scores: int
    mlp: int
    """Dense MLPs, or the experts that a token is routed to, shared ones included."""
    router: int
    kha: int
    """Matrices applied to activations: linear ones that are folded away cost none."""
    logits: int

    @property
    def attention(self) -> int:
        """Eq. 10, without KHA."""
        return self.projections + self.scores

    @property
    def layers(self) -> int:
        """Eq. 11, without KHA."""
        return self.attention + self.mlp + self.router

    @property
    def forward(self) -> int:
        """Everything, KHA and the output layer included."""
        return self.layers + self.kha + self.logits

    @property
    def share_of_layers(self) -> float:
        """KHA's addition, relative to the layers without it (the paper's 0.55 %)."""
        return self.kha / self.layers

    @property
    def share_of_attention(self) -> float:
        """KHA's addition, relative to attention without it (the paper's 1.17 %)."""
        return self.kha / self.attention


def sizes_of(run: Run) -> Sizes:
    """The run's model in the terms of this module.

    Raises:
        ConfigError: it has what the closed form does not count.
    """
    model = counted(run.model)
    return Sizes(model=model, attention=attention_of(model), kha=run.kha)


def counted(model: Model | None) -> Model:
    """The model, if this package can count it.

    Raises:
        ConfigError: naming what it has that is not counted.
    """
    if model is None:
        raise ConfigError("a model without sizes of its own is not counted: give --num-layers, "
                          "--hidden-size and --num-attention-heads")  # fmt: skip
    strange = {
        "--mtp-num-layers": model.mtp_num_layers,
        "--hybrid-layer-pattern": model.hybrid_layer_pattern,
        "linear layers with biases": model.add_bias_linear,
    }
    if found := [what for what, present in strange.items() if present]:
        raise ConfigError(f"the model has {', '.join(found)}, which is not counted")
    return model


def count(sizes: Sizes) -> Counts:
    """Parameters and cache of the whole model."""
    model, kha, attention = sizes.model, sizes.kha, sizes.attention
    whole = parameters(model, kha, Layout(), attention=attention)
    return Counts(
        total=whole.total,
        active=active_parameters(model, kha, attention=attention),
        kha=whole.kha,
        cache_per_layer=attention.cache,
        cache_bytes=_CACHE_BYTES * attention.cache * model.num_layers,
    )


def flops(sizes: Sizes, length: int) -> Flops:
    """Forward FLOPs of one sequence of ``length`` tokens.

    The paper's equations 10 to 12 for any number of key/value heads, head size, MLP width and
    member of the attention family; with ``g = n``, ``D = d / n`` and a dense MLP of ``3 d`` they
    are the paper's own.
    """
    model, attention = sizes.model, sizes.attention
    layers, hidden = model.num_layers, model.hidden_size
    matrices = 3 if model.swiglu else 2
    width = router = 0
    for layer in range(layers):
        if not model.is_moe(layer):
            width += model.ffn_hidden_size
            continue
        width += model.moe_router_topk * model.moe_ffn_hidden_size
        width += model.moe_shared_expert_intermediate_size or 0
        router += model.num_experts
    return Flops(
        projections=2 * length * layers * attention.weights,
        scores=2 * length**2 * layers * attention.pair,
        mlp=2 * length * matrices * hidden * width,
        router=2 * length * hidden * router,
        kha=length * layers * sizes.kha.flops(attention.heads),
        logits=2 * length * hidden * model.padded_vocab(1),
    )


def as_printed(number: int, example: str) -> tuple[str, str]:
    """A count in the digits of one that the paper prints, and how it came to them.

    ``(14650674944, "14.6B")`` gives ``("14.6B", "cut")``, ``(880275456, "880M")`` gives ``("880M",
    "rounded")``: the paper does both. A count that comes to other digits is rounded, with how far
    off it is.
    """
    digits, unit = re.fullmatch(r"([\d.]+)([MB])", example).groups()
    scaled, step = Decimal(number) / _UNITS[unit], Decimal(digits)
    rounded = scaled.quantize(step, rounding=ROUND_HALF_UP)
    for value, how in (
        (rounded, "rounded"),
        (scaled.quantize(step, rounding=ROUND_DOWN), "cut"),
    ):
        if f"{value}{unit}" == example:
            return example, how
    return f"{rounded}{unit}", f"{float(scaled / step - 1):+.2%} of the paper's"
