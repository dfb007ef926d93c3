"""U-Net, with long skips from the way down to the way up.

The first skip is the last one popped, so in a pipeline it would pass through nearly all partitions; each goes through
a portal instead. Depth 2:

      convolutions -- Stash ------------------------------------------------------- Join -- convolutions -- 1 x 1
                        '-- half -- convolutions -- Stash --------- Join -- convolutions -- double --'
                                                      '-- half -- convolutions -- double --'

After Ronneberger, Fischer, Brox: U-Net: Convolutional Networks for Biomedical Image Segmentation, 2015, with instance
normalisation, padding that keeps height and width, and as many convolutions as are asked for. The deepest part gives as
many channels as the skip has that it meets, and so does each part on the way up. Convolution, dropout, normalisation
and activation are a layer each, as in the U-Net that torchgpipe has measured, so that its balances fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.skips import Stash, joined
from torchgpipe.skip import Namespace, pop, skippable

__all__ = ["unet"]


@skippable(pop=["skip"])
class Join(nn.Module):
    """Puts skip and input side by side; what is doubled of an odd height or width lacks a pixel, which is zero."""

    def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        below, beside = (skip.shape[dim] - input.shape[dim] for dim in (2, 3))
        if below or beside:  # Padding by nothing would copy.
            input = F.pad(input, (0, beside, 0, below))
        return torch.cat([skip, input], dim=1)


def unet(
    depth: int = 5,
    num_convs: int = 5,
    base_channels: int = 64,
    in_channels: int = 3,
    out_channels: int = 1,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Return U-Net (B, C): images of shape (batch, in_channels, height, width) to (batch, out_channels, height, width).

    Args:
        depth: how often height and width are halved
        num_convs: B, the convolutions between two changes of height and width
        base_channels: C, the channels of the first convolutions; they double from level to level
        in_channels: of the input
        out_channels: of the output
        dropout: the share of channels that is dropped behind each convolution; 0.1 in what torchgpipe has measured

    Raises:
        ValueError: ``base_channels`` is odd, or there is no level or no convolution.
    """
    if min(depth, num_convs) < 1:
        raise ValueError(f"depth and num_convs must be at least 1, but are {depth} and {num_convs}")
    if base_channels % 2 or base_channels <= 0:
        raise ValueError(f"the last convolutions have base_channels / 2 channels, but base_channels is {base_channels}")

    width = [base_channels * 2**level for level in range(depth + 1)]
    skips = [Namespace() for _ in range(depth)]
    layers: OrderedDict[str, nn.Module] = OrderedDict()

    channels = in_channels
    for level, ns in enumerate(skips):
        convs = _convs(num_convs, channels, width[level], width[level], dropout)
        layers |= {f"down{level}_{name}": layer for name, layer in convs}
        layers[f"down{level}_stash"] = joined(Stash(), ns)
        layers[f"down{level}_half"] = nn.MaxPool2d(2)
        channels = width[level]

    convs = _convs(num_convs, channels, width[depth], channels, dropout)
    layers |= {f"bottom_{name}": layer for name, layer in convs}

    for level, ns in reversed(list(enumerate(skips))):
        layers[f"up{level}_double"] = nn.Upsample(scale_factor=2)
        layers[f"up{level}_join"] = joined(Join(), ns)
        channels = width[level] // 2
        convs = _convs(num_convs, 2 * width[level], channels, channels, dropout)
        layers |= {f"up{level}_{name}": layer for name, layer in convs}

    layers["output"] = nn.Conv2d(channels, out_channels, 1, bias=False)
    return nn.Sequential(layers)


def _convs(count: int, channels: int, inside: int, output: int, dropout: float) -> Iterator[tuple[str, nn.Module]]:
    sizes = [channels, *[inside] * (count - 1), output]
    for k, (before, after) in enumerate(pairwise(sizes)):
        yield f"conv{k}", nn.Conv2d(before, after, 3, padding=1, bias=False)
        yield f"dropout{k}", nn.Dropout2d(dropout)
        yield f"norm{k}", nn.InstanceNorm2d(after)
        yield f"relu{k}", nn.LeakyReLU(0.01)
