"""Where a cell's time goes: what its parts cost, one by one, and how many autograd nodes it has.

`overhead.py` says how long a cell takes; this says what there is to save. Each part is timed alone, in a
loop, as the least of several rounds: the parts add up to about a cell, not exactly. The second table
counts the autograd nodes of a cell, ours and the original's, by walking the graph of a step: the count is
exact, and each node of Python costs what the first table says.

    python -m benchmarks.profile_cell
"""

from __future__ import annotations

import argparse
import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue, SimpleQueue
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.overhead import MODES, cells, devices
from benchmarks.peers import Peer
from benchmarks.records import RESULTS, environment, spread, table, write

Run = Callable[[int], float]  # repeats -> seconds

PARTS: dict[str, tuple[str, Run]] = {}  # name -> (group, run)


def part(group: str, name: str) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        PARTS[name] = (group, run)
        return run

    return register


def call(group: str, name: str, function: Callable[[], object]) -> None:
    """Registers a part that is one call."""

    def run(repeats: int) -> float:
        start = perf_counter()
        for _ in range(repeats):
            function()
        return perf_counter() - start

    part(group, name)(run)


# Autograd nodes: a chain of them, so that a backward through it is nothing else.


class Pass(torch.autograd.Function):
    """The least that a node of Python does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class PassStatic(torch.autograd.Function):
    """As Pass, returning its input as it is: autograd makes the view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class PassSaved(torch.autograd.Function):
    """A node that saves its input and unpacks it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _ = ctx.saved_tensors
        return grad


class PassPhony(torch.autograd.Function):
    """A node with a second output that receives no gradient: zeros are made for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.detach(), PHONY.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return grad


class PassPhonyNone(torch.autograd.Function):
    """The same without the zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.detach(), PHONY.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> Tensor:
        return grad


PHONY = torch.empty(0)
X = torch.randn(2, 4)
XG = torch.randn(2, 4, requires_grad=True)
ONE = torch.ones(2, 4)
LINEAR = nn.Linear(4, 4)
SEQUENTIAL = nn.Sequential(LINEAR)
CHAIN = 50


def chain(name: str, apply: Callable[[Tensor], Any]) -> None:
    """Registers a node's forward and backward, each per node."""

    def build() -> Tensor:
        x = XG
        for _ in range(CHAIN):
            y = apply(x)
            x = y[0] if isinstance(y, tuple) else y
        return x

    def forward(repeats: int) -> float:
        total = 0.0
        for _ in range(-(-repeats // CHAIN)):
            start = perf_counter()
            output = build()
            total += perf_counter() - start
            del output
        return total

    def backward(repeats: int) -> float:
        total = 0.0
        for _ in range(-(-repeats // CHAIN)):
            output = build()
            start = perf_counter()
            torch.autograd.grad(output, XG, ONE)
            del output
            total += perf_counter() - start
        return total

    part("node", f"{name}: forward")(forward)
    part("node", f"{name}: backward")(backward)


chain("custom Function", Pass.apply)
chain("custom Function that returns its input", PassStatic.apply)
chain("custom Function with a saved tensor", PassSaved.apply)
chain("custom Function with an unused phony output", PassPhony.apply)
chain("the same, set_materialize_grads(False)", PassPhonyNone.apply)
chain("built-in view (view_as)", lambda x: x.view_as(x))
chain("built-in multiplication", lambda x: x * 2.0)
chain("a layer (Linear 4 x 4 on 2 rows)", LINEAR)


# The layer, without a graph.


@part("layer", "a layer under no_grad")
def layer_without_grad(repeats: int) -> float:
    with torch.no_grad():
        start = perf_counter()
        for _ in range(repeats):
            LINEAR(X)
        return perf_counter() - start


@part("layer", "a Sequential of one layer under no_grad")
def sequential_without_grad(repeats: int) -> float:
    with torch.no_grad():
        start = perf_counter()
        for _ in range(repeats):
            SEQUENTIAL(X)
        return perf_counter() - start


# The engine, called from inside a node as recomputation does: a graph of one layer.


def engine(name: str, call_engine: Callable[[Tensor], object]) -> None:
    def run(repeats: int) -> float:
        total = 0.0
        for _ in range(repeats):
            output = XG * 2.0
            start = perf_counter()
            call_engine(output)
            total += perf_counter() - start
        return total

    part("engine", name)(run)


def backward_into_grad(output: Tensor) -> None:
    XG.grad = None
    torch.autograd.backward(output, ONE)


def run_backward(output: Tensor) -> object:
    # The arguments that torch.autograd.grad ends with: the same work without its checks.
    return torch._C._ImperativeEngine().run_backward(
        (output,), (ONE,), False, False, (XG,), allow_unreachable=True, accumulate_grad=False
    )


engine("torch.autograd.backward", backward_into_grad)
engine("torch.autograd.grad", lambda output: torch.autograd.grad(output, XG, ONE))
engine("the engine without the wrapper (private)", run_backward)


# Hand-overs between threads, there and back.


def through(make: Callable[[], Any]) -> Run:
    def run(repeats: int) -> float:
        there, back = make(), make()

        def work() -> None:
            while there.get() is not None:
                back.put(True)

        thread = threading.Thread(target=work)
        thread.start()
        start = perf_counter()
        for _ in range(repeats):
            there.put(True)
            back.get()
        seconds = perf_counter() - start
        there.put(None)
        thread.join()
        return seconds

    return run


part("thread", "queue.Queue, there and back")(through(Queue))
part("thread", "queue.SimpleQueue, there and back")(through(SimpleQueue))


@part("thread", "executor.submit().result()")
def submit(repeats: int) -> float:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        start = perf_counter()
        for _ in range(repeats):
            executor.submit(int).result()
        return perf_counter() - start


@part("thread", "executor.submit() of 8, then their results: each")
def submit_many(repeats: int) -> float:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        start = perf_counter()
        for _ in range(repeats // 8):
            futures = [executor.submit(int) for _ in range(8)]
            for future in futures:
                future.result()
        return perf_counter() - start


@part("thread", "a lock, there and back")
def locks(repeats: int) -> float:
    there, back = threading.Lock(), threading.Lock()
    there.acquire()
    back.acquire()

    def work() -> None:
        for _ in range(repeats):
            there.acquire()
            back.release()

    thread = threading.Thread(target=work)
    thread.start()
    start = perf_counter()
    for _ in range(repeats):
        there.release()
        back.acquire()
    seconds = perf_counter() - start
    thread.join()
    return seconds


def start_and_join() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


call("thread", "a thread, started and joined", start_and_join)


# Random state.

GENERATOR = torch.default_generator
STATE = GENERATOR.get_state()


def fork_rng() -> None:
    with torch.random.fork_rng([]):
        torch.set_rng_state(STATE)


call("random", "torch.get_rng_state()", torch.get_rng_state)
call("random", "torch.set_rng_state()", lambda: torch.set_rng_state(STATE))
call("random", "generator.get_state()", GENERATOR.get_state)
call("random", "generator.set_state()", lambda: GENERATOR.set_state(STATE))
call("random", "two states compared", lambda: torch.equal(STATE, STATE))
call("random", "fork_rng([]) and set_rng_state()", fork_rng)


# Tensors and copies.

call("tensor", "x.detach()", XG.detach)
call("tensor", "x.detach().requires_grad_()", lambda: X.detach().requires_grad_())
call("tensor", "x.to(its own device)", lambda: X.to("cpu"))
call("tensor", "x.to('cpu:1'): a copy", lambda: X.to("cpu:1"))
call("tensor", "x._version", lambda: X._version)
LONG = torch.randn(64, 4)
PIECES = LONG.chunk(32)


def per_chunk(function: Callable[[], object]) -> Run:
    def run(repeats: int) -> float:
        start = perf_counter()
        for _ in range(repeats // 32):
            function()
        return perf_counter() - start

    return run


part("tensor", "chunk of 32 micro-batches, each 1/32")(per_chunk(lambda: LONG.chunk(32)))
part("tensor", "cat of 32 micro-batches, each 1/32")(per_chunk(lambda: torch.cat(PIECES)))


# What surrounds a cell.


@contextmanager
def nothing() -> Iterator[None]:
    yield


def enter(context: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        with context():
            pass

    return run


RECORDER = None
CONTEXT = contextvars.copy_context()

call("surroundings", "a call of nothing (in every line here)", lambda: None)
call("surroundings", "asking whether somebody records", lambda: RECORDER is not None)
call("surroundings", "profiler label, no profiler on", enter(lambda: torch.profiler.record_function("cell")))
call("surroundings", "asking whether a profiler is on", torch._C._autograd._profiler_enabled)
call("surroundings", "a contextmanager", enter(nothing))
call("surroundings", "torch.no_grad()", enter(torch.no_grad))
call("surroundings", "torch.enable_grad()", enter(torch.enable_grad))
call("surroundings", "torch._C._set_grad_enabled(True)", lambda: torch._C._set_grad_enabled(True))
call("surroundings", "torch.autocast('cpu')", enter(lambda: torch.autocast("cpu", torch.bfloat16)))
call("surroundings", "contextvars.copy_context()", contextvars.copy_context)
call("surroundings", "context.run()", lambda: CONTEXT.run(int))


def parts(rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Microseconds of each part, as the median and the range of several rounds."""
    gc.collect()
    gc.disable()
    rows = []
    for name, (group, run) in PARTS.items():
        run(repeats // 10)
        seconds = [run(repeats) for _ in range(rounds)]
        rows.append({"group": group, "part": name, **spread(s / repeats * 1e6 for s in seconds)})
    gc.enable()
    return rows


def node_counts(n: int, m: int, peers: list[str]) -> list[dict[str, Any]]:
    """Autograd nodes per cell, all and those of Python, by peer and mode."""
    rows = []
    for name in peers:
        with Peer(name, "steps.py") as peer:
            for mode in MODES:
                for threads in ("inline", "workers"):
                    request = {**cells(n, m, mode, threads), "kind": "nodes"}
                    found = peer.ask({**request, "devices": devices(name, threads, n)})["nodes"]
                    # Those of C++ are named with a number: AddmmBackward0. AccumulateGrad is per parameter.
                    python = {key: count for key, count in found.items() if not key[-1].isdigit()}
                    python.pop("torch::autograd::AccumulateGrad", None)
                    rows.append(
                        {
                            "peer": name,
                            "mode": mode,
                            "threads": threads,
                            "all": sum(found.values()) / (n * m),
                            "python": sum(python.values()) / (n * m),
                            "names": found,
                        }
                    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--peers", nargs="*", choices=["ours", "original"], default=["ours", "original"])
    parser.add_argument("--json", type=Path, default=RESULTS / "profile_cell.json")
    args = parser.parse_args()

    torch.set_num_threads(1)
    rows = parts(args.rounds, args.repeats)
    lines = [[row["group"], row["part"], f"{row['low']:.2f}", f"{row['median']:.2f}"] for row in rows]
    print(table(lines, ["group", "part", "least us", "median us"]))

    n, m = 8, 32
    counts = node_counts(n, m, args.peers)
    if counts:
        lines = [
            [
                row["peer"],
                row["threads"],
                row["mode"],
                f"{row['all']:.2f}",
                f"{row['python']:.2f}",
                ", ".join(f"{name} {count / (n * m):.2f}" for name, count in row["names"].items()),
            ]
            for row in counts
        ]
        header = ["peer", "threads", "mode", "nodes/cell", "of Python", "which"]
        print(f"\nautograd nodes per cell, n={n}, m={m}\n\n" + table(lines, header))

    write(args.json, {"unit": "us", "environment": environment(), "parts": rows, "nodes": counts})


if __name__ == "__main__":
    main()
