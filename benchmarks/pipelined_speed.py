"""A language model in two partitions on two cores, beside naive placement; and the child that trains it.

    naive           hooks move what a module is called with; one partition at a time, on the whole mini-batch
    micro-batches   the plain model, one micro-batch after the other
    call            `model(...)` and `loss.backward()` of the pipelined model
    1F1B, GPipe     `model.step(...)`
    halves          each half of the micro-batches in a thread of its own, with a plain model of its own: no pipeline

`halves` tells what two threads gain on this machine, and `allowed` is that gain times m / (m + 1), the share of clocks
in which a device works. CPU time, all threads together, is steadier under load than time by the clock.

A device is a core here: naive placement and the plain model have one thread, as only one of their devices works at a
time; a pipelined model has a thread for each of its two workers. All ways of a turn train the same model on the same
mini-batch, and there is no result if their losses differ. `splits` tells for each model whether export can split it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import Answer, Request, running, serve
from benchmarks.pipelined_models import VOCABULARY, language_model, place_naively, split_by_export
from benchmarks.program import Progress
from benchmarks.records import of_part, ratios, shown, spread, table
from benchmarks.speed import KEEP_MEMORY
from benchmarks.step_speed import verify_losses

__all__ = ["pipelined_speed", "pipelined_splits", "speed", "splits"]

WAYS = ("naive", "micro-batches", "call", "1F1B", "GPipe", "halves")
OURS = ("call", "1F1B", "GPipe")
AIM = 1.4


def answer(peer: str, request: Request) -> Answer:
    if request["kind"] == "split":
        return split(request)
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if request["way"] in OURS else 1)
    try:
        return train(request)
    finally:
        torch.set_num_threads(threads)


def batch_of(request: Request) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (request["m"] * request["rows"], request["context"])
    ids = torch.randint(VOCABULARY, shape, generator=generator)
    return {"input_ids": ids, "labels": ids}


def train(request: Request) -> Answer:
    """Return the seconds of each step, by the clock and of CPU, and the loss."""
    from torchgpipe import pipelined

    way, m = request["way"], request["m"]
    made, starts = language_model(request["model"], request["layers"], request["width"], request["context"])
    model: Any = made
    batch = batch_of(request)
    if way in OURS:
        sample = {name: tensor[:2] for name, tensor in batch.items()}
        schedule = "1F1B" if way == "call" else way
        pipelined(model, sample, chunks=m, devices=["cpu:0", "cpu:1"], balance=starts, schedule=schedule)
    elif way == "naive":
        names = [name for name, child in model.named_modules() if not list(child.children())]
        place_naively(model, {name: torch.device("cpu") for name in names})

    def call() -> float:
        loss = model(**batch)["loss"]
        torch.autograd.backward(loss)
        return float(loss.detach())

    models = [model]

    def micro_batches_of(own: Any, parts: Sequence[Tensor]) -> float:
        total = 0.0
        for ids in parts:
            loss = own(input_ids=ids, labels=ids)["loss"] / m
            torch.autograd.backward(loss)
            total += float(loss.detach())
        return total

    def halves() -> float:
        parts = batch["input_ids"].chunk(m)
        return sum(pool.map(micro_batches_of, models, (parts[: m // 2], parts[m // 2 :])))

    runs: dict[str, Callable[[], float]] = {
        "naive": call,
        "micro-batches": lambda: micro_batches_of(model, batch["input_ids"].chunk(m)),
        "call": call,
        "halves": halves,
    }
    if way == "halves":
        models.append(copy.deepcopy(model))
    run = runs.get(way, lambda: float(model.step(**batch)))
    seconds, cpu, loss = [], [], 0.0
    with ThreadPoolExecutor(2) as pool:
        for _ in range(request["warm_up"] + request["steps"]):
            for one in models:
                one.zero_grad(set_to_none=True)
            start, start_cpu = perf_counter(), process_time()
            loss = run()
            seconds.append(perf_counter() - start)
            cpu.append(process_time() - start_cpu)
    return {"seconds": seconds[request["warm_up"] :], "cpu": cpu[request["warm_up"] :], "loss": loss}


def split(request: Request) -> Answer:
    """Return the seconds that it takes to split a model by export and to pipeline it; None where it cannot be done."""
    from torchgpipe import pipelined

    found: Answer = {}
    batch = batch_of({**request, "m": 1})
    plain, starts = language_model(request["model"], request["layers"], request["width"], request["context"])
    expected = float(plain(**batch)["loss"].detach())
    for way in ("export", "pipelined"):
        model, _ = language_model(request["model"], request["layers"], request["width"], request["context"])
        start = perf_counter()
        try:
            if way == "export":
                made = split_by_export(model, batch, starts)
            else:
                made = pipelined(model, batch, chunks=1, devices=["cpu:0", "cpu:1"], balance=starts)
            seconds = perf_counter() - start
            output = made(**batch)  # A split by export returns the tensors of the output, without their names.
            loss = output[0] if isinstance(output, tuple) else output["loss"]
            found[way] = {
                "seconds": seconds,
                "output": type(output).__name__,
                "difference": abs(float(loss.detach()) - expected),
            }
        except Exception as error:
            found[way] = {"fails": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    return found


# ---- The rows of the result.


def request_for(args: argparse.Namespace, model: str, **more: Any) -> Request:
    """Return a request to the child."""
    shape = {"layers": args.blocks, "width": args.width, "context": args.context, "rows": args.rows, "m": args.chunks}
    return {"model": model, **shape, **more}


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways, turn by turn."""
    answers: dict[str, dict[str, list[Answer]]] = {model: {way: [] for way in WAYS} for model in args.models}
    progress = Progress(args.turns * len(args.models))
    with running(["ours"], "pipelined_speed.py", KEEP_MEMORY) as peers:
        for turn in range(args.turns):
            if turn and args.seconds.spent():
                break
            for model, found in answers.items():
                progress(f"{model}, {args.chunks} micro-batches")
                for way in WAYS[:: -1 if turn % 2 else 1]:
                    more = {"kind": "train", "way": way, "warm_up": 1, "steps": args.steps}
                    found[way].append(peers["ours"].ask(request_for(args, model, **more)))
    rows = [row(args, model, found) for model, found in answers.items()]
    return {"rows": rows, "aims": aims(rows)}


def row(args: argparse.Namespace, model: str, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    verify_losses(model, answers)
    seconds, cpu = (
        {way: [statistics.median(turn[kind]) for turn in turns] for way, turns in answers.items()}
        for kind in ("seconds", "cpu")
    )
    share = args.chunks / (args.chunks + 1)
    return {
        **request_for(args, model),
        "ideal": 2 * args.chunks / (args.chunks + 1),
        "seconds": {way: {**spread(turns), "turns": turns} for way, turns in seconds.items()},
        "over naive": {way: ratios(turns, seconds["naive"]) for way, turns in seconds.items() if way != "naive"},
        "over micro-batches": {way: ratios(seconds[way], seconds["micro-batches"]) for way in (*OURS, "halves")},
        "of allowed": {
            way: spread(half / own / share for own, half in zip(seconds[way], seconds["halves"])) for way in OURS
        },
        "cpu / micro-batches": {way: ratios(cpu["micro-batches"], cpu[way]) for way in cpu if way != "micro-batches"},
    }


def aims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for way in ("1F1B", "call"):
        lowest = min(row["over naive"][way]["median"] for row in rows)
        name = {"call": "forward and backward"}.get(way, way)
        what = f"{name} over naive placement, two cores, lowest model"
        found.append({"aim": what, "at least": AIM, "reached": lowest, "met": lowest >= AIM})
    return found


def splits(args: argparse.Namespace) -> dict[str, Any]:
    """Try to split each model by export, in a process of its own."""
    rows = []
    progress = Progress(len(args.models))
    for model in args.models:
        progress(f"splitting {model}")
        with running(["ours"], "pipelined_speed.py") as peers:
            rows.append({"model": model, **peers["ours"].ask(request_for(args, model, kind="split"))})
    return {"rows": rows}


def pipelined_speed(result: dict[str, Any]) -> str:
    """Return a table of all ways of a step."""
    lines = []
    for row in of_part(result, "speed"):
        for way, seconds in row["seconds"].items():
            figures = {key: seconds[key] * 1e3 for key in ("median", "low", "high")}
            columns = ("over naive", "over micro-batches", "of allowed", "cpu / micro-batches")
            over = [shown(row[what].get(way), 2) for what in columns]
            name = {"call": "forward and backward"}.get(way, way)
            lines.append([row["model"], row["m"], name, shown(figures, 0), *over])
    over = ["over naive placement", "over micro-batches", "of what two threads allow", "CPU / micro-batches"]
    header = ["model", "m", "step", "ms", *over]
    return table(lines, header) if lines else ""


def pipelined_splits(result: dict[str, Any]) -> str:
    """Return a table of what can be split, and how long it takes."""

    def told(one: dict[str, Any]) -> str:
        return one["fails"] if "fails" in one else f"{one['seconds']:.2f} s, returns {one['output']}"

    rows = of_part(result, "splits")
    lines = [[row["model"], told(row["export"]), told(row["pipelined"])] for row in rows]
    return table(lines, ["model", "split by export", "pipelined"]) if lines else ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer)
