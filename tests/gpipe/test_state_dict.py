"""Names equal those of the wrapped model, so a state_dict fits both; keys of predecessors load or are refused."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.gpipe.helpers import make_input, make_model

pytestmark = pytest.mark.usefixtures("rounded")


def test_names_are_those_of_the_wrapped_model_for_every_balance(pipe: Pipe) -> None:
    module = nn.Sequential(
        OrderedDict(embed=nn.Linear(2, 2), norm=nn.BatchNorm1d(2), block=nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    )
    parameters = [name for name, _ in module.named_parameters()]
    buffers = [name for name, _ in module.named_buffers()]
    state = list(module.state_dict())
    for balance in [[3], [1, 2], [2, 1], [1, 1, 1]]:
        model = pipe(module, balance)
        assert [name for name, _ in model.named_parameters()] == parameters
        assert [name for name, _ in model.named_buffers()] == buffers
        assert [name for name, _ in model.named_modules()] == [name for name, _ in module.named_modules()]
        assert list(model.state_dict()) == state
        assert model.get_parameter("block.0.weight") is module.block[0].weight
        assert model.embed is module.embed
        assert str(model.load_state_dict(module.state_dict())) == "<All keys matched successfully>"


def originals_keys(module: nn.Sequential, balance: list[int]) -> dict[str, Tensor]:
    """Return the state of ``module`` under the keys of the original GPipe."""
    partition_of = [str(j) for j, count in enumerate(balance) for _ in range(count)]
    owner = dict(zip((name for name, _ in module.named_children()), partition_of))
    return {f"partitions.{owner[key.partition('.')[0]]}.{key}": value for key, value in module.state_dict().items()}


@pytest.mark.parametrize("saved_under", [[3], [2, 1], [1, 1, 1]])
def test_a_state_dict_of_the_original_loads_whatever_balance_it_was_saved_under(
    pipe: Pipe, saved_under: list[int]
) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2)))
    state = originals_keys(module, saved_under)
    keys = list(state)
    assert keys[0] == "partitions.0.0.weight"
    module[1].running_mean.add_(1)
    model = pipe(copy.deepcopy(module).requires_grad_(False).apply(_scramble), [1, 2])
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert list(state) == keys, "the user's dict is not touched"
    for name, value in module.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def _scramble(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.add_(1)


def test_keys_that_fit_no_layer_are_still_reported(pipe: Pipe) -> None:
    model = pipe(make_model(2), [1, 1])
    state = originals_keys(make_model(2), [1, 1])
    state["partitions.1.7.weight"] = state.pop("partitions.1.1.weight")
    with pytest.raises(RuntimeError, match=r"Error.* in loading state_dict") as caught:
        model.load_state_dict(state)
    assert "7.weight" in str(caught.value)
    assert "1.weight" in str(caught.value)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["1.weight"]
    assert len(result.unexpected_keys) == 1


@pytest.mark.parametrize("strict", [True, False])
def test_two_old_keys_never_become_one(pipe: Pipe, strict: bool) -> None:
    """PyTorch's Pipe counts the layers of each partition from 0: the last key read was once loaded for both."""
    old = {"partitions.0.0.weight": torch.zeros(2, 2), "partitions.1.0.weight": torch.ones(2, 2)}
    for state in [old, {"0.weight": torch.ones(2, 2), "partitions.0.0.weight": torch.zeros(2, 2)}]:
        model = nn.ModuleDict({"body": pipe(make_model(2), [1, 1])})
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match=r"'body.partitions.0.0.weight'.*'body.(partitions.1.)?0.weight'"):
            model.load_state_dict({f"body.{key}": value for key, value in state.items()}, strict=strict)
        if state is old:
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_old_keys_whose_layers_are_in_another_order_are_refused(pipe: Pipe) -> None:
    """PyTorch's Pipe writes these keys for a layer without parameters and two with; they were once loaded crosswise."""
    with pytest.raises(RuntimeError, match=r"'partitions.1.0.weight' .* earlier layer than 'partitions.0.1.weight'"):
        pipe(make_model(2), [1, 1]).load_state_dict(
            {"partitions.0.1.weight": torch.zeros(2, 2), "partitions.1.0.weight": torch.ones(2, 2)}, strict=False
        )


OF_THE_PIPELINE = ["chunks", "forward", "balance", "devices", "checkpoint", "partitions", "_partitions", "follow"]
OF_ANY_MODULE = ["training", "to", "cuda", "state_dict", "add_module", "T_destination", "_modules", "_parameters"]
OF_ANY_OBJECT = ["__len__", "__class__"]
OF_NOTHING = ["layer", "run", "0x", "größe"]


@pytest.mark.parametrize("name", [*OF_THE_PIPELINE, *OF_ANY_MODULE, *OF_ANY_OBJECT, *OF_NOTHING])
def test_a_layer_with_the_name_of_an_attribute_works_or_is_refused_by_name(pipe: Pipe, name: str) -> None:
    module = make_model(2)
    # Sequential itself refuses names of its attributes, but not if they are written to `_modules` directly.
    module._modules[name] = module._modules.pop("1")
    x = make_input()
    try:
        model = pipe(module, [1, 1], chunks=2)
    except ValueError as error:
        assert f"'{name}'" in str(error)
        assert "rename" in str(error) and name not in OF_NOTHING
    else:
        assert torch.equal(model(x), torch.cat([module._modules[name](module[0](part)) for part in x.chunk(2)]))
        assert f"{name}.weight" in model.state_dict()
