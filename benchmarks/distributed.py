"""What a pipeline over several processes costs beside one that is written by hand, and beside the ideal.

A GPT is trained three ways, in the same processes, in turn:

- `ours`: DistributedGPipe, which gives every process the loss;
- `hand`: the stages and the 1F1B schedule of torch.distributed.pipelining with code written for this model, which
  leaves the losses of the micro-batches in the last process;
- the ideal: each stage's layers alone, without a pipeline. With t the time of a micro-batch on a stage, forward and
  backward, a step takes at least ``sum t + (m - 1) max t``.

The cost model of docs/scaling.rst is checked against them: to the ideal it adds what is sent, from the latency and the
bandwidth that are measured between the processes.

    python -m benchmarks.distributed                          # -> results/distributed.json, .svg; four minutes
    python -m benchmarks.distributed --processes 1 2 4 8      # with as many cores, or GPUs
    python -m benchmarks.distributed --draw
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from benchmarks.models import gpt
from benchmarks.pictures import save
from benchmarks.records import RESULTS, environment, ratios, shown, spread, table, write
from torchgpipe.distributed import DistributedGPipe

__all__ = ["Shape", "main", "predicted"]

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


def predicted(stages: list[float], m: int, latency: float, send: float, reduce: float = 0.0) -> float:
    """The seconds that a step takes by the cost model.

    Args:
        stages: the seconds that a micro-batch takes on each stage, forward and backward
        m: the number of micro-batches
        latency: of a message, in seconds
        send: the seconds that the tensors of a micro-batch take over one boundary, one way
        reduce: the seconds that the gradients of the replicas take
    """
    n = len(stages)
    ways = 2 * (n - 1)  # each boundary there and back, once at the start and at the end of a step
    agree = 2 * (n > 1) * latency * n  # all say that they are ready, and hear of the loss
    return sum(stages) + (m - 1) * max(stages) + ways * (latency + send) + agree + reduce


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
        """The layers of this process."""
        begin = sum(self.balance[: self.rank])
        return nn.Sequential(*list(self.layers)[begin : begin + self.balance[self.rank]]).to(self.device)

    def ours(self, m: int, mesh: Any = None) -> Callable[[], Any]:
        balance = self.balance if mesh is None else [len(self.layers)]
        model = DistributedGPipe(
            self.layers, balance, chunks=m, checkpoint="never", loss_fn=cross_entropy, mesh=mesh, device=self.device
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        input, target = self.batch(m)

        def step() -> None:
            optimizer.zero_grad()
            model.step(input, target)
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
        """A micro-batch on this stage: forward, backward, and nothing sent."""
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
        """There and back, between the first two."""
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
        """What each of them takes, in turn: one figure for each turn, the same in all processes."""
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
            small, large = self.seconds(
                self.message(1), self.message(self.shape.rows * self.shape.length * self.shape.width), repeat=20
            )
            latency = statistics.median(small) / 2
            send = max(0.0, statistics.median(large) / 2 - latency)
        rows = []
        for m in counts:
            ours, hand = self.seconds(self.ours(m), self.hand(m))
            ideal = sum(stages) + (m - 1) * max(stages)
            rows.append(
                {
                    "chunks": m,
                    "ours": spread(self.shape.rows * m / x for x in ours),
                    "hand": spread(self.shape.rows * m / x for x in hand),
                    "ideal": self.shape.rows * m / ideal,
                    "ours_over_hand": ratios(ours, hand),
                    "measured_ms": statistics.median(ours) * 1000,
                    "predicted_ms": predicted(stages, m, latency, send) * 1000,
                }
            )
        result = {
            "processes": self.n,
            "balance": self.balance,
            "stages_ms": [1000 * x for x in stages],
            "latency_ms": latency * 1000,
            "send_ms": send * 1000,
            "rows": rows,
        }
        if self.n > 1:
            result["replicas"] = self.replicas(counts[-1])
        return result

    def replicas(self, m: int) -> dict[str, Any]:
        """One stage in each process, all the same: what it costs to add up their gradients."""
        mesh = init_device_mesh(self.device.type, (self.n, 1))
        whole = Bench(0, 1, self.turns)
        whole.device = self.device
        alone = statistics.median(self.gathered(statistics.median(self.seconds(whole.alone())[0])))
        reduce = statistics.median(self.seconds(self.reduce())[0])
        measured = statistics.median(self.seconds(self.ours(m, mesh))[0])
        return {
            "chunks": m,
            "reduce_ms": reduce * 1000,
            "measured_ms": measured * 1000,
            "predicted_ms": predicted([alone], m, 0.0, 0.0, reduce) * 1000,
        }


def _gpus(n: int) -> bool:
    return torch.cuda.device_count() >= n


def _work(rank: int, n: int, folder: str, turns: int, counts: list[int]) -> None:
    torch.set_num_threads(1)
    with _joined(rank, n, Path(folder)):
        bench = Bench(rank, n, turns)
        result = bench.run(counts)
        if rank == 0:
            Path(folder, "result").write_text(json.dumps(result))


@contextmanager
def _joined(rank: int, n: int, folder: Path) -> Iterator[None]:
    store = dist.FileStore(str(folder / "store"), n)
    if _gpus(n):
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if _gpus(n) else "gloo", store=store, rank=rank, world_size=n, timeout=timedelta(minutes=2)
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


# ---- What there is to see.


def draw(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    runs = result["runs"]
    figure = Figure(figsize=(4.2 * len(runs), 3.6), layout="constrained")
    for axes, run in zip(figure.subplots(1, len(runs), sharey=True, squeeze=False)[0], runs):
        counts = [row["chunks"] for row in run["rows"]]
        axes.plot(counts, [row["ideal"] for row in run["rows"]], "--", color="gray", label="ideal")
        for name, color, width in (("hand", "tab:blue", 5), ("ours", "tab:orange", 2)):
            label = "DistributedGPipe" if name == "ours" else "written by hand"
            axes.plot(
                counts, [row[name]["median"] for row in run["rows"]], "o-", color=color, linewidth=width, label=label
            )
        axes.set(title=f"{run['processes']} process{'es' if run['processes'] > 1 else ''}", xlabel="micro-batches")
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, counts)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylim(bottom=0)  # Now that all is plotted: it fixes the top as well.
    figure.axes[0].set_ylabel("texts a second")
    figure.axes[0].legend()
    save(figure, path)


def distributed_table(result: dict[str, Any]) -> str:
    """Texts a second, beside what is written by hand; what a step takes, and what the model of its costs says."""
    rows = [
        [
            run["processes"],
            row["chunks"],
            *(f"{row[name]['median']:.1f}" for name in ("ours", "hand")),
            f"{row['ideal']:.1f}",
            shown(row["ours_over_hand"], 2),
            *(f"{row[name]:.0f}" for name in ("measured_ms", "predicted_ms")),
        ]
        for run in result["runs"]
        for row in run["rows"]
    ]
    header = ["processes", "micro-batches", "ours", "by hand", "ideal", "ours / by hand", "step, ms", "predicted, ms"]
    return table(rows, header)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a pipeline over several processes.")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path, default=RESULTS / "distributed.json")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    options = parser.parse_args()
    if not options.draw:
        runs = []
        for n in options.processes:
            with TemporaryDirectory() as folder:
                mp.spawn(_work, (n, folder, options.turns, options.chunks), nprocs=n)  # type: ignore[no-untyped-call]
                runs.append(json.loads(Path(folder, "result").read_text()))
        backend = "nccl" if _gpus(max(options.processes)) else "gloo"
        shape = SIZES["cuda" if backend == "nccl" else "cpu"]
        write(options.json, {"environment": environment(), "backend": backend, "shape": shape._asdict(), "runs": runs})
    result = json.loads(options.json.read_text())
    print(distributed_table(result))
    draw(result, options.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
