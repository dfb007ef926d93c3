"""To autograd, a pipeline is the plain model: hooks, selected gradients and second derivatives are the same.

The reference is the plain model, run micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.conftest import Devices, Pipe
from tests.plain import assert_same, outcome, plain_outcome, run_plain
from torchgpipe import GPipe, is_recomputing

MODES = ["always", "except_last", "never"]
CHUNKS = 3
BALANCE = [2, 1, 2]


def build() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False)
    ).double()


def batch() -> Tensor:
    return torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(6, 2).requires_grad_()


class Runs(nn.Module):
    """A layer that counts its runs by phase, and whose graph needs memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = 0

    def forward(self, input: Tensor) -> Tensor:
        if is_recomputing():
            self.again += 1
        else:
            self.first += 1
        return input.sin()


@pytest.fixture
def layers() -> nn.Sequential:
    return build()


@pytest.fixture
def model(pipe: Pipe, layers: nn.Sequential, checkpoint: str) -> GPipe:
    return pipe(layers, BALANCE, chunks=CHUNKS, checkpoint=checkpoint)


def plain(layers: nn.Sequential, x: Tensor) -> Tensor:
    output: Tensor = run_plain(layers, x, chunks=CHUNKS)
    return output


def graph(*tensors: Tensor) -> set[Any]:
    """Return all nodes of the autograd graph."""
    nodes: set[Any] = set()
    pending = [tensor.grad_fn for tensor in tensors]
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending.extend(next_node for next_node, _ in node.next_functions)
    return nodes


def equal(
    actual: Iterable[Tensor | None],
    expected: Iterable[Tensor | None],
    same: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and same(a, b))
        for a, b in zip(actual, expected, strict=True)
    )


@pytest.fixture
def same(checkpoint: str) -> Callable[[Tensor, Tensor], bool]:
    """Return a comparison of gradients that were added to earlier ones, one micro-batch at a time if checkpointed."""
    return torch.equal if checkpoint == "never" else partial(torch.allclose, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------ hooks


def test_a_parameter_receives_its_gradient_once(model: GPipe, layers: nn.Sequential) -> None:
    """The hook receives the whole gradient, not the gradients of the micro-batches one by one."""
    expected = plain_outcome(layers, batch(), chunks=CHUNKS).param_grads
    before: list[tuple[str, Tensor]] = []
    after: list[tuple[str, Tensor]] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: before.append((name, grad.clone())))  # type: ignore[misc]
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: after.append((name, p.grad.clone()))  # type: ignore[misc]
        )
    outcome(model, batch())
    for calls in (before, after):
        assert sorted(name for name, _ in calls) == sorted(expected)
        assert equal([grad for _, grad in calls], [expected[name] for name, _ in calls])


def test_a_hook_changes_the_gradient(model: GPipe, layers: nn.Sequential) -> None:
    """The hook acts once, not once per micro-batch."""
    expected = plain_outcome(layers, batch(), chunks=CHUNKS).param_grads
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    actual = outcome(model, batch()).param_grads
    assert equal(actual.values(), [None if grad is None else grad.clamp(-0.1, 0.1) for grad in expected.values()])


def test_an_optimizer_in_the_backward(model: GPipe, layers: nn.Sequential) -> None:
    """A gradient is used up as soon as it is computed: no later computation needs the parameter."""
    x = batch()
    expected = torch.autograd.grad(plain(layers, x).square().sum(), list(layers.parameters()))
    wanted = [p.detach() - 0.1 * grad for p, grad in zip(layers.parameters(), expected, strict=True)]

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None

    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model(x).square().sum().backward()
    assert equal(layers.parameters(), wanted)


def test_hooks_of_nodes(model: GPipe, layers: nn.Sequential) -> None:
    """The node that accumulates a parameter's gradient can also have hooks; DDP works with these."""
    calls = []
    handles = []
    for name, parameter in model.named_parameters():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        handles.append(node)
        node.register_hook(lambda *grads, name=name: calls.append(name))  # type: ignore[misc]
    model(batch()).sum().backward()
    assert sorted(calls) == sorted(name for name, _ in model.named_parameters())


def test_a_hook_of_the_input(model: GPipe, layers: nn.Sequential) -> None:
    """The hook receives the gradient of the whole mini-batch once, for a leaf and for a computed input."""

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        calls: list[Tensor] = []
        leaf = batch()
        leaf.register_hook(calls.append)
        x = leaf * 2
        x.register_hook(calls.append)
        x.retain_grad()
        run(x).square().sum().backward()
        assert torch.equal(x.grad, calls[0])
        return calls

    actual, expected = gradients(model), gradients(lambda x: plain(layers, x))
    assert len(actual) == 2
    assert equal(actual, expected)


def test_full_backward_hooks_of_layers(model: GPipe, layers: nn.Sequential) -> None:
    """The hooks are called for every micro-batch, with the gradients of the plain model."""

    def gradients(run: Callable[[Tensor], Tensor]) -> dict[str, list[Any]]:
        calls: dict[str, list[Any]] = {name: [] for name, _ in layers.named_children()}

        def hook(layer: nn.Module, before: Any, after: Any) -> None:
            name = next(name for name, child in layers.named_children() if child is layer)
            calls[name].append([grad.tolist() for grad in (*before, *after)])

        handles = [layer.register_full_backward_hook(hook) for layer in layers]
        run(batch()).square().sum().backward()
        for handle in handles:
            handle.remove()
        return calls

    actual, expected = gradients(model), gradients(lambda x: plain(layers, x))
    for name, calls in expected.items():
        assert len(calls) == CHUNKS
        assert sorted(actual[name]) == sorted(calls)


def test_a_full_backward_hook_changes_the_gradient(model: GPipe, layers: nn.Sequential) -> None:
    layers[2].register_full_backward_hook(lambda layer, before, after: (before[0] * 2,))
    layers[1].register_full_backward_pre_hook(lambda layer, after: (after[0] + 1,))
    assert_same(outcome(model, batch()), plain_outcome(layers, batch(), chunks=CHUNKS))


def test_hooks_of_partitions_and_of_the_pipeline(model: GPipe) -> None:
    calls: list[str] = []
    for j, partition in enumerate(model.partitions):
        partition.register_full_backward_hook(lambda *_, j=j: calls.append(f"partition {j}"))  # type: ignore[misc]
    model.register_full_backward_hook(lambda *_: calls.append("pipeline"))
    model(batch()).sum().backward()
    assert sorted(calls) == sorted([f"partition {j}" for j in range(3)] * CHUNKS + ["pipeline"])


# ------------------------------------------------------------------------------------- some gradients of many


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_gradients_of_some(devices: Devices, data: st.DataObject) -> None:
    """`torch.autograd.grad` returns the requested gradients and touches no other."""
    mode = data.draw(st.sampled_from(MODES))
    layers = build()
    model = GPipe(layers, BALANCE, devices=devices(3), chunks=CHUNKS, checkpoint=mode)
    x = batch()
    candidates = [x, *layers.parameters()]
    chosen = data.draw(st.lists(st.sampled_from(range(len(candidates))), min_size=1, unique=True))
    inputs = [candidates[k] for k in chosen]

    actual = torch.autograd.grad(model(x).square().sum(), inputs)
    expected = torch.autograd.grad(plain(layers, x).square().sum(), inputs)

    assert equal(actual, expected)
    assert all(tensor.grad is None for tensor in candidates)


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_backward_into_some(devices: Devices, data: st.DataObject) -> None:
    """`backward(inputs=...)` fills the `.grad` of these inputs and of nothing else."""
    mode = data.draw(st.sampled_from(MODES))
    layers = build()
    model = GPipe(layers, BALANCE, devices=devices(3), chunks=CHUNKS, checkpoint=mode)
    x = batch()
    candidates = [x, *layers.parameters()]
    chosen = data.draw(st.sets(st.sampled_from(range(len(candidates))), min_size=1))

    expected = torch.autograd.grad(plain(layers, x).square().sum(), candidates)
    model(x).square().sum().backward(inputs=[candidates[k] for k in chosen])

    assert equal([c.grad for c in candidates], [grad if k in chosen else None for k, grad in enumerate(expected)])


def test_gradient_of_the_output_itself(model: GPipe) -> None:
    """Only the last node of the graph is differentiated, without any of the layers."""
    output = model(batch())
    (grad,) = torch.autograd.grad(output.sum(), [output])
    assert torch.equal(grad, torch.ones_like(output))


def test_some_micro_batches_of_the_output(model: GPipe, layers: nn.Sequential) -> None:
    """The loss need not use all rows."""
    for rows in ([0], [5], [2, 3], [0, 4]):
        actual = outcome(model, batch(), loss=lambda y, rows=rows: y[rows].square().sum())  # type: ignore[misc]
        expected = plain_outcome(
            layers,
            batch(),
            chunks=CHUNKS,
            loss=lambda y, rows=rows: y[rows].square().sum(),  # type: ignore[misc]
        )
        assert_same(actual, expected)


def test_gradients_are_added_to_those_that_are_there(
    model: GPipe, layers: nn.Sequential, same: Callable[[Tensor, Tensor], bool]
) -> None:
    x = batch()
    for _ in range(2):
        plain(layers, x).square().sum().backward()
    expected = [parameter.grad for parameter in layers.parameters()]
    layers.zero_grad()
    for _ in range(2):
        model(x).square().sum().backward()
    assert equal([parameter.grad for parameter in layers.parameters()], expected, same)


def test_gradients_keep_their_memory(model: GPipe) -> None:
    """`.grad` is added to in place, as optimizers with flat buffers need."""
    x = batch()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [parameter.grad for parameter in model.parameters()]
    model(x).sum().backward()
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), before, strict=True))
    assert all(grad.any() for grad in before if grad is not None)


def test_gradients_do_not_share_memory(pipe: Pipe, checkpoint: str) -> None:
    """Two parameters with the same gradient have separate memory, so that one may be scaled in place."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(1, 2)), nn.Parameter(torch.zeros(1, 2))

        def forward(self, input: Tensor) -> Tensor:
            return input + self.a + self.b

    twice = Twice()
    model = pipe(nn.Sequential(twice, nn.Identity()), [1, 1], chunks=1, checkpoint=checkpoint)
    model(torch.rand(1, 2)).sum().backward()
    twice.a.grad.mul_(2)
    assert twice.b.grad.tolist() == [[1, 1]]


# --------------------------------------------------------------------------------------------- more than once


def test_a_second_backward(model: GPipe, layers: nn.Sequential) -> None:
    x = batch()
    loss = model(x).square().sum()
    inputs = [x, *layers.parameters()]
    expected = torch.autograd.grad(plain(layers, x).square().sum(), inputs)
    for last in (False, False, True):
        assert equal(torch.autograd.grad(loss, inputs, retain_graph=not last), expected)


def test_a_second_backward_without_retain_graph_is_refused(model: GPipe) -> None:
    loss = model(batch()).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_two_losses(model: GPipe, layers: nn.Sequential, same: Callable[[Tensor, Tensor], bool]) -> None:
    """Two losses are differentiated one after the other through the same graph."""

    def gradients(output: Tensor) -> list[Tensor | None]:
        layers.zero_grad()
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
        return [parameter.grad for parameter in layers.parameters()]

    assert equal(gradients(model(batch())), gradients(plain(layers, batch())), same)


def test_gradients_of_gradients(pipe: Pipe, layers: nn.Sequential) -> None:
    """Without checkpointing, the graph is the plain graph."""
    model = pipe(layers, BALANCE, chunks=CHUNKS, checkpoint="never")

    def penalty(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x = batch()
        (grad,) = torch.autograd.grad(run(x).square().sum(), [x], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), list(layers.parameters()))

    assert equal(penalty(model), penalty(lambda x: plain(layers, x)))


@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_gradients_of_gradients_are_refused_or_right(pipe: Pipe, layers: nn.Sequential, mode: str) -> None:
    model = pipe(layers, BALANCE, chunks=CHUNKS, checkpoint=mode)
    x = batch()
    with pytest.raises(RuntimeError, match="checkpoint='never'"):
        torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
    # the model works as before
    assert_same(outcome(model, batch()), plain_outcome(layers, batch(), chunks=CHUNKS))


@pytest.mark.parametrize("used", [0, 1])
def test_gradients_of_gradients_of_one_of_two_outputs(pipe: Pipe, used: int) -> None:
    """Either output may lead backward into the cell."""
    model = pipe(nn.Sequential(Two()), [1], chunks=3, checkpoint="always")
    x = torch.rand(6, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="checkpoint='never'"):
        torch.autograd.grad(model(x)[used].square().sum(), [x], create_graph=True)


def test_gradients_of_gradients_of_one_micro_batch(pipe: Pipe, layers: nn.Sequential) -> None:
    """With 'except_last', the only micro-batch is the last one."""
    model = pipe(layers, BALANCE, chunks=1)
    x = batch()
    (grad,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
    grad.square().sum().backward()
    assert layers[0].weight.grad.any()


# --------------------------------------------------------------------------- what is not a parameter or input


class Captured(nn.Module):
    """A layer that uses an unregistered tensor on the micro-batches that ``when`` selects."""

    def __init__(self, tensor: Tensor, when: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.hidden = [tensor]
        self.when = when

    def forward(self, input: Tensor) -> Tensor:
        return input * self.hidden[0] if self.when(input.detach()) else input


@pytest.mark.parametrize("computed", [False, True], ids=["leaf", "computed"])
@pytest.mark.parametrize("used_by", ["all micro-batches", 0, 1, 2])
def test_captured_tensors(pipe: Pipe, checkpoint: str, used_by: Any, computed: bool) -> None:
    """The gradient is right, or refused with the next move, but never lost."""
    leaf = torch.full((2,), 2.0, requires_grad=True)
    captured = leaf * 3 if computed else leaf
    uses = Captured(captured, lambda x: used_by in ("all micro-batches", x[0, 0].item()))
    layers = nn.Sequential(nn.Identity(), uses, nn.Tanh())
    model = pipe(layers, [1, 1, 1], chunks=3, checkpoint=checkpoint)
    x = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]], requires_grad=True)

    expected = torch.autograd.grad(run_plain(layers, x, chunks=3).sum(), [leaf, x], retain_graph=True)
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        assert checkpoint != "never"
        assert "checkpoint='never'" in str(error)
    else:
        assert equal([leaf.grad, x.grad], expected)


class Returned(Captured):
    def forward(self, input: Tensor) -> Tensor:
        return self.hidden[0]


def test_a_captured_tensor_that_is_returned_as_it_is(pipe: Pipe, checkpoint: str) -> None:
    """No operation has a node that would show the tensor."""
    leaf = torch.full((1, 2), 2.0, requires_grad=True)
    model = pipe(
        nn.Sequential(nn.Linear(2, 2), Returned(leaf, bool), nn.Tanh()), [2, 1], chunks=3, checkpoint=checkpoint
    )
    try:
        model(torch.rand(3, 2)).sum().backward()
    except RuntimeError as error:
        assert checkpoint != "never"
        assert "checkpoint='never'" in str(error)
    else:
        assert equal([leaf.grad], torch.autograd.grad(3 * leaf.tanh().sum(), [leaf]))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.T


def test_cached_parametrizations(pipe: Pipe, checkpoint: str) -> None:
    """The first run computes and caches the weight, without a graph if it is a checkpoint."""
    linear = nn.Linear(2, 2)
    parametrize.register_parametrization(linear, "weight", Symmetric())
    model = pipe(nn.Sequential(linear, nn.Tanh()), [1, 1], chunks=2, checkpoint=checkpoint)
    weight = linear.parametrizations.weight.original
    x = torch.rand(4, 2)
    expected = torch.autograd.grad(run_plain(nn.Sequential(linear, nn.Tanh()), x, chunks=2).sum(), [weight])
    try:
        with parametrize.cached():
            model(x).sum().backward()
    except RuntimeError as error:
        assert checkpoint != "never"
        assert "checkpoint='never'" in str(error)
    else:
        torch.testing.assert_close(weight.grad, expected[0])


def test_a_tensor_that_another_partition_owns(pipe: Pipe, checkpoint: str) -> None:
    """A layer reads the weight of a layer in another partition, without owning it."""
    first = nn.Linear(2, 2)
    reads = Captured(first.weight[0].detach().requires_grad_(), lambda x: True)
    reads.hidden = [first.weight]

    class Reads(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input @ reads.hidden[0]

    layers = nn.Sequential(first, nn.Tanh(), Reads())
    model = pipe(layers, [1, 1, 1], chunks=3, checkpoint=checkpoint)
    x = torch.rand(3, 2)
    expected = torch.autograd.grad(run_plain(layers, x, chunks=3).sum(), [first.weight])
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        assert checkpoint != "never"
        assert "checkpoint='never'" in str(error)
    else:
        torch.testing.assert_close(first.weight.grad, expected[0])


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

    expected = gradients(lambda x: torch.func.functional_call(_Plain(layers), _prefixed(swapped), (x,)))
    try:
        actual = gradients(lambda x: torch.func.functional_call(model, swapped, (x,)))
    except RuntimeError as error:
        assert model.checkpoint != "never"
        assert "checkpoint='never'" in str(error)
    else:
        assert equal(actual, expected)


class _Plain(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return plain(self.layers, x)


def _prefixed(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"layers.{name}": parameter for name, parameter in parameters.items()}


def test_training_mode_that_changes_before_backward(pipe: Pipe, checkpoint: str) -> None:
    """The gradient belongs to the mask of the forward, although `eval` was called since."""
    model = pipe(nn.Sequential(nn.Identity(), nn.Dropout(0.5)), [1, 1], chunks=2, checkpoint=checkpoint)
    x = torch.ones(8, 2, requires_grad=True)
    output = model(x)
    model.eval()
    try:
        output.sum().backward()
    except RuntimeError as error:
        assert checkpoint != "never"
        assert "checkpoint='never'" in str(error)
    else:
        assert torch.equal(x.grad, output)
    assert not model[1].training


def test_training_mode_that_changes_between_two_backward_passes(pipe: Pipe) -> None:
    """The second pass is refused, although the first one found the mode unchanged."""
    model = pipe(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), [1, 1], chunks=2, checkpoint="always")
    loss = model(torch.rand(4, 2)).sum()
    loss.backward(retain_graph=True)
    model.eval()
    with pytest.raises(RuntimeError, match="it was in training mode"):
        loss.backward()


def test_training_mode_that_was_left_and_entered_again_before_backward(model: GPipe) -> None:
    """The mode is the same again. But the views of the partitions take over a mode only when they are called."""
    loss = model(batch()).square().sum()
    model.eval()
    with torch.no_grad():
        model(batch())
    model.train()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ------------------------------------------------------------------------------------------ unused and frozen


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(2))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, input: Tensor) -> Tensor:
        return input * self.used


def test_hooks_of_unused_parameters_are_not_called(pipe: Pipe, checkpoint: str) -> None:
    """There is no gradient to call the hooks with, though all parameters of a partition enter its Checkpoint."""
    layers = nn.Sequential(Unused(), Unused(), nn.Tanh())
    model = pipe(layers, [1, 1, 1], chunks=3, checkpoint=checkpoint)
    calls: list[str] = []
    for name, parameter in layers.named_parameters():
        parameter.register_hook(lambda grad, name=name: calls.append(name))  # type: ignore[misc]
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))  # type: ignore[misc]
    model(torch.rand(3, 2)).sum().backward()
    assert sorted(calls) == ["0.used"] * 2 + ["1.used"] * 2


class Two(nn.Module):
    """A layer of two outputs from two branches, each with its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, input: Any) -> tuple[Tensor, Tensor]:
        a, b = input if isinstance(input, tuple) else (input, input)
        return (a * self.left).sin(), (b * self.right).exp()


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)], ids=str)
def test_unused_outputs(pipe: Pipe, checkpoint: str, used: tuple[bool, bool]) -> None:
    """The branch of the unused output gets no gradient, as in the plain model."""
    layers = nn.Sequential(Two(), Two(), Two())
    model = pipe(layers, [1, 1, 1], chunks=3, checkpoint=checkpoint)

    def loss(output: Any) -> Tensor:
        a, b = output
        terms = [y.square().sum() for y, counts in zip((a, b), used, strict=True) if counts]
        return sum(terms[1:], terms[0])

    x = torch.rand(6, 2, requires_grad=True)
    actual, expected = outcome(model, x, loss=loss), plain_outcome(layers, x, chunks=3, loss=loss)
    assert_same(actual, expected)


def test_frozen_partitions_are_not_recomputed(pipe: Pipe, checkpoint: str) -> None:
    """No layer before the first trained parameter needs a gradient."""
    runs = [Runs() for _ in range(4)]
    layers = nn.Sequential(
        nn.Linear(2, 2), runs[0], nn.Linear(2, 2), runs[1], nn.Linear(2, 2), runs[2], nn.Linear(2, 2), runs[3]
    )
    layers[0].requires_grad_(False)
    layers[2].requires_grad_(False)
    layers[6].requires_grad_(False)
    model = pipe(layers, [2, 2, 2, 2], chunks=3, checkpoint=checkpoint)
    x = torch.rand(6, 2)
    actual = outcome(model, x)
    recomputed = {"always": 3, "except_last": 2, "never": 0}[checkpoint]
    assert [run.first for run in runs] == [3, 3, 3, 3]
    assert [run.again for run in runs] == [0, 0, recomputed, recomputed]
    assert_same(actual, plain_outcome(layers, x, chunks=3))


def test_a_frozen_model_with_an_input_that_needs_grad(pipe: Pipe, checkpoint: str) -> None:
    """The search for an adversarial example does this."""
    layers = build().requires_grad_(False)
    model = pipe(layers, BALANCE, chunks=CHUNKS, checkpoint=checkpoint)
    assert_same(outcome(model, batch()), plain_outcome(layers, batch(), chunks=CHUNKS))


def test_a_frozen_model(pipe: Pipe, checkpoint: str) -> None:
    layers = build().requires_grad_(False)
    output = pipe(layers, BALANCE, chunks=CHUNKS, checkpoint=checkpoint)(batch().detach())
    assert not output.requires_grad
    assert output.grad_fn is None


# ----------------------------------------------------------------------------------------- without a backward


@pytest.mark.parametrize("needs_grad", [True, False], ids=["input needs grad", "input needs none"])
def test_eval_keeps_gradients_and_recomputes_nothing(
    pipe: Pipe, layers: nn.Sequential, checkpoint: str, needs_grad: bool
) -> None:
    runs = Runs()
    layers.append(runs)
    model = pipe(layers, [3, 3], chunks=CHUNKS, checkpoint=checkpoint)
    model.eval()
    x = batch().detach().requires_grad_(needs_grad)
    actual = outcome(model, x)
    assert runs.again == 0
    assert_same(actual, plain_outcome(layers.eval(), x, chunks=CHUNKS))
    assert actual.param_grads["0.weight"] is not None


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_no_autograd_function_without_gradients(
    model: GPipe, train: bool, off: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no autograd function at all, not even one without effect."""

    def refuse(*args: Any) -> None:
        raise AssertionError("an autograd function was applied")

    from torchgpipe.engine.checkpoint import Checkpoint, Recompute
    from torchgpipe.engine.copy import Copy, Wait
    from torchgpipe.engine.dependency import Fork, Join

    for function in (Checkpoint, Recompute, Copy, Wait, Fork, Join):
        monkeypatch.setattr(function, "forward", staticmethod(refuse))
    model.train(train)
    with off():
        output = model(batch())
    assert output.grad_fn is None
    assert not output.requires_grad


def test_no_node_of_ours_without_checkpointing_on_one_device(layers: nn.Sequential) -> None:
    """With 'never' the graph is the plain graph: splitting, layers and gathering."""
    model = GPipe(layers, BALANCE, devices=["cpu"] * 3, chunks=CHUNKS, checkpoint="never")
    kinds = sorted(type(node).__name__ for node in graph(model(batch())))
    x = batch()
    assert kinds == sorted(type(node).__name__ for node in graph(torch.cat([layers(c) for c in x.chunk(CHUNKS)])))


# ------------------------------------------------------------------------------------------------ more usages


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-16, float("inf")], ids=str)
def test_scaled_losses(model: GPipe, layers: nn.Sequential, scale: float) -> None:
    """GradScaler does this: it scales the loss, looks for infinities, and scales the gradients back."""

    def loss(output: Tensor) -> Tensor:
        return output.square().sum() * scale

    actual, expected = (
        outcome(model, batch(), loss=loss),
        plain_outcome(layers, batch(), chunks=CHUNKS, loss=loss),
    )
    assert_same(actual, expected)


def test_gradient_clipping_and_accumulation_in_a_training_loop(
    model: GPipe, layers: nn.Sequential, same: Callable[[Tensor, Tensor], bool]
) -> None:
    """A loop as users write it runs twice, and the parameters are equal at the end."""

    def train(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        start = [parameter.detach().clone() for parameter in layers.parameters()]
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
        for step in range(4):
            loss = run(batch()).square().mean()
            loss.backward()
            if step % 2:
                nn.utils.clip_grad_norm_(layers.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        result = [parameter.detach().clone() for parameter in layers.parameters()]
        with torch.no_grad():
            for parameter, value in zip(layers.parameters(), start, strict=True):
                parameter.copy_(value)
        return result

    assert equal(train(model), train(lambda x: plain(layers, x)), same)


def test_a_loss_that_needs_no_gradient_of_some_micro_batches(pipe: Pipe, checkpoint: str) -> None:
    """Zeros that flow back through a mask are gradients as well."""
    layers = build()
    model = pipe(layers, BALANCE, chunks=CHUNKS, checkpoint=checkpoint)
    mask = torch.tensor([1.0, 1, 0, 0, 1, 1], dtype=torch.float64)[:, None]

    def loss(output: Tensor) -> Tensor:
        return (output * mask).square().sum()

    assert_same(outcome(model, batch(), loss=loss), plain_outcome(layers, batch(), chunks=CHUNKS, loss=loss))


def test_anomaly_mode(model: GPipe, layers: nn.Sequential) -> None:
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        actual = outcome(model, batch())
    assert_same(actual, plain_outcome(layers, batch(), chunks=CHUNKS))


def test_numerical_gradients(pipe: Pipe, checkpoint: str) -> None:
    model = pipe(build(), BALANCE, chunks=CHUNKS, checkpoint=checkpoint)
    assert torch.autograd.gradcheck(model, [batch()])


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.enable_grad])
def test_backward_where_gradients_are_off(model: GPipe, layers: nn.Sequential, context: Any) -> None:
    x = batch()
    loss = model(x).square().sum()
    expected = torch.autograd.grad(plain(layers, x).square().sum(), list(layers.parameters()))
    with context():
        loss.backward()
    assert equal([parameter.grad for parameter in layers.parameters()], expected)
