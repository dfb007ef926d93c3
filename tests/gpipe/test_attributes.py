"""`chunks`, `checkpoint` and other attributes: defaults, checks, and assignment between two calls."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from torch import nn

from tests.conftest import Devices, Pipe
from tests.gpipe.helpers import Recorder, make_input, make_model
from torchgpipe import GPipe


def test_attributes_can_be_set_between_two_calls(pipe: Pipe) -> None:
    """Assigned values were once ignored or not checked: PyTorch raised the error at the call, or none was raised."""
    recorder = Recorder()
    model = pipe(nn.Sequential(*make_model(1), recorder), [1, 1], chunks=2, checkpoint="always")
    model.chunks, model.checkpoint = numpy.int64(3), "never"
    model(make_input())
    assert [len(batch) for batch in recorder.seen] == [2, 2, 2]
    assert (model.chunks, type(model.chunks), model.checkpoint) == (3, int, "never")
    with pytest.raises(ValueError, match="number of chunks must be positive integer, but got 0"):
        model.chunks = 0
    with pytest.raises(TypeError, match=r"but got 4\.5"):
        model.chunks = 4.5
    with pytest.raises(ValueError, match=r"checkpoint is not one of .*, but 'nevr'"):
        model.checkpoint = "nevr"
    assert (model.chunks, model.checkpoint) == (3, "never")


def test_deferred_batch_norms_follow_chunks(pipe: Pipe) -> None:
    module, x = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).double(), make_input()
    model = pipe(copy.deepcopy(module), [1, 1], chunks=2, deferred_batch_norm=True)
    model.chunks = 3
    assert model[0].chunks == 3
    model(x)
    module(x)
    torch.testing.assert_close(model[0].running_var, module[0].running_var)


@pytest.mark.parametrize("name", ["balance", "devices"])
def test_balance_and_devices_cannot_be_set(pipe: Pipe, name: str) -> None:
    model = pipe(make_model(2), [1, 1])
    before = getattr(model, name)
    with pytest.raises(
        AttributeError, match=rf"{name} of a GPipe cannot be set, .*: GPipe\(model\.unwrap\(\), \.\.\.\)"
    ):
        setattr(model, name, [2, 0])
    getattr(model, name).append("changes a list of the caller's own")
    assert getattr(model, name) == before


def test_a_lazy_layer_cannot_be_checkpointed_later_on() -> None:
    model = GPipe(nn.Sequential(nn.LazyLinear(3)), [1], devices=["cpu"], checkpoint="never")
    with pytest.raises(ValueError, match="parameters without a shape cannot be checkpointed"):
        model.checkpoint = "always"


def test_its_representation_shows_balance_devices_and_settings() -> None:
    model = GPipe(make_model(3), [1, 2], devices=["cpu:0", "cpu:1"], chunks=4)
    lines = repr(model).splitlines()
    assert lines[0] == "GPipe("
    assert lines[1] == "  balance=[1, 2], devices=['cpu:0', 'cpu:1'], chunks=4, checkpoint='except_last'"
    assert lines[2].startswith("  (0): Linear(")


def test_lazy_layers_get_their_shape_in_the_pipeline_or_are_refused(pipe: Pipe, checkpoint: str) -> None:
    """A parameter without a shape allows hardly any operation, and a checkpoint would need the shape."""
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 2)).double()
    if checkpoint != "never":
        with pytest.raises(ValueError, match="parameters without a shape cannot be checkpointed"):
            pipe(module, [1, 2], checkpoint=checkpoint)
        return
    model = pipe(module, [1, 2], chunks=2, checkpoint=checkpoint)
    model(make_input()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_attributes(pipe: Pipe, devices: Devices) -> None:
    module = make_model(3)
    model = pipe(module, [1, 2], chunks=4, checkpoint="always")
    assert model.balance == [1, 2]
    assert model.devices == [torch.device(device) for device in devices(2)]
    assert model.chunks == 4
    assert model.checkpoint == "always"
    assert isinstance(model.partitions, list)
    assert [list(partition) for partition in model.partitions] == [[module[0]], [module[1], module[2]]]
    assert all(isinstance(partition, nn.Sequential) for partition in model.partitions)


def test_the_cpu_is_one_place_whatever_its_index(pipe: Pipe) -> None:
    model = pipe(make_model(3), [1, 2])
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cpu")}
    assert model(make_input()).device == torch.device("cpu")
