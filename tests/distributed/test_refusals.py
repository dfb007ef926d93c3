"""Wrong arguments and inputs raise in every process before any message is sent, and the next step works."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from tests.distributed.launch import launch, needs_stages
from tests.distributed.models import data, mlp
from torchgpipe.distributed import DistributedGPipe

pytestmark = [pytest.mark.slow, needs_stages]


def error_of(function: Callable[[], Any]) -> str:
    with pytest.raises((AttributeError, ValueError, TypeError, RuntimeError)) as info:
        function()
    return f"{type(info.value).__name__}: {info.value}"


def make(**options: Any) -> DistributedGPipe:
    model = options.pop("model", None) or mlp()
    return DistributedGPipe(model, **{"balance": [3, 3], "chunks": 4, "loss_fn": F.mse_loss, **options})


def arguments() -> dict[str, str]:
    shared = nn.Linear(4, 4)
    twice = {"partitions.0.0.weight": torch.zeros(4, 4), "partitions.1.0.weight": torch.ones(4, 4)}
    return {
        "schedule": error_of(lambda: make(schedule="2F2B")),
        "partitions": error_of(lambda: make(balance=[2, 2, 2])),
        "multiple": error_of(lambda: make(balance=[2, 2, 2], schedule="Interleaved1F1B")),
        "checkpoint": error_of(lambda: make(checkpoint="sometimes")),
        "twice": error_of(lambda: make(balance=[1, 2, 2, 1], schedule="InterleavedZeroBubble")),
        "chunks": error_of(lambda: make(chunks=0)),
        "few": error_of(lambda: make(chunks=1)),
        "tied": error_of(lambda: make(model=nn.Sequential(shared, nn.Sequential(shared)), balance=[1, 1])),
        "name": error_of(lambda: make(model=named(), balance=[1, 1])),
        "mesh": error_of(lambda: make(mesh=init_device_mesh("cpu", (1, 1, 2)))),
        "loss": error_of(lambda: make(loss_fn=None).step(*data(8))),
        "keys": error_of(lambda: make().load_state_dict(twice, strict=False)),
    }


def named() -> nn.Sequential:
    return nn.Sequential(OrderedDict(step=nn.Tanh(), other=nn.Tanh()))


def steps() -> dict[str, str]:
    rank = dist.get_rank()
    model = make()
    input, target = data(8)
    expected = model.step(input, target)
    said = {
        "target": error_of(lambda: model.step(input, target[:5])),
        "layer": error_of(lambda: model.step(input[:, :3], target)),
        "shape": error_of(lambda: model.step(input if rank else input[:4], target)),
        "grad": error_of(lambda: model.step(input, target) if rank else model.eval_step(input)),
        "text": error_of(lambda: model.step("text", target)),
    }
    model.train(rank == 0)
    said["mode"] = error_of(lambda: model.step(input, target))
    model.train()
    assert torch.equal(model.step(input, target), expected)
    return said


def differing_settings() -> dict[str, str]:
    """A balance that each process measures by itself may differ, and so a layer once ran in two stages, or in none."""
    rank, (input, target) = dist.get_rank(), data(8)
    options: dict[str, list[dict[str, Any]]] = {
        "balance": [{"balance": [3, 3]}, {"balance": [2, 4]}],
        "schedule": [{"schedule": "1F1B"}, {"schedule": "GPipe"}],
        "chunks": [{"chunks": 4}, {"chunks": 2}],
        "checkpoint": [{"checkpoint": "always"}, {"checkpoint": "never"}],
    }
    said = {}
    for what, each in options.items():
        model = make(**each[rank])
        said[what] = error_of(functools.partial(model.step, input, target))
    return said


def settings() -> dict[str, str]:
    model, (input, target) = make(), data(8)
    said = {
        "repr": repr(model).splitlines()[1],
        "balance": error_of(lambda: setattr(model, "balance", [6])),
        "chunks": error_of(lambda: setattr(model, "chunks", 0)),
        "few": error_of(lambda: setattr(model, "chunks", 1)),
        "checkpoint": error_of(lambda: setattr(model, "checkpoint", "nevr")),
    }
    assert (model.balance, model.chunks, model.checkpoint) == ([3, 3], 4, "except_last")
    model.step(input, target)
    if dist.get_rank() == 0:
        model.checkpoint = "never"
    said["one"] = error_of(lambda: model.step(input, target))
    model.checkpoint, model.chunks = "never", 2
    assert torch.equal(model.step(input, target), make(chunks=2, checkpoint="never").step(input, target))
    return said


Said = list[dict[str, dict[str, str]]]


def all_of_them() -> dict[str, dict[str, str]]:
    return {case.__name__: case() for case in (arguments, steps, settings, differing_settings)}


@pytest.fixture(scope="module")
def told() -> Said:
    """Return what is said by each process in each case."""
    return launch(2, all_of_them)


def test_settings_that_are_changed_later_act_as_in_a_new_model_or_raise(told: Said) -> None:
    for rank, said in enumerate(one["settings"] for one in told):
        assert said["repr"] == (
            f"  balance=[3, 3], stages=[{rank}], device='cpu', chunks=4, schedule='1F1B', checkpoint='except_last'"
        )
        assert said["balance"].startswith("AttributeError: balance of a DistributedGPipe cannot be set")
        assert "chunks must be positive integer, but got 0" in said["chunks"]
        assert "microbatches (1) must be greater" in said["few"]
        assert "'nevr'" in said["checkpoint"]
        assert f"rank {1 - rank} prepares another step" in said["one"]


def test_settings_that_differ_between_processes_raise_in_all_of_them(told: Said) -> None:
    for rank, said in enumerate(one["differing_settings"] for one in told):
        for what, text in said.items():
            assert f"rank {1 - rank} prepares another step" in text and what in text, what


def test_wrong_arguments_raise_when_the_model_is_made(told: Said) -> None:
    for said in (one["arguments"] for one in told):
        assert said["schedule"].endswith(
            "schedule must be one of GPipe, 1F1B, Interleaved1F1B, ZeroBubble, or PyTorch's name of one of these, but "
            "got '2F2B'"
        )
        assert "3 partitions in the balance and 2 processes" in said["partitions"]
        assert "but there are 3 partitions and 2 processes" in said["multiple"]
        assert "'sometimes'" in said["checkpoint"]
        assert "use checkpoint='never'" in said["twice"]
        assert "chunks must be positive integer, but got 0" in said["chunks"]
        assert "1" in said["few"]
        assert "'0.weight' (partition 0 on stage 0) is also '1.0.weight' (partition 1 on stage 1)" in said["tied"]
        assert "names of attributes" in said["name"] and "['step']" in said["name"]
        assert "(stages,) or (replicas, stages)" in said["mesh"]
        assert "loss_fn=..." in said["loss"]
        assert "'partitions.0.0.weight' and 'partitions.1.0.weight' would both be of layer '0'" in said["keys"]


def test_a_release_whose_stages_lack_something_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1+cpu"))
    with pytest.raises(
        RuntimeError, match=r"needs PyTorch 2\.13 or later.* this is 2\.12\.1\+cpu\. GPipe and pipelined"
    ):
        DistributedGPipe(nn.Sequential(nn.Linear(1, 1)), [1])


def test_steps_that_do_not_fit_raise_in_all_processes_and_the_next_one_works(told: Said) -> None:
    first, last = (one["steps"] for one in told)
    assert "8 and 5" in last["target"] and "rank 1 could not prepare the step" in first["target"]
    assert "[2, 3] X [4, 4]" in first["layer"] and first["layer"] == last["layer"]
    for what in ("grad", "mode", "shape"):
        assert "rank 1 prepares another step" in first[what], what
        assert "rank 0 prepares another step" in last[what], what
    assert "must consist of tensors" in first["text"] and "must consist of tensors" in last["text"]
