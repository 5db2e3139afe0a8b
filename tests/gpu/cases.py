"""Short GPU trainings: flags, requirements, and the reference that their losses must follow.

All start from the same weights and read the same data, so that loss curves differ only by rounding.
``test_losses.py`` runs them in this order within its time limit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from kha_megatron.model.run import Arguments, Run, as_arguments, parse, render
from kha_megatron.recipes import Recipe
from kha_megatron.recipes.gpu import GPU_EXPERTS, GPU_TRAINING
from kha_megatron.recipes.paper import ATTENTION

STEPS = 200
"""Optimizer steps of a run."""


def _flags(text: str) -> Arguments:
    return parse(text.split())


# the paper's shape in small; every size is a multiple of 128, as blockwise FP8 needs
_RUN = {said.flag: said.words for said in as_arguments(**ATTENTION).values()} | _flags(f"""
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length 256 --max-position-embeddings 256
    --micro-batch-size 8 --global-batch-size 16 --train-iters {STEPS} --lr 5e-4 --min-lr 5e-5
    --lr-decay-style cosine --lr-warmup-fraction 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --weight-decay 0.1 --clip-grad 1.0 --seed 1234 --bf16 --use-distributed-optimizer
    --split 99,1,0 --num-workers 1 --eval-interval 100000 --eval-iters 0 --log-interval 10
    --tensorboard-log-interval 1
""")
_EXPERTS = _flags("""
    --num-experts 8 --moe-ffn-hidden-size 256 --moe-router-topk 2 --moe-router-dtype fp32
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rms --moe-router-load-balancing-type none
    --moe-token-dispatcher-type alltoall
""")
# without NVIDIA's apex Megatron's output layer has no fused weight gradient
_UNFUSED = "--no-gradient-accumulation-fusion"
TE = _flags(f"--transformer-impl transformer_engine {_UNFUSED}")
LOCAL = _flags(f"""
    --transformer-impl local {_UNFUSED} --no-persist-layer-norm --no-masked-softmax-fusion
    --no-rope-fusion
""")
GROUPED = _flags("--moe-grouped-gemm --moe-permute-fusion")
_ONE_GPU = {"expert_model_parallel_size": 1, "num_workers": 1, "eval_iters": 0}
_RECIPE = {
    argument.flag: argument.words
    for argument in as_arguments(**{**GPU_TRAINING, **GPU_EXPERTS, **_ONE_GPU}).values()
}
"""The settings of recipes for GPUs."""
_PADDED = GROUPED | _flags("--moe-router-padding-for-quantization")
TINY = _flags("""
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --kv-channels 16 --seq-length 32
    --max-position-embeddings 32 --train-iters 4 --micro-batch-size 2 --global-batch-size 4
""")
"""Sizes of a dense run on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Largest distance in nats between the loss curves of a case and of its reference."""

    first: float | None
    """At the first step, before any update; None if the two start from different weights."""

    end: float
    """Mean of the last quarter of the steps."""


SAME = Bound(first=0.01, end=0.06)
"""Other kernels for the same arithmetic in bf16. On a CPU another order of the same sums moved the
end by 0.016 (benchmarks/gpu.md)."""

FP8 = Bound(first=0.05, end=0.06)
"""FP8 GEMMs against bf16. On a CPU, rounding to E4M3 and E5M2 moved the first loss by 0.002 and the
end by 0.016. Delayed scaling has no scale at the first step."""

MOE_SAME = Bound(first=0.01, end=0.15)
"""``SAME`` for a mixture of experts. Its routers turn a rounding into another choice of experts."""

MOE_FP8 = Bound(first=0.05, end=0.15)
"""``FP8`` for a mixture of experts. On a CPU, rounding to FP8 moved the end by 0.071."""

OTHER_START = Bound(first=None, end=0.3)
"""Equal arithmetic from other random weights. On a CPU, two seeds were 0.26 apart."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One short training."""

    name: str
    flags: Arguments
    """Megatron's flags, which replace the recipe's."""

    moe: bool = False
    preset: str = ""
    """KHA preset; by default linear for dense models and mlp for mixtures of experts."""

    needs: tuple[str, ...] = ()
    """Keys of :data:`NEEDS`."""

    like: str | None = None
    """The reference, whose losses these must follow."""

    bound: Bound = SAME
    dropped: tuple[str, ...] = ()
    """Flags of the recipe that this case omits."""

    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """Return the run as the launcher takes it."""
        flags = dict(_RUN)
        preset = "kha_linear"
        if self.moe:
            flags |= _EXPERTS
            preset = "kha_mlp"
        flags |= self.flags
        for flag in self.dropped:
            flags.pop(flag, None)
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "2"}
        run = Run.from_values(vocab_size=4096)
        return Recipe(
            name=f"gpu-check/{self.name}",
            description="one case of make gpu-check",
            run=run.updated(render(flags), kha_preset=self.preset or preset),
            ranks=1,
            environment=environment | dict(self.environment),
        )


NEEDS = {
    "te": "Transformer Engine",
    "fp8": "a GPU with FP8 (compute capability 8.9 or newer)",
    "blockwise": "Transformer Engine's blockwise FP8 (Hopper, CUDA 12.9 or newer)",
    "mxfp8": "Transformer Engine's MXFP8 (Blackwell)",
    "flash-attn": "flash-attn in a version that Transformer Engine accepts",
    "apex": "NVIDIA's apex with fused_weight_gradient_mlp_cuda",
}
"""Optional requirements of a machine."""


def _fp8(recipe: str, more: str = "") -> Arguments:
    fp8_format = "e4m3" if recipe == "mxfp8" else "hybrid"
    if recipe == "delayed":
        more += " --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
    return TE | _flags(f"--fp8-recipe {recipe} --fp8-format {fp8_format} {more}")


def _dense(name: str, flags: Arguments, *needs: str, **more: object) -> Case:
    return Case(
        name=name,
        flags=flags,
        needs=needs,
        **({"like": "dense-bf16"} | more),
    )


def _moe(name: str, flags: Arguments, *needs: str, **more: object) -> Case:
    more = {"like": "moe-bf16", "bound": MOE_SAME} | more
    return Case(name=name, flags=flags, needs=needs, moe=True, **more)


_GRAPHS = _flags("--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 2")
_ATTENTION_GRAPHS = _GRAPHS | _flags("--cuda-graph-modules attn")
_SCOPES = _flags("--cuda-graph-modules attn moe_router moe_preprocess")
_FULL = _flags("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
_FLASH = _flags("--attention-backend flash")
_FP16 = _flags("--fp16 --initial-loss-scale 4096")

CASES: tuple[Case, ...] = (
    # the references; local layers run without Transformer Engine
    _dense("dense-bf16", TE, "te", like=None),
    _moe("moe-bf16", TE | GROUPED, "te", like=None),
    _dense("dense-local", LOCAL, like="dense-bf16", bound=OTHER_START),
    # every FP8 recipe of Megatron
    _dense("dense-fp8-tensorwise", _fp8("tensorwise"), "te", "fp8", bound=FP8),
    _moe("moe-fp8-tensorwise", _fp8("tensorwise") | _PADDED, "te", "fp8", bound=MOE_FP8),
    _dense("dense-fp8-delayed", _fp8("delayed"), "te", "fp8", bound=FP8),
    _dense("dense-fp8-blockwise", _fp8("blockwise"), "te", "blockwise", bound=FP8),
    _moe("moe-fp8-blockwise", _fp8("blockwise") | _PADDED, "te", "blockwise", bound=MOE_FP8),
    _dense("dense-fp8-mxfp8", _fp8("mxfp8"), "te", "mxfp8", bound=FP8),
    _dense("dense-fp8-params", _fp8("tensorwise", "--fp8-param-gather"), "te", "fp8", bound=FP8),
    # KHA in torch instead of its kernels
    _moe("moe-plain-torch", TE | GROUPED, "te", environment={"KHA_KERNELS": "torch"}),
    _dense("dense-flash-attention", TE | _FLASH, "te", "flash-attn"),
    _moe("moe-full-recompute", TE | GROUPED | _FULL, "te"),
    _moe("moe-recipe-settings", TE | _RECIPE, "te"),
    # Transformer Engine has other random states with graphs
    _dense("dense-te-graphs", TE | _GRAPHS, "te", bound=OTHER_START),
    _dense("dense-attention-graphs", TE | _ATTENTION_GRAPHS, "te", bound=OTHER_START),
    _moe("moe-attention-graphs", TE | GROUPED | _ATTENTION_GRAPHS, "te", bound=OTHER_START),
    _moe("moe-te-graphs", TE | _RECIPE | _GRAPHS | _SCOPES, "te", bound=OTHER_START),
    _dense("dense-fused-weight-gradients", TE, "te", "apex", dropped=(_UNFUSED,)),
    # other variants and mechanisms, whose loss must only fall
    _dense("dense-gate", TE, "te", preset="kha_gate_v", like=None),
    _dense("dense-mlp-qkv-fp8", _fp8("tensorwise"), "te", "fp8", preset="kha_mlp_qkv", like=None),
    _moe("moe-gates", TE | GROUPED, "te", preset="kha_mlp_gate_output", like=None),
    _moe("moe-heads", TE | GROUPED, "te", preset="kha_mlp_moh_75", like=None),
    _dense("dense-talking", TE, "te", preset="talking", like=None),
    _dense("dense-collaborative", TE, "te", preset="collaborative", like=None),
    # its weights are drawn in another dtype
    _dense("dense-fp16", TE | _FP16, "te", dropped=("--bf16",), bound=OTHER_START),
)
"""In order of importance."""


def missing(case: Case, has: Mapping[str, bool]) -> str | None:
    """Return what the machine lacks for ``case``, or None if it can run."""
    for name in case.needs:
        if not has.get(name):
            return f"needs {NEEDS[name]}"
    return None


def faults(
    case: Case,
    losses: Sequence[float],
    reference: Sequence[float] | None,
    steps: int,
) -> list[str]:
    """Return the faults of a run of ``steps`` steps. Its losses must follow ``reference``."""
    if len(losses) < steps:
        return [f"{len(losses)} losses of {steps}"]
    for step, loss in enumerate(losses, 1):
        if not math.isfinite(loss):
            return [f"the loss is not finite at step {step}"]
    wrong = []
    if steps >= 100 and not end(losses) < losses[0] - 2:
        wrong.append(f"it did not learn: {losses[0]:.3f} at first, {end(losses):.3f} at the end")
    if reference is None:
        return wrong
    bound = case.bound
    first, last = distance(losses, reference)
    if bound.first is not None and not first <= bound.first:
        wrong.append(f"first loss: {first:.4f} from {case.like}, bound {bound.first}")
    if not last <= bound.end:
        wrong.append(f"last losses: {last:.4f} from {case.like}, bound {bound.end}")
    return wrong


def end(losses: Sequence[float]) -> float:
    """Return the mean of the last quarter."""
    return fmean(losses[-max(1, len(losses) // 4) :])


def distance(losses: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Return the distance of two runs at the first step and in the mean of the last quarter."""
    return abs(losses[0] - reference[0]), abs(end(losses) - end(reference))
