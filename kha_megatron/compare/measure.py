"""What a finished run is measured by: its checkpoint, its closed-form counts, its matrices."""

import os
import struct
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.errors import ConfigError
from kha_megatron.heads.knock import MATRICES
from kha_megatron.model.words import Arguments, integer_of
from kha_megatron.ops.diagnostics import diagnose
from kha_megatron.plan.counts import count, flops, sizes_of
from kha_megatron.recipes.recipe import Recipe

_COLUMNS = 6
_GAP = 2  # pixels between matrices
_FIRE = ((0, 0, 4), (59, 15, 112), (140, 41, 129), (222, 73, 104), (254, 159, 109), (252, 253, 191))
_BLUE_RED = ((5, 48, 97), (67, 147, 195), (247, 247, 247), (214, 96, 77), (103, 0, 31))
_EMPTY = 255
"""Palette entry of the gaps, and of values that are not finite: transparent."""


def cost(recipe: Recipe, arguments: Arguments, vocab_size: int) -> dict[str, Any]:
    """Parameters and training FLOPs per token, in closed form.

    Args:
        recipe: with the variant's KHA settings.
        arguments: the whole command line, in which the recipe's sizes may be overridden.
        vocab_size: rows of the embedding.

    Returns:
        ``total``, ``active``, ``kha`` parameters, ``flops`` (forward and backward) and
        ``kha_flops`` of one token; or ``uncounted`` with the reason.
    """
    whole = replace(recipe, megatron=arguments, vocab_size=vocab_size)
    length = integer_of(arguments, "--seq-length", 1)
    try:
        sizes = sizes_of(whole)
    except ConfigError as error:
        return {"uncounted": str(error)}
    counts, work = count(sizes), flops(sizes, length)
    return {
        "total": counts.total,
        "active": counts.active,
        "kha": counts.kha,
        "flops": 3 * work.forward / length,
        "kha_flops": 3 * work.kha / length,
    }


def padded_vocab(checkpoint: MegatronCheckpoint, default: int) -> int:
    """Rows of the embedding that was trained."""
    rows = checkpoint.args.get("padded_vocab_size")
    return rows if type(rows) is int else default


def device(arguments: Arguments) -> str:
    """What trained, for the report: times of different machines are not to be compared."""
    if arguments.get("--device") == ("cpu",) or not torch.cuda.is_available():
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
    kha = checkpoint.kha
    if kha is None or not kha.variants:
        return []
    weights = checkpoint.knock_weights()
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
    up to the largest weight.
    """
    size = len(layers[0])
    columns = min(_COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    shape = (rows * (size + _GAP) - _GAP, columns * (size + _GAP) - _GAP)
    canvas = torch.full(shape, _EMPTY, dtype=torch.uint8)
    stack = torch.stack(layers)
    finite = stack.isfinite()
    if diverging:
        limit = stack[finite].abs().max().item() if finite.any() else 0.0
        stack = stack / (2 * limit or 1.0) + 0.5
    pixels = (stack.clamp(0, 1) * (_EMPTY - 1)).round().nan_to_num(0).to(torch.uint8)
    pixels[~finite] = _EMPTY
    for i, image in enumerate(pixels):
        y, x = (size + _GAP) * (i // columns), (size + _GAP) * (i % columns)
        canvas[y : y + size, x : x + size] = image
    return _png(canvas, _BLUE_RED if diverging else _FIRE)


def _png(pixels: Tensor, anchors: tuple[tuple[int, int, int], ...]) -> bytes:
    """An image of palette entries ``[height, width]``, its colours between ``anchors``."""
    height, width = pixels.shape
    palette = bytearray()
    for i in range(_EMPTY):
        place = i / (_EMPTY - 1) * (len(anchors) - 1)
        left = min(int(place), len(anchors) - 2)
        pairs = zip(anchors[left], anchors[left + 1], strict=True)
        palette += bytes(round(a + (b - a) * (place - left)) for a, b in pairs)
    palette += bytes(3)

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    lines = b"".join(b"\0" + bytes(line.tolist()) for line in pixels)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
        + chunk(b"PLTE", bytes(palette))
        + chunk(b"tRNS", b"\xff" * _EMPTY + b"\0")
        + chunk(b"IDAT", zlib.compress(lines, 9))
        + chunk(b"IEND", b"")
    )
