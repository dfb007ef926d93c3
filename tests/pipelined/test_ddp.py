"""DistributedDataParallel and the Trainers of two processes around a pipelined model, over gloo.

Two processes run all of `CASES`, one after the other. Each has half of the rows of a
mini-batch; the reference is the plain model, in the same process, on both halves.
"""

from __future__ import annotations

import copy
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.launch import launch
from tests.pipelined.helpers import (
    CHUNKS,
    MODELS,
    assert_close,
    batch,
    counted_calls,
    gpt2,
    gradients,
    llama,
    losses_in_float64,
    sample,
)

pytest.importorskip("transformers", minversion="5")

from torchgpipe import pipelined

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
    ),
    pytest.mark.slow,
]

WORLD = 2
Batch = dict[str, Tensor]


def half(arguments: Batch, rank: int) -> Batch:
    return {key: value[rank::WORLD].contiguous() for key, value in arguments.items()}


class Trial:
    """A pipelined model in DDP on this process's rows, and the plain model on the rows of both.

    Args:
        devices: the devices of the pipeline
        name: the model, of `MODELS`
        prepare: changes both models before they are wrapped
        options: the options of DDP
    """

    def __init__(
        self,
        devices: list[str],
        name: str = "llama",
        prepare: Callable[[Any], Any] = lambda model: None,
        **options: Any,
    ) -> None:
        self.name, self.plain, self.inner = name, MODELS[name](), MODELS[name]()
        prepare(self.plain)
        prepare(self.inner)
        pipelined(self.inner, sample(name), chunks=CHUNKS, devices=devices)
        self.model = DistributedDataParallel(self.inner, **options)
        self.reduced: list[int] = []
        self.model.register_comm_hook(None, self._reduce)

    # no annotations: DDP inspects them and cannot read strings
    def _reduce(self, _, bucket):  # type: ignore[no-untyped-def]
        self.reduced.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    def backward(self, seed: int = 0, rows: int = 8) -> None:
        """Run backward on this process's half, and the plain model on both, whose losses are averaged."""
        arguments = batch(self.name, rows, seed=seed)
        loss = self.model(**half(arguments, dist.get_rank())).loss
        loss.backward()
        for rank in range(WORLD):
            expected = self.plain(**half(arguments, rank)).loss
            (expected / WORLD).backward()
            if rank == dist.get_rank():
                assert_close(loss, expected)

    def check(self, buckets: bool = True) -> None:
        """Assert the gradients of the plain model, and one reduction of each bucket since the last check."""
        if buckets:
            assert self.reduced and sorted(self.reduced) == list(range(len(self.reduced))), self.reduced
        else:
            assert self.reduced == []
        self.reduced.clear()
        assert_close(gradients(self.inner), gradients(self.plain))

    def zero_grad(self) -> None:
        self.inner.zero_grad()
        self.plain.zero_grad()


# --------------------------------------------------------------------------------------- the cases, run by each process


def gradients_are_averaged(devices: list[str]) -> None:
    for name in MODELS:
        trial = Trial(devices, name)
        for step in range(3):
            trial.backward(step)
            trial.check()
            trial.zero_grad()


def it_is_the_pipeline_that_runs(devices: list[str]) -> None:
    trial = Trial(devices)
    with counted_calls(trial.inner.model.layers[0]) as calls:
        trial.backward()
    assert calls == [2, 2]


def buckets_are_small(devices: list[str]) -> None:
    """With many buckets, a reduction begins while the pipeline is at work; views of buckets are the gradients."""
    for options in ({"bucket_cap_mb": 0.001}, {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}):
        trial = Trial(devices, **options)
        for step in range(3):
            trial.backward(step)
            trial.check()
            trial.zero_grad()


def mini_batches_differ_in_size(devices: list[str]) -> None:
    trial = Trial(devices)
    for rows in (8, 2, 6):  # two rows: one for each process
        trial.backward(rows=rows)
        trial.check()
        trial.zero_grad()


def gradients_are_accumulated(devices: list[str]) -> None:
    trial = Trial(devices)
    for step in range(4):
        with trial.model.no_sync() if step % 2 == 0 else nullcontext():
            trial.backward(step)
        if step % 2:
            trial.check()
            trial.zero_grad()
        else:
            assert trial.reduced == []


def parts_are_frozen(devices: list[str]) -> None:
    def freeze_the_beginning(model: Any) -> None:
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[:3].requires_grad_(False)

    def freeze_every_other(model: Any) -> None:
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)

    for prepare in (freeze_the_beginning, freeze_every_other):
        trial = Trial(devices, prepare=prepare)
        for step in range(2):
            trial.backward(step)
            trial.check()
            trial.zero_grad()


def add_an_unused_layer(model: Any) -> None:
    torch.manual_seed(7)
    model.model.layers[1].mlp.unused = nn.Linear(3, 3).double()


def some_parameters_are_not_used(devices: list[str]) -> None:
    trial = Trial(devices, prepare=add_an_unused_layer, find_unused_parameters=True)
    for step in range(3):
        trial.backward(step)
        trial.check()
        trial.zero_grad()


def some_parameters_are_not_used_and_nobody_asks(devices: list[str]) -> None:
    """DDP would refuse the second forward of the plain model; in a pipeline the parameters get zeros."""
    trial = Trial(devices, prepare=add_an_unused_layer)
    for step in range(3):
        trial.backward(step)
        for model, zeros in ((trial.inner, True), (trial.plain, False)):
            for parameter in model.model.layers[1].mlp.unused.parameters():
                assert (parameter.grad is not None) == zeros
                assert parameter.grad is None or not parameter.grad.any()
                parameter.grad = None
        trial.check()
        trial.zero_grad()


def the_graph_is_static(devices: list[str]) -> None:
    trial = Trial(devices, static_graph=True)
    for step in range(3):
        trial.backward(step)
        assert_close(gradients(trial.inner), gradients(trial.plain))
        trial.zero_grad()


def hooks_of_parameters_run_once(devices: list[str]) -> None:
    """Each gradient passes them whole, and before it is averaged."""
    trial = Trial(devices)
    before: list[str] = []
    after: list[str] = []
    for name, parameter in trial.inner.named_parameters():
        parameter.register_hook(lambda _, name=name: before.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: after.append(name))
    for step in range(2):
        trial.backward(step)
        trial.check()
        trial.zero_grad()
        names = sorted(name for name, _ in trial.inner.named_parameters())
        assert sorted(before) == sorted(after) == names
        before.clear()
        after.clear()


def an_optimizer_keeps_both_processes_equal(devices: list[str]) -> None:
    trial = Trial(devices, "gpt2")
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (trial.inner, trial.plain)]
    for step in range(3):
        trial.backward(step)
        trial.check()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(trial.inner.state_dict(), trial.plain.state_dict())
    for parameter in trial.inner.parameters():
        both = [torch.empty_like(parameter) for _ in range(WORLD)]
        dist.all_gather(both, parameter.detach())
        assert torch.equal(*both), "to the last bit"


def the_model_evaluates(devices: list[str]) -> None:
    trial = Trial(devices)
    trial.model.eval()
    with torch.no_grad():
        mine = half(batch("llama", 8), dist.get_rank())
        assert_close(trial.model(**mine).logits, trial.plain(**mine).logits)
    trial.model.train()
    trial.backward()
    trial.check()


def the_layers_checkpoint_their_activations(devices: list[str]) -> None:
    for reentrant in (False, True):
        trial = Trial(devices)
        for model in (trial.inner, trial.plain):
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        for step in range(2):
            trial.backward(step)
            trial.check()
            trial.zero_grad()


def adapters_are_trained(devices: list[str]) -> None:
    if not _installed("peft"):
        return
    import peft

    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    arguments = batch("llama", 8)
    models = []
    for pipeline in (True, False):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "up_proj"])
        models.append(peft.get_peft_model(llama(), config).double())
        if pipeline:
            pipelined(models[0], sample("llama"), chunks=CHUNKS, devices=devices)
    ours, plain = models
    model = DistributedDataParallel(ours)
    model(**half(arguments, dist.get_rank())).loss.backward()
    for rank in range(WORLD):
        (plain(**half(arguments, rank)).loss / WORLD).backward()
    assert_close(gradients(ours), gradients(plain))


def the_trainer_of_transformers_trains(devices: list[str]) -> None:
    """As `torchrun` starts it: each process has a part of the rows, and the losses are averaged over the tokens."""
    if not _installed("accelerate"):
        return
    from tests.pipelined.test_trainer import assert_logged, trainer_of

    trained = []
    with as_torchrun_has_it(), tempfile.TemporaryDirectory() as folder:
        for pipeline in (True, False):
            model = gpt2()
            if pipeline:
                pipelined(model, sample("gpt2"), chunks=CHUNKS, devices=devices)
            options = {"ddp_find_unused_parameters": False, "gradient_accumulation_steps": 2}
            trained.append(trainer_of(model, "gpt2", Path(folder), count=32, **options))
            trained[-1].train()
            assert isinstance(trained[-1].model_wrapped, DistributedDataParallel)
    assert_logged(*trained, "loss", "grad_norm")
    assert_close(trained[0].model.state_dict(), trained[1].model.state_dict())


def lightning_trains(devices: list[str]) -> None:
    if not _installed("lightning"):
        return
    from lightning.pytorch.strategies import DDPStrategy

    from tests.pipelined.test_lightning import Task, fit

    warnings.filterwarnings("ignore", message="`isinstance.treespec, LeafSpec.` is deprecated")
    warnings.filterwarnings("ignore", message="The '.*_dataloader' does not have many workers")
    warnings.filterwarnings("ignore", message="It is recommended to use `self.log.*sync_dist=True")
    tasks = [Task(pipelined(llama(), sample("llama"), chunks=CHUNKS, devices=devices)), Task(llama())]
    with as_torchrun_has_it(), tempfile.TemporaryDirectory() as folder:
        for task in tasks:
            fit(task, Path(folder), devices=WORLD, strategy=DDPStrategy(process_group_backend="gloo"))
    assert tasks[0].losses == pytest.approx(tasks[1].losses, abs=1e-9)
    assert_close(tasks[0].state_dict(), tasks[1].state_dict())


def a_copy_is_wrapped_as_well(devices: list[str]) -> None:
    trial = Trial(devices)
    arguments = batch("llama", 8)
    copied = copy.deepcopy(trial.inner)
    model = DistributedDataParallel(copied)
    model(**half(arguments, dist.get_rank())).loss.backward()
    assert all(gradient is None for gradient in gradients(trial.inner).values())
    trial.backward()
    trial.check()
    assert_close(gradients(copied), gradients(trial.inner))


CASES: list[Callable[[list[str]], None]] = [
    gradients_are_averaged,
    it_is_the_pipeline_that_runs,
    buckets_are_small,
    mini_batches_differ_in_size,
    gradients_are_accumulated,
    parts_are_frozen,
    some_parameters_are_not_used,
    some_parameters_are_not_used_and_nobody_asks,
    the_graph_is_static,
    hooks_of_parameters_run_once,
    an_optimizer_keeps_both_processes_equal,
    the_model_evaluates,
    the_layers_checkpoint_their_activations,
    adapters_are_trained,
    a_copy_is_wrapped_as_well,
    the_trainer_of_transformers_trains,
    lightning_trains,
]


# -------------------------------------------------------------------------------------------------------- the processes


def _installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


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


def run_all() -> dict[str, str]:
    """Run all cases in one process, and return a report of each."""
    warnings.simplefilter("error")
    reports = {}
    with losses_in_float64():
        for case in CASES:
            try:
                case(["cpu:0", "cpu:1"])
                report = ""
            except BaseException:
                report = traceback.format_exc()
            reports[case.__name__] = report
            # If one process failed, the other would wait for it in vain.
            failed = torch.tensor([float(bool(report))])
            dist.all_reduce(failed)
            if failed.item():
                dist.barrier()
    return reports


@pytest.fixture(scope="module")
def reports() -> list[dict[str, str]]:
    """Return the reports of both processes."""
    return launch(WORLD, run_all, timeout=60, limit=200)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_processes(reports: list[dict[str, str]], case: Callable[[list[str]], None]) -> None:
    for rank, report in enumerate(reports):
        if report[case.__name__]:
            pytest.fail(f"process {rank}: {report[case.__name__]}", pytrace=False)
