"""``kha-megatron doctor``: check the environment (without importing packages that may crash)."""

import subprocess
from collections.abc import Iterator
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
    status: Literal["ok", "missing", "wrong"]
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

OPTIONAL = {
    "nemo-run": ("launch, compare", "no launch; use torchrun", "launch"),
    "leptonai": ("imported by NeMo-Run", "import nemo_run fails", "launch"),
    "matplotlib": ("inspect, compare", "no inspect, compare", "plots"),
    "triton": ("fused KHA kernels", "KHA runs in torch", None),
    "flash-attn": ("attention in TE", "not needed to train", "flash"),
}
"""Optional packages: (used for, effect if missing, extra that installs the package)."""

USER_EXTRAS = ("megatron", "launch", "plots", "te", "flash")
"""Extras that install the packages above and Transformer Engine."""

TE_INSTALL = install_command("te", "--no-build-isolation ")


def doctor(as_json: AsJSON = False) -> None:
    """Check whether the installed packages and GPUs are supported.

    The exit code is 1 if anything that training needs is missing or unsupported.

    Examples:
      kha-megatron doctor
      kha-megatron doctor --json
    """
    findings = inspect_components()
    healthy = not any(finding.blocks for finding in findings)
    if as_json:
        console.print_json({"ok": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for heading in ("component", "installed", "supported", "effect"):
            table.add_column(heading, no_wrap=heading != "effect", overflow="fold")
        colours = {"ok": "green", "missing": "yellow", "wrong": "red"}
        for x in findings:
            colour = "red" if x.blocks else colours[x.status]
            table.add_row(x.name, f"[{colour}]{escape(x.found)}[/]", x.supported, x.effect)
        console.out.print(table)
        for x in findings:
            if x.blocks or x.status == "wrong":
                console.out.print(f"{x.name}: {x.remedy}", markup=False)
    if not healthy:
        raise typer.Exit(1)


def inspect_components() -> list[Component]:
    required = [_package(name, use, f"needed for {use}") for name, use in REQUIRED.items()]
    findings = [replace(finding, blocks=finding.status != "ok") for finding in required]
    findings += [find_devices(), find_transformer_engine(), *_find_wrong_apex()]
    for name, (present, absent, extra) in OPTIONAL.items():
        options = "--no-build-isolation " * (extra == "flash")
        install = install_command(extra, options) if extra else f"`pip install {name}`"
        findings.append(_package(name, present, absent, install))
    return findings


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
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in USER_EXTRAS):
            versions[canonicalize_name(requirement.name)] = str(requirement.specifier)
    return versions


def _package(
    name: str,
    present: str,
    absent: str,
    install: str | None = None,
) -> Component:
    versions = supported_versions().get(name, "")
    try:  # Megatron may be imported from a source tree instead of the installed package
        found = installed_version() if name == "megatron-core" else version_of(name)
    except VersionError:
        found = None
    # NVIDIA's containers use pre-release versions such as 2.7.0a0+...
    ok = found and SpecifierSet(versions).contains(Version(found).base_version)
    return Component(
        name=name,
        status="ok" if ok else "wrong" if found else "missing",
        found=found or "-",
        supported=versions or "any",
        effect=present if ok else absent,
        remedy="" if ok else f"run {install or f"`pip install '{name}{versions}'`"}",
    )


def find_devices() -> Component:
    """List CUDA devices using nvidia-smi."""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
        names = done.stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        names = []
    if not names:
        return Component(name="CUDA device", status="missing", effect="train with --device cpu")
    found = f"{len(names)} x {names[0]}"
    return Component(name="CUDA device", status="ok", found=found, effect="training")


def find_transformer_engine() -> Component:
    """Check that Transformer Engine is installed, including its compiled extension."""
    present, absent = "fused layers, FP8", "no FP8 and no fused layers"
    finding = _package("transformer-engine", present, absent, TE_INSTALL)
    if finding.found == "-" or not lacks_te_extension():
        return finding
    effect = "no compiled extension: import megatron.core fails without kha_megatron"
    return replace(finding, status="wrong", effect=effect, remedy=f"run {TE_INSTALL}")


def _find_wrong_apex() -> Iterator[Component]:
    """Detect the unrelated ``apex`` package from PyPI. Megatron needs NVIDIA's Apex or none."""
    spec = find_spec("apex")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if folders and not (Path(folders[0]) / "optimizers").is_dir():
        yield Component(
            name="apex",
            status="wrong",
            found=version_of("apex") or "a directory",
            supported="NVIDIA's",
            effect="import megatron.core fails",
            remedy=f"run `pip uninstall apex` or remove {folders[0]}",
            blocks=True,
        )
