"""Pictures that look alike, and come out the same from the same figures. Only drawing itself imports Matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["COLORS", "INK", "open_axes", "save"]

INK = "#404040"
COLORS = ("#1f6f8b", "#e07a1f", "#8a5fbf", "#c2407a", "#7a8a1f", "#909090")


def open_axes(axes: Any, **settings: Any) -> None:
    """Axes without a frame, with a light grid, and what else `Axes.set` takes; a title is on the left."""
    title = settings.pop("title", None)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set(**settings)
    if title is not None:
        axes.set_title(title, loc="left", fontsize=11, color=INK)


def save(figure: Any, path: Path) -> None:
    """Writes a picture, as the ending of its name says. An SVG has no date and no random names in it."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"\ndrawn: {path.name}")
