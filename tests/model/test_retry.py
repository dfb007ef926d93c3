"""Steps that run out of memory, and run again."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from torchgpipe import GPipe


class _Fault(torch.autograd.Function):
    """Call a function forward, and another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[], None], backward: Callable[[], None]) -> Tensor:
        ctx.at_backward = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.at_backward()
        return grad, None, None


class Scarce(nn.Module):
    """A layer that runs out of memory in the actions of these numbers, of one phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.fails = "forward", dict[int, int]()
        self.count = 0
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(weakref.ref(x))

        def act(phase: str) -> None:
            if phase == self.phase and self.fails.get(self.count, 0):
                self.fails[self.count] -= 1
                self.count = 0
                raise torch.OutOfMemoryError("the device is full")
            self.count += phase == self.phase

        return _Fault.apply(x, lambda: act("forward"), lambda: act("backward"))  # type: ignore[no-any-return]


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), Scarce(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)
    ).double()


X = torch.randn(16, 4, dtype=torch.float64)


def make(front: str, *, workers: bool, **options: Any) -> Any:
    devices = ["cpu:0", "cpu:1"] if workers else ["cpu", "cpu"]
    options = {"chunks": 4, "devices": devices, "loss_fn": lambda output, _: output.square().mean(), **options}
    layers = make_layers()
    return GPipe(layers, [4, 3], **options) if front == "GPipe" else torchgpipe.pipelined(layers, X[:4], **options)


def stepped(model: Any, **options: Any) -> list[Any]:
    torch.manual_seed(3)
    loss = model.step(X, **options)
    return [loss, *[parameter.grad for parameter in model.parameters()], *[*model.buffers()], torch.rand(1)]


def scarce_of(model: Any) -> Scarce:
    (layer,) = [layer for layer in model.modules() if isinstance(layer, Scarce)]
    layer.count = 0
    return layer


@pytest.mark.parametrize("front", ["GPipe", "pipelined"])
@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("tries", [1, 2])
def test_a_step_that_was_retried_is_the_step_without_the_fault(
    front: str, workers: bool, phase: str, tries: int
) -> None:
    """Gradients, running statistics, dropout and the caller's generator, after failures at each of the actions."""
    expected = stepped(make(front, workers=workers, checkpoint="always" if tries == 2 else "never"))
    said = ["freed what", "checkpoint='always'" if front == "GPipe" else "all modules"]
    for action in range(4):
        model = make(front, workers=workers, checkpoint="never", on_oom="retry")
        layer = scarce_of(model)
        layer.phase, layer.fails = phase, {action: tries}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            result = stepped(model)
        assert all(map(torch.equal, result, expected))
        assert [words in str(warning.message) for words, warning in zip(said, told, strict=False)] == [True] * tries
        assert {warning.filename for warning in told} == {__file__}


@pytest.mark.parametrize("front", ["GPipe", "pipelined"])
def test_remedies_stay_and_are_tried_once(front: str) -> None:
    model = make(front, workers=False, checkpoint="never")
    layer = scarce_of(model)
    layer.fails = {0: 4}
    with pytest.raises(torch.OutOfMemoryError) as error, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        stepped(model, on_oom="retry")
    assert len(told) == 3 and "chunks=8" in str(told[-1].message)
    assert "has tried everything" in "".join(error.value.__notes__)
    assert model.chunks == 8 and all([parameter.grad is None for parameter in model.parameters()])
    layer.fails = {0: 1}
    with pytest.raises(torch.OutOfMemoryError):
        stepped(model, on_oom="retry")
    stepped(model)
    with pytest.raises(ValueError, match="on_oom must be"):
        stepped(model, on_oom="again")


def test_nothing_of_a_failed_try_is_in_memory_when_the_next_one_begins() -> None:
    model = make("GPipe", workers=True, checkpoint="always", on_oom="retry")
    layer = scarce_of(model)
    layer.fails = {3: 1}
    alive: list[int] = []

    def look(*_: object) -> None:
        if layer.count == 0:
            gc.collect()
            alive.append(sum([ref() is not None for ref in layer.seen]))

    model[0].register_forward_pre_hook(look)
    with pytest.warns(UserWarning, match="runs again"):
        stepped(model)
    assert not any(alive)


LIMITED = """
import resource, warnings, torch
from torch import nn
from torchgpipe import GPipe

torch.set_num_threads(1)
torch.manual_seed(0)
blocks = [nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]) for _ in range(2)]
how = {"schedule": "GPipe", "checkpoint": "never", "loss_fn": lambda output, _: output.square().mean()}
model = GPipe(nn.Sequential(*blocks), [1, 1], devices=["cpu", "cpu"], chunks=4, on_oom="retry", **how)
model.step(torch.randn(400, 64))
x = torch.randn(80_000, 64)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 350 * 2**20, -1))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    model.step(x)
print(len(told), model.checkpoint)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
def test_a_process_whose_memory_is_limited_goes_on() -> None:
    """A real fault, in whatever operation asks for the memory: 680 MB of activations, and 350 MB for all."""
    ran = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("2 always\n", 0), ran.stderr
