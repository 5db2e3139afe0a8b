"""What a finished run is measured by: its checkpoint, its closed-form counts, its matrices."""

import io
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.compare.charts import require_matplotlib
from kha_megatron.errors import ConfigError
from kha_megatron.heads.knock import MATRICES
from kha_megatron.model.recorded import kha_of, knock_weights
from kha_megatron.model.run import Run
from kha_megatron.ops.diagnostics import diagnose
from kha_megatron.plan.counts import count, counted, flops

_COLUMNS = 6
_GAP = 2  # pixels between matrices


def cost(run: Run, vocab_size: int | None) -> dict[str, Any]:
    """Parameters and training FLOPs per token, in closed form.

    Args:
        run: with the variant's KHA settings.
        vocab_size: rows of the embedding.

    Returns:
        ``total``, ``active``, ``kha`` parameters, ``flops`` (forward and backward) and
        ``kha_flops`` of one token, ``spared_flops`` of it on paper; or ``uncounted`` with the
        reason. ``unfused``: why fused attention kernels cannot compute it, or None.
    """
    model = replace(run, vocab_size=vocab_size).model
    kernels = {"unfused": model and run.kha.unfused(model.head_sizes)}
    try:
        model = counted(model)
    except ConfigError as error:
        return kernels | {"uncounted": str(error)}
    length = run.arguments["seq_length"]
    counts, work = count(model, run.kha), flops(model, run.kha, length)
    return kernels | {
        "total": counts.total,
        "active": counts.active,
        "kha": counts.kha,
        "flops": 3 * work.forward / length,
        "kha_flops": 3 * work.kha / length,
        "spared_flops": 3 * (work.spared_projections + work.spared_scores) / length,
    }


def padded_vocab(checkpoint: MegatronCheckpoint, default: int | None) -> int | None:
    """Rows of the embedding that was trained."""
    rows = checkpoint.args.get("padded_vocab_size")
    return rows if type(rows) is int else default


def device(run: Run) -> str:
    """What trained, for the report: times of different machines are not to be compared."""
    if run.training.device == "cpu" or not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def matrices(checkpoint: MegatronCheckpoint, folder: Path) -> list[dict[str, Any]]:
    """Diagnostics of every learnt matrix, and one PNG for each kind, with all layers in it.

    Args:
        checkpoint: of any run; the baseline has no matrices.
        folder: where the PNG files go.

    Returns:
        One entry for each projection and matrix: ``projection``, ``variant``, ``matrix``,
        ``picture`` (file name), and ``layers`` with the diagnostics of each.
    """
    kha = kha_of(checkpoint)
    if kha is None or not kha.variants:
        return []
    weights = knock_weights(checkpoint)
    found = []
    for projection, variant in kha.variants.items():
        stacks = {layer: w.float() for (layer, p), w in sorted(weights.items()) if p == projection}
        numbers = {layer: list(diagnose(stack, variant)) for layer, stack in stacks.items()}
        for i, matrix in enumerate(MATRICES[variant]):
            name = f"{projection}_{matrix}.png"
            picture = mosaic([stack[i] for stack in stacks.values()], diverging=matrix == "gate")
            (folder / name).write_bytes(picture)
            layers = [{"layer": n} | asdict(values[i]) for n, values in numbers.items()]
            entry = {"projection": projection, "variant": variant, "matrix": matrix}
            found.append(entry | {"picture": name, "layers": layers})
    return found


def mosaic(layers: list[Tensor], *, diverging: bool) -> bytes:
    """``[D, D]`` matrices side by side, six a row, one pixel a weight, as a PNG.

    Clipped to 0..1 as in the paper's Fig. 3; with ``diverging`` from blue over white (0) to red,
    up to the largest weight. Gaps, and values that are not finite, are transparent.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib import colormaps
    from matplotlib.image import imsave

    stack = torch.stack(layers).float()
    finite = stack.isfinite()
    largest = stack[finite].abs().max().item() if finite.any() else 0.0
    low, high = (-(largest or 1.0), largest or 1.0) if diverging else (0.0, 1.0)
    step, columns = len(layers[0]) + _GAP, min(_COLUMNS, len(layers))
    canvas = torch.full((-(-len(layers) // columns) * step, columns * step), math.nan)
    for i, image in enumerate(stack.masked_fill(~finite, math.nan)):
        y, x = step * (i // columns), step * (i % columns)
        canvas[y : y + len(image), x : x + len(image)] = image
    colours = colormaps["RdBu_r" if diverging else "magma"].with_extremes(bad=(0, 0, 0, 0))
    file = io.BytesIO()
    shown = canvas[:-_GAP, :-_GAP].numpy()
    imsave(file, shown, cmap=colours, vmin=low, vmax=high, format="png")
    return file.getvalue()
