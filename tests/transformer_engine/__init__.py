"""A test double for Transformer Engine on the CPU.

Transformer Engine's own Python code runs: modules, autograd functions, recipes, scales and their
histories, weight caches and tensor-parallel communication. Only its compiled extension is replaced,
by :mod:`tests.transformer_engine.bindings`, which reads the buffers that the kernels would read.
Tests can check the arithmetic of FP8 and the interface to Transformer Engine, but not kernels,
memory layouts, summation order or speed.

``python -m tests.transformer_engine ARGUMENTS`` is the training entry point with this double.
"""

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kha_megatron.mcore import cpu
from tests.transformer_engine import bindings

HOPPER = (9, 0)
BLACKWELL = (10, 0)
"""Compute capabilities that :func:`install` can simulate. MXFP8 needs Blackwell."""

ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # do not search for CUDA's libraries at import
    "NVTE_UNFUSED_FP8_UPDATE": "1",  # update the scales of delayed scaling in Python
    "NVTE_MASKED_SOFTMAX_FUSION": "0",  # in the unfused attention
}


def install(capability: tuple[int, int] = HOPPER) -> None:
    """Install the CPU runtime and import Transformer Engine on top of it.

    Call this before the first import of Megatron. The training entry point then uses
    ``--transformer-impl transformer_engine`` with ``--device cpu``.
    """
    cpu.install(despite_cuda=True, quiet=True)
    os.environ |= ENVIRONMENT
    properties: Any = torch.cuda.get_device_properties()
    properties.major, properties.minor = capability
    torch.cuda.get_device_capability = lambda device=None: capability
    cpu.MEGATRON_FLAGS["--transformer-impl"] = "transformer_engine"

    del sys.modules["transformer_engine"]  # hidden by the CPU runtime
    sys.modules["transformer_engine_torch"] = bindings
    _load_common().load_framework_extension = lambda framework: None
    import transformer_engine.pytorch  # noqa: F401

    sys.modules["transformer_engine"].common = sys.modules["transformer_engine.common"]
    _accept_cpu_tensors()


def _load_common() -> Any:
    """Import ``transformer_engine.common`` before the package imports the extension through it."""
    package = importlib.util.find_spec("transformer_engine")
    path = Path(package.origin).parent / "common" / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        "transformer_engine.common",
        path,
        submodule_search_locations=[str(path.parent)],
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class _ReportCuda(TorchFunctionMode):
    """Makes ``tensor.is_cuda`` True for every tensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        return func(*args, **(kwargs or {}))


def _accept_cpu_tensors() -> None:
    """Pass the two checks in Transformer Engine that refuse CPU tensors."""
    from transformer_engine.pytorch.attention import DotProductAttention
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.tensor.storage import mxfp8_tensor_storage

    base: Any = TransformerEngineBaseModule
    base.prepare_forward = _with_is_cuda(base.prepare_forward)
    attention: Any = DotProductAttention
    attention.forward = _with_is_cuda(attention.forward)

    def forward(_: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        return bindings.dequantize(tensor, TE_DType[dtype])

    # Transformer Engine would move an MXFP8 tensor to CUDA first, without end here
    mxfp8_tensor_storage._FromMXFP8Func.forward = staticmethod(forward)


def _with_is_cuda(method: Any) -> Any:
    @functools.wraps(method)
    def accepted(*args: Any, **kwargs: Any) -> Any:
        with _ReportCuda():
            return method(*args, **kwargs)

    return accepted
