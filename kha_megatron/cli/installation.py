"""Looking at what is installed without importing it: a broken package must not break the look.

Where only an import can tell, :func:`probe` does it in another process. What was seen is a
:class:`Finding`.
"""

import json
import platform
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from kha_megatron.mcore.compat import version_of

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

PROBE_SECONDS = 120

_LOADERS = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceFileLoader, SOURCE_SUFFIXES))

_PROBE = """
import json, sys
sys.path[:] = json.load(sys.stdin)
try:
{code}
except Exception as error:
    line = (str(error).splitlines() or [""])[0]
    kinds = [kind.__name__ for kind in type(error).__mro__]
    print(json.dumps({{"error": f"{{kinds[0]}}: {{line}}", "kinds": kinds}}))
"""


Status = Literal["ok", "missing", "wrong"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row of the report."""

    name: str
    status: Status
    found: str = "-"
    """Version or device."""
    supported: str = "any"
    effect: str = ""
    """What is used, or what is done without it."""
    remedy: str = ""
    """What to do; empty if nothing needs to be done."""
    blocks: bool = False
    """Training cannot start like this: the command exits with code 1."""


def requirements() -> tuple[str, list[Requirement]]:
    """The Pythons and the packages, extras included, that ``pyproject.toml`` asks for.

    An installation carries them as its metadata; a source tree that is only on the module path
    has the file itself.
    """
    try:
        asked = metadata.metadata("kha-megatron")
        return asked["Requires-Python"] or "", list(
            map(Requirement, asked.get_all("Requires-Dist", []))
        )
    except metadata.PackageNotFoundError:
        project = tomllib.loads(PYPROJECT.read_text())["project"]
        lists = [project["dependencies"], *project["optional-dependencies"].values()]
        return project["requires-python"], [Requirement(line) for each in lists for line in each]


def supported_range(package: str) -> str:
    """The versions of ``package`` that kha-megatron asks for, such as ``>=2.7``; or empty."""
    found = (r for r in requirements()[1] if canonicalize_name(r.name) == package)
    return next((",".join(sorted(map(str, r.specifier), reverse=True)) for r in found), "")


def in_range(found: str, supported: str) -> bool:
    """Whether a version is within ``supported``. NVIDIA's containers call what follows torch 2.6
    ``2.7.0a0+...``: pre-release and local parts do not count."""
    return SpecifierSet(supported).contains(Version(found).base_version)


def find_module(name: str) -> ModuleSpec | None:
    """Where ``import name`` would find a module. Runs no code of it or of its parents."""
    head, *rest = name.split(".")
    specs = (finder.find_spec(head, None) for finder in sys.meta_path)
    spec = next(filter(None, specs), None)
    for part in rest:
        folders = (spec and spec.submodule_search_locations) or []
        found = [FileFinder(folder, *_LOADERS).find_spec(part) for folder in folders]
        # as Python does: a folder without __init__.py counts only where nothing else does
        spec = min(filter(None, found), key=lambda spec: spec.loader is None, default=None)
    return spec


def location(spec: ModuleSpec) -> Path:
    """The folder of a package that :func:`find_module` found."""
    return Path(next(iter(spec.submodule_search_locations or [spec.origin or ""])))


def probe(code: str) -> dict[str, Any]:
    """Run ``code``, whose last line prints a JSON object, in another Python with this one's path.

    Returns:
        That object; or ``{"error": one line, "kinds": names of the exception's classes}``.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE.format(code=textwrap.indent(code, "    "))],
            input=json.dumps(sys.path),
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PROBE_SECONDS} s", "kinds": []}
    except (IndexError, ValueError):  # it died before it could say anything
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"ended with code {done.returncode}: {last}", "kinds": []}


def check_python(name: str) -> list[Finding]:
    """The interpreter against Requires-Python."""
    supported = requirements()[0]
    found = platform.python_version()
    if in_range(found, supported):
        return [Finding(name=name, status="ok", found=found, supported=supported)]
    return [
        Finding(
            name=name,
            status="wrong",
            found=found,
            supported=supported,
            effect="Megatron-Core's wheel for this Python is too old",
            remedy=f"make the environment with Python {supported}",
            blocks=True,
        )
    ]


def check_package(
    name: str,
    *,
    present: str,
    absent: str,
    required: bool = False,
    supported: str | None = None,
    install: str | None = None,
) -> list[Finding]:
    """A package about which its version tells enough.

    Args:
        present: effect if it can be used.
        absent: effect if it cannot.
        required: whether training cannot start without it.
        supported: versions; None takes what kha-megatron asks for.
        install: what to run; None takes ``pip install`` with the supported versions.
    """
    found = version_of(name)
    supported = supported_range(name) if supported is None else supported
    is_right = found is not None and in_range(found, supported)
    status: Status = "missing" if found is None else "ok" if is_right else "wrong"
    return [
        Finding(
            name=name,
            status=status,
            found=found or "-",
            supported=supported or "any",
            effect=present if status == "ok" else absent,
            remedy="" if status == "ok" else install or f"pip install '{name}{supported}'",
            blocks=required and status != "ok",
        )
    ]
