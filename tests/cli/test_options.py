"""Sizes such as ``80GB`` on the command line."""

from kha_megatron.cli.options import parse_size


def test_sizes_are_parsed():
    for text, size in (
        ("700", 700),
        ("3 kib", 3072),
        ("4MiB", 4 << 20),
        ("1GIB", 1 << 30),
        ("5B", 5),
        ("80GB", 80 * 10**9),
        ("1.5kB", 1500),
        ("2TiB", 2 << 40),
    ):
        assert parse_size("--x", text) == size
