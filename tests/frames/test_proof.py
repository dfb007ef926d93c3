"""A pipelined model proves itself on its sample: what is compared, what is let through, what stays behind: nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.frames.models import TWO, Chain
from torchgpipe import pipelined


class Net(nn.Module):
    """Four blocks with dropout and batch norm, and a loss that balances rows, as experts do."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"out": x, "balance": x.softmax(1).mean(0).square().sum()}


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in np.random.get_state()]]


def test_nothing_stays_behind() -> None:
    model: Any = Net()
    model.blocks[2].eval()
    counts: dict[str, int] = {}

    def counting(what: str) -> Callable[..., None]:
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1
            counts[what] = calls

        return count

    for parameter in model.parameters():
        parameter.register_hook(counting("gradient"))
        parameter.register_post_accumulate_grad_hook(counting("accumulated"))
    model.blocks[1].register_forward_hook(counting("forward"))
    model.blocks[0][0].weight.grad = torch.ones(4, 4)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters, modes, before = dict(model.named_parameters()), [one.training for one in model.modules()], states()
    with pytest.warns(UserWarning, match=r"\['balance'\] differ between rows together and rows apart"):
        pipelined(model, torch.randn(3, 4), chunks=2, devices=TWO, balance="parameters", verify=["balance"])
    after = states()
    torch.randn(3, 4)
    assert after[1:] == before[1:]
    assert [one.training for one in model.modules()] == modes
    assert all([parameters[name] is parameter for name, parameter in model.named_parameters()])
    assert all([torch.equal(state[name], tensor) for name, tensor in model.state_dict().items()])
    assert model.blocks[0][0].weight.grad.equal(torch.ones(4, 4))
    assert model.blocks[0][0].bias.grad is None
    assert not counts

    random_state = torch.get_rng_state()
    table = model.verify(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not counts
    assert table.is_equal  # The balance may still differ.
    assert "'balance', rows together and apart" not in [row.name for row in table.rows]


def test_the_balancing_of_experts_is_refused_unless_it_is_named() -> None:
    with pytest.raises(ValueError, match=r"verify=\['balance'\] lets it differ, with a warning .*verify=False"):
        pipelined(Net(), torch.randn(2, 4), chunks=2, devices=TWO, balance="parameters")
    model: Any = pipelined(Net(), torch.randn(2, 4), chunks=2, devices=TWO, balance="parameters", verify=False)
    assert not model.verify(torch.randn(4, 4)).is_equal


def test_everything_is_compared() -> None:
    model: Any = Chain()
    pipelined(model, torch.randn(2, 4), chunks=3, devices=TWO, balance="parameters", loss_fn=nn.MSELoss())
    table = model.verify(torch.randn(6, 4), target=torch.randn(6, 4))
    assert table.is_equal
    assert {row.name for row in table.rows} == {
        "loss, rows together and apart",
        "'value', rows together and apart",
        "loss",
        *[f"'value' of micro-batch {i}" for i in range(3)],
        *[f"gradient of '{name}'" for name, _ in model.named_parameters()],
    }
    assert str(table).splitlines()[-1] == "equal, but for the order of sums"


def test_the_first_tensor_that_differs_is_named_with_its_partition() -> None:
    """Nobody looks at numbers in a box, where the second partition finds those of another micro-batch."""

    class Box:
        def __init__(self) -> None:
            self.box: list[Any] = [None]

    class Boxed(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.kept = Box()

        def forward(self, x: Tensor) -> Tensor:
            for k, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                if k == 0:
                    self.kept.box[0] = x.detach().mean(1).tolist()
            return x + torch.tensor(self.kept.box[0])[:, None]

    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"the output 'value' of micro-batch 0 is not .* when it leaves partition 1"):
        pipelined(Boxed(), torch.randn(2, 4), chunks=3, devices=TWO, balance="parameters")


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_rounds_coarsely(inside: bool) -> None:
    class Casting(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                return super().forward(x).float()

    model = Casting()
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        pipelined(model, torch.randn(2, 4), chunks=3, devices=TWO, balance="parameters")


@pytest.mark.parametrize("sample", [torch.zeros(2, 4), torch.ones(2, 4), torch.ones(1, 4)], ids=["0", "1", "one row"])
def test_a_sample_whose_rows_are_equal_shows_what_couples_them(sample: Tensor) -> None:
    class Centred(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x - x.mean(0)

    with pytest.raises(ValueError, match="the rows are coupled"):
        pipelined(Centred(), sample, chunks=3, devices=TWO, balance="parameters")


def test_a_model_that_draws_in_evaluation_too() -> None:
    """Rows together draw other numbers than rows apart, but the pipeline draws what the rows apart draw."""

    class Autoencoder(Chain):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = super().forward(x)
            return x + torch.randn_like(x) * 0.1, x

    pipelined(Autoencoder(), torch.randn(2, 4), chunks=3, devices=TWO, balance="parameters")


@pytest.mark.parametrize("source", [random.random, np.random.rand])
def test_a_model_that_draws_from_python_or_numpy_in_training(source: Callable[[], float]) -> None:
    """Drops layers, as speech models do; the order of micro-batches decides on what each of them drops."""

    class Dropping(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                y = torch.tanh(layer(x))
                x = x if self.training and source() < 0.5 else y
            return x

    np.random.seed(0)
    random.seed(0)
    pipelined(Dropping(), torch.randn(2, 4), chunks=3, devices=TWO, balance="parameters")


def test_a_model_that_only_evaluates_needs_no_backward() -> None:
    class Rounding(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(x)
            x.mul_(2)  # what tanh has saved
            return super().forward(x.requires_grad_(x.requires_grad))

    model: Any = Rounding()
    pipelined(model, torch.randn(2, 4, requires_grad=True), chunks=3, devices=TWO, balance="parameters")
    x = torch.randn(6, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(x), torch.cat([Rounding.forward(model.unpipelined(), x)]))


class Reversible(torch.autograd.Function):
    """Layers that keep nothing: backward runs all of them again, and differentiates them itself, as in Reformer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = y = x.detach().requires_grad_()
            for layer in ctx.layers:
                y = layer(y)
        y.backward(*grads)
        return x.grad, None


def test_a_function_that_runs_layers_of_later_partitions_again_is_no_fault() -> None:
    """The gradients of a later partition arrive in the backward of the first one, which took them for lost."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            return Reversible.apply(self.first(x), self.layers)  # type: ignore[no-any-return]

    plain, x = Net().double(), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    model: Any = pipelined(copy.deepcopy(plain), x, chunks=2, devices=TWO, balance=[2, 3])
    model(x).square().sum().backward()
    for part in x.chunk(2):
        plain(part).square().sum().backward()
    for ours, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_statistics_that_a_checkpoint_of_the_models_own_counts_again() -> None:
    """They are counted twice in the plain model, too: the second time at backward, and a split backward counts on."""

    class Net(nn.Module):
        def __init__(self, momentum: float | None) -> None:
            super().__init__()
            norms = [nn.BatchNorm1d(4, momentum=momentum) for _ in range(4)]
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), norm) for norm in norms])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) + x  # type: ignore[no-untyped-call]
            return x

    x = torch.randn(4, 4)
    pipelined(Net(None), x, chunks=2, devices=TWO)  # The average of all runs, in any order.
    for net, schedule in [(Net(0.1), "1F1B"), (Net(None), "ZeroBubble")]:
        with pytest.raises(ValueError, match=r"buffer .* again at backward.* pipelined\(checkpoint=...\)"):
            pipelined(net, x, chunks=2, devices=TWO, schedule=schedule)
