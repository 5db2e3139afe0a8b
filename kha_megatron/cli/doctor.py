"""``kha-megatron doctor``: check the environment (without importing packages that may crash)."""

import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich import box
from rich.markup import escape
from rich.table import Table

from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON
from kha_megatron.errors import VersionError, install_command
from kha_megatron.mcore.compat import installed_version, lacks_te_extension, version_of


@dataclass(frozen=True, kw_only=True)
class Component:
    """A row of the report: a package or device."""

    name: str
    status: Literal["ok", "missing", "wrong"]  # wrong: an unsupported version or package
    found: str = "-"  # installed version, or name of the device
    supported: str = "any"
    effect: str = ""  # what the component is used for, or what happens without it
    remedy: str = ""
    blocks: bool = False  # whether the component prevents training


REQUIRED = {
    "torch": "everything",
    "megatron-core": "training, verification",
    "transformers": "Hugging Face models",
    "tokenizers": "data prepare",
    "safetensors": "Hugging Face models",
    "numpy": "datasets",
    "psutil": "checkpoints",
    "tensorboard": "loss history",
}
"""Required packages and what they are used for."""

TE_INSTALL = install_command("te", "--no-build-isolation ")


@dataclass(frozen=True, kw_only=True)
class OptionalPackage:
    name: str
    used_for: str
    without: str  # what happens if the package is missing
    install: str


OPTIONAL = (
    OptionalPackage(
        name="nemo-run",
        used_for="launch, compare",
        without="no launch; use torchrun",
        install=install_command("launch"),
    ),
    OptionalPackage(
        name="leptonai",
        used_for="imported by NeMo-Run",
        without="import nemo_run fails",
        install=install_command("launch"),
    ),
    OptionalPackage(
        name="matplotlib",
        used_for="inspect, compare",
        without="no inspect, compare",
        install=install_command("plots"),
    ),
    OptionalPackage(
        name="triton",
        used_for="fused KHA kernels",
        without="KHA runs in torch",
        install="`pip install triton`",
    ),
    OptionalPackage(
        name="flash-attn",
        used_for="attention in TE",
        without="not needed to train",
        install=install_command("flash", "--no-build-isolation "),
    ),
)

USER_EXTRAS = ("megatron", "launch", "plots", "te", "flash")
"""Extras that install the packages above and Transformer Engine."""


def doctor(as_json: AsJSON = False) -> None:
    """Check whether the installed packages and GPUs are supported.

    The exit code is 1 if anything that training needs is missing or unsupported.

    Examples:
      kha-megatron doctor
      kha-megatron doctor --json
    """
    components = inspect_components()
    is_healthy = not any(component.blocks for component in components)
    if as_json:
        findings = [asdict(component) for component in components]
        console.print_json({"ok": is_healthy, "findings": findings})
    else:
        _print(components)
    if not is_healthy:
        raise typer.Exit(1)


def _print(components: Sequence[Component]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("component", no_wrap=True, overflow="fold")
    table.add_column("installed", no_wrap=True, overflow="fold")
    table.add_column("supported", no_wrap=True, overflow="fold")
    table.add_column("effect", no_wrap=False, overflow="fold")
    colours = {"ok": "green", "missing": "yellow", "wrong": "red"}
    for component in components:
        colour = "red" if component.blocks else colours[component.status]
        table.add_row(
            component.name,
            f"[{colour}]{escape(component.found)}[/]",
            component.supported,
            component.effect,
        )
    console.out.print(table)
    for component in components:
        if component.blocks or component.status == "wrong":
            console.out.print(f"{component.name}: {component.remedy}", markup=False)


def inspect_components() -> list[Component]:
    components = []
    for name, use in REQUIRED.items():
        component = _check_package(name, used_for=use, without=f"needed for {use}")
        components.append(replace(component, blocks=component.status != "ok"))
    components.append(find_devices())
    components.append(find_transformer_engine())
    wrong_apex = find_wrong_apex()
    if wrong_apex is not None:
        components.append(wrong_apex)
    for package in OPTIONAL:
        component = _check_package(
            package.name,
            used_for=package.used_for,
            without=package.without,
            install=package.install,
        )
        components.append(component)
    return components


def supported_versions() -> dict[str, str]:
    """Return version specifiers by dependency, e.g. ``{"torch": "<2.16,>=2.9"}``.

    They are those of the installed kha_megatron and of its extras for users. The extras for
    developers pin some packages.
    """
    try:
        lines = metadata.requires("kha-megatron") or []
    except metadata.PackageNotFoundError:
        return {}
    versions: dict[str, str] = {}
    for line in lines:
        requirement = Requirement(line)
        if _is_for_users(requirement):
            name = canonicalize_name(requirement.name)
            versions[name] = str(requirement.specifier)
    return versions


def _is_for_users(requirement: Requirement) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in USER_EXTRAS)


def _check_package(
    name: str,
    *,
    used_for: str,
    without: str,
    install: str | None = None,
) -> Component:
    """Check that a package is installed in a supported version.

    Args:
        used_for: The effect to report if the package is supported.
        without: The effect to report otherwise.
        install: Command that installs the package (default: with pip).
    """
    supported = supported_versions().get(name, "")
    version = _find_version(name)
    if install is None:
        install = f"`pip install '{name}{supported}'`"
    component = Component(
        name=name,
        status="missing",
        found=version or "-",
        supported=supported or "any",
        effect=without,
        remedy=f"run {install}",
    )
    if not version:
        return component
    # NVIDIA's containers use pre-release versions such as 2.7.0a0+...
    release = Version(version).base_version
    if not SpecifierSet(supported).contains(release):
        return replace(component, status="wrong")
    return replace(component, status="ok", effect=used_for, remedy="")


def _find_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    if package != "megatron-core":
        return version_of(package)
    try:  # it may be imported from a source tree instead of the installed package
        return installed_version()
    except VersionError:
        return None


def find_devices() -> Component:
    """List CUDA devices using nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        names = result.stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        names = []
    if not names:
        return Component(
            name="CUDA device",
            status="missing",
            effect="train with --device cpu",
        )
    found = f"{len(names)} x {names[0]}"
    return Component(name="CUDA device", status="ok", found=found, effect="training")


def find_transformer_engine() -> Component:
    """Check that Transformer Engine is installed, including its compiled extension."""
    component = _check_package(
        "transformer-engine",
        used_for="fused layers, FP8",
        without="no FP8 and no fused layers",
        install=TE_INSTALL,
    )
    if component.found == "-" or not lacks_te_extension():
        return component
    effect = "no compiled extension: import megatron.core fails without kha_megatron"
    return replace(component, status="wrong", effect=effect, remedy=f"run {TE_INSTALL}")


def find_wrong_apex() -> Component | None:
    """Detect the unrelated ``apex`` package from PyPI. Megatron needs NVIDIA's Apex or none."""
    spec = find_spec("apex")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = next(iter(spec.submodule_search_locations))
    is_from_nvidia = Path(folder, "optimizers").is_dir()
    if is_from_nvidia:
        return None
    return Component(
        name="apex",
        status="wrong",
        found=version_of("apex") or "a directory",
        supported="NVIDIA's",
        effect="import megatron.core fails",
        remedy=f"run `pip uninstall apex` or remove {folder}",
        blocks=True,
    )
