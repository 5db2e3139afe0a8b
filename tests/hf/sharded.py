"""Run saved models on two gloo ranks with transformers' own tensor parallelism.

The ``ranks`` fixture is not used: it installs Megatron's CPU runtime, with which transformers takes
its processes for GPUs.
"""

import os
from multiprocessing import set_forkserver_preload
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor

SEEN = "rank{}.pt"


def run_ranks(jobs: list[tuple[Path, dict[str, int]]], ids: Tensor, store: Path) -> None:
    """Load each directory sharded over two ranks and write the results of every rank into it.

    Args:
        jobs: directories of saved models, and keywords of ``DistributedConfig`` for each.
        ids: tokens ``[B, S]``.
        store: a new file for the rendezvous.
    """
    set_forkserver_preload(["kha_megatron.hf.attention_kha", "transformers.distributed"])
    args = (jobs, ids, store)
    mp.start_processes(_rank, args=args, nprocs=2, start_method="forkserver")


def _rank(rank: int, jobs: list[tuple[Path, dict[str, int]]], ids: Tensor, store: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for folder, plan in jobs:
        torch.save(_use(folder, ids, plan), folder / SEEN.format(rank))
    dist.destroy_process_group()


def _use(folder: Path, ids: Tensor, plan: dict[str, int]) -> dict[str, object]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import kha_megatron.hf  # noqa: F401 (registers the kha architecture)

    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(**plan), trust_remote_code=False
    )
    with torch.no_grad():
        logits = model(ids).logits
        new = model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    model.train()
    seen = []
    for _ in range(2):  # The second gradient is added to the first.
        model(ids, labels=ids).loss.backward()
        seen.append({n: _local(p.grad).detach().clone() for n, p in model.named_parameters()})
    return {"logits": logits, "new": new, "grads": seen[0], "accumulated": seen[1]}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
