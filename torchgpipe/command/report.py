"""What a command returns, and how it reads what several commands are given."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torchgpipe.devices.memory import read_size

__all__ = ["Report", "read_memories"]


class Report(NamedTuple):
    """What a command has found.

    Attributes:
        text: for people
        data: the same for programs: numbers, texts, lists and dicts
    """

    text: str
    data: Any


def read_memories(text: str) -> list[float]:
    """Return the bytes of each device, of a text such as ``'2x24GiB'`` or ``'24GiB,16GiB'``."""
    sizes: list[float] = []
    for part in text.split(","):
        count, size = re.fullmatch(r"\s*(?:(\d+)\s*x)?(.*)", part, re.IGNORECASE | re.DOTALL).groups()  # type: ignore[union-attr]
        sizes += [read_size(size)] * int(count or 1)
    if min(sizes, default=0) < 2**10:  # 24 is meant to be 24GiB.
        raise ValueError(f"devices are given as 2x24GiB, or 24GiB,16GiB, but got {text!r}")
    return sizes
