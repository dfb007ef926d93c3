"""A step on several devices with streams: every copy, wait and mark is in its place.

On `late`, a missing one is a race, which fails the test. Models and programs of any kind run there in
`test_step_transparency`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.test_streams import MODES
from tests.layers import Apply
from tests.skip.layers import Pop, Stash
from tests.test_step_transparency import Placing, Run, assert_same
from torchgpipe import GPipe
from torchgpipe.schedule import program
from torchgpipe.skip import Namespace

pytestmark = pytest.mark.late


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output.sin() * target).sum()


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
    run = Run(module, [1, 1, 1, 1], placing, lambda j: f"late:{j}", 4, checkpoint, [x, x])
    assert_same(run.stepped(), run.plain(whole=True))


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
