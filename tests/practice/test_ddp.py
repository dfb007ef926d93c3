"""DistributedDataParallel around a pipeline, in two processes on the CPU, over gloo.

The processes are started once. Each runs all cases on its half of the data, in all ways to make a pipeline, and
reports what failed. The reference is the plain model, in the same process, on the data of both.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.distributed.launch import launch
from tests.drive.test_threads import build
from tests.layers import Using, With
from torchgpipe import GPipe, pipelined

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
    ),
    pytest.mark.slow,
]

WORLD = 2
CHUNKS = 3
BALANCE = [2, 1, 2]
WORKERS = ["cpu:0", "cpu:1", "cpu:2"]


class Way(NamedTuple):
    """A way to make a pipeline of layers."""

    kind: str
    devices: list[str]
    checkpoint: str

    def __call__(self, layers: nn.Sequential, **options: Any) -> Any:
        if self.kind.startswith("pipelined"):
            # Some layers below look at values, which the sample would be refused for.
            options = {"chunks": CHUNKS, "devices": self.devices, "balance": "parameters", "verify": False}
            model = pipelined(layers, data(2)[0].to(next(layers.parameters()).dtype), **options)
            return model if self.kind == "pipelined" else nn.Sequential(model)
        options = {"devices": self.devices, "chunks": CHUNKS, "checkpoint": self.checkpoint, **options}
        return GPipe(layers, BALANCE, **options)


GPIPES = [
    Way("GPipe", ["cpu"] * 3, "except_last"),
    *(Way("GPipe", WORKERS, mode) for mode in ("always", "never")),
]
# Lightning wraps a module around a model, and DistributedDataParallel around both.
PIPELINED = [Way("pipelined", WORKERS, "never"), Way("pipelined, in a module", WORKERS, "never")]
Case = Callable[[Way], None]
CASES: dict[str, tuple[Case, list[Way]]] = {}


def case(*ways: Way) -> Callable[[Case], Case]:
    """Let each process run the function in these ways to make a pipeline, by default with GPipe and pipelined."""

    def add(function: Case) -> Case:
        CASES[function.__name__] = function, [*(ways or [*GPIPES, *PIPELINED])]
        return function

    return add


def data(size: int, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.rand(2, size, 2, dtype=torch.float64, generator=generator)
    return x, y


def half(tensor: Tensor, rank: int | None = None) -> Tensor:
    return tensor[dist.get_rank() if rank is None else rank :: WORLD]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def gradients(layers: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in layers.named_parameters()}


def assert_equal_everywhere(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        both = [torch.empty_like(tensor) for _ in range(WORLD)]
        dist.all_gather(both, tensor.detach())
        assert torch.equal(*both), "to the last bit"


class Trial:
    """A pipeline in DDP, and the plain model in one process on the data of both.

    Args:
        way: makes the pipeline
        prepare: changes the layers before they are wrapped
        options: the options of DDP
    """

    def __init__(self, way: Way, prepare: Callable[[nn.Sequential], Any] = lambda layers: None, **options: Any) -> None:
        self.layers, self.plain = build(), build()
        prepare(self.layers)
        prepare(self.plain)
        self.model = DistributedDataParallel(way(self.layers), **options)
        self.reduced: list[int] = []
        self.model.register_comm_hook(None, self._reduce)

    # no annotations: DDP inspects them and cannot read strings
    def _reduce(self, _, bucket):  # type: ignore[no-untyped-def]
        self.reduced.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    def step(self, x: Tensor, y: Tensor) -> None:
        """Run backward on this process's half, and on the plain model with all of the data."""
        loss_of(self.model(half(x)), half(y)).backward()
        for rank in range(WORLD):
            loss_of(self.plain(half(x, rank)), half(y, rank)).div(WORLD).backward()

    def check(self) -> int:
        """Assert the gradients of the plain model, and one reduction of each bucket since the last check.

        Returns:
            the number of buckets
        """
        buckets = len(self.reduced)
        assert buckets and sorted(self.reduced) == list(range(buckets)), self.reduced
        self.reduced.clear()
        for name, expected in gradients(self.plain).items():
            actual = gradients(self.layers)[name]
            assert (actual is None) == (expected is None), name
            torch.testing.assert_close(actual, expected, msg=lambda m, name=name: f"{name}: {m}")  # type: ignore[misc]
        assert_equal_everywhere([one for one in gradients(self.layers).values() if one is not None])
        self.model.zero_grad()
        self.plain.zero_grad()
        return buckets


# --------------------------------------------------------------------------------------- the cases, run by each process


@case()
def gradients_are_those_of_the_joined_batch(way: Way) -> None:
    """The last mini-batches of an epoch are smaller: fewer micro-batches, and one; then `no_sync` adds three up.

    Small buckets are laid out anew in the second step. For a DDP that was promised a static graph, all of this is the
    same graph.
    """
    small = {"bucket_cap_mb": 1e-5, "gradient_as_bucket_view": True}
    for options in ({}, small, {"static_graph": True}):
        trial = Trial(way, **options)
        for step, size in enumerate([12, 4, 2, 12]):
            trial.step(*data(size, step))
            buckets = trial.check()
        assert (buckets > 1) == ("bucket_cap_mb" in options)
        for step, size in enumerate([12, 4, 2]):
            with trial.model.no_sync() if step < 2 else nullcontext():
                trial.step(*data(size, step))
            assert bool(trial.reduced) == (step == 2)
        trial.check()


@case()
def parts_are_frozen(way: Way) -> None:
    """Frozen: the first partition, which is not recomputed; one in the middle; several; and a single parameter."""
    for frozen in (["0"], ["2"], ["0", "2"], ["4"], ["2.weight"]):

        def freeze(layers: nn.Sequential, frozen: list[str] = frozen) -> None:
            for name, parameter in layers.named_parameters():
                parameter.requires_grad_(not name.startswith(tuple(frozen)))

        trial = Trial(way, freeze)
        with trial.model.no_sync():
            trial.step(*data(12))
        trial.step(*data(2, 1))
        trial.check()
        trial.step(*data(12, 2))
        trial.check()


def branch(layers: nn.Sequential) -> None:
    """Begin with a layer that uses one of two, chosen by the first number of its input, and never the third."""
    torch.manual_seed(1)
    three = nn.ModuleList([nn.Linear(2, 3) for _ in range(3)])
    layers[0] = With(three, lambda three, x: three[0 if x[0, 0] > 0 else 1](x)).double()


def signed(step: int, signs: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return data whose input has these signs in the two processes."""
    x, y = data(12, step)
    for rank, sign in enumerate(signs):
        half(x, rank).mul_(sign)
    return x, y


@case()
def some_parameters_are_not_used(way: Way) -> None:
    """Parameters unused in one process or in both have the gradient None, as without a pipeline."""
    same, changing = [(1, 1)] * 3, [(1, 1), (1, -1), (-1, -1), (1, 1)]
    for options, signs in (({"find_unused_parameters": True}, changing), ({"static_graph": True}, same)):
        trial = Trial(way, branch, **options)
        for step, each in enumerate(signs):
            trial.step(*signed(step, each))
            trial.check()


@case()
def unused_parameters_with_the_default_settings(way: Way) -> None:
    """DDP refuses unused parameters at the next forward, unless a pipeline marks them as used: then they get zeros.

    Autograd reports the missing gradient of a `Checkpoint` input, or of a pipelined call, to the parameter's hooks as
    if it were a gradient.
    """
    trial = Trial(way, branch)
    for step, signs in enumerate([(1, 1), (1, -1)]):
        x, y = signed(step, signs)
        if way.kind == "GPipe" and way.checkpoint == "never":
            if step > 0:
                with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
                    trial.model(x)
            else:
                loss_of(trial.model(half(x)), half(y)).backward()
            continue
        trial.step(x, y)
        for parameter in trial.plain.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        trial.check()


@case()
def hooks_of_parameters_run_once(way: Way) -> None:
    """Each gradient passes them whole, and before it is averaged."""
    trial = Trial(way)
    heard: list[str] = []
    for name, parameter in trial.layers.named_parameters():
        parameter.register_hook(lambda _, name=name: heard.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    for step in range(2):
        trial.step(*data(12, step))
        trial.check()
        assert sorted(heard) == sorted(2 * [name for name, _ in trial.layers.named_parameters()])
        heard.clear()


@case(*PIPELINED)
def layers_checkpoint_their_activations(way: Way) -> None:
    """PyTorch's own checkpoint recomputes them."""
    for reentrant in (False, True):

        def recomputed(linear: nn.Linear, x: Tensor, reentrant: bool = reentrant) -> Any:
            return checkpoint(lambda x: linear(linear(x).tanh()), x, use_reentrant=reentrant)

        def prepare(layers: nn.Sequential, recomputed: Any = recomputed) -> None:
            torch.manual_seed(1)
            layers[2] = Using(recomputed, width=3).double()

        trial = Trial(way, prepare)
        for step in range(2):
            trial.step(*data(12, step))
            trial.check()


@case(*GPIPES)
def deferred_statistics_are_those_of_the_process(way: Way) -> None:
    """As those of any batch norm; before each forward, DDP copies the buffers of the first process to all.

    The processes once exchanged statistics in each forward, which is why `join()` was refused.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    mine, first = copy.deepcopy(plain), copy.deepcopy(plain)
    pipeline = GPipe(plain, [1, 1, 1], devices=way.devices, chunks=CHUNKS, deferred_batch_norm=True)
    model = DistributedDataParallel(pipeline)
    for step in range(2):
        x, _ = data(20, step)
        shares = [x[:11], x[11:] + 1]  # of different distributions
        model(shares[dist.get_rank()]).square().sum().backward()
        with torch.no_grad():
            mine(shares[dist.get_rank()])
            first(shares[0])
        for name, buffer in mine.named_buffers():
            torch.testing.assert_close(pipeline.get_buffer(name), buffer)
            buffer.copy_(first.get_buffer(name))
    with model.join():
        for step in range(1 + dist.get_rank()):
            model(data(12, step)[0]).square().sum().backward()


@case(*GPIPES)
def what_would_wait_for_ever_is_refused(way: Way) -> None:
    def sync() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.SyncBatchNorm(3)), nn.Tanh())

    inside = build()
    inside[2] = DistributedDataParallel(inside[2])
    if len(set(way.devices)) == 1:  # A single thread keeps the order of the layers' messages.
        way(inside)
        GPipe(sync(), [1, 1, 1], devices=way.devices)
        return
    with pytest.raises(ValueError, match=r"DistributedDataParallel\(GPipe\(\.\.\.\)\)"):
        way(inside)
    with pytest.raises(ValueError, match="deferred_batch_norm=True"):
        GPipe(sync(), [1, 1, 1], devices=way.devices)
    with pytest.raises(ValueError, match="SyncBatchNorm cannot run in a pipeline on 2 devices"):
        pipelined(sync().double().eval(), data(2)[0], chunks=2, devices=way.devices[:2])
    model = GPipe(build(), BALANCE, devices=way.devices)
    setattr(model, "3", nn.SyncBatchNorm(3))
    with pytest.raises(ValueError, match="on 3 devices"):
        model(data(12)[0])


# -------------------------------------------------------------------------------------------------------- the processes


def run_all() -> dict[str, list[str]]:
    """Run all cases in one process, and return what failed in each."""
    warnings.simplefilter("error")
    # DDP warns if it looks for unused parameters and finds none.
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")  # while the spine is found
    reports: dict[str, list[str]] = {}
    for name, (function, ways) in CASES.items():
        reports[name] = []
        for way in ways:
            failed = torch.zeros(())
            try:
                function(way)
            except BaseException:
                reports[name].append(f"process {dist.get_rank()}, {way}: {traceback.format_exc()}")
                failed += 1
            # If one process failed, the other would wait for it in vain.
            dist.all_reduce(failed)
            if failed:
                dist.barrier()
    return reports


@pytest.fixture(scope="module")
def reports() -> list[dict[str, list[str]]]:
    """Return the reports of both processes."""
    return launch(WORLD, run_all, timeout=60, limit=200)


@pytest.mark.parametrize("name", CASES)
def test_two_processes(reports: list[dict[str, list[str]]], name: str) -> None:
    for report in reports:
        if report[name]:
            pytest.fail("\n".join(report[name]), pytrace=False)
