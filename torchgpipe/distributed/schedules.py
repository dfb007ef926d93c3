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

#: The names of `torchgpipe.schedule` that PyTorch has a schedule for, and two of PyTorch's own.
ScheduleName: TypeAlias = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "ZeroBubble", "LoopedBFS", "InterleavedZeroBubble"
]

#: PyTorch's schedules with one stage in each process, and with several, by their names here.
_SINGLE: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
_SEVERAL: dict[str, Any] = {
    "GPipe": ScheduleLoopedBFS,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "ZeroBubble": ScheduleInterleavedZeroBubble,
}
_NAMES = {schedule: name for name, schedule in [*_SINGLE.items(), *_SEVERAL.items()]}

#: PyTorch's names, without the word Schedule.
_THEIRS = {schedule.__name__.removeprefix("Schedule").lower(): schedule for schedule in _NAMES}


def verify_schedule(name: str, partitions: int, processes: int) -> Any:
    """Return PyTorch's class of a schedule, given the schedule's name in any case.

    Raises:
        ValueError: there is none, or it does not fit the numbers of partitions and processes.
    """
    several = partitions > processes
    ours = {**_SINGLE, **_SEVERAL, **(_SEVERAL if several else _SINGLE)}
    schedule = {**_THEIRS, **{known.lower(): name for known, name in ours.items()}}.get(name.lower())
    if schedule is None:
        raise ValueError(
            f"schedule must be one of {', '.join(dict.fromkeys(_NAMES.values()))}, or PyTorch's name of one of these, "
            f"but got {name!r}"
        )
    if several and schedule in _SINGLE.values():
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
    """Return the name that PyTorch's class of a schedule has here."""
    return _NAMES[schedule]


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
