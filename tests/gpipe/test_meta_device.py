"""A model on the meta device is materialized by wrapping; its optimizer and hooks stay valid."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.conftest import Pipe
from tests.gpipe.helpers import make_input, make_model
from torchgpipe import GPipe

pytestmark = pytest.mark.usefixtures("rounded")


@pytest.mark.parametrize(
    "layer",
    [
        lambda **kwargs: nn.Linear(2, 2, **kwargs),
        lambda **kwargs: nn.Embedding(4, 2, **kwargs),
        lambda **kwargs: nn.BatchNorm1d(2, **kwargs),
        lambda **kwargs: nn.TransformerEncoderLayer(2, 1, 4, **kwargs),
    ],
    ids=["Linear", "Embedding", "BatchNorm1d", "TransformerEncoderLayer"],
)
def test_a_model_on_the_meta_device_is_initialized_as_if_made_on_its_devices(layer: Callable[..., nn.Module]) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(layer(), nn.ReLU(), layer())
    torch.manual_seed(1)
    model = GPipe(nn.Sequential(layer(device="meta"), nn.ReLU(), layer(device="meta")), [1, 2], devices=["cpu"] * 2)
    for name, tensor in model.state_dict().items():
        expected = plain.state_dict()[name]
        assert tensor.device == expected.device
        assert tensor.dtype == expected.dtype
        # An initialisation may draw any numbers, but constants must equal those of the plain layer.
        assert torch.isfinite(tensor).all()
        if (expected == expected.flatten()[0]).all():
            assert torch.equal(tensor, expected), name
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_an_optimizer_made_on_the_meta_device_trains_the_materialized_parameters(pipe: Pipe, checkpoint: str) -> None:
    """The optimizer once held other parameters and silently trained nothing."""

    class Weight(nn.Parameter):
        pass

    with torch.device("meta"):
        module = make_model(2)
    module[0].weight = weight = Weight(module[0].weight.detach())
    weight.kind, seen = "mine", []
    handle = weight.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter is weight))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5)

    model, x = pipe(module, [1, 1], chunks=2, checkpoint=checkpoint), make_input()
    assert model[0].weight is weight
    assert (type(weight), weight.kind, weight.device.type) == (Weight, "mine", "cpu")
    plain = nn.Sequential(*make_model(2))
    plain.load_state_dict(model.state_dict())
    for part in x.chunk(2):
        plain(part).sum().backward()
    model(x).sum().backward()
    assert torch.equal(weight.grad, 2 * plain[0].weight.grad)
    assert seen == [True]
    optimizer.step()
    for name, parameter in plain.named_parameters():
        assert not torch.equal(parameter, model.get_parameter(name)), f"{name} is not trained"

    handle.remove()
    model.zero_grad()
    model.load_state_dict(plain.state_dict())
    model(x).sum().backward()
    assert torch.equal(weight.grad, plain[0].weight.grad)


def test_a_parameter_that_cannot_be_materialized_in_place_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta"))
    reference = weakref.ref(module[1].bias)
    with pytest.raises(ValueError, match=r"parameter '1\.bias' is on the meta device .*weak reference.*optimizer"):
        GPipe(module, [1, 1], devices=["cpu"] * 2)
    assert reference() is module[1].bias
    assert all(parameter.is_meta for parameter in module.parameters()), "nothing has changed"

    del reference
    view = module[1].bias.view(2)
    with pytest.raises(ValueError, match=r"parameter '1\.bias' is on the meta device .*holding references"):
        GPipe(module, [1, 1], devices=["cpu"] * 2)
    assert view.is_meta


def test_a_frozen_parameter_on_the_meta_device_stays_frozen() -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"))
    module[0].weight.requires_grad_(False)
    model = GPipe(module, [1], devices=["cpu"])
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, True]


def test_a_layer_on_the_meta_device_that_cannot_initialise_itself_is_refused() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, device="meta"))

    module = nn.Sequential(OrderedDict(first=nn.Linear(2, 2, device="meta"), scale=nn.Sequential(Scale())))
    with pytest.raises(ValueError, match="meta device") as caught:
        GPipe(module, [1, 1], devices=["cpu"] * 2)
    assert "'scale.0' (Scale)" in str(caught.value)
    assert "before wrapping" in str(caught.value)
    assert module[0].weight.is_meta, "nothing has been done halfway"


def test_real_tensors_beside_those_on_the_meta_device_keep_their_values() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))
            self.register_buffer("table", torch.arange(64.0))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

    model = GPipe(nn.Sequential(Table()), [1], devices=["cpu"])
    assert torch.equal(model[0].table, torch.arange(64.0)) and torch.equal(model[0].weight, torch.ones(2))
