"""Loops with accelerate around a pipelined model: prepare, mixed precision, accumulation, clipping, saved state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.pipelined.helpers import assert_close, collate, counted_calls, gradients, in_pipeline, llama, rows, sample

pytest.importorskip("transformers", minversion="5")
accelerate = pytest.importorskip("accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("losses_in_float64")]


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    """Forget the settings of earlier tests and Trainers, which all accelerators of a process share, and our own."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Loop:
    """A training loop with accelerate, as its documentation has it.

    Args:
        model: the model
        clip: the greatest norm of the gradients, or None
        options: settings of the Accelerator
    """

    def __init__(self, model: nn.Module, clip: float | None = None, **options: Any) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        self.clip = clip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = DataLoader(rows("llama", 18), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def epoch(self) -> list[float]:
        """Train on four batches of four rows and one of two, and return the losses and the norms of the gradients."""
        said = []
        self.model.train()
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                said.append(loss.item())
                self.accelerator.backward(loss)
                if self.clip is not None and self.accelerator.sync_gradients:
                    said.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return said

    def predictions(self) -> torch.Tensor:
        """Return all predictions; the last batch has two rows only."""
        self.model.eval()
        seen = []
        for batch in self.loader:
            with torch.no_grad():
                outputs = self.model(**batch)
            seen.append(self.accelerator.gather_for_metrics(outputs.logits.argmax(-1)))
        return torch.cat(seen)


@pytest.mark.parametrize(("steps", "clip"), [(1, None), (2, 0.1)])
def test_training_and_evaluation(steps: int, clip: float | None) -> None:
    """With two steps, gradients of two mini-batches are accumulated, and those of the last one stand alone."""
    model = in_pipeline(llama())
    ours, plain = loops = [Loop(one, clip, gradient_accumulation_steps=steps) for one in (model, llama())]
    assert ours.model is model and ours.accelerator.unwrap_model(ours.model) is model
    with counted_calls(model.model.layers[0]) as calls:
        losses = [loop.epoch() + loop.epoch() for loop in loops]
    assert calls == ([2] * 8 + [1, 1]) * 2, "the micro-batches of all batches"
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    assert_close(ours.model.state_dict(), plain.model.state_dict())
    predictions = [loop.predictions() for loop in loops]
    assert len(predictions[0]) == 18
    assert torch.equal(*predictions)


@pytest.mark.parametrize("keep", [True, False])
def test_bfloat16(keep: bool) -> None:
    """Autocast holds in each partition. A single micro-batch rounds as the plain model's mini-batch does.

    Accelerate puts a `forward` of its own on the model, and takes it off again.
    """
    model, plain = in_pipeline(llama(), chunks=1).float(), llama().float()
    loops = [Loop(one, mixed_precision="bf16") for one in (model, plain)]
    with counted_calls(model.model.layers[0]) as calls:
        assert loops[0].epoch() == loops[1].epoch()
    assert calls == [4] * 4 + [2]
    assert_close(model.state_dict(), plain.state_dict(), 0.0)

    ours, expected = (loop.accelerator.unwrap_model(loop.model, keep_fp32_wrapper=keep) for loop in loops)
    assert ours is model
    batch = sample("llama", 4)
    with counted_calls(model.model.layers[0]) as calls:
        assert_close(ours(**batch).logits, expected(**batch).logits, 0.0)
    assert calls == [4]


def test_bfloat16_in_micro_batches() -> None:
    """The loss is the mean over the labels of the micro-batches' losses, each computed in autocast."""
    model, plain = in_pipeline(llama()).float(), llama().float()
    loop = Loop(model, mixed_precision="bf16")
    batch = sample("llama", 4)
    parts = [{key: value[part] for key, value in batch.items()} for part in (slice(0, 2), slice(2, 4))]
    weights = [(part["labels"][:, 1:] != -100).sum() for part in parts]
    loop.accelerator.backward(loop.model(**batch).loss)
    for part, weight in zip(parts, weights):
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(**part).loss * (weight / sum(weights))
        expected.backward()
    # What the micro-batches add up to is rounded to float32.
    assert_close(gradients(model), gradients(plain), 1e-6)


def test_a_step_needs_an_autocast_of_its_own() -> None:
    """Accelerate puts its autocast around ``forward`` alone, so a step between it and ``prepare`` is in float32."""
    loop = Loop(in_pipeline(llama(), chunks=1).float(), mixed_precision="bf16")
    batch = sample("llama", 4)
    expected = loop.model(**batch).loss
    assert loop.model.step(**batch) != expected
    with loop.accelerator.autocast():
        assert loop.model.step(**batch) == expected


@pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")
def test_a_model_that_is_dispatched_already_is_refused(tmp_path: Path) -> None:
    """`from_pretrained(device_map=...)` leaves hooks that move what each layer is called with."""
    model = llama()
    accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "disk"}, offload_dir=tmp_path)
    with pytest.raises(TypeError, match="load the model without device_map"):
        in_pipeline(model)


def test_saved_state(tmp_path: Path) -> None:
    """A run goes on from what it saved, in a new model, and from what the plain model saved."""
    whole, plain = Loop(in_pipeline(llama())), Loop(llama())
    for loop, folder in ((whole, "ours"), (plain, "plain")):
        loop.epoch()
        loop.accelerator.save_state(str(tmp_path / folder))
    state = whole.accelerator.get_state_dict(whole.model)
    unwrapped = whole.accelerator.unwrap_model(whole.model)
    unwrapped.save_pretrained(tmp_path, state_dict=state, save_function=whole.accelerator.save)
    loaded = type(llama()).from_pretrained(tmp_path, dtype=torch.float64)
    assert_close(loaded.state_dict(), whole.model.state_dict(), 0.0)

    expected = whole.epoch()
    for folder in ("ours", "plain"):
        resumed = Loop(in_pipeline(llama()))
        resumed.accelerator.load_state(str(tmp_path / folder))
        assert resumed.epoch() == pytest.approx(expected, abs=1e-9)
        assert_close(resumed.model.state_dict(), whole.model.state_dict())
