"""A LightningModule around a pipelined model, fitted by Lightning's Trainer, beside the same around the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.conftest import Devices
from tests.pipelined.helpers import CHUNKS, assert_close, collate, counted_calls, llama, rows, sample

pytest.importorskip("transformers", minversion="5")
lightning = pytest.importorskip("lightning")

from torchgpipe import pipelined  # noqa: E402

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


def in_pipeline(devices: Devices, chunks: int = CHUNKS) -> Any:
    return pipelined(llama(), sample("llama"), chunks=chunks, devices=devices(2))


def compare(devices: Devices, folder: Path, task: type[Task] = Task, **options: Any) -> Task:
    ours, plain = task(in_pipeline(devices)), task(llama())
    trainers = [fit(one, folder, **options) for one in (ours, plain)]
    assert ours.losses == pytest.approx(plain.losses, abs=1e-9)
    assert ours.validated == pytest.approx(plain.validated, abs=1e-9)
    assert trainers[0].callback_metrics.keys() == trainers[1].callback_metrics.keys()
    assert_close(ours.state_dict(), plain.state_dict())
    return ours


def test_fit(devices: Devices, tmp_path: Path) -> None:
    compare(devices, tmp_path)


def test_accumulated_and_clipped_gradients(devices: Devices, tmp_path: Path) -> None:
    compare(devices, tmp_path, accumulate_grad_batches=2, gradient_clip_val=0.1)


def test_double_precision_as_a_setting(devices: Devices, tmp_path: Path) -> None:
    """Lightning casts the model, and computes with its own default type of numbers."""
    ours, plain = Task(in_pipeline(devices).float()), Task(llama().float())
    for task in (ours, plain):
        fit(task, tmp_path, precision="64-true")
    assert next(ours.parameters()).dtype == torch.float64
    assert_close(ours.state_dict(), plain.state_dict())


def test_bfloat16(devices: Devices, tmp_path: Path) -> None:
    """A single micro-batch rounds as the plain model's mini-batch does, in autocast, too."""
    ours, plain = Task(in_pipeline(devices, chunks=1).float()), Task(llama().float())
    for task in (ours, plain):
        fit(task, tmp_path, precision="bf16-mixed")
    assert ours.losses == plain.losses
    assert_close(ours.state_dict(), plain.state_dict(), 0.0)


def test_it_is_the_pipeline_that_runs(devices: Devices, tmp_path: Path) -> None:
    """Lightning moves and wraps models; the pipeline must not get lost on the way."""
    task = Task(in_pipeline(devices))
    with counted_calls(task.model.model.layers[0]) as calls:
        fit(task, tmp_path, limit_val_batches=0)
    assert calls == [2, 2, 2, 2, 1, 1] * 2


def test_backward_in_the_module_and_under_a_schedule(devices: Devices, tmp_path: Path) -> None:
    compare(devices, tmp_path, OwnSteps)


def test_resuming_from_a_checkpoint(devices: Devices, tmp_path: Path) -> None:
    """Checkpoints have the plain model's names: each of the two goes on from the other's."""
    whole, plain = Task(in_pipeline(devices)), Task(llama())
    for task, name in ((whole, "ours"), (plain, "plain")):
        half = task.__class__(in_pipeline(devices) if name == "ours" else llama())
        fit(half, tmp_path, max_epochs=1).save_checkpoint(tmp_path / f"{name}.ckpt")
        fit(task, tmp_path)
    for name in ("ours", "plain"):
        resumed = Task(in_pipeline(devices))
        fit(resumed, tmp_path, resume=tmp_path / f"{name}.ckpt")
        assert resumed.losses == pytest.approx(whole.losses[3:], abs=1e-9)
        assert_close(resumed.state_dict(), plain.state_dict())

    loaded = Task.load_from_checkpoint(tmp_path / "ours.ckpt", model=llama(), weights_only=True)
    assert_close(loaded.state_dict(), half_of(tmp_path / "ours.ckpt"), 0.0)


def half_of(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return state


def test_averaged_weights_and_saved_models(devices: Devices, tmp_path: Path) -> None:
    """Lightning's callback copies the whole module to average its weights, and another writes checkpoints."""
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

    averages = []
    for task, name in ((Task(in_pipeline(devices)), "ours"), (Task(llama()), "plain")):
        saves = ModelCheckpoint(dirpath=tmp_path / name, save_last=True, monitor="validation_loss")
        fit(task, tmp_path, callbacks=[EMAWeightAveraging(decay=0.9), saves], enable_checkpointing=True)
        averages.append(task.state_dict())
        assert (tmp_path / name / "last.ckpt").exists()
    assert_close(*averages)


def test_the_summary_names_the_layers(devices: Devices, tmp_path: Path) -> None:
    from lightning.pytorch.utilities.model_summary import ModelSummary

    ours, plain = (str(ModelSummary(Task(model), max_depth=4)) for model in (in_pipeline(devices), llama()))
    assert "LlamaForCausalLM" in ours
    assert ours == plain
