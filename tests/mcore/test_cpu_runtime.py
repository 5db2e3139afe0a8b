"""The CPU runtime: what it must catch, in processes of their own or in ranks, never in pytest's."""

import subprocess
import sys
import textwrap

import pytest

from kha_megatron.errors import ConfigError


def _random_fork():
    import torch
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)

    def draw():
        tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        first = torch.rand(3)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inside = torch.rand(3, device="cuda")
        second = torch.rand(3)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inside_again = torch.rand(3)
        return [x.tolist() for x in (first, second, inside, inside_again)]

    one = draw()
    two = draw()
    # without a fork in between, the outer stream gives the same numbers
    tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    assert torch.rand(6).tolist() == one[0] + one[1]
    torch.cuda.manual_seed(9)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    return one, two


def test_the_random_fork_of_tensor_parallel_ranks_is_reproducible(ranks):
    (one, again), (other, _) = ranks(_random_fork, 2)
    assert one == again
    assert one[:2] == other[:2]  # shared by the tensor-parallel ranks
    assert one[2] != other[2]  # each rank's own
    assert one[2] != one[3]  # the fork goes on where it stopped


def test_installation_refuses_before_it_changes_anything_and_happens_once():
    program = """
        import sys, types
        import torch
        from kha_megatron.mcore import cpu
        from kha_megatron.errors import ConfigError

        def refusal():
            try:
                cpu.install()
            except ConfigError as error:
                return str(error)

        stream = torch.cuda.Stream
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 3
        print(refusal())
        torch.cuda.is_available = lambda: False
        sys.modules["megatron.core"] = types.ModuleType("core")
        print(refusal())
        del sys.modules["megatron.core"]
        assert torch.cuda.Stream is stream and not cpu.is_installed()

        torch.cuda.is_available = lambda: True
        cpu.install(despite_cuda=True)
        stream, empty = torch.cuda.Stream, torch.empty
        cpu.install()
        assert cpu.is_installed() and torch.cuda.Stream is stream and torch.empty is empty
        assert torch.empty(1, device="cuda").device.type == "cpu"
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env={"PATH": "", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    on_a_gpu_machine, too_late = done.stdout.splitlines()
    assert "CUDA is available. Use --device cuda" in on_a_gpu_machine
    assert "must be called before the first `import megatron`" in too_late
    assert done.stderr.count("Megatron-Core runs on the CPU with gloo") == 1


@pytest.mark.parametrize(
    ("setting", "threads"), [("3", 3), ("2,1", 2), (" 4 , 2", 4), ("all", 0), ("0", 0), (",1", 0)]
)
def test_threads_are_those_of_the_outermost_region(setting, threads, monkeypatch):
    from kha_megatron.mcore.cpu import runtime

    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    if threads:
        assert runtime._read_num_threads() == threads
        return
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS must be a number .*, got {setting}"):
        runtime._read_num_threads()


def test_without_a_setting_torch_chooses_the_threads(monkeypatch):
    import torch

    from kha_megatron.mcore.cpu import runtime

    for setting in ("", None):
        if setting is None:
            monkeypatch.delenv("OMP_NUM_THREADS")
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", setting)
        assert runtime._read_num_threads() == torch.get_num_threads()
