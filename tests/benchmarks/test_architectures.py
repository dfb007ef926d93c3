"""The catalogue of architectures, and the comparison with the plain model: it must find what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.campaigns.architectures import CATALOGUE, KINDS, Architecture
from benchmarks.campaigns.architectures.reference import Run, compare, run_plain, state


def test_the_catalogue_has_a_hundred_architectures_and_all_kinds() -> None:
    assert len(CATALOGUE) >= 100
    assert {one.kind for one in CATALOGUE.values()} == set(KINDS)
    assert sum(one.kind == "decoder" for one in CATALOGUE.values()) >= 45


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    states: tuple[Tensor, ...]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, input: Tensor, labels: Tensor) -> Output:
        hidden = self.norm(self.first(input))
        logits = self.last(hidden)
        return Output(functional.cross_entropy(logits, labels), logits, (hidden,))


TINY = Architecture(
    "tiny",
    "vision",
    Model,
    lambda rows, generator: {
        "input": torch.randn(rows, 3, generator=generator, dtype=torch.float64),
        "labels": torch.randint(2, (rows,), generator=generator),
    },
    rows=6,
)


def run() -> tuple[Run, Run]:
    """Return a plain run, and the same as a pipeline would leave it, with the joined output."""
    base, batch = TINY.build(), TINY.inputs(6, torch.Generator().manual_seed(0))
    plain = run_plain(TINY, copy.deepcopy(base), batch, 6, 3)
    other = run_plain(TINY, model := copy.deepcopy(base), batch, 6, 3)
    parts = other.outputs
    states = tuple(torch.cat(parts) for parts in zip(*[part.states for part in parts]))
    joined = Output(other.loss, torch.cat([part.logits for part in parts]), states)
    return plain, Run(other.loss, [joined], other.shares, **state(model))


def test_two_runs_that_are_equal_compare_as_equal() -> None:
    assert compare(*run()) == []


def returning(run: Run, **changes: Any) -> None:
    run.outputs[0] = replace(run.outputs[0], **changes)


#: What is wrong in a run, and what is named.
DAMAGES: list[tuple[Callable[[Run], Any], str]] = [
    (lambda run: run.gradients["first.weight"].add_(1e-8), "the gradient of first.weight"),  # type: ignore[union-attr]
    (lambda run: run.gradients.update({"last.bias": None}), "the gradient of last.bias is None"),
    (lambda run: run.gradients.update(unused=torch.zeros(1)), "the gradient of unused is there"),
    (lambda run: run.buffers["norm.num_batches_tracked"].add_(1), "buffer norm.num_batches_tracked"),
    (lambda run: setattr(run, "loss", run.loss + 1e-6), "the loss"),
    (lambda run: returning(run, logits=run.outputs[0].logits.flip(0)), "output .logits"),
    (lambda run: returning(run, states=(run.outputs[0].states[0][:2],)), "output .states[0]"),
    (lambda run: returning(run, states=list(run.outputs[0].states)), "output .states is list"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGES, ids=[named for _, named in DAMAGES])
def test_a_difference_is_found_and_named(damage: Callable[[Run], Any], named: str) -> None:
    plain, other = run()
    damage(other)
    (fault,) = compare(plain, other)
    assert fault.startswith(named)
