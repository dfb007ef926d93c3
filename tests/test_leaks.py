"""A tensor is dropped as soon as nothing needs it: no later than in the plain model, run in the same order.

Every layer here notes the memory of its output, and at every run checks which memory is still in use. No test calls
`gc.collect()` before it checks: a cycle would hold its tensors until a collection, which is a leak.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.conftest import Devices, Pipe
from tests.layers import Using
from torchgpipe import GPipe, is_recomputing
from torchgpipe.schedule import clock_cycles

pytestmark = pytest.mark.usefixtures("no_collection")

MODES = ["always", "except_last", "never"]

#: (layer, micro-batch, whether recomputed)
Label = tuple[int, int, bool]


class Watch:
    """The outputs of layers, and which of them were in memory at the start of each run."""

    def __init__(self) -> None:
        self.storages: dict[Label, StorageWeakRef] = {}
        self.seen: dict[Label, set[Label]] = {}

    def alive(self) -> set[Label]:
        return {label for label, storage in self.storages.items() if not storage.expired()}

    def memory(self) -> set[int]:
        """Return the storages in memory, counting outputs that share one storage once."""
        return {storage.cdata for storage in self.storages.values() if not storage.expired()}


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exp": lambda x, weight: x.exp(),  # needs its output at backward
    "sin": lambda x, weight: x.sin(),  # needs its input
    "scale": lambda x, weight: x * weight,  # needs its input
    "shift": lambda x, weight: x + weight,  # needs nothing
    "view": lambda x, weight: x.view_as(x),  # has no memory of its own
    "itself": lambda x, weight: x,
}


class Layer(nn.Module):
    def __init__(self, watch: Watch, k: int, operation: str) -> None:
        super().__init__()
        self.watch = watch
        self.k = k
        self.operation = operation
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, input: Tensor) -> Tensor:
        label = self.k, sum(k == self.k and again == is_recomputing() for k, _, again in self.watch.seen)
        self.watch.seen[*label, is_recomputing()] = self.watch.alive()
        output = OPERATIONS[self.operation](input, self.weight)
        self.watch.storages[*label, is_recomputing()] = StorageWeakRef(output.untyped_storage())
        return output


def build(operations: list[str]) -> tuple[nn.Sequential, Watch]:
    watch = Watch()
    return nn.Sequential(*[Layer(watch, k, operation) for k, operation in enumerate(operations)]), watch


def run_by_the_clock(layers: nn.Sequential, balance: list[int], x: Tensor, chunks: int, stop: int) -> Tensor:
    """Run the plain model in the order of the schedule; a checkpoint runs without a graph and keeps its input."""
    ends = [sum(balance[:j]) for j in range(len(balance) + 1)]
    partitions = [layers[start:end] for start, end in pairwise(ends)]
    batches = list(x.chunk(chunks))
    kept = []
    for cells in clock_cycles(len(batches), len(balance)):
        for i, j in cells:
            if i < stop:
                kept.append(batches[i])
                with torch.no_grad():
                    batches[i] = partitions[j](batches[i])
            else:
                batches[i] = partitions[j](batches[i])
    output = torch.cat(batches) if len(batches) > 1 else batches[0]
    output.kept = kept  # type: ignore[attr-defined]
    return output


OPERATIONS_OF_ALL_KINDS = ["scale", "exp", "shift", "sin", "itself", "scale", "view", "exp", "sin"]
BALANCE = [3, 3, 3]


@pytest.fixture
def watched(pipe: Pipe, checkpoint: str) -> tuple[GPipe, Watch]:
    layers, watch = build(OPERATIONS_OF_ALL_KINDS)
    return pipe(layers, BALANCE, chunks=3, checkpoint=checkpoint), watch


# --------------------------------------------------------------------------------------------- during forward


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_forward_drops_what_the_plain_model_drops(devices: Devices, data: st.DataObject) -> None:
    """At the start of every layer and at the end, every tensor in memory is in memory in the plain model too."""
    operations = data.draw(st.lists(st.sampled_from(list(OPERATIONS)), min_size=1, max_size=6))
    cuts = data.draw(st.sets(st.integers(1, max(1, len(operations) - 1)), max_size=3)) - {len(operations)}
    balance = [end - start for start, end in pairwise([0, *sorted(cuts), len(operations)])]
    chunks = data.draw(st.integers(1, 4))
    mode = data.draw(st.sampled_from([*MODES, "no_grad"]))
    stop = {"always": chunks, "except_last": chunks - 1}.get(mode, 0)
    x = torch.rand(chunks, 2)

    with torch.set_grad_enabled(mode != "no_grad"):
        layers, expected = build(operations)
        output = run_by_the_clock(layers, balance, x, chunks, stop)
        left = expected.alive()
        del output

        layers, actual = build(operations)
        checkpoint = mode if mode in MODES else "always"
        model = GPipe(layers, balance, devices=devices(len(balance)), chunks=chunks, checkpoint=checkpoint)
        output = model(x)
        assert actual.alive() <= left
        del output

    assert list(actual.seen) == list(expected.seen)
    for label, alive in actual.seen.items():
        assert alive <= expected.seen[label], f"at the start of layer {label[0]} on micro-batch {label[1]}"


# -------------------------------------------------------------------------------------------- during backward


def test_backward_drops_the_input_of_each_finished_cell(pipe: Pipe) -> None:
    """When (i, j) is recomputed, the tensors kept for (i+1, j) and later micro-batches are freed."""
    m = 4
    layers, watch = build(["exp", "exp", "exp"])
    model = pipe(layers, [1, 1, 1], chunks=m, checkpoint="always")
    model(torch.rand(m, 2, requires_grad=True)).sum().backward()
    assert len(watch.seen) == 2 * 3 * m
    for (k, n, again), alive in watch.seen.items():
        if again:
            i = m - 1 - n  # backward takes the micro-batches in reverse
            kept = {label[1] for label in alive if label[0] == k - 1 and not label[2]}
            assert kept <= set(range(i + 1))


@pytest.mark.parametrize("chunks", [3, 1])
def test_nothing_is_left_but_what_the_graph_needs(pipe: Pipe, checkpoint: str, chunks: int) -> None:
    """A second backward recomputes again, from what was kept for the first, also where few gradients are asked for.

    The output is a concatenation with its own memory, also of one micro-batch. All tensors known to Python are counted.
    """
    layers, watch = build(OPERATIONS_OF_ALL_KINDS)
    model = pipe(layers, BALANCE, chunks=chunks, checkpoint=checkpoint)

    def tensors() -> int:
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    for evaluates in (True, False, False):
        count = tensors()
        output = model.train(not evaluates)(torch.rand(3, 2))
        assert watch.alive() or (checkpoint == "always" and not evaluates)
        del output
        assert watch.alive() == set(), "an output that is dropped"
        loss = (output := model(torch.rand(3, 2))).sum()
        before = watch.memory()
        for k in (8, 5, 0):
            torch.autograd.grad(loss, [model[k].weight], retain_graph=True, allow_unused=True)
            assert watch.memory() == before
        loss.backward(retain_graph=True)
        assert watch.memory() == before
        loss.backward()
        assert watch.alive() == set() and output.grad_fn is not None and output.isfinite().all()
        del output, loss
        model.zero_grad(set_to_none=True)
    assert tensors() <= count


def test_a_partition_whose_output_is_ignored_keeps_no_recomputation(pipe: Pipe, checkpoint: str) -> None:
    """No gradient returns to the partition, but the order of the micro-batches still leads through it."""
    layers, watch = build(["scale", "exp"])
    ignores = Using(lambda linear, x: linear(torch.ones_like(x)), width=2)
    model = pipe(layers.append(ignores), [2, 1], chunks=3, checkpoint=checkpoint)
    loss = model(torch.rand(3, 2)).sum()
    loss.backward()
    assert not any(again for _, _, again in watch.alive())
    assert layers[0].weight.grad is None
    assert ignores.linear.weight.grad is not None


def generator_states() -> int:
    size = torch.get_rng_state().numel()
    return sum(issubclass(type(thing), Tensor) and thing.numel() == size for thing in gc.get_objects())


@pytest.mark.parametrize("layer", [nn.Identity, nn.Dropout])
def test_states_of_the_generator_are_freed_with_the_recomputation(
    pipe: Pipe, checkpoint: str, layer: Callable[[], nn.Module]
) -> None:
    """A state has five kilobytes. Without a draw none is kept, and none after backward even if the loss is kept."""
    before = generator_states()
    layers = nn.Sequential(nn.Linear(2, 2), layer(), nn.Linear(2, 2), layer())
    model = pipe(layers, [2, 2], chunks=3, checkpoint=checkpoint)
    loss = model(torch.rand(3, 2)).sum()
    kept = 2 * {"always": 3, "except_last": 2, "never": 0}[checkpoint] if layer is nn.Dropout else 0
    assert generator_states() == before + kept
    loss.backward(retain_graph=True)
    assert generator_states() == before + kept
    loss.backward()
    assert generator_states() == before


# ------------------------------------------------------------------------------------------- without backward


def test_the_callers_input_is_not_held(pipe: Pipe, checkpoint: str) -> None:
    layers, _ = build(["shift", "shift"])
    model = pipe(layers, [1, 1], chunks=2, checkpoint=checkpoint)
    x = torch.rand(4, 2)
    memory = StorageWeakRef(x.untyped_storage())
    output = model(x)
    del x
    assert memory.expired() or checkpoint != "never"  # a checkpoint needs it, and a sum does not
    output.sum().backward()
    assert memory.expired()


# -------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_the_model_is_freed_with_its_last_reference(pipe: Pipe, checkpoint: str, train: bool) -> None:
    layers, _ = build(OPERATIONS_OF_ALL_KINDS)
    model = pipe(layers, BALANCE, chunks=3, checkpoint=checkpoint).train(train)
    gone = [weakref.ref(thing) for thing in (model, model.partitions[1], layers[4], layers[4].weight)]
    model(torch.rand(3, 2)).sum().backward()
    del model, layers
    assert [reference() for reference in gone] == [None] * 4


def test_there_are_no_cycles(watched: tuple[GPipe, Watch]) -> None:
    """A collection after a training step finds none of our objects."""
    model, _ = watched
    model(torch.rand(3, 2)).sum().backward()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        model(torch.rand(3, 2)).sum().backward()
        gc.collect()
        ours = [
            thing
            for thing in gc.garbage
            if issubclass(type(thing), Tensor) or type(thing).__module__.startswith("torchgpipe")
        ]
        # Fake tensors belong to other tests: PyTorch frees them late.
        ours = [thing for thing in ours if "FakeTensor" not in repr(thing)]
        assert ours == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
