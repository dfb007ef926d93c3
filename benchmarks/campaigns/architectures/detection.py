"""Models that find and segment objects. Their targets are a list of a dictionary for each row.

The loss of a micro-batch is divided by its number of boxes, so the loss of the mini-batch is the mean of those of the
micro-batches, weighted by rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.campaigns.architectures.catalogue import ENCODER_DECODER, add, transformers_model
from benchmarks.campaigns.architectures.data import images
from benchmarks.campaigns.architectures.vision import PATCHES

__all__: list[str] = []

CLASSES = 5
KIND = "detection and segmentation"


def boxed(rows: int, generator: Generator, size: int = 64) -> dict[str, Any]:
    """Return images with one to three boxes each."""
    labels = []
    for _ in range(rows):
        count = int(torch.randint(1, 4, (), generator=generator))
        boxes = torch.rand(count, 4, generator=generator, dtype=torch.float64) * 0.3 + 0.2
        labels.append({"class_labels": torch.randint(CLASSES, (count,), generator=generator), "boxes": boxes})
    return {"pixel_values": images(rows, generator, size), "labels": labels}


def masked(rows: int, generator: Generator) -> dict[str, Any]:
    """Return images with a mask for each of three classes."""
    masks = [(torch.rand(3, 64, 64, generator=generator) < 0.5).double() for _ in range(rows)]
    labels = [torch.randperm(CLASSES, generator=generator)[:3] for _ in range(rows)]
    return {"pixel_values": images(rows, generator, 64), "mask_labels": masks, "class_labels": labels}


def answered(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return images alone, for a loss of ours."""
    return {"pixel_values": images(rows, generator, 64)}


BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "out_features": ["stage2"],
}
STAGES = {**BACKBONE, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
DETR: dict[str, Any] = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": BACKBONE,
    **ENCODER_DECODER,
    "num_queries": 6,
    "num_labels": CLASSES,
    "auxiliary_loss": True,
}

add("detr", KIND, transformers_model("DetrForObjectDetection", **DETR), boxed, ci=True)
add("conditional_detr", KIND, transformers_model("ConditionalDetrForObjectDetection", **DETR), boxed)
add("dab_detr", KIND, transformers_model("DabDetrForObjectDetection", **{**DETR, "hidden_size": 32}), boxed)
add("table_transformer", KIND, transformers_model("TableTransformerForObjectDetection", **DETR), boxed)
add(
    "deformable_detr",
    KIND,
    transformers_model(
        "DeformableDetrForObjectDetection",
        **{
            **DETR,
            "backbone_config": {**STAGES, "out_features": ["stage2", "stage3", "stage4"]},
            "num_feature_levels": 4,
            "encoder_n_points": 2,
            "decoder_n_points": 2,
        },
    ),
    boxed,
    rows=8,
)
add(
    "yolos",
    KIND,
    transformers_model(
        "YolosForObjectDetection", **{**PATCHES, "image_size": [64, 64], "patch_size": 16, "num_detection_tokens": 6}
    ),
    boxed,
)
add(
    "maskformer",
    KIND,
    transformers_model(
        "MaskFormerForInstanceSegmentation",
        fpn_feature_size=32,
        mask_feature_size=32,
        use_auxiliary_loss=False,
        num_labels=CLASSES,
        backbone_config={**STAGES, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        decoder_config={
            "model_type": "detr",
            **ENCODER_DECODER,
            "num_queries": 6,
            "num_labels": CLASSES,
        },
    ),
    masked,
)
add(
    "owlvit (boxes)",
    KIND,
    transformers_model("OwlViTVisionModel", **{**PATCHES, "image_size": 64}),
    answered,
    loss=lambda output: output[0].square().mean(),
)
