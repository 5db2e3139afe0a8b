"""The entry point refuses a Megatron that only the plug-in can work with."""

from tests.training.conftest import start

PROGRAM = """
from kha_megatron.mcore import compat
compat.installed_version = lambda: "0.18.2"
from kha_megatron.training.__main__ import main
main()
"""


def test_an_older_megatron_is_refused_with_code_2_and_one_line():
    run = start(["--device", "cpu", "--mock-data", "--kha-preset", "kha_mlp"], program=PROGRAM)
    assert run.codes == [2]
    (line,) = run.errors
    assert "need megatron-core 0.19, and this is 0.18.2" in line
    assert "pip install 'megatron-core>=0.19,<0.20'" in line
    assert "--spec kha_megatron.mcore.specs" in line
    assert "Traceback" not in run.output
