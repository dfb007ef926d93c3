"""torch.compile on the layers, on the partitions and around the pipeline, which is told nothing of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.conftest import Pipe
from tests.layers import Using
from tests.plain import assert_same, outcome, plain_outcome, run_plain
from tests.skip.layers import pair
from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.replay.phase import enter_phase

# torch.compile looks at every input's `.grad` and hides the warning about it, unless warnings are errors.
pytestmark = [pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"), pytest.mark.slow]

# Compiling takes seconds, and is harder in threads.
workers = pytest.mark.parametrize("variant", ["workers"], indirect=True)


class Graphs:
    """A backend that counts what it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward  # as backend="eager" does


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=32):  # Layers share one function, compiled for each mode and size.
        yield
    torch.compiler.reset()


def block(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + linear(functional.layer_norm(x, (4,))).tanh()


def blocks(n: int) -> nn.Sequential:
    return nn.Sequential(*[Using(block) for _ in range(n)]).double()


def data(batch: int) -> Tensor:
    return torch.randn(batch, 4, dtype=torch.float64)


# What is compiled


Way = Callable[..., tuple[GPipe, Callable[[Tensor], Tensor]]]


def layers_before(wrap: Callable[..., GPipe], layers: nn.Sequential, **options: Any) -> Any:
    model = wrap(nn.Sequential(*[torch.compile(layer, **options) for layer in layers]))
    return model, model


def layers_after(wrap: Callable[..., GPipe], layers: nn.Sequential, **options: Any) -> Any:
    model = wrap(layers)
    for layer in model:
        layer.compile(**options)
    return model, model


def partitions(wrap: Callable[..., GPipe], layers: nn.Sequential, **options: Any) -> Any:
    model = wrap(layers)
    model.compile(**options)
    return model, model


def around(wrap: Callable[..., GPipe], layers: nn.Sequential, **options: Any) -> Any:
    model = wrap(layers)
    return model, torch.compile(model, **options)


@pytest.mark.parametrize(
    "variant, way, options",
    [
        ("workers", layers_before, {}),
        ("workers", layers_after, {}),
        ("inline", partitions, {}),
        ("workers", partitions, {"backend": "aot_eager", "fullgraph": True}),  # graphs of autograd, too
        ("inline", around, {}),
    ],
    indirect=["variant"],
)
def test_numbers_are_those_of_the_plain_model(pipe: Pipe, way: Way, options: dict[str, Any]) -> None:
    module, options = blocks(3), {"backend": "eager", **options}
    wrap = partial(pipe, balance=[2, 1], chunks=2)  # one is checkpointed, and one is not
    model, run = way(wrap, copy.deepcopy(module), **options)
    for batch in [4, 3]:
        x = data(batch).requires_grad_()
        actual = outcome(model, x, run=run)
        # torch.compile() puts a module around the layer, and so a part into the names.
        actual.param_grads = {name.replace("._orig_mod", ""): grad for name, grad in actual.param_grads.items()}
        assert_same(actual, plain_outcome(module, x, chunks=2))
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert torch.equal(run(x), run_plain(module, x, chunks=2))


@workers
@pytest.mark.parametrize("schedule", ["1F1B", "ZeroBubble"])
def test_a_step_of_compiled_partitions(pipe: Pipe, schedule: str) -> None:
    module, (x, y) = blocks(2), (data(4), data(4))
    options: dict[str, Any] = {"schedule": schedule, "checkpoint": "never", "loss_fn": functional.mse_loss}
    model = pipe(copy.deepcopy(module), [1, 1], chunks=2, **options)
    model.compile(backend="eager")
    for _ in range(2):
        model.zero_grad()
        module.zero_grad()
        expected = [functional.mse_loss(module(part), target) / 2 for part, target in zip(x.chunk(2), y.chunk(2))]
        for loss in expected:
            loss.backward()
        assert torch.equal(model.step(x, y), torch.stack(expected).detach().sum())
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None and torch.equal(model.get_parameter(name).grad, parameter.grad)


# What layers may do in a pipeline, they may do compiled


def factor() -> int:
    """Tell which run it is: recomputation, or the forward of a cell that is checkpointed or not."""
    return 2 if is_recomputing() else 3 if is_checkpointing() else 5


def scaled(linear: nn.Module, x: Tensor) -> Tensor:
    """Scale the gradient only, because both runs have to return the same."""
    y: Tensor = linear(x)
    return y + (y - y.detach()) * factor()


def with_skip() -> list[nn.Module]:
    stash, pop = pair()
    return [stash, nn.Linear(4, 4), pop]


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "skips": with_skip,
    "deferred batch norm": lambda: [nn.Linear(4, 4), DeferredBatchNorm(4, chunks=3), nn.Linear(4, 4)],
    "dropout": lambda: [nn.Dropout(), nn.Linear(4, 4), nn.Dropout()],
    "in place": lambda: [nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True)],
    "phase": lambda: [Using(scaled) for _ in range(3)],
}


@workers
@pytest.mark.parametrize("name", LAYERS)
def test_layers_do_what_they_do_uncompiled(pipe: Pipe, name: str) -> None:
    module = nn.Sequential(*LAYERS[name]()).double()
    outcomes = []
    for compiled in [True, False]:
        model = pipe(copy.deepcopy(module), [1, 1, 1], chunks=3)  # two are checkpointed, and one is not
        if compiled:
            model.compile(backend="eager")
        torch.manual_seed(1)
        outcomes += [[outcome(model, data(6).requires_grad_()) for _ in range(2)]]
    for actual, expected in zip(*outcomes):
        assert_same(actual, expected)


def test_a_compiled_layer_asks_for_its_phase_at_every_run() -> None:
    """It kept the phase of its first run for ever, if no pipeline had run in that thread before."""

    @torch.compile(backend="eager", fullgraph=True)
    def layer(x: Tensor) -> Tensor:
        return x * factor()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(layer, torch.ones(())).result() == 5
    for phase, expected in [((False, True), 2), ((True, False), 3), ((False, False), 5)]:
        with enter_phase(phase):
            assert layer(torch.ones(())) == expected


# How often


@workers
@pytest.mark.parametrize("checkpoint", ["except_last", "never"])
def test_nothing_is_compiled_again_for_a_mini_batch_of_the_same_size(pipe: Pipe, checkpoint: str) -> None:
    """Each partition is compiled twice: without a graph for what is checkpointed, and with one.

    The last mini-batch of an epoch is smaller, and not always as small: after the first, graphs take any size.
    """
    model, graphs = pipe(blocks(3), [2, 1], chunks=2, checkpoint=checkpoint), Graphs()
    model.compile(backend=graphs)
    counts = []
    for batch in [8, 8, 6, 7, 5]:
        model(data(batch)).sum().backward()
        counts.append(graphs.count)
    assert counts[0] == counts[1] == (2 if checkpoint == "never" else 4)
    assert len(set(counts[2:])) == 1


@workers
def test_code_around_a_pipeline_is_compiled_again_for_no_more_than_a_dynamic_size(pipe: Pipe) -> None:
    model, graphs = pipe(blocks(2), [1, 1], chunks=2), Graphs()
    compiled = torch.compile(lambda x: model(x * 2).square().mean() + 1, backend=graphs)
    counts = []
    for batch in [8, 6, 7, 5]:
        compiled(data(batch)).backward()
        counts.append(graphs.count)
    assert counts[0] == 2  # what is before the pipeline, and what is behind it
    assert len(set(counts[1:])) == 1


@workers
@pytest.mark.skipif(torch.__version__ < "2.13", reason="all partitions share one limit")
def test_many_partitions_are_all_compiled(pipe: Pipe) -> None:
    """The compiler gives up after eight graphs of one piece of code, and all partitions had the same."""
    model, graphs = pipe(blocks(5), [1] * 5, chunks=2, checkpoint="always"), Graphs()
    model.compile(backend=graphs, fullgraph=True)  # which makes an error of giving up
    model(data(4)).sum().backward()
    assert graphs.count == 10


@workers
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_dropout_of_decomposed_graphs_draws_the_same_again(pipe: Pipe) -> None:
    """The graphs of the two runs differ: one is for inference. This is what the default backend makes kernels of."""
    model = pipe(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), [1, 1], chunks=2, checkpoint="always")
    model.compile(backend="aot_eager_decomp_partition")
    y = model(torch.rand(4, 4))
    (gradient,) = torch.autograd.grad(y.sum(), model[0].bias)
    assert torch.equal(gradient, 2.0 * (y != 0).sum(0))
