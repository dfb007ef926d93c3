"""Read, export and balance what was measured for each layer.

A profile is plain data: it needs neither the model nor a device, and can also be put together by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torchgpipe.devices.memory import shown_size
from torchgpipe_balancing.partition import partition
from torchgpipe_balancing.table import table

__all__ = ["LayerProfile", "Profile", "Sizes", "Times"]

By = Literal["time", "size"]


@dataclass(frozen=True)
class Times:
    """The times of a layer for the sample, in seconds.

    Attributes:
        forward: forward, which builds the graph for backward
        recompute: what checkpointing adds: one forward without a graph; 0 if nothing is recomputed
        backward: backward; 0 if the output needs no gradient
    """

    forward: float
    recompute: float
    backward: float

    def total(self, *, recompute: bool = True) -> float:
        """Return the seconds for forward and backward, with recomputation or without."""
        return self.forward + self.backward + (self.recompute if recompute else 0.0)


@dataclass(frozen=True)
class Sizes:
    """What a layer holds, in bytes.

    Attributes:
        activations: what autograd saves for backward, without what an earlier layer already keeps
        parameters: its parameters
        buffers: its buffers
        output: the output to the next layer, and the skips to later layers
    """

    activations: int
    parameters: int
    buffers: int
    output: int


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
        self, by: By = "time", *, recompute: bool = True, chunks: int = 1, param_scale: float = 2.0
    ) -> list[float]:
        """Return the cost of each layer.

        Args:
            by: 'time', in seconds, or 'size', in bytes: activations / chunks + parameters x param_scale

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
            if chunks < 1:
                raise ValueError(f"chunks must be 1 or more, not {chunks}")
            if not param_scale >= 0:
                raise ValueError(f"param_scale must be 0 or more, not {param_scale}")
            return [layer.sizes.activations / chunks + layer.sizes.parameters * param_scale for layer in self.layers]
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
        header, *lines, total = table(
            [[*columns], *[[show(row[name]) for name, show in columns.items()] for row in rows]], words=(0, 1)
        )
        rule = "-" * len(header)
        recomputed = sum(layer.times.recompute for layer in self.layers) / (sum(self.costs()) or 1.0)
        told = (
            f"One run of {self.sample} on {self.device}, medians of {self.rounds} round{'s' * (self.rounds != 1)}; "
            f"{recomputed:.0%} of the time is recomputation."
        )
        return "\n".join([header, rule, *lines, rule, total, told])


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
