"""Normalisation layers count every micro-batch once, and recomputation leaves no trace in their statistics."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.conftest import Pipe
from tests.drive.test_threads import in_threads
from tests.plain import assert_same, loss_of, outcome, plain_outcome
from torchgpipe import GPipe


def make_model() -> nn.Sequential:
    """A norm in the first partition and a norm in the second."""
    return nn.Sequential(nn.Identity(), nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3)).double()


def make_input(*shape: int) -> Tensor:
    return torch.randn(shape or (6, 3), dtype=torch.float64, requires_grad=True)


def test_two_forwards_before_their_backwards(pipe: Pipe, checkpoint: str) -> None:
    """Backward does not count, and its gradients do not depend on statistics that have moved on since its forward.

    Others may hold the buffers, as DDP does.
    """
    module, x = make_model(), make_input()
    expected = plain_outcome(copy.deepcopy(module), x, chunks=3)
    model = pipe(module, [2, 2], chunks=3, checkpoint=checkpoint)
    y = x.detach().clone().requires_grad_()
    outputs = [model(y), model(make_input() * 100)]
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    losses = [loss_of(output) for output in outputs]
    for loss in losses:
        assert loss is not None
        loss.backward()
    assert torch.equal(y.grad, expected.input_grads[0])
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0] and torch.equal(buffer, before[name][1]), name
    assert model[1].num_batches_tracked == 6


def test_a_lazy_instance_norm_counts_its_first_micro_batches_once() -> None:
    """It was not known yet when the pipeline was called, and its recomputation an error."""
    layers, plain = (nn.Sequential(nn.LazyInstanceNorm1d(affine=False, track_running_stats=True)) for _ in range(2))
    x = torch.randn(4, 3, 2)
    model = GPipe(layers, [1], devices=["cpu"], chunks=2, checkpoint="always")
    assert_same(outcome(model, x.requires_grad_()), plain_outcome(plain, x, chunks=2))


def test_calls_in_several_threads(pipe: Pipe, checkpoint: str) -> None:
    """What one counts in its first or only run is not lost in the copies of another one's second run.

    A norm belongs to another partition in each of the models that share it.
    """
    layers, x = make_model(), make_input().detach()
    models = [
        pipe(nn.Sequential(*layers), balance, chunks=3, checkpoint=mode)
        for balance, mode in (([2, 2], "always"), ([1, 3], checkpoint))
    ]

    def train(model: GPipe) -> None:
        for _ in range(25):
            model(x).sum().backward()

    in_threads(*[partial(train, model) for model in models * 2])
    assert [int(layers[k].num_batches_tracked) for k in (1, 3)] == [4 * 25 * 3] * 2


def test_one_norm_used_twice_counts_twice(checkpoint: str) -> None:
    norm = nn.BatchNorm1d(3)
    layers = nn.Sequential(*[nn.Sequential(norm, nn.Tanh(), norm, nn.Identity()) for _ in range(2)])
    model = GPipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=2, checkpoint=checkpoint)
    model(torch.randn(6, 3)).sum().backward()
    assert norm.num_batches_tracked == 8


def test_other_buffers_that_forward_changes(pipe: Pipe, checkpoint: str) -> None:
    """Spectral norm keeps two vectors, which every forward improves.

    A recomputation that starts from the improved ones computes with other weights than forward did, so its
    gradients belong to another function, and the vectors move twice. The gradient of the weight is a sum even within a
    micro-batch, so it rounds in another order.
    """
    module = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4, dtype=torch.float64)), nn.Tanh())
    x = make_input(6, 4)
    expected = plain_outcome(copy.deepcopy(module), x, chunks=3)
    model = pipe(copy.deepcopy(module), [1, 1], chunks=3, checkpoint=checkpoint)
    actual = outcome(model, x)
    torch.testing.assert_close(actual.param_grads, expected.param_grads, rtol=1e-12, atol=1e-12)
    assert_same(replace(actual, param_grads={}), replace(expected, param_grads={}))


class ReadsStatistics(nn.BatchNorm1d):
    """Normalises by running statistics in training, as a batch renormalisation does."""

    def forward(self, input: Tensor) -> Tensor:
        mean = self.running_mean.clone()  # type: ignore[union-attr]
        super().forward(input.detach())
        return (input - mean) * self.weight


def test_a_norm_that_computes_with_its_statistics(pipe: Pipe, checkpoint: str) -> None:
    """It had those of later micro-batches in recomputation."""
    module = nn.Sequential(nn.Linear(3, 3), ReadsStatistics(3)).double()
    model = pipe(copy.deepcopy(module), [1, 1], chunks=3, checkpoint=checkpoint)
    x = make_input()
    assert_same(outcome(model, x), plain_outcome(module, x, chunks=3))
