"""The paper's models (sections 4.1 and 4.4, Table 5) as recipes, and what its tables vary.

Sizes are the paper's. What it does not print is Megatron's default, or follows from its parameter
counts: tied embeddings, a vocabulary of 157,184, and the shape of the 6.1B model of the long run.
The parallel sizes are ours; the paper trained with FSDP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from kha_megatron.model.run import Run
from kha_megatron.recipes.recipe import Recipe

VOCAB_SIZE = 157184
"""Entries of the paper's tokenizer, as its parameter counts give them."""

BATCH = 512
"""Sequences of one optimizer step: 2.1M tokens of 4,096, 4.2M of 8,192."""

ATTENTION: dict[str, Any] = {
    "kv_channels": 128,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
"""What the layers of all its models have in common."""

_OPTIMISATION: dict[str, Any] = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "lr_decay_style": "cosine",
    "micro_batch_size": 1,
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "eval_interval": 1000,
    "eval_iters": 0,
    "log_interval": 10,
    "tensorboard_log_interval": 1,
    "save_interval": 1000,
    "ckpt_format": "torch_dist",
}


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a model learns; defaults and values below are those of section 4.1."""

    tokens: str
    """As the paper writes it: ``75B``, ``100B`` or ``1T``."""
    length: int
    """Tokens of a sequence."""
    rate: float
    """Peak learning rate."""
    last: float = 0.1
    """Share of it that a cosine ends at."""
    batch: int = BATCH
    """Sequences of one optimizer step."""
    warm_up: Mapping[str, Any] = MappingProxyType({"lr_warmup_fraction": 0.05})

    def arguments(self) -> dict[str, Any]:
        """Megatron's; the last batch is a whole one."""
        tokens = int(self.tokens[:-1]) * {"B": 10**9, "T": 10**12}[self.tokens[-1]]
        return {
            "seq_length": self.length,
            "max_position_embeddings": self.length,
            "train_iters": -(-tokens // (self.batch * self.length)),
            "lr": self.rate,
            "min_lr": round(self.rate * self.last, 10),
            **self.warm_up,
            "global_batch_size": self.batch,
        }


ARCHITECTURE = Schedule("75B", 4096, 7.5e-4)  # Tables 1 and 2
EXPLORATION = Schedule("100B", 4096, 7.5e-4)  # Tables 3 and 5
MAIN_RUN = Schedule("1T", 8192, 4.78e-4)  # section 4.3 and Table 4


@dataclass(frozen=True)
class Shape:
    """What Table 5 and section 4.1 vary between models."""

    layers: int
    hidden: int
    ffn: int
    """Of the dense MLP, or of one expert."""
    experts: tuple[int, int] | None = None
    """How many there are, and to how many a token is routed."""


SHAPES: Mapping[str, Shape] = {
    "moe-a0.44b-2.3b": Shape(12, 1152, 768, (64, 4)),
    "moe-a0.8b-6.6b": Shape(18, 1536, 1152, (64, 4)),
    "moe-a1.6b-14.6b": Shape(23, 2048, 1536, (64, 4)),
    "dense-0.6b": Shape(24, 1024, 3072),
    "dense-1.7b": Shape(24, 2048, 6144),
    "dense-3.9b": Shape(36, 2560, 9728),
    "moe-a1b-6.1b": Shape(18, 2048, 384, (128, 8)),
}

PRINTED: Mapping[str, tuple[str, str]] = {  # Table 5 and section 4.1; 880M is Table 3's digit more
    "moe-a0.44b-2.3b": ("2.3B", "0.44B"),
    "moe-a0.8b-6.6b": ("6.6B", "880M"),
    "moe-a1.6b-14.6b": ("14.6B", "1.6B"),
    "dense-0.6b": ("0.61B", "0.61B"),
    "dense-1.7b": ("1.68B", "1.68B"),
    "dense-3.9b": ("3.94B", "3.94B"),
    "moe-a1b-6.1b": ("6.1B", "1.01B"),
}
"""Total and active parameters of the baselines, as the paper prints them."""

VARIANTS: Mapping[str, tuple[str, str]] = {
    "baseline": ("baseline", "no KHA"),
    "mlp": ("kha_mlp", "KHA-MLP on v"),
    "linear": ("kha_linear", "KHA-Linear on q, k and v"),
}
"""The paper's two choices and what it compares them with: preset, words."""


def grouped_query(heads: int, groups: int) -> dict[str, Any]:
    """Arguments of MHA, MQA or GQA with so many query and key/value heads."""
    return {
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": groups,
    }


def recipe_of(
    name: str,
    what: str,
    shape: Shape,
    training: Schedule,
    *,
    preset: str,
    attention: Mapping[str, Any] | None = None,
    heads: Mapping[str, Any] | None = None,
    vocab_size: int = VOCAB_SIZE,
    **fields: Any,
) -> Recipe:
    """One training run of a paper.

    Args:
        what: the model and its variant in a few words; the training's length is added.
        preset: a key of ``PRESETS``.
        attention: arguments of another attention than 32 query and 4 key/value heads, and what else
            of the model or its layout is not as in the paper on KHA.
        heads: what replaces the preset's choice, by argument.
        vocab_size: entries of the tokenizer.
        fields: of :class:`Recipe`, as they are.
    """
    sizes: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
    }
    attention = grouped_query(32, 4) if attention is None else attention
    experts = _experts(*shape.experts, shape.ffn) if shape.experts else {}
    values = sizes | ATTENTION | dict(attention) | experts | training.arguments() | _OPTIMISATION
    values |= {"device": "cuda", "kha_preset": preset, **(heads or {})}
    return Recipe(
        name=name,
        description=f"{what}, {training.tokens} tokens",
        ranks=8,
        run=Run.of(vocab_size=vocab_size, **values),
        **fields,
    )


def _experts(total: int, active: int, ffn: int) -> dict[str, Any]:
    return {
        "num_experts": total,
        "moe_router_topk": active,
        "moe_ffn_hidden_size": ffn,
        # balanced by a bias instead of an auxiliary loss
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rms": True,
        "moe_router_load_balancing_type": ("none",),
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": 8,
    }


def _model(name: str) -> Recipe:
    """A model with the variant that the paper chose for its kind."""
    shape = SHAPES[name]
    training = MAIN_RUN if name == "moe-a1b-6.1b" else EXPLORATION
    preset, words = VARIANTS["mlp" if shape.experts else "linear"]
    kind = "MoE, {1} of {0} experts".format(*shape.experts) if shape.experts else "dense model"
    total, active = PRINTED[name]
    printed = {"total": total, "active": active}
    what = f"the paper's {kind}, {words}"
    return recipe_of(name, what, shape, training, preset=preset, paper=printed)


PAPER = tuple(map(_model, SHAPES))

EQUATION_12 = recipe_of(
    "equation12",
    "one layer of the worked example of eq. 12",
    Shape(1, 1024, 3072),
    replace(EXPLORATION, length=2048),
    preset="kha_mlp",
    attention=grouped_query(32, 32) | {"kv_channels": 32},
)
