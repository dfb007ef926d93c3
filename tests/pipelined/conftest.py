"""Fixtures of the tests with clients; torchvision's missing operators are registered before any import."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pipelined import helpers


@pytest.fixture
def losses_in_float64() -> Iterator[None]:
    """Let models of transformers compute their losses in float64."""
    with helpers.losses_in_float64():
        yield
