"""From text files to what Megatron trains on: a tokenizer, an indexed dataset, and a report.

A prepared folder holds ``corpus.bin`` and ``corpus.idx`` (Megatron's IndexedDataset, one document
per file, each closed by the end-of-document token), ``tokenizer/`` (Hugging Face form) and
``data.json`` (:class:`DataReport`). What is in it depends on the text and the settings only, not
on the number of workers.
"""

import json
import os
import platform
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import kha_megatron
from kha_megatron.checkpoint.staging import check_output_folder, staged_folder
from kha_megatron.data import tokenization
from kha_megatron.data.report import CORPUS, REPORT, TOKENIZER, DataReport
from kha_megatron.data.text_files import Skips, check_files, find_files, printable
from kha_megatron.errors import ConfigError, DataError

DEFAULT_VOCAB_SIZE = 4096

DEFAULT_EXCLUDE = ("__pycache__", ".git", ".hg", ".svn", "site-packages", "dist-packages")
"""Folders that hold no text of the user's own."""

DEFAULT_SAMPLE_BYTES = 64 << 20
"""Text that a tokenizer is trained on; more changes few of the pairs that it merges."""

DEFAULT_MAX_FILE_BYTES = 1 << 20
"""Longest document. Tokenizing takes about 150 bytes of memory for each byte of text, so a worker
may need 150 MB."""


@dataclass(frozen=True)
class Progress:
    """How far a stage of :func:`prepare` has come. A stage without a total cannot tell."""

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
    workers: int | None = None,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    tokenizer_sample: int = DEFAULT_SAMPLE_BYTES,
    overwrite: bool = False,
    on_progress: OnProgress = lambda step: None,
) -> DataReport:
    """Tokenize text files into a folder that Megatron trains from.

    Imports ``megatron.core``: a process that also wants the CPU runtime installs that first.

    Args:
        sources: files and folders of UTF-8 text; None takes the standard library's own source.
        out: folder to make; it appears complete or not at all.
        vocab_size: of the byte-level BPE to train, its 256 bytes and the end-of-document token
            included; None means :data:`DEFAULT_VOCAB_SIZE`.
        tokenizer: use the tokenizer of this Hugging Face folder instead of training one; its
            end-of-sequence token closes documents.
        globs: names of files to take from folders; None takes all (of the standard library
            ``*.py``).
        exclude: names of files and folders to leave out; None means :data:`DEFAULT_EXCLUDE` (of
            the standard library also its tests, which not every installation has).
        workers: documents tokenized at the same time; None means one per available core.
        max_file_bytes: a longer file is split at line ends into documents of at most this size.
        tokenizer_sample: bytes of text to train the tokenizer on, taken evenly from all of it.
        overwrite: replace ``out`` if it is a prepared folder.
        on_progress: told how far each stage has come, possibly from another thread.

    Raises:
        ConfigError: a setting out of range, or two that exclude each other.
        DataError: a source or the tokenizer cannot be used; there is no text at all; a file
            changed meanwhile.
        OutputError: ``out`` is taken or cannot be written.
    """
    if sources is None:
        sources = [standard_library()]
        globs = globs or ("*.py",)
        exclude = (*DEFAULT_EXCLUDE, "test", "tests", "idle_test") if exclude is None else exclude
    globs, exclude = globs or ("*",), DEFAULT_EXCLUDE if exclude is None else exclude
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    sources, out = [Path(source).absolute() for source in sources], Path(out).resolve()
    _check_settings(vocab_size, tokenizer, workers, max_file_bytes)
    _check_sources(sources, out)
    check_output_folder(out, overwrite=overwrite, mark=REPORT)
    fast = tokenization.load_tokenizer(Path(tokenizer)) if tokenizer else None
    size = vocab_size or DEFAULT_VOCAB_SIZE

    skips = Skips()
    found = find_files(sources, globs=globs, exclude=exclude, output=out, skips=skips)
    checking = _meter(on_progress, "checking", sum(found.values()))
    texts = check_files(found, max_file_bytes, skips=skips, advance=checking)
    names = [printable(source) for source in sources]
    if not texts:
        raise DataError(
            f"no usable text in {', '.join(names)} ({skips}): name files or folders of UTF-8 text"
        )
    size_of_text = sum(file.bytes for file in texts)
    on_progress(Progress("loading Megatron"))
    tokenization.indexed_dataset_module()  # a broken installation shows before the long work

    with staged_folder(out) as staged:
        sampled = None
        if fast is None:
            fast, sampled = tokenization.train_tokenizer(
                texts,
                size,
                sample=tokenizer_sample,
                advance=_meter(on_progress, "training tokenizer", size_of_text),
                merging=lambda: on_progress(Progress("merging pairs")),
            )
        fast.save_pretrained(str(staged / TOKENIZER))
        written = tokenization.write_corpus(
            staged / CORPUS,
            texts,
            fast,
            workers=workers,
            limit=max_file_bytes,
            advance=_meter(on_progress, "tokenizing", size_of_text),
        )
        report = DataReport(
            sources=names,
            globs=list(globs),
            exclude=list(exclude),
            max_file_bytes=max_file_bytes,
            files=len(texts),
            split_files=sum(file.pieces > 1 for file in texts),
            bytes=size_of_text,
            **asdict(written),
            file_bytes={
                path.name: path.stat().st_size for path in sorted(staged.glob(f"{CORPUS}.*"))
            },
            tokenizer=printable(Path(tokenizer).absolute()) if tokenizer else "trained",
            tokenizer_sample_bytes=sampled,
            vocab_size=tokenization.vocabulary_size(fast),
            vocab_size_asked=None if tokenizer else size,
            eod_token=fast.eos_token,
            eod_id=fast.eos_token_id,
            skipped=skips.to_dict(),
            versions=_versions(),
        )
        (staged / REPORT).write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def standard_library() -> Path:
    """The folder of the running Python's standard library: real text on every machine."""
    return Path(sysconfig.get_path("stdlib"))


def _check_settings(
    vocab_size: int | None, tokenizer: Path | None, workers: int, max_file_bytes: int
) -> None:
    smallest = tokenization.MIN_VOCAB_SIZE
    if vocab_size is not None and tokenizer:
        raise ConfigError(
            f"--vocab-size {vocab_size} and --tokenizer {printable(Path(tokenizer))} exclude each "
            "other: a tokenizer that exists has its size; drop one"
        )
    if vocab_size is not None and vocab_size < smallest:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small for 256 bytes and the end-of-document token: "
            f"use {smallest} or more"
        )
    if workers < 1:
        raise ConfigError(f"--workers {workers} tokenize nothing: use 1 or more")
    if not 4 <= max_file_bytes <= 1 << 30:  # 4: the longest character; 2**31 tokens overflow
        raise ConfigError(
            f"--max-file-bytes {max_file_bytes} is out of range: use 4 to {1 << 30} (1GiB)"
        )


def _check_sources(sources: Sequence[Path], out: Path) -> None:
    for source in sources:
        if not os.path.exists(source):
            raise DataError(
                f"--from {printable(source)} does not exist or is out of reach: "
                "name a file or a folder"
            )
        if source.resolve().is_relative_to(out):
            raise DataError(
                f"--out {printable(out)} holds the source {printable(source)}: "
                "choose another folder"
            )


def _meter(on_progress: OnProgress, stage: str, size: int) -> Callable:
    """A function that adds bytes (and files, 1 unless told) and reports the stage's new state."""
    done_bytes = done_files = 0

    def advance(more_bytes: int, more_files: int = 1) -> None:
        nonlocal done_bytes, done_files
        done_bytes, done_files = done_bytes + more_bytes, done_files + more_files
        on_progress(Progress(stage, done_files, done_bytes, size))

    return advance


def _versions() -> dict[str, str | None]:
    packages = ("megatron-core", "tokenizers", "transformers")
    installed = {each.name: each.version for each in metadata.distributions()}
    return {
        "python": platform.python_version(),
        "kha-megatron": kha_megatron.__version__,
        **{name: installed.get(name) for name in packages},
    }
