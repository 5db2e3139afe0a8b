"""``kha-megatron data``: text to what Megatron trains on, and a look at what there is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)

from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, Workers, parse_size
from kha_megatron.cli.running import Commands
from kha_megatron.data import USUAL, check_split
from kha_megatron.errors import DataError

if TYPE_CHECKING:
    from kha_megatron.data import DataReport
    from kha_megatron.data import Progress as Step

app = Commands(name="data", help="Prepare text for training, and look at it.", no_args_is_help=True)


@app.command()
def prepare(
    out: Annotated[Path, typer.Option("--out", help="Folder to make.")],
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Text file, or folder of them; repeat for more. "
            "Without it: the source of this Python's standard library.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=257, max=10**7, help="Size of the BPE vocabulary. Default: 4096."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Use the tokenizer of this Hugging Face folder; train none."),
    ] = None,
    globs: Annotated[
        list[str] | None,
        typer.Option("--glob", help="Names of files to take from folders (default all)."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Names of files and folders to leave out, instead of the default: "
            "__pycache__, .git, .hg, .svn, site-packages, dist-packages."
        ),
    ] = None,
    workers: Workers = None,
    max_file_bytes: Annotated[
        str,
        typer.Option(help="Split longer files at line ends into documents of at most this size."),
    ] = "1MiB",
    tokenizer_sample: Annotated[
        str,
        typer.Option(help="Train the tokenizer on at most this much, taken evenly from all text."),
    ] = "64MiB",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it is a prepared folder.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Train a tokenizer on text files and write Megatron's indexed dataset.

    \b
    Every file becomes one document, or several if it is longer than
    --max-file-bytes. Empty, unreadable and non-UTF-8 files are counted and named.
    A folder's tokenizer/ can be given as --tokenizer for other text.

    Examples:
      kha-megatron data prepare --from src --glob '*.py' --out data/mine
    """
    from kha_megatron.data import prepare as make
    from kha_megatron.data import standard_library

    limit = parse_size("--max-file-bytes", max_file_bytes)
    sample = parse_size("--tokenizer-sample", tokenizer_sample)
    if not sources:
        console.log.print(
            "no --from: taking the source of Python's standard library in "
            f"{escape(str(standard_library()))}"
        )
    with progress() as on_progress:
        report = make(
            sources or None,
            out,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            globs=globs or None,
            exclude=exclude or None,
            workers=workers,
            max_file_bytes=limit,
            tokenizer_sample=sample,
            overwrite=overwrite,
            on_progress=on_progress,
        )
    for line in notes(report):
        console.log.print(f"[yellow]note:[/] {escape(line)}")
    _print(report, out, as_json)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="A folder made by `kha-megatron data prepare`.")],
    as_json: AsJSON = False,
) -> None:
    """Print what a prepared folder holds, after checking that it does hold it.

    Opens the dataset and the tokenizer as training does, and compares them with data.json.

    Examples:
      kha-megatron data show data/mine
    """
    from kha_megatron.data import verify

    _print(verify(folder), folder, as_json)


@contextmanager
def progress() -> Iterator[Callable[["Step"], None]]:
    """A progress display on stderr; gives the ``on_progress`` that ``prepare`` takes."""
    display = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        console=console.log,
    )
    tasks: dict[str, Task] = {}

    def on_progress(step: "Step") -> None:
        if step.stage not in tasks:
            for task in display.tasks:  # stages follow one another: the one before is done
                display.update(task.id, total=task.total or 1, completed=task.total or 1)
            added = display.add_task(step.stage, total=None, detail="")
            tasks[step.stage] = next(task for task in display.tasks if task.id == added)
        task = tasks[step.stage]
        if step.total_bytes:
            rate = step.bytes / max(task.elapsed or 0.0, 1e-3)
            display.update(
                task.id,
                total=step.total_bytes,
                completed=step.bytes,
                detail=f"{step.files:,} files, {step.bytes / 1e6:,.1f}/"
                f"{step.total_bytes / 1e6:,.1f} MB, {rate / 1e6:.1f} MB/s",
            )

    with display:
        yield on_progress


def notes(report: "DataReport") -> list[str]:
    """What a person should know about a report before relying on it; often nothing."""
    lines = []
    for split in USUAL:
        try:
            check_split(split, report.documents, "the corpus")
        except DataError as error:
            lines.append(str(error))
    if report.vocab_size_asked and report.vocab_size < report.vocab_size_asked:
        lines.append(
            f"the vocabulary has {report.vocab_size:,} tokens, not {report.vocab_size_asked:,}: "
            "the text has no more pairs that occur twice"
        )
    if report.altered_documents:
        lines.append(
            f"{report.altered_documents:,} of {report.documents:,} documents do not come back "
            "from the tokenizer as they were: it normalises text or lacks characters"
        )
    return lines


def _sampled(size: int | None) -> str:
    return "" if size is None else f" on {size:,} bytes of the text (--tokenizer-sample)"


def _print(report: "DataReport", folder: Path, as_json: bool) -> None:
    if as_json:
        console.print_json(report.to_dict())
        return
    from kha_megatron.data import CORPUS, SKIPPED, TOKENIZER

    rows = {
        "sources": "\n".join(report.sources),
        "files used": f"{report.files:,} ({report.split_files:,} split), {report.bytes:,} bytes",
        "documents": f"{report.documents:,}",
        "tokens": f"{report.tokens:,} as {report.dtype} "
        f"({report.bytes / report.tokens:.2f} bytes per token)",
        "vocabulary": f"{report.vocab_size:,}, documents end with {report.eod_token} "
        f"({report.eod_id})",
        "tokenizer": report.tokenizer + _sampled(report.tokenizer_sample_bytes),
    }
    for reason, what in SKIPPED.items():
        count, examples = (report.skipped[reason][key] for key in ("count", "examples"))
        if count:
            more = ["..."] if count > len(examples) else []
            rows[f"not used: {reason}"] = "\n".join([f"{count:,}, {what}:", *examples, *more])
    console.print_facts(rows, title=str(folder))
    console.out.print(
        f"train on it: --data-path {escape(str(folder / CORPUS))} "
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {escape(str(folder / TOKENIZER))}"
    )
