"""The empty tensor that carries order.

Autograd runs a node after all nodes that use its output. A tensor without elements from one node to another costs
nothing, and makes the engine keep an order that the data alone does not require. Such a tensor is called a phony.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["get_phony"]


def get_phony(device: torch.device) -> Tensor:
    """Return a new phony on ``device``, of shape (0,). Any phony can serve as the gradient of another."""
    return torch.empty(0, device=device)
