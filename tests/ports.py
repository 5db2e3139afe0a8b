"""Ports for the ranks of tests."""

import random
import socket
from contextlib import suppress

_CHOOSE = random.SystemRandom()


def free_port() -> int:
    """Return a port of this machine on which nothing listens.

    Below those that Linux hands out (32768 and up): between here and its use, a connection of
    whatever else runs on the machine may take one of them.
    """
    while True:
        port = _CHOOSE.randrange(20000, 32000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
