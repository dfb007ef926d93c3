"""`torchgpipe.pipelined`: what it returns, takes, refuses, and leaves behind."""

from __future__ import annotations

import copy
import gc
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import Devices
from tests.front.models import (
    TWO,
    Block,
    Chain,
    Decoder,
    batch,
    chain,
    decoder,
    expect_plain,
    gradients,
    plain_loss,
    same,
    sample_of,
)
from tests.layers import Using
from torchgpipe import GPipe, pipelined
from torchgpipe.front.pipelined import pipelined_apart
from torchgpipe.schedule import Action, program

X = torch.randn(4, 2)


@pytest.fixture
def data() -> dict[str, Tensor]:
    return batch()


@pytest.fixture
def pair(devices: Devices, data: dict[str, Tensor]) -> tuple[Any, Decoder]:
    """Return a pipelined model and the plain one."""
    model = decoder()
    plain = copy.deepcopy(model)
    return pipelined(model, sample_of(data), chunks=3, devices=devices(2)), plain


def weights_last(m: int, places: Sequence[int]) -> Any:
    """Leave all of the first column's backward to its second half: nobody waits for an input that needs no gradient."""
    halves = [[*map(Action._make, own)] for own in program("ZeroBubble", m, places)]
    return [sorted(own, key=lambda action: action.kind == "W") for own in halves]


#: The device of each partition, the schedule, and other settings.
WAYS: dict[str, tuple[list[int], Any, dict[str, Any]]] = {
    "one device": ([0], "GPipe", {}),
    "two": ([0, 1], "1F1B", {}),
    "three": ([0, 1, 2], "ZeroBubble", {}),
    "neighbours on one device": ([0] * 4 + [1] * 4, "ZeroBubble", {"balance": [1] * 8}),
    "weights last": ([0, 1], weights_last, {}),
    "round two devices": ([0, 1], "Interleaved1F1B", {"partitions": 4}),
    "layer by layer": ([0], "LayerMajor", {"partitions": 4}),
    "layer by layer, round two devices": ([0, 1], "LayerMajor", {"partitions": 4}),
    "layer by layer, on four devices": ([0, 1, 2, 3], "LayerMajor", {"partitions": 4}),
}


@pytest.mark.parametrize("kind", ["cpu", pytest.param("late", marks=pytest.mark.late)])
@pytest.mark.parametrize("way", WAYS)
def test_a_language_model(data: dict[str, Tensor], way: str, kind: str) -> None:
    """What random programs lack: integers, tied weights, and labels of which some do not count."""
    places, schedule, options = WAYS[way]
    # Neighbours on one device are joined in every other way: on the accelerator where they are not on the host.
    arranged: Any = [pipelined, pipelined_apart][([*WAYS].index(way) + (kind == "late")) % 2]
    model = decoder(layers=5)
    plain = copy.deepcopy(model)
    options = {"chunks": 3, "devices": [f"{kind}:{k}" for k in places], "schedule": schedule, **options}
    assert arranged(model, sample_of(data), **options) is model
    expect_plain(model, plain, data)
    assert len(model._runs().settings.labels) in (options.get("partitions", len(places)), len(set(places)))
    expect_plain(model, plain, data)


def test_steps_accumulate_and_evaluation_is_exact(pair: tuple[Any, Decoder], data: dict[str, Tensor]) -> None:
    model, plain = pair
    plain_loss(plain, data, 3)
    plain_loss(plain, data, 3)
    model.step(**data)
    before = model.norm.weight.grad
    model.step(**data)
    assert model.norm.weight.grad is before
    same(gradients(model), gradients(plain))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            parts = [plain(ids)["logits"] for ids in data["ids"].chunk(3)]
            assert torch.equal(model(data["ids"])["logits"], torch.cat(parts))


@pytest.mark.parametrize("has_run", [False, True])
def test_modules_that_are_new_run_where_they_stand(
    pair: tuple[Any, Decoder], data: dict[str, Tensor], has_run: bool
) -> None:
    """A block is replaced, one is appended, the head, and a part of a block; a new one is made on the meta device."""
    model, _ = pair
    if has_run:
        model.step(**data)
        gradients(model)
    model.layers[1] = Block(6).double()
    model.layers.append(Block(6).double())
    model.head = nn.Linear(6, 11, device="meta").double()
    weight = model.head.weight
    model.layers[2].up = nn.Linear(6, 12).double()
    model(**data)
    assert model.head.weight is weight and weight.device.type == "cpu"
    nn.init.normal_(weight)
    nn.init.normal_(model.head.bias)
    expect_plain(model, copy.deepcopy(model).unpipelined(), data)


class Coder(Chain):
    """Has methods beside forward, with a residual across partitions."""

    def encode(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[1](self.layers[0](x).relu())
        return y

    def decode(self, y: Tensor) -> Tensor:
        return y + self.layers[2](y)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def linear(count: int = 2) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(count)]


@pytest.mark.late
@pytest.mark.parametrize("verify", [False, True])
def test_methods_beside_forward_run_from_device_to_device(verify: bool) -> None:
    """They once mixed tensors of two devices, and the proof found gradients on the last device only."""
    plain = Coder(*linear(3))
    options: dict[str, Any] = {"chunks": 2, "devices": [f"late:{j}" for j in range(3)], "balance": [1, 1, 1]}
    model: Any = pipelined(copy.deepcopy(plain), X[:2], verify=verify, **options)
    code = model.encode(X)
    output = model.decode(code)
    assert code.device == output.device == torch.device("late:0")
    assert torch.equal(output.cpu(), plain(X))
    leaf = torch.ones(2, requires_grad=True, device="late:0")
    leaf.grad = torch.ones_like(leaf)
    with model._runs().in_one_piece(backward=False):
        model.layers[2](X.to("late:2"))
        assert leaf.grad is not None


# --------------------------------------------------------------------------------------------------------- in place


def test_moving_is_refused_and_casting_is_not(pair: tuple[Any, Decoder], data: dict[str, Tensor]) -> None:
    """Nothing rounds differently within a micro-batch."""
    model, plain = pair
    assert model.to("cpu") is model
    before = dict(model.named_parameters())
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert model.to(dtype) is model
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        plain.to(dtype)
        with torch.no_grad():
            parts = [plain(ids)["logits"] for ids in data["ids"].chunk(3)]
            assert torch.equal(model(data["ids"])["logits"], torch.cat(parts))
    with pytest.raises(TypeError, match="denied to move a pipelined Decoder"):
        model.to("meta")
    with pytest.raises(AttributeError, match=r"checkpoint of a pipelined model cannot be set; call unpipelined\(\)"):
        model.checkpoint = True
    model.note = "of the user's own"


def test_a_map_of_devices_of_the_users_own_stays() -> None:
    """unpipelined() took it for the map that tells trainers of several accelerators."""
    model: Any = Chain(*linear())
    model.hf_device_map = {"": "cpu"}
    pipelined(model, X[:2], chunks=2, devices=TWO).unpipelined()
    assert model.hf_device_map == {"": "cpu"}


def test_a_model_on_the_meta_device_comes_into_being_in_parts(data: dict[str, Tensor]) -> None:
    real = decoder()
    with torch.device("meta"):
        model = decoder()
    parameters = list(model.parameters())
    pipelined(model, sample_of(data), chunks=3, devices=TWO)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.norm.weight.isnan().all()
    model.load_state_dict(real.state_dict())
    expect_plain(model, real, data)


# -------------------------------------------------------------------------------------------------- autograd around it


def test_autograd_around_it(pair: tuple[Any, Decoder], data: dict[str, Tensor]) -> None:
    model, plain = pair
    other = batch()
    plain_loss(plain, data, 3)
    expected = gradients(plain)
    loss = model(**data)["loss"]
    loss.backward(retain_graph=True)
    same(gradients(model), expected)
    loss.backward()
    same(gradients(model), expected)
    with pytest.raises(RuntimeError, match=r"backward through the graph a second time|differentiated and freed"):
        loss.backward()

    (grad,) = torch.autograd.grad(model(**data)["loss"], [model.layers[1].up.weight])
    same({"up": grad}, {"up": expected["layers.1.up.weight"]})
    assert all(value is None for value in gradients(model).values())

    with pytest.raises(RuntimeError, match="create_graph=True cannot go through a pipelined model"):
        model(**data)["loss"].backward(create_graph=True)

    # The error was that of PyTorch: "Batching rule not implemented".
    place = model.place.detach().requires_grad_()
    loss_of = lambda x: model(**data, table=x)["loss"]  # noqa: E731
    with pytest.raises(RuntimeError, match=r"several gradients at once .* vectorize=False"):
        torch.autograd.functional.jacobian(loss_of, place, vectorize=True)
    torch.autograd.functional.jacobian(loss_of, place, vectorize=False)

    plain_loss(plain, data, 3)
    plain_loss(plain, other, 3)
    (model(**data)["loss"] + model(**other)["loss"]).backward()
    same(gradients(model), gradients(plain))

    # Two threads share the model.
    for _ in range(4):
        plain_loss(plain, data, 3)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(lambda: [model(**data)["loss"].backward() for _ in range(2)]) for _ in range(2)]:
            future.result()
    same(gradients(model), gradients(plain))


def train(model: Any, data: dict[str, Tensor], run: str) -> None:
    if run == "step":
        model.step(**data)
    else:
        model(**data)["loss"].backward()


@pytest.mark.parametrize("run", ["backward", "step", "forward"])
@pytest.mark.usefixtures("no_collection")
def test_nothing_is_left(pair: tuple[Any, Decoder], data: dict[str, Tensor], run: str) -> None:
    model, _ = pair
    held: list[weakref.ref[Tensor]] = []
    for k in (0, 3):
        model.layers[k].register_forward_hook(lambda _, args, output: held.append(weakref.ref(output)))
    gc.collect()
    if run == "forward":
        model(**data)
        gc.collect()
    else:
        train(model, data, run)
    assert [ref() for ref in held] == [None] * 6
    assert not [one for one in threading.enumerate() if "torchgpipe" in one.name]
    alive = weakref.ref(pipelined(Chain(*linear()), X[:2], chunks=2, devices=TWO))
    assert alive() is None


# ------------------------------------------------------------------------------------------------------ random numbers


@pytest.mark.parametrize("checkpoint", [False, True])
def test_dropout_is_the_same_for_any_devices(data: dict[str, Tensor], checkpoint: bool) -> None:
    results = []
    for places in (["cpu"], ["cpu"] * 2, TWO, ["cpu:0", "cpu:1", "cpu:2"]):
        torch.manual_seed(5)
        model = decoder(dropout=0.5)
        pipelined(model, sample_of(data), chunks=3, devices=places, checkpoint=checkpoint)
        torch.manual_seed(6)
        losses = [model.step(**data), model.step(**data), model(**data)["loss"]]
        losses[-1].backward()
        results.append(([loss.item() for loss in losses], gradients(model), torch.rand(3)))
    assert len(set(results[0][0])) == 3
    for losses, grads, following in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-13)
        same(grads, results[0][1])
        assert torch.equal(following, results[0][2])


def test_dropout_that_begins_later_is_an_error_once(data: dict[str, Tensor]) -> None:
    """A model that draws nothing leaves the generator alone."""
    model = decoder()
    before = torch.random.get_rng_state()
    pipelined(model, sample_of(data), chunks=3, devices=TWO, checkpoint=True)
    model.step(**data)
    model(**data)["loss"].backward()
    assert torch.equal(before, torch.random.get_rng_state())
    gradients(model)
    for layer in model.layers:
        layer.register_forward_hook(lambda _, args, output: nn.functional.dropout(output, 0.5))
    with pytest.raises(RuntimeError, match="run it again: from now on, micro-batches have seeds"):
        model.step(**data)
    assert all(value is None for value in gradients(model).values())
    model.step(**data)


# -------------------------------------------------------------------------------------------------------------- faults


def fail(*_: Any) -> None:
    raise KeyError("here")


@pytest.mark.parametrize(
    ("phase", "run"),
    [("forward", "backward"), ("forward", "step"), ("backward", "backward"), ("backward", "step"), ("end", "step")],
)
def test_an_error_is_the_callers_and_tells_where(
    devices: Devices, data: dict[str, Tensor], run: str, phase: str
) -> None:
    """A block fails at its second micro-batch, or a hook at the end. Gradients that are there stay, and the next step
    works."""
    model: Any = pipelined(decoder(), sample_of(data), chunks=3, devices=devices(2), balance=[3, 4])
    model.step(**data)
    before = gradients(model)
    for name, parameter in model.named_parameters():
        parameter.grad = before[name]
    copies = {name: grad.clone() for name, grad in before.items() if grad is not None}
    calls: list[Tensor] = []

    def hook(block: Any, args: Any, output: Tensor) -> None:
        calls.append(output)
        if len(calls) == 2:
            fail() if phase == "forward" else output.register_hook(fail)  # type: ignore[no-untyped-call]

    block = model.layers[2]
    handle = block.up.weight.register_hook(fail) if phase == "end" else block.register_forward_hook(hook)
    with pytest.raises(KeyError) as raised:
        train(model, data, run)
    if phase != "end":
        (note,) = raised.value.__notes__
        assert note.startswith("micro-batch 1 of 3, partition") and f"during {phase}" in note
    assert not [thread for thread in threading.enumerate() if "torchgpipe" in thread.name]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, copies[name])
        assert not hasattr(parameter, "_torchgpipe")
    handle.remove()
    gradients(model)
    model.step(**data)
    same(gradients(model), before)


def test_an_error_before_the_first_module_is_in_the_models_own_forward(devices: Devices) -> None:
    """It once was in ''."""

    class Checked(Decoder):
        def forward(self, ids: Tensor, **others: Any) -> Any:
            if int(ids.max()) > 10:
                raise KeyError(int(ids.max()))
            return super().forward(ids, **others)

    model = pipelined(Checked(), batch(2), chunks=3, devices=devices(2))
    with pytest.raises(KeyError) as raised:
        model(batch()["ids"] + 11)
    (note,) = raised.value.__notes__
    assert note.endswith("in Checked.forward, during forward")


# ------------------------------------------------------------------------------------------------------------ refusals


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def made(forward: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: chain(forward, *linear())


class WithStep(nn.Linear):
    def step(self) -> None: ...


class Graph:
    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes


def six(**attributes: Any) -> Any:
    model = Chain(*linear(6))
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def with_a_buffer_that_nothing_could_load() -> nn.Module:
    with torch.device("meta"):
        model = sequential()
        model.register_buffer("angles", torch.ones(3), persistent=False)
    return model


def within(model: nn.Module) -> Any:
    return pipelined(model, X[:2], chunks=2)


def on_graphs(self: Chain, graph: Any) -> Any:
    return Chain.forward(self, graph.nodes)


def contrasts(self: Any, x: Tensor) -> dict[str, Tensor]:
    """From a sample of one row, the similarities of two micro-batches were once put one below the other."""
    return {"logits": self.layers[0](x) @ self.layers[1](x).T}


def without_rows(self: Any, x: Tensor) -> dict[str, Tensor]:
    y = Chain.forward(self, x)
    return {"y": y, "sum": y.sum(0)}


def unknown(self: Any, x: Tensor) -> Graph:
    return Graph(Chain.forward(self, x))


def arrays(self: Any, x: Tensor) -> dict[str, Any]:
    """The error was that of a comparison, without a name."""
    y = Chain.forward(self, x)
    return {"y": y, "other": y.detach().numpy()}


def queues(self: Any, x: Tensor) -> dict[str, Any]:
    y = Chain.forward(self, x)
    return {"y": y, "other": deque([y.detach()])}


def counts(self: Any, x: Tensor) -> dict[str, Any]:
    """Each micro-batch counted its own rows, and all agreed."""
    return {"y": Chain.forward(self, x), "rows": len(x), "width": 8}


NESTED = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(2, 2)], layout=torch.jagged)

OUTPUTS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (made(contrasts), {}, ValueError, r"the output 'logits' has shapes .* couples the rows"),
    (made(contrasts), {"sample": X[:1]}, ValueError, r"the output 'logits' has shapes .* couples the rows"),
    (made(without_rows), {}, ValueError, r"the output 'sum' of shape \(\d+,\) has no dimension with the rows"),
    (made(unknown), {"chunks": 1}, TypeError, r"is Graph, whose tensor of shape \(\d, 2\) would get no gradient"),
]


class Decorated(nn.Sequential):
    """Has a compiled forward; the modules that it calls are seen by the compiler only."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Differentiates(Decorated):
    """Returns forces."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(nn.Sequential.forward(self, x).sum(), x, create_graph=True)
        return grad


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (lambda: torch.relu, {}, TypeError, "must be an nn.Module, but is"),
    (lambda: WithStep(2, 2), {}, TypeError, r"has attributes \['step'\]"),
    (lambda: torch.compile(sequential(), backend="eager"), {}, TypeError, "the whole model is compiled"),
    (lambda: Decorated(), {}, TypeError, "the whole model is compiled"),
    (lambda: Differentiates(), {}, RuntimeError, r"let one module of the model do all of it, within torch.enable_grad"),
    (lambda: nn.DataParallel(sequential()), {}, TypeError, "pipeline the module inside"),
    (lambda: GPipe(sequential(), [3], devices=["cpu"]), {}, TypeError, "is a pipeline already"),
    (lambda: within(sequential()), {}, TypeError, "is a pipeline already; call unpipelined"),
    (lambda: nn.Sequential(within(sequential())), {}, TypeError, "the module '0' inside is a pipeline already"),
    (lambda: nn.ReLU(), {}, ValueError, "nothing to split"),
    (lambda: nn.Sequential(nn.Linear(2, 2)), {}, ValueError, "fewer than the 2 partitions"),
    (with_a_buffer_that_nothing_could_load, {}, ValueError, r"the buffers \['angles'\] are on the meta device"),
    (sequential, {"chunks": 0}, ValueError, "number of chunks must be positive"),
    (sequential, {"balance": "speed"}, ValueError, "balance must be one of 'time'"),
    (sequential, {"balance": [2, 2]}, ValueError, "add up to 2, the parts of the spine"),
    (sequential, {"balance": {"5": 1}}, ValueError, "balance names '5', which is no part of the spine"),
    (six, {"balance": {"layers.1": 1, "layers.4": 0}}, ValueError, "'layers.4' into partition 0, which is 'layers.0'"),
    (six, {"balance": {"layers.0": 1}}, ValueError, "each of 2 partitions but the first begins"),
    (six, {"balance": {"layers.3": 0}}, ValueError, "1 partition does not go evenly round 2 devices"),
    (six, {"balance": {"layers.3": 1.5}}, TypeError, "balance must be"),
    (six, {"balance": 3}, TypeError, "balance must be"),
    (sequential, {"partitions": 3}, ValueError, "3 partitions do not go evenly round 2 devices"),
    (sequential, {"schedule": "2F2B"}, ValueError, "schedule must be one of"),
    (sequential, {"reduce": "max"}, ValueError, "reduce must be 'mean', 'sum' or None"),
    (sequential, {"no_chunk": ["mask"]}, ValueError, r"no_chunk names \['mask'\]"),
    (sequential, {"checkpoint": ["7"]}, ValueError, r"checkpoint names \['7'\]"),
    (sequential, {"checkpoint": "except_last"}, ValueError, "checkpoint='except_last' is for GPipe"),
    (sequential, {"sample": 3}, TypeError, "sample must be the arguments of one micro-batch"),
    # Every micro-batch got all rows of later mini-batches.
    (
        sequential,
        {"sample": X[:0]},
        ValueError,
        r"the sample has no rows in \['input'\] that could be",
    ),
    # These were errors in the first step only, without a name.
    (sequential, {"loss_fn": "mse"}, TypeError, "loss_fn must be a function, .*, but got 'mse'"),
    (sequential, {"weight": "mse"}, TypeError, "weight must be a function, .*, but got 'mse'"),
    (sequential, {"partitions": "2"}, TypeError, "partitions must be an integer, but got '2'"),
    (sequential, {"no_chunk": 3}, TypeError, "no_chunk must be a list of names, .* but got 3"),
    (sequential, {"checkpoint": 3}, TypeError, "checkpoint must be a list of names, .* but got 3"),
    # These were taken, and had no effect.
    (sequential, {"may_differ": ["tpyo"]}, ValueError, r"may_differ names \['tpyo'\], but the outputs .* \['value'\]"),
    (sequential, {"verify": ["tpyo"]}, ValueError, r"may_differ names \['tpyo'\]"),
    (sequential, {"target": X[:2]}, ValueError, "target= is for a loss function, but there is none; give loss_fn="),
    (
        made(on_graphs),
        {"sample": ({"nodes": NESTED},)},
        ValueError,
        r"no rows in \['graph.nodes'\] .* pad ",
    ),
    (made(counts), {}, ValueError, "the output 'rows' is int, which depends on the rows"),
    *[
        (made(forward), {}, ValueError, r"the output 'other' is .*, which differs between micro-batches")
        for forward in (arrays, queues)
    ],
    *OUTPUTS,
]


@pytest.mark.parametrize(("make", "options", "error", "message"), REFUSED, ids=[row[3][:30] for row in REFUSED])
def test_what_cannot_be_pipelined(
    make: Callable[[], Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    module = make()
    kind, before = type(module), copy.copy(getattr(module, "__dict__", None))
    with pytest.raises(error, match=message):
        pipelined(module, **{"sample": X[:2], "chunks": 2, "devices": ["cpu", "cpu"], **options})
    assert type(module) is kind and getattr(module, "__dict__", None) == before


@pytest.mark.parametrize(("make", "options", "error", "message"), OUTPUTS)
def test_an_output_that_is_refused_without_a_proof(
    make: Callable[[], Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    options = {"sample": X[:2], "chunks": 2, "devices": ["cpu", "cpu"], **options}
    model: Any = pipelined(make(), verify=False, **options)
    with pytest.raises(error, match=message):
        model(X)


def test_calls_that_are_refused() -> None:
    model: Any = pipelined(sequential(), X[:2], chunks=2)
    assert model.layout.spine == ["0", "2"], "by default there are no more partitions than parts"
    with pytest.raises(ValueError, match=r"the output \(Tensor\) has none; pass labels to step"):
        model.step(X)
    # DataParallel calls this method of all modules inside; with parameters, it would copy them to GPUs before.
    with pytest.raises(RuntimeError, match=r"nn\.DataParallel cannot be around a pipelined Sequential"):
        nn.Sequential(model)[0]._replicate_for_data_parallel()
    model = pipelined(decoder(), sample_of(data := batch()), chunks=2, devices=["cpu"] * 2)
    with pytest.raises(ValueError, match="the batch has 6 rows in dimension 0, but 'labels' has 5"):
        model(data["ids"], labels=data["labels"][:5])
    model = pipelined(sequential(), X[:2], chunks=2, devices=TWO, loss_fn=nn.functional.mse_loss)
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint is around a pipelined model"):
        checkpoint(model, X, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"transforms of torch\.func cannot go through"):
        torch.func.vmap(model)(X[:, None])
    with pytest.raises(ValueError, match="but the sample did not have it") as raised:
        model.step(X, X)
    assert "no target was given: step(..., target=y)" in raised.value.__notes__


@pytest.mark.parametrize("call", ["forward", "step", "no_grad"])
def test_what_cannot_be_split_is_told_by_its_class_and_once(call: str) -> None:
    graph = Graph(X)
    model: Any = pipelined(made(on_graphs)(), (graph,), chunks=2, devices=TWO, loss_fn=lambda y, _: y.mean())
    with torch.set_grad_enabled(call != "no_grad"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            (model.step if call == "step" else model)(graph)
    (one,) = told
    assert "nothing to split ('graph' is Graph); pass dense tensors" in str(one.message)
    assert one.filename == __file__


def turns(self: Any, x: Tensor, turn: bool = False) -> Any:
    a, b = self.layers
    return a(b(x)) if turn else b(a(x))


def test_turning_back_to_an_earlier_partition_is_refused() -> None:
    model: Any = pipelined(made(turns)(), X[:2], chunks=2, devices=TWO)
    model(X)
    with pytest.raises(RuntimeError, match=r"'layers\.0' belongs to partition 0, but the model has called it after"):
        model(X, turn=True)
    with torch.no_grad():
        model(X)


def test_errors_and_the_layout_count_partitions_also_where_some_run_as_one() -> None:
    """Neighbours on one device run as one; errors, and what crosses, called the partition after them 1."""

    def forward(self: Any, x: Tensor, turn: bool = False) -> Any:
        first, *others = self.layers
        for layer in [*others, first] if turn else [first, *others]:
            x = layer(x)
        return x

    devices = ["cpu:0", "cpu:0", "cpu:1"]
    layers = [nn.Linear(2, 2) for _ in range(3)]
    model: Any = pipelined(chain(forward, *layers), X[:2], chunks=2, devices=devices)
    with pytest.raises(RuntimeError, match=r"'layers\.0' belongs to partitions 0 to 1, .* modules of partition 2,"):
        model(X, turn=True)
    model(X)
    assert [(tensor.source, tensor.target) for tensor in model.layout.crossed] == [(1, 2)]


def test_a_layer_at_the_address_of_the_one_that_it_replaces() -> None:
    """It was taken for that one, so it had no door, and the caller's graph did not lead to its parameters."""
    model: Any = pipelined(Chain(nn.Linear(2, 2), nn.Linear(2, 2)), X[:2], chunks=2, devices=TWO)
    for _ in range(10):
        address = id(model.layers[1])
        model.layers[1] = nn.Identity()
        layers = [nn.Linear(2, 2) for _ in range(100)]
        model.layers[1] = next((layer for layer in layers if id(layer) == address), layers[0])
        assert None not in torch.autograd.grad(model(X).sum(), list(model.parameters()), allow_unused=True)


def test_a_model_does_not_keep_its_sample() -> None:
    """Copies and pickles had it as well, and a sample with a graph could not be copied."""
    sample = (torch.randn(2, 4, requires_grad=True) * 2, [torch.ones(4, 4)])
    seen = weakref.ref(sample[0])
    model = pipelined(chain(lambda self, x, rest: Chain.forward(self, x)), sample, chunks=2, devices=TWO)
    del sample
    gc.collect()
    assert seen() is None
    assert copy.deepcopy(model)(torch.ones(4, 4), [torch.ones(4, 4)]).shape == (4, 4)


def test_a_shallow_copy_runs_by_itself() -> None:
    """It has got the attributes of the model, also the one with what runs that."""
    model = chain(lambda self, x: Chain.forward(self, x) * self.scale, nn.Linear(2, 2), nn.Linear(2, 2))
    model.scale = 1
    pipelined(model, X[:2], chunks=2, devices=TWO)
    copied = copy.copy(model)
    copied.scale = 2
    expected = 2 * model(X)
    del model
    assert torch.equal(copied(X), expected)


# ------------------------------------------------------------------------------------------------- inputs and outputs


@pytest.mark.parametrize(
    ("names", "counts"),
    [
        ({"layers.4": 1}, [4, 2]),
        ({"layers.4": 1, "layers.2": 0}, [4, 2]),
        ({**{f"layers.{k}": int(k > 2) for k in range(6)}, "tanh": 0}, [3, 3]),
        ({"layers": 0, "layers.5": 1}, [5, 1]),
    ],
)
def test_a_balance_by_names_loses_no_part(names: dict[str, int], counts: list[int]) -> None:
    """The last name of a partition won: with a whole device_map, some blocks were in no partition."""
    model = six(tanh=nn.Tanh(), between=lambda self, k, x, first: self.tanh(x))
    assert pipelined(model, X, chunks=4, devices=TWO, balance=names).layout.balance == counts


def test_a_balance_takes_the_devices_of_a_device_map() -> None:
    model = pipelined(six(), X, chunks=4, balance={"layers.0": "cpu:0", "layers.4": "cpu:1"})
    assert model.layout.balance == [4, 2]
    assert [str(partition.device) for partition in model.layout.partitions] == ["cpu:0", "cpu:1"]
    with pytest.raises(TypeError, match="devices= has no use"):
        pipelined(six(), X, chunks=4, balance={"layers.4": "cpu:1"}, devices=TWO)


class Shifted(nn.Module):
    """A block with a parameter of its own, used before its first module and behind the last, as in Wan, LTX, PixArt."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale = self.table.unsqueeze(0).unbind(1)
        return x + self.b(x + self.a(x + shift)) * scale


class Tower(nn.Module):
    """Blocks behind a parameter of its own, as in a vision transformer, which an adapted or multimodal model wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.blocks = nn.Parameter(torch.ones(6)), nn.ModuleList([Shifted() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("partitions", "parts"), [(None, 8), (5, 5)])
def test_a_module_with_a_parameter_of_its_own_is_opened_under_offload(partitions: int | None, parts: int) -> None:
    """A tower in a wrapper was one partition with nearly all weights, and said nothing of it."""
    plain, x = nn.Sequential(Tower(), nn.Linear(6, 6)).double(), torch.randn(4, 6, dtype=torch.float64)
    options: Any = {
        "chunks": 2,
        "devices": ["cpu"],
        "partitions": partitions,
        "loss_fn": lambda y, _: y.mean(),
        "reduce": "mean",
    }
    model: Any = pipelined(copy.deepcopy(plain), x[:2], offload=True, **options)
    assert len(model.layout.partitions) == parts
    assert max(part.size for one in model.layout.partitions for part in one.parts) < 1000
    for _ in range(2):
        model.step(x, target=x)
        model(x).mean().backward()
        for rows in [*x.chunk(2), *x.chunk(2)]:
            (plain(rows).mean() / 2).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-14, atol=1e-14)


def test_offload_has_several_partitions_for_each_device() -> None:
    """One for each device would leave nothing in host memory."""
    assert len(pipelined(six(), X, chunks=4, devices=TWO, offload=True).layout.partitions) == 6


def test_a_table_goes_whole_also_if_it_has_as_many_rows_as_the_batch(data: dict[str, Tensor]) -> None:
    model = decoder()
    table = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    plain = copy.deepcopy(model)
    expected = torch.cat([plain(ids, table=table)["logits"] for ids in data["ids"].chunk(3)])
    expected.sum().backward()
    grad, table.grad = table.grad, None
    pipelined(model, {"ids": data["ids"][:2], "table": table}, chunks=3, devices=TWO, no_chunk="table")
    output = model(data["ids"], table=table)
    assert torch.equal(output["logits"], expected)
    output["logits"].sum().backward()
    same({"table": table.grad}, {"table": grad})


def test_an_argument_that_the_sample_lacked_is_not_guessed_to_be_rows() -> None:
    """A bias of as many items as the batch has rows was split, and each micro-batch got another part of it."""

    def forward(self: Any, x: Tensor, *, bias: Any = 0.0) -> Any:
        return Chain.forward(self, x) + bias

    model, x, bias = made(forward)(), torch.randn(2, 2), torch.arange(2.0)
    expected = torch.cat([model(row, bias=bias) for row in x.chunk(2)])
    for sample, options in ((x, {}), (x, {"no_chunk": ["bias"]}), ({"x": x.repeat(2, 1), "bias": bias}, {})):
        pipelined(model, sample, chunks=2, devices=TWO, **options)
        if sample is x and not options:
            with pytest.raises(ValueError, match=r"'bias' has 2 items, .* a sample with it, or no_chunk=\['bias'\]"):
                model(x, bias=bias)
        else:
            assert torch.equal(model(x, bias=bias), expected)
        model.unpipelined()


def test_integers_like_another_argument_are_rows_though_the_sample_lacked_them() -> None:
    """The attention mask of a collator, as in the recipe of Hugging Face, whose sample has ids and labels alone."""

    def forward(self: Any, x: Tensor, mask: Any = 1) -> Any:
        return Chain.forward(self, x) * mask

    model, x, mask = made(forward)(), torch.randn(4, 2), torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]])
    expected = torch.cat([model(*rows) for rows in zip(x.chunk(2), mask.chunk(2))])
    pipelined(model, x, chunks=2, devices=TWO)
    assert torch.equal(model(x, mask), expected)


def test_rows_are_those_of_what_is_split() -> None:
    """They were those of the table, so that every micro-batch got all rows of the other."""

    def forward(self: Any, x: Tensor | None = None, y: Tensor | None = None, *, table: Tensor) -> Any:
        return Chain.forward(self, y if x is None else x) + table.sum(0)  # type: ignore[arg-type]

    model, table, y = made(forward)(), torch.randn(5, 2), torch.randn(6, 2)
    expected = torch.cat([model(table=table, y=part) for part in y.chunk(4)])
    pipelined(model, {"y": y[:3], "table": table}, chunks=4, devices=TWO)
    assert torch.equal(model(table=table, y=y), expected)


def test_an_output_that_all_micro_batches_share() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return {"y": Chain.forward(self, x), "table": table}

    table = torch.ones(3)
    assert torch.equal(within(made(forward)())(X)["table"], table)


def test_layout_shows_what_crosses(data: dict[str, Tensor]) -> None:
    model: Any = pipelined(decoder(), sample_of(data), chunks=3, devices=TWO, balance=[3, 4])
    assert model.layout.balance == [3, 4]
    assert model.layout.spine == ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "head"]
    assert model.layout.tied == [("embed.weight", "head.weight")]
    assert model.layout.crossed == []
    assert "pipelined: balance=[3, 4], devices=['cpu:0', 'cpu:1'], chunks=3" in repr(model)
    model.step(**data)
    text = str(model.layout)
    assert "embed..layers.1" in text
    assert "0 to 1: 2x5x6 float64, 480 B" in text


class Skip(nn.Module):
    """A level of a U-Net, around the levels below it."""

    def __init__(self, down: nn.Module, below: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.down, self.below, self.up = down, below, up

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x).tanh()
        return x + self.up(self.below(x).tanh())


class Nested(nn.Module):
    """A U-Net whose levels call what two lists of the model have, as DynUNet of MONAI does."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.ups = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.levels: nn.Module = nn.Linear(4, 4)
        for down, up in zip(self.downs, self.ups):
            self.levels = Skip(down, self.levels, up)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.levels(x))
        return output


def test_levels_within_levels_are_parts_of_their_own(devices: Devices) -> None:
    """They once were a single part, as no level calls two elements of one list itself."""
    torch.manual_seed(0)
    model: Any = Nested().double()
    plain, x = copy.deepcopy(model), torch.randn(6, 4, dtype=torch.float64)
    pipelined(model, (x[:2],), chunks=3, devices=devices(2), balance="parameters")
    assert model.layout.spine == ["downs.2", "downs.1", "levels.below.below", "ups.1", "ups.2", "head"]
    # A module with several names, as here each level, ties nothing.
    assert model.layout.tied == []
    model(x).square().sum().backward()
    for part in x.chunk(3):
        plain(part).square().sum().backward()
    same(gradients(model), gradients(plain))


def test_checkpointed_modules_run_again(devices: Devices, data: dict[str, Tensor]) -> None:
    model = decoder()
    plain = copy.deepcopy(model)
    names = ["layers.1", "layers.2"]
    pipelined(model, sample_of(data), chunks=3, devices=devices(2), balance=[3, 4], checkpoint=names)
    calls = []
    for layer in model.layers:
        layer.up.register_forward_hook(lambda module, args, output: calls.append(module))
    model.step(**data)
    assert [calls.count(layer.up) for layer in model.layers] == [3, 6, 6, 3]
    gradients(model)
    expect_plain(model, plain, data)


def test_a_call_in_one_piece_says_so_once() -> None:
    def forward(self: Chain, x: Tensor, use_cache: bool = False) -> Any:
        return Chain.forward(self, x)

    model: Any = pipelined(made(forward)(), X[:2], chunks=2, devices=TWO)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="pass the partitions in one piece") as caught:
            model(X, use_cache=True)
        assert caught[0].filename == __file__  # The line that calls the model.
        model(X, use_cache=True)


class TokenCache:
    """What a decoder returns beside its output, and nobody looks at in training."""

    def __init__(self, seen: Tensor) -> None:
        self.seen = seen


def test_a_cache_among_the_outputs_raises_when_it_is_used() -> None:
    def forward(self: Chain, x: Tensor) -> Any:
        x = Chain.forward(self, x)
        return {"x": x, "cache": TokenCache(x)}

    model: Any = pipelined(made(forward)(), X[:2], chunks=2, devices=TWO)
    output = model(X)
    output["x"].sum().backward()
    assert not hasattr(copy.deepcopy(output["cache"]), "seen")
    with pytest.raises(AttributeError, match=r"'seen' of a cache .* had a cache of its own, .* with use_cache=True"):
        output["cache"].seen.sum()


@pytest.mark.parametrize(
    "schedule, places", [("GPipe", [0, 1, 2]), ("1F1B", [0, 1, 2]), ("Interleaved1F1B", [0, 1] * 2)]
)
def test_few_frames_are_under_way_at_a_time(schedule: str, places: list[int]) -> None:
    """The first worker began all frames at once. Each has a thread, which takes memory of each device."""
    names: set[str] = set()

    def noted(linear: nn.Linear, x: Tensor, times: int) -> Tensor:
        names.add(threading.current_thread().name)
        return torch.stack([linear(x).tanh() for _ in range(times)]).mean(0)

    n, m = len(places), 16
    # The last one is slower than the others: they would run ahead.
    model: Any = nn.Sequential(*[Using(partial(noted, times=50 if j == n - 1 else 1)) for j in range(n)])
    devices, loss_fn = [f"cpu:{place}" for place in places], nn.functional.mse_loss
    options: Any = {"balance": [1] * n, "chunks": m, "schedule": schedule, "loss_fn": loss_fn, "devices": devices}
    pipelined(model, torch.randn(m, 4), **options)
    x = torch.randn(m, 4)
    for run in (lambda: model.step(x, target=x), lambda: model(x).sum().backward()):
        names.clear()
        run()
        assert 1 <= len([name for name in names if "frame" in name]) <= n + 1


def test_a_step_does_not_pass_by_a_forward_of_the_models_own() -> None:
    """A forward that was set on the pipelined model was left out by steps, and ran in calls only."""
    model: Any = pipelined(sequential(), X[:2], chunks=2, devices=TWO, loss_fn=lambda output, _: output.mean())
    expected = model.step(X)
    own = model.forward
    model.forward = lambda x: own(x) * 2
    with pytest.raises(RuntimeError, match=r"a forward of its own .* del model\.forward"):
        model.step(X)
    del model.forward
    assert torch.equal(model.step(X), expected)


def test_a_method_in_the_place_of_forward_does_not_train_past_the_pipeline() -> None:
    """Trainers of TRL set one that calls the modules inside: the mini-batch went in one piece, without a word."""
    model: Any = pipelined(sequential(), X[:2], chunks=2, devices=TWO, loss_fn=lambda output, _: output.mean())

    def fused(self: Any, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x

    expected = model(X)
    model.forward = types.MethodType(fused, model)
    with pytest.raises(RuntimeError, match=r"past the pipeline, by another forward .* or call del model\.forward"):
        model(X)
    model._original_forward = model.forward  # As accelerate does, around which it puts an autocast.
    with pytest.raises(RuntimeError, match="past the pipeline"):
        model(X)
    with torch.no_grad():
        torch.testing.assert_close(model(X), expected)
    del model.forward, model._original_forward
    assert torch.equal(model(X), expected)


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please switch to:DeprecationWarning")
@pytest.mark.parametrize(
    "trace",
    [
        lambda model: torch.jit.trace(model, (X,)),  # type: ignore[no-untyped-call]
        lambda model: torch.export.export(model, (X,)),
        torch.fx.symbolic_trace,
    ],
    ids=["jit", "export", "fx"],
)
def test_tracing_is_refused_and_works_without_the_pipeline(trace: Callable[[Any], Any]) -> None:
    """A trace under no_grad() was a constant in silence, and other errors were those of PyTorch."""
    model: Any = pipelined(sequential(), X[:2], chunks=2, devices=TWO).eval()
    expected = model(X)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"cannot be traced .* call model\.unpipelined\(\) first"):
        trace(model)
    trace(model.unpipelined())
    torch.testing.assert_close(model(X), expected)


@pytest.mark.parametrize(("schedule", "run"), [("GPipe", "step"), ("1F1B", "call")])
def test_hooks_that_keep_a_stack_find_their_own_micro_batch(schedule: Any, run: str, devices: Devices) -> None:
    """As those of Opacus do. Under 1F1B, a step takes micro-batches in another order."""
    x, layers = torch.randn(6, 4).double().requires_grad_(), [nn.Linear(4, 4) for _ in range(4)]
    model: Any = nn.Sequential(*layers).double()
    options: dict[str, Any] = {
        "schedule": schedule,
        "loss_fn": lambda output, _: output.square().mean(),
        "reduce": "mean",
    }
    pipelined(model, x[:2].detach(), chunks=3, devices=devices(2), balance=[2, 2], **options)
    sums: dict[nn.Module, Tensor] = {}

    def push(layer: Any, args: Any, output: Tensor) -> None:
        layer.stack.append(args[0].detach())

    def pop(layer: Any, inputs: Any, outputs: Any) -> None:
        sums[layer] = sums.get(layer, torch.zeros(())) + outputs[0].t() @ layer.stack.pop()

    for layer in layers:
        layer.stack = []  # type: ignore[assignment]
        layer.register_forward_hook(push)
        layer.register_full_backward_hook(pop)
    if run == "step":
        model.step(x)
    else:
        model(x).square().mean().backward()
    for layer in layers:
        torch.testing.assert_close(sums[layer], layer.weight.grad)
