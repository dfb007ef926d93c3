"""A skip is dropped right after its last use, in every mode, and whatever happens between its stash and its pop.

No test calls `gc.collect()` before it looks: a cycle would hold its tensors until a collection, and that is a leak.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.conftest import Pipe
from tests.layers import Apply
from tests.plain import assert_same, outcome, plain_outcome
from tests.skip.layers import pair
from torchgpipe import is_recomputing

pytestmark = pytest.mark.usefixtures("no_collection")

Context: TypeAlias = Callable[[], AbstractContextManager[Any]]

M = 3


class Scene:
    """A model with a skip from layer 0 to layer 2, and a record in layer 3 of which skips are in memory.

    Attributes:
        first: the skips of the first runs, by micro-batch
        again: the skips of recomputations, in order
        after_pop: after each pop, a triple: whether the run is a recomputation, and the indices in ``first`` and in
            ``again`` that are still in memory
    """

    def __init__(self, stashed: Callable[[Tensor], Tensor] = lambda x: x + 1) -> None:
        self.first: list[StorageWeakRef] = []
        self.again: list[StorageWeakRef] = []
        self.after_pop: list[tuple[bool, list[int], list[int]]] = []
        self.stashed = stashed

    def layers(self, popped: Callable[[Tensor, Tensor], Tensor] = torch.add) -> nn.Sequential:
        stashing, popping = pair(self._stash, popped)
        return nn.Sequential(stashing, nn.Linear(2, 2), popping, Apply(self._look), nn.Linear(2, 2))

    def _stash(self, x: Tensor) -> Tensor:
        skip = self.stashed(x)
        (self.again if is_recomputing() else self.first).append(StorageWeakRef(skip.untyped_storage()))
        return skip

    def _look(self, x: Tensor) -> Tensor:
        self.after_pop.append((is_recomputing(), self.alive(self.first), self.alive(self.again)))
        return x * 1

    def alive(self, skips: list[StorageWeakRef]) -> list[int]:
        return [k for k, storage in enumerate(skips) if not storage.expired()]

    def all_gone(self) -> bool:
        return not self.alive(self.first) and not self.alive(self.again)


def mini_batch(requires_grad: bool = True) -> Tensor:
    return torch.rand(M, 2, requires_grad=requires_grad)


# ---------------------------------------------------------------------------------------------------- during forward


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_plain_model_drops_a_skip_when_it_is_popped(context: Context) -> None:
    scene = Scene()
    with context():
        scene.layers()(mini_batch(requires_grad=False))
    assert scene.after_pop == [(False, [], [])]


@pytest.mark.parametrize("balance", [[1, 1, 3], [5]], ids=str)
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_pipeline_that_does_not_recompute_drops_a_skip_when_it_is_popped(
    pipe: Pipe, balance: list[int], context: Context
) -> None:
    """The skip is freed at its pop, not when its partition is finished. The graph of a sum needs no operand."""
    scene = Scene()
    model = pipe(scene.layers(), balance, chunks=M, checkpoint="never")
    with context():
        output = model(mini_batch())
    for i, (again, first, _) in enumerate(scene.after_pop):
        assert not again and set(first) <= set(range(i + 1, M))  # still in flight
    assert len(scene.after_pop) == M and scene.all_gone()
    del output


def test_a_partition_that_works_on_copies_of_its_input_keeps_no_original(pipe: Pipe) -> None:
    scene = Scene()
    layers = scene.layers()
    layers[2].inplace = True  # type: ignore[assignment]
    model = pipe(layers, [1, 1, 3], chunks=M, checkpoint="never")
    model(mini_batch())
    assert all(i not in first for i, (_, first, _) in enumerate(scene.after_pop)) and scene.all_gone()


def test_a_checkpointed_partition_keeps_what_it_recomputes_from_and_no_more(pipe: Pipe) -> None:
    """The partition keeps the skip of the first run. A skip within a partition is not kept."""
    scene, inner = Scene(), Scene()
    layers = scene.layers()
    layers.insert(1, nn.Sequential(*inner.layers()))
    model = pipe(layers, [2, 1, 3], chunks=M, checkpoint="always")
    output = model(mini_batch())
    assert scene.alive(scene.first) == [0, 1, 2] and not inner.alive(inner.first)
    output.sum().backward()
    assert len(scene.again) == len(inner.again) == M and scene.all_gone() and inner.all_gone()


# --------------------------------------------------------------------------------------------------- during backward


def test_backward_drops_the_skip_of_each_finished_micro_batch(pipe: Pipe) -> None:
    """When the pop of micro-batch i is recomputed, the skips of later micro-batches are freed."""
    scene = Scene()
    model = pipe(scene.layers(), [1, 1, 3], chunks=M, checkpoint="always")
    model(mini_batch()).sum().backward()
    recomputed = [(first, again) for was, first, again in scene.after_pop if was]
    assert len(recomputed) == M
    for k, (first, _) in enumerate(recomputed):
        assert first == list(range(M - k))
    assert scene.all_gone()


@pytest.mark.parametrize(
    ("stashed", "popped"),
    [
        (lambda x: x + 1, torch.mul),
        (lambda x: x + 1, lambda x, skip: x),
        (lambda x: x + 1, lambda x, skip: x + skip.detach()),
        (lambda x: (x > 0).float(), torch.add),
    ],
)
@pytest.mark.parametrize("balance", [[1, 1, 3], [5]], ids=str)
def test_after_backward_nothing_is_left(
    pipe: Pipe,
    checkpoint: str,
    balance: list[int],
    stashed: Callable[[Tensor], Tensor],
    popped: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Holds whether a gradient returns or not."""
    scene = Scene(stashed)
    model = pipe(scene.layers(popped), balance, chunks=M, checkpoint=checkpoint)
    output = model(mini_batch())
    output.sum().backward()
    assert scene.all_gone()
    del output
    model(mini_batch())
    assert scene.all_gone(), "an output that is dropped"


# ------------------------------------------------------------------------------------------------------ after a fault


@pytest.mark.parametrize(
    ("checkpoint", "phase"),
    [("always", "forward"), ("except_last", "forward"), ("never", "forward"), ("always", "recomputation")],
)
@pytest.mark.parametrize("at", [0, 1, 2, 4], ids=["the stash", "between", "the pop", "after"])
def test_after_a_fault_nothing_is_left_and_the_model_works_on(pipe: Pipe, checkpoint: str, at: int, phase: str) -> None:
    """The layer's second micro-batch fails in the phase."""
    scene, runs = Scene(), []

    def fail(*_: Any) -> None:
        runs.append("recomputation" if is_recomputing() else "forward")
        if runs[-1] == phase and runs.count(phase) == 2:
            raise ZeroDivisionError

    layers = scene.layers()
    layers[at].register_forward_hook(fail)
    model = pipe(layers, [1, 1, 3], chunks=M, checkpoint=checkpoint)
    x = mini_batch()
    with pytest.raises(ZeroDivisionError) as info:
        model(x).sum().backward()
    (note,) = info.value.__notes__
    assert note.startswith(f"micro-batch 1 of {M}, partition {min(at, 2)} ") and note.endswith(f"during {phase}")
    del info
    # After an error, the autograd engine's queue keeps its ready tasks until the next backward.
    torch.ones((), requires_grad=True).backward()
    assert scene.all_gone()
    assert_same(outcome(model, x), plain_outcome(layers, x, chunks=M))
