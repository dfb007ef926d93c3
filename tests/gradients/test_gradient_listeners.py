"""A parameter with a listener receives each gradient once and whole; a captured tensor then raises an error.

Listeners are hooks of parameters, `torch.autograd.grad`, ``backward(inputs=...)`` and
DistributedDataParallel.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.gradients.model import CHUNKS, WIDTH, batch, model_of
from tests.layers import Apply, Using


def test_a_step_calls_no_hook_of_a_parameter_that_got_no_gradient(pipe: Pipe, checkpoint: str) -> None:
    """An optimizer that steps in a hook moved layers that were not used, by what was in ``.grad`` before."""

    used: list[int] = []
    switch = Using(lambda linear, x: linear(x) if used[-1] else x * 2, WIDTH)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), switch, nn.Linear(WIDTH, WIDTH)).double()
    model = pipe(layers, [1, 2], chunks=CHUNKS, checkpoint=checkpoint, loss_fn=lambda y, _: y.sum(), reduce="mean")
    weight = switch.linear.weight
    heard: list[str] = []
    weight.register_hook(lambda _: heard.append("before"))
    weight.register_post_accumulate_grad_hook(lambda _: heard.append("after"))
    for way in (0, 1, 0, 1):
        used.append(way)
        model.step(batch().detach())
        assert heard == ["before", "after"] * way
        heard.clear()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("used_by", [(), (1,), (0, 1, 2)])
def test_a_call_refuses_a_hook_of_a_parameter_that_got_no_gradient(
    pipe: Pipe, checkpoint: str, kind: str, used_by: tuple[int, ...]
) -> None:
    """The graph leads to all parameters of a cell, and a step in a hook moved a weight that was left out by 3.8."""
    switch = Using(lambda linear, x: linear(x) if int(x[0, 0]) in used_by else x * 2, WIDTH)
    model = pipe(nn.Sequential(switch, nn.Linear(WIDTH, WIDTH)).double(), [1, 1], chunks=3, checkpoint=checkpoint)
    heard: list[Tensor] = []
    getattr(switch.linear.weight, kind)(heard.append)
    loss = model(torch.arange(3.0, dtype=torch.float64)[:, None].expand(3, WIDTH)).sum()
    if used_by or checkpoint == "never":
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match=r"has a hook, but nothing .* has used .*; freeze it .*model.step"):
            loss.backward()
        switch.requires_grad_(False)
        model(batch().detach()).sum().backward()
    assert len(heard) == bool(used_by)


@pytest.mark.parametrize("listens", ["hook", "post-accumulate hook", "grad", "inputs"])
def test_the_gradient_of_a_captured_tensor_is_refused_where_something_listens(
    pipe: Pipe, checkpoint: str, listens: str
) -> None:
    """Without one, `test_autograd.py::test_captured_tensors` shows; nothing but ``.grad`` could take it."""
    leaf = torch.full((WIDTH,), 2.0, dtype=torch.float64, requires_grad=True)
    module, model = model_of(pipe, checkpoint, Apply(lambda x: x * leaf))
    weight = module[2].weight
    if listens == "hook":
        weight.register_hook(lambda grad: None)
    elif listens == "post-accumulate hook":
        weight.register_post_accumulate_grad_hook(lambda weight: None)
    loss = model(batch()).sum()

    def differentiate() -> None:
        if listens == "grad":
            torch.autograd.grad(loss, [weight])
        else:
            loss.backward(inputs=[weight] if listens == "inputs" else None)

    if checkpoint == "never":
        differentiate()
    else:
        with pytest.raises(RuntimeError, match="register it as a parameter"):
            differentiate()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_captured_tensor_is_not_called_with_parts(pipe: Pipe, checkpoint: str, kind: str) -> None:
    """The hook was once called for each micro-batch."""
    leaf = torch.full((WIDTH,), 2.0, dtype=torch.float64, requires_grad=True)
    _, model = model_of(pipe, checkpoint, Apply(lambda x: x * leaf))
    calls: list[Tensor] = []
    getattr(leaf, kind)(calls.append)
    if checkpoint == "never":
        model(batch()).sum().backward()
        assert len(calls) == 1
    else:
        with pytest.raises(RuntimeError, match="a hook of it would hear parts"):
            model(batch()).sum().backward()
        assert not calls
