"""Many architectures, small and with random weights: each pipelined, and compared with the plain model.

    python -m benchmarks.campaigns.architectures             # all, each in a process of its own: about an hour
    python -m benchmarks.campaigns.architectures llama gpt2 --seeds 5    # some, with more random cuts

The modules for kinds of models fill the catalogue when this package is imported.
"""

from importlib import import_module

from benchmarks.campaigns.architectures.catalogue import CATALOGUE, KINDS, Architecture

__all__ = ["CATALOGUE", "KINDS", "Architecture"]

TEXT = "decoders", "encoder_decoders", "encoders", "recurrent", "sparse"
IMAGES = "detection", "diffusion", "diffusion_transformers", "image_libraries", "vision", "vision_language", "grids"
for name in (*TEXT, *IMAGES, "speech"):
    import_module(f"{__name__}.{name}")
