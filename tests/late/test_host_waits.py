"""The host waits for a device as rarely as it can: each wait is a time in which no work is launched.

``late`` counts how often the host has waited for a stream. A tensor that comes from the host, in memory that is not
pinned, is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgpipe
from tests import late
from tests.recipes import Keeps
from torchgpipe import GPipe

pytestmark = pytest.mark.late

DEVICES = ["late:0", "late:1"]
M, ROWS = 4, 8


def waits(run: Callable[[], Any]) -> int:
    for _ in range(4):  # What a model draws from is not known in its first run, and recomputation is compared at first.
        run()
    torch.accelerator.synchronize()
    before = late.counts().waits
    run()
    result: int = late.counts().waits - before
    torch.accelerator.synchronize()
    return result


def on(where: str, tensor: Tensor) -> Tensor:
    return tensor if where == "host" else tensor.to(where)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_step_waits_for_what_comes_from_the_host_only(checkpoint: str) -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
    layers[1].append(nn.BatchNorm1d(4))
    layers[2].append(Keeps("data"))
    layers[3].register_buffer("mask", torch.ones(2**17))  # A large one is compared once.
    options: Any = {"devices": DEVICES, "chunks": M, "checkpoint": checkpoint, "loss_fn": F.mse_loss}
    model = GPipe(nn.Sequential(*layers), [2, 2], **options)
    x, y = torch.randn(ROWS, 4), torch.randn(ROWS, 4)
    assert waits(lambda: model.step(x, y)) == 2
    here, there = x.to("late:0"), y.to("late:1")
    assert waits(lambda: model.step(here, there)) == 0
    assert waits(lambda: model(here).sum().backward()) == 0


def counting(**options: Any) -> Any:
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    loss_fn = nn.CrossEntropyLoss()
    if options:
        return GPipe(layers, [2, 2], devices=DEVICES, chunks=M, loss_fn=loss_fn, **options)
    return torchgpipe.pipelined(layers, torch.randn(ROWS, 4), devices=DEVICES, chunks=M, loss_fn=loss_fn)


@pytest.mark.parametrize("where", ["host", "late:1"])
@pytest.mark.parametrize("options", [{}, {"weight": lambda y: (y != -100).sum()}], ids=["pipelined", "weights"])
def test_targets_are_counted_at_once_and_before_they_move(where: str, options: dict[str, Any]) -> None:
    """The host waited for the weight of each micro-batch. On the host there is nothing to wait for."""
    model = counting(**options)
    x, y = torch.randn(ROWS, 4), on(where, torch.randint(4, (ROWS,)))
    assert waits(lambda: model.step(x, target=y)) == 2, "the input, and the target or the weights"


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(4)])
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "table": self.embedding.weight.detach() * 1, "zero": (loss * 0).long(), "logits": logits}


@pytest.mark.parametrize("where", ["host", "late:0"])
def test_labels_are_counted_before_they_move(where: str) -> None:
    """They were counted one micro-batch at a time, in the midst of forward and backward, and copied in many pieces."""
    model: Any = torchgpipe.pipelined(
        LanguageModel(), {"input_ids": torch.arange(12).view(2, 6), "labels": torch.ones(2, 6).long()},
        devices=DEVICES, chunks=M,
    )  # fmt: skip
    ids = torch.randint(16, (ROWS, 6))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    batch = {"input_ids": on(where, ids), "labels": on(where, labels)}
    arriving = 2 if where == "host" else 1  # Each argument at once, or the counts.
    assert waits(lambda: model.step(**batch)) == arriving
    # Outputs that must be equal in all micro-batches are compared: each once.
    assert waits(lambda: model(**batch)["loss"].backward()) == arriving + 2
