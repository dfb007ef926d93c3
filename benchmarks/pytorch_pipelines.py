"""The child of training.py for PyTorch's own pipelines: torch.distributed.pipelining, a process a partition.

Its schedules train the same layers on the same mini-batch, with gloo between CPUs and nccl between GPUs. They have no
checkpointing, and no skips between processes. A step is timed from one
barrier to the next.

A server that has imported PyTorch once forks the processes, so that starting eight of them does not take eight imports.
"""

from __future__ import annotations

import json
import multiprocessing
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.peers import Answer, Request, serve
from benchmarks.tasks import TASKS, inputs, loss, made
from benchmarks.timing import synchronize

SCHEDULES: dict[str, Any] = {"ScheduleGPipe": ScheduleGPipe, "Schedule1F1B": Schedule1F1B}

#: A process that has waited so long for another process raises.
PATIENCE = timedelta(minutes=10)


def answer(peer: str, request: Request) -> Answer:
    """Return the seconds of each step, and the loss of the last."""
    with TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            train_stage,
            args=(peer, request, folder),
            nprocs=len(request["balance"]),
            start_method="forkserver",
        )
        result: Answer = json.loads(Path(folder, "answer").read_text())
    return result


def train_stage(j: int, peer: str, request: Request, folder: str) -> None:
    """Train partition ``j`` in a process of its own. The process of the last partition writes the answer."""
    torch.set_num_threads(1)
    device = torch.device(request["devices"][j])
    n = len(request["balance"])
    if device.type == "cpu":
        world: dict[str, Any] = {"backend": "gloo"}
    else:
        torch.accelerator.set_device_index(device)
        world = {"backend": "nccl", "device_id": device}
    store = f"file://{folder}/store"
    dist.init_process_group(init_method=store, rank=j, world_size=n, timeout=PATIENCE, **world)
    try:
        answered = timed_steps(j, n, device, peer, request)
    finally:
        dist.destroy_process_group()
    if j == n - 1:
        Path(folder, "answer").write_text(json.dumps(answered))


def timed_steps(j: int, n: int, device: torch.device, peer: str, request: Request) -> Answer:
    task = TASKS[request["size"]][request["model"]]
    first = sum(request["balance"][:j])
    layers = made(request["size"], request["model"])[first : first + request["balance"][j]].to(device)
    stage = PipelineStage(layers, j, n, device)
    schedule = SCHEDULES[peer](stage, request["m"], loss_fn=loss)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.0)
    input = [inputs(task, request["batch"], str(device))] if j == 0 else []
    losses: list[Tensor] = []
    # The loss compares with nothing, but the schedule splits a target for it.
    last = {"target": torch.zeros(request["batch"], device=device), "losses": losses} if j == n - 1 else {}

    seconds = []
    for _ in range(request["warm_up"] + request["steps"]):
        dist.barrier()
        synchronize([str(device)])
        start = perf_counter()
        optimizer.zero_grad()
        schedule.step(*input, **last)
        optimizer.step()
        synchronize([str(device)])
        dist.barrier()
        seconds.append(perf_counter() - start)
    mean = float(torch.stack(losses).mean()) if losses else None
    return {"seconds": seconds[request["warm_up"] :], "loss": mean}


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["benchmarks.pytorch_pipelines"])
    serve(answer)
