"""Layers with seeds, on devices that each have a generator of their own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe

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
