"""The benchmark of volumes: peaks of simulated devices, and networks of other libraries."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import volume_networks, volumes

LEVELS = (2, 4, 8, 8)


@pytest.mark.late
def test_volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volumes, "CHANNELS", LEVELS)
    ways = [volumes.WAYS[k]._replace(recomputed=bool(volumes.WAYS[k].recomputed)) for k in (0, 1, 2, 4)]
    ways = [way._replace(begins=("ups.2",)) if way.begins else way for way in ways]
    monkeypatch.setattr(volumes, "WAYS", tuple(ways))
    (*_, result) = volumes.measure(Namespace(edge=32, ways=None))
    alone, again, apart, window = result["rows"]
    assert [len(row["peaks"]) for row in result["rows"]] == [1, 1, 2, 2]
    # What operations need while they run is on top of what plans count.
    assert alone["peaks"][0] > alone["counted"][0] > again["counted"][0]
    assert max(apart["peaks"]) < alone["peaks"][0] and apart["peaks"][0] < window["peaks"][0]
    assert apart["speed"] == pytest.approx(1) and window["speed"] > 1
    assert "| a window " in volumes.volumes(result)


def test_networks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("monai")
    pytest.importorskip("dynamic_network_architectures")
    made = {"UNet": volume_networks.networks()["UNet"]}
    monkeypatch.setattr(volume_networks, "networks", lambda: made)
    (*_, result) = volume_networks.measure(Namespace())
    assert [row["gradients"] and row["scores"] for row in result["rows"]] == [True, True]
    assert "| UNet    | same " in volume_networks.volume_networks(result)
