"""Give the process back as it was: benchmarks have one to themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the threads back, and do without the hundreds of collections between measured steps."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(gc, "collect", lambda: 0)
    yield
    torch.set_num_threads(threads)
