"""A tokenizer of a text's own words, as the tests of commands that read text want it, and a model
that reads text among other things."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast

END = "<|endoftext|>"
MODEL = {
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
}
"""Sizes of a small one."""


def trained(text: str, entries: int, *, whole: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer.

    Args:
        text: what it is trained on.
        entries: its size at most.
        whole: with every byte and an end of text, so that it reads any text; without, it has the
            text's own characters alone, which makes it small.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[END] if whole else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if whole else [],
        show_progress=False,
    )
    bpe.train_from_iterator([text] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END if whole else None)


def save_with_pictures(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A small model of 300 entries that sees pictures too, of which transformers has no class for
    text alone."""
    config = CONFIG_MAPPING["step3p7"](
        text_config={
            **MODEL,
            "vocab_size": 300,
            "moe_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "share_expert_dim": 9,
            "sliding_window": 8,
            "layer_types": ["full_attention"] * 2,
        },
        vision_config={
            "hidden_size": 12,
            "intermediate_size": 12,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "max_position_embeddings": 4,
        },
        image_token_id=299,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
