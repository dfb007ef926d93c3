"""An SVG, composed of pieces, and the two shapes that several pictures have: a timetable and a chart.

The pages embed the SVG in their HTML, so its text has the colour of the page, light or dark. A standalone file, as in
the README, falls back to a grey that is readable on both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

#: The colours of timelines.
FORWARD, RECOMPUTATION, BACKWARD, COPY = "#56B4E9", "#F5D76E", "#009E73", "#CC79A7"
OF_INPUT, OF_WEIGHTS = "#00604A", "#9BDCC4"
INK = {FORWARD: "#000", RECOMPUTATION: "#000", BACKWARD: "#fff", COPY: "#000", OF_INPUT: "#fff", OF_WEIGHTS: "#000"}
TEXT = "var(--color-foreground-primary, #808080)"
FAINT = "var(--color-foreground-border, #a0a0a0)"
ROW = "var(--color-background-secondary, rgba(128, 128, 128, 0.12))"
#: The colour of each kind of work, as timelines name the kinds.
COLOURS = {
    "forward": FORWARD,
    "recomputation": RECOMPUTATION,
    "backward": BACKWARD,
    "backward of the input": OF_INPUT,
    "backward of the weights": OF_WEIGHTS,
}

Points = Sequence[tuple[float, float]]


class Picture:
    """An SVG, composed of pieces."""

    def __init__(self, title: str, width: float, height: float, scale: float = 1.0) -> None:
        box = f'viewBox="0 0 {width:g} {height:g}" width="{scale * width:g}"'
        font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" {font}>'
        self._pieces = [head, f"<title>{title}</title>"]

    def __str__(self) -> str:
        return "\n".join([*self._pieces, "</svg>\n"])

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, label: str = "", round: int = 2
    ) -> None:
        frame = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round}"'
        self._pieces.append(f'<rect {frame} style="fill:{colour}"/>')
        if label:
            self.text(x + width / 2, y + height / 2, label, "middle", INK.get(colour, TEXT), 13)

    def text(self, x: float, y: float, label: str, anchor: str = "start", colour: str = TEXT, size: float = 14) -> None:
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" dominant-baseline="central" font-size="{size:g}"'
        self._pieces.append(f'<text {place} style="fill:{colour}">{label}</text>')

    def line(self, points: Points, colour: str = TEXT, width: float = 1.5, dash: str = "") -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        style = f"fill:none;stroke:{colour};stroke-width:{width}"
        self._pieces.append(f'<polyline points="{path}" style="{style}"{dashed}/>')

    def arrow(self, points: Points, colour: str = TEXT, width: float = 1.5, dash: str = "") -> None:
        """Draw a line with a head; its last piece is horizontal or vertical."""
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        self.line([*points[:-1], (x1 - 4 * dx, y1 - 4 * dy)], colour, width, dash)
        back, side = (x1 - 8 * dx, y1 - 8 * dy), (4 * dy, 4 * dx)
        corners = [(x1, y1), (back[0] - side[0], back[1] - side[1]), (back[0] + side[0], back[1] + side[1])]
        head = " ".join(f"{x:g},{y:g}" for x, y in corners)
        self._pieces.append(f'<polygon points="{head}" style="fill:{colour}"/>')

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        for colour, label in entries:
            self.box(x, y - 7, 14, 14, colour)
            self.text(x + 20, y, label, size=13)
            x += 34 + 7.2 * len(label)


class Work(NamedTuple):
    """Work of a row on micro-batch ``i``, from ``start`` to ``end``."""

    row: int
    start: float
    end: float
    kind: str
    i: int


LEFT, HEIGHT = 78.0, 34.0


def timetable(title: str, works: Sequence[Work], unit: float = 11.6, width: float = 0.0) -> Picture:
    """Draw a row for each device, and a box for each cell with the number of its micro-batch.

    Args:
        title: the title
        works: the cells
        unit: the width of a unit of time
        width: the width of the picture, or 0 for that of its contents
    """
    n, end, top = max(work.row for work in works) + 1, max(work.end for work in works), 34.0
    picture = Picture(title, width or LEFT + unit * end + 8, top + HEIGHT * n + 26)
    kinds = {work.kind for work in works}
    picture.legend(LEFT, 14, [(colour, kind) for kind, colour in COLOURS.items() if kind in kinds])
    for j in range(n):
        y = top + HEIGHT * j
        picture.text(0, y + HEIGHT / 2, f"device {j}")
        picture.box(LEFT, y + 2, unit * end, HEIGHT - 4, ROW)
    for row, start, stop, kind, i in works:
        x, y, wide = LEFT + unit * start + 0.5, top + HEIGHT * row + 2, unit * (stop - start)
        picture.box(x, y, wide - 1, HEIGHT - 4, COLOURS[kind], str(i) if wide >= 9 else "")
    y = top + HEIGHT * n + 8
    picture.arrow([(LEFT, y), (LEFT + unit * end, y)], FAINT)
    picture.text(LEFT + unit * end, y + 12, "time", "end", size=12)
    return picture


class Chart(NamedTuple):
    """A grid in a picture: its corner, its size, and what maps values to shares of the size."""

    picture: Picture
    left: float
    top: float
    width: float
    height: float
    across: Callable[[float], float]
    up: Callable[[float], float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        return self.left + self.width * self.across(x), self.top + self.height * (1 - self.up(y))

    def grid(self, columns: Sequence[int], rows: Mapping[float, str], label: str) -> None:
        for row, name in rows.items():
            self.picture.line([self.place(columns[0], row), self.place(columns[-1], row)], FAINT, 0.5)
            self.picture.text(self.left - 6, self.place(columns[0], row)[1], name, "end", size=12)
        for column in columns:
            self.picture.text(self.place(column, 0)[0], self.top + self.height + 14, str(column), "middle", size=12)
        self.picture.text(self.left + self.width / 2, self.top + self.height + 37, label, "middle", size=13)

    def curve(self, points: Points, marked: Sequence[float], colour: str, width: float = 2.5) -> None:
        self.picture.line([self.place(*point) for point in points], colour, width)
        for x, y in (self.place(*point) for point in points if point[0] in marked):
            self.picture.box(x - 3, y - 3, 6, 6, colour, round=3)
