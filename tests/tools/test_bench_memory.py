"""``tools/bench.py memory``: what it counts, and what a knocked layer keeps."""

import gc
import json

import pytest
import torch

from kha_megatron.heads.knock import SAVED
from tests.tools.conftest import run_tool

TOKENS, SEQUENCE = 12, 6
VALUES = TOKENS * 2 * 64 * 2  # bytes of the values of shape tiny: two heads of 64, bfloat16


def test_extra_bytes_are_those_that_the_documentation_names(interpreting_rank, tmp_path):
    file = tmp_path / "memory.json"
    sizes = ["--device", "cpu", "--tokens", str(TOKENS), "--sequence", str(SEQUENCE)]
    code, output = interpreting_rank(run_tool, "memory", [*sizes, "--json", str(file)])
    assert code == 0
    (result,) = json.loads(file.read_text())["results"]
    assert result["qkv_bytes"] == 4 * VALUES  # four query heads, two key and two value heads
    rows = result["bytes"]
    assert rows["baseline"]["kept"] == rows["stock"]["kept"] >= rows["baseline/kernels"]["kept"]
    for variant in ("mlp", "gate"):
        # plain torch: all that `SAVED` counts but the input, which lies in the QKV buffer
        assert rows[variant]["outputs"] == VALUES
        assert rows[variant]["beyond_outputs"] == (SAVED[variant] - 1) * VALUES
        assert rows[f"{variant}/kernels"]["beyond_outputs"] <= 0
    assert rows["linear"]["outputs"] == 4 * VALUES
    assert all(rows[name]["beyond_outputs"] <= 0 for name in rows if name.startswith("linear"))
    assert "| mlp/kernels |" in output


def counted_twice(variants):
    """Bytes kept, as the tool counts them and as the hooks of autograd see them."""
    import bench_memory
    from layers import Cell, Layer, start_megatron
    from variants import VARIANTS

    start_megatron()
    found = {}
    for name in variants:
        layer = Layer(Cell("tiny", TOKENS, SEQUENCE, "bf16"), VARIANTS[name], moved=False)
        kept = bench_memory.kept(layer, torch.device("cpu"))["kept"]
        found[name] = kept, _seen_by_hooks(layer)
    return found


def _seen_by_hooks(layer):
    given = [
        layer.hidden,
        layer.angles,
        *layer.model.module.parameters(),
        *layer.model.module.buffers(),
    ]
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with layer.variant.chosen(), hooks:
        output = layer.forward()
    saved.pop(output.untyped_storage().data_ptr(), None)
    return sum(saved.values())


def test_agrees_with_what_autograd_says_it_saves(interpreting_rank):
    """But for what a layer holds without saving it: the counts of tokens of each expert."""
    found = interpreting_rank(counted_twice, ["stock", "mlp", "mlp/kernels", "linear"])
    stock = found["stock"]
    assert 0 <= stock[0] - stock[1] < 0.01 * stock[0]
    for kept, saved in found.values():
        assert kept - stock[0] == saved - stock[1]


def test_counts_what_is_alive_once_and_nothing_else(tool):
    bench = tool("bench_memory")
    given = torch.zeros(1000)
    with bench.Allocations() as allocations:
        held = given[:10] * 2
        view = held.view(2, 5)
        given.add_(1)
        dropped = given * 3
        del dropped
        output = torch.cat([view, view])
    gc.collect()
    assert allocations.alive() == held.nbytes + output.nbytes
    del held
    gc.collect()
    assert allocations.alive() == 40 + output.nbytes  # the view holds it
    del view
    gc.collect()
    assert allocations.alive() == output.nbytes


def test_table_says_what_is_not_measured_and_what_is_missed(tool):
    row = {"kept": 640, "over_stock": 192, "outputs": 64, "beyond_outputs": 128}
    stock = {"kept": 448, "over_stock": 0, "outputs": 0, "beyond_outputs": 0}
    result = {"shape": "moe", "tokens": 64, "bytes": {"stock": stock, "mlp": row}}
    table = tool("bench").table("memory", [result])
    assert "| moe | 64 | mlp | 10.0 | 3.0 | 1.0 | 2.0 | not measured | MISSED |" in table


@pytest.mark.parametrize("variant", ["mlp", "linear/folded"])
def test_outputs_of_folded_matrices_are_none(tool, variant):
    bench = tool("bench_memory")
    config = type(
        "Config", (), {"kv_channels": 64, "num_attention_heads": 4, "num_query_groups": 2}
    )
    variants = tool("variants").VARIANTS
    assert bench.outputs(variants[variant], config, TOKENS) == (VALUES if variant == "mlp" else 0)
