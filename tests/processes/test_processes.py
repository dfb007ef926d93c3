"""What processes compare before they send anything, and what they keep of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import torchgpipe
from tests.distributed.launch import launch
from tests.front.test_processes import FEATURES, Experts
from torchgpipe.run import remote_doors

pytestmark = pytest.mark.slow


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def differing() -> dict[str, str]:
    """Return what this process says if one setting is another one in the second process."""
    rank, x = dist.get_rank(), torch.ones(4, 4)
    common: dict[str, Any] = {"loss_fn": F.mse_loss, "mesh": dist.init_device_mesh("cpu", (2,)), "verify": False}
    common |= {"chunks": 2, "balance": [2, 2]}
    each: dict[str, list[Any]] = {
        "chunks": [2, 4],
        "schedule": ["1F1B", "GPipe"],
        "checkpoint": [True, False],
        "reduce": [None, "sum"],
        "balance": [[2, 2], [1, 3]],
        "verify": [False, True],
    }
    said = {}
    for name, values in each.items():
        with pytest.raises(ValueError) as info:
            torchgpipe.pipelined(linears(), x, **{**common, name: values[rank]})
        said[name] = str(info.value)
    model: Any = torchgpipe.pipelined(linears(), torchgpipe.MicroBatches([x, x[:2]]), **{**common, "chunks": None})
    target = torchgpipe.MicroBatches([x, x[:2]])
    with pytest.raises(RuntimeError) as failed:
        model.step(torchgpipe.MicroBatches([x, x[:2]], order="longest" if rank else None), target=target)
    said["order"] = str(failed.value)
    model.step(torchgpipe.MicroBatches([x, x[:2]], order="longest"), target=target)
    return said


def test_settings_that_differ_between_processes_are_named() -> None:
    """Each ran a program of its own, and waited for the other until the timeout."""
    one, other = launch(2, differing)
    assert "rank 1 prepares another step: it has another order= of its micro-batches. Nothing was sent" in one["order"]
    del one["order"]
    for name, text in one.items():
        assert f"rank 1 has another {name} than this process, " in text
    assert "has another chunks than this process, '4' and here '2': give the same in all processes" in one["chunks"]
    assert "has another chunks than this process, '2' and here '4'" in other["chunks"]


def steps_of_many_lengths() -> list[int]:
    """Run mini-batches of many shapes, and return how many calls are remembered behind each, here or in messages."""
    remote_doors._MOST = 2
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[Experts() for _ in range(4)]).double()
    plain, x = copy.deepcopy(model), torch.randn(16, FEATURES).double()
    mesh = dist.init_device_mesh("cpu", (2,))
    torchgpipe.pipelined(model, x[:4], chunks=2, mesh=mesh, loss_fn=F.mse_loss, balance="parameters", verify=False)
    keys = []
    for rows in (4, 6, 8, 10, 12, 14, 4, 6, 8):
        batch = x[:rows]
        loss = model.step(batch, target=batch)
        assert loss == sum([F.mse_loss(plain(part), part) / 2 for part in batch.chunk(2)])
        together = model._runs().together
        keys.append(len(together.doors._known) + len(together.processes.messages.inbox._messages))
    return keys


def test_what_is_known_of_shapes_is_bounded() -> None:
    """Each new shape left a key for each module."""
    for keys in launch(2, steps_of_many_lengths):  # 4 of each shape
        assert max(keys) <= keys[0] + 8, keys
