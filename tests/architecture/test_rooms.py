"""The rooms of the design: who may import whom, and what `import kha_megatron` may need."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import kha_megatron
from kha_megatron.config import PRESETS

PACKAGE = Path(kha_megatron.__file__).parent
EVERYONE = {"config", "errors", "heads", "announcements"}
FREE = {
    "heads",
    *("ops", "model", "checkpoint", "history", "mcore", "cpu", "data", "training", "hf"),
    *("conversion", "recipes", "plan", "compare", "bridge", "cli"),
}
ARROWS = {
    "": set(),
    "__main__": {"cli"},
    "config": set(),
    "errors": set(),
    "announcements": set(),
    "heads": set(),
    "patching": {"checkpoint"},
    "ops": set(),
    "model": set(),
    "checkpoint": set(),
    "history": set(),
    "mcore": {"ops", "model", "checkpoint", "patching"},
    "cpu": set(),
    "data": {"checkpoint"},
    "training": {"mcore", "model", "checkpoint", "data", "cpu"},
    "hf": {"ops"},
    "conversion": {"hf", "mcore", "ops", "model", "checkpoint", "data", "cpu"},
    "recipes": {"model", "checkpoint", "history", "data"},
    "plan": {"model"},
    "compare": {"recipes", "plan", "model", "checkpoint", "history", "mcore", "ops"},
    "bridge": {"hf", "mcore", "conversion", "checkpoint"},
    "cli": FREE - {"cli", "bridge"} | {"patching"},
}
OUTSIDE = {
    "": set(),
    "config": set(),
    "errors": set(),
    "announcements": set(),
    "heads": set(),
    "patching": set(),
    "ops": {"torch", "triton"},
    "model": set(),
    "checkpoint": {"torch", "numpy", "safetensors", "huggingface_hub"},
    "history": {"tensorboard"},
    "cpu": {"torch"},
    "hf": {"torch", "transformers", "huggingface_hub"},
    "recipes": {"nemo_run"},
    "plan": set(),
    "compare": {"torch", "matplotlib", "jinja2", "markupsafe"},
    "bridge": {"torch", "megatron", "transformer_engine"},
}


def imports(path):
    """Absolute names that a module imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "kha_megatron":
                yield from (f"kha_megatron.{alias.name}" for alias in node.names)


def room_of(name):
    """``mcore`` for ``kha_megatron.mcore.specs``; "" for names of the package itself."""
    part = name.split(".")[1] if "." in name else ""
    return part if part in ARROWS else ""


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(path):
    module = ".".join(["kha_megatron", *path.relative_to(PACKAGE).with_suffix("").parts])
    room = room_of(module.removesuffix(".__init__"))
    for name in imports(path):
        top = name.split(".")[0]
        if top == "kha_megatron":
            target = room_of(name)
            allowed = {"", room} | EVERYONE | ARROWS[room]
            if room == "checkpoint":  # folders on disk, whatever is in them
                allowed -= {"config", "heads"}
            assert target in allowed, f"{room or 'package'} must not import {target}"
        elif room in OUTSIDE:
            known = top in sys.stdlib_module_names or top in OUTSIDE[room]
            assert known, f"{room or 'package'} must not import {top}"


def module_graph():
    """For each module the modules of the package that it imports, wherever in the file."""
    names = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graph = {}
    for name, path in names.items():
        found = set(imports(path))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                modules = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
                if modules and node.module in names and len(modules) == len(node.names):
                    found.discard(node.module)  # only modules of it are imported
                found |= modules
        graph[name] = (found & names.keys()) - {name}
    return graph


def test_no_import_goes_in_a_circle():
    list(graphlib.TopologicalSorter(module_graph()).static_order())


def test_every_room_is_listed():
    found = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert found == FREE


def test_import_needs_only_the_standard_library():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in sys.stdlib_module_names and top != "kha_megatron":
            raise ImportError("refused: " + name)
sys.meta_path.insert(0, Refuse())
import kha_megatron
print(kha_megatron.KHAConfig.from_preset("kha_mlp"))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "value=mlp"


def test_version_checks_live_in_compat_only():
    for path in MODULES:
        if path.relative_to(PACKAGE).as_posix() == "mcore/compat.py":
            continue
        text = path.read_text()
        for word in ("is_te_min_version", "is_torch_min_version", "is_version_at_least"):
            assert word not in text, f"{path}: {word} belongs in mcore/compat.py"


def test_presets_build():
    for name in PRESETS:
        kha_megatron.KHAConfig.from_preset(name)
