"""A pipeline returns its layers, and training in another pipeline continues exactly."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import DEVICE, needs_accelerator
from tests.conftest import Pipe
from tests.plain import run_plain
from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.skip import pop, skippable, stash


@skippable(stash=["input"])
class Start(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        yield stash("input", input)
        return super().forward(input)


@skippable(pop=["input"])
class End(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        skip = yield pop("input")
        return super().forward(input) + skip


def layers() -> nn.Sequential:
    """Return six layers, one of them frozen, with a skip from the first to the last but one."""
    torch.manual_seed(0)
    module = nn.Sequential(
        OrderedDict(
            start=Start(4, 4),
            tanh=nn.Tanh(),
            norm=nn.LayerNorm(4),
            frozen=nn.Linear(4, 4).requires_grad_(False),
            end=End(4, 4),
            last=nn.Linear(4, 4),
        )
    ).double()
    return module


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
        ([1, 1, 2, 2], 4, "except_last", True),
        ([6], 4, "except_last", False),
        ([3, 3], 4, "always", True),
        ([3, 3], 4, "never", False),
        ([3, 3], 2, "except_last", False),
        ([2, 1, 3], 3, "always", True),
    ],
)
def test_training_goes_on_bit_by_bit(
    pipe: Pipe, balance: list[int], chunks: int, checkpoint: str, amsgrad: bool
) -> None:
    """Adam's state matters: if it were forgotten, the second step would show it."""
    data = batches(9)

    plain = layers()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1, amsgrad=amsgrad)
    expected = train(lambda x: run_plain(plain, x, chunks=4), optimizer, data[:3])
    expected += train(lambda x: run_plain(plain, x, chunks=chunks), optimizer, data[3:6])
    expected += train(lambda x: run_plain(plain, x, chunks=4), optimizer, data[6:])

    model = pipe(layers(), [3, 3], chunks=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=amsgrad)
    losses = train(model, optimizer, data[:3])
    model = pipe(model.unwrap(), balance, chunks=chunks, checkpoint=checkpoint)
    losses += train(model, optimizer, data[3:6])
    model = pipe(model.unwrap(), [3, 3], chunks=4)
    optimizer.load_state_dict(optimizer.state_dict())  # no effect unless parameters have moved
    losses += train(model, optimizer, data[6:])

    assert losses == expected
    assert len(set(losses)) == len(losses)


def test_the_plain_model_can_be_trained_as_well(pipe: Pipe) -> None:
    data = batches(4)
    model = pipe(layers(), [2, 4])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = train(model, optimizer, data[:2])
    losses += train(model.unwrap(), optimizer, data[2:])

    plain = layers()
    assert losses == train(plain, torch.optim.Adam(plain.parameters(), lr=0.1), data)


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


def test_layers_parameters_and_names_are_the_same(pipe: Pipe) -> None:
    module = layers()
    unwrapped = pipe(module, [2, 4]).unwrap()
    assert type(unwrapped) is nn.Sequential
    assert list(unwrapped.named_children()) == list(module.named_children())
    assert all(
        (name, parameter is its) == (its_name, True)
        for (name, parameter), (its_name, its) in zip(
            unwrapped.named_parameters(), module.named_parameters(), strict=True
        )
    )
    assert list(unwrapped.state_dict()) == list(module.state_dict())


def test_a_replaced_layer_comes_back(pipe: Pipe) -> None:
    model = pipe(layers(), [3, 3])
    new = nn.Linear(4, 2).double()
    model.last = new
    assert model.unwrap().last is new


def test_modes_stay(pipe: Pipe) -> None:
    module = layers()
    module.norm.eval()
    assert [child.training for child in pipe(module, [3, 3]).unwrap().modules()].count(False) == 1

    model = pipe(module, [3, 3]).eval()
    unwrapped = model.unwrap()
    assert not any(child.training for child in unwrapped.modules())
    assert not pipe(unwrapped, [6]).training


def test_an_unwrapped_pipeline_does_not_run(pipe: Pipe) -> None:
    """The layers may have moved to other devices, where the pipeline would not find them, or worse, not notice."""
    for module in (layers(), nn.Sequential()):
        model = pipe(module, [len(module)] if len(module) else [])
        model.unwrap()
        for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with pytest.raises(RuntimeError, match=r"this GPipe has been unwrapped.*call the module.*unwrap\(\)"):
                one(batches(1)[0])


def test_what_an_unwrapped_pipeline_shows_is_true(pipe: Pipe) -> None:
    model = pipe(layers(), [3, 3])
    unwrapped = model.unwrap()
    train(unwrapped, torch.optim.Adam(unwrapped.parameters()), batches(1))
    assert list(model.parameters()) == list(unwrapped.parameters())
    for (name, tensor), (its_name, its) in zip(model.state_dict().items(), unwrapped.state_dict().items(), strict=True):
        assert name == its_name
        assert torch.equal(tensor, its)
    assert list(model.unwrap()) == list(unwrapped)


def test_backward_of_an_earlier_forward_still_works(pipe: Pipe, checkpoint: str) -> None:
    model = pipe(layers(), [3, 3], chunks=2, checkpoint=checkpoint)
    loss = model(batches(1)[0]).sum()
    model = pipe(model.unwrap(), [2, 4])
    loss.backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


# Batch norms


def norms() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()), DeferredBatchNorm(4, chunks=2), nn.Linear(4, 4)
    ).double()


def test_deferred_batch_norms_are_plain_again(pipe: Pipe) -> None:
    module = norms()
    model = pipe(module, [2, 2], chunks=4, deferred_batch_norm=True)
    train(model, torch.optim.Adam(model.parameters(), lr=0.1), batches(2))
    unwrapped = model.unwrap()

    assert [type(child) for child in unwrapped.modules()][1:] == [type(child) for child in module.modules()][1:]
    assert list(unwrapped.parameters()) == list(module.parameters())
    assert [buffer.data_ptr() for buffer in unwrapped.buffers()] == [buffer.data_ptr() for buffer in module.buffers()]
    assert unwrapped[1][0].num_batches_tracked == 2
    assert set(vars(unwrapped[1][0])) == set(vars(nn.BatchNorm1d(4)))
    assert unwrapped[0] is module[0]
    # Running the unwrapped norm updates the caller's layer, with which it shares its buffers.
    unwrapped(batches(1)[0])
    assert module[1][0].num_batches_tracked == 3


def test_deferred_batch_norms_go_on_under_another_number_of_chunks(pipe: Pipe) -> None:
    data = batches(4)
    model = pipe(norms(), [2, 2], chunks=2, deferred_batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = train(model, optimizer, data[:2])
    model = pipe(model.unwrap(), [1, 3], chunks=4, deferred_batch_norm=True)
    losses += train(model, optimizer, data[2:])
    assert all(norm.chunks == 4 for norm in model.modules() if isinstance(norm, DeferredBatchNorm))
    assert model[1][0].num_batches_tracked == 4  # once per mini-batch

    plain = norms()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    expected = train(lambda x: run_plain(plain, x, chunks=2), optimizer, data[:2])
    expected += train(lambda x: run_plain(plain, x, chunks=4), optimizer, data[2:])
    assert losses == expected


def test_batch_norms_that_the_caller_has_deferred_stay_so(pipe: Pipe) -> None:
    module = DeferredBatchNorm.convert_deferred_batch_norm(norms(), chunks=2)
    assert list(pipe(module, [2, 2], chunks=2).unwrap()) == list(module)
