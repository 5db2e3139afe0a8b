"""Log choices and fallbacks once, on rank 0.

Messages go to the logger ``kha_megatron``, which writes to stderr unless the program has given it a
handler.
"""

import logging
import os
import sys
from collections.abc import Hashable

LOGGER = logging.getLogger("kha_megatron")
_logged: set[Hashable] = set()


class _Stderr(logging.StreamHandler):
    """Write to the current ``sys.stderr``, which programs and tests redirect."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def announce(text: str, *, once: Hashable | None = None, every_rank: bool = False) -> None:
    """Log ``kha_megatron: {text}`` at level INFO on the first rank.

    Args:
        once: key under which only the first message of this process is logged.
        every_rank: log on all ranks, with the number of the rank.
    """
    if once is not None:
        if once in _logged:
            return
        _logged.add(once)
    if not is_first_rank():
        if not every_rank:
            return
        text = f"rank {os.environ.get('RANK', '?')}: {text}"
    if not LOGGER.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("kha_megatron: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False  # the handlers of the root logger would log it twice
    LOGGER.info("%s", text)


def forget() -> None:
    """Reset the keys of ``once``, for tests."""
    _logged.clear()


def is_first_rank() -> bool:
    """Return whether this is rank 0 of the process group, or by ``RANK`` without one."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
