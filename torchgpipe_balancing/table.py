"""Print a table, for profiles and plans."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence

__all__ = ["WIDTH", "table"]

#: The most letters of a printed line: what a page of the documentation shows on a usual screen.
WIDTH = 92


def table(rows: Sequence[Sequence[str]], words: Collection[int] = (0,), indent: int = 0) -> list[str]:
    """Return the lines of a table.

    Args:
        rows: the cells of each row
        words: the columns that are aligned to the left; the last column is wrapped where a line would be too long
        indent: the spaces before each line
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    start = indent + sum(widths[:-1]) + 2 * len(widths[:-1])
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if k in words else cell.rjust(width) for k, (cell, width) in enumerate(zip(row, widths))
        ]
        wrapped = textwrap.wrap(cells.pop(), max(20, WIDTH - start), drop_whitespace=False) or [""]
        lines.append(" " * indent + "  ".join([*cells, wrapped[0]]))
        lines += [" " * start + more.lstrip() for more in wrapped[1:]]
    return [line.rstrip() for line in lines]
