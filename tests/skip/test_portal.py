"""A skip travels straight to its device once and its gradient straight back once, beside all computation.

That its copies run beside all computation, `transport/test_overlap.py` shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.separate_memory import separate_memory
from tests.skip.layers import Pop, Stash, pair
from torchgpipe import GPipe
from torchgpipe.devices.stream import Stream
from torchgpipe.devices.typing import Leaves
from torchgpipe.transport import route as engine_copy

M = 3


def pipeline(layers: list[Any], devices: list[int], balance: list[int] | None = None, **options: Any) -> GPipe:
    """Return a pipeline with a partition per layer, on devices of these numbers."""
    balance = balance or [1] * len(layers)
    names = [f"cpu:{k}" for k in devices]
    return GPipe(nn.Sequential(*layers), balance, devices=names, chunks=options.pop("chunks", M), **options)


def train(model: GPipe) -> Counter[tuple[int, int]]:
    """Return how many tensors were copied between each pair of devices."""
    with copies() as ways, separate_memory(model):
        model(torch.rand(model.chunks, 2, requires_grad=True)).sum().backward()
    return Counter(ways)


@contextmanager
def copies() -> Iterator[list[tuple[int, int]]]:
    """Note the devices between which tensors are copied."""
    ways: list[tuple[int, int]] = []
    move = engine_copy._move

    def noting(leaving: Stream, arriving: Stream, target: Stream, leaves: Leaves) -> Leaves:
        moved = move(leaving, arriving, target, leaves)
        ways.extend(
            (leaving.device.index, arriving.device.index) for leaf in moved if leaf is not None and leaf.numel()
        )
        return moved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_copy, "_move", noting)
        yield ways


def there_and_back(ways: list[tuple[int, int]]) -> Counter[tuple[int, int]]:
    """Return each way and the way back, once per micro-batch."""
    moving = [(source, target) for source, target in ways if source != target]
    return Counter(M * (moving + [(target, source) for source, target in moving]))


# ---------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize(
    ("stashed", "popped", "there", "back"),
    [
        (torch.exp, torch.add, True, True),
        (lambda x: None, lambda x, skip: x, False, False),
        (lambda x: x[:0], lambda x, skip: x, False, False),
        (torch.exp, lambda x, skip: x, True, False),
        (torch.exp, lambda x, skip: x + skip.detach(), True, False),
        (lambda x: x > 0, torch.mul, True, False),
    ],
)
def test_a_skip_is_copied_once_there_and_its_gradient_once_back(
    checkpoint: str, stashed: Any, popped: Any, there: bool, back: bool
) -> None:
    """What has no elements is not copied, nor is a gradient that never comes. The property has all devices."""
    stashing, popping = pair(stashed, popped)
    model = pipeline([stashing, nn.Linear(2, 2), popping], [0, 1, 2], checkpoint=checkpoint)
    expected = there_and_back([(0, 1), (1, 2)]) + Counter(M * ([(0, 2)] * there + [(2, 0)] * back))
    assert train(model) == expected


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_any_skips_are_copied_once_there_and_once_back(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 4))
    devices = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    blocks: list[list[nn.Module]] = [[nn.Linear(2, 2)] for _ in range(n)]
    ways = [*pairwise(devices)]
    for _ in range(data.draw(st.integers(1, 4))):
        a, c = sorted(data.draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))))
        stashing, popping = pair()
        blocks[a].append(stashing)
        blocks[c].insert(blocks[c].index(stashing) + 1 if a == c else 0, popping)
        ways.append((devices[a], devices[c]))
    mode = data.draw(st.sampled_from(["always", "except_last", "never"]))
    model = pipeline([nn.Sequential(*block) for block in blocks], devices, checkpoint=mode)
    assert train(model) == there_and_back(ways)


# ---------------------------------------------------------------------------------------------------------- memory


def test_a_skip_is_on_one_device_at_a_time() -> None:
    """A skip is freed on its first device when it has arrived on the second, and there when it has been popped."""

    def make(x: Tensor) -> Tensor:
        skip = x * 2
        sources.append(StorageWeakRef(skip.untyped_storage()))
        return skip

    def popped(x: Tensor, skip: Tensor) -> Tensor:
        targets.append(StorageWeakRef(skip.untyped_storage()))
        i = len(targets) - 1
        alive.append([not storage.expired() for storage in [*sources[: i + 1], *targets[: i + 1]]])
        return x + skip

    sources: list[StorageWeakRef] = []
    targets: list[StorageWeakRef] = []
    alive: list[list[bool]] = []
    model = pipeline([Stash(make), nn.Identity(), Pop(popped)], [0, 1, 2])
    with separate_memory(model), torch.no_grad():
        model(torch.rand(M, 2))
    assert alive == [[False] * (i + 1) + [False] * i + [True] for i in range(M)]
    assert targets[-1].expired()


@pytest.mark.late
def test_after_backward_only_gradients_are_left_on_the_devices(checkpoint: str) -> None:
    names = ["late:0", "late:1", "late:2"]
    model = GPipe(
        nn.Sequential(Stash(), nn.Linear(2, 2), Pop()), [1, 1, 1], devices=names, chunks=M, checkpoint=checkpoint
    )
    before = allocated()
    model(torch.rand(M, 2, requires_grad=True)).sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert allocated() - before == sum(grad.nbytes for grad in grads if grad is not None)


def allocated() -> int:
    torch.accelerator.synchronize()
    return sum(torch.accelerator.memory_allocated(index) for index in range(3))
