"""Time the steps of any peer, on any devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter, process_time

import torch
from torch import Tensor

from benchmarks.peers import Answer, Request

__all__ = ["Step", "synchronize", "timed"]

#: Returns the loss of a step.
Step = Callable[[], Tensor]


def synchronize(devices: Iterable[str]) -> None:
    """Wait until accelerators have nothing to do."""
    for device in {*map(torch.device, devices)}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def timed(step: Step, start: Callable[[], object], devices: list[str], request: Request) -> Answer:
    """Return the seconds of each step after the first ones, by the clock and of CPU, and the loss of the last."""
    seconds, cpu = [], []
    for _ in range(request["warm_up"] + request["steps"]):
        synchronize(devices)
        begin, cpu_begin = perf_counter(), process_time()
        start()
        value = step()
        synchronize(devices)
        seconds.append(perf_counter() - begin)
        cpu.append(process_time() - cpu_begin)
    return {"seconds": seconds[request["warm_up"] :], "cpu": cpu[request["warm_up"] :], "loss": float(value)}
