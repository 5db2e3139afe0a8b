"""Megatron's models with and without KHA, as the benchmarks of layers and steps run them.

The configuration is what ``megatron.training`` makes of a recipe's command line.
"""

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.kernels.fused import KERNELS_VARIABLE
from kha_megatron.mcore import compat, cpu
from kha_megatron.model.run import Arguments, parse, render
from kha_megatron.recipes import get_recipe

SHAPES = {
    "moe": ("moe-a0.8b-6.6b", []),
    "dense": ("dense-3.9b", []),
    "tiny": ("quickstart", ["--kv-channels", "64"]),  # a head dim that the kernels support
}
"""By name: the recipe with the sizes, and changes to it."""

PRECISIONS = {
    "bf16": ["--bf16"],
    "delayed": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"],
    "tensorwise": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "blockwise": ["--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"],
    "mxfp8": ["--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"],
}
_ONE_LAYER: Arguments = {
    "--num-layers": ("1",),
    "--tensor-model-parallel-size": ("1",),
    "--expert-model-parallel-size": ("1",),
    "--micro-batch-size": ("1",),
    "--global-batch-size": ("1",),
}
_DROPPED = {"--sequence-parallel", "--bf16"}

STOCK = "stock"


@dataclass(frozen=True)
class Variant:
    """One way to run a model."""

    name: str
    preset: str | None
    """A key of ``kha_megatron.heads.config.PRESETS``; None for Megatron's own layers."""
    kernels: bool = False
    """Use the Triton kernels or raise an error; otherwise always torch."""

    def chosen(self) -> contextlib.AbstractContextManager:
        """Run this variant within a block: each forward pass reads the environment."""
        implementation = "triton" if self.kernels else "torch"
        return mock.patch.dict(os.environ, {KERNELS_VARIABLE: implementation})


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(STOCK, None),
        Variant("baseline", "baseline"),
        Variant("mlp", "kha_mlp"),
        Variant("mlp/kernels", "kha_mlp", kernels=True),
        Variant("gate", "kha_gate_v"),
        Variant("gate/kernels", "kha_gate_v", kernels=True),
        Variant("linear", "kha_linear"),
    )
}
"""By name; the others are compared with ``stock``."""


class Cell(NamedTuple):
    """The input of a layer and its precision."""

    shape: str
    tokens: int
    """Tokens of one microbatch."""
    sequence: int
    precision: str

    def __str__(self) -> str:
        return f"{self.shape}, {self.tokens} tokens, {self.precision}"


def start_megatron() -> None:
    """Initialize Megatron's process groups and random states for one process."""
    from megatron.core import parallel_state, tensor_parallel

    logging.getLogger("megatron").setLevel(logging.WARNING)
    if not dist.is_initialized():
        backend = "gloo" if cpu.is_installed() else "nccl"
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def uses_local_modules() -> bool:
    """Return whether Megatron's local modules are used instead of Transformer Engine's."""
    is_missing = importlib.util.find_spec("transformer_engine") is None
    return cpu.is_installed() or is_missing or compat.lacks_te_extension()


def module_flags() -> Arguments:
    """Return the flags that local modules need, or none for Transformer Engine."""
    if not uses_local_modules():
        return {}
    flags: Arguments = {}
    for flag, word in cpu.MEGATRON_FLAGS.items():
        if cpu.is_installed() or flag != "--distributed-backend":
            flags[flag] = () if word is None else (word,)
    return flags


def parse_megatron(arguments: Arguments) -> argparse.Namespace:
    """Parse and validate a command line as our entry point does, for one process."""
    from megatron.training.arguments import parse_args, validate_args

    from kha_megatron.training.arguments import add_kha_arguments

    with (
        mock.patch.object(sys, "argv", ["benchmark", *render(arguments)]),
        mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        args = parse_args(add_kha_arguments)
        validate_args(args, {"tokenizer_type": "NullTokenizer"})
    return args


def transformer_config(cell: Cell) -> Any:
    """Return the ``TransformerConfig`` of one layer of the recipe."""
    from megatron.training.argument_utils import core_transformer_config_from_args

    recipe, changes = SHAPES[cell.shape]
    local = {"transformer_impl": "local"} if uses_local_modules() else {}
    arguments = get_recipe(recipe).run_for(changes, **local).flags
    arguments = {flag: value for flag, value in arguments.items() if flag not in _DROPPED}
    arguments |= _ONE_LAYER | {
        "--seq-length": (str(cell.sequence),),
        "--max-position-embeddings": (str(cell.sequence),),
    }
    arguments |= module_flags() | parse(PRECISIONS[cell.precision])
    return core_transformer_config_from_args(parse_megatron(arguments))


class Layer:
    """One layer in Megatron's ``TransformerBlock`` and data parallelism, as in training.

    ``hidden`` is its input and ``upstream`` the gradient of its output, ``[s, b, h]``. The shared
    matrices are a little away from the identity, as training would move them.
    """

    def __init__(self, cell: Cell, variant: Variant) -> None:
        from megatron.core import tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.transformer.transformer_block import TransformerBlock

        from kha_megatron.mcore.specs import kha_layer_spec

        self.variant = variant
        config = transformer_config(cell)
        self.backend = config.transformer_impl
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        if variant.preset is not None:
            spec = kha_layer_spec(config, HeadsConfig.from_preset(variant.preset))
        else:
            engine = config.transformer_impl == "transformer_engine"
            spec = get_gpt_decoder_block_spec(
                config,
                use_transformer_engine=engine,
                normalization=config.normalization,
            )
        with variant.chosen():
            block = TransformerBlock(
                config,
                spec,
                post_layer_norm=False,
                post_process=False,
            )
        block = block.cuda().to(config.params_dtype)  # as Float16Module would
        self._move_matrices(block)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, ddp, block)
        on_cpu = cpu.is_installed()
        rotary = RotaryEmbedding(config.kv_channels, 1.0, use_cpu_initialization=on_cpu)
        self.angles = rotary(cell.sequence)
        size = cell.sequence, cell.tokens // cell.sequence, config.hidden_size
        draw = {"generator": torch.Generator().manual_seed(2), "device": "cpu"}
        self.hidden = torch.randn(size, **draw).to(config.params_dtype).cuda().requires_grad_()
        self.upstream = torch.randn(size, **draw).to(config.params_dtype).cuda()

    @staticmethod
    @torch.no_grad()
    def _move_matrices(block: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(3)
        for name, weight in block.named_parameters():
            if ".knock_" in name:
                noise = torch.randn(
                    weight.shape,
                    generator=generator,
                    device="cpu",
                )
                weight += (0.02 * noise).to(weight)

    def forward(self) -> Tensor:
        """Return the output ``[s, b, h]``."""
        return self.model(self.hidden, None, rotary_pos_emb=self.angles)

    def run(self, microbatches: int) -> None:
        """Run the forward and backward passes between two optimizer steps.

        Gradients are not set to zero: their values do not matter here.
        """
        self.model.module.set_is_first_microbatch()  # FP8 weights are quantised again
        with self.variant.chosen():
            for _ in range(microbatches):
                self.hidden.grad = None
                self.forward().backward(self.upstream)

    def saved_bytes(self) -> int:
        """Return the bytes that autograd saves for the backward pass.

        Storages count once. The input, the output, parameters and buffers do not count.
        """
        known = [self.hidden, self.angles, *self.model.module.parameters()]
        known += self.model.module.buffers()
        places = {tensor.untyped_storage().data_ptr() for tensor in known}
        saved: dict[int, tuple[int, Tensor]] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes(), tensor  # alive: no address is reused
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with self.variant.chosen(), hooks:
            places.add(self.forward().untyped_storage().data_ptr())
        return sum(size for place, (size, _) in saved.items() if place not in places)
