"""What a scheduler that starts jobs again is told by a training that is over, or is not."""

import pytest

from tests.faults.jobs import arguments, until

FLAG = "FAULT_TOL_FINISHED_FLAG_FILE"


@pytest.mark.whole
def test_the_flag_of_a_finished_training_is_left_when_it_has_finished(entry, tmp_path, monkeypatch):
    flag, job = tmp_path / "flag", arguments(tmp_path / "run", "--train-iters", "2")
    monkeypatch.setenv(FLAG, str(flag))
    assert entry([*job, *until(1)], 2).codes == [0, 0]
    assert not flag.exists(), "cut short"
    run = entry(job, 2)
    assert run.codes == [0, 0], run.output[-3000:]
    assert flag.is_file()

    monkeypatch.setenv(FLAG, str(tmp_path / "no" / "flag"))
    run = entry(job, 2)  # nothing left to train
    assert run.codes[0] == 2, run.output[-3000:]
    (line,) = run.errors
    assert f"{FLAG} {tmp_path}/no/flag cannot be written (No such file" in line
