"""The command line of a benchmark, what it prints, and the files that it writes.

A benchmark is a `Program` of parts, each of which answers a question and has a result of its own:

    PARTS = {"speed": Part("speed", measure, {"samples/s": speed}), "step": ...}

    program = Program("training", __doc__, PARTS, ("speed",), sizes=TASKS, devices=True)
    program.add("--turns", type=int, default=5)
    program.run()

A result is written to `results/NAME.json`, or to --json, with what it was measured on.
With --show nothing is measured: the tables are made of the JSON that is there.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from benchmarks.peers import Answer, Case, Peer, running
from benchmarks.records import RESULTS, aims_table, environment, write

__all__ = ["Budget", "Part", "Program", "Progress", "ask_in_turn"]

Result = dict[str, Any]


#: The options that each part of a program has in its result.
ABOUT = ("size", "scale", "device", "devices", "turns", "steps")


class Part(NamedTuple):
    """A question that a program answers.

    Attributes:
        result: the file of the answer in `results/`; ``"step:host"`` is the part `host` of `step.json`
        measure: returns the answer, given the options; or yields it as it grows, and each state is written
        tables: what makes a table of an answer, by the title; a page calls the table by the name of this function
        notes: returns what else is to be told of an answer
        cpu: whether it is only for the CPU
    """

    result: str
    measure: Callable[[argparse.Namespace], Result | Iterable[Result]]
    tables: Mapping[str, Callable[[Result], str]]
    notes: Callable[[Result], Iterable[str]] = lambda answer: ()
    cpu: bool = False

    def path(self, folder: Path = RESULTS, suffix: str = "") -> Path:
        """Return the file of the answer."""
        return folder / f"{self.result.partition(':')[0]}{suffix}.json"

    def read(self, path: Path) -> Result:
        """Return the answer in a file.

        Raises:
            FileNotFoundError: there is none.
        """
        answer: Result = json.loads(path.read_text())
        if ":" in self.result:
            key = self.result.partition(":")[2]
            if key not in answer["parts"]:
                raise FileNotFoundError(f"{path.name} has no part {key}")
            answer = answer["parts"][key]
        return answer

    def write(self, path: Path, answer: Result) -> None:
        """Write an answer into a file, beside the other parts that are there."""
        if ":" in self.result:
            known = json.loads(path.read_text()) if path.exists() else {}
            parts = {**known.get("parts", {}), self.result.partition(":")[2]: answer}
            answer = {"environment": answer["environment"], "parts": parts}
        write(path, answer)

    def present(self, answer: Result) -> None:
        """Print the tables of an answer, what it was aimed at, and the notes."""
        for title, table in {**self.tables, "what was aimed at": aims_table}.items():
            if text := table(answer):
                print(f"\n{title}\n\n{text}")
        for note in self.notes(answer):
            print(f"\n{note}")


class Program:
    """A benchmark, as it is started from a shell. Parts that were measured before stay in their results.

    Args:
        name: of the program
        about: the docstring of its module, whose first line is shown as help
        parts: by name
        usual: the parts that are measured unless --only or --all is given; all by default
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
        parts: Mapping[str, Part],
        usual: Iterable[str] = (),
        *,
        sizes: Iterable[str] = (),
        peers: Sequence[str] = (),
        devices: bool = False,
        device: bool = False,
        seconds: str = "",
    ) -> None:
        self._parts, usual = parts, list(usual or parts)
        parser = argparse.ArgumentParser(prog=name, description=(about or "").partition("\n")[0])
        self.add, self._error, self._parse = parser.add_argument, parser.error, parser.parse_args
        if sizes := list(sizes):
            self.add("--size", choices=sizes, default=sizes[0])
        if peers:
            self.add("--peers", nargs="+", choices=peers, default=list(peers), help="all of them by default")
        if devices:
            gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
            self.add("--devices", nargs="+", default=gpus or ["cpu"], help="all GPUs by default, or the CPU")
        if device:
            self.add("--device", default="cpu")
        if seconds:
            self.add("--seconds", type=Budget, default=Budget(), help=f"start no further {seconds} after so many")
        self.add("--json", type=Path, help="where the result is written; of several parts a folder")
        self.add("--show", action="store_true", help="measure nothing, show the results that are there")
        self.add("--only", nargs="+", choices=list(parts), default=usual, help=f"parts; {', '.join(usual)} by default")
        self.add("--all", action="store_true", help="all parts")

    def run(self) -> Result:
        """Measure, write and show the parts that are wanted; return the answer of each."""
        args = self._parse()
        measured_on = environment()
        wanted = list(self._parts) if args.all else args.only
        on_cpu = getattr(args, "device", "cpu") == "cpu"
        if not on_cpu:
            wanted = [name for name in wanted if not self._parts[name].cpu]
            if not wanted:
                self._error("these parts are only for the CPU; leave --device out for them")
        into: Path | None = args.json
        one_file = into is not None and into.suffix == ".json"
        if one_file and len({self._parts[name].path() for name in wanted}) != 1:
            self._error(
                f"{into} would hold the result of one of {', '.join(wanted)}: give a folder, or --only one part"
            )
        answers: Result = {}
        for name in wanted:
            part = self._parts[name]
            path = into if one_file else part.path(into or RESULTS, "" if on_cpu else "-cuda")
            if args.show:
                answers[name] = part.read(path)
            else:
                args.json = path
                about = {name: getattr(args, name) for name in ABOUT if hasattr(args, name)}
                measured = part.measure(args)
                for outcome in [measured] if isinstance(measured, dict) else measured:
                    answers[name] = {"environment": measured_on, **about, **outcome}
                    part.write(path, answers[name])  # Now, so that a run that is cut short leaves what it has.
            part.present(answers[name])
        return answers


class Progress:
    """Prints what is done next, and how much is done."""

    def __init__(self, total: int) -> None:
        self._done, self._total = 0, total

    def __call__(self, task: str) -> None:
        """Print that this begins."""
        print(f"[{self._done}/{self._total}] {task}", flush=True)
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
