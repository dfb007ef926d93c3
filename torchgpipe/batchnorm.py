"""The public path of deferred batch norms; they live in `torchgpipe.norms.batchnorm`."""

from __future__ import annotations

from torchgpipe.norms.batchnorm import DeferredBatchNorm, mini_batch

__all__ = ["DeferredBatchNorm", "mini_batch"]
