"""PyTorch's schedules by their names, and what each of them asks of a pipeline."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from torchgpipe.model.settings import CheckpointMode, verify_checkpoint

__all__ = ["ScheduleName", "fill_drain", "is_interleaved", "name_of", "verify_fit", "verify_schedule"]

#: PyTorch's names of schedules, without the word Schedule.
ScheduleName: TypeAlias = Literal["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"]

#: By PyTorch's names without the word Schedule, in any case: what runs one stage in each process, and what several.
_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL: dict[str, Any] = {
    "loopedbfs": ScheduleLoopedBFS,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "interleavedzerobubble": ScheduleInterleavedZeroBubble,
}


def verify_schedule(name: str, partitions: int, processes: int) -> Any:
    """The kind of schedule of this name.

    Raises:
        ValueError: there is none, or it does not fit the numbers of partitions and processes.
    """
    known = {**_SINGLE, **_SEVERAL}
    schedule = known.get(name.lower())
    if schedule is None:
        raise ValueError(f"schedule is not one of {', '.join(map(name_of, known.values()))}, but {name!r}")
    if name.lower() in _SINGLE and partitions != processes:
        raise ValueError(
            f"{name} has one stage in each process, but there are {partitions} partitions in the balance and "
            f"{processes} processes in a pipeline; for several stages in each, use schedule='Interleaved1F1B'"
        )
    if partitions % processes:
        raise ValueError(
            f"the number of partitions must be a multiple of that of the processes in a pipeline, but there are "
            f"{partitions} and {processes}"
        )
    return schedule


def name_of(schedule: Any) -> str:
    """Return the name of a kind of schedule, without the word Schedule."""
    name: str = schedule.__name__
    return name.removeprefix("Schedule")


def verify_fit(checkpoint: Any, schedule: Any) -> CheckpointMode:
    """The checkpoint mode, once it fits the schedule.

    Raises:
        ValueError: it is none, or does not.
    """
    mode = verify_checkpoint(checkpoint)
    if schedule is ScheduleInterleavedZeroBubble and mode != "never":
        raise ValueError(
            "the zero bubble schedule differentiates each micro-batch twice, which would also compute it again twice; "
            "use checkpoint='never'"
        )
    return mode


def is_interleaved(schedule: Any) -> bool:
    """Return whether this kind of schedule runs several stages in each process."""
    return schedule in _SEVERAL.values()


def fill_drain(schedule: Any) -> Any:
    """Return the kind of schedule for as many stages in a process that runs any number of micro-batches."""
    return ScheduleLoopedBFS if is_interleaved(schedule) else ScheduleGPipe
