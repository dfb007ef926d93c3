"""What identifies a skip: its name, within a namespace."""

from __future__ import annotations

import uuid
from functools import total_ordering
from typing import NamedTuple

__all__ = ["Namespace", "SkipKey"]


@total_ordering
class Namespace:
    """Keeps skips of the same name apart, where a block of layers occurs several times.

    Copies of a namespace are equal to it: the layers of a copied model still find each other, also when they
    were copied one by one.

    Example::

        ns = Namespace()
        layers = [Stash().isolate(ns), Middle(), Pop().isolate(ns)]
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace '{self.id}'>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __lt__(self, other: object) -> bool:
        return self.id < other.id if isinstance(other, Namespace) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)


class SkipKey(NamedTuple):
    """A skip. Without a namespace its name is shared by the whole model."""

    namespace: Namespace | None
    name: str
