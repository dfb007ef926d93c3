"""Kinds of model that a pipeline could get wrong without a word: each is right, or refused and told what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.frames.models import TWO, gradients, same
from torchgpipe import pipelined

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Four layers, of which the last two are in partition 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))
        self.kept: Any = None
        self.state: dict[str, Any] = {}
        self.double()

    def run(self, x: Tensor, between: Callable[[int, Tensor], Tensor]) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = between(k, torch.tanh(layer(x)))
        return x


def net(forward: Callable[..., Any], **attributes: Any) -> Net:
    """Return a net of a class that has this forward."""
    model: Net = type("Net", (Net,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(model, name, value.double() if isinstance(value, nn.Module) else value)
    return model


def chain(change: Callable[[Any, int, Tensor, dict[str, Any]], Any]) -> Net:
    """Return a net with ``change(model, k, x, locals)`` after each layer; None leaves x as it is."""

    def forward(self: Net, x: Tensor) -> Tensor:
        own: dict[str, Any] = {"x": x}

        def between(k: int, x: Tensor) -> Tensor:
            result = change(self, k, x, own)
            return x if result is None else result

        return self.run(x, between)

    return net(forward)


# ------------------------------------------------------------------------------------------------------------ refused


class Reversed(torch.autograd.Function):
    """An operation that no function mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, grad


def hides(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    own.setdefault("first", x)
    return Reversed.apply(x, own["first"]) if k == 3 else None  # type: ignore[no-untyped-call]


def pools(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    own.setdefault("first", x)
    if k < 3:
        return None
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.add, x, own["first"]).result()


def keeps(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    if k == 0:
        self.kept = x
    return x + self.kept if k == 3 else None


def overwrites(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    if k == 0:
        self.state["hidden"] = x.detach()
    if k == 3:
        x = x + self.state["hidden"]
        self.state["hidden"] = None
    return x


def clears(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    if k == 0:
        self.state["hidden"] = x.detach()
    return x + self.state.pop("hidden") if k == 3 else None


def reassigns(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    if k == 0:
        self.seen = x.detach().mean()
    return x + self.seen if k == 3 else None


def renormalises(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    self.scale.data = self.scale.data * 0.9
    return x * self.scale


def differentiates(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    if k == 1 and torch.is_grad_enabled():
        x.square().sum().backward(retain_graph=True)
    return None


def detaches(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    own.setdefault("first", x)
    return x + own["first"].detach_() if k == 3 else None


def unsqueezes(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    own.setdefault("first", x)
    if k == 3:
        own["first"].unsqueeze_(1)
    return x + own["first"][:, 0] if k == 3 else None


def changes_a_base(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    if k == 0:
        x = x * 1
        own["first"] = x, x[:, :2]
        return x + 1
    base, view = own["first"]
    if k == 2:
        base.mul_(2)
    return x + view.repeat(1, 2) if k == 3 else None


def reenters(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    own.setdefault("first", x)
    return checkpoint(torch.mul, x, own["first"], use_reentrant=True) if k == 3 else None


def keeps_a_mask(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    if k == 0:
        self.state["mask"] = (x > 0).to(x.dtype)
    return x * self.state["mask"]


def counts(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    if k == 0:
        self.seen += 1
    return x + self.seen if k == 3 else None


def draws(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    return x * (torch.rand(x.shape, generator=self.kept) > 0.5) if self.training and k in (1, 2) else None


def forces(self: Net, k: int, x: Tensor, own: dict[str, Any]) -> Any:
    own.setdefault("first", x)
    return torch.autograd.grad(x.sum(), own["first"], retain_graph=True)[0] if k == 3 and x.requires_grad else None


class Keeps(nn.Linear):
    """A layer that keeps a tensor on itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x).mean(1, keepdim=True)
        return super().forward(x)


def of_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.keeps(x), lambda k, x: x * self.keeps.kept if k == 3 else x)


def with_generator(model: Net) -> Net:
    model.kept = torch.Generator().manual_seed(3)
    return model


def losing(loss: Callable[[Tensor], Tensor]) -> Net:
    def forward(self: Net, x: Tensor) -> dict[str, Tensor]:
        x = self.run(x, lambda k, x: x)
        return {"out": x, "loss": loss(x)}

    return net(forward)


def recurrent(self: Any, x: Tensor) -> Tensor:
    return self.run(self.rnn(x)[0], lambda k, x: x)


def translating(self: Any, x: Tensor) -> Tensor:
    return self.run(self.transformer(x, x), lambda k, x: x)


SEQUENCES = X[:, None].repeat(1, 5, 1)

REFUSED: dict[str, tuple[Callable[[], Net], str]] = {
    "sum": (lambda: losing(lambda x: x.square().sum()), r"'loss' of 4 rows is .*it is a sum: give reduce='sum'"),
    "logsumexp": (lambda: losing(lambda x: x.logsumexp(0).mean()), r"'loss' of 4 rows .* the rows are coupled"),
    "max": (lambda: losing(lambda x: x.max()), r"'loss' of 4 rows .* the rows are coupled"),
    "contrastive": (lambda: losing(lambda x: (x @ x.t()).softmax(0).diag().log().mean()), "the rows are coupled"),
    "mean of rows": (lambda: chain(lambda self, k, x, own: x - x.mean(0)), r"coupled, as by x.mean\(0\)"),
    "pairs of rows": (lambda: net(lambda self, x: x @ self.run(x, lambda k, x: x).t()), "couples the rows"),
    "sequence first": (lambda: net(recurrent, rnn=nn.LSTM(4, 4)), r"batch_first=True for 'rnn'\?"),
    "transformer": (
        lambda: net(translating, transformer=nn.Transformer(4, 2, 1, 1, 8, 0.0)).eval(),
        r"batch_first=True for '.*'\?",
    ),
    "hidden operation": (
        lambda: chain(hides),
        "'ReversedBackward' takes a tensor that 'TanhBackward0' has made in ano",
    ),
    "thread pool": (lambda: chain(pools), "'AddBackward0' takes a tensor that 'TanhBackward0' has made in another"),
    "reentrant": (lambda: chain(reenters), "another partition or thread"),
    "kept": (lambda: chain(keeps), "the model keeps the tensor 'kept' on itself, and partition 1 uses it"),
    "overwritten": (lambda: chain(overwrites), "a micro-batch fails in the pipeline"),
    "cleared": (lambda: chain(clears), "a micro-batch fails in the pipeline .* return it instead"),
    "reassigned buffer": (
        lambda: chain(reassigns),
        "the model keeps the tensor 'seen' on itself, and partition 1 uses",
    ),
    "kept in a dict": (lambda: chain(keeps_a_mask), "keeps the tensor 'state' on itself, and partition 1 uses it"),
    "kept by a layer": (
        lambda: net(of_a_layer, keeps=Keeps(4, 4)),
        "'keeps' keeps the tensor 'kept' on itself, and partition 1 uses it",
    ),
    "counting buffer": (lambda: chain(counts), "keeps the tensor 'seen' on itself, and partition 1 uses it"),
    "shared generator": (
        lambda: with_generator(chain(draws)),
        r"partitions 0 and 1 draw from one torch\.Generator .* each module",
    ),
    "forces": (lambda: chain(forces), "the model computes gradients in its forward, behind a boundary"),
    "changed parameter": (lambda: chain(renormalises), "changes the parameter 'scale' .* after optimizer.step"),
    "backward in forward": (lambda: chain(differentiates), "was differentiated by itself"),
    "detach_": (lambda: chain(detaches), "calls 'detach_' in partition 1"),
    "unsqueeze_": (lambda: chain(unsqueezes), "calls 'unsqueeze_' in partition 1"),
    "stale view": (
        lambda: chain(changes_a_base),
        "does not reach the view of the same memory|has made in another partition",
    ),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype", "ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, message = REFUSED[name]
    model = make()
    kind = type(model)
    x = SEQUENCES if name in ("sequence first", "transformer") else X
    with pytest.raises((ValueError, RuntimeError), match=message):
        pipelined(model, x[:2], chunks=3, devices=TWO, balance={"layers.2": 1})
    assert type(model) is kind  # The plain model is left.
    assert all([parameter.grad is None for parameter in model.parameters()])


# -------------------------------------------------------------------------------------------------------------- right


@dataclass
class Record:
    x: Tensor
    table: Any = None


class Pair(NamedTuple):
    x: Tensor
    y: Any


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Held(nn.Linear):
    """A layer that takes what holds a tensor."""

    def forward(self, held: Any) -> Tensor:
        return super().forward(held.x)


def captured(self: Any, x: Tensor) -> Tensor:
    return self.held(Holder(self.run(x, lambda k, x: x)))


def in_a_class_of_its_own(self: Any, x: Tensor) -> Any:
    class Outputs(NamedTuple):
        x: Tensor
        rows: list[Tensor]

    x = self.run(x, lambda k, x: x)
    return Outputs(x, [x * 2, x.sum(1)])


def recorded(self: Any, record: Record) -> Record:
    return Record(self.run(record.x, lambda k, x: x + record.table.mean()), None)


def crops(self: Any, images: list[Tensor]) -> Tensor:
    for layer in self.layers:
        images = [torch.tanh(layer(image)) for image in images]
    return torch.stack(images, 1)[:, 0]


def two_towers(self: Any, pair: list[Tensor]) -> Tensor:
    left, right = pair
    return self.run(left, lambda k, x: x + right)


def two_or_one(self: Any, x: Tensor, pair: list[Tensor | None]) -> Tensor:
    return self.run(x, lambda k, x: x if pair[k % 2] is None else x + pair[k % 2])


def masked(self: Any, mask: Tensor, x: Tensor) -> Tensor:
    return self.run(x, lambda k, x: x * mask)


def prompted(self: Any, x: Tensor) -> Tensor:
    """Use a leaf that is no parameter in both partitions."""
    return self.run(x, lambda k, x: x + self.kept if k in (0, 2) else x)


def changed(self: Any, x: Tensor) -> Tensor:
    """Change in place what the last partition imports."""
    a, b, c, d = self.layers
    kept = a(x) * 1
    x = c(b(kept * 1))
    kept.add_(x)
    return d(x) * kept  # type: ignore[no-any-return]


class Calling(nn.Linear):
    """A layer that calls itself or another: the search for elements of a container went round until Python gave up."""

    next: list[Callable[..., Tensor]]

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return super().forward(self.next[0](x, times - 1) if times else x)


def recursive() -> Net:
    alone, a, b = Calling(4, 4), Calling(4, 4), Calling(4, 4)
    alone.next, a.next, b.next = [alone], [b], [a]
    return net(lambda self, x: self.run(self.b(self.a(self.alone(x))), lambda k, x: x), alone=alone, a=a, b=b)


def multiplied(self: Any, x: Tensor, graph: Tensor) -> Tensor:
    return self.run(x, lambda k, x: torch.sparse.mm(graph, x.t()).t())


GRAPH = torch.eye(4, dtype=torch.float64).to_sparse()

#: What `frames/programs.py` does not draw.
RIGHT: dict[str, tuple[Callable[[], Net], Callable[[Tensor], tuple[Any, ...]]]] = {
    "plain object": (lambda: net(captured, held=Held(4, 4)), lambda x: (x,)),
    "class made in forward": (lambda: net(in_a_class_of_its_own), lambda x: (x,)),
    "dataclass": (lambda: net(recorded), lambda x: (Record(x, torch.ones(5)),)),
    "list of crops": (lambda: net(crops), lambda x: ([x, x * 2, x * 3],)),
    "two towers": (lambda: net(two_towers), lambda x: ([x, x.flip(1)],)),
    "list with None": (lambda: net(two_or_one), lambda x: (x, [x[:, :1], None])),
    "mask of one row": (lambda: net(masked), lambda x: (torch.ones(1, 4, dtype=x.dtype), x)),
    "leaf": (
        lambda: net(prompted, kept=torch.ones(4, dtype=torch.float64, requires_grad=True)),
        lambda x: (x,),
    ),
    "import changed in place": (lambda: net(changed), lambda x: (x,)),
    "modules that call each other": (recursive, lambda x: (x,)),
    "sparse argument": (lambda: net(multiplied), lambda x: (x, GRAPH)),
}


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Record):
        return [value.x]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("rows", [2, 3])
def test_right(name: str, rows: int) -> None:
    make, arguments = RIGHT[name]
    model: Any = make()
    plain_model = copy.deepcopy(model)
    pipelined(model, arguments(X[:rows]), chunks=3, devices=TWO, balance={"layers.2": 1})
    expected = [tensors(plain_model(*arguments(part))) for part in X.chunk(3)]
    result = tensors(model(*arguments(X)))
    for ours, parts in zip(result, zip(*expected), strict=True):
        torch.testing.assert_close(ours, torch.cat(parts), rtol=0, atol=0)
    sum([one.square().sum() for one in result]).backward()  # type: ignore[union-attr]
    sum([one.square().sum() for part in expected for one in part]).backward()  # type: ignore[union-attr]
    same(gradients(model), gradients(plain_model))
    if isinstance(model.kept, Tensor):
        same({"kept": model.kept.grad}, {"kept": plain_model.kept.grad})
