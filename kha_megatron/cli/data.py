"""``kha-megatron data``: tokenize text files for training, and check the result."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, Workers, parse_size
from kha_megatron.cli.running import Commands
from kha_megatron.data import COMMON_SPLITS, describe_empty_sets

if TYPE_CHECKING:
    from kha_megatron.data import DataReport
    from kha_megatron.data import Progress as Step

data_app = Commands(
    name="data",
    help="Prepare and check training data.",
    no_args_is_help=True,
)


@data_app.command()
def prepare(
    out: Annotated[Path, typer.Option("--out", help="Output directory.")],
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Input file or directory: UTF-8 text, JSON Lines (.jsonl, .ndjson, .json), "
            ".parquet or .arrow. Text and JSON Lines can be compressed (.gz, .zst). Can be "
            "repeated. Default: the source code of Python's standard library.",
        ),
    ] = None,
    json_key: Annotated[
        str, typer.Option(help="Name of the field (JSON Lines) or column with the text.")
    ] = "text",
    vocab_size: Annotated[
        int | None, typer.Option(min=257, max=10**7, help="BPE vocabulary size. Default: 4096.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Hugging Face tokenizer directory. Default: train one.")
    ] = None,
    globs: Annotated[
        list[str] | None,
        typer.Option(
            "--glob",
            help="Only read matching files from directories, e.g. '*.py'. Default: JSON Lines, "
            ".parquet and .arrow files, or all files if there are none of these.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Skip files and directories that match this pattern. "
            "Default: __pycache__, site-packages, dist-packages. Hidden files are always skipped."
        ),
    ] = None,
    workers: Workers = None,
    max_file_size: Annotated[
        str,
        typer.Option(
            "--max-file-bytes",
            help="Maximum document size. Longer documents are split at newlines.",
        ),
    ] = "1MiB",
    sample_size: Annotated[
        str,
        typer.Option("--tokenizer-sample", help="Amount of text to train the tokenizer on."),
    ] = "64MiB",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it holds prepared data.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Train a tokenizer and convert text to Megatron's indexed dataset format.

    Each text file becomes one document, and so does each row of a JSON Lines,
    Parquet or Arrow file (also of directories that datasets wrote with
    save_to_disk). Empty files, rows without text, binary files and metadata
    are skipped and reported. Damaged files are errors. To reuse the tokenizer
    for another dataset, pass --tokenizer OUT/tokenizer.

    Examples:
      kha-megatron data prepare --from src --glob '*.py' --out data/mine
      kha-megatron data prepare --from corpus.jsonl.gz --out data/corpus
    """
    from kha_megatron import data

    max_file_bytes = parse_size("--max-file-bytes", max_file_size)
    sample_bytes = parse_size("--tokenizer-sample", sample_size)
    if not sources:
        console.log.print(
            "Using Python's standard library as text, because --from is not set: "
            f"{escape(str(data.standard_library()))}"
        )
    with progress() as on_progress:
        report = data.prepare(
            sources or None,
            out,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            globs=globs or None,
            exclude=exclude or None,
            json_key=json_key,
            workers=workers,
            max_file_bytes=max_file_bytes,
            tokenizer_sample=sample_bytes,
            overwrite=overwrite,
            on_progress=on_progress,
        )
    for warning in describe_limitations(report):
        console.log.print(f"[yellow]warning:[/] {escape(warning)}")
    _print_report(report, out, as_json)


@data_app.command()
def show(
    folder: Annotated[
        Path, typer.Argument(help="Directory written by `kha-megatron data prepare`.")
    ],
    as_json: AsJSON = False,
) -> None:
    """Check prepared data and print a summary.

    Compares the tokenizer's vocabulary and the hashes of the dataset's files
    with data.json.

    Examples:
      kha-megatron data show data/mine
    """
    from kha_megatron.data import verify

    with progress() as on_progress:
        report = verify(folder, on_progress)
    _print_report(report, folder, as_json)


@contextmanager
def progress() -> Iterator[Callable[["Step"], None]]:
    """Show progress on stderr. Yields the callback for ``kha_megatron.data.prepare``."""
    display = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        console=console.log,
    )
    task_of_stage: dict[str, TaskID] = {}

    def complete_earlier_stages() -> None:
        for task in task_of_stage.values():
            display.update(task, total=1, completed=1)

    def on_progress(step: "Step") -> None:
        if step.stage not in task_of_stage:
            complete_earlier_stages()
            task_of_stage[step.stage] = display.add_task(step.stage, total=None, detail="")
        if step.total_bytes:
            done = f"{step.bytes / 1e6:,.1f}"
            total = f"{step.total_bytes / 1e6:,.1f}"
            display.update(
                task_of_stage[step.stage],
                total=step.total_bytes,
                completed=step.bytes,
                detail=f"{step.files:,} files, {done}/{total} MB",
            )

    with display:
        yield on_progress


def describe_limitations(report: "DataReport") -> list[str]:
    """Return warnings about prepared data, e.g. a smaller vocabulary than requested."""
    warnings = []
    for split in COMMON_SPLITS:
        problem = describe_empty_sets(split, report.documents, dataset="the corpus")
        if problem is not None:
            warnings.append(problem)
    if report.vocab_size_asked and report.vocab_size < report.vocab_size_asked:
        warnings.append(
            f"The vocabulary has {report.vocab_size:,} tokens instead of "
            f"{report.vocab_size_asked:,}, because the text is too short."
        )
    skipped_metadata = report.skipped.get("metadata", {}).get("count")
    if skipped_metadata:
        warnings.append(
            f"Skipped {skipped_metadata:,} files with metadata or text next to JSON Lines, Parquet "
            "or Arrow files. To read text files, pass --glob."
        )
    if report.altered_documents:
        warnings.append(
            f"The tokenizer does not restore {report.altered_documents:,} of "
            f"{report.documents:,} documents. It normalises text or lacks characters."
        )
    return warnings


def _print_report(report: "DataReport", folder: Path, as_json: bool) -> None:
    if as_json:
        console.print_json(report.to_dict())
        return
    from kha_megatron.data import CORPUS, TOKENIZER

    facts = {}
    for name, text in _summarize(report).items():
        # names of files and tokens can contain control characters
        facts[name] = console.replace_control_characters(text)
    console.print_facts(facts, title=str(folder))
    data_path = shlex.quote(str(folder / CORPUS))
    tokenizer_path = shlex.quote(str(folder / TOKENIZER))
    console.out.print(
        f"Train with --data-path {data_path} --tokenizer-type HuggingFaceTokenizer "
        f"--tokenizer-model {tokenizer_path}",
        markup=False,
    )


def _summarize(report: "DataReport") -> dict[str, str]:
    """Return the rows of the summary by name."""
    from kha_megatron.documents.files import SKIPPED

    # older data.json files do not have tokens_after
    tokens_after = report.tokens_after or [report.eod_token]
    document_format = " ".join([*report.tokens_before, "text", *tokens_after])  # <s> text </s>
    bytes_per_token = report.bytes / report.tokens
    tokenizer = report.tokenizer
    if report.tokenizer_sample_bytes:
        tokenizer += f" on {report.tokenizer_sample_bytes:,} bytes of the text"
    facts = {
        "sources": "\n".join(report.sources),
        "files": f"{report.files:,} ({report.split_files:,} split), {report.bytes:,} bytes",
        "documents": f"{report.documents:,}",
        "each document": document_format,
        "tokens": f"{report.tokens:,} as {report.dtype} ({bytes_per_token:.2f} bytes per token)",
        "vocabulary": f"{report.vocab_size:,}, end of document {report.eod_token} "
        f"({report.eod_id})",
        "tokenizer": tokenizer,
    }
    for reason, entry in report.skipped.items():
        count = entry["count"]
        examples = entry["examples"]
        if not count:
            continue
        lines = [f"{count:,}, {SKIPPED.get(reason, reason)}:", *examples]
        if count > len(examples):
            lines.append("...")
        facts[f"skipped: {reason}"] = "\n".join(lines)
    return facts
