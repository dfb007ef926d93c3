"""Models of many kinds are planned for, measured, applied and trained."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.balancing.planning.models import WIDTH, Attention, Residual, mean, mlp, quick
from tests.layers import Apply
from torchgpipe import NoChunk
from torchgpipe.skip import pop, skippable, stash

ROWS = 16


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes its input."""

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Adds what was stashed."""

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip


class Tokens(NamedTuple):
    """A sample of an `Attention`, and what trains it."""

    rows: int

    @property
    def arguments(self) -> dict[str, Tensor]:
        words = torch.randint(11, (self.rows, 5))
        # The mask has as many rows as the sample by chance, and is whole for each micro-batch.
        return {"mask": torch.zeros(5, 5), "words": words, "labels": words.flip(1)}


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


SEQUENTIALS = {
    "skips": (nn.Sequential(linear(), Stash(), linear(), linear(), Pop(), linear()), lambda n: torch.randn(n, WIDTH)),
    "a tuple": (
        nn.Sequential(Apply(lambda pair: pair[0] * pair[1]), linear(), linear(), nn.ReLU()),
        lambda n: (torch.randn(n, WIDTH), torch.randn(n, WIDTH)),
    ),
    "a dict": (
        nn.Sequential(Apply(lambda given: given["a"] - given["b"]), linear(), linear(), nn.ReLU()),
        lambda n: {"a": torch.randn(n, WIDTH), "b": torch.randn(n, 1)},
    ),
    "not split": (
        nn.Sequential(Apply(lambda pair: pair[0] @ pair[1]), linear(), linear(), nn.ReLU()),
        lambda n: (torch.randn(n, WIDTH), NoChunk(torch.randn(WIDTH, WIDTH))),
    ),
}


@pytest.mark.parametrize("meta", [False, True], ids=["cpu", "meta"])
@pytest.mark.parametrize("name", SEQUENTIALS)
def test_a_sequential(name: str, meta: bool) -> None:
    model, sample = SEQUENTIALS[name]
    model = copy.deepcopy(model)
    plan = quick(copy.deepcopy(model).to("meta") if meta else model, sample(4), loss_fn=mean)
    check = plan.check(model, steps=1)
    assert check.predicted_bytes == pytest.approx(check.measured_bytes)
    pipeline = plan.apply(model)
    pipeline.step(sample(ROWS)).item()
    assert gradients(pipeline)


@pytest.mark.parametrize("rows", [4, 5], ids=["", "as many rows as the mask"])
def test_a_module_with_a_mask_tied_embeddings_and_its_own_loss(rows: int) -> None:
    model = Attention()
    plain = copy.deepcopy(model).double()
    plan = quick(model, Tokens(rows).arguments, no_chunk=("mask",))
    assert plan.question.costs.loss == "the model's own"
    model.double()
    pipeline = plan.apply(model)
    assert model.layout.tied == [("embed.weight", "head.weight")]
    arguments = Tokens(ROWS).arguments
    arguments["mask"] = arguments["mask"].double()
    loss = pipeline.step(**arguments)
    whole = plain(**arguments)["loss"]
    whole.backward()
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_a_tied_parameter_counts_in_both_layers_and_in_no_other() -> None:
    layers = quick(Attention(), Tokens(4).arguments, no_chunk=("mask",)).question.costs.layers
    weight = 11 * WIDTH * 4
    assert [layer.parameters for layer in layers] == [weight, *[layers[1].parameters] * 3, weight]


@pytest.mark.parametrize("model", [mlp(), Residual()], ids=["Sequential", "module"])
def test_a_model_on_the_meta_device_is_planned_as_on_the_cpu(model: nn.Module) -> None:
    meta, real = quick(copy.deepcopy(model).to("meta")).question.costs, quick(model).question.costs
    assert (meta.has_times, real.has_times) == (False, True)
    for a, b in zip(meta.layers, real.layers, strict=True):
        assert (a.modules, a.parameters, a.trained, a.buffers) == (b.modules, b.parameters, b.trained, b.buffers)
        for one, other in zip(a.samples, b.samples, strict=True):
            assert (one.kept, one.again, one.input, one.waiting, one.crossing) == (
                other.kept,
                other.again,
                other.input,
                other.waiting,
                other.crossing,
            )


@pytest.mark.parametrize("model", [mlp(), Residual()], ids=["Sequential", "module"])
def test_the_target_of_a_model_on_the_meta_device_may_be_elsewhere(model: nn.Module) -> None:
    target = torch.randn(4, 1)
    assert quick(copy.deepcopy(model).to("meta"), target=target, loss_fn=mean).apply(model)


def test_parameters_that_are_not_trained_have_no_gradients_or_states() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    plan = quick(model, optimizer=torch.optim.AdamW)
    first, second, *_ = plan.question.costs.layers_at(4, 1, plan.question.states)
    assert (first.state, second.state) == (288, 4 * 288)


@pytest.mark.parametrize("model", [mlp(), Residual()], ids=["Sequential", "module"])
def test_options_reach_measurements_and_the_pipeline(model: nn.Module) -> None:
    seen = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append((len(output), tuple(target.shape)))
        return ((output - target) ** 2).mean()

    def weight(target: Tensor) -> Tensor:
        return target.new_tensor(1.0)

    plan = quick(model, target=torch.randn(4, 1), loss_fn=loss_fn, weight=weight)
    assert seen
    assert all(shape == (rows, 1) for rows, shape in seen)
    seen.clear()
    plan.apply(model).step(torch.randn(ROWS, WIDTH), target=torch.randn(ROWS, 1))
    assert seen == [(4, (4, 1))] * 4
