"""Mutations are found by names and syntax trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation import ROOT, Mutation, read, table

SOURCE = """\
class A:
    def f(self):  # moved, and written in another way
        self.z.wait( 1,
            2 )
        with self.lock, other():
            return self.tie(1, x)

    def g(self):
        with self.lock: return 2
"""


def apply(place: str, part: str, *sources: str) -> str:
    given = {Path(str(k)): source for k, source in enumerate(sources)}
    return Mutation(part, place, "", "").apply(given)[1]


def test_a_call_is_found_by_the_function_around_it_and_by_what_is_called() -> None:
    assert "self.z" not in apply("A.f", "self.z.wait", "x = 1", SOURCE)
    assert "return 1" in apply("A.f", "self.tie", SOURCE)
    assert "return x" in apply("A.f", "self.tie[-1]", SOURCE)
    assert "with other():" in apply("A.f", "self.lock", SOURCE)
    assert "with self.lock:" in apply("A.f", "other", SOURCE)
    assert apply("A.g", "self.lock", SOURCE).endswith("if True:\n            return 2")


@pytest.mark.parametrize("part", ["self.z", "wait", "self.z.wait(1, 2)", "x"])
def test_a_stale_mutation_is_an_error(part: str) -> None:
    with pytest.raises(ValueError, match=r"is stale: .* is in 0 functions A\.f"):
        apply("A.f", part, SOURCE)
    with pytest.raises(ValueError, match=r"2 functions A\.g"):
        apply("A.g", "self.lock", SOURCE, SOURCE)


def test_every_row_of_the_table_can_be_applied_and_names_a_test() -> None:
    sources = read(ROOT)
    assert not [fault for mutation in table()[1] if (fault := mutation.fault(sources))]
