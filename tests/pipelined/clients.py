"""The trainers of the clients' libraries, each as a function that trains a model of `helpers` and returns its log.

    fit(model, folder, name="llama", save=None, resume=None, **options)

trains for some steps, most of them with four rows. It leaves a checkpoint of the first half under ``save``, or begins
at the one under ``resume``. The options are settings of the trainer. What is logged is a list of numbers for each name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader

from tests.pipelined.helpers import collate, rows

transformers = pytest.importorskip("transformers", minversion="5")
accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")

__all__ = [
    "Task",
    "TaskThatSteps",
    "accelerate",
    "transformers",
    "with_accelerate",
    "with_lightning",
    "with_transformers",
]

# --------------------------------------------------------------------------------------------------------- transformers


def with_transformers(
    model: nn.Module,
    folder: Path,
    name: str = "llama",
    *,
    save: Path | None = None,
    resume: Path | None = None,
    kind: Any = transformers.Trainer,
    count: int = 16,
    **options: Any,
) -> dict[str, list[float]]:
    """Train for four steps on ``count`` rows, and evaluate; a plain model by the Trainer of transformers itself."""
    own = {"compute_metrics": options.pop("compute_metrics", None)}
    settings = {"max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    settings |= {"learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    settings |= {"disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    settings |= {"save_strategy": "steps", "save_steps": 2} if save else {}
    trainer = (kind if hasattr(model, "step") else transformers.Trainer)(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(save or folder), **settings | options),
        train_dataset=rows(name, count),
        eval_dataset=rows(name, 6, seed=1),
        data_collator=collate,
        **own,
    )
    trainer.train(resume_from_checkpoint=resume and str(resume / "checkpoint-2"))
    assert trainer.model is model
    trainer.evaluate(rows(name, 5, seed=2))
    log: dict[str, list[float]] = {"best": [trainer.state.best_global_step or 0]}
    for entry in trainer.state.log_history:
        for key in ("loss", "grad_norm", "eval_loss", "eval_right"):
            log.setdefault(key, []).extend([float(entry[key])] if key in entry else [])
    return log


# ----------------------------------------------------------------------------------------------------------- accelerate


def with_accelerate(
    model: nn.Module,
    folder: Path,
    name: str = "llama",
    *,
    save: Path | None = None,
    resume: Path | None = None,
    clip: float | None = None,
    **options: Any,
) -> dict[str, list[float]]:
    """Train for two epochs with accelerate, as its documentation has it, and evaluate.

    An epoch has four batches of four rows and one of two.
    """
    # All accelerators of a process share their settings.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, **options)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(rows(name, 18), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    prepared, optimizer, loader, scheduler = accelerator.prepare(
        model, made, data, LambdaLR(made, lambda step: 1 / (1 + step))
    )
    log: dict[str, list[float]] = {"loss": [], "norm": [], "predictions": []}
    if resume is not None:
        accelerator.load_state(str(resume))
    for epoch in range(0 if resume is None else 1, 2):
        prepared.train()
        for batch in loader:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                log["loss"].append(loss.item())
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    log["norm"].append(float(accelerator.clip_grad_norm_(prepared.parameters(), clip)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if epoch == 0 and save is not None:
            accelerator.save_state(str(save))
    prepared.eval()
    for batch in loader:
        with torch.no_grad():
            logits = prepared(**batch).logits
        log["predictions"] += accelerator.gather_for_metrics(logits.argmax(-1)).flatten().tolist()
    # Accelerate puts a `forward` of its own on the model, and takes it off again.
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    return log


# ------------------------------------------------------------------------------------------------------------ lightning


class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Training and validation of a language model, as in Lightning's documentation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.said: dict[str, list[float]] = {"loss": [], "validation_loss": []}

    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        return self.say("loss", self.model(**batch).loss)

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.say("validation_loss", self.model(**batch).loss)

    def say(self, name: str, loss: Tensor) -> Tensor:
        self.said[name].append(loss.item())
        self.log(name, loss, batch_size=4)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": CosineAnnealingLR(optimizer, 8), "interval": "step"},
        }


class TaskThatSteps(Task):
    """The same, with the optimizer in the hands of the module, and backward under a schedule where there is one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if hasattr(self.model, "step"):
            loss = self.model.step(**batch)
        else:
            loss = self.model(**batch).loss
            self.manual_backward(loss)
        self.say("loss", loss)
        optimizer.step()
        self.lr_schedulers().step()


def with_lightning(
    model: nn.Module,
    folder: Path,
    name: str = "llama",
    *,
    save: Path | None = None,
    resume: Path | None = None,
    kind: type[Task] = Task,
    **options: Any,
) -> dict[str, list[float]]:
    """Fit for two epochs, each with two batches of four rows and one of two, and validate after each."""
    task = kind(model)
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    settings |= {"max_epochs": 1 if save else 2}
    settings |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings |= {"enable_checkpointing": False}
    trainer = lightning.Trainer(default_root_dir=folder, **settings | options)
    loaders = [DataLoader(rows(name, 10, seed=seed), batch_size=4, collate_fn=collate) for seed in (0, 1)]  # type: ignore[arg-type]
    trainer.fit(task, *loaders, ckpt_path=resume and resume / "last.ckpt")
    if save is not None:
        trainer.save_checkpoint(save / "last.ckpt")
    return task.said
