"""The child of balance.py: splits cost vectors, profiles a model that is as uneven as can be, and times partitions."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import Answer, Request, serve


def uneven() -> tuple[nn.Sequential, Tensor]:
    """Return six convolutions that take the time, forty cheap layers, and two linear ones that hold the parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 3, padding=1)]
    layers += [nn.Conv2d(48, 48, 3, padding=1) for _ in range(5)]
    layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(768, 256)]
    for _ in range(20):
        layers += [nn.Linear(256, 256), nn.ReLU(inplace=True)]
    layers += [nn.Linear(256, 4096), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers), torch.rand(4, 3, 48, 48)


@cache
def model() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return uneven()


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def solver(peer: str) -> Callable[[list[int], int], list[int]]:
    """Return the function with which the peer splits costs."""
    if peer == "ours":
        from torchgpipe_balancing import partition

        return partition

    from torchgpipe.balance.blockpartition import solve

    return lambda costs, partitions: [len(block) for block in solve(costs, partitions)]


def solve(peer: str, request: Request) -> Answer:
    """Return the balance of each vector, and the seconds that it took; None if it took too long."""
    split = solver(peer)
    balances: list[list[int] | None] = []
    seconds: list[float | None] = []
    for costs in request["vectors"]:
        balance, took = None, None
        with suppress(TimeoutError), limited(request["limit"]):
            start = perf_counter()
            balance = split(costs, request["partitions"])
            took = perf_counter() - start
        balances.append(balance)
        seconds.append(took)
    return {"balances": balances, "seconds": seconds}


def profile(peer: str, request: Request) -> Answer:
    """Return the rows of a report."""
    import torchgpipe_balancing

    module, sample = model()
    report = torchgpipe_balancing.profile(module, sample, device="cpu", timeout=request["seconds"])
    print(report)
    return {"rows": report.rows(), "rounds": report.rounds}


def run(peer: str, request: Request) -> Answer:
    """Return the seconds that layers `start` to `end` take together, for a checkpointed micro-batch."""
    module, sample = model()
    with torch.no_grad():
        input = module[: request["start"]](sample)
    partition = module[request["start"] : request["end"]]
    needs_gradient = request["start"] > 0 and input.is_floating_point()

    seconds = []
    end = perf_counter() + request["seconds"]
    while len(seconds) < 3 or perf_counter() < end:
        module.zero_grad()
        # Neither shared nor a leaf: layers may change it in place.
        first, second = input.clone(), input.clone().requires_grad_(needs_gradient).clone()

        start = perf_counter()
        with torch.no_grad():
            partition(first)
        output = partition(second)
        output.backward(torch.ones_like(output))
        seconds.append(perf_counter() - start)
        del output
    return {"seconds": statistics.median(seconds[1:])}  # the first one warms up


def answer(peer: str, request: Request) -> Answer:
    return {"solve": solve, "profile": profile, "run": run}[request["kind"]](peer, request)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer)
