"""Bad and hostile input, signals and internal errors: one error line and the right exit code."""

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from kha_megatron import cli
from kha_megatron.cli import console
from kha_megatron.data import prepare
from tests.cli.commands import leaves

NUMBERS = ("9" * 20, "9" * 5000, "3.5")
PATHS = ("n" * 300, "d/" * 2500 + "f")
ESCAPE = "new\nline\x1b[2Jand escape"
PLACES = {"recipe": "quickstart", "gpus": "8", "prompt": "text", "variants": "a,b"}
COMMANDS = dict(leaves(get_command(cli.app)))
READERS = ("convert to-hf", "convert to-megatron", "inspect", "verify", "generate", "data show")


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Run a command that must exit with code 2 and one line on stderr; return that line."""
    monkeypatch.chdir(tmp_path)

    def run(words):
        monkeypatch.setattr(sys, "argv", ["kha-megatron", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        assert (end.value.code, out) == (2, ""), (words, err)
        error = err[err.index("error: ") :]
        assert len(error.splitlines()) == 1, err
        assert "\x1b" not in err
        return error

    return run


def invocation(words, command, bad, value):
    """Return the command line with ``value`` for the parameter ``bad`` and usual other values."""
    options = []
    arguments = []
    for parameter in command.params:
        if parameter is bad or parameter.required:
            given = value if parameter is bad else PLACES.get(parameter.name, "missing")
            if parameter.opts[0].startswith("-"):
                options += [parameter.opts[0], given]
            else:
                arguments.append(given)
    return [*words, *options, "--", *arguments]


def parameters(command, kind):
    return [p for p in command.params if kind in str(p.type_descriptor.annotation)]


@pytest.mark.parametrize("name", COMMANDS)
def test_impossible_numbers_and_paths_are_refused(refused, name, tmp_path):
    command = COMMANDS[name]
    for kind, values in (("int", NUMBERS), ("Path", PATHS)):
        for parameter in parameters(command, kind):
            for value in values:
                refused(invocation(name.split(), command, parameter, value))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", READERS)
def test_control_characters_of_a_path_are_not_printed(refused, name):
    command = COMMANDS[name]
    path = next(p for p in parameters(command, "Path") if not p.opts[0].startswith("-"))
    refused(invocation(name.split(), command, path, ESCAPE))


LAUNCH = "launch quickstart --dry-run"
SLURM = "--executor slurm --time 04:00:00"
HEADS = f"{LAUNCH} -- --mock-data --heads"
BASELINE = f"{LAUNCH} -- --mock-data --kha-preset baseline --kha-attention"
PLAN = "plan moe-a0.8b-6.6b --gpus 64"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compare --recipe quikstart", "Unknown recipe"),
        ("compare --nproc 2", "No training data"),
        ("launch quickstart --lr 1", "arguments after --, e.g. -- --kha-preset kha_mlp"),
        ("upcycle a b", "Did you mean `kha-megatron convert upcycle`?"),
        (f"{LAUNCH} -- --mock-data --kha-preset kha_mpl", "Did you mean kha_mlp?"),
        (f"{LAUNCH} --executor slurm", "--time must be HH:MM:SS"),
        (f"{LAUNCH} --nodes 2", "require --executor slurm"),
        (f"{LAUNCH} --detach -- --mock-data", "require --executor slurm"),
        (f"{LAUNCH} {SLURM} --env A", "--env must have the format NAME=VALUE, got 'A'"),
        (f"{LAUNCH} {SLURM} --chain 2 -- --mock-data --ckpt-step 5", "--ckpt-step 5 cannot be"),
        (f"{LAUNCH} {SLURM} --retries 1 -- --mock-data --ckpt-step 5", "--ckpt-step 5 cannot be"),
        (f"{LAUNCH} --data /no/such", "/no/such/corpus.idx"),
        (f"{LAUNCH} stray", "argument 'stray'"),
        (f"{HEADS} moh.shared=4 --heads moh.active=1", "4 shared and 1 active of 4 heads"),
        (f"{HEADS} gate.key=head", "with QK-norm"),
        (f"{LAUNCH} -- --mock-data --no-rope-freq 2", "Please add --gpt-model"),
        (f"{BASELINE} gla", "gla requires --multi-latent-attention"),
        (f"{BASELINE} gta --multi-latent-attention", "gta does not support --multi-latent"),
        (f"{HEADS} collaborative.dim=30", "rotary features per head (32)"),
        (f"{PLAN} --gpu-memory '80 apples'", "80 apples"),
        ("plan quickstart --gpus 0", "Invalid value for '--gpus'"),
        ("plan quickstart --gpus 3", "The number of ranks (3) must be divisible by 2"),
        ("data prepare --from /gone --out out", "--from /gone: no such file"),
        ("data prepare --from / --out out --workers 0", "--workers"),
        ("data show /gone", "Could not read /gone/data.json"),
    ],
)
def test_bad_input_is_refused(refused, line, message, tmp_path):
    assert message in refused(shlex.split(line))
    assert list(tmp_path.iterdir()) == []


def test_a_deleted_directory_is_one_error(refused, tmp_path, monkeypatch):
    directory = tmp_path / "deleted"
    directory.mkdir()
    monkeypatch.chdir(directory)
    directory.rmdir()
    message = "The current directory has been deleted. Change to another directory."
    assert message in refused(["launch", "quickstart", "--dry-run", "--", "--mock-data"])


def test_codes_of_emojis_in_a_path_are_printed(capsys):
    console.out.print("c m:b:p", markup=False)
    console.out.print(console.number_table(":b:"))
    console.log.print("c m:b:p", markup=False)
    console.error("c m:b:p")
    out, err = capsys.readouterr()
    assert out.startswith("c m:b:p\n:b:")
    assert err == "c m:b:p\nerror: c m:b:p\n"


def test_an_internal_error_writes_a_report(monkeypatch, capsys, tmp_path):
    def broken(*_):
        raise RuntimeError("deep\ninside")

    monkeypatch.setattr("kha_megatron.data.verify", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["kha-megatron", "data", "show", "directory"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    line = capsys.readouterr().err.strip()
    assert len(line.splitlines()) == 1
    assert "RuntimeError: deep inside" in line
    (report,) = tmp_path.glob("kha-megatron-*.txt")
    assert str(report) in line
    assert "Traceback" in report.read_text()


def test_a_full_output_device_is_an_error():
    command = [sys.executable, "-m", "kha_megatron", "recipes", "list"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert result.returncode == 2
    assert result.stderr == "error: Could not write the output: No space left on device\n"


def test_output_into_a_symlink_loop_is_refused(refused, tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    loop = str(tmp_path / "a")
    assert loop in refused(["data", "prepare", "--out", loop])
    assert loop in refused(["quickstart", "--output", loop])
    assert loop in refused(["launch", "quickstart", "--output", loop, "--", "--mock-data"])


def test_data_show_does_not_print_escape_sequences(monkeypatch, capsys, tmp_path):
    report = prepare([Path(__file__)], tmp_path / "out", vocab_size=260)
    evil = dataclasses.replace(
        report,
        sources=["\x1b[31mred"],
        tokenizer="\x1b]0;title",
    )
    monkeypatch.setattr("kha_megatron.data.verify", lambda *_: evil)
    monkeypatch.setattr(sys, "argv", ["kha-megatron", "data", "show", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        cli.main()
    assert "red" in (out := capsys.readouterr().out)
    assert "\x1b" not in out


def test_a_panic_of_a_library_is_one_error(monkeypatch, capsys):
    """A regular expression in ``tokenizer.json`` can raise it, which is not an Exception."""
    panic = type("PanicException", (BaseException,), {})

    def broken(*_):
        raise panic("called `Result::unwrap()` on an `Err` value")

    monkeypatch.setattr("kha_megatron.data.verify", broken)
    monkeypatch.setattr(sys, "argv", ["kha-megatron", "data", "show", "directory"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "error: The tokenizers library failed: called" in capsys.readouterr().err


WORKING = """
import sys, time
from kha_megatron import cli
from kha_megatron.cli import console
from kha_megatron.checkpoint.staging import staged_folder

def work(path, *_):
    with staged_folder(path) as staged:
        (staged / "weights").write_bytes(bytes(1000))
        print("ready", flush=True)
        time.sleep(60)

from kha_megatron import data
data.verify = work
cli.main()
"""


def default_signals():
    """Restore the handlers of a terminal: child processes inherit ignored signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.whole),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.whole),
    ],
)
def test_a_terminated_command_leaves_no_partial_output(tmp_path, number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", WORKING, "data", "show", tmp_path / "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )
    assert process.stdout.readline() == "ready\n"
    assert any(".partial" in name for name in os.listdir(tmp_path))
    process.send_signal(number)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    assert os.listdir(tmp_path) == []
