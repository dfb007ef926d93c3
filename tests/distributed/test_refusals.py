"""Wrong arguments and inputs raise in every process before any message is sent, and the next step works."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from tests.distributed.launch import launch
from tests.distributed.models import data, mlp
from torchgpipe.distributed import DistributedGPipe

pytestmark = pytest.mark.slow

ERRORS = (AttributeError, ValueError, TypeError, RuntimeError)


def make(**options: Any) -> DistributedGPipe:
    model = options.pop("model", None) or mlp()
    return DistributedGPipe(model, **{"balance": [3, 3], "chunks": 4, "loss_fn": F.mse_loss, **options})


def refuses(function: Callable[[], Any], message: str) -> None:
    with pytest.raises(ERRORS, match=message):
        function()


def tied() -> nn.Sequential:
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, nn.Sequential(shared))


def named() -> nn.Sequential:
    return nn.Sequential(OrderedDict(step=nn.Tanh(), other=nn.Tanh()))


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "2F2B"}, "must be one of GPipe, 1F1B, Interleaved1F1B, ZeroBubble, .* got '2F2B'"),
    ({"balance": [2, 2, 2]}, "but there are 3 partitions and 2 processes"),
    ({"balance": [2, 2, 2], "schedule": "Interleaved1F1B"}, "but there are 3 partitions and 2 processes"),
    ({"balance": [1, 1, 1, 1, 1, 1], "schedule": "V-Half"}, "V-Half wants"),
    ({"checkpoint": "sometimes"}, "'sometimes'"),
    ({"chunks": 0}, "chunks must be positive integer, but got 0"),
]


def wrong_arguments() -> None:
    for options, message in ARGUMENTS:
        refuses(lambda options=options: make(**options), message)  # type: ignore[misc]
    said = r"'0.weight' \(partition 0 on stage 0\) is also '1.0.weight' \(partition 1 on stage 1\)"
    refuses(lambda: make(model=tied(), balance=[1, 1]), said)
    refuses(lambda: make(model=named(), balance=[1, 1]), r"names of attributes .*\['step'\]")
    refuses(lambda: make(mesh=init_device_mesh("cpu", (1, 1, 2))), r"\(stages,\) or \(replicas, stages\)")
    refuses(lambda: make(loss_fn=None).step(*data(8)), r"loss_fn=\.\.\.")
    twice = {"partitions.0.0.weight": torch.zeros(4, 4), "partitions.1.0.weight": torch.ones(4, 4)}
    said = "'partitions.0.0.weight' and 'partitions.1.0.weight' would both be of layer '0'"
    refuses(lambda: make().load_state_dict(twice, strict=False), said)


def steps_that_do_not_fit() -> None:
    """The next one works."""
    rank, model, (input, target) = dist.get_rank(), make(), data(8)
    expected = model.step(input, target)
    other = f"rank {1 - rank} prepares another step"
    refuses(
        lambda: model.step(input, target[:5]),
        r"8 rows in dimension 0, but the target is of shape \(5, " if rank else "rank 1 could not prepare the step",
    )
    refuses(lambda: model.step(input if rank else input[:4], target), other)
    refuses(lambda: model.step(input, target) if rank else model.eval_step(input), other)
    refuses(lambda: model.step("text", target), "must consist of tensors")
    model.train(rank == 0)
    refuses(lambda: model.step(input, target), other)
    model.train()
    assert torch.equal(model.step(input, target), expected)
    # A layer fails in its process, and what the others wait for is lost.
    refuses(lambda: model.step(input[:, :3], target), "rank 0 has failed with .*" * rank + r"\(2x3 and 4x4\)")
    refuses(lambda: model.step(input, target), "has closed its connections")


def settings_that_differ_between_processes() -> None:
    """A balance that each process measures by itself may differ, and so a layer once ran in two stages, or in none."""
    rank = dist.get_rank()
    options: dict[str, list[Any]] = {
        "balance": [[3, 3], [2, 4]],
        "schedule": ["1F1B", "GPipe"],
        "chunks": [4, 2],
        "checkpoint": ["always", "never"],
    }
    for what, each in options.items():
        said = f"rank {1 - rank} has another {what} than this process"
        refuses(lambda what=what, each=each: make(**{what: each[rank]}), said)  # type: ignore[misc]


def settings_that_are_changed_later() -> None:
    """They act as in a new model, or raise."""
    rank, model, (input, target) = dist.get_rank(), make(), data(8)
    assert repr(model).splitlines()[1] == (
        f"  balance=[3, 3], stages=[{rank}], device='cpu', chunks=4, schedule='1F1B', checkpoint='except_last'"
    )
    for name, value, message in (
        ("balance", [6], "balance of a DistributedGPipe cannot be set"),
        ("chunks", 0, "chunks must be positive integer, but got 0"),
        ("checkpoint", "nevr", "'nevr'"),
    ):
        refuses(lambda name=name, value=value: setattr(model, name, value), message)  # type: ignore[misc]
    assert (model.balance, model.chunks, model.checkpoint) == ([3, 3], 4, "except_last")
    expected = model.step(input, target)
    if rank == 0:
        model.checkpoint = "never"  # The others need not know.
    assert torch.equal(model.step(input, target), expected)
    model.chunks = 4 - rank
    refuses(lambda: model.step(input, target), f"rank {1 - rank} prepares another step")
    model.chunks = 2
    assert torch.equal(model.step(input, target), make(chunks=2, checkpoint="never").step(input, target))


def all_of_them() -> None:
    wrong_arguments()
    steps_that_do_not_fit()
    settings_that_differ_between_processes()
    settings_that_are_changed_later()


def test_what_does_not_fit_raises_in_all_processes() -> None:
    launch(2, all_of_them)
