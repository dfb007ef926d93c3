"""Pipeline parallelism for PyTorch on the devices of one machine."""

from torchgpipe.gpipe import GPipe
from torchgpipe.microbatch import NoChunk
from torchgpipe.phase import is_checkpointing, is_recomputing

__all__ = ["GPipe", "NoChunk", "is_checkpointing", "is_recomputing"]

__version__ = "1.0.0.dev0"
