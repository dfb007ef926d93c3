"""The Trainers of transformers and Lightning in two processes, each with a pipelined model, over gloo.

What DistributedDataParallel itself does around a pipelined model is in `tests/practice/test_ddp.py`.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.launch import launch
from tests.pipelined.helpers import assert_close, gpt2, in_pipeline, llama, losses_in_float64

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
    ),
    pytest.mark.slow,
]

WORLD = 2
CLIENTS = ["tests.pipelined.test_trainer"] + ["tests.pipelined.test_lightning"] * bool(
    importlib.util.find_spec("lightning")
)


@contextmanager
def as_torchrun_has_it() -> Iterator[None]:
    """Set the variables by which clients know their rank; the group is there already."""
    rank = str(dist.get_rank())
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}
    settings |= {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def both_trainers() -> None:
    warnings.simplefilter("error")
    with losses_in_float64(), as_torchrun_has_it(), tempfile.TemporaryDirectory() as folder:
        the_trainer_of_transformers_trains(Path(folder))
        if importlib.util.find_spec("lightning"):
            lightning_trains(Path(folder))


def the_trainer_of_transformers_trains(folder: Path) -> None:
    """Each process has a part of the rows, and the losses are averaged over the tokens."""
    from tests.pipelined.test_trainer import assert_logged, trainer_of

    trained = []
    for model in (in_pipeline(gpt2()), gpt2()):
        options = {"ddp_find_unused_parameters": False, "gradient_accumulation_steps": 2}
        trained.append(trainer_of(model, "gpt2", folder, count=32, **options))
        trained[-1].train()
        assert isinstance(trained[-1].model_wrapped, DistributedDataParallel)
    assert_logged(*trained, "loss", "grad_norm")
    assert_close(trained[0].model.state_dict(), trained[1].model.state_dict())


def lightning_trains(folder: Path) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    from tests.pipelined.test_lightning import Task, fit

    warnings.filterwarnings("ignore", message="`isinstance.treespec, LeafSpec.` is deprecated")
    warnings.filterwarnings("ignore", message="The '.*_dataloader' does not have many workers")
    warnings.filterwarnings("ignore", message="It is recommended to use `self.log.*sync_dist=True")
    tasks = [Task(in_pipeline(llama())), Task(llama())]
    for task in tasks:
        fit(task, folder, devices=WORLD, strategy=DDPStrategy(process_group_backend="gloo"))
    assert tasks[0].losses == pytest.approx(tasks[1].losses, abs=1e-9)
    assert_close(tasks[0].state_dict(), tasks[1].state_dict())


def test_two_processes() -> None:
    launch(WORLD, both_trainers, timeout=60, limit=200, imports=CLIENTS)
