"""The mutations and their table are those of the sources as they are; `mutation.py` runs them."""

from __future__ import annotations

import pytest

from tests.mutation import HEADER, MUTATIONS, ROOT, TABLE, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_can_be_applied(mutation: Mutation) -> None:
    file = ROOT / "torchgpipe" / mutation.file
    source = file.read_text()
    mutated = mutation.apply(source)
    assert mutated != source
    compile(mutated, file, "exec")


def test_a_stale_mutation_is_an_error() -> None:
    mutation = Mutation("", "", "x = 1\nif x:\n    pass", "if x:\n    x = 2")
    assert mutation.apply("def f():\n    x = 1\n    if x:\n        pass\n") == "def f():\n    if x:\n        x = 2\n"
    for source in ("x = 1\n", "x = 1\nif x:\n    pass\n" * 2, "x = 1\nif x:\n    pass  # or not\n"):
        with pytest.raises(ValueError, match="stale"):
            mutation.apply(source)


def test_table_lists_all_mutations_and_each_is_noticed() -> None:
    table = TABLE.read_text()
    assert table.startswith(HEADER)
    rows = [line.split(" | ") for line in table[len(HEADER) :].splitlines()]
    assert [(row[0].removeprefix("| "), row[1]) for row in rows] == [(each.name, each.file) for each in MUTATIONS]
    for _, _, test in rows:
        file, _, name = test.removesuffix(" |").strip("`").partition("::")
        assert f"def {name.split('::')[-1]}(" in (ROOT / "tests" / file).read_text()
