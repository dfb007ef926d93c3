"""The loss of a step, in both fronts: it is that of the plain loop, or refused."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.front.models import chain
from torchgpipe import GPipe, MicroBatches, NoChunk, pipelined
from torchgpipe.schedule import ScheduleName

TWO = ["cpu:0", "cpu:1"]
ROWS, CLASSES = 8, 3


def layers(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, CLASSES)).to(dtype)


class Stepping(NamedTuple):
    """A pipeline, and a step of it."""

    model: Any
    step: Callable[..., Any]


def of_layers(module: nn.Sequential, x: Tensor, **options: Any) -> Stepping:
    model = GPipe(module, **{"balance": [2, 1], "devices": TWO, "chunks": 4, **options})
    return Stepping(model, lambda x, y=None, **more: model.step(x, target=y, **more))


def of_any_module(module: nn.Sequential, x: Tensor, **options: Any) -> Stepping:
    model: Any = pipelined(module, x[:2], **{"devices": TWO, "chunks": 4, "balance": [1, 1], **options})
    return Stepping(model, lambda x, y=None, **more: model.step(x, target=y, **more))


fronts = pytest.mark.parametrize("front", [of_layers, of_any_module])


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1), dtype=dtype)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


# ------------------------------------------------------------------------------------------------ equal to plain

LABELS = torch.tensor([0, 1, 2, 2, 0, -100, 1, 1])
NUMBERS = torch.linspace(-1, 1, ROWS * CLASSES, dtype=torch.float64).view(ROWS, CLASSES)
WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)


def padded(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


class Halved(nn.MSELoss):
    """It overrides forward, so what it has of its class says nothing."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) / 2


#: The loss function, and the target.
EQUAL: dict[str, tuple[Any, Any]] = {
    "a sum of labels": (nn.CrossEntropyLoss(reduction="sum"), LABELS),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), LABELS),
    "class weights and another label to ignore": (nn.NLLLoss(weight=WEIGHTS, ignore_index=2), LABELS.clamp(0)),
    "micro-batches without labels": (F.cross_entropy, torch.tensor([0, 1, -100, -100, 2, -100, 1, 1])),
    "smoothed": (partial(F.cross_entropy, weight=WEIGHTS, label_smoothing=0.2), LABELS),
    "a sum by partial": (partial(F.cross_entropy, reduction="sum", ignore_index=1), LABELS.clamp(0)),
    "probabilities": (F.cross_entropy, NUMBERS.softmax(1)),
    "a sum of numbers": (nn.MSELoss(reduction="sum"), NUMBERS),
    "a mean of numbers": (F.smooth_l1_loss, NUMBERS),
    "a mean over rows": (nn.KLDivLoss(reduction="batchmean"), NUMBERS.softmax(1)),
    "integers that are numbers": (nn.MSELoss(), -100 * NUMBERS.round().long()),
    "weights of elements": (nn.BCEWithLogitsLoss(weight=WEIGHTS), NUMBERS.sigmoid()),
    "deprecated": (partial(F.mse_loss, size_average=True), NUMBERS),
    "a function": (padded, LABELS),
    "a class of the user's": (Halved(), NUMBERS),
    "a list with an item for each row": (lambda y, t: sum(a.sum() * b["scale"] for a, b in zip(y, t)) / len(y),
                                         [{"scale": k} for k in range(ROWS)]),
}  # fmt: skip


@fronts
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("name", EQUAL)
def test_the_loss_is_that_of_the_plain_loop(front: Any, name: str) -> None:
    """A sum was averaged over micro-batches, and class weights gave another mean."""
    loss_fn, target = EQUAL[name]
    calls: list[int] = []
    x, plain = inputs(), layers()
    loss = loss_fn(plain(x), target)
    loss.backward()
    if isinstance(loss_fn, nn.Module):
        loss_fn = copy.deepcopy(loss_fn)
        loss_fn.register_forward_hook(lambda *_: calls.append(1))
    model, step = front(layers(), x, loss_fn=loss_fn)
    torch.testing.assert_close(step(x, target), loss.detach())
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert len(calls) == 4 * isinstance(loss_fn, nn.Module)


# ------------------------------------------------------------------------------------------------ refused


def total(output: Tensor, _: Any) -> Tensor:
    return output.square().sum()


def without_zeros(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=0)


def contrastive(output: Tensor, _: Any) -> Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


#: The loss function, the target, the next move, and the options that it means.
REFUSED: dict[str, tuple[Any, Any, str, dict[str, Any]]] = {
    "sum": (total, None, r"gives \S+ for micro-batches 0 and 1 together, .* it is a sum: give reduce='sum'",
            {"reduce": "sum"}),
    "padding": (without_zeros, torch.tensor([0, 1, 2, 2, 0, 2, 1, 1]), "give weight=, which takes the target",
                {"weight": lambda target: (target != 0).sum()}),
    "nothing but padding": (lambda output, target: F.cross_entropy(output, target[0]),
                            (torch.tensor([-100, -100, 2, 1, 0, 2, 1, 1]),), "but for each of them nan and",
                            {"weight": lambda target: (target[0] != -100).sum()}),
    "rows with each other": (contrastive, None, "or reduce='mean', if the mean of what it gives", {"reduce": "mean"}),
}  # fmt: skip


@fronts
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mean_is_refused(front: Any, name: str, schedule: ScheduleName) -> None:
    """It was averaged silently. Gradients are as they were; the next move is taken, and not proved."""
    loss_fn, target, message, options = REFUSED[name]
    calls: list[int] = []

    def counted(output: Tensor, target: Any) -> Tensor:
        calls.append(len(output))
        return loss_fn(output, target)

    x, module = inputs(), layers()
    _, step = front(module, x, loss_fn=counted, schedule=schedule)
    before = module[0].weight.grad = torch.ones_like(module[0].weight)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            step(x, target)
        assert calls == [2, 2, 2, 2]
        calls.clear()
    assert module[0].weight.grad is before and bool((before == 1).all()) and module[2].weight.grad is None
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        step(x, target)
    calls.clear()
    plain = layers()
    _, step = front(layers(), x, loss_fn=counted, schedule=schedule, **options)
    loss = step(x, target)
    assert calls == [2, 2, 2, 2]
    if options != {"reduce": "mean"}:
        torch.testing.assert_close(loss, loss_fn(plain(x), target).detach())


@fronts
def test_a_function_is_proved_again_when_weights_differ(front: Any) -> None:
    """Without padding, each micro-batch weighs the same, and a mean over rows looks like one over labels."""

    def over_rows(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum") / len(output)

    x = inputs()
    _, step = front(layers(), x, loss_fn=over_rows)
    for _ in range(2):
        step(x, LABELS.clamp(0))
    with pytest.raises(ValueError, match=r"micro-batches 0 and 2 together.* weighted 2 to 1"):
        step(x, LABELS)
    _, step = front(layers(), x, loss_fn=padded)
    step(x[:4], torch.full((4,), -100).index_fill(0, torch.tensor([0]), 1))  # One micro-batch counts: nothing to see.


class Noise:
    """A loss that draws, as of a diffusion model."""

    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        self.draw = draw

    def __call__(self, output: Tensor, _: Any) -> Tensor:
        return (output - self.draw(output)).square().mean()


def from_python(output: Tensor) -> float:
    return random.random()


def fails(output: Tensor, _: Any) -> Tensor:
    if len(output) != 2:
        raise ArithmeticError("two rows")
    return output.mean()


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, output: Tensor, _: Any) -> Tensor:
        with self.lock:
            return output.mean()


@fronts
@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [
        (Noise(torch.rand_like), "it draws random numbers"),
        (Noise(from_python), "it draws random numbers"),
        (fails, "a copy of it, called on two micro-batches, raises ArithmeticError: two rows"),
        (Locked(), "a copy of it, called on two micro-batches, raises TypeError: cannot pickle '_thread.lock' object"),
    ],
    ids=["torch", "python", "fails", "locked"],
)
def test_what_cannot_be_compared_is_told_once(front: Any, loss_fn: Any, why: str) -> None:
    x = inputs()
    _, step = front(layers(), x, loss_fn=loss_fn)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match=f"cannot tell if it is, because {why}; give reduce='mean' or weight="):
        first = step(x)
    step(x)
    _, step = front(layers(), x, loss_fn=loss_fn, reduce="mean")
    torch.manual_seed(3)
    if loss_fn is fails:
        assert torch.equal(step(x), first)


@fronts
def test_the_proof_draws_nothing(front: Any) -> None:
    """The step after it draws what it would without the proof. Python's generator went on."""
    x = inputs()
    for draw in (torch.rand_like, from_python):
        drawn = []
        for options in ({}, {"reduce": "mean"}):
            _, step = front(layers(), x, loss_fn=Noise(draw), **options)
            torch.manual_seed(3)
            random.seed(3)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                drawn.append([step(x) for _ in range(2)])
        assert drawn[0] == drawn[1]


class Centred(nn.Module):
    """A loss around a moving centre, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES, dtype=torch.float64))
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        loss = (output - target - self.centre).square().mean()
        self.centre.mul_(0.5).add_(0.5 * output.detach().mean(0))
        return loss


CALLS: list[int] = []
COUNT = 0


def in_globals(output: Tensor, target: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return noted(output, target)


def noted(output: Tensor, target: Tensor) -> Tensor:
    CALLS.append(len(output))
    return (output - target).square().mean() if len(output) else noted(output[:0], target)


def in_a_closure(centred: Centred) -> Any:
    count = 0

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return centred(output, target) / min(count, 1)

    return loss_fn


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(output, target)


@fronts
@pytest.mark.parametrize("how", ["module", "closure", "partial", "method", "object", "globals"])
def test_a_loss_with_state_is_called_once_for_each_micro_batch(front: Any, how: str) -> None:
    """The proof called it once more: the centre moved five times for four micro-batches, and so did counters."""
    centred, counting = Centred(), Counting()
    loss_fn = {
        "module": centred,
        "closure": in_a_closure(centred),
        "partial": partial(in_a_closure(centred)),
        "method": centred.forward,
        "object": counting,
        "globals": in_globals,
    }[how]
    x, plain, other, before = inputs(), layers(), Centred(), COUNT
    of_plain = other if how in ("module", "closure", "partial", "method") else F.mse_loss
    with torch.no_grad():
        expected = sum([of_plain(plain(a), b) / 4 for a, b in zip(x.chunk(4), NUMBERS.chunk(4))])
    CALLS.clear()
    _, step = front(layers(), x, loss_fn=loss_fn)
    torch.testing.assert_close(step(x, NUMBERS), expected)
    assert centred.calls + counting.calls + COUNT - before == 4
    assert len(CALLS) == COUNT - before
    torch.testing.assert_close(centred.centre, other.centre)


def test_a_sum_with_state_is_refused() -> None:
    """It is proved on copies that begin with one state, so neither the centre nor the counter hides the sum.

    The step has failed, so the loss function is as it was before.
    """
    centred = Centred()
    _, step = of_layers(layers(), inputs(), loss_fn=lambda output, target: len(output) * centred(output, target))
    with pytest.raises(ValueError, match="it is a sum: give reduce='sum'"):
        step(inputs(), NUMBERS)
    assert centred.calls == 0


def test_outputs_that_cannot_be_joined() -> None:
    """A model of contrastive losses, whose outputs `pipelined` refuses to join, and sends here."""

    def forward(self: Any, x: Tensor) -> dict[str, Tensor]:
        features = self.layers[1](self.layers[0](x))
        return {"similarity": features @ features.T}

    x = torch.randn(8, 4, dtype=torch.float64)
    module = chain(forward, nn.Linear(4, 4).double(), nn.Linear(4, 4).double())
    loss_fn = lambda output, _: contrastive(output["similarity"], None)  # noqa: E731
    model: Any = pipelined(module, x[:4], chunks=2, devices=TWO, loss_fn=loss_fn)
    with pytest.warns(UserWarning, match="couples the rows"):
        model.step(x)
    model.step(x)


@fronts
def test_a_matrix_beside_the_loss_is_joined_along_its_rows(front: Any) -> None:
    """As of a confusion matrix: `pipelined` said that a step cannot join it, and to use a step; a GPipe takes it."""

    def scored(output: Tensor, target: Tensor) -> Any:
        loss, counts = F.cross_entropy(output, target), torch.zeros(CLASSES, CLASSES)
        return loss, {"matrix": counts.index_put_((target, output.argmax(1)), torch.ones(()), accumulate=True)}

    x, target, plain = inputs(), LABELS.clamp(0), layers()
    expected = torch.cat([scored(plain(a), b)[1]["matrix"] for a, b in zip(x.chunk(4), target.chunk(4))])
    _, step = front(layers(), x, loss_fn=scored)
    assert torch.equal(step(x, target)[1]["matrix"], expected)


@fronts
def test_values_that_cannot_be_joined_name_what_can(front: Any) -> None:
    for values, message in (
        (len, "must consist of tensors .* is int"),
        (lambda y: y[:, : len(y) - 1], "Sizes of tens"),
    ):
        loss_fn = lambda y, t, values=values: (F.mse_loss(y, t), values(y))  # noqa: E731
        _, step = front(layers(), inputs(), loss_fn=loss_fn, chunks=3)
        with pytest.raises((TypeError, RuntimeError), match=message):
            step(inputs(), NUMBERS)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"loss_fn": nn.MSELoss(reduction="none")}, "loss_fn has reduction='none', but must return one number"),
    ({"loss_fn": partial(F.mse_loss, reduction="none")}, "give reduction='mean' or 'sum'"),
    ({"loss_fn": F.mse_loss, "reduce": "median"}, "reduce must be 'mean', 'sum' or None, but got 'median'"),
    ({"loss_fn": F.mse_loss, "reduce": "sum", "weight": len}, "so weight= has no use"),
]


@fronts
@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_settings_that_do_not_fit(front: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        front(layers(), inputs(), **options)


# ------------------------------------------------------------------------------------------------ how often, and what


@fronts
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZeroBubble"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_the_loss_is_computed_once_for_each_micro_batch(front: Any, schedule: str, checkpoint: str) -> None:
    """It was a part of the last cell, and recomputed with it."""
    calls: list[bool] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(output.requires_grad)
        return F.mse_loss(output, target)

    x = inputs()
    _, step = front(layers(), x, loss_fn=loss_fn, schedule=schedule, checkpoint=checkpoint)
    step(x, NUMBERS)
    calls.clear()
    step(x, NUMBERS)
    assert calls == [True] * 4


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("devices", [TWO, ["cpu", "cpu"]])
def test_a_loss_with_parameters_of_its_own(devices: list[str], checkpoint: str) -> None:
    """They get their gradients directly, and so does a weight of the model. A loss that fails leaves both."""
    x, own = inputs(), nn.Linear(CLASSES, 1).double()
    module = layers()
    fails: list[None] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if fails and torch.equal(target, NUMBERS[6:]):
            raise ArithmeticError
        return own(output).square().mean() + module[2].bias.square().sum()

    _, step = of_layers(module, x, loss_fn=loss_fn, checkpoint=checkpoint, devices=devices, schedule="GPipe")
    step(x, NUMBERS)
    mine = [parameter.grad.clone() for parameter in (*module.parameters(), *own.parameters())]
    fails.append(None)
    with pytest.raises(ArithmeticError):
        step(x, NUMBERS)
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], mine[:-2], rtol=0, atol=0)
    fails.clear()
    module.zero_grad()
    own.zero_grad()
    loss_fn(module(x), NUMBERS).backward()
    torch.testing.assert_close([p.grad for p in (*module.parameters(), *own.parameters())], mine)


@fronts
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_loss_that_changes_the_output_in_place(front: Any, checkpoint: str) -> None:
    """As the temperature of logits is often applied. What a layer has saved of its output must not change."""

    def loss_fn(output: Tensor, _: Any) -> Tensor:
        output /= 2
        output[:, 0] *= 3
        return output.square().mean()

    x, plain = inputs(), layers()
    loss_fn(plain(x), None).backward()
    model, step = front(layers(), x, loss_fn=loss_fn, checkpoint=checkpoint, schedule="GPipe")
    step(x)
    torch.testing.assert_close(gradients(model), gradients(plain))
    model, step = front(layers(), x, loss_fn=loss_fn, schedule="GPipe", checkpoint="never")
    model.register_module("2", nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(x)


def test_an_error_of_its_backward_says_so() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            raise ArithmeticError

    x = inputs()
    options: dict[str, Any] = {"loss_fn": lambda y, _: Fails.apply(y).mean(), "schedule": "GPipe"}
    place = "partition 1 (layers '2'..'2') on cpu:1, during"
    for checkpoint, notes in (
        ("always", ["in the backward of the loss", f"micro-batch 0 of 4, {place} forward"]),
        ("never", [f"micro-batch 3 of 4, {place} backward"]),
    ):
        with pytest.raises(ArithmeticError) as raised:
            of_layers(layers(), x, checkpoint=checkpoint, **options).step(x)
        assert raised.value.__notes__ == notes


@fronts
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_is_the_number_of_the_plain_loop(front: Any, dtype: torch.dtype) -> None:
    """That of a GPipe was float64, which some devices lack."""
    x, y, module = inputs(dtype), NUMBERS.to(dtype), layers(dtype)
    expected = sum(F.mse_loss(module(a), b).detach() * 0.25 for a, b in zip(x.chunk(4), y.chunk(4)))
    loss = front(module, x, loss_fn=F.mse_loss).step(x, y)
    assert loss.dtype == dtype and loss.shape == () and torch.equal(loss, expected)


@fronts
def test_a_scaler_scales_gradients_and_not_the_loss(front: Any) -> None:
    x = inputs()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, step = front(layers(), x, loss_fn=F.mse_loss)
    other, plain = front(layers(), x, loss_fn=F.mse_loss)
    assert torch.equal(step(x, NUMBERS, scaler=scaler), plain(x, NUMBERS))
    for ours, theirs in zip(gradients(model), gradients(other)):
        assert torch.equal(ours, 1024 * theirs)


class Overflows(nn.Linear):
    """Its weight has an infinite gradient in a micro-batch of three rows."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.clone()
        if len(x) == 3:
            weight.register_hook(lambda grad: grad * torch.inf)
        return F.linear(x, weight, self.bias)


@fronts
def test_an_overflow_in_one_micro_batch_of_a_window_skips_the_step(front: Any) -> None:
    """In the last partition alone. Gradients, weights and scale are those of the plain loop that accumulates."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Overflows(4, CLASSES)).double()
    plain = copy.deepcopy(module)
    model, step = front(module, inputs(), loss_fn=F.mse_loss, schedule="1F1B")
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for sizes, scale in (([2, 1, 1], 1024.0), ([2, 3, 1], 512.0), ([1, 2], 512.0)):
        xs, ys = inputs()[: sum(sizes)].split(sizes), NUMBERS[: sum(sizes)].split(sizes)
        before = copy.deepcopy(plain.state_dict())
        step(MicroBatches(xs), MicroBatches(ys), scaler=scalers[0])
        for x, y in zip(xs, ys):
            scalers[1].scale(F.mse_loss(plain(x), y) * (len(x) / sum(sizes))).backward()
        for scaler, optimizer in zip(scalers, optimizers):
            scaler.unscale_(optimizer)
        for ours, theirs in zip(gradients(model), gradients(plain)):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        for scaler, optimizer in zip(scalers, optimizers):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == scale
        for ours, theirs, old in zip(model.parameters(), plain.parameters(), before.values()):
            assert torch.equal(ours, theirs) and torch.equal(ours, old) == (3 in sizes)


def test_a_scaler_of_the_models_own() -> None:
    def forward(self: Any, x: Tensor, scaler: float = 1.0) -> Tensor:
        return self.layers[1](self.layers[0](x)) * scaler

    x = torch.randn(8, 4)
    model: Any = pipelined(chain(forward, nn.Linear(4, 4), nn.Linear(4, 4)), (x,), chunks=2, devices=TWO,
                           loss_fn=lambda y, _: y.mean())  # fmt: skip
    with pytest.raises(
        TypeError, match="forward of the model has an argument of the same name; pass that one by posit"
    ):
        model.step(x, scaler=2.0)
    model.step(x, 2.0)


# ------------------------------------------------------------------------------------------------ targets

WORDS, LENGTHS = torch.tensor([1, 2, 1, 1, 2, 2, 1, 2, 1, 2, 1, 1]), torch.tensor([2, 1, 1, 2, 2, 1, 2, 1])


def ctc(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    frames = output.unsqueeze(0).expand(5, -1, -1).log_softmax(-1)
    return F.ctc_loss(frames, target[0][: target[1].sum()], torch.full((len(output),), 5), target[1])


@fronts
def test_a_target_without_a_row_for_each_row(front: Any) -> None:
    """It was refused even for one micro-batch, and nothing passed it whole."""
    x, table = inputs(), torch.ones(5, dtype=torch.float64)
    expected = ctc(layers()(x), (WORDS, LENGTHS)).detach()
    torch.testing.assert_close(front(layers(), x, loss_fn=ctc, chunks=1).step(x, (NoChunk(WORDS), LENGTHS)), expected)
    model, step = front(layers(), x, loss_fn=ctc, chunks=1)
    torch.testing.assert_close(step(x, (WORDS, LENGTHS)), expected)
    model.chunks = 4
    ways = r"the target is of shape \(12,\); wrap in NoChunk what .* or give GPipe or pipelined no_chunk=\['target'\]"
    with pytest.raises(ValueError, match=ways):
        step(x, (WORDS, LENGTHS))

    def scaled(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        assert target[0] is not None and len(target[0]) == 5
        return F.mse_loss(output, target[1][: len(output)]) * target[0].sum()

    loss = front(layers(), x, loss_fn=scaled).step(x, (NoChunk(table), NUMBERS))
    torch.testing.assert_close(loss, scaled(layers()(x), (table, NUMBERS)).detach())
    zeros = torch.zeros(ROWS + 3, CLASSES, dtype=torch.float64)
    loss = front(layers(), x, loss_fn=scaled, no_chunk=["target"]).step(x, (table, zeros))
    torch.testing.assert_close(loss, scaled(layers()(x), (table, zeros)).detach())


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


def test_arguments_of_a_gpipe_that_go_whole() -> None:
    """By name, as `pipelined` has them."""
    x, mask = inputs(), torch.rand(4, dtype=torch.float64)
    module = nn.Sequential(Masked(), *layers())
    model = GPipe(module, [2, 2], devices=TWO, chunks=4, no_chunk="mask")
    torch.testing.assert_close(model(x, mask=mask), model(x, mask))
    torch.testing.assert_close(model(x, mask), layers()(x * mask))
    with pytest.raises(
        ValueError, match=r"no_chunk names \['masks'\], but the arguments of the first layer are \['x', 'mask'"
    ):
        GPipe(module, [2, 2], devices=TWO, no_chunk=["masks", "target"])


# ------------------------------------------------------------------------------------------------ models with a loss


class LanguageModel(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mid, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
        self.wrap = wrap
        self.double()

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.mid(self.embed(tokens)))
        return self.wrap(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def wrapped(loss: Tensor, logits: Tensor) -> dict[str, Tensor]:
    return {"loss": loss, "logits": logits}


OWN: list[tuple[Any, dict[str, Any]]] = [
    (lambda loss, _: loss, {}),
    (lambda loss, logits: (loss, logits), {}),
    (wrapped, {}),
    (lambda loss, _: loss, {"loss_fn": lambda output, _: output}),
    (wrapped, {"loss_fn": lambda output, _: output["loss"]}),
    (wrapped, {"loss_fn": lambda output, _: output["loss"] * 2, "weight": lambda named: (named["labels"] >= 0).sum()}),
]


@pytest.mark.parametrize(("wrap", "options"), OWN)
def test_the_loss_that_a_model_returns(wrap: Any, options: dict[str, Any]) -> None:
    """A number, the first of a tuple, or what loss_fn takes out of the output; its labels count, not its rows."""
    tokens = torch.arange(24).view(4, 6) % 5
    labels = tokens.clone()
    labels[0, :5] = labels[1, :4] = -100
    plain = LanguageModel(lambda loss, _: loss)
    expected = plain(tokens, labels) * (2 if "weight" in options else 1)
    expected.backward()
    model: Any = pipelined(LanguageModel(wrap), (tokens, labels), chunks=4, devices=["cpu", "cpu"], **options)
    torch.testing.assert_close(model.step(tokens, labels), expected.detach())
    torch.testing.assert_close(gradients(model), gradients(plain))


# ------------------------------------------------------------------------------------------------ settings


def test_settings_of_a_pipelined_model_may_be_set() -> None:
    """chunks and schedule, as those of a GPipe; a model with attributes of these names keeps its own."""
    x = inputs()
    model, step = of_any_module(layers(), x, loss_fn=F.mse_loss)
    expected = step(x, NUMBERS)
    model.chunks, model.schedule = 2, "GPipe"
    assert (model.chunks, model.schedule) == (2, "GPipe") and "chunks=2" in repr(model)
    torch.testing.assert_close(step(x, NUMBERS), expected)
    assert copy.deepcopy(model).chunks == 2
    with pytest.raises(ValueError, match="schedule must be one of"):
        model.schedule = "F1B1"
    with pytest.raises(ValueError, match="V-Half wants partitions"):
        model.schedule = "V-Half"
    with pytest.raises(ValueError, match="number of chunks must be positive"):
        model.chunks = 0
    assert (model.chunks, model.schedule) == (2, "GPipe")

    own = layers()
    own.chunks = "of its own"
    model, step = of_any_module(own, x, loss_fn=F.mse_loss)
    model.chunks += "!"
    step(x, NUMBERS)
    assert model.chunks == model.unpipelined().chunks == "of its own!"


# ------------------------------------------------------------------------------------------------ on an accelerator


@pytest.mark.late
@fronts
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("where", ["cpu", "late:0"])
def test_the_proof_on_an_accelerator(front: Any, schedule: str, where: str) -> None:
    """The two outputs are used by the caller's thread, which waits for the device in the first step only."""
    x, weights = inputs(torch.float32), WEIGHTS.float().to("late:1")
    target = LABELS.to(where)

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def own(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight=weights)

    plain = layers(torch.float32)
    F.cross_entropy(plain(x), LABELS).backward()
    options: dict[str, Any] = {"schedule": schedule, "checkpoint": "always", "devices": ["late:0", "late:1"]}
    model, step = front(layers(torch.float32), x, loss_fn=weighted, **options)
    step(x, target)
    torch.testing.assert_close([None if g is None else g.cpu() for g in gradients(model)], gradients(plain))
    _, step = front(layers(torch.float32), x, loss_fn=own, **options)
    with pytest.raises(ValueError, match="give weight="):
        step(x, target)
    model, step = front(layers(torch.float32), x, loss_fn=nn.CrossEntropyLoss(weight=weights), **options)
    loss = step(x, target)
    torch.testing.assert_close(
        loss.cpu(), F.cross_entropy(layers(torch.float32)(x), LABELS, weight=weights.cpu()).detach()
    )
