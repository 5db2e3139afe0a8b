"""Attention statistics of ``kha-megatron inspect --text``: sinks, activations, gates, head load.

See arXiv 2505.06708, section 4, and arXiv 2410.11842, figure 3.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from kha_megatron.cli import console
from kha_megatron.cli.generate import check_tokens, load, parse_device
from kha_megatron.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from kha_megatron.hf.instruments import LayerFigures

TOKENS = 512
"""Tokens measured by default."""


def attention_figures(
    checkpoint: Path, text: str, *, tokens: int | None, tokenizer: Path | None, device: str
) -> "tuple[int, list[LayerFigures]]":
    """Run a model on the beginning of a text and return the token count and figures per layer.

    Args:
        checkpoint: Hugging Face directory, or a Megatron checkpoint, which is converted into a
            temporary directory.
        text: text to tokenize.
        tokens: 2 or more; None for :data:`TOKENS`, or the model's positions if they are fewer.
        tokenizer: tokenizer directory for a Megatron checkpoint that records none.
        device: as on the command line.

    Raises:
        CheckpointError: the checkpoint cannot be loaded or has no tokenizer.
        ConfigError: more tokens than the model has positions, or no such device.
        DataError: fewer than two tokens.
    """
    from kha_megatron.checkpoint.hf_reader import is_hf_folder
    from kha_megatron.conversion import to_hf
    from kha_megatron.hf.instruments import measure

    target = parse_device(device)
    with tempfile.TemporaryDirectory(prefix="kha-inspect-") as scratch:
        folder = checkpoint
        if not is_hf_folder(checkpoint):
            plan = to_hf.plan(checkpoint, tokenizer=tokenizer)
            if plan.source.companions.origin is None:
                raise CheckpointError(
                    f"{checkpoint} records no Hugging Face tokenizer: add --tokenizer DIRECTORY"
                )
            folder = Path(scratch) / "model"
            with console.log.status(f"Converting {checkpoint}"):
                plan.write(folder)
        words, model = load(folder, target)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or TOKENS
    ids = words(text, return_tensors="pt").input_ids[:, : tokens or min(TOKENS, limit)]
    if ids.shape[1] < 2:
        raise DataError(f"expected a text of 2 or more tokens, got {ids.shape[1]}")
    check_tokens(ids, model)
    return ids.shape[1], measure(model, ids.to(target))


def tables(layers: "Sequence[LayerFigures]", tokens: int) -> Iterator[Table]:
    """Yield a table of sinks and peaks, and one of gates and head load if there are any."""
    columns = ("layer", "sink mean", "sink max", "head", "peak", "feature", "token", "median")
    shown = console.numbers(*columns, title=f"attention over {tokens} tokens", names=0)
    for x in layers:
        sinks = ["", "", ""]
        if x.sinks:
            most = max(x.sinks)
            sinks = [f"{sum(x.sinks) / len(x.sinks):.3f}", f"{most:.3f}", str(x.sinks.index(most))]
        peak = [f"{x.peak:.3g}", str(x.peak_feature), str(x.peak_token), f"{x.median:.3g}"]
        shown.add_row(str(x.layer), *sinks, *peak)
    yield shown
    gates = list(dict.fromkeys(name for x in layers for name in x.gates))
    routed = any(x.load for x in layers)
    if not gates and not routed:
        return
    loads = ["least load", "most load"] if routed else []
    heads = [name.replace("/", "\n") for name in gates]
    shown = console.numbers("layer", *heads, *loads, title="gates and heads", names=0)
    for x in layers:
        cells = [f"{x.gates[name]:.3f}" if name in x.gates else "" for name in gates]
        if routed:
            cells += [f"{min(x.load):.3f}", f"{max(x.load):.3f}"] if x.load else ["", ""]
        shown.add_row(str(x.layer), *cells)
    yield shown
