"""The child of training.py: trains models, and times the steps.

A step is all that a training loop does: forward, a loss, backward, and an optimizer, which has a learning rate of 0,
so that a figure does not depend on the steps before it.

    train           forward and backward of the plain model, or a pipeline
    step            `GPipe.step` under a schedule
    micro-batches   the plain model in this thread, micro-batch by micro-batch: what a pipeline does, without one
    whole           the plain model, the whole mini-batch at once

All but `train` train the same layers on the same mini-batch with the loss of `pytorch_pipelines.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import Answer, Request, pipeline, serve
from benchmarks.tasks import TASKS, inputs, loss, made
from benchmarks.timing import Step, synchronize, timed

__all__ = ["balance", "runner", "train"]

# ---- Forward and backward, of all who can.


def runner(peer: str, module: nn.Sequential, request: Request) -> Callable[[Tensor], Tensor]:
    """Return the function that is trained."""
    if peer in ("ours", "original"):
        model: Callable[[Tensor], Tensor] = pipeline(module, request)
        return model
    module.to(request["devices"][0])
    if request.get("split"):
        return lambda x: torch.cat([module(part) for part in x.chunk(request["m"])])
    return module


def train(peer: str, request: Request) -> Answer:
    """Return the seconds of each step, and of its forward; or the reason why there are none."""
    module = made(request["size"], request["model"])
    devices = request["devices"]
    try:
        x = inputs(TASKS[request["size"]][request["model"]], request["batch"], devices[0])
        run = runner(peer, module, request)
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
    """Return balances by time for each number of partitions, from one profile of a micro-batch."""
    from torchgpipe_balancing import profile

    module = made(request["size"], request["model"])
    sample = inputs(TASKS[request["size"]][request["model"]], request["rows"], "cpu")
    report = profile(module, sample, device=request["device"], timeout=request["seconds"])
    return {"balances": [report.balance(n) for n in request["partitions"]]}


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


def step(peer: str, request: Request) -> Answer:
    """Return the seconds of each step, and the loss of the last."""
    module = made("step", request["model"])
    devices = request["devices"]
    x = inputs(TASKS["step"][request["model"]], request["batch"], devices[0])
    usual = torch.get_num_threads()
    torch.set_num_threads(request["threads"])
    try:
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
