"""Choices and fallbacks that a user should know of: one plain line each, on stderr, from rank 0.

They go through the logger ``kha_megatron``. A program that gives it a handler of its own gets
them there instead; stdout is for results.
"""

import logging
import os
import sys
from collections.abc import Hashable

LOGGER = logging.getLogger("kha_megatron")
_said: set[Hashable] = set()


class _Stderr(logging.StreamHandler):
    """Writes to whatever ``sys.stderr`` is at the time: programs and tests redirect it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def announce(text: str, *, once: Hashable | None = None, every_rank: bool = False) -> None:
    """Log ``kha_megatron: {text}`` at level INFO; silent on all ranks but the first.

    Args:
        once: where given, nothing is said again in this process under the same key.
        every_rank: whether others say it too, with their number: what may befall one machine alone.
    """
    if once is not None:
        if once in _said:
            return
        _said.add(once)
    if not is_first_rank():
        if not every_rank:
            return
        text = f"rank {os.environ.get('RANK', '?')}: {text}"
    if not LOGGER.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("kha_megatron: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False  # the root's handlers, if any, would say it again
    LOGGER.info("%s", text)


def forget() -> None:
    """Let everything be said again; for tests."""
    _said.clear()


def is_first_rank() -> bool:
    """Whether this process is rank 0 of its job: by its process group, else by ``RANK``."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
