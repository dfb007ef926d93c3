"""Transformers of diffusers that people train adapters on: for images and for video.

Most take an encoded text beside patches, and what belongs to no row: ids of places, shapes of images, numbers of
frames. Where a batch is in another dimension than the first one, or the ids have a row for each of the batch and the
model takes those of the first one, the micro-batches are given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.campaigns.architectures.catalogue import add
from benchmarks.campaigns.architectures.data import noise
from benchmarks.campaigns.architectures.diffusion import CROSS, denoised, diffuser, flux, latents

__all__: list[str] = []

HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}
STREAMS: dict[str, Any] = {**HEADS, "num_layers": 2, "num_single_layers": 2}


def packed(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return packed latents at random times between 0 and 1, with an encoded text."""
    return {
        "hidden_states": noise(rows, 16, 4, generator=generator),
        "encoder_hidden_states": noise(rows, 6, 16, generator=generator),
        "timestep": torch.rand(rows, generator=generator, dtype=torch.float64),
    }


def places(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return the same with ids of places in four axes, a row for each of the batch, as Flux 2 wants them."""
    image = torch.cartesian_prod(torch.arange(1), torch.arange(4), torch.arange(4), torch.arange(1))
    words = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(6))
    ids = {"img_ids": image.expand(rows, -1, -1).clone(), "txt_ids": words.expand(rows, -1, -1).clone()}
    return {**packed(rows, generator), **ids, "guidance": torch.rand(rows, generator=generator, dtype=torch.float64)}


def video(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return the latents of three frames at random times, with an encoded text."""
    return {
        "hidden_states": noise(rows, 4, 3, 4, 4, generator=generator),
        "encoder_hidden_states": noise(rows, 6, 16, generator=generator),
        "timestep": torch.randint(1000, (rows,), generator=generator),
    }


def masked(rows: int, generator: Generator, length: int = 6) -> Tensor:
    """Return a mask of encoded texts of random lengths."""
    lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
    return (torch.arange(length) < lengths).long()


def flux_without_vector(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return the arguments of Flux without the pooled text and the guidance, which Chroma has not."""
    drawn = flux(rows, generator)
    return {key: value for key, value in drawn.items() if key not in ("pooled_projections", "guidance")}


def listed(rows: int, generator: Generator) -> dict[str, Any]:
    """Return lists of images and texts, as Z-Image wants them."""
    return {
        "x": [noise(4, 1, 8, 8, generator=generator) for _ in range(rows)],
        "t": torch.rand(rows, generator=generator, dtype=torch.float64),
        "cap_feats": [noise(6, 16, generator=generator) for _ in range(rows)],
    }


def layered(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return the arguments of HiDream, one of which has a dimension of layers before that of the rows."""
    return {
        "hidden_states": noise(rows, 4, 8, 8, generator=generator),
        "timesteps": torch.randint(1000, (rows,), generator=generator),
        "encoder_hidden_states_t5": noise(rows, 6, 16, generator=generator),
        "encoder_hidden_states_llama3": noise(4, rows, 6, 16, generator=generator),
        "pooled_embeds": noise(rows, 16, generator=generator),
    }


def sized(rows: int, generator: Generator) -> dict[str, Any]:
    """Return the arguments of SDXL's U-Net: pooled texts and sizes of images in a dict."""
    drawn = {**latents(rows, generator), "encoder_hidden_states": noise(rows, 6, 16, generator=generator)}
    sizes = torch.randint(8, 64, (rows, 6), generator=generator).double()
    return {**drawn, "added_cond_kwargs": {"text_embeds": noise(rows, 16, generator=generator), "time_ids": sizes}}


add(
    "flux2",
    "diffusion",
    diffuser(
        "Flux2Transformer2DModel",
        **STREAMS,
        in_channels=4,
        joint_attention_dim=16,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    ),
    places,
    loss=denoised,
)
add(
    "chroma",
    "diffusion",
    diffuser(
        "ChromaTransformer2DModel",
        **STREAMS,
        in_channels=4,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=16,
        approximator_hidden_dim=16,
        approximator_layers=2,
    ),
    flux_without_vector,
    loss=denoised,
    whole=("img_ids", "txt_ids"),
)
add(
    "qwen_image",
    "diffusion",
    diffuser(
        "QwenImageTransformer2DModel",
        **HEADS,
        num_layers=3,
        in_channels=4,
        out_channels=1,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    ),
    lambda rows, generator: {
        **packed(rows, generator),
        "encoder_hidden_states_mask": masked(rows, generator),
        "img_shapes": [[(1, 4, 4)]] * rows,
    },
    loss=denoised,
)
add(
    "z_image",
    "diffusion",
    diffuser(
        "ZImageTransformer2DModel",
        in_channels=4,
        dim=32,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 4, 8],
        axes_lens=[64, 32, 32],
    ),
    listed,
    loss=lambda output: denoised((torch.stack(output.sample),)),
)
add(
    "lumina2",
    "diffusion",
    diffuser(
        "Lumina2Transformer2DModel",
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=3,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 4, 8),
        axes_lens=(32, 16, 16),
        cap_feat_dim=16,
    ),
    lambda rows, generator: {
        "hidden_states": noise(rows, 4, 8, 8, generator=generator),
        "timestep": torch.rand(rows, generator=generator, dtype=torch.float64),
        "encoder_hidden_states": noise(rows, 6, 16, generator=generator),
        "encoder_attention_mask": masked(rows, generator).bool(),
    },
    loss=denoised,
)
add(
    "hidream",
    "diffusion",
    diffuser(
        "HiDreamImageTransformer2DModel",
        **STREAMS,
        patch_size=2,
        in_channels=4,
        caption_channels=[16, 16],
        text_emb_dim=16,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=(8, 4, 4),
        max_resolution=(8, 8),
        llama_layers=[0, 1, 2, 3],
    ),
    layered,
    loss=denoised,
    given=True,
)
add(
    "unet2d_condition (sdxl)",
    "diffusion",
    diffuser(
        "UNet2DConditionModel",
        **{**CROSS, "attention_head_dim": (2, 4)},
        use_linear_projection=True,
        transformer_layers_per_block=(1, 2),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16 + 6 * 8,
    ),
    sized,
    loss=denoised,
)
add(
    "wan",
    "diffusion",
    diffuser(
        "WanTransformer3DModel",
        **HEADS,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=3,
        rope_max_seq_len=32,
    ),
    video,
    loss=denoised,
)
add(
    "ltx",
    "diffusion",
    diffuser(
        "LTXVideoTransformer3DModel",
        **HEADS,
        in_channels=4,
        out_channels=4,
        cross_attention_dim=32,
        caption_channels=16,
        num_layers=3,
    ),
    lambda rows, generator: {
        **packed(rows, generator),
        "timestep": torch.randint(1000, (rows,), generator=generator),
        "encoder_attention_mask": masked(rows, generator),
        "num_frames": 1,
        "height": 4,
        "width": 4,
    },
    loss=denoised,
)
add(
    "hunyuan_video",
    "diffusion",
    diffuser(
        "HunyuanVideoTransformer3DModel",
        **STREAMS,
        in_channels=4,
        out_channels=4,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=16,
        rope_axes_dim=(4, 4, 8),
    ),
    lambda rows, generator: {
        **video(rows, generator),
        "encoder_attention_mask": masked(rows, generator),
        "pooled_projections": noise(rows, 16, generator=generator),
        "guidance": torch.rand(rows, generator=generator, dtype=torch.float64) * 1000,
    },
    loss=denoised,
)
add(
    "cosmos",
    "diffusion",
    diffuser(
        "CosmosTransformer3DModel",
        **HEADS,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        text_embed_dim=16,
        adaln_lora_dim=4,
        extra_pos_embed_type=None,  # Its norm is one of float32 only.
        max_size=(4, 8, 8),
    ),
    lambda rows, generator: {**video(rows, generator), "fps": 24, "padding_mask": torch.zeros(1, 1, 4, 4)},
    loss=denoised,
    whole=("padding_mask",),
)
