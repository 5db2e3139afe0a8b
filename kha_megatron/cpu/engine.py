"""Transformer Engine's Python on the CPU, above a stand-in for its compiled extension.

Modules, autograd functions, recipes, scales and their histories, caches of quantised weights,
recomputation and tensor-parallel communication are Transformer Engine's own. Its kernels are
replaced by :mod:`kha_megatron.cpu.bindings`, which reads the buffers that the kernels would read.
So it shows what FP8's formats and scalings do to a model, and whether Transformer Engine is given
and gives what a GPU needs; it cannot show kernels, memory layouts, the order in which a product is
summed, or speed.
"""

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kha_megatron import te_extension
from kha_megatron.announcements import announce
from kha_megatron.cpu import bindings
from kha_megatron.errors import MissingDependencyError, VersionError
from kha_megatron.versions import version_of

TESTED = ("2.17.1", "2.19.0", "2.20.2")
"""Versions of Transformer Engine that the stand-in was tested with: the last by our tests, the
modules of tests/cpu/test_engine.py with all three."""

CAPABILITIES = {"9.0": (9, 0), "10.0": (10, 0)}
"""Devices that can be played, by what a user calls them: Hopper and Blackwell."""

ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # no search for CUDA's libraries at import
    "NVTE_UNFUSED_FP8_UPDATE": "1",  # scales of delayed scaling in Python, which is there
    "NVTE_MASKED_SOFTMAX_FUSION": "0",  # of the unfused attention
}
"""What makes Transformer Engine take its own Python where it has both."""


def check() -> str:
    """The installed version of Transformer Engine.

    Raises:
        MissingDependencyError: there is none, or one of the packages that it imports is missing.
        VersionError: it is one that was not tested.
    """
    for package in ("transformer_engine", "onnx", "onnxscript", "pydantic", "einops"):
        engine = package == "transformer_engine"
        if (te_extension.find() if engine else importlib.util.find_spec(package)) is None:
            raise MissingDependencyError(
                package, "--transformer-impl transformer_engine on the CPU", "te-cpu"
            )
    version = version_of("transformer-engine") or "without a version"
    if version not in TESTED:
        raise VersionError(
            f"transformer-engine {version} was not tested on the CPU ({', '.join(TESTED)} was): "
            "`pip install 'kha-megatron[te-cpu]'`"
        )
    return version


def is_installed() -> bool:
    """Whether Transformer Engine runs on the stand-in in this process."""
    return sys.modules.get("transformer_engine_torch") is bindings


def install(capability: tuple[int, int], *, quiet: bool = False) -> None:
    """Import Transformer Engine on the CPU; see :func:`kha_megatron.cpu.install`."""
    version = check()
    os.environ |= ENVIRONMENT
    modules: dict[str, Any] = sys.modules
    if modules.get("transformer_engine", ...) is None:
        del modules["transformer_engine"]  # hidden: see kha_megatron.te_extension
    sys.modules["transformer_engine_torch"] = bindings
    _load_common().load_framework_extension = lambda framework: None
    import transformer_engine.pytorch  # noqa: F401

    sys.modules["transformer_engine"].common = sys.modules["transformer_engine.common"]  # type: ignore[attr-defined]
    _admit_cpu_tensors()
    if not quiet:
        announce(
            f"Transformer Engine {version} runs on the CPU as on compute capability "
            f"{'.'.join(map(str, capability))}: this shows the arithmetic of FP8's formats and "
            "scalings, and not kernels, memory layouts, the order of summation or speed"
        )


def _load_common() -> Any:
    """``transformer_engine.common``, before the package itself imports the extension through it."""
    package = importlib.util.find_spec("transformer_engine")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "common" / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        "transformer_engine.common", path, submodule_search_locations=[str(path.parent)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class _SaysCuda(TorchFunctionMode):
    """Every tensor says that it is on a CUDA device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        return func(*args, **(kwargs or {}))


def _admit_cpu_tensors() -> None:
    """Transformer Engine refuses tensors off CUDA at two doors; behind them nobody asks."""
    from transformer_engine.pytorch.attention import DotProductAttention
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    base: Any = TransformerEngineBaseModule
    base.prepare_forward = _saying_cuda(base.prepare_forward)
    attention: Any = DotProductAttention
    attention.forward = _saying_cuda(attention.forward)
    _read_mxfp8_where_it_lies()


def _read_mxfp8_where_it_lies() -> None:
    """An MXFP8 tensor off CUDA is moved there to be read; here it would be moved for ever."""
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.tensor.storage import mxfp8_tensor_storage

    def forward(_: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        return bindings.dequantize(tensor, TE_DType[dtype])

    mxfp8_tensor_storage._FromMXFP8Func.forward = staticmethod(forward)


def _saying_cuda(method: Any) -> Any:
    @functools.wraps(method)
    def admitted(*args: Any, **kwargs: Any) -> Any:
        with _SaysCuda():
            return method(*args, **kwargs)

    return admitted
