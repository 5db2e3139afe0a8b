"""Registry of head mechanisms, including those from other packages and files.

There are two ways to add a :class:`Mechanism` to this package without changing it:

- A package declares an entry point in the group ``kha_megatron.heads``.
- The environment variable ``KHA_HEADS_FROM`` lists Python files (``--heads-from`` sets it).

Code in checkpoints and model directories is never executed.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple
from zlib import crc32

from kha_megatron.errors import ConfigError, in_one_line
from kha_megatron.heads.collaborative import CollaborativeHeads
from kha_megatron.heads.gate import Gate, observe_gate
from kha_megatron.heads.knock import Knock
from kha_megatron.heads.mechanism import Mechanism
from kha_megatron.heads.moh import MixtureOfHeads
from kha_megatron.heads.talking import TalkingHeads

GROUP = "kha_megatron.heads"
"""Entry point group. Each entry point is a subclass of ``Mechanism``."""

FILES_VARIABLE = "KHA_HEADS_FROM"
"""Environment variable with paths of Python files, separated like ``PATH``."""


observe_output_gate = partial(observe_gate, "output")
"""Logs the gate of ``--attention-output-gate``."""

_OUR_MECHANISMS: tuple[type[Mechanism], ...] = (
    CollaborativeHeads,
    TalkingHeads,
    Gate,
    MixtureOfHeads,
)
"""Mechanisms of this package except KHA, in the order in which they run."""

_RESERVED_NAMES = {
    *(field.name for field in fields(Knock)),
    "knock",
    "preset",
    "heads",
    "heads_from",
    "providers",
    "init_seed",
    "attention",
    "latent_heads",
    "folded",
    "fold_linear",
    "upcycle",
    "log_interval",
    "perturb_embedding",
    "stock",
}
"""Names that other mechanisms must not have, because ``--kha-NAME`` or ``kha_NAME`` is used."""

_PROVIDER_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""A package name, or the name of a Python file without directories. Saved models contain it, so it
must not be anything else that pip or a shell would interpret."""

_MECHANISM_NAME = re.compile(r"[a-z][a-z0-9_]*")


class _Registered(NamedTuple):
    mechanism_type: type[Mechanism]
    provider: str | None
    """Name of the package or file. None for mechanisms of this package."""


def mechanism_types() -> Mapping[str, type[Mechanism]]:
    """Return all mechanism classes except ``Knock`` by name, in the order in which they run.

    Raises:
        ConfigError: If an entry point or a file cannot be imported, or a class is invalid.
    """
    types = {}
    for name, registered in _registered().items():
        types[name] = registered.mechanism_type
    return MappingProxyType(types)


def provider_of(name: str) -> str | None:
    """Return the package or file name of a mechanism (None for those of this package)."""
    return _registered()[name].provider


def file_of(name: str) -> str | None:
    """Return the path of a mechanism that was registered with ``--heads-from``."""
    module_name = mechanism_types()[name].__module__
    path = sys.modules[module_name].__file__
    return path if path in _files() else None


def use_files(paths: Sequence[str | Path]) -> None:
    """Register all mechanisms in these Python files, also for child processes."""
    all_files = dict.fromkeys(_files())
    for path in paths:
        all_files[os.path.abspath(path)] = None
    old_value = os.environ.get(FILES_VARIABLE, "")
    os.environ[FILES_VARIABLE] = os.pathsep.join(all_files)
    try:
        mechanism_types()
    except ConfigError:
        os.environ[FILES_VARIABLE] = old_value
        raise


def check_registered(providers: Mapping[str, str]) -> None:
    """Check that the mechanisms of a saved model are registered.

    Args:
        providers: Maps mechanism names to :func:`provider_of` when the model was saved.

    Raises:
        ConfigError: If a mechanism is missing, or ``providers`` is not such a mapping.
    """
    if not _maps_names(providers):
        raise ConfigError(f"kha_providers must map mechanisms to packages, got {providers!r:.200}.")
    missing = providers.keys() - mechanism_types().keys()
    for name in sorted(missing):
        source = providers[name]
        is_valid_source = _PROVIDER_NAME.fullmatch(source)
        is_valid_name = _MECHANISM_NAME.fullmatch(name)
        if not (is_valid_source and is_valid_name):
            raise ConfigError(
                f"kha_providers must map mechanisms to names of packages or Python files, got "
                f"{source!r:.200} for {name!r:.200}."
            )
        if source.endswith(".py"):
            remedy = f"Read {source} first, then pass it with --heads-from"
        else:
            remedy = f"Look at the package {source} first, then install it"
        raise ConfigError(
            f"The model uses the head mechanism {name} from {source}, which is not registered. "
            f"{remedy}."
        )


def _maps_names(providers: Any) -> bool:
    """Return whether ``providers`` is a mapping of printable strings to such strings."""
    if not isinstance(providers, Mapping):
        return False
    for name in (*providers.keys(), *providers.values()):
        if not isinstance(name, str) or not name.isprintable():
            return False
    return True


def presets() -> dict[str, Mapping[str, Any]]:
    """Return the presets of all mechanisms, including a few combinations with KHA."""
    all_presets: dict[str, Mapping[str, Any]] = dict(Knock.presets)
    for name, mechanism in mechanism_types().items():
        for preset, settings in mechanism.presets.items():
            all_presets[preset] = {name: dict(settings)}
    for kha_preset in ("kha_linear", "kha_mlp"):
        for other_preset in ("gate_output", "moh_75"):
            name = f"{kha_preset}_{other_preset}"
            all_presets[name] = {**all_presets[kha_preset], **all_presets[other_preset]}
    return all_presets


def _files() -> list[str]:
    """Return the absolute paths in ``KHA_HEADS_FROM``."""
    paths = os.environ.get(FILES_VARIABLE, "")
    absolute_paths = []
    for path in paths.split(os.pathsep):
        if path:
            absolute_paths.append(os.path.abspath(path))
    return absolute_paths


def _registered() -> Mapping[str, _Registered]:
    return _register(tuple(_files()))


@cache
def _register(files: tuple[str, ...]) -> Mapping[str, _Registered]:
    """Import packages and files, and return all mechanisms except ``Knock`` by name."""
    registered: dict[str, _Registered] = {}
    for mechanism_type in _OUR_MECHANISMS:
        registered[mechanism_type.name] = _Registered(mechanism_type, None)
    external_mechanisms = list(_from_packages())
    for file in files:
        external_mechanisms += _from_file(file)
    for mechanism in external_mechanisms:
        name = mechanism.mechanism_type.name
        is_used = name in registered or name in _RESERVED_NAMES
        is_valid = _MECHANISM_NAME.fullmatch(name)
        if is_used or not is_valid:
            raise ConfigError(
                f"The mechanism name {name!r} in {mechanism.provider} is invalid or already in "
                "use. Choose another name with lower-case letters, digits and underscores."
            )
        registered[name] = mechanism
    return registered


@cache
def _from_packages() -> tuple[_Registered, ...]:
    mechanisms = []
    entries = entry_points(group=GROUP)
    for entry in sorted(entries, key=attrgetter("name")):
        package = entry.dist.name if entry.dist else entry.value
        try:
            mechanism_type = entry.load()
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"The head mechanism {entry.name} of {package} cannot be imported "
                f"({in_one_line(error)}). Update or uninstall {package}."
            ) from error
        mechanisms.append(_Registered(mechanism_type, package))
    return tuple(mechanisms)


@cache
def _from_file(path: str) -> tuple[_Registered, ...]:
    module = _import_file(path)
    file_name = Path(path).name
    mechanisms = []
    for value in vars(module).values():
        is_mechanism = isinstance(value, type) and issubclass(value, Mechanism)
        if is_mechanism and value.__module__ == module.__name__:  # not imported from elsewhere
            mechanisms.append(_Registered(value, file_name))
    if not mechanisms:
        raise ConfigError(f"--heads-from {path} contains no subclass of Mechanism.")
    return tuple(mechanisms)


def _import_file(path: str) -> ModuleType:
    # unique, because two files may have the same name
    stem = re.sub(r"\W", "_", Path(path).stem)
    checksum = crc32(path.encode())
    module_name = f"kha_heads_{stem}_{checksum:08x}"
    spec = spec_from_file_location(module_name, path)
    is_file = Path(path).is_file()
    if spec is None or spec.loader is None or not is_file:
        raise ConfigError(f"--heads-from must be a Python file, got {path}.")
    module = module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        del sys.modules[module_name]
        raise ConfigError(f"--heads-from {path} must not call sys.exit().") from error
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(f"--heads-from {path} failed: {in_one_line(error)}.") from error
    return module
