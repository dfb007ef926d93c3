"""Layers with skips: the decorator, and the two things that such a layer can yield."""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from torchgpipe.skip.layout import skips_of
from torchgpipe.skip.namespace import Namespace, SkipKey
from torchgpipe.skip.tracker import current_skip_tracker
from torchgpipe.typing import Leaf

__all__ = ["Skippable", "pop", "skippable", "stash", "verify_skippables"]

M = TypeVar("M", bound=nn.Module)


class stash:
    """Puts a tensor away for a later layer: ``yield stash('name', tensor)``.

    Args:
        name: the name of the skip, as the layer has declared it
        tensor: a tensor of any shape, or None

    Raises:
        TypeError: ``tensor`` is something else.
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Leaf) -> None:
        if not (tensor is None or isinstance(tensor, Tensor)):
            raise TypeError(f"only a tensor or None can be stashed, but '{name}' is {type(tensor).__name__}")
        self.name = name
        self.tensor = tensor


class pop:
    """Takes the tensor that an earlier layer has put away: ``tensor = yield pop('name')``.

    Args:
        name: the name of the skip, as the layer has declared it
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(ABC):  # noqa: B024 -- nothing is abstract, it only registers classes
    """What a class is after :func:`skippable`, beside what it was: ``isinstance(layer, Skippable)``.

    Attributes:
        stashable_names (frozenset[str]): the names that the class stashes
        poppable_names (frozenset[str]): the names that the class pops
    """

    stashable_names: frozenset[str] = frozenset()
    poppable_names: frozenset[str] = frozenset()

    def isolate(self: M, ns: Namespace, *, only: Iterable[str] | None = None) -> M:  # type: ignore[misc]
        """Puts the layer's skips into a namespace, where only layers of the same namespace find them.

        Args:
            ns: the namespace
            only: the names to put there (default: all that the layer has declared)

        Returns:
            the layer itself

        Raises:
            ValueError: a name in ``only`` is not declared.
        """
        declared = type(self).stashable_names | type(self).poppable_names  # type: ignore[attr-defined]
        names = declared if only is None else frozenset(only)
        if not names <= declared:
            raise ValueError(
                f"{type(self).__name__} declares {sorted(declared)}, so {sorted(names - declared)} cannot be isolated"
            )
        # Made here and not in the constructor, which is the user's.
        namespaces = self.__dict__.setdefault("_skip_namespaces", {})
        namespaces.update(dict.fromkeys(names, ns))
        return self

    def skip_key(self, name: str) -> SkipKey:
        """The identity of one of the layer's skips."""
        return SkipKey(self.__dict__.get("_skip_namespaces", {}).get(name), name)


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Declares the skips of a class of layers.

    The ``forward`` of such a class is a generator. It yields :class:`stash` to put a tensor away and :class:`pop`
    to take one, and returns its output::

        @skippable(stash=['1to3'])
        class Layer1(nn.Module):
            def forward(self, input):
                yield stash('1to3', input)
                return f1(input)

        class Layer2(nn.Module):
            def forward(self, input):
                return f2(input)

        @skippable(pop=['1to3'])
        class Layer3(nn.Module):
            def forward(self, input):
                skip_1to3 = yield pop('1to3')
                return f3(input) + skip_1to3

    In a pipeline the tensor goes from the device of its stash straight to that of its pop. In a plain Sequential
    the layers do the same without one. Every declared name must be stashed, or popped, at each call.

    The class remains the same class: its constructor, attributes and the keys of its ``state_dict`` are those that
    it was written with. It gains what :class:`Skippable` has.

    Args:
        stash: the names that the class stashes
        pop: the names that the class pops
    """
    stashable, poppable = frozenset(stash), frozenset(pop)

    def decorate(cls: type[M]) -> type[M]:
        own: Any = cls
        own.stashable_names = stashable
        own.poppable_names = poppable
        own.isolate = Skippable.isolate
        own.skip_key = Skippable.skip_key
        own.forward = _driven(own.forward)
        own.__repr__ = _marked(own.__repr__)
        own._load_from_state_dict = _taking_wrapped_keys(own._load_from_state_dict)
        Skippable.register(cls)
        return cls

    return decorate


def _driven(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a forward that is a generator to its end."""

    @functools.wraps(forward)
    def driven(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        steps = result if isinstance(result, Generator) else _no_steps(result)
        open_names = {(stash, name) for name in self.stashable_names} | {(pop, name) for name in self.poppable_names}
        reply = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as end:
                if open_names:
                    names = ", ".join(f"{kind.__name__}('{name}')" for kind, name in sorted(open_names, key=str))
                    raise RuntimeError(f"{type(self).__name__} has declared but not done: {names}") from None
                return end.value
            reply = _do(self, step)
            open_names.discard((type(step), step.name))

    return driven


def _no_steps(output: Any) -> Generator[Any, Any, Any]:
    return output
    yield


def _do(layer: Any, step: Any) -> Leaf:
    """Does what a layer has yielded."""
    kind = type(layer).__name__
    if isinstance(step, stash):
        if step.name not in layer.stashable_names:
            raise RuntimeError(f"'{step.name}' has not been declared as stashable by {kind}: @skippable(stash=[...])")
        current_skip_tracker().stash(layer.skip_key(step.name), step.tensor)
        return None
    if isinstance(step, pop):
        if step.name not in layer.poppable_names:
            raise RuntimeError(f"'{step.name}' has not been declared as poppable by {kind}: @skippable(pop=[...])")
        try:
            return current_skip_tracker().pop(layer.skip_key(step.name))
        except KeyError:
            raise RuntimeError(
                f"{kind} pops '{step.name}', which no earlier layer has stashed, or another one has popped"
            ) from None
    raise TypeError(f"{kind} yielded {type(step).__name__}, but a skippable layer yields stash(...) and pop(...) only")


def _marked(text: Callable[[Any], str]) -> Callable[[Any], str]:
    @functools.wraps(text)
    def marked(self: Any) -> str:
        return f"@skippable({text(self)})"

    return marked


def _taking_wrapped_keys(load: Callable[..., None]) -> Callable[..., None]:
    """Takes the keys of the original as well, which has the layer in an attribute ``module`` of a wrapper."""

    @functools.wraps(load)
    def taking(self: Any, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        start = prefix + "module."
        if not hasattr(self, "module"):
            for key in [key for key in state_dict if key.startswith(start)]:
                state_dict[prefix + key[len(start) :]] = state_dict.pop(key)
        load(self, state_dict, prefix, *args, **kwargs)

    return taking


def verify_skippables(module: nn.Sequential) -> None:
    """Checks that every skip of a model is stashed once and popped once, in this order.

    A layer's skips are those of all modules in it.

    Raises:
        TypeError: some are not; the message lists all of them and what to do.
    """
    faults: list[str] = []
    stashed: dict[SkipKey, str] = {}
    popped: set[SkipKey] = set()
    later = {
        key: name for name, layer in module.named_children() for key in skips_of(layer.modules(), "stashable_names")
    }

    for index, (name, layer) in enumerate(module.named_children()):
        what = f"layer {index}, {type(layer).__name__}"
        own = list(skips_of(layer.modules(), "stashable_names"))
        for key in own:
            if isinstance(layer, Skippable) and {key.name} <= layer.stashable_names & layer.poppable_names:
                faults.append(
                    f"'{name}' declared '{key.name}' both as stashable and as poppable ({what}); "
                    "use two names, or a variable"
                )
            elif key in stashed:
                faults.append(
                    f"'{name}' redeclared '{key.name}' as stashable ({what}), after '{stashed[key]}'; isolate each "
                    "pair: layer.isolate(Namespace())"
                )
            stashed.setdefault(key, name)
        for key in skips_of(layer.modules(), "poppable_names"):
            if isinstance(layer, Skippable) and {key.name} <= layer.stashable_names & layer.poppable_names:
                popped.add(key)
            elif key not in stashed:
                hint = (
                    f"'{later[key]}' stashes it only afterwards; change their order"
                    if key in later
                    else "stash it in an earlier layer, in the same namespace"
                )
                faults.append(f"'{name}' declared '{key.name}' as poppable but it was not stashed ({what}); {hint}")
            elif key in popped:
                faults.append(
                    f"'{name}' redeclared '{key.name}' as poppable ({what}); a skip is popped once, so stash it again "
                    "under another name, or isolate each pair: layer.isolate(Namespace())"
                )
            popped.add(key)

    for key, name in stashed.items():
        if key not in popped:
            faults.append(
                f"no module declared '{key.name}' as poppable but stashed by '{name}'; pop it in a later layer, in the "
                "same namespace, or do not stash it"
            )
    if faults:
        raise TypeError("stashes and pops of the model do not match:\n\n" + "\n".join(f"* {fault}" for fault in faults))
