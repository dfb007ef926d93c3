"""Pictures of curves, which come out the same from the same figures. Only drawing itself imports Matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Curve", "panels", "save"]

INK = "#404040"
COLORS = ("#1f6f8b", "#e07a1f", "#8a5fbf", "#c2407a", "#7a8a1f", "#909090", "#2f9e6e", "#b08b2e")
COLUMNS = 4


class Curve(NamedTuple):
    """A line of a panel.

    Attributes:
        name: in the legend, the same in every panel
        points: the places along the x-axis, each with a median and, if there are several turns, their range
        dashed: whether it is an ideal and nothing measured
    """

    name: str
    points: list[tuple[float, Mapping[str, float]]]
    dashed: bool = False


def panels(drawn: Mapping[str, Sequence[Curve]], x: str, y: str) -> Any:
    """Return a figure with a panel for each title, all with the same axes and one legend; None if there is none."""
    if not drawn:
        return None
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(drawn))
    lines = -(-len(drawn) // columns)
    figure = Figure(figsize=(3.6 * columns + 2.4, 3.5 * lines + 0.4), layout="constrained")
    places = list(figure.subplots(lines, columns, squeeze=False).flat)
    names = list(dict.fromkeys(curve.name for curves in drawn.values() for curve in curves if not curve.dashed))
    labels: dict[str, Any] = {}
    for axes, (title, curves) in zip(places, drawn.items()):
        for curve in curves:
            along, spreads = zip(*sorted(curve.points, key=lambda point: point[0]), strict=True)
            middle = [turns["median"] for turns in spreads]
            ends = [[turns.get(end, turns["median"]) for turns in spreads] for end in ("low", "high")]
            error = [[abs(median - value) for median, value in zip(middle, values)] for values in ends]
            color = INK if curve.dashed else COLORS[names.index(curve.name) % len(COLORS)]
            style = {"linestyle": ":", "linewidth": 1} if curve.dashed else {"marker": "o", "markersize": 4}
            drawn_curve = axes.errorbar(along, middle, None if curve.dashed else error, color=color, capsize=3, **style)
            labels.setdefault(curve.name, drawn_curve)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        axes.grid(axis="y", alpha=0.3)
        axes.set(xlabel=x, xticks=sorted({place for curve in curves for place, _ in curve.points}), ylim=(0, None))
        axes.set_title(title, loc="left", fontsize=11, color=INK)
    for axes in places[len(drawn) :]:
        axes.set_axis_off()
    figure.supylabel(y, fontsize=10)
    figure.legend(labels.values(), labels.keys(), loc="outside right upper", frameon=False)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a picture, as the ending of its name says. An SVG has no date and no random names in it."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"\ndrawn: {path.name}")
