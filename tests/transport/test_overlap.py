"""Copies run beside all computation, and wait for nothing else: a call or a step takes the time that it takes on paper.

On the clock of `late`, a copy between devices takes as long as a layer. One that waits for more than what it copies, or
that anything but its receiver waits for, makes the call longer. Races are found where numbers are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import late
from tests.skip.layers import pair
from torchgpipe import GPipe, pipelined
from torchgpipe.devices.links import verify_links
from torchgpipe.schedule import Action, Program, program, simulate

pytestmark = pytest.mark.late

M, ROWS, WIDTH = 5, 2, 16

#: Seconds of a layer forward, and of a copy: so many that it does not count when the host launches what.
LAYER, COPY = 100.0, 100.0
SPEED = late.Speed(2 * ROWS * WIDTH**2 / LAYER, bandwidth=1e12, link=4 * ROWS * WIDTH / COPY, kernel=0, latency=0)


def layers(n: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n)]


def loss_fn(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def seconds(places: list[int], run: Callable[[Tensor], Any]) -> float:
    """Return the time of a run on an input that is there, after some: the first recomputations are compared."""
    verify_links([torch.device("late", place) for place in set(places)], 2)  # On the clock, all would seem broken.
    x = torch.randn(M * ROWS, WIDTH, device=f"late:{places[0]}", requires_grad=True)
    with late.on_clock(SPEED):
        for _ in range(5):
            torch.accelerator.synchronize()
            late.intervals()
            run(x)
        done = late.intervals()
    return max(one.end for one in done) - min(one.start for one in done)


def on_paper(actions: Program, recomputed: float = 0.0) -> float:
    costs = {"F": LAYER, "B": 2 * LAYER + recomputed, "I": LAYER, "W": LAYER}
    return simulate(actions, costs, transfer=COPY).seconds  # type: ignore[arg-type]


def in_a_row(n: int, places: list[int], skip: int = 3, **options: Any) -> Any:
    """Return a pipeline with a skip over all layers, whose copy takes as long as so many others.

    Three are as long as forward and backward of a layer: its streams copy all the time.
    """
    stash, pop = pair(lambda x: torch.cat([x * 2] * skip, 1), lambda x, popped: x + popped[:, :WIDTH].tanh())
    first, *others = layers(n)
    row = [nn.Sequential(first, stash), *others[:-1], nn.Sequential(pop, others[-1])]
    devices, options = [f"late:{place}" for place in places], {"checkpoint": "never", **options}
    return GPipe(nn.Sequential(*row), [1] * n, devices=devices, chunks=M, **options)


def any_module(n: int, places: list[int], **options: Any) -> Any:
    sample, devices = torch.randn(2, WIDTH), [f"late:{place}" for place in places]
    return pipelined(nn.Sequential(*layers(n)), sample, balance=[1] * n, devices=devices, chunks=M, **options)


def test_forward() -> None:
    model = in_a_row(4, [0, 1, 2, 3], skip=1)
    with torch.no_grad():
        found = seconds([0, 1, 2, 3], model)
    assert found == pytest.approx(on_paper([[Action("F", i, j) for i in range(M)] for j in range(4)]), rel=0.01)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_backward_by_autograd(checkpoint: str) -> None:
    """The first recomputation of each device does not wait for the gradient, which comes from all devices behind it."""
    model = in_a_row(3, [0, 1, 2], skip=1, checkpoint=checkpoint)
    found = seconds([0, 1, 2], lambda x: loss_fn(model(x), None).backward())
    again = LAYER if checkpoint == "always" else 0.0
    assert found == pytest.approx(on_paper(program("GPipe", M, [0, 1, 2]), again) - 2 * again, rel=0.01)


@pytest.mark.parametrize("make", [in_a_row, any_module])
@pytest.mark.parametrize(
    ("schedule", "places"),
    [("1F1B", [0, 1, 2]), ("Interleaved1F1B", [0, 1, 0, 1]), ("ZeroBubble", [0, 1, 2]), ("ZB-V", [0, 1, 1, 0])],
)
def test_a_step(make: Any, schedule: Any, places: list[int]) -> None:
    model = make(len(places), places, schedule=schedule, loss_fn=loss_fn)
    found = seconds(places, model.step)
    assert found == pytest.approx(on_paper(program(schedule, M, places)), rel=0.01)
