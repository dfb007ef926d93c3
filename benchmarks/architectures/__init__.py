"""Many architectures, small and with random weights: each pipelined, and compared with the plain model.

    python -m benchmarks.architectures                     # all of them, each in a process of its own: about an hour
    python -m benchmarks.architectures llama gpt2 --seeds 5    # some, with more random cuts
    python -m benchmarks.architectures --plain             # whether the plain models run at all
    python -m benchmarks.architectures --export            # asks torch.distributed.pipelining to split them, too

The modules for kinds of models fill the catalogue when this package is imported.
"""

from benchmarks.architectures import (
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
from benchmarks.architectures.catalogue import CATALOGUE, KINDS, Architecture

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
