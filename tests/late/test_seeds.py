"""Layers with seeds, on devices that each have a generator of their own."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layers import Apply
from torchgpipe import GPipe, is_recomputing, pipelined

pytestmark = pytest.mark.late

M = 4


class Noisy(nn.Module):
    """Draws from the generator of its device, or of the CPU, and calls ``before`` first."""

    def __init__(self, generator_of: str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.device = generator_of
        self.before: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        return x * self.weight * torch.rand(x.shape, device=self.device or x.device).to(x.device)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def pipe(layers: list[nn.Module], places: list[int], **options: Any) -> GPipe:
    devices = [f"late:{place}" for place in places]
    module = nn.Sequential(*layers)
    return GPipe(module, [1] * len(layers), devices=devices, chunks=M, loss_fn=loss_fn, **options)


def gradients(model: GPipe) -> list[Tensor]:
    torch.manual_seed(1)
    x, y = torch.rand(M, 3), torch.rand(M, 3)
    loss = model.step(x, y)
    result = [loss.cpu()] + [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return result


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("generator_of", [None, "cpu"])
def test_the_numbers_depend_on_no_device(checkpoint: str, generator_of: str | None) -> None:
    def layers() -> list[nn.Module]:
        return [Noisy(), Noisy(generator_of), Noisy(), Noisy()]

    for _ in range(2):  # What a layer draws from is not known in the first step.
        expected = gradients(pipe(layers(), [0, 0, 0, 0], checkpoint="never"))
    one = pipe(layers(), [0, 1, 2, 3], checkpoint=checkpoint)
    for _ in range(2):
        torch.testing.assert_close(gradients(one), expected, rtol=1e-6, atol=0)


def test_a_layer_that_draws_on_its_device_holds_nobody_up() -> None:
    """It held a lock of the process. So a layer that waited for its device let all devices wait."""
    layers = [Noisy(), Noisy()]
    model = pipe(layers, [0, 1], checkpoint="never")
    gradients(model)
    meeting = threading.Barrier(2, timeout=60)
    launched: list[list[None]] = [[], []]

    def meet(j: int) -> None:
        launched[j].append(None)
        if len(launched[j]) == 2 - j:  # The first layer is one micro-batch ahead.
            meeting.wait()

    layers[0].before, layers[1].before = (lambda: meet(0)), (lambda: meet(1))
    gradients(model)


def test_a_cell_of_an_accelerator_runs_beside_one_of_the_cpu_that_draws() -> None:
    """A cell of an accelerator runs beside one of the CPU, in both passes; one of them draws from the CPU's generator.

    Each could be mistaken for the one that draws. If both do, neither would draw the same again.
    """
    meet = threading.Barrier(2, timeout=60)

    def meet_and_draw(j: int, draws: bool, input: Tensor) -> Tensor:
        meets = not is_recomputing() and 1 <= int(input[0, 0].item()) + j <= 3
        if meets:
            meet.wait()
        mask = (torch.rand if draws else torch.ones)(input.shape).to(input.device)
        if meets:
            meet.wait()
        return torch.cat([input[:, :1], input[:, 1:] * mask[:, 1:]], 1)

    def step(checkpoint: str, draws: list[bool]) -> list[Tensor]:
        layers = nn.Sequential(*(Apply(partial(meet_and_draw, j, its)) for j, its in enumerate(draws)))
        x = torch.cat([torch.arange(4.0)[:, None], torch.ones(4, 2)], 1).requires_grad_()
        torch.manual_seed(0)
        output = GPipe(layers, [1, 1], devices=["cpu:0", "late:0"], chunks=4, checkpoint=checkpoint)(x)
        output.sum().backward()
        assert x.grad is not None
        return [output.detach().cpu(), x.grad]

    for draws in ([True, False], [False, True]):
        assert all(map(torch.equal, step("always", draws), step("never", draws)))
    with pytest.raises(RuntimeError, match="checkpoint='never'"):
        step("always", [True, True])


class Forces(nn.Module):
    """Returns the gradient of a pipelined energy."""

    def __init__(self) -> None:
        super().__init__()
        energy = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2), nn.Linear(3, 3))
        self.energy = pipelined(energy, torch.rand(2, 3), chunks=2, devices=["late:0"])

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(self.energy(x).sum(), x)
        return forces


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_layer_that_differentiates_a_pipelined_model(checkpoint: str) -> None:
    """A thread of the autograd engine waited for the generator that the cell held, and the cell for the thread."""
    model = pipe([nn.Linear(3, 3), Forces(), nn.Linear(3, 3)], [0, 0, 0], checkpoint=checkpoint)
    for _ in range(2):  # What the model draws from is not known in the first step.
        gradients(model)
