"""The layers of a pipeline are split into partitions, which are views on these layers, and moved to their devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.model.partition import layers_of, split
from torchgpipe.model.placement import place

CPUS = [torch.device("cpu", j) for j in range(4)]


def make_model(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))


# Splitting


# Views on the layers of a pipeline


def test_partitions_are_views() -> None:
    module = make_model(3)
    model = GPipe(module, [1, 2], devices=CPUS)
    first, second = model.partitions
    assert first[0] is model[0] is module[0]
    assert second[-1] is model[2]
    assert model.partitions[0] is first, "hooks stay where they are"
    assert not list(model.named_parameters(prefix="partitions.0"))[6:], "and nothing is registered twice"


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


# Devices


def test_a_partition_that_is_in_its_place_is_not_copied() -> None:
    """PyTorch itself copies a CPU tensor to 'cpu:1'. Parameters stay themselves, so that an optimizer keeps them."""
    module = make_model(2)
    before = [(id(parameter), parameter.data_ptr()) for parameter in module.parameters()]
    place(split(layers_of(module), [1, 1]), CPUS[:2])
    assert [(id(parameter), parameter.data_ptr()) for parameter in module.parameters()] == before
