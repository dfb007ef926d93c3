"""A window of accumulation in one step of the pipeline, beside the Trainer of transformers with the plain model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipelined.clients import transformers, with_transformers
from tests.pipelined.helpers import CLOSE, MODELS, TWO, assert_close, collate, rows
from torchgpipe import MicroBatches, pipelined
from torchgpipe.integrations.transformers import PipelineTrainer

pytestmark = pytest.mark.slow

llama, bert = MODELS["llama"], MODELS["bert"]


def uneven_rows(name: str, count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return rows of 4 to 11 tokens, which no batch can hold together without padding."""
    lengths = torch.randint(4, 12, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [rows(name, 1, length, seed=100 * seed + k)[0] for k, length in enumerate(lengths)]


def of_one_row(model: nn.Module) -> Any:
    """Pipeline a model whose mini-batches are never split."""
    batches = [collate([row]) for row in uneven_rows(model.config.model_type, 2, seed=9)]  # type: ignore[union-attr, arg-type]
    return pipelined(model, MicroBatches(batches), devices=TWO)


class Events(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Notes what a Trainer tells its callbacks, and stops it after some substep."""

    def __init__(self, stops_at: int | None) -> None:
        self.seen: list[tuple[str, int]] = []
        self._stops_at = stops_at

    def _note(self, name: str, state: Any) -> None:
        self.seen.append((name, state.global_step))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("begin", state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("substep", state)
        if len(self.seen) == self._stops_at:
            control.should_training_stop = control.should_save = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("end", state)


def fit(
    kind: Any,
    model: Any,
    folder: Path,
    *,
    stops_at: int | None = None,
    resume: str | None = None,
    scale: float = 0.0,
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """Train in windows of four batches of one row, five and a half of them an epoch; return the log and the events."""
    settings: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 8}
    settings |= {"learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True}
    settings |= {"disable_tqdm": True, "dataloader_pin_memory": False, "per_device_eval_batch_size": 1}
    name, events = model.config.model_type, Events(stops_at)
    trainer = kind(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **settings | options),
        train_dataset=uneven_rows(name, 22),
        eval_dataset=uneven_rows(name, 3, seed=1),
        data_collator=collate,
        callbacks=[events],
    )
    if scale:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)  # as fp16=True has it on a GPU
    trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    logged = ("loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "num_input_tokens_seen", "total_flos")
    return [entry[key] for entry in trainer.state.log_history for key in logged if key in entry], events.seen


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    targets = {"target_modules": ["q_proj", "v_proj", "up_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM", **targets))


def without_counts(model: Any) -> Any:
    model.accepts_loss_kwargs = False  # Then the Trainer averages the losses of a window, whatever their labels are.
    return model


def in_float32(model: Any) -> Any:
    return model.float()


#: What a model is made into, settings, and how far weights may be apart. Products of MKL in float32 round by the place
#: of their factors in memory, and one bit of bfloat16 is 2**-8.
TRAINED: dict[str, tuple[Callable[[Any], Any], dict[str, Any], float]] = {
    "float64": (
        lambda model: model,
        {"eval_strategy": "steps", "eval_steps": 5, "include_num_input_tokens_seen": "all"},
        CLOSE,
    ),
    "float64, a mean of batches": (without_counts, {}, CLOSE),
    "float32, scaled": (in_float32, {"max_grad_norm": 0.0, "scale": 1024.0}, 1e-4),
    "autocast": (in_float32, {"bf16": True}, 1e-2),
    "LoRA, bfloat16": (lambda model: lora(model.bfloat16()), {}, 2e-2),
}


@pytest.mark.parametrize("trained", TRAINED)
def test_a_window_trains_as_by_the_trainer(trained: str, tmp_path: Path) -> None:
    """Rows have lengths of their own, and the last window of an epoch has two of them instead of four."""
    make, options, tolerance = TRAINED[trained]
    ours, plain = of_one_row(make(llama())), make(llama())
    log, events = fit(PipelineTrainer, ours, tmp_path, **options)
    expected, told = fit(transformers.Trainer, plain, tmp_path, **options)
    assert events == told
    assert log == pytest.approx(expected, rel=max(1e-5, 10 * tolerance))
    assert_close(ours.state_dict(), plain.state_dict(), tolerance)


def test_a_run_goes_on_after_it_was_stopped_in_the_midst_of_a_window(tmp_path: Path) -> None:
    """The window is trained from its beginning, with the random numbers that it would have had."""

    def model() -> Any:
        return of_one_row(llama(attention_dropout=0.2))

    whole, stopped, resumed = model(), model(), model()
    options = {"max_steps": 8, "save_total_limit": 1}
    fit(PipelineTrainer, whole, tmp_path, **options)
    # Of a window of four, events are: begin, three substeps, end. The seventh window has two rows, in the next epoch.
    _, events = fit(PipelineTrainer, stopped, tmp_path, stops_at=13, **options)
    assert events[-3:] == [("begin", 2), ("substep", 2), ("substep", 2)]
    assert not any(parameter.grad is not None for parameter in stopped.parameters())
    fit(PipelineTrainer, resumed, tmp_path, resume="checkpoint-2", **options)
    assert_close(resumed.state_dict(), whole.state_dict())


def test_a_mean_of_rows_is_that_of_the_window(tmp_path: Path) -> None:
    """The Trainer gives BERT the number of labels, which it ignores, and adds up the means of a window's batches."""
    ours, plain = pipelined(bert(), collate(rows("bert", 2)), chunks=2, devices=TWO), bert()
    window: dict[str, Any] = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
    log = with_transformers(ours, tmp_path, "bert", kind=PipelineTrainer, count=24, **window)
    expected = with_transformers(plain, tmp_path, "bert", per_device_train_batch_size=6, count=24)
    assert log["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert_close(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "no use for \\['label_smoothing_factor'\\]"),
        ({"compute_loss_func": lambda *args, **options: 0}, "no use for \\['compute_loss_func'\\]"),
        ({"optim": "lomo"}, "no use for \\['optim=lomo'\\]"),
        ({}, "no use for \\['compute_loss'\\]"),
        ({"model": bert()}, "takes a pipelined model, but got BertForSequenceClassification"),
    ],
)
def test_what_the_step_would_leave_out_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    class Other(PipelineTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    own = {name: options.pop(name) for name in ("compute_loss_func", "model") if name in options}
    kind = PipelineTrainer if own or options else Other
    settings = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **options)
    with pytest.raises((TypeError, ValueError), match=message):
        kind(**{"model": of_one_row(bert()), **own}, args=settings)


def test_a_launcher_of_processes_is_refused_with_one_process_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun accelerate wraps the model of a single process, too, which had no attribute ``step`` then."""
    mode = transformers.training_args.ParallelMode.DISTRIBUTED
    monkeypatch.setattr(transformers.TrainingArguments, "parallel_mode", property(lambda _: mode))
    settings = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match=r"no use for \['torchrun, processes: 1'\]"):
        PipelineTrainer(of_one_row(bert()), settings)
