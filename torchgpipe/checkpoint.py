"""Provide the phases of a checkpointed layer under the path of the original; they live in `torchgpipe.replay.phase`."""

from __future__ import annotations

from torchgpipe.replay.phase import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
