"""``kha-megatron spikes``: find loss spikes in a training run."""

import math
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON
from kha_megatron.compare.spikes import SpikeDefinition, find_spikes
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
    found = find_spikes(values, definition)
    first, last = values[0][0], values[-1][0]
    recoveries = [spike.recovery for spike in found if spike.recovery is not None]
    if as_json:
        result = {
            "run": str(run),
            "name": name,
            "values": len(values),
            "iterations": (first, last),
            "definition": asdict(definition),
            "count": len(found),
            "highest": max((spike.height for spike in found), default=0.0),
            "median_recovery": median(recoveries) if recoveries else None,
            "longest_recovery": max(recoveries, default=None),
            "not_recovered": len(found) - len(recoveries),
            "spikes": [
                asdict(spike) | {"recovery": spike.recovery, "finite": math.isfinite(spike.height)}
                for spike in found
            ],
        }
        console.print_json(result)
        return
    table = console.number_table("start", "peak", "level", "height", "recovery", names=0)
    for spike in found:
        height = f"{spike.height:.3f}" if math.isfinite(spike.height) else "not finite"
        recovery = "not recovered" if spike.recovery is None else str(spike.recovery)
        table.add_row(str(spike.start), str(spike.peak), f"{spike.level:.3f}", height, recovery)
    console.out.print(
        f"Found {len(found)} spikes in {len(values)} values of {name!r} (iterations {first} to "
        f"{last})."
    )
    if found:
        console.out.print(table)
