"""Where a cell's time goes: what its parts cost, one by one, and its autograd nodes. A part of host_time.py.

`cells` says how long a cell takes; this says what there is to save. Each part is timed alone, in a loop, as the least
of several rounds: the parts add up to about a cell, not exactly, because in a real step caches are colder. The second
table counts the autograd nodes of a cell, ours and the original's, by walking the graph of a step: the count is exact,
and each node of Python costs what the first table says.
"""

from __future__ import annotations

import argparse
import contextvars
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from timeit import Timer
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cost import MODES
from benchmarks.peers import running
from benchmarks.placement import threaded
from benchmarks.program import Progress
from benchmarks.records import spread, table_of

__all__ = ["measure", "nodes", "parts", "show"]

M, N = 32, 8
#: Autograd nodes in a row, so that a backward through them is nothing else.
CHAIN = 50
ROUNDS = 7


class Pass(torch.autograd.Function):
    """The least work of a node of Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


X = torch.zeros(2, 4)
XG = torch.zeros(2, 4, requires_grad=True)
ONE = torch.ones(2, 4)
LINEAR = nn.Linear(4, 4)
STATE = torch.get_rng_state()

NODES: dict[str, Callable[[Tensor], Any]] = {
    "custom Function": Pass.apply,
    "built-in view (view_as)": lambda x: x.view_as(x),
    "built-in multiplication": lambda x: x * 2.0,
    "a layer (Linear 4 x 4 on 2 rows)": LINEAR,
}
#: Parts that are one call, by group and name.
CALLS: list[tuple[str, str, Callable[[], object]]] = [
    ("layer", "a layer under no_grad", torch.no_grad()(lambda: LINEAR(X))),
    ("engine", "torch.autograd.backward, and a multiplication", lambda: torch.autograd.backward(XG * 2.0, ONE)),
    ("engine", "torch.autograd.grad, and a multiplication", lambda: torch.autograd.grad(XG * 2.0, XG, ONE)),
    ("random", "torch.get_rng_state()", torch.get_rng_state),
    ("random", "torch.set_rng_state()", lambda: torch.set_rng_state(STATE)),
    ("tensor", "x.detach()", XG.detach),
    ("tensor", "x.detach().requires_grad_()", lambda: X.detach().requires_grad_()),
    ("tensor", "x.to(its own device)", lambda: X.to("cpu")),
    ("tensor", "x.to('cpu:1'): a copy", lambda: X.to("cpu:1")),
    ("surroundings", "a call of nothing (in every line here)", lambda: None),
    ("surroundings", "profiler label, no profiler on", lambda: enter(torch.profiler.record_function("cell"))),
    ("surroundings", "torch.no_grad()", lambda: enter(torch.no_grad())),
    ("surroundings", "torch.enable_grad()", lambda: enter(torch.enable_grad())),
    ("surroundings", "torch.autocast('cpu')", lambda: enter(torch.autocast("cpu", torch.bfloat16))),
    ("surroundings", "contextvars.copy_context()", contextvars.copy_context),
]


def enter(context: Any) -> None:
    with context:
        pass


def chain(apply: Callable[[Tensor], Tensor]) -> Tensor:
    x = XG
    for _ in range(CHAIN):
        x = apply(x)
    return x


def there_and_back(there: SimpleQueue[Any], back: SimpleQueue[Any]) -> None:
    there.put(True)
    back.get()


def time_parts(repeats: int) -> list[dict[str, Any]]:
    """Return the microseconds of each part, as the median and the range of several rounds."""
    found: list[dict[str, Any]] = []

    def add(group: str, name: str, call: Callable[[], object], each: int = 1) -> None:
        timer, number = Timer(call), max(1, repeats // each)
        timer.timeit(number)
        microseconds = [1e6 * seconds / (number * each) for seconds in timer.repeat(ROUNDS, number)]
        found.append({"group": group, "part": name, **spread(microseconds)})

    for name, apply in NODES.items():
        add("node", f"{name}: forward", partial(chain, apply), CHAIN)
        backward = partial(torch.autograd.grad, chain(apply), XG, ONE, retain_graph=True)
        add("node", f"{name}: backward, the graph kept", backward, CHAIN)
    for group, name, call in CALLS:
        add(group, name, call)
    queues: tuple[SimpleQueue[Any], SimpleQueue[Any]] = SimpleQueue(), SimpleQueue()
    thread = Thread(target=lambda: [queues[1].put(True) for _ in iter(queues[0].get, None)])
    thread.start()
    add("thread", "queue.SimpleQueue, there and back", partial(there_and_back, *queues))
    queues[0].put(None)
    thread.join()
    return found


def count_nodes(names: list[str]) -> list[dict[str, Any]]:
    """Return the autograd nodes per cell, all and those of Python, by peer and mode."""
    rows = []
    with running(names, "tiny_steps.py") as peers:
        for name, peer in peers.items():
            for mode in MODES:
                for way in ("inline", "workers"):
                    shape = {"n": N, "m": M, "mode": mode, "balance": [1] * N, "devices": threaded(name, way, N)}
                    found = peer.ask({"kind": "nodes", **shape})["nodes"]
                    # Those of C++ are named with a number: AddmmBackward0. AccumulateGrad is per parameter.
                    python = {key: count for key, count in found.items() if not key[-1].isdigit()}
                    python.pop("torch::autograd::AccumulateGrad", None)
                    counts = {"all": sum(found.values()) / (N * M), "python": sum(python.values()) / (N * M)}
                    rows.append({"peer": name, "mode": mode, "threads": way, **counts, "names": found})
    return rows


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    progress = Progress(2)
    progress("parts of a cell")
    timed = time_parts(400 * args.steps)
    progress("autograd nodes")
    return {"unit": "us", "parts": timed, "nodes": count_nodes([name for name in args.peers if name != "plain"])}


def parts(result: dict[str, Any]) -> str:
    return table_of(result["parts"], {"": "group", "part": "part", "us": "low:.2f"})


def nodes(result: dict[str, Any]) -> str:
    columns = {"": "peer", "threads": "threads", "mode": "mode", "nodes": "all:.2f", "of them in Python": "python:.2f"}
    return table_of(result["nodes"], columns)


def show(result: dict[str, Any]) -> dict[str, str]:
    return {"the least time of each part": parts(result), "autograd nodes per cell": nodes(result)}
