"""Verifying a Sequential, splitting it, and putting the parts on their devices."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.model.partition import layers_of, place, split, verify_balance, verify_module

CPUS = [torch.device("cpu", j) for j in range(4)]


def make_model(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))


# What can be partitioned


def test_a_sequential_can_be_partitioned() -> None:
    verify_module(make_model())
    verify_module(nn.Sequential())


def test_equal_layers_are_no_duplicates() -> None:
    verify_module(nn.Sequential(nn.ReLU(), nn.ReLU()))


def test_any_other_module_cannot() -> None:
    with pytest.raises(TypeError, match="ModuleList"):
        verify_module(nn.ModuleList())


@given(counts=st.lists(st.integers(1, 4), max_size=5))
def test_a_balance_that_fits_is_returned_as_a_list(counts: list[int]) -> None:
    assert verify_balance(iter(counts), sum(counts)) == counts


@given(counts=st.lists(st.integers(-1, 4), max_size=5), layers=st.integers(0, 12))
def test_any_other_balance_is_refused(counts: list[int], layers: int) -> None:
    fits = sum(counts) == layers and all(count > 0 for count in counts)
    try:
        verify_balance(counts, layers)
    except ValueError as error:
        assert not fits
        assert str(layers) in str(error)
    else:
        assert fits


# Splitting


@given(balance=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_partitions_hold_consecutive_layers_under_their_names(balance: list[int]) -> None:
    module = nn.Sequential(OrderedDict((f"layer{k}", nn.Identity()) for k in range(sum(balance))))
    partitions = split(layers_of(module), balance)
    assert [len(partition) for partition in partitions] == balance
    assert [item for partition in partitions for item in partition.named_children()] == list(module.named_children())


def test_a_partition_is_a_sequential() -> None:
    (partition,) = split(layers_of(nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 3))), [3])
    x = torch.randn(4, 1)
    assert isinstance(partition, nn.Sequential)
    assert partition(x).shape == (4, 3)


def test_the_first_layer_of_a_partition_may_take_several_arguments() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x + y, y

    class Second(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[1]

    (partition,) = split(layers_of(nn.Sequential(Add(), Second())), [2])
    assert partition(torch.tensor(1), torch.tensor(2)) == 2


# Views on the layers of a pipeline


def test_partitions_are_views() -> None:
    module = make_model(3)
    model = GPipe(module, [1, 2], devices=CPUS)
    first, second = model.partitions
    assert first[0] is model[0] is module[0]
    assert second[-1] is model[2]
    assert model.partitions[0] is first, "hooks stay where they are"
    assert not list(model.named_parameters(prefix="partitions.0"))[6:], "and nothing is registered twice"


def test_a_view_follows_the_layers_of_its_pipeline() -> None:
    model = GPipe(make_model(3), [1, 2], devices=CPUS)
    partition = model.partitions[1]
    setattr(model, "2", nn.Identity())
    assert isinstance(model.partitions[1][1], nn.Identity)
    assert model.partitions[1] is partition


@pytest.mark.parametrize("write", ["index", "attribute", "add_module", "register_module"])
def test_writing_to_a_view_is_refused_and_tells_where_to_write(write: str) -> None:
    model = GPipe(make_model(2), [2], devices=CPUS)
    partition, layer = model.partitions[0], nn.Identity()
    with pytest.raises(TypeError, match=r"model.set_submodule\('1', layer\)"):
        if write == "index":
            partition[1] = layer
        elif write == "attribute":
            setattr(partition, "1", layer)
        else:
            getattr(partition, write)("1", layer)
    assert isinstance(partition[1], nn.Linear)


def test_other_attributes_of_a_view_can_be_set() -> None:
    model = GPipe(make_model(2), [2], devices=CPUS)
    model.partitions[0].note = "mine"
    assert model.partitions[0].note == "mine"


# Placing


def test_every_partition_is_moved_to_its_device() -> None:
    """The meta device stands in for an accelerator."""
    module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Linear(1, 1))
    place(split(layers_of(module), [1, 1, 1]), [torch.device("cpu"), torch.device("meta"), torch.device("cpu")])
    assert {name: tensor.device.type for name, tensor in module.state_dict().items()} == {
        "0.weight": "cpu",
        "0.bias": "cpu",
        "1.weight": "meta",
        "1.bias": "meta",
        "1.running_mean": "meta",
        "1.running_var": "meta",
        "1.num_batches_tracked": "meta",
        "2.weight": "cpu",
        "2.bias": "cpu",
    }


def test_a_partition_that_is_in_its_place_is_not_copied() -> None:
    """PyTorch copies what is on the CPU to 'cpu:1'."""
    module = make_model(2)
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    place(split(layers_of(module), [1, 1]), CPUS[:2])
    assert [parameter.data_ptr() for parameter in module.parameters()] == pointers


def test_parameters_are_moved_in_place_so_that_an_optimizer_keeps_them() -> None:
    module = make_model(2)
    parameters = list(module.parameters())
    place(split(layers_of(module), [1, 1]), CPUS[:2])
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))


def test_a_parameter_cannot_be_on_two_devices() -> None:
    module = make_model(3)
    module[2].weight = module[0].weight
    with pytest.raises(ValueError, match=r"'0\.weight' \(partition 0 on cpu:0\).*'2\.weight' \(partition 1 on cpu:1\)"):
        place(split(layers_of(module), [1, 2]), CPUS[:2])
    place(split(layers_of(module), [1, 2]), [CPUS[0], CPUS[0]])
    place(split(layers_of(module), [3]), CPUS[:1])


def test_nothing_is_moved_if_anything_is_wrong() -> None:
    class Unable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, device="meta"))

    module = nn.Sequential(nn.Linear(1, 1, device="meta"), Unable())
    with pytest.raises(ValueError, match=r"'1' \(Unable\)"):
        place(split(layers_of(module), [1, 1]), CPUS[:2])
    assert module[0].weight.is_meta
