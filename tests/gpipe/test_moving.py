"""Moving a `GPipe` raises a TypeError; casting works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import replicate

from tests.conftest import Pipe
from tests.gpipe.helpers import make_input, make_model
from torchgpipe import GPipe
from torchgpipe.pipe import Pipe as RemovedPipe


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.cpu(),
        lambda model: model.cuda(),
        lambda model: model.cuda(0),
        lambda model: model.cuda(device=0),
        lambda model: model.to("cpu"),
        lambda model: model.to("cuda:0"),
        lambda model: model.to(0),
        lambda model: model.to(torch.device("cpu")),
        lambda model: model.to("cpu", torch.float64),
        lambda model: model.to(device="cpu"),
        lambda model: model.to(device="cpu", dtype=torch.float64),
        lambda model: model.to(torch.zeros(1)),
        lambda model: model.to(tensor=torch.zeros(1)),
        lambda model: model.to("meta"),
        lambda model: model.to_empty(device="meta"),
    ],
)
def test_moving_is_denied(pipe: Pipe, move: Callable[[GPipe], Any]) -> None:
    model = pipe(make_model(2), [1, 1])
    with pytest.raises(TypeError, match="denied to move parameters and buffers") as caught:
        move(model)
    assert "devices" in str(caught.value)
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("name", ["cuda", "cpu", "xpu", "to"])
def test_methods_that_move_other_modules_document_their_type_error(name: str) -> None:
    assert "TypeError" in (vars(GPipe)[name].__doc__ or "")


def test_data_parallel_around_it_is_refused() -> None:
    """DataParallel once ran copies of the pipeline in threads. Without parameters, it can be tested without a GPU."""
    for model in [GPipe(nn.Sequential(nn.Tanh()), [1], devices=["cpu"]), RemovedPipe(nn.Sequential(nn.Tanh()))]:
        with pytest.raises(RuntimeError, match=rf"around a {type(model).__name__}: .*DistributedDataParallel"):
            replicate(nn.Sequential(model), [0, 1])


def test_the_denial_is_a_new_exception_each_time(pipe: Pipe) -> None:
    """The original raised one shared instance, whose traceback grew with every use."""
    model = pipe(make_model(1), [1])
    caught = []
    for _ in range(2):
        with pytest.raises(TypeError) as info:
            model.cpu()
        caught.append(info.value)
    assert caught[0] is not caught[1]
    lengths = []
    for error in caught:
        traceback, length = error.__traceback__, 0
        while traceback is not None:
            traceback, length = traceback.tb_next, length + 1
        lengths.append(length)
    assert lengths[0] == lengths[1]


def test_a_module_around_it_cannot_move_it_either(pipe: Pipe) -> None:
    parent = nn.Sequential(pipe(make_model(2), [1, 1]))
    with pytest.raises(TypeError, match="denied to move parameters and buffers"):
        parent.to("meta")
    with pytest.raises(TypeError, match="denied to move parameters and buffers"):
        parent.to_empty(device="meta")
    assert not any(parameter.is_meta for parameter in parent.parameters())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_of_a_module_around_it_is_denied_too(pipe: Pipe) -> None:
    parent = nn.Sequential(pipe(make_model(2), [1, 1]))
    with pytest.raises(TypeError, match="denied to move parameters and buffers"):
        parent.cuda()


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda model: model.to(torch.float32), torch.float32),
        (lambda model: model.to(dtype=torch.float32), torch.float32),
        (lambda model: model.to(device=None, dtype=torch.float32), torch.float32),
        (lambda model: model.to(torch.bfloat16, non_blocking=True), torch.bfloat16),
        (lambda model: model.half(), torch.float16),
        (lambda model: model.bfloat16(), torch.bfloat16),
        (lambda model: model.float(), torch.float32),
        (lambda model: model.double(), torch.float64),
        (lambda model: model.type(torch.float32), torch.float32),
        (lambda model: nn.Sequential(model).to(torch.float32)[0], torch.float32),
        (lambda model: nn.Sequential(model).half()[0], torch.float16),
    ],
)
def test_casting_works(pipe: Pipe, cast: Callable[[GPipe], GPipe], dtype: torch.dtype) -> None:
    model = pipe(make_model(2), [1, 1], chunks=2)
    assert cast(model) is model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    output = model(make_input().detach().to(dtype))
    assert output.dtype == dtype
    output.sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {dtype}


def test_share_memory_and_memory_format_are_not_moves(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()), [1, 1])
    assert model.share_memory() is model
    assert model.to(memory_format=torch.channels_last) is model
