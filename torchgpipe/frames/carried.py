"""The keys and values of one sequence, which each chunk of it takes over from the chunk before, column by column. ::

    column 1              F(0,1) ──keys──► F(1,1) ──keys──► F(2,1)
    column 0     F(0,0) ──keys──► F(1,0) ──keys──► F(2,0)

Each micro-batch has a cache of its own, whose layers of a column are filled when the column begins: a later chunk is
already in the column before, and must not add to what this one reads. The keys and values enter the graph of a cell
without their history, as everything from another cell does. Their gradients return to the cell of the chunk before,
whose backward comes later: last in, first out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchgpipe.cell.cell import Cell, Export
from torchgpipe.model.given import CarriedCache

__all__ = ["Carried"]

_TENSORS = ("keys", "values")


class Carried:
    """The keys and values of one sequence.

    Args:
        given: the cache of the caller, which stays empty, and the lengths
        places: the columns, each with numbers of layers of the cache that it fills

    Raises:
        ValueError: the cache is not empty, or is asked for its length where it is not filled yet.
    """

    def __init__(self, given: CarriedCache, places: Iterable[tuple[int, Sequence[int]]]) -> None:
        self._ends = given.ends
        self._columns = {k: column for column, layers in places for k in layers}
        layers = given.cache.layers
        tokens = max([layer.get_seq_length() for layer in layers])
        if tokens:
            raise ValueError(f"the cache of a sequence has {tokens} tokens already; give an empty one")
        # Masks and positions follow the length of the first layer of each kind, before the first layer runs.
        kinds = [type(layer) for layer in layers]
        late = [k for k in {kinds.index(kind) for kind in kinds} if self._columns.get(k) != 0]
        if late:
            raise ValueError(
                f"layers {sorted(late)} of the cache tell the model how many tokens there are, and are not in the first "
                "partition, where masks and positions are made; give pipelined a balance that begins with these layers"
            )
        self._caches = [copy.copy(given.cache) for _ in self._ends]
        for cache in self._caches:
            cache.layers = [copy.copy(layer) for layer in layers]
        #: By layer, what the last chunk has left, and where the gradients of its tensors arrive.
        self._left: dict[int, tuple[dict[str, Any], list[Export | None]]] = {}

    def cache(self, i: int) -> Any:
        """Return the cache of micro-batch ``i``."""
        return self._caches[i]

    def enter(self, i: int, column: int, cell: Cell | None) -> None:
        """Fill the layers of a column, before micro-batch ``i`` runs there."""
        for k in self._of(i, column):
            if i:
                state, exports = self._left.pop(k)
                with torch.set_grad_enabled(cell is not None):
                    for name, export in zip(_TENSORS, exports):
                        if cell is not None and export is not None:
                            state[name] = cell.import_(state[name], (None, export))
                vars(self._caches[i].layers[k]).update(state)

    def leave(self, i: int, column: int, cell: Cell | None) -> None:
        """Take what micro-batch ``i`` has left in the layers of a column.

        Raises:
            RuntimeError: the model has not added its keys and values, or not these alone.
        """
        for k in self._of(i, column):
            layer = self._caches[i].layers[k]
            if layer.get_seq_length() != self._ends[i]:
                raise RuntimeError(
                    f"layer {k} of the cache has {layer.get_seq_length()} tokens after chunk {i} of a sequence, but "
                    f"should have {self._ends[i]}: the model has left the cache out, as under gradient checkpointing, "
                    "or has other tokens; train on the whole sequence"
                )
            if i + 1 < len(self._ends):
                tensors = [getattr(layer, name) for name in _TENSORS]
                exports = [cell.export(tensor) if cell and tensor.requires_grad else None for tensor in tensors]
                state = {**vars(layer), **{name: tensor.detach() for name, tensor in zip(_TENSORS, tensors)}}
                self._left[k] = state, exports

    def _of(self, i: int, column: int) -> list[int]:
        return [k for k in range(len(self._caches[i].layers)) if self._columns.get(k) == column]
