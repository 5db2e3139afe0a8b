"""A small tokenizer and the sizes of a small model for tests of commands that read text."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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
