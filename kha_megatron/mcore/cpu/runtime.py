"""Redirect CUDA devices, streams and random generators to the CPU.

Functions are patched individually, since a ``TorchFunctionMode`` would slow down every operation.
"""

import logging
import os
import re
import sys
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError, show_value
from kha_megatron.mcore.cpu import collectives
from kha_megatron.mcore.patching import patch

_CPU = torch.device("cpu")
_GPU_PACKAGES = ("apex", "flash_attn", "transformer_engine")
"""GPU-only packages that Megatron would use if they are installed."""

_LIKE_FUNCTIONS = (
    "empty_like",
    "full_like",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "zeros_like",
)
"""Functions of ``torch`` with a tensor and a device as arguments."""

_NEW_METHODS = (
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_tensor",
    "new_zeros",
)
"""Methods of tensors with a device as argument."""

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
    num_threads = _read_num_threads()
    if not quiet:
        announce("Megatron-Core runs on the CPU with gloo, which is slower than on a GPU.")
    modules: dict[str, Any] = sys.modules
    for package in _GPU_PACKAGES:
        modules[package] = None  # makes an import fail
    _replace_cuda_functions()
    # optimizers of torch 2.12 and newer look for an accelerator's stream
    torch.accelerator.current_accelerator = lambda check_available=False: None
    _redirect_devices()
    _disable_compilation()
    _ignore_rng_warning()
    collectives.install()
    _patch_device_mesh()
    _patch_data_loader()
    _installed = True
    torch.set_num_threads(num_threads)


def _read_num_threads() -> int:
    """Return the number of threads in ``OMP_NUM_THREADS``, or torch's number without one.

    OpenMP also accepts a list. The first number is that of the outermost parallel region.
    """
    setting = os.environ.get("OMP_NUM_THREADS")
    if not setting:
        return torch.get_num_threads()
    threads = setting.partition(",")[0].strip()
    if not re.fullmatch("[1-9][0-9]{0,5}", threads):
        raise ConfigError(
            "The environment variable OMP_NUM_THREADS must be a number or a list of numbers such "
            f"as 4,1, got {show_value(setting)}."
        )
    return int(threads)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)  # 0 means cuda:0


def _redirect_devices() -> None:
    """Patch all torch functions that take a device."""
    constructors = {function.__name__ for function in _device_constructors()}
    constructors &= set(dir(torch))  # the others belong to submodules
    patch(torch, *constructors, *_LIKE_FUNCTIONS)(_call_on_cpu)
    patch(torch.Tensor, *_NEW_METHODS, "to")(_call_on_cpu)
    patch(torch.Tensor, "cuda", "pin_memory")(lambda original, self, *args, **kwargs: self)

    @patch(torch.Tensor, "to")
    def move(to: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        return to(self, *args, **kwargs)

    @patch(torch.Tensor, "type")
    def get_or_change_type(type_: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return type_(self, *args, **kwargs)
        # Megatron's optimizers only accept torch.cuda.FloatTensor etc.
        return type_(self).replace("torch.", "torch.cuda.", 1)


def _call_on_cpu(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with keyword arguments that place its result on the CPU."""
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

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


def _replace_cuda_functions() -> None:
    """Replace functions of ``torch.cuda`` that fail without a GPU.

    Each name gets a function of its own, because torch.compile does not allow two names of one
    function.
    """
    _replace_device_functions(torch.cuda)
    _replace_stream_functions(torch.cuda)
    _replace_random_generator(torch.cuda)
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, _no_op())


def _no_op() -> Any:
    """Return a new function that does nothing."""
    return lambda *args, **kwargs: None


def _replace_device_functions(cuda: Any) -> None:
    properties = SimpleNamespace(
        name="cpu",
        major=8,
        minor=0,
        total_memory=0,
        multi_processor_count=1,
    )
    cuda.is_available = lambda: True
    # otherwise torch would defer manual_seed until CUDA is initialized
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.set_device = _no_op()
    cuda.get_device_name = lambda device=None: properties.name
    cuda.get_device_properties = lambda device=None: properties
    # that of an A100, which has no FP8
    cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    cuda.synchronize = _no_op()
    cuda.empty_cache = _no_op()
    cuda.memory_stats = lambda device=None: defaultdict(int)
    cuda.reset_peak_memory_stats = _no_op()


def _replace_stream_functions(cuda: Any) -> None:
    for name in ("Stream", "Event", "stream", "device"):
        setattr(cuda, name, type(name, (_Stream,), {}))
    cuda.current_stream = lambda device=None: _Stream()
    cuda.default_stream = lambda device=None: _Stream()
    cuda.set_stream = _no_op()
    cuda.is_current_stream_capturing = lambda: False


def _replace_random_generator(cuda: Any) -> None:
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.random.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.random.set_rng_state(state)

    # Megatron's RNG tracker uses torch.cuda.random
    for module in (cuda, cuda.random):
        module.get_rng_state = get_rng_state
        module.set_rng_state = set_rng_state
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.default_generators = (torch.default_generator,)


def _disable_compilation() -> None:
    """Replace ``torch.compile``, which would need a compiler for the device."""

    def compile_nothing(model: Any = None, **kwargs: Any) -> Any:
        if model is None:  # called as a decorator with options
            return lambda function: function
        return model

    torch.compile = compile_nothing


def _ignore_rng_warning() -> None:
    """Drop a warning that does not apply, because the RNG tracker forks the CPU generator."""
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _patch_device_mesh() -> None:
    """Build device meshes on the CPU. FSDP requires them to be where the parameters are."""

    @patch(dist.device_mesh.DeviceMesh, "__init__")
    def build_mesh(build: Any, self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type = "cpu"
        build(self, device_type, *args, **kwargs)


def _patch_data_loader() -> None:
    """Prevent data loaders from pinning memory and from changing the state of the CPU generator.

    New iterators draw a seed from this generator, but here the model also uses it.
    """

    @patch(torch.utils.data.dataloader._BaseDataLoaderIter, "__init__")
    def build_iterator(build: Any, self: Any, loader: Any) -> None:
        loader.pin_memory = False
        state = torch.get_rng_state()
        build(self, loader)
        torch.set_rng_state(state)
