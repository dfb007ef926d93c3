"""The child of training.py: trains models, and times the steps.

A step is all that a training loop does: forward, a loss, backward, and an optimizer, which has a learning rate of 0,
so that a figure does not depend on the steps before it.

    train           forward and backward of the plain model, `checkpoint_sequential`, or a pipeline
    step            `GPipe.step` under a schedule
    micro-batches   the plain model in this thread, micro-batch by micro-batch: what a pipeline does, without one
    whole           the plain model, the whole mini-batch at once
    halves          both halves of the layers without a pipeline: the second half has its input before it starts

    halves, one thread     first ####|second ####|          "one"
    halves, two threads    first ####|                      "two", as fast as two threads can be on this machine
                          second ####|

All but `train` train the same layers on the same mini-batch with the loss of `pytorch_pipelines.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from threading import Thread
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.peers import Answer, Request, pipeline, serve
from benchmarks.tasks import TASKS, closed_units, inputs, loss, made, segments
from benchmarks.timing import Step, synchronize, timed

__all__ = ["balance", "runner", "train"]

# ---- Forward and backward, of all who can.


def runner(peer: str, module: nn.Sequential, request: Request) -> Callable[[Tensor], Tensor] | None:
    """Return the function that is trained; None if the peer cannot train this model."""
    if peer in ("ours", "original"):
        model: Callable[[Tensor], Tensor] = pipeline(module, request)
        return model
    module.to(request["devices"][0])
    if peer == "plain":
        if request.get("split"):
            return lambda x: torch.cat([module(part) for part in x.chunk(request["m"])])
        return module
    units, pieces = list(closed_units(module)), segments(module)
    if pieces < 2:
        return None
    divided: Callable[..., Tensor] = checkpoint_sequential
    return lambda x: divided(units, pieces, x, use_reentrant=False)


def train(peer: str, request: Request) -> Answer:
    """Return the seconds of each step, and of its forward; or the reason why there are none."""
    module = made(request["size"], request["model"])
    devices = request["devices"]
    try:
        x = inputs(TASKS[request["size"]][request["model"]], request["batch"], devices[0])
        run = runner(peer, module, request)
        if run is None:
            return {"none": "skips"}
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        forward: list[float] = []

        def step() -> Tensor:
            begin = perf_counter()
            value = run(x).square().mean()
            if peer == "plain":  # On one device, waiting here costs nothing.
                synchronize(devices)
                forward.append(perf_counter() - begin)
            torch.autograd.backward(value)
            optimizer.step()
            return value.detach()

        return {**timed(step, optimizer.zero_grad, devices, request), "forward": forward[request["warm_up"] :]}
    except torch.OutOfMemoryError:
        return {"none": "out of memory"}
    finally:
        # Free the devices for the other peers, which run next.
        module.zero_grad()
        module.to("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def balance(peer: str, request: Request) -> Answer:
    """Return balances by time for each number of partitions, from one profile of a micro-batch.

    A balance is of the layers and, for a pipeline that cannot be cut where a skip passes, of the units that no skip
    leaves; None if there are fewer units than partitions.
    """
    from torchgpipe_balancing import partition, profile

    module = made(request["size"], request["model"])
    sample = inputs(TASKS[request["size"]][request["model"]], request["rows"], "cpu")
    report = profile(module, sample, device=request["device"], timeout=request["seconds"])
    # PyTorch's pipelines recompute nothing.
    costs = iter(report.costs("time", recompute=False))
    units = [sum(islice(costs, len(unit))) for unit in closed_units(module)]
    return {
        "segments": segments(module),
        "balances": [
            {"balance": report.balance(n), "units": partition(units, n) if n <= len(units) else None}
            for n in request["partitions"]
        ],
    }


# ---- Steps: under a schedule, and what they are compared to.


def scheduled(module: nn.Sequential, x: Tensor, request: Request) -> Step:
    """Return a step of a pipeline. Nothing is recomputed, because the peers know no checkpointing."""
    from torchgpipe import GPipe

    how = {"devices": request["devices"], "chunks": request["m"], "schedule": request["schedule"]}
    model: Any = GPipe(module, request["balance"], checkpoint="never", loss_fn=loss, **how)
    target = torch.zeros(len(x), device=request["devices"][-1])
    return lambda: model.step(x, target)


def one_by_one(module: nn.Sequential, x: Tensor, request: Request) -> Step:
    """Return a step of the plain model, in micro-batches or, if `m` is 1, of the whole mini-batch at once."""
    parts = x.chunk(1 if request["kind"] == "whole" else request["m"])

    def step() -> Tensor:
        total = torch.zeros((), device=x.device)
        for part in parts:
            share = loss(module(part), part) / len(parts)
            torch.autograd.backward(share)
            total += share.detach()
        return total

    return step


def both_halves(module: nn.Sequential, x: Tensor, request: Request) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that train the first and the second half of the layers on all micro-batches."""
    first, second = module[: request["balance"][0]], module[request["balance"][0] :]
    parts = x.chunk(request["m"])
    with torch.no_grad():
        between = [first(part) for part in parts]
    entered = [value.clone().requires_grad_() for value in between]

    def train_first() -> None:
        for part, value in zip(parts, between):
            torch.autograd.backward(first(part), value)

    def train_second() -> None:
        for value in entered:
            value.grad = None
            torch.autograd.backward(loss(second(value), value) / len(parts))

    return train_first, train_second


def side_by_side(*functions: Callable[[], None]) -> None:
    """Run each function in a thread of its own, with one core."""

    def run(function: Callable[[], None]) -> None:
        torch.set_num_threads(1)
        function()

    threads = [Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def halves(module: nn.Sequential, x: Tensor, request: Request) -> Answer:
    """Return the seconds of each half, of both in this thread, and of both in two threads, step by step."""
    first, second = both_halves(module, x, request)
    seconds: dict[str, list[float]] = {"first": [], "second": [], "one": [], "two": []}
    for turn in range(request["warm_up"] + request["steps"]):
        module.zero_grad()
        times = [perf_counter()]
        first()
        times.append(perf_counter())
        second()
        times.append(perf_counter())
        module.zero_grad()
        start = perf_counter()
        side_by_side(first, second)
        end = perf_counter()
        if turn >= request["warm_up"]:
            seconds["first"].append(times[1] - times[0])
            seconds["second"].append(times[2] - times[1])
            seconds["one"].append(times[2] - times[0])
            seconds["two"].append(end - start)
    return {"seconds": seconds}


def step(peer: str, request: Request) -> Answer:
    """Return the seconds of each step, and the loss of the last."""
    module = made("step", request["model"])
    devices = request["devices"]
    x = inputs(TASKS["step"][request["model"]], request["batch"], devices[0])
    usual = torch.get_num_threads()
    torch.set_num_threads(request["threads"])
    try:
        if request["kind"] == "halves":
            return halves(module, x, request)
        if request["kind"] != "step":
            module.to(devices[0])
        step_of = scheduled(module, x, request) if request["kind"] == "step" else one_by_one(module, x, request)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

        def trained() -> Tensor:
            value = step_of()
            optimizer.step()
            return value

        return timed(trained, optimizer.zero_grad, devices, request)
    finally:
        torch.set_num_threads(usual)
        module.zero_grad()
        module.to("cpu")


def answer(peer: str, request: Request) -> Answer:
    return {"train": train, "balance": balance}.get(request["kind"], step)(peer, request)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer)
