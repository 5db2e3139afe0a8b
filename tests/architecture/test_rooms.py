"""Check the imports between rooms and what `import kha_megatron` needs."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kha_megatron

PACKAGE = Path(kha_megatron.__file__).parent
EVERYONE = {"errors", "heads", "announcements"}
FREE = {
    "heads",
    *("model", "checkpoint", "mcore", "data", "documents", "training", "hf"),
    *("conversion", "recipes", "plan", "compare", "bridge", "serving", "cli", "testing"),
}
NOTHING = frozenset()
ARROWS = {
    **dict.fromkeys(("", "errors", "announcements", "heads"), NOTHING),
    **dict.fromkeys(("model", "checkpoint", "hf", "documents"), NOTHING),
    "__main__": {"cli"},
    "mcore": {"model", "checkpoint"},
    "data": {"checkpoint", "documents", "mcore"},
    "training": {"mcore", "model", "checkpoint", "data"},
    "conversion": {"hf", "mcore", "model", "checkpoint", "data"},
    "recipes": {"model", "checkpoint", "data"},
    "plan": {"model"},
    "compare": {"recipes", "plan", "model", "checkpoint", "mcore", "conversion", "data"},
    "bridge": {"hf", "mcore", "conversion", "model"},
    "serving": {"hf"},
    "testing": {"mcore", "hf", "conversion"},
    "cli": FREE - {"cli", "bridge", "serving", "testing", "training"},
}
OUTSIDE = {
    **dict.fromkeys(("", "errors", "announcements", "model", "plan"), NOTHING),
    "heads": {"torch", "triton"},
    "checkpoint": {"torch", "numpy", "safetensors", "huggingface_hub", "psutil"},
    "documents": {"pyarrow"},
    "hf": {"torch", "transformers", "huggingface_hub"},
    "recipes": {"nemo_run", "psutil", "tensorboard"},
    "compare": {"torch", "matplotlib", "jinja2", "markupsafe"},
    "bridge": {"torch", "megatron"},
    "serving": {"torch", "transformers", "vllm"},
}


def imports(path):
    """Yield the absolute names that a module imports, anywhere in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "kha_megatron":
                yield from (f"kha_megatron.{alias.name}" for alias in node.names)


def room_of(name):
    """Return ``mcore`` for ``kha_megatron.mcore.specs``; "" for names of the package itself."""
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
            if room == "checkpoint":  # knows no model
                allowed -= {"heads"}
            assert target in allowed, f"{room or 'package'} must not import {target}"
        elif room in OUTSIDE:
            known = top in sys.stdlib_module_names or top in OUTSIDE[room]
            assert known, f"{room or 'package'} must not import {top}"


def test_allowed_imports_exist():
    used = {room: set() for room in ARROWS}
    used_outside = {room: set() for room in OUTSIDE}
    for path in MODULES:
        module = ".".join(["kha_megatron", *path.relative_to(PACKAGE).with_suffix("").parts])
        room = room_of(module.removesuffix(".__init__"))
        for name in imports(path):
            top = name.split(".")[0]
            if top == "kha_megatron":
                used[room].add(room_of(name))
            elif room in OUTSIDE:
                used_outside[room].add(top)
    for allowed, imported in ((ARROWS, used), (OUTSIDE, used_outside)):
        unused = {room: names - imported[room] for room, names in allowed.items()}
        assert not {room: names for room, names in unused.items() if names}


def module_graph():
    """Return for each module the modules of the package that it imports."""
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


@pytest.mark.fast
def test_imports_have_no_cycle():
    graph = module_graph()
    assert set(graphlib.TopologicalSorter(graph).static_order()) == graph.keys()


@pytest.mark.fast
def test_every_room_is_listed():
    found = {p.parent.name for p in PACKAGE.glob("*/*.py")}
    assert found | {"data", "documents"} == FREE


REFUSE_IMPORTS = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if refused(name.partition(".")[0]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def run_without(refused, code, *words):
    """Run code in a process that cannot import the top-level modules that ``refused`` selects."""
    code = f"refused = lambda top: {refused}\n{REFUSE_IMPORTS}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
    )


@pytest.mark.fast
def test_import_needs_only_the_standard_library():
    code = "import kha_megatron; print(kha_megatron.HeadsConfig.from_preset('kha_mlp'))"
    result = run_without("top not in {'kha_megatron', *sys.stdlib_module_names}", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "value=mlp"


IMPORT_AND_RUN = """
import kha_megatron.hf, kha_megatron.conversion.to_hf, kha_megatron.conversion.verify
from kha_megatron.cli import main
main()
"""


@pytest.mark.whole
def test_export_and_conversion_import_without_megatron(tmp_path):
    """Commands that need Megatron raise an error with the command that installs it."""
    words = ["data", "prepare", "--from", PACKAGE / "heads", "--out", tmp_path / "data"]
    result = run_without("top == 'megatron'", IMPORT_AND_RUN, *words)
    assert result.returncode == 2, result.stderr
    assert "megatron-core, which is not installed. Run `pip install" in result.stderr
    assert "'.[megatron]'" in result.stderr
    assert not (tmp_path / "data").exists()


VERSION_READ = re.compile(
    r"importlib(?:\.| import )metadata|\bpackaging\b|pkg_resources|package_info|['\"]__version__"
    r"|\b(?!kha_megatron)[\w.]+\.__version__|from (?!kha_megatron )\S+ import .*__version__"
    r"|is_\w*_min_version|is_version_at_least|\b(?:get_\w+|megatron|installed)_version\b"
)
MAY_READ = {
    "__init__.py": r'"__version__',  # our own
    "mcore/compat.py": ".*",
    "heads/registry.py": r"importlib\.metadata|importlib import metadata",
    "heads/kernels/fused.py": r"triton\.__version__",
    # these report versions
    "cli/doctor.py": r"packaging|importlib import metadata|installed_version",
    "data.py": r"installed_version",
    "serving/__init__.py": r"vllm\.__version__",
}
"""Modules other than compat.py that may read a version, and the names that they may use."""


@pytest.mark.fast
def test_versions_are_read_in_compat_only():
    for path in MODULES:
        name = path.relative_to(PACKAGE).as_posix()
        read = VERSION_READ.findall(path.read_text())
        wrong = [word for word in read if not re.fullmatch(MAY_READ.get(name, ""), word)]
        assert not wrong, f"{name} reads {wrong}: ask mcore/compat.py"


def test_version_reads_elsewhere_are_detected():
    source = (PACKAGE / "mcore" / "attention.py").read_text()
    assert not VERSION_READ.search(source)
    for mutation in (
        "import megatron.core\nif megatron.core.__version__ >= '0.19': pass",
        "from megatron import core\nnew = getattr(core, '__version__', '0')",
        "from importlib import metadata\nmetadata.version('megatron-core')",
        "from packaging.version import Version",
        "from megatron.core.utils import is_te_min_version",
        "from kha_megatron.mcore import compat\ncompat.installed_version()",
    ):
        assert VERSION_READ.search(mutation), mutation


def test_config_options_are_read_without_default():
    """A default would hide that a supported Megatron-Core lacks the option."""
    defaulted = re.compile(r"getattr\(([\w.]+\.)?(config|transformer), [^,)]+, ")
    for path in (PACKAGE / "mcore").rglob("*.py"):
        if path.name != "compat.py":
            code = ast.unparse(ast.parse(path.read_text()))  # each call on one line
            assert not defaulted.search(code), path
    assert defaulted.search("getattr(self.config, 'cuda_graph_impl', 'none')")


def root_name(node):
    """Return ``a`` for ``a.b.c``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def replaced_attributes(source):
    """Return the attributes of Megatron's modules and classes that a module assigns."""
    tree = ast.parse(source)
    megatron = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "megatron":
            megatron |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = {alias.asname or alias.name.split(".")[0] for alias in node.names}
            megatron |= {name for name in names if name == "megatron"}
    replaced = set()
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Call) and root_name(node.func) in ("setattr", "patch"):
            targets = [node.args[0]]
        for target in targets:
            is_attribute = isinstance(target, ast.Attribute) or isinstance(node, ast.Call)
            if is_attribute and root_name(target) in megatron:
                replaced.add(ast.unparse(target))
    return replaced


def test_functions_of_megatron_are_replaced_in_patches_only():
    for path in MODULES:
        name = path.relative_to(PACKAGE).as_posix()
        if name != "mcore/patches.py":
            assert not replaced_attributes(path.read_text()), name
        patches = "kha_megatron.mcore.patching" in imports(path)
        assert not patches or name.startswith("mcore/cpu/") or name == "mcore/patches.py", name


def test_replaced_functions_are_detected():
    source = (PACKAGE / "mcore" / "patches.py").read_text()
    assert len(replaced_attributes(source)) > 15
    for mutation in (
        "from megatron.training import training\ntraining.train_step = print",
        "from megatron.core import optimizer\noptimizer.optimizer.Adam.step = print",
        "from megatron.core.utils import a as b\nsetattr(b, 'c', print)",
        "import megatron.core\nmegatron.core.mpu.is_initialized = print",
        "from megatron.training import training\n@patch(training, 'train')\ndef f(): pass",
    ):
        assert replaced_attributes(mutation), mutation
    assert not replaced_attributes("from megatron.core import mpu\nconfig.value = mpu.size")


def test_patches_say_why_and_until_when():
    tree = ast.parse((PACKAGE / "mcore" / "patches.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            lines = ast.get_docstring(node).splitlines()
            assert any(line.startswith("Upstream: ") for line in lines), node.name
            assert any(line.startswith("Remove: ") for line in lines), node.name


MECHANISM_NAMES = re.compile(
    r"\b(moh|talking|collaborative)\b|\b(moh|talking|collaborative|gate)_(router|norms|pre|post)\b"
    r"|\bgate[._](output|value|key|query)\b|moh-"
)
MECHANISM_CLASSES = {"Gate", "MixtureOfHeads", "TalkingHeads", "CollaborativeHeads"}
MAY_NAME = {
    "heads/__init__.py",
    "heads/registry.py",
    "heads/config.py",  # Megatron's own output gate
    *(f"heads/{name}.py" for name in ("gate", "moh", "talking", "collaborative")),
    "conversion/file_format.py",  # Qwen3-Next stores the output gate inside q_proj
    "conversion/hf_families.py",  # architectures with an output gate
    # examples
    *("cli/compare.py", "cli/convert.py", "cli/quickstart.py", "training/arguments.py"),
}


def names_a_mechanism(source):
    """Return identifiers and strings (not docstrings) that name a mechanism other than KHA."""
    tree = ast.parse(source)
    found = set()
    documents = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        text = None
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "kha_megatron.heads"
        ):
            text = {f"{node.module}.{alias.name}".rpartition("heads.")[2] for alias in node.names}
            found |= {name for name in text if {*name.split(".")} & MECHANISM_CLASSES}
        elif isinstance(node, ast.Attribute) and MECHANISM_NAMES.fullmatch(node.attr):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and id(node) not in documents:
            found |= {node.value} if MECHANISM_NAMES.search(str(node.value)) else set()
    return found


def test_mechanisms_are_named_in_their_files_and_the_registry_only():
    """Recipes choose mechanisms. KHA itself is the subject of the whole package."""
    named = {}
    for path in MODULES:
        name = path.relative_to(PACKAGE).as_posix()
        if name not in MAY_NAME and not name.startswith("recipes/"):
            named[name] = names_a_mechanism(path.read_text())
    assert not {name: found for name, found in named.items() if found}
    assert names_a_mechanism("from kha_megatron.heads import Gate\nkha.moh or 'gate.value'") == {
        *("Gate", "moh", "gate.value")
    }
