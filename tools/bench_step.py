"""Time whole training steps of Megatron's stock model and of ours.

A step is what a job repeats: forward passes, loss, backward passes, gradient reduction, clipping
and Adam, with Megatron's schedule, data parallelism and distributed optimizer on one GPU. `stock`
is Megatron's own HybridModel. Megatron has no hybrid layers of local modules, so without
Transformer Engine `stock` is its GPTModel with the same layers. The others are the HybridModel of
our recipes: `baseline` without KHA, and the names of KHA presets. Options are added with a plus:

  +watch       check for NaN and Inf in each step, which training does by default
  +fused-loss  --cross-entropy-loss-fusion
  +graphs      CUDA graphs of attention, routers and preprocessing (Transformer Engine only)
  +torch       KHA in torch instead of Triton kernels

A cell is MODEL/PRECISION/MICRO_BATCH=CONTENDERS. Its contenders take turns in one process. `busy`
is the time in which the GPU runs at least one kernel, and `peak` the memory of a contender alone.
TFLOP/s are those of the model, counted as Megatron does, without KHA. `first loss` must be equal
except for rounding, because all contenders start from the same model. On a CPU the model is tiny,
times mean little, and there are no kernels, so that `busy` and `peak` are empty.
"""

import argparse
import contextlib
import functools
import io
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self
from unittest import mock

import torch
from bench import positive, prepare_megatron
from layers import (
    PRECISIONS,
    STOCK,
    module_flags,
    parse_megatron,
    start_megatron,
    uses_local_modules,
)
from measuring import (
    Call,
    Cells,
    Reading,
    Report,
    Spread,
    interleaved,
    kernel_clock,
    ratios,
    spreads,
)
from torch import Tensor

from kha_megatron.errors import ConfigError, KHAError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.kernels.fused import KERNELS_VARIABLE
from kha_megatron.mcore import patches
from kha_megatron.model.run import Arguments, Run, parse
from kha_megatron.recipes import get_recipe

MODELS = {
    "dense-0.6b": ("dense-0.6b", []),
    "dense-1.7b": ("dense-1.7b", []),
    # 0.79B parameters, of which 0.44B are active
    "moe-0.8b": ("moe-a0.44b-2.3b", ["--num-experts", "16"]),
    "tiny": ("quickstart", ["--kv-channels", "64"]),
}
"""By name: the recipe, and changes to it that let several contenders fit on one GPU."""

OPTIONS: dict[str, list[str]] = {
    "watch": [],
    "fused-loss": ["--cross-entropy-loss-fusion"],
    "graphs": [
        *("--cuda-graph-impl", "transformer_engine"),
        *("--cuda-graph-modules", "attn", "moe_router", "moe_preprocess"),
        *("--cuda-graph-warmup-steps", "2"),
        "--te-rng-tracker",
    ],
    "torch": [],
}
"""Arguments of Megatron by option of a contender."""

# what one rank cannot overlap, and what precisions and contenders choose
_DROPPED = (
    *("--overlap-grad-reduce", "--overlap-param-gather"),
    *("--sequence-parallel", "--bf16", "--cross-entropy-loss-fusion"),
)
_ONE_RANK = [
    *("--tensor-model-parallel-size", "1"),
    *("--expert-model-parallel-size", "1"),
]

DEFAULTS = {
    "cuda": {
        "cells": [
            "moe-0.8b/bf16/1=stock,kha_mlp,kha_mlp+watch,kha_linear",
            "dense-0.6b/bf16/1=stock,kha_linear,kha_mlp",
            "moe-0.8b/bf16/4=stock+fused-loss,kha_mlp+fused-loss",
            "dense-0.6b/bf16/4=stock+fused-loss,kha_mlp+fused-loss",
            "moe-0.8b/tensorwise/1=stock,kha_mlp",
            "moe-0.8b/bf16/1=stock+graphs,kha_mlp+graphs",
        ],
        "length": 4096,
        "repetitions": 7,
    },
    "cpu": {
        "cells": [
            "tiny/bf16/1=stock,baseline,kha_mlp,kha_mlp+watch,kha_linear",
            "tiny/bf16/2=stock+fused-loss,kha_mlp+fused-loss+watch",
        ],
        "length": 32,
        "repetitions": 3,
    },
}
"""Most informative cells first. The contenders of a cell must fit on the GPU together."""

HEADER = ["model", "precision", "micro-batch", "contender", "ms", "over first", "tokens/s"]
HEADER += ["TFLOP/s", "busy, ms", "busy share", "peak, GB", "first loss"]


@dataclass(frozen=True)
class Contender:
    """A model and its options."""

    name: str
    preset: str | None
    """A key of ``kha_megatron.heads.config.PRESETS``; None for Megatron's own model."""
    options: tuple[str, ...]

    @classmethod
    def parse(cls, name: str) -> Self:
        """Parse a name like ``kha_mlp+watch``."""
        preset, *options = name.split("+")
        for option in options:
            if option not in OPTIONS:
                known = ", ".join(OPTIONS)
                raise ConfigError(f"Unknown option {option!r} in {name!r}. Options: {known}.")
        return cls(name, None if preset == STOCK else preset, tuple(options))

    def chosen(self) -> Any:
        """Return a context in which KHA runs in torch, or as training chooses."""
        implementation = "torch" if "torch" in self.options else "auto"
        return mock.patch.dict(os.environ, {KERNELS_VARIABLE: implementation})


@dataclass(frozen=True)
class Cell:
    """What the contenders of a comparison have in common."""

    model: str
    precision: str
    micro_batch: int
    contenders: tuple[Contender, ...]
    length: int
    microbatches: int

    @classmethod
    def parse(cls, text: str, length: int, microbatches: int) -> Self:
        """Parse MODEL/PRECISION/MICRO_BATCH=CONTENDER,CONTENDER."""
        settings, _, names = text.partition("=")
        model, precision, micro_batch = f"{settings}//".split("/")[:3]
        is_known = model in MODELS and precision in PRECISIONS and micro_batch.isdecimal()
        if not is_known or not names:
            raise ConfigError(
                f"Expected a cell like moe-0.8b/bf16/1=stock,kha_mlp, got {text!r}. Models: "
                f"{', '.join(MODELS)}. Precisions: {', '.join(PRECISIONS)}."
            )
        contenders = tuple(Contender.parse(name) for name in names.split(","))
        return cls(model, precision, int(micro_batch), contenders, length, microbatches)

    @property
    def name(self) -> str:
        names = ",".join(contender.name for contender in self.contenders)
        return f"{self.model}/{self.precision}/{self.micro_batch}={names}"

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.micro_batch * self.length * self.microbatches

    def run(self, contender: Contender) -> Run:
        """Return the recipe's run for one rank, with a HybridModel where there can be one."""
        recipe, changes = MODELS[self.model]
        local = {"transformer_impl": "local"} if uses_local_modules() else {}
        sizes = {
            "seq_length": self.length,
            "max_position_embeddings": self.length,
            "micro_batch_size": self.micro_batch,
            "global_batch_size": self.micro_batch * self.microbatches,
        }
        run = get_recipe(recipe).run_for([*changes, *_ONE_RANK], **sizes, **local)
        needs_gpt = contender.preset is None and uses_local_modules()
        return run if needs_gpt else run.as_hybrid()

    def arguments(self, contender: Contender) -> Arguments:
        """Return the command line of Megatron."""
        flags = self.run(contender).flags
        for flag in _DROPPED:
            flags.pop(flag, None)
        flags |= module_flags() | parse(PRECISIONS[self.precision])
        for option in contender.options:
            flags |= parse(OPTIONS[option])
        return flags


class Training:
    """A model with its optimizer, and random tokens that all contenders share."""

    def __init__(self, cell: Cell, contender: Contender) -> None:
        from megatron.core import tensor_parallel

        self.cell = cell
        self.contender = contender
        run = cell.run(contender)
        args = parse_megatron(cell.arguments(contender))
        assert run.model is not None
        args.padded_vocab_size = run.model.padded_vocab(1)
        has_graphs = "graphs" in contender.options
        tensor_parallel.model_parallel_cuda_manual_seed(
            1,
            te_rng_tracker=has_graphs,
            force_reset_rng=True,
        )
        torch.manual_seed(1)
        patches.build_output_layer_without_apex()
        with contender.chosen(), contextlib.redirect_stdout(io.StringIO()):
            self.chunks, self.optimizer = _build(args, contender)
        self.config = self.chunks[0].config
        self.flops = _flops(args)
        self.first_loss: Tensor | None = None
        self._draw_batch(args.padded_vocab_size)
        self.step()
        self.step()
        if has_graphs:
            self._capture(args)
            self.step()

    def _draw_batch(self, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(7)
        shape = self.cell.micro_batch, self.cell.length + 1
        text = torch.randint(vocabulary, shape, generator=generator, device="cpu")
        self.tokens = text[:, :-1].contiguous().cuda()
        self.labels = text[:, 1:].contiguous().cuda()
        positions = torch.arange(self.cell.length, device="cpu").cuda()
        self.positions = positions.expand(self.cell.micro_batch, -1)

    def _capture(self, args: argparse.Namespace) -> None:
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        helper = TECudaGraphHelper(
            model=self.chunks,
            config=self.config,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            optimizers=[self.optimizer],
        )
        helper.create_cudagraphs()

    def parameters(self) -> int:
        """Return the number of parameters."""
        count = 0
        for chunk in self.chunks:
            count += sum(parameter.numel() for parameter in chunk.parameters())
        return count

    def step(self) -> None:
        """Run one optimizer step."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        run_forward_backward = get_forward_backward_func()
        with self.contender.chosen():
            run_forward_backward(
                forward_step_func=self._forward_step,
                data_iterator=None,
                model=self.chunks,
                num_microbatches=self.cell.microbatches,
                seq_length=self.cell.length,
                micro_batch_size=self.cell.micro_batch,
                forward_only=False,
            )
        self.optimizer.step()

    def _forward_step(self, iterator: None, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        losses = model(self.tokens, self.positions, None, labels=self.labels)
        return losses, self._loss

    def _loss(self, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = losses.float().sum()
        count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
        mean = total.detach() / losses.numel()
        if self.first_loss is None:
            self.first_loss = mean
        return total, count, {"loss": mean}


def _build(args: argparse.Namespace, contender: Contender) -> tuple[list[Any], Any]:
    """Build model chunks and optimizer as ``megatron.training`` does."""
    from megatron.core import num_microbatches_calculator as microbatches
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config

    from kha_megatron.mcore.finite import stop_before_non_finite_steps

    microbatches.unset_num_microbatches_calculator()
    batch = args.global_batch_size, args.micro_batch_size
    microbatches.init_num_microbatches_calculator(0, None, *batch, 1)
    config = _model_config(args, contender)

    def watch(models: list[Any]) -> list[Any]:
        if "watch" in contender.options:
            stop_before_non_finite_steps(models)
        return models

    config.pre_wrap_hooks.append(watch)
    builder = config.get_builder_cls()(config)
    chunks = builder.build_distributed_models(
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        ddp_config=get_megatron_ddp_config(args),
    )
    optimizer_config, overrides = get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(
        optimizer_config,
        chunks,
        config_overrides=overrides,
        use_gloo_process_groups=False,
    )
    transformer = chunks[0].config
    if transformer.finalize_model_grads_func is None:
        transformer.finalize_model_grads_func = finalize_model_grads
    transformer.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer


def _model_config(args: argparse.Namespace, contender: Contender) -> Any:
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    from kha_megatron.mcore.building import model_config

    if contender.preset is not None:
        return model_config(args, HeadsConfig.from_preset(contender.preset))
    if args.hybrid_layer_pattern:
        return hybrid_config_from_args(args)
    return gpt_config_from_args(args)


def _flops(args: argparse.Namespace) -> float:
    """Return the FLOPs of a step as Megatron counts them for its throughput."""
    from megatron.training.training import num_floating_point_operations

    return num_floating_point_operations(args, args.global_batch_size)


def wall_clock(device: torch.device) -> Callable[[Call], Reading]:
    """Return a clock for calls that are much longer than a launch."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def clock(call: Call) -> Reading:
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        seconds = time.perf_counter() - start
        return lambda: seconds

    return clock


def peak_bytes(training: Training, own_bytes: int) -> int:
    """Return the largest memory in a step without that of other contenders.

    ``own_bytes`` is what the contender holds between steps.
    """
    others = torch.cuda.memory_allocated() - own_bytes
    torch.cuda.reset_peak_memory_stats()
    training.step()
    return torch.cuda.max_memory_allocated() - others


def measure(cell: Cell, args: argparse.Namespace, device: torch.device) -> Report:
    """Return the figures of all contenders of a cell."""
    on_gpu = device.type == "cuda"
    trainings: dict[str, Training] = {}
    own_bytes: dict[str, int] = {}
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    for contender in cell.contenders:
        before = torch.cuda.memory_allocated() if on_gpu else 0
        try:
            trainings[contender.name] = Training(cell, contender)
        except KHAError as error:
            skipped[contender.name] = str(error)
        except Exception as error:  # the other contenders are still measured
            traceback.print_exc()
            failed[contender.name] = f"{type(error).__name__}: {error}".partition("\n")[0]
        if on_gpu:
            own_bytes[contender.name] = torch.cuda.memory_allocated() - before
    if not trainings:
        return {"cell": cell.name, "contenders": {}, "skipped": skipped, "failed": failed}
    peaks = {}
    if on_gpu:
        for name, training in trainings.items():
            peaks[name] = peak_bytes(training, own_bytes[name])
    calls = {name: training.step for name, training in trainings.items()}
    turns = functools.partial(interleaved, calls, device)
    times = turns(repetitions=args.repetitions, warm_up=1, clock=wall_clock(device))
    busy = turns(repetitions=2, warm_up=0, clock=kernel_clock) if on_gpu else {}
    milliseconds = spreads(times, lambda seconds: 1e3 * seconds)
    first = next(iter(trainings))
    contenders = {}
    for name, training in trainings.items():
        seconds = milliseconds[name].median / 1e3
        contenders[name] = {
            "milliseconds": milliseconds[name],
            "over_first": ratios(times[name], times[first]),
            "tokens_per_second": cell.tokens / seconds,
            "teraflops": training.flops / seconds / 1e12,
            "busy_milliseconds": Spread.of([1e3 * t for t in busy[name]]) if busy else None,
            "peak_gigabytes": peaks[name] / 1e9 if peaks else None,
            "parameters": training.parameters(),
            "first_loss": float(training.first_loss),
        }
    return {
        "cell": cell.name,
        "model": cell.model,
        "precision": cell.precision,
        "micro_batch": cell.micro_batch,
        "modules": "local" if uses_local_modules() else "transformer_engine",
        "contenders": contenders,
        "skipped": skipped,
        "failed": failed,
    }


def rows(result: Report) -> list[list[str]]:
    lines = []
    for name, figures in result["contenders"].items():
        line = [result["model"], result["precision"], str(result["micro_batch"]), name]
        line += [figures["milliseconds"].text(1), figures["over_first"].text(4)]
        line += [f"{figures['tokens_per_second']:,.0f}", f"{figures['teraflops']:.4g}"]
        busy = figures["busy_milliseconds"]
        if busy is None:
            line += ["", ""]
        else:
            share = busy.median / figures["milliseconds"].median
            line += [busy.text(1), f"{share:.3f}"]
        peak = figures["peak_gigabytes"]
        line += ["" if peak is None else f"{peak:.1f}", f"{figures['first_loss']:.4f}"]
        lines.append(line)
    return lines


def options(add: Callable[..., Any]) -> None:
    add("--cells", nargs="+", metavar="CELL", help="see above (default: most informative first)")
    add("--length", type=positive, help="tokens of a sequence (default: 4096)")
    add("--microbatches", type=positive, default=2, help="of a step (default: 2)")


def cells(args: argparse.Namespace, device: torch.device) -> Cells:
    """Yield the name of each cell and a function that measures it."""
    parsed = list(_parse_cells(args))
    prepare_megatron(args.device)
    start_megatron()
    for cell in parsed:
        yield cell.name, functools.partial(measure, cell, args, device)


def _parse_cells(args: argparse.Namespace) -> Iterator[Cell]:
    for text in args.cells:
        yield Cell.parse(text, args.length, args.microbatches)
