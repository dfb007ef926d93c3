"""Layers with skips: the decorator, and the two things that such a layer can yield."""

from __future__ import annotations

import functools
import threading
from abc import ABC
from collections.abc import Callable, Generator, Iterable, Set
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from torchgpipe.devices.typing import Leaf
from torchgpipe.skip.layout import skips_of
from torchgpipe.skip.namespace import Namespace, SkipKey
from torchgpipe.skip.tracker import current_skip_tracker

__all__ = ["Skippable", "pop", "skippable", "stash", "verify_skippables"]

M = TypeVar("M", bound=nn.Module)


class stash:
    """Puts a tensor away for a later layer: ``yield stash('name', tensor)``.

    Args:
        name: the name of the skip, as the layer has declared it
        tensor: a tensor of any shape, or None; anything else is a :exc:`TypeError` where it is yielded
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Leaf) -> None:
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
    """What a class is after :func:`skippable`, beside what it was. ::

        assert isinstance(Stash(), Skippable)

    A type checker does not see what a decorator adds to a class. A class that derives from this one, too, has
    :meth:`isolate` for the type checker as well, and is the same otherwise::

        @skippable(stash=['1to3'])
        class Layer1(Skippable, nn.Module):
            def forward(self, input):
                yield stash('1to3', input)
                return f1(input)

        layer = Layer1().isolate(Namespace())

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
        names = declared if only is None else _several(only, "only")
        if not names <= declared:
            raise ValueError(
                f"{type(self).__name__} declares {sorted(declared)}, so {sorted(names - declared)} cannot be isolated"
            )
        # Made here and not in the constructor, which is the user's.
        namespaces = self.__dict__.setdefault("_skip_namespaces", {})
        namespaces.update(dict.fromkeys(names, ns))
        return self

    def skip_key(self, name: str) -> SkipKey:
        """The identity of one of the layer's skips.

        Args:
            name: the name of the skip, as the layer has declared it
        """
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
    it was written with. It gains what :class:`Skippable` has. A subclass has the same skips, whether it has a
    ``forward`` of its own or not, unless it is decorated itself: then it has those.

    Args:
        stash: the names that the class stashes
        pop: the names that the class pops

    Raises:
        TypeError: ``stash`` or ``pop`` is a string, not several of them.
    """
    stashable, poppable = _several(stash, "stash"), _several(pop, "pop")

    def decorate(cls: type[M]) -> type[M]:
        own: Any = cls
        own.stashable_names = stashable
        own.poppable_names = poppable
        own.forward = _driven(own.forward)
        # To derive from Skippable is no more than a declaration of types.
        if not getattr(cls, "_drives_forward", False):
            own._drives_forward = True
            own.isolate = Skippable.isolate
            own.skip_key = Skippable.skip_key
            own.__repr__ = _marked(own.__repr__)
            own._load_from_state_dict = _taking_wrapped_keys(own._load_from_state_dict)
            own.__init_subclass__ = _driving_subclasses(cls)
            Skippable.register(cls)
        return cls

    return decorate


def _several(names: Iterable[str], argument: str) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"{argument} takes a list of names, but got the string '{names}'; write {argument}=['{names}']")
    return frozenset(names)


def _driving_subclasses(cls: Any) -> Any:
    """Makes what a subclass defines as its forward run like that of ``cls``."""
    own = cls.__dict__.get("__init_subclass__")

    def __init_subclass__(subclass: Any, /, **options: Any) -> None:
        (super(cls, subclass).__init_subclass__ if own is None else own.__get__(None, subclass))(**options)
        if "forward" in subclass.__dict__:
            subclass.forward = _driven(subclass.forward)

    return classmethod(__init_subclass__)


#: What a layer has declared and not done yet in a call: pairs of `stash` or `pop` and a name.
_Open = set[tuple[type, str]]


class _Driving(threading.local):
    """The layer that this thread is in, and what it still has to do."""

    def __init__(self) -> None:  # in every thread
        self.layer: Any = None
        self.open: _Open | None = None


_driving = _Driving()


def _driven(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a forward that is a generator to its end."""

    @functools.wraps(forward)
    def driven(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, outer_open = _driving.layer, _driving.open
        if outer is self:  # super().forward(...), a part of the layer's call
            return _run(self, forward(self, *args, **kwargs), outer_open)  # type: ignore[arg-type]
        open_: _Open = {(stash, name) for name in self.stashable_names}
        open_.update([(pop, name) for name in self.poppable_names])
        _driving.layer, _driving.open = self, open_
        try:
            output = _run(self, forward(self, *args, **kwargs), open_)
        finally:
            _driving.layer, _driving.open = outer, outer_open
        if open_:
            names = ", ".join(sorted(f"{kind.__name__}('{name}')" for kind, name in open_))
            raise RuntimeError(
                f"{type(self).__name__} has declared but not done: {names}; yield each declared name at every call "
                "(None can be stashed), or do not declare it"
            )
        return output

    return driven


def _run(layer: Any, steps: Any, open_: _Open) -> Any:
    """Does what a forward yields, and gives what it returns."""
    if not isinstance(steps, Generator):
        return steps
    try:
        step = next(steps)
        while True:
            try:
                reply = _do(layer, step, open_)
            except BaseException as error:
                # Where the layer has yielded: the traceback shows its line, and its with blocks are left.
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as end:
        return end.value


def _do(layer: Any, step: Any, open_: _Open) -> Leaf:
    """Does what a layer has yielded."""
    kind = type(layer).__name__
    if isinstance(step, stash):
        if step.name not in layer.stashable_names:
            raise RuntimeError(f"'{step.name}' has not been declared as stashable by {kind}: @skippable(stash=[...])")
        if not (step.tensor is None or isinstance(step.tensor, Tensor)):
            raise TypeError(
                f"{kind} stashes '{step.name}', which is {type(step.tensor).__name__}, but only a tensor or None can "
                "be stashed; stash each tensor under a name of its own"
            )
        current_skip_tracker().stash(layer.skip_key(step.name), step.tensor, layer)
        open_.discard((stash, step.name))
        return None
    if isinstance(step, pop):
        if step.name not in layer.poppable_names:
            raise RuntimeError(f"'{step.name}' has not been declared as poppable by {kind}: @skippable(pop=[...])")
        try:
            tensor = current_skip_tracker().pop(layer.skip_key(step.name))
        except KeyError:
            raise RuntimeError(
                f"{kind} pops '{step.name}', which no earlier layer has stashed, or which was popped already; stash "
                "it in a layer before, in the same namespace, and pop it once"
            ) from None
        open_.discard((pop, step.name))
        return tensor
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


def verify_skippables(module: nn.Module) -> None:
    """Checks that every skip of a model is stashed once and popped once, in this order. ::

        verify_skippables(nn.Sequential(Stash(), Middle(), Pop()))

    A layer's skips are those of all modules in it. :class:`~torchgpipe.GPipe` does this when it is made.

    Args:
        module: the layers are its children, in their order

    Raises:
        TypeError: some are not; the message lists all of them and what to do.
    """
    layers = [_skippables(index, *layer) for index, layer in enumerate(module.named_children())]
    later = {key: end for ends in layers for end in ends for key in end.stashes}
    faults: list[str] = []
    stashed: dict[SkipKey, _End] = {}
    popped: set[SkipKey] = set()

    for ends in layers:
        for end in ends:
            for key in end.stashes & end.pops:
                faults.append(
                    f"'{end.path}' declared '{key.name}' both as stashable and as poppable ({end.what}); "
                    "use two names, or a variable"
                )
            for key in end.stashes:
                if key in stashed:
                    faults.append(
                        f"'{end.path}' redeclared '{key.name}' as stashable but not isolated by namespace "
                        f"({end.what}), after '{stashed[key].path}'; isolate each pair: layer.isolate(Namespace())"
                    )
                stashed.setdefault(key, end)
        for end in ends:
            for key in end.pops:
                if key not in stashed:
                    hint = (
                        f"'{later[key].path}' stashes it only afterwards; change their order"
                        if key in later
                        else "stash it in an earlier layer, in the same namespace"
                    )
                    faults.append(
                        f"'{end.path}' declared '{key.name}' as poppable but it was not stashed ({end.what}); {hint}"
                    )
                elif key in popped:
                    faults.append(
                        f"'{end.path}' redeclared '{key.name}' as poppable but not isolated by namespace "
                        f"({end.what}); a skip is popped once, so stash it again under another name, or isolate each "
                        "pair: layer.isolate(Namespace())"
                    )
                popped.add(key)

    for key, end in stashed.items():
        if key not in popped:
            faults.append(
                f"no module declared '{key.name}' as poppable but stashed by '{end.path}' ({end.what}); pop it in a "
                "later layer, in the same namespace, or do not stash it"
            )
    if faults:
        raise TypeError("stashes and pops of the model do not match:\n\n" + "\n".join(f"* {fault}" for fault in faults))


class _End(NamedTuple):
    """A module with skips: its name in the model, which layer it is in, and its skips."""

    path: str
    what: str
    stashes: Set[SkipKey]
    pops: Set[SkipKey]


def _skippables(index: int, name: str, layer: nn.Module) -> list[_End]:
    return [
        _End(
            path,
            f"layer {index}, {type(module).__name__}",
            # Dicts, which are sets with an order.
            dict.fromkeys(skips_of([module], "stashable_names")).keys(),
            dict.fromkeys(skips_of([module], "poppable_names")).keys(),
        )
        for path, module in layer.named_modules(prefix=name)
    ]
