"""A recomputation draws what the first run drew, and nobody else notices that it drew at all.

The reference is the pipeline itself with `checkpoint='never'`: there, every layer runs once.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import torchgpipe
from tests.conftest import Pipe
from tests.layers import Apply
from tests.plain import Outcome, assert_same, outcome
from torchgpipe import GPipe, is_recomputing
from torchgpipe.drive.autograd import in_one_thread

CHECKPOINTED = ["always", "except_last"]


class Draw(nn.Module):
    """Draws numbers, and keeps them by phase."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw
        self.first: list[Tensor] = []
        self.again: list[Tensor] = []

    def forward(self, input: Tensor) -> Tensor:
        noise = self.draw(input.detach())
        (self.again if is_recomputing() else self.first).append(noise)
        return input * noise

    def repeats(self) -> bool:
        """Return whether each recomputation drew what a first run drew."""
        return all(any(torch.equal(again, first) for first in self.first) for again in self.again)


def random_layers() -> nn.Sequential:
    """Layers that draw beside some that do not, in double precision."""
    first = [nn.Linear(2, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4)]
    return nn.Sequential(*first, nn.AlphaDropout(0.3), nn.RReLU(), nn.Linear(4, 2), nn.Dropout(0.2)).double()


def drawing(pipe: Pipe, draw: Callable[[Tensor], Tensor], checkpoint: str, **options: Any) -> tuple[GPipe, Draw]:
    """Return a pipeline of two partitions whose first one draws, and the layer that does."""
    layer = Draw(draw)
    return pipe(nn.Sequential(layer, nn.Tanh()), [1, 1], **{"chunks": 2, **options}, checkpoint=checkpoint), layer


def ones(rows: int = 4, columns: int = 2) -> Tensor:
    return torch.ones(rows, columns, requires_grad=True)


# ---------------------------------------------------------------------------------------------- equal numbers


OUTSIDE: dict[str, Callable[[], float]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "normal": np.random.randn,  # which keeps every other number in reserve
}


@pytest.mark.parametrize("draws", OUTSIDE)
@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cpu:0", "cpu:1"]])
def test_numbers_of_python_and_numpy_are_drawn_again(draws: str, devices: list[str]) -> None:
    """Recomputation drew others: of 200 steps, 36 had wrong gradients in silence."""
    source, x, y = OUTSIDE[draws], torch.randn(8, 2), torch.zeros(8, 2)
    layers = nn.Sequential(*[layer for _ in range(2) for layer in (nn.Linear(2, 2), Draw(lambda x: x * source()))])
    settings: dict[str, Any] = {"devices": devices, "chunks": 4, "loss_fn": nn.MSELoss()}

    def trained(front: str, checkpoint: str) -> list[Tensor]:
        if front == "GPipe":
            model: Any = GPipe(layers, [2, 2], checkpoint=checkpoint, **settings)
        else:
            settings["verify"] = False
            model = torchgpipe.pipelined(layers, x, checkpoint=checkpoint == "always", **settings)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        source()  # It may leave a number in reserve.
        grads = []
        for step in (False, True, True, False):  # A first mini-batch shows what is drawn.
            layers.zero_grad()
            loss = model.step(x, target=y) if step else model(x).square().mean()
            if not step:
                loss.backward()
            grads += [parameter.grad for parameter in layers.parameters()]
        if front == "pipelined":
            model.unpipelined()
        return grads

    for front in ("GPipe", "pipelined"):
        assert all(map(torch.equal, trained(front, "always"), trained(front, "never"))), front


def test_what_another_thread_draws_from_python_is_no_concern(pipe: Pipe) -> None:
    """As threads do that load data: its numbers are not those of a layer, and no recomputation is refused."""

    def draw(x: Tensor) -> Tensor:
        thread = threading.Thread(target=random.random)
        thread.start()
        thread.join()
        return torch.ones_like(x)

    model, layer = drawing(pipe, draw, "always")
    model(ones()).sum().backward()
    assert layer.again and layer.repeats()


def test_a_seed_gives_the_same_with_one_device_and_with_several(checkpoint: str) -> None:
    """Workers draw in the order of the schedule, however the threads are run, and checkpointed or not."""
    layers = random_layers()
    x = torch.rand(8, 2, dtype=torch.float64, requires_grad=True)

    def step(model: GPipe) -> Outcome:
        torch.manual_seed(7)
        return outcome(model, x)

    for balance in ([2, 3, 3], [1] * 8):
        expected = step(GPipe(layers, balance, devices=["cpu"] * 8, chunks=4, checkpoint="never"))
        after = torch.get_rng_state()
        model = GPipe(layers, balance, devices=[f"cpu:{j}" for j in range(8)], chunks=4, checkpoint=checkpoint)
        for _ in range(3):
            actual = step(model)
            assert torch.equal(torch.get_rng_state(), after), "as many numbers were drawn"
            # Workers number their nodes separately, so the gradients of the micro-batches may be summed in any order.
            assert_close(actual.param_grads, expected.param_grads, rtol=1e-12, atol=1e-12)
            assert_same(replace(actual, param_grads={}), replace(expected, param_grads={}))


@pytest.mark.parametrize("checkpoint", CHECKPOINTED)
def test_a_frozen_partition_draws_between_two_trained_ones(checkpoint: str) -> None:
    """It has nothing to differentiate, so nothing is noted there; the cells behind it must look at the states anew."""

    def trained(checkpoint: str) -> Outcome:
        torch.manual_seed(0)
        layers = random_layers()
        for parameter in layers[:3].parameters():
            parameter.requires_grad_(False)
        model = GPipe(layers, [3, 3, 2], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)
        torch.manual_seed(1)
        return outcome(model, torch.rand(6, 2, dtype=torch.float64))

    assert_same(trained(checkpoint), trained("never"))


def test_backwards_in_another_order_and_twice(pipe: Pipe) -> None:
    model, draw = drawing(pipe, torch.rand_like, "always", chunks=1)
    outputs = [model(ones()) for _ in range(3)]
    order = (1, 1, 2, 0)
    for k in order:
        outputs[k].sum().backward(retain_graph=True)
    assert all(torch.equal(draw.first[k], noise) for k, noise in zip(order, draw.again, strict=True))


# ----------------------------------------------------------------------------------------- with other threads


def in_another_thread(draw: Callable[[], Any]) -> None:
    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()


@pytest.mark.parametrize("recomputing", [False, True], ids=["in the first run", "in recomputation"])
def test_another_thread_may_draw_while_layers_draw_nothing(pipe: Pipe, recomputing: bool) -> None:
    """A thread that prepares data lets no model fail that draws nothing, and what it draws is not taken back."""

    def meanwhile(input: Tensor) -> Tensor:
        if is_recomputing() == recomputing:
            in_another_thread(lambda: torch.rand(()))
        return input * 1

    layers = nn.Sequential(nn.Linear(2, 2), Apply(meanwhile))
    before = torch.get_rng_state()
    pipe(layers, [1, 1], chunks=2, checkpoint="always")(ones()).sum().backward()
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.rand(()), torch.rand(())  # once for each micro-batch
    assert torch.equal(torch.get_rng_state(), after)
    assert layers[0].weight.grad is not None


@pytest.mark.parametrize("draws_first", [True, False], ids=["between two draws", "before any draw"])
def test_another_thread_that_draws_meanwhile_is_no_silent_error(pipe: Pipe, draws_first: bool) -> None:
    """The generator of the CPU belongs to all threads of the process, also to those that we know nothing of.

    Two numbers are drawn by the layer, and between them one by another thread.
    """

    drawn: dict[bool, list[float]] = {False: [], True: []}

    def draw_twice(input: Tensor) -> Tensor:
        numbers = drawn[is_recomputing()]
        if draws_first:
            numbers.append(torch.rand(()).item())
        if not is_recomputing():
            in_another_thread(lambda: torch.rand(()))
        numbers.append(torch.rand(()).item())
        return input * sum(numbers)

    model = pipe(nn.Sequential(nn.Linear(2, 2), Apply(draw_twice)), [1, 1], chunks=1, checkpoint="always")
    output = model(torch.rand(4, 2))
    try:
        output.sum().backward()
    except RuntimeError as error:
        assert "checkpoint='never'" in str(error)
    else:
        assert drawn[True] == drawn[False]


@pytest.mark.parametrize("checkpoint", CHECKPOINTED)
def test_a_backward_through_a_random_pipeline_within_a_layer(checkpoint: str) -> None:
    """Its second run lies in the midst of each run of the layer, and was taken for a disturbance."""

    def trained(checkpoint: str) -> Outcome:
        inner = GPipe(nn.Sequential(nn.Dropout()), [1], devices=["cpu"], checkpoint=checkpoint)

        def gradient(input: Tensor) -> Tensor:
            with torch.enable_grad():
                x = input.detach().requires_grad_()
                (grad,) = torch.autograd.grad(inner(x).sum(), x)
            return input * grad

        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(2, 2), Apply(gradient), nn.Dropout()).double()
        return outcome(GPipe(layers, [3], devices=["cpu"], chunks=2, checkpoint=checkpoint), torch.ones(4, 2).double())

    assert_same(trained(checkpoint), trained("never"))


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, input: Tensor) -> Tensor:
        return input * torch.rand(input.shape, dtype=input.dtype, generator=self.generator)


def test_a_layer_with_a_generator_of_its_own(pipe: Pipe, checkpoint: str) -> None:
    """It goes on from where the first runs have left it."""

    def trained(checkpoint: str) -> tuple[list[Tensor], list[Tensor]]:
        module = nn.Sequential(Noise(1), nn.Sequential(nn.Tanh(), Noise(2)), nn.Dropout(0.5), Noise(3))
        model = pipe(module, [1, 2, 1], chunks=3, checkpoint=checkpoint)
        torch.manual_seed(0)
        grads = []
        for _ in range(2):
            x = torch.ones(6, 4, dtype=torch.float64, requires_grad=True)
            model(x).sum().backward()
            grads.append(x.grad)
        generators = [layer.generator for layer in module.modules() if isinstance(layer, Noise)]
        return grads, [generator.get_state() for generator in generators]

    for found, expected in zip(trained(checkpoint), trained("never"), strict=True):
        assert_close(found, expected, rtol=0, atol=0)


HIDDEN = torch.Generator()


def from_a_hidden_generator(x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=HIDDEN)


def from_a_seed(x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=torch.manual_seed(0))


def from_a_fork(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return torch.rand_like(x)


@pytest.mark.xfail(strict=True, reason="these leave no trace in the state of a generator that a layer is known to have")
@pytest.mark.parametrize("draw", [from_a_hidden_generator, from_a_seed, from_a_fork])
@pytest.mark.parametrize("checkpoint", CHECKPOINTED)
def test_known_limits(pipe: Pipe, checkpoint: str, draw: Callable[[Tensor], Tensor]) -> None:
    """What is seeded draws the same, but the caller, who has drawn meanwhile, is set back as well."""
    model, layer = drawing(pipe, draw, checkpoint, chunks=3)
    output = model(ones(6))
    torch.rand(100)
    state = torch.get_rng_state()
    output.sum().backward()
    assert layer.again and layer.repeats() and torch.equal(torch.get_rng_state(), state)


REFUSED = "a layer has a random number generator that it did not have when the pipeline was called"


@pytest.mark.parametrize("checkpoint", CHECKPOINTED)
@pytest.mark.parametrize("always", [True, False], ids=["at each forward", "at the first forward"])
def test_a_layer_that_makes_its_generator(pipe: Pipe, checkpoint: str, always: bool) -> None:
    """It drew from a generator whose state before nobody had noted, and drew other numbers in recomputation.

    One that is made each time would draw the same, but cannot be told from one that was replaced.
    """

    def draw(input: Tensor) -> Tensor:
        if always or not hasattr(layer, "generator"):
            layer.generator = torch.Generator().manual_seed(0)
        return torch.rand(input.shape, dtype=input.dtype, generator=layer.generator)

    model, layer = drawing(pipe, draw, checkpoint)
    output = model(ones())
    state = layer.generator.get_state()
    with pytest.raises(RuntimeError, match=REFUSED):
        output.sum().backward()
    assert torch.equal(layer.generator.get_state(), state)
    layer.first.clear(), layer.again.clear()
    with pytest.raises(RuntimeError, match=REFUSED) if always else nullcontext():
        model(ones()).sum().backward()
    assert layer.repeats()


@pytest.mark.parametrize("checkpoint", CHECKPOINTED)
def test_a_layer_whose_generator_is_replaced_before_backward(pipe: Pipe, checkpoint: str) -> None:
    layer = Noise(1)
    model = pipe(nn.Sequential(layer, nn.Tanh()), [1, 1], chunks=2, checkpoint=checkpoint)
    loss = model(ones()).sum()
    loss.backward(retain_graph=True)
    noted, layer.generator = layer.generator, torch.Generator().manual_seed(2)
    state = layer.generator.get_state()
    with pytest.raises(RuntimeError, match=REFUSED):
        loss.backward(retain_graph=True)
    assert torch.equal(layer.generator.get_state(), state)
    layer.generator = noted
    loss.backward()


def test_a_backward_pass_that_failed_can_be_tried_again(pipe: Pipe, checkpoint: str) -> None:
    """The graph is there as long as autograd has not come to its end, and so is what to draw again."""

    def grads(fails: list[None]) -> list[Tensor]:
        def fail(grad: Tensor) -> None:
            if fails:
                fails.pop()
                raise KeyboardInterrupt

        def failing(input: Tensor) -> Tensor:
            output = input * 1
            if output.requires_grad:
                output.register_hook(fail)
            return output

        torch.manual_seed(0)
        module = random_layers().append(Apply(failing))
        # One micro-batch, because what the others have added to gradients by then stays there.
        loss = pipe(module, [3, 6], chunks=1, checkpoint=checkpoint)(torch.ones(6, 2, dtype=torch.float64)).sum()
        if fails:
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
            torch.rand(100)
        loss.backward()
        return [parameter.grad for parameter in module.parameters()]

    assert_close(grads([None]), grads([]), rtol=0, atol=0)


def test_what_is_forgotten_is_not_drawn_anew() -> None:
    """Here the pass fails after the cell, before autograd has let go of it."""
    model = GPipe(nn.Sequential(nn.Dropout(0.5)), [1], devices=["cpu"], checkpoint="always")
    output = model(torch.ones(6, 4, requires_grad=True))
    fails = [True]

    def fail(*_: Any) -> None:
        if fails.pop():
            raise KeyboardInterrupt

    ((checkpointed, _),) = output.grad_fn.next_functions  # behind the concatenation
    checkpointed.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        output.sum().backward()
    with pytest.raises(RuntimeError, match="call the pipeline again"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("devices", "inline"),
    [
        (["cpu", "cpu"], True),
        (["cpu:0", "cpu:1"], True),
        (["cuda:0", "cuda:0"], True),
        (["cuda:0", "cuda:1"], False),
        (["cpu", "cuda:0"], False),
        (["cpu:0", "cuda:0", "cpu:1"], True),
    ],
    ids=str,
)
def test_devices_with_one_generator(devices: list[str], inline: bool) -> None:
    """A partition on the CPU once made all GPUs beside it take turns."""
    assert in_one_thread([*map(torch.device, devices)]) == inline


COLLECTING = """
import gc, sys, threading, time, torch
from contextlib import suppress
from torchgpipe.replay.random import RandomStates

def note():
    states = RandomStates(torch.device("cpu"), [], between=True)
    for _ in range(1000):
        before = states.begin()
        torch.rand(1)
        with suppress(RuntimeError), states.replay(states.end(before)):  # They disturb each other.
            torch.rand(1)

sys.setswitchinterval(1e-5)
gc.set_threshold(1)
gc.callbacks.append(lambda phase, info: time.sleep(0))
threads = [threading.Thread(target=note, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
def test_the_garbage_collector_in_the_midst_of_a_state() -> None:
    """One thread had the generator and waited for the interpreter, the other one the other way round."""
    subprocess.run([sys.executable, "-c", COLLECTING], check=True, timeout=120)
