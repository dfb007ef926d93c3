"""Where a cell's time goes: what its parts cost, one by one, and how many autograd nodes it has.

`overhead.py` says how long a cell takes; this says what there is to save. Each part is timed alone, in a
loop, as the least of several rounds: the parts add up to about a cell, not exactly. The second table
counts the autograd nodes of a cell, ours and the original's, by walking the graph of a step: the count is
exact, and each node of Python costs what the first table says.

    python -m benchmarks.profile_cell
"""

from __future__ import annotations

import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.cost import MODES
from benchmarks.overhead import cells
from benchmarks.peers import running
from benchmarks.placement import threaded
from benchmarks.program import Command
from benchmarks.records import spread, table

M, N = 32, 8
CHAIN = 50
CALLS = 200


class Timed(NamedTuple):
    """A part of a cell.

    Attributes:
        group: parts that stand together
        name: of the part
        run: what is timed, given what `before` returns
        parts: how many times one run contains the part
        before: what comes before a run, and is not timed
    """

    group: str
    name: str
    run: Callable[[Any], object]
    parts: int = 1
    before: Callable[[], Any] = lambda: None

    def seconds(self, repeats: int) -> float:
        """Return the seconds that the part takes so many times, more or less, each."""
        runs = max(1, repeats // self.parts)
        total = 0.0
        for _ in range(runs):
            made = self.before()
            start = perf_counter()
            ended = self.run(made)
            total += perf_counter() - start
            del made, ended
        return total / (runs * self.parts)


def call(group: str, name: str, function: Callable[[], object]) -> Timed:
    """Return a part that is one call."""

    def run(_: object) -> None:
        for _ in range(CALLS):
            function()

    return Timed(group, name, run, CALLS)


# ---- Autograd nodes: a chain of them, so that a backward through it is nothing else.


class Pass(torch.autograd.Function):
    """The least work of a node of Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> Tensor:
        return grad


class PassStatic(Pass):
    """As Pass, returning its input as it is: autograd makes the view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x


class PassSaved(Pass):
    """A node that saves its input and unpacks it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> Tensor:
        _ = ctx.saved_tensors
        return grad


class PassPhony(Pass):
    """A node with a second output that receives no gradient: zeros are made for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.detach(), PHONY.detach()


class PassPhonyNone(Pass):
    """The same without the zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x.detach(), PHONY.detach()


PHONY = torch.empty(0)
X = torch.zeros(2, 4)
XG = torch.zeros(2, 4, requires_grad=True)
ONE = torch.ones(2, 4)


def chain(name: str, apply: Callable[[Tensor], Any]) -> list[Timed]:
    """Return the forward and the backward of a node."""

    def build(_: object = None) -> Tensor:
        x = XG
        for _ in range(CHAIN):
            y = apply(x)
            x = y[0] if isinstance(y, tuple) else y
        return x

    def backward(output: Tensor) -> None:
        torch.autograd.grad(output, XG, ONE)

    return [
        Timed("node", f"{name}: forward", build, CHAIN),
        Timed("node", f"{name}: backward", backward, CHAIN, build),
    ]


def nodes_and_layers() -> Iterator[Timed]:
    linear = nn.Linear(4, 4)
    yield from chain("custom Function", Pass.apply)
    yield from chain("custom Function that returns its input", PassStatic.apply)
    yield from chain("custom Function with a saved tensor", PassSaved.apply)
    yield from chain("custom Function with an unused phony output", PassPhony.apply)
    yield from chain("the same, set_materialize_grads(False)", PassPhonyNone.apply)
    yield from chain("built-in view (view_as)", lambda x: x.view_as(x))
    yield from chain("built-in multiplication", lambda x: x * 2.0)
    yield from chain("a layer (Linear 4 x 4 on 2 rows)", linear)
    for name, layer in {"a layer": linear, "a Sequential of one layer": nn.Sequential(linear)}.items():
        part = call("layer", f"{name} under no_grad", lambda layer=layer: layer(X))  # type: ignore[misc]
        yield part._replace(run=torch.no_grad()(part.run))


def engine_calls() -> Iterator[Timed]:
    """Yield calls of the engine on a graph of one layer, as recomputation calls it inside a node."""

    def backward_into_grad(output: Tensor) -> None:
        XG.grad = None
        torch.autograd.backward(output, ONE)

    def run_backward(output: Tensor) -> object:
        # The arguments that torch.autograd.grad ends with: the same work without its checks.
        return torch._C._ImperativeEngine().run_backward(
            (output,), (ONE,), False, False, (XG,), allow_unreachable=True, accumulate_grad=False
        )

    for name, run in {
        "torch.autograd.backward": backward_into_grad,
        "torch.autograd.grad": lambda output: torch.autograd.grad(output, XG, ONE),
        "the engine without the wrapper (private)": run_backward,
    }.items():
        yield Timed("engine", name, run, before=lambda: XG * 2.0)


# ---- Threads: hand-overs between them, there and back.


def queued(name: str, make: Callable[[], Any]) -> Timed:
    """Return a part that hands over to a running thread through two queues."""

    def before() -> tuple[Any, Any]:
        there, back = make(), make()

        def work() -> None:
            while there.get() is not None:
                back.put(True)

        threading.Thread(target=work).start()
        return there, back

    def run(queues: tuple[Any, Any]) -> None:
        there, back = queues
        for _ in range(CALLS):
            there.put(True)
            back.get()
        there.put(None)

    return Timed("thread", f"{name}, there and back", run, CALLS, before)


def locked() -> Timed:
    def before() -> tuple[threading.Lock, threading.Lock]:
        there, back = threading.Lock(), threading.Lock()
        there.acquire()
        back.acquire()

        def work() -> None:
            for _ in range(CALLS):
                there.acquire()
                back.release()

        threading.Thread(target=work).start()
        return there, back

    def run(locks: tuple[threading.Lock, threading.Lock]) -> None:
        there, back = locks
        for _ in range(CALLS):
            there.release()
            back.acquire()

    return Timed("thread", "a lock, there and back", run, CALLS, before)


def start_and_join() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def threads(executor: ThreadPoolExecutor) -> Iterator[Timed]:
    def submit_eight(_: object) -> None:
        for future in [executor.submit(int) for _ in range(8)]:
            future.result()

    yield queued("queue.Queue", Queue)
    yield queued("queue.SimpleQueue", SimpleQueue)
    yield call("thread", "executor.submit().result()", lambda: executor.submit(int).result())
    yield Timed("thread", "executor.submit() of 8, then their results: each", submit_eight, 8)
    yield locked()
    yield call("thread", "a thread, started and joined", start_and_join)


# ---- Random state, tensors, and what surrounds a cell.


def random_state() -> Iterator[Timed]:
    generator = torch.default_generator
    state = generator.get_state()

    def fork_rng() -> None:
        with torch.random.fork_rng([]):
            torch.set_rng_state(state)

    yield call("random", "torch.get_rng_state()", torch.get_rng_state)
    yield call("random", "torch.set_rng_state()", lambda: torch.set_rng_state(state))
    yield call("random", "generator.get_state()", generator.get_state)
    yield call("random", "generator.set_state()", lambda: generator.set_state(state))
    yield call("random", "two states compared", lambda: torch.equal(state, state))
    yield call("random", "fork_rng([]) and set_rng_state()", fork_rng)


def tensors() -> Iterator[Timed]:
    long = torch.zeros(64, 4)
    pieces = long.chunk(32)
    yield call("tensor", "x.detach()", XG.detach)
    yield call("tensor", "x.detach().requires_grad_()", lambda: X.detach().requires_grad_())
    yield call("tensor", "x.to(its own device)", lambda: X.to("cpu"))
    yield call("tensor", "x.to('cpu:1'): a copy", lambda: X.to("cpu:1"))
    yield call("tensor", "x._version", lambda: X._version)
    yield Timed("tensor", "chunk of 32 micro-batches, each 1/32", lambda _: long.chunk(32), 32)
    yield Timed("tensor", "cat of 32 micro-batches, each 1/32", lambda _: torch.cat(pieces), 32)


@contextmanager
def nothing() -> Iterator[None]:
    yield


def enter(context: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        with context():
            pass

    return run


def surroundings() -> Iterator[Timed]:
    recorder = None
    context = contextvars.copy_context()
    for name, function in {
        "a call of nothing (in every line here)": lambda: None,
        "asking whether somebody records": lambda: recorder is not None,
        "profiler label, no profiler on": enter(lambda: torch.profiler.record_function("cell")),
        "asking whether a profiler is on": torch._C._autograd._profiler_enabled,
        "a contextmanager": enter(nothing),
        "torch.no_grad()": enter(torch.no_grad),
        "torch.enable_grad()": enter(torch.enable_grad),
        "torch._C._set_grad_enabled(True)": lambda: torch._C._set_grad_enabled(True),
        "torch.autocast('cpu')": enter(lambda: torch.autocast("cpu", torch.bfloat16)),
        "contextvars.copy_context()": contextvars.copy_context,
        "context.run()": lambda: context.run(int),
    }.items():
        yield call("surroundings", name, function)


def time_parts(rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Return the microseconds of each part, as the median and the range of several rounds."""
    gc.collect()
    gc.disable()
    rows = []
    with ThreadPoolExecutor(1) as executor:
        groups = (nodes_and_layers(), engine_calls(), threads(executor), random_state(), tensors(), surroundings())
        for part in (part for group in groups for part in group):
            part.seconds(repeats // 10)
            seconds = [part.seconds(repeats) for _ in range(rounds)]
            rows.append({"group": part.group, "part": part.name, **spread(s * 1e6 for s in seconds)})
    gc.enable()
    return rows


def count_nodes(names: list[str]) -> list[dict[str, Any]]:
    """Return the autograd nodes per cell, all and those of Python, by peer and mode."""
    rows = []
    with running(names, "tiny_steps.py") as peers:
        for name, peer in peers.items():
            for mode in MODES:
                for way in ("inline", "workers"):
                    request = cells("nodes", N, M, mode, way, kind="nodes", devices=threaded(name, way, N))
                    found = peer.ask(request)["nodes"]
                    # Those of C++ are named with a number: AddmmBackward0. AccumulateGrad is per parameter.
                    python = {key: count for key, count in found.items() if not key[-1].isdigit()}
                    python.pop("torch::autograd::AccumulateGrad", None)
                    counts = {"all": sum(found.values()) / (N * M), "python": sum(python.values()) / (N * M)}
                    rows.append({"peer": name, "mode": mode, "threads": way, **counts, "names": found})
    return rows


def parts(result: dict[str, Any]) -> str:
    return table([[row["group"], row["part"], f"{row['low']:.2f}"] for row in result["parts"]], ["", "part", "us"])


def nodes(result: dict[str, Any]) -> str:
    lines = [
        [row["peer"], row["threads"], row["mode"], f"{row['all']:.2f}", f"{row['python']:.2f}"]
        for row in result["nodes"]
    ]
    return table(lines, ["", "threads", "mode", "nodes", "of them in Python"])


def show(result: dict[str, Any]) -> dict[str, str]:
    return {"the least time of each part": parts(result), "autograd nodes per cell": nodes(result)}


def main() -> None:
    command = Command("profile_cell", __doc__, show=show, peers=("ours", "original"))
    command.add("--rounds", type=int, default=7)
    command.add("--repeats", type=int, default=2000)
    args = command.parse()
    torch.set_num_threads(1)
    command.finish(unit="us", parts=time_parts(args.rounds, args.repeats), nodes=count_nodes(args.peers))


if __name__ == "__main__":
    main()
