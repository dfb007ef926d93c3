"""Both distributions are made of this checkout, and the wheel can be imported; nothing is fetched."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")
packages = importlib.import_module("benchmarks.campaigns.packages")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    if not (packages.ROOT / ".git").exists():
        pytest.skip("git tells which files belong to the repository")
    wheel, archive, source = packages.build(tmp_path_factory.mktemp("built"))
    return wheel, archive, source


def test_the_distributions_have_what_they_should(made: tuple[Path, Path, Path]) -> None:
    wheel, archive, source = made
    found = packages.contents(wheel, archive)
    ours = [path for package in ("torchgpipe", "torchgpipe_balancing") for path in (source / package).rglob("*.py")]
    assert found["wheel"]["modules"] == len(ours)
    others = [name.partition(".dist-info/")[2] or name for name in found["wheel"]["others"]]
    metadata = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"]
    assert sorted(others) == [*metadata, "torchgpipe/py.typed", "torchgpipe_balancing/py.typed"]
    assert found["wheel"]["relative links of the description"] == []
    assert [name for name in found["sdist"]["left out"] if not name.startswith(".")] == []
