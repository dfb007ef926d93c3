"""The Trainer of transformers, accelerate and Lightning on a pipelined model, beside the same on the plain model."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.launch import launch
from tests.pipelined.clients import (
    TaskThatSteps,
    accelerate,
    with_accelerate,
    with_lightning,
    with_transformers,
)
from tests.pipelined.helpers import CLOSE, MODELS, assert_close, counted_calls, in_pipeline, losses_in_float64, sample
from torchgpipe.integrations.transformers import PipelineTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("losses_in_float64"),
    # Lightning 2.6 asks PyTorch 2.13 in an old way.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    # It would rather load data in other processes.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]

llama = MODELS["llama"]
Fit = Callable[..., dict[str, list[float]]]
WORLD = 2


def assert_fitted_alike(
    fit: Fit, folder: Path, ours: Any, plain: Any, tolerance: float = CLOSE, chunks: int = 2, **options: Any
) -> None:
    """Assert equal logs and equal weights, and that the pipeline does not get lost when it is moved and wrapped."""
    logs, calls = [], []
    for model, own in ((ours, folder / "ours"), (plain, folder / "plain")):
        layer = next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0]
        with counted_calls(layer) as rows:
            logs.append(fit(model, own, model.config.model_type, **options))
        calls.append(rows)
    assert max(calls[1]) == 4 and max(calls[0]) == 4 // chunks and sum(calls[0]) == sum(calls[1])
    assert logs[0].keys() == logs[1].keys()
    for key, expected in logs[1].items():
        # Some trainers sum losses in float32.
        assert logs[0][key] == pytest.approx(expected, rel=1e-6), key
    assert_close(ours.state_dict(), plain.state_dict(), tolerance)


def right(prediction: Any) -> dict[str, float]:
    scores = prediction.predictions
    scores = scores[0] if isinstance(scores, tuple) else scores
    return {"right": float((scores.argmax(-1) == prediction.label_ids).mean())}


EVALUATES: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "compute_metrics": right}
THRICE: dict[str, Any] = {"gradient_accumulation_steps": 3, "count": 24}
TWICE: dict[str, Any] = {"gradient_accumulation_steps": 2}

#: The trainer, the model, and settings of the trainer.
SCENARIOS: dict[str, tuple[Fit, str, dict[str, Any]]] = {
    "an encoder and a decoder": (with_transformers, "t5", EVALUATES),
    # The last mini-batch of an epoch has a single row, which cannot be split.
    "a ragged last batch": (with_transformers, "gpt2", {"count": 9, "num_train_epochs": 2, "max_steps": -1}),
    # The rows have different numbers of labels: a decoder's loss is their sum over all that are accumulated. The
    # Trainer gives their number to the encoder as well, which takes the mean of its rows nevertheless.
    "accumulation": (with_transformers, "llama", THRICE | EVALUATES),
    "accumulation, a mean of rows": (with_transformers, "bert", THRICE),
    # Norms are logged as they are before clipping.
    "accumulation, windows in a step, clipped": (
        with_transformers,
        "llama",
        {**THRICE, "kind": PipelineTrainer, "max_grad_norm": 0.1, "chunks": 1},  # in micro-batches of four rows
    ),
    # The Trainer computes this loss from the logits, outside of the model.
    "smoothed labels": (with_transformers, "bert", {"label_smoothing_factor": 0.1}),
    # The model's own, switched on by the Trainer after the model has become a pipeline.
    "checkpointing": (with_transformers, "llama", {"activation_checkpointing": True}),
    # The gradients of the last mini-batch stand alone.
    "accelerate, accumulated and clipped": (with_accelerate, "llama", {**TWICE, "clip": 0.1}),
    "Lightning, accumulated and clipped": (
        with_lightning,
        "llama",
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "Lightning, by steps": (with_lightning, "llama", {"kind": TaskThatSteps}),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_trainer_trains_as_it_trains_the_plain_model(scenario: str, tmp_path: Path) -> None:
    fit, name, options = SCENARIOS[scenario]
    assert_fitted_alike(fit, tmp_path, in_pipeline(MODELS[name]()), MODELS[name](), **options)


@pytest.mark.parametrize(
    ("fit", "options"),
    [
        (with_transformers, {"bf16": True}),
        (with_accelerate, {"mixed_precision": "bf16"}),
        (with_lightning, {"precision": "bf16-mixed"}),
    ],
)
def test_precision_as_a_setting(fit: Fit, options: dict[str, Any], tmp_path: Path) -> None:
    """With a single micro-batch nothing rounds differently, in autocast neither."""
    ours, plain = in_pipeline(llama(), chunks=1).float(), llama().float()
    assert_fitted_alike(fit, tmp_path, ours, plain, tolerance=0.0, chunks=1, **options)
    assert next(ours.parameters()).dtype == torch.float32


@pytest.mark.parametrize("fit", [with_transformers, with_accelerate, with_lightning])
def test_a_run_goes_on_from_a_checkpoint_of_either_model(fit: Fit, tmp_path: Path) -> None:
    """It ends like the run that never stopped. Checkpoints have the plain model's names."""
    whole = llama()
    fit(whole, tmp_path)
    for name, saving in (("ours", in_pipeline(llama())), ("plain", llama())):
        fit(saving, tmp_path, save=tmp_path / name)
    for name, resumed in (("plain", in_pipeline(llama())), ("ours", llama())):
        fit(resumed, tmp_path, resume=tmp_path / name)
        assert_close(resumed.state_dict(), whole.state_dict())


def test_a_step_needs_an_autocast_of_its_own() -> None:
    """Accelerate puts its autocast around ``forward`` alone, so a step between it and ``prepare`` is in float32."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(in_pipeline(llama(), chunks=1).float())
    batch = sample("llama", 4)
    expected = model(**batch).loss
    assert model.step(**batch) != expected
    with accelerator.autocast():
        assert model.step(**batch) == expected


@pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")
def test_a_model_that_is_dispatched_already_is_refused(tmp_path: Path) -> None:
    """`from_pretrained(device_map=...)` leaves hooks that move what each layer is called with."""
    model = llama()
    accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "disk"}, offload_dir=tmp_path)
    with pytest.raises(TypeError, match="load the model without device_map"):
        in_pipeline(model)


# ------------------------------------------------------------------------------------------------------- two processes


def fit_in_two_processes() -> bool:
    """Each process has a part of the rows, and the losses are averaged over the tokens.

    What DistributedDataParallel itself does around a pipelined model is in `tests/practice/test_ddp.py`.
    """
    warnings.simplefilter("error")
    rank = str(dist.get_rank())
    # By these, clients know their rank; the group is there already.
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"ddp_find_unused_parameters": False, "count": 32, **TWICE}
    with losses_in_float64(), tempfile.TemporaryDirectory() as folder:
        gpt2 = MODELS["gpt2"]
        assert_fitted_alike(with_transformers, Path(folder), in_pipeline(gpt2()), gpt2(), **options)
    return True


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_two_processes() -> None:
    assert launch(WORLD, fit_in_two_processes, timeout=60, limit=200) == [True] * WORLD
