"""Find PyTorch's schedules by name, and check what each of them needs of a pipeline."""

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

#: Schedules with one stage in each process, and with several. The keys are in lower case, because any case is accepted.
_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL: dict[str, Any] = {
    "loopedbfs": ScheduleLoopedBFS,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "interleavedzerobubble": ScheduleInterleavedZeroBubble,
}


def verify_schedule(name: str, partitions: int, processes: int) -> Any:
    """Return PyTorch's class of this name.

    Raises:
        ValueError: there is none, or it does not fit the numbers of partitions and processes.
    """
    known = {**_SINGLE, **_SEVERAL}
    schedule = known.get(name.lower())
    if schedule is None:
        raise ValueError(f"schedule must be one of {', '.join(map(name_of, known.values()))}, but got {name!r}")
    if name.lower() in _SINGLE and partitions != processes:
        raise ValueError(
            f"{name} has one stage in each process, but there are {partitions} partitions in the balance and "
            f"{processes} processes in a pipeline; for several stages in each, use schedule='Interleaved1F1B'"
        )
    if partitions % processes:
        raise ValueError(
            f"the number of partitions must be a multiple of the number of processes in a pipeline, but there are "
            f"{partitions} partitions and {processes} processes; change the balance"
        )
    return schedule


def name_of(schedule: Any) -> str:
    """Return the name of a schedule's class, without the word Schedule."""
    name: str = schedule.__name__
    return name.removeprefix("Schedule")


def verify_fit(checkpoint: Any, schedule: Any) -> CheckpointMode:
    """Check that the schedule can run with this checkpoint mode, and return the mode.

    Raises:
        ValueError: there is no such mode, or the schedule cannot.
    """
    mode = verify_checkpoint(checkpoint)
    if schedule is ScheduleInterleavedZeroBubble and mode != "never":
        raise ValueError(
            "the zero bubble schedule differentiates each micro-batch twice, and would recompute it twice; "
            f"use checkpoint='never' instead of {mode!r}"
        )
    return mode


def is_interleaved(schedule: Any) -> bool:
    """Return whether a schedule runs several stages in each process."""
    return schedule in _SEVERAL.values()


def fill_drain(schedule: Any) -> Any:
    """Return the schedule that runs any number of micro-batches, with as many stages in a process."""
    return ScheduleLoopedBFS if is_interleaved(schedule) else ScheduleGPipe
