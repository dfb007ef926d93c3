"""`torchgpipe.pipelined`: what it returns, takes, refuses, and leaves behind."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Devices
from tests.frames.models import TWO, Block, Chain, Decoder, batch, chain, gradients, plain_loss, same
from torchgpipe import GPipe, pipelined
from torchgpipe.frames.pipelined import pipelined_apart
from torchgpipe.schedule import Action, program


@pytest.fixture
def data() -> dict[str, Tensor]:
    return batch()


def of(data: dict[str, Tensor], rows: int = 2) -> dict[str, Tensor]:
    return {name: tensor[:rows] for name, tensor in data.items()}


def decoder(**options: Any) -> Decoder:
    return Decoder(**options).double()


SCHEDULES = ["GPipe", "1F1B", "ZeroBubble"]


@pytest.mark.on_late
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_loss_and_gradients_are_those_of_the_plain_model(
    devices: Devices, data: dict[str, Tensor], n: int, schedule: Any
) -> None:
    model = decoder()
    plain = copy.deepcopy(model)
    loss, outputs = plain_loss(plain, data, 3)
    expected = gradients(plain)
    assert pipelined(model, of(data), chunks=3, devices=devices(n), schedule=schedule) is model

    output = model(**data)
    torch.testing.assert_close(output["loss"].cpu(), loss, rtol=1e-14, atol=0)
    # A copy on another device has other strides, with which products may round differently.
    slack = 1e-12 if devices(1) == ["late:0"] else 0.0
    for ours, of_all in (
        (output["logits"], [one["logits"] for one in outputs]),
        (output["hidden"][2], [one["hidden"][2] for one in outputs]),
    ):
        torch.testing.assert_close(ours.cpu(), torch.cat(of_all), rtol=slack, atol=slack)
    output["loss"].backward()
    same(gradients(model), expected)

    assert model.step(**data).item() == pytest.approx(loss.item(), rel=1e-14)
    same(gradients(model), expected)
    model.step(**data)
    before = model.norm.weight.grad
    model.step(**data)
    assert model.norm.weight.grad is before
    same(gradients(model), {name: None if grad is None else 2 * grad for name, grad in expected.items()})
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            torch.testing.assert_close(model(data["ids"])["logits"], output["logits"], rtol=0, atol=0)


@pytest.mark.late
def test_in_one_piece_a_leaf_on_another_device_has_its_gradient() -> None:
    """The proof once found no gradients of the plain model but those on its last device."""
    model: Any = pipelined(Coder(), X[:2], chunks=2, devices=["late:0", "late:1", "late:2"], balance=[1, 1, 1])
    leaf = torch.ones(2, requires_grad=True, device="late:0")
    leaf.grad = torch.ones_like(leaf)
    with model._runs().in_one_piece(model, backward=False):
        model.layers[2](X.to("late:2"))
        assert leaf.grad is not None


@pytest.mark.parametrize("has_run", [False, True])
def test_modules_that_are_new_run_where_they_stand(devices: Devices, data: dict[str, Tensor], has_run: bool) -> None:
    """A block is replaced, one is appended, the head, and a part of a block; a new one is made on the meta device."""
    model: Any = pipelined(decoder(), of(data), chunks=3, devices=devices(2))
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
    plain = copy.deepcopy(model).unpipelined()
    loss, _ = plain_loss(plain, data, 3)
    expected = gradients(plain)
    torch.testing.assert_close(model.step(**data), loss, rtol=1e-12, atol=0)
    same(gradients(model), expected)
    model(**data)["loss"].backward()
    same(gradients(model), expected)


class Coder(nn.Module):
    """Has methods beside forward, with a residual across partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    def encode(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[1](self.layers[0](x).relu())
        return y

    def decode(self, y: Tensor) -> Tensor:
        return y + self.layers[2](y)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


@pytest.mark.late
@pytest.mark.parametrize("verify", [False, True])
def test_methods_beside_forward_run_from_device_to_device(verify: bool) -> None:
    """They once mixed tensors of two devices."""
    plain = Coder()
    options: dict[str, Any] = {"chunks": 2, "devices": [f"late:{j}" for j in range(3)], "balance": [1, 1, 1]}
    model: Any = pipelined(copy.deepcopy(plain), X[:2], verify=verify, **options)
    code = model.encode(X)
    output = model.decode(code)
    assert code.device == output.device == torch.device("late:0")
    assert torch.equal(output.cpu(), plain(X))


@pytest.mark.parametrize(
    "names",
    [["cpu"] * 8, pytest.param(["late:0"] * 4 + ["late:1"] * 4, marks=pytest.mark.late)],
    ids=["inline", "late"],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_neighbours_on_one_device_may_be_kept_apart(data: dict[str, Tensor], names: list[str], schedule: Any) -> None:
    model: Any = decoder(layers=5)
    plain = copy.deepcopy(model)
    loss, _ = plain_loss(plain, data, 3)
    expected = gradients(plain)
    pipelined_apart(model, of(data), chunks=3, devices=names, balance=[1] * 8, schedule=schedule)
    for run in (lambda: model(**data)["loss"].backward(), lambda: model.step(**data)):
        run()
        same(gradients(model), expected)
    assert model.step(**data).item() == pytest.approx(loss.item(), rel=1e-14)


def test_the_second_half_of_backward_may_come_last(devices: Devices, data: dict[str, Tensor]) -> None:
    """The first column leaves all of its backward to it: nobody waits for the gradient of an input that needs none."""

    def weights_last(m: int, places: Sequence[int]) -> Any:
        halves = [[*map(Action._make, own)] for own in program("ZeroBubble", m, places)]
        return [sorted(own, key=lambda action: action.kind == "W") for own in halves]

    model: Any = decoder()
    plain = copy.deepcopy(model)
    plain_loss(plain, data, 3)
    expected = gradients(plain)
    pipelined_apart(model, of(data), chunks=3, devices=devices(2), schedule=weights_last)
    for _ in range(2):
        model.step(**data)
        same(gradients(model), expected)


@pytest.mark.parametrize(
    ("schedule", "count"), [("Interleaved1F1B", 2), ("LayerMajor", 1), ("LayerMajor", 2), ("LayerMajor", 4)]
)
def test_partitions_may_go_round_the_devices(data: dict[str, Tensor], schedule: str, count: int) -> None:
    model = decoder()
    plain = copy.deepcopy(model)
    plain_loss(plain, data, 3)
    expected = gradients(plain)
    options: dict[str, Any] = {"devices": [f"cpu:{k}" for k in range(count)], "partitions": 4, "schedule": schedule}
    pipelined(model, of(data), chunks=3, **options)
    assert len(model._runs().settings.labels) == 4, "each partition is a column of its own"
    model.step(**data)
    same(gradients(model), expected)


# --------------------------------------------------------------------------------------------------------- in place


def test_moving_is_refused_and_casting_is_not(data: dict[str, Tensor]) -> None:
    model: Any = pipelined(decoder(), of(data), chunks=2, devices=TWO)
    model.to("cpu")
    model.float()
    assert model.embed.weight.dtype == torch.float32
    with pytest.raises(TypeError, match="denied to move a pipelined Decoder"):
        model.to("meta")


def test_a_model_on_the_meta_device_comes_into_being_in_parts(data: dict[str, Tensor]) -> None:
    real = decoder()
    with torch.device("meta"):
        model: Any = Decoder().double()
    parameters = list(model.parameters())
    pipelined(model, of(data), chunks=3, devices=TWO)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.norm.weight.isnan().all()
    model.load_state_dict(real.state_dict())
    loss, _ = plain_loss(real, data, 3)
    torch.testing.assert_close(model.step(**data), loss, rtol=1e-14, atol=0)


def test_buffers_that_nothing_could_load_are_refused() -> None:
    class Rotary(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.ones(3), persistent=False)

    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(ValueError, match=r"the buffers \['angles'\] are on the meta device"):
        pipelined(model, of(batch()), chunks=2, devices=["cpu"] * 2)


# -------------------------------------------------------------------------------------------------- autograd around it


@pytest.fixture
def pair(devices: Devices, data: dict[str, Tensor]) -> tuple[Any, Decoder]:
    """Return a pipelined model and the plain one."""
    model = decoder()
    plain = copy.deepcopy(model)
    return pipelined(model, of(data), chunks=3, devices=devices(2)), plain


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


@pytest.mark.parametrize("run", ["backward", "step"])
def test_hooks_of_parameters_hear_the_gradient_once(
    pair: tuple[Any, Decoder], data: dict[str, Tensor], run: str
) -> None:
    model, plain = pair
    plain_loss(plain, data, 3)
    heard: list[Tensor] = []
    model.embed.weight.register_hook(heard.append)
    after: list[Tensor] = []
    model.layers[2].up.weight.register_post_accumulate_grad_hook(lambda one: after.append(one.grad.clone()))
    if run == "step":
        model.step(**data)
    else:
        model(**data)["loss"].backward()
    assert len(heard) == len(after) == 1
    expected = gradients(plain)
    same({"embed": heard[0], "up": after[0]}, {"embed": expected["embed.weight"], "up": expected["layers.2.up.weight"]})


def test_frozen_parameters_get_no_gradient(pair: tuple[Any, Decoder], data: dict[str, Tensor]) -> None:
    model, plain = pair
    for one in (model, plain):
        for parameter in [*one.embed.parameters(), one.place, *one.layers[:3].parameters()]:
            parameter.requires_grad_(False)
    plain_loss(plain, data, 3)
    expected = gradients(plain)
    model.step(**data)
    same(gradients(model), expected)
    model(**data)["loss"].backward()
    same(gradients(model), expected)


def test_nothing_is_left_after_backward(pair: tuple[Any, Decoder], data: dict[str, Tensor]) -> None:
    model, _ = pair
    held: list[weakref.ref[Tensor]] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        held.append(weakref.ref(output))

    model.layers[0].register_forward_hook(note)
    model.layers[3].register_forward_hook(note)
    gc.disable()
    try:
        model.step(**data)
        assert [ref() for ref in held] == [None] * len(held)
        output = model(**data)
        output["loss"].backward()
        del output
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()
    assert threading.active_count() == 1 or not [one for one in threading.enumerate() if "torchgpipe" in one.name]


# ------------------------------------------------------------------------------------------------------ random numbers


@pytest.mark.parametrize("checkpoint", [False, True])
def test_dropout_is_the_same_for_any_devices(data: dict[str, Tensor], checkpoint: bool) -> None:
    results = []
    for places in (["cpu"], ["cpu"] * 2, TWO, ["cpu:0", "cpu:1", "cpu:2"]):
        torch.manual_seed(5)
        model: Any = Decoder(dropout=0.5).double()
        pipelined(model, of(data), chunks=3, devices=places, checkpoint=checkpoint)
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
    model: Any = decoder()
    before = torch.random.get_rng_state()
    pipelined(model, of(data), chunks=3, devices=TWO, checkpoint=True)
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


@pytest.mark.parametrize("run", ["backward", "step"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_error_is_the_callers_and_tells_where(
    devices: Devices, data: dict[str, Tensor], run: str, phase: str
) -> None:
    """A block fails at its second micro-batch. Gradients that are there stay, and the next step works."""
    model: Any = pipelined(decoder(), of(data), chunks=3, devices=devices(2), balance=[3, 4])
    model.step(**data)
    before = gradients(model)
    for name, parameter in model.named_parameters():
        parameter.grad = before[name]
    copies = {name: grad.clone() for name, grad in before.items() if grad is not None}
    calls: list[Tensor] = []

    def fail(*_: Any) -> None:
        raise KeyError("here")

    def hook(block: Any, args: Any, output: Tensor) -> None:
        calls.append(output)
        if len(calls) == 2:
            fail() if phase == "forward" else output.register_hook(fail)  # type: ignore[no-untyped-call]

    handle = model.layers[2].register_forward_hook(hook)
    with pytest.raises(KeyError) as raised:
        if run == "step":
            model.step(**data)
        else:
            model(**data)["loss"].backward()
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


def plain_sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


X = torch.randn(4, 2)


class WithStep(nn.Linear):
    def step(self) -> None: ...


class Graph:
    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes


def halves() -> list[nn.Module]:
    return [nn.Linear(2, 2), nn.Linear(2, 2)]


def on_graphs(self: Chain, graph: Any) -> Any:
    return Chain.forward(self, graph.nodes)


def not_layers(self: Any, x: Tensor) -> Tensor:
    return x * self.weight


def weight_alone() -> nn.Module:
    model: nn.Module = type("Net", (nn.Module,), {"forward": not_layers})()
    model.weight = nn.Parameter(torch.ones(2))
    return model


NESTED = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(2, 2)], layout=torch.jagged)


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (lambda: torch.relu, {}, TypeError, "must be an nn.Module, but is"),
    (lambda: WithStep(2, 2), {}, TypeError, r"has attributes \['step'\]"),
    (lambda: torch.compile(plain_sequential(), backend="eager"), {}, TypeError, "the whole model is compiled"),
    (lambda: nn.DataParallel(plain_sequential()), {}, TypeError, "pipeline the module inside"),
    (lambda: GPipe(plain_sequential(), [3], devices=["cpu"]), {}, TypeError, "is a pipeline already"),
    (weight_alone, {}, ValueError, "nothing to split"),
    (lambda: nn.Sequential(nn.Linear(2, 2)), {}, ValueError, "fewer than the 2 partitions"),
    (plain_sequential, {"chunks": 0}, ValueError, "number of chunks must be positive"),
    (plain_sequential, {"balance": "speed"}, ValueError, "balance must be one of 'time'"),
    (plain_sequential, {"balance": [2, 2]}, ValueError, "add up to 2, the parts of the spine"),
    (plain_sequential, {"balance": {"5": 1}}, ValueError, "balance names '5', which is no part of the spine"),
    (plain_sequential, {"schedule": "2F2B"}, ValueError, "schedule must be one of"),
    (plain_sequential, {"reduce": "max"}, ValueError, "reduce must be 'mean', 'sum' or None"),
    (plain_sequential, {"no_chunk": ["mask"]}, ValueError, r"no_chunk names \['mask'\]"),
    (plain_sequential, {"checkpoint": ["7"]}, ValueError, r"checkpoint names \['7'\]"),
    (plain_sequential, {"sample": 3}, TypeError, "sample must be the arguments of one micro-batch"),
    (lambda: pipelined(plain_sequential(), X[:2], chunks=2), {}, TypeError, "is a pipeline already; call unpipelined"),
    (
        lambda: nn.Sequential(pipelined(plain_sequential(), X[:2], chunks=2), nn.Linear(2, 2)),
        {},
        TypeError,
        "the module '0' inside is a pipeline already",
    ),
    (
        lambda: chain(on_graphs, *halves()),
        {"sample": ({"nodes": NESTED},)},
        ValueError,
        r"\['graph.nodes'\] are nested tensors, .* pad them",
    ),
    (plain_sequential, {"partitions": 3}, ValueError, "3 partitions do not go evenly round 2 devices"),
]


@pytest.mark.parametrize(("make", "options", "error", "message"), REFUSED, ids=[row[3][:30] for row in REFUSED])
def test_what_cannot_be_pipelined(
    make: Callable[[], Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    options = {"sample": (X[:2],), "chunks": 2, "devices": ["cpu", "cpu"], **options}
    module = make()
    kind = type(module)
    with pytest.raises(error, match=message):
        pipelined(module, options.pop("sample"), **options)
    assert type(module) is kind


def test_calls_that_are_refused() -> None:
    model: Any = pipelined(plain_sequential(), X[:2], chunks=2)
    assert model.layout.spine == ["0", "2"], "by default there are no more partitions than parts"
    with pytest.raises(ValueError, match=r"the output \(Tensor\) has none; pass labels to step"):
        model.step(X)
    # DataParallel calls this method of all modules inside; with parameters, it would copy them to GPUs before.
    with pytest.raises(RuntimeError, match=r"nn\.DataParallel cannot be around a pipelined Sequential"):
        nn.Sequential(model)[0]._replicate_for_data_parallel()
    model = pipelined(Decoder(), of(data := batch()), chunks=2, devices=["cpu"] * 2)
    with pytest.raises(ValueError, match="the batch has 6 rows in dimension 0, but 'labels' has 5"):
        model(data["ids"], labels=data["labels"][:5])


@pytest.mark.parametrize("call", ["forward", "step", "no_grad"])
def test_what_cannot_be_split_is_told_by_its_class_and_once(call: str) -> None:
    graph = Graph(X)
    model: Any = pipelined(chain(on_graphs, *halves()), (graph,), chunks=2, devices=TWO, loss_fn=lambda y, _: y.mean())
    with torch.set_grad_enabled(call != "no_grad"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            (model.step if call == "step" else model)(graph)
    (one,) = told
    assert "nothing to split ('graph' is Graph); pass dense tensors" in str(one.message)
    assert one.filename == __file__


@pytest.mark.filterwarnings("ignore:torchgpipe.pipelined. a training call runs as one micro-batch")
def test_an_empty_mini_batch_does_not_tell_what_is_drawn() -> None:
    """After one, layers that draw once drew without seeds, so the numbers depended on the partitions."""
    outputs = []
    for devices in (["cpu"] * 2, TWO):
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(2, 9), nn.Dropout(), nn.Linear(9, 9), nn.Dropout())
        model: Any = pipelined(made, X[:2], chunks=2, devices=devices)
        model(X[:0])
        torch.manual_seed(1)
        outputs.append(model(X))
    assert torch.equal(*outputs)


def contrasts(self: Any, x: Tensor) -> dict[str, Tensor]:
    return {"logits": self.layers[0](x) @ self.layers[1](x).T}


@pytest.mark.parametrize("rows", [1, 2])
def test_an_output_that_couples_the_rows_is_refused_by_name(rows: int) -> None:
    """From a sample of one row, the similarities of two micro-batches were once put one below the other."""
    refusal = r"the output 'logits' has shapes .* couples the rows"
    with pytest.raises(ValueError, match=refusal):
        pipelined(chain(contrasts, *halves()), X[:rows], chunks=2, devices=["cpu"] * 2)
    model: Any = pipelined(chain(contrasts, *halves()), X[:rows], chunks=2, devices=["cpu"] * 2, verify=False)
    with pytest.raises(ValueError, match=refusal):
        model(X)


def turns(self: Any, x: Tensor, turn: bool = False) -> Any:
    a, b = self.layers
    return a(b(x)) if turn else b(a(x))


def test_turning_back_to_an_earlier_partition_is_refused() -> None:
    model: Any = pipelined(chain(turns, *halves()), X[:2], chunks=2, devices=TWO)
    model(X)
    with pytest.raises(RuntimeError, match=r"'layers\.0' belongs to partition 0, but the model has called it after"):
        model(X, turn=True)
    with torch.no_grad():
        model(X)


def test_errors_count_partitions_as_the_layout_does() -> None:
    """Neighbours on one device run as one, and errors called the partition after them 1."""

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


# ------------------------------------------------------------------------------------------------- inputs and outputs


def test_a_table_goes_whole_also_if_it_has_as_many_rows_as_the_batch(data: dict[str, Tensor]) -> None:
    model: Any = decoder()
    table = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    plain = copy.deepcopy(model)
    expected = torch.cat([plain(ids, table=table)["logits"] for ids in data["ids"].chunk(3)])
    expected.sum().backward()
    grad, table.grad = table.grad, None
    pipelined(model, {"ids": data["ids"][:2], "table": table}, chunks=3, devices=TWO, no_chunk=["table"])
    output = model(data["ids"], table=table)
    assert torch.equal(output["logits"], expected)
    output["logits"].sum().backward()
    assert grad is not None
    torch.testing.assert_close(table.grad, grad, rtol=1e-12, atol=1e-12)


def test_autocast(pair: tuple[Any, Decoder], data: dict[str, Tensor]) -> None:
    model, plain = pair
    model.float()
    plain.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = [plain(ids)["logits"] for ids in data["ids"].chunk(3)]
        output = model(data["ids"])["logits"]
    assert torch.equal(output, torch.cat(expected))
    (output.float().sum()).backward()
    for one in expected:
        one.float().sum().backward()
    same(gradients(model), gradients(plain), tolerance=1e-5)


def test_loss_fn_with_targets_and_values(devices: Devices, data: dict[str, Tensor]) -> None:
    def loss_fn(output: Any, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())
        return loss, {"rows": output["logits"][:, 0], "count": torch.tensor(len(target))}

    model: Any = decoder()
    pipelined(model, {"ids": data["ids"][:2]}, chunks=4, devices=devices(2), loss_fn=loss_fn)
    plain = copy.deepcopy(model).unpipelined()
    target = data["labels"].clamp(min=0)
    loss, values = model.step(data["ids"], target=target)
    logits = plain(data["ids"])["logits"]
    torch.testing.assert_close(loss, loss_fn({"logits": logits}, target)[0].detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(values["rows"], logits[:, 0], rtol=1e-12, atol=1e-12)
    assert values["count"].tolist() == [2, 2, 2]


@pytest.mark.late
def test_the_target_may_be_on_another_device(data: dict[str, Tensor]) -> None:
    """A target on the host, as a data loader gives it, once met the output on the device of the last partition."""
    model: Any = decoder()
    options: dict[str, Any] = {"loss_fn": lambda output, target: (output["logits"].sum((1, 2)) * target).mean()}
    pipelined(model, {"ids": data["ids"][:2]}, chunks=3, devices=["late:0", "late:1"], **options)
    target = torch.randn(len(data["ids"]), dtype=torch.float64)
    model.step(data["ids"], target=target)
    expected = gradients(model)
    model.step(data["ids"], target=target.to("late:2"))
    same(gradients(model), expected)


def test_layout_shows_what_crosses(data: dict[str, Tensor]) -> None:
    model: Any = pipelined(decoder(), of(data), chunks=3, devices=TWO, balance=[3, 4])
    assert model.layout.balance == [3, 4]
    assert model.layout.spine == ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "head"]
    assert model.layout.tied == [("embed.weight", "head.weight")]
    assert model.layout.crossed == []
    assert "pipelined: balance=[3, 4], devices=['cpu:0', 'cpu:1'], chunks=3" in repr(model)
    model.step(**data)
    text = str(model.layout)
    assert "embed..layers.1" in text
    assert "0 to 1: 2x5x6 float64, 480 B" in text


def test_checkpointed_modules_run_again(devices: Devices, data: dict[str, Tensor]) -> None:
    model: Any = decoder()
    plain = copy.deepcopy(model)
    plain_loss(plain, data, 3)
    expected = gradients(plain)
    pipelined(model, of(data), chunks=3, devices=devices(2), balance=[3, 4], checkpoint=["layers.1", "layers.2"])
    calls = []
    for layer in model.layers:
        layer.up.register_forward_hook(lambda module, args, output: calls.append(module))
    model.step(**data)
    assert [calls.count(layer.up) for layer in model.layers] == [3, 6, 6, 3]
    same(gradients(model), expected)
    model(**data)["loss"].backward()
    same(gradients(model), expected)


def test_a_call_in_one_piece_says_so_once() -> None:
    def forward(self: Chain, x: Tensor, use_cache: bool = False) -> Any:
        return Chain.forward(self, x)

    model: Any = pipelined(chain(forward, *halves()), X[:2], chunks=2, devices=TWO)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="pass the partitions in one piece") as caught:
            model(X, use_cache=True)
        assert caught[0].filename == __file__  # The line that calls the model.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(X, use_cache=True)


@pytest.mark.parametrize(
    "schedule, places", [("GPipe", [0, 1, 2]), ("1F1B", [0, 1, 2]), ("Interleaved1F1B", [0, 1] * 2)]
)
def test_few_frames_are_under_way_at_a_time(schedule: str, places: list[int]) -> None:
    """The first worker began all frames at once. Each has a thread, which takes memory of each device."""
    names: set[str] = set()

    class Noted(nn.Tanh):
        def forward(self, x: Tensor) -> Tensor:
            names.add(threading.current_thread().name)
            if not self.last:
                return super().forward(x)
            # Slower than the others: they would run ahead.
            return torch.stack([super(Noted, self).forward(x) for _ in range(50)]).mean(0)

        last = False

    n, m = len(places), 16
    model: Any = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), Noted()) for _ in range(n)])
    model[-1][-1].last = True
    devices, loss_fn = [f"cpu:{place}" for place in places], nn.functional.mse_loss
    options: Any = {"balance": [1] * n, "chunks": m, "schedule": schedule, "loss_fn": loss_fn, "devices": devices}
    pipelined(model, torch.randn(m, 4), **options)
    x = torch.randn(m, 4)
    for run in (lambda: model.step(x, target=x), lambda: model(x).sum().backward()):
        names.clear()
        run()
        assert 1 <= len([name for name in names if "frame" in name]) <= n + 1
