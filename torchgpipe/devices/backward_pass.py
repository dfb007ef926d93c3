"""The backward pass that a thread is in. Autograd numbers its passes, and tells of them in private names only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["at_end_of_pass", "current_pass", "keeps_graph", "will_accumulate", "will_run"]

#: The number of the backward pass that this thread is in; -1 if in none.
current_pass: Callable[[], int] = torch._C._current_graph_task_id

#: Keeps a callback until the backward pass that this thread is in has ended, and calls it if that succeeds.
at_end_of_pass: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

#: Whether another pass may follow the one that this thread is in, through the same graph.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

#: Whether the backward pass that this thread is in comes to a node.
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node


def will_accumulate(leaf: Any) -> bool:
    """Whether the backward pass that this thread is in adds to the ``.grad`` of a leaf, given the leaf's node."""
    try:
        return will_run(leaf)
    except RuntimeError:  # `torch.autograd.grad` is asked for the gradient of just this leaf.
        return False
