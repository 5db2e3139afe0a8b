"""Run saved models on two gloo ranks with transformers' own tensor parallelism.

The ``ranks`` fixture is not used: it installs Megatron's CPU runtime, with which transformers takes
its processes for GPUs.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import kha_megatron.hf  # noqa: F401 (registers the kha architecture)

RESULTS = "rank{}.pt"


def run_ranks(jobs: list[tuple[Path, dict[str, int]]], ids: Tensor, root: Path) -> None:
    """Load each directory sharded over two ranks and write the results of every rank into it.

    ``jobs`` has directories of saved models, and keywords of ``DistributedConfig`` for each.
    """
    plans = [(str(directory), plan) for directory, plan in jobs]
    torch.save([plans, ids], root / "jobs.pt")
    command = [sys.executable, "-m", "tests.hf.sharded", root]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)


def _rank(rank: int, root: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/store",
        rank=rank,
        world_size=2,
    )
    jobs, ids = torch.load(root / "jobs.pt")
    for directory, plan in jobs:
        results = _results(directory, ids, plan)
        torch.save(results, Path(directory) / RESULTS.format(rank))
    dist.destroy_process_group()


def _results(directory: str, ids: Tensor, plan: dict[str, int]) -> dict[str, object]:
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        distributed_config=DistributedConfig(**plan),
        trust_remote_code=False,
    )
    with torch.no_grad():
        logits = model(ids).logits
        new = model.generate(
            ids,
            max_new_tokens=2,
            do_sample=False,
            pad_token_id=0,
        )
    model.train()
    model(ids, labels=ids).loss.backward()
    grads = _local_gradients(model)
    model(ids, labels=ids).loss.backward()  # The second gradient is added to the first.
    return {
        "logits": logits,
        "new": new,
        "grads": grads,
        "accumulated": _local_gradients(model),
    }


def _local_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        gradients[name] = gradient.clone()
    return gradients


if __name__ == "__main__":
    mp.start_processes(
        _rank,
        args=(Path(sys.argv[1]),),
        nprocs=2,
        start_method="fork",
    )
