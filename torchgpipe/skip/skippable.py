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
    """A layer with skips. Every class that :func:`skippable` has decorated counts as a subclass. ::

        assert isinstance(Stash(), Skippable)

    A type checker does not see the methods that a decorator adds. To show it :meth:`isolate`, derive a class from this
    one as well. Nothing else changes::

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
        """Put the layer's skips into a namespace, so that only layers of the same namespace find them.

        Args:
            ns: the namespace
            only: the names to put into the namespace (default: all names that the layer has declared)

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
        # The dict is made here, because the constructor is the user's.
        namespaces = self.__dict__.setdefault("_skip_namespaces", {})
        namespaces.update(dict.fromkeys(names, ns))
        return self

    def skip_key(self, name: str) -> SkipKey:
        """Return the identity of one of the layer's skips.

        Args:
            name: the name of the skip, as the layer has declared it
        """
        return SkipKey(self.__dict__.get("_skip_namespaces", {}).get(name), name)


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Declare the skips of a class of layers.

    The ``forward`` of such a class is a generator. It yields :class:`stash` to put a tensor away, yields :class:`pop`
    to take a tensor, and returns its output::

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

    In a pipeline the tensor goes straight from the device of its stash to the device of its pop. The same layers
    compute the same in a plain Sequential. Each call must stash and pop every declared name.

    The decorator returns the same class, with the methods of :class:`Skippable` added. The constructor, the attributes
    and the keys of ``state_dict`` stay as they were. A subclass inherits the skips, even if it overrides ``forward``.
    If the subclass is decorated as well, its own declaration replaces the inherited one.

    Args:
        stash: the names that the class stashes
        pop: the names that the class pops

    Raises:
        TypeError: ``stash`` or ``pop`` is a single string instead of a list of names.
    """
    stashable, poppable = _several(stash, "stash"), _several(pop, "pop")

    def decorate(cls: type[M]) -> type[M]:
        patched: Any = cls
        patched.stashable_names = stashable
        patched.poppable_names = poppable
        patched.forward = drive(patched.forward)
        # Not `issubclass(cls, Skippable)`: a class may derive from it for its types only, and lacks all of this.
        if not getattr(cls, "_drives_forward", False):
            patched._drives_forward = True
            patched.isolate = Skippable.isolate
            patched.skip_key = Skippable.skip_key
            patched.__repr__ = _marked(patched.__repr__)
            patched._load_from_state_dict = _taking_wrapped_keys(patched._load_from_state_dict)
            patched.__init_subclass__ = _driving_subclasses(cls)
            Skippable.register(cls)
        return cls

    return decorate


def _several(names: Iterable[str], argument: str) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"{argument} takes a list of names, but got the string '{names}'; write {argument}=['{names}']")
    return frozenset(names)


def _driving_subclasses(cls: Any) -> Any:
    """Return an ``__init_subclass__`` that drives the ``forward`` of each subclass, too."""
    before = cls.__dict__.get("__init_subclass__")

    def __init_subclass__(subclass: Any, /, **options: Any) -> None:
        (super(cls, subclass).__init_subclass__ if before is None else before.__get__(None, subclass))(**options)
        if "forward" in subclass.__dict__:
            subclass.forward = drive(subclass.forward)

    return classmethod(__init_subclass__)


def _marked(text: Callable[[Any], str]) -> Callable[[Any], str]:
    @functools.wraps(text)
    def marked(self: Any) -> str:
        return f"@skippable({text(self)})"

    return marked


def _taking_wrapped_keys(load: Callable[..., None]) -> Callable[..., None]:
    """Load keys of the original as well, which kept the layer in the attribute ``module`` of a wrapper."""

    @functools.wraps(load)
    def taking(self: Any, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        start = prefix + "module."
        if not hasattr(self, "module"):
            for key in [key for key in state_dict if key.startswith(start)]:
                state_dict[prefix + key[len(start) :]] = state_dict.pop(key)
        load(self, state_dict, prefix, *args, **kwargs)

    return taking
