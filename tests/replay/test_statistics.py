"""Normalisation layers count every micro-batch once, and recomputation leaves no trace in their statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.conftest import Pipe
from tests.plain import assert_same, outcome, plain_outcome, run_plain
from torchgpipe import GPipe

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "BatchNorm1d, with length": (lambda: nn.BatchNorm1d(3), (3, 2)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (3, 2, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), (3, 2, 1, 2)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(3), (3, 2)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (3, 4)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (3, 2, 2)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(3, track_running_stats=True), (3, 2, 1, 2)),
    "cumulative average": (lambda: nn.BatchNorm1d(3, momentum=None), (3,)),
    "large momentum": (lambda: nn.BatchNorm1d(3, momentum=0.9), (3,)),
    "no momentum": (lambda: nn.BatchNorm1d(3, momentum=0.0), (3,)),
    "not affine": (lambda: nn.BatchNorm1d(3, affine=False), (3,)),
    "without statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (3,)),
    "InstanceNorm without statistics": (lambda: nn.InstanceNorm1d(3), (3, 4)),
    "a subclass": (lambda: Subclass(3), (3,)),
    "inside a layer": (lambda: nn.Sequential(nn.Identity(), nn.Sequential(nn.BatchNorm1d(3))), (3,)),
}


class Subclass(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def make_model(make_norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(3)) -> nn.Sequential:
    """A norm in the first partition and a norm in the second."""
    return nn.Sequential(nn.Identity(), make_norm(), nn.Tanh(), make_norm()).double()


def make_input(*shape: int) -> Tensor:
    return torch.randn(*(shape or (6, 3)), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", NORMS)
def test_every_micro_batch_is_counted_once(pipe: Pipe, checkpoint: str, name: str) -> None:
    make_norm, shape = NORMS[name]
    module, x = make_model(make_norm), make_input(8, *shape)
    model = pipe(copy.deepcopy(module), [2, 2], chunks=3, checkpoint=checkpoint)
    for _ in range(2):  # steps
        assert_same(outcome(model, x), plain_outcome(module, x, chunks=3))
    counts = [buffer.item() for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert set(counts) <= {0 if name.startswith("InstanceNorm") else 6}  # InstanceNorm does not count


def test_forward_alone_counts(pipe: Pipe, checkpoint: str) -> None:
    module, x = make_model(), make_input()
    model = pipe(copy.deepcopy(module), [2, 2], chunks=3, checkpoint=checkpoint)
    model(x)
    run_plain(module, x, chunks=3)
    assert_same_buffers(model, module)
    with torch.no_grad():
        model(x)
        run_plain(module, x, chunks=3)
    assert_same_buffers(model, module)


def test_backward_does_not_count(pipe: Pipe, checkpoint: str) -> None:
    """Two forwards, as in gradient accumulation, then both backwards."""
    model = pipe(make_model(), [2, 2], chunks=3, checkpoint=checkpoint)
    outputs = [model(make_input()), model(make_input())]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for output in outputs:
        output.sum().backward()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert model[1].num_batches_tracked == 6


def test_gradients_do_not_depend_on_statistics_that_have_moved_on(pipe: Pipe, checkpoint: str) -> None:
    """Between forward and backward another forward updates the statistics that recomputation starts from."""
    module, x = make_model(), make_input()
    expected = plain_outcome(copy.deepcopy(module), x, chunks=3)
    model = pipe(module, [2, 2], chunks=3, checkpoint=checkpoint)
    y = x.detach().clone().requires_grad_()
    output = model(y)
    with torch.no_grad():
        model(make_input() * 100)
    weights = torch.arange(1, output.numel() + 1, dtype=output.dtype).reshape(output.shape) % 7 - 2
    (output * weights).sum().backward()
    assert torch.equal(y.grad, expected.input_grads[0])


def test_the_tensors_of_the_statistics_stay_the_same(pipe: Pipe, checkpoint: str) -> None:
    """Somebody else may hold them: a state_dict, DistributedDataParallel, an average of the model."""
    model = pipe(make_model(), [2, 2], chunks=2, checkpoint=checkpoint)
    before = dict(model.named_buffers())
    model(make_input()).sum().backward()
    assert all(before[name] is buffer for name, buffer in model.named_buffers())


def test_a_norm_in_evaluation_inside_a_training_model(pipe: Pipe, checkpoint: str) -> None:
    """It normalises by its statistics, leaves them alone, and can be differentiated."""

    def freeze(module: nn.Module) -> nn.Module:
        norm = module.get_submodule("1")
        norm.eval()
        norm.running_mean.add_(torch.arange(3))
        return module

    module, x = freeze(make_model()), make_input()
    model = pipe(copy.deepcopy(module), [2, 2], chunks=3, checkpoint=checkpoint)
    assert not model[1].training
    assert model[3].training
    for _ in range(2):
        assert_same(outcome(model, x), plain_outcome(module, x, chunks=3))
    assert model[1].num_batches_tracked == 0
    assert model[3].num_batches_tracked == 6


def test_statistics_are_loaded_between_steps(pipe: Pipe, checkpoint: str) -> None:
    module, x = make_model(), make_input()
    model = pipe(copy.deepcopy(module), [2, 2], chunks=3, checkpoint=checkpoint)
    model(x).sum().backward()
    model.load_state_dict(module.state_dict())
    assert_same(outcome(model, x), plain_outcome(module, x, chunks=3))


def test_evaluation_uses_the_statistics_of_training(pipe: Pipe, checkpoint: str) -> None:
    module, x = make_model(), make_input()
    model = pipe(copy.deepcopy(module), [2, 2], chunks=3, checkpoint=checkpoint)
    for _ in range(3):
        model(x).sum().backward()
        run_plain(module, x, chunks=3)
    model.eval()
    module.eval()
    assert_same(outcome(model, x), plain_outcome(module, x, chunks=3))


def test_a_change_of_mode_before_backward_is_right_or_refused(pipe: Pipe, checkpoint: str) -> None:
    """Recomputed in evaluation, a batch norm would give other gradients than the ones of what forward did."""
    module, x = make_model(), make_input()
    expected = plain_outcome(copy.deepcopy(module), x, chunks=3, loss=torch.sum)
    model = pipe(module, [2, 2], chunks=3, checkpoint=checkpoint)
    y = x.detach().clone().requires_grad_()
    output = model(y).sum()
    model.eval()
    try:
        output.backward()
    except RuntimeError as error:
        assert checkpoint != "never"
        assert "mode" in str(error)
        assert "checkpoint='never'" in str(error)
    else:
        assert torch.equal(y.grad, expected.input_grads[0])


def test_a_failing_recomputation_leaves_the_statistics_in_place(pipe: Pipe) -> None:
    class FailAgain(nn.Module):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            if self.runs > 2:
                raise ZeroDivisionError
            return x

    model = pipe(nn.Sequential(nn.BatchNorm1d(3), FailAgain()), [2], chunks=2, checkpoint="always")
    output = model(torch.randn(6, 3))
    before = dict(model.named_buffers())
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    assert all(before[name] is buffer for name, buffer in model.named_buffers())
    assert model[0].num_batches_tracked == 2


def test_one_norm_used_twice_counts_twice(checkpoint: str) -> None:
    class Twice(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(x).tanh())

    norm = nn.BatchNorm1d(3)
    model = GPipe(
        nn.Sequential(Twice(norm), Twice(norm)), [1, 1], devices=["cpu", "cpu"], chunks=2, checkpoint=checkpoint
    )
    model(torch.randn(6, 3)).sum().backward()
    assert norm.num_batches_tracked == 8


@pytest.mark.parametrize("normalise", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_other_buffers_that_forward_changes_are_right_or_refused(
    pipe: Pipe, checkpoint: str, normalise: Callable[[nn.Module], nn.Module]
) -> None:
    """Spectral norm keeps two vectors, which every forward improves.

    A recomputation that starts from the improved ones computes with other weights than forward did, so its
    gradients belong to another function, and the vectors move twice. (Weight norm keeps nothing.)
    """
    module = nn.Sequential(normalise(nn.Linear(4, 4, dtype=torch.float64)), nn.Tanh())
    x = make_input(6, 4)
    expected = plain_outcome(copy.deepcopy(module), x, chunks=3)
    model = pipe(copy.deepcopy(module), [1, 1], chunks=3, checkpoint=checkpoint)
    try:
        actual = outcome(model, x)
    except RuntimeError as error:
        assert checkpoint != "never"
        assert normalise is parametrizations.spectral_norm
        assert "checkpoint='never'" in str(error)
    else:
        assert_same(actual, expected)


def assert_same_buffers(a: nn.Module, b: nn.Module) -> None:
    for name, buffer in b.named_buffers():
        assert torch.equal(a.get_buffer(name), buffer), name
