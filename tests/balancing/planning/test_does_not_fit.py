"""Where nothing fits, the error says by how much and where; and with so much more memory, it fits."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.balancing.planning.models import quick, wide
from torchgpipe_balancing import DoesNotFit, Plan

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}
MARGIN = 0.1


def plan(memory: list[float], **options: Any) -> Plan:
    """Return a plan of a model on the meta device: all that is said of memory is the same in every run."""
    devices = [f"cpu:{k}" for k in range(len(memory))]
    return quick(wide().to("meta"), memory=memory, devices=devices, margin=MARGIN, **options)


def size(text: str) -> float:
    """Return the bytes that a text like '1.5 KiB' stands for, rounded up."""
    number, unit = text.split()
    return (float(number) + (0.05 if unit != "B" else 0.5)) * UNITS[unit]


def message(memory: list[float], **options: Any) -> str:
    with pytest.raises(DoesNotFit) as caught:
        plan(memory, **options)
    return str(caught.value)


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


@pytest.mark.parametrize("memory", [[12_000.0, 12_000.0], [16_000.0, 9_000.0]])
def test_so_much_more_memory_fits(memory: list[float]) -> None:
    text = message(memory)
    assert "nothing fits 16 rows; the nearest is schedule='1F1B', chunks=4 (4 rows), balance=" in text
    more = size(found(r"it would fit with ([\d.]+ \w+) more memory on each device", text))
    assert plan([one + more for one in memory]).balance
    assert message([one + 0.98 * more for one in memory])  # And less does not.


def test_the_device_that_lacks_memory_is_named() -> None:
    text = message([1e6, 1000.0])
    lacks = found(r"which lacks (.*)", text)
    assert re.fullmatch(r"[\d.]+ KiB on cpu:1", lacks)
