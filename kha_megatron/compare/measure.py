"""Cost and diagnostics of a trained variant."""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.compare.charts import draw_matrices
from kha_megatron.errors import ConfigError
from kha_megatron.heads.diagnostics import diagnose
from kha_megatron.heads.knock import Variant
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.recorded import read_kha_config, read_knock_weights
from kha_megatron.model.run import Run
from kha_megatron.plan.counts import (
    TRAINING_FACTOR,
    compute_flops,
    count_model,
    get_countable_model,
    get_sequence_length,
)

Entry = dict[str, Any]
"""A JSON object in ``result.json``."""


def compute_cost(
    run: Run,
    vocab_size: int | None,
    model: ModelConfig | None = None,
) -> Entry:
    """Compute parameter counts and training FLOPs per token.

    Args:
        run: Arguments of the run.
        vocab_size: Vocabulary size including padding.
        model: The model, if the arguments do not describe it.

    Returns:
        A dictionary with these keys:

        - ``total``, ``active``, ``kha``: number of parameters
        - ``flops``, ``kha_flops``: training FLOPs per token
        - ``spared_flops``: FLOPs that a kernel could save by skipping inactive heads
        - ``unfused``: why the variant cannot use fused attention kernels (None if it can)
        - ``uncounted``: error message, replaces the counts if the model is not supported
    """
    if model is None:
        model = replace(run, vocab_size=vocab_size).model
    unfused = None
    if model is not None:
        unfused = run.kha.unfused_reason(model.head_sizes)
    try:
        model = get_countable_model(model, run.arguments)
        length = get_sequence_length(run.arguments)
    except ConfigError as error:
        return {"unfused": unfused, "uncounted": str(error)}
    counts = count_model(model)
    flops = compute_flops(model, length)
    skippable = flops.skippable_projections + flops.skippable_scores
    return {
        "unfused": unfused,
        "total": counts.total,
        "active": counts.active,
        "kha": counts.kha,
        "flops": flops.training / length,
        "kha_flops": TRAINING_FACTOR * flops.kha / length,
        "spared_flops": TRAINING_FACTOR * skippable / length,
    }


def describe_device(run: Run) -> str:
    """Describe the hardware for the report, e.g. ``8 x NVIDIA H100 80GB HBM3``."""
    if run.training.device == "cpu" or not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores"
    count = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0)
    return f"{count} x {name}"


def diagnose_matrices(checkpoint: MegatronCheckpoint, folder: Path) -> list[Entry]:
    """Compute diagnostics of the KHA matrices in a checkpoint, and plot them to ``folder``.

    Returns:
        A list of JSON entries, e.g. ``{"projection": "value", "variant": "mlp", "matrix": "up",
        "picture": "value_up.png", "layers": [{"layer": 0, ...}, ...]}``. Empty without KHA.
    """
    kha = read_kha_config(checkpoint)
    if kha is None or not kha.variants:
        return []
    weights = read_knock_weights(checkpoint)
    draw_matrices(weights, kha, folder)
    entries = []
    for projection, variant in kha.variants.items():
        weight_by_layer = {}
        for (layer, weight_projection), weight in sorted(weights.items()):
            if weight_projection == projection:
                weight_by_layer[layer] = weight
        layers_by_matrix = _diagnose_layers(weight_by_layer, variant)
        for matrix, layers in layers_by_matrix.items():
            entry = {
                "projection": projection,
                "variant": variant,
                "matrix": matrix,
                "picture": f"{projection}_{matrix}.png",
                "layers": layers,
            }
            entries.append(entry)
    return entries


def _diagnose_layers(
    weight_by_layer: Mapping[int, torch.Tensor],
    variant: Variant,
) -> dict[str, list[Entry]]:
    """Return the diagnostics of each layer by the name of the matrix, e.g. ``up``.

    Args:
        weight_by_layer: Each weight has shape (num_matrices, head_dim, head_dim).
    """
    layers_by_matrix: dict[str, list[Entry]] = {}
    for layer, weight in weight_by_layer.items():
        for diagnostics in diagnose(weight, variant):
            entry = {"layer": layer} | asdict(diagnostics)
            layers_by_matrix.setdefault(diagnostics.matrix, []).append(entry)
    return layers_by_matrix
