"""A recording has each cell and copy once, in an order in which they can run, and changes no results."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from tests.conftest import Devices, Pipe
from tests.faults import Fault, Plan, build, rows
from tests.front.models import chain
from tests.layers import With
from tests.plain import assert_same, outcome, tensors
from tests.separate_memory import separate_memory
from tests.skip.layers import pair
from torchgpipe import GPipe
from torchgpipe.front.pipelined import pipelined_apart
from torchgpipe.schedule import ScheduleName
from torchgpipe.timeline.span import Span
from torchgpipe.timeline.timeline import Timeline

M, N = 4, 3

#: A pipeline on these is run by one thread.
CPUS = ["cpu"] * N


def linears(n: int = N) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(n)])


def gpipe(devices: list[str], **options: Any) -> Any:
    """Return a pipeline with a layer in each partition, which can step."""
    options = {"chunks": M, "checkpoint": "never", "loss_fn": nn.functional.mse_loss, **options}
    return GPipe(linears(len(devices)), [1] * len(devices), devices=devices, **options)


def any_module(devices: list[str], **options: Any) -> Any:
    """Return a pipelined model likewise, in which neighbouring columns on one device stay apart."""
    options = {"chunks": M, "loss_fn": nn.functional.mse_loss, "balance": [1] * len(devices), **options}
    return pipelined_apart(linears(len(devices)), batch(), devices=devices, **options)


def batch(**options: Any) -> Tensor:
    return torch.randn(2 * M, 3, **options)


def checkpointed(mode: str) -> int:
    return {"always": M, "except_last": M - 1, "never": 0}[mode]


def recorded(model: nn.Module, x: Tensor | None = None) -> Timeline:
    """Record a call and its backward."""
    with torchgpipe.record(model) as timeline:
        model(batch() if x is None else x).sum().backward()
    return timeline


def cells(spans: list[Span]) -> Counter[tuple[str, int, int]]:
    return Counter((span.kind, span.micro_batch, span.partition) for span in spans if span.computes)


def all_cells(mode: str, trained: Callable[[int], bool] = lambda j: True) -> Counter[tuple[str, int, int]]:
    """Return the cells of a step, of which those of the trained partitions have a backward."""
    grid = [(i, j) for i in range(M) for j in range(N)]
    backward = [("backward", i, j) for i, j in grid if trained(j)]
    again = [("recomputation", i, j) for _, i, j in backward if i < checkpointed(mode)]
    return Counter([*[("forward", i, j) for i, j in grid], *again, *backward])


def at(spans: list[Span], kind: str, i: int, j: int) -> Span:
    (span,) = [span for span in spans if (span.kind, span.micro_batch, span.partition) == (kind, i, j)]
    return span


def assert_in_order(spans: list[Span], mode: str) -> None:
    """Assert that each cell begins after the cells that it depends on have ended."""
    for span in spans:
        assert 0 <= span.start <= span.end
        assert not span.failed
    for i in range(M):
        for j in range(N):
            forward, backward = at(spans, "forward", i, j), at(spans, "backward", i, j)
            assert forward.end <= backward.start
            if j > 0:
                assert at(spans, "forward", i, j - 1).end <= forward.start
                assert backward.end <= at(spans, "backward", i, j - 1).start
            if i > 0:
                assert at(spans, "forward", i - 1, j).end <= forward.start
                assert backward.end <= at(spans, "backward", i - 1, j).start
            if i < checkpointed(mode):
                again = at(spans, "recomputation", i, j)
                assert forward.end <= again.start
                assert again.end <= backward.start


@pytest.mark.parametrize("input_grad", [False, True])
def test_every_cell_is_there_once(pipe: Pipe, checkpoint: str, input_grad: bool) -> None:
    model = pipe(linears(), [1] * N, chunks=M, checkpoint=checkpoint)
    timeline = recorded(nn.Sequential(model), batch(requires_grad=input_grad))
    assert cells(timeline.spans) == all_cells(checkpoint)
    assert len(timeline.spans) == all_cells(checkpoint).total()
    assert_in_order(timeline.spans, checkpoint)
    assert [row.layers for row in timeline.partitions] == [("0",), ("1",), ("2",)]
    for span in timeline.spans:
        assert span.layers == timeline.partitions[span.partition].layers
        assert span.device == model.devices[span.partition]
        assert (span.step, span.stream, span.other) == (0, "computing", None)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("late", marks=pytest.mark.late)])
@pytest.mark.parametrize("mode", ["always", "except_last", "never", "pipelined"])
def test_copies_and_waits_are_there_once(kind: str, mode: str) -> None:
    devices = [f"{kind}:{j}" for j in range(N)]
    if mode == "pipelined":
        model, mode = any_module(devices), "never"
    else:
        model = GPipe(linears(), [1] * N, devices=devices, chunks=M, checkpoint=mode)
    with separate_memory(model), torchgpipe.record(model) as timeline:
        model(batch()).sum().backward()
    assert cells(timeline.spans) == all_cells(mode)
    if kind == "cpu":  # The clocks of accelerators are compared with the host's once, and differ a little.
        assert_in_order(timeline.spans, mode)
    assert all(-1 < span.start <= span.end < 100 for span in timeline.spans)
    ways = [(i, a, c) for i in range(M) for j in range(N - 1) for a, c in [(j, j + 1), (j + 1, j)]]
    copies = [span for span in timeline.spans if span.kind == "copy"]
    waits = [span for span in timeline.spans if span.kind == "wait"]
    assert Counter((span.micro_batch, span.partition, span.other) for span in copies) == Counter(ways)
    assert Counter((span.micro_batch, span.other, span.partition) for span in waits) == Counter(ways)
    for span in copies:
        assert span.other is not None
        stream, sending = ("leaving", "forward") if span.partition < span.other else ("gradient leaving", "backward")
        assert span.stream == stream
        assert kind != "cpu" or at(timeline.spans, sending, span.micro_batch, span.partition).end <= span.start
    assert {span.stream for span in waits} == {"computing"}


def test_a_skip_has_copies_of_its_own() -> None:
    start, finish = pair()
    layers = nn.Sequential(nn.Sequential(nn.Linear(3, 3), start), nn.Linear(3, 3), finish)
    model = GPipe(layers, [1, 1, 1], devices=["cpu:0", "cpu:1", "cpu:2"], chunks=M)
    with separate_memory(model), torchgpipe.record(model) as timeline:
        model(batch()).sum().backward()
    skips = [span for span in timeline.spans if span.kind == "copy" and span.stream.startswith("skip")]
    ways = [(i, *ends) for i in range(M) for ends in [(0, 2, "skip leaving"), (2, 0, "skip gradient leaving")]]
    assert Counter((s.micro_batch, s.partition, s.other, s.stream) for s in skips) == Counter(ways)


# Recording changes nothing else.


@pytest.mark.parametrize("schedule", [None, "1F1B", "ZeroBubble"])
def test_numbers_are_the_same_to_the_last_bit(pipe: Pipe, checkpoint: str, schedule: ScheduleName | None) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
    x, results = batch(requires_grad=schedule is None), []
    for recording in (False, True):
        options: dict[str, Any] = {"schedule": schedule or "1F1B", "loss_fn": nn.functional.mse_loss}
        model = pipe(copy.deepcopy(module), [1, 2, 1], chunks=M, checkpoint=checkpoint, **options)
        with torchgpipe.record(model) if recording else nullcontext():
            torch.manual_seed(1)
            results.append(outcome(model, x, run=None if schedule is None else lambda x: model.step(x, x)))  # noqa: B023
    assert_same(*results)


def first_frozen() -> nn.Sequential:
    layers = linears()
    layers[0].requires_grad_(False)
    return layers


def with_layer(j: int, layer: nn.Module) -> nn.Sequential:
    layers = linears()
    layers[j] = layer
    return layers


def constant() -> nn.Module:
    """Return a layer that returns its weight, whatever its input."""
    return With(nn.Linear(3, 2), lambda linear, _: linear.weight)


def halves() -> nn.Module:
    def forward(layers: nn.Sequential, inputs: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = (inputs, inputs) if isinstance(inputs, Tensor) else inputs
        return layers[0](first), layers[1](second)

    return With(linears(2), forward)


#: Layers, and the partitions whose cells have a backward. What a layer hands on has no node of the layer's own.
TRAINED: dict[str, tuple[Callable[[], nn.Sequential], Callable[[int], bool]]] = {
    "the first frozen": (first_frozen, lambda j: j > 0),
    "the first hands on its input": (lambda: with_layer(0, nn.Identity()), lambda j: j > 0),
    "the second hands on its input": (lambda: with_layer(1, nn.Identity()), lambda j: True),
    "the last hands on its input": (lambda: with_layer(2, nn.Identity()), lambda j: True),
    "the first returns a parameter": (lambda: with_layer(0, constant()), lambda j: True),
    "the second returns a parameter": (lambda: with_layer(1, constant()), lambda j: j > 0),
    "the last returns a parameter": (lambda: with_layer(2, constant()), lambda j: j > 1),
    "several outputs": (lambda: nn.Sequential(halves(), halves(), halves()), lambda j: True),
}


@pytest.mark.parametrize(("name", "mode"), [*((name, "never") for name in TRAINED), ("the first frozen", "always")])
def test_only_cells_that_are_differentiated_have_a_backward(pipe: Pipe, name: str, mode: str) -> None:
    make, trained = TRAINED[name]
    model = pipe(make(), [1] * N, chunks=M, checkpoint=mode)
    with torchgpipe.record(model) as timeline:
        torch.stack([*tensors(model(batch()))]).sum().backward()
    assert cells(timeline.spans) == all_cells(mode, trained)
    assert not any(span.failed for span in timeline.spans)


@pytest.mark.parametrize("schedule", ["1F1B", "ZeroBubble"])
@pytest.mark.parametrize("make", [gpipe, any_module])
def test_calls_and_steps_have_every_cell_once_and_the_numbers_are_the_same(
    devices: Devices, make: Callable[..., Any], schedule: ScheduleName
) -> None:
    torch.manual_seed(0)
    model, x, results = make(devices(N), schedule=schedule), batch(), []
    for recording in (False, True):
        model.zero_grad()
        with torchgpipe.record(model) if recording else nullcontext() as timeline:
            model(x).sum().backward()
            model.step(x, target=x)
            with torch.no_grad():
                model.step(x, target=x)
        results.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *results))
    forward = all_cells("never", lambda j: False)
    stepped = all_cells("never")
    if schedule == "ZeroBubble":  # The first partition has no gradient to pass on, so W does all of its backward.
        grid = [(i, j) for i in range(M) for j in range(N)]
        halves = [("backward of the input", i, j) for i, j in grid if j]
        stepped = forward + Counter(halves + [("backward of the weights", i, j) for i, j in grid])
    assert [cells(timeline.of_step(k)) for k in range(3)] == [all_cells("never"), stepped, forward]
    assert all(span.computes and not span.failed for span in timeline.spans)
    assert_in_order(timeline.of_step(0), "never")


def test_a_recomputed_cell_has_a_backward_in_one_piece(devices: Devices) -> None:
    model = gpipe(devices(2), schedule="ZeroBubble", checkpoint="always")
    with torchgpipe.record(model) as timeline:
        model.step(batch(), target=batch())
    # The backward of a cell of the last partition comes next, so the cell is not recomputed.
    first = [("forward", 0), ("recomputation", 0), ("backward", 0)]
    last = [("forward", 1), ("backward of the input", 1), ("backward of the weights", 1)]
    assert Counter((kind, j) for kind, _, j in cells(timeline.spans)) == Counter(M * (first + last))


def test_what_a_pipelined_model_recomputes_in_its_last_partition_is_a_part_of_backward() -> None:
    model = any_module(CPUS, schedule="ZeroBubble", checkpoint=True)
    with torchgpipe.record(model) as timeline:
        model.step(batch(), target=batch())
    ahead = Counter(("recomputation", i, j) for i in range(M) for j in range(N - 1))
    assert cells(timeline.spans) == all_cells("never") + ahead


def test_rows_are_columns() -> None:
    """Neighbours on one device are one column."""
    devices, loss_fn = ["cpu:0", "cpu:0", "cpu:1"], nn.functional.mse_loss
    model: Any = torchgpipe.pipelined(linears(), batch(), chunks=M, devices=devices, balance=[1] * N, loss_fn=loss_fn)
    with torchgpipe.record(model) as timeline:
        model(batch())
        model.step(batch(), target=batch())
    assert [(str(row.device), row.layers) for row in timeline.partitions] == [("cpu:0", ("0", "1")), ("cpu:1", ("2",))]


def test_a_column_that_is_passed_by_has_no_cell(devices: Devices) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        x = self.layers[0](x)
        return self.layers[2](x if self.skips else self.layers[1](x))

    model = chain(forward, *linears())
    model.skips = False
    pipelined_apart(model, batch(), chunks=M, devices=devices(N), balance=[1] * N)
    model.skips = True
    timeline = recorded(model)
    assert {span.partition for span in timeline.spans} == {0, 2}


def test_transforms_of_torch_func_still_work() -> None:
    model = gpipe(["cpu"], chunks=2)
    x = batch()
    expected = torch.func.grad(lambda x: model(x).sum())(x)
    with torchgpipe.record(model):
        assert torch.equal(torch.func.grad(lambda x: model(x).sum())(x), expected)


# Several steps


def test_accumulation_is_several_steps_and_a_second_backward_is_recorded(pipe: Pipe) -> None:
    model = pipe(linears(), [1] * N, chunks=M, checkpoint="never")
    with torchgpipe.record(model) as timeline:
        losses = torch.stack([model(batch()).sum() for _ in range(2)]).sum()
        losses.backward(retain_graph=True)
        losses.backward()
    assert timeline.steps == [0, 1]
    assert not any(span.failed for span in timeline.spans)
    for step in timeline.steps:
        counted = cells(timeline.of_step(step))
        assert {kind: counted[kind, 0, 0] for kind in ("forward", "backward")} == {"forward": 1, "backward": 2}
        assert counted.total() == M * N * 3


def test_only_the_last_steps_are_kept() -> None:
    """Memory is bounded while steps go by."""
    model = gpipe(CPUS)
    with torchgpipe.record(model, steps=2) as timeline:
        model(batch()).sum().backward()
        first = weakref.ref(model._mechanisms.recorder._steps[0])  # type: ignore[union-attr]
        for _ in range(4):
            model(batch()).sum().backward()
        gc.collect()
        assert first() is None
    assert timeline.steps == [3, 4]
    assert {span.step for span in timeline.spans} == {3, 4}
    with pytest.raises(ValueError, match=r"step 0 is not among those that were kept, which are \[3, 4\]"):
        timeline.of_step(0)


@pytest.mark.usefixtures("no_collection")
def test_no_tensor_is_kept(pipe: Pipe, checkpoint: str) -> None:
    """Tensors are freed without the help of the garbage collector."""
    model = pipe(linears(), [1] * N, chunks=M, checkpoint=checkpoint)
    seen: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda _, inputs, output: seen.extend([weakref.ref(inputs[0]), weakref.ref(output)]))
    gc.collect()
    timeline = recorded(model)
    assert timeline.spans
    assert len(seen) >= 2 * M
    assert [ref() for ref in seen if ref() is not None] == []


def test_a_backward_outside_the_block_is_not_recorded(pipe: Pipe, checkpoint: str) -> None:
    model = pipe(linears(), [1] * N, chunks=M, checkpoint=checkpoint)
    with torchgpipe.record(model) as timeline:
        loss = model(batch()).sum()
    before = list(timeline.spans)
    loss.backward()
    assert timeline.spans == before
    assert cells(before) == all_cells("never", lambda j: False)


# Faults


@pytest.mark.parametrize("j", range(N))
@pytest.mark.parametrize(
    ("phase", "mode"),
    [
        ("forward", "always"),
        ("forward", "never"),
        ("recomputation", "always"),
        ("backward", "always"),
        ("backward", "never"),
    ],
)
def test_a_step_that_raises_leaves_its_timeline_up_to_the_fault(pipe: Pipe, phase: str, mode: str, j: int) -> None:
    plan = Plan()
    model = pipe(build(plan, N), [2] * N, chunks=M, checkpoint=mode)
    plan.add((1, j), phase)
    with pytest.raises(Fault), torchgpipe.record(model) as timeline:
        model(rows(M)).sum().backward()
    (failed,) = [span for span in timeline.spans if span.failed]
    assert (failed.kind, failed.micro_batch, failed.partition) == (phase, 1, j)
    assert all(span.start <= failed.end for span in timeline.spans)
    assert "failed" in str(timeline.report())
    assert model._mechanisms.recorder is None

    # A fault that is caught in the block is marked as well, and the next step is not.
    with torchgpipe.record(model) as timeline:
        with pytest.raises(Fault):
            model(rows(M)).sum().backward()
        plan.faults.clear()
        model(rows(M)).sum().backward()
    (failed,) = [span for span in timeline.spans if span.failed]
    assert (failed.step, failed.kind, failed.micro_batch, failed.partition) == (0, phase, 1, j)
    assert failed.end <= timeline.of_step(1)[0].start


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_cell_of_a_pipelined_model_that_raises_is_marked(devices: Devices, phase: str) -> None:
    plan = Plan()
    model = pipelined_apart(build(plan, N).eval(), rows(M), chunks=M, devices=devices(N), balance=[1] * N)
    plan.add((1, 1), phase)
    with pytest.raises(Fault), torchgpipe.record(model) as timeline:
        model.train()(rows(M)).sum().backward()
    assert [(one.kind, one.micro_batch, one.partition) for one in timeline.spans if one.failed] == [(phase, 1, 1)]


# Which pipeline is recorded, and for how long


@pytest.mark.parametrize("make", [gpipe, any_module])
def test_a_pipeline_is_recorded_by_one_block_at_a_time(make: Callable[..., Any]) -> None:
    model = make(CPUS)
    refused = pytest.raises(RuntimeError, match="recorded already; leave the other block")
    with torchgpipe.record(model), refused, torchgpipe.record(model):
        pass
    with torchgpipe.record(model) as timeline:
        model(batch())
    assert timeline.steps == [0]


def test_a_timeline_can_only_be_read_after_the_block() -> None:
    with torchgpipe.record(gpipe(CPUS)) as timeline:
        looks = [timeline.of_step, timeline.report, timeline.plot]
        attributes = [lambda: timeline.spans, lambda: timeline.steps, lambda: timeline.partitions]
        for read in [*looks, *attributes, lambda: timeline.save("never.json")]:
            with pytest.raises(RuntimeError, match="still being recorded; read it after the block"):
                read()
        assert str(timeline) == "<Timeline, being recorded>"
    assert [read() for read in attributes] == [[], [], []]
    assert repr(timeline) == "<Timeline of 0 steps, 0 spans>" and timeline._repr_html_().startswith("&lt;Timeline of 0")
    for look in looks:
        with pytest.raises(ValueError, match=r"in the block of torchgpipe\.record\(\)"):
            look()


def test_what_is_refused() -> None:
    model, two = gpipe(CPUS), nn.ModuleDict({name: gpipe(["cpu"]) for name in ("a", "b")})
    none: list[Any] = [nn.Linear(3, 3), 3, None]
    asked: list[tuple[Any, Any, str]] = [
        *((one, 1, f"no pipeline to record in this {type(one).__name__}; pass a GPipe, a pipelined") for one in none),
        (two, 1, r"2 pipelines .*'a', 'b'.*get_submodule\('a'\)"),
        *((model, steps, f"the number of steps to keep, but got {steps!r}") for steps in (0, -1, 1.5, None, "2")),
    ]
    for one, steps, message in asked:
        with pytest.raises((TypeError, ValueError), match=message), torchgpipe.record(one, steps=steps):
            pass
    assert model._mechanisms.recorder is None


@pytest.mark.parametrize("inner", ["always", "never"])
def test_of_nested_pipelines_the_outer_one_is_recorded(pipe: Pipe, checkpoint: str, inner: str) -> None:
    """A nested pipeline begins inside a cell, and does not end it."""
    nested = gpipe(["cpu"] * 2, chunks=2, checkpoint=inner)
    model = pipe(nn.Sequential(nn.Linear(3, 3), nested, nn.Linear(3, 3)), [1, 1, 1], chunks=M, checkpoint=checkpoint)
    with torchgpipe.record(model) as timeline, torchgpipe.record(nested, steps=100) as within:
        model(batch()).sum().backward()
    assert cells(timeline.spans) == all_cells(checkpoint)
    assert_in_order(timeline.spans, checkpoint)
    assert len(within.steps) == M + checkpointed(checkpoint)
    assert not any(span.failed for span in within.spans)
    if checkpoint == "never":
        for i in range(M):
            around = at(timeline.spans, "backward", i, 1)
            parts = [span for span in within.of_step(i) if span.kind == "backward"]
            assert around.seconds >= max(span.end for span in parts) - min(span.start for span in parts)


@pytest.mark.parametrize("make", [gpipe, any_module])
def test_a_copy_of_the_model_is_not_recorded(make: Callable[..., Any]) -> None:
    model = make(CPUS)
    with torchgpipe.record(model) as timeline:
        for other in [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]:
            other(batch())
    assert timeline.steps == []
    model(batch())
    assert timeline.steps == []
