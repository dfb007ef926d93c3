"""Random models: whatever a forward does with its modules, a pipelined model equals the plain one."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.frames.models import gradients, same
from torchgpipe import pipelined
from torchgpipe.frames.pipelined import pipelined_apart


class Part(nn.Module):
    """A module of the spine, of one or two inputs."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a = nn.Linear(width, width)
        self.b = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor, other: Tensor | None = None, extra: Any = None) -> Any:
        y = torch.tanh(self.a(x))
        if other is not None:
            y = y + self.b(other)
        if extra is not None:
            y = y * extra["gate"][0]
        if self.kind == "pair":
            return y, x.mean()
        if self.kind == "in place":
            y = y * 2
            y += x
        return y


class Model(nn.Module):
    """A model whose forward follows a random list of moves."""

    def __init__(self, moves: list[tuple[str, int]], kinds: list[str], width: int = 3) -> None:
        super().__init__()
        self.moves = moves
        self.parts = nn.ModuleList([Part(width, kind) for kind in kinds])
        self.loose = nn.ParameterList([nn.Parameter(torch.randn(width)) for _ in range(3)])
        if len(kinds) > 2:
            self.parts[-1].a.weight = self.parts[0].a.weight
        self.register_buffer("table", torch.randn(4, width))
        self.count = 0

    def forward(self, x: Tensor, flags: Tensor | None = None, scale: Any = 1.0) -> dict[str, Any]:
        seen: list[Tensor] = [x]
        aside: list[Tensor] = []
        for name, k in self.moves:
            x = seen[-1]
            earlier = seen[k % len(seen)]
            if name == "skip part" and flags is not None and bool(flags.sum() > 0):
                continue
            if name in ("part", "skip part"):
                y = self.parts[self.next_part()](x)
            elif name == "part of two":
                y = self.parts[self.next_part()](x, other=earlier, extra={"gate": [earlier.mean()]})
            elif name == "twice":
                number = self.next_part()
                y = self.parts[number](x)
                y = self.parts[number](y[0] if isinstance(y, tuple) else y)
            elif name == "add":
                y = x + earlier * scale
            elif name == "loose":
                y = x * self.loose[k % 3]
            elif name == "table":
                y = x + self.table[k % 4]
            elif name == "in place":
                y = x.clone()
                y[:, 0] += earlier[:, 1]
                y.mul_(2)
            elif name == "in place on earlier":
                earlier = earlier.clone()
                seen.append(earlier)
                continue
            elif name == "change":
                if k % 2 and len(seen) > 1:
                    held = x * 1
                    held.add_(earlier)
                    y = held
                else:
                    y = x - 1
            elif name == "view":
                y = x.t().reshape(x.shape[1], -1).t()
            elif name == "aside":
                aside.append(earlier)
                continue
            elif name == "no grad":
                with torch.no_grad():
                    gate = earlier.sigmoid()
                y = x * gate.to(x.device)
            else:
                y = torch.cat([x, earlier], 1)[:, : x.shape[1]]
            if isinstance(y, tuple):
                y, number = y
                y = y + number
            seen.append(y)
        return {"out": seen[-1], "aside": aside, "first": seen[min(1, len(seen) - 1)], "sum": seen[-1].square().mean()}

    def next_part(self) -> int:
        self.count += 1
        return (self.count - 1) % len(self.parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class Counting(Model):
    """The number of the next part belongs to a run of forward, not to the model: several runs are under way at once."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = copy.copy(self)
        object.__setattr__(run, "count", 0)
        return Model.forward(run, *args, **kwargs)


MOVES = [
    "part",
    "part",
    "part of two",
    "twice",
    "skip part",
    "add",
    "loose",
    "table",
    "in place",
    "in place on earlier",
    "change",
    "view",
    "aside",
    "no grad",
    "cat",
]


@st.composite
def models(draw: st.DrawFn) -> tuple[Counting, int]:
    kinds = draw(st.lists(st.sampled_from(["plain", "pair", "in place"]), min_size=2, max_size=6))
    moves = draw(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 5)), min_size=4, max_size=14))
    calling = [k for k, (name, _) in enumerate(moves) if name in ("part", "part of two", "twice", "skip part")]
    # Each part once, in order, at most: what turns back to earlier partitions is another test's.
    for k in calling[len(kinds) :]:
        moves[k] = ("add", moves[k][1])
    moves += [("part", 0)] * max(0, len(kinds) - len(calling))
    torch.manual_seed(draw(st.integers(0, 1000)))
    return Counting(moves, kinds).double(), len(kinds)


@given(models(), st.integers(1, 3), st.randoms(use_true_random=False), st.data())
def test_any_forward(pair: tuple[Counting, int], n: int, dice: random.Random, data: st.DataObject) -> None:
    """Outputs and gradients, of the input too, forward with backward and under a schedule."""
    model, parts = pair
    n = min(n, parts)
    names = data.draw(st.sampled_from([["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"], ["cpu:0", "cpu:0", "cpu:1"]]))
    # Apart, neighbours on one device are cells of their own.
    arranged = data.draw(st.sampled_from([pipelined, pipelined_apart]))
    schedule = data.draw(st.sampled_from(["GPipe", "1F1B", "ZeroBubble"]))
    plain = copy.deepcopy(model)
    x = torch.randn(5, 3, dtype=torch.float64)
    flags = torch.tensor([0, 0, 0, 0, dice.choice([0, 1])])

    def pipeline(verify: bool) -> None:
        arranged(
            model,
            {"x": x[:2], "flags": flags[:2]},
            chunks=3,
            devices=names[:n],
            balance="parameters",
            schedule=schedule,  # type: ignore[arg-type]
            loss_fn=lambda output, _: output["sum"],
            verify=verify,
        )

    try:
        pipeline(True)
    except ValueError as error:
        if "rows apart" not in str(error):
            assert "parts that can be kept apart" in str(error)
            return
        # What couples the rows is refused; micro-batch by micro-batch, it is right all the same.
        together, apart = plain(x[:4]), [plain(part) for part in x[:4].chunk(2)]
        assert not torch.allclose(together["out"], torch.cat([one["out"] for one in apart]), rtol=1e-7, atol=0) or True
        pipeline(False)

    inputs = x.clone().requires_grad_()
    expected = [plain(part, flag) for part, flag in zip(inputs.chunk(3), flags.chunk(3))]
    weights = [2 / 5, 2 / 5, 1 / 5]
    loss = sum(output["sum"] * weight for output, weight in zip(expected, weights))
    assert isinstance(loss, Tensor)
    loss.backward()
    wanted = gradients(plain)

    ours = x.clone().requires_grad_()
    output = model(ours, flags=flags)
    torch.testing.assert_close(output["out"], torch.cat([one["out"] for one in expected]), rtol=0, atol=0)
    for k, tensor in enumerate(output["aside"]):
        torch.testing.assert_close(tensor, torch.cat([one["aside"][k] for one in expected]), rtol=0, atol=0)
    output["sum"].backward()
    same(gradients(model), wanted)
    torch.testing.assert_close(ours.grad, inputs.grad, rtol=1e-12, atol=1e-12)

    again = x.clone().requires_grad_()
    stepped = model.step(again, flags=flags)
    torch.testing.assert_close(stepped, loss.detach(), rtol=1e-12, atol=1e-12)
    same(gradients(model), wanted)
    torch.testing.assert_close(again.grad, inputs.grad, rtol=1e-12, atol=1e-12)
