"""Weights in host memory: results are those of the resident pipeline, and devices hold no more than the slots.

It is one mechanism beneath ``pipelined`` and ``GPipe``; a GPipe trains by ``step`` alone.
"""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import torchgpipe
from tests import late
from tests.conftest import ALL_VARIANTS, Devices
from tests.front.models import Chain, chain
from tests.layers import Apply, Using
from tests.offload.transfers import Transfers, counted, transfers_of
from tests.plain import on_host
from tests.skip.layers import pair as skip_layers
from torchgpipe import GPipe
from torchgpipe.devices.stream import AcceleratorStream, Stream
from torchgpipe.front.pipelined import pipelined_apart, runs_of
from torchgpipe.listener.listener import NO_MICRO_BATCH
from torchgpipe.offload.aliases import OffloadedAliases
from torchgpipe.offload.host_copies import HostCopies, HostCopy
from torchgpipe.offload.host_memory import HostMemory
from torchgpipe.schedule import Action, Program, program
from torchgpipe.schedule.residency import residency
from torchgpipe.timeline.span import TRANSFERS

on_late = pytest.mark.on_late


@pytest.fixture(scope="module", autouse=True)
def small_tensors_have_host_copies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostMemory, "least", 1)
        yield


@pytest.fixture(scope="module", autouse=True)
def transfers_are_counted() -> Iterator[None]:
    with counted():
        yield


@pytest.fixture(scope="session")
def devices(variant: str) -> Devices:
    """Return devices for a pipeline; never the CPU beside an accelerator."""
    return lambda n: ["cuda:0" if variant == "cuda" else ALL_VARIANTS[variant](j) for j in range(n)]


def test_the_cpu_is_no_device_beside_an_accelerator() -> None:
    """An activation in host memory was used there before it had arrived: gradients of 1e37."""
    with pytest.raises(ValueError, match="leave the CPU out of devices"):
        torchgpipe.pipelined(
            chain(adds, nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4), chunks=2, devices=["cpu", "meta"],
            balance=[1, 1], offload=True, verify=False,
        )  # fmt: skip


WORDS, WIDTH, PARTITIONS = 7, 6, 6


class Block(nn.Module):
    def __init__(self, dropout: float, norms: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norms else nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + Fault.apply(self.dropout(torch.tanh(self.linear(self.norm(x)))))


class Fault(torch.autograd.Function):
    """Can be made to fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class Failure(Exception):
    pass


class Model(nn.Module):
    """A language model in small, whose embedding may be its head, too, and is used in glue."""

    def __init__(self, *, tied: bool = False, frozen: int = 0, dropout: float = 0.0, norms: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout, norms) for _ in range(PARTITIONS - 2)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)
        self.glued = tied

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits + functional.linear(x, self.embed.weight) if self.glued else logits


BALANCE = [2, 1, 1, 1, 1, 2]


#: A program of the user's own: one micro-batch after the other, to and fro.
OWN: Program = [
    [Action(kind, i, j) for i in range(4) for kind, order in (("F", 1), ("B", -1)) for j in range(PARTITIONS)[::order]]
]


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (rows,)), torch.randint(WORDS, (rows,))


def pair(model: Model, devices: list[str], front: str = "pipelined", **options: Any) -> tuple[Any, Any]:
    """Return the model resident, and in host memory; as layers in a row with a skip, if the front is GPipe."""
    slots = options.pop("slots", 2)
    given: dict[str, Any] = {"chunks": 4, "schedule": "LayerMajor", "checkpoint": False}
    given |= {"loss_fn": functional.cross_entropy, **options}
    if front == "GPipe":
        stash, pop = skip_layers()
        layers = nn.Sequential(model.embed, stash, *model.blocks, pop, model.head)
        places = [devices[j % len(devices)] for j in range(PARTITIONS)]
        resident = GPipe(copy.deepcopy(layers), BALANCE, devices=places, **given)
        return resident, GPipe(layers, BALANCE, devices=devices, offload=True, slots=slots, **given)
    given |= {"partitions": PARTITIONS, "devices": devices, "verify": False}
    sample = data(2)[0]
    # Every partition by itself, as in host memory: the gradients of tied weights are added partition by partition.
    resident = pipelined_apart(copy.deepcopy(model), sample, **given)
    return resident, torchgpipe.pipelined(copy.deepcopy(model), sample, offload=True, slots=slots, **given)


def transfers(model: Any) -> Transfers:
    memory = model._host_memory if isinstance(model, GPipe) else runs_of(model).host_memory  # type: ignore[union-attr]
    return transfers_of(memory)


def once(model: Any, ids: Tensor, target: Tensor, how: str) -> Tensor:
    """Train once, and return the loss."""
    if how == "step":
        loss: Tensor = model.step(ids, target) if isinstance(model, GPipe) else model.step(ids, target=target)
        return loss
    output = model(ids)
    loss = functional.cross_entropy(output.float(), target.to(output.device))
    loss.backward()
    return loss.detach()


def trained(model: Any, ids: Tensor, target: Tensor, how: str, autocast: str | None = None) -> list[Any]:
    """Train a step of two mini-batches, evaluate, and return all that can be seen on the host."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for _ in range(2):
        with torch.autocast(autocast or "cpu", torch.bfloat16, enabled=autocast is not None):
            loss = once(model, ids, target, how)
    seen = [on_host(one) for one in (loss, *gradients(model), *model.buffers())]
    optimizer.step()
    model.eval()
    with torch.no_grad():
        seen.append(on_host(model(ids)))
    model.train()
    return [*seen, *map(on_host, model.parameters())]


def gradients(model: Any) -> list[Tensor | None]:
    return [one.grad for one in model.parameters()]


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    return all(
        torch.equal(a.cpu(), b.cpu()) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b
        for a, b in zip(ours, theirs, strict=True)
    )


def is_empty(model: Any) -> bool:
    """Return whether no weights are on devices, and all parameters on the host."""
    moved = transfers(model)
    return not any(moved.present.values()) and {one.device.type for one in model.parameters()} == {"cpu"}


def in_halves(m: int, places: list[int]) -> list[Program]:
    """Return the forward and the backward half of LayerMajor."""
    return [
        [[one for one in own if (one.kind == "F") == forward] for own in program("LayerMajor", m, places)]
        for forward in (True, False)
    ]


@on_late
@settings(max_examples=settings.default.max_examples // 3, phases=[Phase.explicit, Phase.generate])
@given(draw=st.data())
def test_it_equals_the_resident_pipeline_bit_for_bit(devices: Devices, draw: st.DataObject) -> None:
    front = draw.draw(st.sampled_from(["pipelined", "GPipe"]))
    there = list(dict.fromkeys(devices(draw.draw(st.integers(1, 2)))))
    n, is_late = len(there), there[0].startswith("late")
    model = Model(
        tied=draw.draw(st.booleans()) and front == "pipelined",
        frozen=draw.draw(st.sampled_from([0, 2])),
        dropout=draw.draw(st.sampled_from([0.0, 0.3])),
        norms=draw.draw(st.booleans()) and not is_late,  # which cannot run them in evaluation
    )
    how = "step" if front == "GPipe" else draw.draw(st.sampled_from(["step", "backward"]))
    known: list[Any] = ["LayerMajor", "GPipe", "1F1B", OWN] if n == 1 else ["LayerMajor", "Interleaved1F1B"]
    schedule = draw.draw(st.sampled_from(known)) if how == "step" else "LayerMajor"
    modes: list[Any] = [False, True, *(["except_last", ["1", "3"]] if front == "GPipe" else [])]
    options = {"checkpoint": draw.draw(st.sampled_from(modes)), "schedule": schedule}
    counts = st.integers(1, 4)
    slots = draw.draw(st.one_of(counts, st.lists(counts, min_size=n, max_size=n)))
    autocast = draw.draw(st.sampled_from([None, "late" if is_late else "cpu"]))
    resident, at_home = pair(model, there, front, slots=slots, **options)
    ids, target = data()
    ours, theirs = (trained(one, ids, target, how, autocast) for one in (at_home, resident))
    assert equal(ours, theirs)
    assert is_empty(at_home)
    if how == "step":
        places = [j % n for j in range(PARTITIONS)]
        step, forward = OWN if schedule is OWN else program(schedule, 4, places), in_halves(4, places)[0]
        assert transfers(at_home).uploads == 2 * residency(step, slots).uploads + residency(forward, slots).uploads


@on_late
@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("slots", [1, 2, [3, 1]])
def test_uploads_bytes_and_peaks_are_those_of_the_residency(devices: Devices, how: str, slots: Any) -> None:
    there = devices(2)
    names = list(dict.fromkeys(there))
    each = slots[: len(names)] if isinstance(slots, list) else [slots] * len(names)
    places = [names.index(there[j % 2]) for j in range(PARTITIONS)]
    options: dict[str, Any] = {"chunks": 4, "partitions": PARTITIONS, "devices": names, "verify": False}
    options |= {"loss_fn": functional.mse_loss, "slots": each if isinstance(slots, list) else slots, "offload": True}
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(PARTITIONS)]
    model: Any = torchgpipe.pipelined(Chain(*layers), torch.randn(2, WIDTH), **options)
    x = torch.randn(8, WIDTH)
    if how == "step":
        model.step(x, target=torch.randn(8, WIDTH))
        programs: list[Program] = [program("LayerMajor", 4, places)]
    else:
        model(x).sum().backward()
        programs = in_halves(4, places)
    moved = transfers(model)
    size = 4 * (WIDTH * WIDTH + WIDTH)
    plans = [residency(one, each) for one in programs]
    assert moved.uploads == sum(one.uploads for one in plans)
    assert moved.bytes_up == sum(one.bytes_up([size] * PARTITIONS) for one in plans) == size * moved.uploads
    assert moved.bytes_down == size * PARTITIONS
    assert moved.peaks == {torch.device(name): count * size for name, count in zip(names, each)}


def adds(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = x + layer(x)
    return x


@pytest.mark.late
@pytest.mark.parametrize("kind", ["pipelined", "GPipe"])
def test_the_number_of_micro_batches_takes_no_memory_but_that_of_the_input(kind: str) -> None:
    """Activations are evicted. With ``offload='weights'``, they take memory of the device for each micro-batch."""

    def peak(chunks: int, offload: Any) -> int:
        layers = [nn.Linear(64, 64) for _ in range(8)]
        options: dict[str, Any] = {"chunks": chunks, "loss_fn": functional.mse_loss, "offload": offload}
        options |= {"checkpoint": True, "balance": [2] * 4}
        model: Any
        if kind == "GPipe":
            model = GPipe(nn.Sequential(*layers), devices=["late:0"], **options)
        else:
            residual = chain(adds, *layers)
            places = ["late:0"] * 4
            model = torchgpipe.pipelined(residual, torch.randn(2, 64), devices=places, verify=False, **options)
        x = torch.randn(chunks * 64, 64)
        used = []
        for _ in range(2):
            torch.accelerator.synchronize()
            module = torch.get_device_module("late")
            module.reset_peak_memory_stats("late:0")
            before = module.memory_allocated("late:0")
            once(model, x, x, "step")
            torch.accelerator.synchronize()
            used.append(module.max_memory_allocated("late:0") - before - 2 * x.nbytes)
        return used[-1]

    boundary = 64 * 64 * 4
    assert peak(16, True) <= peak(8, True) + boundary
    assert peak(16, "weights") >= peak(8, "weights") + 8 * 3 * boundary


def peeks(self: Any, x: Tensor) -> Any:
    """Use what another micro-batch has left."""
    x = self.layers[0](x)
    if self.first is not None:
        x = x + self.first.detach()
    elif self.looks:
        self.first = x
    return self.layers[1](x)


@pytest.mark.late
def test_what_was_evicted_is_not_used_by_another_micro_batch() -> None:
    model = chain(peeks, nn.Linear(4, 4), nn.Linear(4, 4))
    model.first, model.looks = None, False
    devices = ["late:0"] * 2
    torchgpipe.pipelined(
        model, torch.randn(2, 4), chunks=8, balance=[1, 1], devices=devices, offload=True, verify=False
    )
    model.looks = True
    with pytest.raises(RuntimeError, match=r"of shape \(2, 4\) .* waits in host memory.*offload='weights'"):
        model(torch.randn(16, 4))


class Passing(nn.Module):
    """Hands on a part of a memory, or a tensor that it has changed in place, to a layer that gets it thrice."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shift = Using(lambda linear, x: x + linear.bias, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h, other = torch.stack([h.tanh(), h]).unbind() if self.way == "a part" else (h + 1, h)
        shifted = self.shift(h)
        h = h if self.way == "a part" else h.mul_(2)
        return self.last(self.attention(h, h, h, need_weights=False)[0] + shifted) + other


def passing(way: str, checkpoint: list[str], *, offload: bool = True, shift: int = 1) -> Any:
    torch.manual_seed(1)
    return torchgpipe.pipelined(
        Passing(way), torch.randn(2, 3, WIDTH), chunks=8, loss_fn=lambda y, _: y.mean(), checkpoint=checkpoint,
        balance={"first": 0, "shift": shift, "attention": 1, "last": 2}, devices=["late:0"] * 3, verify=False,
        offload=offload,
    )  # fmt: skip


@pytest.mark.late
@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("way", ["a part", "changed"])
def test_what_is_restored_is_whole_and_new_and_one_tensor(way: str, how: str) -> None:
    """Of a memory only the part that was copied was restored, a tensor that was changed since came as before, and
    attention no longer got one tensor thrice."""
    x = torch.randn(16, 3, WIDTH)
    seen = []
    for offload in (False, True):
        model = passing(way, ["attention"], offload=offload)
        _ = model.step(x, target=x) if how == "step" else model(x).mean().backward()
        seen.append(gradients(model))
    assert equal(*seen)


@pytest.mark.late
def test_what_is_changed_in_place_while_it_is_downloaded_is_refused() -> None:
    """It went down as it was or as it had become, as it happened."""
    model = passing("changed", ["shift"], shift=0)
    with pytest.raises(
        RuntimeError, match=r"of shape \(2, 3, 6\) was changed in place after a module .* change a copy"
    ):
        model(torch.randn(16, 3, WIDTH))
    assert late.hazards()  # That is why.


def begun() -> tuple[HostCopies, Stream, list[Action]]:
    """Return the host copies of a mini-batch of 8 on one device, that device's stream, and all actions."""
    device = torch.device("late:0")
    memory = HostMemory([device], 2, None)
    aliases = OffloadedAliases([], [device], memory.streams, nullcontext(), backward=True, host_memory=memory)
    stream = memory.streams.current(device)
    copies = HostCopies(aliases, [stream], [0], None)
    actions = [Action(kind, i, 0) for kind in ("F", "B") for i in range(8)]
    copies.begin(actions)
    return copies, stream, actions


@pytest.mark.late
def test_what_was_uploaded_and_is_not_needed_is_freed_when_it_has_arrived() -> None:
    """A cell without a gradient needs nothing: what was uploaded for it was freed while the copy was under way."""
    copies, stream, actions = begun()
    kept: Any = copies.keep(torch.ones(4096, device=stream.device), actions[0], actions[8])
    assert isinstance(kept, HostCopy)
    for _ in range(2):
        copies.evict(stream)
    with late.delays(5000):
        copies.prefetch(actions[8])
        del kept
        copies.end_of(actions[8], stream)
    copies.end()


@pytest.mark.late
@pytest.mark.parametrize("how", ["forward", "step"])
@pytest.mark.usefixtures("no_collection")
def test_nothing_of_a_mini_batch_keeps_a_deleted_model(how: str) -> None:
    ids, target = data()
    _, model = pair(Model(), ["late:0"], checkpoint=True)
    alive = weakref.ref(model.embed.weight)
    gc.collect()
    _ = once(model, ids, target, how) if how == "step" else model(ids)
    del model, _
    assert alive() is None


@pytest.mark.parametrize("front", ["pipelined", "GPipe"])
def test_sparse_gradients_go_down_as_they_are(front: str) -> None:
    """Their bytes were counted as those of a dense tensor: 'nbytes is not defined for sparse tensors'."""
    model = Model()
    model.embed.sparse = True
    models, (ids, target) = pair(model, ["cpu:0", "cpu:1"], front), data()
    for one in models:
        once(one, ids, target, "step")
        once(one, ids, target, "step")
    ours, theirs = ([grad.to_dense() for grad in gradients(one) if grad is not None] for one in models)
    assert equal(ours, theirs)
    assert {grad.layout for grad in gradients(models[0]) if grad is not None} == {torch.strided, torch.sparse_coo}


@pytest.mark.late
def test_frozen_weights_follow_the_model() -> None:
    """They came as tensors of inference mode, kept a former dtype, and were lost to a graph when they were trained."""
    ids, target = data()
    _, model = pair(Model(frozen=PARTITIONS - 2), ["late:0"])
    with torch.inference_mode():
        model(ids)
    model.double().step(ids, target=target)
    before = model(ids)
    model.requires_grad_(True)
    (before.sum() + model(ids).sum()).backward()
    assert all(one.grad is not None and one.grad.dtype == torch.float64 for one in model.parameters())


@on_late
def test_a_recording_shows_uploads_and_downloads_in_lanes_of_their_own(devices: Devices, tmp_path: Path) -> None:
    there = devices(2)
    names = list(dict.fromkeys(there))
    places = [j % len(names) for j in range(PARTITIONS)]
    model = pair(Model(), names, checkpoint=True)[1]
    with torchgpipe.record(model) as timeline:
        once(model, *data(), "step")
        once(model, *data(), "backward")
    whole, halves = residency(program("LayerMajor", 4, places), 2), [residency(one, 2) for one in in_halves(4, places)]
    for step, plans in ((0, [whole]), (1, halves)):
        weights = [span for span in timeline.of_step(step) if span.micro_batch == NO_MICRO_BATCH]
        ups = Counter(span.partition for span in weights if span.kind == "upload")
        downs = Counter(span.partition for span in weights if span.kind == "download")
        assert ups == Counter(stay.j for one in plans for own in one.weights for stay in own)
        assert downs == Counter(range(PARTITIONS))
    others = [span for span in timeline.spans if span.kind in TRANSFERS and span.micro_batch != NO_MICRO_BATCH]
    assert {span.stream for span in others} == (
        set() if there[0].startswith("cpu") else {"activations leaving", "activations arriving"}
    )
    timeline.save(tmp_path / "step.json")
    lanes = [event for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"] if event["ph"] == "M"]
    named = {event["args"]["name"] for event in lanes if event["name"] == "thread_name"}
    assert {"weights arriving", "gradients leaving"} <= named
    picture = timeline.plot()
    assert all(f">{kind} {device}<" in picture for kind in TRANSFERS for device in names)
    assert "upload of weights, partition 0" in picture
    use = timeline.report().devices[0]
    assert 0 < use.transferring <= 1
    assert 0 <= use.hidden <= 1
    assert "from and to host memory" in str(timeline.report())


def test_a_weight_that_was_evicted_has_no_memory() -> None:
    model = pair(Model(), ["cpu"])[1]
    seen = []

    def look(module: nn.Module, args: Any) -> None:
        there = [one.linear.weight.untyped_storage().nbytes() > 0 for one in model.blocks]
        seen.append((list(model.blocks).index(module), there))

    for block in model.blocks:
        block.register_forward_pre_hook(look)
    once(model, *data(), "step")
    assert len(seen) == 4 * (PARTITIONS - 2)
    for k, there in seen:
        assert there[k]
        assert sum(there) <= 2


class Events:
    """Counts uploads, downloads and layers, forward and backward, and fails at one of them."""

    places = (
        (HostMemory, "fill"), (HostMemory, "download"), (HostCopy, "__init__"), (HostCopy, "prefetch"),
        (HostCopy, "get"),
    )  # fmt: skip

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.fails_at = 0, -1
        for kind, name in (*self.places, (Fault, "forward"), (Fault, "backward")):
            patch.setattr(kind, name, self.counted(getattr(kind, name), is_static=kind is Fault))

    def counted(self, own: Any, *, is_static: bool) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.fails_at:
                raise Failure
            return own(*args, **options)

        return staticmethod(run) if is_static else run


@on_late
@settings(max_examples=settings.default.max_examples // 5, phases=[Phase.explicit, Phase.generate])
@given(draw=st.data())
def test_a_failure_anywhere_leaves_everything_as_it_was(devices: Devices, draw: st.DataObject) -> None:
    front, how = draw.draw(st.sampled_from([("pipelined", "step"), ("pipelined", "backward"), ("GPipe", "step")]))
    there = list(dict.fromkeys(devices(draw.draw(st.integers(1, 2)))))
    resident, model = pair(Model(frozen=1), there, front, checkpoint=draw.draw(st.booleans()))
    ids, target = data()

    def once_more() -> None:
        for one in (resident, model):
            once(one, ids, target, how)
        assert equal(gradients(model), gradients(resident))

    once_more()
    with pytest.MonkeyPatch.context() as patch:
        events = Events(patch)
        once_more()
        count, events.count = events.count, 0
        events.fails_at = draw.draw(st.integers(1, count))
        grads = gradients(model)
        before = [on_host(one) for one in (*model.parameters(), *grads)]
        with suppress(Failure):
            once(model, ids, target, how)
            # Workers prefetch an activation if its host copy is there in time, so the last events may not come.
            assert events.count < events.fails_at
            return
    assert all(one is grad for one, grad in zip(gradients(model), grads))
    assert equal([*model.parameters(), *grads], before)
    assert is_empty(model)
    once_more()


@on_late
def test_the_proof_runs_and_copies_are_pipelined(devices: Devices) -> None:
    there = devices(2)
    names = list(dict.fromkeys(there))
    sample, (ids, target) = data(2)[0], data()
    plain = Model(tied=True, norms=not names[0].startswith("late"))  # which cannot run them in evaluation
    model: Any = torchgpipe.pipelined(
        plain, sample, chunks=4, partitions=PARTITIONS, devices=names, loss_fn=functional.cross_entropy, offload=True
    )
    assert model is plain
    assert runs_of(model).settings.schedule == "LayerMajor"  # type: ignore[union-attr]
    assert model.verify(ids, target=target).is_equal
    assert all(one.grad is None for one in model.parameters())
    assert is_empty(model)
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())
    assert equal(trained(copied, ids, target, "step"), trained(model, ids, target, "step"))
    module = model.unpipelined()
    assert {one.device.type for one in (*module.parameters(), *module.buffers())} == {"cpu"}
    functional.cross_entropy(module(ids), target).backward()


@on_late
def test_retained_graphs_and_optimizers_in_hooks(devices: Devices) -> None:
    resident, model = pair(Model(), devices(2), checkpoint=True)
    ids, target = data()
    for one in (resident, model):
        output = one(ids)
        loss = functional.cross_entropy(output, target.to(output.device))
        loss.backward(retain_graph=True)
        loss.backward()
    assert equal(gradients(model), gradients(resident))
    heard = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: heard.append(name))
    for how in ("step", "backward"):
        once(model, ids, target, how)
    assert sorted(heard) == sorted(2 * [name for name, _ in model.named_parameters()])


def test_methods_beside_forward_upload_their_weights(devices: Devices) -> None:
    model = pair(Model(), devices(2))[1]
    plain = copy.deepcopy(model).unpipelined()
    ids = data()[0]
    with torch.no_grad():
        torch.testing.assert_close(model.blocks[2](model.embed(ids)).cpu(), plain.blocks[2](plain.embed(ids)))
    assert is_empty(model)
    with pytest.raises(RuntimeError, match=r"'embed' is called outside of the model's forward.*torch.no_grad\(\)"):
        model.embed(ids)


@on_late
def test_calls_that_pass_in_one_piece_tell_what_they_cost(devices: Devices) -> None:
    class Cached(Model):
        def forward(self, ids: Tensor, use_cache: bool = False) -> Tensor:  # type: ignore[override]
            return super().forward(ids)

    model = pair(Cached(), devices(2))[1]
    ids = data()[0]
    moved = transfers(model)
    with torch.no_grad():
        expected = model(ids)
        uploads = moved.uploads
        with pytest.warns(UserWarning, match="in one piece, without a speed-up, and all weights come from host memory"):
            whole = model(ids, use_cache=True)
    torch.testing.assert_close(whole, expected)
    assert moved.uploads == uploads + PARTITIONS
    assert is_empty(model)


# ------------------------------------------------------------------------------------------------------ what is refused


class Thief(nn.Linear):
    """Uses the weight of another module, which is no module of its own."""

    other: list[nn.Linear]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.other[0].bias


def with_a_thief() -> Any:
    model = Chain(nn.Linear(4, 4), nn.Linear(4, 4), Thief(4, 4))
    model.layers[2].other = [model.layers[0]]
    return model


def returns(self: Any, x: Tensor) -> Any:
    return Chain.forward(self, x), self.layers[3].weight


STOLEN: dict[str, tuple[Callable[[], Any], str]] = {
    "module": (with_a_thief, "uses the weight 'bias' of a Linear"),
    "output": (lambda: chain(returns), "returns the weight 'weight' of a Linear"),
}


@pytest.mark.parametrize("way", STOLEN)
@pytest.mark.parametrize("verify", [False, True])
def test_a_weight_outside_of_its_partition_is_refused(way: str, verify: bool) -> None:
    make, message = STOLEN[way]
    x = torch.randn(4, 4)
    with pytest.raises((ValueError, RuntimeError), match=message):
        output = halves(make(), verify=verify)(x)
        assert not verify
        output.sum().backward()


def halves(model: nn.Module, **options: Any) -> Any:
    options |= {"chunks": 2, "partitions": 2, "checkpoint": False}
    return torchgpipe.pipelined(model, torch.randn(2, 4), devices=["cpu"], offload=True, **options)


def uses_views(self: Any, x: Tensor) -> Tensor:
    """Take views of weights in the first partition, and use them in the last."""
    first, frozen = self.layers[0].weight, self.layers[1].bias
    turned, part, constant = first.t(), first[1:3, ::2].unsqueeze(0), first.detach().view(-1)[2:6]
    x = Chain.forward(self, x) @ turned
    return (x[:, None, :2] * part).flatten(1) * constant + frozen.expand(2, 4)[1]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_view_of_a_weight_may_be_used_in_any_partition(devices: Devices, checkpoint: bool) -> None:
    """It was refused, for its memory leaves with its partition: 'which is not on the device then'."""
    plain = chain(uses_views).double()
    plain.layers[1].bias.requires_grad_(False)
    options: Any = {"devices": devices(2), "verify": True, "checkpoint": checkpoint, "offload": True}
    x, options["loss_fn"] = torch.randn(4, 4, dtype=torch.float64), lambda y, _: y.square().mean()
    model: Any = torchgpipe.pipelined(copy.deepcopy(plain), x[:2], chunks=2, partitions=4, **options)
    for how in ("step", "backward"):
        for rows in x.chunk(2):
            (plain(rows).square().mean() / 2).backward()
        _ = model.step(x, target=x) if how == "step" else model(x).square().mean().backward()
        for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
        assert is_empty(model)
    with torch.no_grad():
        assert equal([*model(x).chunk(2)], [plain(rows) for rows in x.chunk(2)])


def test_a_weight_that_forward_changes_is_refused() -> None:
    model = halves(Chain(), verify=False)
    weight = model.layers[3].weight
    before = weight.detach().clone()
    model.between = lambda self, k, x, first: self.layers[3].weight.data.clamp_(-0.1, 0.1) if k == 0 else x
    with pytest.raises(RuntimeError, match=r"changes the weight 'weight' of a Linear|in partition 0 uses the weight"):
        model(torch.randn(4, 4))
    assert torch.equal(weight, before)


def test_a_weight_that_leaves_a_layer_is_refused() -> None:
    module = nn.Sequential(
        Using(lambda linear, x: (linear(x), linear.weight.t())), Apply(lambda pair: pair[0] @ pair[1])
    )
    model = GPipe(module, [1, 1], devices=["cpu"], offload=True, loss_fn=functional.mse_loss)
    with pytest.raises(RuntimeError, match=r"returns the weight 'weight' of a Linear, or a view of it.*weight.clone"):
        model.step(torch.randn(4, 4), torch.randn(4, 4))


def test_what_a_gpipe_cannot_do_is_refused(devices: Devices) -> None:
    own, (ids, target) = list(dict.fromkeys(devices(2))), data()
    model = pair(Model(), own, "GPipe")[1]
    with pytest.raises(RuntimeError, match=r"trains by step\(\).*torchgpipe.pipelined\(module, sample, offload=True\)"):
        model(ids)
    with pytest.raises(RuntimeError, match="without a program"):
        model.verify(ids)
    with pytest.raises(ValueError, match=r"'0\.weight' is a UninitializedParameter"):
        GPipe(nn.Sequential(nn.LazyLinear(2)), [1], offload=True, devices=own)
    assert GPipe(nn.Sequential(nn.Linear(2, 2)), [1], offload=True, devices=own[:1]).schedule == "LayerMajor"
    copied = copy.deepcopy(model)
    assert torch.equal(copied.step(ids, target), model.step(ids, target))
    module = model.unwrap()
    assert {one.device.type for one in (*module.parameters(), *module.buffers())} == {"cpu"}


@on_late
def test_what_cannot_live_in_host_memory_is_refused(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, there = data()[0], devices(1)

    def made(model: nn.Module, **options: Any) -> Any:
        given: dict[str, Any] = {"chunks": 2, "partitions": PARTITIONS, "devices": there, "verify": False}
        return torchgpipe.pipelined(model, ids, offload=True, **given | options)

    class Special(nn.Parameter):
        pass

    odd = Model()
    odd.head.weight = Special(odd.head.weight.detach())
    with pytest.raises(ValueError, match=r"'head\.weight' is a Special"):
        made(odd)
    with pytest.raises(ValueError, match=r"slots must be 1 or more"):
        made(Model(), slots=0)
    with pytest.raises(ValueError, match=r"offload must be True, 'weights' or False, but got 'all'"):
        torchgpipe.pipelined(Model(), ids, chunks=2, offload="all")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pin must be an integer, or a list of one for each device, but got '1GiB'"):
        made(Model(), pin="1GiB")
    for wrong in ({"slots": [2, 1, 1]}, {"pin": [None, 0, 0]}):
        with pytest.raises(ValueError, match=r"has 3 numbers, but the partitions are on 1 devices, \S+; give a number"):
            made(Model(), **wrong)
    monkeypatch.setattr("torchgpipe.offload.verify.memory_in_use", lambda device: (0, 0, 300))
    with pytest.raises(ValueError, match=r"takes \d+ B in 2 slots of .* with 300 B: give more partitions, fewer slots"):
        made(Model())
    monkeypatch.undo()
    model = made(Model())
    if there[0].startswith("late"):
        with pytest.raises(TypeError, match=r"denied to move a pipelined Model.*with weights in host memory"):
            model.to(there[0])
        with pytest.raises(ValueError, match=r"'embed.weight' is on late:0, but under offload=True.*model.cpu\(\)"):
            made(Model().to(there[0]))
    output = model(ids)
    with torch.no_grad():
        model.blocks[1].linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="'weight' of a Linear was changed between forward and backward"):
        output.sum().backward()
    assert is_empty(model)


@on_late
def test_the_host_waits_for_all_copies(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may change weights after a step."""
    model, waited = pair(Model(), devices(1))[1], []
    for kind in (Stream, AcceleratorStream):

        def synchronize(self: Stream, own: Any = kind.synchronize) -> None:
            waited.append(self.name)
            own(self)

        monkeypatch.setattr(kind, "synchronize", synchronize)
    once(model, *data(), "step")
    assert {"weights arriving", "gradients leaving", "activations arriving", "activations leaving"} <= set(waited)


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = block(x).tanh()
        return x.float()


def test_a_forward_with_autocast_is_proved() -> None:
    """A cast that autocast keeps is made under a lock: the proof, which evicted weights meanwhile, waited for ever."""
    model: Any = torchgpipe.pipelined(
        Cast(), torch.randn(4, 4), chunks=2, devices=["cpu"], partitions=3, offload=True, slots=1
    )
    assert model.verify(torch.randn(4, 4)).is_equal
