"""Pipelines side by side, inside each other, and called from several threads.

Threads meet at barriers, whose timeouts only end a test that would otherwise hang. Where two threads must not disturb
each other, Python switches between them as often as it can.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Devices, Pipe
from tests.layers import Apply
from tests.plain import assert_equal, gradients, run_plain
from torchgpipe import GPipe, MicroBatches, is_checkpointing, is_recomputing, pipelined

TIMEOUT = 60


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    return layers.double()


def batch(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(6, 2, dtype=torch.float64, generator=generator).requires_grad_()


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions at the same time, switching between their threads as often as Python can."""
    start = threading.Barrier(len(functions), timeout=TIMEOUT)

    def run(function: Callable[[], Any]) -> Any:
        start.wait()
        return function()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(functions)) as pool:
            return [future.result(TIMEOUT) for future in [pool.submit(run, function) for function in functions]]
    finally:
        sys.setswitchinterval(interval)


# ------------------------------------------------------------------------------------------------ the workers


@pytest.mark.parametrize("front", ["pipelined", "GPipe"])
def test_a_product_that_opens_a_thread_rounds_as_in_the_callers_thread(front: str) -> None:
    """A bug: a new thread gave a first matrix product all cores, whatever ``torch.set_num_threads`` had said.

    PyTorch tells OpenMP in a new thread when it first asks for the number, and products of a recurrent layer do not.
    """
    plain = nn.Sequential(*[nn.Linear(8, 32), nn.Linear(32, 8)]).double()
    layers, x = copy.deepcopy(plain), torch.randn(6, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = plain(x)
        if front == "GPipe":
            output = GPipe(layers, [1, 1], devices=["cpu:0", "cpu:1"], chunks=1)(MicroBatches([x]))
        else:
            output = pipelined(layers, MicroBatches([x]), devices=["cpu:0", "cpu:1"])(MicroBatches([x]))
    assert torch.equal(output[0], expected)


@pytest.mark.usefixtures("cpu_workers")
@pytest.mark.parametrize(
    ("devices", "workers"),
    [
        (["cpu", "cpu", "cpu"], 0),
        (["cpu:0", "cpu:1", "cpu:2"], 3),
        (["cpu:0", "cpu:1", "cpu:0"], 2),
        (["cpu", "cpu:0", "cpu"], 2),
    ],
    ids=str,
)
def test_one_worker_for_each_distinct_device(devices: list[str], workers: int) -> None:
    """With a single device, the caller's own thread is the worker. No thread is left, which data loaders that fork
    would not survive."""
    before = {*threading.enumerate()}
    ran: list[set[threading.Thread]] = [set() for _ in devices]

    def note(j: int, input: Tensor) -> Tensor:
        ran[j].add(threading.current_thread())
        return input * 1

    layers = nn.Sequential(*[Apply(partial(note, j)) for j in range(3)])
    output = GPipe(layers, [1, 1, 1], devices=devices, chunks=4, checkpoint="never")(torch.rand(4, 2))
    assert before.issuperset(threading.enumerate())
    of_devices: dict[str, set[threading.Thread]] = {}
    for device, threads in zip(devices, ran, strict=True):
        of_devices.setdefault(device, set()).update(threads)
    assert all(len(threads) == 1 for threads in of_devices.values())
    used = set.union(*of_devices.values())
    assert used == {threading.current_thread()} if workers == 0 else len(used - before) == workers
    assert output.shape == (4, 2)


@pytest.mark.usefixtures("cpu_workers")
def test_a_cell_starts_when_its_input_is_there() -> None:
    """Partition 0 goes on to micro-batch 2 while partition 1, a slower device, is still at micro-batch 0."""
    ahead = threading.Event()

    def fast(input: Tensor) -> Tensor:
        if input[0, 0].item() == 2:
            ahead.set()
        return input + 10

    def slow(input: Tensor) -> Tensor:
        assert input[0, 0].item() > 10 or ahead.wait(TIMEOUT)
        return input

    model = GPipe(nn.Sequential(Apply(fast), Apply(slow)), [1, 1], devices=["cpu:0", "cpu:1"], chunks=4)
    x = torch.arange(4.0)[:, None]
    assert torch.equal(model(x), x + 10)


@pytest.mark.usefixtures("cpu_workers")
def test_workers_of_the_cpu_share_its_cores() -> None:
    """Each worker uses its share of the cores during the call; threads that start later have all cores."""
    seen: list[int] = []

    def note(input: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        if input[0, 0].item() > 1:
            raise ValueError("fails")
        return input

    notes = nn.Sequential(Apply(note), Apply(note))
    threads = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        model = GPipe(notes, [1, 1], devices=["cpu:0", "cpu:1"])
        model(torch.ones(1, 1))
        with pytest.raises(ValueError, match="fails"):
            model(torch.ones(1, 1) * 2)
        assert seen == [2, 2, 2]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 5
        seen.clear()
        GPipe(notes, [1, 1])(torch.ones(1, 1))
        assert seen == [5, 5]
    finally:
        torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------ beside each other


@pytest.mark.parametrize("what", ["call", "evaluation", "backward"])
def test_what_runs_beside_a_step_waits_for_it(pipe: Pipe, what: str) -> None:
    """It found aliases in the modules: a call got no gradient, and a recomputation was one of other layers."""
    x, beside = batch().detach(), list[Future[Any]]()
    results: list[Tensor] = []

    def meet(input: Tensor) -> Tensor:
        if steps and not beside:
            beside.append(pool.submit(run))
            while not (beside[0].done() or model._mechanisms.lock._changed._waiters):  # type: ignore[attr-defined]
                pass
        return input

    def run() -> None:
        with torch.set_grad_enabled(what != "evaluation"):
            loss = early if what == "backward" else model(x).square().sum()
        results.append(loss.detach())
        if what != "evaluation":
            loss.backward()

    def all_of_it() -> dict[str, Tensor | None]:
        model.zero_grad()
        model.step(x)
        beside[0].result(TIMEOUT) if steps else run()
        return gradients(model)

    layers = nn.Sequential(Apply(meet), *build())
    model = pipe(layers, [2, 2, 2], chunks=3, checkpoint="always", loss_fn=lambda output, _: output.mean())
    steps = False
    early = model(x).square().sum()
    expected = all_of_it()
    early = model(x).square().sum()
    with ThreadPoolExecutor(1) as pool:
        steps = True
        assert_equal(all_of_it(), expected)
    assert torch.equal(results[0], results[1])


def test_a_loss_may_run_its_own_model(pipe: Pipe, checkpoint: str) -> None:
    """In a worker, which is another thread than the one that has the lock. A step there would exchange parameters."""
    x, y = batch().detach(), batch(1).detach()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - run(target)).square().mean()

    run: Callable[[Tensor], Tensor] = build()
    plain = run
    for part, target in zip(x.chunk(3), y.chunk(3)):
        (loss_fn(plain(part), target) * (1 / 3)).backward()
    run = model = pipe(build(), [2, 2, 1], chunks=3, checkpoint=checkpoint, loss_fn=loss_fn, reduce="mean")
    model.step(x, y)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    run = lambda target: model.step(target, target)  # noqa: E731
    if len(set(model.devices)) > 1:
        with pytest.raises(RuntimeError, match="run by its own layers or its loss"):
            model.step(x, y)


@pytest.mark.parametrize("shared", [True, False], ids=["one pipeline", "two pipelines"])
def test_two_threads(pipe: Pipe, checkpoint: str, shared: bool) -> None:
    """Each thread asks for its own gradients, serves, and adds to `.grad`; hooks hear each backward once."""
    modules = [build(0), build(0 if shared else 1)]
    models = [pipe(module, [2, 2, 1], chunks=3, checkpoint=checkpoint) for module in modules]
    if shared:
        modules[1], models[1] = modules[0], models[0]
    repeats = 6

    def results(run: Callable[[Tensor], Tensor], k: int) -> list[Tensor]:
        x = batch(k)
        with torch.no_grad():
            output = run(x)
        with torch.inference_mode():
            inferred = run(x)
        grads = torch.autograd.grad(run(x).square().sum(), [x, *modules[k].parameters()])
        return [output, inferred, *grads]

    expected = [results(partial(run_plain, modules[k], chunks=3), k) for k in range(2)]
    calls: list[None] = []
    for module in modules[: 1 if shared else 2]:
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: calls.append(None))  # type: ignore[arg-type]

    def train(k: int) -> list[list[Tensor]]:
        found = [results(models[k], k) for _ in range(repeats)]
        calls_before.append(len(calls))
        for _ in range(repeats):
            models[k](batch(k)).square().sum().backward()
        return found

    calls_before: list[int] = []
    for found, wanted in zip(in_threads(partial(train, 0), partial(train, 1)), expected, strict=True):
        assert all(torch.equal(a, b) for result in found for a, b in zip(result, wanted, strict=True))
    sums = [[repeats * grad for grad in wanted[3:]] for wanted in expected]
    if shared:
        sums = [[a + b for a, b in zip(*sums)]] * 2
    for module, wanted in zip(modules, sums):
        torch.testing.assert_close([parameter.grad for parameter in module.parameters()], wanted)
    # Those of `torch.autograd.grad` are called as well, once each.
    assert len(calls) == 2 * 2 * repeats * len(sums[0])


def test_steps_of_one_model_come_one_after_the_other(pipe: Pipe) -> None:
    """Each sets `.grad` aside: two at once would lose gradients, or put those of the other step back."""
    model = pipe(build(), [2, 2, 1], chunks=3, loss_fn=lambda output, _: output.square().sum(), reduce="mean")
    x, repeats = batch().detach(), 20
    model.step(x)
    expected = [2 * repeats * parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    def train() -> None:
        for _ in range(repeats):
            model.step(x)

    in_threads(train, train)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


# ------------------------------------------------- inside each other; `test_transparency` draws pipelines as layers


def test_phases_in_a_pipeline_in_a_pipeline(devices: Devices) -> None:
    """A layer is recomputing if any enclosing cell is; the innermost run without a graph is a checkpoint."""
    seen: list[tuple[bool, bool]] = []

    def note(input: Tensor) -> Tensor:
        seen.append((is_checkpointing(), is_recomputing()))
        return input * 1

    inner = GPipe(nn.Sequential(nn.Linear(2, 2), Apply(note)), [1, 1], devices=devices(2), checkpoint="always")
    outer = GPipe(nn.Sequential(nn.Linear(2, 2), inner), [1, 1], devices=devices(2), checkpoint="always")
    output = outer(torch.rand(1, 2))
    assert seen == [(True, False)]
    seen.clear()
    output.sum().backward()
    # The outer recomputation runs the inner pipeline, with the inner pipeline's own two runs.
    assert seen == [(True, True), (False, True)]
