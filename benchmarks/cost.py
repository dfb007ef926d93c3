"""What a step of a pipeline takes, computed and not measured.

The schedule has m + n - 1 clocks, in m of which a device works:

    partition 0   0 1 2 3 . .
    partition 1   . 0 1 2 3 .
    partition 2   . . 0 1 2 3
"""

from __future__ import annotations

from collections.abc import Sequence

from torchgpipe.schedule import program, simulate

__all__ = ["MODES", "ideal_speed_up", "recomputed", "step_seconds"]

MODES = ("always", "except_last", "never")


def recomputed(mode: str, m: int) -> int:
    """Return for how many micro-batches forward is computed twice."""
    return {"always": m, "except_last": m - 1, "never": 0}[mode]


def ideal_speed_up(n: int, m: int, mode: str, forward: float = 1 / 3) -> float:
    """Return the largest possible speed-up over one device that recomputes nothing, for partitions that take the same.

    Args:
        forward: the share of forward in a step; a third where backward takes twice as long
    """
    return n * m / (m + n - 1) * m / (m + recomputed(mode, m) * forward)


def step_seconds(
    stages: Sequence[float], m: int, *, latency: float = 0.0, send: float = 0.0, reduce: float = 0.0
) -> float:
    """Return the simulated seconds of a step under 1F1B, if backward takes twice as long as forward.

    docs/scaling.rst explains what is added.

    Args:
        stages: the seconds that a micro-batch takes on each stage, forward and backward
        m: the number of micro-batches
        latency: of a message, in seconds
        send: the seconds that the tensors of a micro-batch take over one boundary, one way
        reduce: the seconds that the gradients of the replicas take
    """
    n = len(stages)
    step = simulate(
        program("1F1B", m, range(n)),
        lambda action: stages[action.j] * (1 if action.kind == "F" else 2) / 3,
        transfer=latency + send,
    )
    agree = 2 * (n > 1) * latency * n  # all say that they are ready, and hear of the loss
    return step.seconds + agree + reduce
