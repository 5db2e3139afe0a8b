"""What attention does with a text, for ``kha-megatron inspect --text``: sinks, massive activations,
gates and the load of heads (arXiv 2505.06708, section 4; arXiv 2410.11842, figure 3)."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from kha_megatron.cli import console
from kha_megatron.cli.generate import check_model_folder, check_tokens, load, parse_device
from kha_megatron.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from kha_megatron.hf.instruments import LayerFigures

TOKENS = 512
"""Of a text, where nothing else is asked for."""


def attention_figures(
    checkpoint: Path, text: str, *, tokens: int | None, tokenizer: Path | None, device: str
) -> "tuple[int, list[LayerFigures]]":
    """Pass the beginning of a text through a model: its number of tokens, and each layer's figures.

    Args:
        checkpoint: of either side; Megatron's is converted into a temporary folder first.
        text: of which at most ``tokens`` tokens pass.
        tokens: 2 or more; None for :data:`TOKENS`, or the model's positions if those are fewer.
        tokenizer: a folder, for a checkpoint of Megatron that names none.
        device: as on the command line.

    Raises:
        CheckpointError: the checkpoint cannot be loaded, converted, or has no tokenizer.
        ConfigError: more tokens than the model has positions, or a device that is not there.
        DataError: less than two tokens.
    """
    target = parse_device(device)
    with _model_folder(checkpoint, tokenizer) as folder:
        check_model_folder(folder)
        from kha_megatron.hf.instruments import measure

        with console.log.status(f"Loading {checkpoint}"):
            words, model = load(folder, target)
        config = model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or 2**20
        ids = words(text, return_tensors="pt").input_ids[:, : tokens or min(TOKENS, limit)]
        if ids.shape[1] < 2:
            raise DataError(f"the text has {ids.shape[1]} tokens: attention needs 2 or more")
        if ids.shape[1] > limit:
            raise ConfigError(
                f"--tokens {tokens} exceed the {limit} positions that the model was trained on: "
                f"use --tokens {limit} or less"
            )
        check_tokens(ids, config.vocab_size)
        with console.log.status(f"Passing {ids.shape[1]} tokens"):
            return ids.shape[1], measure(model, ids.to(target))


@contextmanager
def _model_folder(checkpoint: Path, tokenizer: Path | None) -> Iterator[Path]:
    from kha_megatron.checkpoint.hf_reader import is_hf_folder

    if is_hf_folder(checkpoint):
        if tokenizer is not None:
            raise ConfigError(
                f"--tokenizer {tokenizer} beside {checkpoint}, which has its own: leave it out"
            )
        yield checkpoint
        return
    from kha_megatron.conversion import to_hf

    plan = to_hf.plan(checkpoint, tokenizer=tokenizer)
    if plan.source.companions.origin is None:
        raise CheckpointError(
            f"{checkpoint} names no tokenizer of Hugging Face: add --tokenizer FOLDER"
        )
    with tempfile.TemporaryDirectory(prefix="kha-inspect-") as scratch:
        with console.log.status(f"Converting {checkpoint}"):
            plan.write(Path(scratch) / "model")
        yield Path(scratch) / "model"


def tables(layers: "Sequence[LayerFigures]", tokens: int) -> Iterator[Table]:
    """A row for each layer: of sinks and peaks, and where there are any of gates and heads."""
    columns = ("\nlayer", "sink\nmean", "sink\nmost", "of\nhead", "\npeak", "of\nfeature")
    shown = console.numbers(
        *columns, "at\ntoken", "\nmedian", title=f"attention over {tokens} tokens", names=0
    )
    for x in layers:
        sinks = ["", "", ""]
        if x.sinks:
            most = max(range(len(x.sinks)), key=x.sinks.__getitem__)
            sinks = [f"{sum(x.sinks) / len(x.sinks):.3f}", f"{x.sinks[most]:.3f}", str(most)]
        peak = [f"{x.peak:.3g}", str(x.peak_feature), str(x.peak_token), f"{x.median:.3g}"]
        shown.add_row(str(x.layer), *sinks, *peak)
    yield shown
    gates = list(dict.fromkeys(name for x in layers for name in x.gates))
    routed = any(x.load for x in layers)
    if not gates and not routed:
        return
    heads = [f"{place}\n{kind}" for kind, _, place in (name.partition("/") for name in gates)]
    loads = ["head load\nleast", "head load\nmost"] if routed else []
    shown = console.numbers("\nlayer", *heads, *loads, title="gates and heads", names=0)
    for x in layers:
        cells = [f"{x.gates[name]:.3f}" if name in x.gates else "" for name in gates]
        if routed:
            cells += [f"{min(x.load):.3f}", f"{max(x.load):.3f}"] if x.load else ["", ""]
        shown.add_row(str(x.layer), *cells)
    yield shown
