"""Version checks for Megatron-Core 0.19 and 0.20.

All code that depends on the version of Megatron-Core is in this file, except for functions of
Megatron that we replace (:mod:`kha_megatron.mcore.patches`). We support the versions from
:data:`OLDEST` to :data:`NEWEST`, and test the releases up to :data:`NEWEST_TESTED`.
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

OLDEST, NEWEST = (0, 19), (0, 20)
NEWEST_TESTED = (0, 19)
TESTED = "0.19.2 and the main branch of 22 August 2026 (0.20.0), with and without pull request 6313"
"""What the tests ran with. 0.20 has not been released."""
INSTALL = f"pip install 'megatron-core>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
"""Command that installs a supported version."""
BRIDGE = "0.6"
"""The supported version of Megatron-Bridge."""


def installed_version() -> str:
    """Get the version of Megatron-Core without importing it.

    Raises:
        VersionError: If Megatron-Core is not installed.
    """
    try:
        spec = util.find_spec("megatron.core")
        if spec and spec.submodule_search_locations:  # may be a checkout without metadata
            info = Path(spec.submodule_search_locations[0], "package_info.py")
            text = info.read_text() if info.is_file() else ""
            numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)
            if len(numbers) == 3:
                return ".".join(numbers)
        return metadata.version("megatron-core")
    except ImportError:
        raise VersionError(f"megatron-core is not installed. Run `{INSTALL}`.") from None


@functools.cache
def check_version() -> str:
    """Check that the installed Megatron-Core version is supported, and return it.

    If no release of this version was tested, log a warning.

    Raises:
        VersionError: If Megatron-Core is missing or too old.
    """
    found = installed_version()
    major, minor, *_ = re.findall(r"\d+", found)
    release = int(major), int(minor)
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise VersionError(
            f"megatron-core>={oldest} is required, but {found} is installed. Run `{INSTALL}`."
        )
    if release > NEWEST_TESTED:
        announce(
            f"WARNING: megatron-core {found} is installed. kha_megatron was tested with {TESTED}.",
            once="megatron-core",
        )
    return found


@contextmanager
def megatron_imports() -> Iterator[None]:
    """Context manager for ``import megatron`` that raises VersionError instead of ImportError.

    This is needed because Megatron swallows an ImportError from the ``--spec`` module and then
    trains without the spec.
    """
    found = check_version()
    try:
        yield
    except ImportError as error:
        raise VersionError(
            f"megatron-core {found} is not compatible with kha_megatron ({error}). Run `{INSTALL}`."
        ) from error


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def bridge_imports() -> Iterator[None]:
    """Context manager for imports of ``megatron.bridge``. Checks the version first."""
    found = version_of("megatron-bridge")
    if found is None:
        raise MissingDependencyError("megatron-bridge", "kha_megatron.bridge", "bridge")
    if not f"{found}.".startswith(f"{BRIDGE}."):
        raise VersionError(
            f"megatron-bridge {found} is not supported. Run {install_command('bridge')} to install "
            f"version {BRIDGE}."
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

    version, driver = ctypes.c_int(), "no driver (libcuda.so.1) is installed"
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        driver = f"the driver supports up to {version.value // 1000}.{version.value % 1000 // 10}"
    except OSError:
        pass
    built = f"needs CUDA {torch.version.cuda}" if torch.version.cuda else "was built without CUDA"
    return f"torch {torch.__version__} {built}, and {driver}"


@functools.cache  # find_spec cannot find the package once hide_incomplete_te has hidden it
def lacks_te_extension() -> bool:
    """Detect a Transformer Engine installation without the compiled PyTorch extension."""
    spec = util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return False
    file = "transformer_engine_torch*.so"  # same locations as in Transformer Engine
    patterns = (file, f"transformer_engine/{file}", f"transformer_engine/wheel_lib/{file}")
    parents = Path(spec.origin).parents[1], Path(sysconfig.get_paths()["purelib"])
    return not any(any(parent.glob(pattern)) for parent in parents for pattern in patterns)


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

    classes = vars(hybrid_layer_allocation).get("LAYER_SYMBOL_TO_CONFIG_CLASS", {})
    for symbol, layer_config_class in classes.items():
        if isinstance(config, layer_config_class):
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
    symbols = [layer_symbol(config) for config in layer_config_list or ()]
    known_symbols = [symbol for symbol in symbols if symbol is not None]
    if layer_config_list is None or known_symbols != symbols:
        raise VersionError(
            f"kha_megatron cannot read the hybrid layers of megatron-core {installed_version()}. "
            f"Run `{INSTALL}`."
        )
    return known_symbols
