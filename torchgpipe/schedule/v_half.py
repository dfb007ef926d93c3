"""V-Half: little more than half of the activations of 1F1B, for a shorter bubble.

Each device has two partitions, placed like a V: the first device has the first and the last partition.

    partition 0 ┐             ┌ partition 7    device 0
      partition 1 ┐         ┌ partition 6      device 1
        partition 2 ┐     ┌ partition 5        device 2
          partition 3 └──── partition 4        device 3

The activations of one partition of a device live long and those of the other live short, so that all devices hold about
the same number. Backward is split: gradients of inputs come first, because other devices wait for them; gradients of
weights come when a device would be idle, or needs the memory.

The placement and the idea are those of P. Qi et al., `Pipeline Parallelism with Controllable Memory
<https://arxiv.org/abs/2405.15362>`_, 2024. Here a list scheduler arranges the actions, because their published pattern
repeats for ever and says nothing about the first and the last micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchgpipe.schedule.action import Action, Kind, needs

__all__ = ["v_half"]

_KINDS: tuple[Kind, ...] = ("F", "I", "W")


def v_half(m: int, devices: Sequence[int]) -> list[list[Action]]:
    """Return the program for ``m`` micro-batches.

    Args:
        m: the number of micro-batches
        devices: the index of the device of each partition

    Raises:
        ValueError: the partitions are not placed like a V.
    """
    d = len(set(devices))
    if list(devices) != [*range(d), *reversed(range(d))]:
        raise ValueError(
            f"V-Half wants partitions that are placed like a V, 0, 1, ..., 1, 0, but they are on devices "
            f"{list(devices)}; give devices=[a, b, b, a], for instance"
        )
    return _Arrangement(m, devices, d).program


class _Arrangement:
    """Actions in the order in which devices would start them, if each took one unit of time.

    Args:
        m: the number of micro-batches
        devices: the device of each partition
        d: the number of devices
    """

    def __init__(self, m: int, devices: Sequence[int], d: int) -> None:
        self._n = len(devices)
        self._finished = 0  # micro-batches whose last I has run
        #: At most so many micro-batches are between the first partition's F and I.
        self._in_flight = (d + 1) // 2 + 1
        #: A device that holds so many activations starts no micro-batch on the way down the V.
        self._most_live = d + 2
        self._turn = d - 1
        self._splits = {(i, j): True for i in range(m) for j in range(self._n)}
        self._done: set[Action] = set()
        self._live = [0] * d
        self.program: list[list[Action]] = [[] for _ in range(d)]
        # In each partition a kind of action runs in the order of micro-batches, so only the next of each may start.
        following: list[set[Action]] = [set() for _ in range(d)]
        for j, device in enumerate(devices):
            following[device].update([Action(kind, 0, j) for kind in _KINDS])
        while any(following):
            chosen = [min(self._candidates(k, actions), default=None) for k, actions in enumerate(following)]
            for k, choice in enumerate(chosen):
                if choice is not None:
                    action = choice[-1]
                    following[k].remove(action)
                    if action.i + 1 < m:
                        following[k].add(action._replace(i=action.i + 1))
                    self.program[k].append(action)
                    self._done.add(action)
                    self._live[k] += (action.kind == "F") - (action.kind == "W")
                    self._finished += action.kind == "I" and action.j == 0

    def _candidates(self, k: int, following: set[Action]) -> Iterator[tuple[int, int, int, Action]]:
        """Yield the actions that device ``k`` can start now, with their ranks; the lowest is to be started."""
        is_full = self._live[k] >= self._most_live
        for action in following:
            kind, i, j = action
            if not self._done.issuperset(needs(action, self._splits, self._n)):
                continue
            if kind == "I":
                yield 0, i, -j, action
            elif kind == "W":
                yield 1 if is_full else 4, i, j, action
            elif j > self._turn:
                yield 2, i, j, action
            elif not is_full and (j > 0 or i < self._finished + self._in_flight):
                yield 3, i, j, action
