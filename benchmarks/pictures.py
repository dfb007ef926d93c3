"""Pictures that look alike, and come out the same from the same figures. Only drawing itself imports Matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["COLORS", "INK", "drawing", "open_axes", "save"]

INK = "#404040"
COLORS = ("#1f6f8b", "#e07a1f", "#8a5fbf", "#c2407a", "#7a8a1f", "#909090")


def drawing(draw: Callable[[dict[str, Any], Path], None]) -> Callable[[dict[str, Any], Path], None]:
    """Let a function that draws a result say so where it cannot: figures are worth having without their picture."""

    @wraps(draw)
    def drawn(result: dict[str, Any], path: Path) -> None:
        if find_spec("matplotlib") is None:
            print(f"\nnot drawn, for Matplotlib is missing: {path.name}")
        else:
            draw(result, path)

    return drawn


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
