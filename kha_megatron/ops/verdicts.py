"""What is known of the kernels on this machine: whether they may be trusted, and for how long.

The first time that kernels are called in some way, they are compared with plain torch
(:mod:`kha_megatron.ops.verification`). That they are right is remembered, in this process and in a
file in the user's cache folder, for this GPU, driver, Triton and these very kernels. That they are
wrong, or cannot be imported, compiled or started, is remembered in this process only: what was full
or missing may be there again at the next start. It is said on every rank that it happens to.

Ranks decide for themselves: either way computes the same function, and each all-reduces the same
gradients in the same order. Where that is not so, the caller asks the others.
"""

import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import torch

from kha_megatron.announcements import announce


class Case(Hashable, Protocol):
    """A way of calling kernels. Its ``repr`` says all that decides whether they are right."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        ...

    def complaint(self) -> str | None:
        """What is wrong, or None. Raises whatever the kernels raise."""


_right: dict[Case, bool] = {}
_PLACES = {"TRITON_HOME", "TRITON_CACHE_DIR", "TRITON_DUMP_DIR"}
"""Variables that say where Triton keeps something, not what it makes."""


def trusts(case: Case) -> bool | None:
    """Whether the kernels compute this case as plain torch does; says why not.

    Returns:
        None for no verdict: none was reached before, and now is no time to compare, because a CUDA
        graph is being captured, code traced or a backward pass run.
    """
    if case not in _right:
        if why := _not_now(case.device):
            announce(f"{case} runs in plain torch: {why}", once=(case, why))
            return None
        _right[case] = _is_known(case) or _is_right(case)
    return _right[case]


def forget() -> None:
    """Forget what this process knows; files stay. For tests."""
    _right.clear()


def _not_now(device: torch.device) -> str | None:
    before = "and these kernels have not been compared with it before"
    if torch.compiler.is_compiling():
        return f"torch.compile traces, {before}"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return f"a CUDA graph is being captured, {before}"
    if torch._C._current_graph_task_id() != -1:  # autograd's thread would wait for itself
        return f"a backward pass runs, {before}"
    return None


def _is_right(case: Case) -> bool:
    def compare() -> str | None:
        with torch.cuda.device(case.device) if case.device.type == "cuda" else nullcontext():
            return case.complaint()

    start = time.perf_counter()
    try:
        # a thread of its own has none of the caller's modes and hooks: autocast, inference, those
        # that count, trace or keep what is saved for the backward pass
        with ThreadPoolExecutor(1) as thread:
            why = thread.submit(compare).result()
    except Exception as error:
        why = f"the kernels fail, {type(error).__name__}: {' '.join(str(error).split())[:500]}"
    if why is None:
        took = time.perf_counter() - start
        announce(f"{case}: the kernels equal plain torch here (compared in {took:.1f} s)")
        _keep(case)
        return True
    announce(
        f"WARNING: {case} runs in plain torch, for here {why} (KHA_KERNELS=triton takes the "
        "kernels all the same)",
        every_rank=True,
    )
    return False


def _is_known(case: Case) -> bool:
    path, text = _record(case)
    try:
        return path.read_text() == text
    except (OSError, ValueError):
        return False


def _keep(case: Case) -> None:
    path, text = _record(case)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # nothing half written stays
            new = Path(folder, path.name)
            new.write_text(text)
            os.replace(new, path)
    except OSError as error:
        why = f"{path.parent} cannot be written ({error.strerror}): each start compares again"
        announce(why, once=why)


def _record(case: Case) -> tuple[Path, str]:
    """The file that says that a case is right on a machine like this, and what is in it."""
    text = f"{_machine(case.device)}\n{case!r}\n"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Path(cache, "kha_megatron", "kernels", f"{name}.txt"), text


@functools.cache
def _machine(device: torch.device) -> str:
    """All that decides what a kernel computes, but for how it is called."""
    import triton

    words = [f"Triton {triton.__version__}", f"torch {torch.__version__}"]
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        words.append(f"{gpu.name} {gpu.major}.{gpu.minor} {gpu.multi_processor_count}")
        words.append(_driver())
    choices = {n for n in os.environ if n.startswith("TRITON_")} - _PLACES
    words += [f"{name}={os.environ[name]}" for name in sorted(choices)]
    sources = hashlib.sha256()
    here = Path(__file__).parent
    for file in sorted(here.rglob("*.py")):
        sources.update(file.read_bytes())
    return ", ".join([*words, f"sources {sources.hexdigest()}"])


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):  # a container may hide it
        return f"CUDA {torch.version.cuda}"
