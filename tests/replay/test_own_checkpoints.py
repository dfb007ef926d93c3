"""Layers that recompute themselves by PyTorch's checkpoint, in the workers of a step.

Such a layer sets the generator of the CPU to its state in forward, and afterwards back, without a look at other
threads: two layers at once drew each other's numbers, so did a layer in forward meanwhile, and one left the generator
where the other had set it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.layers import With
from torchgpipe import GPipe
from torchgpipe.replay.callers_generator import CallersGenerator

X = torch.randn(12, 4, dtype=torch.float64)


def own(dropout: float, reentrant: bool | None) -> nn.Module:
    """Return a layer that recomputes itself, unless ``reentrant`` is None."""
    inner = nn.Sequential(nn.Linear(4, 64), nn.Dropout(dropout), nn.Tanh(), nn.Linear(64, 4))
    if reentrant is None:
        return With(inner, lambda inner, x: inner(x))
    return With(inner, partial(checkpoint, use_reentrant=reentrant))


@pytest.mark.parametrize(
    ("mode", "dropout", "schedule"), [("never", 0.5, "GPipe"), ("always", 0.5, "ZeroBubble"), ("always", 0.0, "GPipe")]
)
def test_layers_draw_and_the_caller_draws_what_they_would_draw(dropout: float, mode: Any, schedule: Any) -> None:
    results = []
    for reentrant in (None, False):
        torch.manual_seed(0)
        layers = nn.Sequential(*[own(dropout, reentrant) for _ in range(6)]).double()
        options: dict[str, Any] = {"schedule": schedule, "checkpoint": mode, "loss_fn": nn.functional.mse_loss}
        model = GPipe(layers, [2, 2, 2], devices=["cpu:0", "cpu:1", "cpu:2"], chunks=6, **options)
        seen = []
        for _ in range(5):
            loss = model.step(X, X)
            seen.append(torch.cat([loss[None], *[one.grad.flatten() for one in model.parameters()], torch.rand(3)]))
            model.zero_grad()
        results.append(torch.stack(seen))
    assert torch.equal(*results)


def test_a_generator_that_is_left_where_forward_began_is_put_back() -> None:
    """As threads of the autograd engine leave it, each of which serves an accelerator."""
    generator, forward = CallersGenerator(), torch.get_rng_state()
    x = torch.ones(3, requires_grad=True)
    middle = x * 2
    output = middle * 2
    generator.watch([output, None, x])
    torch.rand(3)  # as a loop draws that loads a batch here
    state = torch.get_rng_state()
    hook = middle.register_hook(lambda _: torch.set_rng_state(forward))
    output.sum().backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), state)
    hook.remove()
    middle.register_hook(lambda _: torch.rand(3))
    output.sum().backward(retain_graph=True)
    drawn = torch.get_rng_state()
    assert not torch.equal(drawn, state)
    output.sum().backward()
    assert not torch.equal(torch.get_rng_state(), drawn)
