"""Measure a finished run: closed-form counts and learnt matrices."""

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


def cost(run: Run, vocab_size: int | None) -> dict[str, Any]:
    """Return parameters and training FLOPs (forward and backward) per token in closed form.

    Args:
        run: with the variant's KHA settings.
        vocab_size: rows of the embedding.

    Returns:
        ``total``, ``active`` and ``kha`` parameters; ``flops`` and ``kha_flops`` of one token; and
        ``spared_flops``, which kernels that skip unselected heads would save. Otherwise
        ``uncounted`` with the reason. ``unfused`` is the reason why fused attention kernels cannot
        compute the variant, or None.
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


def device(run: Run) -> str:
    """Return the name of the hardware of a run."""
    if run.training.device == "cpu" or not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def matrices(checkpoint: MegatronCheckpoint, folder: Path) -> list[dict[str, Any]]:
    """Diagnose every learnt matrix and write one PNG per projection and matrix into ``folder``.

    Returns:
        One entry per projection and matrix with ``projection``, ``variant``, ``matrix``,
        ``picture`` (file name) and ``layers`` (the diagnostics of each layer).
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
