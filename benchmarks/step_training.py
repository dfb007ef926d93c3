"""The child of step.py: train with the schedules of `GPipe.step`, and with what they are compared to; time the steps.

    step            `GPipe.step` under a schedule
    micro-batches   the plain model in this thread, micro-batch by micro-batch: what a pipeline does, without one
    whole           the plain model, the whole mini-batch at once
    halves          both halves of the layers without a pipeline: the second half has its input before it starts

    halves, one thread     first ####|second ####|          "one"
    halves, two threads    first ####|                      "two", as fast as two threads can be on this machine
                          second ####|

All train the same layers on the same mini-batch with the loss of `pytorch_pipelines.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import Answer, Request, serve
from benchmarks.pytorch_pipelines import loss
from benchmarks.training import TASKS, inputs, made, synchronize

#: Returns the loss of a step.
Step = Callable[[], Tensor]


def scheduled(module: nn.Sequential, x: Tensor, request: Request) -> Step:
    """Return a step of a pipeline. Nothing is recomputed, because the peers know no checkpointing."""
    from torchgpipe import GPipe

    model = GPipe(
        module,
        request["balance"],
        devices=request["devices"],
        chunks=request["m"],
        checkpoint="never",
        schedule=request["schedule"],
        loss_fn=loss,
    )
    target = torch.zeros(len(x), device=request["devices"][-1])
    return lambda: model.step(x, target)


def micro_batches(module: nn.Sequential, x: Tensor, request: Request) -> Step:
    parts = x.chunk(request["m"])

    def step() -> Tensor:
        total = torch.zeros((), device=x.device)
        for part in parts:
            share = loss(module(part), part) / len(parts)
            torch.autograd.backward(share)
            total += share.detach()
        return total

    return step


def whole(module: nn.Sequential, x: Tensor, request: Request) -> Step:
    def step() -> Tensor:
        value = loss(module(x), x)
        torch.autograd.backward(value)
        return value.detach()

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
    found: dict[str, list[float]] = {"first": [], "second": [], "one": [], "two": []}
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
            found["first"].append(times[1] - times[0])
            found["second"].append(times[2] - times[1])
            found["one"].append(times[2] - times[0])
            found["two"].append(end - start)
    return {"seconds": found}


def trained(module: nn.Sequential, step: Step, request: Request) -> Answer:
    """Return the seconds of each step, and the loss of the last."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    devices = request["devices"]
    seconds = []
    for _ in range(request["warm_up"] + request["steps"]):
        synchronize(devices)
        start = perf_counter()
        optimizer.zero_grad()
        value = step()
        optimizer.step()
        synchronize(devices)
        seconds.append(perf_counter() - start)
    return {"seconds": seconds[request["warm_up"] :], "loss": float(value)}


STEPS: dict[str, Callable[[nn.Sequential, Tensor, Request], Step]] = {
    "step": scheduled,
    "micro-batches": micro_batches,
    "whole": whole,
}


def answer(peer: str, request: Request) -> Answer:
    module = made("step", request["model"])
    x = inputs(TASKS["step"][request["model"]], request["batch"], request["devices"][0])
    usual = torch.get_num_threads()
    torch.set_num_threads(request["threads"])
    try:
        if request["kind"] == "halves":
            return halves(module, x, request)
        if request["kind"] != "step":
            module.to(request["devices"][0])
        step: Any = STEPS[request["kind"]](module, x, request)
        return trained(module, step, request)
    finally:
        torch.set_num_threads(usual)
        module.zero_grad()
        module.to("cpu")


if __name__ == "__main__":
    serve(answer)
