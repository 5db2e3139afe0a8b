"""The one rewriting mode and the short list of ``torch.cuda`` stand-ins behind ``cpu.install()``.

Three layers, each because the one before cannot reach it:

1. :class:`CudaToCpu`, a ``TorchFunctionMode`` entered for good: rewrites every CUDA device that
   reaches a torch function as an argument.
2. :func:`_cuda_stand_ins`: functions of ``torch.cuda`` that take no tensor and so bypass the mode.
3. :func:`_patch_torch`: four places of torch that leave the mode or cannot work without a device.

Limits: the mode is thread-local (it survives ``fork``); the "CUDA" random generator *is* the CPU
generator; streams and events are in order, as everything on a CPU is.
"""

import functools
import logging
import os
import sys
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from kha_megatron.announcements import announce
from kha_megatron.cpu import collectives
from kha_megatron.errors import ConfigError

_CPU = torch.device("cpu")
_CUDA_ONLY = ("transformer_engine", "apex", "flash_attn")
"""Packages that Megatron prefers where they are installed, and whose kernels need a GPU."""

_mode: "CudaToCpu | None" = None


def is_installed() -> bool:
    """Whether this process already runs on the CPU stand-in."""
    return _mode is not None


def install(
    *, despite_cuda: bool = False, hide_cuda_only: bool = True, quiet: bool = False
) -> None:
    """Make "cuda" mean the CPU in this process. Later calls do nothing.

    Args:
        despite_cuda: go on although the machine has a CUDA device; without it a GPU machine is
            refused, because training on its CPU is rarely what was meant.
        hide_cuda_only: make Transformer Engine, apex and flash-attn look as if they were not
            installed, so that Megatron takes its own modules. Without it, models of Transformer
            Engine modules can be constructed, and not run.
        quiet: do not print the line that says so (rank 0 prints it once).

    Raises:
        ConfigError: a CUDA device is present and ``despite_cuda`` is False, or Megatron was
            imported first (it binds CUDA names while it is imported).
    """
    global _mode
    if _mode is not None:
        return
    if torch.cuda.is_available() and not despite_cuda:
        raise ConfigError(
            f"kha_megatron.cpu was asked for on a machine with {torch.cuda.device_count()} CUDA "
            "device(s): use --device cuda, or cpu.install(despite_cuda=True) to mean it"
        )
    if "megatron.core" in sys.modules:
        raise ConfigError("kha_megatron.cpu.install() must run before the first `import megatron`")
    if not quiet:
        announce("Megatron-Core runs on the CPU with gloo: a correctness device, not a fast one")
    if hide_cuda_only:
        modules: dict[str, Any] = sys.modules
        modules.update(dict.fromkeys(_CUDA_ONLY))  # None makes `import` raise ImportError
    for name, stand_in in _cuda_stand_ins().items():
        setattr(torch.cuda, name, stand_in)
    _mode = CudaToCpu()
    _mode.__enter__()
    _patch_torch(_mode)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)  # torch reads 0 as cuda:0


class CudaToCpu(TorchFunctionMode):
    """Send what is addressed to a CUDA device to the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers accept a parameter by comparing this string
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class _Stream:
    """Stream and event in one, also as a context manager: CPU work is in order already."""

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
    """Replacements for attributes of ``torch.cuda``, by name.

    Each is an object of its own: ``torch._dynamo`` keys a table on their identities.
    """

    def nothing() -> Any:
        return lambda *args, **kwargs: None

    def stream_class(name: str) -> type:
        return type(name, (_Stream,), {})

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.random.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.random.set_rng_state(state)

    # Megatron's RNG tracker calls these two by their home module
    torch.cuda.random.get_rng_state = get_rng_state
    torch.cuda.random.set_rng_state = set_rng_state  # type: ignore[assignment]
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, nothing())
    properties = SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=0, multi_processor_count=1
    )
    return {
        "is_available": lambda: True,
        # without this, seeds are queued for a start-up that never comes: no error, other numbers
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": nothing(),
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_name": lambda device=None: "cpu",
        "Stream": stream_class("Stream"),
        "Event": stream_class("Event"),
        "stream": stream_class("stream"),
        "device": stream_class("device"),
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "set_stream": nothing(),
        "synchronize": nothing(),
        "is_current_stream_capturing": lambda: False,
        "empty_cache": nothing(),
        "memory_stats": lambda device=None: defaultdict(int),
        "reset_peak_memory_stats": nothing(),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "default_generators": (torch.default_generator,),
    }


def _patch_torch(mode: CudaToCpu) -> None:
    # Megatron fuses small functions with torch.compile, which would look for the device's compiler
    def uncompiled(model: Any = None, **kwargs: Any) -> Any:
        return model if model is not None else (lambda f: f)

    torch.compile = uncompiled

    # the tracker warns when the CPU generator moves inside a fork: here it is the one it forked
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )

    # Tensor.backward is itself overridable, so the mode is popped while it runs and the bodies of
    # Function.backward would see raw CUDA devices: enter it again at the engine's door
    run_backward = torch.autograd.graph._engine_run_backward

    @functools.wraps(run_backward)
    def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    torch.autograd.graph._engine_run_backward = engine_run_backward
    torch.autograd._engine_run_backward = engine_run_backward

    if dist.is_available():
        collectives.patch()
        _patch_device_mesh()
    _patch_data_loader()


def _patch_device_mesh() -> None:
    # a mesh keeps its device as a word, and FSDP compares the parameters' device with it
    mesh = dist.device_mesh.DeviceMesh
    initialise = mesh.__init__

    @functools.wraps(initialise)
    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialise(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    mesh.__init__ = __init__  # type: ignore[method-assign]


def _patch_data_loader() -> None:
    # a new iterator draws its base seed from the CPU generator, which here is the model's own:
    # give it back; and its pinning thread would run outside the mode
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    initialise = iterator.__init__

    @functools.wraps(initialise)
    def __init__(self, loader: Any) -> None:
        loader.pin_memory = False
        state = torch.get_rng_state()
        initialise(self, loader)
        torch.set_rng_state(state)

    iterator.__init__ = __init__  # type: ignore[method-assign]
