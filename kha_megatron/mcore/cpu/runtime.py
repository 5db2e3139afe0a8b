"""Redirect CUDA devices, streams and random generators to the CPU.

Functions are patched individually, since a ``TorchFunctionMode`` would slow down every operation.
"""

import logging
import os
import sys
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError
from kha_megatron.mcore.cpu import collectives
from kha_megatron.mcore.patching import patch

_CPU = torch.device("cpu")
_HIDDEN = ("apex", "flash_attn", "transformer_engine")
"""GPU-only packages that Megatron would use if they are installed."""

_LIKE = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")  # torch.X_like
_NEW = ("empty", "empty_strided", "full", "ones", "tensor", "zeros")  # Tensor.new_X

_installed = False


def is_installed() -> bool:
    return _installed


def install(*, despite_cuda: bool = False, quiet: bool = False) -> None:
    """Redirect CUDA to the CPU and hide GPU-only packages. Does nothing if called again.

    Args:
        despite_cuda (bool): Install even if the machine has CUDA devices.
        quiet (bool): Do not log a message on rank 0.

    Raises:
        ConfigError: If there is a CUDA device, or Megatron was already imported.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available() and not despite_cuda:
        raise ConfigError("CUDA is available. Use --device cuda, or install(despite_cuda=True).")
    if "megatron.core" in sys.modules:
        raise ConfigError("cpu.install() must be called before the first `import megatron`.")
    if not quiet:
        announce("Megatron-Core runs on the CPU with gloo, which is slower than on a GPU.")
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(_HIDDEN))  # None makes an import fail
    for name, stand_in in _cuda_stand_ins().items():
        setattr(torch.cuda, name, stand_in)
    # optimizers of torch 2.12 and newer look for an accelerator's stream
    torch.accelerator.current_accelerator = lambda check_available=False: None
    _rewrite_devices()
    _patch_torch()
    _installed = True
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)  # 0 means cuda:0


def _rewrite_devices() -> None:
    """Patch all torch functions that take a device."""
    makers = {function.__name__ for function in _device_constructors()} & set(dir(torch))
    patch(torch, *makers, *(f"{name}_like" for name in _LIKE))(_on_cpu)
    patch(torch.Tensor, *(f"new_{name}" for name in _NEW), "to")(_on_cpu)
    patch(torch.Tensor, "cuda", "pin_memory")(lambda original, self, *args, **kwargs: self)

    @patch(torch.Tensor, "to")
    def to(move: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        return move(self, *args, **kwargs)

    @patch(torch.Tensor, "type")
    def type_(kind: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return kind(self, *args, **kwargs)
        # Megatron's optimizers check this string
        return kind(self).replace("torch.", "torch.cuda.", 1)


def _on_cpu(function: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
    return function(*args, **kwargs)


class _Stream:
    """No-op replacement for streams and events. CPU operations run in order anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = time.time()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        self._time = time.time()

    def elapsed_time(self, end: "_Stream") -> float:
        return (end._time - self._time) * 1e3

    def query(self) -> bool:
        return True

    def record_event(self, event: "_Stream | None" = None) -> "_Stream":
        return event or _Stream()

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    synchronize = wait = wait_stream = wait_event = _nothing


def _cuda_stand_ins() -> dict[str, Any]:
    # torch.compile does not allow two names of one function
    def nothing() -> Any:
        return lambda *args, **kwargs: None

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.random.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.random.set_rng_state(state)

    # Megatron's RNG tracker uses torch.cuda.random
    torch.cuda.random.get_rng_state = get_rng_state
    torch.cuda.random.set_rng_state = set_rng_state  # type: ignore[assignment]
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, nothing())
    properties = SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=0, multi_processor_count=1
    )
    return {
        "is_available": lambda: True,
        # otherwise torch would defer manual_seed until CUDA is initialized
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (8, 0),  # no FP8
        "get_device_name": lambda device=None: "cpu",
        **{n: type(n, (_Stream,), {}) for n in ("Stream", "Event", "stream", "device")},
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        **{n: nothing() for n in ("set_device", "set_stream", "synchronize", "empty_cache")},
        "reset_peak_memory_stats": nothing(),
        "is_current_stream_capturing": lambda: False,
        "memory_stats": lambda device=None: defaultdict(int),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "default_generators": (torch.default_generator,),
    }


def _patch_torch() -> None:
    # torch.compile would need a compiler for the device
    def uncompiled(model: Any = None, **kwargs: Any) -> Any:
        return model if model is not None else (lambda f: f)

    torch.compile = uncompiled

    # this warning does not apply, because the tracker forks the CPU generator
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )

    collectives.install()

    # FSDP requires the mesh and the parameters to have the same device type
    @patch(dist.device_mesh.DeviceMesh, "__init__")
    def build_mesh(build: Any, self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        build(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    # new iterators draw a seed from the CPU generator, but the model also uses it
    @patch(torch.utils.data.dataloader._BaseDataLoaderIter, "__init__")
    def build_iterator(build: Any, self: Any, loader: Any) -> None:
        loader.pin_memory = False
        state = torch.get_rng_state()
        build(self, loader)
        torch.set_rng_state(state)
