"""A GPipe whose weights live in host memory: steps and evaluation are those of the resident one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.conftest import Devices
from tests.layers import Apply, Using
from tests.skip.layers import pair
from torchgpipe import GPipe
from torchgpipe.engine.host_memory import HostMemory
from torchgpipe.schedule import program
from torchgpipe.schedule.residency import residency

pytestmark = pytest.mark.on_late


@pytest.fixture(scope="module", autouse=True)
def small_tensors_rest() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostMemory, "least", 1)
        yield


BALANCE, WIDTH = [2, 1, 2, 1], 6


def layers(dropout: float = 0.2) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.Tanh()) for _ in range(3)]
    stash, pop = pair()
    return nn.Sequential(stash, *blocks, pop, nn.Linear(WIDTH, 3))


def made(module: nn.Sequential, devices: list[str], **options: Any) -> GPipe:
    return GPipe(copy.deepcopy(module), BALANCE, devices=devices, chunks=4, loss_fn=functional.cross_entropy, **options)


@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(
    n=st.integers(1, 2),
    checkpoint=st.sampled_from(["always", "except_last", "never", ["1", "2"]]),
    interleaved=st.booleans(),
    slots=st.integers(1, 3),
    frozen=st.booleans(),
)
def test_it_equals_the_resident_pipeline_bit_for_bit(
    devices: Devices, n: int, checkpoint: Any, interleaved: bool, slots: int, frozen: bool
) -> None:
    own = list(dict.fromkeys(devices(n)))
    places = [j % len(own) for j in range(4)]
    schedule = "LayerMajor" if not interleaved else "1F1B" if len(own) == 1 else "Interleaved1F1B"
    module = layers()
    module[1].requires_grad_(not frozen)
    options: dict[str, Any] = {"schedule": schedule, "checkpoint": checkpoint}
    resident = made(module, [own[place] for place in places], **options)
    model = made(module, own, offload=True, slots=slots, **options)
    x, y = torch.randn(8, WIDTH), torch.randint(3, (8,))
    seen = []
    for one in (resident, model):
        torch.manual_seed(2)
        losses = [one.step(x, y) for _ in range(2)]
        one.eval()
        with torch.no_grad():
            seen.append([*losses, one(x), *[each.grad for each in one.parameters()]])
    for a, b in zip(*seen):
        assert a is b or torch.equal(a.cpu(), b.cpu())
    memory = model._host_memory
    assert memory is not None
    stays = residency(program(schedule, 4, places), slots)  # type: ignore[arg-type]
    forward = residency([[a for a in own if a.kind == "F"] for own in program("LayerMajor", 4, places)], slots)
    assert memory.uploads == 2 * stays.uploads + forward.uploads
    assert not any(memory._there.values())
    assert {one.device.type for one in model.parameters()} == {"cpu"}


def test_what_it_cannot_do_is_refused(devices: Devices) -> None:
    own = list(dict.fromkeys(devices(2)))
    model = made(layers(0.0), own, offload=True)
    assert model.schedule == "LayerMajor"
    schedule = "GPipe" if len(own) == 1 else "Interleaved1F1B"
    assert made(layers(), own, offload=True, schedule=schedule).schedule == schedule
    x, y = torch.randn(4, WIDTH), torch.randint(3, (4,))
    with pytest.raises(RuntimeError, match=r"trains by step\(\).*torchgpipe.pipelined\(module, sample, offload=True\)"):
        model(x)
    with pytest.raises(RuntimeError, match="without a program"):
        model.verify(x)
    with pytest.raises(ValueError, match=r"'0\.weight' is a UninitializedParameter"):
        GPipe(nn.Sequential(nn.LazyLinear(2)), [1], offload=True, devices=own)
    copied = copy.deepcopy(model)
    assert torch.equal(copied.step(x, y), model.step(x, y))
    module = model.unwrap()
    assert {one.device.type for one in (*module.parameters(), *module.buffers())} == {"cpu"}


def test_a_weight_that_leaves_its_partition_is_refused(devices: Devices) -> None:
    returns = Using(lambda linear, x: (linear(x), linear.weight.t()), WIDTH)
    module = nn.Sequential(returns, Apply(lambda values: values[0] @ values[1]))
    model = GPipe(module, [1, 1], devices=devices(1), offload=True, loss_fn=functional.mse_loss)
    with pytest.raises(RuntimeError, match=r"returns the weight 'weight' of a Linear, or a view of it.*weight.clone"):
        model.step(torch.randn(4, WIDTH), torch.randn(4, WIDTH))
