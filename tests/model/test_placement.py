"""Partitions are moved to their devices, with parameters that keep their identity."""

from __future__ import annotations

import torch
from torch import nn

from torchgpipe.model.partition import layers_of, split
from torchgpipe.model.placement import place

CPUS = [torch.device("cpu", j) for j in range(4)]


def make_model(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))


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
    """PyTorch itself copies a CPU tensor to 'cpu:1'. Parameters stay themselves, so that an optimizer keeps them."""
    module = make_model(2)
    parameters = list(module.parameters())
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    place(split(layers_of(module), [1, 1]), CPUS[:2])
    assert [parameter.data_ptr() for parameter in module.parameters()] == pointers
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
