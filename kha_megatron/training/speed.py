"""Log tokens per second and GPU, and model FLOPs utilization (MFU), to TensorBoard and W&B.

The MFU counts the FLOPs that Megatron prints as throughput, which exclude those of KHA. It is
relative to the dense bf16 peak of the GPU, also for FP8.
"""

from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training import get_args, training

from kha_megatron.mcore import patches
from kha_megatron.training.scalars import write_scalars

_PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
}
"""Dense bf16 FLOP/s by NVIDIA's data sheets. Longer names take precedence."""


def log_speed() -> None:
    """Log the speed whenever Megatron computes its throughput, every ``--log-interval``."""
    patches.wrap_throughput_report(_report)


def _report(original: Any, is_logged: bool = False, throughput: float | None = None) -> None:
    original(is_logged, throughput)
    args = get_args()
    iteration = args.curr_iteration + 1
    if throughput is None:  # called before a save
        return
    if iteration % args.log_interval:  # Megatron also logs the first iteration
        return
    flops_per_second = throughput * 10**12  # per GPU
    batch_size = get_current_global_batch_size()
    flops_per_batch = training.num_floating_point_operations(args, batch_size)
    batches_per_second = flops_per_second / flops_per_batch
    tokens_per_second = batches_per_second * batch_size * args.seq_length
    values = {"tokens-per-second-per-gpu": tokens_per_second}
    peak = find_peak(torch.cuda.get_device_name()) if args.device == "cuda" else None
    if peak is not None:
        values["mfu"] = flops_per_second / peak
    write_scalars(values, iteration)


def find_peak(device_name: str) -> float | None:
    """Return the peak FLOP/s of a GPU, or None if it is unknown."""
    words = device_name.replace("-", " ").split()
    for name in sorted(_PEAKS, key=len, reverse=True):
        if set(name.split()) <= set(words):
            return _PEAKS[name]
    return None
