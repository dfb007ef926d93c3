"""The layout of a pipelined module: the spine, its partitions, and what crosses their boundaries; as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torchgpipe.devices.memory import shown_size

__all__ = ["Crossed", "Layout", "Part", "PartitionLayout"]


@dataclass
class Part:
    """A part of the spine.

    Attributes:
        modules: the names of its modules
        parameters: the number of elements of its parameters
        size: the bytes of its parameters and buffers
        again: the module that is called again after others and so holds them together; '' if there is none
        seconds: the time of its forward on the sample
    """

    modules: list[str]
    parameters: int
    size: int
    again: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The names of its first and last modules."""
        return _from_to(self.modules[0], self.modules[-1])


@dataclass(frozen=True)
class PartitionLayout:
    """A partition.

    Attributes:
        device: its device
        parts: its parts of the spine
    """

    device: torch.device
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """The names of its first and last parts."""
        return _from_to(self.parts[0].modules[0], self.parts[-1].modules[-1])


def _from_to(first: str, last: str) -> str:
    return first if first == last else f"{first}..{last}"


@dataclass(frozen=True)
class Crossed:
    """A tensor that has crossed from one partition to another; of those that run as one, the next ones are told.

    Attributes:
        source: the partition that it comes from
        target: the partition that uses it
        shape: its shape
        dtype: its type
        size: its bytes
    """

    source: int
    target: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    size: int


@dataclass
class Layout:
    """The layout of a pipelined module.

    Attributes:
        partitions: the partitions
        tied: for each parameter that has several names, its names
        crossed: what the first micro-batch has carried from partition to partition, each with a gradient to come back;
            empty until a mini-batch has run
    """

    partitions: list[PartitionLayout]
    tied: list[tuple[str, ...]]
    crossed: list[Crossed] = field(default_factory=list)

    @property
    def spine(self) -> list[str]:
        """The names of all parts of the spine."""
        return [part.name for partition in self.partitions for part in partition.parts]

    @property
    def balance(self) -> list[int]:
        """The number of parts in each partition."""
        return [len(partition.parts) for partition in self.partitions]

    def __str__(self) -> str:
        total = sum(part.seconds for partition in self.partitions for part in partition.parts) or 1.0
        rows = [("", "modules", "parts", "device", "parameters", "memory", "time")]
        for j, partition in enumerate(self.partitions):
            parts = partition.parts
            rows.append(
                (
                    str(j),
                    partition.name,
                    str(len(parts)),
                    str(partition.device),
                    f"{sum(part.parameters for part in parts):,}",
                    shown_size(sum(part.size for part in parts)),
                    f"{sum(part.seconds for part in parts) / total:.0%}",
                )
            )
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        lines += [f"tied: {' = '.join(names)}" for names in self.tied]
        for tensor in self.crossed:
            shape = "x".join(map(str, tensor.shape)) or "number"
            dtype, size = str(tensor.dtype)[6:], shown_size(tensor.size)
            lines.append(f"{tensor.source} to {tensor.target}: {shape} {dtype}, {size}")
        return "\n".join(lines)
