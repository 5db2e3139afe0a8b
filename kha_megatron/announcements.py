"""Logging of choices and fallbacks, by default only on rank 0.

The logger ``kha_megatron`` writes to stderr unless the program has added a handler to it.
"""

import logging
import os
import sys
from collections.abc import Hashable

LOGGER = logging.getLogger("kha_megatron")
_logged: set[Hashable] = set()


class _Stderr(logging.StreamHandler):
    """Handler that looks up ``sys.stderr`` for each record, since programs and tests redirect
    it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def announce(text: str, *, once: Hashable | None = None, every_rank: bool = False) -> None:
    """Log ``kha_megatron: {text}`` at level INFO on the first rank.

    Args:
        once: Key for deduplication. Only the first message with this key is logged.
        every_rank: Whether to log on all ranks. The message is then prefixed with the rank.
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
        LOGGER.propagate = False  # otherwise the root logger would log the message again
    LOGGER.info("%s", text)


def forget() -> None:
    """Reset the deduplication keys (for tests)."""
    _logged.clear()


def is_first_rank() -> bool:
    """Return whether this is rank 0. Without a process group, ``RANK`` is used."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
