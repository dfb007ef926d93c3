"""Kinds of model that a pipeline could get wrong without a word: each is right, or refused and told what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Devices
from tests.front.models import TWO, Chain, chain, gradients, same
from tests.front.programs import Program, Run, move
from tests.layers import Using
from torchgpipe import pipelined

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

# ------------------------------------------------------------------------------------------------------------ refused


@move("pop")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    hidden: Tensor = run.model.state.pop("x")
    return x + hidden


@move("backward")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> None:
    if torch.is_grad_enabled():
        x.square().sum().backward(retain_graph=True)


@move("differentiate")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor | None:
    return torch.autograd.grad(x.sum(), y, retain_graph=True)[0] if x.requires_grad else None


@move("stale view")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    base = x * 1
    view = base[:, :2]
    x = run.call(run.call(base + 1))
    base.mul_(2)
    return x + view.repeat(1, 2)


@move("draw")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    return x * (torch.rand(x.shape, generator=run.model.generator) > 0.5) if run.model.training else x


@move("keep on a module")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> None:
    run.model.parts[0].kept = x


@move("kept on a module")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    return x * run.model.parts[0].kept  # type: ignore[operator]


@move("renew a parameter")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    run.model.square.data = run.model.square.data * 0.9
    return x @ run.model.square


@move("replace a parameter")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    run.model.square = nn.Parameter(run.model.square.detach() * 0.9)
    return x @ run.model.square


@move("coupled loss")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> None:
    run.loss = lambda: run.x.logsumexp(0).mean()  # type: ignore[method-assign]


Moves = list[tuple[str, int]]

CHANGES = "the model changes from call to call, in evaluation: the same rows"
SHARED = "is not that of the plain model, .* the model keeps state that another micro-batch changes"

#: What the model does in partition 0, where one tensor is there beside the input; what it does in partition 1; and what
#: it is told.
REFUSED: dict[str, tuple[Moves, Moves, str]] = {
    "coupled loss": ([], [("coupled loss", 0)], r"'loss' of 4 rows .* the rows are coupled"),
    "mean of rows": ([("mean of rows", 0)], [], r"coupled, as by x.mean\(0\)"),
    "sequence first": ([("sequence first", 1)], [], r"batch_first=True for 'recurrent'\?"),
    "hidden": ([], [("hidden", 1)], "'HiddenBackward' takes a tensor that 'AddBackward0' has made in ano"),
    "thread pool": ([], [("thread pool", 1)], "'MulBackward0' takes a tensor that .* has made in another"),
    "kept": ([("keep", 1)], [("kept", 0)], SHARED),
    "kept in a dict": ([("keep in a dict", 1)], [("kept in a dict", 0)], SHARED),
    "popped": ([("keep in a dict", 1)], [("pop", 0)], "a micro-batch fails in the pipeline .* return it instead"),
    "kept on a module": ([("keep on a module", 0)], [("kept on a module", 0)], SHARED),
    "buffer": ([("add to a buffer", 1)], [("sum of a buffer", 0)], CHANGES),
    "reassigned buffer": ([("add to a buffer", 0)], [("sum of a buffer", 0)], CHANGES),
    "generator": ([("draw", 0)], [("draw", 0)], SHARED),
    "gradient": ([], [("differentiate", 1)], "the model computes gradients in its forward, behind a boundary"),
    "parameter": ([("change a parameter", 0)], [], r"changes the parameter 'loose\.0' .* after optimizer.step"),
    "renewed parameter": ([("renew a parameter", 0)], [], "changes the parameter 'square' .* after optimizer.step"),
    "replaced parameter": ([("replace a parameter", 0)], [], "changes the parameter 'square' .* after optimizer.step"),
    "backward": ([("backward", 0)], [], "was differentiated by itself"),
    "stale view": (
        [("stale view", 0)],
        [],
        "the gradient of 'parts.0.* a tensor in a way that the pipeline does not see",
    ),
}


def in_pipeline(name: str, devices: list[str], **options: Any) -> Any:
    first, last, _ = REFUSED[name]
    call = [("call", 0)]
    model = Program([*call, *first, *call, *call, *last, *call], [("plain", 0)] * 4, tied=False).double()
    model.generator = torch.Generator().manual_seed(3)  # type: ignore[assignment]
    try:
        return pipelined(model, X[:2], chunks=3, devices=devices, balance={"parts.2": 1}, **options)
    except (ValueError, RuntimeError):
        assert type(model) is Program  # The plain model is left.
        assert all([parameter.grad is None for parameter in model.parameters()])
        raise


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=REFUSED[name][2]):
        in_pipeline(name, TWO)


@pytest.mark.late
def test_a_view_of_what_is_changed_in_place_on_another_device() -> None:
    with pytest.raises(ValueError, match=r"the output '.*' of micro-batch 0 is not that of the plain model"):
        in_pipeline("stale view", ["late:0", "late:1"])


def test_rows_that_are_not_where_they_are_looked_for() -> None:
    """The items of a list that is the only argument are the rows, and so is dimension 0 of the first tensor."""
    mask, whole = (
        torch.ones(1, 4, dtype=X.dtype),
        r"split along dimension 0: \['mask'\]; passed whole: \['x'\].*no_chunk=",
    )
    in_tuple = "cannot be joined.* lists with an item for each row .not so tuples, whose tensors are split.: .'images'"
    for forward, sample, message in ((crops, ([X[:3], X[:3] * 2],), in_tuple), (masked, (mask, X[:3]), whole)):
        with pytest.raises(ValueError, match=message):
            pipelined(chain(forward).double(), sample, chunks=3, devices=TWO)
    model: Any = pipelined(chain(masked).double(), (mask, X[:3]), chunks=3, devices=TWO, no_chunk="mask")
    assert len(model(mask, X)) == len(X)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype", "ignore:enable_nested_tensor is True")
def test_a_transformer_that_takes_sequences_first() -> None:
    model = nn.Transformer(4, 2, 2, 1, 8, 0.0).double().eval()
    x = X[:2, None].repeat(1, 5, 1)
    with pytest.raises(ValueError, match=r"batch_first=True for '.*'\?"):
        pipelined(model, (x, x), chunks=3, devices=TWO)


# -------------------------------------------------------------------------------------------------------------- right


@dataclass
class Record:
    x: Tensor
    table: Any = None


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def run(model: Any, x: Tensor, between: Callable[[int, Tensor], Tensor] = lambda k, x: x) -> Tensor:
    """Call four layers, of which the last two are in partition 1."""
    for k, layer in enumerate(model.layers[:4]):
        x = between(k, torch.tanh(layer(x)))
    return x


def captured(self: Any, x: Tensor) -> Tensor:
    held: Tensor = self.layers[4](Holder(run(self, x)))
    return held


def in_a_class_of_its_own(self: Any, x: Tensor) -> Any:
    class Outputs(NamedTuple):
        x: Tensor
        rows: list[Tensor]

    x = run(self, x)
    return Outputs(x, [x * 2, x.sum(1)])


def recorded(self: Any, record: Record) -> Record:
    return Record(run(self, record.x, lambda k, x: x + record.table.mean()), None)


def crops(self: Any, images: list[Tensor]) -> Tensor:
    for layer in self.layers:
        images = [torch.tanh(layer(image)) for image in images]
    return torch.stack(images, 1)[:, 0]


def two_towers(self: Any, pair: list[Tensor]) -> Tensor:
    left, right = pair
    return run(self, left, lambda k, x: x + right)


def two_or_one(self: Any, x: Tensor, pair: list[Tensor | None]) -> Tensor:
    return run(self, x, lambda k, x: x if pair[k % 2] is None else x + pair[k % 2])


def masked(self: Any, mask: Tensor, x: Tensor) -> Tensor:
    return run(self, x, lambda k, x: x * mask)


def prompted(self: Any, x: Tensor) -> Tensor:
    """Use a leaf that is no parameter in both partitions."""
    return run(self, x, lambda k, x: x + self.leaf if k in (0, 2) else x)


def changed(self: Any, x: Tensor) -> Tensor:
    """Change in place what the last partition imports."""
    a, b, c, d = self.layers
    kept = a(x) * 1
    x = c(b(kept * 1))
    kept.add_(x)
    return d(x) * kept  # type: ignore[no-any-return]


def reshaped(self: Any, x: Tensor) -> Tensor:
    """Change the shape of what the last partition imports."""
    a, b, c, d = self.layers
    kept = a(x) * 1
    x = c(b(kept * 1))
    kept.unsqueeze_(1)
    return d(x) * kept[:, 0]  # type: ignore[no-any-return]


def multiplied(self: Any, x: Tensor, graph: Tensor) -> Tensor:
    return run(self, x, lambda k, x: torch.sparse.mm(graph, x.t()).t())


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def with_options(self: Any, pair: Pair, options: dict[str, Tensor]) -> Tensor:
    return run(self, pair.x, lambda k, x: x + pair.y * options["scale"])


class WithTable(nn.Linear):
    """A layer that registers a buffer in its first forward, in the place of an attribute."""

    table: Tensor | None

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.table = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            del self.table
            self.register_buffer("table", torch.arange(4).to(x))
        assert self.table is not None
        return super().forward(x) + self.table


class Calling(nn.Linear):
    """A layer that calls itself or another: the search for elements of a container went round until Python gave up."""

    next: list[Callable[..., Tensor]]

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return super().forward(self.next[0](x, times - 1) if times else x)


def viewed_before_a_change(self: Chain, x: Tensor) -> Tensor:
    """Use views in later partitions that are older than a change in place: autograd makes their nodes anew there.

    A bug: those nodes were taken for some of the later partition, which was refused with a text on thread pools.
    """
    x = self.layers[0](x)
    view, turned = x[:, :2], x.t()
    x[:, 2:] = 0
    for layer in self.layers[1:]:
        x = layer(x)
    return x[:, :2] * view + turned.t()[:, 2:]


def with_leaf() -> nn.Module:
    model = chain(prompted)
    model.leaf = torch.ones(4, dtype=torch.float64, requires_grad=True)
    return model  # type: ignore[no-any-return]


def recursive() -> nn.Module:
    alone, a, b = layers = [Calling(4, 4) for _ in range(3)]
    alone.next, a.next, b.next = [alone], [b], [a]
    return chain(lambda self, x: run(self, self.layers[4](self.layers[5](self.layers[6](x)))), *linear(), *layers)


def linear() -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(4)]


def complex_linear() -> list[nn.Module]:
    return [nn.Linear(4, 4, dtype=torch.complex128) for _ in range(4)]


GRAPH = torch.eye(4, dtype=torch.float64).to_sparse()

#: What `front/programs.py` does not draw.
RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], tuple[Any, ...]]]] = {
    "plain object": (lambda: chain(captured, *linear(), Using(lambda linear, held: linear(held.x))), lambda x: (x,)),
    "class made in forward": (lambda: chain(in_a_class_of_its_own), lambda x: (x,)),
    "dataclass": (lambda: chain(recorded), lambda x: (Record(x, torch.ones(5)),)),
    "tuple of crops": (lambda: chain(crops), lambda x: ((x, x * 2, x * 3),)),
    "two towers": (lambda: chain(two_towers), lambda x: ((x, x.flip(1)),)),
    "list with None": (lambda: chain(two_or_one), lambda x: (x, [x[:, :1], None])),
    "leaf": (with_leaf, lambda x: (x,)),
    "import changed in place": (lambda: chain(changed), lambda x: (x,)),
    "views made before a change in place": (lambda: chain(viewed_before_a_change), lambda x: (x,)),
    "import reshaped in place": (lambda: chain(reshaped), lambda x: (x,)),
    # After the sample there was both the attribute and the buffer.
    "buffer made in forward": (lambda: chain(run, *[WithTable() for _ in range(4)]), lambda x: (x,)),
    "modules that call each other": (recursive, lambda x: (x,)),
    # Its numbers were to be equal in all digits, since no number was real.
    "complex": (lambda: chain(run, *complex_linear()), lambda x: (torch.complex(x, x.flip(1)),)),
    # The two were taken for the positional and the keyword arguments.
    "named tuple and dict": (lambda: chain(with_options), lambda x: (Pair(x, x.flip(1)), {"scale": x})),
    "sparse argument": (lambda: chain(multiplied), lambda x: (x, GRAPH)),
}


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Record):
        return [value.x]
    return [tensor for item in value for tensor in tensors(item)]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("rows", [2, 3])
def test_right(name: str, rows: int) -> None:
    make, arguments = RIGHT[name]
    model: Any = make().double()
    plain = copy.deepcopy(model)
    pipelined(model, arguments(X[:rows]), chunks=3, devices=TWO, balance={"layers.2": 1})
    expected = [tensors(plain(*arguments(part))) for part in X.chunk(3)]
    result = tensors(model(*arguments(X)))
    for ours, parts in zip(result, zip(*expected), strict=True):
        torch.testing.assert_close(ours, torch.cat(parts), rtol=0, atol=0)
    sum([one.abs().square().sum() for one in result]).backward()  # type: ignore[union-attr]
    sum([one.abs().square().sum() for part in expected for one in part]).backward()  # type: ignore[union-attr]
    same(gradients(model), gradients(plain))
    if name == "leaf":
        same({"leaf": model.leaf.grad}, {"leaf": plain.leaf.grad})


@pytest.mark.parametrize("where", [(0,), (0, 1), (2, 3)])
def test_a_generator_of_the_models_own(where: tuple[int, ...], devices: Devices) -> None:
    """In one partition, draws have a certain order."""
    model: Any = Chain().double()
    model.generator = torch.Generator().manual_seed(3)
    model.between = lambda self, k, x, first: (
        x * (torch.rand(x.shape, generator=self.generator) > 0.5) if self.training and k in where else x
    )
    plain = copy.deepcopy(model)
    pipelined(model, X[:2], chunks=3, devices=devices(2), balance=[2, 2])
    for _ in range(2):
        for part in X.chunk(3):
            (plain(part).square().sum()).backward()
        model(X).square().sum().backward()
        same(gradients(model), gradients(plain))
    assert torch.equal(model.generator.get_state(), plain.generator.get_state())
