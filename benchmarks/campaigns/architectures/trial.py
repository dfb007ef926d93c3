"""In a process of its own: one architecture, pipelined in several ways, each compared with the plain model.

    python -m benchmarks.campaigns.architectures.trial NAME '{"seeds": 2}'     # prints one line of JSON

The ways: `backward()` of what the caller sees, on one device and on several; `step` under three schedules; and random
ones, with cuts anywhere in the spine. A way ends as 'exact', 'refused' (an error by the library), 'differs' or 'error'.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, nn

from benchmarks.campaigns.architectures import CATALOGUE, Architecture
from benchmarks.campaigns.architectures.catalogue import Call
from benchmarks.campaigns.architectures.operators import register_missing
from benchmarks.campaigns.architectures.precision import in_float64
from benchmarks.campaigns.architectures.reference import (
    Run,
    compare,
    loss_of,
    micro_batches,
    run_plain,
    shares_of,
    state,
)

__all__ = ["WAYS", "Way", "prepare", "run", "try_way"]

CHUNKS = 3
SCHEDULES = ("1F1B", "ZeroBubble", "GPipe")


@dataclass(frozen=True)
class Way:
    """A way to pipeline a model.

    Args:
        step: whether to call `step`, not `backward`
        devices: of the partitions
        schedule: of the step
        balance: of the partitions; None for random counts
        chunks: of a mini-batch
        seed: of the data, and of the random counts
    """

    step: bool
    devices: tuple[str, ...]
    schedule: str = "1F1B"
    balance: str | None = "parameters"
    chunks: int = CHUNKS
    seed: int = 0

    def __str__(self) -> str:
        where = f"{len(self.devices)} partitions {'inline' if len(set(self.devices)) == 1 else 'with workers'}"
        run = f"step {self.schedule}" if self.step else "backward"
        return f"{run}, {where}" + (f", random cut {self.seed}" if self.balance is None else "")


def _devices(count: int, workers: bool = True) -> tuple[str, ...]:
    return tuple(f"cpu:{j}" if workers else "cpu" for j in range(count))


WAYS = (
    Way(step=False, devices=_devices(2, workers=False), balance="time"),
    Way(step=False, devices=_devices(2)),
    Way(step=False, devices=_devices(3)),
    Way(step=True, devices=_devices(2)),
    Way(step=True, devices=_devices(3), schedule="ZeroBubble"),
    Way(step=True, devices=_devices(2, workers=False), schedule="GPipe"),
)


def _random_ways(seeds: int) -> Iterator[Way]:
    """Yield two random ways for each seed: backward and a step."""
    for seed in range(1, seeds + 1):
        draw = random.Random(seed)
        for step in (False, True):
            devices = _devices(draw.randint(2, 4), workers=draw.random() < 0.7)
            schedule = draw.choice(SCHEDULES)
            yield Way(step, devices, schedule, balance=None, chunks=draw.randint(2, 4), seed=seed)


def prepare() -> None:
    """Set the process up: no network, one thread, missing operators."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    register_missing()


def draw(architecture: Architecture, rows: int, chunks: int, seed: int) -> Call:
    """Return random arguments with so many rows; those of each micro-batch, if a batch cannot be split."""
    from torchgpipe import MicroBatches

    generator = Generator().manual_seed(seed)
    if not architecture.given:
        return architecture.inputs(rows, generator)
    batches = [architecture.inputs(len(part), generator) for part in torch.empty(rows).chunk(chunks)]
    weigh = architecture.weight
    weights = None if weigh is None else [weigh(kwargs) for _, kwargs in batches]
    return (MicroBatches(batches, weights=weights),), {}


def pipeline(architecture: Architecture, model: nn.Module, way: Way, **options: Any) -> Any:
    """Pipeline a model in a way; there may be fewer partitions, if its spine is shorter than a random way asks for."""
    from torchgpipe import pipelined

    sample = draw(architecture, 2, 2, seed=100)
    options = {"chunks": way.chunks, "schedule": way.schedule, "verify": architecture.coupled or True, **options}
    # The catalogue knows what its experts do.
    warnings.filterwarnings("ignore", message=".* differ between rows together and rows apart")
    if architecture.loss is not None:
        options["loss_fn"] = lambda output, target: architecture.loss(output)  # type: ignore[misc]
    elif architecture.explicit:
        options["weight"] = architecture.weight
    if way.balance is not None:
        return pipelined(model, sample, devices=list(way.devices), balance=way.balance, **options)
    cut = random.Random(way.seed)
    for n in range(len(way.devices), 1, -1):
        devices = list(way.devices[:n])
        try:
            spine = pipelined(model, sample, devices=devices, balance="parameters", **options).layout.spine
        except ValueError as error:
            if n > 2 and "fewer than" in str(error):
                continue
            raise
        model.unpipelined()  # type: ignore[operator]
        cuts = sorted(cut.sample(range(1, len(spine)), n - 1))
        balance = [b - a for a, b in zip([0, *cuts], [*cuts, len(spine)])]
        return pipelined(model, sample, devices=devices, balance=balance, **options)
    raise AssertionError("unreachable")


def run_pipelined(architecture: Architecture, model: Any, way: Way, batch: Any) -> Run:
    """Run a pipelined model, forward and backward."""
    args, kwargs = batch
    if way.step:
        return Run(model.step(*args, **kwargs), **state(model))
    output = model(*args, **kwargs)
    outputs, shares = [output], [1.0]
    if architecture.given:
        outputs, shares = output, shares_of(architecture, micro_batches(architecture, batch, 0, 0))
    loss = torch.stack([loss_of(architecture, output) * share for output, share in zip(outputs, shares)]).sum()
    loss.backward()
    return Run(loss.detach(), outputs, shares, **state(model))


def try_way(architecture: Architecture, base: nn.Module, way: Way, **options: Any) -> dict[str, Any]:
    """Compare one way, with options of `pipelined`, with the plain model; return the verdict, with what led to it."""
    rows = architecture.rows + (way.seed % 2 if architecture.rows < 8 else 0)
    start = time.perf_counter()
    layout = None
    try:
        batch = draw(architecture, rows, way.chunks, way.seed)
        torch.manual_seed(way.seed)
        model = copy.deepcopy(base)
        if architecture.draws:
            inline = replace(way, devices=_devices(2, workers=False), balance="parameters")
            plain = run_pipelined(architecture, pipeline(architecture, model, inline), way, batch)
        else:
            plain = run_plain(architecture, model, batch, rows, way.chunks)
    except Exception as error:
        return {"way": str(way), "verdict": f"error: the plain model: {_line(error)}", "trace": traceback.format_exc()}
    result: dict[str, Any] = {"way": str(way)}
    try:
        batch = draw(architecture, rows, way.chunks, way.seed)
        torch.manual_seed(way.seed)
        model = pipeline(architecture, copy.deepcopy(base), way, **options)
        layout = model.layout.balance
        faults = compare(plain, run_pipelined(architecture, model, way, batch))
        result["verdict"] = f"differs: {'; '.join(faults[:3])} ({len(faults)})" if faults else "exact"
    except Exception as error:
        kind = "refused" if _by_us(error) else "error"
        result |= {"verdict": f"{kind}: {_line(error)}", "trace": _trace(error)}
    return {**result, "balance": layout, "seconds": round(time.perf_counter() - start, 2)}


def _by_us(error: BaseException) -> bool:
    """Return whether the library has raised an error about something that it does not take."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, (TypeError, ValueError)) and "/torchgpipe/" in frames[-1].filename


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-6000:]


def _line(error: BaseException) -> str:
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {error}{f' ({notes})' if notes else ''}"


def run(architecture: Architecture, ways: Callable[[], Iterator[Way]]) -> dict[str, Any]:
    """Try all ways, and return the worst verdict with those of all ways."""
    start = time.perf_counter()
    base = architecture.build()
    results = [try_way(architecture, base, way) for way in ways()]
    order = ("exact", "refused", "differs", "error")
    worst = max(results, key=lambda result: order.index(result["verdict"].partition(":")[0]))
    return {
        "name": architecture.name,
        "kind": architecture.kind,
        "parameters": sum(parameter.numel() for parameter in base.parameters()),
        "verdict": worst["verdict"],
        "exact": sum(result["verdict"] == "exact" for result in results),
        "ways": len(results),
        "seconds": round(time.perf_counter() - start, 1),
        "details": [result for result in results if result["verdict"] != "exact"],
    }


def main() -> None:
    name, options = sys.argv[1], json.loads(sys.argv[2])
    prepare()
    warnings.simplefilter("ignore")
    architecture = CATALOGUE[name]
    with in_float64():
        result = run(architecture, lambda: iter([*WAYS, *_random_ways(options["seeds"])]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
