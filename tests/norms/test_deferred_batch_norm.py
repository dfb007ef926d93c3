"""Deferred batch norms normalise micro-batches and track whole mini-batches.

Their outputs equal, to the last bit, those of plain batch norms run micro-batch by micro-batch; their statistics
equal those of plain batch norms run on the whole mini-batch.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.drive.test_threads import in_threads
from tests.layers import Apply, Weighted, With
from tests.plain import assert_same, outcome, plain_outcome
from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm, mini_batch

MODES = ["always", "except_last", "never"]

convert = DeferredBatchNorm.convert_deferred_batch_norm
revert = DeferredBatchNorm.revert_deferred_batch_norm


class Named(nn.BatchNorm1d):
    """A user's subclass with other defaults."""

    def __init__(self, features: int, **options: Any) -> None:
        super().__init__(features, eps=1e-3, **options)


#: A class of batch norms, and the shape of a sample.
KINDS: dict[str, tuple[type[Any], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (3,)),
    "1d, with length": (nn.BatchNorm1d, (3, 4)),
    "2d": (nn.BatchNorm2d, (3, 2, 3)),
    "3d": (nn.BatchNorm3d, (3, 2, 1, 2)),
    "a subclass": (Named, (3,)),
}


def scaling() -> nn.Module:
    """Return a layer with a weight that treats each sample by itself, whatever the shape."""
    return Weighted(lambda x, weight: (x * weight).tanh() + x, ())


def twice(norm: nn.Module) -> nn.Module:
    """Return a layer that runs one norm twice on each input."""
    return With(norm, lambda norm, x: norm(x) + norm(x * x + 5))


#: A layer, made of a norm. Cells sum the gradients of what runs twice in another order, so that one is frozen.
LAYERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "norm": lambda norm: norm,
    "norm inside": lambda norm: nn.Sequential(scaling(), norm, nn.ReLU()),
    "norm that runs twice": lambda norm: twice(norm.requires_grad_(False)),
    "norm in evaluation": lambda norm: norm.eval(),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers far from zero, distributed differently in every channel and sample."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    for dim in (0, 1):
        x = x + 4 * torch.rand(shape[dim], generator=generator).reshape([-1 if k == dim else 1 for k in range(x.ndim)])
    return x.requires_grad_()


def norms(module: nn.Module) -> list[Any]:
    return [norm for norm in module.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)]


def assert_same_statistics(actual: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    assert len(norms(actual)) == len(norms(expected)) > 0
    for a, b in zip(norms(actual), norms(expected)):
        assert torch.equal(a.num_batches_tracked, b.num_batches_tracked)
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(
                getattr(a, name).cpu(), getattr(b, name), **{"rtol": 1e-9, "atol": 1e-9, **tolerance}
            )


def track_whole(module: nn.Sequential, x: Tensor, chunks: int) -> None:
    """Let each norm track the whole mini-batch, as it arrives after earlier norms have normalised micro-batches."""
    with torch.no_grad():
        for layer in module:
            parts = [copy.deepcopy(layer)(part) for part in x.chunk(chunks)]
            layer(x)
            x = torch.cat(parts)


def deferred(
    pipe: Pipe, checkpoint: str, *layers: nn.Module, chunks: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Any, nn.Sequential]:
    """Return a pipeline of a partition for each layer, with deferred batch norms, and the plain layers."""
    module = nn.Sequential(*layers).to(dtype)
    plain, balance = copy.deepcopy(module), [1] * len(layers)
    return pipe(module, balance, chunks=chunks, checkpoint=checkpoint, deferred_batch_norm=True), plain


# The running statistics are those of the whole mini-batch


@given(data=st.data())
def test_like_the_whole_mini_batch(pipe: Pipe, data: st.DataObject) -> None:
    """Each run of a norm is an update, as on the whole mini-batch; a recomputation is none."""
    make, sample = KINDS[data.draw(st.sampled_from(list(KINDS)))]
    chunks = data.draw(st.integers(1, 10))
    batches = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=2))
    if sample == (3,):
        assume(all(len(part) != 1 for batch in batches for part in torch.zeros(batch).chunk(chunks)))
    options = {"momentum": data.draw(st.sampled_from([0.1, 1.0, 0.0, None])), "affine": data.draw(st.booleans())}
    names = data.draw(st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=4))
    mode = data.draw(st.sampled_from(MODES))
    context: Any = data.draw(st.sampled_from([nullcontext, torch.no_grad, torch.inference_mode]))
    model, whole = deferred(pipe, mode, scaling(), *[LAYERS[name](make(3, **options)) for name in names], chunks=chunks)
    parts = copy.deepcopy(whole)
    for k, batch in enumerate(batches):
        x = numbers(batch, *sample, seed=k)
        with context():
            actual, expected = outcome(model, x), plain_outcome(parts, x, chunks=chunks)
        actual.buffers = expected.buffers = {}
        assert_same(actual, expected)
        track_whole(whole, x, chunks)
        assert_same_statistics(model, whole)
    whole.load_state_dict(model.state_dict())
    x = numbers(6, *sample)
    assert_same(outcome(model.eval(), x), plain_outcome(whole.eval(), x, chunks=chunks))


def test_a_layer_that_does_not_always_run(pipe: Pipe, checkpoint: str) -> None:
    x = torch.cat([numbers(2, 3).detach().abs(), -numbers(2, 3).detach().abs(), numbers(2, 3, seed=1).detach().abs()])
    skips = With(nn.BatchNorm1d(3), lambda norm, x: norm(x) if x[0, 0] > 0 else x)
    model, whole = deferred(pipe, checkpoint, skips)
    outcome(model, x)
    whole(x[[0, 1, 4, 5]])
    assert_same_statistics(model, whole)


# A mini-batch is a call of the pipeline


@pytest.mark.parametrize("mode", ["always", "never", ["1"]])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_norm_in_two_partitions_is_refused_and_twice_in_one_is_right(mode: Any, stepped: bool) -> None:
    """Its runs were grouped by every second one, and two partitions run them in another order: variances were 3 times
    too large."""
    norm = nn.BatchNorm1d(3, affine=False)
    layers = nn.Sequential(With(norm, lambda norm, x: norm(x) + 10), With(norm, lambda norm, x: norm(x) * 2)).double()
    x, plain = torch.randn(8, 3, dtype=torch.float64) * torch.arange(1, 9)[:, None], copy.deepcopy(layers)
    first = torch.cat([copy.deepcopy(plain[0])(part) for part in x.chunk(4)])
    plain[0](x)
    plain[1](first)
    options: dict[str, Any] = {"chunks": 4, "deferred_batch_norm": True, "checkpoint": mode}
    options |= {"devices": ["cpu", "cpu"], "loss_fn": lambda output, _: output.mean(), "reduce": "mean"}
    with pytest.raises(ValueError, match=r"partition 1 is '0.module' of partition 0, .* both uses in one partition"):
        GPipe(layers, [1, 1], **options)
    model = GPipe(layers, [2], **options)
    model.step(x) if stepped else model(x)
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_call_that_fails_leaves_nothing(pipe: Pipe, checkpoint: str) -> None:
    """Also one whose outputs cannot be gathered."""
    runs = []

    def fails(x: Tensor) -> Tensor:
        runs.append(len(x))
        if len(runs) == 3:
            raise ValueError("asked to fail")
        return x

    model, whole = deferred(pipe, checkpoint, nn.BatchNorm1d(3), Apply(fails), nn.BatchNorm1d(3), scaling(), chunks=4)
    del whole[3], whole[1]
    model[3].forward = lambda x: x if x[0, 0] > 0 else (x, x)
    for error, message in ((ValueError, "asked to fail"), ((TypeError, ValueError), None)):
        with pytest.raises(error, match=message):
            model(numbers(9, 3))
        assert_same_statistics(model, whole)
    del model[3].forward
    outcome(model, numbers(11, 3))
    track_whole(whole, numbers(11, 3), 4)
    assert_same_statistics(model, whole)


def test_calls_in_several_threads(pipe: Pipe, checkpoint: str) -> None:
    """With an average over all mini-batches, the order in which they are counted does not matter.

    Threads take turns often (`in_threads`), so that two would be in a norm at once without its lock.
    """
    model, whole = deferred(pipe, checkpoint, nn.BatchNorm1d(3, momentum=None), scaling(), nn.Identity())
    inputs = [numbers(6 + 2 * (k % 2), 3, seed=k) for k in range(24)]

    def train(of_thread: list[Tensor]) -> None:
        for x in of_thread:
            model(x).sum().backward()

    in_threads(*[partial(train, inputs[k::4]) for k in range(4)])
    for x in inputs:
        whole(x)
    assert_same_statistics(model, whole)


def test_a_pipeline_inside_a_pipeline(pipe: Pipe, checkpoint: str) -> None:
    """The mini-batch is that of the outer pipeline."""
    inner = nn.Sequential(scaling(), nn.BatchNorm1d(3), twice(nn.BatchNorm1d(3)))
    whole = copy.deepcopy(nn.Sequential(*inner)).double()
    nested = pipe(inner, [1, 2], chunks=2, checkpoint=checkpoint, deferred_batch_norm=True)
    model = pipe(nn.Sequential(nn.Identity(), nested), [1, 1], chunks=3, checkpoint=checkpoint).double()
    x = numbers(12, 3)
    outcome(model, x)
    # The second norm of the inner pipeline sees six micro-batches, normalised by the first norm.
    track_whole(whole, x, 6)
    assert_same_statistics(model, whole)


# Without a pipeline


@pytest.mark.parametrize("momentum", [0.1, None])
def test_after_as_many_runs_as_chunks(momentum: float | None) -> None:
    whole = nn.BatchNorm2d(3, momentum=momentum).double()
    ours = convert(copy.deepcopy(whole), chunks=4)
    for sizes in [(2, 2, 2, 2), (3, 2, 2, 2), (0, 5, 0, 5), (1, 7, 1, 0)]:
        x, before = numbers(sum(sizes), 3, 2, 2), copy.deepcopy(whole)
        for part in x.split(list(sizes)):
            assert_same_statistics(ours, before)
            assert torch.equal(ours(part), copy.deepcopy(whole)(part))
        whole(x)
        assert_same_statistics(ours, whole)


def test_mini_batch() -> None:
    whole = nn.BatchNorm1d(3).double()
    norm, x = convert(copy.deepcopy(whole), chunks=100), numbers(9, 3)
    with mini_batch(4):
        for part in x.chunk(4):
            norm(part).sum().backward()
    whole(x)
    assert_same_statistics(norm, whole)
    with pytest.raises(KeyError), mini_batch(4):
        norm(x)
        raise KeyError
    assert_same_statistics(norm, whole)
    with pytest.raises(ValueError, match="must be 1 or more, not 0"), mini_batch(0):
        pass


@pytest.mark.parametrize("forget", [
    lambda norm: norm.reset_running_stats(),
    lambda norm: norm.load_state_dict(nn.BatchNorm1d(3).state_dict()),
])  # fmt: skip
def test_unfinished_mini_batches_are_forgotten(forget: Callable[[nn.Module], object]) -> None:
    whole = nn.BatchNorm1d(3).double()
    ours = convert(copy.deepcopy(whole), chunks=2)
    x = numbers(8, 3)
    ours(x * 7)
    forget(ours)
    for part in x.chunk(2):
        ours(part)
    whole(x)
    assert_same_statistics(ours, whole)


# Numbers


@pytest.mark.parametrize(
    ("dtype", "weights", "mean", "tolerance"),
    [
        (torch.float32, torch.float32, 10_000, 1e-3),
        (torch.float16, torch.float16, 30, 1e-3),
        (torch.float16, torch.float32, 30, 1e-5),
        (torch.bfloat16, torch.bfloat16, 30, 1e-2),
        (torch.bfloat16, torch.float32, 30, 1e-5),
    ],
)
def test_far_from_zero(dtype: torch.dtype, weights: torch.dtype, mean: float, tolerance: float) -> None:
    """Low precision is accumulated in float32, and what is far from zero does not lose its variance.

    The sum of squares would lose all digits of the variance in float32, where the mean is 10,000 times the deviation. A
    mean of 30 in bfloat16 may be wrong by 0.06, so rounded means cannot give a variance of 0.01.
    """
    x = (
        torch.randn(64, 3, 8, generator=torch.Generator().manual_seed(1)) * 0.1
        + torch.linspace(-1, 1, 64)[:, None, None]
    )
    x = (x + mean).to(dtype)
    norm: Any = nn.BatchNorm1d(3, momentum=1.0).to(weights)
    plain = copy.deepcopy(norm)
    model = GPipe(nn.Sequential(norm), [1], devices=["cpu"], chunks=16, deferred_batch_norm=True)
    assert torch.equal(model(x), torch.cat([plain(part) for part in x.chunk(16)]))
    var, mean_of_all = torch.var_mean(x.double(), (0, 2))
    torch.testing.assert_close(norm.running_mean.double(), mean_of_all, rtol=tolerance, atol=0)
    torch.testing.assert_close(norm.running_var.double(), var, rtol=tolerance, atol=0)


# Conversion


def test_converts_batch_norms() -> None:
    for kind, _ in KINDS.values():
        norm = kind(3, momentum=0.3).eval().double()
        norm.note = "mine"
        ours = convert(norm, chunks=4)
        assert (type(ours), type(revert(ours))) == (DeferredBatchNorm, kind)
        assert (ours.eps, ours.momentum, ours.note) == (norm.eps, 0.3, "mine")
        assert (ours.chunks, ours.training) == (4, False)
        assert list(ours.state_dict()) == list(norm.state_dict())
        with pytest.raises(ValueError, match="D input"):
            ours(torch.zeros(8, 3, 1, 1, 1, 1))


def test_modules_that_are_not_converted() -> None:
    for layer in [
        nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.SyncBatchNorm(3),
        nn.InstanceNorm2d(3, track_running_stats=True),
        nn.LazyBatchNorm2d(),
    ]:
        assert convert(layer, chunks=4) is layer
        around = nn.Sequential(nn.Sequential(layer), nn.BatchNorm2d(3))
        assert convert(around, chunks=4)[0] is around[0]
    lazy = nn.LazyBatchNorm1d()
    lazy(torch.randn(4, 3))
    assert isinstance(convert(lazy), DeferredBatchNorm), "it is not lazy any more"


def test_converts_once() -> None:
    for norm in [DeferredBatchNorm(3, chunks=4), convert(nn.BatchNorm2d(3), 4)]:
        assert convert(norm, chunks=4) is norm
        other = convert(norm, chunks=5)
        assert other is not norm and (norm.chunks, other.chunks) == (4, 5)
        assert type(other) is type(norm) and other.weight is norm.weight
        assert other._unfinished is not norm._unfinished
    model = nn.Sequential(convert(nn.BatchNorm2d(3), 4))
    assert convert(model, 4) is model


def test_the_callers_module_is_not_changed_and_shares_all_state(pipe: Pipe) -> None:
    module = nn.Sequential(nn.Sequential(scaling(), nn.BatchNorm1d(3)), nn.ModuleDict({"a": nn.BatchNorm1d(3)})["a"])
    before = {name: (layer, type(layer), dict(vars(layer))) for name, layer in module.named_modules()}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    model = pipe(module, [1, 1], chunks=2, deferred_batch_norm=True)
    for name, layer in module.named_modules():
        assert (layer, type(layer), vars(layer)) == before[name]
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(own) == list(tensors) and all(own[name] is tensor for name, tensor in tensors.items())
    assert model[0][0] is module[0][0]  # type: ignore[index]

    # Training, tracking, casting and hooks change the caller's module as well.
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hook = module[1].register_forward_hook(lambda layer, *_: calls.append(layer))
    calls: list[nn.Module] = []
    for _ in range(2):
        model(numbers(6, 3)).square().sum().backward()
        hook.remove()
    optimizer.step()
    assert calls == [model[1]] * 3, "two micro-batches, and the recomputation of one"
    torch.testing.assert_close(dict(module.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert module[1].weight.grad is not None and module[1].num_batches_tracked == 2
    assert module[1].weight.dtype == torch.float64


def test_a_norm_in_two_places_stays_one() -> None:
    norm, block = nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3))
    module = nn.ModuleList([nn.Sequential(norm, block), nn.ModuleList([block, norm])])
    module.register_module("nothing", None)
    converted: Any = convert(module)
    assert converted[0][0] is converted[1][1] is not norm
    assert converted[0][1] is converted[1][0] is not block
    assert isinstance(converted[0][0], DeferredBatchNorm) and converted.nothing is None


def test_a_compiled_module_is_not_called_in_place_of_the_converted_one() -> None:
    """What torch.compile has returned once called the old norm.

    The old norm tracked micro-batches, and the statistics of the new norm stayed as they were.
    """
    module = nn.Sequential(nn.BatchNorm1d(3).double())
    module.compile(backend="eager")
    converted = convert(module, 2)
    converted(numbers(6, 3))
    assert converted[0].num_batches_tracked == 0
    module = nn.Sequential(nn.Linear(3, 3), torch.compile(nn.Sequential(nn.BatchNorm1d(3)), backend="eager"))
    with pytest.raises(ValueError, match=r"torch\.compile.*in place and afterwards"):
        GPipe(module, [2], chunks=2, deferred_batch_norm=True)


# Classes


def test_a_forward_of_its_own_is_refused() -> None:
    """Operations of such a forward, around the normalisation or instead of it, would be lost."""

    class Scaled(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 1) * 3

    patched = nn.BatchNorm1d(3)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    for norm in (Scaled(3), patched):
        with pytest.raises(TypeError, match=rf"{type(norm).__name__} has one; derive .*DeferredBatchNorm"):
            GPipe(nn.Sequential(nn.Sequential(norm)), [1], chunks=2, deferred_batch_norm=True)
    untracked = Scaled(3, track_running_stats=False)
    assert convert(untracked) is untracked


def test_a_subclass_of_ours() -> None:
    class Mine(DeferredBatchNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    x = numbers(6, 3)
    for norm in (nn.BatchNorm1d(3), Named(3)):
        mine = Mine.convert_deferred_batch_norm(norm.double(), chunks=2)
        assert type(mine) is Mine and convert(mine, 2) is mine and type(convert(mine, 3)) is Mine
        assert torch.equal(mine(x), convert(norm)(x) + 1)
        assert type(Mine.revert_deferred_batch_norm(mine)) is type(norm)
    assert type(Mine.convert_deferred_batch_norm(DeferredBatchNorm(3), 2)) is DeferredBatchNorm


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, _pickled])
@pytest.mark.parametrize(
    "make",
    [lambda: convert(nn.BatchNorm1d(3), 2), lambda: convert(Named(3), 2), lambda: DeferredBatchNorm(3, chunks=2)],
)
def test_copies(make: Callable[[], nn.Module], duplicate: Callable[[Any], Any]) -> None:
    """Also in the middle of a mini-batch."""
    norm, x = make().double(), numbers(6, 3)
    norm(x[:3])
    other = duplicate(norm)
    assert type(other) is type(norm) and repr(other) == repr(norm)
    assert type(revert(other)) is type(revert(norm))
    if duplicate is not copy.copy:
        norm(x[3:])
        other(x[3:])
        assert other.num_batches_tracked == 1
        assert_same_statistics(other, norm)


# What is stored


@pytest.mark.parametrize("prefix", ["", "partitions.1."])
def test_state_dicts_of_the_original_load(pipe: Pipe, prefix: str) -> None:
    model = pipe(nn.Sequential(nn.Identity(), nn.BatchNorm1d(3)), [1, 1], deferred_batch_norm=True)
    state = {prefix + "1." + name: tensor + 1 for name, tensor in nn.BatchNorm1d(3).state_dict().items()}
    extra = {prefix + "1." + name: torch.ones(3) for name in ("sum", "sum_squares", "tracked", "counter")}
    given = {**state, **extra}
    model.load_state_dict(given)
    for name, tensor in state.items():
        assert torch.equal(model.state_dict()[name.removeprefix("partitions.1.")], tensor)
    assert given.keys() == {*state, *extra}  # the caller's dict
    with pytest.raises(RuntimeError, match="another"):
        model.load_state_dict({**given, prefix + "1.another": torch.ones(3)})


def test_nothing_is_kept_after_a_call(pipe: Pipe, checkpoint: str) -> None:
    """The graph holds the call's context for recomputations, but not the moments of the call.

    A micro-batch that is not checkpointed saves its own moments for backward.
    """
    model, _ = deferred(pipe, checkpoint, scaling(), nn.BatchNorm1d(37), nn.Identity(), chunks=2)

    def alive() -> int:
        grads = {id(parameter.grad) for parameter in model.parameters()}
        kinds = (Tensor, nn.Parameter)
        return sum(type(x) in kinds and x.shape == (37,) and id(x) not in grads for x in gc.get_objects())

    before = alive()
    loss = model(numbers(6, 37)).sum()
    assert alive() == before + {"always": 0, "except_last": 2, "never": 4}[checkpoint]
    loss.backward()
    assert alive() == before
