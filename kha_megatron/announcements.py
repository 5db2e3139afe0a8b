"""User-facing log messages, e.g. which attention backend was chosen or why we had to fall back.

By default, the ``kha_megatron`` logger prints to stderr on rank 0 only. Add your own handler to the
logger to change this.
"""

import logging
import os
import sys
from collections.abc import Hashable

LOGGER = logging.getLogger("kha_megatron")
_logged: set[Hashable] = set()


class _Stderr(logging.StreamHandler):
    """Always writes to the current ``sys.stderr``, even if it was redirected (e.g. by pytest)."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def announce(text: str, *, once: Hashable | None = None, every_rank: bool = False) -> None:
    """Log an INFO message, by default only on rank 0.

    Args:
        text: Message. It is prefixed with ``kha_megatron:``.
        once: Deduplication key. If a message with the same key was already logged, do nothing.
        every_rank: Log on all ranks. Ranks other than 0 put their rank in front of the message.
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


def is_first_rank() -> bool:
    """Return True on rank 0. Uses ``$RANK`` if torch.distributed is not initialized."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
