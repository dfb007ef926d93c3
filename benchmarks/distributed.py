"""The cost of a pipeline over several processes, beside one that is written by hand and beside the ideal.

A GPT is trained five ways, in the same processes, in turn:

- `ours`: DistributedGPipe, which gives every process the loss;
- `any`: the same model by `pipelined`, which takes any model, and runs all of its forward in each process;
- `hand`: the stages and the 1F1B schedule of torch.distributed.pipelining with code written for this model, which
  leaves the losses of the micro-batches in the last process;
- `ours` and `any` again with recomputation, of the same layers;
- the ideal: each stage's layers alone, without a pipeline. With t the time of a micro-batch on a stage, forward and
  backward, a step takes what 1F1B takes on paper.

The cost model of docs/scaling.rst is checked against them: to the ideal it adds what is sent, from the latency and the
bandwidth that are measured between the processes. Both are computed from a result, and are not in it.

    python -m benchmarks.distributed                          # -> results/distributed.json; seven minutes
    python -m benchmarks.distributed --processes 1 2 4 8      # with as many cores, or GPUs
    python -m benchmarks.distributed --show
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import torchgpipe
from benchmarks.cost import step_seconds
from benchmarks.models import gpt
from benchmarks.program import Part, Program
from benchmarks.records import ratios, spread, table_of
from torchgpipe.distributed import DistributedGPipe

VOCABULARY = 256


class Shape(NamedTuple):
    """What is trained.

    Attributes:
        blocks: of the GPT
        width: of its vectors
        length: of a text
        rows: texts in a micro-batch
    """

    blocks: int
    width: int
    length: int
    rows: int


SIZES = {"cpu": Shape(8, 128, 64, 16), "cuda": Shape(24, 1024, 1024, 2)}


# ---- In each process.


def cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


class Bench:
    """The trials of one process."""

    def __init__(self, rank: int, n: int, turns: int) -> None:
        self.rank, self.n, self.turns = rank, n, turns
        self.device = torch.device("cuda", rank) if _gpus(n) else torch.device("cpu")
        self.shape = SIZES[self.device.type]
        torch.manual_seed(0)
        self.layers = gpt(VOCABULARY, self.shape.blocks, 4, self.shape.width, self.shape.length)
        self.balance = [len(part) for part in torch.arange(len(self.layers)).tensor_split(n)]

    def batch(self, m: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(m)
        text = torch.randint(VOCABULARY, (m * self.shape.rows, self.shape.length + 1), generator=draw).to(self.device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def part(self) -> nn.Sequential:
        """Return the layers of this process."""
        begin = sum(self.balance[: self.rank])
        return nn.Sequential(*list(self.layers)[begin : begin + self.balance[self.rank]]).to(self.device)

    def ours(self, m: int, mesh: Any = None, *, recomputes: bool = False) -> Callable[[], Any]:
        model = DistributedGPipe(
            self.layers,
            self.balance if mesh is None else [len(self.layers)],
            chunks=m,
            checkpoint="always" if recomputes else "never",
            loss_fn=cross_entropy,
            mesh=mesh,
            device=self.device,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        input, target = self.batch(m)

        def step() -> None:
            optimizer.zero_grad()
            model.step(input, target)
            optimizer.step()

        return step

    def any_model(self, m: int, *, recomputes: bool = False) -> Callable[[], Any]:
        model: Any = copy.deepcopy(self.layers)
        input, target = self.batch(m)
        names = [name for name, _ in model.named_children()]
        places = torch.arange(len(names)).tensor_split(self.n)
        balance = {names[k]: j for j, part in enumerate(places) for k in part.tolist()}
        torchgpipe.pipelined(
            model,
            input[: 2 * self.shape.rows],
            chunks=m,
            mesh=init_device_mesh(self.device.type, (self.n,)),
            devices=[self.device],
            balance=balance,
            # What DistributedGPipe recomputes: in the last partition, backward follows forward under 1F1B.
            checkpoint=[name for name in names if recomputes and balance[name] < self.n - 1],
            loss_fn=cross_entropy,
            verify=False,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def step() -> None:
            optimizer.zero_grad()
            model.step(input, target=target)
            optimizer.step()

        return step

    def hand(self, m: int) -> Callable[[], Any]:
        part = self.part()
        stage = PipelineStage(part, self.rank, self.n, self.device)
        schedule = Schedule1F1B(stage, m, loss_fn=cross_entropy)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.0)
        input, target = self.batch(m)
        arguments = (input,) if self.rank == 0 else ()
        last: dict[str, Any] = {"target": target, "losses": []} if self.rank == self.n - 1 else {}

        def step() -> None:
            optimizer.zero_grad()
            if last:
                last["losses"].clear()
            schedule.step(*arguments, **last)
            optimizer.step()

        return step

    def alone(self) -> Callable[[], Any]:
        """Return a step of one micro-batch on this stage: forward, backward, and no messages."""
        part = self.part()
        shape = (self.shape.rows, self.shape.length)
        if self.rank == 0:
            value = self.batch(1)[0]
        else:
            value = torch.randn(*shape, self.shape.width, device=self.device, requires_grad=True)
        target = self.batch(1)[1]

        def step() -> None:
            output = part(value)
            if self.rank == self.n - 1:
                cross_entropy(output, target).backward()
            else:
                output.backward(torch.ones_like(output))

        return step

    def message(self, numbers: int) -> Callable[[], Any]:
        """Return a step that sends so many numbers between the first two processes, there and back."""
        numbers_ = torch.zeros(numbers, device=self.device)

        def step() -> None:
            if self.rank == 0:
                dist.send(numbers_, 1)
                dist.recv(numbers_, 1)
            elif self.rank == 1:
                dist.recv(numbers_, 0)
                dist.send(numbers_, 0)

        return step

    def reduce(self) -> Callable[[], Any]:
        flat = torch.cat([parameter.detach().flatten() for parameter in self.layers.parameters()]).to(self.device)
        return lambda: dist.all_reduce(flat)

    def seconds(self, *steps: Callable[[], Any], repeat: int = 1) -> list[list[float]]:
        """Return the seconds of each step, which run in turn: one figure a turn, in all processes."""
        for step in steps:
            for _ in range(2):
                step()
        result: list[list[float]] = [[] for _ in steps]
        for turn in range(self.turns):
            order = list(zip(steps, result))
            for step, taken in order[:: 1 if turn % 2 else -1]:
                dist.barrier()
                begin = perf_counter()
                for _ in range(repeat):
                    step()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                taken.append((perf_counter() - begin) / repeat)
        return result

    def gathered(self, value: float) -> list[float]:
        values: list[Any] = [None] * self.n
        dist.all_gather_object(values, value)
        return values

    def run(self, counts: list[int]) -> dict[str, Any]:
        stages = self.gathered(statistics.median(self.seconds(self.alone(), repeat=10)[0]))
        latency = send = 0.0
        if self.n > 1:
            tensor = self.shape.rows * self.shape.length * self.shape.width
            small, large = self.seconds(self.message(1), self.message(tensor), repeat=20)
            latency = statistics.median(small) / 2
            send = max(0.0, statistics.median(large) / 2 - latency)
        result = {
            "processes": self.n,
            "balance": self.balance,
            "stages_ms": [1000 * x for x in stages],
            "latency_ms": latency * 1000,
            "send_ms": send * 1000,
            "rows": [self.row(m) for m in counts],
        }
        if self.n > 1:
            result["replicas"] = self.replicas(counts[-1])
        return result

    def row(self, m: int) -> dict[str, Any]:
        """Measure both ways with m micro-batches."""
        ours, any_model, hand = self.seconds(self.ours(m), self.any_model(m), self.hand(m))
        again = self.seconds(self.ours(m, recomputes=True), self.any_model(m, recomputes=True))
        texts = self.shape.rows * m
        return {
            "chunks": m,
            "ours": spread(texts / x for x in ours),
            "hand": spread(texts / x for x in hand),
            "ours_over_hand": ratios(ours, hand),
            "any_over_hand": ratios(any_model, hand),
            "any_over_ours_recomputed": ratios(*reversed(again)),
            "measured_ms": statistics.median(ours) * 1000,
        }

    def replicas(self, m: int) -> dict[str, Any]:
        """Measure what it costs to sum gradients of replicas, one stage in each process."""
        mesh = init_device_mesh(self.device.type, (self.n, 1))
        whole = Bench(0, 1, self.turns)
        whole.device = self.device
        alone = statistics.median(self.gathered(statistics.median(self.seconds(whole.alone())[0])))
        reduce = statistics.median(self.seconds(self.reduce())[0])
        measured = statistics.median(self.seconds(self.ours(m, mesh))[0])
        predicted = step_seconds([alone], m, reduce=reduce)
        return {
            "chunks": m,
            "reduce_ms": reduce * 1000,
            "measured_ms": measured * 1000,
            "predicted_ms": predicted * 1000,
        }


def _gpus(n: int) -> bool:
    return torch.cuda.device_count() >= n


def _work(rank: int, n: int, folder: str, turns: int, counts: list[int]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", n)
    backend = "nccl" if _gpus(n) else "gloo"
    if _gpus(n):
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=timedelta(minutes=2))
    result = Bench(rank, n, turns).run(counts)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# ---- The table of a result.


def ideal(result: dict[str, Any], run: dict[str, Any], row: dict[str, Any]) -> float:
    """Return how many texts a second the stages allow, by themselves."""
    texts: float = result["shape"]["rows"] * row["chunks"]
    return texts / step_seconds([x / 1000 for x in run["stages_ms"]], row["chunks"])


def predicted_ms(run: dict[str, Any], row: dict[str, Any]) -> float:
    """Return the time of a step by the cost model."""
    stages, latency, send = ([x / 1000 for x in run["stages_ms"]], run["latency_ms"] / 1000, run["send_ms"] / 1000)
    return 1000 * step_seconds(stages, row["chunks"], latency=latency, send=send)


def distributed(result: dict[str, Any]) -> str:
    """Return a table of texts a second, beside those by hand, and of a step as measured and as predicted."""
    rows = [
        {**run, **row, "ideal": ideal(result, run, row), "predicted_ms": predicted_ms(run, row)}
        for run in result["runs"]
        for row in run["rows"]
    ]
    columns: dict[str, Any] = {
        **{"processes": "processes", "micro-batches": "chunks"},
        "ours": lambda row: f"{row['ours']['median']:.1f}",
        "by hand": lambda row: f"{row['hand']['median']:.1f}",
        **{"ideal": "ideal:.1f", "ours / by hand": "ours_over_hand:2"},
        **{"any model / by hand": "any_over_hand:2", "any / ours, recomputed": "any_over_ours_recomputed:2"},
        **{"step, ms": "measured_ms:.0f", "predicted, ms": "predicted_ms:.0f"},
    }
    return table_of(rows, columns)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runs = []
    for n in args.processes:
        with TemporaryDirectory() as folder:
            mp.spawn(_work, (n, folder, args.turns, args.chunks), nprocs=n)  # type: ignore[no-untyped-call]
            runs.append(json.loads(Path(folder, "result").read_text()))
    on_gpus = _gpus(max(args.processes))
    shape = SIZES["cuda" if on_gpus else "cpu"]
    return {"backend": "nccl" if on_gpus else "gloo", "shape": shape._asdict(), "runs": runs}


PARTS = {"distributed": Part("distributed", measure, {"texts a second": distributed})}


def main() -> None:
    program = Program("distributed", "Measure a pipeline over several processes.", PARTS)
    program.add("--processes", type=int, nargs="+", default=[1, 2])
    program.add("--chunks", type=int, nargs="+", default=[2, 4, 8, 16])
    program.add("--turns", type=int, default=9)
    program.run()


if __name__ == "__main__":
    main()
