"""Every command of the documents runs, or is checked as far as it can be here.

:data:`FORMS` says which takes which form, and why; a command that no line of it knows fails.
"""

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
from kha_megatron.config import KHAConfig
from tests.cli.commands import parse
from tests.docs.pages import PAGES, ROOT, blocks, commands
from tests.recipes.conftest import nemorun_home  # noqa: F401

TEXT = Path(json.__file__).parent
"""Python that stays as it is, whatever is edited here."""
SMALL = ["--from", str(TEXT), "--glob", "*.py", "--max-file-bytes", "512B"]

FORMS = (
    # what is typed, the form, and why it is not simply run
    ("docs/tutorials/*: kha-megatron *", "parse", "tests/docs/test_tutorials.py walks it"),
    ("benchmarks/gpu.md: kha-megatron *", "parse", "hours; the shell fills in a folder"),
    ("kha-megatron launch *--dry-run*", "run", ""),
    ("kha-megatron launch * --resume *", "parse", "nothing to resume; tests/recipes"),
    ("kha-megatron launch *", "dry", "trains: tests/docs/test_tutorials.py does"),
    ("kha-megatron compare *", "parse", "trains: tests/docs/test_tutorials.py does"),
    ("kha-megatron doctor --deep", "parse", "imports for 15 s; tests/cli/test_doctor.py"),
    ("kha-megatron data prepare --vocab-size *", "small", "the standard library takes a while"),
    ("kha-megatron data *", "run", ""),
    ("kha-megatron convert upcycle * --text *", "parse", "20 s: both models read the text"),
    ("kha-megatron convert *", "unverified", "6 s a command; tests/cli/test_convert.py verifies"),
    ("kha-megatron verify *", "no logits", "6 s a command; tests/cli/test_convert.py"),
    ("kha-megatron *", "run", ""),
    (
        "torchrun * pretrain_gpt.py *",
        "megatron",
        "no script, no GPU; tests/training/test_stock_script.py",
    ),
    ("torchrun * examples/stock_script.py *", "megatron", "tests/docs/test_tutorials.py runs it"),
    ("torchrun * -m tests.transformer_engine *", "entry", "tests/training/test_engine.py"),
    ("torchrun * -m kha_megatron.training *", "entry", "8 GPUs; tests/training"),
    ("nemo kha train *", "known", "trains; tests/recipes/test_nemo.py has its words"),
    ("make *", "make", "each is a whole run"),
    ("python -m vllm.*", "known", "make test-serving has it"),
    ("vllm serve *", "known", "make test-serving makes the environment that it needs"),
    ("source .venv/bin/activate", "known", "of the shell"),
    ("export KHA_CONFIG=*", "setting", ""),
    ("pip install *", "extras", "changes the environment"),
    ("*python* tools/*.py*", "tool", "measures for minutes; tests/tools"),
    ("*python* -m pytest *", "known", "this is it"),
    ("tools/*.sh*", "tool", "packs or installs gigabytes"),
    ("tar *", "known", "another machine"),
    ("cat patches/*", "known", "tests/mcore/test_patches.py"),
)
"""First match wins. Forms are the names of :class:`Forms`' methods."""

RUN_HERE = ("run", "dry", "small", "unverified", "no logits", "parse")


def matches(command, pattern):
    """Whether a command, or the page and the command, are like this."""
    page = command.place.partition(":")[0]
    return any(fnmatch.fnmatchcase(text, pattern) for text in (f"{command}", f"{page}: {command}"))


def form_of(command):
    """The form that a command takes.

    Raises:
        AssertionError: there is none.
    """
    if not command.words:
        return "variables"
    for pattern, form, _ in FORMS:
        if matches(command, pattern):
            return form
    raise AssertionError(
        f"{command.place}: `{command}` is new: say in tests/docs/test_commands.py how it is tested"
    )


ALL = [command for page in PAGES for command in commands(page)]


def of_form(*forms):
    return [command for command in ALL if form_of(command) in forms]


def test_every_form_is_used():
    """A line of the table that no command needs is no line of it."""
    unused = [
        pattern for pattern, _, _ in FORMS if not any(matches(command, pattern) for command in ALL)
    ]
    assert not unused


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with what the pages speak of: text, a small Qwen3, checkpoints, a run's history."""
    from torch.utils.tensorboard import SummaryWriter

    from kha_megatron.conversion import to_hf, to_megatron
    from kha_megatron.data.prepare import prepare
    from tests.conversion.models import CONFIGS, make

    place = tmp_path_factory.mktemp("documents")
    text = {"globs": ["*.py"], "max_file_bytes": 512, "workers": 1}
    prepare([TEXT], place / "data/python", vocab_size=512, **text)
    for folder in ("my-text", "more-text"):
        (place / folder).mkdir()
        shutil.copy(TEXT / "encoder.py", place / folder / "book.txt")
    config = deepcopy(CONFIGS["qwen3"])
    config.vocab_size, config.max_position_embeddings = 512, 64
    model = make(config)
    model.save_pretrained(place / "Qwen3-0.6B-Base")
    for file in (place / "data/python/tokenizer").iterdir():
        shutil.copy(file, place / "Qwen3-0.6B-Base")
    base = place / "Qwen3-0.6B-Base"
    linear, mlp = (KHAConfig.from_preset(name) for name in ("kha_linear", "kha_mlp"))
    to_megatron.plan(base, upcycle=linear).write(place / "runs/kha-linear/checkpoints")
    shutil.copytree(place / "runs/kha-linear/checkpoints", place / "ckpt/run")
    to_megatron.plan(base, upcycle=mlp).write(place / "quickstart/run/checkpoints")
    to_hf.plan(base, upcycle=mlp).write(place / "quickstart/hf")
    with SummaryWriter(place / "quickstart/run/tensorboard") as writer:
        for step in range(100):
            writer.add_scalar("lm loss", 6 - step / 50, step)
    return place


@pytest.fixture
def here(world, tmp_path, monkeypatch, nemorun_home):  # noqa: F811
    """A copy of the world, which is the working folder."""
    folder = shutil.copytree(world, tmp_path / "here")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return folder


def call(words, monkeypatch, capsys, unless=None):
    """Run a ``kha-megatron`` command in this process, which is to succeed ``unless`` it says so."""
    monkeypatch.setattr(sys, "argv", [os.path.expanduser(word) for word in words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    streams = capsys.readouterr()
    excused = unless and re.search(unless, " ".join(streams.err.split()))
    assert not end.value.code or excused, (
        f"{' '.join(words)}\n{streams.out[-2000:]}\n{streams.err[-4000:]}"
    )


ADDED = {
    "dry": ["--dry-run"],
    "small": ["--overwrite", *SMALL],
    "unverified": ["--no-verify"],
    "no logits": ["--no-logits"],
}


@pytest.mark.parametrize("page", sorted({c.place.partition(":")[0] for c in of_form(*RUN_HERE)}))
def test_commands_of(page, here, monkeypatch, capsys):
    for command in commands(page):
        form = form_of(command)
        if form not in RUN_HERE:
            continue
        words = list(command.words)
        end = words.index("--") if "--" in words else len(words)
        words[end:end] = ADDED.get(form, [])
        if form == "parse":
            parse(words)
        else:
            call(words, monkeypatch, capsys)


def _parse_arguments(lines):
    """What Megatron's parser, with ours where that is meant, says of each command line."""
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
        words = list(command.words)
        start = (
            next(
                i
                for i, word in enumerate(words)
                if re.search(r"\.py$|\.training$|\.transformer_engine$", word)
            )
            + 1
        )
        form = form_of(command)
        patched = command.place.startswith(
            "patches/"
        )  # there Megatron's scripts have our arguments
        lines.append((command.place, "entry" if patched else form, words[start:]))
    assert len(lines) > 5
    assert ranks(_parse_arguments, 1, lines) == [[]]


def test_trainings_say_what_megatron_demands():
    """Where its parser is content, and its checks are not."""
    for command in of_form("entry", "megatron"):
        words = dict(zip(command.words, [*command.words[1:], ""], strict=True))
        assert ("--save" in words) <= ("--save-interval" in words), command.place
        if form_of(command) == "megatron" and not command.place.startswith("patches/"):
            assert "--eval-interval" in words, command.place
        sizes = [words.get(f"--{kind}-parallel-size", "1") for kind in ("tensor-model", "context")]
        if "stock_script.py" not in f"{command}" and sizes != ["1", "1"]:  # it runs on a CPU
            assert command.variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1", command.place


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in of_form("make"):
        assert command.words[1] in targets, command


def test_extras_exist():
    with open(ROOT / "pyproject.toml", "rb") as file:
        known = tomllib.load(file)["project"]["optional-dependencies"].keys()
    for command in of_form("extras"):
        for found in re.findall(r"\[(.*)\]", str(command)):
            assert set(found.split(",")) <= known, command


def as_file(module):
    """``tools/bench.py`` for ``tools.bench``."""
    return f"{module.replace('.', '/')}.py"


def test_tools_exist_and_know_their_options():
    for command in of_form("tool"):
        named = [ROOT / name for word in command.words for name in (word, as_file(word))]
        file = next(path for path in named if path.is_file())
        source = file.read_text()
        if file.name == "bench.py":
            source += (ROOT / f"tools/bench_{command.words[2]}.py").read_text()
            source += "".join(path.read_text() for path in (ROOT / "tools").glob("bench*.py"))
        for word in command.words:
            if word.startswith("--"):
                assert word.partition("=")[0] in source, command


def test_settings_can_be_read():
    for command in of_form("setting"):
        text = command.words[1].partition("=")[2]
        assert KHAConfig.from_dict(json.loads(text)).mechanisms, command


def _execute(programs):
    for place, text in programs:
        exec(compile(text, place, "exec"), {"__name__": "documents"})
    return len(programs)


def test_programs_can_be_executed(ranks):
    """What they define is not called: that the names are there is what the pages promise."""
    programs = [
        (f"{block.page}:{block.line}", block.text)
        for page in PAGES
        for block in blocks(page, "python")
    ]
    assert ranks(_execute, 1, programs)[0] >= 2
