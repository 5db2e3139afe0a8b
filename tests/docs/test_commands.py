"""Commands in the documents parse and run. :data:`FORMS` says how each is checked."""

import argparse
import fnmatch
import json
import os
import re
import shutil
import sys
import tomllib
from copy import deepcopy
from pathlib import Path

import pytest

from kha_megatron import cli
from kha_megatron.heads.config import HeadsConfig
from tests.cli.commands import parse
from tests.docs.pages import PAGES, ROOT, blocks, commands
from tests.recipes.conftest import nemorun_home  # noqa: F401

TEXT = Path(json.__file__).parent
"""Small Python sources outside of this repository."""
SMALL = ["--from", str(TEXT), "--glob", "*.py", "--max-file-bytes", "512B"]

FORMS = (
    # pattern of the command, or of "page: command", and how it is checked; the first match wins
    ("docs/tutorials/*: kha-megatron *", "parse"),  # test_tutorials.py runs them
    ("benchmarks/gpu.md: kha-megatron *", "parse"),  # takes hours
    ("kha-megatron launch *--dry-run*", "run"),
    ("kha-megatron launch * --resume *", "parse"),
    ("kha-megatron launch *", "dry"),
    ("kha-megatron compare *", "parse"),  # trains
    ("kha-megatron data prepare --vocab-size *", "small"),
    ("kha-megatron convert upcycle * --text *", "parse"),  # takes 20 s
    ("kha-megatron convert update-code *", "run"),
    ("kha-megatron convert *", "unverified"),  # tests/cli/test_convert.py verifies
    ("kha-megatron verify *", "no logits"),
    ("kha-megatron *", "run"),
    ("torchrun * pretrain_*.py *", "megatron"),
    ("torchrun * examples/stock_script.py *", "megatron"),
    ("torchrun * -m kha_megatron.training *", "entry"),
    ("make *", "make"),
    ("export KHA_CONFIG=*", "setting"),
    ("pip install lm_eval*", "known"),
    ("pip install *", "extras"),
    ("*python* tools/*.py*", "tool"),
    ("tools/*.sh*", "tool"),
    *(
        (pattern, "known")
        for pattern in (
            *("nemo kha train *", "python -m vllm.*", "vllm serve *", "source .venv/bin/activate"),
            *("*python* -m pytest *", "tar *", "cat patches/*", "for i in *", "echo *"),
            *("git clone *", "git -C *", "APEX_CPP_EXT=1 *", "nsys profile *", "lm_eval *"),
            *("pip download *", "python -m zipfile *", "python examples/*", "curl *"),
        )
    ),
)
RUN_HERE = ("run", "dry", "small", "unverified", "no logits", "parse")
ADDED = {
    "dry": ["--dry-run"],
    "small": ["--overwrite", *SMALL],
    "unverified": ["--no-verify"],
    "no logits": ["--no-logits"],
}


def form_of(command):
    """Return how a command is checked; fail for a command that no pattern matches."""
    if not command.words:
        return "variables"
    page = command.place.partition(":")[0]
    for pattern, form in FORMS:
        for text in (f"{command}", f"{page}: {command}"):
            if fnmatch.fnmatchcase(text, pattern):
                return form
    raise AssertionError(f"{command.place}: add a pattern to FORMS for `{command}`")


PAGES = [page for page in PAGES if page != "docs/own_mechanism.md"]  # has a test of its own
ALL = [command for page in PAGES for command in commands(page)]


def of_form(*forms):
    return [command for command in ALL if form_of(command) in forms]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Create the files that the pages mention: text, a small Qwen3, checkpoints, a loss history."""
    from torch.utils.tensorboard import SummaryWriter

    from kha_megatron.conversion import to_hf, to_megatron
    from kha_megatron.data import prepare
    from tests.conversion.models import CONFIGS, make

    place = tmp_path_factory.mktemp("documents")
    text = {"globs": ["*.py"], "max_file_bytes": 512, "workers": 1}
    prepare([TEXT], place / "data/python", vocab_size=512, **text)
    (place / "examples").mkdir()
    shutil.copy(ROOT / "examples/qwen3_235b.py", place / "examples")
    for folder in ("my-text", "more-text"):
        (place / folder).mkdir()
        shutil.copy(TEXT / "encoder.py", place / folder / "book.txt")
    config = deepcopy(CONFIGS["qwen3"])
    config.vocab_size = 512
    config.max_position_embeddings = 64
    model = make(config)
    model.save_pretrained(place / "Qwen3-0.6B-Base")
    for file in (place / "data/python/tokenizer").iterdir():
        shutil.copy(file, place / "Qwen3-0.6B-Base")
    base = place / "Qwen3-0.6B-Base"
    linear, mlp = (HeadsConfig.from_preset(name) for name in ("kha_linear", "kha_mlp"))
    to_megatron.plan_import(base, upcycle=linear).write(place / "runs/kha-linear/checkpoints")
    shutil.copytree(place / "runs/kha-linear/checkpoints", place / "ckpt/run")
    to_megatron.plan_import(base, upcycle=mlp).write(place / "quickstart/run/checkpoints")
    to_hf.plan_export(base, upcycle=mlp).write(place / "quickstart/hf")
    with SummaryWriter(place / "quickstart/run/tensorboard") as writer:
        for step in range(100):
            writer.add_scalar("lm loss", 6 - step / 50, step)
    return place


@pytest.fixture
def here(world, tmp_path, monkeypatch, nemorun_home):  # noqa: F811
    """Change into a copy of ``world``."""
    folder = shutil.copytree(world, tmp_path / "here")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return folder


PAGES_WITH_COMMANDS = sorted({c.place.partition(":")[0] for c in of_form(*RUN_HERE)})


@pytest.mark.fast
def test_commands_parse():
    for command in of_form(*RUN_HERE):
        if not command.words[1].startswith("--"):  # options of kha-megatron itself
            parse(command.words)


@pytest.mark.whole
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS)
def test_commands_of_a_page_run_in_order(page, here, monkeypatch, capsys):
    for command in commands(page):
        form = form_of(command)
        if form not in RUN_HERE or form == "parse":
            continue
        words = list(command.words)
        end = words.index("--") if "--" in words else len(words)
        words[end:end] = ADDED.get(form, [])
        monkeypatch.setattr(sys, "argv", [os.path.expanduser(word) for word in words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert not stopped.value.code, f"{command}: {capsys.readouterr().err[-4000:]}"


def _parse_arguments(lines):
    """Parse command lines with Megatron's parser, and with our arguments for our entry point."""
    from megatron.training.arguments import add_megatron_arguments

    from kha_megatron.training.arguments import add_kha_arguments

    stock = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    ours = add_kha_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    refused = []
    for place, form, words in lines:
        parser = ours if form == "entry" else stock
        parser.error = lambda message, place=place: refused.append(f"{place}: {message}")
        parser.parse_args(words)
    return refused


def test_arguments_of_trainings_exist(ranks):
    lines = []
    for command in of_form("entry", "megatron"):
        script = r"\.py$|\.training$"
        start = next(i for i, word in enumerate(command.words, 1) if re.search(script, word))
        # Patched Megatron scripts have our arguments.
        form = "entry" if command.place.startswith("patches/") else form_of(command)
        lines.append((command.place, form, list(command.words[start:])))
    assert len(lines) > 5
    assert ranks(_parse_arguments, 1, lines) == [[]]


def test_trainings_have_the_arguments_that_megatron_needs():
    for command in of_form("entry", "megatron"):
        words = dict(zip(command.words, [*command.words[1:], ""], strict=True))
        assert ("--save" in words) <= ("--save-interval" in words), command.place
        if form_of(command) == "megatron" and not command.place.startswith("patches/"):
            assert "--eval-interval" in words, command.place
        tp = words.get("--tensor-model-parallel-size", "1")
        cp = words.get("--context-parallel-size", "1")
        runs_on_cpu = "stock_script.py" in f"{command}"
        if not runs_on_cpu and (tp, cp) != ("1", "1"):
            assert command.variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1", command.place


def test_make_targets_extras_and_settings_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for command in of_form("make"):
        assert command.words[1] in targets, command
    for command in of_form("extras"):
        for found in re.findall(r"\[(.*)\]", str(command)):
            assert set(found.split(",")) <= project["optional-dependencies"].keys(), command
    for command in of_form("setting"):
        text = command.words[1].partition("=")[2]
        assert HeadsConfig.from_dict(json.loads(text)).mechanisms, command


def test_tools_exist_and_have_their_options():
    for command in of_form("tool"):
        file = next(ROOT / word for word in command.words if (ROOT / word).is_file())
        source = file.read_text()
        if file.name == "bench.py":
            for path in (ROOT / "tools").glob("bench*.py"):
                source += path.read_text()
        for word in command.words:
            if word.startswith("--"):
                assert word.partition("=")[0] in source, command


def _execute(programs):
    for place, text in programs:
        text = text.replace("experiment.run()", "experiment.dryrun()")
        exec(compile(text, place, "exec"), {"__name__": "documents"})
    return len(programs)


def test_programs_run(ranks):
    programs = []
    for page in PAGES:
        for line, text in blocks(page, "python"):
            programs.append((f"{page}:{line}", text))
    assert ranks(_execute, 1, programs)[0] >= 2
