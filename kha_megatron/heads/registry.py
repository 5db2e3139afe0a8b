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
from pathlib import Path
from types import MappingProxyType
from typing import Any
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

_OWN: tuple[type[Mechanism], ...] = (CollaborativeHeads, TalkingHeads, Gate, MixtureOfHeads)
_RESERVED = {
    *(field.name for field in fields(Knock)),
    *("knock", "preset", "heads", "heads_from", "providers"),
    *("init_seed", "attention", "latent_heads"),
    *("upcycle", "log_interval", "perturb_embedding", "stock"),
}


_PROVIDER_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""A package name, or the name of a Python file without directories. Saved models contain it, so it
must not be anything else that pip or a shell would interpret."""

_MECHANISM_NAME = re.compile(r"[a-z][a-z0-9_]*")


def mechanism_types() -> Mapping[str, type[Mechanism]]:
    """Return all mechanism classes except ``Knock`` by name, in the order in which they run.

    Raises:
        ConfigError: If an entry point or a file cannot be imported, or a class is invalid.
    """
    return MappingProxyType({name: kind for name, (kind, _) in _registered().items()})


def provider_of(name: str) -> str | None:
    """Return the package or file name of a mechanism (None for those of this package)."""
    return _registered()[name][1]


def file_of(name: str) -> str | None:
    """Return the path of a mechanism that was registered with ``--heads-from``."""
    path = sys.modules[mechanism_types()[name].__module__].__file__
    return path if path in _files() else None


def use_files(paths: Sequence[str | Path]) -> None:
    """Register all mechanisms in these Python files, also for child processes."""
    added = [os.path.abspath(path) for path in paths]
    before = os.environ.get(FILES_VARIABLE, "")
    os.environ[FILES_VARIABLE] = os.pathsep.join(dict.fromkeys([*_files(), *added]))
    try:
        mechanism_types()
    except ConfigError:
        os.environ[FILES_VARIABLE] = before
        raise


def check_registered(providers: Mapping[str, str]) -> None:
    """Check that the mechanisms of a saved model are registered.

    Args:
        providers: Maps mechanism names to :func:`provider_of` when the model was saved.

    Raises:
        ConfigError: If a mechanism is missing, or ``providers`` is not such a mapping.
    """
    pairs = providers.items() if isinstance(providers, Mapping) else [(None, None)]
    if not all(isinstance(text, str) and text.isprintable() for pair in pairs for text in pair):
        raise ConfigError(f"kha_providers must map mechanisms to packages, got {providers!r:.200}.")
    for name in sorted(providers.keys() - mechanism_types().keys()):
        source = providers[name]
        if not (_PROVIDER_NAME.fullmatch(source) and _MECHANISM_NAME.fullmatch(name)):
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


def presets() -> dict[str, Mapping[str, Any]]:
    """Return the presets of all mechanisms, including a few combinations with KHA."""
    others = {
        preset: {name: dict(settings)}
        for name, mechanism in mechanism_types().items()
        for preset, settings in mechanism.presets.items()
    }
    combined = {
        f"{knock}_{other}": {**Knock.presets[knock], **others[other]}
        for knock in ("kha_linear", "kha_mlp")
        for other in ("gate_output", "moh_75")
    }
    return {**Knock.presets, **others, **combined}


def _files() -> list[str]:
    paths = os.environ.get(FILES_VARIABLE, "").split(os.pathsep)
    return [os.path.abspath(path) for path in paths if path]


def _registered() -> Mapping[str, tuple[type[Mechanism], str | None]]:
    return _register(tuple(_files()))


@cache
def _register(files: tuple[str, ...]) -> Mapping[str, tuple[type[Mechanism], str | None]]:
    found: dict[str, tuple[type[Mechanism], str | None]] = {k.name: (k, None) for k in _OWN}
    for kind, provider in [*_from_packages(), *(pair for f in files for pair in _from_file(f))]:
        name = kind.name
        if name in found or name in _RESERVED or not _MECHANISM_NAME.fullmatch(name):
            raise ConfigError(
                f"The mechanism name {name!r} in {provider} is invalid or already in use. Choose "
                "another name with lower-case letters, digits and underscores."
            )
        found[name] = kind, provider
    return found


@cache
def _from_packages() -> tuple[tuple[Any, str], ...]:
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist else entry.value
        try:
            found.append((entry.load(), package))
        except Exception as error:
            raise ConfigError(
                f"The head mechanism {entry.name} of {package} cannot be imported "
                f"({in_one_line(error)}). Update or uninstall {package}."
            ) from error
    return tuple(found)


@cache
def _from_file(path: str) -> tuple[tuple[type[Mechanism], str], ...]:
    # unique, because two files may have the same name
    module_name = f"kha_heads_{re.sub(r'\W', '_', Path(path).stem)}_{crc32(path.encode()):08x}"
    spec = spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(f"--heads-from must be a Python file, got {path}.")
    module = sys.modules[module_name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(f"--heads-from {path} failed: {in_one_line(error)}.") from error
    defined = [v for v in vars(module).values() if getattr(v, "__module__", None) == module_name]
    kinds = [v for v in defined if isinstance(v, type) and issubclass(v, Mechanism)]
    if not kinds:
        raise ConfigError(f"--heads-from {path} contains no subclass of Mechanism.")
    return tuple((kind, Path(path).name) for kind in kinds)
