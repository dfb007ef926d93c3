"""The keys and values of one sequence, which each chunk of it takes over from the chunk before, column by column. ::

    column 1              F(0,1) ──keys──► F(1,1) ──keys──► F(2,1)
    column 0     F(0,0) ──keys──► F(1,0) ──keys──► F(2,0)

Each chunk has a cache of its own, whose layers of a column are filled when the column begins: a later chunk is in an
earlier column meanwhile, and must not add to what this one reads. The keys and values enter the graph of a cell without
their history, as everything from another cell does. Their gradients return to the cell of the chunk before, whose
backward comes later: last in, first out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchgpipe.batch.sequence import CarriedCache
from torchgpipe.cell.cell import Cell, Export
from torchgpipe.model.comparison import Comparison
from torchgpipe.model.values import each

__all__ = ["Carried", "verify_sequence"]

_TENSORS = ("keys", "values")


class Carried:
    """The keys and values of one sequence.

    Args:
        given: the cache of the caller, which stays empty, and the lengths
        places: columns, each with the numbers of layers of the cache that are filled there

    Raises:
        ValueError: the cache is asked for its length before it is filled.
    """

    def __init__(self, given: CarriedCache, places: Iterable[tuple[int, Sequence[int]]]) -> None:
        self._empty, self._ends = given.cache, given.ends
        self._columns = {k: column for column, numbers in places for k in numbers}
        layers = self._empty.layers
        # A model asks the first layer of each kind how many tokens there are, before its own first layer runs.
        kinds = [type(layer) for layer in layers]
        late = [k for k in sorted({kinds.index(kind) for kind in kinds}) if self._columns.get(k) != 0]
        if late:
            raise ValueError(
                f"layers {late} of the cache tell the model how many tokens there are, but are not in the first "
                "partition, where it makes masks and positions; give pipelined a balance whose first partition has them"
            )
        self._caches: dict[int, Any] = {}
        #: By layer, what the chunk before has left, and where the gradients of its tensors arrive.
        self._left: dict[int, tuple[dict[str, Any], list[Export | None]]] = {}

    def cache(self, i: int) -> Any:
        """Return the cache of chunk ``i``, while that is under way."""
        return self._caches[i]

    def enter(self, i: int, column: int, cell: Cell | None) -> None:
        """Fill the layers of a column, before chunk ``i`` runs there."""
        if column == 0:
            self._caches[i] = copy.copy(self._empty)
            self._caches[i].layers = [copy.copy(layer) for layer in self._empty.layers]
        for k in self._of(column) if i else ():
            state, exports = self._left.pop(k)
            # The model may have stopped in a block without gradients.
            with torch.set_grad_enabled(cell is not None):
                for name, export in zip(_TENSORS, exports):
                    if cell is not None and export is not None:
                        state[name] = cell.import_(state[name], (None, export))
            vars(self._caches[i].layers[k]).update(state)

    def leave(self, i: int, column: int, cell: Cell | None, *, ends: bool) -> None:
        """Keep what chunk ``i`` leaves in the layers of a column for the next chunk.

        Args:
            i: the chunk
            column: the column
            cell: the cell; None if there is no backward
            ends: whether the chunk ends here

        Raises:
            RuntimeError: the model has not added the tokens of the chunk to the cache.
        """
        self._verify(i, range(len(self._empty.layers)) if ends else self._of(column))
        for k in self._of(column) if i + 1 < len(self._ends) else ():
            layer = self._caches[i].layers[k]
            tensors = [getattr(layer, name) for name in _TENSORS]
            exports = [cell.export(tensor) if cell and tensor.requires_grad else None for tensor in tensors]
            self._left[k] = {**vars(layer), **{name: it.detach() for name, it in zip(_TENSORS, tensors)}}, exports

    def forget(self, i: int) -> None:
        """Forget the cache of chunk ``i``, which has ended."""
        self._caches.pop(i, None)

    def _of(self, column: int) -> list[int]:
        return [k for k in range(len(self._empty.layers)) if self._columns.get(k) == column]

    def _verify(self, i: int, numbers: Sequence[int]) -> None:
        lengths = {k: self._caches[i].layers[k].get_seq_length() for k in numbers}
        wrong = {k: length for k, length in lengths.items() if length != self._ends[i]}
        if wrong:
            raise RuntimeError(
                f"behind chunk {i} of a sequence, layers of the cache should have {self._ends[i]} tokens, but "
                f"{wrong} have others: the model does not use its cache as generate() does, or a module that does has "
                "no layer_idx; train on whole sequences"
            )


def verify_sequence(given: CarriedCache, run: Callable[[dict[str, Any]], Any], epsilon: float) -> None:
    """Check that a plain model gives for two chunks of a short sequence what it gives for all of that.

    Args:
        given: the sequence
        run: runs the plain model
        epsilon: the rounding error of the coarsest numbers in it, relative to 1

    Raises:
        ValueError: it does not.
    """
    if given.ends[-1] < 2:
        return
    whole, halves = given.short()
    together, parts = dict(each(run(whole))), [dict(each(run(half))) for half in halves]
    comparison = Comparison(epsilon)
    for path, tensor in sorted(together.items(), key=lambda item: item[1].dim() == 0):  # Losses follow from the others.
        own = [part[path] for part in parts if path in part]
        if tensor.dim() == 0:
            joined = sum(own, torch.zeros_like(tensor))
            said = f"{float(tensor):.6g}, and that of its chunks {float(joined):.6g}: {_NO_SUM}"
        elif tensor.dim() > 1 and tensor.shape[1] == sum([len(one[0]) for one in own]):
            joined, said = torch.cat(own, 1), f"not that of its chunks: {_LOOKS_AHEAD}"
        else:
            continue
        comparison.add(path, tensor, joined, f"the output '{path}' of a sequence is {said}", tolerance=comparison.loose)
    if comparison.faults:
        raise ValueError(comparison.faults[0])


_NO_SUM = (
    "it is no mean over tokens, as with the losses of routers, which output_router_logits=False leaves out; or the "
    "model's loss does not take shift_labels: leave labels out, give pipelined loss_fn=, and the step a target of "
    "MicroBatches with the following labels of each chunk; or train on whole sequences"
)
_LOOKS_AHEAD = "the model attends to later tokens, or a layer does without the cache; train on whole sequences"
