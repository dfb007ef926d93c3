"""A LightningModule around a pipelined model, fitted by Lightning's Trainer, beside the same around the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.pipelined.helpers import CLOSE, assert_close, collate, counted_calls, in_pipeline, llama, rows

pytest.importorskip("transformers", minversion="5")
lightning = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("losses_in_float64"),
    # Lightning 2.6 asks PyTorch 2.13 in an old way.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    # It would rather load data in other processes.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]


class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Training and validation of a language model, as in Lightning's documentation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        self.log("loss", loss, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        loss = self.model(**batch).loss
        self.validated.append(loss.item())
        self.log("validation_loss", loss, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OwnSteps(Task):
    """The same, with the optimizer in the hands of the module, and backward under a schedule where there is one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if hasattr(self.model, "step"):
            loss = self.model.step(**batch)
        else:
            loss = self.model(**batch).loss
            self.manual_backward(loss)
        self.losses.append(loss.item())
        optimizer.step()
        self.lr_schedulers().step()


def loader(seed: int) -> DataLoader[Any]:
    return DataLoader(rows("llama", 10, seed=seed), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]


def fit(task: Task, folder: Path, resume: Path | None = None, **options: Any) -> Any:
    """Fit for two epochs, each with two batches of four rows and one of two, and validate after each."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "num_sanity_val_steps": 0} | quiet
    settings |= {"enable_checkpointing": False} | options
    trainer = lightning.Trainer(default_root_dir=folder, **settings)
    trainer.fit(task, loader(0), loader(1), ckpt_path=resume)
    return trainer


#: The kind of task, and the settings of the Trainer.
SCENARIOS: dict[str, tuple[type[Task], dict[str, Any]]] = {
    "plain": (Task, {}),
    "accumulated and clipped gradients": (Task, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "backward in the module, under a schedule": (OwnSteps, {}),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fit(scenario: str, tmp_path: Path) -> None:
    """Lightning moves and wraps models; the pipeline must not get lost on the way."""
    kind, options = SCENARIOS[scenario]
    ours, plain = tasks = [kind(in_pipeline(llama())), kind(llama())]
    with counted_calls(ours.model.model.layers[0]) as calls:
        trainers = [fit(one, tmp_path, **options) for one in tasks]
    assert calls == [2, 2, 2, 2, 1, 1] * 4, "each batch of an epoch, and of its validation"
    assert ours.losses == pytest.approx(plain.losses, abs=1e-9)
    assert ours.validated == pytest.approx(plain.validated, abs=1e-9)
    assert trainers[0].callback_metrics.keys() == trainers[1].callback_metrics.keys()
    assert_close(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize(("precision", "chunks", "tolerance"), [("64-true", 2, CLOSE), ("bf16-mixed", 1, 0.0)])
def test_precision_as_a_setting(precision: str, chunks: int, tolerance: float, tmp_path: Path) -> None:
    """Lightning casts the model, and computes with its own default type of numbers, or in autocast.

    A single micro-batch rounds as the plain model's mini-batch does.
    """
    ours, plain = Task(in_pipeline(llama(), chunks=chunks).float()), Task(llama().float())
    for task in (ours, plain):
        fit(task, tmp_path, precision=precision)
    assert next(ours.parameters()).dtype == (torch.float64 if precision == "64-true" else torch.float32)
    assert_close(ours.state_dict(), plain.state_dict(), tolerance)


def test_resuming_from_a_checkpoint(tmp_path: Path) -> None:
    """Checkpoints have the plain model's names: each of the two goes on from the other's."""
    whole = Task(llama())
    fit(whole, tmp_path)
    for name, model in (("ours", in_pipeline(llama())), ("plain", llama())):
        path = tmp_path / f"{name}.ckpt"
        fit(Task(model), tmp_path, max_epochs=1).save_checkpoint(path)
        resumed = Task(in_pipeline(llama()))
        fit(resumed, tmp_path, resume=path)
        assert resumed.losses == pytest.approx(whole.losses[3:], abs=1e-9)
        assert_close(resumed.state_dict(), whole.state_dict())
        loaded = Task.load_from_checkpoint(path, model=llama(), weights_only=True)
        assert_close(loaded.state_dict(), torch.load(path, weights_only=True)["state_dict"], 0.0)


def test_averaged_weights_and_saved_models(tmp_path: Path) -> None:
    """Lightning's callback copies the whole module to average its weights, and another writes checkpoints."""
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

    averages = []
    for task, name in ((Task(in_pipeline(llama())), "ours"), (Task(llama()), "plain")):
        saves = ModelCheckpoint(dirpath=tmp_path / name, save_last=True, monitor="validation_loss")
        fit(task, tmp_path, callbacks=[EMAWeightAveraging(decay=0.9), saves], enable_checkpointing=True)
        averages.append(task.state_dict())
        assert (tmp_path / name / "last.ckpt").exists()
    assert_close(*averages)


def test_the_summary_names_the_layers() -> None:
    from lightning.pytorch.utilities.model_summary import ModelSummary

    ours, plain = (str(ModelSummary(Task(model), max_depth=4)) for model in (in_pipeline(llama()), llama()))
    assert "LlamaForCausalLM" in ours
    assert ours == plain
