"""ResNet, with every convolution, normalisation and activation a layer of its own.

A block is left around its convolutions by a skip, so that it can be split over partitions:

      input -- Stash -- conv - bn - relu - conv - bn - relu - conv - bn -- Add -- relu -- output
                 '---------------------------------------------------------'

Layers are named as in torchvision, with `_` for the dots between a stage, a block and a layer: `layer3_22_conv2`. What
torchvision calls `downsample` is in the layer that adds: `layer1_0_add`.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, 2015; with the stride in the 3 x 3 convolution.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence

from torch import Tensor, nn

from benchmarks.models.skips import Stash, joined
from torchgpipe.skip import Namespace, pop, skippable

__all__ = ["resnet", "resnet101"]

#: A block's output has so many times the channels of its 3 x 3 convolution.
EXPANSION = 4


@skippable(pop=["skip"])
class Add(nn.Sequential):
    """Adds the block's input to what has become of it; its own layers bring the former to the latter's shape."""

    def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
        shortcut = yield pop("skip")
        for layer in self:
            shortcut = layer(shortcut)
        return input + shortcut


def resnet101(num_classes: int = 1000) -> nn.Sequential:
    """Return ResNet-101: images of shape (batch, 3, height, width) to logits of shape (batch, num_classes)."""
    return resnet((3, 4, 23, 3), num_classes)


def resnet(blocks: Sequence[int], num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """Return a ResNet of bottleneck blocks.

    Args:
        blocks: the number of blocks in each stage; a stage halves height and width, the first one excepted
        num_classes: of the output, of shape (batch, num_classes)
        width: channels after the first convolution; they double from stage to stage
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    layers["bn1"] = nn.BatchNorm2d(width)
    layers["relu"] = nn.ReLU()
    layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)

    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            for name, layer in _bottleneck(channels, width * 2**stage, stride):
                layers[f"layer{stage + 1}_{block}_{name}"] = layer
            channels = width * 2**stage * EXPANSION

    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(channels, num_classes)
    return nn.Sequential(layers)


def _bottleneck(channels: int, width: int, stride: int) -> Iterator[tuple[str, nn.Module]]:
    output = width * EXPANSION
    shortcut: list[nn.Module] = []
    if stride != 1 or channels != output:
        shortcut = [nn.Conv2d(channels, output, 1, stride, bias=False), nn.BatchNorm2d(output)]

    ns = Namespace()
    yield "stash", joined(Stash(), ns)
    yield "conv1", nn.Conv2d(channels, width, 1, bias=False)
    yield "bn1", nn.BatchNorm2d(width)
    yield "relu1", nn.ReLU()
    yield "conv2", nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
    yield "bn2", nn.BatchNorm2d(width)
    yield "relu2", nn.ReLU()
    yield "conv3", nn.Conv2d(width, output, 1, bias=False)
    yield "bn3", nn.BatchNorm2d(output)
    yield "add", joined(Add(*shortcut), ns)
    yield "relu3", nn.ReLU()
