"""The order in which cells run, as pure functions: no tensor, no device."""

from __future__ import annotations

from torchgpipe.schedule.clock import clock_cycles

__all__ = ["clock_cycles"]
