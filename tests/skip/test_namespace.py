"""Namespaces are unique, equal to their copies, and ordered."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from torchgpipe.skip import Namespace


def test_each_namespace_is_unique() -> None:
    a, b = Namespace(), Namespace()
    assert a == a and a != b and a != a.id and len({a, b, a}) == 2
    assert repr(a) != repr(b) and repr(a).startswith("<Namespace '")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda ns: pickle.loads(pickle.dumps(ns))])
def test_copies_are_equal(copied: Callable[[Any], Any]) -> None:
    ns = Namespace()
    assert copied(ns) == ns and hash(copied(ns)) == hash(ns) and copied(ns) != Namespace()


def test_namespaces_can_be_sorted() -> None:
    namespaces = [Namespace() for _ in range(9)]
    ordered = sorted(namespaces)
    assert all(a < b and b > a and a <= b and b >= a for a, b in pairwise(ordered))
    namespaces.reverse()
    assert sorted(namespaces) == ordered
    with pytest.raises(TypeError):
        assert Namespace() < None  # type: ignore[operator]
