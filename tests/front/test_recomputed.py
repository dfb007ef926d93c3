"""Modules that a pipelined model recomputes: the second run does what the first run did, and leaves no trace."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.front.models import TWO, Chain, chain, gradients
from tests.layers import Using
from tests.plain import assert_equal
from tests.replay.test_own_checkpoints import own
from torchgpipe import is_checkpointing, is_recomputing, pipelined

Context = Callable[[], AbstractContextManager[Any]]

X = torch.randn(6, 4, dtype=torch.float64)


def layers() -> list[nn.Module]:
    """Return layers that keep books on their runs."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.utils.spectral_norm(nn.Linear(4, 4)),
        nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4), nn.Dropout(0.2)),
    ]


def mean(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def trained(model: Any, run: str, x: Tensor = X, within: Context = nullcontext) -> dict[str, Any]:
    """Train once, and return everything that this leaves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with within():
        loss = model.step(x) if run == "step" else mean(model(x))
    drawn = torch.rand(3) if run == "backward" else None  # as a loop draws that loads a batch here
    if run == "backward":
        loss.backward()
    optimizer.step()
    left = {f"gradient of {name}": grad for name, grad in gradients(model).items()}
    left |= {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return {**left, "loss": loss.detach(), "drawn": drawn, "drawn next": torch.rand(3)}


def assert_recomputes_the_same(
    make: Callable[[], nn.Module], *modes: Any, x: Tensor = X, within: Context = nullcontext, **options: Any
) -> None:
    """Assert that a model leaves the same with and without recomputation, and so do generators of its layers."""
    results = []
    options = {"devices": TWO, "loss_fn": lambda y, _: mean(y), **options}
    for mode in ("never", "always", *modes):
        torch.manual_seed(0)
        model: Any = make().to(x.dtype)
        pipelined(model, x[:2], chunks=3, checkpoint=mode, **options)
        torch.manual_seed(3)
        results.append([trained(model, run, x, within) for run in ("step", "backward", "step")])
        generators = [layer.generator.get_state() for layer in model.layers if hasattr(layer, "generator")]
        results[-1].append(dict(enumerate(generators)))
    for other in results[1:]:
        for one, expected in zip(other, results[0]):
            assert_equal(one, expected)


@pytest.mark.parametrize(
    ("schedule", "devices"), [("ZeroBubble", ["cpu"]), ("GPipe", TWO), ("1F1B", ["cpu:0", "cpu:1", "cpu:2"])]
)
def test_recomputation_changes_nothing(schedule: Any, devices: list[str]) -> None:
    """Batch norms counted twice, spectral norms improved twice, and generators were left where others had them."""
    some = ["layers.1", "layers.2", "layers.4"]
    assert_recomputes_the_same(lambda: Chain(*layers()), some, devices=devices, schedule=schedule)


def two(first: nn.Module, **options: Any) -> Any:
    """Pipeline a module and a Linear on two devices; all is recomputed."""
    return pipelined(
        Chain(first, nn.Linear(4, 4)).double(), X[:2], chunks=3, devices=TWO, **{"checkpoint": True, **options}
    )


def test_a_layer_can_ask_which_run_it_is_in_and_has_what_the_caller_set() -> None:
    def asks(linear: nn.Linear, x: Tensor) -> Tensor:
        phases.append((is_checkpointing(), is_recomputing()))
        settings.append((setting.get(), torch.is_autocast_enabled("cpu")))
        return linear(x)

    phases: list[tuple[bool, bool]] = []
    settings: list[Any] = []
    setting: ContextVar[str] = ContextVar("setting", default="none")
    model = two(Using(asks)).float()
    phases.clear()
    settings.clear()
    token = setting.set("mine")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(X.float()).sum()
    setting.reset(token)
    loss.backward()
    assert phases == 3 * [(True, False)] + 3 * [(False, True)]
    assert settings == 6 * [("mine", True)]
    phases.clear()
    with torch.no_grad():
        model(X.float())
    model.eval()(X.float()).sum().backward()
    assert phases == 6 * [(False, False)]


class Container(nn.Module):
    """Takes and returns containers, and adds to a list of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, state: dict[str, Any], *, seen: list[Tensor]) -> dict[str, Any]:
        seen.append(self.linear(self.norm(state["x"]) * (1 + len(seen))))
        return {"x": torch.stack(seen).sum(0), "past": (state["x"], *state["past"])}


class Containers(Chain):
    def forward(self, x: Tensor) -> Any:
        state: dict[str, Any] = {"x": x, "past": ()}
        for half in (self.layers[:2], self.layers[2:]):
            seen: list[Tensor] = []
            for layer in (*half, half[1]):  # One is called twice.
                state = layer(state, seen=seen)
        return state["x"] + sum(state["past"])


def test_containers_are_those_of_the_first_run() -> None:
    """A list or a cache that a module adds to had the additions of the first run already."""
    assert_recomputes_the_same(lambda: Containers(*[Container() for _ in range(4)]), balance={"layers.2": 1})


def test_a_graph_that_is_kept_is_recomputed_again() -> None:
    model = two(parametrizations.spectral_norm(nn.Linear(4, 4)))
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward(retain_graph=True)
    loss.backward()
    for name, both in gradients(model).items():
        assert torch.equal(2 * once[name], both), name  # type: ignore[operator, arg-type]


@pytest.mark.usefixtures("no_collection")
def test_activations_are_not_kept() -> None:
    def keeps(linear: nn.Linear, x: Tensor) -> Tensor:
        y = linear(x).exp()
        held.append(weakref.ref(y))
        return linear(y.sin())

    held: list[weakref.ref[Tensor]] = []
    model = two(nn.Sequential(Using(keeps), nn.BatchNorm1d(4)))
    held.clear()
    loss = model(X).sum()
    assert [one() for one in held] == 3 * [None]
    loss.backward()
    assert [one() for one in held] == 6 * [None]


def noting(events: list[str]) -> nn.Module:
    """Return layers of which the first two note their second runs, and the third when its gradient arrives."""

    def second_run(name: str) -> nn.Module:
        def noted(linear: nn.Linear, x: Tensor) -> Tensor:
            if is_recomputing():
                events.append(name)
            y: Tensor = linear(x).sin()
            return y

        return Using(noted)

    def gradient(linear: nn.Linear, x: Tensor) -> Tensor:
        y: Tensor = linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: events.append("gradient"))
        return y

    return Chain(second_run("first"), second_run("second"), Using(gradient), nn.Linear(4, 4)).double()


@pytest.mark.parametrize("run", ["step", "backward"])
def test_the_module_that_backward_begins_with_runs_again_before_the_gradient_is_there(run: str) -> None:
    """A device that waited for a gradient recomputed afterwards. All modules at once would take more memory."""
    events: list[str] = []
    options: Any = {"balance": {"layers.3": 1}, "checkpoint": ["layers.0", "layers.1"], "loss_fn": lambda y, _: mean(y)}
    model = pipelined(noting(events), X[:2], chunks=3, devices=TWO, **options)
    events.clear()
    trained(model, run)
    assert events == 3 * ["second", "gradient", "first"]


class Noise(nn.Linear):
    generator: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype))


def test_a_generator_of_a_layer_draws_the_same_again() -> None:
    def make() -> nn.Module:
        layer = Noise(4, 4)
        layer.generator = torch.Generator().manual_seed(1)
        return Chain(layer, nn.Linear(4, 4))

    assert_recomputes_the_same(make)


def step_between(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def replace(model: Any) -> None:
    model.layers[0].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("change", [step_between, replace, nn.Module.eval])
def test_layers_that_are_changed_between_the_runs_are_refused(change: Callable[[Any], Any]) -> None:
    model = two(nn.Linear(4, 4))
    loss = model(X).sum()
    change(model)
    with pytest.raises(RuntimeError, match="is not what it was at forward"):
        loss.backward()


def test_a_module_that_changes_its_input_is_refused() -> None:
    doubles = Using(lambda linear, x: linear(x.mul_(2)))
    model = chain(lambda self, x: Chain.forward(self, x + 1), doubles, nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"'layers.0' changes its input in place"):
        pipelined(model.double(), X[:2], chunks=3, devices=TWO, checkpoint=True)


def test_a_module_that_differentiates_is_refused() -> None:
    def force(linear: nn.Linear, x: Tensor) -> Tensor:
        with torch.enable_grad():
            energy = linear(x.detach().requires_grad_()).square().sum()
        return x - torch.autograd.grad(energy, [linear.weight], create_graph=True)[0].sum()

    with pytest.raises(RuntimeError, match=r"'layers.0' differentiates in its forward"):
        two(Using(force), verify=False)(X)


def test_weights_that_autocast_casts_are_those_of_the_first_run() -> None:
    assert_recomputes_the_same(Chain, x=X.float(), within=lambda: torch.autocast("cpu", torch.bfloat16))


def test_cached_weights_are_right_or_refused() -> None:
    """Threads share the cache, and one that clears it makes another compute a weight in one run only."""

    def make() -> nn.Module:
        return Chain(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))

    assert_recomputes_the_same(make, devices=["cpu"], within=parametrize.cached)
    model: Any = pipelined(make().double(), X[:2], chunks=3, devices=TWO, checkpoint=True, verify=False)
    with parametrize.cached(), pytest.raises(RuntimeError, match=r"leave out cached\(\) or checkpoint"):
        model(X)


# ------------------------------------------------------------------------------------- checkpoints of the model's own


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("run", "reentrant"), [("backward", True), ("step", False)])
def test_two_checkpoints_of_the_models_own_at_once(reentrant: bool, run: str) -> None:
    """Each sets the generator of the process back and forth.

    One left it where the other had set it, so a loop drew the same numbers in every mini-batch.
    """
    results = []
    for mode, devices in ((None, ["cpu"]), (reentrant, TWO)):
        torch.manual_seed(0)
        model: Any = Chain(*[own(0.5, mode) for _ in range(4)]).double()
        pipelined(model, X[:2], chunks=6, devices=devices, loss_fn=lambda y, _: mean(y))
        torch.manual_seed(3)
        x = X.clone().requires_grad_()  # for reentrant checkpoints
        results.append([trained(model, run, x) for _ in range(6)])
    for one, expected in zip(results[1], results[0]):
        assert_equal(one, expected)


def test_what_hooks_draw_at_backward_stays_drawn() -> None:
    noises = []
    model = two(nn.Linear(4, 4))
    model.layers[0].weight.register_hook(lambda grad: noises.append(torch.rand(3)))
    for _ in range(2):
        model(X).sum().backward()
    assert not torch.equal(*noises)


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.7 * x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_function_runs_again() -> None:
    """PyTorch's checkpoint stops a second run by an error, in place of which TorchScript raised one of its own."""
    scripted = torch.jit.script(swish)
    results = []
    for mode in ("never", "always"):
        torch.manual_seed(0)
        model = two(Using(lambda linear, x: scripted(linear(x))), checkpoint=mode)
        for _ in range(4):  # The first runs are compared, and do not stop.
            model(X).sum().backward()
        results.append(gradients(model))
    assert_equal(*results)


def test_other_tensors_that_are_saved_in_the_second_run() -> None:
    """PyTorch's error said nothing of what to do."""
    seen: list[Tensor] = []

    def more(linear: nn.Linear, x: Tensor) -> Tensor:
        y: Tensor = linear(x)
        for scale in seen:
            y = y * scale
        seen.append(y.detach().mean())
        return y

    model = two(Using(more), verify=False, schedule="1F1B", loss_fn=lambda y, _: mean(y))
    seen.clear()
    with pytest.raises(RuntimeError, match=r"'layers\.0' has not computed .*\(other tensors are saved .* leave it out"):
        model.step(X)
