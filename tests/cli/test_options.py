"""What several commands read alike."""

import pytest

from kha_megatron.cli.options import parse_size
from kha_megatron.errors import ConfigError


def test_sizes():
    texts = ["700", "3 kib", "4MiB", "1GIB", "5B", "80GB", "1.5kB", "2TiB"]
    sizes = [700, 3072, 4 << 20, 1 << 30, 5, 80 * 10**9, 1500, 2 << 40]
    assert [parse_size("--x", text) for text in texts] == sizes


@pytest.mark.parametrize("text", ["", "MiB", "-3", "0", "0.1", "4M", "4MX", "1e3", "9" * 20, "٣MB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="--x"):
        parse_size("--x", text)
