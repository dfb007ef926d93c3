"""The empty tensor that carries order.

Autograd runs a node after all nodes that use its output. A tensor without elements that leads from one node
to another costs nothing and makes the engine keep an order that the data does not ask for. Such a tensor is
called a phony.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

__all__ = ["get_phony"]


@cache
def _phony(device: torch.device) -> Tensor:
    # It outlives whatever is set here at its first use: inference mode, modes of the user, a default device. In a new
    # thread none of that is set.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: torch.empty(0, device=device)).result()


def get_phony(device: torch.device) -> Tensor:
    """A phony on ``device``, of shape (0,): a new alias of the one that is kept for it.

    The alias may become the output of an autograd function; the gradient of any phony may be any other.
    """
    return _phony(device).detach()
