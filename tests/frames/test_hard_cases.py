"""What models and training loops do beside the usual: right, or refused with the next move. Each was wrong once."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import Devices
from tests.frames.models import Decoder, batch, gradients, same
from torchgpipe import GPipe, pipelined

TWO = ["cpu:0", "cpu:1"]


class Chain(nn.Module):
    """Four linear layers, and a way to put something between them."""

    between: Callable[..., Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.between is not None:
                x = self.between(self, k, x, first)
        return x


class Condition(nn.Module):
    """Adds a table to a condition that all layers get: with one row, both have the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * (condition + self.table[None])
        return out


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Condition() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        condition = self.condition(x)
        for layer in self.layers:
            x = layer(x, condition)
        return x


X = torch.randn(6, 4, dtype=torch.float64)


def make(model: nn.Module, devices: list[str] | None = None, chunks: int = 3, **options: Any) -> tuple[Any, Any]:
    """Return a pipelined model, and a plain copy."""
    model.double()
    plain = copy.deepcopy(model)
    options.setdefault("balance", "parameters")
    return pipelined(model, (X[:2],), chunks=chunks, devices=devices or TWO, **options), plain


def expect_same(model: Any, plain: Any, chunks: int = 3) -> None:
    for part in X.chunk(chunks):
        (plain(part).square().sum()).backward()
    model(X).square().sum().backward()
    same(gradients(model), gradients(plain))


# ----------------------------------------------------------------------------------------------- gradients on their way


def test_a_gradient_that_waits_is_not_changed_in_place() -> None:
    model, plain = make(Conditioned(), ["cpu:0", "cpu:1", "cpu:2"], chunks=6)
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


def test_a_leaf_that_is_no_parameter() -> None:
    model, plain = make(Chain())
    for one in (model, plain):
        one.prompt = torch.ones(4, dtype=torch.float64, requires_grad=True)
        one.between = lambda self, k, x, first: x + self.prompt if k in (0, 2) else x
    model(X).sum().backward()
    sum(plain(part).sum() for part in X.chunk(3)).backward()  # type: ignore[union-attr]
    same(gradients(model), gradients(plain))
    torch.testing.assert_close(model.prompt.grad, plain.prompt.grad)


def test_an_import_that_is_changed_in_place_is_what_later_partitions_import() -> None:
    class Changing(Chain):
        def forward(self, x: Tensor) -> Tensor:
            a, b, c, d = self.layers
            kept = a(x) * 1
            y = b(kept * 1)
            kept.add_(y)  # in the partition of b, an import
            out: Tensor = d(c(y)) * kept
            return out

    model, plain = make(Changing(), ["cpu:0", "cpu:1", "cpu:2"], balance=[1, 1, 2])
    expect_same(model, plain)


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


def test_another_pipelined_model_within_the_forward() -> None:
    inner, plain_inner = make(Chain())
    inner(X)
    model, plain = make(Chain())
    model.between = lambda self, k, x, first: x + inner(first) if k in (0, 3) else x
    plain.between = lambda self, k, x, first: x + plain_inner(first) if k in (0, 3) else x
    for part in X.chunk(3):
        plain(part).sum().backward()
    model(X).sum().backward()
    same(gradients(model), gradients(plain), tolerance=1e-10)
    same(gradients(inner), gradients(plain_inner), tolerance=1e-10)


def test_a_gpipe_within_the_glue() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    teacher = GPipe(copy.deepcopy(layers), [2, 1], devices=TWO, chunks=1, checkpoint="never")
    model, plain = make(Chain())
    model.between = lambda self, k, x, first: x + teacher(first.detach()) if k == 3 else x
    plain.between = lambda self, k, x, first: x + layers(first.detach()) if k == 3 else x
    for part in X.chunk(3):
        plain(part).sum().backward()
    model(X).sum().backward()
    same(gradients(model), gradients(plain))
    same(gradients(teacher), gradients(layers))


# -------------------------------------------------------------------------------------------------------------- refused


def test_modules_that_call_themselves_or_each_other() -> None:
    """The search for elements of a container went round in them until Python gave up."""

    class Calling(nn.Linear):
        next: list[Callable[..., Tensor]]

        def forward(self, x: Tensor, times: int = 2) -> Tensor:
            return super().forward(self.next[0](x, times - 1) if times else x)

    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alone, self.a, self.b, self.head = Calling(4, 4), Calling(4, 4), Calling(4, 4), nn.Linear(4, 4)
            self.alone.next, self.a.next, self.b.next = [self.alone], [self.b], [self.a]

        def forward(self, x: Tensor) -> Tensor:
            x = self.head(self.b(self.a(self.alone(x))))
            return x

    model, plain = make(Recursive())
    assert model.layout.spine == ["alone", "a..b", "head"]
    expect_same(model, plain)


def test_a_tensor_that_a_module_keeps_for_a_later_partition() -> None:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x).mean(1, keepdim=True)
            return super().forward(x)

    model = Chain()
    model.layers[0] = Keeps(4, 4)
    model.between = lambda self, k, x, first: x * self.layers[0].kept if k == 3 else x
    with pytest.raises(ValueError, match=r"'layers.0' keeps the tensor 'kept' on itself, and partition 1 uses it"):
        make(model)
    pipelined(model, (X[:2],), chunks=3, devices=["cpu"] * 2)


def test_a_buffer_that_changes_and_is_read_in_a_later_partition() -> None:
    def counts(self: Any, k: int, x: Tensor, first: Tensor) -> Tensor:
        if k == 0:
            self.count += 1
        return x + self.count if k == 3 else x

    model = Chain()
    model.between = counts
    with pytest.raises(ValueError, match="the model keeps the tensor 'count' on itself, and partition 1 uses it"):
        make(model)


def test_gradients_computed_in_the_forward() -> None:
    def forces(self: Any, k: int, x: Tensor, first: Tensor) -> Tensor:
        return torch.autograd.grad(x.sum(), first, retain_graph=True)[0] if k == 3 and x.requires_grad else x

    model, _ = make(Chain())
    model.between = forces
    with pytest.raises(RuntimeError, match="the model computes gradients in its forward, behind a boundary"):
        model(X.clone().requires_grad_())


def test_an_output_of_an_unknown_class() -> None:
    class Result:
        def __init__(self, values: Tensor) -> None:
            self.values = values

    class Wrapping(Chain):
        def forward(self, x: Tensor) -> Any:
            return Result(super().forward(x))

    with pytest.raises(TypeError, match=r"is Result, whose tensor of shape \(2, 4\) would get no gradient"):
        pipelined(Wrapping().double(), (X[:2],), chunks=1, devices=TWO)
    model: Any = pipelined(Wrapping().double(), (X[:2],), chunks=1, devices=TWO, verify=False)
    with pytest.raises(TypeError, match=r"is Result, whose tensor of shape \(6, 4\) would get no gradient"):
        model(X)


def test_checkpointing_around_the_model() -> None:
    model, _ = make(Chain())
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint is around a pipelined model"):
        checkpoint(model, X, use_reentrant=False)


@pytest.mark.late
def test_a_view_of_what_is_changed_in_place_on_another_device() -> None:
    def changes(self: Any, k: int, x: Tensor, first: Tensor) -> Tensor:
        if k == 0:
            base = x * 1
            self.seen = (base, base[:, :2])
        if k == 3:
            base, view = self.seen
            base.add_(1)
            return x * view.sum(1, keepdim=True)
        return x

    class Local(Chain):
        def forward(self, x: Tensor) -> Tensor:
            run = copy.copy(self)
            run.between = lambda _, k, x, first: changes(run, k, x, first)
            return Chain.forward(run, x)

    model, _ = make(Local(), ["late:0", "late:1"], verify=False)
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


class Noisy(nn.Module):
    """Drops features after some layers, in training, by a generator of its own."""

    def __init__(self, *where: int) -> None:
        super().__init__()
        self.layers, self.where = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)]), where
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x)
            if self.training and k in self.where:
                x = x * (torch.rand(x.shape, generator=self.generator) > 0.5)
        return x


@pytest.mark.parametrize("where", [(0,), (0, 1), (2, 3)])
def test_a_generator_of_the_models_own(where: tuple[int, ...], devices: Devices) -> None:
    model, plain = make(Noisy(*where), devices(2), balance=[2, 2])
    for _ in range(2):
        expect_same(model, plain)
    assert torch.equal(model.generator.get_state(), plain.generator.get_state())


def test_a_generator_that_partitions_share_is_refused() -> None:
    """Their micro-batches would draw in no certain order."""
    with pytest.raises(ValueError, match=r"partitions 0 and 1 draw from one torch\.Generator .* each module"):
        make(Noisy(1, 2), balance=[2, 2])


# ----------------------------------------------------------------------------------------------------------------- ends


def test_a_frame_that_catches_its_cancellation_ends_all_the_same() -> None:
    class Stubborn(Chain):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            finally:
                self.layers[3](x)

    model, _ = make(Stubborn())
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


@pytest.mark.parametrize("what", ["mask", "feature", "in a dict"])
def test_a_tensor_that_the_model_itself_keeps_for_later_partitions(what: str) -> None:
    class Keeping(Chain):
        def forward(self, x: Tensor) -> Tensor:
            value = self.layers[0](x) if what == "feature" else (x > 0).to(x.dtype)
            self.kept = {"it": value} if what == "in a dict" else value
            for layer in self.layers:
                x = layer(x) * (self.kept["it"] if what == "in a dict" else self.kept)
            return x

    with pytest.raises(ValueError, match="the model keeps the tensor 'kept' on itself, and partition 1 uses it"):
        make(Keeping())


def test_a_buffer_that_the_last_partition_alone_changes(devices: Devices) -> None:
    class Counting(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.count += x.detach().sum(0)
            return x

    model, plain = make(Counting(), devices(2))
    expect_same(model, plain)
    torch.testing.assert_close(model.count, plain.count, rtol=1e-12, atol=0)


def test_targets_that_do_not_count_have_no_weight() -> None:
    model, plain = make(Chain(), loss_fn=nn.functional.cross_entropy)
    target = torch.tensor([-100, -100, -100, 1, 2, 3])
    loss = nn.functional.cross_entropy(plain(X), target)
    loss.backward()
    torch.testing.assert_close(model.step(X, target=target), loss.detach(), rtol=1e-12, atol=0)
    same(gradients(model), gradients(plain))


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


def test_losses_that_are_sums_are_added_up() -> None:
    model, plain = make(Chain(), loss_fn=nn.CrossEntropyLoss(reduction="sum"), reduce="sum")
    target = torch.tensor([0, 1, 2, 3, 0, 1])
    loss = nn.functional.cross_entropy(plain(X), target, reduction="sum")
    loss.backward()
    torch.testing.assert_close(model.step(X, target=target), loss.detach(), rtol=1e-12, atol=0)
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


def test_an_input_that_a_model_differentiates_under_no_grad() -> None:
    """Parts of a split under no_grad() say that they require grad, but a graph that is made of them ends nowhere."""

    class Forces(Chain):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if not x.requires_grad:
                return y
            with torch.enable_grad():
                (slope,) = torch.autograd.grad((x.sin() * x).sum(), x)
            return y + slope

    model, plain = make(Forces())
    x = X.clone().requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)


def test_a_target_that_went_to_the_model() -> None:
    model, _ = make(Chain(), loss_fn=nn.functional.mse_loss)
    with pytest.raises(TypeError, match="positional arguments") as raised:
        model.step(X, X)
    assert "no target was given: step(..., target=y)" in raised.value.__notes__
