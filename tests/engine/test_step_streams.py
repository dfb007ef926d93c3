"""A step on several devices with streams: every copy, wait and mark is in its place.

On `late`, a missing one is a race, which fails the test.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.engine.test_streams import MODES, Pop, Stash, pipelines
from tests.layers import Apply
from tests.test_step_transparency import Placing, placings
from torchgpipe import GPipe
from torchgpipe.schedule import program
from torchgpipe.skip import Namespace

pytestmark = pytest.mark.late


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output.sin() * target).sum()


def assert_like_plain(module: nn.Sequential, balance: list[int], placing: Placing, x: Tensor, **options: Any) -> None:
    """Compare the gradients, to the last few bits: the programs sum them in several orders."""
    plain, y = copy.deepcopy(module), torch.randn(len(x), 3, dtype=torch.float64)
    devices = [f"late:{place}" for place in placing.places]
    schedule: Any = placing.schedule or (lambda m, places: placing.make(m))
    model = GPipe(module, balance, devices=devices, schedule=schedule, loss_fn=loss_fn, **options)
    mine, its = (x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2))
    for _ in range(2):
        loss = model.step(mine, y)
    for _ in range(2):
        parts = its.clone().chunk(options["chunks"]), y.chunk(options["chunks"])
        expected = torch.stack([loss_fn(plain(a), b) for a, b in zip(*parts)]).mean()
        if expected.requires_grad:
            expected.backward()
    torch.testing.assert_close(loss.cpu(), expected.detach(), check_dtype=False)
    for p, q in zip(module.parameters(), plain.parameters()):
        torch.testing.assert_close(None if p.grad is None else p.grad.cpu(), q.grad)
    torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZeroBubble", "Interleaved1F1B", "V-Half"])
def test_skips_across_devices(schedule: Any, checkpoint: str) -> None:
    outer, inner = Namespace(), Namespace()
    module = nn.Sequential(
        nn.Sequential(nn.Linear(3, 3), Stash().isolate(outer)),
        nn.Sequential(nn.Linear(3, 3), Stash().isolate(inner)),
        nn.Linear(3, 3),
        nn.Sequential(Pop().isolate(inner), Pop().isolate(outer), nn.Linear(3, 3)),
    ).double()
    places = {"Interleaved1F1B": [0, 1, 0, 1], "V-Half": [0, 1, 1, 0]}.get(schedule, [0, 1, 2, 3])
    placing = Placing(places, lambda m: program(schedule, m, places), schedule)
    x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    assert_like_plain(module, [1, 1, 1, 1], placing, x, chunks=4, checkpoint=checkpoint)


@given(data=st.data())
def test_any_pipeline(data: st.DataObject) -> None:
    layers, balance = data.draw(pipelines())
    module = nn.Sequential(*layers).double()
    # Batch norms count micro-batches in the order of the program, and skips of a plain model come one after the other.
    placing = data.draw(placings(len(balance), exact=True))
    mode, chunks = data.draw(st.sampled_from(MODES)), data.draw(st.integers(1, 4))
    x = torch.randn(2 * chunks, 3, dtype=torch.float64, requires_grad=data.draw(st.booleans()))
    assert_like_plain(module, balance, placing, x, chunks=chunks, checkpoint=mode)


@pytest.mark.parametrize("devices", [[0, 1], [1, 1]], ids=str)
@pytest.mark.parametrize("checkpoint", MODES)
def test_streams_and_devices_are_current_in_the_layers(checkpoint: str, devices: list[int]) -> None:
    def note(phase: str, value: Tensor) -> None:
        current = [torch.accelerator.current_stream(j).stream_id for j in range(2)]
        seen.add((phase, f"late:{torch.accelerator.current_device_index()}", *current))

    def forward(x: Tensor) -> Tensor:
        note("forward", x)
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda grad: note("backward", grad))
        return x.sin()

    seen: set[tuple[Any, ...]] = set()
    module = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), Apply(forward)) for _ in range(2)])
    names = [f"late:{j}" for j in devices]
    model = GPipe(module, [1, 1], devices=names, chunks=2, checkpoint=checkpoint, loss_fn=loss_fn, schedule="GPipe")
    model.step(torch.randn(4, 3), torch.randn(4, 3))
    default = [torch.accelerator.current_stream(j).stream_id for j in range(2)]
    assert seen == {(phase, name, *default) for phase in ("forward", "backward") for name in names}
