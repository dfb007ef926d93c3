"""Models for the tests of several processes, and a step of the plain model as the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.skip.layers import pair
from torchgpipe import is_checkpointing, is_recomputing
from torchgpipe.distributed import DistributedGPipe

__all__ = ["assert_gradients", "cross_entropy", "data", "everything", "mlp", "plain_step", "tokens", "weigh"]

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


class Several(nn.Module):
    """A layer that returns a dict of tensors and None, with an integer tensor and a tensor that needs no gradient."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x, "ids": x.argmax(-1), "nothing": None, "constant": x.detach() * 2}


class Joined(nn.Module):
    def forward(self, all: dict[str, Any]) -> Tensor:
        assert all["nothing"] is None and all["ids"].dtype == torch.int64
        result: Tensor = all["x"] * all["constant"] + F.one_hot(all["ids"], 4)
        return result


class Channels(nn.Module):
    """A norm of values of shape (batch, time, channels)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.mT)
        return y.mT


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
        Several(),
        Joined(),
        Channels(4),
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


def plain_step(
    model: nn.Module,
    input: Tensor,
    target: Tensor,
    chunks: int,
    loss_fn: Callable[[Any, Any], Tensor] = F.mse_loss,
    weight: Callable[[Any], Any] = len,
) -> Tensor:
    """Return the mean loss and accumulate its gradients, one micro-batch after the other."""
    losses = torch.zeros((), dtype=torch.float64)
    total = sum(float(weight(y)) for y in target.chunk(chunks))
    for x, y in zip(input.chunk(chunks), target.chunk(chunks)):
        loss = loss_fn(model(x), y) * (float(weight(y)) / total)
        loss.backward()
        losses += loss.detach()
    return losses


def assert_gradients(model: DistributedGPipe, plain: nn.Module, exact: bool = True) -> None:
    """Assert that the gradients of this process are those of the plain model."""
    expected = dict(plain.named_parameters())
    close = 0.0 if exact else 1e-12
    for name, parameter in model.named_parameters():
        actual, wanted = parameter.grad, expected[name].grad
        if wanted is None:
            assert actual is None, name
        else:
            torch.testing.assert_close(actual, wanted, rtol=close, atol=close, msg=lambda m, n=name: f"{n}: {m}")
