"""Test that optimizer state of another layout is refused."""

import pytest

from tests.faults.jobs import arguments, resumed, until


@pytest.mark.whole
def test_optimizer_state_of_another_layout(entry, tmp_path):
    fixed, moving = tmp_path / "fixed", tmp_path / "moving"
    assert entry(arguments(fixed, *until(1)), 2).codes == [0, 0]
    other = ["--tensor-model-parallel-size", "2"]
    run = entry(arguments(fixed, *until(2), *other), 2)
    assert run.codes == [2, 2], run.output[-3000:]
    (line,) = run.errors
    assert "can only be loaded with --tensor-model-parallel-size 1, not" in line
    remedies = ["--dist-ckpt-optim-fully-reshardable", "--no-load-optim"]
    assert [word in line for word in remedies] == [True, True]

    anew = entry(arguments(fixed, *until(2), *other, remedies[1]), 2)
    saved = entry(arguments(moving, *until(1), remedies[0]), 2)
    moved = entry(arguments(moving, *until(2), *other, remedies[0]), 2)
    for run in (anew, saved, moved):
        assert run.codes == [0, 0], run.output[-3000:]
    assert resumed(anew.output) == resumed(moved.output) == 1
