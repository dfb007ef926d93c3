"""Give the process back as it was: benchmarks have one to themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Put the threads back, and keep what is there out of the hundreds of collections between measured steps."""
    threads = torch.get_num_threads()
    gc.freeze()
    yield
    torch.set_num_threads(threads)
    gc.unfreeze()
