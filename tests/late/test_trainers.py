"""The Trainer of transformers over two devices: it adds up losses on its own device, where the batches are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import late
from tests.pipelined.clients import transformers
from tests.pipelined.helpers import assert_close, collate, llama, rows, sample
from torchgpipe import pipelined
from torchgpipe.integrations.transformers import PipelineTrainer

pytestmark = pytest.mark.late


@pytest.fixture(autouse=True)
def _on_the_first_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a Trainer take the first of the accelerators, as it takes the first GPU."""
    state = pytest.importorskip("accelerate").state
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "late:0")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)


def fit(kind: Any, model: Any, folder: Path, **options: Any) -> Any:
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 1e-2, **options}
    settings |= {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    settings |= {"dataloader_pin_memory": False}
    data = {"train_dataset": rows("llama", 16), "eval_dataset": rows("llama", 4, seed=1), "data_collator": collate}
    trainer = kind(model, transformers.TrainingArguments(output_dir=str(folder), **settings), **data)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def over(devices: list[str]) -> Any:
    return pipelined(llama(), sample("llama"), chunks=2, devices=devices)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", [transformers.Trainer, PipelineTrainer])
@pytest.mark.parametrize("devices", [["late:0", "late:1"], ["late:1", "late:0"]])
def test_a_trainer_trains_as_the_plain_model(devices: list[str], kind: Any, recomputes: bool, tmp_path: Path) -> None:
    """The Trainer of transformers once refused a loss that was not on its own device, that of the batches."""
    options: dict[str, Any] = {"activation_checkpointing": recomputes}
    trainer, losses = fit(kind, over(devices), tmp_path, **options)
    assert trainer.args.device == torch.device("late:0") and trainer.is_model_parallel
    plain, expected = fit(transformers.Trainer, llama(), tmp_path, **options)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    ours, theirs = ({name: value.cpu() for name, value in one.model.state_dict().items()} for one in (trainer, plain))
    assert_close(ours, theirs, 1e-5)


def test_numbers_are_where_the_batch_is_and_all_else_is_on_the_last_device() -> None:
    batch, model = sample("llama", 4), over(["late:0", "late:1"])
    model(**batch).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    output = model(**{name: value.to("late:0") for name, value in batch.items()})
    assert (output.loss.device, output.logits.device) == (torch.device("late:0"), torch.device("late:1"))
    output.loss.backward()
    assert_close({name: parameter.grad for name, parameter in model.named_parameters()}, expected, 0.0)
    assert model(**batch).loss.device == torch.device("late:1"), (
        "a batch on the host leaves its loss on the last device"
    )


def test_generated_tokens_are_where_the_prompt_is() -> None:
    late.load()
    ids = torch.randint(3, 32, (2, 5), generator=torch.Generator().manual_seed(0))
    expected = llama().eval().generate(ids, max_new_tokens=6, do_sample=False)
    with pytest.warns(UserWarning, match="with a cache, as in generate"):
        tokens = over(["late:1", "late:0"]).eval().generate(ids.to("late:0"), max_new_tokens=6, do_sample=False)
    assert tokens.device == torch.device("late:0") and torch.equal(tokens.cpu(), expected)
