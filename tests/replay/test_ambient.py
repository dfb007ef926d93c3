"""What the caller sets around the call holds inside every layer, in the first run and in recomputation.

A layer may run in a worker, whose thread starts with nothing set, or again at backward, long after the
`with` block was left and perhaps inside another one. The layers here note the state of their thread,
`state()`, and it is compared with what the caller saw inside the block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import Pipe
from tests.layers import Apply, Using
from tests.plain import assert_same, outcome, plain_outcome, run_plain
from torchgpipe import GPipe, is_checkpointing, is_recomputing

AUTOCAST_TYPES = [
    kind
    for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia", "ipu")
    if torch.amp.is_autocast_available(kind)
]

setting: ContextVar[str] = ContextVar("setting", default="as it was")

# --------------------------------------------------------------------- what can be set, and how to look at it

_heard = threading.local()


def _hear(name: str) -> None:
    if hasattr(_heard, "names"):
        _heard.names.append(name)


class FunctionMode(TorchFunctionMode):
    """Reports each `torch.ones`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ones:
            _hear(self.name)
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    """Reports each `exp`."""

    entries = 0

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __enter__(self) -> Any:
        self.entries += 1
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.exp.default:
            _hear(self.name)
        return func(*args, **(kwargs or {}))


def hooks(name: str) -> AbstractContextManager[Any]:
    """Saved-tensor hooks that report what they are given to save."""

    def pack(tensor: Tensor) -> Tensor:
        _hear(name)
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


@contextmanager
def autocast(kind: str, dtype: torch.dtype, cache: bool, enabled: bool = True) -> Iterator[None]:
    """`torch.autocast`, also where the device is missing: there it turns itself off with a warning."""
    previous = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    set_autocast(kind, enabled, dtype, cache)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        set_autocast(kind, *previous)


def set_autocast(kind: str, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cache)


@contextmanager
def context_variable(value: str) -> Iterator[None]:
    token = setting.set(value)
    try:
        yield
    finally:
        setting.reset(token)


@contextmanager
def several(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def state() -> dict[str, Any]:
    """All that is set in this thread, but for grad mode."""
    _heard.names = heard = []
    try:
        with torch.enable_grad():
            one = torch.ones(1, requires_grad=True)  # heard by function modes
            one.exp()  # heard by dispatch modes, and saves its result
    finally:
        del _heard.names
    return {
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST_TYPES],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default device": one.device.type,
        "context variable": setting.get(),
        "modes and hooks": heard,
    }


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "autocast": lambda: autocast("cpu", torch.float16, True),
    "autocast without cache": lambda: autocast("cpu", torch.bfloat16, False),
    "autocast off, with a dtype": lambda: autocast("cpu", torch.float16, True, enabled=False),
    "autocast of two types": lambda: several(
        autocast("cpu", torch.float16, True), autocast(AUTOCAST_TYPES[-1], torch.bfloat16, True)
    ),
    "saved-tensor hooks": lambda: hooks("hooks"),
    "two pairs of saved-tensor hooks": lambda: several(hooks("outer hooks"), hooks("inner hooks")),
    "default device": lambda: torch.device("meta"),
    "context variable": lambda: context_variable("set by the caller"),
    "function mode": lambda: FunctionMode("function mode"),
    "two function modes": lambda: several(FunctionMode("outer"), FunctionMode("inner")),
    "dispatch mode": lambda: DispatchMode("dispatch mode"),
    "two dispatch modes": lambda: several(DispatchMode("outer"), DispatchMode("inner")),
    "everything": lambda: several(
        context_variable("set with everything"),
        FunctionMode("function mode of everything"),
        autocast("cpu", torch.float16, False),
        hooks("hooks of everything"),
        DispatchMode("dispatch mode of everything"),
        torch.device("meta"),
    ),
}

#: Where backward may be called.
OTHERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "inference_mode(False)": lambda: torch.inference_mode(False),
    **SETTINGS,
}

#: Each at forward with another at backward, and each at backward with everything at forward.
PAIRS = sorted({*zip(SETTINGS, OTHERS), *[("everything", other) for other in OTHERS]})


class Probe(nn.Module):
    """Notes the state of its thread in every run, and hands its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.first_runs: list[dict[str, Any]] = []
        self.recomputations: list[dict[str, Any]] = []
        self.grad_modes: list[tuple[str, bool]] = []

    def forward(self, input: Tensor) -> Tensor:
        phase = "recomputing" if is_recomputing() else "checkpointing" if is_checkpointing() else "plain"
        self.grad_modes.append((phase, torch.is_grad_enabled()))
        (self.recomputations if is_recomputing() else self.first_runs).append(state())
        return input * 1


def probed(pipe: Pipe, checkpoint: str, **options: Any) -> tuple[GPipe, list[Probe]]:
    """Return two partitions with a probe each, and the probes."""
    probes = [Probe(), Probe()]
    layers = nn.Sequential(nn.Linear(2, 2), probes[0], nn.Linear(2, 2), probes[1])
    return pipe(layers, [2, 2], chunks=2, checkpoint=checkpoint, **options), probes


# ------------------------------------------------------------------------------- in every layer, at every run


@pytest.mark.parametrize("name, other", PAIRS)
def test_it_holds_in_every_run_whatever_is_set_at_backward(pipe: Pipe, name: str, other: str) -> None:
    """One micro-batch runs again, and one does not."""
    model, probes = probed(pipe, "except_last")
    x = torch.rand(4, 2)
    with SETTINGS[name]():
        expected = state()
        loss = model(x).float().sum()
        assert state() == expected, "and is left alone"
    with OTHERS[other]():
        before, grad_mode = state(), torch.is_grad_enabled()
        loss.backward()
        assert (state(), torch.is_grad_enabled()) == (before, grad_mode), "backward puts back what it was called in"
    for probe in probes:
        assert probe.first_runs == [expected] * 2
        assert probe.recomputations == [expected]
        assert probe.grad_modes == [("checkpointing", False), ("plain", True), ("recomputing", True)]


@pytest.mark.parametrize("name", SETTINGS)
def test_it_holds_in_every_run_of_a_step(pipe: Pipe, name: str) -> None:
    model, probes = probed(pipe, "except_last", loss_fn=lambda output, target: output.float().mean())
    x = torch.rand(4, 2)
    with SETTINGS[name]():
        expected = state()
        model.step(x, target=x)
        assert state() == expected, "and is left alone"
    for probe in probes:
        assert probe.first_runs == [expected] * 2
        assert all(found == expected for found in probe.recomputations)
    assert probes[0].recomputations


def test_each_call_has_its_own(pipe: Pipe) -> None:
    """Whatever was set in another call or another backward pass, in this thread or in another."""
    model, probes = probed(pipe, "always")
    x = torch.rand(4, 2)
    neutral = state()
    with SETTINGS["everything"]():
        expected = state()
        first = model(x).float().sum()
    second = model(x).sum()
    thread = threading.Thread(target=lambda: first.backward(retain_graph=True))
    thread.start()
    thread.join()
    second.backward()
    first.backward()
    for probe in probes:
        assert probe.first_runs == [expected] * 2 + [neutral] * 2
        assert probe.recomputations == [expected] * 2 + [neutral] * 2 + [expected] * 2


def test_it_is_put_back_when_recomputation_fails(pipe: Pipe) -> None:
    def fail(input: Tensor) -> Tensor:
        if is_recomputing():
            raise ValueError("fails")
        return input * 1

    model = pipe(nn.Sequential(nn.Linear(2, 2), Apply(fail)), [1, 1], chunks=2, checkpoint="always")
    x = torch.rand(4, 2)
    with SETTINGS["everything"]():
        loss = model(x).float().sum()
    for other in OTHERS.values():
        with other():
            before, grad_mode = state(), torch.is_grad_enabled()
            with pytest.raises(ValueError, match="fails"):
                loss.backward(retain_graph=True)
            assert (state(), torch.is_grad_enabled(), is_recomputing()) == (before, grad_mode, False)


@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inside", [nullcontext, torch.enable_grad, lambda: torch.inference_mode(False)])
def test_layers_compute_gradients_where_they_are_on(pipe: Pipe, outside: Any, inside: Any) -> None:
    model, probes = probed(pipe, "always")
    x = torch.rand(4, 2)
    with outside(), inside():
        expected, grads, inference = state(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        output = model(x)
    assert output.is_inference() == inference
    assert output.requires_grad == (grads and not inference)
    if output.requires_grad:
        output.sum().backward()
    for probe in probes:
        assert probe.first_runs == [expected] * 2
        assert [enabled for phase, enabled in probe.grad_modes if phase != "checkpointing"] == [grads] * 2


# --------------------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize(("dtype", "cache"), [(torch.bfloat16, False), (torch.float16, True)])
def test_numbers_under_autocast_are_those_of_the_plain_model(
    pipe: Pipe, checkpoint: str, dtype: torch.dtype, cache: bool
) -> None:
    """Not a single gradient is lost to a weight whose cast was cached by a run without a graph.

    Here backward is inside the block. `test_transparency` has any layers, and backward outside.
    """
    layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.rand(6, 3, requires_grad=True)

    def step(run: Callable[[Tensor], Tensor], cache: bool) -> Any:
        with torch.autocast("cpu", dtype, cache_enabled=cache):
            return outcome(layers, x, run=run, loss=lambda output: output.float().square().sum())

    # With its cache, autocast keeps one cast of a weight for all micro-batches, and so adds up their
    # gradients in the narrow type. Every recomputation has casts of its own, as there are without the cache.
    expected = step(lambda x: run_plain(layers, x, chunks=3), cache and checkpoint == "never")
    assert_same(step(pipe(layers, [2, 1, 2], chunks=3, checkpoint=checkpoint), cache), expected)


def test_cached_casts_cost_no_gradient(pipe: Pipe, checkpoint: str) -> None:
    """Casts that were cached before the call, and the caller's after a backward in the same block."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = pipe(layers, [1, 1], chunks=2, checkpoint=checkpoint)
    x = torch.rand(4, 2)
    with torch.autocast("cpu"):
        layers(x)
        for run in (model, layers):
            layers.zero_grad()
            run(x).float().sum().backward()
            assert all(parameter.grad is not None and parameter.grad.any() for parameter in layers.parameters())


def test_a_layer_can_set_something_for_itself(pipe: Pipe, checkpoint: str) -> None:
    def narrow(linear: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output: Tensor = linear(x)
        assert output.dtype == torch.bfloat16
        return output.float()

    layers = nn.Sequential(Using(narrow), nn.Linear(4, 4), Using(narrow), nn.Linear(4, 4))
    model = pipe(layers, [2, 2], chunks=2, checkpoint=checkpoint)
    x = torch.rand(4, 4, requires_grad=True)
    assert_same(outcome(layers, x, run=model), plain_outcome(layers, x, chunks=2))


# -------------------------------------------------------------------------------- saved-tensor hooks and modes


@pytest.mark.parametrize("hooked", [True, False])
def test_a_backward_that_forbids_hooks(pipe: Pipe, hooked: bool) -> None:
    """A recomputation needs the hooks of its call, so it fails where hooks are forbidden, with that one's message."""
    model, probes = probed(pipe, "always")
    with hooks("hooks") if hooked else nullcontext():
        loss = model(torch.rand(4, 2)).sum()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        if not hooked:
            loss.backward()
            assert all(probe.recomputations for probe in probes)
            return
        with pytest.raises(RuntimeError, match="not here") as caught:
            loss.backward()
    assert "during recomputation" in caught.value.__notes__[0]


def test_flop_counter_counts_every_layer(pipe: Pipe, checkpoint: str) -> None:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4))
    model = pipe(layers, [1, 2], chunks=2, checkpoint=checkpoint)
    x = torch.rand(4, 2)

    def count(run: Callable[[], Any]) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        flops: int = counter.get_total_flops()
        return flops

    forward = count(lambda: layers(x))
    assert forward > 0
    assert count(lambda: model(x)) == forward

    both = count(lambda: layers(x).sum().backward())
    recomputed = {"always": forward, "except_last": forward // 2, "never": 0}[checkpoint]
    assert count(lambda: model(x).sum().backward()) == both + recomputed


def test_modes_are_not_entered_anew(pipe: Pipe) -> None:
    """A mode that resets what it knows when it is entered must not lose it: it was entered once."""
    model, _ = probed(pipe, "always")
    with DispatchMode("") as mode:
        loss = model(torch.rand(4, 2)).sum()
    loss.backward()
    assert mode.entries == 1


def test_fake_tensors(checkpoint: str) -> None:
    """A training step can be tried without memory or time; the model is for real again afterwards."""
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    model = GPipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=2, checkpoint=checkpoint)
    with FakeTensorMode(allow_non_fake_inputs=True):
        output = model(torch.rand(4, 2))
        assert isinstance(output, FakeTensor)
        assert output.shape == (4, 4)
        output.sum().backward()
    layers.zero_grad()
    x = torch.rand(4, 2)
    assert_same(outcome(layers, x, run=model), plain_outcome(layers, x, chunks=2))
