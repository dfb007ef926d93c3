"""`model.step` of a decoder of transformers, as a loop that fine-tunes calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pipelined.helpers import (
    CHUNKS,
    TWO,
    assert_close,
    batch,
    counted_calls,
    gradients,
    in_pipeline,
    llama,
    sample,
)

pytest.importorskip("transformers", minversion="5")

from torchgpipe import pipelined

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("losses_in_float64")]


@pytest.fixture
def model() -> Any:
    """Return a pipelined decoder; nobody gave the mask with the sample."""
    arguments = {name: value for name, value in sample("llama").items() if name != "attention_mask"}
    return pipelined(llama(), arguments, chunks=CHUNKS, devices=TWO)


@pytest.mark.parametrize("length", [4, 7, 12])
def test_sequences_of_other_lengths_than_the_sample(length: int, model: Any) -> None:
    """Rows are padded, so they have different numbers of labels."""
    plain, arguments = llama(), batch("llama", length=length)
    loss = model.step(**arguments)
    expected = plain(**arguments).loss
    expected.backward()
    assert_close(loss, expected.detach())
    assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradient_checkpointing(when: str) -> None:
    """The model's own switch, which has two names, holds in training mode: layers run once more at backward."""
    model, plain = llama(), llama()
    switch = "activation_checkpointing_enable"
    switch = switch if hasattr(model, switch) else "gradient_checkpointing_enable"
    if when == "before":
        getattr(model, switch)()
    in_pipeline(model)
    if when == "after":
        getattr(model, switch)()
    with counted_calls(model.model.layers[1].mlp) as calls:
        model.train().step(**batch("llama"))
    assert len(calls) == 2 * CHUNKS
    plain(**batch("llama")).loss.backward()
    assert_close(gradients(model), gradients(plain))
    with counted_calls(model.model.layers[1].mlp) as calls, torch.no_grad():
        model.eval().step(**batch("llama"))
    assert len(calls) == CHUNKS
