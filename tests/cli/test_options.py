"""Sizes such as ``80GB`` on the command line."""

from kha_megatron.cli.options import parse_size


def test_sizes_are_parsed():
    texts = ["700", "3 kib", "4MiB", "1GIB", "5B", "80GB", "1.5kB", "2TiB"]
    sizes = [700, 3072, 4 << 20, 1 << 30, 5, 80 * 10**9, 1500, 2 << 40]
    assert [parse_size("--x", text) for text in texts] == sizes
