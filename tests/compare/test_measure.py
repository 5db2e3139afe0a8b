"""Pictures pixel by pixel, and counts against models that Megatron built."""

import struct
import zlib

import torch

from kha_megatron.compare import parse_variants
from kha_megatron.compare.measure import cost, mosaic
from kha_megatron.config import PRESETS
from kha_megatron.recipes import get_recipe


def pixels(png: bytes) -> tuple[list[list[int]], bytes, bytes]:
    """Palette entries by row, the palette and its transparency; checks every chunk."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(png):
        length, kind = struct.unpack_from(">I4s", png, place)
        data = png[place + 8 : place + 8 + length]
        (check,) = struct.unpack_from(">I", png, place + 8 + length)
        assert check == zlib.crc32(kind + data)
        chunks[kind] = data
        place += 12 + length
    width, height, depth, colour = struct.unpack_from(">IIBB", chunks[b"IHDR"])
    assert (depth, colour) == (8, 3)
    raw = zlib.decompress(chunks[b"IDAT"])
    assert len(raw) == height * (width + 1)
    rows = [list(raw[y * (width + 1) + 1 : (y + 1) * (width + 1)]) for y in range(height)]
    return rows, chunks[b"PLTE"], chunks[b"tRNS"]


def test_weights_are_clipped_and_bad_ones_are_gaps():
    first = torch.tensor([[0.0, 1.0], [0.5, -3.0]])
    second = torch.tensor([[7.0, float("nan")], [float("inf"), 0.25]])
    rows, palette, alpha = pixels(mosaic([first, second], diverging=False))
    gap = [255, 255]
    assert rows == [[0, 254, *gap, 254, 255], [127, 0, *gap, 255, 64]]
    assert (palette[:3], palette[254 * 3 : 255 * 3]) == (bytes((0, 0, 4)), bytes((252, 253, 191)))
    assert alpha == b"\xff" * 255 + b"\0"


def test_gates_are_symmetric_about_zero():
    rows, palette, _ = pixels(mosaic([torch.tensor([[-2.0, 2.0], [0.0, 1.0]])], diverging=True))
    assert rows == [[0, 254], [127, 190]]
    assert palette[127 * 3 : 128 * 3] == bytes((247, 247, 247))
    assert pixels(mosaic([torch.zeros(2, 2)], diverging=True))[0] == [[127, 127]] * 2


def test_layers_go_six_a_row():
    rows, *_ = pixels(mosaic([torch.eye(3)] * 7, diverging=False))
    assert (len(rows), len(rows[0])) == (3 + 2 + 3, 6 * 5 - 2)
    assert rows[5][:6] == [254, 0, 0, 255, 255, 255]


def test_costs_differ_by_what_is_knocked_and_follow_the_overrides():
    """Hand values: 4 layers of D = 32 with 4 query and 2 key/value heads."""
    recipe = get_recipe("quickstart")
    variants = {v.name: v for v in parse_variants(",".join(PRESETS))}
    found = {}
    for name, variant in variants.items():
        whole = variant.of(recipe)
        found[name] = cost(whole, whole.arguments_for(), 512)
    base = found["baseline"]
    assert (base["kha"], base["kha_flops"]) == (0, 0)
    for name, matrices, heads in (
        ("kha_mlp", 3, 2),
        ("kha_gate_v", 1, 2),
        ("kha_linear_v", 1, 2),
        ("kha_linear", 3, (4 + 2 + 2) / 3),
        ("kha_mlp_qkv", 9, (4 + 2 + 2) / 3),
    ):
        own = found[name]
        assert own["kha"] == 4 * matrices * 32**2, name
        assert own["total"] - base["total"] == own["active"] - base["active"] == own["kha"]
        assert own["kha_flops"] == 3 * 4 * matrices * heads * 2 * 32**2, name
        assert own["flops"] - base["flops"] == own["kha_flops"]
    arguments = recipe.arguments_for(overrides=["--num-layers", "2"])
    assert cost(variants["kha_mlp"].of(recipe), arguments, 512)["kha"] == 2 * 3 * 32**2


def test_what_cannot_be_counted_says_why():
    recipe = get_recipe("quickstart")
    arguments = recipe.arguments_for()
    del arguments["--disable-bias-linear"]
    assert "linear layers with biases" in cost(recipe, arguments, 512)["uncounted"]
