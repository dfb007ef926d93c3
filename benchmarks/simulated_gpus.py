"""Many devices with short blocks: a process for each device, beside one process, and beside the ideal.

A device is simulated: its block sleeps in forward and twice as long in backward, so that cores do not matter, and all
time of the host counts against the pipeline. One process has a worker thread for each device, which share Python's
interpreter; several processes send messages over gloo instead. The ideal is what `torchgpipe.schedule` simulates, with
the seconds that the blocks are told to sleep.

Two bounds of the machine stand beside the ideal. A sleep takes longer than it is told to, and autograd takes its time:
so a single block, without any pipeline, is below the ideal, too. And with fewer cores than devices, processes compete
for cores as threads do for the interpreter: the CPU time of a step, of all processes, says how much.

    python -m benchmarks.simulated_gpus                     # four minutes
    python -m benchmarks.simulated_gpus --devices-of 8 --seconds-of 0.001
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import torchgpipe
from benchmarks.program import Part, Program, Progress
from benchmarks.records import aim, spread, table_of
from benchmarks.schedules import Sleeping, simulated_sleep
from benchmarks.tiny_steps import Chain, mean

#: The schedule of all steps.
SCHEDULE = "1F1B"


def model_of(n: int, m: int, seconds: float, where: dict[str, Any]) -> Any:
    """Return a pipelined chain of blocks that sleep, one for each device."""
    model = Chain([Sleeping(seconds) for _ in range(n)])
    balance = {f"blocks.{k}": k for k in range(n)}
    # Without a proof, which would sleep, too.
    how: dict[str, Any] = {"chunks": m, "balance": balance, "schedule": SCHEDULE, "verify": False, "loss_fn": mean}
    return torchgpipe.pipelined(model, (torch.zeros(2, 1),), **how, **where)


def timed(model: Any, m: int, turns: int) -> list[list[float]]:
    """Return the seconds of each step after two, by the clock and of CPU."""
    x = torch.zeros(2 * m, 1)
    taken = []
    for _ in range(turns + 2):
        if dist.is_initialized():
            dist.barrier()
        begin, cpu = perf_counter(), process_time()
        model.step(x)
        taken.append([perf_counter() - begin, process_time() - cpu])
    return taken[2:]


def alone(m: int, seconds: float, turns: int) -> list[list[float]]:
    """Return the seconds of one block, forward and backward, without a pipeline; see `timed`."""
    block, taken = Sleeping(seconds), []
    x = torch.zeros(2, 1, requires_grad=True)
    for _ in range(turns + 2):
        begin, cpu = perf_counter(), process_time()
        for _ in range(m):
            mean(block(x)).backward()
        taken.append([perf_counter() - begin, process_time() - cpu])
    return taken[2:]


def _work(rank: int, n: int, folder: str, m: int, seconds: float, turns: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(minutes=2))
    taken = timed(model_of(n, m, seconds, {"mesh": init_device_mesh("cpu", (n,))}), m, turns)
    Path(folder, f"{rank}.json").write_text(json.dumps(taken))
    dist.barrier()
    dist.destroy_process_group()


def over_processes(n: int, m: int, seconds: float, turns: int) -> list[list[float]]:
    """Return the seconds of each step of n processes: that of the last one to end, and the CPU time of all."""
    with TemporaryDirectory() as folder:
        mp.spawn(_work, (n, folder, m, seconds, turns), nprocs=n)  # type: ignore[no-untyped-call]
        each = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(n)]
    return [[max(clock for clock, _ in step), sum(cpu for _, cpu in step)] for step in zip(*each)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    progress = Progress((2 * len(args.devices_of) + 1) * len(args.seconds_of))
    torch.set_num_threads(1)
    m = args.micro_batches
    for n in (1, *args.devices_of):
        for seconds in args.seconds_of:
            ideal = simulated_sleep(SCHEDULE, m, range(n), seconds).seconds
            for processes in (1, n) if n > 1 else (0,):
                progress(f"{n} devices, blocks of {1000 * seconds:g} ms, {processes} processes")
                if processes == 0:
                    taken = alone(m, seconds, args.turns)
                elif processes == 1:
                    one = {"devices": [f"cpu:{k}" for k in range(n)]}
                    taken = timed(model_of(n, m, seconds, one), m, args.turns)
                else:
                    taken = over_processes(n, m, seconds, args.turns)
                clock, cpu = zip(*taken)
                rows.append(
                    {
                        **{"devices": n, "processes": processes, "block_ms": 1000 * seconds, "m": m},
                        **{"ideal_ms": 1000 * ideal, "measured_ms": spread(1000 * x for x in clock)},
                        "ideal/measured": spread(ideal / x for x in clock),
                        "cpu_ms": 1000 * statistics.median(cpu),
                        "load": round(os.getloadavg()[0], 1),
                    }
                )
    aims = [
        aim(
            f"{row['devices']} processes, blocks of {row['block_ms']:g} ms",
            row["ideal/measured"]["median"],
            least=0.85 if row["devices"] > 4 else 0.95,
        )
        for row in rows
        if row["processes"] > 1
    ]
    return {"rows": rows, "aims": aims}


def simulated(result: dict[str, Any]) -> str:
    """Return a table of steps: with threads, and with processes."""
    columns: dict[str, Any] = {
        **{"devices": "devices", "block, ms": "block_ms:g", "processes": lambda row: row["processes"] or "no pipeline"},
        **{"ideal, ms": "ideal_ms:.0f", "measured, ms": "measured_ms:0", "ideal / measured": "ideal/measured:2"},
        "CPU of all, ms": "cpu_ms:.0f",
    }
    return table_of(result["rows"], columns)


PARTS = {"simulated_gpus": Part("simulated_gpus", measure, {"steps of blocks that sleep": simulated})}


def main() -> None:
    program = Program("simulated_gpus", __doc__, PARTS)
    program.add("--devices-of", type=int, nargs="+", default=[2, 4, 8], help="how many devices")
    program.add("--seconds-of", type=float, nargs="+", default=[0.001, 0.015], help="of the forward of a block")
    program.add("--micro-batches", type=int, default=32)
    program.add("--turns", type=int, default=9)
    program.run()


if __name__ == "__main__":
    main()
