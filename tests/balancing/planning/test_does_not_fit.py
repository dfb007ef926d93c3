"""Where nothing fits, the error says by how much and where; and with so much more memory, it fits."""

from __future__ import annotations

import re

import pytest

from tests.balancing.planning.models import quick, wide
from torchgpipe.devices.memory import read_size
from torchgpipe_balancing import DoesNotFit, Plan


def plan(memory: list[float]) -> Plan:
    """Return a plan of a model on the meta device: all that is said of memory is the same in every run."""
    devices = [f"cpu:{k}" for k in range(len(memory))]
    return quick(wide().to("meta"), memory=memory, devices=devices, margin=0.1)


@pytest.mark.parametrize("memory", [[12_000.0, 12_000.0], [16_000.0, 9_000.0]])
def test_so_much_more_memory_fits_and_less_does_not(memory: list[float]) -> None:
    told = r"(?s)nothing fits 16 rows; the nearest is schedule='1F1B', chunks=4 .*would fit with .* more memory on each"
    with pytest.raises(DoesNotFit, match=told) as caught:
        plan(memory)
    more = read_size(re.findall(r"fit with ([\d.]+ \w+) more", str(caught.value))[0])
    assert plan([one + 1.05 * more for one in memory]).balance
    with pytest.raises(DoesNotFit):
        plan([one + 0.9 * more for one in memory])


def test_the_device_that_lacks_memory_is_named() -> None:
    with pytest.raises(DoesNotFit, match=r"which lacks [\d.]+ KiB on cpu:1\n"):
        plan([1e6, 1000.0])
