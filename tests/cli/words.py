"""A tokenizer of a text's own words, as the tests of commands that read text want it."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"


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
