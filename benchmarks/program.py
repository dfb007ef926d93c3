"""The command line of a benchmark, what it prints, and the files that it writes.

    command = Command("speed", __doc__, show=show, draw=draw, sizes=TASKS, devices=True)
    command.add("--scale", type=int, default=1, help="...")
    args = command.parse()
    command.finish(unit="samples/s", rows=measure(args))

A result is written to `results/NAME.json`, or to --json, with what it was measured on; its picture beside it.
With --draw nothing is measured: the tables and the picture are made of the JSON that is there.

A benchmark that answers several questions is a `Program` of parts, and each part has a result of its own:

    program = Program("training", __doc__, {"speed": Part("speed", measure, show, draw), "step": ...}, devices=True)
    program.add("--turns", type=int, default=5)
    program.run()
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from benchmarks.peers import Answer, Case, Peer, running
from benchmarks.pictures import save
from benchmarks.records import RESULTS, environment, write

__all__ = ["Budget", "Command", "Part", "Program", "Progress", "ask_in_turn"]

Result = dict[str, Any]


class Command:
    """A benchmark, as it is started from a shell.

    Args:
        name: of the benchmark, and of its result
        about: the docstring of its module, whose first line is shown as help
        show: makes tables of a result, by their titles
        draw: makes a figure of a result, or None if there is nothing to draw
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
        # A benchmark may describe an option in its own words.
        parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0], conflict_handler="resolve")
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
        self.add("--json", type=Path, help="where the result is written; of a program with parts also a folder")
        self.add("--draw", action="store_true", help="measure nothing, show and draw the results that are there")

    def parse(self) -> argparse.Namespace:
        """Return the options, unless there is only something to draw."""
        args = self._parse()
        cuda = "" if getattr(args, "device", "cpu") == "cpu" else "-cuda"
        self._path: Path = args.json or RESULTS / f"{self._name}{cuda}.json"
        args.json = self._path
        if args.draw:
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

    def _present(self, result: Result) -> None:
        present(result, self._show, self._draw, self._path.with_suffix(".svg"))


def present(
    result: Result,
    show: Callable[[Result], dict[str, str]],
    draw: Callable[[Result], Any] | None,
    picture: Path,
) -> None:
    """Print the tables of a result, and draw its picture if it has one."""
    for title, text in show(result).items():
        print(f"\n{title}\n\n{text}" if text else f"\n{title}")
    if draw is None:
        return
    if find_spec("matplotlib") is None:  # Figures are worth having without their picture.
        print(f"\nnot drawn, for Matplotlib is missing: {picture.name}")
    elif (figure := draw(result)) is None:
        print("\nnothing was measured that can be drawn")
    else:
        save(figure, picture)


#: The options that each part of a program has in its result.
ABOUT = ("size", "scale", "device", "devices", "turns", "steps")


class Part(NamedTuple):
    """A question that a program answers.

    Attributes:
        result: the file of the answer in `results/`; ``"step/host"`` is the part `host` of `step.json`
        measure: returns the answer, given the options
        show: makes tables of an answer, by their titles
        draw: makes a figure of an answer, or None if there is nothing to draw
        cpu: whether it is only for the CPU
    """

    result: str
    measure: Callable[[argparse.Namespace], Result]
    show: Callable[[Result], dict[str, str]]
    draw: Callable[[Result], Any] | None = None
    cpu: bool = False

    def path(self, folder: Path = RESULTS, suffix: str = "") -> Path:
        """Return the file of the answer."""
        return folder / f"{self.result.partition('/')[0]}{suffix}.json"

    def read(self, path: Path) -> Result:
        """Return the answer in a file.

        Raises:
            FileNotFoundError: there is none.
        """
        found: Result = json.loads(path.read_text())
        if "/" in self.result:
            key = self.result.partition("/")[2]
            if key not in found["parts"]:
                raise FileNotFoundError(f"{path.name} has no part {key}")
            found = found["parts"][key]
        return found

    def write(self, path: Path, answer: Result) -> None:
        """Write an answer into a file, beside the other parts that are there."""
        if "/" in self.result:
            known = json.loads(path.read_text()) if path.exists() else {}
            parts = {**known.get("parts", {}), self.result.partition("/")[2]: answer}
            answer = {"environment": answer["environment"], "parts": parts}
        write(path, answer)


class Program(Command):
    """A benchmark of several parts. Parts that were measured before stay in their results.

    Args:
        name: of the program
        about: the docstring of its module, whose first line is shown as help
        parts: by name
        usual: the parts that are measured unless --only or --all is given
        **options: as of `Command`
    """

    def __init__(
        self, name: str, about: str | None, parts: Mapping[str, Part], usual: Iterable[str], **options: Any
    ) -> None:
        super().__init__(name, about, **options)
        self._parts, usual = parts, list(usual)
        self.add("--only", nargs="+", choices=list(parts), default=usual, help=f"parts; {', '.join(usual)} by default")
        self.add("--all", action="store_true", help="all parts")

    def run(self, adapt: Callable[[argparse.Namespace], None] = lambda args: None) -> None:
        """Measure, write, show and draw the parts that are wanted.

        Args:
            adapt: completes the options
        """
        args = self._parse()
        measured_on = environment()
        wanted = list(self._parts) if args.all else args.only
        on_cpu = getattr(args, "device", "cpu") == "cpu"
        if not on_cpu:
            wanted = [name for name in wanted if not self._parts[name].cpu]
            if not wanted:
                self.error("these parts are only for the CPU; leave --device out for them")
        into: Path | None = args.json
        one_file = into is not None and into.suffix == ".json"
        if one_file and len({self._parts[name].path() for name in wanted}) != 1:
            self.error(f"{into} would hold the result of one of {', '.join(wanted)}: give a folder, or --only one part")
        if not args.draw:
            adapt(args)
        for name in wanted:
            part = self._parts[name]
            path = into if one_file else part.path(into or RESULTS, "" if on_cpu else "-cuda")
            if args.draw:
                answer = part.read(path)
            else:
                about = {name: getattr(args, name) for name in ABOUT if hasattr(args, name)}
                answer = {"environment": measured_on, **about, **part.measure(args)}
                part.write(path, answer)  # Now, so that a run that is cut short leaves the parts before.
            present(answer, part.show, part.draw, path.with_suffix(".svg"))


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


def ask_in_turn(
    cases: Sequence[Case],
    children: str | Mapping[str, str] | Mapping[str, Peer],
    turns: int,
    spent: Callable[[], bool],
    *,
    fresh: bool = False,
    repeat: Sequence[int] | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, list[Answer]]]:
    """Ask the ways of each case one after the other, turn by turn, every other turn in reverse.

    So what is compared is measured within seconds, and no way profits from being the first.

    Args:
        cases: each with its ways, by name: the peer, and the request
        children: the module that answers, or that of each peer; or peers that are running
        turns: how often each way is asked
        spent: whether no further turn is to begin
        fresh: whether each turn has processes of its own
        repeat: how often each case is asked in a turn, A B A B
        environment: variables of the processes
    Returns:
        for each case the answers of each way, one for each time that it was asked
    """
    answers: list[dict[str, list[Answer]]] = [{way: [] for way in case} for case in cases]
    wanted = dict.fromkeys(peer for case in cases for peer, _ in case.values())
    progress = Progress(turns)
    peers: Mapping[str, Any] = {} if isinstance(children, str) else children
    start = any(isinstance(peers.get(peer), str | None) for peer in wanted)
    with ExitStack() as stack:
        for turn in range(turns):
            if turn and spent():
                break
            progress("turn")
            if start and (turn == 0 or fresh):
                stack.close()
                peers = stack.enter_context(running(wanted, cast("Mapping[str, str]", children), environment))
            for case, answered, times in zip(cases, answers, repeat or [1] * len(cases), strict=True):
                for _ in range(times):
                    for way, (peer, request) in list(case.items())[:: -1 if turn % 2 else 1]:
                        answered[way].append(peers[peer].ask(request))
    return answers
