"""A profile is plain data, which these tests build by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from torchgpipe_balancing import LayerProfile, Profile
from torchgpipe_balancing.sizes import Sizes
from torchgpipe_balancing.times import Times

MIB = 2**20


def made(layers: Sequence[tuple[float, int, int]]) -> Profile:
    """Return a profile of layers from their backward seconds, and bytes of activations and parameters."""
    return Profile(
        layers=tuple(
            LayerProfile(
                f"layer{i}", "Linear", Times(seconds / 2, seconds / 2, seconds), Sizes(activations, parameters, 0, 64)
            )
            for i, (seconds, activations, parameters) in enumerate(layers)
        ),
        sample="(8, 4) float32",
        device="cpu",
        rounds=3,
    )


@pytest.fixture
def profile() -> Profile:
    return made([(0.004, 6 * MIB, 0), (0.001, 2 * MIB, 3 * MIB), (0.001, 0, 1 * MIB)])


def test_prints_as_a_table(profile: Profile) -> None:
    assert str(profile).splitlines() == [
        "layer   type     forward  recompute  backward  activations  parameters   share",
        "------  ------  --------  ---------  --------  -----------  ----------  ------",
        "layer0  Linear  2.000 ms   2.000 ms  4.000 ms      6.0 MiB         0 B   66.7%",
        "layer1  Linear  0.500 ms   0.500 ms  1.000 ms      2.0 MiB     3.0 MiB   16.7%",
        "layer2  Linear  0.500 ms   0.500 ms  1.000 ms          0 B     1.0 MiB   16.7%",
        "------  ------  --------  ---------  --------  -----------  ----------  ------",
        "total           3.000 ms   3.000 ms  6.000 ms      8.0 MiB     4.0 MiB  100.0%",
        "One run of (8, 4) float32 on cpu, medians of 3 rounds; 25% of the time is recomputation.",
    ]


def test_rows_are_flat(profile: Profile) -> None:
    assert profile.rows()[1] == {
        "layer": "layer1",
        "type": "Linear",
        "forward": 0.0005,
        "recompute": 0.0005,
        "backward": 0.001,
        "activations": 2 * MIB,
        "parameters": 3 * MIB,
        "buffers": 0,
        "output": 64,
        "share": pytest.approx(1 / 6),
    }


def test_costs(profile: Profile) -> None:
    assert profile.costs() == pytest.approx([0.008, 0.002, 0.002])
    assert profile.costs(recompute=False) == pytest.approx([0.006, 0.0015, 0.0015])
    assert profile.costs("size") == [6 * MIB, 8 * MIB, 2 * MIB]
    assert profile.costs("size", chunks=2, param_scale=4) == [3 * MIB, 13 * MIB, 4 * MIB]


def test_balance(profile: Profile) -> None:
    assert profile.balance(2) == [1, 2]
    assert profile.balance(2, by="size") == [1, 2]
    assert profile.balance(2, by="size", param_scale=0) == [1, 2]
    assert profile.balance(2, by="size", chunks=4) == [2, 1]


def test_balance_leaves_recomputation_out() -> None:
    layers = [
        LayerProfile(str(i), "", Times(1, recompute, 0), Sizes(0, 0, 0, 0)) for i, recompute in enumerate([5, 0, 0])
    ]
    profile = Profile(tuple(layers), "", "cpu", 1)
    assert profile.balance(2) == [1, 2]
    assert profile.balance(2, recompute=False) in ([1, 2], [2, 1])
    assert profile.costs(recompute=False) == [1, 1, 1]


def test_balance_for_the_devices_at_hand(profile: Profile) -> None:
    assert profile.balance(speeds=[3, 1]) == [2, 1]
    # by time, within the memory of the devices
    assert profile.balance(2, limits=[14 * MIB, 2 * MIB]) == [2, 1]
    with pytest.raises(ValueError, match=r"sizes do not fit into limits: all layers together have size 16777216"):
        profile.balance(limits=[8 * MIB, 7 * MIB])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "color"}, "by must be 'time' or 'size', not 'color'"),
        ({"by": "size", "chunks": 0}, "chunks must be 1 or more, not 0"),
        ({"by": "size", "param_scale": -1}, "param_scale must be 0 or more, not -1"),
    ],
)
def test_mistakes(profile: Profile, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile.costs(**options)


def test_more_partitions_than_layers(profile: Profile) -> None:
    with pytest.raises(ValueError, match="3 layers cannot be split into 4 partitions"):
        profile.balance(4)


def test_plot(profile: Profile) -> None:
    pytest.importorskip("matplotlib")
    [axes] = profile.plot([1, 2], by="size").axes
    assert [bar.get_height() for bars in axes.containers for bar in bars] == [6, 8, 2]
    assert [line.get_xdata()[0] for line in axes.get_lines()] == [0.5]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["partition 0: 6 MiB", "partition 1: 10 MiB"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["layer0", "layer1", "layer2"]

    [axes] = profile.plot().axes
    assert [bar.get_height() for bars in axes.containers for bar in bars] == pytest.approx([8, 2, 2])
    assert not axes.get_lines()


def test_plot_of_another_model(profile: Profile) -> None:
    with pytest.raises(ValueError, match=r"balance \[1, 1\] adds up to 2 layers, not 3"):
        profile.plot([1, 1])


def test_plot_without_matplotlib(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it fails
    with pytest.raises(ImportError, match="pip install matplotlib"):
        profile.plot()
