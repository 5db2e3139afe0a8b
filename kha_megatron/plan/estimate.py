"""Estimate what a run needs on a number of GPUs, and check that its largest rank fits on a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kha_megatron.errors import ConfigError
from kha_megatron.model.layout import Layout
from kha_megatron.model.rules import check_arguments, check_layout
from kha_megatron.model.run import Run
from kha_megatron.plan.counts import Counts, Flops, compute_flops, count_model, get_countable_model
from kha_megatron.plan.memory import Memory, estimate_memory
from kha_megatron.plan.rank import Precision, Rank, Recompute, Setup

USABLE_MEMORY = 0.9
"""Leave some headroom for everything that is not part of the estimate (e.g. the CUDA context)."""

_CORE_ATTENTION = "core_attn"
"""Default of ``--recompute-modules``, with ``--recompute-granularity selective``."""

ESTIMATED_ARGUMENTS = (
    "--accumulate-allreduce-grads-in-fp32",
    "--grad-reduce-in-bf16",
    "--main-grads-dtype",
    "--recompute-activations",
    "--recompute-method",
    "--recompute-modules",
    "--recompute-num-layers",
)
"""Arguments that change the estimate although we have no field for them."""

_RECOMPUTE_FLAGS: Mapping[Recompute, str] = {
    "selective": "--recompute-granularity selective --recompute-modules core_attn",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
"""Megatron arguments that reduce the memory of activations, cheapest first."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Parameters, FLOPs and memory of a run. Memory is that of the rank that needs the most."""

    setup: Setup
    layout: Layout
    counts: Counts  # of the whole model
    flops: Flops  # forward pass of one sequence
    largest_rank: Rank
    memory: Memory  # of the largest rank, excluding KHA
    kha_memory: Memory

    @property
    def total_memory(self) -> float:
        return self.memory.total + self.kha_memory.total

    @property
    def total_activations(self) -> float:
        return self.memory.activations + self.kha_memory.activations

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward pass."""
        batch = self.setup.batch
        return self.flops.training / batch.seq_length

    @property
    def flops_per_step(self) -> int:
        """FLOPs of forward and backward pass of a global batch."""
        batch = self.setup.batch
        assert batch.global_batch_size is not None
        return self.flops.training * batch.global_batch_size

    def fits(self, gpu_memory: float) -> bool:
        usable = USABLE_MEMORY * gpu_memory
        return self.total_memory <= usable

    def explain_fit(self, gpu_memory: float) -> str:
        """Describe whether the largest rank fits, and what to do if it does not."""
        needed = f"{self.total_memory / 1e9:.1f} GB of GPU memory"
        usable = f"{USABLE_MEMORY:.0%} of {gpu_memory / 1e9:.1f} GB"
        if self.fits(gpu_memory):
            return f"The largest rank needs about {needed}, which fits into {usable}."
        activations = f"{self.total_activations / 1e9:.1f} GB"
        return (
            f"The largest rank needs about {needed} ({activations} for activations), "
            f"which does not fit into {usable}. {self._advise(gpu_memory)}"
        )

    def _advise(self, gpu_memory: float) -> str:
        """Return the cheapest change that makes the largest rank fit."""
        smaller_batches = _smaller_sizes(self.setup.batch.micro_batch_size)
        for size in smaller_batches:
            if self._changed(micro_batch_size=size).fits(gpu_memory):
                return f"Set --micro-batch-size {size}."
        for recompute, flags in _RECOMPUTE_FLAGS.items():
            if self._changed(recompute=recompute).fits(gpu_memory):
                return f"Add {flags}."
            for size in smaller_batches:
                changed = self._changed(recompute=recompute, micro_batch_size=size)
                if changed.fits(gpu_memory):
                    return f"Add {flags} and set --micro-batch-size {size}."
        return (
            "Use more GPUs with a larger --tensor-model-parallel-size, "
            "--pipeline-model-parallel-size or --context-parallel-size."
        )

    def _changed(
        self,
        *,
        recompute: Recompute | None = None,
        micro_batch_size: int | None = None,
    ) -> "Estimate":
        """Return the estimate of a run that differs in these settings."""
        setup = self.setup
        if recompute is not None:
            setup = replace(setup, recompute=recompute)
        if micro_batch_size is not None:
            batch = replace(setup.batch, micro_batch_size=micro_batch_size)
            setup = replace(setup, batch=batch)
        return _estimate(setup, self.layout)


def _smaller_sizes(size: int) -> list[int]:
    """Halve ``size`` as often as possible, so that it always divides the global batch size.

    >>> _smaller_sizes(12)
    [6, 3]
    """
    sizes = []
    while size % 2 == 0:
        size //= 2
        sizes.append(size)
    return sizes


def estimate_run(run: Run, gpus: int) -> Estimate:
    """Estimate parameters, FLOPs and memory of a run on ``gpus`` ranks.

    Raises:
        ConfigError: If the layout is invalid, or the run is not supported.
    """
    setup = build_setup(run)
    layout = run.layout(gpus)
    attention_type = setup.model.attention_type
    if layout.tp > 1 and attention_type != "gqa":
        raise ConfigError(
            f"Cannot estimate the memory of {attention_type.upper()} with "
            "--tensor-model-parallel-size."
        )
    check_layout(setup.model, layout, setup.batch)
    check_arguments(run.arguments, gpus, run.kha)
    return _estimate(setup, layout)


def _estimate(setup: Setup, layout: Layout) -> Estimate:
    ranks = [Rank(setup, layout, stage) for stage in range(layout.pp)]
    largest_rank = max(ranks, key=_total_memory)
    memory = estimate_memory(largest_rank)
    model = setup.model
    return Estimate(
        setup=setup,
        layout=layout,
        counts=count_model(model),
        flops=compute_flops(model, setup.batch.seq_length),
        largest_rank=largest_rank,
        memory=memory.base,
        kha_memory=memory.kha,
    )


def _total_memory(rank: Rank) -> float:
    return estimate_memory(rank).total


def build_setup(run: Run) -> Setup:
    """Extract what the estimate needs from a run.

    Raises:
        ConfigError: If the run is not supported.
    """
    model = get_countable_model(run.model, run.arguments)
    training = run.training
    batch = run.batch
    if model.mtp_num_layers:
        raise ConfigError("Cannot estimate the memory of multi-token prediction.")
    if training.use_torch_fsdp2 or training.use_megatron_fsdp:
        raise ConfigError("Cannot estimate the memory of FSDP.")
    if batch is None or batch.global_batch_size is None:
        raise ConfigError("Cannot estimate the memory of a run without a fixed batch size.")
    return Setup(
        model=model,
        batch=batch,
        precision=_get_precision(run),
        recompute=_get_recompute(run),
        gradient_size=_get_gradient_size(run),
        distributed_optimizer=training.use_distributed_optimizer,
    )


def _get_precision(run: Run) -> Precision:
    if run.model is not None and run.model.fp8:
        return "fp8"
    if run.training.bf16:
        return "bf16"
    return "fp16" if run.training.fp16 else "fp32"


def _get_gradient_size(run: Run) -> int:
    """Return the bytes per gradient, see ``validate_args`` in Megatron.

    Gradients are accumulated in float32 by default, except with ``--fp16``.
    """
    training = run.training
    if training.bf16:
        has_bf16_main_gradients = run.arguments.get("--main-grads-dtype") == ("bf16",)
        is_half = "--grad-reduce-in-bf16" in run.arguments or has_bf16_main_gradients
    else:
        is_half = training.fp16 and "--accumulate-allreduce-grads-in-fp32" not in run.arguments
    return 2 if is_half else 4


def _get_recompute(run: Run) -> Recompute:
    granularity = run.training.recompute_granularity
    if "--recompute-activations" in run.arguments:
        granularity = "selective"
    if granularity == "full":
        _check_recomputes_single_layers(run)
        return "full"
    modules = run.arguments.get("--recompute-modules", (_CORE_ATTENTION,))
    if granularity == "selective" and _CORE_ATTENTION in modules:
        return "selective"
    return "none"


def _check_recomputes_single_layers(run: Run) -> None:
    """Raise ConfigError unless all layers are recomputed one at a time."""
    for flag, modelled in (("--recompute-method", "uniform"), ("--recompute-num-layers", "1")):
        value = " ".join(run.arguments.get(flag, (modelled,)))
        if value != modelled:
            raise ConfigError(
                f"Cannot estimate the memory of {flag} {value}, only of {_RECOMPUTE_FLAGS['full']}."
            )
