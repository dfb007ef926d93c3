"""What models and training loops do beside the usual: right, or refused with the next move. Each was wrong once."""

from __future__ import annotations

import copy
import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.conftest import Devices
from tests.front.models import TWO, Chain, Decoder, batch, chain, decoder, gradients, same, sample_of
from tests.layers import Using
from torchgpipe import GPipe, MicroBatches, pipelined

X = torch.randn(6, 4, dtype=torch.float64)


def make(model: nn.Module, devices: list[str] | None = None, **options: Any) -> tuple[Any, Any]:
    """Return a pipelined model, and a plain copy."""
    model.double()
    plain = copy.deepcopy(model)
    options = {"chunks": 3, "balance": "parameters", **options}
    return pipelined(model, (X[:2],), devices=devices or TWO, **options), plain


def run(plain: nn.Module) -> None:
    """Differentiate the plain model micro-batch by micro-batch."""
    for part in X.chunk(3):
        plain(part).square().sum().backward()


def expect_same(model: Any, plain: nn.Module) -> None:
    """Check the gradients."""
    run(plain)
    model(X).square().sum().backward()
    same(gradients(model), gradients(plain))


# ----------------------------------------------------------------------------------------- between forward and backward


def test_backward_that_failed_is_not_tried_again_with_old_gradients(devices: Devices) -> None:
    model, _ = make(Chain(), devices(2))
    fails = [True]

    def hook(grad: Tensor) -> None:
        if fails.pop() if fails else False:
            raise KeyError("once")

    model.layers[0].register_forward_hook(lambda _, args, output: output.register_hook(hook) and None)
    loss = model(X).sum()
    with pytest.raises(KeyError):
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated and freed"):
        loss.backward()
    assert all(grad is None for grad in gradients(model).values())


@pytest.mark.parametrize(
    ("place", "devices", "is_used"),
    [
        ("cpu", TWO, True),
        pytest.param("cpu", ["late:0", "late:1"], False, marks=pytest.mark.late),
        pytest.param("late:0", ["late:0", "late:1"], True, marks=pytest.mark.late),
        pytest.param("late:2", ["late:0", "late:1"], False, marks=pytest.mark.late),
    ],
)
def test_an_input_is_refilled_between_forward_and_backward(place: str, devices: list[str], is_used: bool) -> None:
    """A buffer of the host was refused, although the pipeline had a copy of it on its first device."""
    model, plain = make(Chain(), devices)
    x = X.to(place, copy=True)
    loss = model(x).square().sum()
    x.fill_(7)
    if is_used:
        with pytest.raises(RuntimeError, match=r"an input of shape \(6, 4\) .* was changed in place after forward"):
            loss.backward()
        return
    loss.backward()
    run(plain)
    same(gradients(model), gradients(plain))


def test_parameters_are_replaced_and_frozen_between_forward_and_backward() -> None:
    model, plain = make(Chain())
    loss = model(X).square().sum()
    model.layers[1].weight = new = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    model.layers[0].requires_grad_(False)
    loss.backward()
    assert model.layers[1].weight is new
    run(plain)
    names = ["layers.2.weight", "layers.3.weight"]
    ours, expected = gradients(model), gradients(plain)
    same({name: ours[name] for name in names}, {name: expected[name] for name in names})


@pytest.mark.on_late
@pytest.mark.parametrize("when", ["together", "before", "after"])
@pytest.mark.parametrize(("way", "layer", "n"), [("hook", 0, 2), ("hook", 3, 1), ("attribute", 3, 2), ("list", 0, 1)])
def test_a_loss_that_leaves_the_model_beside_its_output(
    n: int, layer: int, way: str, when: str, devices: Devices
) -> None:
    """Differentiated with the output, it failed with PyTorch's "a second time"; alone, its gradient was lost."""
    kept: list[Tensor] = []

    def between(model: Any, k: int, x: Tensor, first: Tensor) -> Tensor:
        if k == layer and way == "attribute":
            model.kept = x.square().mean()
        elif k == layer and way == "list":
            kept.append(x.square().mean())
        return x

    chained: Any = Chain()
    chained.between = between
    model, _ = make(chained, devices(n))
    if way == "hook":
        model.layers[layer].register_forward_hook(lambda module, args, output: kept.append(output.square().mean()))
    kept.clear()
    loss = model(X).sum()
    other = model.kept if way == "attribute" else kept[-1]
    with pytest.raises(RuntimeError, match=r"from the midst of .* was differentiated by itself"):
        if when == "together":
            (loss + other.to(loss.device)).backward()
        elif when == "before":
            other.backward(retain_graph=True)
        else:
            loss.backward(retain_graph=True)
            other.backward()


# ------------------------------------------------------------------------------------------------- within the forward


@pytest.mark.parametrize("kind", ["pipelined", "GPipe"])
def test_a_pipeline_within_the_forward(kind: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    plain_inner = copy.deepcopy(layers)
    if kind == "GPipe":
        inner: Any = GPipe(layers, [2, 1], devices=TWO, chunks=1, checkpoint="never")
    else:
        inner = pipelined(layers, (X[:2],), chunks=3, devices=TWO, balance="parameters")
    model, plain = make(Chain())
    for one, within in ((model, inner), (plain, plain_inner)):
        one.between = lambda self, k, x, first, within=within: x + within(first.detach()) if k in (0, 3) else x
    expect_same(model, plain)
    same(gradients(inner), gradients(plain_inner), tolerance=1e-10)


def in_a_layer(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        return x + torch.autograd.grad(linear(y).tanh().sum(), y, create_graph=True)[0]


def of_each_layer(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        y = layer(x)
        grad = torch.autograd.grad(y.square().sum(), y, create_graph=True)[0] if y.requires_grad else 0
        x = torch.tanh(y + 0.1 * grad)
    return x


def of_the_input(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(Chain.forward(self, x).square().sum(), x, create_graph=True)[0]


def of_a_leaf_that_is_used_again(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = leaf = x.detach().requires_grad_()
        for layer in self.layers:
            y = torch.tanh(layer(y)) + leaf
        return torch.autograd.grad(y.square().sum(), leaf, create_graph=True)[0]


@pytest.mark.on_late
def test_a_module_that_differentiates(devices: Devices) -> None:
    """On an accelerator the nodes of the second derivative had numbers of another thread, so they were taken for those
    of another partition.
    """
    expect_same(*make(nn.Sequential(*[Using(in_a_layer) for _ in range(4)]), devices(2)))


@pytest.mark.on_late
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("forward", [of_each_layer, of_the_input, of_a_leaf_that_is_used_again])
def test_a_forward_that_differentiates(forward: Any, n: int, devices: Devices) -> None:
    if n == 1 or len(set(devices(2))) == 1:
        expect_same(*make(chain(forward), devices(n)))
        return
    # With the CPU as one of the devices, the plain model already mixes them.
    with pytest.raises((RuntimeError, ValueError), match=r"let one module do all of it|on the same device"):
        make(chain(forward), devices(n))


class Added(torch.autograd.Function):
    """A sum that no mode sees, as of a kernel of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, grad


@pytest.mark.late
def test_the_arguments_of_a_module_are_on_its_device_in_one_piece() -> None:
    """Asked for their device, they told that of the module, so they were not copied, though no mode saw their use."""
    layers = [Using(lambda linear, x: Added.apply(x, linear(x))) for _ in range(4)]
    model, plain = make(Chain(*layers), ["late:0", "late:1"])
    assert model.verify(X).is_equal
    expect_same(model, plain)


def test_a_frame_that_catches_its_cancellation_ends_all_the_same() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        try:
            return Chain.forward(self, x)
        finally:
            self.layers[3](x)

    def fail(layer: Any, args: Any, output: Tensor) -> None:
        if args[0][0, 0] == X[2, 0]:
            raise KeyError("a layer")

    model, _ = make(chain(forward))
    model.layers[0].register_forward_hook(fail)
    with pytest.raises(KeyError, match="a layer"):
        model(X)
    assert not [thread for thread in threading.enumerate() if "torchgpipe" in thread.name]


def test_a_change_of_what_a_module_keeps_and_has_returned() -> None:
    """Once the module had changed it itself, the model had a copy, and the change was lost."""

    class Counter(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("count", torch.zeros(()).add_(1))

        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.count

    def forward(self: Any, x: Tensor) -> Any:
        x, count = self.layers[0](x)
        count += 1
        return self.layers[1](x)

    model, plain = make(chain(forward, Counter(), nn.Linear(4, 4)), balance=[1, 1])
    model(X)
    for part in X.chunk(3):
        plain(part)
    assert torch.equal(model.layers[0].count, plain.layers[0].count)


# --------------------------------------------------------------------------------------------------- losses and targets


class Pair(NamedTuple):
    """The parts were made as a plain tuple is, which a named tuple refuses."""

    first: Tensor
    second: Tensor


def of_a_pair(output: Tensor, target: Pair) -> Tensor:
    return (output - target.first - target.second).square().mean()


LOSSES: list[tuple[Any, str | None, Any]] = [
    (nn.CrossEntropyLoss(), None, torch.tensor([-100, -100, -100, 1, 2, 3])),  # what does not count has no weight
    (nn.CrossEntropyLoss(reduction="sum"), "sum", torch.tensor([0, 1, 2, 3, 0, 1])),
    (of_a_pair, None, Pair(X, X)),
]


@pytest.mark.parametrize(("loss_fn", "reduce", "target"), LOSSES)
def test_losses_of_targets(loss_fn: Any, reduce: str | None, target: Any) -> None:
    model, plain = make(Chain(), loss_fn=loss_fn, reduce=reduce)
    loss = loss_fn(plain(X), target)
    loss.backward()
    torch.testing.assert_close(model.step(X, target=target), loss.detach(), rtol=1e-12, atol=0)
    same(gradients(model), gradients(plain))
    for wrong, shape in ((torch.tensor(1.0), r"\(\)"), (X[:5], r"\(5, 4\)")):
        with pytest.raises(ValueError, match=f"has 6 rows in dimension 0, but the target is of shape {shape}"):
            model.step(X, target=wrong)


def test_values_beside_the_loss(devices: Devices) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = functional.mse_loss(output, target)
        return loss, {"rows": output[:, 0], "count": torch.tensor(len(target))}

    model, plain = make(Chain(), devices(2), chunks=4, loss_fn=loss_fn)
    loss, values = model.step(X, target=X)
    torch.testing.assert_close(loss, loss_fn(plain(X), X)[0].detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(values["rows"], plain(X)[:, 0], rtol=1e-12, atol=1e-12)
    assert values["count"].tolist() == [2, 2, 2]


@pytest.mark.late
@pytest.mark.parametrize("devices", [["cpu", "late:0"], ["late:0", "cpu"], ["late:0", "late:1"]])
@pytest.mark.parametrize(
    "to_host", [Tensor.cpu, lambda x: x.to("cpu"), lambda x: x.to(device="cpu"), lambda x: torch.ones(4, device="cpu")]
)
def test_a_model_computes_on_the_host_on_purpose(to_host: Any, devices: list[str]) -> None:
    """Where a column is on the host, what the model takes there was taken to the column that came to it."""

    def forward(self: Any, x: Tensor) -> Any:
        x = Chain.forward(self, x)
        on_host = to_host(x.detach()).numpy()
        return x * float((on_host * 0 + 2).max())

    model, plain = make(chain(forward), devices)
    assert model.verify(X).is_equal
    expect_same(model, plain)


@pytest.mark.late
def test_a_model_that_a_pipeline_has_left_on_several_devices_is_told_where_to_go() -> None:
    """The remedies of other errors are to pipeline the model again."""
    model, _ = make(Chain(), ["late:0", "late:1"])
    with pytest.raises(RuntimeError, match="on the same device") as raised:
        pipelined(model.unpipelined(), (X[:2],), chunks=2)
    assert "on ['late:0', 'late:1'], where a pipeline may have left" in raised.value.__notes__[-1]
    plain = copy.deepcopy(model.to("cpu"))
    expect_same(pipelined(model, (X[:2],), chunks=3), plain)


@pytest.mark.late
def test_the_target_may_be_on_another_device() -> None:
    """A target on the host, as a data loader gives it, once met the output on the device of the last partition."""
    model, plain = make(Chain(), ["late:0", "late:1"], loss_fn=lambda output, target: (output.sum(1) * target).mean())
    target = torch.randn(6, dtype=torch.float64)
    (plain(X).sum(1) * target).mean().backward()
    expected = gradients(plain)
    for place in ("cpu", "late:2"):
        model.step(X, target=target.to(place))
        same(gradients(model), expected)


def test_a_step_without_grad_of_a_micro_batch_without_labels() -> None:
    model, data = decoder(), batch()
    data["labels"][2:4] = -100
    whole = model(**data)["loss"].detach()
    pipelined(model, sample_of(data), chunks=3, devices=TWO)
    with torch.no_grad():
        torch.testing.assert_close(model.step(**data), whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.step(**data), whole, rtol=1e-12, atol=0)


class Speaker(Decoder):
    """Compares with the next label."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(ids)["logits"]
        return {
            "logits": logits,
            "loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
        }


IDS = torch.randint(11, (8, 6))


def labels_of_lengths(*lengths: int) -> Tensor:
    return IDS.where(torch.arange(6) < torch.tensor(lengths)[:, None], -100)


@pytest.mark.parametrize("by_name", [True, False])
def test_labels_that_are_shifted_are_seen_in_a_sample_without_padding(by_name: bool) -> None:
    """Micro-batches had the weights of their rows, where the mini-batch was padded."""
    plain, labels = Speaker().double(), labels_of_lengths(6, 6, 2, 2, 3, 1, 4, 6)
    sample: Any = {"ids": IDS[:2], "labels": labels[:2]} if by_name else (IDS[:2], labels[:2])
    model: Any = pipelined(copy.deepcopy(plain), sample, chunks=4, devices=TWO)
    loss = model.step(ids=IDS, labels=labels) if by_name else model.step(IDS, labels)
    expected = plain(IDS, labels)["loss"]
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    same(gradients(model), gradients(plain))


# ------------------------------------------------------------------------------- containers, and tensors of other kinds


@pytest.mark.on_late
def test_an_input_that_a_model_differentiates_under_no_grad(devices: Devices) -> None:
    """A copy on another device did not say that it requires grad, nor could it be differentiated."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = Chain.forward(self, x)
        if not x.requires_grad:
            return y
        with torch.enable_grad():
            return y + torch.autograd.grad((x.sin() * x).sum(), x)[0]

    model, plain = make(chain(forward), devices(1) * 2)
    x = X.clone().requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(model(x).cpu(), plain(x), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["coo", "csr", "vmap"])
def test_tensors_without_a_storage_of_their_own(kind: str, offload: bool) -> None:
    """Sparse ones, as the edges of a graph, and those of function transforms: what watches the memory failed."""

    def inside(linear: nn.Linear, x: Tensor, edges: Tensor) -> Tensor:
        x = linear(x)
        return x.tanh() if kind == "vmap" else torch.sparse.mm(edges, x.T).T.tanh()

    def forward(self: Any, x: Tensor) -> Tensor:
        dense = torch.eye(4, dtype=x.dtype) * 2
        edges = dense if kind == "vmap" else dense.to_sparse() if kind == "coo" else dense.to_sparse_csr()
        for layer in self.layers:
            x = layer(x, edges)
            x = torch.vmap(lambda row: row * 2 + row.sum())(x) if kind == "vmap" else x + torch.sparse.mm(edges, x.T).T
        return x

    model, plain = make(chain(forward, *[Using(inside) for _ in range(4)]), TWO, offload=offload)
    expect_same(model, plain)


class Memory:
    """What modules remember for later ones."""

    last: Tensor
    calls = 0


def appends(x: Tensor, states: list[Tensor]) -> Tensor:
    x = x + sum(states)
    states.append(x * 2)
    return x


def pops(x: Tensor, states: list[Tensor]) -> Tensor:
    if len(states) == 2:
        return x + states.pop() * states.pop(0)
    states.append(x * 2)
    return x


def enters(x: Tensor, states: dict[str, Any]) -> Tensor:
    states.setdefault("first", x * 2)
    states.setdefault("all", []).append((x, x * 3))
    states["last"] = states["first"] + states.get("last", 0)
    return x * states["last"] + states["all"][-1][1]


def remembers(x: Tensor, memory: Memory) -> Tensor:
    x = x * memory.last if memory.calls else x
    memory.last, memory.calls = x * 2, memory.calls + 1
    if memory.calls % 2:
        memory.spare = x  # type: ignore[attr-defined]
    else:
        del memory.spare  # type: ignore[attr-defined]
    return x


@pytest.mark.on_late
@pytest.mark.parametrize("way", ["", "recomputed", "without grad", "offload"])
@pytest.mark.parametrize("act", [appends, pops, enters, remembers])
def test_what_a_module_does_to_a_container_reaches_later_partitions(act: Any, way: str, devices: Devices) -> None:
    """Its tensors come from earlier partitions, so the module gets a copy of the container: changes were lost."""

    def forward(self: Any, x: Tensor) -> Tensor:
        states: Any = {appends: list, pops: list, enters: dict, remembers: Memory}[act]()
        for layer in self.layers:
            x = layer(x, states)
        kept = states.values() if isinstance(states, dict) else [states.last] if act is remembers else states
        return x + sum([one[0][0] if isinstance(one, list) else one for one in kept])

    options: dict[str, Any] = {"offload": True} if way == "offload" else {"checkpoint": way == "recomputed"}
    layers = [Using(lambda linear, x, states: linear(act(x, states)).tanh()) for _ in range(4)]
    model, plain = make(chain(forward, *layers), devices(4), balance=[1] * 4, **options)
    if way == "without grad":
        with torch.no_grad():
            torch.testing.assert_close(
                model(X[:1]).cpu(), plain(X[:1]), rtol=1e-12 if "cuda" in devices(1)[0] else 0, atol=0
            )
    expect_same(model, plain)


@pytest.mark.on_late
def test_a_container_of_the_models_own_stays_as_it_is(devices: Devices) -> None:
    """Every micro-batch reads it, so a module gets a copy of it with tensors of its own device."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.tables is None:
            self.tables = {"scale": torch.full((4,), 2.0, dtype=x.dtype, device=x.device)}
        for layer in self.layers:
            x = layer(x, self.tables)
        return x

    plain = chain(forward, *[Using(lambda linear, x, tables: (linear(x) * tables["scale"]).tanh()) for _ in range(4)])
    plain.tables = None
    model, plain = make(plain, devices(4), balance=[1] * 4)
    for _ in range(2):
        expect_same(model, plain)
    assert model.tables["scale"].device == torch.device(devices(4)[0]) or devices(4)[0].startswith("cpu")


class Adapted(nn.Module):
    """An adapter that takes the place of a layer's forward, in a network of its own, as in kohya's scripts."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.down, self.up, self.original = nn.Linear(4, 2), nn.Linear(2, 4), linear.forward
        linear.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.original(x) + self.up(self.down(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["call", "step"])
def test_adapters_outside_of_a_frozen_model_are_trained(way: str) -> None:
    """``model(x)`` had no graph: the node that stands for a mini-batch had no input that requires grad."""

    def make_adapted() -> tuple[Any, nn.ModuleList]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).requires_grad_(False)
        return model.double(), nn.ModuleList(map(Adapted, model)).double()

    x = torch.randn(4, 4).double()
    model, network = make_adapted()
    for part in reversed(x.chunk(2)) if way == "call" else x.chunk(2):
        (model(part).square().sum() / x.numel()).backward()
    expected = [parameter.grad for parameter in network.parameters()]
    model, network = make_adapted()
    pipelined(model, x[:2], chunks=2, devices=TWO, loss_fn=lambda output, _: output.square().mean())
    if way == "call":
        (model(x).square().sum() / x.numel()).backward()
    else:
        model.step(x)
    for ours, gradient in zip(network.parameters(), expected):
        torch.testing.assert_close(ours.grad, gradient)


class PackedInEvaluation(nn.Linear):
    """A frozen layer that gives its weight packed memory in its first run in evaluation, as Linear4bit does on CPUs."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.requires_grad_(False)
        self.weight.state = {"packed": False}  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.state  # type: ignore[attr-defined]
        if not self.training and not state["packed"]:
            self.weight.data, state["packed"] = self.weight.data.flip(0).contiguous(), True
        return functional.linear(x, self.weight.flip(0) if state["packed"] else self.weight, self.bias)


@pytest.mark.parametrize("training", [True, False])
def test_a_weight_that_is_packed_by_its_first_run_is_what_its_attributes_say(training: bool) -> None:
    """What the attributes say was put back after the sample's runs, and the packed memory was not: other outputs."""

    def make_packed() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[PackedInEvaluation() for _ in range(4)]).double()

    model, x = make_packed().train(training), torch.randn(4, 4).double()
    expected = torch.cat([make_packed()(part) for part in x.chunk(2)])
    if not training:
        with pytest.raises(RuntimeError, match="let the model run once before"):
            pipelined(model, x[:2], chunks=2, devices=TWO)
        model(x)
    pipelined(model, x[:2], chunks=2, devices=TWO)
    assert torch.equal(model(x), expected) and torch.equal(model.eval()(x), expected)
    plain = model.unpipelined()
    assert torch.equal(torch.cat([plain(part) for part in x.chunk(2)]), expected)


# ---------------------------------------------------------------------------------------- parameters, objects of torch


class Clamped(nn.Linear):
    """Clamps its weights in forward, as Gemma 3n does."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-2, 2)
        return super().forward(x)


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_an_operation_in_place_that_leaves_a_parameter_as_it_is(offload: bool) -> None:
    """An optimizer may change the weights, so that it does not leave them any more."""
    layers = [Clamped(4, 4) if k % 2 else nn.Linear(4, 4) for k in range(4)]
    for layer in layers[1::2]:
        layer.requires_grad_(not offload)
    model, plain = make(Chain(*layers), offload=offload)
    if not offload:
        with torch.no_grad():
            for one in (model, plain):
                one.layers[1].weight.mul_(100)
    expect_same(model, plain)
    assert torch.equal(model.layers[1].weight, plain.layers[1].weight)


@pytest.mark.parametrize("how", ["seen", "shared", "offload"])
def test_an_operation_in_place_on_a_parameter_that_others_would_miss(how: str) -> None:
    """Autograd sees it in what another micro-batch has saved; a copy on another device does not get the change."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.layers[1].weight
        with torch.no_grad():
            (weight if how == "seen" else weight.data).clamp_(-9, 9)
        return Chain.forward(self, x)  # type: ignore[no-any-return]

    model = chain(forward) if how != "offload" else Chain(*[Clamped(4, 4) for _ in range(4)])
    if how == "shared":
        model.layers[3].weight = model.layers[1].weight
    with pytest.raises(
        RuntimeError, match=r"changes the (parameter 'layers\.1\.weight'|weight) .* after optimizer.step"
    ):
        make(model, offload=how == "offload")


class Masked(nn.Linear):
    def forward(self, x: Tensor, mask: Any) -> Tensor:
        y: Tensor = super().forward(x) * mask.to_dense().reshape(-1).to(x.dtype)
        return y


@pytest.mark.on_late
def test_an_object_of_torch_comes_to_the_device_of_the_column(devices: Devices) -> None:
    """The tensors of a BlockMask stayed on the device of its first use."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def forward(self: Any, x: Tensor) -> Tensor:
        mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device=x.device, BLOCK_SIZE=4)
        for layer in self.layers:
            x = layer(x, mask)
        return x

    model, plain = make(chain(forward, *[Masked(4, 4) for _ in range(4)]), devices(2), checkpoint=True)
    expect_same(model, plain)


def test_a_sparse_tensor_goes_from_partition_to_partition_and_is_not_joined_with_a_graph() -> None:
    """Its bytes were asked for, which it has not; and PyTorch cannot differentiate sparse tensors that are joined."""
    x = torch.rand(4, 4, dtype=torch.float64)
    to_sparse, to_dense = Using(lambda f, x: f(x).to_sparse(), 4), Using(lambda f, x: f(x.to_dense()), 4)
    layers = nn.Sequential(to_sparse, to_dense).double()
    plain = copy.deepcopy(layers)
    for part in x.chunk(2):
        plain(part).sum().backward()
    how: dict[str, Any] = {"chunks": 2, "devices": ["cpu:0", "cpu:1"]}
    pipelined(layers, x, **how)(x).sum().backward()
    for mine, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    for model in (
        pipelined(nn.Sequential(nn.Linear(4, 4), to_sparse).double(), x, verify=False, **how),
        GPipe(nn.Sequential(nn.Linear(4, 4), to_sparse).double(), [1, 1], **how),
    ):
        with pytest.raises(NotImplementedError, match="SparseCPU"):
            model(x).to_dense().sum().backward()
        sum([output.to_dense().sum() for output in model(MicroBatches(x.chunk(2)))]).backward()


def test_half_a_model_on_the_meta_device_is_given_memory_first() -> None:
    """The move was ``model.to('cpu')``, which PyTorch refuses where there is no memory."""
    x, layers = torch.rand(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    how: dict[str, Any] = {"chunks": 2, "devices": ["cpu:0", "cpu:1"]}
    with pytest.raises(Exception, match="meta") as caught:
        pipelined(layers, x, **how)
    assert "child.to_empty(device='cpu')" in caught.value.__notes__[-1]
    layers[1].to_empty(device="cpu").reset_parameters()
    assert pipelined(layers, x, **how)(x).shape == (4, 4)
