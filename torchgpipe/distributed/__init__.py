"""The same pipeline over several processes, and machines, on ``torch.distributed``."""

from torchgpipe.distributed.gpipe import DistributedGPipe

__all__ = ["DistributedGPipe"]
