"""A `@skippable` class stays the same class, its layers stash and pop, and errors say what they did wrong."""

from __future__ import annotations

import copy
import inspect
import pickle
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.plain import assert_same, outcome, plain_outcome
from tests.skip.layers import Pop, Stash, pair
from torchgpipe.skip import Namespace, Skippable, pop, skippable, stash

# ------------------------------------------------------------------------------------------ the class as it was


@skippable(stash=["a", "b"], pop=["c"])
class Layer(Skippable, nn.Module):
    """Documented."""

    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        self.register_buffer("count", torch.tensor(0))

    def extra_repr(self) -> str:
        return "extra"

    def forward(self, x: Tensor, factor: int = 1) -> Any:
        """Runs."""
        c = yield pop("c")
        yield stash("a", x * factor)
        yield stash("b", c)
        return self.linear(x)


def test_it_stays_the_class_that_it_was() -> None:
    assert type(Layer(3)) is Layer and Layer.__bases__ == (Skippable, nn.Module) and Layer.__doc__ == "Documented."
    assert list(inspect.signature(Layer).parameters) == ["width", "bias"]
    assert Layer.forward.__doc__ == "Runs." and Layer.forward.__name__ == "forward"
    assert list(inspect.signature(Layer.forward).parameters) == ["self", "x", "factor"]
    assert list(Layer(3).state_dict()) == ["count", "linear.weight", "linear.bias"]


def test_it_is_skippable() -> None:
    layer = Layer(3)
    assert isinstance(layer, Skippable) and issubclass(Layer, Skippable)
    assert layer.stashable_names == {"a", "b"} and layer.poppable_names == {"c"}
    assert not isinstance(nn.Linear(1, 1), Skippable)
    assert repr(layer).startswith("@skippable(Layer(\n  extra\n")
    assert repr(nn.Sequential(Stash())) == "Sequential(\n  (0): @skippable(Stash())\n)"


def test_names_are_given_in_a_list() -> None:
    with pytest.raises(TypeError, match=r"stash takes a list of names, but got the string 'skip'.*stash=\['skip'\]"):
        skippable(stash="skip")
    with pytest.raises(TypeError, match=r"pop=\['skip'\]"):
        skippable(pop="skip")
    with pytest.raises(TypeError, match=r"only=\['a'\]"):
        Layer(3).isolate(Namespace(), only="a")
    assert skippable(pop=iter("ab"))(type("Both", (nn.Module,), {})).poppable_names == {"a", "b"}  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------- what can be loaded


@skippable(stash=["outer"])
class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer(2)
        self.weight = nn.Parameter(torch.rand(2))


def test_keys_of_the_original_load() -> None:
    """The original kept a skippable layer in the attribute ``module`` of a wrapper."""
    target = nn.Sequential(Pop(), Outer(), nn.Linear(2, 2))
    saved = {name: tensor + 1 for name, tensor in target.state_dict().items()}
    target.load_state_dict({k.replace("1.", "1.module.").replace("inner.", "inner.module."): saved[k] for k in saved})
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, saved[name]), name


# ---------------------------------------------------------------------------------------------------------- copies


def run(*layers: nn.Module) -> Tensor:
    output: Tensor = nn.Sequential(*layers)(torch.ones(2))
    return output


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_work(copied: Callable[[nn.Sequential], nn.Sequential]) -> None:
    stashing: Any = Base()
    popping: Any = PopBase()
    stashing.isolate(ns := Namespace())
    again = copied(nn.Sequential(stashing, popping.isolate(ns)))
    assert isinstance(again[0], Base) and isinstance(again[0], Skippable)
    assert again[0].skip_key("skip") == again[1].skip_key("skip") == stashing.skip_key("skip")  # type: ignore[operator]
    assert torch.equal(run(*again), torch.full((2,), 2.0))


def test_copies_of_a_pair_that_were_made_apart_still_find_each_other() -> None:
    namesakes = pair(lambda x: x), pair(lambda x: -x, lambda x, skip: skip)
    (a, b), (c, d) = namesakes
    for function in (copy.copy, copy.deepcopy):
        assert torch.equal(run(function(a), function(c), function(b), function(d)), -torch.ones(2).sin())


# -------------------------------------------------------------------------------------------------------- isolation


def test_isolate() -> None:
    """All declared names or some can be isolated, of the layer and not of its class, copies or inner layers; the last
    call counts; the layer itself is returned."""
    alice, bob = Namespace(), Namespace()
    assert copy.copy(alice) == alice != bob and sorted([alice, bob]) == sorted([bob, alice])
    layer: Any = Layer(2)
    assert [layer.skip_key(name) for name in "abc"] == [(None, "a"), (None, "b"), (None, "c")]
    assert layer.isolate(alice) is layer
    assert [layer.skip_key(name).namespace for name in "abc"] == [alice, alice, alice]
    layer.isolate(bob, only=["b"])
    assert [layer.skip_key(name).namespace for name in "abc"] == [alice, bob, alice]
    layer.isolate(bob, only=["c"]).isolate(alice, only=["b"])
    assert [layer.skip_key(name).namespace for name in "abc"] == [alice, alice, bob]
    layer.isolate(bob, only=[])
    assert [layer.skip_key(name).namespace for name in "abc"] == [alice, alice, bob]
    again = copy.deepcopy(layer).isolate(Namespace())
    assert layer.skip_key("a").namespace == alice != again.skip_key("a").namespace
    assert Layer(2).skip_key("a").namespace is None
    with pytest.raises(ValueError, match=r"Layer declares \['a', 'b', 'c'\], so \['d'\] cannot be isolated"):
        layer.isolate(Namespace(), only=["a", "d"])
    block: Any = Outer()
    assert block.isolate(Namespace()).inner.skip_key("a").namespace is None


# ------------------------------------------------------------------------------------------------------- subclasses


@skippable(stash=["skip"])
class Base(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x * 2)
        return x


@skippable(pop=["skip"])
class PopBase(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return (yield pop("skip"))


class Inherits(Base):
    pass


class StashesAnother(Base):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x * 0)
        yield stash("skip", x * 3)  # The second value counts.
        return x


class Extends(Base):
    def forward(self, x: Tensor) -> Any:
        output: Tensor = super().forward(x * 4)
        return output / 4


class StashesAndExtends(Base):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x * 0)
        return super().forward(x * 5) / 5


@pytest.mark.parametrize(
    ("kind", "expected"), [(Inherits, 2), (StashesAnother, 3), (Extends, 8), (StashesAndExtends, 10)]
)
def test_subclasses_are_skippable(kind: type[nn.Module], expected: int) -> None:
    layer = kind()
    assert isinstance(layer, Skippable) and isinstance(layer, Base)
    found = run(layer, Pop(lambda x, skip: torch.stack([x, skip])))
    assert torch.equal(found, torch.tensor([[1.0], [expected]]).expand(2, 2))
    assert repr(layer) == f"@skippable({kind.__name__}())"
    forgets = type("Forgets", (kind,), {"forward": lambda self, x: x})
    with pytest.raises(RuntimeError, match=r"Forgets has declared but not done: stash\('skip'\)"):
        forgets()(torch.ones(1))


def test_a_subclass_may_declare_other_skips() -> None:
    @skippable(stash=["skip", "other"])
    class More(Base):
        def forward(self, x: Tensor) -> Any:
            output = super().forward(x)
            yield stash("other", x * 7)
            return output

    pop_other = layer_of(lambda self, x: x + (yield pop("other")), pop=["other"])
    layer = More()
    assert Base.stashable_names == {"skip"} and layer.stashable_names == {"skip", "other"}  # type: ignore[attr-defined]
    assert torch.equal(run(layer, Pop(lambda x, skip: x + skip), pop_other), torch.full((2,), 10.0))
    assert repr(layer) == "@skippable(More())"


# --------------------------------------------------------------------------------------------------- what is allowed


def layer_of(forward: Callable[..., Any], **names: Any) -> nn.Module:
    """Return a layer of the class Mine."""
    return skippable(**names)(type("Mine", (nn.Module,), {"forward": forward}))()


def test_a_forward_without_skips_need_not_be_a_generator() -> None:
    layer = layer_of(lambda self, x, *, factor: x * factor)
    assert layer(torch.ones(1), factor=3).item() == 3 and isinstance(layer, Skippable)


def test_blocks_with_skips_in_them(pipe: Pipe) -> None:
    """A layer may contain both ends of a skip, and be an end of another one."""

    @skippable(stash=["outer"])
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.open, self.close = pair()

        def forward(self, x: Tensor) -> Any:
            h = self.open(x)
            yield stash("outer", h)
            return self.close(h)

    pop_outer = layer_of(lambda self, x: x + (yield pop("outer")), pop=["outer"])
    layers = nn.Sequential(Block(), nn.Linear(2, 2), pop_outer)
    x = torch.rand(4, 2, requires_grad=True)
    model = pipe(layers, [1, 1, 1], chunks=2, checkpoint="always")
    assert_same(outcome(model, x), plain_outcome(layers, x, chunks=2))


# ------------------------------------------------------------------------------------- what is not, and what it says


def doing(*actions: Any) -> Callable[..., Any]:
    """Return a forward that yields these, or what functions make of its input."""

    def forward(self: nn.Module, x: Tensor) -> Any:
        for action in actions:
            yield action(x) if callable(action) and not isinstance(action, type) else action
        return x

    return forward


def caught(self: nn.Module, x: Tensor) -> Any:
    """A layer may catch the error, and it is still told that it has not popped."""
    try:
        skip = yield pop("skip")
    except RuntimeError:
        skip = x * 2
    yield stash("next", skip)
    return x


def stash_other(x: Tensor) -> Any:
    return stash("other", x)


def stash_list(x: Tensor) -> Any:
    return stash("skip", [x])  # type: ignore[arg-type]


NOT_STASHABLE = r"^'other' has not been declared as stashable by Mine: @skippable\(stash="
NOT_POPPABLE = r"^'other' has not been declared as poppable by Mine: @skippable\(pop="

#: Which actions, under which declarations, are which error.
WRONG: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (doing(), {"stash": ["skip"]}, RuntimeError, r"^Mine has declared but not done: stash\('skip'\); yield each"),
    (doing(), {"pop": ["a", "b"], "stash": ["c"]}, RuntimeError, r" done: pop\('a'\), pop\('b'\), stash\('c'\)"),
    (doing(stash_other), {}, RuntimeError, NOT_STASHABLE),
    (doing(stash_other), {"pop": ["other"]}, RuntimeError, NOT_STASHABLE),
    (doing(pop("other")), {}, RuntimeError, NOT_POPPABLE),
    (doing(pop("other")), {"stash": ["other"]}, RuntimeError, NOT_POPPABLE),
    (
        doing(pop("skip"), pop("skip")),
        {"pop": ["skip"]},
        RuntimeError,
        "^Mine pops 'skip', .* which was popped already",
    ),
    (caught, {"pop": ["skip"], "stash": ["next"]}, RuntimeError, r"done: pop\('skip'\)"),
    (doing(stash_list), {"stash": ["skip"]}, TypeError, "^Mine stashes 'skip', which is list, but only a tensor or"),
    (doing(lambda x: x), {"stash": ["skip"]}, TypeError, "^Mine yielded Tensor, but a skippable layer yields stash"),
    (doing(stash), {"stash": ["skip"]}, TypeError, "^Mine yielded type, but a skippable layer yields stash"),
]


@pytest.mark.parametrize(("forward", "names", "kind", "message"), WRONG)
def test_an_error_names_the_layer_and_in_a_pipeline_its_place(
    pipe: Pipe, forward: Callable[..., Any], names: dict[str, Any], kind: type[Exception], message: str
) -> None:
    layer = layer_of(forward, **names)
    with pytest.raises(kind, match=message):
        layer(torch.ones(1))
    if forward is caught:
        return
    pops, stashes = names.get("pop", ()), names.get("stash", ())
    first = layer_of(doing(*[lambda x, name=name: stash(name, x) for name in pops]), stash=pops)
    last = layer_of(doing(*map(pop, stashes)), pop=stashes)
    model = pipe(nn.Sequential(first, nn.Sequential(layer), last), [1, 1, 1], chunks=2)
    with pytest.raises(kind, match=message) as info:
        model(torch.ones(2, 1))
    assert info.value.__notes__[0].startswith("micro-batch 0 of 2, partition 1 (layers '1'..'1')")


def test_an_error_is_raised_where_the_layer_has_yielded() -> None:
    with pytest.raises(TypeError) as info:
        layer_of(doing(stash_list), stash=["skip"])(torch.ones(1))
    assert any(frame.line.startswith("yield action") for frame in traceback.extract_tb(info.value.__traceback__))


def test_an_error_leaves_the_blocks_that_the_layer_is_in() -> None:
    """Blocks are left before the error is handled: a suspended frame would keep its tensors, and here the mode."""
    tensors: list[weakref.ref[Tensor]] = []

    def forward(self: nn.Module, x: Tensor) -> Any:
        mine = torch.ones(1)
        tensors.append(weakref.ref(mine))
        with torch.no_grad():
            yield stash("other", x)

    try:
        layer_of(forward)(torch.ones(1))
    except RuntimeError:
        assert torch.is_grad_enabled()
    assert tensors[0]() is None


def test_an_error_in_a_nested_layer_does_not_affect_the_next_call() -> None:
    """A thread leaves every layer that it has entered, however a call ends."""

    class Fails(Base):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)
            if x.item() < 0:
                raise ZeroDivisionError
            return x

    layer = Fails()
    with pytest.raises(ZeroDivisionError):
        layer(-torch.ones(1))
    assert layer(torch.ones(1)).item() == 1
