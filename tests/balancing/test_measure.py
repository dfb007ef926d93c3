"""Profiling measures the right sizes and times, and leaves the model unchanged."""

from __future__ import annotations

import gc
import random
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
from tests.layers import Apply
from torchgpipe.pipe import PipeSequential
from torchgpipe.skip import Namespace, pop, skippable, stash
from torchgpipe.skip.tracker import current_skip_tracker
from torchgpipe_balancing import Profile, measure, profile


def quick(module: nn.Sequential, sample: Any, **options: Any) -> Profile:
    """Profile in a single round."""
    return profile(module, sample, timeout=0, device="cpu", **options)


def sizes(measured: Profile, name: str) -> list[int]:
    return [row[name] for row in measured.rows()]


# -- Sizes --


def test_sizes_of_a_layer() -> None:
    measured = quick(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, affine=False)), torch.rand(7, 3))
    linear, norm = (layer.sizes for layer in measured.layers)

    assert linear.parameters == (3 * 5 + 5) * 4
    assert linear.buffers == 0
    assert linear.activations == 7 * 3 * 4  # the input; parameters are not counted
    assert linear.output == 7 * 5 * 4
    assert norm.parameters == 0
    assert norm.buffers == (5 + 5) * 4 + 8
    assert norm.activations == (7 * 5 + 2 * 5) * 4  # the input, mean and variance, but no running statistics


def test_what_two_layers_keep_counts_once() -> None:
    measured = quick(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.rand(4, 3))
    # ReLU keeps its output, which is also the input that the last layer keeps.
    assert sizes(measured, "activations") == [48, 48, 0]


def test_what_passes_by_counts_once() -> None:
    def forked(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()  # keeps its output
        return y, y

    def untouched(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0] + 1, pair[1]

    def joined(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]  # keeps both factors; the second one is already counted

    sample = torch.rand(4, requires_grad=True)
    measured = quick(nn.Sequential(Apply(forked), Apply(untouched), Apply(joined)), sample)
    assert sizes(measured, "activations") == [16, 0, 16]


def test_tensors_that_autograd_frees_do_not_count() -> None:
    sample = torch.rand(4, requires_grad=True)
    measured = quick(nn.Sequential(Apply(lambda x: x + x.exp().detach())), sample)
    assert sizes(measured, "activations") == [0]


def test_a_view_keeps_the_whole_storage() -> None:
    sample = torch.rand(4, requires_grad=True)
    measured = quick(nn.Sequential(Apply(lambda x: (x * torch.ones(1000)[:4]).sum())), sample)
    assert sizes(measured, "activations") == [4000]


def test_nothing_is_kept_for_frozen_layers() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    module[0].requires_grad_(False)
    measured = quick(module, torch.rand(4, 3))
    assert sizes(measured, "activations") == [0, 0, 48, 48]
    assert sizes(measured, "parameters") == [48, 0, 48, 0]


def test_autocast_of_the_caller_holds() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured = quick(module, torch.rand(8, 4))
    assert sizes(measured, "output") == [8 * 4 * 2]
    assert sizes(measured, "activations") == [8 * 4 * 2 + 0]


def test_autocast_keeps_nothing_from_run_to_run() -> None:
    gradients: list[Tensor] = []
    weights: list[weakref.ref[Tensor]] = []

    class Watched(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                self.weight.register_hook(gradients.append)  # type: ignore[no-untyped-call]
            weights.append(weakref.ref(self.weight))
            assert all(weight() is None or weight() is self.weight for weight in weights)
            return super().forward(input)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        quick(nn.Sequential(Watched(4, 4), Watched(4, 4)), torch.rand(8, 4))
        assert len(gradients) == 4  # the cast in the run without gradients has no graph
        assert {weight() for weight in weights} == {None}


def test_sparse_tensors_do_not_count() -> None:
    class Graph(nn.Module):
        def __init__(self, adjacency: Tensor) -> None:
            super().__init__()
            self.register_buffer("adjacency", adjacency)

        def forward(self, input: Tensor) -> Tensor:
            return torch.sparse.mm(self.adjacency, input)

    adjacency = torch.eye(100).to_sparse()
    measured = quick(nn.Sequential(nn.Linear(2, 2), Graph(adjacency)), torch.rand(100, 2))
    assert sizes(measured, "buffers") == [0, 0]
    assert sizes(measured, "activations") == [100 * 2 * 4, 0]


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
    nn.Softmax,
    nn.Identity,
    lambda: nn.Unflatten(1, (2, 2)),
    nn.Flatten,
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


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@given(st.lists(st.integers(0, len(LAYERS) - 1), max_size=7), st.booleans())
def test_activations_add_up_to_those_of_the_model(which: list[int], requires_grad: bool) -> None:
    made: list[nn.Module] = []
    flat = True
    for index in which:
        layer = LAYERS[index]()
        if flat or isinstance(layer, nn.Flatten | nn.ReLU | nn.Tanh | nn.Dropout | nn.Identity):
            made.append(layer)
            flat = isinstance(layer, nn.Flatten) or (flat and not isinstance(layer, nn.Unflatten))
    module = nn.Sequential(*made)

    sample = torch.rand(6, 4, requires_grad=requires_grad)
    assert sum(sizes(quick(module, sample), "activations")) == kept(module, sample * 1)


# -- Times --


class Clock:
    """A clock that only layers move, so that every time is known in advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


class Slow(nn.Module):
    """A layer that moves the clock by known times."""

    def __init__(self, clock: Clock, forward: float, backward: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.backward_seconds = clock, forward, backward
        self.weight = nn.Parameter(torch.ones(()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Slow:
        copied = Slow(self.clock, self.seconds, self.backward_seconds)
        copied.weight.requires_grad_(self.weight.requires_grad)
        return copied

    def forward(self, input: Tensor) -> Tensor:
        self.clock.now += self.seconds
        output = input * self.weight
        if output.requires_grad:
            output.register_hook(self.slow_backward)
        return output

    def slow_backward(self, gradient: Tensor) -> None:
        self.clock.now += self.backward_seconds


def test_times(clock: Clock) -> None:
    measured = profile(nn.Sequential(Slow(clock, 1, 2), Slow(clock, 3, 10)), torch.rand(4), device="cpu", timeout=100)
    first, second = (layer.times for layer in measured.layers)

    assert (first.forward, first.recompute, first.backward) == (1, 1, 2)
    assert (second.forward, second.recompute, second.backward) == (3, 3, 10)
    assert first.total() == 4
    assert first.total(recompute=False) == 3
    # A round has three forwards, the first one untimed, and a backward: 3 * 4 + 12.
    assert measured.rounds == 5
    assert "20% of the time is recomputation" in str(measured)


def test_frozen_layers_are_neither_recomputed_nor_run_backward(clock: Clock) -> None:
    module = nn.Sequential(Slow(clock, 1, 2), Slow(clock, 1, 2), Slow(clock, 1, 2), Slow(clock, 1, 2))
    module[0].requires_grad_(False)
    module[2].requires_grad_(False)
    measured = quick(module, torch.rand(4))

    # Layer 2 has no gradient of its own, but the earlier layer 1 has.
    assert [row["recompute"] for row in measured.rows()] == [0, 1, 1, 1]
    assert [row["backward"] for row in measured.rows()] == [0, 2, 2, 2]
    assert [row["forward"] for row in measured.rows()] == [1, 1, 1, 1]


def test_median_over_rounds(clock: Clock) -> None:
    seconds = iter([9, *[9, 1, 1], *[9, 1, 5], *[9, 1, 3]])
    module = nn.Sequential(Apply(lambda x: setattr(clock, "now", clock.now + next(seconds)) or x))
    sample = torch.rand(4, requires_grad=True)
    measured = profile(module, sample, device="cpu", timeout=27)
    assert measured.rounds == 3
    assert measured.layers[0].times.forward == 3


def test_at_least_one_round() -> None:
    assert quick(nn.Sequential(nn.Linear(2, 2)), torch.rand(2, 2)).rounds == 1


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_negative_timeout(timeout: float) -> None:
    with pytest.raises(ValueError, match=f"timeout must be 0 seconds or more, not {timeout}"):
        profile(nn.Sequential(), torch.rand(1), timeout=timeout)


# -- Unchanged by profiling --


def state_of(module: nn.Module) -> list[Any]:
    tensors = [*module.parameters(), *module.buffers()]
    return [
        [(tensor.data_ptr(), tensor._version, tensor.tolist(), tensor.device) for tensor in tensors],
        [None if p.grad is None else (p.grad.data_ptr(), p.grad.tolist()) for p in module.parameters()],
        [(m.training, len(m._forward_hooks), sorted(vars(m))) for m in module.modules()],
    ]


def test_module_and_sample_stay_untouched() -> None:
    module = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4, 2)
    )
    module(torch.rand(5, 4)).sum().backward()
    module[2].eval()
    sample = torch.randn(5, 4)
    before = state_of(module), sample.tolist(), sample._version

    quick(module, sample)
    assert (state_of(module), sample.tolist(), sample._version) == before
    assert sample.grad is None


def test_gradient_of_the_sample_stays_untouched() -> None:
    sample = torch.rand(5, 4, requires_grad=True)
    module = nn.Sequential(nn.Linear(4, 4))
    measured = quick(module, sample * 1)  # not a leaf either
    quick(module, sample)
    assert sample.grad is None
    assert measured.sample == "(5, 4) float32"


def test_random_stream_stays_untouched() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    sample = torch.ones(5)
    quick(nn.Sequential(nn.Dropout(), Apply(torch.rand_like)), sample)
    assert torch.equal(torch.rand(3), expected)


def test_layers_run_in_training_mode() -> None:
    seen: list[bool] = []

    class Mode(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(self.training)
            return input

    module = nn.Sequential(Mode(), Mode()).eval()
    quick(module, torch.rand(1))
    assert set(seen) == {True}
    assert not module[0].training


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_profiled_whatever_the_caller_is_in(mode: Callable[[], Any]) -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    with mode():
        measured = quick(module, torch.rand(2, 4))
        assert not torch.is_grad_enabled()
    assert sizes(measured, "activations") == [32]


# -- Unusual layers --


def test_shared_parameters() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    measured = quick(nn.Sequential(first, nn.ReLU(), second, first), torch.rand(2, 4))
    assert sizes(measured, "parameters") == [80, 0, 80, 80]
    assert [layer.name for layer in measured.layers] == ["0", "1", "2", "3"]


def test_layers_that_work_in_place() -> None:
    # Doubling makes a second run on the same tensor visible, and a leaf must not be changed in place at all.
    runs: list[float] = []

    def doubled(x: Tensor) -> Tensor:
        x.mul_(2)
        runs.append(x.flatten()[0].item())
        return x

    sample = torch.ones(2, 2, requires_grad=True)
    quick(nn.Sequential(Apply(doubled), Apply(doubled), nn.Linear(2, 2), nn.ReLU(inplace=True)), sample)
    assert sorted(set(runs)) == [2, 4]


def test_integers_none_and_nested_containers() -> None:
    def embedded(batch: dict[str, Any]) -> tuple[Tensor, list[Any]]:
        return torch.ones(10, 3, requires_grad=True)[batch["tokens"]], [batch["mask"], None]

    def summed(pair: tuple[Tensor, list[Any]]) -> Tensor:
        hidden, (mask, nothing) = pair
        assert nothing is None
        return (hidden * mask[..., None]).sum(1)

    sample = {"tokens": torch.arange(6).view(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool)}
    measured = quick(nn.Sequential(Apply(embedded), Apply(summed)), sample)
    assert sizes(measured, "output") == [2 * 3 * 3 * 4 + 6, 2 * 3 * 4]
    assert "(2, 3) int64, (2, 3) bool" in measured.sample


class Attend(nn.Module):
    """A layer of two or three arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, mask: Tensor, power: int = 1) -> Any:
        return self.function(x, mask, power)


def test_a_tuple_is_several_arguments_of_the_first_layer_that_takes_them() -> None:
    x, mask = torch.rand(2, 3), torch.rand(2, 3)
    for layer in [Attend(lambda *inputs: inputs), Apply(lambda *inputs: inputs), nn.Bilinear(3, 3, 4)]:
        measured = quick(nn.Sequential(layer, nn.Identity()), (x, mask))
        assert measured.sample == "(2, 3) float32, (2, 3) float32"
    assert quick(nn.Sequential(Attend(lambda x, mask, power: x * power)), (x, mask, 2)).layers[0].sizes.output == 24
    # A layer with a single argument unpacks the tuple itself.
    quick(nn.Sequential(Unpack(), nn.Linear(3, 2)), (x, mask))
    quick(nn.Sequential(Unpack()), (x,))


class Unpack(nn.Module):
    """A layer whose single argument is a tuple."""

    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(values, tuple)
        return values[0].sin()


def test_a_tuple_is_one_argument_of_a_later_layer_unless_the_module_hands_on_several() -> None:
    """As in GPipe and in `torchgpipe.pipe.Pipe`."""
    seen: list[int] = []
    pair = Apply(lambda x: (x, x.exp()))
    count = Apply(lambda *values: (seen.append(len(values)), values[0])[1])
    quick(nn.Sequential(pair, count), torch.rand(2, 3))
    assert {*seen} == {1}
    seen.clear()
    quick(PipeSequential(pair, count), torch.rand(2, 3))
    assert {*seen} == {2}
    quick(PipeSequential(nn.Bilinear(3, 3, 4), nn.ReLU()), (torch.rand(2, 3),) * 2)
    with pytest.raises(TypeError, match="input2") as raised:
        quick(nn.Sequential(pair, nn.Bilinear(3, 3, 4)), torch.rand(2, 3))
    assert "while profiling layer '1' (Bilinear) with input (2, 3) float32, (2, 3) float32" in raised.value.__notes__[0]


def test_outputs_without_gradient() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x.argmax(1)), nn.Embedding(4, 3), nn.Linear(3, 1))
    measured = quick(module, torch.rand(5, 4))
    assert [row["backward"] > 0 for row in measured.rows()] == [True, False, True, True]
    assert sizes(measured, "activations") == [80, 0, 40, 60]


# -- Skips --


@skippable(stash=["skip"])
class Stash(nn.Module):
    """A layer that stashes a function of the input and returns the input."""

    def __init__(self, function: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Any:
        yield stash("skip", self.function(input))
        return input


@skippable(pop=["skip"])
class Pop(nn.Module):
    """A layer that joins the skip and the input by a function."""

    def __init__(self, function: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Any:
        skip = yield pop("skip")
        return self.function(input, skip)


def test_skips_are_outputs_and_kept_where_backward_needs_them() -> None:
    # 32 bytes each: exp keeps its result, and a product both factors, one of which is the skip.
    module = nn.Sequential(Stash(torch.exp), nn.Tanh(), Pop(torch.mul))
    measured = quick(module, torch.rand(2, 4, requires_grad=True))
    assert sizes(measured, "output") == [64, 32, 32]
    assert sizes(measured, "activations") == [32, 32, 32]

    module = nn.Sequential(Stash(torch.neg), nn.Tanh(), Pop(torch.add))
    assert sizes(quick(module, torch.rand(2, 4, requires_grad=True)), "activations") == [0, 32, 0]


def test_gradients_of_skips_are_part_of_backward(clock: Clock) -> None:
    def slow(input: Tensor) -> Tensor:
        return Slow(clock, 3, 10)(input)

    stashing = quick(nn.Sequential(Stash(slow), Pop(torch.add)), torch.rand(4, requires_grad=True))
    assert [row["forward"] for row in stashing.rows()] == [3, 0]
    assert [row["recompute"] for row in stashing.rows()] == [3, 0]
    assert [row["backward"] for row in stashing.rows()] == [10, 0]

    # The skip alone has a gradient, because the sample needs none.
    popping = nn.Sequential(
        Stash(lambda input: input.clone().requires_grad_()),
        Pop(lambda input, skip: input.detach() + slow(skip)),
    )
    measured = quick(popping, torch.rand(4))
    assert [row["recompute"] for row in measured.rows()] == [0, 3]
    assert [row["backward"] for row in measured.rows()] == [0, 10]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (torch.sum, (True, torch.float32, ())),
        (torch.detach, (False, torch.float32, (4, 3))),
        (lambda input: input.argmax(1), (False, torch.int64, (4,))),
        (lambda input: None, None),
    ],
)
def test_skips_need_gradient_as_at_their_stash(function: Callable[[Tensor], Any], expected: Any) -> None:
    seen: set[Any] = set()

    def noted(input: Tensor, skip: Any) -> Tensor:
        if torch.is_grad_enabled():
            seen.add(skip if skip is None else (skip.requires_grad, skip.dtype, skip.shape))
        return input

    quick(nn.Sequential(Stash(function), nn.Tanh(), Pop(noted)), torch.rand(4, 3, requires_grad=True))
    assert seen == {expected}


def test_skips_are_cut_off() -> None:
    """Backward of the popping layer must not reach the stashing layer, whose graph is freed."""
    gradients: list[Tensor] = []

    def watched(input: Tensor) -> Tensor:
        output = input.exp()
        if output.requires_grad:
            output.register_hook(gradients.append)  # type: ignore[no-untyped-call]
        return output

    quick(nn.Sequential(Stash(watched), Pop(torch.mul)), torch.rand(4, requires_grad=True))
    assert [gradient.tolist() for gradient in gradients] == [[1.0] * 4] * 2  # once per backward


def test_a_stash_that_is_gone_hides_no_activation() -> None:
    """A later layer may keep a tensor at the address of a freed stash."""
    ends = Namespace(), Namespace()
    module = nn.Sequential(
        Stash(torch.exp).isolate(ends[0]),
        Stash(torch.tanh).isolate(ends[1]),
        Pop(torch.add).isolate(ends[0]),
        Pop(torch.add).isolate(ends[1]),
    )
    for _ in range(20):
        measured = quick(module, torch.rand(1 << 10, requires_grad=True))
        assert sizes(measured, "activations") == [4096, 4096, 0, 0]


def test_skips_that_layers_change_in_place() -> None:
    # A second run must not see the skip as the first run changed it.
    seen: list[float] = []

    def doubled(input: Tensor, skip: Tensor) -> Tensor:
        seen.append(skip.mul_(2).flatten()[0].item())
        return input + skip

    quick(nn.Sequential(Stash(torch.ones_like), nn.ReLU(inplace=True), Pop(doubled)), torch.rand(4))
    assert set(seen) == {2}


def test_skips_in_several_namespaces_and_within_a_layer() -> None:
    inner, outer, other = Namespace(), Namespace(), Namespace()
    module = nn.Sequential(
        Stash(torch.exp).isolate(outer),
        Stash(torch.tanh).isolate(other),
        nn.Sequential(
            Stash(torch.neg).isolate(inner), nn.Tanh(), Pop(torch.mul).isolate(inner), Pop(torch.add).isolate(other)
        ),
        Pop(torch.mul).isolate(outer),
    )
    measured = quick(module, torch.rand(2, 4, requires_grad=True))
    assert sizes(measured, "output") == [64, 64, 32, 32]
    # No skip leaves the block: the skip is kept once, for the product.
    assert sizes(measured, "activations") == [32, 32, 64, 64]


def test_skips_leave_nothing_in_the_thread() -> None:
    tracker = current_skip_tracker()
    quick(nn.Sequential(Stash(torch.exp), nn.Tanh(), Pop(torch.mul)), torch.rand(4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        quick(nn.Sequential(Stash(torch.exp), nn.Linear(1, 1), Pop(torch.mul)), torch.rand(4, 4))
    assert current_skip_tracker() is tracker
    assert not tracker.skips


def test_pop_without_a_stash() -> None:
    with pytest.raises(RuntimeError, match="Pop pops 'skip', which no earlier layer has stashed") as raised:
        quick(nn.Sequential(nn.ReLU(), Pop(torch.add)), torch.rand(4))
    assert "while profiling layer '1' (Pop)" in raised.value.__notes__[0]


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


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointed_layer() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))

        def forward(self, input: Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(self.inner, input, use_reentrant=True)

    sample = torch.rand(2, 4, requires_grad=True)
    assert sizes(quick(nn.Sequential(Checkpointed()), sample), "activations") == [32]


def test_empty_model() -> None:
    measured = quick(nn.Sequential(), torch.rand(1))
    assert measured.layers == ()
    assert "total" in str(measured)


def test_not_sequential() -> None:
    with pytest.raises(TypeError, match=r"module must be nn\.Sequential to be partitioned, not Linear"):
        profile(nn.Linear(1, 1), torch.rand(1))  # type: ignore[arg-type]


# -- Faults --


def test_a_failing_layer_is_named() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        quick(module, torch.rand(16, 3))
    assert raised.value.__notes__ == [
        "while profiling layer '1' (Linear) with input (16, 4) float32, from a sample of (16, 3) float32, on cpu"
    ]


# -- Devices, and many rounds --


def test_default_device() -> None:
    module = nn.Sequential(nn.Linear(3, 4))
    measured = profile(module, torch.rand(2, 3), timeout=0)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert torch.device(measured.device).type == (accelerator.type if accelerator else "cpu")


@needs_accelerator
def test_on_a_gpu() -> None:
    module = nn.Sequential(nn.Linear(512, 2048), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(2048, 16)).eval()
    sample = torch.rand(64, 512)
    profile(module, sample, device=KIND, timeout=0)  # cuBLAS allocates a workspace per thread, and keeps it
    backend.manual_seed(0)
    state = backend.get_rng_state()
    held = backend.memory_allocated()
    measured = profile(module, sample, device=KIND, timeout=0.1)

    assert measured.device == DEVICE
    assert all(layer.times.forward > 0 and layer.times.backward > 0 for layer in measured.layers)
    assert torch.equal(backend.get_rng_state(), state)
    assert sum(sizes(measured, "activations")) == kept(module.train().to(DEVICE), sample.to(DEVICE))
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

    module = nn.Sequential(Stash(lambda input: input.repeat(2**20)), Apply(noted), Pop(joined))
    before = backend.memory_allocated()
    measure.profile_sizes(module, torch.rand(8, requires_grad=True), device=KIND)
    assert held[0] < 2**20


def test_many_rounds_agree_on_sizes() -> None:
    made = random.Random(0)
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(made.randint(3, 5))])
    assert sizes(quick(module, torch.rand(4, 8)), "activations") == [128] * len(module)
