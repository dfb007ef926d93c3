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

from benchmarks.plan_choice import choice, plan_choice
from benchmarks.plan_prediction import plan_memory, plan_prediction, prediction
from benchmarks.plan_search import plan_search, search
from benchmarks.plan_splits import plan_optimal, plan_splits, splits
from benchmarks.program import Part, Program
from benchmarks.records import aims_table

PARTS = {
    "prediction": Part(
        "plan/prediction",
        prediction,
        lambda result: {
            "predicted and measured steps": plan_prediction(result),
            "more than 20% off": ", ".join(result["beyond"]),
            "predicted and counted activations": plan_memory(result),
            "what was aimed at": aims_table(result),
        },
    ),
    "choice": Part(
        "plan/choice",
        choice,
        lambda result: {"the planned way among all": plan_choice(result), "what was aimed at": aims_table(result)},
    ),
    "splits": Part(
        "plan/splits",
        splits,
        lambda result: {
            "the search beside all choices": plan_optimal(result),
            "balances of others, over ours": plan_splits(result),
            "what was aimed at": aims_table(result),
        },
    ),
    "search": Part("plan/search", search, lambda result: {"the search": plan_search(result)}),
}


def main() -> None:
    command = Program("plan", __doc__, PARTS, PARTS, seconds="turn of prediction")
    command.add("--seeds", type=int, default=10, help="the models of each family, of prediction")
    command.add("--shrink", type=int, default=1, help="how many times smaller mini-batches are")
    command.add("--measure", type=float, default=3.0, help="seconds that a plan measures")
    command.add("--turns", type=int, default=3, help="of prediction")
    command.add("--steps", type=int, default=5, help="of a planned pipeline, in a turn")
    command.add("--rounds", type=int, default=9, help="of choice")
    command.add("--tables", type=int, default=1000, help="of splits")
    command.add("--limit", type=float, default=2.0, help="seconds that the original may take for one table")
    command.add("--search", nargs=2, type=int, default=[100, 8], metavar=("LAYERS", "DEVICES"))
    command.run()


if __name__ == "__main__":
    main()
