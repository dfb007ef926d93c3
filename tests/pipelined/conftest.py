"""Fixtures of the tests with clients; torchvision's missing operators are registered before any import."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.campaigns.architectures.operators import register_missing

register_missing()

from tests.pipelined import helpers  # noqa: E402


@pytest.fixture(scope="session")
def variant() -> str:
    """Return the devices that have workers: what clients do to a model is the same on one device."""
    return "workers"


@pytest.fixture
def losses_in_float64() -> Iterator[None]:
    """Let models of transformers compute their losses in float64."""
    with helpers.losses_in_float64():
        yield
