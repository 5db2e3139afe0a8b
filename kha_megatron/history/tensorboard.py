"""A run's TensorBoard files: the numbers of every iteration, exactly as they were."""

from pathlib import Path

from kha_megatron.errors import DataError

History = dict[str, list[tuple[int, float]]]
"""Values by name, each at its training iteration, in order."""

LOSS = "lm loss"
VALIDATION_LOSS = "lm loss validation"
SECONDS = "iteration-time"


def read_history(tensorboard_dir: Path) -> History:
    """All scalars of a ``--tensorboard-dir``, without the copies over samples.

    A step that several runs wrote (after a resume) has the value of the newest. A step that one run
    wrote twice has the first: Megatron ends with the test loss under the validation loss's name.

    Raises:
        DataError: the folder holds no TensorBoard event file.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = sorted(Path(tensorboard_dir).glob("events.out.tfevents.*"))
    if not files:
        raise DataError(
            f"{tensorboard_dir} holds no TensorBoard file (events.out.tfevents.*): "
            "train with --tensorboard-dir"
        )
    merged: dict[str, dict[int, float]] = {}
    for file in files:  # their names begin with the time of their start
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            if not name.endswith(" vs samples"):
                first = {event.step: event.value for event in reversed(events.Scalars(name))}
                merged.setdefault(name, {}).update(first)
    return {name: sorted(values.items()) for name, values in merged.items()}
