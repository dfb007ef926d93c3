"""What a step takes, returns, refuses and counts. That it gives the plain model's gradients is a property of
`test_transparency`; that it fails well is one of `test_faults`.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import Devices
from tests.front.models import chain
from tests.layers import Apply, Using
from tests.plain import assert_equal, gradients
from torchgpipe import GPipe, MicroBatches, NoChunk, is_recomputing, pipelined
from torchgpipe.devices.torch_internals import add_each
from torchgpipe.graph.split_backward import SplitBackward
from torchgpipe.schedule import Action, program

SCHEDULES = ["GPipe", "1F1B", "ZeroBubble"]


def plain_step(module: nn.Module, inputs: list[Any], losses: Callable[[int, Any], Tensor]) -> Tensor:
    """Run micro-batches forward and backward one by one, as under 1F1B; return the loss."""
    total = torch.zeros((), dtype=torch.float64)
    for i, value in enumerate(inputs):
        share = losses(i, module(value))
        share.backward()
        total += share.detach()
    return total


def mlp(width: int = 6, layers: int = 4, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout), nn.Tanh()) for _ in range(layers)]
    ).double()


def data(rows: int = 8, width: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, width, dtype=torch.float64), torch.randn(rows, width, dtype=torch.float64)


def stepping(module: nn.Sequential, devices: list[str], **options: Any) -> GPipe:
    options = {"chunks": 4, "loss_fn": F.mse_loss, **options}
    balance = options.pop("balance", [1] * len(devices))
    return GPipe(module, balance, devices=devices, **options)


def lines(*layers: nn.Module) -> nn.Sequential:
    """Return the layers, each behind a linear one."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), layer) for layer in layers]).double()


# ------------------------------------------------------------------------------------------------ what it computes


@pytest.mark.parametrize("front", ["layers", "any module"])
def test_a_program_of_iterators_serves_every_step(front: str) -> None:
    """The check at construction ran through the iterators, so the first step found a program of no micro-batch."""
    given, (x, y) = iter([iter(map(tuple, row)) for row in program("1F1B", 4, [0, 1])]), data()
    how: dict[str, Any] = {"chunks": 4, "devices": ["cpu:0", "cpu:1"], "loss_fn": F.mse_loss}
    if front == "layers":
        model: Any = GPipe(mlp(), [2, 2], schedule=given, **how)  # type: ignore[arg-type]
    else:
        model = pipelined(mlp(), x, partitions=2, schedule=given, **how)
    assert float(model.step(x, target=y)) == float(model.step(x, target=y))
    model.schedule = iter(program("1F1B", 8, [0, 1]))
    model.chunks = 8
    model.step(x, target=y)


@pytest.mark.on_late
def test_frozen_layers_get_nothing_and_no_backward_before_the_first_trained_one(devices: Devices) -> None:
    ran: list[int] = []

    def watch(k: int, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda _: ran.append(k))
        return x

    module = lines(*[Apply(partial(watch, k)) for k in range(4)])
    module[:2].requires_grad_(False)
    stepping(module, devices(4), checkpoint="never").step(*data())
    assert set(ran) == {2, 3}
    assert [layer[0].weight.grad is None for layer in module] == [True, True, False, False]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cell_whose_backward_comes_next_is_not_recomputed(schedule: str) -> None:
    again: list[int] = []

    def look(j: int, x: Tensor) -> Tensor:
        again.extend([j] * is_recomputing())
        return x

    module = lines(*[Apply(partial(look, j)) for j in range(2)])
    stepping(module, ["cpu:0", "cpu:1"], schedule=schedule, checkpoint="always").step(*data())
    # The last micro-batch turns round, with 'GPipe' on both devices; else each one does so on the last device.
    assert [again.count(0), again.count(1)] == ([3, 3] if schedule == "GPipe" else [4, 0])


def test_layers_that_are_named_are_recomputed_one_by_one(devices: Devices) -> None:
    """The last layer of the last partition runs backward next, so it is not."""
    seen: list[str] = []

    def look(name: str, x: Tensor) -> Tensor:
        seen.extend(name * is_recomputing())
        return x.tanh()

    def watched(names: list[str], checkpoint: Any) -> GPipe:
        layers = lines(*[Apply(partial(look, name)) for name in "abcdef"])
        named = nn.Sequential(OrderedDict(zip("abcdef", layers)))
        return stepping(named, names, balance=[3, 3], checkpoint=checkpoint)

    x, y = data()
    model, plain = watched(devices(2), ["b", "c", "f"]), watched(["cpu"] * 2, "never")
    assert torch.equal(model.step(x, y), plain.step(x, y))
    assert_equal(gradients(model), gradients(plain))
    assert "".join(seen) == "cb" * 4
    assert "checkpoint=('b', 'c', 'f')" in repr(model)
    for training, expected in ((True, "bcf" * 4), (False, "")):
        seen.clear()
        F.mse_loss(model.train(training)(x), y).backward()
        assert sorted(seen) == sorted(expected)
    model.train()
    with pytest.raises(ValueError, match=r"checkpoint names \['g'\], but the layers of the pipeline are \['a', 'b'"):
        model.checkpoint = ["a", "g"]
    model.partitions[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="checkpoint names layers of partition 0, which is compiled or has hooks"):
        model.step(x, y)
    model.checkpoint = ["d", "e", "f"]
    model.step(x, y)
    model.set_submodule("f", nn.Linear(5, 5).double())
    with pytest.raises(RuntimeError) as info:
        model.step(x, y)
    assert info.value.__notes__[0].startswith("micro-batch 0 of 4, partition 1 (layers 'f'..'f')")


def test_another_pipeline_within_a_layer_or_the_loss(devices: Devices) -> None:
    """Its layers were looked for in the outer pipeline, and its workers waited for a lock that the outer one held."""
    x, y = data()
    inner = stepping(mlp(dropout=0.2), devices(4))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        inner.step(x, y)
        return F.mse_loss(output, target)

    stepping(nn.Sequential(nn.Linear(6, 6).double(), inner), devices(2), loss_fn=loss_fn).step(x, y)


# ------------------------------------------------------------------------------------------------ beside the loss


def scored(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.mse_loss(output, target), {"output": output, "count": (output > target).sum()}


@pytest.mark.parametrize("rows", [7, 1])
def test_values_beside_the_loss_are_gathered_without_a_graph(devices: Devices, rows: int) -> None:
    x, y = data(rows=rows)
    model, reference = stepping(mlp(), devices(4), loss_fn=scored), stepping(mlp(), devices(4))
    loss, values = model.step(x, y)
    assert torch.equal(loss, reference.step(x, y))
    assert_equal(gradients(model), gradients(reference))
    outputs = [mlp()(part) for part in x.chunk(4)]
    assert torch.equal(values["output"], torch.cat(outputs)) and not values["output"].requires_grad
    assert values["count"].tolist() == [(output > part).sum() for output, part in zip(outputs, y.chunk(4))]
    model.weight = lambda target: float(target[0, 0] > 0)  # nothing, for some micro-batches
    with torch.no_grad():
        assert len(model.step(x, y)[1]["output"]) == rows


def test_values_of_given_micro_batches_have_the_shapes_that_they_were_returned_with() -> None:
    """A count came back in a tensor of shape (1,), as it is gathered of a mini-batch that was split."""
    x, y = data(rows=3)
    xs, ys = x.split([1, 2]), y.split([1, 2])
    _, values = stepping(mlp(), ["cpu"] * 4, loss_fn=scored).step(MicroBatches(xs), MicroBatches(ys))
    assert [value["count"].shape for value in values] == [(), ()]


@pytest.mark.on_late
def test_tensors_that_go_whole_to_every_micro_batch(devices: Devices) -> None:
    """A table in the input or the target was taken for the batch."""
    x, y = data(rows=7)
    table = NoChunk(torch.ones(100, 6, dtype=torch.float64))
    layers = nn.Sequential(Apply(lambda pair: pair[0] + pair[1].sum()), nn.Linear(6, 6).double())
    model = stepping(layers, devices(2), loss_fn=lambda o, t: (o - t[1]).sum(), reduce="sum")
    model.step((x, table), (NoChunk(torch.ones(1)), y))
    assert model[1].weight.grad is not None


@pytest.mark.on_late
@pytest.mark.parametrize("finite", [2, 0])
def test_what_weighs_nothing_may_be_infinite_or_complex(devices: Devices, finite: int) -> None:
    """Its share of the loss is no sum over anything: it was NaN, or complex as the outputs."""
    layers = nn.Sequential(nn.Linear(6, 6).double(), Apply(lambda x: x * (1 if x.device.type == "late" else 1j)))
    model = stepping(layers, devices(2), loss_fn=lambda z, _: z.abs().mean(), weight=lambda t: t.sum())
    x = data(rows=4)[0]
    x[finite:] = float("inf")
    loss = model.step(x, torch.tensor([1, 1, 0, 0]) * (finite > 0))
    assert loss.dtype == torch.float64 and loss.isfinite() and (loss == 0) == (finite == 0)


# ------------------------------------------------------------------------------------------------ programs


FOUR = ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]
INTERLEAVED = program("Interleaved1F1B", 4, [0, 1, 0, 1])


def stepped(rows: int = 8, devices: list[str] | None = None, **options: Any) -> Any:
    return stepping(mlp(), devices or ["cpu:0", "cpu:1", "cpu:2", "cpu:3"], **options).step(*data(rows))


def fitted(schedule: Any) -> None:
    model = stepping(mlp(), FOUR, schedule=INTERLEAVED)
    try:
        model.schedule = schedule
    finally:
        assert model.schedule == INTERLEAVED


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: GPipe(mlp(), [4], devices=["cpu"]).step(*data()), "a step needs a loss"),
    (lambda: GPipe(nn.Sequential(), [], devices=[], loss_fn=F.mse_loss).step(*data()), "a step needs layers"),
    (lambda: stepped(schedule="F1B1"), r"schedule must be one of GPipe, 1F1B, .*, but got 'F1B1'"),
    (lambda: stepped(schedule=program("1F1B", 2, [0])), "this program cannot run"),
    (
        lambda: stepping(mlp(), ["cpu"] * 4).step(data()[0], data(5)[1]),
        "has 8 rows in dimension 0, but the target is of sh",
    ),
    (lambda: stepping(mlp(), FOUR, schedule="1F1B"), "1F1B wants the partitions of a device next to each other"),
    (lambda: stepping(mlp(), FOUR, schedule=[[Action("F", 0, 0)], []]), "this program cannot run"),
    (lambda: stepped(3, FOUR, schedule=INTERLEAVED), "is for 4 micro-batches, but the mini-batch has 3"),
    (lambda: fitted("V-Half"), "V-Half wants partitions that are placed like a V"),
    (
        lambda: stepping(lines(Apply(lambda x: {"x": x, "name": "x"}), nn.Tanh()), ["cpu"] * 2).step(*data()),
        "'name'.* is str",
    ),
    (lambda: stepped(loss_fn=lambda a, b: (F.mse_loss(a, b), "good")), "beside the loss must consist of tensors and"),
    (lambda: stepped(loss_fn=lambda a, b: (F.mse_loss(a, b), a, b)), "or a pair of this loss and other values, but it"),
    (
        lambda: stepped(loss_fn=lambda a, b: F.mse_loss(a, b) if torch.equal(b, data()[1][:2]) else scored(a, b)),
        "loss_fn returned None .* return the same structure for each",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_missing_or_does_not_fit_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()
    GPipe(mlp(), [1] * 4, devices=FOUR)  # never steps


def scaled(self: Any, x: Tensor, scale: Tensor | float = 1.0) -> Any:
    return self.layers[1](self.layers[0](x) * scale)


@pytest.mark.parametrize("kind", ["GPipe", "pipelined"])
@pytest.mark.parametrize(
    "options",
    [{"loss_fn": F.mse_loss}, {"loss_fn": lambda output, _: output.mean(), "weight": lambda target: target.numel()}],
    ids=["loss_fn", "weight"],
)
def test_a_loss_that_misses_its_target_says_so(kind: str, options: dict[str, Any]) -> None:
    """In ``step(x, y)`` of a pipelined model, y once was an argument of the model, and the error one of None."""
    layers, x = [nn.Linear(2, 2), nn.Linear(2, 2)], torch.randn(4, 2)
    options = {"devices": ["cpu"] * 2, "chunks": 2, **options}
    model: Any
    if kind == "GPipe":
        model = GPipe(nn.Sequential(*layers), [1, 1], **options)
    else:
        model = pipelined(chain(scaled, *layers), x, **options)
    with pytest.raises((AttributeError, TypeError)) as raised:
        model.step(x)
    assert raised.value.__notes__[0] == "no target was given: step(..., target=y)"
    model.step(x, target=x)


# ------------------------------------------------------------------------------------------------ autocast


class Casts(TorchDispatchMode):
    """Counts the casts of each weight, by its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            self.counts[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("schedule", "checkpoint"), [("GPipe", "except_last"), ("ZeroBubble", "never")])
def test_a_step_casts_each_weight_once(devices: Devices, checkpoint: str, schedule: Any) -> None:
    """Each run of a cell cast all of its weights, and while a cell was launched, all other devices waited."""
    module, plain = (lines(*[nn.Identity()] * 4).float() for _ in range(2))
    model = stepping(module, devices(4), schedule=schedule, checkpoint=checkpoint)
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (module, plain))
    x, y = (value.float() for value in data())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):  # In one block, and yet with the weights of the moment.
            with Casts() as casts:
                model.step(x, y)
            assert casts.counts == {weight.data_ptr(): 1 for weight in module.parameters()}
            optimizer.step()
            optimizer.zero_grad()
    for _ in range(2):
        for part, target in zip(x.chunk(4), y.chunk(4)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(plain(part), target) * (1 / 4)
            loss.backward()
        other.step()
        other.zero_grad()
    torch.testing.assert_close([*module.parameters()], [*plain.parameters()])


def test_backward_is_outside_of_autocast(devices: Devices) -> None:
    """As ``loss.backward()`` is."""
    inside: list[bool] = []

    def look(x: Tensor) -> Tensor:
        x = x * 1
        x.register_hook(lambda _: inside.append(torch.is_autocast_enabled("cpu")))
        return x

    model = stepping(lines(nn.Identity(), Apply(look)).float(), devices(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.step(*(value.float() for value in data()))
    assert inside == [False] * 4


def test_a_layer_under_autocast_holds_nobody_up() -> None:
    """Cells were launched one at a time. So a layer that waited for its device let all devices wait."""
    meeting = threading.Barrier(2, timeout=60)
    launched: list[list[None]] = [[], []]

    def meet(j: int, x: Tensor) -> Tensor:
        launched[j].append(None)
        # In the second step, as it is known by then that nothing draws. The first layer is one micro-batch ahead.
        if len(launched[j]) == 4 + 2 - j:
            meeting.wait()
        return x * 2

    model = stepping(nn.Sequential(*[Apply(partial(meet, j)) for j in range(2)]), FOUR[:2], checkpoint="never")
    x, y = data()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.step(x.requires_grad_(), y)


# ------------------------------------------------------------------------------------------------ random numbers


@pytest.mark.on_late
def test_each_layer_and_micro_batch_draws_other_numbers(devices: Devices) -> None:
    drawn: list[Tensor] = []

    def noise(x: Tensor) -> Tensor:
        drawn.append(torch.rand(3))
        return x * drawn[-1][0]

    model = stepping(lines(*[Apply(noise) for _ in range(4)]), devices(4), checkpoint="never")
    x, y = data()
    for _ in range(2):
        model.step(x, y)
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(drawn) == 32


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_layer_that_begins_to_draw_is_noticed(checkpoint: str) -> None:
    """Its numbers had no seed, so a recomputation may have drawn others. Without one, it has seeds from then on."""
    draws: list[None] = []
    noise = Apply(lambda x: x * torch.rand(x.shape) if draws else x * 1)
    model = stepping(mlp().append(noise), FOUR[:2], balance=[2, 3], checkpoint=checkpoint)
    x, y = data()
    model.step(x, y)
    model.zero_grad()
    draws.append(None)
    refused = pytest.raises(RuntimeError, match=r"from the generator of cpu in this mini-batch.*drew none before")
    with refused if checkpoint == "always" else nullcontext():
        model.step(x, y)
    assert all(parameter.grad is None for parameter in model.parameters()) == (checkpoint == "always")
    results = []
    for _ in range(2):
        torch.manual_seed(4)
        results.append(model.step(x, y))
    assert results[0] == results[1]


def of_layers(layers: nn.Sequential, devices: list[str], **options: Any) -> tuple[Any, Callable[..., Tensor]]:
    model = stepping(layers, devices, **options)
    return model, model.step


def of_any_module(layers: nn.Sequential, devices: list[str], **options: Any) -> tuple[Any, Callable[..., Tensor]]:
    settings: dict[str, Any] = {"chunks": 4, "loss_fn": F.mse_loss, **options, "balance": "parameters"}
    model: Any = pipelined(layers, data(2)[0], devices=devices, **settings)
    return model, lambda x, y: model.step(x, target=y)


fronts = pytest.mark.parametrize("front", [of_layers, of_any_module])


@fronts
def test_what_hooks_draw_at_backward_stays_drawn(devices: Devices, front: Any) -> None:
    """The generator was put back behind the seed of the step, so the noise of the next step was that of this one."""
    noise = []

    def hooked(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: noise.append(torch.rand(4)))
        return x * 1

    layers = mlp(dropout=0.3)
    layers[2] = Apply(hooked)
    _, step = front(layers, devices(3), balance=[1, 1, 2], checkpoint="never")
    noise.clear()
    x, y = data()
    for _ in range(3):
        step(x, y)
    numbers = torch.cat(noise).tolist()
    assert len(set(numbers)) == len(numbers) > 0


@fronts
@pytest.mark.filterwarnings("ignore:torchgpipe.pipelined. a training call runs as one micro-batch")
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_an_empty_mini_batch_does_not_tell_whether_layers_draw(devices: Devices, front: Any, checkpoint: str) -> None:
    """Dropout draws nothing for it, and was taken for a layer that never draws: it lost its seeds for good."""
    x, y = data()
    losses = []
    for first in (0, 8):
        model, step = front(mlp(dropout=0.3), devices(4), checkpoint=checkpoint)
        _ = step(x[:first], y[:first]) if front is of_layers else model(x[:first])
        torch.manual_seed(2)
        losses.append(step(x, y))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("drawn", [False, True])
def test_a_step_in_another_thread_draws_no_numbers_of_this_one(drawn: bool) -> None:
    """Each step draws its seed from the generator of the CPU; the other step took that for a draw of its layers."""
    x, y = data()
    other = stepping(mlp(), FOUR[:2], balance=[2, 2], checkpoint="always")
    meets: list[None] = []

    def meet(input: Tensor) -> Tensor:
        if meets:
            meets.pop()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(other.step, x, y).result()
                if drawn:
                    pool.submit(torch.rand, 1).result()
        return input * 1

    model = stepping(mlp().append(Apply(meet)), FOUR[:2], balance=[2, 3], checkpoint="always")
    model.step(x, y)
    meets.append(None)
    with pytest.raises(RuntimeError, match="from the generator of cpu") if drawn else nullcontext():
        model.step(x, y)


@pytest.mark.parametrize("p", [[0.1, 0.2], torch.ones(2)], ids=["a list", "a tensor"])
def test_a_layer_whose_p_is_no_dropout(devices: Devices, p: Any) -> None:
    """Whether a model draws was looked up by the p of its modules, and that of some cannot be looked up."""
    layers = mlp()
    layers[2].p = p
    x, y = data()
    stepping(layers, devices(4)).step(x, y)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_pipelined_layer_draws_the_same_on_any_devices(checkpoint: str) -> None:
    """Its workers waited for the generator that the recomputation around them held."""

    def run(names: list[str]) -> Tensor:
        inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6)).double()
        pipelined(inner, x[:2], chunks=1, devices=["cpu:4", "cpu:5"], balance="parameters")
        model = stepping(mlp().append(inner), names, balance=[2, 3], checkpoint=checkpoint, schedule="GPipe")
        torch.manual_seed(2)
        return torch.stack([model.step(x, y) for _ in range(2)])

    x, y = data()
    torch.manual_seed(0)
    expected = run(["cpu"] * 2)
    torch.manual_seed(0)
    assert torch.equal(run(FOUR[:2]), expected)


# ------------------------------------------------------------------------------------------------ bugs


def test_a_partition_that_begins_in_place_runs_on_a_copy(devices: Devices) -> None:
    """Also where its neighbour is on the same device: the backward of the sigmoid needs what the layer changes."""
    found = []
    for inplace in (True, False):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), nn.Sigmoid(), nn.ReLU(inplace), nn.Linear(6, 6)]
        model = stepping(nn.Sequential(*layers).double(), devices(4), checkpoint="never")
        model.step(*data())
        found.append(gradients(model))
    assert_equal(*found)


def test_a_group_norm_is_differentiated_as_a_whole(devices: Devices) -> None:
    """PyTorch's backward of a group norm without the gradient of its input kills the process if memory is in the order
    of channels, and the second half of a split backward asks for the gradients of weights only."""
    layers = [nn.Conv2d(3, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.Tanh()), nn.Conv2d(4, 4, 1)]
    module = nn.Sequential(*layers, nn.Identity()).double().to(memory_format=torch.channels_last)
    plain = copy.deepcopy(module)
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    stepping(module, devices(4), schedule="ZeroBubble", loss_fn=lambda output, _: output.square().mean()).step(x)
    plain_step(plain, list(x.chunk(4)), lambda _, output: output.square().mean() * (1 / 4))
    assert_equal(gradients(module), gradients(plain))


def test_a_weight_that_two_nodes_use_is_differentiated_in_the_first_half(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for the second half; once, a cell with such a weight was not split at all."""
    halves: list[SplitBackward] = []
    rest = SplitBackward.differentiate_weights
    monkeypatch.setattr(SplitBackward, "differentiate_weights", lambda self: (halves.append(self), rest(self)))
    twice = [Using(lambda f, x: f(f(x).tanh()).tanh(), width=6) for _ in range(4)]
    module = nn.Sequential(*[nn.Sequential(layer, nn.Linear(6, 6)) for layer in twice]).double()
    plain, (x, _) = copy.deepcopy(module), data()
    options = {"schedule": "ZeroBubble", "checkpoint": "never", "loss_fn": lambda output, _: output.square().mean()}
    stepping(module, devices(4), **options).step(x)
    plain_step(plain, list(x.chunk(4)), lambda _, output: output.square().mean() * (1 / 4))
    assert_equal(gradients(module), gradients(plain))
    assert halves


def test_a_split_backward_without_a_gradient_of_the_input_is_left_to_its_second_half() -> None:
    """Where a cell is recomputed, it was split; in the last micro-batch, all was done by the first half, too early.

    The recomputed cell takes each of its inputs for one that needs a gradient. So a sum was in another order.
    """
    x, _ = data(rows=3)
    module = nn.Sequential(
        Using(lambda f, x: (f(x), f(x).detach()), width=6), Using(lambda f, pair: f(pair[1]).tanh(), width=6)
    ).double()
    plain = copy.deepcopy(module)
    options = {"chunks": 3, "schedule": "V-Half", "checkpoint": "except_last"}
    stepping(module, ["cpu", "cpu"], loss_fn=lambda output, _: output.square().sum(), reduce="mean", **options).step(x)
    plain_step(plain, list(x.chunk(3)), lambda _, output: output.square().sum() * (1 / 3))
    assert_equal(gradients(module), gradients(plain))


def test_a_captured_tensor_in_a_partition_without_parameters(devices: Devices) -> None:
    """The partition was taken for one with nothing to differentiate."""
    x, _ = data()
    prompt = torch.ones(6, dtype=torch.float64, requires_grad=True)
    module = nn.Sequential(Apply(lambda x: x * prompt), nn.Tanh())
    stepping(module, devices(2), loss_fn=lambda y, _: y.square().mean()).step(x)
    mine, prompt.grad = prompt.grad, None
    plain_step(module, list(x.chunk(4)), lambda _, y: y.square().mean() * (1 / 4))
    assert mine is not None and torch.equal(mine, prompt.grad)


def test_a_captured_parameter_with_a_hook_is_refused(devices: Devices) -> None:
    """Its hook heard each micro-batch, if the loss function was what captured it."""
    x, y = data()
    module = mlp()
    weight = module[0][0].weight
    model = stepping(module, devices(4), loss_fn=lambda output, target: F.mse_loss(output, target) + weight.norm())
    model.step(x, y)
    single = weight.grad.clone()
    model.step(x, y)
    assert torch.equal(weight.grad, 2 * single)
    weight.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match="a hook of it would hear parts"):
        model.step(x, y)
    assert torch.equal(weight.grad, 2 * single) and weight is module[0][0].weight


def test_a_parameter_that_a_layer_replaces_stays(devices: Devices) -> None:
    class Replacing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if not hasattr(self, "replaced"):
                self.replaced = self.bias = nn.Parameter(torch.zeros(6, dtype=torch.float64))
            return output

    layer = Replacing(6, 6).double()
    stepping(nn.Sequential(layer, nn.Tanh()), devices(2), checkpoint="never").step(*data())
    assert layer.bias is layer.replaced


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_ctrl_c_at_the_end_of_a_step_leaves_all_gradients_or_none(after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of some parameters were added, and those of others lost."""
    model: Any = stepping(mlp(), ["cpu"] * 4)
    model.step(*data())
    before = gradients(model)

    def interrupted(*args: Any) -> None:
        if after:
            add_each(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr("torchgpipe.gradients.set_aside.add_each", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.step(*data())
    after_it = gradients(model)
    for name, grad in before.items():
        assert grad is not None and torch.equal(after_it[name], grad * 2 if after else grad)


def test_a_partition_without_inputs_is_recomputed() -> None:
    """It was taken for one with nothing to differentiate, and its gradients were lost."""
    drawn = Using(lambda linear, _: linear(torch.ones(2, 4)), 4)
    layers = nn.Sequential(Apply(lambda x: ()), drawn, nn.Linear(4, 4))
    model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=2, checkpoint="always", loss_fn=F.mse_loss)
    model.step(torch.ones(4, 4), torch.zeros(4, 4))
    expected = copy.deepcopy(layers)
    expected.zero_grad()
    F.mse_loss(expected(None), torch.zeros(2, 4)).backward()
    for mine, plain in zip(layers.parameters(), expected.parameters()):
        torch.testing.assert_close(mine.grad, plain.grad)
