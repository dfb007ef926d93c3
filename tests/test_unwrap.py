"""A pipeline returns its layers, and training in another pipeline continues exactly."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import DEVICE, needs_accelerator
from tests.conftest import Pipe
from tests.plain import run_plain
from tests.skip.layers import pair
from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm


def layers() -> nn.Sequential:
    """Return six layers, one of them frozen, with a skip from the first to the last but one."""
    torch.manual_seed(0)
    stash, pop = pair(torch.neg, torch.add)
    return nn.Sequential(
        OrderedDict(
            start=nn.Sequential(nn.Linear(4, 4), stash),
            tanh=nn.Tanh(),
            norm=nn.LayerNorm(4),
            frozen=nn.Linear(4, 4).requires_grad_(False),
            end=nn.Sequential(pop, nn.Linear(4, 4)),
            last=nn.Linear(4, 4),
        )
    ).double()


def batches(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 4, dtype=torch.float64, generator=generator) for _ in range(n)]


def train(model: Callable[[Tensor], Any], optimizer: torch.optim.Optimizer, data: list[Tensor]) -> list[float]:
    """Train one step on each mini-batch, and return the losses."""
    losses = []
    for input in data:
        loss = (model(input) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("balance", "chunks", "checkpoint", "amsgrad"),
    [
        ([3, 3], 4, "except_last", True),  # the same settings as before
        ([5, 1], 4, "except_last", False),
        ([1, 1, 2, 2], 4, "always", True),
        ([6], 2, "never", False),
    ],
)
def test_training_goes_on_bit_by_bit(
    pipe: Pipe, balance: list[int], chunks: int, checkpoint: str, amsgrad: bool
) -> None:
    """Adam's state matters: if it were forgotten, the second step would show it."""
    data = batches(9)

    plain = layers()
    optimizer_of_plain = torch.optim.Adam(plain.parameters(), lr=0.1, amsgrad=amsgrad)
    expected = []
    for m, part in [(4, data[:3]), (chunks, data[3:6]), (4, data[6:])]:
        expected += train(partial(run_plain, plain, chunks=m), optimizer_of_plain, part)

    model = pipe(layers(), [3, 3], chunks=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=amsgrad)
    losses = train(model, optimizer, data[:3])
    model = pipe(model.unwrap(), balance, chunks=chunks, checkpoint=checkpoint)
    losses += train(model, optimizer, data[3:6])
    model = pipe(model.unwrap(), [3, 3], chunks=4)
    optimizer.load_state_dict(optimizer.state_dict())  # no effect unless parameters have moved
    losses += train(model, optimizer, data[6:])

    losses += train(model.unwrap(), optimizer, data[:1])  # the plain model
    expected += train(plain, optimizer_of_plain, data[:1])
    assert losses == expected
    assert len(set(losses)) == len(losses)


@needs_accelerator
@pytest.mark.parametrize("devices", [[DEVICE, "cpu"], ["cpu", DEVICE], [DEVICE, DEVICE]])
def test_the_state_of_the_optimizer_follows_to_other_devices(devices: list[str]) -> None:
    data = batches(9)
    plain = layers()
    expected = train(plain, torch.optim.Adam(plain.parameters(), lr=0.1), data)

    model = GPipe(layers(), [3, 3], devices=["cpu", "cpu"])
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = train(model, optimizer, data[:3])
    for others, part in [(devices, data[3:6]), (["cpu", "cpu"], data[6:])]:
        model = GPipe(model.unwrap(), [3, 3], devices=others)
        optimizer.load_state_dict(optimizer.state_dict())
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        losses += train(lambda x, model=model: model(x).cpu(), optimizer, part)  # type: ignore[misc]
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)


def test_what_comes_back(pipe: Pipe) -> None:
    """Names, parameters, modes, and layers that were replaced; what the unwrapped pipeline shows stays true."""
    module = layers()
    module.norm.eval()
    model = pipe(module, [2, 4])
    unwrapped = model.unwrap()
    assert type(unwrapped) is nn.Sequential
    assert list(unwrapped.named_children()) == list(module.named_children())
    assert all(map(lambda a, b: a[0] == b[0] and a[1] is b[1], unwrapped.named_parameters(), module.named_parameters()))
    assert list(unwrapped.state_dict()) == list(module.state_dict())
    assert [child.training for child in unwrapped.modules()].count(False) == 1
    train(unwrapped, torch.optim.Adam(unwrapped.parameters()), batches(1))
    for (name, tensor), (other_name, other) in zip(model.state_dict().items(), unwrapped.state_dict().items()):
        assert name == other_name and torch.equal(tensor, other)
    assert list(model.unwrap()) == list(unwrapped)

    model = pipe(module, [3, 3])
    model.last = new = nn.Linear(4, 2).double()
    model.eval()
    unwrapped = model.unwrap()
    assert unwrapped.last is new and not any(child.training for child in unwrapped.modules())
    assert not pipe(unwrapped, [6]).training


def test_an_unwrapped_pipeline_does_not_run(pipe: Pipe) -> None:
    """The layers may have moved to other devices, where the pipeline would not find them, or worse, not notice."""
    for module in (layers(), nn.Sequential()):
        model = pipe(module, [len(module)] if len(module) else [])
        model.unwrap()
        for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with pytest.raises(RuntimeError, match=r"this GPipe has been unwrapped.*call the module.*unwrap\(\)"):
                one(batches(1)[0])


# Batch norms


def norms() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()), DeferredBatchNorm(4, chunks=2), nn.Linear(4, 4)
    ).double()


def test_deferred_batch_norms_are_plain_again_and_go_on_under_another_number_of_chunks(pipe: Pipe) -> None:
    data, module, plain = batches(4), norms(), norms()
    model = pipe(module, [2, 2], chunks=2, deferred_batch_norm=True)
    optimizer, other = (torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, plain))
    losses = train(model, optimizer, data[:2])
    unwrapped = model.unwrap()
    assert [type(child) for child in unwrapped.modules()][1:] == [type(child) for child in module.modules()][1:]
    assert [buffer.data_ptr() for buffer in unwrapped.buffers()] == [buffer.data_ptr() for buffer in module.buffers()]
    assert set(vars(unwrapped[1][0])) == set(vars(nn.BatchNorm1d(4)))
    assert unwrapped[0] is module[0]
    model = pipe(unwrapped, [1, 3], chunks=4, deferred_batch_norm=True)
    losses += train(model, optimizer, data[2:])
    assert all(norm.chunks == 4 for norm in model.modules() if isinstance(norm, DeferredBatchNorm))
    assert model[1][0].num_batches_tracked == module[1][0].num_batches_tracked == 4  # once per mini-batch
    expected = train(partial(run_plain, plain, chunks=2), other, data[:2])
    assert losses == expected + train(partial(run_plain, plain, chunks=4), other, data[2:])
    module = DeferredBatchNorm.convert_deferred_batch_norm(norms(), chunks=2)
    assert list(pipe(module, [2, 2], chunks=2).unwrap()) == list(module), "what the caller has deferred stays so"
