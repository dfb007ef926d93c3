"""Layers that compute with what they keep: a second run begins with what the first one had, and leaves no trace.

The rows of `recipes.py` draw such layers in any model of a Sequential. Here they are in both fronts, one by one.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layers import Using
from tests.plain import assert_equal, assert_same, outcome, plain_outcome
from tests.recipes import WAYS, Keeps
from torchgpipe import GPipe, pipelined
from torchgpipe.replay import outputs, state

X = torch.arange(1.0, 9).reshape(4, 2).double()

devices = pytest.mark.parametrize(
    "device", ["cpu:0", "cpu:{}", pytest.param("late:{}", marks=pytest.mark.late)], ids=["inline", "workers", "late"]
)
fronts = pytest.mark.parametrize("front", ["GPipe", "pipelined"])

RUNS = [(front, run) for front in ("GPipe", "pipelined") for run in ("call", "step")]
#: Each way in each mode, and both in each run of each front: a Latin square. The rows of `recipes.py` are drawn in all.
SQUARE = [
    (way, mode, *RUNS[(row + column) % 4])
    for row, way in enumerate(WAYS)
    for column, mode in enumerate(["never", "except_last", "always", ["0"]])
]


def of(
    front: str, layers: nn.Sequential, device: str, checkpoint: Any, dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    """Return a pipeline of two partitions, and 4 micro-batches."""
    options |= {"devices": [device.format(j) for j in range(2)], "chunks": 4, "checkpoint": checkpoint}
    options["loss_fn"] = lambda output, _: output.mean()
    if front == "GPipe":
        return GPipe(layers, [1, 1], **options)
    if checkpoint == "except_last":
        options["checkpoint"] = True
    # The proof finds that these layers tell micro-batches apart by more than their rows.
    return pipelined(layers, X[:2].to(device.format(0), dtype), balance=[1, 1], verify=False, **options)


def left(model: Any) -> dict[str, Any]:
    """Return what training leaves: gradients, buffers, and plain attributes."""
    kept = {name: getattr(layer, "kept", None) for name, layer in model.named_children()}
    return {
        "gradients": {name: parameter.grad.cpu() for name, parameter in model.named_parameters()},
        "kept": {name: value.cpu() if isinstance(value, Tensor) else value for name, value in kept.items()},
    }


@devices
@pytest.mark.parametrize(("way", "checkpoint", "front", "run"), SQUARE, ids=str)
def test_a_layer_that_keeps_and_changes_something(way: str, checkpoint: Any, front: str, run: str, device: str) -> None:
    """Guarded by `is_recomputing`, a second run computed with what later micro-batches had left; unguarded, it was
    refused in one front, and changes that no version counts, as those of numbers, made gradients wrong in silence."""
    if way == "NumPy" and device == "late:{}":
        pytest.skip("NumPy knows memory of the host only")
    plain = nn.Sequential(Keeps(way, 2), Keeps(way, 2)).double()
    model = of(front, copy.deepcopy(plain), device, checkpoint)
    x = X.to(device.format(0))
    for _ in range(2):
        for rows in X.chunk(4):
            (plain(rows).mean() / 4).backward()
        if run == "step":
            model.step(x, target=x)
        else:
            torch.stack([part.mean() / 4 for part in model(x).chunk(4)]).sum().backward()
    assert_equal(left(model), left(plain))


# ------------------------------------------------------------------------------------------- what else is kept


class Large(nn.Module):
    """Has a large table, which it may change."""

    table: Tensor

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(2, 2), change
        self.register_buffer("table", torch.ones(state._SMALL))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.table[:1].clone()
        if self.change:
            (self.table.data if self.change == "data" else self.table).add_(1)
        return y


def compared(model: Any, plain: nn.Sequential) -> None:
    """Train both once, and assert that this leaves the same in both."""
    model.zero_grad()
    assert_same(outcome(model, X), plain_outcome(plain, X, chunks=4))


@fronts
@pytest.mark.parametrize("change", ["data", "in place"])
def test_a_large_buffer_that_changes_is_refused(change: str, front: str) -> None:
    """There is no copy of it: causal masks would have one for each micro-batch."""
    model = of(front, nn.Sequential(Large(change), nn.Linear(2, 2)).double(), "cpu:0", "always")
    refused = (
        "'table' of a Large was changed in place.*never" if change == "in place" else "not computed in recomputation"
    )
    with pytest.raises(RuntimeError, match=refused):
        model(X).sum().backward()


@fronts
def test_a_large_buffer_that_is_filled_once(front: str) -> None:
    plain = nn.Sequential(Large(), nn.Linear(2, 2)).double()
    model = of(front, copy.deepcopy(plain), "cpu:0", "always")
    compared(model, plain)
    model[0].change = plain[0].change = "in place"
    with pytest.raises(RuntimeError, match="run the mini-batch again if it is filled only once"):
        model(X)
    model[0].change = plain[0].change = ""
    plain.load_state_dict(model.state_dict())
    compared(model, plain)


class Lazily(nn.Module):
    """Makes a number and a buffer in its first run, and changes them in later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "calls"):
            self.calls = 0
            self.register_buffer("scale", torch.ones(1))
        self.calls += 1
        self.scale = self.scale + self.calls
        y: Tensor = self.linear(x) * self.scale
        return y


class Both(nn.Module):
    """Two modules have one buffer: one writes it, and the other reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.reads = Keeps("in place", 2), Keeps("in place", 2)
        self.reads.kept = self.writes.kept

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.reads(self.writes(x))
        return y


class NowAndThen(nn.Module):
    """Changes what it keeps in every third run only: the two before compute with what that one replaces."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        self.linear, self.calls, self.scale = nn.Linear(2, 2), 0, 1.0
        self.register_buffer("table", torch.ones(state._SMALL if large else 2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            self.scale, self.table = self.scale / 2, self.table + 1
        y: Tensor = self.linear(x) * self.scale * self.table[:2].clone()
        return y


class Balanced(nn.Module):
    """Shows a number with its graph, and computes with that of the micro-batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(2, 2), torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        result = y * self.size.detach()
        self.size = y.square().mean()
        return result


class Hooked(nn.Module):
    """Installs a hook in its first run, and notes that, as transformers does for what layers return.

    The second run of Phi-4's images found no note, so it installed the hook again, beside that of the first run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "installed"):
            self.inner.register_forward_hook(lambda *call: call[-1] * 2)
            self.installed = True
        y: Tensor = self.inner(x)
        return y


@fronts
@pytest.mark.parametrize(
    "layer", [Lazily, Both, partial(NowAndThen, False), partial(NowAndThen, True), Balanced, Hooked]
)
def test_what_comes_later_and_what_else_modules_have(layer: Callable[[], nn.Module], front: str) -> None:
    plain = nn.Sequential(layer(), nn.Linear(2, 2)).double()
    model = of(front, copy.deepcopy(plain), "cpu:0", "always")
    for _ in range(3):
        compared(model, plain)


@fronts
def test_a_graph_that_is_kept_runs_again_from_the_same_state(front: str) -> None:
    model = of(front, nn.Sequential(Keeps("data", 2), Keeps("number", 2)).double(), "cpu:0", "always")
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    assert_equal([parameter.grad / 2 for parameter in model.parameters()], once)


# --------------------------------------------------------------------------------------- what is not kept alive


class Shows(nn.Module):
    """Keeps its last output for all to see."""

    def __init__(self, seen: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.linear, self.seen, self.last = nn.Linear(2, state._SMALL), seen, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        self.seen.append(weakref.ref(self.last))
        return self.last.sum(1, keepdim=True)


@pytest.mark.usefixtures("no_collection")
@fronts
def test_what_a_layer_shows_is_not_kept_for_each_micro_batch(front: str) -> None:
    seen: list[weakref.ref[Tensor]] = []
    model = of(front, nn.Sequential(Shows(seen), nn.Linear(1, 1)).double(), "cpu:0", "always")
    seen.clear()
    loss = model(X).sum()
    assert [one() is not None for one in seen] == [False, False, False, True]
    loss.backward()
    assert sum(one() is not None for one in seen) == 1


@pytest.mark.usefixtures("no_collection")
def test_copies_are_forgotten_when_a_cell_has_been_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss holds the graph, and the graph held them until the next mini-batch."""
    copies: list[weakref.ref[Tensor]] = []
    clone = Tensor.clone

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied = clone(tensor, *args, **kwargs)
        copies.append(weakref.ref(copied))
        return copied

    model = of("GPipe", nn.Sequential(Keeps("data", 2), nn.Linear(2, 2)).double(), "cpu:0", "always")
    monkeypatch.setattr(Tensor, "clone", noted)
    loss = model(X).sum()
    assert any(one() is not None for one in copies)
    loss.backward()
    assert not any(one() is not None for one in copies)


class Remembers(nn.Module):
    """Adds something large of the micro-batch before."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if is_buffer:
            self.register_buffer("last", torch.zeros(state._SMALL))
        else:
            self.last = torch.zeros(state._SMALL)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * (1 + self.last[:1])
        self.last = self.last + 1
        return y


@fronts
def test_what_seems_to_be_shown_but_is_computed_with(front: str) -> None:
    model = of(front, nn.Sequential(Remembers(False), nn.Linear(2, 2)).double(), "cpu:0", "always")
    with pytest.raises(RuntimeError, match=r"has not computed in recomputation .* with buffers"):
        model(X).sum().backward()
    plain = nn.Sequential(Remembers(True), nn.Linear(2, 2)).double()
    model = of(front, copy.deepcopy(plain), "cpu:0", "always")
    for _ in range(2):
        compared(model, plain)


# ------------------------------------------------------------------------------------ what nobody can give back


def counting() -> Callable[[nn.Module, Tensor], Tensor]:
    calls = [0]

    def count(linear: nn.Module, x: Tensor) -> Tensor:
        calls[0] += 1
        y: Tensor = linear(x) * calls[0]
        return y

    return count


def drawing(draw: Callable[[random.Random, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Draw from a generator that is no attribute of the layer, nor Python's own."""
    generator = random.Random(0)
    return lambda linear, x: draw(generator, linear(x))


HIDDEN: dict[str, Callable[[], Callable[[nn.Module, Tensor], Tensor]]] = {
    "a number outside": counting,
    "random numbers": lambda: drawing(lambda generator, y: y * generator.random()),
    "the order": lambda: drawing(lambda generator, y: y[:, generator.sample([0, 1], 2)] * (1 + generator.random())),
}


@fronts
@pytest.mark.parametrize("run", ["call", "step"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_another_output_in_recomputation_is_refused(hidden: str, run: str, front: str) -> None:
    """Gradients were those of another function, in silence."""
    layers = nn.Sequential(Using(HIDDEN[hidden](), 2), nn.Linear(2, 2)).double()
    model = of(front, layers, "cpu:0", "always", schedule="GPipe")
    name = "partition 0" if front == "GPipe" else "'0'"
    with pytest.raises(RuntimeError, match=rf"{name}.* has not computed in recomputation what it computed before"):
        model.step(X, target=X) if run == "step" else model(X).sum().backward()


class Follower(nn.Module):
    """Has weights that follow those of another layer in its forward, as the key encoder of a momentum contrast."""

    def __init__(self) -> None:
        super().__init__()
        self.leader = nn.Linear(2, 2)
        self.follower = copy.deepcopy(self.leader).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for leading, following in zip(self.leader.parameters(), self.follower.parameters()):
            following.data.lerp_(leading.data, 0.5)
        y: Tensor = self.leader(x) * self.follower(x)
        return y


def test_another_output_from_the_second_mini_batch_on_is_refused() -> None:
    """Only the first recomputation was compared, when both had the same weights, so that nothing followed."""
    model = of("GPipe", nn.Sequential(Follower(), nn.Linear(2, 2)).double(), "cpu:0", "always")
    model(X).sum().backward()
    with torch.no_grad():
        model[0].leader.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"partition 0.* has not computed in recomputation .* without asking"):
        model(X).sum().backward()


@fronts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_is_not_refused(dtype: torch.dtype, front: str) -> None:
    """As where kernels add in any order, or the compiler made two graphs."""
    torch.manual_seed(0)

    def rounds(linear: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = linear(x)
        noise = torch.tensor([[random.choice([-4, 4]) for _ in row] for row in y])
        return y * (1 + torch.finfo(dtype).eps * noise).to(y)

    layers = nn.Sequential(Using(rounds, 2), nn.Linear(2, 2)).to(dtype)
    of(front, layers, "cpu:0", "always", dtype=dtype)(X.to(dtype)).sum().backward()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comparing_an_output_takes_no_memory(dtype: torch.dtype, transposed: bool) -> None:
    """It was widened by 16 MiB, with four temporaries, and a transposed one copied: a step of 640 MiB took 1,030."""
    output = torch.ones(1 << 10, 1 << 12, dtype=dtype)
    output = output.t() if transposed else output

    class New(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() != memory:
                self.bytes = max(self.bytes, result.untyped_storage().nbytes())
            return result

    memory = output.untyped_storage().data_ptr()
    with New() as new:
        found = outputs.sums(output)
    assert 0 < new.bytes <= 1 << 16
    assert found is not None
    assert found[1:].tolist() == [1 << 22, 1 << 11]


@fronts
def test_outputs_that_are_compared_may_be_of_eight_bits(front: str) -> None:
    def rounds(linear: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = linear(x)
        return y, y.detach().to(torch.float8_e4m3fn)

    layers = nn.Sequential(Using(rounds, 2), Using(lambda linear, pair: linear(pair[0]) + pair[1].to(X.dtype), 2))
    of(front, layers.double(), "cpu:0", "always")(X).sum().backward()
