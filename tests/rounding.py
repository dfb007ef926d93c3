"""Products whose rows round differently with their number, as on some processors: the fixture ``rounded``.

A row of a matrix product may round differently if there are more rows beside it, because a kernel for another size
sums the terms in another order. This depends on the processor, so a test that compares a mini-batch with its
micro-batches bit by bit passes on one machine and fails on the next. Here every product is the sum of two parts, and
the shapes of the operands decide which terms are in which part, for a pipeline and the plain model alike. Operands of
equal shapes still round equally, and a sum that is exact in any order, as of small integers, stays exact.

The CPU kernels themselves are replaced. So the change acts in every thread, backward threads included, and needs no
mode, which the library would carry from thread to thread. It does not reach processes that a test starts, ``out=`` and
in-place products, and code that `torch.compile` generates; it does reach backends that only trace, such as "eager".
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["rounding"]


class Product(NamedTuple):
    """The way to compute an operation in two parts.

    Attributes:
        operand: position of the argument that is split; the operation is linear in this argument
        outputs: how many of the results are linear in it, by default all
        beta: whether a summand is scaled by ``beta``; the second part omits the summand
        bias: position of a summand that the second part omits
    """

    operand: int
    outputs: int | None = None
    beta: bool = False
    bias: int | None = None


PRODUCTS = {
    "mm": Product(0),
    "addmm": Product(1, beta=True),
    "bmm": Product(0),
    "baddbmm": Product(1, beta=True),
    "mv": Product(0),
    "convolution": Product(0, bias=2),
    "convolution_backward": Product(0),
    "_scaled_dot_product_flash_attention_for_cpu": Product(2, outputs=1),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Product(0),
}


@contextmanager
def rounding() -> Iterator[None]:
    """Make products round differently with the number of their rows, in all threads of this process."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*other operators may also be overridden", category=UserWarning)
        for name, product in PRODUCTS.items():
            library.impl(name, _in_two_parts(name, product), "CPU", with_keyset=True, allow_override=True)
    # oneDNN has one kernel for a whole LSTM; without oneDNN, an LSTM consists of the products above.
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = enabled
        library._destroy()


def _in_two_parts(name: str, product: Product) -> Callable[..., Any]:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def compute(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        operand = args[product.operand]
        if not (operand.is_floating_point() or operand.is_complex()):
            return kernel.call_boxed(keys, *args, **kwargs)
        # A function mode of the caller, such as a default device, must not see these operations.
        with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
            in_first = _mask(operand.shape, [tuple(x.shape) for x in args if isinstance(x, Tensor)])
            first, second = list(args), list(args)
            first[product.operand] = operand.masked_fill(~in_first, 0)
            second[product.operand] = operand.masked_fill(in_first, 0)
            if product.bias is not None:
                second[product.bias] = None
            parts = (
                kernel.call_boxed(keys, *first, **kwargs),
                kernel.call_boxed(keys, *second, **{**kwargs, "beta": 0} if product.beta else kwargs),
            )
            result = _sum(*parts, product.outputs)
            # The zeros in place of the other part's terms turn infinity into NaN.
            return result if _is_finite(result) else kernel.call_boxed(keys, *args, **kwargs)

    return compute


def _mask(shape: torch.Size, shapes: list[tuple[int, ...]]) -> Tensor:
    """Return the mask of the first part, of ``shape``, which all ``shapes`` of an operation determine."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(shapes).encode()))
    return torch.empty(shape, dtype=torch.bool, device="cpu").bernoulli_(generator=generator)


def _sum(first: Any, second: Any, outputs: int | None) -> Any:
    if isinstance(first, Tensor):
        return first + second
    return tuple(
        a if a is None or (outputs is not None and k >= outputs) else a + b
        for k, (a, b) in enumerate(zip(first, second, strict=True))
    )


def _is_finite(result: Any) -> bool:
    tensors = [result] if isinstance(result, Tensor) else [x for x in result if x is not None]
    return all(bool(x.isfinite().all()) for x in tensors)
