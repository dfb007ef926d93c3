"""The balancing functions work under both signatures and from both import paths."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import torchgpipe.balance
import torchgpipe_balancing
from tests.layers import Apply
from tests.plain import run_plain
from tests.skip.layers import pair
from torchgpipe import GPipe
from torchgpipe_balancing.planning.optimizer import states_of

NEW, OLD = torchgpipe_balancing, torchgpipe.balance


class Work(nn.Module):
    """A layer that multiplies matrices so often that its time exceeds all noise."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.weight = nn.Parameter(torch.eye(100))

    def forward(self, input: Tensor) -> Tensor:
        for _ in range(self.times):
            input = input @ self.weight
        return input


@pytest.mark.parametrize(("times", "balance"), [([1, 1, 1, 400], [3, 1]), ([400, 1, 1, 1], [1, 3])])
def test_by_time(times: list[int], balance: list[int]) -> None:
    module, sample = nn.Sequential(*map(Work, times)), torch.rand(100, 100)
    assert NEW.balance_by_time(module, sample, partitions=2, device="cpu", timeout=0) == balance
    assert OLD.balance_by_time(2, module, sample, device="cpu", timeout=0) == balance


def test_by_size() -> None:
    # Each row has 80 bytes of activations, and the last layer 40,000 bytes of parameters.
    module = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 500, bias=False))
    sample = torch.rand(1000, 20)
    assert NEW.balance_by_size(module, sample, partitions=2, device="cpu") == [2, 2]
    assert OLD.balance_by_size(2, module, sample, device="cpu") == [2, 2]
    assert OLD.balance_by_size(2, module, sample, chunks=1000, device="cpu") == [3, 1]
    assert OLD.balance_by_size(2, module, sample, param_scale=10, device="cpu") == [3, 1]
    balance = NEW.balance_by_size(module, sample, partitions=3, device="cpu")
    model = GPipe(module, balance, devices=["cpu"] * 3, chunks=4)
    assert torch.equal(model(sample), run_plain(module, sample, chunks=4))


def test_models_with_skips() -> None:
    # The original raises a KeyError where a layer pops a skip that another layer has stashed.
    (start, end), (inner_start, inner_end) = pair(), pair()
    module, sample = nn.Sequential(start, Work(1), inner_start, Work(400), inner_end, end), torch.rand(100, 100)
    assert sum(NEW.balance_by_time(module, sample, partitions=2, device="cpu", timeout=0)) == 6
    assert NEW.balance_by_size(module, sample, partitions=2, device="cpu") == [3, 3]
    assert OLD.balance_by_size(2, module, sample, device="cpu") == [3, 3]
    model = GPipe(module, [3, 3], devices=["cpu", "cpu"], chunks=4)
    assert torch.equal(model(sample), module(sample))


def test_the_functions_behind_the_signatures_keep_their_import_paths() -> None:
    """Programs written for 0.0.5 to 0.0.7 call the profiling functions, change the costs, and split."""
    from torchgpipe.balance import blockpartition
    from torchgpipe.balance.profile import profile_sizes, profile_times

    module, sample = nn.Sequential(nn.Linear(20, 20), Work(400), nn.Linear(100, 500, bias=False)), torch.rand(100, 20)
    module.insert(1, nn.Linear(20, 100, bias=False))
    times = profile_times(module, sample, 0.0, torch.device("cpu"))
    assert [type(time) for time in times] == [int] * 4
    assert max(times) == times[2] > 0
    sizes = profile_sizes(module, sample, 4, 3.0, torch.device("cuda"))
    assert sizes[1] == 100 * 20 * 4 // 4 + 20 * 100 * 4 * 3
    assert blockpartition.solve([1, 2, 3, 4, 5, 6], partitions=2) == [[1, 2, 3, 4], [5, 6]]
    assert OLD.blockpartition.solve([7]) == [[7]]
    with pytest.raises(ValueError, match="partitions"):
        blockpartition.solve([1], 2)


def test_by_parameters() -> None:
    module = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10), nn.Linear(10, 30))
    assert NEW.balance_by_parameters(module, partitions=2) == [3, 1]
    assert NEW.balance_by_parameters(module.to("meta"), partitions=2) == [3, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_stands_for_what_the_machine_has() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert OLD.balance_by_size(2, module, torch.rand(2, 4)) == [1, 1]
    assert OLD.balance_by_time(2, module, torch.rand(2, 4), timeout=0) == [1, 1]


@pytest.mark.parametrize(
    "balance",
    [
        lambda module, n: NEW.balance_by_time(module, torch.rand(1), partitions=n),
        lambda module, n: NEW.balance_by_size(module, torch.rand(1), partitions=n),
        lambda module, n: NEW.balance_by_parameters(module, partitions=n),
        lambda module, n: OLD.balance_by_time(n, module, torch.rand(1)),
        lambda module, n: OLD.balance_by_size(n, module, torch.rand(1)),
    ],
)
def test_mistakes_show_before_anything_is_measured(balance: Any) -> None:
    untouched = Apply(lambda _: pytest.fail("a layer ran"))
    for n, message in [(3, "2 layers cannot be split into 3 partitions"), (0, "partitions must be 1 or more, not 0")]:
        with pytest.raises(ValueError, match=message):
            balance(nn.Sequential(untouched, untouched), n)
    with pytest.raises(TypeError, match=r"module must be nn\.Sequential to be partitioned, not Apply"):
        balance(untouched, 1)


#: The optimizers of the documented table, under the table's words.
OPTIMIZERS: dict[str, list[Any]] = {
    "SGD": [optim.SGD],
    "SGD with momentum": [partial(optim.SGD, momentum=0.9)],
    "Adam, AdamW, NAdam, RAdam": [optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam],
    "Adam, AdamW with amsgrad": [partial(optim.Adam, amsgrad=True), partial(optim.AdamW, amsgrad=True)],
    "Adamax": [optim.Adamax],
    "Adadelta": [optim.Adadelta],
    "Adagrad": [optim.Adagrad],
    "ASGD": [optim.ASGD],
    "RMSprop": [optim.RMSprop],
    "RMSprop with momentum": [partial(optim.RMSprop, momentum=0.9)],
    "RMSprop with momentum and centered": [partial(optim.RMSprop, momentum=0.9, centered=True)],
    "Rprop": [optim.Rprop],
}


def test_table_of_optimizers() -> None:
    table = [line.strip() for line in (OLD.balance_by_size.__doc__ or "").splitlines()]
    for words, group in OPTIMIZERS.items():
        [scale] = [int(line[len(words) :].split()[0]) for line in table if line.startswith(words + "  ")]
        assert [2 + states_of(optimizer) for optimizer in group] == [scale] * len(group), words
