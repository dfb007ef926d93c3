"""Profiling measures the right sizes and times, and leaves the model unchanged."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.accelerator import DEVICE, KIND, backend, needs_accelerator
from tests.balancing.planning.models import state_of
from tests.layers import Apply, Using
from tests.skip.layers import Pop, Stash, pair
from torchgpipe.pipe import PipeSequential
from torchgpipe.skip.tracker import current_skip_tracker
from torchgpipe_balancing import Profile, measure, profile


def quick(module: nn.Sequential, sample: Any, **options: Any) -> Profile:
    """Profile in a single round."""
    return profile(module, sample, **{"timeout": 0, "device": "cpu", **options})


def column(measured: Profile, name: str) -> list[Any]:
    return [row[name] for row in measured.rows()]


def made(*layers: nn.Module | Callable[..., Any]) -> nn.Sequential:
    return nn.Sequential(*[one if isinstance(one, nn.Module) else Apply(one) for one in layers])


def leaf(*shape: int) -> Tensor:
    return torch.rand(shape, requires_grad=True)


# -- Sizes --


class Checkpointed(nn.Sequential):
    def forward(self, input: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(super().forward, input, use_reentrant=True)


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()  # keeps its output
    return y, y


def embedded(batch: dict[str, Any]) -> tuple[Tensor, list[Any]]:
    return torch.ones(10, 3, requires_grad=True)[batch["tokens"]], [batch["mask"], None]


def summed(given: tuple[Tensor, list[Any]]) -> Tensor:
    hidden, (mask, nothing) = given
    assert nothing is None
    return (hidden * mask[..., None]).sum(1)


def sharing() -> nn.Sequential:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second, first)


def nested_skips() -> nn.Sequential:
    """Return layers with skips in several namespaces, one of which does not leave a block."""
    (stash, pop), (outer, outer_pop), (other, other_pop) = (
        pair(torch.neg, torch.mul),
        pair(torch.exp, torch.mul),
        pair(),
    )
    return nn.Sequential(outer, other, nn.Sequential(stash, nn.Tanh(), pop, other_pop), outer_pop)


SPARSE = torch.eye(100).to_sparse()
TOKENS = {"tokens": torch.arange(6).view(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool)}
FROZEN = [nn.Linear(3, 3).requires_grad_(False), nn.Tanh(), nn.Linear(3, 3), nn.Tanh()]

#: What it is about, the model, the sample, and the bytes for each layer: of activations (A), parameters (P), buffers
#: (B) and outputs (O).
SIZES: dict[str, tuple[nn.Sequential, Any, str]] = {
    # The norm keeps its input, mean and variance, but no running statistics.
    "what a layer owns is no activation": (
        made(nn.Linear(3, 5), nn.BatchNorm1d(5, affine=False)),
        torch.rand(7, 3),
        "P 80 0 B 0 48 A 84 180 O 140 140",
    ),
    # ReLU keeps its output, which is also the input that the last layer keeps.
    "once": (made(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.rand(4, 3), "A 48 48 0"),
    # The product keeps both factors; the second one is already counted.
    "passes by": (made(twice, lambda xy: (xy[0] + 1, xy[1]), lambda xy: xy[0] * xy[1]), leaf(4), "A 16 0 16"),
    "freed by autograd": (made(lambda x: x + x.exp().detach()), leaf(4), "A 0"),
    "a view keeps its storage": (made(lambda x: (x * torch.ones(1000)[:4]).sum()), leaf(4), "A 4000"),
    "frozen": (made(*FROZEN), torch.rand(4, 3), "A 0 0 48 48 P 48 0 48 0"),
    "sparse": (made(nn.Linear(2, 2), lambda x: torch.sparse.mm(SPARSE, x)), torch.rand(100, 2), "B 0 0 A 800 0"),
    "shared parameters": (sharing(), torch.rand(2, 4), "P 80 0 80 80"),
    "integers, None and containers": (made(embedded, summed), TOKENS, "O 78 24"),
    "no gradient": (
        made(nn.Linear(4, 4), lambda x: x.argmax(1), nn.Embedding(4, 3), nn.Linear(3, 1)),
        torch.rand(5, 4),
        "A 80 0 40 60",
    ),
    # A skip is an output. exp keeps its result, sin its input, and a product both factors, one of which is the skip.
    "a skip is kept": (made(Stash(torch.exp), nn.Tanh(), Pop(torch.mul)), leaf(2, 4), "O 64 32 32 A 64 32 32"),
    "a skip is not kept": (made(Stash(torch.neg), nn.Tanh(), Pop(torch.add)), leaf(2, 4), "A 32 32 0"),
    # The skip that does not leave the block is kept once, for the product.
    "several namespaces": (nested_skips(), leaf(2, 4), "O 64 64 32 32 A 64 32 128 64"),
    "checkpointed": (made(Checkpointed(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))), leaf(2, 4), "A 32"),
    "no layers": (made(), torch.rand(1), "A"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    module, sample, expected = SIZES[name]
    measured = quick(module, sample)
    for words in re.findall("[A-Z][ 0-9]*", expected):
        of = {"A": "activations", "P": "parameters", "B": "buffers", "O": "output"}[words[0]]
        assert column(measured, of) == [int(number) for number in words[1:].split()]
    assert column(measured, "layer") == [str(k) for k in range(len(module))]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_profiled_whatever_the_caller_is_in(mode: Callable[[], Any]) -> None:
    with mode():
        measured = quick(nn.Sequential(nn.Linear(4, 4)), torch.rand(2, 4))
        assert not torch.is_grad_enabled()
    assert column(measured, "activations") == [32]


def test_autocast_of_the_caller_holds_and_keeps_nothing_from_run_to_run() -> None:
    gradients: list[Tensor] = []
    weights: list[weakref.ref[Tensor]] = []

    def watched(linear: nn.Linear, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            linear.weight.register_hook(gradients.append)  # type: ignore[no-untyped-call]
        weights.append(weakref.ref(linear.weight))
        assert all(weight() is None or weight() is linear.weight for weight in weights)
        return linear(input)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured = quick(nn.Sequential(Using(watched, bias=False), Using(watched, bias=False)), torch.rand(8, 4))
        assert len(gradients) == 4  # the cast in the run without gradients has no graph
        assert {weight() for weight in weights} == {None}
    # The second layer also keeps its cast weight, for the gradient of its input.
    assert (column(measured, "output"), column(measured, "activations")) == ([64, 64], [64, 64 + 32])


def test_a_stash_that_is_gone_hides_no_activation() -> None:
    """A later layer may keep a tensor at the address of a freed stash."""
    (first, first_pop), (second, second_pop) = pair(torch.exp, torch.add), pair(torch.tanh, torch.add)
    module = nn.Sequential(first, second, first_pop, second_pop)
    for _ in range(20):
        assert column(quick(module, leaf(1 << 10)), "activations") == [2 * 4096, 2 * 4096, 0, 0]


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(4, 4),
    lambda: nn.Linear(4, 4).requires_grad_(False),
    lambda: nn.BatchNorm1d(4),
    lambda: nn.LayerNorm(4),
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    lambda: nn.Dropout(0.5),
    lambda: nn.Dropout(0.5, inplace=True),
    nn.Tanh,
    lambda: nn.Softmax(1),
    nn.Identity,
    lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten()),
    lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
]


def kept(module: nn.Sequential, input: Tensor) -> int:
    """Return the bytes that the whole model keeps, counted in one run."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor.detach()  # A graph that holds its own outputs would never be freed.

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = module(input)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    return sum(storage.nbytes() for address, storage in storages.items() if address not in own)


@given(st.lists(st.sampled_from(LAYERS), max_size=7), st.booleans())
def test_activations_add_up_to_those_of_the_model(which: list[Callable[[], nn.Module]], requires_grad: bool) -> None:
    module = nn.Sequential(*[make() for make in which])
    sample = torch.rand(6, 4, requires_grad=requires_grad)
    assert sum(column(quick(module, sample), "activations")) == kept(module, sample * 1)


# -- Times --


class Clock:
    """A clock that only layers move, so that every time is known in advance."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds

    def slow(self, forward: float, backward: float) -> nn.Module:
        """Return a layer that moves the clock by known times."""

        def run(linear: nn.Linear, input: Tensor) -> Tensor:
            self.move(forward)
            output: Tensor = linear(input)
            if output.requires_grad:
                output.register_hook(lambda _: self.move(backward))
            return output

        return Using(run)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


def test_times(clock: Clock) -> None:
    measured = profile(nn.Sequential(clock.slow(1, 2), clock.slow(3, 10)), torch.rand(4), device="cpu", timeout=100)
    first, second = (layer.times for layer in measured.layers)
    assert (first.forward, first.recompute, first.backward) == (1, 1, 2)
    assert (second.forward, second.recompute, second.backward) == (3, 3, 10)
    assert (first.total(), first.total(recompute=False)) == (4, 3)
    # A round has three forwards, the first one untimed, and a backward: 3 * 4 + 12.
    assert measured.rounds == 5
    assert "20% of the time is recomputation" in str(measured)


def test_median_over_rounds(clock: Clock) -> None:
    seconds = iter([9, *[9, 1, 1], *[9, 1, 5], *[9, 1, 3]])
    measured = profile(made(lambda x: clock.move(next(seconds)) or x), leaf(4), device="cpu", timeout=27)
    assert measured.rounds == 3
    assert measured.layers[0].times.forward == 3


def test_only_what_has_a_gradient_is_recomputed_and_runs_backward(clock: Clock) -> None:
    def frozen() -> nn.Module:
        return clock.slow(1, 2).requires_grad_(False)

    def slow(input: Tensor) -> Tensor:
        clock.move(1)
        output = input * 1
        output.requires_grad and output.register_hook(lambda _: clock.move(2))
        return output

    def times(module: nn.Sequential, sample: Tensor) -> list[list[float]]:
        measured = quick(module, sample)
        return [column(measured, name) for name in ("forward", "recompute", "backward")]

    # Layer 2 has no gradient of its own, but the earlier layer 1 has.
    module = made(frozen(), clock.slow(1, 2), frozen(), clock.slow(1, 2))
    assert times(module, torch.rand(4)) == [[1] * 4, [0, 1, 1, 1], [0, 2, 2, 2]]
    # The gradient of a skip is part of backward of the layer that stashes it.
    assert times(made(Stash(slow), Pop(torch.add)), leaf(4)) == [[1, 0], [1, 0], [2, 0]]
    # The skip alone has a gradient, because the sample needs none.
    module = made(Stash(lambda x: x.clone().requires_grad_()), Pop(lambda x, skip: x.detach() + slow(skip)))
    assert times(module, torch.rand(4)) == [[0, 1], [0, 1], [0, 2]]


# -- Unchanged by profiling --


def test_all_stays_as_it_was_and_layers_run_in_training_mode() -> None:
    modes: list[bool] = []
    noted = Apply(torch.rand_like)
    noted.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    module(torch.rand(5, 4)).sum().backward()
    module.append(noted).eval()[2].train()
    leaf_, plain = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4)
    before = state_of(module), plain.tolist(), plain._version
    for sample in (plain, leaf_, leaf_ * 1):
        assert quick(module, sample).sample == "(5, 4) float32"
    assert (state_of(module), plain.tolist(), plain._version) == before
    assert plain.grad is leaf_.grad is None
    assert {*modes} == {True}


def test_one_copy_at_a_time() -> None:
    alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    most = 0

    class Counted(nn.Linear):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            alive.add(self)

        def forward(self, input: Tensor) -> Tensor:
            nonlocal most
            most = max(most, len(alive))
            return super().forward(input)

    gc.disable()
    try:
        quick(nn.Sequential(*[Counted(4, 4) for _ in range(5)]), torch.rand(2, 4))
        assert most == 1
        assert not alive
    finally:
        gc.enable()


# -- Unusual layers --


def test_layers_that_work_in_place() -> None:
    # Doubling makes a second run on the same tensor visible, and a leaf must not be changed in place at all.
    seen: list[float] = []

    def doubled(x: Tensor, skip: Tensor | None = None) -> Tensor:
        seen.append((x if skip is None else skip).mul_(2).flatten()[0].item())
        return x

    quick(made(doubled, doubled, nn.Linear(2, 2), nn.ReLU(inplace=True)), torch.ones(2, 2, requires_grad=True))
    assert {*seen} == {2, 4}
    seen.clear()
    quick(made(Stash(torch.ones_like), nn.ReLU(inplace=True), Pop(doubled)), torch.rand(4))
    assert {*seen} == {2}


class Attend(nn.Module):
    """A layer of two or three arguments."""

    def forward(self, x: Tensor, mask: Tensor, power: int = 1) -> Any:
        return x * mask * power, x


class Unpack(nn.Module):
    """A layer whose single argument is a tuple."""

    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(values, tuple)
        return values[0].sin()


def test_a_tuple_is_several_arguments_of_the_first_layer_that_takes_them() -> None:
    x = torch.rand(2, 3)
    for layer in [Attend(), Apply(lambda *inputs: inputs), nn.Bilinear(3, 3, 4), Unpack()]:
        assert quick(nn.Sequential(layer, nn.Identity()), (x, x)).sample == "(2, 3) float32, (2, 3) float32"
    assert quick(nn.Sequential(Attend()), (x, x, 2)).layers[0].sizes.output == 48
    quick(nn.Sequential(Unpack()), (x,))


def test_a_tuple_is_one_argument_of_a_later_layer_unless_the_module_hands_on_several() -> None:
    """As in GPipe and in `torchgpipe.pipe.Pipe`."""
    seen: list[int] = []
    doubled = Apply(lambda x: (x, x.exp()))
    count = Apply(lambda *values: (seen.append(len(values)), values[0])[1])
    for kind, several in [(nn.Sequential, 1), (PipeSequential, 2)]:
        seen.clear()
        quick(kind(doubled, count), torch.rand(2, 3))
        assert {*seen} == {several}
    quick(PipeSequential(nn.Bilinear(3, 3, 4), nn.ReLU()), (torch.rand(2, 3),) * 2)
    with pytest.raises(TypeError, match="input2") as raised:
        quick(nn.Sequential(doubled, nn.Bilinear(3, 3, 4)), torch.rand(2, 3))
    assert "while profiling layer '1' (Bilinear) with input (2, 3) float32, (2, 3) float32" in raised.value.__notes__[0]


@pytest.mark.parametrize("stashed", [torch.detach, lambda x: x.argmax(1), lambda x: None])
def test_skips_need_gradient_as_at_their_stash(stashed: Callable[[Tensor], Any]) -> None:
    seen: list[Any] = []
    quick(made(Stash(stashed), nn.Tanh(), Pop(lambda x, skip: seen.append(skip) or x)), leaf(4, 3))
    assert not any(skip is not None and skip.requires_grad for skip in seen)


def test_skips_are_cut_off() -> None:
    """Backward of the popping layer must not reach the stashing layer, whose graph is freed."""
    gradients: list[Tensor] = []

    def watched(input: Tensor) -> Tensor:
        output = input.exp()
        if output.requires_grad:
            output.register_hook(gradients.append)  # type: ignore[no-untyped-call]
        return output

    quick(made(Stash(watched), Pop(torch.mul)), leaf(4))
    assert [gradient.tolist() for gradient in gradients] == [[1.0] * 4] * 2  # once per backward


def test_skips_leave_nothing_in_the_thread() -> None:
    tracker = current_skip_tracker()
    quick(made(Stash(torch.exp), nn.Tanh(), Pop(torch.mul)), torch.rand(4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        quick(made(Stash(torch.exp), nn.Linear(1, 1), Pop(torch.mul)), torch.rand(4, 4))
    assert current_skip_tracker() is tracker
    assert not tracker.skips


def test_layer_that_keeps_what_it_computed() -> None:
    # weight_norm does this; such a tensor cannot be deep-copied.
    class Keeping(nn.Linear):
        last: Tensor

        def forward(self, input: Tensor) -> Tensor:
            self.last = super().forward(input)
            return self.last

    module = nn.Sequential(Keeping(4, 4))
    module(torch.rand(1, 4))
    last = module[0].last
    quick(module, torch.rand(2, 4))
    assert module[0].last is last


# -- Faults --


def test_mistakes() -> None:
    """The error of a layer has a note that names it."""
    for timeout in (-1, math.nan):
        with pytest.raises(ValueError, match=f"timeout must be 0 seconds or more, not {timeout}"):
            quick(made(), 1, timeout=timeout)
    with pytest.raises(TypeError, match=r"module must be nn\.Sequential to be partitioned, not Lin"):
        quick(nn.Linear(1, 1), 1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        quick(made(nn.Linear(3, 4), nn.Linear(3, 4)), torch.rand(16, 3))
    place = "while profiling layer '1' (Linear) with input (16, 4) float32, from a sample of (16, 3) float32, on cpu"
    assert raised.value.__notes__ == [place]
    with pytest.raises(RuntimeError, match="Pop pops 'skip', which no earlier layer has stashed"):
        quick(made(nn.ReLU(), Pop(torch.add)), torch.rand(4))


# -- Devices --


@needs_accelerator
def test_on_a_gpu() -> None:
    module = nn.Sequential(nn.Linear(512, 2048), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(2048, 16)).eval()
    sample = torch.rand(64, 512)
    quick(module, sample, device=KIND)  # cuBLAS allocates a workspace per thread, and keeps it
    backend.manual_seed(0)
    state = backend.get_rng_state()
    held = backend.memory_allocated()
    measured = profile(module, sample, device=KIND, timeout=0.1)

    assert measured.device == DEVICE
    assert all(layer.times.forward > 0 and layer.times.backward > 0 for layer in measured.layers)
    assert torch.equal(backend.get_rng_state(), state)
    assert sum(column(measured, "activations")) == kept(module.train().to(DEVICE), sample.to(DEVICE))
    module.cpu()
    backend.synchronize()
    assert backend.memory_allocated() == held


@needs_accelerator
def test_skips_wait_on_the_host_while_other_layers_run() -> None:
    held: list[int] = []

    def noted(input: Tensor) -> Tensor:
        held.append(backend.memory_allocated() - before)
        return input + 1

    def joined(input: Tensor, skip: Tensor) -> Tensor:
        assert skip.device == input.device
        return input + skip.sum()

    module = made(Stash(lambda input: input.repeat(2**20)), noted, Pop(joined))
    before = backend.memory_allocated()
    quick(module, leaf(8), device=KIND)
    assert held[0] < 2**20
