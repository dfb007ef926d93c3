"""Evaluation before training, and text generation: a pipeline that only runs forward, at any length."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from tests.conftest import Pipe
from tests.plain import assert_same, outcome, plain_outcome

sys.path.append(str(Path(torchgpipe.__file__).parent.parent / "examples"))
pytest.importorskip("tqdm")

from adapters import Block, Embedding, generate

OFF = [torch.inference_mode, torch.no_grad, nullcontext]


@pytest.fixture
def module() -> nn.Sequential:
    """Return a model that generates text and has dropout."""
    layers = [Embedding(8), Block(8), nn.Dropout(), Block(8), nn.Linear(8, 128)]
    return nn.Sequential(*layers).double()


def text(batch: int, time: int) -> Tensor:
    return torch.randint(128, (batch, time))


@pytest.mark.parametrize("off", OFF)
def test_training_and_evaluation_in_turns(
    pipe: Pipe, checkpoint: str, off: Callable[[], Any], module: nn.Sequential
) -> None:
    """Training does not fail on tensors that evaluation leaves behind, above all inference tensors.

    The first evaluation comes before any training.
    """
    module[2] = nn.BatchNorm1d(5).double()  # normalises over time, with buffers
    model = pipe(copy.deepcopy(module), [2, 2, 1], chunks=2, checkpoint=checkpoint)
    for _ in range(2):
        for each in [module, model]:
            each.eval()
        with off():
            for batch in (3, 1, 4):
                x = text(batch, 5)
                torch.testing.assert_close(model(x), module(x))
        for each in [module, model]:
            each.train()
        assert_same(outcome(model, x), plain_outcome(module, x, chunks=2))


def test_text_is_the_one_that_the_plain_model_writes(pipe: Pipe, module: nn.Sequential) -> None:
    """One character is generated at a time, from a prompt of batch size 1: every length occurs once."""
    model = pipe(copy.deepcopy(module), [2, 2, 1], chunks=4)
    written = ["".join(generate(each, "The ", 60, seed=0)) for each in [model, module]]
    assert len(written[0]) == 60
    assert written[0] == written[1]


def test_several_texts_at_once_until_each_ends(pipe: Pipe, module: nn.Sequential) -> None:
    """Finished texts leave the mini-batch, which becomes smaller than the number of micro-batches."""

    def write(model: nn.Module) -> list[list[int]]:
        done, texts = [], torch.arange(6)[:, None] + 65
        with torch.inference_mode():
            while len(texts):
                texts = torch.cat([texts, model(texts)[:, -1].argmax(1, keepdim=True)], dim=1)
                ended = (texts[:, -1] % 5 == 0) | (texts.shape[1] == 20) | (torch.arange(len(texts)) == 0)
                done += texts[ended].tolist()
                texts = texts[~ended]
        return done

    model = pipe(copy.deepcopy(module), [2, 2, 1], chunks=4).eval()
    assert write(model) == write(module.eval())
