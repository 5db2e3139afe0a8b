"""``kha-megatron doctor``: what is installed, against what is supported, and what that means.

A check takes the name of what it is about and gives one :class:`Finding` or a few, from metadata
and files alone. What only an import can tell is in :data:`DEEP`.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kha_megatron.cli import console
from kha_megatron.cli.installation import (
    Finding,
    Status,
    check_package,
    check_python,
    find_module,
    in_range,
    location,
    probe,
    supported_range,
)
from kha_megatron.cli.options import AsJSON
from kha_megatron.mcore import compat
from kha_megatron.mcore.compat import megatron_version, version_of
from kha_megatron.recipes.launching import find_torchrun

FLASH_ATTENTION = ">=2.1.1,<2.8.4"
"""What Transformer Engine 2.20 accepts."""

TORCH_PROBE = """
import torch.cuda as seen
names = [seen.get_device_name(index) for index in range(seen.device_count())]
print(json.dumps({"devices": names if seen.is_available() else []}))
"""

SPECS_PROBE = """
import warnings
warnings.simplefilter("ignore")
from kha_megatron.mcore.compat import hide_incomplete_te
hide_incomplete_te()  # the check of Transformer Engine speaks of it
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from kha_megatron.config import PRESETS
from kha_megatron.mcore.compat import check_version
specs = "kha_megatron.mcore.specs"
names = [*PRESETS, "kha"]
names += [f"{name}_hybrid" for name in names]
found = {name: import_module((specs, name)) for name in names}
lost = [name for name, spec in found.items() if not isinstance(spec, ModuleSpec)]
check_version()
print(json.dumps({"names": names, "lost": lost}))
"""
"""Looks every name up as Megatron's ``--spec`` does: it gives None where it cannot import."""


def doctor(
    as_json: AsJSON = False,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Also import torch, Megatron-Core and Transformer Engine, each in a process of "
            "its own, and look our specs up as Megatron does.",
        ),
    ] = False,
) -> None:
    """Compare what is installed with what is supported, and say what will be used.

    \b
    Exits with code 1 if something that training needs is missing or wrong.

    Examples:
      kha-megatron doctor
      kha-megatron doctor --deep --json
    """
    with console.log.status("looking at what is installed"):
        findings = examine(deep=deep)
    healthy = not any(finding.blocks for finding in findings)
    if as_json:
        console.print_json({"ok": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings)
        if not deep:
            console.log.print(f"--deep also imports, to be sure: {', '.join(DEEP)}")
    if not healthy:
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    colours = {"ok": "green", "missing": "yellow", "wrong": "red"}
    table = Table()
    for heading in ("component", "found", "supported", "status", "what it means"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        colour = "red" if finding.blocks else colours[finding.status]
        cells = (finding.name, finding.found, finding.supported)
        status = f"[{colour}]{finding.status}[/]"
        table.add_row(*map(escape, cells), status, escape(finding.effect))
    console.out.print(table)
    for finding in sorted(findings, key=lambda finding: not finding.blocks):
        if finding.remedy:
            word = "[red]needed[/]" if finding.blocks else "optional"
            console.out.print(f"{word}, {finding.name}: {escape(finding.remedy)}")


def examine(*, deep: bool = False) -> list[Finding]:
    """All findings. A check that fails is a finding itself; none raises.

    Args:
        deep: whether to import what only an import can tell of.
    """
    return [finding for name in CHECKS for finding in findings_of(name, deep=deep)]


def findings_of(name: str, *, deep: bool = False) -> list[Finding]:
    """The findings of one of :data:`CHECKS`, with ``deep`` those of an import too."""
    try:
        findings = CHECKS[name](name)
        return DEEP[name](findings) if deep and name in DEEP else findings
    except Exception as error:  # whatever a broken installation may throw
        lacking = error.name if isinstance(error, ModuleNotFoundError) else None
        return [
            Finding(
                name=name,
                status="wrong",
                found=f"cannot be examined: {type(error).__name__}: {error}",
                effect="unknown",
                remedy=f"pip install {lacking}" if lacking else f"install {name} again",
                blocks=name not in OPTIONAL,
            )
        ]


def check_torch(name: str) -> list[Finding]:
    """PyTorch, and the CUDA devices that the driver names."""
    (torch,) = check_package(
        name, required=True, present="", absent="needed: everything runs on it"
    )
    if torch.status == "ok" and (spec := find_module("torch")):
        file = location(spec) / "version.py"
        cuda = re.search(r"^cuda\b.*'(.+)'", file.read_text() if file.is_file() else "", re.M)
        built = f"built for CUDA {cuda[1]}" if cuda else "built without CUDA"
        torch = replace(torch, effect=built)
    return [torch, _device(_devices_of_the_driver())]


def _device(names: list[str]) -> Finding:
    finding = Finding(
        name="CUDA device",
        status="missing",
        effect="training runs on the CPU with --device cpu: right, but not fast",
    )
    found = ", ".join(f"{count} x {what}" for what, count in Counter(names).items())
    effect = "training runs on it (--device cuda)"
    return replace(finding, status="ok", found=found, effect=effect) if names else finding


def _devices_of_the_driver() -> list[str]:
    words = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = re.findall(r"^(.+), (\d+) MiB, (\d+)\.(\d+)$", done.stdout, re.MULTILINE)
    return [f"{what} ({int(mib) / 1024:.0f} GiB, sm_{a}{b})" for what, mib, a, b in rows]


def see_torch(findings: list[Finding]) -> list[Finding]:
    """Whether PyTorch imports, and the devices that it sees itself."""
    torch, driver = findings
    if torch.status == "missing":
        return findings
    seen = probe(TORCH_PROBE)
    if "error" in seen:
        torch = replace(
            torch,
            status="wrong",
            effect=f"`import torch` fails: {seen['error']}",
            remedy=f"pip install --force-reinstall '{torch.name}{supported_range(torch.name)}'",
            blocks=True,
        )
    device = _device(seen.get("devices", []))
    if device.status == "missing" and driver.status == "ok":
        remedy = f"nvidia-smi sees {driver.found}, torch does not: compare its CUDA and the driver"
        device = replace(device, remedy=remedy)
    return [torch, device]


def check_megatron(name: str) -> list[Finding]:
    """Megatron-Core and megatron.training, from a wheel or from a source tree on the path."""
    supported = supported_range(name)
    core, training = find_module("megatron.core"), find_module("megatron.training")
    install = f"pip install '{name}{supported}'"
    missing = Finding(
        name=name,
        status="missing",
        supported=supported,
        effect="nothing trains without it",
        remedy=install,
        blocks=True,
    )
    if core is None:
        return [missing]
    found, folder = megatron_version(location(core)) or version_of(name), location(core)
    status: Status = "ok" if found and in_range(found, supported) else "wrong"
    untested = found is not None and compat.release(found) > compat.NEWEST
    first = replace(
        missing,
        status=status,
        found=found or "without a version",
        effect=f"from {folder}" + (": newer than what was tested" if untested else ""),
        remedy="" if status == "ok" else f"{install}, and see that no other hides it",
        blocks=status != "ok" and not untested,
    )
    second = replace(missing, name="megatron.training", supported="any")
    if training is None:
        second = replace(second, effect="`python -m kha_megatron.training` cannot run")
    else:
        second = Finding(
            name=second.name, status="ok", found="yes", effect=f"from {location(training)}"
        )
    return [first, second]


def see_specs(findings: list[Finding]) -> list[Finding]:
    """Whether Megatron's own ``--spec`` finds each of our specs; it trains without in silence."""
    finding = Finding(
        name="--spec",
        status="wrong",
        effect="a stock script would stop, or train plain attention",
        remedy="pip install kha-megatron into the environment that has megatron-core",
        blocks=True,
    )
    if find_module("megatron.core") is None:
        return findings
    seen = probe(SPECS_PROBE)
    if "error" in seen:
        return [replace(finding, found=seen["error"])]
    if seen["lost"]:
        return [replace(finding, found=f"not found: {', '.join(seen['lost'])}")]
    effect = f"Megatron finds all {len(seen['names'])} names of kha_megatron.mcore.specs"
    return [Finding(name=finding.name, status="ok", found="yes", effect=effect)]


TE_ABSENT = (
    "layers are Megatron's own (--transformer-impl local); no FP8; context parallelism gathers "
    "all keys and values"
)
TE_ALONE = "its Python alone"
TE_INSTALL = "pip install --no-build-isolation 'kha-megatron[te]'"


def check_transformer_engine(name: str) -> list[Finding]:
    """Transformer Engine, or its Python alone, which is for machines without a GPU."""
    (finding,) = check_package(
        name,
        present="fused layers and FP8 (--transformer-impl transformer_engine)",
        absent=TE_ABSENT,
        install=TE_INSTALL,
    )
    if finding.status != "ok" or not compat.lacks_te_extension() or _devices_of_the_driver():
        return [finding]
    return [
        replace(
            finding,
            found=f"{finding.found}, {TE_ALONE}",
            effect="not used; a script must import kha_megatron.mcore before megatron.core, which "
            "raises FileNotFoundError otherwise",
            remedy=f"pip uninstall {name}, if that is not wanted",
        )
    ]


def see_transformer_engine(findings: list[Finding]) -> list[Finding]:
    """Whether Transformer Engine imports: its extension is what is missing most often."""
    (finding,) = findings
    name = finding.name
    if find_module("transformer_engine") is None or finding.found.endswith(TE_ALONE):
        return findings
    seen = probe("import torch, transformer_engine.pytorch\nprint('{}')")
    if "error" not in seen:
        return findings
    found = version_of(name) or "without a version"
    # Megatron falls back on ImportError alone; with anything else its own import ends too
    harmless = "ImportError" in seen["kinds"]
    effect = TE_ABSENT if harmless else "`import megatron.core` fails with it"
    extension = "Could not find shared object file" in seen["error"]
    return [
        replace(
            finding,
            status="wrong",
            found=f"{found}, without its torch extension" if extension else found,
            effect=f"{effect}: {seen['error']}",
            remedy=f"pip install --no-build-isolation transformer-engine-torch=={found}"
            if extension and version_of(name)
            else f"{TE_INSTALL}, or pip uninstall {name}",
            blocks=not harmless,
        )
    ]


def check_apex(name: str) -> list[Finding]:
    """NVIDIA's apex, none, or another thing of that name: PyPI's is a web toolkit."""
    spec = find_module("apex")
    unfused = (
        "our entry point turns gradient accumulation fusion off; in other scripts pass "
        "--no-gradient-accumulation-fusion"
    )
    none = Finding(
        name=name,
        status="missing",
        supported="NVIDIA's or none",
        effect="optimizers and norms come from Transformer Engine or PyTorch; fused weight "
        f"gradients from nowhere: {unfused}",
    )
    if spec is None:
        return [none]
    folder, found = location(spec), version_of("apex")
    parts = ("optimizers", "normalization", "multi_tensor_apply")
    if not all(find_module(f"apex.{part}") for part in parts):
        impostor = replace(
            none,
            status="wrong",
            found=f"{found or 'a folder'}, not NVIDIA's",
            effect=f"Megatron takes {folder} for NVIDIA's and fails when it builds a norm",
            remedy="pip uninstall apex" if found else f"rename or remove {folder}",
            blocks=True,
        )
        return [impostor]
    fused = find_module("fused_weight_gradient_mlp_cuda") is not None
    gradients = "fused weight gradients" if fused else f"no fused weight gradients: {unfused}"
    effect = f"fused Adam and norms; {gradients}"
    return [replace(none, status="ok", found=found or "without a version", effect=effect)]


def check_nemo_run(name: str) -> list[Finding]:
    """NeMo-Run, the leptonai it imports at start, and the torchrun it starts."""
    (finding,) = check_package(
        name,
        present="`kha-megatron launch` works",
        absent="no `kha-megatron launch`; torchrun -m kha_megatron.training works",
        install="pip install 'kha-megatron[launch]'",
    )
    if finding.status == "ok" and find_module("leptonai.api.v1") is None:
        finding = replace(
            finding,
            status="wrong",
            effect="`import nemo_run` fails: leptonai "
            f"{version_of('leptonai') or '(missing)'} has no "
            "leptonai.api.v1",
            remedy=f"pip install 'leptonai{supported_range('leptonai')}'",
        )
    path = find_torchrun()
    torchrun = Finding(
        name="torchrun",
        status="ok" if path else "missing",
        found=path or "-",
        effect="starts the ranks" if path else "NeMo-Run cannot start ranks",
        remedy="" if path else "pip install --force-reinstall torch, which brings it along",
    )
    return [finding, torchrun]


def _required(present: str) -> Callable[[str], list[Finding]]:
    absent = f"needed: {present}"
    return partial(check_package, required=True, present=present, absent=absent)


CHECKS: dict[str, Callable[[str], list[Finding]]] = {
    "python": check_python,
    "torch": check_torch,
    "megatron-core": check_megatron,
    "--spec": lambda name: [],
    "transformer-engine": check_transformer_engine,
    "apex": check_apex,
    "triton": partial(
        check_package,
        present="KHA's fused kernels, torch.compile and Megatron's Triton kernels",
        absent="no fused kernels of KHA's, and torch.compile makes no GPU kernels",
    ),
    "flash-attn": partial(
        check_package,
        supported=FLASH_ATTENTION,
        present="one more attention for Transformer Engine; flash decoding",
        absent="not needed to train: attention is Transformer Engine's or Megatron's own",
        install=f"pip install --no-build-isolation 'flash-attn{FLASH_ATTENTION}' (needs nvcc)",
    ),
    "nemo-run": check_nemo_run,
    "transformers": _required("Hugging Face models and tokenizers"),
    "tokenizers": _required("`kha-megatron data prepare`"),
    "safetensors": _required("Hugging Face checkpoints"),
    "numpy": _required("datasets"),
    "psutil": _required("checkpoints: a save hangs without it"),
    "tensorboard": _required("the loss history"),
    "matplotlib": partial(
        check_package,
        present="`kha-megatron inspect`, `compare` and `quickstart` draw",
        absent="`kha-megatron inspect`, `compare` and `quickstart` cannot draw",
        install="pip install 'kha-megatron[plots]'",
    ),
}
"""Every check by the name of the package it is about, in the order of the report."""

DEEP: dict[str, Callable[[list[Finding]], list[Finding]]] = {
    "torch": see_torch,
    "--spec": see_specs,
    "transformer-engine": see_transformer_engine,
}
"""What an import makes of a check's findings. Takes about 10 s."""

OPTIONAL = ("triton", "flash-attn", "nemo-run", "matplotlib")
"""Checks about what training starts without, whatever its state."""
