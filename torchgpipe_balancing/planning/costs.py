"""What was measured of a model, for micro-batches of a few sizes, and what follows for any size between them.

All of it is plain data, which can be saved: it needs neither the model nor a device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchgpipe_balancing.planning.problem import CellCosts, Layer

__all__ = ["Costs", "LayerCosts"]


@dataclass(frozen=True)
class LayerCosts:
    """What is known of a layer.

    Attributes:
        modules: the names of its modules
        parameters: bytes of its parameters
        trained: bytes of its parameters that require grad
        buffers: bytes of its buffers
        samples: what it took, for each size of a micro-batch
    """

    modules: tuple[str, ...]
    parameters: int
    trained: int
    buffers: int
    samples: tuple[Layer, ...]

    @property
    def name(self) -> str:
        """The names of its first and last modules."""
        return self.modules[0] if len(self.modules) == 1 else f"{self.modules[0]}..{self.modules[-1]}"


@dataclass(frozen=True)
class Costs:
    """What was measured of a model.

    Attributes:
        layers: the layers, in order
        rows: the sizes of micro-batches that were measured, in rows, in increasing order
        cells: what cells and steps take, for each of these sizes
        latency: seconds that any transfer between devices takes
        per_byte: seconds that a transfer takes for each byte besides
        where: the devices that were used, or 'meta'
        loss: where the loss came from
    """

    layers: tuple[LayerCosts, ...]
    rows: tuple[int, ...]
    cells: tuple[CellCosts, ...]
    latency: float
    per_byte: float
    where: str
    loss: str

    @property
    def has_times(self) -> bool:
        """Whether times were measured, which the meta device has not."""
        return self.where != "meta"

    def layers_at(self, rows: float, states: float) -> tuple[Layer, ...]:
        """Return the layers for a mini-batch. Where one size is known, what layers take is in proportion to the rows.

        Args:
            rows: the rows of a micro-batch
            states: bytes of gradients and of the optimizer's states for each byte of a parameter that requires grad
        """
        layers = []
        for layer in self.layers:
            fields = _between(self.rows, layer.samples, rows)
            if len(self.rows) == 1:
                fields = {name: value * rows / self.rows[0] for name, value in fields.items()}
            fields["state"] = layer.parameters + layer.trained * states + layer.buffers
            layers.append(Layer(**fields))
        return tuple(layers)

    def cells_at(self, rows: float) -> CellCosts:
        """Return what cells take for micro-batches of so many rows."""
        return CellCosts(**_between(self.rows, self.cells, rows))


def _between(known: Sequence[int], values: Sequence[Any], rows: float) -> dict[str, float]:
    """Return all fields at so many rows, on the straight line through the nearest two sizes that are known."""
    if len(known) == 1:
        return dict(vars(values[0]))
    k = min(max(bisect_left(known, rows), 1), len(known) - 1)
    share = (rows - known[k - 1]) / (known[k] - known[k - 1])
    a, b = vars(values[k - 1]), vars(values[k])
    return {name: max(0.0, a[name] * (1 - share) + b[name] * share) for name in a}
