"""Image classifiers of timm and torchvision, which take a tensor and return one; the loss is ours.

Batch norms count every micro-batch; all are given two rows or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.campaigns.architectures.catalogue import add, still
from benchmarks.campaigns.architectures.data import images

__all__: list[str] = []

CLASSES = 5


def timm_model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of timm by its name, with these settings."""

    def make() -> nn.Module:
        import timm

        return still(timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings))

    return make


def torchvision_model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of torchvision by its name, with these settings, without dropout."""

    def make() -> nn.Module:
        from torchvision import models

        return still(models.get_model(name, weights=None, num_classes=CLASSES, **settings))

    return make


def made(name: str, block: str, *args: Any, **settings: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of torchvision by its class, smaller than those that have names."""

    def make() -> nn.Module:
        from torchvision import models

        module = getattr(models, block)
        return still(getattr(module, name)(*args, num_classes=CLASSES, **settings))

    return make


def pixels(size: int) -> Callable[[int, Generator], tuple[Tensor]]:
    """Return what draws images of this size."""
    return lambda rows, generator: (images(rows, generator, size),)


def score(output: Any) -> Tensor:
    """Return a loss of all that a model returns: a tensor, several by name, or a tuple."""
    if isinstance(output, Tensor):
        ramp = output.new_tensor([float(k) for k in range(output.shape[1])])
        shape = (1, -1, *[1] * (output.dim() - 2))
        return (output - ramp.view(shape)).square().mean()
    parts = list(output.values()) if hasattr(output, "values") else [part for part in output if part is not None]
    return sum((0.4 * score(part) for part in parts[1:]), score(parts[0]))


def timm_made(file: str, name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of timm by its class, smaller than those that have names."""

    def make() -> nn.Module:
        from importlib import import_module

        cls = getattr(import_module(f"timm.models.{file}"), name)
        return still(cls(num_classes=CLASSES, **settings))

    return make


PLAIN: dict[str, Any] = {"img_size": 32, "embed_dim": 32, "depth": 3, "num_heads": 4, "patch_size": 8}
MIXED: dict[str, Any] = {"img_size": 32, "patch_size": 8, "num_blocks": 3, "embed_dim": 32}
WINDOWS: dict[str, Any] = {
    "img_size": 32,
    "embed_dim": 16,
    "depths": (1, 2),
    "num_heads": (2, 4),
    "window_size": 4,
}
RESIDUAL: dict[str, Any] = {"layers": (1, 1, 2, 1), "channels": (8, 16, 16, 32)}


def _resnet(block: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from timm.models import resnet

        return resnet.ResNet(getattr(resnet, block), num_classes=CLASSES, **{**RESIDUAL, **settings})

    return make


def _gated() -> nn.Module:
    from timm.layers import GatedMlp
    from timm.models.mlp_mixer import MlpMixer, SpatialGatingBlock

    return MlpMixer(num_classes=CLASSES, mlp_ratio=2, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp, **MIXED)


#: What makes each, and the size of its images.
TIMM: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vit": (timm_model("vit_tiny_patch16_224", **PLAIN), 32),
    "deit (distilled)": (timm_model("deit_tiny_distilled_patch16_224", **PLAIN), 32),
    "eva": (timm_model("eva02_tiny_patch14_224", **PLAIN), 32),
    "beit": (timm_model("beit_base_patch16_224", **PLAIN), 32),
    "cait": (timm_model("cait_xxs24_224", **PLAIN, depth_token_only=1), 32),
    "swin": (timm_model("swin_tiny_patch4_window7_224", **WINDOWS), 32),
    "xcit": (timm_model("xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=3, num_heads=4), 32),
    "mixer": (timm_made("mlp_mixer", "MlpMixer", **MIXED), 32),
    "gmlp": (_gated, 32),
    "convnext": (timm_made("convnext", "ConvNeXt", depths=(1, 1, 2, 1), dims=(8, 16, 16, 32)), 64),
    "convmixer": (timm_made("convmixer", "ConvMixer", dim=32, depth=3, kernel_size=3, patch_size=4), 32),
    "resnet": (_resnet("BasicBlock"), 64),
    "resnext": (_resnet("Bottleneck", cardinality=4, base_width=8), 64),
    "densenet": (timm_made("densenet", "DenseNet", growth_rate=8, block_config=(2, 2, 2)), 64),
    "metaformer": (timm_made("metaformer", "MetaFormer", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)), 64),
    "pvt_v2": (timm_model("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 40, 32), num_heads=(1, 2, 5, 4)), 64),
    "levit": (timm_model("levit_128s", img_size=64, embed_dim=(16, 24, 32), num_heads=(2, 2, 4), key_dim=8), 64),
    "tinynet": (timm_model("tinynet_e"), 64),
    "mobilenetv3": (timm_model("mobilenetv3_small_050"), 64),
    "regnet": (timm_model("regnetx_002"), 64),
    "ghostnet": (timm_model("ghostnet_050"), 64),
    "dla": (timm_model("dla46_c"), 64),
    "edgenext": (timm_model("edgenext_xx_small"), 64),
    "mobilevit": (timm_model("mobilevit_xxs"), 64),
}

for name, (make, size) in TIMM.items():
    add(f"timm {name}", "timm", make, pixels(size), loss=score, rows=8, ci=name == "convnext")


def _vgg() -> nn.Module:
    from torchvision.models import vgg

    layers: list[str | int] = [8, "M", 16, "M", 16, "M", 32, "M", 32, "M"]
    with torch.device("meta"):  # The classifier of the original has 120 million parameters.
        model = vgg.VGG(nn.Sequential(), num_classes=CLASSES, init_weights=False)
    model.features = vgg.make_layers(layers, batch_norm=True)
    model.classifier = nn.Sequential(nn.Linear(32 * 49, 32), nn.ReLU(inplace=True), nn.Linear(32, CLASSES))
    return model


def _residual() -> nn.Module:
    from torchvision.models import resnet

    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def _fcn() -> nn.Module:
    from torchvision.models import segmentation
    from torchvision.models._utils import IntermediateLayerGetter

    backbone = IntermediateLayerGetter(_residual(), {"layer4": "out", "layer3": "aux"})
    head = segmentation.fcn.FCNHead
    return still(segmentation.FCN(backbone, head(512, CLASSES), head(256, CLASSES)))


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    stages = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    return ConvNeXt(stages, layer_scale=0.1, num_classes=CLASSES)


def _dense(checkpointed: bool) -> Callable[[], nn.Module]:
    layers = {"growth_rate": 8, "block_config": (2, 2, 2), "num_init_features": 16}
    make = made("DenseNet", "densenet", **layers, memory_efficient=checkpointed)

    def averaged() -> nn.Module:
        # PyTorch counts statistics again in recomputation, and those of the last batch weigh most: the order matters.
        model = make()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
        return model

    return averaged if checkpointed else make


#: What makes each, and the size of its images.
TORCHVISION: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet": (_residual, 32),
    "vgg": (_vgg, 64),
    "squeezenet": (torchvision_model("squeezenet1_1"), 64),
    "densenet": (_dense(False), 64),
    "densenet (checkpointed)": (_dense(True), 64),
    "googlenet (aux)": (torchvision_model("googlenet", aux_logits=True, init_weights=False), 64),
    "mobilenet_v2": (torchvision_model("mobilenet_v2", width_mult=0.25), 64),
    "mobilenet_v3": (torchvision_model("mobilenet_v3_small"), 64),
    "shufflenet_v2": (torchvision_model("shufflenet_v2_x0_5"), 64),
    "mnasnet": (torchvision_model("mnasnet0_5"), 64),
    "efficientnet": (torchvision_model("efficientnet_b0"), 64),
    "regnet": (torchvision_model("regnet_y_400mf"), 64),
    "convnext": (_convnext, 64),
    "vit": (made("VisionTransformer", "vision_transformer", 32, 8, 3, 4, 32, 40), 32),
    "swin": (made("SwinTransformer", "swin_transformer", [4, 4], 16, [1, 2], [2, 4], [4, 4]), 32),
    "maxvit": (made("MaxVit", "maxvit", (64, 64), 8, 2, [16, 32], [1, 1], 8, 0.0), 64),
    "fcn": (_fcn, 32),
    "deeplabv3": (torchvision_model("deeplabv3_mobilenet_v3_large", weights_backbone=None, aux_loss=True), 64),
    "lraspp": (torchvision_model("lraspp_mobilenet_v3_large", weights_backbone=None), 32),
}

for name, (make, size) in TORCHVISION.items():
    add(f"torchvision {name}", "torchvision", make, pixels(size), loss=score, rows=8, ci=name == "resnet")


def _stochastic() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    stages = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    return ConvNeXt(stages, stochastic_depth_prob=0.3, layer_scale=0.1, num_classes=CLASSES)


add("torchvision convnext (stochastic depth)", "torchvision", _stochastic, pixels(64), loss=score, rows=8, draws=True)
