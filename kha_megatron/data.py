"""Prepare training data for Megatron: train (or load) a tokenizer and tokenize text.

The output directory looks like this::

    corpus.bin, corpus.idx   # Megatron's IndexedDataset
    tokenizer/               # Hugging Face format
    data.json                # see DataReport

The number of workers does not affect the result.
"""

import hashlib
import json
import math
import os
import platform
import re
import string
import struct
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import kha_megatron
from kha_megatron.checkpoint.integrity import hash_file
from kha_megatron.checkpoint.reading import MAX_JSON_BYTES, open_regular, read_regular
from kha_megatron.checkpoint.staging import check_output_folder, staged_folder
from kha_megatron.documents.files import Skipped, empty_skipped, find_files, select_text_files
from kha_megatron.documents.formats import printable
from kha_megatron.documents.reader import Reader, TextFile
from kha_megatron.errors import ConfigError, DataError, MissingDependencyError, in_one_line
from kha_megatron.lfs import refuse_lfs_pointer
from kha_megatron.mcore.compat import installed_version, version_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CORPUS = "corpus"
TOKENIZER = "tokenizer"
REPORT = "data.json"
_FORMAT = 1
"""Version of the format of ``data.json``."""

BLENDS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
"""Megatron arguments that take dataset prefixes."""

_FILE_FLAGS = ("--data-args-path", "--per-split-data-args-path", "--per-dataset-sequences-path")
"""Megatron arguments that take a file."""

SPLIT_NAMES = ("training", "validation", "test")
"""The sets that ``--split`` has weights for, in this order."""
COMMON_SPLITS = ("969,30,1", "99,1,0")
"""Megatron's default for ``--split``, and the value in its examples."""

_HEADER = struct.Struct("<9sQBQ")
"""Header of an ``.idx`` file (magic number, version, dtype, number of sequences)."""

DEFAULT_VOCAB_SIZE = 4096
DEFAULT_EXCLUDE = ("__pycache__", "site-packages", "dist-packages")
_TESTS_OF_PYTHON = ("test", "tests", "idle_test")
"""Directories of Python's standard library with tests, which are not used as training data."""
DEFAULT_SAMPLE_BYTES = 64 << 20
"""How much text to train a tokenizer on. The merges hardly change with more text."""
DEFAULT_MAX_FILE_BYTES = 1 << 20
"""Maximum document size. Each worker needs about 150 bytes of memory per byte."""
END_OF_DOCUMENT = "<|endoftext|>"
_PREPARE = "Prepare the data with `kha-megatron data prepare`."
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "*tokens*.json", "chat_template*")
"""Glob patterns. A repository of a model can contain Git LFS pointers in place of its weights."""

_TRAINER_LIMIT = 1 << 16
"""Maximum size in bytes of a text for the tokenizer's trainer, which keeps 256 in memory."""
_MAX_WORD_LENGTH = 1 << 7
"""Words with more characters are split. Otherwise, training a tokenizer would take hours."""
_LONG_WORD = re.compile(rf"\S{{{_MAX_WORD_LENGTH}}}")

_MIN_DOCUMENT_BYTES = 4
"""Size of the longest UTF-8 characters."""
_MAX_DOCUMENT_BYTES = 1 << 30
"""A document of 2**31 tokens overflows Megatron's index, and a token can be a single byte."""


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Contents of ``data.json``: statistics, file hashes and how the dataset was made."""

    sources: list[str]
    globs: list[str]
    exclude: list[str]
    json_key: str
    """Name of the JSON Lines field, or Parquet or Arrow column, with the text."""
    max_file_bytes: int
    """Documents above this size were split."""
    files: int
    split_files: int
    """Number of files in which a document was split."""
    bytes: int
    """Size of the text in UTF-8."""
    documents: int
    tokens: int
    """Total number of tokens, including the special tokens of each document."""
    altered_documents: int
    """Number of documents that do not survive a tokenizer round trip (encode and decode)."""
    dtype: str
    """NumPy dtype of the tokens (uint16 or int32)."""
    file_bytes: dict[str, int]
    file_sha256: dict[str, str]
    tokenizer: str
    """``"trained"``, or the path of an existing tokenizer."""
    vocab_size: int
    vocab_size_asked: int | None
    """Requested vocabulary size (None for an existing tokenizer). The actual size can be smaller if
    there is not enough text."""
    vocab_sha256: str
    """Hash of the vocabulary, see :func:`vocabulary_hash`."""
    eod_token: str
    eod_id: int
    tokens_before: list[str] = field(default_factory=list)
    """Special tokens at the start of each document, e.g. BOS."""
    tokens_after: list[str] = field(default_factory=list)
    """Special tokens at the end of each document. The last one is the end-of-document token."""
    skipped: Skipped
    versions: dict[str, str | None]
    tokenizer_sample_bytes: int | None
    """How much text the tokenizer was trained on (None for an existing tokenizer)."""

    def to_dict(self) -> dict[str, Any]:
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Load ``data.json`` from a prepared directory."""
        try:
            content = read_regular(folder / REPORT, MAX_JSON_BYTES)
            values = json.loads(content)
            if values.pop("format") != _FORMAT:
                raise ValueError(f"expected format {_FORMAT}")
            cls._check_types(values)
            return cls(**values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"Could not read {folder / REPORT} ({error}). {_PREPARE}") from error

    @classmethod
    def _check_types(cls, values: Mapping[str, Any]) -> None:
        """Raise TypeError unless all required integers and strings are there."""
        for item in fields(cls):
            expected_type: Any = item.type
            if expected_type not in (int, str):
                continue
            if not isinstance(values.get(item.name), expected_type):
                raise TypeError(f"{item.name} is missing or has the wrong type")


def verify(folder: Path, on_progress: "OnProgress" = lambda step: None) -> DataReport:
    """Check the integrity of a prepared directory.

    Compares the tokenizer's vocabulary and the hashes of the dataset's files with ``data.json``.

    Raises:
        DataError: If there is any mismatch, e.g. because a file is damaged.
    """
    report = DataReport.read(folder)
    name = printable(folder)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    actual_values: dict[str, Any] = {
        "vocab_size": vocabulary_size(tokenizer),
        "vocab_sha256": vocabulary_hash(tokenizer.get_vocab()),
        "eod_id": tokenizer.eos_token_id,
    }
    try:
        actual_values["file_sha256"] = _hash_files(
            folder,
            report.file_bytes,
            on_progress,
        )
    except OSError as error:
        raise DataError(f"Could not open the dataset in {name} ({error}). {_PREPARE}") from error
    for field_name, actual in actual_values.items():
        expected = getattr(report, field_name)
        if actual != expected:
            raise DataError(
                f"{name} does not match its {REPORT}: {field_name} should be {expected}, but is "
                f"{actual}. {_PREPARE}"
            )
    return report


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """Load a fast tokenizer from a local directory (never from the Hub, and no remote code).

    Raises:
        DataError: If this fails, or if the tokenizer is slow or has no EOS token.
    """
    from transformers import AutoTokenizer

    for pattern in _TOKENIZER_FILES:
        for file in sorted(folder.glob(pattern)):
            refuse_lfs_pointer(file, DataError)
    try:
        if not folder.is_dir():  # transformers would look for the name in its cache of the Hub
            raise FileNotFoundError("no such directory")
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder),
            trust_remote_code=False,
            local_files_only=True,
        )
        if not tokenizer.is_fast or tokenizer.eos_token_id is None:
            raise ValueError("it needs a tokenizer.json, and an eos_token in tokenizer_config.json")
    except Exception as error:  # transformers and tokenizers raise a dozen types
        raise DataError(
            f"Could not load a tokenizer from {printable(folder)} ({in_one_line(error)}). Pass a "
            "directory written by save_pretrained."
        ) from error
    return tokenizer


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Return the IDs of the special tokens that a tokenizer adds before and after each text."""
    encoded = tokenizer(string.ascii_letters, return_special_tokens_mask=True)
    token_ids = encoded["input_ids"]
    positions_of_text = []
    for position, is_special in enumerate(encoded["special_tokens_mask"]):
        if not is_special:
            positions_of_text.append(position)
    if not positions_of_text:
        raise DataError("The tokenizer has no tokens for ASCII letters. Pass another one.")
    start = positions_of_text[0]
    end = positions_of_text[-1] + 1
    return token_ids[:start], token_ids[end:]


def vocabulary_size(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return the largest token id plus one, or ``len(tokenizer)`` if that is larger."""
    largest_id = max(tokenizer.get_vocab().values())
    return max(len(tokenizer), largest_id + 1)


def vocabulary_hash(vocabulary: Mapping[str, int]) -> str:
    """Hash a vocabulary (``{token: id}``), regardless of the order of its entries."""
    entries = json.dumps(sorted(vocabulary.items()))
    return hashlib.sha256(entries.encode()).hexdigest()


def _hash_files(
    folder: Path,
    sizes: Mapping[str, int],
    on_progress: "OnProgress",
) -> dict[str, str]:
    total_size = sum(sizes.values())
    advance = _track_progress(on_progress, "hashing", total_size)
    digests = {}
    for name, size in sizes.items():
        digests[name] = hash_file(folder / name)
        advance(size)
    return digests


def indexed_dataset_module() -> Any:
    """Import Megatron's ``indexed_dataset`` lazily, since this takes several seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that are not needed to write a file
        try:
            from megatron.core.datasets import indexed_dataset
        except ModuleNotFoundError as error:
            raise MissingDependencyError("megatron-core", "its data format", "megatron") from error
    return indexed_dataset


class Progress(NamedTuple):
    """Progress of one stage. ``total_bytes`` is 0 if we do not know the total."""

    stage: str
    files: int = 0
    bytes: int = 0
    total_bytes: int = 0


OnProgress = Callable[[Progress], None]


def prepare(
    sources: Sequence[Path] | None,
    out: Path,
    *,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    globs: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    json_key: str = "text",
    workers: int | None = None,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    tokenizer_sample: int = DEFAULT_SAMPLE_BYTES,
    overwrite: bool = False,
    on_progress: OnProgress = lambda step: None,
) -> DataReport:
    """Tokenize text and save it as a Megatron dataset.

    Example::

        prepare([Path("books/")], Path("data"), vocab_size=32000, globs=["*.txt"])

    Args:
        sources: Files or directories (text, JSON Lines, Parquet or Arrow, see
            :mod:`kha_megatron.documents`). If None, use the source code of Python's standard
            library.
        out: Output directory. It only appears once everything has been written.
        vocab_size: Vocabulary size of the new tokenizer, a byte-level BPE (default: 4096).
        tokenizer: Directory of an existing tokenizer. If given, no tokenizer is trained.
        globs: Which files in a directory to use. By default, use the JSON Lines, Parquet and Arrow
            files, or all files if there are none of these. Hidden files are always ignored.
        exclude: Names of files and directories to ignore (default: :data:`DEFAULT_EXCLUDE`).
        json_key: Name of the JSON Lines field, or Parquet or Arrow column, with the text.
        workers: Number of threads for tokenization (default: one per core).
        max_file_bytes: Longer documents are split, preferably at newlines.
        tokenizer_sample: How many bytes of text to train the tokenizer on. They are spread evenly
            over all sources.
        overwrite: Whether ``out`` may already contain a dataset.
        on_progress: Called with a :class:`Progress`, possibly from another thread.

    Raises:
        ConfigError: For invalid or conflicting options.
        DataError: If there is no text, or if a source or the tokenizer cannot be read.
        OutputError: If we cannot write to ``out``.
    """
    if sources is None:
        sources = [standard_library()]
        globs = globs or ("*.py",)
        if exclude is None:
            exclude = (*DEFAULT_EXCLUDE, *_TESTS_OF_PYTHON)
    if exclude is None:
        exclude = DEFAULT_EXCLUDE
    if workers is None:
        workers = len(os.sched_getaffinity(0))
    sources = [Path(source).absolute() for source in sources]
    out = Path(os.path.realpath(out))
    if vocab_size is not None and tokenizer:
        raise ConfigError("You passed both --vocab-size and --tokenizer; use only one of them.")
    if not _MIN_DOCUMENT_BYTES <= max_file_bytes <= _MAX_DOCUMENT_BYTES:
        raise ConfigError(
            f"--max-file-bytes must be from {_MIN_DOCUMENT_BYTES} to {_MAX_DOCUMENT_BYTES}, got "
            f"{max_file_bytes}."
        )
    for source in sources:
        if not os.path.exists(source):
            raise DataError(f"--from {printable(source)}: no such file or directory.")
    output_files = (f"{CORPUS}.*", TOKENIZER, REPORT)
    check_output_folder(out, overwrite=overwrite, mark=REPORT, only=output_files)
    used_tokenizer = None
    tokenizer_name = "trained"
    if tokenizer:
        used_tokenizer = load_tokenizer(Path(tokenizer))
        tokenizer_name = printable(Path(tokenizer).absolute())

    skipped = empty_skipped()
    sizes = find_files(
        sources,
        globs=globs,
        exclude=exclude,
        output=out,
        skipped=skipped,
    )
    reader = Reader(max_file_bytes, json_key)
    text_files = select_text_files(
        sizes,
        reader,
        sources=sources,
        skipped=skipped,
        advance=_track_progress(on_progress, "checking", sum(sizes.values())),
    )
    source_names = [printable(source) for source in sources]
    if not text_files:
        reasons = _count_reasons(skipped)
        raise DataError(f"No UTF-8 text found in {', '.join(source_names)} ({reasons}).")
    text_bytes = sum(file.bytes for file in text_files)
    on_progress(Progress("loading Megatron"))
    indexed_dataset_module()  # so that a broken installation fails early

    with staged_folder(out) as staged:
        requested_size = None
        sample_bytes = None
        if used_tokenizer is None:
            requested_size = vocab_size or DEFAULT_VOCAB_SIZE
            sample = _TokenizerSample(text_files, json_key, tokenizer_sample, on_progress)
            used_tokenizer = _train_tokenizer(sample, requested_size)
            sample_bytes = sample.bytes
        used_tokenizer.save_pretrained(str(staged / TOKENIZER))
        corpus_fields = _write_corpus(
            staged / CORPUS,
            _read_documents(text_files, reader),
            used_tokenizer,
            workers,
            advance=_track_progress(on_progress, "tokenizing", text_bytes),
        )
        file_bytes = {}
        for file in sorted(staged.glob(f"{CORPUS}.*")):
            file_bytes[file.name] = file.stat().st_size
        report = DataReport(
            sources=source_names,
            globs=list(globs or ("*",)),
            exclude=list(exclude),
            json_key=json_key,
            max_file_bytes=max_file_bytes,
            files=len(text_files),
            split_files=sum(file.is_split for file in text_files),
            bytes=text_bytes,
            **corpus_fields,
            file_bytes=file_bytes,
            file_sha256=_hash_files(staged, file_bytes, on_progress),
            tokenizer=tokenizer_name,
            tokenizer_sample_bytes=sample_bytes,
            vocab_size=vocabulary_size(used_tokenizer),
            vocab_size_asked=requested_size,
            vocab_sha256=vocabulary_hash(used_tokenizer.get_vocab()),
            eod_token=used_tokenizer.eos_token,
            eod_id=used_tokenizer.eos_token_id,
            skipped=skipped,
            versions=_installed_versions(),
        )
        content = json.dumps(report.to_dict(), indent=2)
        report_file = staged / REPORT
        report_file.write_text(f"{content}\n")
    return report


def _installed_versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "kha-megatron": kha_megatron.__version__,
        "megatron-core": installed_version(),
        "tokenizers": version_of("tokenizers"),
        "transformers": version_of("transformers"),
    }


def _count_reasons(skipped: Skipped) -> str:
    """List why files were skipped, e.g. ``3 empty, 1 hidden``."""
    counts = []
    for reason, skipped_files in skipped.items():
        if skipped_files["count"]:
            counts.append(f"{skipped_files['count']} {reason}")
    return ", ".join(counts) or "no files"


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _track_progress(on_progress: OnProgress, stage: str, total_bytes: int) -> Callable[..., None]:
    """Return an ``advance(bytes, files=1)`` callback that reports the progress of a stage."""
    step = Progress(stage, total_bytes=total_bytes)

    def advance(size: int, files: int = 1) -> None:
        nonlocal step
        step = step._replace(files=step.files + files, bytes=step.bytes + size)
        on_progress(step)

    return advance


class _TokenizerSample:
    """Yields a sample of text to train a tokenizer on, which is spread evenly over all files.

    Args:
        max_bytes: Approximate size of the sample.
    """

    def __init__(
        self,
        files: Sequence[TextFile],
        json_key: str,
        max_bytes: int,
        on_progress: OnProgress,
    ) -> None:
        total_bytes = sum(file.bytes for file in files)
        self.files = files
        self.reader = Reader(_TRAINER_LIMIT, json_key)
        self.fraction = min(1.0, max_bytes / total_bytes)
        self.on_progress = on_progress
        self.advance = _track_progress(on_progress, "training tokenizer", total_bytes)
        self.bytes = 0
        """Size of the text that has been sampled so far."""
        self.stop = threading.Event()
        """Set this to interrupt the iteration from another thread."""

    def __iter__(self) -> Iterator[str]:
        bytes_read = 0
        for file in self.files:
            for text in self.reader.read(file):
                if self.stop.is_set():
                    raise KeyboardInterrupt
                size = len(text.encode())
                bytes_read += size
                if self.bytes < self.fraction * bytes_read:
                    self.bytes += size
                    yield from _split_long_words(text)
            self.advance(file.bytes)
        self.on_progress(Progress("merging pairs"))


def _split_long_words(text: str) -> Iterator[str]:
    """Yield a text unchanged, or in pieces if it contains a very long word."""
    if not _LONG_WORD.search(text):
        yield text
        return
    for start in range(0, len(text), _MAX_WORD_LENGTH):
        yield text[start : start + _MAX_WORD_LENGTH]


def _train_tokenizer(sample: _TokenizerSample, vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
    # run in a thread, because the main thread cannot handle Ctrl-C inside the library
    with ThreadPoolExecutor(1) as pool:
        try:
            training = pool.submit(tokenizer.train_from_iterator, iter(sample), trainer)
            training.result()
        finally:
            sample.stop.set()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_DOCUMENT,
        eos_token=END_OF_DOCUMENT,
        clean_up_tokenization_spaces=False,  # it would remove spaces when decoding
    )


class _Document(NamedTuple):
    text: str
    ends_file: bool
    """Whether this is the last document of its file."""


class _EncodedDocument(NamedTuple):
    token_ids: Any
    is_altered: bool
    """Whether the tokens decode to another text."""
    bytes: int
    ends_file: bool


def _read_documents(files: Sequence[TextFile], reader: Reader) -> Iterator[_Document]:
    for file in files:
        for number, text in enumerate(reader.read(file), 1):
            is_last = number == file.documents
            yield _Document(text, ends_file=is_last)


class _Encoder:
    """Tokenizes documents.

    Each document gets the special tokens that the tokenizer adds (e.g. BOS), like in Megatron's
    ``preprocess_data.py``, and ends with an EOS token. If the text itself contains special tokens
    (e.g. ``<|endoftext|>``), they are tokenized like any other text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", dtype: Any) -> None:
        from tokenizers import Tokenizer

        self.dtype = dtype
        self.tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.tokenizer.no_truncation()  # a tokenizer.json may ask for truncation and padding
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        self.first_ids, self.last_ids = special_tokens(tokenizer)
        if self.last_ids[-1:] != [tokenizer.eos_token_id]:
            self.last_ids.append(tokenizer.eos_token_id)

    def encode(self, document: _Document) -> _EncodedDocument:
        """Tokenize a document. Can be called from several threads."""
        import numpy as np

        (encoded,) = self.tokenizer.encode_batch_fast([document.text], add_special_tokens=False)
        (decoded,) = self.tokenizer.decode_batch([encoded.ids], skip_special_tokens=False)
        token_ids = [*self.first_ids, *encoded.ids, *self.last_ids]
        return _EncodedDocument(
            token_ids=np.array(token_ids, dtype=self.dtype),
            is_altered=decoded != document.text,
            bytes=len(document.text.encode()),
            ends_file=document.ends_file,
        )


def _write_corpus(
    prefix: Path,
    documents: Iterator[_Document],
    tokenizer: "PreTrainedTokenizerFast",
    workers: int,
    *,
    advance: Callable[[int, int], None],
) -> dict[str, Any]:
    """Tokenize all documents and write ``{prefix}.bin`` and ``{prefix}.idx``.

    Returns:
        Some of the fields of :class:`DataReport`.
    """
    import numpy as np

    datasets = indexed_dataset_module()
    dtype = datasets.DType.optimal_dtype(vocabulary_size(tokenizer))
    encoder = _Encoder(tokenizer, dtype)
    builder = datasets.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    tokens = 0
    altered_documents = 0
    pool = ThreadPoolExecutor(workers)  # the library releases Python's lock
    try:
        for batch in batched(documents, 4 * workers):
            for document in pool.map(encoder.encode, batch):
                length = len(document.token_ids)
                builder.add_document(document.token_ids, [length])
                tokens += length
                altered_documents += document.is_altered
                finished_files = int(document.ends_file)
                advance(document.bytes, finished_files)
    finally:
        pool.shutdown(cancel_futures=True)
        builder.data_file.close()
    builder.finalize(f"{prefix}.idx")
    return {
        "documents": len(builder.sequence_lengths),
        "tokens": tokens,
        "altered_documents": altered_documents,
        "dtype": np.dtype(dtype).name,
        "tokens_before": tokenizer.convert_ids_to_tokens(encoder.first_ids),
        "tokens_after": tokenizer.convert_ids_to_tokens(encoder.last_ids),
    }


def lacks_data(arguments: Mapping[str, Any]) -> bool:
    """Return whether Megatron's arguments name no training data."""
    names = ["mock_data", "data_args_path", "per_split_data_args_path"]
    names += [_argument_name(flag) for flag in BLENDS]
    return not any(arguments.get(name) for name in names)


def _argument_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def check_data(arguments: Mapping[str, Any], *, read_files: bool = True) -> None:
    """Check the data arguments before training starts.

    Args:
        arguments: Megatron's arguments by name.
        read_files: Set to False if the files are not accessible from this machine.

    Raises:
        DataError: If files are missing, a split is empty or the tokenizer does not match.
    """
    if lacks_vocabulary(arguments):
        raise DataError("--mock-data requires --vocab-size.")
    if not arguments.get("mock_data"):
        _check_datasets(arguments, read_files=read_files)
    if read_files:
        _check_paths(arguments)


def _check_datasets(arguments: Mapping[str, Any], *, read_files: bool) -> None:
    if lacks_data(arguments):
        raise DataError(
            "No training data given. Pass --data-path PREFIX or --mock-data, or --data DIR to "
            "`kha-megatron launch`. Prepare the data with `kha-megatron data prepare`."
        )
    if not read_files:
        return
    split = arguments.get("split") or COMMON_SPLITS[0]
    for flag in BLENDS:
        blend = arguments.get(_argument_name(flag)) or ()
        for prefix in _prefixes(blend):
            if "://" in prefix:  # in an object store
                continue
            documents = count_documents(prefix)
            _check_tokenizer(Path(prefix), arguments)
            if flag == "--data-path":
                check_split(split, documents, prefix)


def _check_paths(arguments: Mapping[str, Any]) -> None:
    """Raise DataError if a file does not exist that an argument names."""
    for flag in _FILE_FLAGS:
        path = arguments.get(_argument_name(flag))
        if path and "://" not in path and not Path(path).is_file():
            raise DataError(f"{flag} {path} is not a file. Pass an existing file.")
    tokenizer = Path(arguments.get("tokenizer_model") or "")
    # a relative path can also be the name of a model on the Hugging Face Hub
    if tokenizer.is_absolute() and not tokenizer.exists():
        raise DataError(
            f"--tokenizer-model {tokenizer} does not exist. Pass the directory or file of a "
            "tokenizer, or its name on the Hugging Face Hub."
        )


def _check_tokenizer(prefix: Path, arguments: Mapping[str, Any]) -> None:
    """Raise DataError if a dataset was tokenized with another tokenizer (extra tokens are fine)."""
    folder = prefix.parent
    has_report = (folder / REPORT).is_file()
    if prefix.name != CORPUS or not has_report:
        return  # written by other tools, which do not record their tokenizer
    report = DataReport.read(folder)
    description = f"{prefix} was tokenized with a vocabulary of {report.vocab_size} tokens"
    tokenizer_type = arguments.get("tokenizer_type")
    tokenizer_model = arguments.get("tokenizer_model")
    if tokenizer_type == "NullTokenizer":
        size = arguments.get("vocab_size") or 0
        if size < report.vocab_size:
            raise DataError(
                f"{description}. Pass --vocab-size {report.vocab_size} instead of {size}."
            )
    elif tokenizer_type == "HuggingFaceTokenizer" and tokenizer_model:
        _check_vocabulary(folder / TOKENIZER, tokenizer_model, description)


def _check_vocabulary(data_tokenizer: Path, tokenizer_model: str, description: str) -> None:
    """Raise DataError unless a model's tokenizer contains all tokens of the data's tokenizer."""
    model_tokenizer = Path(tokenizer_model)
    is_same = model_tokenizer.resolve() == data_tokenizer.resolve()
    if is_same or not model_tokenizer.is_dir():
        return
    model_vocabulary = load_tokenizer(model_tokenizer).get_vocab()
    data_vocabulary = load_tokenizer(data_tokenizer).get_vocab()
    if not data_vocabulary.items() <= model_vocabulary.items():
        raise DataError(
            f"{description}, but the {len(model_vocabulary)} tokens of --tokenizer-model "
            f"{tokenizer_model} have other ids. Pass --tokenizer-model {data_tokenizer}, or "
            f"prepare the data again with --tokenizer {tokenizer_model}."
        )


def check_same_tokenizer(
    path: Path,
    saved: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> None:
    """Raise DataError if a run is resumed with another tokenizer (extra tokens are fine)."""
    saved_tokenizer = _tokenizer_directory(saved)
    tokenizer = _tokenizer_directory(arguments)
    if saved_tokenizer is None or tokenizer is None or saved_tokenizer.samefile(tokenizer):
        return
    saved_vocabulary = load_tokenizer(saved_tokenizer).get_vocab()
    vocabulary = load_tokenizer(tokenizer).get_vocab()
    if not saved_vocabulary.items() <= vocabulary.items():
        raise DataError(
            f"{path} was trained with the tokenizer in {saved_tokenizer}, but the tokens in "
            f"{tokenizer} have other ids. Prepare the data with the tokenizer of that run."
        )


def _tokenizer_directory(arguments: Mapping[str, Any]) -> Path | None:
    """Return the directory in ``--tokenizer-model``, if it contains a fast tokenizer."""
    directory = arguments.get("tokenizer_model")
    if not isinstance(directory, str):
        return None
    # unlike Path.is_file(), this accepts any text
    if not os.path.isfile(os.path.join(directory, "tokenizer.json")):
        return None
    return Path(directory)


def lacks_vocabulary(arguments: Mapping[str, Any]) -> bool:
    """Return whether ``--mock-data`` is used without anything that sets a vocabulary size."""
    if not arguments.get("mock_data"):
        return False
    if arguments.get("tokenizer_type") not in (None, "NullTokenizer"):
        return False
    has_size = arguments.get("vocab_size") or arguments.get("use_checkpoint_args")
    return not has_size


def _prefixes(blend: Sequence[str]) -> Sequence[str]:
    """Return only the prefixes of a blend such as ``0.3 data/code 0.7 data/web``."""
    if len(blend) % 2:
        return blend
    try:
        for weight in blend[::2]:
            float(weight)
    except ValueError:
        return blend
    return blend[1::2]


def list_data_files(arguments: Mapping[str, Any]) -> list[Path]:
    """Return the indices, token files and tokenizer that a run reads from this machine."""
    paths = []
    for flag in BLENDS:
        blend = arguments.get(_argument_name(flag)) or ()
        for prefix in _prefixes(blend):
            paths += [Path(f"{prefix}.idx"), Path(f"{prefix}.bin")]
    tokenizer = arguments.get("tokenizer_model")
    if tokenizer:
        paths += [Path(tokenizer), Path(tokenizer, "tokenizer.json")]
    return [path for path in paths if path.is_file()]


def count_documents(prefix: str | Path) -> int:
    try:
        with open(f"{prefix}.idx", "rb", opener=open_regular) as stream:
            header = stream.read(_HEADER.size)
        _, _, _, documents = _HEADER.unpack(header)
        return documents
    except (OSError, struct.error) as error:
        raise DataError(f"Could not read the index {prefix}.idx ({error}). {_PREPARE}") from error


def documents_of(split: str, documents: int) -> list[int | None]:
    """Return the number of documents in the training, validation and test sets.

    >>> documents_of("90,10", 50)
    [45, 5, None]

    The result is None for sets with weight 0.
    """
    numbers = re.findall(r"\d+\.?\d*|\.\d+", split)
    weights = [float(number) for number in numbers]
    missing = len(SPLIT_NAMES) - len(weights)
    total = sum(weights)
    if missing < 0 or not 0 < total < math.inf:
        raise ConfigError(f"--split must consist of one to three weights, got {split!r}.")
    weights += [0.0] * missing
    counts: list[int | None] = []
    start = 0.0
    for weight in weights:
        end = start + weight / total
        count = round(end * documents) - round(start * documents)
        if end > start:
            counts.append(count)
        else:
            counts.append(None)
        start = end
    return counts


def check_split(split: str, documents: int, dataset: str) -> None:
    """Raise DataError if a set in ``split`` would be empty despite its positive weight."""
    problem = describe_empty_sets(split, documents, dataset)
    if problem is not None:
        raise DataError(problem)


def describe_empty_sets(split: str, documents: int, dataset: str) -> str | None:
    """Return the error message of :func:`check_split`, or None if no set would be empty.

    Args:
        documents: Number of documents in the dataset.
        dataset: Name of the dataset for the message.
    """
    counts = documents_of(split, documents)
    empty_sets = []
    for name, count in zip(SPLIT_NAMES, counts, strict=True):
        if count == 0:
            empty_sets.append(name)
    if not empty_sets:
        return None
    return (
        f"--split {split} leaves no document for {' and '.join(empty_sets)} (number of documents "
        f"in {dataset}: {documents}), and Megatron would hang. Use larger weights for it, or "
        "--split 1,0,0 to use all documents for training."
    )
