"""The models that are measured, each one nn.Sequential of layers fine enough to be balanced over many partitions.

They use nothing of a pipeline but `torchgpipe.skip`, and of that only what the original has as well: so the same
model runs plain, through ours and through the original. Skips have no parameters, so names of parameters are the same.
"""

from benchmarks.models.amoebanet import amoebanetd
from benchmarks.models.gpt import gpt
from benchmarks.models.resnet import resnet, resnet101
from benchmarks.models.unet import unet

__all__ = ["amoebanetd", "gpt", "resnet", "resnet101", "unet"]
