"""Pre-train on the CPU with Megatron's own ``pretrain()``, from the wheel of megatron-core.

The wheel has no ``pretrain_gpt.py`` and ``pretrain_hybrid.py``. This is a minimal version of both
for data and tensor parallelism, without Knocking-Heads Attention. It builds a HybridModel with
``--hybrid-layer-pattern``, and a GPTModel without. ``docs/tutorials/stock_script.md`` adds KHA.
"""

import os
import sys
import time
from functools import partial

from kha_megatron.mcore import cpu

os.environ.update(cpu.ENVIRONMENT)
cpu.install(despite_cuda=True)  # Megatron on the CPU. On a GPU, omit this line
sys.argv += [word for flag in cpu.MEGATRON_FLAGS.items() for word in flag if word]  # and this one.

from kha_megatron.mcore import patches

patches.use_shipped_dataset_helpers()  # The wheel has no Makefile to compile them.
patches.use_forked_writers()

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain, set_startup_timestamps
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split


def datasets(samples, vp_stage=None):
    """Return training, validation and test data on every rank."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=not args.sft,
        context_parallel_size=args.context_parallel_size,
    )
    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, samples, lambda: True, config).build()


datasets.is_distributed = True


def loss(mask, losses):
    """Return the sum of the losses, the number of tokens, and both for the log."""
    mask = mask.flatten().float()
    total, tokens = torch.sum(losses.flatten().float() * mask), mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(data_iterator, model):
    """Return the losses of one microbatch and the loss function."""
    batch = {name: tensor.cuda() for name, tensor in next(data_iterator).items()}
    # Causal without a mask: right for --sft if each line of the data is one conversation.
    mask, labels = batch.get("attention_mask"), batch["labels"]
    losses = model(batch["tokens"], batch["position_ids"], mask, labels=labels)
    return losses, partial(loss, batch["loss_mask"])


def main():
    """Train with the arguments of the command line."""
    set_startup_timestamps(program_start=time.time(), main_entry=time.time())
    args = parse_and_validate_args()
    config = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    container = pretrain_cfg_container_from_args(args, config(args))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":  # Megatron's checkpoint writers import this file.
    main()
