"""Provide deferred batch norms under their public path; they live in `torchgpipe.norms`."""

from __future__ import annotations

from torchgpipe.norms.deferred import DeferredBatchNorm
from torchgpipe.norms.mini_batch import mini_batch

__all__ = ["DeferredBatchNorm", "mini_batch"]
