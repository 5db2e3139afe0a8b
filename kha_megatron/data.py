"""Convert text files to a tokenizer and Megatron's indexed dataset, and check such datasets.

A prepared directory contains ``corpus.bin`` and ``corpus.idx`` (Megatron's IndexedDataset),
``tokenizer/`` (Hugging Face format) and ``data.json`` (:class:`DataReport`). Each file becomes one
document, or several if it is long. The result does not depend on the number of workers.
"""

import json
import math
import os
import platform
import re
import stat
import struct
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from itertools import accumulate, batched, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import kha_megatron
from kha_megatron.checkpoint.staging import check_output_folder, staged_folder
from kha_megatron.errors import ConfigError, DataError, MissingDependencyError, in_one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CORPUS, TOKENIZER, REPORT = "corpus", "tokenizer", "data.json"
FORMAT = 1
"""Version of ``data.json``."""

BLENDS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
"""Megatron's arguments that take dataset prefixes."""

PARTS = ("training", "validation", "test")
USUAL = ("969,30,1", "99,1,0")
"""The default of Megatron's ``--split``, and the value in its examples."""

_HEADER = struct.Struct("<9sQBQ")
"""Header of an ``.idx`` file: magic, version, dtype, number of sequences."""

SKIPPED: dict[str, str] = {
    "empty": "no bytes in it",
    "unreadable": "cannot be opened, or not a regular file",
    "not_utf8": "bytes that are not UTF-8 text",
    "other_name": "name matches no --glob",
    "excluded": "name matches --exclude, or the output itself (a directory counts as one)",
    "repeated": "already reached by another path or link",
}
"""Reasons for not using a path: key in ``data.json``, and explanation."""

DEFAULT_VOCAB_SIZE = 4096
DEFAULT_EXCLUDE = ("__pycache__", ".git", ".hg", ".svn", "site-packages", "dist-packages")
DEFAULT_SAMPLE_BYTES = 64 << 20
"""Text that a tokenizer is trained on. More text changes few of the merges."""
DEFAULT_MAX_FILE_BYTES = 1 << 20
"""Longest document. Tokenizing takes about 150 bytes of memory per byte of text and worker."""
END_OF_DOCUMENT = "<|endoftext|>"
_AGAIN = "Make it with `kha-megatron data prepare`."

_EXAMPLES = 5  # paths that a report names for each reason
_BYTES_PER_TOKEN = 64  # read by read_beginning
_TRAINER_PIECE = 1 << 16  # bytes; the trainer holds 256 pieces in memory
_LONGEST = 1 << 7  # characters; the trainer would merge pairs of longer words for hours
_LONG_WORD = re.compile(rf"\S{{{_LONGEST}}}")

Skipped = dict[str, dict[str, Any]]
"""``{reason: {"count": n, "examples": [...]}}`` for each reason in :data:`SKIPPED`."""


def printable(path: Path) -> str:
    """Return ``path`` as text with undecodable bytes escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Content of ``data.json``: what a prepared directory contains and was made from."""

    sources: list[str]
    globs: list[str]
    exclude: list[str]
    max_file_bytes: int
    """Longer files were split into several documents."""
    files: int
    split_files: int
    bytes: int
    """Bytes of UTF-8 text in the files."""
    documents: int
    tokens: int
    """Tokens in the dataset, including one end-of-document token per document."""
    altered_documents: int
    """Documents that the tokenizer does not decode to the original text."""
    dtype: str
    """NumPy dtype of the stored tokens: uint16 or int32."""
    file_bytes: dict[str, int]
    tokenizer: str
    """``"trained"``, or the directory that the tokenizer was taken from."""
    vocab_size: int
    vocab_size_asked: int | None
    """Requested size; None for an existing tokenizer. Short text yields fewer tokens."""
    eod_token: str
    eod_id: int
    skipped: Skipped
    versions: dict[str, str | None]
    tokenizer_sample_bytes: int | None
    """Bytes that the tokenizer was trained on; None for an existing tokenizer."""

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the report of a prepared directory. Raise DataError if it cannot be read."""
        try:
            values = json.loads((folder / REPORT).read_bytes())
            if values.pop("format") != FORMAT:
                raise ValueError(f"expected format {FORMAT}")
            return cls(**values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"Cannot read {folder / REPORT} ({error}). {_AGAIN}") from error


def verify(folder: Path) -> DataReport:
    """Open a prepared directory as training does. Raise DataError if it differs from its report."""
    report, name = DataReport.read(folder), printable(folder)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    datasets = indexed_dataset_module()
    found: dict[str, Any] = {
        "vocab_size": vocabulary_size(tokenizer),
        "eod_id": tokenizer.eos_token_id,
    }
    try:
        found["file_bytes"] = {file: os.path.getsize(folder / file) for file in report.file_bytes}
        if found["file_bytes"] == report.file_bytes:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron warns that this process has no rank
                dataset = datasets.IndexedDataset(str(folder / CORPUS))
            found["documents"] = len(dataset.document_indices) - 1
            found["tokens"] = int(dataset.sequence_lengths.sum(dtype="int64"))
            found["dtype"] = dataset.index.dtype.__name__
    except (OSError, AssertionError, ValueError) as error:
        raise DataError(f"Cannot open the dataset in {name} ({error}). {_AGAIN}") from error
    for what, value in found.items():
        if value != (asked := getattr(report, what)):
            raise DataError(
                f"{name}: expected {what} {asked} as in {REPORT}, got {value}. {_AGAIN}"
            )
    return report


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a local Hugging Face directory without running code from it.

    Raises:
        DataError: It cannot be loaded, is not fast, or has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        if not folder.is_dir():  # transformers would look for the name in its cache of the Hub
            raise FileNotFoundError("no such directory")
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        if not tokenizer.is_fast or tokenizer.eos_token_id is None:
            raise ValueError("it needs a tokenizer.json, and an eos_token in tokenizer_config.json")
    except Exception as error:  # transformers and tokenizers raise a dozen types
        raise DataError(
            f"Cannot load a tokenizer from {printable(folder)} ({in_one_line(error)}). Pass a "
            "directory written by save_pretrained."
        ) from error
    return tokenizer


def vocabulary_size(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return one more than the largest id, and at least the number of tokens."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def indexed_dataset_module() -> Any:
    """Import ``megatron.core.datasets.indexed_dataset``, which takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that are not needed to write a file
        try:
            from megatron.core.datasets import indexed_dataset
        except ModuleNotFoundError as error:
            raise MissingDependencyError("megatron-core", "its data format", "megatron") from error
    return indexed_dataset


class Progress(NamedTuple):
    """Progress of one stage of :func:`prepare`. ``total_bytes`` is 0 if it is unknown."""

    stage: str
    files: int = 0
    bytes: int = 0
    total_bytes: int = 0


class TextFile(NamedTuple):
    """A UTF-8 file, its size, and the number of documents that it is split into."""

    path: Path
    bytes: int
    pieces: int


OnProgress = Callable[[Progress], None]


def prepare(
    sources: Sequence[Path] | None,
    out: Path,
    *,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    globs: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    workers: int | None = None,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    tokenizer_sample: int = DEFAULT_SAMPLE_BYTES,
    overwrite: bool = False,
    on_progress: OnProgress = lambda step: None,
) -> DataReport:
    """Tokenize text files into a directory that Megatron trains from.

    This imports Megatron. On a machine without a GPU, install the CPU runtime first.

    Args:
        sources: Files and directories of UTF-8 text; None for Python's standard library.
        out: Output directory. It appears complete or not at all.
        vocab_size: Size of the byte-level BPE to train. Default: 4096.
        tokenizer: Hugging Face directory of a tokenizer to use instead of training one.
        globs: Patterns of file names to take from directories; None for all.
        exclude: Patterns of files and directories to skip. Default: :data:`DEFAULT_EXCLUDE`.
        workers: Number of threads that tokenize. Default: one per core.
        max_file_bytes: Split longer files at line ends into documents of at most this size.
        tokenizer_sample: Bytes of text to train the tokenizer on, taken evenly from all files.
        overwrite: Replace ``out`` if it is a prepared directory.
        on_progress: Called with the progress of each stage, possibly from another thread.

    Raises:
        ConfigError: An option is out of range, or two exclude each other.
        DataError: A source or the tokenizer cannot be used, or there is no text.
        OutputError: ``out`` is in use or cannot be written.
    """
    if sources is None:
        sources = [standard_library()]
        globs = globs or ("*.py",)
        exclude = (*DEFAULT_EXCLUDE, "test", "tests", "idle_test") if exclude is None else exclude
    globs, exclude = globs or ("*",), DEFAULT_EXCLUDE if exclude is None else exclude
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    sources, out = [Path(source).absolute() for source in sources], Path(out).resolve()
    if vocab_size is not None and tokenizer:
        raise ConfigError(f"Pass either --vocab-size {vocab_size} or --tokenizer, not both.")
    if not 4 <= max_file_bytes <= 1 << 30:  # the longest character; 2**31 tokens overflow
        raise ConfigError(f"Expected --max-file-bytes from 4 to {1 << 30}, got {max_file_bytes}.")
    for source in sources:
        if not os.path.exists(source):
            raise DataError(f"--from {printable(source)} does not exist.")
    held = (f"{CORPUS}.*", TOKENIZER, REPORT)
    check_output_folder(out, overwrite=overwrite, mark=REPORT, only=held)
    fast = load_tokenizer(Path(tokenizer)) if tokenizer else None

    skipped: Skipped = {reason: {"count": 0, "examples": []} for reason in SKIPPED}
    found = find_files(sources, globs=globs, exclude=exclude, output=out, skipped=skipped)
    checking = _meter(on_progress, "checking", sum(found.values()))
    texts = select_text_files(found, max_file_bytes, skipped=skipped, advance=checking)
    names = [printable(source) for source in sources]
    if not texts:
        counts = ", ".join(f"{s['count']} {reason}" for reason, s in skipped.items() if s["count"])
        raise DataError(f"Found no UTF-8 text in {', '.join(names)} ({counts or 'no files'}).")
    size_of_text = sum(file.bytes for file in texts)
    on_progress(Progress("loading Megatron"))
    indexed_dataset_module()  # a broken installation fails before the long work

    with staged_folder(out) as staged:
        sampled = None
        if fast is None:
            fast, sampled = _train_tokenizer(
                texts, vocab_size or DEFAULT_VOCAB_SIZE, tokenizer_sample, size_of_text, on_progress
            )
        fast.save_pretrained(str(staged / TOKENIZER))
        tokenizing = _meter(on_progress, "tokenizing", size_of_text)
        written = _write_corpus(staged / CORPUS, texts, fast, workers, max_file_bytes, tokenizing)
        packages = ("megatron-core", "tokenizers", "transformers")
        report = DataReport(
            sources=names,
            globs=list(globs),
            exclude=list(exclude),
            max_file_bytes=max_file_bytes,
            files=len(texts),
            split_files=sum(file.pieces > 1 for file in texts),
            bytes=size_of_text,
            **written,
            file_bytes={p.name: p.stat().st_size for p in sorted(staged.glob(f"{CORPUS}.*"))},
            tokenizer=printable(Path(tokenizer).absolute()) if tokenizer else "trained",
            tokenizer_sample_bytes=sampled,
            vocab_size=vocabulary_size(fast),
            vocab_size_asked=None if tokenizer else vocab_size or DEFAULT_VOCAB_SIZE,
            eod_token=fast.eos_token,
            eod_id=fast.eos_token_id,
            skipped=skipped,
            versions={
                "python": platform.python_version(),
                "kha-megatron": kha_megatron.__version__,
                **{name: metadata.version(name) for name in packages},
            },
        )
        (staged / REPORT).write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _meter(on_progress: OnProgress, stage: str, total: int) -> Callable:
    """Return a function that adds bytes and files and reports the progress."""
    step = Progress(stage, total_bytes=total)

    def advance(size: int, files: int = 1) -> None:
        nonlocal step
        step = step._replace(files=step.files + files, bytes=step.bytes + size)
        on_progress(step)

    return advance


def _skip(skipped: Skipped, reason: str, path: Path) -> None:
    entry = skipped[reason]
    entry["count"] += 1
    if len(entry["examples"]) < _EXAMPLES:
        entry["examples"].append(printable(path))


def find_files(
    sources: Sequence[Path],
    *,
    globs: Sequence[str],
    exclude: Sequence[str],
    output: Path,
    skipped: Skipped,
) -> dict[Path, int]:
    """Return the regular files under ``sources`` and their sizes in bytes, each real file once.

    Directories are walked in sorted order and links are followed. ``globs`` and ``exclude`` apply
    to names below a source, not to a source itself. ``output`` is not walked.
    """
    files: dict[Path, int] = {}
    written = os.path.realpath(output)
    seen: set[str] = set()
    stack = [(path, True) for path in reversed(sources)]

    def matches(path: Path, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(path.name, pattern) for pattern in patterns)

    while stack:
        path, is_source = stack.pop()
        try:
            status = path.stat()
            is_folder, real = stat.S_ISDIR(status.st_mode), os.path.realpath(path)
            if real == written or (not is_source and matches(path, exclude)):
                _skip(skipped, "excluded", path)
            elif not (is_source or is_folder or matches(path, globs)):
                _skip(skipped, "other_name", path)
            elif real in seen:
                _skip(skipped, "repeated", path)
            elif is_folder:
                seen.add(real)
                stack += [(child, False) for child in sorted(path.iterdir(), reverse=True)]
            elif stat.S_ISREG(status.st_mode):
                seen.add(real)
                files[path] = status.st_size
            else:  # opening a pipe or device could wait forever
                _skip(skipped, "unreadable", path)
        except (OSError, ValueError):
            _skip(skipped, "unreadable", path)
    return files


def select_text_files(
    sizes: dict[Path, int], limit: int, *, skipped: Skipped, advance: Callable[[int], None]
) -> list[TextFile]:
    """Return the files that are UTF-8 text, in the given order, and add the others to ``skipped``.

    Call ``advance`` with the size of each file after reading it.
    """
    files = []
    for path, seen_size in sizes.items():
        try:
            pieces = [len(piece) for piece in read_pieces(path, limit) if piece.decode()]
            if pieces:
                files.append(TextFile(path, sum(pieces), len(pieces)))
            else:
                _skip(skipped, "empty", path)
        except UnicodeDecodeError:
            _skip(skipped, "not_utf8", path)
        except OSError:
            _skip(skipped, "unreadable", path)
        advance(seen_size)
    return files


def read_pieces(path: Path, limit: int) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces of at most ``limit`` (>= 4) bytes.

    A piece ends after the last line end that fits, or between two characters of a longer line.
    """
    with open(path, "rb") as stream:
        rest = b""
        while True:
            block = rest + stream.read(limit + 1 - len(rest))
            if len(block) <= limit:
                if block:
                    yield block
                return
            cut = block.rfind(b"\n", 0, limit) + 1
            if not cut:  # not before a continuation byte of UTF-8
                ends = (at for at in range(limit, limit - 4, -1) if block[at] & 0xC0 != 0x80)
                cut = next(ends, limit)
            yield block[:cut]
            rest = block[cut:]


def read_beginning(file: Path, tokens: int) -> str:
    """Return the beginning of a UTF-8 file, long enough for ``tokens`` tokens."""
    try:
        text = next(read_pieces(file, tokens * _BYTES_PER_TOKEN), b"").decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {file} ({error}). Pass a UTF-8 text file.") from error
    if not text.strip():
        raise DataError(f"{file} contains no text.")
    return text


def _pieces_of(file: TextFile, limit: int) -> Iterator[str]:
    """Yield the text of a file. Raise DataError if it has changed since it was selected."""
    size = 0
    try:
        for piece in read_pieces(file.path, limit):
            size += len(piece)
            yield piece.decode()
        if size != file.bytes:
            raise ValueError(f"{size} bytes instead of {file.bytes}")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{printable(file.path)} changed while it was being read ({error})."
        ) from error


def _train_tokenizer(
    texts: Sequence[TextFile], vocab_size: int, sample: int, total: int, on_progress: OnProgress
) -> "tuple[PreTrainedTokenizerFast, int]":
    """Train a byte-level BPE on about ``sample`` bytes, taken evenly from ``total``.

    Returns:
        The tokenizer, and the number of bytes it was trained on.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    stop = threading.Event()
    advance = _meter(on_progress, "training tokenizer", total)
    passed = taken = 0

    def pieces() -> Iterator[str]:
        nonlocal passed, taken
        for file in texts:
            for text in _pieces_of(file, _TRAINER_PIECE):
                if stop.is_set():
                    raise KeyboardInterrupt
                size = len(text.encode())
                passed += size
                if taken < min(1.0, sample / total) * passed:
                    taken += size
                    step = _LONGEST if _LONG_WORD.search(text) else len(text)
                    yield from (text[i : i + step] for i in range(0, len(text), step))
            advance(file.bytes)
        on_progress(Progress("merging pairs"))

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
    # Ctrl-C reaches only the main thread, and not while it runs the library
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(tokenizer.train_from_iterator, pieces(), trainer).result()
        finally:
            stop.set()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_DOCUMENT,
        eos_token=END_OF_DOCUMENT,
        clean_up_tokenization_spaces=False,  # it would remove spaces when decoding
    )
    return fast, taken


def _write_corpus(
    prefix: Path,
    texts: Sequence[TextFile],
    tokenizer: "PreTrainedTokenizerFast",
    workers: int,
    limit: int,
    advance: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write ``prefix.bin`` and ``prefix.idx``, one document per piece of at most ``limit`` bytes.

    The end-of-sequence token ends each document. Special tokens in the text become plain text.

    Returns:
        ``documents``, ``tokens``, ``altered_documents`` and ``dtype`` of :class:`DataReport`.
    """
    import numpy as np
    from tokenizers import Tokenizer

    datasets = indexed_dataset_module()
    dtype = datasets.DType.optimal_dtype(vocabulary_size(tokenizer))
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()  # a tokenizer.json may ask for truncation and padding
    plain.no_padding()
    plain.encode_special_tokens = True

    def encode(document: tuple[str, bool]) -> tuple[int, bool, Any, bool]:
        text, ends_file = document
        ids = plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        intact = plain.decode_batch([ids], skip_special_tokens=False)[0] == text
        with_end = np.array([*ids, tokenizer.eos_token_id], dtype=dtype)
        return len(text.encode()), ends_file, with_end, intact

    documents = (
        (text, number == file.pieces)
        for file in texts
        for number, text in enumerate(_pieces_of(file, limit), 1)
    )
    builder = datasets.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    tokens = altered = 0
    pool = ThreadPoolExecutor(workers)  # the library releases Python's lock
    try:
        for batch in batched(documents, 4 * workers):
            for size, ends_file, ids, intact in pool.map(encode, batch):
                builder.add_document(ids, [len(ids)])
                tokens += len(ids)
                altered += not intact
                advance(size, int(ends_file))
    finally:
        pool.shutdown(cancel_futures=True)
        builder.data_file.close()
    builder.finalize(f"{prefix}.idx")
    return {
        "documents": len(builder.sequence_lengths),
        "tokens": tokens,
        "altered_documents": altered,
        "dtype": np.dtype(dtype).name,
    }


def check_data(arguments: Mapping[str, Any], *, look: bool = True) -> None:
    """Raise DataError unless the training data of a command line exists and can be split.

    Args:
        arguments: Megatron's arguments by name.
        look: False if the files are on machines that this one cannot see.
    """
    if lacks_vocabulary(arguments):
        raise DataError("--mock-data needs the number of tokens. Add --vocab-size N.")
    if arguments.get("mock_data"):
        return
    blends = {flag: arguments.get(flag[2:].replace("-", "_")) or () for flag in BLENDS}
    listed = arguments.get("data_args_path") or arguments.get("per_split_data_args_path")
    if not any(blends.values()) and not listed:
        raise DataError(
            "No training data given. Add --data-path PREFIX or --mock-data, or pass --data DIR to "
            "`kha-megatron launch`. `kha-megatron data prepare` makes both."
        )
    for flag, words in blends.items() if look else ():
        for prefix in _prefixes(words):
            if "://" in prefix:  # in an object store
                continue
            if not Path(f"{prefix}.bin").is_file():
                raise DataError(f"{flag} {prefix}: {prefix}.bin does not exist. {_AGAIN}")
            documents = count_documents(prefix)
            if flag == "--data-path":
                check_split(arguments.get("split") or USUAL[0], documents, prefix)


def lacks_vocabulary(arguments: Mapping[str, Any]) -> bool:
    """Return whether mock data is used and no argument gives the vocabulary size."""
    null = arguments.get("tokenizer_type") in (None, "NullTokenizer")
    known = arguments.get("vocab_size") or arguments.get("use_checkpoint_args")
    return bool(arguments.get("mock_data") and null and not known)


def _prefixes(words: Sequence[str]) -> Sequence[str]:
    """Return the prefixes of ``prefix ...`` or ``weight prefix weight prefix ...``."""
    try:
        [float(word) for word in words[::2]]
    except ValueError:
        return words
    return words[1::2] if len(words) % 2 == 0 else words


def count_documents(prefix: str | Path) -> int:
    """Return the number of documents of a dataset, from the header of its ``.idx`` file."""
    try:
        with open(f"{prefix}.idx", "rb") as stream:
            return _HEADER.unpack(stream.read(_HEADER.size))[3]
    except (OSError, struct.error) as error:
        raise DataError(f"{prefix}.idx cannot be read as an index ({error}). {_AGAIN}") from error


def documents_of(split: str, documents: int) -> list[int | None]:
    """Return how many of ``documents`` each of :data:`PARTS` gets; None for a part of share 0.

    ``split`` has one to three shares, such as ``969,30,1``.
    """
    shares = [float(share) for share in re.findall(r"\d+\.?\d*|\.\d+", split)]
    if not 0 < len(shares) <= len(PARTS) or not 0 < sum(shares) < math.inf:
        raise ConfigError(f"Expected --split with one to three shares, got {split!r}.")
    shares += [0.0] * (len(PARTS) - len(shares))
    ends = accumulate((share / sum(shares) for share in shares), initial=0.0)
    return [
        round(end * documents) - round(begin * documents) if end > begin else None
        for begin, end in pairwise(ends)
    ]


def check_split(split: str, documents: int, name: str) -> None:
    """Raise DataError if ``split`` leaves a part of the dataset ``name`` without documents."""
    found = documents_of(split, documents)
    if empty := [part for part, count in zip(PARTS, found, strict=True) if count == 0]:
        # one document for every part that had none, from the largest part
        counts = [0 if count is None else max(count, 1) for count in found]
        most = counts.index(max(counts))
        counts[most] -= sum(counts) - sum(count or 0 for count in found)
        works = ",".join(map(str, counts)) if counts[most] > 0 else "1,0,0"
        raise DataError(
            f"--split {split} leaves no document for {' and '.join(empty)} of the {documents} in "
            f"{name}, and Megatron would hang. Use --split {works}."
        )
