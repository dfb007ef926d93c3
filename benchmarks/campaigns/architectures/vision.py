"""Models of images in transformers: classifiers, segmentation, depth, masked images.

Batch norms count every micro-batch, so their models get micro-batches of two rows or more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.campaigns.architectures.catalogue import add, transformers_model
from benchmarks.campaigns.architectures.data import classes, images, noise

__all__ = ["PATCHES"]

CLASSES = 5

#: For every vision transformer; each takes what its configuration knows.
PATCHES: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "num_labels": CLASSES,
}


def labelled(rows: int, generator: Generator, size: int = 32) -> dict[str, Tensor]:
    """Return images with a class each."""
    return {"pixel_values": images(rows, generator, size), "labels": classes(rows, generator, CLASSES)}


def larger(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return images of 64 pixels, for models that halve them often."""
    return labelled(rows, generator, 64)


def segmented(rows: int, generator: Generator, size: int = 32) -> dict[str, Tensor]:
    """Return images with a class for each pixel."""
    labels = torch.randint(CLASSES, (rows, size, size), generator=generator)
    return {"pixel_values": images(rows, generator, size), "labels": labels}


def hidden(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return images of 16 patches, some of them hidden."""
    mask = torch.rand(rows, 16, generator=generator) < 0.4
    mask[:, 0] = True
    return {"pixel_values": images(rows, generator), "bool_masked_pos": mask}


#: The class of each, and what is particular in its configuration.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", {}),
    "deit": ("DeiTForImageClassification", {}),
    "beit": ("BeitForImageClassification", {"use_relative_position_bias": True, "layer_scale_init_value": 0.1}),
    "data2vec (vision)": ("Data2VecVisionForImageClassification", {"layer_scale_init_value": 0.1}),
    "dinov2": ("Dinov2ForImageClassification", {"mlp_ratio": 2}),
    "dinov2_with_registers": ("Dinov2WithRegistersForImageClassification", {"mlp_ratio": 2, "num_register_tokens": 2}),
    "ijepa": ("IJepaForImageClassification", {}),
    "vit_msn": ("ViTMSNForImageClassification", {}),
}

WINDOWS = {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
STAGES = {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "patch_size": 4}
PYRAMID = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
HEADS = {**PYRAMID, "num_attention_heads": [1, 1, 2, 2]}

#: The same, of models that get smaller and wider from stage to stage.
HIERARCHIES: dict[str, tuple[str, dict[str, Any]]] = {
    "swin": ("SwinForImageClassification", WINDOWS),
    "swinv2": ("Swinv2ForImageClassification", WINDOWS),
    "focalnet": (
        "FocalNetForImageClassification",
        {
            "embed_dim": 16,
            "depths": [1, 2],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
            "patch_size": 4,
            "hidden_sizes": [16, 32],
        },
    ),
    "hiera": (
        "HieraForImageClassification",
        {
            "image_size": [32, 32],
            "embed_dim": 16,
            "depths": [1, 2, 1],
            "num_heads": [1, 2, 4],
            "query_stride": [2, 2],
            "num_query_pool": 2,
            "masked_unit_size": [4, 4],
            "patch_size": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
        },
    ),
    "convnext": ("ConvNextForImageClassification", STAGES),
    "convnextv2": ("ConvNextV2ForImageClassification", STAGES),
    "poolformer": ("PoolFormerForImageClassification", PYRAMID),
    "pvt": ("PvtForImageClassification", {**HEADS, "patch_sizes": [4, 2, 2, 2], "image_size": 64}),
    "pvt_v2": ("PvtV2ForImageClassification", HEADS),
    "segformer": ("SegformerForImageClassification", {**HEADS, "decoder_hidden_size": 16}),
}

#: The same, of models that have batch norms.
NORMED: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": ("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]}),
    "regnet": (
        "RegNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "groups_width": 8},
    ),
    "bit": (
        "BitForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [32, 64], "depths": [1, 2], "num_groups": 4},
    ),
    "levit": (
        "LevitForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [2, 2, 4],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
            "mlp_ratio": [2, 2, 2],
            "attention_ratio": [2, 2, 2],
        },
    ),
    "cvt": (
        "CvtForImageClassification",
        {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    ),
    "mobilevit": (
        "MobileViTForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
            "patch_size": 2,
        },
    ),
    "mobilevitv2": ("MobileViTV2ForImageClassification", {"image_size": 64, "width_multiplier": 0.25, "patch_size": 2}),
    "mobilenet_v1": ("MobileNetV1ForImageClassification", {"depth_multiplier": 0.25}),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25}),
    "efficientnet": (
        "EfficientNetForImageClassification",
        {
            "width_coefficient": 0.25,
            "depth_coefficient": 0.5,
            "hidden_dim": 320,
            "kernel_sizes": [3, 3],
            "in_channels": [32, 16],
            "out_channels": [16, 24],
            "depthwise_padding": [],
            "strides": [1, 2],
            "num_block_repeats": [1, 2],
            "expand_ratios": [1, 4],
        },
    ),
    "swiftformer": (
        "SwiftFormerForImageClassification",
        {"embed_dims": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "mlp_ratio": 2},
    ),
    "hgnet_v2": (
        "HGNetV2ForImageClassification",
        {
            "embedding_size": 8,
            "stem_channels": [3, 8, 8],
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "stage_in_channels": [8, 16],
            "stage_mid_channels": [8, 8],
            "stage_out_channels": [16, 32],
            "stage_num_blocks": [1, 1],
            "stage_numb_of_layers": [2, 2],
            "stage_downsample": [False, True],
            "stage_downsample_strides": [2, 2],
            "stage_light_block": [False, True],
            "stage_kernel_size": [3, 3],
        },
    ),
}

for name, (cls, settings) in TRANSFORMERS.items():
    add(name, "vision", transformers_model(cls, **{**PATCHES, **settings}), labelled, ci=name == "vit")

for name, (cls, settings) in HIERARCHIES.items():
    make = transformers_model(cls, **{"image_size": 32, "num_labels": CLASSES, **settings})
    add(name, "vision", make, larger if name.startswith("pvt") else labelled)

SIXTY_FOUR = ("levit", "mobilevit", "mobilevitv2", "mobilenet_v1", "mobilenet_v2", "swiftformer")
for name, (cls, settings) in NORMED.items():
    draw = larger if name in SIXTY_FOUR else labelled
    add(name, "vision", transformers_model(cls, num_labels=CLASSES, **settings), draw, rows=8)


def imagined(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return images as tokens, 16 of them, with a class each."""
    ids = torch.randint(32, (rows, 16), generator=generator)
    return {"input_ids": ids, "labels": classes(rows, generator, CLASSES)}


add(
    "imagegpt (classes)",
    "vision",
    transformers_model(
        "ImageGPTForImageClassification",
        num_labels=CLASSES,
        n_positions=16,
        n_embd=32,
        n_layer=3,
        n_head=4,
        vocab_size=33,
    ),
    imagined,
)

add(
    "vit (masked images)",
    "vision",
    transformers_model("ViTForMaskedImageModeling", encoder_stride=8, **PATCHES),
    hidden,
    weight=lambda kwargs: float(kwargs["bool_masked_pos"].sum()),
    explicit=True,
)


def covered(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return images, and the noise that says which of their patches are hidden."""
    return {"pixel_values": images(rows, generator), "noise": noise(rows, 16, generator=generator)}


add(
    "vit_mae",
    "vision",
    transformers_model(
        "ViTMAEForPreTraining",
        decoder_hidden_size=32,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=40,
        **PATCHES,
    ),
    covered,
)


def measured(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return images alone, for models whose loss is ours."""
    return {"pixel_values": images(rows, generator)}


add(
    "dpt (depth)",
    "vision",
    transformers_model(
        "DPTForDepthEstimation",
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        **{**PATCHES, "num_hidden_layers": 4},
    ),
    measured,
    loss=lambda output: output.predicted_depth.square().mean(),
    noise=0.1,
)
add(
    "segformer (segmentation)",
    "vision",
    transformers_model(
        "SegformerForSemanticSegmentation",
        num_labels=CLASSES,
        hidden_sizes=[16, 16, 32, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
    ),
    segmented,
    rows=6,
)
