"""A 3D U-Net on volumes, one at a time: what each device has to hold, and how busy it is.

For each way to train there are the most bytes of tensors that each device holds in a step, beside parameters and
gradients, read from simulated GPUs: those compute nothing, so a large volume needs neither a GPU nor memory, see
`tests/late`. What libraries use within an operation, and what an allocator loses, is not counted. Beside them is what
plans count, which leaves out what operations need while they run, and the speed in which a simulated step follows from
the operations of the layers, without copies.

The model is that of `examples/volumes.py`, in float32, with scores at each size, and with as many channels as nnU-Net
gives a network of six levels. The volumes of a window are micro-batches; all have one size here.

    python -m benchmarks.volumes                    # some minutes; needs a C++ compiler
    python -m benchmarks.volumes --only networks    # those of MONAI and nnU-Net, beside themselves; needs both
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import volume_networks
from benchmarks.allocations import peaks_of
from benchmarks.offload import CARD
from benchmarks.peers import examples_on_path
from benchmarks.program import Part, Program, Progress
from benchmarks.records import GIB, Row, table_of
from torchgpipe import MicroBatches, pipelined
from torchgpipe.devices.links import verify_links
from torchgpipe.schedule import ScheduleName
from torchgpipe_balancing.planning.candidates import PlanInput, problem_for
from torchgpipe_balancing.planning.costs import Costs
from torchgpipe_balancing.planning.measure import measured
from torchgpipe_balancing.planning.model_under_test import ModelUnderTest
from torchgpipe_balancing.planning.on_meta import as_on_accelerator
from torchgpipe_balancing.planning.problem import Choice, Device

__all__ = ["PARTS"]

CHANNELS = (32, 64, 128, 256, 320, 320)


class Way(NamedTuple):
    """A way to train.

    Attributes:
        name: its name
        begins: the modules that partitions but the first begin with
        places: the device of each partition
        window: the volumes in a step
        recomputed: the modules that run again at backward; True for all
        schedule: the schedule
    """

    name: str
    begins: tuple[str, ...]
    places: tuple[int, ...]
    window: int = 1
    recomputed: Any = False
    schedule: ScheduleName = "1F1B"

    @property
    def devices(self) -> int:
        """The number of devices."""
        return max(self.places) + 1


#: Cuts that divide the operations of six levels about evenly, where whole levels can.
TWO, FOUR = ("ups.3",), ("downs.2", "ups.3", "ups.4")
#: Cuts that divide the memory, with the two convolutions of the last level apart.
WITHIN = ("downs.1", "ups.4.0", "ups.4.3")
FIRST = [f"downs.{k}" for k in range(6)] + [f"ups.{k}" for k in range(3)]
WAYS = (
    Way("one device", (), (0,)),
    Way("one device, recomputed", (), (0,), recomputed=True),
    Way("one volume at a time", TWO, (0, 1)),
    Way("one volume at a time, recomputed", TWO, (0, 1), recomputed=True),
    Way("a window", TWO, (0, 1), 4),
    Way("a window, first device recomputed", TWO, (0, 1), 4, recomputed=FIRST),
    Way("a window, recomputed", TWO, (0, 1), 4, recomputed=True),
    Way("a window, V-Half", FOUR, (0, 1, 1, 0), 4, schedule="V-Half"),
    Way("one volume at a time", FOUR, (0, 1, 2, 3)),
    Way("a window", FOUR, (0, 1, 2, 3), 8),
    Way("a window, recomputed", FOUR, (0, 1, 2, 3), 8, recomputed=True),
    Way("one volume at a time, cut within the last level", WITHIN, (0, 1, 2, 3)),
)


def unet(channels: tuple[int, ...]) -> tuple[Any, Callable[[Any, Tensor], Tensor]]:
    """Return a model and its loss function."""
    examples_on_path()
    from volumes import UNet, loss_fn

    torch.manual_seed(0)
    return UNet(channels), loss_fn


def drawn(edge: int) -> tuple[Tensor, Tensor]:
    """Return a volume, and the classes of its voxels."""
    volume = torch.zeros(1, 1, edge, edge, edge)
    return volume, volume[:, 0].long()


def step_of(way: Way, model: Any, loss_fn: Any, edge: int) -> Callable[[], object]:
    """Return what trains in a way on a window of volumes, for a model on the first device."""
    if not way.begins and not way.recomputed:
        volume, classes = (tensor.to("late:0") for tensor in drawn(edge))

        def step() -> None:
            for _ in range(way.window):
                (loss_fn(model(volume), classes) / way.window).backward()

        return step
    sample, target = (MicroBatches([tensor] * 2) for tensor in drawn(2 ** len(CHANNELS)))
    balance: Any = {name: j for j, name in enumerate(way.begins, 1)} or "parameters"
    devices, how = [f"late:{k}" for k in way.places], {"schedule": way.schedule, "checkpoint": way.recomputed}
    pipelined(
        model,
        sample,
        target=target,
        devices=devices,
        balance=balance,
        loss_fn=loss_fn,
        reduce="mean",
        verify=False,
        **how,
    )
    volume, classes = drawn(edge)
    volume, classes = volume.to(devices[0]), classes.to(devices[-1])
    return lambda: model.step(MicroBatches([volume] * way.window), target=MicroBatches([classes] * way.window))


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Take a step in each way, on devices that compute nothing."""
    os.environ.setdefault("LATE_DEVICES", "8")
    from tests import late

    late.load()
    costs, ways, rows = costs_of_volume(args.edge), WAYS[: args.ways], list[Row]()
    progress = Progress(len(ways))
    verify_links([torch.device("late", k) for k in range(4)], 2)
    with late.on_clock(late.Speed(**CARD)):
        for way in ways:
            progress(f"simulated GPUs, {way.devices} devices, {way.name}")
            about: Row = {"way": way.name, "devices": way.devices, "window": way.window}
            rows.append({**about, "peaks": peaks(way, args.edge), **on_paper(way, costs)})
            yield {"unit": "bytes", "edge": args.edge, "channels": CHANNELS, "rows": rows}


def peaks(way: Way, edge: int) -> list[int]:
    """Return the most bytes that each device holds in a step, above those between two steps."""
    model, loss_fn = unet(CHANNELS)
    model.to("late:0")
    step = step_of(way, model, loss_fn, edge)
    step()  # Gradients stay.
    return peaks_of(step, [torch.device("late", k) for k in range(way.devices)])


def costs_of_volume(edge: int) -> Costs:
    """Return what plans count of each layer, for a volume."""
    model, loss_fn = unet(CHANNELS)
    volume, classes = (tensor.to("meta") for tensor in drawn(edge))
    with as_on_accelerator():
        tested = ModelUnderTest(model.to("meta"), volume, classes, 4, {"loss_fn": loss_fn})
        return measured(tested, [torch.device("meta")], [1.0], 1, [1], seconds=0)


def on_paper(way: Way, costs: Costs) -> Row:
    """Return what plans count that each device holds, and the simulated speed over that of one device."""
    names = [layer.modules[0] for layer in costs.layers]
    if not {*way.begins} <= {*names}:  # A plan takes modules as they are in a spine for four partitions.
        return {}
    cuts = [0, *[names.index(name) for name in way.begins], len(names)]
    prefixes = tuple([f"{name}." for name in way.recomputed]) if isinstance(way.recomputed, list) else ("",)
    recomputed = [k for k, name in enumerate(names) if way.recomputed and f"{name}.".startswith(prefixes)]
    choice = Choice(tuple([b - a for a, b in pairwise(cuts)]), frozenset(recomputed))
    given = PlanInput(costs, tuple([Device(f"late:{k}") for k in range(way.devices)]), way.window, 1.0)
    outcome = problem_for(given, way.schedule, way.window, way.places).outcome(choice)
    counted = [memory - state for memory, state in zip(outcome.memory, outcome.state)]
    alone = sum([3 * layer.forward for layer in costs.layers_at(1, 0.0)])
    return {"counted": counted, "speed": alone * way.window / outcome.seconds}


def volumes(result: dict[str, Any]) -> str:
    """Return a table of what devices hold, and of the simulated speed of each way."""
    first = result["rows"][0]
    columns: dict[str, Any] = {"devices": "devices", "way": "way", "volumes in a step": "window"}
    columns["each device holds at most, GiB"] = lambda row: ", ".join(f"{peak / GIB:.1f}" for peak in row["peaks"])
    columns["as plans count"] = lambda row: ", ".join(f"{size / GIB:.1f}" for size in row.get("counted", ())) or "-"
    columns["the fullest, over one device"] = lambda row: f"{max(row['peaks']) / max(first['peaks']):.2f}"
    columns["speed, simulated"] = lambda row: f"{row['speed']:.2f}x" if "speed" in row else "-"
    return table_of(result["rows"], columns)


PARTS = {
    "devices": Part("volumes:devices", measure, {"devices": volumes}, cpu=True),
    "networks": Part(
        "volumes:networks", volume_networks.measure, {"networks": volume_networks.volume_networks}, cpu=True
    ),
}


def main() -> None:
    program = Program("volumes", __doc__, PARTS, ("devices",))
    program.add("--edge", type=int, default=192, help="of a volume")
    program.add("--ways", type=int, help="only the first ones (default: all)")
    program.run()


if __name__ == "__main__":
    main()
