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
_LEARNING_RATE_DIGITS = 10
"""Decimal places of computed learning rates, so that the command line has 7.5e-05 instead of
7.500000000000001e-05."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Training length and learning rate schedule. Defaults are from section 4.1."""

    tokens: str
    """Number of training tokens, e.g. ``75B`` or ``1T``."""
    sequence_length: int
    peak_rate: float
    """Peak learning rate."""
    final_fraction: float = 0.1
    """Final learning rate, as a fraction of the peak."""
    global_batch: int = 512
    """Global batch size in sequences."""
    warm_up: Mapping[str, Any] = MappingProxyType({"lr_warmup_fraction": 0.05})
    """Megatron arguments for the warm-up of the learning rate."""

    @property
    def final_rate(self) -> float:
        """Learning rate at the end of training."""
        return round(self.peak_rate * self.final_fraction, _LEARNING_RATE_DIGITS)

    @property
    def iterations(self) -> int:
        """Number of training steps, rounded up."""
        number = int(self.tokens[:-1])
        unit = _UNITS[self.tokens[-1]]
        tokens_per_batch = self.global_batch * self.sequence_length
        return math.ceil(number * unit / tokens_per_batch)

    def arguments(self) -> dict[str, Any]:
        """Return Megatron's arguments for this schedule."""
        save_interval = self.iterations // _KEPT_CHECKPOINTS
        return {
            "seq_length": self.sequence_length,
            "max_position_embeddings": self.sequence_length,
            "train_iters": self.iterations,
            "save_interval": save_interval,
            "save_retain_interval": save_interval,
            "lr": self.peak_rate,
            "min_lr": self.final_rate,
            **self.warm_up,
            "global_batch_size": self.global_batch,
        }


SCHEDULE_75B = Schedule(tokens="75B", sequence_length=4096, peak_rate=7.5e-4)
"""Training of the models in Tables 1 and 2."""
SCHEDULE_100B = Schedule(tokens="100B", sequence_length=4096, peak_rate=7.5e-4)
"""Training of the models in Tables 3 and 5."""
SCHEDULE_1T = Schedule(tokens="1T", sequence_length=8192, peak_rate=4.78e-4)
"""Training of the model in section 4.3 and Table 4."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts of each MoE layer."""

    total: int
    per_token: int
    """Number of experts that the router selects for a token (top-k)."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Dimensions of a model, as in Table 5, and the largest micro batch that fits in memory."""

    layers: int
    hidden: int
    ffn: int
    """Intermediate size of the MLP (of each expert for MoE)."""
    experts: Experts | None = None
    """None for dense models."""
    total_parameters: str = ""
    """Published parameters of the baseline, e.g. ``6.6B`` (Table 5, section 4.1)."""
    active_parameters: str = ""
    micro_batch: int = 1
    """Micro batch size (sequences) for 8 GPUs with 80 GB. See ``kha-megatron plan --all``. It is
    the same for all head mechanisms that are compared in a table, unless one needs more memory."""

    @property
    def parameters(self) -> dict[str, str | float]:
        """The published parameters, as in :attr:`Recipe.paper`."""
        return {"total": self.total_parameters, "active": self.active_parameters}


MODEL_SIZES: Mapping[str, ModelSize] = {
    "moe-a0.44b-2.3b": ModelSize(
        layers=12,
        hidden=1152,
        ffn=768,
        experts=Experts(total=64, per_token=4),
        total_parameters="2.3B",
        active_parameters="0.44B",
        micro_batch=8,
    ),
    "moe-a0.8b-6.6b": ModelSize(
        layers=18,
        hidden=1536,
        ffn=1152,
        experts=Experts(total=64, per_token=4),
        total_parameters="6.6B",
        active_parameters="880M",  # from Table 3
        micro_batch=4,
    ),
    "moe-a1.6b-14.6b": ModelSize(
        layers=23,
        hidden=2048,
        ffn=1536,
        experts=Experts(total=64, per_token=4),
        total_parameters="14.6B",
        active_parameters="1.6B",
        micro_batch=2,
    ),
    "dense-0.6b": ModelSize(
        layers=24,
        hidden=1024,
        ffn=3072,
        total_parameters="0.61B",
        active_parameters="0.61B",
        micro_batch=4,
    ),
    "dense-1.7b": ModelSize(
        layers=24,
        hidden=2048,
        ffn=6144,
        total_parameters="1.68B",
        active_parameters="1.68B",
        micro_batch=4,
    ),
    "dense-3.9b": ModelSize(
        layers=36,
        hidden=2560,
        ffn=9728,
        total_parameters="3.94B",
        active_parameters="3.94B",
        micro_batch=2,
    ),
    "moe-a1b-6.1b": ModelSize(
        layers=18,
        hidden=2048,
        ffn=384,
        experts=Experts(total=128, per_token=8),
        total_parameters="6.1B",
        active_parameters="1.01B",
        micro_batch=2,
    ),
}


@dataclass(frozen=True)
class HeadVariant:
    """Head mechanisms of a recipe."""

    description: str
    preset: str = "baseline"
    """Name of a preset of :class:`HeadsConfig`."""
    heads: Mapping[str, Any] = field(default_factory=dict)
    """Other Megatron arguments, which override the preset."""


VARIANTS: Mapping[str, HeadVariant] = {
    "baseline": HeadVariant("no KHA"),
    "mlp": HeadVariant("KHA-MLP on v", preset="kha_mlp"),
    "linear": HeadVariant("KHA-Linear on q, k and v", preset="kha_linear"),
}


def grouped_query(*, heads: int, kv_heads: int) -> dict[str, Any]:
    """Return Megatron's arguments for GQA with ``heads`` query heads."""
    return {
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": kv_heads,
    }


def _default_attention() -> dict[str, Any]:
    return grouped_query(heads=32, kv_heads=4)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Model and training schedule. Combine it with a :class:`HeadVariant` to get a recipe."""

    description: str
    size: ModelSize
    schedule: Schedule
    overrides: dict[str, Any] = field(default_factory=_default_attention)
    """Megatron arguments of the attention, which override :data:`ATTENTION`, and of the layout."""
    vocab_size: int = VOCAB_SIZE
    note: str = ""

    def make_recipe(self, name: str, variant: HeadVariant, **paper: str | float) -> Recipe:
        """Build the recipe for a variant.

        Args:
            paper: Published results, if any. See :attr:`Recipe.paper`.
        """
        values: dict[str, Any] = {
            **self._model_arguments(),
            **TRAINING,
            **GPU_TRAINING,
            **self.schedule.arguments(),
            "micro_batch_size": self.size.micro_batch,
            "kha_preset": variant.preset,
            **variant.heads,
        }
        return Recipe(
            name=name,
            description=f"{self.description}, {variant.description}, {self.schedule.tokens} tokens",
            ranks=8,
            run=Run.from_values(vocab_size=self.vocab_size, **values),
            paper=paper,
            note=self.note,
        )

    def _model_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "num_layers": self.size.layers,
            "hidden_size": self.size.hidden,
            "ffn_hidden_size": self.size.ffn,
            **ATTENTION,
            **self.overrides,
        }
        if self.size.experts is not None:
            arguments |= {
                **ROUTING,
                "num_experts": self.size.experts.total,
                "moe_router_topk": self.size.experts.per_token,
                "moe_ffn_hidden_size": self.size.ffn,
                "moe_router_bias_update_rms": True,
                **GPU_EXPERTS,
            }
        return arguments


def _main_recipe(name: str) -> Recipe:
    """Build the main recipe for a model size: KHA-MLP for MoE, KHA-Linear for dense models."""
    size = MODEL_SIZES[name]
    if size.experts is None:
        description = "the paper's dense model"
        variant = VARIANTS["linear"]
    else:
        per_token = size.experts.per_token
        description = f"the paper's MoE, {per_token} of {size.experts.total} experts"
        variant = VARIANTS["mlp"]
    schedule = SCHEDULE_1T if name == "moe-a1b-6.1b" else SCHEDULE_100B
    baseline = Baseline(description=description, size=size, schedule=schedule)
    return baseline.make_recipe(name, variant, **size.parameters)


PAPER = tuple(_main_recipe(name) for name in MODEL_SIZES)

EQUATION_12 = Baseline(
    description="one layer of the worked example of eq. 12",
    size=ModelSize(layers=1, hidden=1024, ffn=3072, micro_batch=8),
    schedule=replace(SCHEDULE_100B, sequence_length=2048),
    overrides=grouped_query(heads=32, kv_heads=32) | {"kv_channels": 32},
).make_recipe("equation12", VARIANTS["mlp"])
