"""Under the fixture `rounded`, rows of a product round differently with their number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("rounded")


def attention(x: Tensor) -> Tensor:
    x = x.reshape(-1, 2, 8, 8)
    return F.scaled_dot_product_attention(x, x, x).flatten(1)


PRODUCTS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "product": lambda: nn.Linear(128, 8, bias=False),
    "product and bias": lambda: nn.Linear(128, 8),
    "vector": lambda: partial(torch.mv, vec=torch.randn(128)),
    "batched product": lambda: lambda x: torch.einsum("nij,nkj->nik", x.reshape(-1, 8, 16), x.reshape(-1, 8, 16)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 8, 8)), nn.Conv2d(2, 3, 3, padding=1), nn.Flatten()),
    "attention": lambda: attention,
    "recurrent layer": lambda: nn.Sequential(nn.Unflatten(1, (8, 16)), nn.LSTM(16, 8, batch_first=True)),
}


def step(layer: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Return the output and the gradient of the input, which have a row for each row of ``x``."""
    x = x.detach().clone().requires_grad_()
    output = layer(x)
    output = output[0] if isinstance(output, tuple) else output
    output.sin().sum().backward()
    assert x.grad is not None
    return [output.detach(), x.grad]


@pytest.mark.parametrize("make", PRODUCTS.values(), ids=PRODUCTS)
def test_rows_round_differently_with_their_number(make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    layer, x = make(), torch.randn(4, 128)
    whole, again, half = step(layer, x), step(layer, x), step(layer, x[:2])
    for a, b, c in zip(whole, again, half, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a[:2], c)
        torch.testing.assert_close(a[:2], c)


def test_sums_that_are_exact_in_any_order_stay_exact() -> None:
    a, b = torch.arange(12.0).reshape(3, 4), torch.arange(8.0).reshape(4, 2)
    assert (a @ b).tolist() == [[28.0, 34.0], [76.0, 98.0], [124.0, 162.0]]
    assert (torch.tensor([[float("inf"), 1.0]]) @ torch.ones(2, 1)).item() == float("inf")
