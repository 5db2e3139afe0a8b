"""Compute the cost of a variant and diagnostics of its trained matrices."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.compare.charts import draw_matrices
from kha_megatron.errors import ConfigError
from kha_megatron.heads.diagnostics import diagnose
from kha_megatron.heads.knock import MATRICES
from kha_megatron.model.recorded import read_kha_config, read_knock_weights
from kha_megatron.model.run import Run
from kha_megatron.plan.counts import compute_flops, count_model, get_countable_model


def compute_cost(run: Run, vocab_size: int | None) -> dict[str, Any]:
    """Compute the number of parameters and the training FLOPs per token.

    Returns:
        Parameters (``total``, ``active``, ``kha``) and FLOPs (``flops``, ``kha_flops``), where
        ``spared_flops`` could be saved by skipping inactive heads. If the model is not supported,
        ``uncounted`` is the reason. ``unfused`` is the reason why fused attention kernels do not
        support the variant, or None.
    """
    model = replace(run, vocab_size=vocab_size).model
    kernels = {"unfused": model and run.kha.unfused_reason(model.head_sizes)}
    try:
        model = get_countable_model(model)
    except ConfigError as error:
        return kernels | {"uncounted": str(error)}
    length = run.arguments["seq_length"]
    counts, work = count_model(model, run.kha), compute_flops(model, run.kha, length)
    return kernels | {
        "total": counts.total,
        "active": counts.active,
        "kha": counts.kha,
        "flops": 3 * work.forward / length,
        "kha_flops": 3 * work.kha / length,
        "spared_flops": 3 * (work.skippable_projections + work.skippable_scores) / length,
    }


def describe_device(run: Run) -> str:
    """Return the number and type of devices that were used for a run."""
    if run.training.device == "cpu" or not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def diagnose_matrices(checkpoint: MegatronCheckpoint, folder: Path) -> list[dict[str, Any]]:
    """Compute diagnostics of all KHA matrices and draw one PNG per projection and matrix.

    Returns:
        One entry per projection and matrix, with the PNG's file name in ``picture`` and the
        diagnostics of each layer in ``layers``.
    """
    kha = read_kha_config(checkpoint)
    if kha is None or not kha.variants:
        return []
    weights = read_knock_weights(checkpoint)
    draw_matrices(weights, kha, folder)
    found = []
    for projection, variant in kha.variants.items():
        numbers = {
            layer: list(diagnose(weight, variant))
            for (layer, name), weight in sorted(weights.items())
            if name == projection
        }
        for i, matrix in enumerate(MATRICES[variant]):
            layers = [{"layer": layer} | asdict(values[i]) for layer, values in numbers.items()]
            entry = {"projection": projection, "variant": variant, "matrix": matrix}
            found.append(entry | {"picture": f"{projection}_{matrix}.png", "layers": layers})
    return found
