"""A pipelined model proves itself on its sample: what is compared, what is let through, what stays behind: nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.frames.models import TWO, Chain, chain, gradients, same
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


def two(model: nn.Module, sample: Tensor | None = None, **options: Any) -> Any:
    """Pipeline a model on two devices."""
    sample = torch.randn(2, 4) if sample is None else sample
    return pipelined(model, sample, chunks=3, devices=TWO, balance="parameters", **options)


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in np.random.get_state()]]


def test_nothing_stays_behind() -> None:
    model: Any = Net()
    model.blocks[2].eval()
    heard: list[Any] = []
    for parameter in model.parameters():
        parameter.register_hook(heard.append)
        parameter.register_post_accumulate_grad_hook(heard.append)
    model.blocks[1].register_forward_hook(lambda *run: heard.append(run))
    model.blocks[0][0].weight.grad = torch.ones(4, 4)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters, modes, before = dict(model.named_parameters()), [one.training for one in model.modules()], states()
    with pytest.warns(UserWarning, match=r"\['balance'\] differ between rows together and rows apart"):
        two(model, torch.randn(3, 4), may_differ=["balance"])
    after = states()
    torch.randn(3, 4)
    assert after[1:] == before[1:]
    assert [one.training for one in model.modules()] == modes
    assert all([parameters[name] is parameter for name, parameter in model.named_parameters()])
    assert all([torch.equal(state[name], tensor) for name, tensor in model.state_dict().items()])
    assert model.blocks[0][0].weight.grad.equal(torch.ones(4, 4))
    assert model.blocks[0][0].bias.grad is None
    assert not heard

    random_state = torch.get_rng_state()
    table = model.verify(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not heard
    assert table.is_equal  # The balance may still differ.
    assert "'balance', rows together and apart" not in [row.name for row in table.rows]


@pytest.mark.parametrize("inference", [False, True])
def test_the_callers_tensors_stay_as_they_are_and_may_be_of_inference_mode(inference: bool) -> None:
    """The pipeline ran on the caller's own memory: the model changed it, and what inference mode made was refused."""
    model: Any = chain(lambda self, x: Chain.forward(self, x.mul_(2)))
    with torch.inference_mode(inference):
        x = torch.randn(6, 4)
        before = x.clone()
    pipelined(model, x, chunks=1, devices=TWO, balance="parameters")
    with torch.inference_mode(inference):
        assert model.verify(x).is_equal
    assert torch.equal(x, before)


def test_the_balancing_of_experts_is_refused_unless_it_is_named() -> None:
    with pytest.raises(ValueError, match=r"may_differ=\['balance'\] lets it differ, with a warning .*verify=False"):
        two(Net())
    assert not two(Net(), verify=False).verify(torch.randn(4, 4)).is_equal


def test_everything_is_compared() -> None:
    model = two(Chain(), loss_fn=nn.MSELoss())
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

    def forward(self: Any, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if k == 0:
                self.kept.numbers = x.detach().mean(1).tolist()
        return x + torch.tensor(self.kept.numbers)[:, None]

    torch.manual_seed(0)
    model = chain(forward)
    model.kept = SimpleNamespace()
    with pytest.raises(ValueError, match=r"the output 'value' of micro-batch 0 is not .* when it leaves partition 1"):
        two(model)


def casts(self: Chain, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return Chain.forward(self, x).float()


def draws_in_evaluation(self: Chain, x: Tensor) -> Any:
    """Rows together draw other numbers than rows apart, but the pipeline draws what the rows apart draw."""
    x = Chain.forward(self, x)
    return x + torch.randn_like(x) * 0.1, x


def drops_layers(source: Callable[[], float]) -> Callable[[Chain, Tensor], Any]:
    """Drop layers by Python or NumPy, as speech models do: the order of micro-batches decides on what each drops."""

    def forward(self: Chain, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = torch.tanh(layer(x))
            x = x if self.training and source() < 0.5 else y
        return x

    return forward


def only_evaluates(self: Chain, x: Tensor) -> Any:
    """Change what tanh has saved, so that there is no backward."""
    x = torch.tanh(x)
    x.mul_(2)
    return Chain.forward(self, x.requires_grad_(x.requires_grad))


@pytest.mark.parametrize(
    "forward", [casts, draws_in_evaluation, drops_layers(random.random), drops_layers(np.random.rand), only_evaluates]
)
def test_what_is_no_fault(forward: Callable[..., Any]) -> None:
    np.random.seed(0)
    random.seed(0)
    sample = torch.randn(2, 4, requires_grad=forward is only_evaluates)
    model = two(chain(forward), sample)
    if forward is only_evaluates:
        x = torch.randn(6, 4)
        with torch.no_grad():
            torch.testing.assert_close(model(x), forward(model.unpipelined(), x))


def test_autocast_around_it_rounds_coarsely() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        two(Chain())


@pytest.mark.parametrize("sample", [torch.zeros(2, 4), torch.ones(2, 4), torch.ones(1, 4)], ids=["0", "1", "one row"])
def test_a_sample_whose_rows_are_equal_shows_what_couples_them(sample: Tensor) -> None:
    with pytest.raises(ValueError, match="the rows are coupled"):
        two(chain(lambda self, x: (y := Chain.forward(self, x)) - y.mean(0)), sample)


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

    def forward(self: Any, x: Tensor) -> Any:
        return Reversible.apply(self.layers[0](x), self.layers[1:])

    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    plain, x = chain(forward, nn.Linear(4, 4), *blocks).double(), torch.randn(4, 4, dtype=torch.float64)
    x.requires_grad_()
    model: Any = pipelined(copy.deepcopy(plain), x, chunks=2, devices=TWO, balance=[2, 3])
    model(x).square().sum().backward()
    for part in x.chunk(2):
        plain(part).square().sum().backward()
    same(gradients(model), gradients(plain))


def test_statistics_that_a_checkpoint_of_the_models_own_counts_again() -> None:
    """They are counted twice in the plain model, too: the second time at backward, and a split backward counts on."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) + x  # type: ignore[no-untyped-call]
        return x

    def net(momentum: float | None) -> Any:
        norms = [nn.BatchNorm1d(4, momentum=momentum) for _ in range(4)]
        return chain(forward, *[nn.Sequential(nn.Linear(4, 4), norm) for norm in norms])

    x = torch.randn(4, 4)
    pipelined(net(None), x, chunks=2, devices=TWO)  # The average of all runs, in any order.
    for momentum, schedule in [(0.1, "1F1B"), (None, "ZeroBubble")]:
        with pytest.raises(ValueError, match=r"buffer .* again at backward.* pipelined\(checkpoint=...\)"):
            pipelined(net(momentum), x, chunks=2, devices=TWO, schedule=schedule)


def test_rows_that_are_not_in_dimension_0_are_told_with_what_is_split() -> None:
    """The error was that of the layer, which says nothing about rows."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.GRU(4, 4, batch_first=True)
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor, state: Tensor) -> Any:
            return self.head(self.recurrent(x, state)[0])

    with pytest.raises(RuntimeError, match="hidden size") as raised:
        pipelined(Recurrent(), (torch.randn(3, 5, 4), torch.randn(1, 3, 4)), chunks=2, devices=TWO)
    assert "split along dimension 0: ['x']; passed whole: ['state']" in raised.value.__notes__[-1]
