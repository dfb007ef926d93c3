"""Mutations are found by names and syntax trees; `mutation.py --check` verifies that all are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation import Mutation

SOURCE = """\
class A:
    def f(self):  # moved, and written in another way
        if (self.x
                and self.y): self.z( 1 ); return 2

    def g(self):
        self.z(1); return 2
"""


def apply(place: str, old: str, new: str, *sources: str) -> str:
    return Mutation("", place, old, new).apply({Path(str(k)): source for k, source in enumerate(sources)})[1]


def test_a_mutation_is_found_by_the_name_of_the_place_and_the_syntax_tree() -> None:
    expected = "if self.x and self.y:\n            return 3"
    assert expected in apply("A.f", "self.z(1)\nreturn 2", "return 3", "x = 1", SOURCE)
    assert "if self.x:" in apply("A.f", "self.x and self.y", "self.x", SOURCE)
    assert apply("x", "1", "2", "x = 1", SOURCE) == "x = 2"


@pytest.mark.parametrize("old", ["self.z(2)", "self.z(1)\nreturn", "self.z"])
def test_a_stale_mutation_is_an_error(old: str) -> None:
    with pytest.raises(ValueError, match=r"is stale: its code occurs 0 times in A\.g"):
        apply("A.g", old, "pass", SOURCE)
    with pytest.raises(ValueError, match=r"2 times in A\.g"):
        apply("A.g", "return 2", "pass", SOURCE, SOURCE)
