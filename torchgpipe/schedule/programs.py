"""The programs of the literature, for any number of micro-batches. Here for two devices and three micro-batches:

    GPipe     F0F1F2..b2  b1  b0        all forward, then all backward, in reverse
              ..F0F1F2b2  b1  b0  ..
    1F1B      F0F1..b0  F2b1    ..b2    a device holds one micro-batch for itself, and one for each device behind it
              ..F0b0  F1b1  F2b2  ..
    LayerMajor, for two partitions on one device, which can do with the weights of one at a time:
              F0F1F2F0b0  F1b1  F2b2  b0  b1  b2

The others are generated (see `fastest`) for equal times of F, I and W, with the placement and the memory of their
papers. On d devices with v partitions each, a device keeps at most so many cells:

    Interleaved1F1B    d v           backward in one piece
    ZeroBubble         d v           each device has neighbouring partitions, or they go round the devices
    V-Min              2 (d+4)//3    partitions are placed like a V, so that the last device turns micro-batches back:
    V-Half             2 (d+2)//2
    ZB-V               2 d               0 ┐       ┌ 5    device 0
                                           1 ┐   ┌ 4      device 1
                                             2 └─ 3       device 2

Sources:

- GPipe: Y. Huang et al., `GPipe <https://arxiv.org/abs/1811.06965>`_, 2018.
- 1F1B: D. Narayanan et al., `PipeDream <https://arxiv.org/abs/1806.03377>`_, 2018, with a flush after each step.
- Interleaved1F1B: D. Narayanan et al., `Efficient Large-Scale Language Model Training on GPU Clusters
  <https://arxiv.org/abs/2104.04473>`_, 2021, which keeps half as much again; that it need not was shown by X. Wan et
  al., `PipeOffload <https://arxiv.org/abs/2503.01328>`_, 2025.
- ZeroBubble: the memory of schedule H1 of P. Qi et al., `Zero Bubble Pipeline Parallelism
  <https://arxiv.org/abs/2401.10241>`_, 2023.
- V-Min, V-Half, ZB-V: P. Qi et al., `Pipeline Parallelism with Controllable Memory
  <https://arxiv.org/abs/2405.15362>`_, 2024.
- LayerMajor: J. Lamy-Poirier, `Breadth-First Pipeline Parallelism <https://arxiv.org/abs/2211.05953>`_, 2022, but for
  the last partition, which runs backward after each forward, and so holds one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import groupby
from typing import Literal, TypeAlias, get_args

from torchgpipe.schedule.action import Action, Kind, Program, verify
from torchgpipe.schedule.clock import clock_cycles
from torchgpipe.schedule.fastest import fastest

__all__ = [
    "APART",
    "GENERATED",
    "NAMES",
    "RESIDENT",
    "SPLITTING",
    "Schedule",
    "ScheduleName",
    "places_of",
    "program",
    "program_of",
    "usual",
    "usual_places",
    "verified",
]

ScheduleName: TypeAlias = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "ZeroBubble", "V-Min", "V-Half", "ZB-V", "LayerMajor"
]
NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)

#: The schedules for weights that stay on their devices. LayerMajor idles as GPipe does, and holds as many activations.
RESIDENT: tuple[ScheduleName, ...] = NAMES[:-1]

#: The schedules whose partitions are placed like a V, and how many micro-batches they hold on ``d`` devices.
_OF_A_V: dict[str, Callable[[int], int]] = {
    "V-Min": lambda d: (d + 4) // 3,
    "V-Half": lambda d: (d + 2) // 2,
    "ZB-V": lambda d: d,
}

#: The schedules that run backward in two halves.
SPLITTING = ("ZeroBubble", *_OF_A_V)

#: The schedules whose programs are generated, for equal times.
GENERATED = ("Interleaved1F1B", *SPLITTING)

#: The schedules in which neighbouring partitions on one device run at different times, and not as one partition.
APART = (*_OF_A_V, "LayerMajor")

#: A name, a program, or a function that returns a program for a number of micro-batches and the places of partitions.
Schedule: TypeAlias = ScheduleName | Program | Callable[[int, Sequence[int]], Program]


def usual(*, offload: bool) -> ScheduleName:
    """Return the schedule if none is given: LayerMajor for weights in host memory, or else 1F1B."""
    return "LayerMajor" if offload else "1F1B"


def verified(schedule: Schedule) -> Schedule:
    """Return a schedule; of a program a copy in lists, because every step runs through it, and iterators end.

    Raises:
        TypeError: the schedule is neither a name nor a program.
        ValueError: there is no schedule of this name.
    """
    if schedule is None or (isinstance(schedule, str) and schedule not in NAMES):
        raise ValueError(f"schedule must be one of {', '.join(NAMES)}, or a program, but got {schedule!r}")
    return schedule if isinstance(schedule, str) or callable(schedule) else _actions(schedule)


def _actions(rows: Program) -> list[list[Action]]:
    """Return the actions of a program of a user, with plain tuples, lists or iterators in place of actions and lists.

    Raises:
        TypeError: it is no program.
    """
    try:
        return [[*map(Action._make, row)] for row in rows]
    except TypeError as error:
        raise TypeError(
            "a program is a list of actions (kind, i, j) for each device, as schedule.program('1F1B', 4, [0, 1]) "
            f"returns, but got {rows!r:.200} ({error})"
        ) from error


def places_of(devices: Sequence[object]) -> list[int]:
    """Return the index of the device of each partition; devices are counted in the order of their first partitions."""
    seen = list(dict.fromkeys(devices))
    return [seen.index(device) for device in devices]


def usual_places(name: str, n: int) -> list[int]:
    """Return the index of the device of each partition, with as few partitions as a schedule can use on ``n`` devices.

    Interleaved1F1B and LayerMajor could go round the devices more often.
    """
    second = range(n) if name == "Interleaved1F1B" else reversed(range(n)) if name in _OF_A_V else ()
    return [*range(n), *second]


def program_of(schedule: Schedule, m: int | None, places: Sequence[int], order: Sequence[int] | None = None) -> Program:
    """Return the program of a schedule for ``m`` micro-batches, verified.

    Args:
        schedule: the schedule
        m: the number of micro-batches; None for that of the program, or 1 if the schedule is a name or a function
        places: the index of the device of each partition
        order: the micro-batches that take the places of 0, 1, 2, ... in the schedule (default: these)

    Raises:
        TypeError: the schedule is neither a name nor a program.
        ValueError: the schedule does not fit the places or the number of micro-batches, or the program cannot run.
    """
    if order is not None:
        usual = program_of(schedule, m, places)
        return [[Action(kind, order[i], j) for kind, i, j in actions] for actions in usual]
    if isinstance(schedule, str):
        return program(schedule, m or 1, places)
    actions = _actions(schedule(m or 1, list(places)) if callable(schedule) else schedule)
    count = 1 + max([action.i for row in actions for action in row], default=-1)
    if m is not None and count != m:
        raise ValueError(
            f"the program is for {count} micro-batches, but the mini-batch has {m}; drop a last, smaller mini-batch, "
            "or let schedule be a function that takes the number of micro-batches and the places, and returns a program"
        )
    _verify(tuple(map(tuple, actions)), count, tuple(places))
    return actions


@lru_cache(maxsize=32)  # To verify a program takes as long as many cells, and every step asks for its program.
def _verify(actions: tuple[tuple[Action, ...], ...], m: int, places: tuple[int, ...]) -> None:
    verify(actions, m, places)


def program(name: ScheduleName, m: int, places: Sequence[int]) -> list[list[Action]]:
    """Return the program of a schedule.

    Neighbouring partitions on one device run one after the other, as one partition would, but in the schedules APART.

    Args:
        name: the name of the schedule
        m: the number of micro-batches
        places: the index of the device of each partition; devices are counted in the order of their first partitions

    Returns:
        for each device, its actions

    Raises:
        ValueError: there is no such schedule, or its partitions have to be placed in another way.
    """
    verified(name)
    return [list(row) for row in _program(name, m, tuple(places))]


@lru_cache(maxsize=32)  # Every step asks for its program.
def _program(name: str, m: int, places: tuple[int, ...]) -> tuple[tuple[Action, ...], ...]:
    try:
        return _made(name, m, places)
    except ValueError as error:
        raise ValueError(f"{error}; the schedules that run there are {[*_fitting(places)]}") from None


def _fitting(places: tuple[int, ...]) -> Iterator[str]:
    """Yield the schedules that run on these places."""
    for name in NAMES:
        with suppress(ValueError):
            _made(name, 1, places)
            yield name


def _made(name: str, m: int, places: tuple[int, ...]) -> tuple[tuple[Action, ...], ...]:
    #: The runs of neighbouring partitions that are on one device.
    runs = [list(run) for _, run in groupby(range(len(places)), key=None if name in APART else places.__getitem__)]
    made = _MAKERS[name](m, [places[run[0]] for run in runs])
    return tuple(
        tuple(Action(kind, i, j) for kind, i, k in row for j in (runs[k] if kind == "F" else reversed(runs[k])))
        for row in made
    )


def _one_block_each(name: str, devices: Sequence[int]) -> None:
    if len(set(devices)) < len(devices):
        raise ValueError(
            f"{name} wants the partitions of a device next to each other, but they are on devices {list(devices)}"
        )


def _fill_drain(m: int, places: Sequence[int]) -> list[list[Action]]:
    """Return all forward in the order of the clock cycles, then all backward in the reverse order.

    So autograd runs them.

    Args:
        m: the number of micro-batches
        places: the index of the device of each partition
    """
    forward = [Action("F", i, j) for clock in clock_cycles(m, len(places)) for i, j in clock]
    backward = [Action("B", i, j) for _, i, j in reversed(forward)]
    return [[action for action in forward + backward if places[action.j] == k] for k in range(1 + max(places))]


def _one_f_one_b(m: int, devices: Sequence[int]) -> list[list[Action]]:
    """Return forward and backward in turn, once a device holds a micro-batch for each device behind it, and one."""
    _one_block_each("1F1B", devices)
    n = len(devices)
    return [
        list(_in_turn([Action("F", i, k) for i in range(m)], [Action("B", i, k) for i in range(m)], ahead=n - 1 - k))
        for k in range(n)
    ]


def _in_turn(forward: list[Action], backward: list[Action], ahead: int) -> Iterator[Action]:
    """Yield forward and backward in turn, with ``ahead`` forward actions in advance."""
    yield from forward[:ahead]
    for index, action in enumerate(backward):
        yield from forward[ahead + index : ahead + index + 1]
        yield action


def _interleaved(m: int, devices: Sequence[int]) -> list[list[Action]]:
    """Return what is fastest in the memory of as many micro-batches as there are devices."""
    if not _goes_round(devices):
        raise ValueError(
            f"Interleaved1F1B wants partitions that go round the devices, 0, 1, ..., 0, 1, ..., but they are on "
            f"devices {list(devices)}; give devices=[a, b, a, b], for instance"
        )
    return fastest(m, devices, limits=len(devices), split=False)


def _goes_round(devices: Sequence[int]) -> bool:
    return list(devices) == [*range(max(devices) + 1)] * (len(devices) // (max(devices) + 1))


def _zero_bubble(m: int, devices: Sequence[int]) -> list[list[Action]]:
    """Return the same with a split backward; each device may have neighbouring partitions instead."""
    if not _goes_round(devices):
        _one_block_each("ZeroBubble", devices)
    return fastest(m, devices, limits=len(devices))


def _of_a_v(name: str, m: int, devices: Sequence[int]) -> list[list[Action]]:
    """Return what is fastest with two partitions a device in the memory that a schedule has."""
    d = len(set(devices))
    if list(devices) != [*range(d), *reversed(range(d))]:
        raise ValueError(
            f"{name} wants partitions that are placed like a V, 0, 1, ..., 1, 0, but they are on devices "
            f"{list(devices)}; give devices=[a, b, b, a], for instance"
        )
    return fastest(m, devices, limits=2 * _OF_A_V[name](d))


def _layer_major(m: int, places: Sequence[int]) -> list[list[Action]]:
    """Return all micro-batches of a partition before the next partition, on any places; backward from the last one.

    Where partitions go round ``d`` devices and there are ``d`` micro-batches or more, a device idles only in the
    beginning and at the end. Micro-batches stay in their order, in which plain training would run them.
    """
    last = len(places) - 1
    program: list[list[Action]] = [[] for _ in set(places)]
    for j, place in enumerate(places):
        kinds: tuple[Kind, ...] = ("F", "B") if j == last else ("F",)
        program[place] += [Action(kind, i, j) for i in range(m) for kind in kinds]
    for j in reversed(range(last)):
        program[places[j]] += [Action("B", i, j) for i in range(m)]
    return program


_MAKERS: dict[str, Callable[[int, Sequence[int]], list[list[Action]]]] = {
    "GPipe": _fill_drain,
    "1F1B": _one_f_one_b,
    "Interleaved1F1B": _interleaved,
    "ZeroBubble": _zero_bubble,
    "LayerMajor": _layer_major,
    **{name: partial(_of_a_v, name) for name in _OF_A_V},
}
