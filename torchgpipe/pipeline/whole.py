"""The plain model over several processes, for a proof: the first one runs it alone, with the weights of all.

    first process    fetches weights ── runs the plain model ── runs its part of the pipeline ── compares, tells all
    others           send weights ───── wait ────────────────── run theirs, send what it gave ── take the table

The weights wait in host memory and come to their device one column at a time, as under ``offload``. While the pipeline
runs, stand-ins are in their places again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from torchgpipe.pipeline.pipeline import Pipeline
from torchgpipe.processes.processes import Processes
from torchgpipe.spine.weights import fetch, put

__all__ = ["Whole"]


class Whole:
    """The weights of all processes in the first one, for a ``with`` block.

    Args:
        pipeline: what runs the pipelined model
        processes: the processes

    Attributes:
        pipeline: runs the plain model
        processes: see above
    """

    def __init__(self, pipeline: Pipeline, processes: Processes) -> None:
        self.pipeline, self.processes = pipeline.alone(), processes
        #: The places of what was fetched, with what is not there now: that, or the stand-ins.
        self._places: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> Whole:
        self._places = fetch(self.pipeline.module, self.pipeline.settings, self.processes)
        self._swap()
        return self

    def __exit__(self, *_: object) -> None:
        self._swap()

    def tell(self, *told: Any) -> Any:
        """Tell the others what to do next, in the first process, and return that in all."""
        return self.processes.gather(told, "the proof")[0]

    @contextmanager
    def in_parts(self, *told: Any) -> Iterator[None]:
        """Tell the others to run the pipeline, and let stand-ins be in their places for a ``with`` block."""
        self.tell(*told)
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        self._places = [(child, name, put(child, name, tensor)) for child, name, tensor in self._places]
