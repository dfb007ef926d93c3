"""A `GPipe` is a module: its layers, attributes, modes, hooks and copies, how it is moved and cast, and its devices."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import replicate

from tests.conftest import Devices, Pipe, with_accelerators
from tests.gpipe.helpers import make_input, make_model
from tests.layers import Apply
from tests.plain import assert_same, outcome
from torchgpipe import GPipe
from torchgpipe.pipe import Pipe as RemovedPipe

pytestmark = pytest.mark.usefixtures("rounded")

# Layers and attributes


def test_attributes_and_layers(pipe: Pipe, devices: Devices) -> None:
    module = make_model(3)
    model = pipe(module, [1, 2], chunks=4, checkpoint="always")
    assert (model.balance, model.chunks, model.checkpoint) == ([1, 2], 4, "always")
    assert model.devices == [torch.device(device) for device in devices(2)]
    assert isinstance(model.partitions, list)
    assert [list(partition) for partition in model.partitions] == [[module[0]], [module[1], module[2]]]
    assert all(isinstance(partition, nn.Sequential) for partition in model.partitions)
    # The CPU is one place whatever its index.
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cpu")}
    assert model(make_input()).device == torch.device("cpu")
    lines = repr(model).splitlines()
    shown = f"balance=[1, 2], devices={devices(2)}, chunks=4, checkpoint='always'"
    assert lines[:2] == ["GPipe(", f"  {shown}"] and lines[2].startswith("  (0): Linear(")
    assert len(model) == 3
    assert list(model) == list(module)
    assert [model[0], model[1], model[2], model[-1], model[-2], model[-3]] == [*module, *reversed(module)]
    for index in [3, -4]:
        with pytest.raises(IndexError):
            model[index]


def test_attributes_can_be_set_between_two_calls(pipe: Pipe) -> None:
    """Assigned values were once ignored or not checked: PyTorch raised the error at the call, or none was raised."""
    seen: list[int] = []
    counts = Apply(lambda x: seen.append(len(x)) or x)
    model = pipe(nn.Sequential(*make_model(1), counts), [1, 1], chunks=2, checkpoint="always")
    model.chunks, model.checkpoint = numpy.int64(3), "never"
    model(make_input())
    assert seen == [2, 2, 2]
    assert (model.chunks, type(model.chunks), model.checkpoint) == (3, int, "never")
    refused: list[tuple[str, Any, type[Exception], str]] = [
        ("chunks", 0, ValueError, "number of chunks must be positive integer, but got 0"),
        ("chunks", 4.5, TypeError, r"but got 4\.5"),
        ("checkpoint", "nevr", ValueError, "checkpoint is not one of .*, but 'nevr'"),
        *[
            (name, [2, 0], AttributeError, rf"{name} of a GPipe cannot be set, .*: GPipe\(model\.unwrap\(\), \.\.\.\)")
            for name in ("balance", "devices")
        ],
    ]
    for name, value, error, message in refused:
        before = getattr(model, name)
        with pytest.raises(error, match=message):
            setattr(model, name, value)
        if isinstance(before, list):
            getattr(model, name).append("changes a list of the caller's own")
        assert getattr(model, name) == before


def test_deferred_batch_norms_follow_chunks(pipe: Pipe) -> None:
    module, x = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).double(), make_input()
    model = pipe(copy.deepcopy(module), [1, 1], chunks=2, deferred_batch_norm=True)
    model.chunks = 3
    assert model[0].chunks == 3
    model(x)
    module(x)
    torch.testing.assert_close(model[0].running_var, module[0].running_var)


def test_lazy_layers_get_their_shape_in_the_pipeline_or_are_refused(pipe: Pipe, checkpoint: str) -> None:
    """A parameter without a shape allows hardly any operation, and a checkpoint would need the shape."""
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 2)).double()
    refused = "parameters without a shape cannot be checkpointed"
    if checkpoint != "never":
        with pytest.raises(ValueError, match=refused):
            pipe(module, [1, 2], checkpoint=checkpoint)
        return
    model = pipe(module, [1, 2], chunks=2, checkpoint=checkpoint)
    with pytest.raises(ValueError, match=refused):
        model.checkpoint = "always"
    model(make_input()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def three() -> nn.Sequential:
    return nn.Sequential(OrderedDict(a=nn.Identity(), b=nn.Identity(), c=nn.Sequential(nn.Identity())))


def test_a_replaced_layer_is_the_one_that_runs(pipe: Pipe) -> None:
    model = pipe(three(), [1, 2], chunks=2)
    x = make_input()
    assert torch.equal(model(x), x)
    model.b = Apply(lambda x: x * 3)
    model.a = Apply(lambda x: x + 1)
    model[2][0] = Apply(lambda x: x * 2)
    assert torch.equal(model(x), (x + 1) * 3 * 2)
    assert model.partitions[1][0] is model.b is model[1]
    # By its index, it comes to its device. That once was an error of Python that names no way.
    model[-2] = nn.Linear(2, 3, device="meta", dtype=torch.float64)
    model(x).sum().backward()
    assert model.b.bias.grad is not None and model.partitions[1][0] is model.b is model[1]
    assert model.balance == [1, 2]
    assert [*model.state_dict()] == ["b.weight", "b.bias"]


def test_layers_that_come_or_go_are_an_error_at_the_call(pipe: Pipe) -> None:
    """An added layer was once listed and saved but never ran; a deleted one raised a KeyError of its name alone."""
    model = pipe(make_model(3), [1, 2])
    model.add_module("head", nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"\['head'\] was added; .*unwrap\(\)"):
        model(make_input())
    del model.head, model._modules["1"]
    with pytest.raises(RuntimeError, match=r"\['1'\] was deleted; put nn.Identity\(\)"):
        model(make_input())


# What it may be made of


@pytest.mark.parametrize("balance", [(1, 2), iter([1, 2]), torch.tensor([1, 2]), numpy.array([1, 2]), range(1, 3)])
def test_balance_may_be_any_iterable_of_integers_and_the_model_a_subclass(balance: Any) -> None:
    x, module = make_input(), type("Model", (nn.Sequential,), {})(*make_model(3))
    model = GPipe(module, balance=balance, devices=(f"cpu:{j}" for j in range(2)))
    assert model.balance == [1, 2]
    assert [type(number) for number in model.balance] == [int, int]
    assert model.devices == [torch.device("cpu:0"), torch.device("cpu:1")]
    assert torch.equal(model(x), module(x))


def test_an_empty_sequential_returns_its_input() -> None:
    model = GPipe(nn.Sequential(), [])
    x, y = make_input(), make_input(3)
    assert model(x) is x
    assert model((x, [y, None])) == (x, [y, None])
    assert len(model) == 0
    assert list(model) == model.balance == model.devices == list(model.partitions) == []


def test_the_wrapped_sequential_is_not_changed(pipe: Pipe) -> None:
    """A frozen batch norm, in eval mode inside a training model, was once put into training mode by wrapping."""
    module = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.BatchNorm1d(2), c=nn.Dropout()))
    layers, state, parameters = list(module.named_children()), set(vars(module)), dict(module.named_parameters())
    for training, modes in [(True, [True, False, True]), (False, [False, False, True])]:
        module.train(training)
        for layer, mode in zip(module, modes):
            layer.train(mode)
        assert pipe(module, [1, 2], chunks=2).training == training
        assert [layer.training for layer in module] == modes
    assert list(module.named_children()) == layers
    assert set(vars(module)) == state
    assert all(parameters[name] is parameter for name, parameter in module.named_parameters())
    module(torch.randn(4, 2)).sum().backward()


# Devices


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the default is the accelerators")
def test_without_an_accelerator_every_partition_is_on_the_cpu() -> None:
    assert GPipe(make_model(3), [1, 1, 1]).devices == [torch.device("cpu")] * 3
    # Devices beyond the partitions are left alone.
    assert GPipe(make_model(2), [2], devices=["cpu:0", "cpu:1", "cuda:7"]).devices == [torch.device("cpu:0")]


@pytest.mark.parametrize(("accelerators", "shared"), [(1, [0, 0, 0, 0, 0]), (2, [0, 0, 0, 1, 1]), (4, [0, 0, 1, 2, 3])])
def test_too_few_accelerators_and_the_list_that_shares_them(
    monkeypatch: pytest.MonkeyPatch, accelerators: int, shared: list[int]
) -> None:
    with_accelerators(monkeypatch, accelerators)
    with pytest.raises(IndexError, match="too few devices to hold given partitions") as caught:
        GPipe(make_model(5), [1] * 5)
    found = re.search(r"devices=(\[.*?\])", str(caught.value))
    assert found is not None
    devices = ast.literal_eval(found[1])
    assert devices == [f"cpu:{index}" for index in shared]
    assert GPipe(make_model(5), [1] * 5, devices=devices)(make_input()).shape == (6, 2)


# Modes and hooks


def test_hooks_act_once_per_call_on_the_model_and_for_each_micro_batch_inside(pipe: Pipe) -> None:
    model = pipe(make_model(3), [1, 2], chunks=3, checkpoint="never")
    calls: list[Any] = []

    def note(name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, args: calls.append((name, "before", len(args[0]))))
        module.register_forward_hook(lambda _, args, output: calls.append((name, "after", len(output))))
        module.register_full_backward_hook(lambda _, inputs, grads: calls.append((name, "backward", len(grads[0]))))

    for name, module in [("model", model), ("layer", model[0]), *zip("01", model.partitions)]:
        note(name, module)
    model(make_input(5)).sum().backward()
    of = {name: [call[1:] for call in calls if call[0] == name] for name in ("model", "layer", "0", "1")}
    assert of["model"] == [("before", 5), ("after", 5), ("backward", 5)]
    forward = [(when, rows) for rows in (2, 2, 1) for when in ("before", "after")]
    backward = [("backward", rows) for rows in (1, 2, 2)]
    assert of["layer"] == of["0"] == of["1"] == forward + backward


def test_hooks_on_partitions_can_change_what_goes_in_and_out(pipe: Pipe, checkpoint: str) -> None:
    model = pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2, checkpoint=checkpoint)
    model.partitions[0].register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    model.partitions[1].register_forward_hook(lambda _module, _args, output: output * 3)
    x = make_input()
    output = model(x)
    assert torch.equal(output, (x + 1) * 3)
    output.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


# Copies


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("after", ["nothing", "forward", "backward"])
def test_a_copy_is_a_model_of_its_own(pipe: Pipe, copied: Callable[[GPipe], GPipe], after: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.Tanh(), nn.BatchNorm1d(2, dtype=torch.float64))
    model = pipe(module, [1, 2], chunks=2, checkpoint="always")
    x = make_input()
    if after != "nothing":
        output = model(x)
    if after == "backward":
        output.sum().backward()
    twin = copied(model)
    assert (twin.devices, twin.balance, twin.chunks, twin.checkpoint) == (model.devices, model.balance, 2, "always")
    assert [list(partition) for partition in twin.partitions] == [[twin[0]], [twin[1], twin[2]]]
    model.zero_grad()
    assert_same(outcome(twin, x), outcome(model, x))
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.any()
    setattr(twin, "1", nn.Identity())
    assert isinstance(model.partitions[1][0], nn.Tanh)
    assert isinstance(twin.partitions[1][0], nn.Identity)


# Moving is refused, and casting works

DENIED = "denied to move parameters and buffers"


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.cpu(),
        lambda model: model.cuda(device=0),
        lambda model: model.to(0),
        lambda model: model.to("cpu", torch.float64),
        lambda model: model.to(device="cpu", dtype=torch.float64),
        lambda model: model.to(torch.zeros(1)),
        lambda model: model.to(tensor=torch.zeros(1)),
        lambda model: model.to_empty(device="meta"),
        lambda model: nn.Sequential(model).to("meta"),
        lambda model: nn.Sequential(model).to_empty(device="meta"),
    ],
)
def test_moving_is_denied(move: Callable[[GPipe], Any]) -> None:
    """The original raised one shared instance, whose traceback grew with every use."""
    model = GPipe(make_model(2), [1, 1], devices=["cpu"] * 2)
    errors = []
    for _ in range(2):
        with pytest.raises(TypeError, match=DENIED) as caught:
            move(model)
        errors.append(caught.value)
    assert "devices" in str(errors[0]) and errors[0] is not errors[1]
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}
    assert all("TypeError" in (vars(GPipe)[name].__doc__ or "") for name in ("cuda", "cpu", "xpu", "to"))


def test_data_parallel_around_it_is_refused() -> None:
    """DataParallel once ran copies of the pipeline in threads. Without parameters, it can be tested without a GPU."""
    for model in [GPipe(nn.Sequential(nn.Tanh()), [1], devices=["cpu"]), RemovedPipe(nn.Sequential(nn.Tanh()))]:
        with pytest.raises(RuntimeError, match=rf"around a {type(model).__name__}: .*DistributedDataParallel"):
            replicate(nn.Sequential(model), [0, 1])


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda model: model.to(torch.float32), torch.float32),
        (lambda model: model.to(device=None, dtype=torch.float32), torch.float32),
        (lambda model: model.to(torch.bfloat16, non_blocking=True), torch.bfloat16),
        (lambda model: model.half(), torch.float16),
        (lambda model: model.double(), torch.float64),
        (lambda model: model.type(torch.float32), torch.float32),
        (lambda model: nn.Sequential(model).to(torch.float32)[0], torch.float32),
    ],
)
def test_casting_works(pipe: Pipe, cast: Callable[[GPipe], GPipe], dtype: torch.dtype) -> None:
    model = pipe(make_model(2), [1, 1], chunks=2)
    assert cast(model) is model
    output: Tensor = model(make_input().detach().to(dtype))
    output.sum().backward()
    assert {output.dtype, *[tensor.dtype for p in model.parameters() for tensor in (p, p.grad)]} == {dtype}
    assert model.share_memory() is model  # which moves nothing
    assert model.to(memory_format=torch.preserve_format) is model
