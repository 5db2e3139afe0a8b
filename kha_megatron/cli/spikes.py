"""``kha-megatron spikes``: find loss spikes in a training run."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON
from kha_megatron.compare.spikes import Spike, SpikeDefinition, find_spikes
from kha_megatron.errors import DataError
from kha_megatron.recipes.log_lines import LOSS, read_history, read_log


def spikes(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="LOG_OR_TENSORBOARD", help="Megatron log file or TensorBoard directory."
        ),
    ],
    name: Annotated[str, typer.Option(help="Metric to check.")] = LOSS,
    window: Annotated[
        int, typer.Option(min=4, max=10**6, help="Window size.")
    ] = SpikeDefinition.window,
    deviations: Annotated[
        float, typer.Option(min=0, help="Threshold in standard deviations.")
    ] = SpikeDefinition.deviations,
    margin: Annotated[
        float, typer.Option(min=0, help="Threshold in nats.")
    ] = SpikeDefinition.margin,
    as_json: AsJSON = False,
) -> None:
    """Find loss spikes in a Megatron run and print their height and recovery time.

    The loss is compared with the median of the last --window values. A spike starts if the loss is
    above that median by more than --margin and by more than --deviations standard deviations
    (estimated as 1.4826 times the median absolute deviation), or if it is not finite. The spike
    ends once the loss is back below half of this threshold.

    Values inside spikes are not added to the window, and no spikes are reported until a quarter of
    the window is filled. The height of a spike is measured from the median, and its recovery time
    in iterations. If possible, use a TensorBoard directory: logged losses are averages over
    --log-interval iterations, so logs are less accurate.

    Examples:
      kha-megatron spikes quickstart/run/tensorboard
      kha-megatron spikes slurm-1234.out --json | jq '.count'
    """
    definition = SpikeDefinition(window=window, deviations=deviations, margin=margin)
    history = read_history(run) if run.is_dir() else read_log(run)
    if name not in history:
        raise DataError(
            f"Metric {name!r} not found in {run}. Available: {', '.join(sorted(history))}."
        )
    values = history[name]
    if len(values) <= definition.warmup:
        raise DataError(
            f"{run} has only {len(values)} values of {name!r}, but at least "
            f"{definition.warmup + 1} are required. Choose a smaller --window."
        )
    detected = find_spikes(values, definition)
    first_iteration, _ = values[0]
    last_iteration, _ = values[-1]
    if as_json:
        result = {
            "run": str(run),
            "name": name,
            "values": len(values),
            "iterations": (first_iteration, last_iteration),
            "definition": asdict(definition),
        }
        console.print_json(result | _summarize(detected))
        return
    console.out.print(
        f"Found {len(detected)} spikes in {len(values)} values of {name!r} (iterations "
        f"{first_iteration} to {last_iteration})."
    )
    if detected:
        console.out.print(_spike_table(detected))


def _summarize(detected: Sequence[Spike]) -> dict[str, Any]:
    heights = [spike.height for spike in detected]
    recoveries = [spike.recovery for spike in detected if spike.recovery is not None]
    entries = []
    for spike in detected:
        entry = asdict(spike)
        entry["recovery"] = spike.recovery
        entry["finite"] = math.isfinite(spike.height)
        entries.append(entry)
    return {
        "count": len(detected),
        "highest": max(heights, default=0.0),
        "median_recovery": median(recoveries) if recoveries else None,
        "longest_recovery": max(recoveries, default=None),
        "not_recovered": len(detected) - len(recoveries),
        "spikes": entries,
    }


def _spike_table(detected: Sequence[Spike]) -> Table:
    table = console.number_table(
        "start",
        "peak",
        "level",
        "height",
        "recovery",
        left_aligned=0,
    )
    for spike in detected:
        height = f"{spike.height:.3f}" if math.isfinite(spike.height) else "not finite"
        recovery = "not recovered" if spike.recovery is None else str(spike.recovery)
        table.add_row(
            str(spike.start),
            str(spike.peak),
            f"{spike.level:.3f}",
            height,
            recovery,
        )
    return table
