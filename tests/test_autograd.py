"""To autograd, a pipeline is the plain model: hooks, selected gradients and second derivatives are the same.

The reference is the plain model, run micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.conftest import Devices, Pipe
from tests.layers import Apply, Using
from tests.plain import assert_same, outcome, plain_outcome, run_plain
from tests.random_pipelines import MODES
from torchgpipe import GPipe

CHUNKS = 3
BALANCE = [2, 1, 2]


def build() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False)
    ).double()


def batch() -> Tensor:
    return torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(6, 2).requires_grad_()


@pytest.fixture
def layers() -> nn.Sequential:
    return build()


@pytest.fixture
def model(pipe: Pipe, layers: nn.Sequential, checkpoint: str) -> GPipe:
    return pipe(layers, BALANCE, chunks=CHUNKS, checkpoint=checkpoint)


def plain(layers: nn.Sequential, x: Tensor) -> Tensor:
    output: Tensor = run_plain(layers, x, chunks=CHUNKS)
    return output


def equal(
    actual: Iterable[Tensor | None],
    expected: Iterable[Tensor | None],
    same: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and same(a, b))
        for a, b in zip(actual, expected, strict=True)
    )


# ------------------------------------------------------------------------------------------------------ hooks


def test_a_hook_of_the_input(model: GPipe, layers: nn.Sequential) -> None:
    """The hook receives the gradient of the whole mini-batch once, for a leaf and for a computed input."""

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        calls: list[Tensor] = []
        leaf = batch()
        leaf.register_hook(calls.append)
        x = leaf * 2
        x.register_hook(calls.append)
        run(x).square().sum().backward()
        return calls

    assert equal(gradients(model), gradients(lambda x: plain(layers, x)))


# ------------------------------------------------------------------------------------- some gradients of many


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_gradients_of_some(devices: Devices, data: st.DataObject) -> None:
    """`torch.autograd.grad` returns the requested gradients, also again, and `backward(inputs=...)` fills them."""
    layers = build()
    mode = data.draw(st.sampled_from(MODES))
    model = GPipe(layers, BALANCE, devices=devices(3), chunks=CHUNKS, checkpoint=mode)
    x = batch()
    candidates = [x, *layers.parameters()]
    chosen = data.draw(st.lists(st.sampled_from(range(len(candidates))), min_size=1, unique=True))
    inputs = [candidates[k] for k in chosen]
    expected = torch.autograd.grad(plain(layers, x).square().sum(), candidates)

    loss = model(x).square().sum()
    for keep in (True, True, False):
        assert equal(torch.autograd.grad(loss, inputs, retain_graph=keep), [expected[k] for k in chosen])
    assert all(tensor.grad is None for tensor in candidates)
    model(x).square().sum().backward(inputs=inputs)
    assert equal([c.grad for c in candidates], [grad if k in chosen else None for k, grad in enumerate(expected)])


# --------------------------------------------------------------------------------------------- more than once


def test_gradients_of_gradients(pipe: Pipe, layers: nn.Sequential) -> None:
    """Without checkpointing, the graph is the plain graph."""
    model = pipe(layers, BALANCE, chunks=CHUNKS, checkpoint="never")

    def penalty(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x = batch()
        (grad,) = torch.autograd.grad(run(x).square().sum(), [x], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), list(layers.parameters()))

    assert equal(penalty(model), penalty(lambda x: plain(layers, x)))


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("used", [0, 1])
def test_gradients_of_gradients_are_refused(model: GPipe, layers: nn.Sequential, used: int) -> None:
    """Either output may lead backward into the cell. The model works as before."""
    x = batch()
    two = GPipe(nn.Sequential(Using(lambda f, x: (f(x), x.sin()), width=2)).double(), [1], checkpoint="always")
    for output in (model(x), two(x)[used]):
        with pytest.raises(RuntimeError, match="checkpoint='never'"):
            torch.autograd.grad(output.square().sum(), [x], create_graph=True)
    assert_same(outcome(model, batch()), plain_outcome(layers, batch(), chunks=CHUNKS))


# --------------------------------------------------------------------------- what is not a parameter or input


def assert_right_or_refused(
    run: Callable[[], Tensor],
    checkpoint: str,
    *pairs: tuple[Tensor, Tensor],
    same: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> None:
    """Assert that a gradient that no cell expects is right, or refused with the next move, but never lost."""
    try:
        run().sum().backward()
    except RuntimeError as error:
        assert checkpoint != "never"
        assert "checkpoint='never'" in str(error)
    else:
        assert pairs and equal([tensor.grad for tensor, _ in pairs], [grad for _, grad in pairs], same)


@pytest.mark.parametrize("computed", [False, True], ids=["leaf", "computed"])
@pytest.mark.parametrize("used_by", [(0, 1, 2), (1,)])
def test_captured_tensors(pipe: Pipe, checkpoint: str, used_by: tuple[int, ...], computed: bool) -> None:
    """A layer uses an unregistered tensor, on some micro-batches or on all."""
    leaf = torch.full((2,), 2.0, requires_grad=True)
    captured = leaf * 3 if computed else leaf
    uses = Apply(lambda x: x * captured if x[0, 0].item() in used_by else x)
    layers = nn.Sequential(nn.Identity(), uses, nn.Tanh())
    model = pipe(layers, [1, 1, 1], chunks=3, checkpoint=checkpoint)
    x = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]], requires_grad=True)
    expected = torch.autograd.grad(run_plain(layers, x, chunks=3).sum(), [leaf, x], retain_graph=True)
    assert_right_or_refused(lambda: model(x), checkpoint, *zip([leaf, x], expected))


class Fails(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("no gradient today")


@pytest.mark.parametrize("stepped", [False, True])
def test_an_error_of_a_layer_that_captures_a_tensor_comes_through(pipe: Pipe, checkpoint: str, stepped: bool) -> None:
    """It was taken for the sign that a cell had freed what the captured tensor was computed from."""
    leaf = torch.ones(2, requires_grad=True)
    layers = nn.Sequential(nn.Linear(2, 2), Apply(lambda x: Fails.apply(x) * leaf))
    model = pipe(layers, [1, 1], chunks=2, checkpoint=checkpoint, loss_fn=lambda output, _: output.mean())
    with pytest.raises(RuntimeError, match="no gradient today"):
        model.step(torch.rand(4, 2)) if stepped else model(torch.rand(4, 2)).sum().backward()


@pytest.mark.parametrize("returned", [True, False])
def test_a_captured_tensor_without_a_node(pipe: Pipe, checkpoint: str, returned: bool) -> None:
    """It is returned as it is, or it is the weight of a layer in another partition."""
    first = nn.Linear(2, 2)
    leaf = torch.full((1, 2), 2.0, requires_grad=True) if returned else first.weight
    reads = Apply(lambda x: leaf if returned else x @ leaf)
    layers = nn.Sequential(first, nn.Tanh(), reads, nn.Tanh())
    model = pipe(layers, [1, 2, 1], chunks=3, checkpoint=checkpoint)
    x = torch.rand(3, 2)
    expected = torch.autograd.grad(run_plain(layers, x, chunks=3).sum(), [leaf])
    assert_right_or_refused(lambda: model(x), checkpoint, *zip([leaf], expected), same=torch.allclose)


def test_cached_parametrizations(pipe: Pipe, checkpoint: str) -> None:
    """The first run computes and caches the weight, without a graph if it is a checkpoint."""
    linear = nn.Linear(2, 2)
    parametrize.register_parametrization(linear, "weight", Apply(lambda weight: weight + weight.T))
    layers = nn.Sequential(linear, nn.Tanh())
    model = pipe(layers, [1, 1], chunks=2, checkpoint=checkpoint)
    weight = linear.parametrizations.weight.original
    x = torch.rand(4, 2)
    (expected,) = torch.autograd.grad(run_plain(layers, x, chunks=2).sum(), [weight])
    with parametrize.cached():
        assert_right_or_refused(lambda: model(x), checkpoint, (weight, expected), same=torch.allclose)


# --------------------------------------------------------------------------- what changes before the backward


def test_parameters_that_change_before_backward(model: GPipe, layers: nn.Sequential) -> None:
    """The plain model refuses. A recomputation with other weights would silently give a wrong gradient."""
    loss = model(batch()).square().sum()
    with torch.no_grad():
        layers[4].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|checkpoint='never'"):
        loss.backward()


def test_parameters_that_were_frozen_for_the_forward_only(pipe: Pipe, checkpoint: str) -> None:
    """A generator is trained through a discriminator that is frozen for its call, and unfrozen before backward.

    The recomputation finds the parameters unfrozen, but the plain model gives them no gradient. They were once taken
    for tensors that no layer has registered.
    """

    def step(run: Callable[[Tensor], Tensor], layers: nn.Sequential) -> list[Tensor | None]:
        layers.zero_grad()
        layers[2].requires_grad_(False)
        layers[0].bias.requires_grad_(False)
        loss = run(batch()).square().sum()
        layers.requires_grad_(True)
        loss.backward()
        return [parameter.grad for parameter in layers.parameters()]

    layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    expected = step(lambda x: run_plain(layers, x, chunks=3), layers)
    assert [grad is None for grad in expected] == [False, True, True, True]
    assert equal(step(pipe(layers, [2, 1], chunks=3, checkpoint=checkpoint), layers), expected)


def test_parameters_that_are_swapped_for_a_call(model: GPipe, layers: nn.Sequential) -> None:
    """`functional_call` restores the model's own parameters before backward, which must reach the swapped ones."""
    model.requires_grad_(False)
    swapped = {name: (2 * p.detach()).requires_grad_() for name, p in layers.named_parameters()}

    def gradients(run: Callable[[Tensor], Tensor]) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(run(batch()).sum(), list(swapped.values()), allow_unused=True)

    around = Using(lambda _, x: plain(layers, x))
    around.layers = layers
    prefixed = {f"layers.{name}": parameter for name, parameter in swapped.items()}
    expected = gradients(lambda x: torch.func.functional_call(around, prefixed, (x,)))
    try:
        actual = gradients(lambda x: torch.func.functional_call(model, swapped, (x,)))
    except RuntimeError as error:
        assert model.checkpoint != "never"
        assert "checkpoint='never'" in str(error)
    else:
        assert equal(actual, expected)


def test_training_mode_that_changes_before_backward(pipe: Pipe, checkpoint: str) -> None:
    """The gradient belongs to the mask of the forward, although `eval` was called since, or between two passes."""
    model = pipe(nn.Sequential(nn.Identity(), nn.Dropout(0.5)), [1, 1], chunks=2, checkpoint=checkpoint)
    x = torch.ones(8, 2, requires_grad=True)
    output = model(x)
    output.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, output)
    model.eval()
    with pytest.raises(RuntimeError, match="it was in training mode") if checkpoint != "never" else nullcontext():
        output.sum().backward()
    assert not model[1].training


def test_training_mode_that_was_left_and_entered_again_before_backward(model: GPipe) -> None:
    """The mode is the same again. But the views of the partitions take over a mode only when they are called."""
    loss = model(batch()).square().sum()
    model.eval()
    with torch.no_grad():
        model(batch())
    model.train()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ----------------------------------------------------------------------------------------- without a backward


def test_forward_mode_is_refused(devices: Devices) -> None:
    """The pipeline would lose the tangents."""
    model = GPipe(build(), BALANCE, devices=devices(3), chunks=CHUNKS, loss_fn=lambda output, _: output.mean())
    for run in (model, model.step):
        with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="lose the tangents; use the pl"):
            run(batch())


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_no_autograd_function_without_gradients(
    model: GPipe, train: bool, off: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no autograd function at all, not even one without effect."""

    def refuse(*args: Any) -> None:
        raise AssertionError("an autograd function was applied")

    from torchgpipe.drive.nodes import CellNode, Recompute
    from torchgpipe.graph.dependency import Fork, Join
    from torchgpipe.transport.route import Copy, Wait

    for function in (CellNode, Recompute, Copy, Wait, Fork, Join):
        monkeypatch.setattr(function, "forward", staticmethod(refuse))
    model.train(train)
    with off():
        output = model(batch())
    assert output.grad_fn is None
    assert not output.requires_grad


# ------------------------------------------------------------------------------------------------ more usages


def test_anomaly_mode(model: GPipe, layers: nn.Sequential) -> None:
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        actual = outcome(model, batch())
    assert_same(actual, plain_outcome(layers, batch(), chunks=CHUNKS))
