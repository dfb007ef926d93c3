"""Tensors that a module returns again and again, buffers that glue reads, and modules that some micro-batches skip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

import torchgpipe
from tests.distributed.launch import launch
from torchgpipe.processes.stand_in import StandIn

pytestmark = pytest.mark.slow


class Table(nn.Module):
    """Returns a buffer beside its output: the same object each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.rand(4))

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), self.table


class Returned(nn.Module):
    """Once, the tensor was taken for sent by the micro-batch before, and values from nowhere were used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Table(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, table = self.first(x)
        return self.second(x) * table


class ReadByGlue(Returned):
    """Once, its process took the buffer for one that all have, and the others waited for it."""

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.first(x)
        return self.second(x) * self.first.table  # type: ignore[operator]


class Skipping(nn.Module):
    """Once, both ends expected what crosses in another order, and one waited for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x0 = x
        for k, block in enumerate(self.blocks):
            if k % 3 == 0 or x0[0, k] > 0:
                x = block(x).tanh()
        return x


class Reading(Skipping):
    """Glue reads what each block returns, and what a block returns has another form in each micro-batch.

    With several partitions in a process, each waited for what the other one was to read, or to tell of a form, in a
    later action: the first was refused, and Mixtral and Qwen2-MoE with micro-batches of two forms stood in the second.
    """

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate(self.blocks):
            y = block(x).tanh()
            x = torch.cat([x, x]) * y[:1] if y[0, k] > 0 else x * y
        return x[:2]


class AskedWhere(nn.Module):
    """Once, each process asked the others for its own first parameter, to know where that is, and waited for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        where = next(self.parameters()).device
        return self.blocks[2](self.blocks[1](x) + torch.ones(4, dtype=x.dtype, device=where))


class Padded(AskedWhere):
    """Once refused: `pad_sequence` makes its result itself, with values, and writes to it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[2](pad_sequence([self.blocks[1](x[:1]), x], batch_first=True))


class StateCache:
    def __init__(self) -> None:
        self.states: list[Tensor] = []


class Stateful(nn.Linear):
    def forward(self, x: Tensor, cache: StateCache) -> Tensor:
        cache.states.append(super().forward(x))
        return cache.states[-1].tanh()


class Cached(nn.Module):
    """Once, a process sent what the cache held to a module that did not use it, and the receiver had no such thing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Stateful(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        cache = StateCache()
        for block in self.blocks:
            x = block(x, cache)
        return x


class Collecting(nn.Module):
    """Hooks collect what modules inside of blocks take and return, as transformers does it for hidden states.

    Once, the proof waited for what another process did not have, and in evaluation the owner of a block took what its
    hooks had kept for what all processes have. A hook that reads values has them where the module is, and is left out
    elsewhere; it once let the model fail.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)])
        self.collected: list[Tensor] = []
        self.norms: list[float] = []
        for block in self.blocks:
            block[2].register_forward_hook(lambda _, args, output: self.norms.append(output.norm().item()))
            block[2].register_forward_hook(lambda _, args, output: self.collected.extend([args[0], output]))

    def forward(self, x: Tensor) -> Tensor:
        self.collected = []
        for block in self.blocks[:2]:
            x = x + block(x)
        return x + self.blocks[2](torch.stack(self.collected).sum(0))


class Checkpointed(nn.Module):
    """Once, a second run in a process computed with stand-ins, whose gradients were no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: block(y).tanh() * self.scale, x, use_reentrant=False)
        return x


class InPlace(nn.Module):
    """Once, the proof took an argument that a module changes for what it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.relu = nn.ModuleList([nn.ReLU(inplace=True) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block, relu in zip(self.blocks, self.relu):
            x = block(x)
            relu(x)
        return x


class ChangesInput(nn.Module):
    """Once, a process that has only the second module took zeros for what the first had made of the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Masking(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        x = self.first(x, mask)
        return self.second(x) * mask


class Masking(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask[:, 0] = 2.0
        return super().forward(x)


class Alternating(nn.Module):
    """Once, a tensor of another process crossed under a number that was known, and its strides were not expected."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](x)
        return self.blocks[2](first if x[0, 0] > 0 else second)


CONSTANTS = {"zero": torch.zeros((), dtype=torch.float64), "ones": [torch.ones(4, dtype=torch.float64)]}


class WithConstants(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        self.kept = CONSTANTS["zero"]
        return super().forward(x).tanh(), CONSTANTS


class ConstantsOfAFile(nn.Module):
    """Once, a process marked the constant as its own, for ever, and the others had it and waited."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WithConstants(4, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        total: Any = CONSTANTS["zero"]
        for block in self.blocks:
            y, constants = block(x * CONSTANTS["ones"][0])
            total = total + constants["zero"] + block.kept
            x = x + y * constants["ones"][0]
        return x + total + CONSTANTS["zero"]


class Sharing(nn.Linear):
    def __init__(self, width: int, others: int) -> None:
        super().__init__(width, others)
        self.scale = nn.Parameter(torch.rand(others), requires_grad=False)

    def forward(self, x: Tensor, shared: dict[str, Any]) -> Any:
        y = super().forward(x).tanh()
        shared.setdefault("all", []).append(y)
        shared["last"] = y, len(shared["all"])
        return y, self.scale


class FillsADict(nn.Module):
    """Blocks fill a dict that they are given, as those of Gemma 3n, and return a frozen weight, once waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Sharing(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        shared: dict[str, Any] = {}
        for block in self.blocks:
            y, scale = block(x, shared)
            x = x + y * scale
        return x + sum(shared["all"]) * shared["last"][1] + shared["last"][0]


class ReadsWithoutGrad(nn.Module):
    """Once, what crosses under no_grad required a gradient in one process only, which looked for another call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(4, 4), Router(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        with torch.no_grad():
            gate = self.router(x)
        return self.last(x * gate)


class Router(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.sigmoid() if y.sum().item() < 1000 else y


class Starting(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).tanh(), []


class Growing(nn.Module):
    """Once, all calls of a module of another process returned one list, to which the model adds what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Starting(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, states = block(x)
            states.append(x)
            x = x * len(states)
        return x


class Keeping(nn.Linear):
    def __init__(self, width: int, others: int) -> None:
        super().__init__(width, others)
        self.shape, self.auxiliary = (1,), [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        self.shape, self.auxiliary = (x.shape[-1],), [y.square().mean(-1, keepdim=True)]
        return y


class KeepingByValue(Keeping):
    """Does not run without values, so others know its attributes from its process."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / max(1.0, x.sum().item() / 1000))


class ReadsAttributes(nn.Module):
    """Once, in other processes, the shape was what it had been before the proof; the auxiliary losses were refused."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(4, 4) for kind in (KeepingByValue, Keeping, Keeping, KeepingByValue)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for block in self.blocks:
            x = x + block.auxiliary[0] * block.shape[0]
        return x


class HooksItself(nn.Module):
    """Puts hooks into itself when it first runs, as a model of transformers within a module does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not self.linear._forward_hooks:
            self.linear.register_forward_hook(lambda *_: None)
        return self.linear(x).tanh()


class Hooked(nn.Module):
    """Each process told the shapes of calls without hooks, and waited for those of calls with hooks, or the reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([HooksItself() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def made(kind: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return kind().double(), torch.randn(12, 4).double()


def train(kind: type[nn.Module], partitions: int, schedule: str, verify: bool) -> Any:
    model, x = made(kind)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    how: dict[str, Any] = {"partitions": partitions, "schedule": schedule, "verify": verify}
    sample = x[:2].abs()  # All of its rows take all modules.
    torchgpipe.pipelined(model, sample, chunks=6, mesh=mesh, balance="parameters", loss_fn=square, **how)
    losses = [model.step(x).item() for _ in range(3)]  # type: ignore[operator]
    own = [(name, one.grad) for name, one in nn.Module.named_parameters(model) if not isinstance(one, StandIn)]
    return losses, {name: grad.numpy() for name, grad in own if grad is not None}


def square(output: Tensor, _: None) -> Tensor:
    return output.square().mean()


def train_all(cases: Sequence[tuple[type[nn.Module], int, str, bool]]) -> list[Any]:
    return [train(*case) for case in cases]


_OF_TWO = [
    (Returned, 2, "1F1B", False),
    (Returned, 2, "1F1B", True),
    (ReadByGlue, 2, "1F1B", True),
    (Padded, 2, "1F1B", False),
    (InPlace, 2, "1F1B", True),
    (Growing, 2, "1F1B", True),
    (ConstantsOfAFile, 2, "1F1B", True),
    (ReadsAttributes, 2, "1F1B", True),
    (ChangesInput, 2, "1F1B", True),
    (Hooked, 2, "1F1B", True),
    (Hooked, 2, "1F1B", False),
    (Skipping, 4, "Interleaved1F1B", False),
    (Skipping, 4, "GPipe", False),
    (Skipping, 2, "1F1B", False),
    (Reading, 4, "Interleaved1F1B", False),
    (Reading, 4, "GPipe", False),
    (Reading, 4, "LayerMajor", False),
]
_OF_THREE = [
    (AskedWhere, 3, "1F1B", True),
    (Alternating, 3, "1F1B", False),
    (ReadsWithoutGrad, 3, "1F1B", True),
    (FillsADict, 3, "1F1B", True),
    (Cached, 3, "1F1B", False),
    (Collecting, 3, "1F1B", True),
    (Checkpointed, 3, "1F1B", True),
]


@pytest.mark.parametrize(("n", "cases"), [(2, _OF_TWO), (3, _OF_THREE)])
def test_gradients_are_those_of_the_plain_model(n: int, cases: Any) -> None:
    for case, results in zip(cases, zip(*launch(n, train_all, cases))):
        model, x = made(case[0])
        losses = [square(model(rows), None) / 6 for rows in x.split(2)]
        for _ in range(3):
            for loss in losses:
                loss.backward(retain_graph=True)
        seen = set()
        for said, grads in results:
            assert said == pytest.approx([sum(losses).item()] * 3, rel=1e-12), case  # type: ignore[union-attr]
            for name, grad in grads.items():
                seen.add(name)
                expected = model.get_parameter(name).grad
                torch.testing.assert_close(
                    torch.from_numpy(grad), expected, rtol=1e-10, atol=1e-14, msg=f"{name} of {case}"
                )
        assert seen == {name for name, one in model.named_parameters() if one.grad is not None}


class Doubled(torch.autograd.Function):
    """Calls a module in its forward, as the function of reversible layers does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: nn.ModuleList) -> Tensor:
        for block in blocks:
            x = block(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad, None


class Reversible(Skipping):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[3](Doubled.apply(self.blocks[0](x), self.blocks[1:3]))


class Annealed(nn.Linear):
    """Returns a number that changes from step to step, or fills a list later: other processes went on as before."""

    beta, fills = 1.0, False

    def forward(self, x: Tensor, states: list[Tensor]) -> Any:
        x = super().forward(x)
        if self.fills:
            states.append(x)
        return x, self.beta


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Annealed(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        states: list[Tensor] = []
        x, beta = self.blocks[0](x, states)
        return self.blocks[1](x) * beta * (1 + len(states))


class Counted(Annealed):
    calls = 0

    def forward(self, x: Tensor, states: list[Tensor]) -> Any:
        self.calls += 1
        return super().forward(x, states)


class Counting(Scaled):
    """Its modules count in a number, which another process once counted otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counted(4, 4), nn.Linear(4, 4)])


class OwnParameter(Scaled):
    """Its first module returns a parameter, for which the second process waited for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WithBias(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.blocks[0](x)
        return self.blocks[1](x) + bias


class WithBias(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.bias


def refused() -> list[str]:
    faults = []
    for kind, balance, change in [
        (Reversible, [2, 2], {}),
        (Scaled, [1, 1], {"beta": 0.5}),
        (Scaled, [1, 1], {"fills": True}),
        (Counting, [1, 1], {}),
        (OwnParameter, [1, 1], {}),
    ]:
        model, x = made(kind)
        mesh = dist.init_device_mesh("cpu", (2,))
        with pytest.raises(RuntimeError) as info:
            how: dict[str, Any] = {"verify": False, "schedule": "GPipe", "balance": balance, "loss_fn": square}
            torchgpipe.pipelined(model, x[:2], chunks=6, mesh=mesh, **how)
            for _ in range(2):
                model.step(x)  # type: ignore[operator]
                vars(model.blocks[0]).update(change)  # type: ignore[index]
        faults.append(str(info.value))
    return faults


def test_what_other_processes_cannot_know_is_refused() -> None:
    """Once, a process took its output for another's, or what a module had returned before for what it returns now."""
    first, second = launch(2, refused)
    assert "DoubledBackward begins in partition 0 and ends in another process" in second[0]
    assert "DoubledBackward begins in partition 0" in first[0]
    assert "'blocks.0' returns [(2, 4), 0.5], and did something else before" in first[1]
    assert "'blocks.0' has changed a list or a dict that it was given" in first[2]
    assert "'blocks.0' returns [(2, 4), 1.0] with [2] as its attribute 'calls', and did something" in first[3]
    assert "'blocks.0' returns a parameter of shape (4,)" in first[4]
    for fault, said in zip(first[1:5], second[1:5]):
        assert "rank 0 has failed with" in said, fault
