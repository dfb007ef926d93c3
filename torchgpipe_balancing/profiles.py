"""Read, export, draw and balance what was measured for each layer.

A profile is plain data: it needs neither the model nor a device, and can also be put together by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from torchgpipe.devices.memory import shown_size
from torchgpipe_balancing.partition import partition
from torchgpipe_balancing.sizes import Sizes, footprints
from torchgpipe_balancing.times import Times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LayerProfile", "Profile"]

By = Literal["time", "size"]


@dataclass(frozen=True)
class LayerProfile:
    """The name, the times and the sizes of a layer.

    Attributes:
        name: its name in the nn.Sequential
        type: the name of its class
        times: its times, in seconds
        sizes: its sizes, in bytes
    """

    name: str
    type: str
    times: Times
    sizes: Sizes


@dataclass(frozen=True)
class Profile:
    """The times and sizes of a model's layers, in order, and how they were measured.

    Attributes:
        layers: a profile for each layer
        sample: shapes and types of the input
        device: where the layers were measured
        rounds: the number of rounds; times are the medians over them
    """

    layers: tuple[LayerProfile, ...]
    sample: str
    device: str
    rounds: int

    def costs(
        self,
        by: By = "time",
        *,
        recompute: bool = True,
        chunks: int = 1,
        param_scale: float = 2.0,
    ) -> list[float]:
        """Return the cost of each layer.

        Args:
            by: 'time', in seconds, or 'size', in bytes

        Keyword Args:
            recompute: whether time includes one recomputation; pass False for ``checkpoint='never'``
            chunks: the number of micro-batches that the sample will be split into: a partition holds the
                activations of one; the default is right if the sample is a micro-batch
            param_scale: how many times parameters are held; see :func:`torchgpipe.balance.balance_by_size`

        Raises:
            ValueError: `by` is neither 'time' nor 'size', `chunks` is below 1, or `param_scale` is negative.

        """
        if by == "time":
            return [layer.times.total(recompute=recompute) for layer in self.layers]
        if by == "size":
            return footprints((layer.sizes for layer in self.layers), chunks=chunks, param_scale=param_scale)
        raise ValueError(f"by must be 'time' or 'size', not {by!r}")

    def balance(
        self,
        partitions: int | None = None,
        by: By = "time",
        *,
        recompute: bool = True,
        chunks: int = 1,
        param_scale: float = 2.0,
        speeds: Iterable[float] | None = None,
        limits: Iterable[float] | None = None,
    ) -> list[int]:
        """Split the layers so that the costliest partition costs as little as possible. ::

            profile.balance(4)
            profile.balance(4, by="size", chunks=8, param_scale=4)  # 8 micro-batches, Adam
            profile.balance(limits=[16 * 2**30, 8 * 2**30])  # by time, within 16 and 8 GiB

        Args:
            partitions: the number of partitions; may be left out if `speeds` or `limits` are given
            by: what to balance, 'time' or 'size'

        Keyword Args:
            recompute, chunks, param_scale: as in :meth:`costs`
            speeds: the speed of each partition's device, relative to the others (default: all are equally fast)
            limits: the bytes that each partition's device has for activations and parameters, counted as by 'size'

        Returns:
            The number of layers in each partition, GPipe's `balance`.

        Raises:
            ValueError: as in :meth:`costs`, or no such split exists; see :func:`partition`.

        """
        sizes = self.costs("size", chunks=chunks, param_scale=param_scale)
        return partition(
            self.costs(by, recompute=recompute, chunks=chunks, param_scale=param_scale),
            partitions,
            speeds=speeds,
            sizes=None if limits is None else sizes,
            limits=limits,
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return a flat dictionary for each layer, ready for ``pandas.DataFrame(profile.rows())``.

        Times are in seconds, sizes in bytes. `share` is the layer's share of the total time, from 0 to 1.
        """
        whole = sum(self.costs())
        return [
            {
                "layer": layer.name,
                "type": layer.type,
                **asdict(layer.times),
                **asdict(layer.sizes),
                "share": layer.times.total() / whole if whole else 0.0,
            }
            for layer in self.layers
        ]

    def __str__(self) -> str:
        columns: dict[str, Callable[[Any], str]] = {
            "layer": str,
            "type": str,
            "forward": _time,
            "recompute": _time,
            "backward": _time,
            "activations": shown_size,
            "parameters": shown_size,
            "share": "{:.1%}".format,
        }
        rows = self.rows()
        figures = [name for name, show in columns.items() if show is not str]
        rows.append({"layer": "total", "type": "", **{name: sum(row[name] for row in rows) for name in figures}})
        cells = [[show(row[name]) for name, show in columns.items()] for row in rows]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]

        def line(row: Iterable[str]) -> str:
            aligned = [
                cell.ljust(width) if index < 2 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            return "  ".join(aligned)

        rule = "  ".join("-" * width for width in widths)
        recomputed = sum(layer.times.recompute for layer in self.layers) / (sum(self.costs()) or 1.0)
        return "\n".join(
            [
                line(columns),
                rule,
                *map(line, cells[:-1]),
                rule,
                line(cells[-1]),
                f"One run of {self.sample} on {self.device}, medians of {self.rounds} "
                f"round{'s' * (self.rounds != 1)}; {recomputed:.0%} of the time is recomputation.",
            ]
        )

    def plot(
        self,
        balance: Sequence[int] | None = None,
        by: By = "time",
        *,
        recompute: bool = True,
        chunks: int = 1,
        param_scale: float = 2.0,
    ) -> Figure:
        """Draw the cost of each layer, and the cuts between partitions. ::

            profile.plot(profile.balance(4)).savefig("balance.png")

        Args:
            balance: the number of layers in each partition (default: no cuts)
            by: what to draw, 'time' or 'size'

        Keyword Args:
            recompute, chunks, param_scale: as in :meth:`costs`

        Raises:
            ImportError: Matplotlib is not installed.
            ValueError: as in :meth:`costs`, or `balance` does not add up to the number of layers.

        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plot needs Matplotlib: pip install matplotlib") from error

        costs = self.costs(by, recompute=recompute, chunks=chunks, param_scale=param_scale)
        balance = [len(costs)] if balance is None else list(balance)
        if sum(balance) != len(costs):
            raise ValueError(f"balance {balance} adds up to {sum(balance)} layers, not {len(costs)}")

        scale, unit = (1e3, "ms") if by == "time" else (2.0**-20, "MiB")
        heights = [cost * scale for cost in costs]
        figure = Figure(figsize=(min(4 + 0.3 * len(costs), 24), 4), layout="constrained")
        axes = figure.add_subplot()
        for j, (start, end) in enumerate(pairwise(accumulate(balance, initial=0))):
            load = sum(heights[start:end])
            axes.bar(range(start, end), heights[start:end], label=f"partition {j}: {load:.3g} {unit}")
            if start:
                axes.axvline(start - 0.5, color="black", linestyle="--", linewidth=1)
        axes.set_xticks(range(len(costs)), [layer.name for layer in self.layers], rotation=90)
        axes.set_xlabel("layer")
        axes.set_ylabel(f"{by} ({unit})")
        axes.set_title(f"{self.sample} on {self.device}")
        axes.legend()
        return figure


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
