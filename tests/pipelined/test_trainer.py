"""The Trainer of transformers on a pipelined model: losses, weights and logs are those of the plain model's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Devices
from tests.pipelined.helpers import CHUNKS, MODELS, assert_close, collate, counted_calls, gpt2, llama, rows, sample

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

from torchgpipe import pipelined  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("losses_in_float64")]

Change = Callable[[Any], Any]


def trainer_of(
    model: nn.Module, name: str, folder: Path, count: int = 16, kind: Any = transformers.Trainer, **options: Any
) -> Any:
    """Return a Trainer for four steps of four rows; ``options`` are those of a Trainer and its TrainingArguments."""
    own = {"compute_metrics", "compute_loss_func", "callbacks", "optimizers", "peft_config"}
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    settings |= {key: value for key, value in options.items() if key not in own}
    return kind(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=rows(name, count),
        eval_dataset=rows(name, 6, seed=1),
        data_collator=collate,
        **{key: value for key, value in options.items() if key in own},
    )


def logged(trainer: Any, *keys: str) -> dict[str, float]:
    """Return the logged numbers with these names."""
    log = trainer.state.log_history
    return {f"{key} of step {entry['step']}": float(entry[key]) for entry in log for key in keys if key in entry}


def assert_logged(ours: Any, plain: Any, *keys: str) -> None:
    """Assert equal logs. The Trainer sums losses in float32."""
    assert logged(plain, *keys)
    assert logged(ours, *keys) == pytest.approx(logged(plain, *keys), rel=1e-6)


def compare(
    name: str,
    devices: Devices,
    folder: Path,
    prepare: Change = lambda model: None,
    kind: Any = transformers.Trainer,
    **options: Any,
) -> Any:
    """Train the plain model and a pipelined one, the latter by ``kind``, and assert equal logs and equal weights.

    Returns:
        the Trainers, that of the pipelined model first
    """
    plain, ours = MODELS[name](), MODELS[name]()
    prepare(plain)
    prepare(ours)
    pipelined(ours, sample(name), chunks=CHUNKS, devices=devices(2))
    expected = trainer_of(plain, name, folder / "plain", **options)
    trainer = trainer_of(ours, name, folder / "ours", kind=kind, **options)
    expected.train()
    trainer.train()
    assert trainer.model is ours
    assert_logged(trainer, expected, "loss", "grad_norm")
    assert_close(ours.state_dict(), plain.state_dict())
    return trainer, expected


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, devices: Devices, tmp_path: Path) -> None:
    compare(name, devices, tmp_path)


def test_it_is_the_pipeline_that_runs(devices: Devices, tmp_path: Path) -> None:
    """Trainers wrap, move and unwrap models; the pipeline must not get lost on the way."""
    model = pipelined(llama(), sample("llama"), chunks=CHUNKS, devices=devices(2))
    with counted_calls(model.model.layers[0]) as calls:
        trainer_of(model, "llama", tmp_path, max_steps=2).train()
    assert calls == [2, 2] * 2, "two micro-batches of two rows in each of two steps"


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_accumulated_gradients(name: str, devices: Devices, tmp_path: Path) -> None:
    """The rows have different numbers of labels: a decoder's loss is their sum over all that are accumulated.

    The Trainer gives their number to this encoder as well, which takes the mean of its rows nevertheless.
    """
    trainer, expected = compare(name, devices, tmp_path, gradient_accumulation_steps=3, count=24)
    assert trainer.model_accepts_loss_kwargs and expected.model_accepts_loss_kwargs, "by forward's signature"


@pytest.mark.parametrize("count", [10, 9])
def test_a_ragged_last_batch(count: int, devices: Devices, tmp_path: Path) -> None:
    """The last mini-batch of an epoch has two rows, or a single one, which cannot be split."""
    compare("gpt2", devices, tmp_path, count=count, num_train_epochs=2, max_steps=-1)


def test_the_number_of_items_is_given_to_a_loss_of_the_user(devices: Devices, tmp_path: Path) -> None:
    given: list[int] = []

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        given.append(int(num_items_in_batch))
        logits = outputs.logits[:, :-1].flatten(0, 1)
        summed = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return summed / num_items_in_batch

    compare("llama", devices, tmp_path, compute_loss_func=loss)
    assert len(set(given)) > 1 and given[: len(given) // 2] == given[len(given) // 2 :]


@pytest.mark.parametrize("count", [1, 3])
def test_a_trainer_that_steps(count: int, devices: Devices, tmp_path: Path) -> None:
    """Under a schedule a device holds the activations of fewer micro-batches than with `loss.backward()`."""

    class StepTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            model.train()
            with self.accelerator.autocast():
                loss: Tensor = model.step(**self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
                return loss

    options = {"gradient_accumulation_steps": count, "count": 24, "max_grad_norm": 0.1}
    trainer, expected = compare("llama", devices, tmp_path, kind=StepTrainer, **options)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-6)


def test_clipping(devices: Devices, tmp_path: Path) -> None:
    """Logged norms are those before clipping."""
    trainer, _ = compare("llama", devices, tmp_path, max_grad_norm=0.01, optim="sgd", learning_rate=10.0)
    assert min(logged(trainer, "grad_norm").values()) > 0.01


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_label_smoothing(name: str, devices: Devices, tmp_path: Path) -> None:
    """The Trainer computes this loss from the logits, outside of the model."""
    compare(name, devices, tmp_path, label_smoothing_factor=0.1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, devices: Devices, tmp_path: Path) -> None:
    """The model's own, switched on by the Trainer after the model has become a pipeline."""
    options = {"use_reentrant": reentrant}
    compare("llama", devices, tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs=options)


def test_some_layers_are_frozen(devices: Devices, tmp_path: Path) -> None:
    compare("llama", devices, tmp_path, prepare=lambda model: model.model.layers[:2].requires_grad_(False))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_evaluation(name: str, devices: Devices, tmp_path: Path) -> None:
    """Six rows are evaluated in a batch of four and one of two, during training and after it."""

    def right(prediction: Any) -> dict[str, float]:
        scores = prediction.predictions
        scores = scores[0] if isinstance(scores, tuple) else scores
        return {"right": float((scores.argmax(-1) == prediction.label_ids).mean())}

    trainer, plain = compare(name, devices, tmp_path, eval_strategy="steps", eval_steps=2, compute_metrics=right)
    assert_logged(trainer, plain, "eval_loss", "eval_right")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    ours, expected = (one.predict(rows(name, 5, seed=2)) for one in (trainer, plain))
    assert_close(torch.tensor(ours.label_ids), torch.tensor(expected.label_ids))
    both = [one.predictions if isinstance(one.predictions, tuple) else (one.predictions,) for one in (ours, expected)]
    assert_close(*(dict(enumerate(map(torch.tensor, predictions))) for predictions in both))


def test_saving_and_resuming(devices: Devices, tmp_path: Path) -> None:
    """A run that is resumed in a new process's model ends like the run that never stopped."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
    whole, plain = compare("llama", devices, tmp_path, **options)

    for folder in ("ours", "plain"):  # whose checkpoints are the same
        resumed = pipelined(llama(), sample("llama"), chunks=CHUNKS, devices=devices(2))
        trainer = trainer_of(resumed, "llama", tmp_path / "resumed", **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-2"))
        assert trainer.state.global_step == 4
        assert_close(resumed.state_dict(), plain.model.state_dict())

    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4", dtype=torch.float64)
    assert type(saved) is type(plain.model)
    assert_close(saved.state_dict(), whole.model.state_dict(), 0.0)


def test_the_best_model_is_loaded_at_the_end(devices: Devices, tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    # The greatest loss counts as the best, which is not the last one.
    options |= {"load_best_model_at_end": True, "greater_is_better": True, "save_total_limit": 1}
    trainer, plain = compare("gpt2", devices, tmp_path, **options)
    assert trainer.state.best_global_step == plain.state.best_global_step < 4


def test_bfloat16(devices: Devices, tmp_path: Path) -> None:
    """With a single micro-batch nothing rounds differently, in autocast neither."""
    plain, ours = llama().float(), llama().float()
    pipelined(ours, sample("llama"), chunks=1, devices=devices(2))
    trainers = [trainer_of(model, "llama", tmp_path, bf16=True) for model in (ours, plain)]
    for trainer in trainers:
        trainer.train()
    assert logged(trainers[0], "loss", "grad_norm") == logged(trainers[1], "loss", "grad_norm")
    assert_close(ours.state_dict(), plain.state_dict(), 0.0)


def test_dropout_does_not_depend_on_the_partitions(devices: Devices, tmp_path: Path) -> None:
    trained = []
    for n in (1, 2, 3):
        model = pipelined(gpt2(dropout=0.2), sample("gpt2"), chunks=CHUNKS, partitions=n, devices=devices(n))
        trainer_of(model, "gpt2", tmp_path).train()
        trained.append(model.state_dict())
    assert_close(trained[1], trained[0])
    assert_close(trained[2], trained[0])
