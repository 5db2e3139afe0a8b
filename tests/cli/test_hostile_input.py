"""Every command against values that nobody means: one line, exit code 2, no report of a fault."""

import os
import signal
import subprocess
import sys

import pytest
from typer.main import get_command

from kha_megatron import cli
from kha_megatron.cli import running
from kha_megatron.errors import ConfigError

NUMBERS = ("9" * 20, "-" + "9" * 20, "9" * 5000, "3.5", "")
PATHS = ("n" * 300, "d/" * 2500 + "f", "nul\0byte", "new\nline\x1b[2Jand escape")
PLACES = {"recipe": "quickstart", "gpus": "8", "tasks": "a", "prompt": "text", "variants": "a,b"}


def leaves(command, words=()):
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, (*words, name))
    if not hasattr(command, "commands"):
        yield words, command


COMMANDS = dict(leaves(get_command(cli.app)))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["kha-megatron", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, *capsys.readouterr()

    return command


def refused(run, words):
    code, stdout, stderr = run(*words)
    assert (code, stdout) == (2, ""), (words, stderr)
    assert stderr.startswith("error: "), stderr
    assert len(stderr.splitlines()) == 1, stderr
    assert "\x1b" not in stderr
    return stderr


def invocations(words, command, bad, value):
    """The command's words with ``value`` for the parameter ``bad``, plausible ones for others."""
    options, arguments = [], []
    for parameter in command.params:
        if parameter is not bad and not parameter.required:
            continue
        given = value if parameter is bad else PLACES.get(parameter.name, "gone")
        is_option = parameter.opts[0].startswith("-")
        (options if is_option else arguments).extend(
            [parameter.opts[0], given] if is_option else [given]
        )
    return [*words, *options, "--", *arguments]


def kinds(command, kind):
    for parameter in command.params:
        annotation = str(parameter.type_descriptor.annotation)
        if kind in annotation and "bool" not in annotation:
            yield parameter


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_numbers_and_paths_that_nothing_can_be(run, words, tmp_path):
    command = COMMANDS[words]
    cases = [(p, value) for p in kinds(command, "int") for value in NUMBERS]
    cases += [(p, value) for p in kinds(command, "Path") for value in PATHS[:3]]
    for parameter, value in cases:
        refused(run, invocations(words, command, parameter, value))
    assert list(tmp_path.iterdir()) == []


READERS = ("convert to-hf", "convert to-megatron", "convert fold", "inspect", "verify", "generate")


@pytest.mark.parametrize("words", [*READERS, "data show", "spikes"])
def test_paths_in_a_message_stay_on_its_line(run, words):
    command = COMMANDS[tuple(words.split())]
    for parameter in kinds(command, "Path"):
        if not parameter.opts[0].startswith("-"):
            refused(run, invocations(words.split(), command, parameter, PATHS[3]))
            break


@pytest.mark.parametrize(
    "flag",
    [
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--num-query-groups",
        "--seq-length",
        "--vocab-size",
        "--global-batch-size",
        "--micro-batch-size",
        "--train-iters",
    ],
)
def test_megatrons_numbers_of_many_digits(run, flag):
    for value in ("9" * 20, "9" * 5000):
        words = ["launch", "quickstart", "--dry-run", "--", "--mock-data", flag, value]
        assert flag in refused(run, words)


def test_sizes(run):
    for flag, words in (("--gpu-memory", ["plan", "quickstart", "--gpus", "8"]),):
        for value in ("9" * 5000 + "GB", "-1GB", "nan", "1e400GB"):
            assert flag in refused(run, [*words, flag, value])


def test_what_is_left_is_one_line_and_a_report(run, monkeypatch, tmp_path):
    def broken(path):
        raise RuntimeError("deep\ninside")

    monkeypatch.setattr("kha_megatron.data.report.verify", broken)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    code, stdout, stderr = run("data", "show", "folder")
    assert (code, stdout) == (1, "")
    assert len(stderr.splitlines()) == 1
    assert "RuntimeError: deep inside" in stderr
    (report,) = tmp_path.glob("kha-megatron-*.txt")
    assert str(report) in stderr
    text = report.read_text()
    assert "Traceback" in text
    assert "'data', 'show', 'folder'" in text


def test_a_path_is_measured_in_bytes():
    running.check_path("--out", running.Path("ä" * 127))
    with pytest.raises(ConfigError, match="of 256 bytes: use at most 255"):
        running.check_path("--out", running.Path("ä" * 128))


TERMINATED = """
import os, signal, sys, time
from kha_megatron import cli
from kha_megatron.checkpoint.staging import staged_folder

def work(path):
    with staged_folder(path) as staged:
        (staged / "weights").write_bytes(bytes(1000))
        print("ready", flush=True)
        time.sleep(60)

sys.modules["kha_megatron.data.report"] = type(sys)("report")
sys.modules["kha_megatron.data.report"].verify = work
cli.main()
"""


def as_from_a_terminal():
    """With signals as they are there: children ignore what `nohup` and background jobs do."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_terminated_command_leaves_nothing(tmp_path, number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINATED, "data", "show", tmp_path / "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_from_a_terminal,
    )
    assert process.stdout.readline() == "ready\n"
    assert any(".partial-" in name for name in os.listdir(tmp_path))
    process.send_signal(number)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    assert os.listdir(tmp_path) == []
