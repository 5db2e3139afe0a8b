"""The CPU runtime: what it must catch, in processes of their own or in ranks, never in pytest's."""

import subprocess
import sys
import textwrap


def _every_way_to_name_the_device():
    import torch
    from torch.utils.data import DataLoader

    assert torch.cuda.is_available()
    assert torch.cuda.current_device() == 0
    x = torch.ones(3)
    for device in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0):
        made = [
            torch.empty(2, 3, device=device),
            torch.zeros((2, 3), device=device),
            torch.tensor([1.0], device=device),
            torch.arange(3, device=device),
            torch.randn_like(x, device=device),
            torch.full((2,), 1.0, device=device, pin_memory=True),
            x.new_zeros(2, device=device),
            x.to(device),
            x.to(device, torch.bfloat16, non_blocking=True),
            x.to(device=device, dtype=torch.float64),
            x.cuda(device, non_blocking=True),
            x.cuda(device=device),
            x.pin_memory(),
            torch.nn.Linear(2, 3, device=device).weight,
            torch.nn.Linear(2, 3).to(device).weight,
            torch.nn.Linear(2, 3).cuda(device).weight,
            torch.nn.Linear(2, 3).cuda().weight,
        ]
        assert {tensor.device.type for tensor in made} == {"cpu"}
    assert x.to("cuda", torch.bfloat16).dtype == torch.bfloat16
    assert x.to(device="cuda", dtype=torch.float64).dtype == torch.float64
    assert x.to(torch.int64).dtype == torch.int64
    assert torch.full((2,), 3, device="cuda").tolist() == [3, 3]
    assert torch.empty(2, device="meta").device.type == "meta"
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.type(torch.int64).dtype == torch.int64

    batches = DataLoader(list(range(5)), batch_size=2, pin_memory=True)
    before = torch.get_rng_state()
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert torch.equal(torch.get_rng_state(), before)


def test_every_way_to_name_a_cuda_device_lands_on_the_cpu(ranks):
    ranks(_every_way_to_name_the_device, 1)


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

    one, two = draw(), draw()
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


def _exchange():
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    sizes = torch.tensor([[1, 2], [3, 0]])
    sent = torch.arange(3.0) + 10 * rank
    received = torch.empty(int(sizes[:, rank].sum()), device="cuda")
    dist.all_to_all_single(received, sent, sizes[:, rank], sizes[rank])
    return received.tolist()


def test_all_to_all_takes_split_sizes_as_tensors(ranks):
    assert ranks(_exchange, 2) == [[0, 10, 11, 12], [1, 2]]


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
