"""The Trainer of transformers on a pipelined model: losses, weights and logs are those of the plain model's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipelined.helpers import MODELS, assert_close, collate, counted_calls, gpt2, in_pipeline, llama, rows

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("losses_in_float64")]


def trainer_of(
    model: nn.Module, name: str, folder: Path, count: int = 16, kind: Any = transformers.Trainer, **options: Any
) -> Any:
    """Return a Trainer for four steps of four rows; ``options`` are those of a Trainer and its TrainingArguments."""
    own = {key: options.pop(key) for key in ("compute_metrics", "compute_loss_func") if key in options}
    settings = {"max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    settings |= {"learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    settings |= {"disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False, **options}
    return kind(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=rows(name, count),
        eval_dataset=rows(name, 6, seed=1),
        data_collator=collate,
        **own,
    )


def logged(trainer: Any, *keys: str) -> dict[str, float]:
    """Return the logged numbers with these names."""
    log = trainer.state.log_history
    return {f"{key} of step {entry['step']}": float(entry[key]) for entry in log for key in keys if key in entry}


def assert_logged(ours: Any, plain: Any, *keys: str) -> None:
    """Assert equal logs. The Trainer sums losses in float32."""
    assert logged(plain, *keys)
    assert logged(ours, *keys) == pytest.approx(logged(plain, *keys), rel=1e-6)


def compare(name: str, folder: Path, kind: Any = transformers.Trainer, frozen: int = 0, **options: Any) -> Any:
    """Train the plain model and a pipelined one, the latter by ``kind``, and assert equal logs and equal weights.

    Args:
        frozen: the number of layers of a decoder that are not trained

    Returns:
        the Trainers, that of the pipelined model first
    """
    plain, ours = MODELS[name](), MODELS[name]()
    for model in (plain, ours) if frozen else ():
        model.model.layers[:frozen].requires_grad_(False)
    expected = trainer_of(plain, name, folder / "plain", **options)
    trainer = trainer_of(in_pipeline(ours), name, folder / "ours", kind=kind, **options)
    expected.train()
    trainer.train()
    assert trainer.model is ours
    assert_logged(trainer, expected, "loss", "grad_norm")
    assert_close(ours.state_dict(), plain.state_dict())
    return trainer, expected


#: What is trained, and with what settings.
SCENARIOS: dict[str, tuple[str, dict[str, Any]]] = {
    "an encoder and a decoder": ("t5", {}),
    # The last mini-batch of an epoch has a single row, which cannot be split.
    "tied weights, a ragged last batch": ("gpt2", {"count": 9, "num_train_epochs": 2, "max_steps": -1}),
    # The rows have different numbers of labels: a decoder's loss is their sum over all that are accumulated. The
    # Trainer gives their number to the encoder as well, which takes the mean of its rows nevertheless.
    "accumulation": ("llama", {"gradient_accumulation_steps": 3, "count": 24}),
    "accumulation, a mean of rows": ("bert", {"gradient_accumulation_steps": 3, "count": 24}),
    # Norms are logged as they are before clipping.
    "clipping": ("llama", {"max_grad_norm": 0.01, "optim": "sgd", "learning_rate": 10.0}),
    # The Trainer computes this loss from the logits, outside of the model.
    "smoothed labels": ("llama", {"label_smoothing_factor": 0.1}),
    "smoothed labels of rows": ("bert", {"label_smoothing_factor": 0.1}),
    "frozen layers": ("llama", {"frozen": 2}),
} | {
    # The model's own, switched on by the Trainer after the model has become a pipeline.
    f"checkpointing, {'' if reentrant else 'not '}reentrant": (
        "llama",
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": reentrant}},
    )
    for reentrant in (False, True)
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_training(scenario: str, tmp_path: Path) -> None:
    name, options = SCENARIOS[scenario]
    trainer, expected = compare(name, tmp_path, **options)
    if "accumulation" in scenario:
        assert trainer.model_accepts_loss_kwargs and expected.model_accepts_loss_kwargs, "by forward's signature"
    if scenario == "clipping":
        assert min(logged(trainer, "grad_norm").values()) > 0.01


def test_the_number_of_items_is_given_to_a_loss_of_the_user(tmp_path: Path) -> None:
    given: list[int] = []

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        given.append(int(num_items_in_batch))
        logits = outputs.logits[:, :-1].flatten(0, 1)
        summed = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return summed / num_items_in_batch

    compare("llama", tmp_path, compute_loss_func=loss)
    assert len(set(given)) > 1 and given[: len(given) // 2] == given[len(given) // 2 :]


@pytest.mark.parametrize("count", [1, 3])
def test_a_trainer_that_steps(count: int, tmp_path: Path) -> None:
    """Under a schedule a device holds the activations of fewer micro-batches than with `loss.backward()`."""

    class StepTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            model.train()
            with self.accelerator.autocast():
                loss: Tensor = model.step(**self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
                return loss

    options = {"gradient_accumulation_steps": count, "count": 24, "max_grad_norm": 0.1}
    trainer, expected = compare("llama", tmp_path, kind=StepTrainer, **options)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_evaluation(name: str, tmp_path: Path) -> None:
    """Six rows are evaluated in a batch of four and one of two, during training and after it."""

    def right(prediction: Any) -> dict[str, float]:
        scores = prediction.predictions
        scores = scores[0] if isinstance(scores, tuple) else scores
        return {"right": float((scores.argmax(-1) == prediction.label_ids).mean())}

    trainer, plain = compare(name, tmp_path, eval_strategy="steps", eval_steps=2, compute_metrics=right)
    assert_logged(trainer, plain, "eval_loss", "eval_right")
    ours, expected = (one.predict(rows(name, 5, seed=2)) for one in (trainer, plain))
    assert_close(torch.tensor(ours.label_ids), torch.tensor(expected.label_ids))
    both = [one.predictions if isinstance(one.predictions, tuple) else (one.predictions,) for one in (ours, expected)]
    assert_close(*(dict(enumerate(map(torch.tensor, predictions))) for predictions in both))


def test_saving_and_resuming(tmp_path: Path) -> None:
    """A run that is resumed in a new process's model ends like the run that never stopped.

    The checkpoints of the plain model and of the pipelined one are the same.
    """
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
    whole, plain = compare("llama", tmp_path, **options)
    for folder in ("ours", "plain"):
        resumed = in_pipeline(llama())
        trainer = trainer_of(resumed, "llama", tmp_path / "resumed", **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-2"))
        assert trainer.state.global_step == 4
        assert_close(resumed.state_dict(), plain.model.state_dict())

    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4", dtype=torch.float64)
    assert type(saved) is type(plain.model)
    assert_close(saved.state_dict(), whole.model.state_dict(), 0.0)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    # The greatest loss counts as the best, which is not the last one.
    options |= {"load_best_model_at_end": True, "greater_is_better": True, "save_total_limit": 1}
    trainer, plain = compare("gpt2", tmp_path, **options)
    assert trainer.state.best_global_step == plain.state.best_global_step < 4


def test_bfloat16_in_the_pipeline(tmp_path: Path) -> None:
    """With a single micro-batch nothing rounds differently, in autocast neither. The pipeline must not get lost."""
    plain, ours = llama().float(), in_pipeline(llama().float(), chunks=1)
    trainers = [trainer_of(model, "llama", tmp_path, bf16=True) for model in (ours, plain)]
    with counted_calls(ours.model.layers[0]) as calls:
        for trainer in trainers:
            trainer.train()
    assert calls == [4] * 4
    assert logged(trainers[0], "loss", "grad_norm") == logged(trainers[1], "loss", "grad_norm")
    assert_close(ours.state_dict(), plain.state_dict(), 0.0)


def test_dropout_does_not_depend_on_the_partitions(tmp_path: Path) -> None:
    trained = []
    for n in (1, 2, 3):
        model = in_pipeline(gpt2(dropout=0.2), partitions=n, devices=[f"cpu:{j}" for j in range(n)])
        trainer_of(model, "gpt2", tmp_path).train()
        trained.append(model.state_dict())
    assert_close(trained[1], trained[0])
    assert_close(trained[2], trained[0])
