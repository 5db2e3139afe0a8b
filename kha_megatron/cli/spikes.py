"""``kha-megatron spikes``: find the loss spikes of a run."""

import math
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON
from kha_megatron.compare.spikes import Definition, find_spikes
from kha_megatron.errors import DataError
from kha_megatron.recipes.log_lines import LOSS, read_history, read_log


def spikes(
    run: Annotated[
        Path,
        typer.Argument(metavar="LOG_OR_TENSORBOARD", help="Log file or --tensorboard-dir."),
    ],
    name: Annotated[str, typer.Option(help="Scalar to examine.")] = LOSS,
    window: Annotated[int, typer.Option(max=10**6, help="Logged values.")] = Definition.window,
    deviations: Annotated[float, typer.Option(help="Threshold / noise.")] = Definition.deviations,
    margin: Annotated[float, typer.Option(help="Minimum threshold (nats).")] = Definition.margin,
    as_json: AsJSON = False,
) -> None:
    """Find the loss spikes of a Megatron run with their height and recovery time.

    The level is the median of the last --window values outside of spikes, and the noise is 1.4826
    times their median absolute deviation. A spike starts at a value that is not finite, or that
    exceeds the level by more than --deviations times the noise and more than --margin. It ends at
    the first value less than half of that threshold above the level. Its height is its highest
    value minus the level, its recovery the number of iterations from start to end. The first
    quarter of --window values cannot start a spike.

    Prefer the TensorBoard directory: a log holds means over --log-interval iterations, which hide
    short spikes.

    Examples:
      kha-megatron spikes quickstart/run/tensorboard
      kha-megatron spikes slurm-1234.out --json | jq '.count'
    """
    definition = Definition(window=window, deviations=deviations, margin=margin)
    history = read_history(run) if run.is_dir() else read_log(run)
    if name not in history:
        raise DataError(f"{run} has no {name!r}. Choose from {', '.join(sorted(history))}.")
    values = history[name]
    if len(values) <= definition.first_judged:
        raise DataError(
            f"Expected more than {definition.first_judged} values of {name!r} in {run}, got "
            f"{len(values)}. Choose a smaller --window."
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
        f"{len(found)} spikes in {len(values)} values of {name!r}, iterations {first} to {last}"
    )
    if found:
        console.out.print(table)
