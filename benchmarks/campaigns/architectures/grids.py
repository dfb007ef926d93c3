"""Models of text about images that come as one list of patches, with a grid for each image, and other newer writers.

Patches have no row for each of the batch, so the micro-batches are given, as a window of accumulation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.campaigns.architectures.catalogue import add, transformers_model
from benchmarks.campaigns.architectures.data import images, noise, shifted_labels
from benchmarks.campaigns.architectures.vision_language import IMAGE, PLAIN_VISION, TEXT, illustrated, pooled

__all__: list[str] = []

START = 97  # the token before an image


def patches(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text after an image of 4 x 4 patches each, which are merged to four tokens, as Qwen-VL wants them."""
    drawn = pooled(rows, generator)
    del drawn["pixel_values"]
    return {
        **drawn,
        "pixel_values": noise(rows * 16, 3 * 2 * 8 * 8, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        "mm_token_type_ids": (drawn["input_ids"] == IMAGE).int(),
    }


def placed(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text after an image of 4 x 4 patches with their places, as Gemma 4 wants them."""
    drawn = pooled(rows, generator)
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    return {
        **drawn,
        "pixel_values": torch.rand(rows, 16, 3 * 8 * 8, generator=generator, dtype=torch.float64),
        "image_position_ids": grid.expand(rows, -1, -1).clone(),
        "mm_token_type_ids": (drawn["input_ids"] == IMAGE).long(),
    }


def measured(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text after an image, and the size of the image."""
    drawn = pooled(rows, generator)
    return {**drawn, "image_sizes": torch.tensor([[32, 32]] * rows)}


def cropped(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text after an image and its crop, as Phi-4 wants them: 2 x 3 tokens, one between, 2 x 3 tokens."""
    drawn = illustrated(rows, generator, 13)
    del drawn["pixel_values"]
    return {
        **drawn,
        "image_pixel_values": noise(rows, 2, 3, 32, 32, generator=generator),
        "image_sizes": torch.tensor([[32, 32]] * rows),
        "image_attention_mask": torch.ones(rows, 2, 4, 4),
    }


def tiles(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text after an image of one tile each, as Llama 4 wants them."""
    return {**pooled(rows, generator), "pixel_values": images(rows, generator)}


ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
VISION_QWEN: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 32,
}
QWEN: dict[str, Any] = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": 96}
GEMMA: dict[str, Any] = {
    **TEXT,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 99,
}

#: The class, what draws its arguments, its configuration, and whether the micro-batches have to be given.
WRITERS: dict[str, tuple[str, Callable[[int, Generator], dict[str, Tensor]], dict[str, Any], bool]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        patches,
        {
            "text_config": {**TEXT, "rope_parameters": ROPE},
            "vision_config": {**VISION_QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
            **QWEN,
        },
        True,
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        patches,
        {
            "text_config": {**TEXT, "rope_parameters": ROPE},
            "vision_config": {**VISION_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **QWEN,
        },
        True,
    ),
    "gemma4 (images)": (
        "Gemma4ForConditionalGeneration",
        placed,
        {
            "text_config": {
                **GEMMA,
                "global_head_dim": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
            },
            "vision_config": {
                **PLAIN_VISION,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "position_embedding_size": 16,
                "pooling_kernel_size": 2,
            },
            "audio_config": None,
            "image_token_id": IMAGE,
        },
        False,
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        measured,
        {
            "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
            "vision_config": {"model_type": "pixtral", **PLAIN_VISION, "head_dim": 8},
            "image_token_index": IMAGE,
        },
        False,
    ),
    "phi4_multimodal": (
        "Phi4MultimodalForCausalLM",
        cropped,
        {
            **TEXT,
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "vision_config": {**PLAIN_VISION, "crop_size": 32, "image_token_id": IMAGE},
            "audio_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_blocks": 1,
                "num_attention_heads": 2,
                "nemo_conv_channels": 8,
                "ext_pw_out_channel": 16,
                "depthwise_separable_out_channel": 16,
                "input_size": 16,
                "audio_token_id": START,
            },
        },
        False,
    ),
    "llama4 (images)": (
        "Llama4ForConditionalGeneration",
        tiles,
        {
            "text_config": {
                **TEXT,
                "num_local_experts": 4,
                "intermediate_size_mlp": 40,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 8,
            },
            "vision_config": {
                **PLAIN_VISION,
                "vision_output_dim": 32,
                "intermediate_size": 128,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": IMAGE,
        },
        False,
    ),
}

for name, (cls, draw, settings, given) in WRITERS.items():
    add(
        name,
        "vision-language",
        transformers_model(cls, **settings),
        draw,
        weight=shifted_labels,
        given=given,
        ci=name == "qwen3_vl",
    )
