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


def train_tokenizer(text: str, entries: int, *, every_byte: bool = False):
    """Train a byte-level BPE tokenizer.

    With ``every_byte``, the tokenizer has all bytes and an end-of-text token, so that it can encode
    any text. Otherwise it has only the characters of ``text``, which keeps it small.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[END] if every_byte else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if every_byte else [],
        show_progress=False,
    )
    bpe.train_from_iterator([text] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END if every_byte else None)
