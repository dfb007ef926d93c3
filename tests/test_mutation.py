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
"""


def test_a_call_is_found_by_the_function_around_it_and_by_what_is_called() -> None:
    def applied(part: str) -> str:
        return Mutation(part, "A.f", "", "").apply({Path("a"): "x = 1", Path("b"): SOURCE})[1]

    assert "self.z" not in applied("self.z.wait")
    assert "return 1" in applied("self.tie")
    assert "return x" in applied("self.tie[-1]")
    assert "with other():" in applied("self.lock")
    with pytest.raises(ValueError, match=r"is stale: wait is in 0 functions A\.f"):
        applied("wait")


def test_every_row_of_the_table_can_be_applied_and_names_a_test() -> None:
    sources = read(ROOT)
    for mutation in table():
        path, mutated = mutation.apply(sources)
        compile(mutated, path, "exec")
        file, _, function = mutation.test.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), mutation.test
