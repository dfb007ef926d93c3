"""What models and training loops do beside the usual: right, or refused with the next move. Each was wrong once."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import Devices
from tests.frames.models import TWO, Chain, Decoder, batch, chain, gradients, same
from torchgpipe import GPipe, pipelined

X = torch.randn(6, 4, dtype=torch.float64)


def make(model: nn.Module, devices: list[str] | None = None, chunks: int = 3, **options: Any) -> tuple[Any, Any]:
    """Return a pipelined model, and a plain copy."""
    model.double()
    plain = copy.deepcopy(model)
    options.setdefault("balance", "parameters")
    return pipelined(model, (X[:2],), chunks=chunks, devices=devices or TWO, **options), plain


def expect_same(model: Any, plain: Any, chunks: int = 3) -> None:
    """Check gradients, and the counting buffer."""
    for part in X.chunk(chunks):
        (plain(part).square().sum()).backward()
    model(X).square().sum().backward()
    same(gradients(model), gradients(plain))
    torch.testing.assert_close(model.count, plain.count, rtol=1e-12, atol=0)


# ----------------------------------------------------------------------------------------------- gradients on their way


def test_a_gradient_that_waits_is_not_changed_in_place() -> None:
    """A table is added to a condition that all layers get: with one row, both have the same gradient."""

    def forward(self: Any, x: Tensor) -> Any:
        condition, *layers = self.layers
        condition = condition(x)
        for layer in layers:
            x = layer[0](x) * (condition + layer[1].bias[None])
        return x

    layers = [nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)]) for _ in range(3)]
    model, plain = make(chain(forward, nn.Linear(4, 4), *layers), ["cpu:0", "cpu:1", "cpu:2"], chunks=6)
    for _ in range(5):
        expect_same(model, plain, chunks=6)


def test_an_input_with_a_graph_of_its_own(devices: Devices) -> None:
    model, plain = make(Chain(), devices(2))
    weight, other = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    (model(X * weight.exp()).sum()).backward()
    sum(plain(part).sum() for part in (X * other.exp()).chunk(3)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(weight.grad, other.grad, rtol=1e-6, atol=1e-6)
    same(gradients(model), gradients(plain))


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


# ----------------------------------------------------------------------------------------- between forward and backward


def test_a_parameter_is_replaced_between_forward_and_backward() -> None:
    model, _ = make(Chain())
    loss = model(X).sum()
    new = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    model.layers[1].weight = new
    loss.backward()
    assert model.layers[1].weight is new


def test_a_parameter_is_frozen_between_forward_and_backward() -> None:
    model, plain = make(Chain())
    loss = model(X).sum()
    model.layers[0].requires_grad_(False)
    loss.backward()
    sum(plain(part).sum() for part in X.chunk(3)).backward()  # type: ignore[union-attr]
    result, expected = gradients(model), gradients(plain)
    same({k: v for k, v in result.items() if "0" not in k}, {k: v for k, v in expected.items() if "0" not in k})


def test_a_forward_without_backward_is_freed() -> None:
    model, _ = make(Chain())
    held: list[weakref.ref[Tensor]] = []
    model.layers[0].register_forward_hook(lambda _, args, output: held.append(weakref.ref(output)))
    model(X)
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


def test_a_model_is_freed() -> None:
    gc.collect()
    gc.disable()  # Weights on a GPU would wait for the collector.
    try:
        model, _ = make(Chain())
        model.step_of = nn.Parameter(torch.ones(()))
        model(X).sum().backward()
        held = weakref.ref(model)
        del model
        assert held() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------- pipelines within models


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


# -------------------------------------------------------------------------------------------------------------- refused


def test_an_output_of_an_unknown_class() -> None:
    class Result:
        def __init__(self, values: Tensor) -> None:
            self.values = values

    def forward(self: Chain, x: Tensor) -> Any:
        return Result(Chain.forward(self, x))

    for verify, rows in ((True, 2), (False, 6)):
        refused = rf"is Result, whose tensor of shape \({rows}, 4\) would get no gradient"
        with pytest.raises(TypeError, match=refused):
            pipelined(chain(forward).double(), (X[:2],), chunks=1, devices=TWO, verify=verify)(X)


def test_checkpointing_around_the_model() -> None:
    model, _ = make(Chain())
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint is around a pipelined model"):
        checkpoint(model, X, use_reentrant=False)


@pytest.mark.late
def test_a_view_of_what_is_changed_in_place_on_another_device() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        base = a(x) * 1
        view = base[:, :2]
        x = d(c(b(base + 1)))
        base.add_(1)
        return x * view.sum(1, keepdim=True)

    model, _ = make(chain(forward), ["late:0", "late:1"], verify=False)
    with pytest.raises(RuntimeError, match="does not reach the view of the same memory of shape"):
        model(X)


@pytest.mark.late
@pytest.mark.parametrize("how", ["in place", "out="])
def test_a_sum_that_runs_without_a_graph_through_partitions_of_several_devices(how: str) -> None:
    class Sums(Chain):
        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros_like(x)
            for layer in self.layers:
                y = layer(x)
                with torch.no_grad():
                    if how == "out=":
                        torch.add(total, y, out=total)
                    else:
                        total.add_(y)
                x = y + total  # with a graph
            return x

    model, plain = make(Sums(), ["late:0", "late:1"])
    torch.testing.assert_close(model(X).to("cpu"), torch.cat([plain(part) for part in X.chunk(3)]))


# ---------------------------------------------------------------------------------------- generators of the model's own


@pytest.mark.parametrize("where", [(0,), (0, 1), (2, 3)])
def test_a_generator_of_the_models_own(where: tuple[int, ...], devices: Devices) -> None:
    """Where partitions share one, their micro-batches would draw in no certain order: see test_right_or_refused.py."""

    def drops(self: Any, k: int, x: Tensor, first: Tensor) -> Tensor:
        if not self.training or k not in where:
            return x
        return x * (torch.rand(x.shape, generator=self.generator) > 0.5)

    noisy = Chain()
    noisy.between, noisy.generator = drops, torch.Generator().manual_seed(3)  # type: ignore[assignment]
    model, plain = make(noisy, devices(2), balance=[2, 2])
    for _ in range(2):
        expect_same(model, plain)
    assert torch.equal(model.generator.get_state(), plain.generator.get_state())


# ----------------------------------------------------------------------------------------------------------------- ends


def test_a_frame_that_catches_its_cancellation_ends_all_the_same() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        try:
            return Chain.forward(self, x)
        finally:
            self.layers[3](x)

    model, _ = make(chain(forward))
    model.layers[0].register_forward_hook(lambda _, args, output: _raise() if args[0][0, 0] == X[2, 0] else None)
    with pytest.raises(KeyError, match="a layer"):
        model(X)
    assert not [thread for thread in threading.enumerate() if "torchgpipe" in thread.name]


def _raise() -> None:
    raise KeyError("a layer")


def test_a_hook_that_fails_at_the_end_of_a_step_leaves_the_gradients() -> None:
    model: Any = Decoder().double()
    data = batch()
    pipelined(model, {name: tensor[:2] for name, tensor in data.items()}, chunks=3, devices=TWO)
    model.step(**data)
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.layers[3].up.weight.register_hook(lambda grad: _raise())
    with pytest.raises(KeyError, match="a layer"):
        model.step(**data)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, before[name])


def test_a_step_without_grad_of_a_micro_batch_without_labels() -> None:
    model: Any = Decoder().double()
    data = batch()
    data["labels"][2:4] = -100
    plain = copy.deepcopy(model)
    pipelined(model, {name: tensor[:2] for name, tensor in data.items()}, chunks=3, devices=TWO)
    with torch.no_grad():
        loss = model.step(**data)
    whole = plain(**data)["loss"]
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.step(**data), whole.detach(), rtol=1e-12, atol=0)


def test_a_buffer_that_the_last_partition_alone_changes(devices: Devices) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        x = Chain.forward(self, x)
        self.count += x.detach().sum(0)
        return x

    expect_same(*make(chain(forward), devices(2)))


def test_a_map_of_devices_of_the_users_own_stays() -> None:
    """unpipelined() took it for the map that tells trainers of several accelerators."""
    model = Chain()
    model.hf_device_map = {"": "cpu"}  # type: ignore[assignment]
    assert make(model)[0].unpipelined().hf_device_map == {"": "cpu"}


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_targets_in_a_named_tuple() -> None:
    """The parts were made as a plain tuple is, which a named tuple refuses."""

    def loss_fn(output: Tensor, target: Pair) -> Tensor:
        return (output - target.first - target.second).square().mean()

    model, plain = make(Chain(), loss_fn=loss_fn)
    torch.testing.assert_close(model.step(X, target=Pair(X, X)), loss_fn(plain(X), Pair(X, X)).detach())
    for target, shape in ((torch.tensor(1.0), r"\(\)"), (X[:5], r"\(5, 4\)")):
        with pytest.raises(ValueError, match=f"has 6 rows in dimension 0, but the target is of shape {shape}"):
            model.step(X, target=target)


LOSSES: list[tuple[Any, str | None, list[int]]] = [
    (nn.CrossEntropyLoss(), None, [-100, -100, -100, 1, 2, 3]),  # what does not count has no weight
    (nn.CrossEntropyLoss(reduction="sum"), "sum", [0, 1, 2, 3, 0, 1]),
]


@pytest.mark.parametrize(("loss_fn", "reduce", "classes"), LOSSES)
def test_losses_of_targets(loss_fn: Any, reduce: str | None, classes: list[int]) -> None:
    model, plain = make(Chain(), loss_fn=loss_fn, reduce=reduce)
    loss = loss_fn(plain(X), torch.tensor(classes))
    loss.backward()
    torch.testing.assert_close(model.step(X, target=torch.tensor(classes)), loss.detach(), rtol=1e-12, atol=0)
    same(gradients(model), gradients(plain))


def test_an_output_without_rows_is_that_of_all_micro_batches_or_refused() -> None:
    class Sums(Chain):
        table = torch.ones(3)

        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"y": y, "table": self.table, "sum": y.sum(0)} if self.training else {"y": y, "table": self.table}

    refusal = r"the output 'sum' of shape \(\d+,\) has no dimension with the rows"
    with pytest.raises(ValueError, match=refusal):
        make(Sums())
    model, _ = make(Sums(), verify=False)
    with pytest.raises(ValueError, match=refusal):
        model(X)
    assert torch.equal(model.eval()(X)["table"], torch.ones(3))


@pytest.mark.parametrize("places", [TWO, pytest.param(["late:0"] * 2, marks=pytest.mark.late)])
def test_an_input_that_a_model_differentiates_under_no_grad(places: list[str]) -> None:
    """Parts of a split under no_grad() say that they require grad, but a graph that is made of them ends nowhere.

    A copy on another device did not even say so.
    """

    def forward(self: Chain, x: Tensor) -> Any:
        y = Chain.forward(self, x)
        if not x.requires_grad:
            return y
        with torch.enable_grad():
            return y + torch.autograd.grad((x.sin() * x).sum(), x)[0]

    model, plain = make(chain(forward), places)
    x = X.clone().requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(model(x).cpu(), plain(x), rtol=1e-12, atol=1e-12)


def test_a_target_that_went_to_the_model() -> None:
    model, _ = make(Chain(), loss_fn=nn.functional.mse_loss)
    with pytest.raises(TypeError, match="positional arguments") as raised:
        model.step(X, X)
    assert "no target was given: step(..., target=y)" in raised.value.__notes__


def test_a_change_of_what_a_module_keeps_and_has_returned_is_refused() -> None:
    """Once the module had changed it itself, the model had a copy, and the change was lost."""

    class Counter(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("count", torch.zeros(()).add_(1))

        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.count

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counter, self.head = Counter(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x, count = self.counter(x)
            count += 1
            y: Tensor = self.head(x)
            return y

    model = pipelined(Model(), torch.randn(2, 4), chunks=2, balance=[1, 1], devices=["cpu:0", "cpu:1"], verify=False)
    with pytest.raises(RuntimeError, match=r"shape \(\) in place that 'counter' keeps .* let 'counter' itself change"):
        model(torch.randn(4, 4))
