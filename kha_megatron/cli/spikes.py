"""``kha-megatron spikes``: how often the loss of a run jumps, how high, and how long it takes."""

import math
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON
from kha_megatron.compare.spikes import Definition, Spike, find_spikes
from kha_megatron.errors import DataError
from kha_megatron.recipes.log_lines import LOSS, read_history, read_log


def spikes(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="LOG_OR_TENSORBOARD",
            help="What Megatron printed, in a file, or its --tensorboard-dir.",
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", help="Which of the run's numbers to look at.")
    ] = LOSS,
    window: Annotated[
        int, typer.Option("--window", help="Logged values that make the level and the noise.")
    ] = Definition.window,
    deviations: Annotated[
        float, typer.Option("--deviations", help="How far above the level, in units of the noise.")
    ] = Definition.deviations,
    margin: Annotated[
        float, typer.Option("--margin", help="And how far at least, in units of the loss.")
    ] = Definition.margin,
    as_json: AsJSON = False,
) -> None:
    """Count the loss spikes of any Megatron run: height and iterations until recovery.

    A spike begins at a value that is above the level (the median of the last --window values that
    are in no spike) by more than --deviations times the noise (1.4826 times their median distance
    from the level) and by more than --margin, or that is NaN or infinite. It ends with the first
    value less than half of that threshold above the level it began from. Its height is the highest
    value minus the level; its recovery is the iterations from its first value to its end. A loss
    that stays up is one spike that has not recovered. The first quarter of --window values is not
    judged. The paper shows spikes and defines none; this definition is ours.

    A log holds means over --log-interval iterations, in which short spikes are lower than they
    were: prefer the TensorBoard folder.

    Examples:
      kha-megatron spikes quickstart/run/tensorboard
      kha-megatron spikes slurm-1234.out --json | jq '.count'
    """
    definition = Definition(window=window, deviations=deviations, margin=margin)
    history = read_history(run) if run.is_dir() else read_log(run)
    if name not in history:
        raise DataError(f"{run} holds no {name!r}: it holds {', '.join(sorted(history))}")
    values = history[name]
    if len(values) <= definition.first_judged:
        raise DataError(
            f"{run} holds {len(values)} values of {name!r}, and the first "
            f"{definition.first_judged} are not judged: give a smaller --window"
        )
    found = find_spikes(values, definition)
    iterations = (values[0][0], values[-1][0])
    if as_json:
        result = {
            "run": str(run),
            "name": name,
            "values": len(values),
            "iterations": iterations,
            "definition": asdict(definition),
            **_summary(found),
            "spikes": [_entry(spike) for spike in found],
        }
        console.print_json(result)
        return
    if found:
        table = console.numbers("start", "peak", "level", "height", "recovery", names=0)
        for spike in found:
            recovery = "not recovered" if spike.recovery is None else str(spike.recovery)
            numbers = (str(spike.start), str(spike.peak), f"{spike.level:.3f}")
            table.add_row(*numbers, _number(spike.height), recovery)
        console.out.print(table)
    console.out.print(
        f"{len(found)} {'spike' if len(found) == 1 else 'spikes'} in {len(values)} values of "
        f"{name!r}, iterations {iterations[0]} to {iterations[1]}{_words(found)}"
    )


def _summary(found: list[Spike]) -> dict[str, Any]:
    recoveries = [spike.recovery for spike in found if spike.recovery is not None]
    return {
        "count": len(found),
        "highest": max((spike.height for spike in found), default=0.0),
        "median_recovery": median(recoveries) if recoveries else None,
        "longest_recovery": max(recoveries, default=None),
        "not_recovered": len(found) - len(recoveries),
    }


def _words(found: list[Spike]) -> str:
    if not found:
        return ""
    summary = _summary(found)
    words = [f"highest {_number(max(spike.height for spike in found))}"]
    if summary["median_recovery"] is not None:
        words.append(
            f"recovered after {summary['median_recovery']:g} iterations (median), at most "
            f"{summary['longest_recovery']}"
        )
    if summary["not_recovered"]:
        words.append(f"{summary['not_recovered']} not recovered")
    return ": " + ", ".join(words)


def _entry(spike: Spike) -> dict[str, Any]:
    return asdict(spike) | {"recovery": spike.recovery, "finite": math.isfinite(spike.height)}


def _number(height: float) -> str:
    return f"{height:.3f}" if math.isfinite(height) else "not finite"
