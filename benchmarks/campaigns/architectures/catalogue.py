"""The catalogue says what an architecture is: how to build it small, its random arguments, and its loss.

An entry names its kind, the row of the table that it is counted in. Building is deterministic: the entry's name seeds
the weights. Weights are moved a little from where their library puts them, since many layers start as zero or as the
identity, and would hide a wrong gradient. Everything is float64, in training mode, without dropout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.campaigns.architectures.operators import register_missing

__all__ = [
    "CATALOGUE",
    "ENCODER_DECODER",
    "KINDS",
    "Architecture",
    "Call",
    "add",
    "still",
    "transformers_model",
    "without_dropout",
]

#: Positional and keyword arguments of one call.
Call = tuple[tuple[Any, ...], dict[str, Any]]

#: In the order of the table.
KINDS = (
    "decoder",
    "mixture of experts",
    "state space or recurrent",
    "encoder",
    "encoder-decoder",
    "vision",
    "speech",
    "vision-language",
    "detection and segmentation",
    "diffusion",
    "timm",
    "torchvision",
)


#: Of an encoder and a decoder that are as small as the rest.
ENCODER_DECODER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
}


@dataclass(frozen=True)
class Architecture:
    """One model, small and with random weights.

    Args:
        name: as the table shows it
        kind: one of ``KINDS``
        make: makes the model, from the seeded global generator
        draw: draws arguments for a number of rows
        loss: takes the output; by default the loss is the output's own
        weight: takes keyword arguments of a micro-batch, and returns its weight in the mean; by default its rows
        explicit: whether ``pipelined`` has to be told the weight, which differs from its own
        rows: of a mini-batch
        whole: the names of arguments that are not split although they have a row for each of the batch
        given: whether the caller gives the micro-batches, because a batch of them cannot be split
        draws: whether it draws random numbers that matter; then it is compared with itself on one device
        coupled: the names of outputs that balance experts over the batch, so that they differ for its parts
        refused: whether the rows of its batch are coupled, so that it has to be refused
        ci: whether the tests run it
        noise: how far weights are moved
    """

    name: str
    kind: str
    make: Callable[[], nn.Module]
    draw: Callable[[int, Generator], Any]
    loss: Callable[[Any], Tensor] | None = None
    weight: Callable[[Mapping[str, Any]], float] | None = None
    explicit: bool = False
    rows: int = 5
    whole: tuple[str, ...] = ()
    given: bool = False
    draws: bool = False
    coupled: tuple[str, ...] = ()
    refused: bool = False
    ci: bool = False
    noise: float = field(default=0.02, repr=False)

    def build(self) -> nn.Module:
        """Return the model in float64 and in training mode, the same one each time."""
        register_missing()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()))
            model = self.make().double().train()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.is_floating_point():
                        parameter.add_(torch.randn_like(parameter), alpha=self.noise)
        return model

    def inputs(self, rows: int, generator: Generator) -> Call:
        """Return random arguments with so many rows."""
        drawn = self.draw(rows, generator)
        return ((), drawn) if isinstance(drawn, dict) else (tuple(drawn), {})


#: All architectures, by name.
CATALOGUE: dict[str, Architecture] = {}


def add(
    name: str, kind: str, make: Callable[[], nn.Module], draw: Callable[[int, Generator], Any], **more: Any
) -> None:
    """Enter an architecture into the catalogue."""
    assert name not in CATALOGUE and kind in KINDS, f"{name!r} is there twice, or of no known kind: {kind!r}"
    CATALOGUE[name] = Architecture(name, kind, make, draw, **more)


def transformers_model(name: str, *, dropout: bool = False, **settings: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of transformers, by its class and its configuration, by default without dropout."""

    def make() -> nn.Module:
        import transformers

        cls = getattr(transformers, name)
        config = cls.config_class(**settings)
        if not dropout:
            without_dropout(config)
        config._experts_implementation = "eager"  # a grouped matrix product knows no float64
        model: nn.Module = cls(config)
        return model

    return make


def without_dropout(config: Any) -> Any:
    """Set all rates of dropout in a configuration to 0, those of its parts as well, and return it."""
    from transformers import PretrainedConfig

    words = ("drop", "mask_time", "mask_feature")
    for key, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            without_dropout(value)
        elif isinstance(value, float) and any(word in key for word in words):
            setattr(config, key, 0.0)
        elif isinstance(value, (list, tuple)) and any(word in key for word in words):
            setattr(config, key, [0.0 if isinstance(rate, float) else rate for rate in value])
    return config


def still(model: nn.Module) -> nn.Module:
    """Set all rates of dropout of a model to 0, those of whole paths and of classes as well, and return it."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        for name in ("drop_rate", "drop_prob", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model
