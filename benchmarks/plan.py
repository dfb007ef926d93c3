"""Plans: whether predictions hold, whether the choice is the best, how splits compare, and how long the search takes.

    prediction  random models: predicted over measured step, predicted and counted activations (`plan_prediction.py`)
    choice      small models: the planned way among all ways, all of them measured (`plan_choice.py`)
    splits      random costs: the search beside all choices, and beside balances of others (`plan_splits.py`)
    search      100 layers on 8 devices: seconds of the search (`plan_search.py`)

Each part can be run by itself; parts that were measured before stay in the result. `prediction` and `choice` mean
nothing where other processes take a core.

    python -m benchmarks.plan                            # all parts, about 15 minutes on two idle cores
    python -m benchmarks.plan --only splits search
    python -m benchmarks.plan --draw                     # only the tables
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks.plan_choice import choice, plan_choice
from benchmarks.plan_prediction import plan_memory, plan_prediction, prediction
from benchmarks.plan_search import plan_search, search
from benchmarks.plan_splits import plan_optimal, plan_splits, splits
from benchmarks.program import Command
from benchmarks.records import aims_table as plan_aims
from benchmarks.records import of_part

__all__ = [
    "plan_aims",
    "plan_choice",
    "plan_memory",
    "plan_optimal",
    "plan_prediction",
    "plan_search",
    "plan_splits",
]

PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "prediction": prediction,
    "choice": choice,
    "splits": splits,
    "search": search,
}


def show(result: dict[str, Any]) -> dict[str, str]:
    told = {
        "predicted and measured steps": plan_prediction(result),
        "more than 20% off": ", ".join(of_part(result, "prediction", "beyond")),
        "predicted and counted activations": plan_memory(result),
        "the planned way among all": plan_choice(result),
        "the search beside all choices": plan_optimal(result),
        "balances of others, over ours": plan_splits(result),
        "the search": plan_search(result),
        "what was aimed at": plan_aims(result),
    }
    return {title: text for title, text in told.items() if text}


def main() -> None:
    command = Command("plan", __doc__, show=show, seconds="turn of prediction")
    command.add("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="these parts; all by default")
    command.add("--seeds", type=int, default=10, help="the models of each family, of prediction")
    command.add("--shrink", type=int, default=1, help="how many times smaller mini-batches are")
    command.add("--measure", type=float, default=3.0, help="seconds that a plan measures")
    command.add("--turns", type=int, default=3, help="of prediction")
    command.add("--steps", type=int, default=5, help="of a planned pipeline, in a turn")
    command.add("--rounds", type=int, default=9, help="of choice")
    command.add("--tables", type=int, default=1000, help="of splits")
    command.add("--limit", type=float, default=2.0, help="seconds that the original may take for one table")
    command.add("--search", nargs=2, type=int, default=[100, 8], metavar=("LAYERS", "DEVICES"))
    command.add("--draw", action="store_true", help="measure nothing, print the tables of the JSON that is there")
    args = command.parse()
    command.finish_parts(PARTS, args.only, args)


if __name__ == "__main__":
    main()
