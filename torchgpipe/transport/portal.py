"""The life of a skip, from the partition that stashes it to the partition that pops it.

A skip is one more output of the cell that stashes it and one more input of the cell that pops it. The cells between
pass the skip on in the batch and do not touch it. So the skip is on no other device than these two, and autograd sees
one edge between them. The life of a skip of micro-batch i, from partition a to partition c:

1. Cell (i, a) computes the skip. In a checkpointed cell the skip is a plain tensor; its graph comes later, in 7.
2. The `Wait` that closes the cell marks where the skip is ready, for the stream that leaves a for c. From now on only
   the batch holds the tensor.
3. The batch passes the cells (i, a+1) ... (i, c-1).
4. Before cell (i, c) computes, the skip is copied to c, on streams of its own. The batch drops the skip, which is then
   gone from a, unless a graph of a's own layers needs it.
5. Cell (i, c) pops the copy. In a cell that runs again, its node keeps the copy until then; else the copy
   is gone when the layer that pops it has finished, unless the layers' graph needs it.
6. Backward of cell (i, c) computes the gradient of the skip, or none, if the layer did not use the skip. The copy is
   gone. The gradient is copied straight back to a.
7. Cell (i, a) is computed again, the skip with it, and differentiated with the gradients of all its outputs.

If both ends are on one device nothing is copied in 4 and 6. Within one partition there is no portal at all.
"""

from __future__ import annotations

from typing import NamedTuple

from torchgpipe.devices.typing import Leaf
from torchgpipe.skip.namespace import SkipKey
from torchgpipe.transport.route import Route, copy

__all__ = ["Portal"]


class Portal(NamedTuple):
    """A skip between two partitions; ``route`` is None where both are on one device."""

    key: SkipKey
    route: Route | None

    def receive(self, i: int, tensor: Leaf) -> Leaf:
        """Copy the skip of micro-batch ``i`` to its target: step 4."""
        return tensor if self.route is None else copy(self.route, i, (tensor,))[0]
