"""Any model over two processes: the same loss, gradients and buffers, bit by bit, as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.launch import launch
from torchgpipe import pipelined
from torchgpipe.processes.stand_in import StandIn

Case: TypeAlias = Callable[[], tuple[nn.Module, dict[str, Any]]]

FEATURES = 6


class Random(nn.Module):
    """Blocks with residuals, skips from anywhere to anywhere, a tied weight, masks and values that glue reads.

    Args:
        seed: decides what is there
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(high: int) -> int:
            return int(torch.randint(high, (), generator=generator))

        self.embed = nn.Linear(4, FEATURES)
        self.blocks = nn.ModuleList()
        for _ in range(6):
            rate = [0.0, 0.3][draw(2)]
            last: nn.Module = [nn.ReLU(inplace=True), nn.BatchNorm1d(FEATURES), nn.Tanh(), nn.Dropout(0.2)][draw(4)]
            self.blocks.append(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(rate), last))
        self.head = nn.Linear(4, FEATURES)
        if draw(2):
            self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        #: For each block, what glue does behind it, and with which earlier value.
        self.moves = [(draw(8), draw(k + 1)) for k in range(6)]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(x)
        values = [h]
        for block, (move, k) in zip(self.blocks, self.moves):
            h = block(h)
            other = values[k]
            if move == 0:
                h = h + other
            elif move == 1:
                h = h.masked_fill(mask, 0.0)
            elif move == 2:
                h = h + 1 if h.detach().sum() > other.detach().sum() else h - other
            elif move == 3:
                h = h + other.t().contiguous().t()
            elif move == 4:
                h = nn.functional.relu(h + other, inplace=True)
            elif move == 5:
                h = h * torch.empty(len(h), 1, dtype=h.dtype).bernoulli_(0.5)
            elif move == 6:
                h = h.clone()
                h[:, 1:3] += other[:, :2]
            elif move == 7:
                h = h + h[mask.flatten()].sum()
            values.append(h)
        return h @ self.head.weight


def random_model(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(seed)
    return Random(seed), {"x": torch.randn(8, 4), "mask": torch.rand(8, 1) > 0.5}


class Experts(nn.Module):
    """Return the sum of what two experts make of the rows that are routed to them: forward looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 2)
        self.experts = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            (rows,) = (scores.argmax(-1) == k).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * scores[rows, k : k + 1])
        return out


class Routed(nn.Module):
    """Collect what the gates return, as transformers does for the loss that balances experts: by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts() for _ in range(4)])
        for layer in self.layers:
            layer.gate.register_forward_hook(lambda _module, _args, output: _scores.get().append(output))

    def forward(self, x: Tensor) -> Tensor:
        scores: list[Tensor] = []
        token = _scores.set(scores)
        for layer in self.layers:
            x = x + layer(x)
        _scores.reset(token)
        return x + torch.stack(scores).sum()


_scores: ContextVar[list[Tensor]] = ContextVar("scores")


def routed() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Routed(), {"x": torch.randn(8, FEATURES)}


class Images(nn.Module):
    """Let images cross in an order of their dimensions that fake tensors get wrong, and slices with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            patches = x.flatten(2).transpose(1, 2).contiguous()
            x = layer(patches.transpose(1, 2).reshape(x.shape))
        pooled = nn.functional.adaptive_avg_pool2d(x, 1)
        return self.head(pooled.flatten(1) + x[:, :, 0, 0].expand(-1, 4))


def images() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Images(), {"x": torch.randn(7, 4, 5, 5)}  # The last micro-batch has one row, of which it is true.


#: What all models of a process share, as class weights.
CONSTANT = torch.full((FEATURES,), 2.0, dtype=torch.float64)


class Held:
    """An object of which nobody knows what it holds."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Remembering(nn.Module):
    """Takes an object and a list, appends to the list, returns another object, and keeps a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.auxiliary: Tensor | None = None

    def forward(self, held: Held, memory: list[Tensor]) -> Held:
        y = self.linear(held.x).tanh()
        self.auxiliary = y.square().mean()
        with torch.no_grad():
            memory.append(y * 0.5)
        memory.append(y.sigmoid())
        return Held(y)


class Sliced(nn.Module):
    """Let slices cross that begin anywhere, objects, and what modules put into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Remembering() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        memory: list[Tensor] = []
        for layer in self.layers:
            x = torch.cat([layer(Held(x), memory).x, x], 1)[:, 1 : FEATURES + 1]
        return x * memory[0] + memory[3] * CONSTANT.to(x)


def sliced() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Sliced(), {"x": torch.randn(8, FEATURES)}


def run(case: Case, step: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    """Pipeline a model, run a mini-batch, and return what this process has of the results."""
    torch.set_default_dtype(torch.float64)
    model: Any
    model, batch = case()
    target = torch.zeros(())

    def loss_fn(output: Tensor, target: Any) -> Tensor:
        return output.square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sample = {name: tensor[:2] for name, tensor in batch.items()}
        options = {"chunks": 4, "balance": "parameters", "loss_fn": loss_fn, "verify": False, **options}
        pipelined(model, sample, **options)
    torch.manual_seed(5)
    if step:
        loss = model.step(**batch, target=torch.zeros(len(batch["x"])))
    else:
        loss = loss_fn(model(**batch), target)
        loss.backward()
    found: dict[str, Any] = {} if isinstance(loss, StandIn) else {"loss": loss.item()}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, StandIn):
            found[name] = None if parameter.grad is None else parameter.grad.numpy()
    found.update({name: tensor.numpy() for name, tensor in model.named_buffers() if not isinstance(tensor, StandIn)})
    assert not vars(CONSTANT), "once, it was taken for what a column owns, also in the next model of this process"
    return found


def _run_in_process(cases: list[Case], step: bool, options: dict[str, Any]) -> list[Any]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return [run(case, step, {**options, "mesh": mesh}) for case in cases]


def assert_equal(cases: list[Case], *, step: bool, partitions: int = 2, **options: Any) -> None:
    """Check that two processes have the results of one."""
    before = torch.get_default_dtype()
    devices = [f"cpu:{j % 2}" for j in range(partitions)]
    try:
        plain = [run(case, step, {**options, "partitions": partitions, "devices": devices[:2]}) for case in cases]
    finally:
        torch.set_default_dtype(before)
    rows = launch(2, _run_in_process, cases, step, {**options, "partitions": partitions})
    for expected, *found in zip(plain, *rows):
        assert {name for own in found for name in own} == expected.keys()
        for own in found:
            for name, value in own.items():
                if value is None or expected[name] is None:
                    assert value is expected[name], name
                else:
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[name])), name


class Seeded:
    """Make the random model of a seed; it can be pickled."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self) -> tuple[nn.Module, dict[str, Any]]:
        return random_model(self._seed)


@pytest.mark.parametrize(
    ("step", "partitions", "schedule", "seeds"),
    [(True, 2, "1F1B", [0, 1, 2]), (False, 2, "1F1B", [3, 4, 5]), (True, 4, "Interleaved1F1B", [1, 3, 5])],
)
def test_random_models_are_equal(step: bool, partitions: int, schedule: str, seeds: list[int]) -> None:
    """A model gives the same over two processes, with skips, ties, masks, reads, dropout and norms."""
    assert_equal([*map(Seeded, seeds)], step=step, partitions=partitions, schedule=schedule)


def test_hooks_strides_objects_and_lists_are_equal() -> None:
    """Hooks of a module that routes were never called, and a process waited for ever.

    Values were laid out in the strides of fake tensors, which differ from a convolution's: images came scrambled. A
    list got its tensors twice, or without values, and so did objects; slices began elsewhere, and were rounded.
    """
    assert_equal([routed, images, sliced], step=True)
    assert_equal([sliced], step=True, verify=True)


def test_recomputation() -> None:
    """A module that runs again at backward has the values that have crossed, and draws the same numbers."""
    assert_equal([routed, images, Seeded(0)], step=False, checkpoint=True)
