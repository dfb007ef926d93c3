"""Identify a skip by its name and a namespace."""

from __future__ import annotations

import uuid
from functools import total_ordering
from typing import NamedTuple

__all__ = ["Namespace", "SkipKey"]


@total_ordering
class Namespace:
    """Keep skips of the same name apart, for a block of layers that occurs several times.

    A copy of a namespace equals the original. So the layers of a copied model still find each other's skips, even if
    the layers were copied one by one.

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
    """The identity of a skip. Without a namespace, the name belongs to the whole model."""

    namespace: Namespace | None
    name: str
