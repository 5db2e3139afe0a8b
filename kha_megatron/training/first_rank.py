"""Compute something on rank 0 for all ranks, before torch.distributed is initialized.

The result is sent through the key-value store that torchrun's agent serves, and which
torch.distributed uses later. The agent keeps this store when it restarts the ranks, so the keys of
an earlier attempt may still be in it. The number of restarts in the environment does not help,
because each node counts only its own. So every attempt has a random name:

1. Rank 0 stores the name of its attempt as ``attempt``.
2. All other ranks read this name and report themselves under it.
3. When the last one has done so, rank 0 clears ``attempt`` and stores its result under the name.

Consequently, the name of an attempt can only be read again if one of its ranks was missing, and
then it has no result. Ranks that wait for the result also look for a new name.
"""

import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from kha_megatron.errors import CheckpointError, KHAError

_KEY_PREFIX = "kha_megatron"
_ATTEMPT = "attempt"
"""Key of the current attempt's name."""

_INTERVAL = 0.2
"""Seconds until a rank looks for a key again."""


def compute_on_first_rank(compute: Callable[[], Any], timeout: timedelta) -> Any:
    """Call a function on rank 0, and return its result on all ranks.

    If the ranks were not started by torchrun, each of them calls the function.

    Args:
        compute: Returns a JSON-serializable result. If it raises a KHAError, rank 0 prints the
            error, and all ranks exit with its exit code.
        timeout: Maximum time that ranks wait for each other.

    Raises:
        CheckpointError: If a rank has waited for longer than ``timeout``.
    """
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if is_alone or not has_agent_store:
        return compute()
    store = _connect(timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    if os.environ["RANK"] == "0":
        message = _send(store, compute, deadline)
    else:
        message = _receive(store, deadline)
    outcome = json.loads(message)
    if "exit_code" in outcome:
        sys.exit(outcome["exit_code"])
    return outcome["result"]


def _connect(timeout: timedelta) -> Store:
    """Connect to the store of torchrun's agent."""
    client = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timeout,
        wait_for_workers=False,
    )
    return PrefixStore(_KEY_PREFIX, client)


def _send(store: Store, compute: Callable[[], Any], deadline: float) -> str:
    """Compute the result on rank 0, and send it as JSON. Returns the message."""
    attempt = uuid.uuid4().hex
    store.set(_ATTEMPT, attempt)
    try:
        message = json.dumps({"result": compute()})
    except KHAError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        message = json.dumps({"exit_code": error.exit_code})
    while not store.check([f"{attempt}/complete"]):
        _sleep(deadline, "Some ranks have not started in time")
    store.set(_ATTEMPT, "")
    store.set(f"{attempt}/message", message)
    return message


def _receive(store: Store, deadline: float) -> str:
    """Report this rank to each new attempt, until one of them has a message."""
    attempt = ""
    while True:
        newest_attempt = ""
        if store.check([_ATTEMPT]):
            newest_attempt = store.get(_ATTEMPT).decode()
        if newest_attempt and newest_attempt != attempt:
            attempt = newest_attempt
            _report(store, attempt)
        if attempt and store.check([f"{attempt}/message"]):
            return store.get(f"{attempt}/message").decode()
        _sleep(deadline, "Rank 0 did not report in time which checkpoint to load")


def _report(store: Store, attempt: str) -> None:
    """Report this rank. The last one marks the attempt as complete."""
    num_other_ranks = int(os.environ["WORLD_SIZE"]) - 1
    num_reported = store.add(f"{attempt}/ranks", 1)
    if num_reported == num_other_ranks:
        store.set(f"{attempt}/complete", "")


def _sleep(deadline: float, problem: str) -> None:
    """Sleep between two checks of a key. With ``store.wait``, torch would log each timeout."""
    if time.monotonic() > deadline:
        raise CheckpointError(
            f"{problem}. See the output of the other ranks, or increase "
            "--distributed-timeout-minutes."
        )
    time.sleep(_INTERVAL)
