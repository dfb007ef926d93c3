"""The autograd graph behind tensors or nodes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["graph"]


def graph(*roots: Any) -> dict[Any, list[Any]]:
    """Return the nodes behind tensors, or behind nodes and these themselves, each with its successors, in order."""
    pending = [root.grad_fn if isinstance(root, Tensor) else root for root in roots]
    leads_to: dict[Any, list[Any]] = {}
    while pending:
        node = pending.pop()
        if node is not None and node not in leads_to:
            leads_to[node] = [follower for follower, _ in node.next_functions]
            pending += leads_to[node]
    return leads_to
