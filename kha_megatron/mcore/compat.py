"""Version checks for Megatron-Core 0.19 and 0.20.

All code that depends on the version of Megatron-Core is in this file, except for functions of
Megatron that we replace (:mod:`kha_megatron.mcore.patches`). Older versions than :data:`OLDEST` are
refused. Newer releases than :data:`NEWEST_TESTED` only log a warning, although our requirements
exclude those after :data:`NEWEST`.
"""

import ctypes
import functools
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.errors import MissingDependencyError, VersionError, install_command

type _Release = tuple[int, int]
"""Major and minor version."""

OLDEST: _Release = (0, 19)
"""Oldest release that is supported."""
NEWEST: _Release = (0, 20)
"""Newest release that may be installed. It has not been released yet."""
NEWEST_TESTED: _Release = (0, 19)
"""Newest release that the tests ran with."""
TESTED = "0.19.2 and the main branch of 22 August 2026 (0.20.0), with and without pull request 6313"
"""All versions that the tests ran with, for the warning about later releases."""

_FIRST_EXCLUDED: _Release = (NEWEST[0], NEWEST[1] + 1)
INSTALL = "pip install 'megatron-core>={}.{},<{}.{}'".format(*OLDEST, *_FIRST_EXCLUDED)
"""Command that installs a supported version."""
BRIDGE = "0.6"
"""The supported version of Megatron-Bridge."""


def installed_version() -> str:
    """Get the version of Megatron-Core without importing it.

    Raises:
        VersionError: If Megatron-Core is not installed.
    """
    try:
        return _version_in_source() or metadata.version("megatron-core")
    except ImportError:
        raise VersionError(f"megatron-core is not installed. Run `{INSTALL}`.") from None


def _version_in_source() -> str | None:
    """Read the version from ``package_info.py``, since a source tree may have no metadata."""
    spec = util.find_spec("megatron.core")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    package_info = package / "package_info.py"
    if not package_info.is_file():
        return None
    assignment = re.compile(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", re.MULTILINE)
    numbers = assignment.findall(package_info.read_text())
    if len(numbers) != 3:
        return None
    return ".".join(numbers)


@functools.cache
def check_version() -> str:
    """Check that the installed Megatron-Core version is supported, and return it.

    If no release of this version was tested, log a warning.

    Raises:
        VersionError: If Megatron-Core is missing or too old.
    """
    version = installed_version()
    major, minor, *_ = re.findall(r"\d+", version)
    release = (int(major), int(minor))
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise VersionError(
            f"megatron-core>={oldest} is required, but {version} is installed. Run `{INSTALL}`."
        )
    if release > NEWEST_TESTED:
        announce(
            f"WARNING: megatron-core {version} is installed. "
            f"kha_megatron was tested with {TESTED}.",
            once="megatron-core",
        )
    return version


@contextmanager
def megatron_imports() -> Iterator[None]:
    """Context manager for ``import megatron`` that raises VersionError instead of ImportError.

    This is needed because Megatron swallows an ImportError from the ``--spec`` module and then
    trains without the spec.
    """
    version = check_version()
    try:
        yield
    except ImportError as error:
        raise VersionError(
            f"megatron-core {version} is not compatible with kha_megatron ({error}). "
            f"Run `{INSTALL}`."
        ) from error


def version_of(distribution: str) -> str | None:
    """Get the version of an installed package, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def bridge_imports() -> Iterator[None]:
    """Context manager for imports of ``megatron.bridge``. Checks the version first."""
    version = version_of("megatron-bridge")
    if version is None:
        raise MissingDependencyError("megatron-bridge", "kha_megatron.bridge", "bridge")
    is_supported = version == BRIDGE or version.startswith(f"{BRIDGE}.")
    if not is_supported:
        raise VersionError(
            f"megatron-bridge {version} is not supported. "
            f"Run {install_command('bridge')} to install version {BRIDGE}."
        )
    try:
        yield
    # Transformer Engine raises FileNotFoundError if its torch extension is not installed.
    except (ImportError, FileNotFoundError) as error:
        raise MissingDependencyError(
            f"Transformer Engine with its torch extension (import error: {error})",
            "Megatron-Bridge",
            "bridge,te",
        ) from error


def cuda_versions() -> str:
    """Describe the CUDA versions of torch and of NVIDIA's driver, for errors about devices."""
    import torch

    torch_cuda = "was built without CUDA"
    if torch.version.cuda:
        torch_cuda = f"needs CUDA {torch.version.cuda}"
    return f"torch {torch.__version__} {torch_cuda}, and {_driver_version()}"


def _driver_version() -> str:
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return "no driver (libcuda.so.1) is installed"
    major, remainder = divmod(version.value, 1000)  # e.g. 12040 is CUDA 12.4
    minor = remainder // 10
    return f"the driver supports up to {major}.{minor}"


@functools.cache  # find_spec cannot find the package once hide_incomplete_te has hidden it
def lacks_te_extension() -> bool:
    """Detect a Transformer Engine installation without the compiled PyTorch extension."""
    spec = util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return False
    package = Path(spec.origin).parent
    site_packages = Path(sysconfig.get_paths()["purelib"])
    # same locations as in Transformer Engine
    for directory in (package.parent, site_packages):
        for location in (".", "transformer_engine", "transformer_engine/wheel_lib"):
            extensions = directory.glob(f"{location}/transformer_engine_torch*.so")
            if any(extensions):
                return False
    return True


def hide_incomplete_te() -> None:
    """Hide Transformer Engine if its compiled extension is missing.

    Importing such an installation raises FileNotFoundError. Megatron only falls back to its local
    modules on an ImportError.
    """
    modules: dict[str, Any] = sys.modules
    if "transformer_engine" not in modules and lacks_te_extension():
        modules["transformer_engine"] = None  # makes `import` raise ImportError


def layer_symbol(config: Any) -> str | None:
    """Return the symbol of a hybrid layer (``*``, ``-``, ``E``, ...) from the layer's own config.

    Since upstream pull request 6313, ``HybridModel`` gives each layer a copy of the model's config,
    with a class for each symbol. For other configs, including a model's, return None.
    """
    from megatron.core.models.hybrid import hybrid_layer_allocation

    config_classes = getattr(hybrid_layer_allocation, "LAYER_SYMBOL_TO_CONFIG_CLASS", None)
    if config_classes is None:  # before 6313, when layers had no config of their own
        return None
    for symbol, config_class in config_classes.items():
        if isinstance(config, config_class):
            return symbol
    return None


def layer_symbols(
    layer_type_list: Sequence[str] | None, layer_config_list: Sequence[Any] | None
) -> list[str]:
    """Return the symbols of a pipeline stage's layers from the arguments of ``HybridStack``.

    ``HybridModel`` passes ``layer_config_list`` since upstream pull request 6313, and
    ``layer_type_list`` before.

    Raises:
        VersionError: If the layers are unknown, and therefore cannot be checked.
    """
    if layer_type_list is not None:
        return list(layer_type_list)
    if layer_config_list is None:
        raise _unknown_layers()
    symbols = []
    for config in layer_config_list:
        symbol = layer_symbol(config)
        if symbol is None:
            raise _unknown_layers()
        symbols.append(symbol)
    return symbols


def _unknown_layers() -> VersionError:
    return VersionError(
        f"kha_megatron cannot read the hybrid layers of megatron-core {installed_version()}. "
        f"Run `{INSTALL}`."
    )
