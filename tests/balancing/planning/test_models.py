"""Models of many kinds are planned for, measured, applied and trained."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.balancing.planning.models import WIDTH, Attention, Residual, mean, mlp, quick, wide
from tests.balancing.planning.peaks import activation_peaks
from tests.layers import Apply
from tests.skip.layers import Pop, Stash
from torchgpipe import NoChunk

ROWS = 16


def arguments(rows: int) -> dict[str, Tensor]:
    """Return a sample of an `Attention`, and what trains it."""
    words = torch.randint(11, (rows, 5))
    # The mask has as many rows as the sample by chance, and is whole for each micro-batch.
    return {"mask": torch.zeros(5, 5), "words": words, "labels": words.flip(1)}


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


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
    predicted, held = activation_peaks(plan, model)
    assert predicted == pytest.approx(held)
    pipeline = plan.apply(model)
    pipeline.step(sample(ROWS)).item()
    assert len(gradients(pipeline)) == len(list(pipeline.parameters()))


@pytest.mark.parametrize("rows", [4, 5], ids=["", "as many rows as the mask"])
def test_a_module_with_a_mask_tied_embeddings_and_its_own_loss(rows: int) -> None:
    model = Attention()
    plain = copy.deepcopy(model).double()
    plan = quick(model, arguments(rows), no_chunk=("mask",))
    assert plan.input.costs.loss == "the model's own"
    model.double()
    pipeline = plan.apply(model)
    assert model.layout.tied == [("embed.weight", "head.weight")]
    given = arguments(ROWS)
    given["mask"] = given["mask"].double()
    loss = pipeline.step(**given)
    whole = plain(**given)["loss"]
    whole.backward()
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_a_tied_parameter_counts_in_both_layers_and_in_no_other() -> None:
    layers = quick(Attention(), arguments(4), no_chunk=("mask",)).input.costs.layers
    weight = 11 * WIDTH * 4
    assert [layer.parameters for layer in layers] == [weight, *[layers[1].parameters] * 3, weight]


@pytest.mark.parametrize("model", [mlp(), wide(), Residual()], ids=["mlp", "wide", "module"])
def test_a_model_on_the_meta_device_is_planned_as_on_the_cpu(model: nn.Module) -> None:
    """Its target may be elsewhere."""
    options = {"target": torch.randn(4, 1), "loss_fn": mean}
    meta, real = (
        quick(copy.deepcopy(model).to("meta"), **options).input.costs,
        quick(model, **options).input.costs,
    )
    assert (meta.has_times, real.has_times) == (False, True)
    times = dict.fromkeys(("forward", "backward", "inputs", "weights"), 0.0)
    for a, b in zip(meta.layers, real.layers, strict=True):
        alike = [replace(one, samples=tuple(replace(own, **times) for own in one.samples)) for one in (a, b)]
        assert alike[0] == alike[1]


def test_parameters_that_are_not_trained_have_no_gradients_or_states() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    plan = quick(model, optimizer=torch.optim.AdamW)
    first, second, *_ = plan.input.costs.layers_at(4, plan.input.states)
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
