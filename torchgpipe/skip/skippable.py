"""Declare the skips of a class of layers."""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from torchgpipe.skip.drive import drive
from torchgpipe.skip.namespace import Namespace, SkipKey

__all__ = ["Skippable", "skippable"]

M = TypeVar("M", bound=nn.Module)


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
        own.forward = drive(own.forward)
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
            subclass.forward = drive(subclass.forward)

    return classmethod(__init_subclass__)


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
