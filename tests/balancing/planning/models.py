"""Small models to plan for, and plans that are made quickly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torchgpipe
from torchgpipe_balancing import Plan

__all__ = ["DEVICES", "Attention", "Residual", "mean", "mlp", "quick", "state_of", "wide"]

DEVICES = ["cpu:0", "cpu:1"]

WIDTH = 8


def mlp(layers: int = 6, width: int = WIDTH) -> nn.Sequential:
    """Return layers that each keep their input and their output: a linear layer and a ReLU."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)])


def wide(layers: int = 6, width: int = WIDTH) -> nn.Sequential:
    """Return layers that keep nine times their input, and so much less where they are recomputed."""
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
    )


class Residual(nn.Module):
    """Blocks with residuals, which are no Sequential."""

    def __init__(self, layers: int = 5, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Attention(nn.Module):
    """Blocks of a transformer that all take the same mask; the output is a mapping with the loss of the labels."""

    def __init__(self, layers: int = 3, width: int = WIDTH, words: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True) for _ in range(layers)]
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, words: Tensor, mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def mean(output: Tensor, target: Any) -> Tensor:
    """Return a loss."""
    return output.mean() if target is None else ((output - target) ** 2).mean()


def quick(model: nn.Module, sample: Any = None, **options: Any) -> Plan:
    """Return a plan that takes little time: for two devices, and one schedule and number of micro-batches."""
    options = {
        "batch": 16,
        "devices": DEVICES,
        "schedule": "1F1B",
        "chunks": 4,
        "seconds": 0.01,
        "trials": 0,
        **options,
    }
    return torchgpipe.plan(model, torch.randn(4, WIDTH) if sample is None else sample, **options)


def state_of(model: nn.Module) -> Any:
    """Return all that a run could change: identities, and copies of values."""

    def of(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        return id(tensor), tensor.device, tensor.requires_grad, tensor.tolist(), tensor.data_ptr(), tensor._version

    names = [
        (name, type(one), id(one), one.training, [*vars(one)], [*one._forward_pre_hooks], [*one._forward_hooks])
        for name, one in model.named_modules()
    ]
    parameters = [
        (name, of(one), of(one.grad), [*(one._backward_hooks or ())]) for name, one in model.named_parameters()
    ]
    buffers = [(name, of(one)) for name, one in model.named_buffers()]
    random = torch.get_rng_state().tolist()
    return names, parameters, buffers, random, torch.is_grad_enabled(), torch.get_default_dtype()
