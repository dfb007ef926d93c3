"""Layers with seeds, on devices that each have a generator of their own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, pipelined

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


def test_two_steps_at_once_on_the_same_devices_draw_their_own_numbers() -> None:
    """A generator serves one layer at a time, whichever step the layer belongs to."""
    models = [pipe([Noisy() for _ in range(4)], [0, 0, 1, 1], checkpoint="always") for _ in range(2)]
    x, y = torch.rand(M, 3), torch.rand(M, 3)

    def step(model: GPipe) -> list[Tensor]:
        model.step(x, y)
        result = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return result

    expected = []
    for _ in range(2):  # What a layer draws from is not known in the first round.
        torch.manual_seed(2)
        expected = [step(model) for model in models]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            torch.manual_seed(2)
            results = list(threads.map(step, models))  # Whoever is first draws the first seed.
            first = int(torch.equal(results[0][0], expected[1][0]))
            torch.testing.assert_close(results[first], expected[0], rtol=0, atol=0)
            torch.testing.assert_close(results[1 - first], expected[1], rtol=0, atol=0)


def test_a_step_in_the_midst_of_a_recomputed_cell_has_its_own_seed() -> None:
    """It was taken for a draw of the cell, which draws from its device only. So the second run of the cell put the
    generator of the CPU back, and the next step had the same seed once more."""
    layer = Noisy()
    outer, inner = pipe([layer], [0], checkpoint="always", schedule="GPipe"), pipe([Noisy()], [1], checkpoint="never")
    x, y = torch.rand(M, 3), torch.rand(M, 3)
    for model in (outer, inner):
        model.step(x, y)
    losses: list[float] = []

    def step_elsewhere() -> None:
        with ThreadPoolExecutor(1) as thread:
            losses.append(thread.submit(inner.step, x, y).result().item())

    layer.before = step_elsewhere
    outer.step(x, y)
    assert len(set(losses)) == len(losses) > M


def test_a_seed_of_another_step_is_no_draw_of_a_model_that_draws_nothing() -> None:
    """The generator of a device was looked at while a cell of another step had it."""
    silent, noisy = nn.Linear(3, 3), Noisy()
    one = pipe([silent], [0], checkpoint="always", schedule="GPipe")
    other = pipe([noisy], [0], checkpoint="never")
    x, y = torch.rand(M, 3), torch.rand(M, 3)
    for model in (one, other):
        model.step(x, y)
    drawing, seen = threading.Event(), threading.Event()

    def draw_for_a_while() -> None:
        drawing.set()
        seen.wait(0.5)  # The step that draws nothing waits for this cell now, and need not.

    noisy.before = draw_for_a_while
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(other.step, x, y)
        assert drawing.wait(60)

        def wait(*_: object) -> None:
            seen.set()
            step.result(60)

        silent.register_forward_pre_hook(wait)
        one.step(x, y)


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
