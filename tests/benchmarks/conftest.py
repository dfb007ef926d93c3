"""Give the process back as it was: benchmarks have one to themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the threads back, and keep what is there out of the hundreds of collections between measured steps."""
    threads, unfreeze = torch.get_num_threads(), gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    gc.freeze()
    yield
    torch.set_num_threads(threads)
    unfreeze()
