"""Provide PyTorch's old Pipe under its public path; it lives in `torchgpipe.compat.pipe`."""

from __future__ import annotations

from torchgpipe.compat.pipe import BalanceError, LocalRRef, NoChunk, Pipe, PipeSequential, WithDevice

__all__ = ["BalanceError", "LocalRRef", "NoChunk", "Pipe", "PipeSequential", "WithDevice"]
