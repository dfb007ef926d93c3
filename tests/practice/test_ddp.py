"""DistributedDataParallel around a pipeline: two processes on the CPU, over gloo.

The processes are started once. Each runs all of `CASES` on its half of the data and leaves a report per case, which
the tests read.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import torchgpipe
from torchgpipe import GPipe
from torchgpipe.batchnorm import mini_batch
from torchgpipe.model import data_parallel
from torchgpipe.pipe import Pipe, WithDevice

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
    ),
    pytest.mark.slow,
]

EXAMPLES = Path(torchgpipe.__file__).parent.parent / "examples"
WORLD = 2
CHUNKS = 3
BALANCE = [2, 1, 2]
DEVICES = {"inline": ["cpu"] * 3, "workers": ["cpu:0", "cpu:1", "cpu:2"]}
PAIRS = [("inline", "except_last"), ("workers", "always"), ("workers", "except_last"), ("workers", "never")]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    return layers.double()


def data(size: int, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.rand(2, size, 2, dtype=torch.float64, generator=generator)
    return x, y


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def gradients(layers: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in layers.named_parameters()}


def wrap_in_gpipe(layers: nn.Sequential, devices: list[str], checkpoint: str) -> GPipe:
    return GPipe(layers, BALANCE, devices=devices, chunks=CHUNKS, checkpoint=checkpoint)


def wrap_in_pipe(layers: nn.Sequential, devices: list[str], checkpoint: str) -> Pipe:
    places = [device for device, count in zip(devices, BALANCE) for _ in range(count)]
    return Pipe(nn.Sequential(*map(WithDevice, layers, places)), CHUNKS, checkpoint)


class Trial:
    """A pipeline in DDP, and the plain model in one process on the data of both.

    Args:
        devices: the devices of the pipeline
        checkpoint: the checkpoint mode of the pipeline
        prepare: changes the layers before they are wrapped
        wrap: makes the pipeline
        options: the options of DDP
    """

    def __init__(
        self,
        devices: list[str],
        checkpoint: str,
        prepare: Callable[[nn.Sequential], Any] = lambda layers: None,
        wrap: Callable[[nn.Sequential, list[str], str], GPipe] = wrap_in_gpipe,
        **options: Any,
    ) -> None:
        self.layers, self.plain = build(), build()
        prepare(self.layers)
        prepare(self.plain)
        self.model = DistributedDataParallel(wrap(self.layers, devices, checkpoint), **options)
        self.reduced: list[int] = []
        self.model.register_comm_hook(None, self._reduce)

    # no annotations: DDP inspects them and cannot read strings
    def _reduce(self, _, bucket):  # type: ignore[no-untyped-def]
        self.reduced.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    def step(self, x: Tensor, y: Tensor) -> None:
        """Run backward on this process's half, and on the plain model with all of the data."""
        mine = slice(dist.get_rank(), None, WORLD)
        output = self.model(x[mine])
        loss_of(output if isinstance(output, Tensor) else output.local_value(), y[mine]).backward()
        loss_of(self.plain(x), y).backward()

    def check(self) -> None:
        """Assert the gradients of the plain model, and one reduction of each bucket since the last check."""
        assert self.reduced and sorted(self.reduced) == list(range(len(self.reduced))), self.reduced
        self.reduced.clear()
        for name, expected in gradients(self.plain).items():
            actual = gradients(self.layers)[name]
            assert (actual is None) == (expected is None), name
            torch.testing.assert_close(actual, expected, msg=lambda m, name=name: f"{name}: {m}")  # type: ignore[misc]

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.plain.zero_grad()


# --------------------------------------------------------------------------------------- the cases, run by each process


def gradients_are_those_of_the_joined_batch(devices: list[str], checkpoint: str) -> None:
    trial = Trial(devices, checkpoint)
    for step in range(3):
        trial.step(*data(12, step))
        trial.check()
        trial.zero_grad()


def each_bucket_is_reduced_once(devices: list[str], checkpoint: str) -> None:
    """The default bucket holds everything; small buckets are laid out anew in the second step."""
    for options in ({}, {"bucket_cap_mb": 1e-5}):
        trial = Trial(devices, checkpoint, **options)
        counts = []
        for step in range(3):
            trial.step(*data(12, step))
            counts.append(len(trial.reduced))
            trial.check()
            trial.zero_grad()
        assert counts[-1] > 1 if options else counts == [1, 1, 1], counts


def fewer_micro_batches_come(devices: list[str], checkpoint: str) -> None:
    """The last mini-batches of an epoch are smaller: some micro-batches, and one."""
    trial = Trial(devices, checkpoint)
    for step, size in enumerate([12, 4, 2, 12]):
        trial.step(*data(size, step))
        assert trial.reduced == [0]
        trial.check()
        trial.zero_grad()


def parts_are_frozen(devices: list[str], checkpoint: str) -> None:
    """Frozen: the first partition, which is not recomputed; one in the middle; and single parameters."""
    for frozen in ([0], [2], [0, 2], [4]):
        trial = Trial(
            devices,
            checkpoint,
            lambda layers, frozen=frozen: [layers[k].requires_grad_(False) for k in frozen],  # type: ignore[misc]
        )
        for step in range(2):
            trial.step(*data(12, step))
            trial.check()
            trial.zero_grad()
    trial = Trial(devices, checkpoint, lambda layers: layers[2].weight.requires_grad_(False))
    with trial.model.no_sync():
        trial.step(*data(12))
    trial.step(*data(2, 1))
    trial.check()


def gradients_are_accumulated(devices: list[str], checkpoint: str) -> None:
    """`no_sync` around all backwards but the last: one reduction, and the sum of the gradients."""
    trial = Trial(devices, checkpoint)
    for _ in range(2):
        for step, size in enumerate([12, 4, 2]):
            with trial.model.no_sync() if step < 2 else nullcontext():
                trial.step(*data(size, step))
            assert trial.reduced == ([] if step < 2 else [0])
        trial.check()
        trial.zero_grad()


def other_settings(devices: list[str], checkpoint: str, **how: Any) -> None:
    """For a DDP that was promised a static graph, fewer micro-batches and accumulation are the same graph."""
    for options in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        with warnings.catch_warnings():
            # DDP warns if it looks for unused parameters and finds none.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            trial = Trial(devices, checkpoint, **how, **options)
            for step, size in enumerate([12, 4, 2, 12]):
                trial.step(*data(size, step))
                trial.check()
                trial.zero_grad()
            for step, size in enumerate([12, 4]):
                with trial.model.no_sync() if step < 1 else nullcontext():
                    trial.step(*data(size, step))
            trial.check()


def steps_are_skipped_in_all_processes(devices: list[str], checkpoint: str) -> None:
    """An overflow in one process is an overflow in the average. In float16 with a scaler and clipping."""
    trial = Trial(devices, checkpoint, nn.Module.float)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (trial.layers, trial.plain)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in optimizers]
    scales = []
    for step in range(4):
        x, y = (tensor.float() for tensor in data(12, step))
        if step == 1:
            x[1] = torch.inf  # in the share of process 1
        mine = slice(dist.get_rank(), None, WORLD)
        for net, part, scaler, optimizer in zip((trial.model, trial.plain), (mine, slice(None)), scalers, optimizers):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(net(x[part]).float(), y[part])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append([scaler.get_scale() for scaler in scalers])
    assert scales == [[2.0**8] * 2, [2.0**7] * 2, [2.0**7] * 2, [2.0**8] * 2]
    for name, expected in trial.plain.state_dict().items():
        actual = trial.layers.state_dict()[name]
        torch.testing.assert_close(actual, expected, rtol=0.01, atol=0.001)
        assert torch.equal(*data_parallel.all_gather(dist.group.WORLD, actual))


def the_output_is_in_a_reference(devices: list[str], checkpoint: str) -> None:
    """`Pipe` returns a reference.

    DDP looks for tensors in the output, to find unused parameters and for a static graph.
    """
    trial = Trial(devices, checkpoint, wrap=wrap_in_pipe)
    for step in range(2):
        trial.step(*data(12, step))
        trial.check()
        trial.zero_grad()
    other_settings(devices, checkpoint, wrap=wrap_in_pipe)


def an_optimizer_keeps_both_processes_equal(devices: list[str], checkpoint: str) -> None:
    trial = Trial(devices, checkpoint)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (trial.layers, trial.plain)]
    for step in range(4):
        trial.step(*data([12, 12, 10, 2][step], step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, expected in trial.plain.state_dict().items():
        torch.testing.assert_close(trial.layers.state_dict()[name], expected)
    for parameter in trial.layers.parameters():
        of_all = [torch.empty_like(parameter) for _ in range(WORLD)]
        dist.all_gather(of_all, parameter.detach())
        assert torch.equal(of_all[0], of_all[1])


class Branch(nn.Module):
    """A layer that uses one of two layers, chosen by the first number of its input, and never the third."""

    def __init__(self) -> None:
        super().__init__()
        self.above, self.below, self.never = (nn.Linear(2, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.above(x) if x[0, 0] > 0 else self.below(x)
        return y


def some_parameters_are_not_used(devices: list[str], checkpoint: str) -> None:
    """Parameters unused in one process or in both have the gradient None, as without a pipeline."""

    def branch(layers: nn.Sequential) -> None:
        torch.manual_seed(1)
        layers[0] = Branch().double()

    same, changing = [(1, 1)] * 3, [(1, 1), (1, -1), (-1, -1), (1, 1)]
    for options, signs in (({"find_unused_parameters": True}, changing), ({"static_graph": True}, same)):
        trial = Trial(devices, checkpoint, branch, **options)
        for step, (first, second) in enumerate(signs):
            x, y = data(12, step)
            x[0::2] *= first
            x[1::2] *= second
            mine = slice(dist.get_rank(), None, WORLD)
            loss_of(trial.model(x[mine]), y[mine]).backward()
            for part in (slice(0, None, WORLD), slice(1, None, WORLD)):
                loss_of(trial.plain(x[part]), y[part]).div(WORLD).backward()
            trial.check()
            trial.zero_grad()


def unused_parameters_with_the_default_settings(devices: list[str], checkpoint: str) -> None:
    """DDP refuses unused parameters at the next forward, unless a checkpointed cell marks them as used.

    Autograd reports the missing gradient of a `Checkpoint` input to the parameter's hooks as if it were a gradient.
    Then these parameters get zeros.
    """

    def branch(layers: nn.Sequential) -> None:
        torch.manual_seed(1)
        layers[0] = Branch().double()

    trial = Trial(devices, checkpoint, branch)
    for step, (first, second) in enumerate([(1, 1), (1, -1)]):
        x, y = data(12, step)
        x[0::2] *= first
        x[1::2] *= second
        if checkpoint == "never" and step > 0:
            with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
                trial.model(x)
            return
        mine = slice(dist.get_rank(), None, WORLD)
        loss_of(trial.model(x[mine]), y[mine]).backward()
        if checkpoint == "never":
            continue
        for part in (slice(0, None, WORLD), slice(1, None, WORLD)):
            loss_of(trial.plain(x[part]), y[part]).div(WORLD).backward()
        for parameter in trial.plain.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        trial.check()
        trial.zero_grad()


def layers_in_ddp(devices: list[str], checkpoint: str) -> None:
    """A single thread keeps the order of the layers' messages. Several threads do not, so they are refused."""
    layers, plain = build(), build()
    layers[2] = DistributedDataParallel(layers[2])
    if len(set(devices)) > 1:
        with pytest.raises(ValueError, match=r"DistributedDataParallel\(GPipe\(\.\.\.\)\)"):
            GPipe(layers, BALANCE, devices=devices, checkpoint=checkpoint)
        return
    model = GPipe(layers, BALANCE, devices=devices, chunks=CHUNKS, checkpoint=checkpoint)
    for step, size in enumerate([12, 4, 12]):
        x, y = data(size, step)
        mine = slice(dist.get_rank(), None, WORLD)
        model.zero_grad()
        plain.zero_grad()
        loss_of(model(x[mine]), y[mine]).backward()
        loss_of(plain(x), y).backward()
        for name, expected in gradients(plain[2]).items():
            torch.testing.assert_close(model.get_parameter(f"2.module.{name}").grad, expected)


# Statistics of batch norms


class Norms(Trial):
    """A pipeline with deferred batch norms in DDP, and the plain model, which sees all of the data.

    In the plain model each layer runs once on the whole data, to update its statistics; its output is normalised by
    micro-batches, as in the pipelines.
    """

    def __init__(self, devices: list[str], checkpoint: str) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 2))
        layers.double()
        self.plain, self.layers = copy.deepcopy(layers), layers
        self.pipeline = GPipe(
            layers, BALANCE, devices=devices, chunks=CHUNKS, checkpoint=checkpoint, deferred_batch_norm=True
        )
        self.model = DistributedDataParallel(self.pipeline)

    @torch.no_grad()
    def track(self, of_all: Iterable[Tensor]) -> None:
        parts = [part for x in of_all for part in x.chunk(CHUNKS)]
        for layer in self.plain:
            passed = [copy.deepcopy(layer)(part) for part in parts]
            layer(torch.cat(parts))
            parts = passed

    def check(self) -> None:
        for name, expected in self.plain.named_buffers():
            torch.testing.assert_close(self.pipeline.get_buffer(name), expected)


@contextmanager
def counted_exchanges() -> Iterator[list[int]]:
    """Count the numbers that this process sends in each exchange of statistics."""
    sent: list[int] = []
    original = data_parallel.all_gather

    def exchange(group: Any, values: Tensor) -> list[Tensor]:
        sent.append(len(values))
        return original(group, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchgpipe.norms.synchronize.all_gather", exchange)
        yield sent


def halves(size: int, step: int = 0) -> list[Tensor]:
    """Return the data of each process: a little more or less than half, of another distribution."""
    x, _ = data(size, step)
    return [x[: size // 2 + 1], x[size // 2 + 1 :] + 1]


def statistics_are_those_of_the_joined_batch(devices: list[str], checkpoint: str) -> None:
    """Some mini-batches are small, so that the processes have different numbers of micro-batches."""
    trial = Norms(devices, checkpoint)
    with counted_exchanges() as sent:
        for step, size in enumerate([20, 18, 10, 20]):
            of_all = halves(size, step)
            trial.model(of_all[dist.get_rank()]).square().sum().backward()
            trial.track(of_all)
            trial.check()
    assert sent == [2 * (2 + 3 + 3)] * 4, "one exchange in each step, of all layers"
    for buffer in trial.pipeline.buffers():
        assert torch.equal(*data_parallel.all_gather(dist.group.WORLD, buffer)), "to the last bit"


def statistics_without_gradients(devices: list[str], checkpoint: str) -> None:
    """Forward does the same in `no_sync` and under `no_grad`."""
    trial = Norms(devices, checkpoint)
    for step, context in enumerate([trial.model.no_sync, torch.no_grad, nullcontext]):
        of_all = halves(20, step)
        with context():
            output = trial.model(of_all[dist.get_rank()])
            if output.requires_grad:
                output.square().sum().backward()
        trial.track(of_all)
        trial.check()


def statistics_of_accumulated_batches(devices: list[str], checkpoint: str) -> None:
    """All mini-batches in a block share one update and one exchange."""
    trial = Norms(devices, checkpoint)
    batches = [halves(20, step) for step in range(2)]
    with counted_exchanges() as sent, mini_batch(2):
        for step, of_all in enumerate(batches):
            with trial.model.no_sync() if step == 0 else nullcontext():
                trial.model(of_all[dist.get_rank()]).square().sum().backward()
    assert len(sent) == 1
    trial.track([x for of_all in batches for x in of_all])
    trial.check()


def statistics_of_one_process_alone(devices: list[str], checkpoint: str) -> None:
    """Evaluation, and the pipeline called without DDP, exchange nothing, so that one process can run alone."""
    trial = Norms(devices, checkpoint)
    if dist.get_rank() == 0:
        with counted_exchanges() as sent:
            trial.pipeline.eval()(data(12)[0])
            trial.check()
            x = data(12)[0]
            trial.pipeline.train()(x)
            trial.track([x])
            trial.check()
        assert sent == []


class Sometimes(nn.Module):
    """A layer that runs a norm twice if the whole input is positive, and otherwise not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x) + 5) if (x > 0).all() else x


def statistics_of_layers_that_do_not_run_everywhere(devices: list[str], checkpoint: str) -> None:
    """A process whose layer has not run takes over the statistics of the others. No process waits for another."""
    layers = nn.Sequential(nn.Identity(), Sometimes(), nn.Identity(), nn.BatchNorm1d(2), nn.Linear(2, 2)).double()
    first, second = nn.BatchNorm1d(2).double(), nn.BatchNorm1d(2).double()
    normalise = copy.deepcopy(first)
    pipeline = GPipe(layers, BALANCE, devices=devices, chunks=CHUNKS, checkpoint=checkpoint, deferred_batch_norm=True)
    model = DistributedDataParallel(pipeline, find_unused_parameters=True)
    for signs in [(1, -1), (-1, -1), (-1, 1), (1, 1)]:
        of_all = [(x.abs() + 0.1) * sign for x, sign in zip(halves(20), signs)]
        model(of_all[dist.get_rank()]).square().sum().backward()
        with torch.no_grad():
            seen = [part for x, sign in zip(of_all, signs) if sign > 0 for part in x.chunk(CHUNKS)]
            seen_again = [normalise(part) + 5 for part in seen]
            if seen:
                first(torch.cat(seen))
                first(torch.cat(seen_again))
            passed_by = [x for x, sign in zip(of_all, signs) if sign < 0]
            second(torch.cat([*map(normalise, seen_again), *passed_by]))
        for name, norm in (("1.norm", first), ("3", second)):
            for key, expected in norm.named_buffers():
                torch.testing.assert_close(pipeline.get_buffer(f"{name}.{key}"), expected)


def a_failing_forward_leaves_no_statistics(devices: list[str], checkpoint: str) -> None:
    trial = Norms(devices, checkpoint)
    with pytest.raises(RuntimeError):
        trial.model(torch.rand(12, 7, dtype=torch.float64))
    trial.check()
    of_all = halves(20)
    trial.model(of_all[dist.get_rank()]).square().sum().backward()
    trial.track(of_all)
    trial.check()


def what_would_wait_for_ever_is_refused(devices: list[str], checkpoint: str) -> None:
    trial = Norms(devices, checkpoint)
    with pytest.raises(RuntimeError, match=r"join\(throw_on_early_termination=True\)"), trial.model.join():
        trial.model(halves(20)[dist.get_rank()])

    def sync() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.SyncBatchNorm(3)), nn.Tanh())

    if len(set(devices)) == 1:
        GPipe(sync(), [1, 1, 1], devices=devices)
        return
    with pytest.raises(ValueError, match="deferred_batch_norm=True"):
        GPipe(sync(), [1, 1, 1], devices=devices)
    model = GPipe(build(), BALANCE, devices=devices)
    setattr(model, "3", nn.SyncBatchNorm(3))
    with pytest.raises(ValueError, match="on 3 devices"):
        model(data(12)[0])


CASES: list[Callable[[list[str], str], None]] = [
    gradients_are_those_of_the_joined_batch,
    each_bucket_is_reduced_once,
    fewer_micro_batches_come,
    parts_are_frozen,
    gradients_are_accumulated,
    other_settings,
    steps_are_skipped_in_all_processes,
    the_output_is_in_a_reference,
    an_optimizer_keeps_both_processes_equal,
    some_parameters_are_not_used,
    unused_parameters_with_the_default_settings,
    layers_in_ddp,
    statistics_are_those_of_the_joined_batch,
    statistics_without_gradients,
    statistics_of_accumulated_batches,
    statistics_of_one_process_alone,
    statistics_of_layers_that_do_not_run_everywhere,
    a_failing_forward_leaves_no_statistics,
    what_would_wait_for_ever_is_refused,
]


def run_all(rank: int, folder: str) -> None:
    """Run all cases in one process and write a report of each."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # no message leaves the machine
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    for case in CASES:
        for variant, checkpoint in PAIRS:
            try:
                case(DEVICES[variant], checkpoint)
                report = ""
            except BaseException:
                report = traceback.format_exc()
            Path(folder, _report(case, variant, checkpoint, rank)).write_text(report)
            # If one process failed, the other would wait for it in vain.
            failed = torch.tensor([float(bool(report))])
            dist.all_reduce(failed)
            if failed.item():
                dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"example-{rank}").write_text(_output_of_the_example(rank, folder))


def _output_of_the_example(rank: int, folder: str) -> str:
    if importlib.util.find_spec("tqdm") is None:
        return ""
    sys.path.append(str(EXAMPLES))
    example = importlib.import_module("ddp")
    meeting = Path(folder, "example")
    meeting.mkdir(exist_ok=True)
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(io.StringIO()):
        example.train(rank, str(meeting), example.parse_options(["--steps", "3", "--batch", "16"]))
    return output.getvalue()


def _report(case: Callable[..., None], variant: str, checkpoint: str, rank: int) -> str:
    return f"{case.__name__}-{variant}-{checkpoint}-{rank}"


# ------------------------------------------------------------------------------------------------------------ the tests


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder with the reports of the processes."""
    folder = tmp_path_factory.mktemp("ddp")
    # Processes forked from the server of `launch` need not import PyTorch.
    context = mp.start_processes(run_all, (str(folder),), nprocs=WORLD, join=False, start_method="forkserver")
    try:
        for _ in range(60):  # if one process waits for the other forever, its report is missing below
            if context.join(timeout=10):
                break
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
                process.join()
    yield folder


@pytest.mark.parametrize("variant, mode", PAIRS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_with_ddp(reports: Path, variant: str, mode: str, case: Callable[..., None]) -> None:
    for rank in range(WORLD):
        report = reports / _report(case, variant, mode, rank)
        assert report.exists(), f"process {rank} left no report"
        if report.read_text():
            pytest.fail(f"process {rank}: {report.read_text()}", pytrace=False)


def test_the_example(reports: Path) -> None:
    pytest.importorskip("tqdm")
    lines = (reports / "example-0").read_text().splitlines()
    assert lines[0] == "parameters and statistics of the processes differ by 0.0"
    assert "of new excerpts are recognised" in lines[1]
    assert (reports / "example-1").read_text() == ""
