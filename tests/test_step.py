"""A step gives the gradients of the plain model run micro-batch by micro-batch, to the last bit, in all schedules."""

from __future__ import annotations

import copy
import threading
from collections import Counter
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
from tests.layers import Apply
from tests.skip.layers import pair
from torchgpipe import GPipe, NoChunk, is_recomputing
from torchgpipe.replay import seeds
from torchgpipe.schedule import program

SCHEDULES = ["GPipe", "1F1B", "ZeroBubble"]


def plain_step(module: nn.Module, inputs: list[Any], losses: Callable[[int, Any], Tensor], schedule: str) -> Tensor:
    """Run micro-batches forward, and then backward one by one, in the order of the schedule; return the loss."""
    shares = [losses(i, module(value)) for i, value in enumerate(inputs)]
    order = reversed(range(len(shares))) if schedule == "GPipe" else range(len(shares))
    for i in order:
        if shares[i].requires_grad:
            shares[i].backward()
    total = torch.zeros((), dtype=torch.float64)
    for share in shares:  # One after the other: a sum of five numbers at once may round in another way.
        total += share.detach().squeeze()
    return total


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: None if grad is None else grad.cpu() for name, grad in grads.items()}


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        other = actual[name]
        same = other is value is None or (other is not None and value is not None and torch.equal(other, value))
        assert same, f"{name} differs"


# ------------------------------------------------------------------------------------------------ particular models


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


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_dropout_is_the_same_however_the_model_is_cut(schedule: str, checkpoint: str) -> None:
    """The reference is a step on one device without checkpointing."""
    x, y = data()

    def run(devices: list[str], balance: list[int], schedule: str, checkpoint: str) -> list[Tensor]:
        model = stepping(mlp(dropout=0.3), devices, balance=balance, schedule=schedule, checkpoint=checkpoint)
        torch.manual_seed(2)
        losses = [model.step(x, y) for _ in range(3)]
        return [*losses, torch.rand(1)]

    expected = run(["cpu"], [4], "1F1B", "never")
    assert len({float(loss) for loss in expected}) == 4
    looped = ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]
    cuts = [(["cpu:0", "cpu:1"], [1, 3]), (["cpu:0", "cpu:1"], [2, 2]), (["cpu"] * 4, [1] * 4)]
    for devices, balance in [(looped, [1] * 4)] if schedule == "Interleaved1F1B" else cuts:
        assert run(devices, balance, schedule, checkpoint) == expected


@pytest.mark.late
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "Interleaved1F1B"])
def test_on_accelerators_every_wait_is_there(schedule: str, checkpoint: str) -> None:
    """Skips go straight from device to device, forward and backward."""
    x, y = data()
    stash, pop = pair()
    torch.manual_seed(0)
    lines = [nn.Linear(6, 6).double() for _ in range(3)]
    module = nn.Sequential(nn.Sequential(lines[0], stash), lines[1], nn.Tanh(), nn.Sequential(pop, lines[2]))
    plain = copy.deepcopy(module)
    names = [f"late:{k % (2 if schedule == 'Interleaved1F1B' else 4)}" for k in range(4)]
    model = stepping(module, names, schedule=schedule, checkpoint=checkpoint)
    result = float(model.step(x, y))
    expected = plain_step(
        plain,
        list(x.chunk(4)),
        lambda i, output: F.mse_loss(output, y.chunk(4)[i]) * (1 / 4),
        "GPipe" if schedule == "GPipe" else "1F1B",
    )
    assert result == float(expected)
    assert_equal(grads_of(model), grads_of(plain))


def test_a_smaller_last_mini_batch_and_weights(devices: Devices) -> None:
    """The mean over tokens: padded targets weigh nothing, in a micro-batch of nothing else as well."""
    x, _ = data(rows=7)
    y = torch.tensor([0, 1, -100, -100, 2, -100, 3])
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)).double()
    plain = copy.deepcopy(module)
    model = stepping(
        module, devices(2), loss_fn=F.cross_entropy, weight=lambda target: (target != -100).sum(), chunks=4
    )
    loss = model.step(x, y)
    expected = F.cross_entropy(plain(x), y)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.on_late
def test_gradients_of_earlier_steps_are_added_to_in_place(devices: Devices) -> None:
    x, y = data()
    model = stepping(mlp(), devices(4))
    model.step(x, y)
    before = [parameter.grad for parameter in model.parameters()]
    once = [None if grad is None else grad.clone() for grad in before]
    model.step(x, y)
    for parameter, grad, single in zip(model.parameters(), before, once, strict=True):
        assert parameter.grad is grad
        assert single is not None and torch.equal(parameter.grad, single + single)


@pytest.mark.on_late
def test_hooks_of_parameters_are_called_once_with_the_whole_gradient(devices: Devices) -> None:
    x, y = data()
    model, other = stepping(mlp(), devices(4)), stepping(mlp(), devices(4))
    heard: list[Tensor] = []
    accumulated: list[Tensor] = []
    weight = model[1][0].weight
    weight.register_hook(lambda grad: heard.append(grad.clone()) or grad * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: accumulated.append(parameter.grad.clone()))
    model.step(x, y)
    other.step(x, y)
    (whole,) = heard
    assert torch.equal(whole, other[1][0].weight.grad)
    assert torch.equal(weight.grad, whole * 2)
    assert [torch.equal(grad, weight.grad) for grad in accumulated] == [True]


def test_shared_parameters_are_summed_partition_by_partition() -> None:
    """One device, two partitions, one weight: the sum of each partition comes first."""
    x, y = data()
    first, last = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    last.weight = first.weight
    model = stepping(nn.Sequential(first, last), ["cpu", "cpu"])
    model.step(x, y)
    parts: list[Tensor] = []
    for own in (0, 1):
        a, b = copy.deepcopy(first), copy.deepcopy(last)
        shared = [a, b][own].weight
        [a, b][own].weight.grad = None
        plain = nn.Sequential(a, b)
        for k, chunk in enumerate(x.chunk(4)):
            (F.mse_loss(plain(chunk), y.chunk(4)[k]) * (1 / 4)).backward()
        assert shared.grad is not None
        parts.append(shared.grad)
    assert torch.equal(first.weight.grad, parts[0] + parts[1])


@pytest.mark.on_late
def test_frozen_layers_get_nothing_and_no_backward_before_the_first_trained_one(devices: Devices) -> None:
    x, y = data()
    ran: list[int] = []

    class Watch(nn.Module):
        def __init__(self, k: int) -> None:
            super().__init__()
            self.k = k

        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda _: ran.append(self.k))
            return x

    layers = [nn.Sequential(nn.Linear(6, 6).double(), Watch(k)) for k in range(4)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    model = stepping(nn.Sequential(*layers), devices(4), checkpoint="never")
    model.step(x, y)
    assert set(ran) == {2, 3}
    assert [layer[0].weight.grad is None for layer in layers] == [True, True, False, False]


@pytest.mark.on_late
def test_without_grad_there_is_a_loss_only(devices: Devices) -> None:
    x, y = data()
    model = stepping(mlp(), devices(4))
    with torch.no_grad():
        loss = model.step(x, y)
    assert float(loss) == float(model.step(x, y))
    assert loss.dim() == 0


# ------------------------------------------------------------------------------------------------ faults


class Fault(Exception):
    pass


class Failing(nn.Module):
    """Fails forward, or backward, at one micro-batch."""

    def __init__(self, i: int, phase: str) -> None:
        super().__init__()
        self.i, self.phase, self.runs = i, phase, 0

    def forward(self, x: Tensor) -> Tensor:
        i, self.runs = self.runs, self.runs + 1
        if self.phase == "forward" and i == self.i:
            raise Fault
        if self.phase == "backward" and x.requires_grad:
            x = x * 1
            x.register_hook(lambda _: self._fail() if i == self.i else None)
        return x

    def _fail(self) -> None:
        raise Fault


@pytest.mark.on_late
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("j", [0, 1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("present", [True, False], ids=["gradients present", "no gradients"])
def test_a_failing_step_leaves_gradients_as_they_were(
    devices: Devices, schedule: str, j: int, phase: str, present: bool
) -> None:
    x, y = data()
    layers = list(mlp())
    failing = Failing(2, phase)
    layers[j] = nn.Sequential(layers[j], failing)
    model = stepping(nn.Sequential(*layers), devices(4), schedule=schedule, checkpoint="never")
    before: list[Tensor | None] = [None for _ in model.parameters()]
    if present:
        failing.i = -1
        model.step(x, y)
        failing.i, failing.runs = 2, 0
        before = [parameter.grad for parameter in model.parameters()]
    kept = [grad if grad is None else grad.clone() for grad in before]
    threads = threading.active_count()
    with pytest.raises(Fault) as info:
        model.step(x, y)
    assert f"micro-batch 2 of 4, partition {j}" in info.value.__notes__[0]
    assert f"during {phase}" in info.value.__notes__[0]  # or half of it, such as "during backward of the weights"
    assert threading.active_count() == threads
    for parameter, grad, copied in zip(model.parameters(), before, kept, strict=True):
        assert parameter.grad is grad
        assert grad is None or (copied is not None and torch.equal(grad, copied))
    failing.i, failing.runs = -1, 0
    model.step(x, y)


def test_what_is_missing_or_does_not_fit_is_refused(devices: Devices) -> None:
    x, y = data()
    with pytest.raises(ValueError, match="a step needs a loss"):
        GPipe(mlp(), [4], devices=["cpu"]).step(x, y)
    with pytest.raises(ValueError, match="a step needs layers"):
        GPipe(nn.Sequential(), [], devices=[], loss_fn=F.mse_loss).step(x, y)
    with pytest.raises(ValueError, match="schedule must be one of"):
        GPipe(mlp(), [4], devices=["cpu"], schedule=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input and target must have the same size in dimension 0"):
        stepping(mlp(), devices(4)).step(x, y[:5])
    with pytest.raises(ValueError, match=r"schedule must be one of GPipe, 1F1B, .*, but got 'F1B1'"):
        stepping(mlp(), devices(4), schedule="F1B1")
    with pytest.raises(ValueError, match="this program cannot run"):
        stepping(mlp(), devices(4), schedule=program("1F1B", 2, [0])).step(x, y)


# ------------------------------------------------------------------------------------------------ the caller's settings


def test_backward_is_outside_of_autocast(devices: Devices) -> None:
    """As ``loss.backward()`` is; the gradients are those of a plain model whose forward alone is inside."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    plain = copy.deepcopy(module)
    x, y = (value.float() for value in data())
    model = stepping(module, devices(4), schedule="1F1B")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.step(x, y)
    for k, part in enumerate(x.chunk(4)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(plain(part), y.chunk(4)[k]) * (1 / 4)
        loss.backward()
    assert_equal(grads_of(model), grads_of(plain))

    inside: list[bool] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            x.register_hook(lambda _: inside.append(torch.is_autocast_enabled("cpu")))
            return x

    looking = stepping(nn.Sequential(nn.Linear(6, 6), Look()), devices(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        looking.step(x, y)
    assert inside == [False] * 4


class Casts(TorchDispatchMode):
    """Counts the casts of each weight, by its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            self.counts[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZeroBubble"])
def test_a_step_casts_each_weight_once(devices: Devices, checkpoint: str, schedule: Any) -> None:
    """Each run of a cell cast all of its weights, and while a cell was launched, all other devices waited."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    plain = copy.deepcopy(module)
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


def test_a_layer_under_autocast_holds_nobody_up() -> None:
    """Cells were launched one at a time. So a layer that waited for its device let all devices wait."""
    meeting = threading.Barrier(2, timeout=60)
    launched: list[list[None]] = [[], []]

    def meet(j: int, x: Tensor) -> Tensor:
        launched[j].append(None)
        if len(launched[j]) == 2 - j:  # The first layer is one micro-batch ahead.
            meeting.wait()
        return x * 2

    layers = [Apply(partial(meet, j)) for j in range(2)]
    model = stepping(nn.Sequential(*layers), ["cpu:0", "cpu:1"], checkpoint="never")
    x, y = data()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.step(x.requires_grad_(), y)


def test_a_loss_that_draws(devices: Devices) -> None:
    """The numbers of the loss function depend on the step and the micro-batch only, as those of layers do."""
    x, y = data()

    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target + torch.rand_like(target))

    def run(names: list[str], schedule: str) -> Tensor:
        model = stepping(mlp(), names, balance=[4] if len(names) == 1 else [1] * 4, loss_fn=noisy, schedule=schedule)
        torch.manual_seed(3)
        return model.step(x, y)

    assert run(devices(4), "GPipe") == run(["cpu"], "1F1B")


def test_a_loss_that_is_a_module_is_no_layer(devices: Devices) -> None:
    x, y = data()
    model = stepping(mlp(), devices(4), loss_fn=nn.MSELoss())
    assert model.step(x, y) == stepping(mlp(), devices(4)).step(x, y)
    assert len(model) == 4
    assert [*model.state_dict()] == [*mlp().state_dict()]


def test_a_layer_that_begins_to_draw_is_noticed(devices: Devices) -> None:
    """Its numbers were not seeded, so a recomputation may have drawn others; the next step finds it."""
    x, y = data()
    module = mlp()
    model = stepping(module, devices(4), checkpoint="always", schedule="GPipe")
    model.step(x, y)
    model.zero_grad()
    for layer in module:
        layer[1].p = 0.5
    with pytest.raises(RuntimeError, match="drew none when it first ran"):
        model.step(x, y)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.step(x, y)


def test_a_layer_that_begins_to_draw_on_its_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the CPU's generator was looked at. 'cpu:1' stands for an accelerator, which has a generator of its own."""
    own, cpu = torch.Generator(), torch.default_generator
    monkeypatch.setattr(seeds, "generators_of", lambda device: [cpu, own] if device.index else [cpu])

    class Noise(nn.Module):
        draws = False

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand(x.shape, generator=own) if self.draws else x * 1

    module, noise = mlp(), Noise()
    module.append(noise)
    x, y = data()
    model = stepping(module, ["cpu:0", "cpu:1"], balance=[2, 3], checkpoint="always")
    model.step(x, y)
    noise.draws = True
    with pytest.raises(RuntimeError, match="from the generator of cpu during this step"):
        model.step(x, y)
    model.step(x, y)


@pytest.mark.parametrize("drawn", [False, True])
def test_a_step_in_another_thread_draws_no_numbers_of_this_one(drawn: bool) -> None:
    """Each step draws its seed from the generator of the CPU; the other step took that for a draw of its layers."""
    x, y = data()
    other = stepping(mlp(), ["cpu:0", "cpu:1"], balance=[2, 2], checkpoint="always")

    class Meeting(nn.Module):
        meets = False

        def forward(self, input: Tensor) -> Tensor:
            if self.meets:
                self.meets = False
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(other.step, x, y).result()
                    if drawn:
                        pool.submit(torch.rand, 1).result()
            return input * 1

    module, meeting = mlp(), Meeting()
    module.append(meeting)
    model = stepping(module, ["cpu:0", "cpu:1"], balance=[2, 3], checkpoint="always")
    model.step(x, y)
    meeting.meets = True
    with pytest.raises(RuntimeError, match="from the generator of cpu") if drawn else nullcontext():
        model.step(x, y)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_an_empty_mini_batch_does_not_tell_whether_layers_draw(devices: Devices, checkpoint: str) -> None:
    """Dropout draws nothing for it, and was taken for a layer that never draws: it lost its seeds for good."""
    x, y = data()

    def run(first: int) -> Tensor:
        model = stepping(mlp(dropout=0.3), devices(4), checkpoint=checkpoint)
        model.step(x[:first], y[:first])
        torch.manual_seed(2)
        return model.step(x, y)

    assert run(0) == run(8)


@pytest.mark.on_late
def test_each_layer_and_micro_batch_draws_other_numbers(devices: Devices) -> None:
    drawn: list[Tensor] = []

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            drawn.append(torch.rand(3))
            return x * drawn[-1][0]

    x, y = data()
    layers = [nn.Sequential(nn.Linear(6, 6).double(), Noise()) for _ in range(4)]
    model = stepping(nn.Sequential(*layers), devices(4), checkpoint="never")
    model.step(x, y)
    model.step(x, y)
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(drawn) == 32


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cell_whose_backward_comes_next_is_not_recomputed(schedule: str) -> None:
    again: list[int] = []

    class Look(nn.Module):
        def __init__(self, j: int) -> None:
            super().__init__()
            self.j = j

        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                again.append(self.j)
            return x

    x, y = data()
    layers = [nn.Sequential(nn.Linear(6, 6).double(), Look(j)) for j in range(2)]
    stepping(nn.Sequential(*layers), ["cpu:0", "cpu:1"], schedule=schedule, checkpoint="always").step(x, y)
    # The last micro-batch turns round, with 'GPipe' on both devices; else each one does so on the last device.
    expected = [3, 3] if schedule == "GPipe" else [4, 0]
    assert [again.count(0), again.count(1)] == expected


@pytest.mark.on_late
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_weight_that_is_used_twice_in_a_cell(devices: Devices, checkpoint: str) -> None:
    """A split backward that entered at both uses would count one of them twice."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.weight).tanh(), self.weight)

    x, y = data()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6).double(), Twice(), Twice(), nn.Linear(6, 6).double())
    plain = copy.deepcopy(module)
    stepping(module, devices(4), schedule="ZeroBubble", checkpoint=checkpoint).step(x, y)
    plain_step(plain, list(x.chunk(4)), lambda i, output: F.mse_loss(output, y.chunk(4)[i]) * (1 / 4), "1F1B")
    assert_equal(grads_of(module), grads_of(plain))


def test_a_group_norm_is_differentiated_as_a_whole(devices: Devices) -> None:
    """PyTorch's backward of a group norm without the gradient of its input kills the process if memory is in the order
    of channels, and the second half of a split backward asks for the gradients of weights only."""
    norm = nn.GroupNorm(2, 4)
    layers = [nn.Conv2d(3, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.Tanh()), nn.Conv2d(4, 4, 1), nn.Identity()]
    module = nn.Sequential(*layers).double().to(memory_format=torch.channels_last)
    plain = copy.deepcopy(module)
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    stepping(module, devices(4), schedule="ZeroBubble", loss_fn=lambda output, _: output.square().mean()).step(x)
    plain_step(plain, list(x.chunk(4)), lambda _, output: output.square().mean() * (1 / 4), "1F1B")
    assert_equal(grads_of(module), grads_of(plain))


# ------------------------------------------------------------------------------------------------ bugs


class Doubling(nn.Module):
    """Doubles the gradient that arrives, by a hook on its input or on its output."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6).double()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "input" and x.requires_grad:
            x.register_hook(lambda grad: grad * 2)
        y: Tensor = self.line(x)
        if self.where == "output" and y.requires_grad:
            y.register_hook(lambda grad: grad * 2)
        return y


@pytest.mark.on_late
@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_that_layers_register_change_a_gradient_once(
    devices: Devices, schedule: str, checkpoint: str, where: str
) -> None:
    """Hooks on outputs were applied twice by a split backward; those on the input of a recomputed cell, never."""
    x, y = data()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6).double(), Doubling(where), Doubling(where), nn.Linear(6, 6).double())
    plain = copy.deepcopy(module)
    model = stepping(module, devices(4), schedule=schedule, checkpoint=checkpoint)
    model.step(x, y)
    plain_step(plain, list(x.chunk(4)), lambda i, output: F.mse_loss(output, y.chunk(4)[i]) * (1 / 4), schedule)
    assert_equal(grads_of(model), grads_of(plain))


@pytest.mark.on_late
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_complex_numbers_between_partitions(devices: Devices, checkpoint: str) -> None:
    """Checkpointed partitions said that they need no gradient."""

    class Turn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + 2j)

    class Real(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.real

    x, y = data()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6).double(), Turn(), Turn(), Real())
    plain = copy.deepcopy(module)
    model = stepping(module, devices(4), checkpoint=checkpoint, schedule="GPipe")
    model.step(x, y)
    plain_step(plain, list(x.chunk(4)), lambda i, output: F.mse_loss(output, y.chunk(4)[i]) * (1 / 4), "GPipe")
    assert_equal(grads_of(model), grads_of(plain))


def test_a_captured_tensor_in_a_partition_without_parameters(devices: Devices) -> None:
    """The partition was taken for one with nothing to differentiate."""
    x, y = data()
    prompt = torch.ones(6, dtype=torch.float64, requires_grad=True)

    class Prompted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * prompt

    module = nn.Sequential(Prompted(), nn.Tanh())
    stepping(module, devices(2)).step(x, y)
    mine, prompt.grad = prompt.grad, None
    plain_step(module, list(x.chunk(4)), lambda i, output: F.mse_loss(output, y.chunk(4)[i]) * (1 / 4), "1F1B")
    assert mine is not None and torch.equal(mine, prompt.grad)


@pytest.mark.on_late
def test_tensors_that_go_whole_to_every_micro_batch(devices: Devices) -> None:
    """A table in the input or the target was taken for the batch."""
    x, y = data(rows=7)

    class Add(nn.Module):
        def forward(self, pair: Any) -> Tensor:
            return pair[0] + pair[1].sum()

    table = NoChunk(torch.ones(100, 6, dtype=torch.float64))
    model = stepping(nn.Sequential(Add(), nn.Linear(6, 6).double()), devices(2), loss_fn=lambda o, t: (o - t[1]).sum())
    model.step((x, table), (NoChunk(torch.ones(1)), y))
    assert model[1].weight.grad is not None


@pytest.mark.on_late
def test_infinite_outputs_of_a_micro_batch_that_weighs_nothing(devices: Devices) -> None:
    x, y = data(rows=4)
    x[3] = float("inf")
    model = stepping(mlp(), devices(4), weight=lambda target: float(target.isfinite().all()))
    y[3] = float("nan")
    assert model.step(x, y).isfinite()


def test_complex_outputs_of_micro_batches_that_weigh_nothing(devices: Devices) -> None:
    """Their loss was complex."""
    layers = nn.Sequential(nn.Linear(6, 4, dtype=torch.complex128))
    model = stepping(layers, devices(1), loss_fn=lambda output, _: output.abs().mean(), weight=lambda _: 0.0)
    assert model.step(data()[0].to(torch.complex128), None).item() == 0.0


def test_another_pipeline_within_a_layer_or_the_loss(devices: Devices) -> None:
    """Its layers were looked for in the outer pipeline, and its workers waited for a lock that the outer one held."""
    x, y = data()
    inner = stepping(mlp(dropout=0.2), devices(4))
    within = nn.Sequential(nn.Linear(6, 6).double(), inner)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        inner.step(x, y)
        return F.mse_loss(output, target)

    stepping(within, devices(2), loss_fn=loss_fn).step(x, y)


@pytest.mark.on_late
def test_a_failing_hook_leaves_gradients_as_they_were(devices: Devices) -> None:
    """Gradients joined `.grad` before the hooks of others were called."""
    x, y = data()

    def fail(_: Tensor) -> None:
        raise Fault

    model = stepping(mlp(), devices(4))
    model[2][0].weight.register_hook(fail)
    with pytest.raises(Fault):
        model.step(x, y)
    assert all(parameter.grad is None for parameter in model.parameters())


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
    present = weight.grad.clone()
    weight.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match="a hook of it would hear parts"):
        model.step(x, y)
    assert torch.equal(weight.grad, present)
    assert weight is module[0][0].weight


def test_a_parameter_that_a_layer_replaces_stays(devices: Devices) -> None:
    x, y = data()

    class Replacing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if not hasattr(self, "replaced"):
                self.replaced = self.bias = nn.Parameter(torch.zeros(6, dtype=torch.float64))
            return output

    layer = Replacing(6, 6).double()
    stepping(nn.Sequential(layer, nn.Tanh()), devices(2), checkpoint="never").step(x, y)
    assert layer.bias is layer.replaced
