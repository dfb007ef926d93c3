"""Parameters of classes of people's own, with or without ``__torch_function__``: layers see them, and train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from tests.conftest import Devices
from tests.front.models import gradients, same
from torchgpipe import GPipe, pipelined

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Parameter):
    """A parameter with a method and an attribute."""

    scale = 3.0

    def scaled(self) -> Tensor:
        return self * self.scale


class Handling(nn.Parameter):
    """A parameter that handles operations."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result * 3 if func is functional.linear else result


class Sticky(Tensor):
    """A tensor whose class results have, too. A backward that begins at one of them runs without the class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 3 if func is functional.linear else result


class Wrapping(Tensor):
    """A tensor that holds another one, as quantised tensors do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Any:
        return Wrapping(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def held(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapping) else value

        result = func(*tree_map(held, args), **tree_map(held, kwargs or {}))
        aten = torch.ops.aten
        if func not in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            return result
        # As torchao does it. A bug: what the tensor holds had moved before, as an attribute, and this failed.
        return return_and_correct_aliasing(func, args, kwargs or {}, Wrapping(result))


class Layer(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = make(torch.randn(4, 4, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.kind = type(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is self.kind
        weight = self.weight.scaled() if isinstance(self.weight, Scaled) else self.weight
        return torch.tanh(functional.linear(x, weight, self.bias))


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "scaled": Scaled,
    "handling": Handling,
    "sticky": lambda values: nn.Parameter(values.as_subclass(Sticky)),
    "wrapping": lambda values: nn.Parameter(Wrapping(values)),
}


@pytest.mark.on_late
@pytest.mark.parametrize("front", ["except_last", "pipelined", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_a_class(kind: str, front: str, devices: Devices) -> None:
    """Aliases of parameters of a subclass could not be made; a second run in backward did not see the class."""

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Layer(KINDS[kind]) for _ in range(4)])

    plain, model = layers(), layers()
    if front in ("pipelined", "recomputed"):
        options = {"balance": [2, 2], "checkpoint": front == "recomputed"}
        ours: Any = pipelined(model, X[:2], chunks=3, devices=devices(2), loss_fn=functional.mse_loss, **options)
    else:
        ours = GPipe(model, [2, 2], devices=devices(2), chunks=3, checkpoint=front, loss_fn=functional.mse_loss)
    for part in X.chunk(3):
        functional.mse_loss(plain(part), part).div(3).backward()
    expected = gradients(plain)
    functional.mse_loss(ours(X), X.to(ours(X).device)).backward()
    same(gradients(ours), expected)
    ours.step(X, target=X)
    same(gradients(ours), expected)
    assert {type(parameter) for parameter in ours.parameters()} == {type(parameter) for parameter in plain.parameters()}
