"""One of Megatron's transformer layers in one process, with or without KHA, ready to be measured.

The configuration is what ``megatron.training`` makes of a command line, so that a layer is the one
that training on that command line would have, whatever is switched on by its flags. It runs as in
training: inside a ``TransformerBlock``, which enters the FP8 contexts, inside Megatron's data
parallelism, which accumulates weight gradients in float32.

Import only after ``bench.choose_device``.
"""

import contextlib
import io
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.arguments import parse_args, validate_args
from shapes import arguments_of, has
from torch import Tensor
from variants import Variant

from kha_megatron.mcore import cpu
from kha_megatron.mcore.knocking import KnockingHeads
from kha_megatron.mcore.specs import kha_layer_spec
from kha_megatron.model.words import render

_CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}

_OURS = {"--moe-router-bias-update-rms"}
"""Arguments of our entry point, of no concern to one layer."""
_NOISE = 0.02
"""Standard deviation of what is added to the shared matrices, as training would have moved them."""


@dataclass(frozen=True)
class Cell:
    """What a layer is given, apart from its variant."""

    shape: str
    tokens: int
    """Of one microbatch."""
    sequence: int
    precision: str
    words: tuple[str, ...] = ()
    """More of Megatron's arguments."""

    def __str__(self) -> str:
        return f"{self.shape}, {self.tokens} tokens, {self.precision}"


def precision_refusal(precision: str) -> str | None:
    """Why this machine has no such arithmetic, or None."""
    if precision == "bf16":
        return None
    if cpu.is_installed() or not has("transformer_engine"):
        return "FP8 needs Transformer Engine and a CUDA device"
    found, needed = torch.cuda.get_device_capability(), _CAPABILITY[precision]
    if found < needed:
        return "{} needs compute capability {}.{}, and this is {}.{}".format(
            precision, *needed, *found
        )
    return None


def start_megatron(seed: int = 1) -> None:
    """Megatron's process groups and random states for one process."""
    logging.getLogger("megatron").setLevel(logging.WARNING)
    if not dist.is_initialized():
        backend = "gloo" if cpu.is_installed() else "nccl"
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def transformer_config(cell: Cell) -> TransformerConfig:
    """Of the recipe's layer, with Transformer Engine and its fusions where that is installed."""
    arguments = arguments_of(
        cell.shape,
        cell.precision,
        layers=1,
        sequence=cell.sequence,
        on_cpu=cpu.is_installed(),
        words=("--global-batch-size=1", *cell.words),
    )
    arguments = {flag: words for flag, words in arguments.items() if flag not in _OURS}
    with (
        mock.patch.object(sys, "argv", ["layer", *render(arguments)]),
        mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        args = parse_args()
        validate_args(args, {"tokenizer_type": "NullTokenizer"})
        return core_transformer_config_from_args(args)


class Layer:
    """One layer of a variant, its input and the gradient of its output, bfloat16 ``[s, b, h]``.

    Args:
        moved: give the shared matrices some noise, as training would; otherwise they are the
            identity, so that all variants compute and route the same.
    """

    def __init__(self, cell: Cell, variant: Variant, *, moved: bool = True) -> None:
        self.variant = variant
        config = transformer_config(cell)
        self.backend = config.transformer_impl
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        with variant.chosen():
            block = TransformerBlock(
                config,
                _spec(config, variant),
                post_layer_norm=False,
                pre_process=True,
                post_process=False,
            )
        block = block.cuda().bfloat16()  # as Float16Module would, without its casts of the output
        if moved:
            _move_matrices(block)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, ddp, block)
        on_cpu = cpu.is_installed()
        rotary = RotaryEmbedding(config.kv_channels, 1.0, use_cpu_initialization=on_cpu)
        self.angles = rotary(cell.sequence)
        size = cell.sequence, cell.tokens // cell.sequence, config.hidden_size
        generator = torch.Generator().manual_seed(2)
        draw = {"generator": generator, "device": "cpu"}
        self.hidden = torch.randn(size, **draw).to(config.params_dtype).cuda().requires_grad_()
        self.upstream = torch.randn(size, **draw).to(config.params_dtype).cuda()

    def forward(self) -> Tensor:
        """``[s, b, h]``."""
        return self.model(self.hidden, None, rotary_pos_emb=self.angles)

    def run(self, microbatches: int) -> None:
        """Forward and backward passes between two optimizer steps.

        Gradients are not set to zero: what they add up to does not matter here.
        """
        self.model.module.set_is_first_microbatch()  # FP8 weights are made anew
        with self.variant.chosen():
            for _ in range(microbatches):
                self.hidden.grad = None
                self.forward().backward(self.upstream)


def _spec(config: TransformerConfig, variant: Variant) -> Any:
    if variant.preset is not None:
        return kha_layer_spec(config, variant.kha())
    return get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )


@torch.no_grad()
def _move_matrices(block: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for module in block.modules():
        if isinstance(module, KnockingHeads):
            noise = torch.randn(module.weight.shape, generator=generator, device="cpu")
            module.weight += (_NOISE * noise).to(module.weight)
