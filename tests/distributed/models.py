"""Models for the tests of several processes, and a step of the plain model as the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.layers import Apply, With
from tests.skip.layers import pair
from torchgpipe import is_checkpointing, is_recomputing
from torchgpipe.batchnorm import mini_batch

__all__ = [
    "EVERYTHING", "MLP", "Task", "assert_gradients", "assert_step", "cross_entropy", "data", "everything", "mlp",
    "plain_step", "tokens", "weigh",
]  # fmt: skip

CLASSES = 5


def mlp(layers: int = 6) -> nn.Sequential:
    """Return linear layers and activations."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for k in range(layers):
        model.append(nn.Linear(4, 4) if k % 2 == 0 else nn.Tanh())
    return model.double()


def data(size: int) -> tuple[Tensor, Tensor]:
    """Return the input and the target of a mini-batch for `mlp`."""
    draw = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=draw).double(), torch.randn(size, 4, generator=draw).double()


def several(x: Tensor) -> dict[str, Any]:
    """Return a dict of tensors and None, with an integer tensor and a tensor that needs no gradient."""
    return {"x": x, "ids": x.argmax(-1), "nothing": None, "constant": x.detach() * 2}


def joined(all: dict[str, Any]) -> Tensor:
    assert all["nothing"] is None and all["ids"].dtype == torch.int64
    result: Tensor = all["x"] * all["constant"] + F.one_hot(all["ids"], 4)
    return result


class Counter(nn.Module):
    runs = 0
    first_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += not is_recomputing()
        self.first_runs += is_checkpointing()
        return x


def everything(dropout: float = 0.0) -> nn.Sequential:
    """Return a model from tokens (batch, time) to scores (batch, time, 5), with layers of all difficult kinds.

    The balance [3, 3, 2, 4] puts a difficult value on each boundary.
    """
    torch.manual_seed(0)
    stash_a, pop_a = pair()
    stash_b, pop_b = pair()
    frozen = nn.Linear(4, 4).requires_grad_(False)
    layers = [
        nn.Embedding(7, 4),
        stash_a,
        Apply(several),
        Apply(joined),
        With(nn.BatchNorm1d(4), lambda norm, x: norm(x.mT).mT),  # of values of shape (batch, time, channels)
        stash_b,
        frozen,
        pop_a,
        Counter(),
        pop_b,
        nn.Dropout(dropout),
        nn.Linear(4, CLASSES),
    ]
    return nn.Sequential(*layers).double()


def tokens(size: int, time: int = 6) -> tuple[Tensor, Tensor]:
    """Return tokens and targets for `everything`. Targets of -100 do not count in the loss."""
    draw = torch.Generator().manual_seed(size)
    input = torch.randint(7, (size, time), generator=draw)
    target = torch.randint(CLASSES, (size, time), generator=draw)
    target[torch.rand(size, time, generator=draw) < 0.4] = -100
    return input, target


def weigh(target: Tensor) -> Tensor:
    """Return the number of targets that count."""
    return (target != -100).sum()


def cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


class Task(NamedTuple):
    """A model and what it learns."""

    make: Callable[[], nn.Sequential]
    draw: Callable[[int], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Any, Any], Tensor]
    weight: Callable[[Any], Any] | None

    @property
    def options(self) -> dict[str, Any]:
        return {"chunks": 4, "loss_fn": self.loss_fn, "weight": self.weight}


MLP = Task(mlp, data, F.mse_loss, None)
EVERYTHING = Task(everything, tokens, cross_entropy, weigh)


def plain_step(task: Task, model: nn.Module, *parts: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss and accumulate its gradients, one micro-batch of all parts after the other."""
    inputs = [x for input, _ in parts for x in input.chunk(4)]
    targets = [y for _, target in parts for y in target.chunk(4)]
    weights = [float((task.weight or len)(y)) for y in targets]
    losses = torch.zeros((), dtype=torch.float64)
    with mini_batch(len(inputs)):
        for x, y, weight in zip(inputs, targets, weights):
            loss = task.loss_fn(model(x), y) * (weight / sum(weights))
            loss.backward()
            losses += loss.detach()
    return losses


def assert_step(
    task: Task, model: Any, plain: nn.Module, sizes: tuple[int, ...], replica: int = 0, exact: bool = False
) -> None:
    """Assert that a step has the loss and the gradients of the plain model, and the statistics of this replica's rows.

    Args:
        sizes: the number of rows of each replica
        exact: whether gradients are added in the same order
    """
    parts = [task.draw(size + k) for k, size in enumerate(sizes)]
    alone = copy.deepcopy(plain)
    expected = plain_step(task, plain, *parts)
    if len(parts) > 1:
        plain_step(task, alone, parts[replica])
        for name, buffer in alone.named_buffers():
            plain.get_buffer(name).copy_(buffer)
    input, target = parts[replica]
    torch.testing.assert_close(model.step(input, target=target), expected, rtol=1e-13, atol=0)
    assert_gradients(model, plain, exact)
    buffers = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=1e-12, atol=1e-12)


def assert_gradients(model: nn.Module, plain: nn.Module, exact: bool = False) -> None:
    """Assert that the gradients of this process are those of the plain model."""
    expected = dict(plain.named_parameters())
    close = 0.0 if exact else 1e-12
    for name, parameter in model.named_parameters():
        actual, wanted = parameter.grad, expected[name].grad
        assert (actual is None) == (wanted is None), name
        torch.testing.assert_close(actual, wanted, rtol=close, atol=close, msg=lambda m, n=name: f"{n}: {m}")
