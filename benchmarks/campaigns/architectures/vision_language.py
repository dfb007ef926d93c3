"""Models of images and text: text about images, and scores of pairs.

Where a model couples the rows of a batch (the contrastive loss of CLIP), the plain micro-batches do so too, but their
outputs are no rows of the mini-batch's. Such a model has to be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.campaigns.architectures.catalogue import add, transformers_model, without_dropout
from benchmarks.campaigns.architectures.data import all_labels, classes, images, noise, shifted_labels, text

__all__: list[str] = []

IMAGE = 98  # the token that stands for a patch
PATCH_COUNT = 16
TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 16,
}


def illustrated(rows: int, generator: Generator, patches: int = PATCH_COUNT) -> dict[str, Tensor]:
    """Return text that begins with the patches of an image, with a label for each of its own tokens."""
    drawn = text(rows, generator, high=IMAGE)
    front = torch.full((rows, patches), IMAGE)
    return {
        "input_ids": torch.cat([front, drawn["input_ids"]], 1),
        "attention_mask": torch.cat([torch.ones_like(front), drawn["attention_mask"]], 1),
        "labels": torch.cat([torch.full_like(front, -100), drawn["labels"]], 1),
        "pixel_values": images(rows, generator),
    }


def pooled(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return the same for models that make four tokens of an image."""
    return illustrated(rows, generator, 4)


def tiled(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return the same with two images a row, of four tokens each."""
    drawn = illustrated(rows, generator, 8)
    return {**drawn, "pixel_values": noise(rows, 2, 3, 32, 32, generator=generator)}


def typed(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return the same with types of tokens, as PaliGemma wants them in training."""
    drawn = illustrated(rows, generator)
    return {**drawn, "token_type_ids": torch.ones_like(drawn["input_ids"])}


def captioned(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return images beside text, with its labels."""
    return {**text(rows, generator), "pixel_values": images(rows, generator)}


def paired(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return images beside text, without labels."""
    drawn = captioned(rows, generator)
    del drawn["labels"]
    return drawn


def questioned(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return images beside questions, with the scores of answers."""
    drawn = captioned(rows, generator)
    return {**drawn, "labels": torch.rand(rows, 5, generator=generator, dtype=torch.float64)}


def seen(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text beside features of regions of an image."""
    features = noise(rows, 4, 16, generator=generator)
    drawn = text(rows, generator)
    labels = torch.cat([drawn["labels"], torch.full((rows, 4), -100)], 1)
    return {**drawn, "labels": labels, "visual_embeds": features, "visual_attention_mask": torch.ones(rows, 4)}


def documents(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return an image of a page, its words and their boxes, with a class each."""
    drawn = text(rows, generator)
    corner = torch.randint(30, (*drawn["labels"].shape, 2), generator=generator)
    labels = torch.where(drawn["labels"] == -100, drawn["labels"], drawn["labels"] % 5)
    return {
        **drawn,
        "labels": labels,
        "bbox": torch.cat([corner, corner + 9], -1),
        "pixel_values": images(rows, generator),
    }


def apart(output: Any) -> Tensor:
    """Return a loss of embeddings that does not couple the rows."""
    loss: Tensor = output[0].square().mean() + output[0].mean()
    return loss


def classified(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return images with a class each."""
    return {"pixel_values": images(rows, generator), "labels": classes(rows, generator, 5)}


def bidirectional(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text and image with types of tokens that tell one from the other, as Gemma 3 wants them."""
    drawn = pooled(rows, generator)
    return {**drawn, "token_type_ids": (drawn["input_ids"] == IMAGE).long()}


CLIP: dict[str, Any] = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}
LLAMA = {"model_type": "llama", **TEXT}
PLAIN_VISION = {key: value for key, value in VISION.items() if key != "projection_dim"}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, **PLAIN_VISION}
LLAVA: dict[str, Any] = {
    "text_config": LLAMA,
    "vision_config": {"model_type": "clip_vision_model", **VISION},
    "image_token_index": IMAGE,
}
SMOL: dict[str, Any] = {
    "text_config": LLAMA,
    "vision_config": PLAIN_VISION,
    "image_token_id": IMAGE,
    "scale_factor": 2,
    "pad_token_id": 0,
}

#: Models that write text about images: the class, what draws its arguments, and its configuration.
WRITERS: dict[str, tuple[str, Callable[[int, Generator], dict[str, Tensor]], dict[str, Any]]] = {
    "llava": ("LlavaForConditionalGeneration", illustrated, {**LLAVA, "vision_feature_layer": -1}),
    "vipllava": ("VipLlavaForConditionalGeneration", illustrated, {**LLAVA, "vision_feature_layers": [-1, -2]}),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        typed,
        {
            "text_config": {"model_type": "gemma", **TEXT},
            "vision_config": SIGLIP,
            "image_token_index": IMAGE,
            "projection_dim": 32,
        },
    ),
    "idefics3": ("Idefics3ForConditionalGeneration", tiled, SMOL),
    "smolvlm": ("SmolVLMForConditionalGeneration", tiled, SMOL),
    "gemma3 (images)": (
        "Gemma3ForConditionalGeneration",
        bidirectional,
        {
            "text_config": {"model_type": "gemma3_text", **TEXT, "sliding_window": 8},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
        },
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        pooled,
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {**PLAIN_VISION, "image_size": [32, 32], "patch_size": [8, 8]},
            "image_token_id": IMAGE,
            "downsample_ratio": 0.5,
        },
    ),
    "aya_vision": (
        "AyaVisionForConditionalGeneration",
        pooled,
        {
            "text_config": {"model_type": "cohere2", **TEXT, "sliding_window": 8},
            "vision_config": SIGLIP,
            "image_token_index": IMAGE,
            "downsample_factor": 2,
            "adapter_layer_norm_eps": 1e-6,
            "alignment_intermediate_size": 32,
        },
    ),
    "git": ("GitForCausalLM", captioned, {**TEXT, "vision_config": PLAIN_VISION}),
    "blip": ("BlipForConditionalGeneration", captioned, CLIP),
}

for name, (cls, draw, settings) in WRITERS.items():
    add(name, "vision-language", transformers_model(cls, **settings), draw, weight=shifted_labels, ci=name == "llava")

for name, cls in {
    "clip (contrastive)": "CLIPModel",
    "siglip (contrastive)": "SiglipModel",
    "chinese_clip (contrastive)": "ChineseCLIPModel",
}.items():
    add(
        name,
        "vision-language",
        transformers_model(cls, **CLIP),
        lambda rows, generator: {**paired(rows, generator), "return_loss": True},
        refused=True,
    )
for name in ("clip", "siglip"):
    cls = {"clip": "CLIPForImageClassification", "siglip": "SiglipForImageClassification"}[name]
    add(f"{name} (classes)", "vision-language", transformers_model(cls, num_labels=5, **CLIP), classified)
add(
    "clip (images)",
    "vision-language",
    transformers_model("CLIPVisionModelWithProjection", **VISION),
    lambda rows, generator: {"pixel_values": images(rows, generator)},
    loss=apart,
)
add(
    "clip (text)",
    "vision-language",
    transformers_model("CLIPTextModelWithProjection", **{**TEXT, "projection_dim": 16}),
    lambda rows, generator: {key: value for key, value in text(rows, generator).items() if key != "labels"},
    loss=apart,
)
add(
    "vilt (answers)",
    "vision-language",
    transformers_model(
        "ViltForQuestionAnswering",
        **{**TEXT, **PLAIN_VISION},
        num_labels=5,
        modality_type_vocab_size=2,
        max_image_length=16,
    ),
    questioned,
)
add(
    "visual_bert",
    "vision-language",
    transformers_model("VisualBertForPreTraining", **TEXT, visual_embedding_dim=16),
    seen,
    weight=all_labels,
)
add(
    "layoutlmv3 (tokens)",
    "vision-language",
    transformers_model(
        "LayoutLMv3ForTokenClassification",
        **{**TEXT, "max_position_embeddings": 64},
        num_labels=5,
        input_size=32,
        patch_size=8,
        coordinate_size=5,
        shape_size=6,
        max_2d_position_embeddings=64,
    ),
    documents,
    weight=all_labels,
)
add(
    "pix2struct",
    "vision-language",
    transformers_model(
        "Pix2StructForConditionalGeneration",
        text_config={"vocab_size": 99, "hidden_size": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4},
        vision_config={
            "hidden_size": 32,
            "patch_embed_hidden_size": 16,
            "d_ff": 40,
            "d_kv": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "seq_len": 16,
        },
        decoder_start_token_id=1,
        pad_token_id=0,
    ),
    lambda rows, generator: {
        "flattened_patches": torch.cat(
            [
                torch.randint(1, 5, (rows, 16, 2), generator=generator).double(),
                noise(rows, 16, 16, generator=generator),
            ],
            -1,
        ),
        "labels": text(rows, generator)["labels"],
    },
    weight=all_labels,
)


def _captions() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, VisionEncoderDecoderModel, ViTConfig, ViTModel

    encoder = ViTModel(without_dropout(ViTConfig(**PLAIN_VISION)))
    shape = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    decoder = GPT2LMHeadModel(without_dropout(GPT2Config(**shape, is_decoder=True, add_cross_attention=True)))
    model = VisionEncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    return model


add(
    "vision_encoder_decoder (vit to gpt2)",
    "vision-language",
    _captions,
    lambda rows, generator: {"pixel_values": images(rows, generator), "labels": text(rows, generator)["labels"]},
    weight=all_labels,
)
