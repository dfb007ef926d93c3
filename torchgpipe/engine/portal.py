"""The way of a skip from the partition that stashes it to the one that pops it.

A skip is one more output of the cell that stashes it and one more input of the cell that pops it. It passes the
cells between in the batch, as a reference that they do not touch, so it is on no other device than these two,
and autograd sees one edge between them. The life of a skip of micro-batch i, from partition a to partition c:

1. Cell (i, a) computes it. If the cell is checkpointed this is a plain tensor, and its graph comes later, in 7.
2. The `Wait` that closes the cell marks where it is ready, for the stream that leaves a for c. From now on only the
   batch holds the tensor.
3. The batch passes the cells (i, a+1) ... (i, c-1).
4. Before cell (i, c) computes, the skip is copied to c, on streams of its own. The batch lets go of
   it, and with that it is gone from a, unless a graph of a's own layers needs it.
5. Cell (i, c) pops it. If the cell is checkpointed, its `Checkpoint` keeps the copy to compute again from; else
   the layers' graph keeps what it needs, and beyond that the copy is gone when the layer that pops it is through.
6. Backward of cell (i, c) gives its gradient, or none, if the layer had no use for it. The copy is gone. The gradient
   goes straight back to a.
7. Cell (i, a) is computed again, the skip with it, and differentiated with the gradients of all its outputs.

If both ends are on one device nothing is copied in 4 and 6. Within one partition there is no portal at all.
"""

from __future__ import annotations

from typing import NamedTuple

from torchgpipe.devices.typing import Leaf
from torchgpipe.engine.copy import Route, copy
from torchgpipe.skip.namespace import SkipKey

__all__ = ["Portal"]


class Portal(NamedTuple):
    """The way of one skip between two partitions; no route where both are on one device."""

    key: SkipKey
    route: Route | None

    def receive(self, i: int, tensor: Leaf) -> Leaf:
        """Step 4, for micro-batch ``i``."""
        return tensor if self.route is None else copy(self.route, i, (tensor,))[0]
