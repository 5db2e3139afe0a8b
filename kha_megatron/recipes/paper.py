"""Recipes for the models of the KHA paper (sections 4.1 and 4.4, Table 5) and shared defaults.

Hyperparameters that the paper does not mention are left at Megatron's defaults. We inferred tied
embeddings, the vocabulary size and the sizes of the 6.1B model from the published parameter counts.
The parallel sizes are our own, since the paper used FSDP.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from kha_megatron.model.run import Run
from kha_megatron.recipes.gpu import GPU_EXPERTS, GPU_TRAINING
from kha_megatron.recipes.recipe import Recipe

VOCAB_SIZE = 157184
_UNITS = {"B": 10**9, "T": 10**12}

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

ROUTING: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": ("none",),
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
}
"""MoE routing. Load is balanced by expert biases rather than by an auxiliary loss."""

TRAINING: dict[str, Any] = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "lr_decay_style": "cosine",
    "eval_interval": 1000,
    "eval_iters": 0,
    "log_interval": 10,
    "log_throughput": True,
    "log_timers_to_tensorboard": True,
    "tensorboard_log_interval": 1,
    "save_interval": 1000,
    "ckpt_format": "torch_dist",
}

_KEPT_CHECKPOINTS = 10
"""Number of checkpoints that a run keeps, besides the newest one."""


@dataclass(frozen=True)
class Schedule:
    """Training length and learning rate schedule. Defaults are from section 4.1."""

    tokens: str  # training tokens, e.g. ``75B`` or ``1T``
    length: int  # sequence length
    rate: float  # peak learning rate
    last: float = 0.1  # final learning rate, as a fraction of the peak
    batch: int = 512  # global batch size (sequences)
    warm_up: Mapping[str, Any] = MappingProxyType({"lr_warmup_fraction": 0.05})

    def arguments(self) -> dict[str, Any]:
        number = int(self.tokens[:-1])
        unit = _UNITS[self.tokens[-1]]
        tokens_per_batch = self.batch * self.length
        iterations = math.ceil(number * unit / tokens_per_batch)
        interval = iterations // _KEPT_CHECKPOINTS
        return {
            "seq_length": self.length,
            "max_position_embeddings": self.length,
            "train_iters": iterations,
            "save_interval": interval,
            "save_retain_interval": interval,
            "lr": self.rate,
            "min_lr": round(self.rate * self.last, 10),
            **self.warm_up,
            "global_batch_size": self.batch,
        }


SCHEDULE_75B = Schedule("75B", 4096, 7.5e-4)  # Tables 1 and 2
SCHEDULE_100B = Schedule("100B", 4096, 7.5e-4)  # Tables 3 and 5
SCHEDULE_1T = Schedule("1T", 8192, 4.78e-4)  # section 4.3 and Table 4


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a model, as in Table 5, and the largest micro batch that fits in memory."""

    layers: int
    hidden: int
    ffn: int  # intermediate size of the MLP (of each expert for MoE)
    experts: tuple[int, int] | None = None  # ``(num_experts, top_k)`` for MoE models
    total: str = ""  # published parameters of the baseline (Table 5, section 4.1)
    active: str = ""
    micro_batch: int = 1
    """Micro batch size (sequences) for 8 GPUs with 80 GB. See ``kha-megatron plan --all``. It is
    the same for all head mechanisms that are compared in a table, unless one needs more memory."""

    @property
    def parameters(self) -> dict[str, str | float]:
        return {"total": self.total, "active": self.active}


MODEL_SIZES: Mapping[str, ModelSize] = {
    "moe-a0.44b-2.3b": ModelSize(12, 1152, 768, (64, 4), "2.3B", "0.44B", 8),
    "moe-a0.8b-6.6b": ModelSize(18, 1536, 1152, (64, 4), "6.6B", "880M", 4),  # 880M is from Table 3
    "moe-a1.6b-14.6b": ModelSize(23, 2048, 1536, (64, 4), "14.6B", "1.6B", 2),
    "dense-0.6b": ModelSize(24, 1024, 3072, None, "0.61B", "0.61B", 4),
    "dense-1.7b": ModelSize(24, 2048, 6144, None, "1.68B", "1.68B", 4),
    "dense-3.9b": ModelSize(36, 2560, 9728, None, "3.94B", "3.94B", 2),
    "moe-a1b-6.1b": ModelSize(18, 2048, 384, (128, 8), "6.1B", "1.01B", 2),
}


@dataclass(frozen=True)
class HeadVariant:
    """Head mechanisms of a recipe: a preset, plus other arguments, which override it."""

    description: str
    preset: str = "baseline"
    heads: Mapping[str, Any] = field(default_factory=dict)


VARIANTS: Mapping[str, HeadVariant] = {
    "baseline": HeadVariant("no KHA"),
    "mlp": HeadVariant("KHA-MLP on v", "kha_mlp"),
    "linear": HeadVariant("KHA-Linear on q, k and v", "kha_linear"),
}


def grouped_query(heads: int, groups: int) -> dict[str, Any]:
    """Megatron arguments for GQA with ``heads`` query heads and ``groups`` KV heads."""
    return {"num_attention_heads": heads, "group_query_attention": True, "num_query_groups": groups}


@dataclass(frozen=True)
class Baseline:
    """Model and training schedule. Combine it with a :class:`HeadVariant` to get a recipe."""

    description: str
    shape: ModelSize
    schedule: Schedule
    attention: dict[str, Any] = field(default_factory=lambda: grouped_query(32, 4))
    """Megatron arguments for attention, plus any other overrides."""
    vocab_size: int = VOCAB_SIZE
    note: str = ""

    def recipe(self, name: str, variant: HeadVariant, **paper: str | float) -> Recipe:
        """Build the recipe for a variant. ``paper`` contains published results, if any."""
        shape = self.shape
        values: dict[str, Any] = {
            "num_layers": shape.layers,
            "hidden_size": shape.hidden,
            "ffn_hidden_size": shape.ffn,
        }
        values |= ATTENTION | self.attention
        if shape.experts is not None:
            values |= ROUTING | {
                "num_experts": shape.experts[0],
                "moe_router_topk": shape.experts[1],
                "moe_ffn_hidden_size": shape.ffn,
                "moe_router_bias_update_rms": True,
                **GPU_EXPERTS,
            }
        values |= {**TRAINING, **GPU_TRAINING, **self.schedule.arguments()}
        values["micro_batch_size"] = shape.micro_batch
        values |= {"kha_preset": variant.preset, **variant.heads}
        return Recipe(
            name=name,
            description=f"{self.description}, {variant.description}, {self.schedule.tokens} tokens",
            ranks=8,
            run=Run.from_values(vocab_size=self.vocab_size, **values),
            paper=paper,
            note=self.note,
        )


def _recipe(name: str) -> Recipe:
    """Build the main recipe for a model size: KHA-MLP for MoE, KHA-Linear for dense models."""
    shape = MODEL_SIZES[name]
    description = "the paper's dense model"
    variant = VARIANTS["linear"]
    if shape.experts:
        experts, experts_per_token = shape.experts
        description = f"the paper's MoE, {experts_per_token} of {experts} experts"
        variant = VARIANTS["mlp"]
    schedule = SCHEDULE_1T if name == "moe-a1b-6.1b" else SCHEDULE_100B
    base = Baseline(description, shape, schedule)
    return base.recipe(name, variant, **shape.parameters)


PAPER = tuple(map(_recipe, MODEL_SIZES))

EQUATION_12 = Baseline(
    "one layer of the worked example of eq. 12",
    ModelSize(1, 1024, 3072, micro_batch=8),
    replace(SCHEDULE_100B, length=2048),
    grouped_query(32, 32) | {"kv_channels": 32},
).recipe("equation12", VARIANTS["mlp"])
