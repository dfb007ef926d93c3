"""The models that `pipelined.py` measures, and what it measures them beside: naive placement, and a split by export.

No model here is an `nn.Sequential`, and each computes something between its blocks, as models do.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.gpt import Attention, Embedding, FeedForward

__all__ = ["GPT", "Glued", "Tiny", "language_model", "language_models", "place_naively", "split_by_export"]

VOCABULARY = 512


class Tiny(nn.Module):
    """Layers of 4 x 4, called one after the other.

    Args:
        count: the number of layers
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])

    def forward(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = block(input)
        return input


class Glued(Tiny):
    """The same layers, with a residual connection around each: an operation between two blocks."""

    def forward(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = input + block(input)
        return input


class GPT(nn.Module):
    """A language model that returns its own loss and its logits, as those of transformers do.

    Args:
        layers: the number of blocks
        width: the length of the vectors
        heads: of each attention
        context: the largest length of an input
    """

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = Embedding(VOCABULARY, context, width)
        self.blocks = nn.ModuleList([nn.Sequential(Attention(width, heads), FeedForward(width)) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def language_models() -> list[str]:
    """Return the language models that there are: our own, and GPT-2 if transformers is installed."""
    return ["gpt", *(["gpt2"] if find_spec("transformers") else [])]


def language_model(name: str, layers: int, width: int, context: int) -> tuple[nn.Module, dict[str, int]]:
    """Return a language model without dropout, and the block at which the second of two partitions begins."""
    torch.manual_seed(0)
    heads = max(1, width // 64)
    if name == "gpt":
        return GPT(layers, width, heads, context), {f"blocks.{layers // 2}": 1}
    _declare_torchvision_operators()
    from transformers import GPT2Config, GPT2LMHeadModel  # type: ignore[import-not-found, unused-ignore]

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config), {f"transformer.h.{layers // 2}": 1}


def _declare_torchvision_operators() -> None:
    """Let transformers import torchvision beside a build of PyTorch that torchvision's operators do not fit."""
    for name in ("nms", "qnms"):
        if find_spec("torchvision") and not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


# ---- Naive placement.


def place_naively(module: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Place modules on devices, and let each move its arguments there when it is called, as `device_map` does.

    Args:
        module: the model
        devices: for names of modules, their devices
    """
    for name, device in devices.items():
        child = module.get_submodule(name).to(device)

        def move(_: nn.Module, args: Any, kwargs: Any, device: torch.device = device) -> Any:
            return moved(args, device), moved(kwargs, device)

        child.register_forward_pre_hook(move, with_kwargs=True)


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)([moved(item, device) for item in value])
    if type(value) is dict:
        return {key: moved(item, device) for key, item in value.items()}
    return value


# ---- Splitting by export.


def split_by_export(module: nn.Module, sample: dict[str, Tensor] | Tensor, starts: Mapping[str, int]) -> Any:
    """Return the model split by `torch.distributed.pipelining.pipeline`, which can be called in one process."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    args, kwargs = ((sample,), None) if isinstance(sample, Tensor) else ((), sample)
    return pipeline(module, args, kwargs, split_spec=dict.fromkeys(starts, SplitPoint.BEGINNING))
