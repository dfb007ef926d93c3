"""Count the bytes that an optimizer keeps beside a parameter."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import pytree

__all__ = ["Optimizer", "states_of"]

#: A class of optimizers, a function that takes parameters and returns an optimizer, an optimizer, or the number of
#: bytes that it keeps for each byte of a parameter.
Optimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | torch.optim.Optimizer | float | None


def states_of(optimizer: Optimizer) -> float:
    """Return how many bytes an optimizer keeps for each byte of a parameter that it trains. ::

        >>> states_of(torch.optim.AdamW)
        2.0

    The optimizer trains a matrix of 256 x 256 for one step, and its states are counted. One that keeps less for a
    matrix than for a vector, such as Adafactor, is counted for the matrix.

    Args:
        optimizer: a class of optimizers, such as ``torch.optim.AdamW``; a function that takes parameters and returns an
            optimizer, such as ``functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)``; an optimizer of the class
            and the settings that will train the model; a number of bytes; or None, for no states

    Raises:
        TypeError: the optimizer is something else, or cannot be made from parameters alone.
        ValueError: the number of bytes is negative, or not finite.
    """
    if optimizer is None:
        return 0.0
    if isinstance(optimizer, (int, float)):
        if not 0 <= optimizer < math.inf:
            raise ValueError(f"an optimizer keeps 0 bytes or more for each byte of a parameter, but got {optimizer}")
        return float(optimizer)
    weight = nn.Parameter(torch.zeros(256, 256))
    weight.grad = torch.ones_like(weight)
    try:
        if isinstance(optimizer, torch.optim.Optimizer):
            # Some keep a default that is no argument, as AdamW keeps 'decoupled_weight_decay'.
            known = inspect.signature(type(optimizer)).parameters
            settings = {name: value for name, value in optimizer.defaults.items() if name in known}
            made: Any = type(optimizer)([weight], **settings)
        else:
            made = optimizer([weight])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of settings that matter to training only.
            made.step()
        states = pytree.tree_leaves(dict(made.state[weight]))
    except Exception as error:
        raise TypeError(
            f"optimizer must be a class such as torch.optim.AdamW, a function that takes parameters, an optimizer, or "
            f"the bytes that it keeps for each byte of a parameter, but {optimizer!r} failed on a matrix: {error}"
        ) from error
    return sum([state.nbytes for state in states if isinstance(state, Tensor) and state.numel() > 1]) / weight.nbytes
