"""The order of cells, as pure functions of numbers."""

from __future__ import annotations

from torchgpipe.schedule.clock import clock_cycles

__all__ = ["clock_cycles"]
