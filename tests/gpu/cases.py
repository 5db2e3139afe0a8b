"""Short trainings on a GPU: what each changes, what it needs, what it must equal.

All start from the same weights and read the same text in the same order, so that two loss curves
differ by nothing but arithmetic. ``test_losses.py`` runs them in the order written here, the most
important first, until its time is spent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from kha_megatron.model.run import Run, say
from kha_megatron.model.words import render
from kha_megatron.recipes import Recipe
from kha_megatron.recipes.paper import ATTENTION

Value = str | int | float | Literal[True] | tuple[str | int | float, ...]
"""What follows a flag: one value, several, or True for a flag that stands alone."""

STEPS = 200
"""Optimizer steps of a run."""

_MODEL: dict[str, Value] = {
    # the paper's shape in small; every size a multiple of 128, as blockwise FP8 asks for
    "--num-layers": 4,
    "--hidden-size": 256,
    "--ffn-hidden-size": 512,
    "--num-attention-heads": 4,
    "--group-query-attention": True,
    "--num-query-groups": 2,
    **{said.flag: said.words or True for said in say(**ATTENTION).values()},
}

_TRAINING: dict[str, Value] = {
    "--seq-length": 256,
    "--max-position-embeddings": 256,
    "--micro-batch-size": 8,
    "--global-batch-size": 16,  # two microbatches, so that gradients are accumulated
    "--train-iters": STEPS,
    "--lr": 5e-4,  # low: at a rate four times that, rounding alone moves the end by tenths
    "--min-lr": 5e-5,
    "--lr-decay-style": "cosine",
    "--lr-warmup-fraction": 0.1,
    "--adam-beta1": 0.9,
    "--adam-beta2": 0.95,
    "--weight-decay": 0.1,
    "--clip-grad": 1.0,
    "--seed": 1234,
    "--bf16": True,
    "--use-distributed-optimizer": True,
    "--split": "99,1,0",
    "--num-workers": 1,
    "--eval-interval": 100000,
    "--eval-iters": 0,
    "--log-interval": 10,
    "--tensorboard-log-interval": 1,
}

_EXPERTS: dict[str, Value] = {
    "--num-experts": 8,
    "--moe-ffn-hidden-size": 256,
    "--moe-router-topk": 2,
    "--moe-router-score-function": "sigmoid",
    "--moe-router-enable-expert-bias": True,
    "--moe-router-bias-update-rms": True,
    "--moe-router-load-balancing-type": "none",
    "--moe-router-dtype": "fp32",
    "--moe-token-dispatcher-type": "alltoall",
}

TE: dict[str, Value] = {
    "--transformer-impl": "transformer_engine",
    # without NVIDIA's apex Megatron has no fused weight gradient for its own output layer
    "--no-gradient-accumulation-fusion": True,
}

LOCAL: dict[str, Value] = {
    "--transformer-impl": "local",
    # what Megatron's own layers fuse with kernels that come from apex or Transformer Engine
    "--no-gradient-accumulation-fusion": True,
    "--no-persist-layer-norm": True,
    "--no-masked-softmax-fusion": True,
    "--no-rope-fusion": True,
}

TINY: dict[str, Value] = {
    "--num-layers": 2,
    "--hidden-size": 64,
    "--ffn-hidden-size": 64,
    "--kv-channels": 16,
    "--seq-length": 32,
    "--max-position-embeddings": 32,
    "--train-iters": 4,
    "--micro-batch-size": 2,
    "--global-batch-size": 4,
}
"""What a run on the CPU replaces."""

TINY_EXPERTS: dict[str, Value] = {"--moe-ffn-hidden-size": 64}


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How far a loss curve may be from that of the case it must follow, in nats."""

    first: float | None
    """At the first step, before any update; None where the two do not start from equal weights."""

    end: float
    """Mean of the last quarter of the steps."""


SAME = Bound(first=0.01, end=0.06)
"""Other kernels for the same arithmetic in bf16.

At the first step only forward rounding differs, which the loss averages over all tokens. Later
training amplifies it as any perturbation: on a CPU another order of the same sums moved the end by
0.016 (benchmarks/gpu.md), and the bound leaves four times that.
"""

FP8 = Bound(first=0.05, end=0.06)
"""FP8 GEMMs against bf16.

On a CPU, linear layers rounded to E4M3, and their gradients to E5M2, under one scale for each
tensor moved the first loss by 0.002 and the end by 0.016, no more than another order of sums. The
first bound is wider for delayed scaling, which knows no scale yet at the first step.
"""

MOE_SAME, MOE_FP8 = Bound(first=0.01, end=0.15), Bound(first=0.05, end=0.15)
"""The same of a mixture of experts, whose routers turn a rounding into another choice of experts:
on a CPU rounding to FP8 moved the first loss by 0.002 and the end by 0.071."""

OTHER_START = Bound(first=None, end=0.3)
"""The same arithmetic from other random weights: two seeds were 0.26 apart on a CPU. It catches
what does not train; whether the layers are equal is asked by tests/gpu, with equal weights."""


def _words(value: Value) -> tuple[str, ...]:
    if value is True:
        return ()
    return tuple(map(str, value)) if isinstance(value, tuple) else (str(value),)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One short training."""

    name: str
    flags: Mapping[str, Value]
    """Megatron's, replacing the recipe's."""

    moe: bool = False
    preset: str = ""
    """KHA's; empty is the paper's choice: linear for dense models, mlp for mixtures of experts."""

    needs: tuple[str, ...] = ()
    """Keys of :data:`NEEDS`."""

    like: str | None = None
    """The case whose losses these must follow."""

    bound: Bound = SAME
    dropped: tuple[str, ...] = ()
    """Flags of the recipe that this case leaves out."""

    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """The run as the launcher takes it; overriding words can follow."""
        megatron = _MODEL | _TRAINING | (_EXPERTS if self.moe else {}) | dict(self.flags)
        words = {flag: _words(v) for flag, v in megatron.items() if flag not in self.dropped}
        preset = self.preset or ("kha_mlp" if self.moe else "kha_linear")
        return Recipe(
            name=f"gpu-check/{self.name}",
            description="one case of make gpu-check",
            run=Run.of(vocab_size=4096).updated(render(words), kha_preset=preset),
            ranks=1,
            environment={
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "OMP_NUM_THREADS": "2",
                **self.environment,
            },
        )


NEEDS = {
    "te": "Transformer Engine",
    "fp8": "a GPU with FP8 (compute capability 8.9 or newer)",
    "blockwise": "Transformer Engine's blockwise FP8 (Hopper, CUDA 12.9 or newer)",
    "mxfp8": "Transformer Engine's MXFP8 (Blackwell)",
    "flash-attn": "flash-attn in a version that Transformer Engine takes",
    "apex": "NVIDIA's apex with fused_weight_gradient_mlp_cuda",
}
"""What a machine may lack."""


def _fp8(recipe: str, **more: Value) -> dict[str, Value]:
    scaling: dict[str, Value] = {"--fp8-recipe": recipe, "--fp8-format": "hybrid"}
    if recipe == "delayed":
        scaling |= {"--fp8-amax-history-len": 1024, "--fp8-amax-compute-algo": "max"}
    if recipe == "mxfp8":
        scaling["--fp8-format"] = "e4m3"
    return TE | scaling | {f"--{name.replace('_', '-')}": value for name, value in more.items()}


def _dense(name: str, flags: Mapping[str, Value], *needs: str, **more: object) -> Case:
    return Case(name=name, flags=flags, needs=needs, **({"like": "dense-bf16"} | more))


def _moe(name: str, flags: Mapping[str, Value], *needs: str, **more: object) -> Case:
    return Case(
        name=name,
        flags=flags,
        needs=needs,
        moe=True,
        **({"like": "moe-bf16", "bound": MOE_SAME} | more),
    )


GROUPED: dict[str, Value] = {"--moe-grouped-gemm": True, "--moe-permute-fusion": True}
_PADDED: dict[str, Value] = GROUPED | {"--moe-router-padding-for-quantization": True}
_GRAPHS: dict[str, Value] = {"--cuda-graph-warmup-steps": 2}
_FULL: dict[str, Value] = {
    "--recompute-granularity": "full",
    "--recompute-method": "uniform",
    "--recompute-num-layers": 1,
}
_FIRST_LAST: dict[str, Value] = {
    "first_last_layers_bf16": True,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
}

CASES: tuple[Case, ...] = (
    # what the others are compared with; the local ones run without Transformer Engine
    _dense("dense-bf16", TE, "te", like=None),
    _moe("moe-bf16", TE | GROUPED, "te", like=None),
    _dense("dense-local", LOCAL, like="dense-bf16", bound=OTHER_START),
    # every recipe that Megatron has
    _dense("dense-fp8-tensorwise", _fp8("tensorwise"), "te", "fp8", bound=FP8),
    _moe("moe-fp8-tensorwise", _fp8("tensorwise") | _PADDED, "te", "fp8", bound=MOE_FP8),
    _dense("dense-fp8-delayed", _fp8("delayed"), "te", "fp8", bound=FP8),
    _dense("dense-fp8-blockwise", _fp8("blockwise"), "te", "blockwise", bound=FP8),
    _moe("moe-fp8-blockwise", _fp8("blockwise") | _PADDED, "te", "blockwise", bound=MOE_FP8),
    _dense("dense-fp8-mxfp8", _fp8("mxfp8"), "te", "mxfp8", bound=FP8),
    # weights kept in FP8, and layers kept in bf16
    _dense(
        "dense-fp8-params-tensorwise",
        _fp8("tensorwise", fp8_param_gather=True),
        *("te", "fp8"),
        bound=FP8,
    ),
    _dense("dense-fp8-first-last", _fp8("tensorwise", **_FIRST_LAST), "te", "fp8", bound=FP8),
    _moe("moe-fp8-delayed", _fp8("delayed") | _PADDED, "te", "fp8", bound=MOE_FP8),
    _moe("moe-local", LOCAL, like="moe-bf16", bound=OTHER_START),
    # KHA by other ways: plain torch for its kernels, matrices applied instead of folded
    _moe("moe-plain-torch", TE | GROUPED, "te", environment={"KHA_KERNELS": "torch"}),
    _dense("dense-not-folded", TE | {"--kha-fold": "never"}, "te"),
    _dense(
        "dense-fp8-not-folded",
        _fp8("tensorwise") | {"--kha-fold": "never"},
        *("te", "fp8"),
        bound=FP8,
    ),
    # attention, recompute, graphs
    _dense("dense-fused-attention", TE | {"--attention-backend": "fused"}, "te"),
    _dense("dense-flash-attention", TE | {"--attention-backend": "flash"}, "te", "flash-attn"),
    _dense("dense-unfused-attention", TE | {"--attention-backend": "unfused"}, "te"),
    _moe("moe-full-recompute", TE | GROUPED | _FULL, "te"),
    _dense("dense-fp8-full-recompute", _fp8("tensorwise") | _FULL, "te", "fp8", bound=FP8),
    _moe(
        "moe-selective-recompute",
        TE
        | GROUPED
        | {
            "--recompute-granularity": "selective",
            "--recompute-modules": ("core_attn", "moe_act", "layernorm"),
        },
        "te",
    ),
    _dense(
        "dense-te-graphs",
        TE | _GRAPHS | {"--cuda-graph-impl": "transformer_engine"},
        "te",
        bound=OTHER_START,  # Transformer Engine's random states
    ),
    _moe(
        "moe-te-graphs-attention",
        TE
        | GROUPED
        | _GRAPHS
        | {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": "attn"},
        "te",
        bound=OTHER_START,
    ),
    _dense(
        "dense-local-graphs",
        TE | _GRAPHS | {"--cuda-graph-impl": "local"},
        "te",
        bound=OTHER_START,
    ),
    # fused weight gradients, by apex in the output layer
    _dense("dense-fused-weight-gradients", TE, "te", "apex", dropped=tuple(TE)[1:], bound=SAME),
    _moe(
        "moe-fp8-fused-weight-gradients",
        _fp8("tensorwise") | _PADDED,
        *("te", "fp8", "apex"),
        dropped=tuple(TE)[1:],
        bound=MOE_FP8,
    ),
    # the other variants; their curves are their own, so only that they learn is asked
    _dense("dense-gate", TE, "te", preset="kha_gate_v", like=None),
    _dense("dense-mlp-qkv-fp8", _fp8("tensorwise"), "te", "fp8", preset="kha_mlp_qkv", like=None),
    _dense("dense-baseline-fp8", _fp8("tensorwise"), "te", "fp8", preset="baseline", like=None),
    _moe("moe-gates", TE | GROUPED, "te", preset="kha_mlp_gate_output", like=None),
    _dense("dense-gates-fp8", _fp8("tensorwise"), "te", "fp8", preset="gate_value", like=None),
    _dense(
        "dense-heads-fp8", _fp8("tensorwise"), "te", "fp8", preset="kha_linear_moh_75", like=None
    ),
    _moe("moe-heads", TE | GROUPED, "te", preset="kha_mlp_moh_75", like=None),
    _dense("dense-talking", TE, "te", preset="talking", like=None),
    _dense("dense-collaborative", TE, "te", preset="collaborative", like=None),
    _dense(
        "dense-fp16",
        TE | {"--fp16": True, "--initial-loss-scale": 4096},
        "te",
        dropped=("--bf16",),
        bound=OTHER_START,  # drawn in another dtype
    ),
    # what is left of parameters kept in FP8
    _dense(
        "dense-fp8-params-delayed",
        _fp8("delayed", fp8_param_gather=True),
        *("te", "fp8"),
        bound=FP8,
    ),
    _dense(
        "dense-fp8-params-blockwise",
        _fp8("blockwise", fp8_param_gather=True),
        *("te", "blockwise"),
        bound=FP8,
    ),
    _moe(
        "moe-fp8-params-tensorwise",
        _fp8("tensorwise", fp8_param_gather=True) | _PADDED,
        *("te", "fp8"),
        bound=MOE_FP8,
    ),
)
"""In the order of their importance."""


def missing(case: Case, has: Mapping[str, bool]) -> str | None:
    """What the machine lacks for ``case``, in words; None if it can run."""
    lacking = [NEEDS[name] for name in case.needs if not has.get(name)]
    return f"needs {lacking[0]}" if lacking else None


def faults(
    case: Case, losses: Sequence[float], reference: Sequence[float] | None, steps: int
) -> list[str]:
    """What is wrong with a finished run; empty if nothing is.

    Args:
        losses: of each step.
        reference: the same of the case that it must follow; None if there is none.
        steps: how many there must be.
    """
    if len(losses) < steps:
        return [f"{len(losses)} losses of {steps}"]
    if bad := [i for i, loss in enumerate(losses, 1) if not math.isfinite(loss)]:
        return [f"the loss is not finite at step {bad[0]}"]
    found = []
    if steps >= 100 and not end(losses) < losses[0] - 2:
        found.append(f"it did not learn: {losses[0]:.3f} at first, {end(losses):.3f} at the end")
    if reference is None:
        return found
    first, last = distance(losses, reference)
    if case.bound.first is not None and not first <= case.bound.first:
        found.append(
            f"the first loss is {first:.4f} from {case.like}'s: at most {case.bound.first}"
        )
    if not last <= case.bound.end:
        found.append(f"the last losses are {last:.4f} from {case.like}'s: at most {case.bound.end}")
    return found


def end(losses: Sequence[float]) -> float:
    """Mean of the last quarter."""
    return fmean(losses[-max(1, len(losses) // 4) :])


def distance(losses: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """How far two runs are apart, at the first step and in the mean of the last quarter."""
    return abs(losses[0] - reference[0]), abs(end(losses) - end(reference))
