"""Random programs of `tests.front.programs` over processes, each compared with the same partitions in one process.

Most of them are harmless; some have one move that a pipeline must see, and then the sample proves or refuses them.

    python -m tests.distributed.random_programs --first 1000 --count 300     # a campaign; prints what is not equal
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.launch import Crash, launch
from tests.front.programs import COMPILED, DOUBTFUL, HARMLESS, KEEPING, LOSSES, OF_AUXILIARY, Program
from torchgpipe import pipelined
from torchgpipe.model.values import mapped
from torchgpipe.processes.stand_in import StandIn

__all__ = ["Trial", "draw", "try_in_this_process"]

_KINDS = ["plain", "plain", "plain", "norm", "in place", "hooked", "frozen", "auxiliary", "keeps"]
_SCHEDULES = {1: ["1F1B", "1F1B", "GPipe", "ZeroBubble"], 2: ["Interleaved1F1B", "GPipe", "LayerMajor"]}


class Trial(NamedTuple):
    """A program, and how it is trained.

    Attributes:
        seed: of all that is drawn
        processes: how many
        partitions: in each process
        moves, parts, tied, loss: of the program
        options: of `pipelined`
        way: 'step', 'call' or 'evaluation'
        given: the arguments beside x and labels
    """

    seed: int
    processes: int
    partitions: int
    moves: list[tuple[str, int]]
    parts: list[tuple[str, int]]
    tied: bool
    loss: str
    options: dict[str, Any]
    way: str
    given: set[str]


def draw(seed: int) -> Trial:
    """Return the trial of a seed."""
    chosen = random.Random(seed)
    processes, partitions = chosen.choice([2, 2, 3]), chosen.choice([1, 1, 1, 2])
    least = processes * partitions
    kinds = [chosen.choice(_KINDS) for _ in range(chosen.randint(max(3, least), least + 3))]
    parts = [(chosen.choice([*KEEPING]) if kind == "keeps" else kind, chosen.randrange(6)) for kind in kinds]
    moves = [(chosen.choice(HARMLESS), chosen.randrange(12)) for _ in range(chosen.randint(2, 9))]
    is_doubtful = chosen.random() < 0.3
    if is_doubtful:
        unused = {*COMPILED, *([] if "auxiliary" in kinds else OF_AUXILIARY)}
        name = chosen.choice([name for name in DOUBTFUL if name not in unused])
        moves.insert(chosen.randrange(len(moves) + 1), (name, chosen.randrange(12)))
    for _ in range(len(parts) - sum([name.startswith("call") for name, _ in moves])):
        moves.insert(chosen.randrange(len(moves) + 1), ("call", 0))
    if chosen.random() < 0.5:
        moves.append(("again", chosen.randrange(12)))
    casts = any([name == "autocast" for name, _ in moves])
    return Trial(
        seed,
        processes,
        partitions,
        moves,
        parts,
        chosen.random() < 0.5,
        chosen.choice(["mean", "sum"] if casts else [*LOSSES]),
        {
            "schedule": chosen.choice(_SCHEDULES[partitions]),
            "verify": is_doubtful or chosen.random() < 0.3,
            "checkpoint": chosen.random() < 0.25,
        },
        chosen.choice(["step", "step", "step", "call", "call", "evaluation"]),
        {name for name in ("mask", "extra") if chosen.random() < 0.4},
    )


def _run(trial: Trial, **where: Any) -> dict[str, Tensor | None]:
    """Train a program for two mini-batches; return what this process has of losses, gradients and buffers."""
    torch.manual_seed(trial.seed)
    program: Any = Program(trial.moves, trial.parts, trial.tied, trial.loss)
    if not any([name == "autocast" for name, _ in trial.moves]):
        program = program.double()
    dtype = program.square.dtype
    batch: dict[str, Any] = {"x": torch.randn(6, 4, dtype=dtype)}
    more = {"mask": torch.rand(6) > 0.3, "extra": {"list": [torch.randn(6, 4, dtype=dtype) for _ in range(2)]}}
    batch |= {name: more[name] for name in sorted(trial.given)}
    if LOSSES[trial.loss].takes_labels:
        batch["labels"] = torch.randint(4, (6, 3))
    sample = mapped(batch, lambda tensor: tensor[:2])
    how = {"chunks": 3, "balance": "parameters", "partitions": trial.processes * trial.partitions}
    pipelined(program, sample, **how, **trial.options, **where)
    torch.manual_seed(7)
    found: dict[str, Tensor | None] = {}
    for k in range(2):
        if trial.way == "step":
            loss = program.step(**batch)
        else:
            with torch.set_grad_enabled(trial.way == "call"):
                loss = program.train(trial.way == "call")(**batch)["loss"]
            if trial.way == "call":
                loss.backward()
        found[f"loss {k}"] = loss.detach()
    found |= {name: one.grad for name, one in program.named_parameters() if not isinstance(one, StandIn)}
    return found | {name: one for name, one in program.named_buffers() if not isinstance(one, StandIn)}


def try_in_this_process(seeds: list[int]) -> list[str]:
    """Return what is not equal, for each seed: nothing; names; or errors of one process, and of several."""
    results = []
    for trial in map(draw, seeds):
        devices = [f"cpu:{j}" for j in range(trial.processes * trial.partitions)]
        mesh = dist.init_device_mesh("cpu", (trial.processes,))
        both: list[Any] = []
        for where in ({"devices": devices}, {"mesh": mesh, "devices": ["cpu"]}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    both.append(_run(trial, **where))
                except Exception as error:
                    both.append(f"{type(error).__name__}: {error}"[:600])
        expected, ours = both
        if isinstance(expected, str) or isinstance(ours, str):
            errors = [one if isinstance(one, str) else "accepted" for one in both]
            results.append(f"one process: {errors[0]}\n    several: {errors[1]}")
        else:
            results.append(" ".join([name for name, value in ours.items() if not _equal(value, expected[name])]))
    return results


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    kinds = Counter[str]()
    for seed in range(args.first, args.first + args.count):
        trial = draw(seed)
        try:
            told = launch(trial.processes, try_in_this_process, [seed], timeout=20.0)
        except Crash as error:
            told = [[f"crash: {error}"]]
        texts = [texts[0] for texts in told]
        refused = all(["one process: " in text for text in texts]) and "several: accepted" not in "".join(texts)
        kind = "refused" if refused else "equal" if not any(texts) else "not equal"
        kinds[kind] += 1
        if kind == "not equal":
            print(trial, *texts, sep="\n  ", flush=True)
    print(dict(kinds))


if __name__ == "__main__":
    main()
