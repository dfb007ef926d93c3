"""Many architectures, small and with random weights: each pipelined, and compared with the plain model.

    python -m benchmarks.campaigns.architectures             # all, each in a process of its own: about an hour
    python -m benchmarks.campaigns.architectures llama gpt2 --seeds 5    # some, with more random cuts
    python -m benchmarks.campaigns.architectures --plain     # whether the plain models run at all
    python -m benchmarks.campaigns.architectures --export    # asks torch.distributed.pipelining to split them, too

The modules for kinds of models fill the catalogue when this package is imported.
"""

from benchmarks.campaigns.architectures import (
    decoders,
    detection,
    diffusion,
    encoder_decoders,
    encoders,
    image_libraries,
    recurrent,
    sparse,
    speech,
    vision,
    vision_language,
)
from benchmarks.campaigns.architectures.catalogue import CATALOGUE, KINDS, Architecture

__all__ = [
    "CATALOGUE",
    "KINDS",
    "Architecture",
    "decoders",
    "detection",
    "diffusion",
    "encoder_decoders",
    "encoders",
    "image_libraries",
    "recurrent",
    "sparse",
    "speech",
    "vision",
    "vision_language",
]
