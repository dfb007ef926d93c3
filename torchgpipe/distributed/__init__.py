"""Run the same pipeline over several processes and machines, on ``torch.distributed``."""

from torchgpipe.distributed.files import Checkpoints
from torchgpipe.distributed.gpipe import DistributedGPipe

__all__ = ["Checkpoints", "DistributedGPipe"]
