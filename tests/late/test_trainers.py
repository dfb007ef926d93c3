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
def test_with_the_last_partition_on_its_device_a_trainer_trains_as_the_plain_model(
    kind: Any, recomputes: bool, tmp_path: Path
) -> None:
    """Losses, labels and masks are where a Trainer has them, without a copy."""
    options: dict[str, Any] = {"activation_checkpointing": recomputes}
    trainer, losses = fit(kind, over(["late:1", "late:0"]), tmp_path, **options)
    assert trainer.args.device == torch.device("late:0") and trainer.is_model_parallel
    plain, expected = fit(transformers.Trainer, llama(), tmp_path, **options)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    ours, theirs = ({name: value.cpu() for name, value in one.model.state_dict().items()} for one in (trainer, plain))
    assert_close(ours, theirs, 1e-5)


def test_the_trainer_of_transformers_refuses_a_loss_on_another_device(tmp_path: Path) -> None:
    """The pages say what to do; the PipelineTrainer brings the loss back itself."""
    with pytest.raises(ValueError, match="Calculated loss must be on the original device"):
        fit(transformers.Trainer, over(["late:0", "late:1"]), tmp_path)
    _, losses = fit(PipelineTrainer, over(["late:0", "late:1"]), tmp_path)
    assert len(losses) == 3


def test_generated_tokens_are_where_the_prompt_is() -> None:
    late.load()
    ids = torch.randint(3, 32, (2, 5), generator=torch.Generator().manual_seed(0))
    expected = llama().eval().generate(ids, max_new_tokens=6, do_sample=False)
    with pytest.warns(UserWarning, match="with a cache, as in generate"):
        tokens = over(["late:1", "late:0"]).eval().generate(ids.to("late:0"), max_new_tokens=6, do_sample=False)
    assert tokens.device == torch.device("late:0") and torch.equal(tokens.cpu(), expected)
