"""Pictures that look alike, and come out the same from the same figures. Only drawing itself imports Matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["COLORS", "INK", "new_figure", "open_axes", "save", "shared_legend"]

INK = "#404040"
COLORS = ("#1f6f8b", "#e07a1f", "#8a5fbf", "#c2407a", "#7a8a1f", "#909090")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def open_axes(axes: Any, *, grid: str = "y", **settings: Any) -> None:
    """Take the frame off axes, give them a light grid, and set what `Axes.set` takes; a title is on the left."""
    title = settings.pop("title", None)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    axes.set(**settings)
    if title is not None:
        axes.set_title(title, loc="left", fontsize=11, color=INK)


def shared_legend(figure: Any, panels: Iterable[Any]) -> None:
    """Put one legend beside all panels, with each label once."""
    labels = {text: line for axes in panels for line, text in zip(*axes.get_legend_handles_labels())}
    figure.legend(labels.values(), labels.keys(), loc="outside right upper", frameon=False)


def save(figure: Any, path: Path) -> None:
    """Write a picture, as the ending of its name says. An SVG has no date and no random names in it."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"\ndrawn: {path.name}")
