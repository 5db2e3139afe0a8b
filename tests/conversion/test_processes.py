"""End the process that runs Megatron when its parent is killed."""

import os
import signal
import subprocess
import sys

from tests.processes import is_alive, wait_until

COMMAND = """
import os, sys, time
from pathlib import Path
from kha_megatron.conversion import megatron_model

def hold(*_):
    part = Path(sys.argv[1]).with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.rename(sys.argv[1])
    time.sleep(3000)

if __name__ == "__main__":
    megatron_model._run_here = hold
    megatron_model.run_megatron(None, None, rounded_to=None)
"""


def test_the_process_that_runs_megatron_ends_with_its_parent(tmp_path):
    script, pid = tmp_path / "command.py", tmp_path / "pid"
    script.write_text(COMMAND)
    command = subprocess.Popen([sys.executable, script, pid])
    try:
        wait_until(pid.exists)
        command.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_alive(int(pid.read_text())))
    finally:
        command.kill()
        command.wait()
        if pid.exists() and is_alive(int(pid.read_text())):
            os.kill(int(pid.read_text()), signal.SIGKILL)
