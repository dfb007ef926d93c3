"""What modules keep as attributes in their forward, where the model may read it: an auxiliary loss, a length.

Another process does not run the module, so there the attributes must come to stand for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["KeptAttributes"]

_nothing: Any = object()


class KeptAttributes:
    """The numbers, words and tensors that a module and those inside have as attributes now, and what becomes of them.

    Args:
        module: the module
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [vars(child) for child in module.modules()]
        self._before = [*map(_values, self._places)]

    def _set_since(self) -> Iterator[tuple[int, str, Any, Any]]:
        """Yield the number of the module, the name, and the value before and now, of each that was set since."""
        for k, (place, before) in enumerate(zip(self._places, self._before)):
            now = _values(place)
            for name in sorted(before.keys() | now.keys()):
                old, new = before.get(name, _nothing), now.get(name, _nothing)
                if old is not new and (isinstance(old, Tensor) or isinstance(new, Tensor) or old != new):
                    yield k, name, old, new

    def tensors(self) -> dict[tuple[int, str], Tensor]:
        """Return the tensors that were set since, by the numbers of the modules and the names."""
        return {(k, name): new for k, name, _, new in self._set_since() if isinstance(new, Tensor)}

    def exchange(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put ``change(tensor)`` in the place of each tensor that was set since."""
        for (k, name), tensor in self.tensors().items():
            self._places[k][name] = change(tensor)

    def put_back(self) -> bool:
        """Put back what there was, and return whether anything else has been set since."""
        since = [*self._set_since()]
        for k, name, old, _ in since:
            if old is _nothing:
                del self._places[k][name]
            else:
                self._places[k][name] = old
        return bool(since)


def _values(place: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in place.items() if isinstance(value, (int, float, str, type(None), Tensor))}
