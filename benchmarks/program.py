"""The command line of a benchmark, what it prints, and the files that it writes.

    command = Command("speed", __doc__, show=show, draw=draw, sizes=TASKS, devices=True)
    command.add("--scale", type=int, default=1, help="...")
    args = command.parse()
    command.finish(unit="samples/s", rows=measure(args))

A result is written to `results/NAME.json`, or to --json, with what it was measured on; its picture beside it.
With --draw nothing is measured: the tables and the picture are made of the JSON that is there.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks.pictures import save
from benchmarks.records import RESULTS, environment, write

__all__ = ["Budget", "Command", "Progress"]

Result = dict[str, Any]


class Command:
    """A benchmark, as it is started from a shell.

    Args:
        name: of the benchmark, and of its result
        about: the docstring of its module, whose first line is shown as help
        show: makes tables of a result, by their titles
        draw: makes a figure of a result, or None if there is nothing to draw; gives the option --draw
        sizes: choices of --size, the default first
        peers: choices of --peers, all of them by default
        devices: whether there is an option --devices, by default all GPUs, or the CPU
        device: whether there is an option --device, by default the CPU
        seconds: what is not started any more when the time of --seconds is spent; no such option if empty
    """

    def __init__(
        self,
        name: str,
        about: str | None,
        *,
        show: Callable[[Result], dict[str, str]] = lambda result: {},
        draw: Callable[[Result], Any] | None = None,
        sizes: Iterable[str] = (),
        peers: Sequence[str] = (),
        devices: bool = False,
        device: bool = False,
        seconds: str = "",
    ) -> None:
        self._name, self._show, self._draw = name, show, draw
        parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
        self.add, self.error = parser.add_argument, parser.error
        self._parse = parser.parse_args
        if sizes := list(sizes):
            self.add("--size", choices=sizes, default=sizes[0])
        if peers:
            self.add("--peers", nargs="+", choices=peers, default=list(peers), help="all of them by default")
        if devices:
            found = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
            self.add("--devices", nargs="+", default=found or ["cpu"], help="all GPUs by default, or the CPU")
        if device:
            self.add("--device", default="cpu")
        if seconds:
            self.add("--seconds", type=Budget, default=Budget(), help=f"start no further {seconds} after so many")
        self.add("--json", type=Path, help="where the result is written")
        if draw is not None:
            self.add("--draw", action="store_true", help="measure nothing, draw the JSON that is there")

    def parse(self) -> argparse.Namespace:
        """Return the options, unless there is only something to draw."""
        args = self._parse()
        cuda = "" if getattr(args, "device", "cpu") == "cpu" else "-cuda"
        self._path: Path = args.json or RESULTS / f"{self._name}{cuda}.json"
        args.json = self._path
        if getattr(args, "draw", False):
            self._present(json.loads(self._path.read_text()))  # Without it, this raises.
            raise SystemExit
        self.environment = environment()
        return args

    def known(self) -> Result:
        """Return the result that is there already, or nothing."""
        result: Result = json.loads(self._path.read_text()) if self._path.exists() else {}
        return result

    def write(self, **content: Any) -> Result:
        """Write and return a result, with the environment as it was when the benchmark started."""
        result = {"environment": self.environment, **content}
        write(self._path, result)
        return result

    def finish(self, **content: Any) -> None:
        """Write a result, print its tables and draw its picture."""
        self._present(self.write(**content))

    def finish_parts(
        self,
        parts: Mapping[str, Callable[[argparse.Namespace], Result]],
        wanted: Iterable[str],
        args: argparse.Namespace,
        **about: Any,
    ) -> None:
        """Measure some parts, write them beside those that were measured before, and print and draw all of them.

        Args:
            parts: what measures a part, given the options, in the order of the result
            wanted: the names of the parts to measure
            args: the options
            **about: is written into each part that is measured
        """
        measured = self.known().get("parts", {})
        content: Result = {}
        for name in wanted:
            measured[name] = {"environment": self.environment, **about, **parts[name](args)}
            # After each part, so that a run that is cut short leaves the parts before.
            content = {"parts": {name: measured[name] for name in parts if name in measured}}
            self.write(**content)
        self.finish(**content)

    def _present(self, result: Result) -> None:
        for title, text in self._show(result).items():
            print(f"\n{title}\n\n{text}" if text else f"\n{title}")
        if self._draw is None:
            return
        path = self._path.with_suffix(".svg")
        if find_spec("matplotlib") is None:  # Figures are worth having without their picture.
            print(f"\nnot drawn, for Matplotlib is missing: {path.name}")
            return
        figure = self._draw(result)
        if figure is None:
            print("\nnothing was measured that can be drawn")
        else:
            save(figure, path)


class Progress:
    """Prints what is done next, and how much is done."""

    def __init__(self, total: int) -> None:
        self._done, self._total = 0, total

    def __call__(self, what: str) -> None:
        """Print that this begins."""
        print(f"[{self._done}/{self._total}] {what}", flush=True)
        self._done += 1


class Budget:
    """The seconds in which a benchmark may start something new; then it writes what it has.

    Args:
        seconds: from now on
    """

    def __init__(self, seconds: float | str = math.inf) -> None:
        self._start = monotonic()
        self._seconds = float(seconds)

    def passed(self) -> float:
        """Return the seconds that have passed."""
        return monotonic() - self._start

    def left(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(0.0, self._seconds - self.passed())

    def spent(self, share: float = 1.0) -> bool:
        """Return whether this share of the seconds has passed."""
        return self.passed() >= share * self._seconds
