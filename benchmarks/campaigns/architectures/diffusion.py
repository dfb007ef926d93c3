"""Models of diffusers: U-Nets, diffusion transformers, autoencoders, and control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.campaigns.architectures.catalogue import add, still
from benchmarks.campaigns.architectures.data import noise

__all__: list[str] = []


def diffuser(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of diffusers by its class, with these settings, without dropout."""

    def make() -> nn.Module:
        import diffusers

        return still(getattr(diffusers, name)(**settings))

    return make


def denoised(output: Any) -> Tensor:
    """Return the square of what a model predicts, minus a ramp."""
    sample = output[0] if isinstance(output, tuple) else output.sample
    ramp = torch.linspace(-1, 1, sample.shape[-1], dtype=sample.dtype)
    return functional.mse_loss(sample, ramp.expand_as(sample))


def latents(rows: int, generator: Generator, channels: int = 4, size: int = 8) -> dict[str, Tensor]:
    """Return latents at random times."""
    times = torch.randint(1000, (rows,), generator=generator)
    return {"sample": noise(rows, channels, size, size, generator=generator), "timestep": times}


def conditioned(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return latents at random times, with an encoded text."""
    return {**latents(rows, generator), "encoder_hidden_states": noise(rows, 6, 16, generator=generator)}


def translated(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return the same under the names of the transformers."""
    drawn = conditioned(rows, generator)
    return {"hidden_states": drawn.pop("sample"), **drawn}


def classified(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return latents with a class each."""
    drawn = latents(rows, generator)
    labels = torch.randint(5, (rows,), generator=generator)
    return {"hidden_states": drawn["sample"], "timestep": drawn["timestep"], "class_labels": labels}


def joint(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return latents with an encoded text, whole and pooled."""
    return {**translated(rows, generator), "pooled_projections": noise(rows, 16, generator=generator)}


def flux(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return packed latents, whose ids of places belong to no row."""
    return {
        "hidden_states": noise(rows, 16, 4, generator=generator),
        "encoder_hidden_states": noise(rows, 6, 16, generator=generator),
        "pooled_projections": noise(rows, 16, generator=generator),
        "timestep": torch.rand(rows, generator=generator, dtype=torch.float64),
        "img_ids": torch.cartesian_prod(torch.arange(1), torch.arange(4), torch.arange(4)).double(),
        "txt_ids": torch.zeros(6, 3, dtype=torch.float64),
        "guidance": torch.rand(rows, generator=generator, dtype=torch.float64),
    }


def pictures(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return images to encode."""
    return {"sample": noise(rows, 3, 16, 16, generator=generator)}


UNET: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": (16, 32),
    "norm_num_groups": 4,
}
CROSS: dict[str, Any] = {
    **UNET,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 8,
}
DIT: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
}

add(
    "unet2d",
    "diffusion",
    diffuser(
        "UNet2DModel",
        **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ),
    latents,
    loss=denoised,
)
add("unet2d_condition", "diffusion", diffuser("UNet2DConditionModel", **CROSS), conditioned, loss=denoised, ci=True)
add(
    "unet2d_condition (tuple)",
    "diffusion",
    diffuser("UNet2DConditionModel", **CROSS),
    lambda rows, generator: {**conditioned(rows, generator), "timestep": 7, "return_dict": False},
    loss=denoised,
)
add(
    "dit",
    "diffusion",
    diffuser("DiTTransformer2DModel", **DIT, num_embeds_ada_norm=5, norm_num_groups=4),
    classified,
    loss=denoised,
)
add(
    "pixart",
    "diffusion",
    diffuser(
        "PixArtTransformer2DModel",
        **DIT,
        out_channels=8,
        cross_attention_dim=32,
        caption_channels=16,
        num_embeds_ada_norm=1000,
        norm_num_groups=4,
    ),
    lambda rows, generator: {
        **translated(rows, generator),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    },
    loss=denoised,
)
add(
    "sd3",
    "diffusion",
    diffuser(
        "SD3Transformer2DModel",
        **DIT,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
    ),
    joint,
    loss=denoised,
)
add(
    "flux",
    "diffusion",
    diffuser(
        "FluxTransformer2DModel",
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    ),
    flux,
    loss=denoised,
    whole=("img_ids", "txt_ids"),
)
add(
    "sana",
    "diffusion",
    diffuser(
        "SanaTransformer2DModel",
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=8,
        patch_size=1,
    ),
    translated,
    loss=denoised,
)
add(
    "aura_flow",
    "diffusion",
    diffuser(
        "AuraFlowTransformer2DModel",
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=64,
    ),
    lambda rows, generator: {
        **translated(rows, generator),
        "timestep": torch.rand(rows, generator=generator, dtype=torch.float64),
    },
    loss=denoised,
)
add(
    "unet2d (without attention)",
    "diffusion",
    diffuser(
        "UNet2DModel",
        **{**UNET, "layers_per_block": 2},
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    ),
    latents,
    loss=denoised,
)
CODER: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "latent_channels": 4,
}
add("autoencoder_kl", "diffusion", diffuser("AutoencoderKL", **CODER), pictures, loss=denoised)
add("vq_model", "diffusion", diffuser("VQModel", **CODER, num_vq_embeddings=20), pictures, loss=denoised)
add(
    "autoencoder_tiny",
    "diffusion",
    diffuser(
        "AutoencoderTiny",
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 2),
        num_decoder_blocks=(2, 1),
    ),
    pictures,
    loss=denoised,
)
add(
    "controlnet",
    "diffusion",
    diffuser(
        "ControlNetModel",
        in_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=8,
        conditioning_embedding_out_channels=(8, 16),
    ),
    lambda rows, generator: {
        **conditioned(rows, generator),
        "controlnet_cond": noise(rows, 3, 16, 16, generator=generator),
    },
    loss=lambda output: sum(
        (sample.square().mean() for sample in output.down_block_res_samples),
        output.mid_block_res_sample.square().mean(),
    ),
)
