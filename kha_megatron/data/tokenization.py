"""A byte-level BPE tokenizer that loses nothing, and the indexed dataset it writes."""

import re
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kha_megatron.data.text_files import TextFile, printable, read_pieces
from kha_megatron.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_DOCUMENT = "<|endoftext|>"

MIN_VOCAB_SIZE = 256 + 1
"""Every byte and the end-of-document token: any text can be written, nothing is merged yet."""

_TRAINER_PIECE = 1 << 16  # the trainer holds 256 pieces at a time: 16 MB, however long the files
_LONGEST = 1 << 7  # characters of a word for the trainer
_LONG_WORD = re.compile(rf"\S{{{_LONGEST}}}")
_CHANGED = "changed while it was being read: run again when nothing writes to it"


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a local Hugging Face folder. No code of the folder is run.

    Raises:
        DataError: no folder, no fast tokenizer in it, or one without an end-of-sequence token.
    """
    from transformers import AutoTokenizer

    name = printable(folder)
    if not folder.is_dir():
        raise DataError(
            f"tokenizer folder {name} does not exist: name one that holds tokenizer.json"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers and tokenizers raise a dozen kinds, many plain
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"tokenizer folder {name} holds nothing that transformers can load "
            f"({reason}): name a folder written by save_pretrained"
        ) from error
    if not tokenizer.is_fast:
        raise DataError(f"the tokenizer of {name} has no fast form: save it with a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer of {name} has no end-of-sequence token to close documents with: "
            "set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def vocabulary_size(tokenizer: "PreTrainedTokenizerFast") -> int:
    """One more than the largest id, or the number of tokens if that is more."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def train_tokenizer(
    texts: Sequence[TextFile],
    vocab_size: int,
    *,
    sample: int,
    advance: Callable[[int], None],
    merging: Callable[[], None],
) -> "tuple[PreTrainedTokenizerFast, int]":
    """Train a byte-level BPE on the text, or on a sample from all parts of it.

    Args:
        vocab_size: 256 bytes, the end-of-document token and the merges together; fewer come out
            when no pair occurs twice any more.
        sample: bytes that are enough; the time and the memory of the training grow with them.
        advance: called with the size of each file whose words were counted, from another thread.
        merging: called, likewise, when the counting is done.

    Returns:
        The tokenizer, and how many bytes it was trained on: less than a piece more than ``sample``.

    Raises:
        DataError: a file can no longer be read as text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    stop = threading.Event()
    share = min(1.0, sample / sum(file.bytes for file in texts))
    passed = taken = 0

    def pieces() -> Iterator[str]:
        nonlocal passed, taken
        for file in texts:
            for piece in _read(file, _TRAINER_PIECE):
                if stop.is_set():
                    raise KeyboardInterrupt
                passed += len(piece)
                if taken < share * passed:
                    taken += len(piece)
                    yield from _short_words(_decoded(file, piece))
            advance(file.bytes)
        merging()

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # A thread of its own: Ctrl-C reaches only the main one, and not while it is in the library.
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(tokenizer.train_from_iterator, pieces(), trainer).result()
        finally:
            stop.set()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_DOCUMENT,
        eos_token=END_OF_DOCUMENT,
        clean_up_tokenization_spaces=False,  # it would eat spaces when decoding
    )
    return fast, taken


def _short_words(text: str) -> list[str]:
    """Text in parts, if it holds words so long that merging their pairs would take hours."""
    if _LONG_WORD.search(text) is None:
        return [text]
    return [text[start : start + _LONGEST] for start in range(0, len(text), _LONGEST)]


@dataclass(frozen=True)
class Written:
    """What :func:`write_corpus` wrote."""

    documents: int
    tokens: int
    """One end-of-document token per document included."""
    altered_documents: int
    """Documents that the tokenizer does not give back as they were."""
    dtype: str
    """NumPy name of the type the tokens are stored in: uint16 or int32."""


def write_corpus(
    prefix: Path,
    texts: Sequence[TextFile],
    tokenizer: "PreTrainedTokenizerFast",
    *,
    workers: int,
    limit: int,
    advance: Callable[[int, int], None],
) -> Written:
    """Write ``prefix.bin`` and ``prefix.idx``, in the order of ``texts``.

    Every piece of at most ``limit`` bytes becomes a document and gets the tokenizer's
    end-of-sequence token, no other special token: the words of one inside the text are encoded as
    the plain text they are. ``workers`` threads tokenize (the library works outside Python's
    lock), with at most twice as many documents under way.

    Args:
        advance: called with the bytes of each document written and 1 if it ended a file, else 0.

    Raises:
        DataError: a file can no longer be read as the text it was.
    """
    datasets = indexed_dataset_module()
    dtype = datasets.DType.optimal_dtype(vocabulary_size(tokenizer))
    encode = _encoder(tokenizer, dtype)
    builder = datasets.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    tokens = altered = 0
    pool = ThreadPoolExecutor(workers)
    try:
        results = _in_order(pool, encode, _documents(texts, limit), 2 * workers)
        for size, ends_file, ids, intact in results:
            builder.add_document(ids, [len(ids)])
            tokens += len(ids)
            altered += not intact
            advance(size, ends_file)
    finally:
        pool.shutdown(cancel_futures=True)
        builder.data_file.close()
    builder.finalize(f"{prefix}.idx")
    documents = len(builder.sequence_lengths)
    return Written(documents, tokens, altered, np.dtype(dtype).name)


def indexed_dataset_module() -> Any:
    """``megatron.core.datasets.indexed_dataset``; its import takes seconds.

    Raises:
        MissingDependencyError: Megatron-Core is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that writing a file does not need
        try:
            from megatron.core.datasets import indexed_dataset
        except ModuleNotFoundError as error:
            if error.name not in ("megatron", "megatron.core"):
                raise
            raise MissingDependencyError("megatron-core", "its data format", "megatron") from error
    return indexed_dataset


def _documents(texts: Sequence[TextFile], limit: int) -> Iterator[tuple[int, int, str]]:
    """Size in bytes, whether it ends its file, and the text, of every document.

    Raises:
        DataError: a file no longer is what it was when it was checked.
    """
    for file in texts:
        size = pieces = 0
        for piece in _read(file, limit):
            size, pieces = size + len(piece), pieces + 1
            yield len(piece), int(pieces == file.pieces), _decoded(file, piece)
        if (size, pieces) != (file.bytes, file.pieces):
            raise DataError(f"{printable(file.path)} {_CHANGED}")


def _read(file: TextFile, limit: int) -> Iterator[bytes]:
    try:
        yield from read_pieces(file.path, limit)
    except OSError as error:
        raise DataError(f"{printable(file.path)} {_CHANGED} ({error})") from error


def _decoded(file: TextFile, piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{printable(file.path)} {_CHANGED} ({error})") from error


def _encoder(tokenizer: "PreTrainedTokenizerFast", dtype: type) -> Callable:
    """A thread-safe function from an item of :func:`_documents` to its size, its end mark, its ids
    ``[n + 1]`` and whether they decode to the same text."""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()  # a folder's tokenizer.json may ask for both
    plain.no_padding()
    plain.encode_special_tokens = True
    end = tokenizer.eos_token_id

    def encode(document: tuple[int, int, str]) -> tuple[int, int, np.ndarray, bool]:
        size, ends_file, text = document
        ids = plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        intact = plain.decode_batch([ids], skip_special_tokens=False)[0] == text
        return size, ends_file, np.array([*ids, end], dtype=dtype), intact

    return encode


def _in_order(
    pool: ThreadPoolExecutor, function: Callable, items: Iterable, most: int
) -> Iterator[Any]:
    """``pool.map``, except that at most ``most`` items are under way or waiting to be taken."""
    waiting: deque = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
