"""A profile is plain data, which these tests build by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from torchgpipe_balancing import LayerProfile, Profile
from torchgpipe_balancing.profiles import Sizes, Times

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


def test_prints_a_row_for_each_layer_and_their_sum(profile: Profile) -> None:
    header, _, *rows, _, total, told = str(profile).splitlines()
    assert [row.split()[0] for row in rows] == ["layer0", "layer1", "layer2"]
    assert all(len(row) == len(header) for row in [*rows, total])
    assert [row.rpartition(" ")[2] for row in [*rows, total]] == ["66.7%", "16.7%", "16.7%", "100.0%"]
    assert "25% of the time is recomputation" in told


def test_costs(profile: Profile) -> None:
    assert profile.costs() == pytest.approx([0.008, 0.002, 0.002])
    assert profile.costs(recompute=False) == pytest.approx([0.006, 0.0015, 0.0015])
    assert profile.costs("size") == [6 * MIB, 8 * MIB, 2 * MIB]
    assert profile.costs("size", chunks=2, param_scale=4) == [3 * MIB, 13 * MIB, 4 * MIB]


def test_balance(profile: Profile) -> None:
    assert profile.balance(2) == [1, 2]
    assert profile.balance(2, by="size") == profile.balance(2, by="size", param_scale=0) == [1, 2]
    assert profile.balance(2, by="size", chunks=4) == [2, 1]
    assert profile.balance(speeds=[3, 1]) == [2, 1]
    # by time, within the memory of the devices
    assert profile.balance(2, limits=[14 * MIB, 2 * MIB]) == [2, 1]
    with pytest.raises(ValueError, match=r"sizes do not fit into limits: all layers together have size 16777216"):
        profile.balance(limits=[8 * MIB, 7 * MIB])


def test_balance_leaves_recomputation_out() -> None:
    layers = [LayerProfile(str(k), "", Times(1, again, 0), Sizes(0, 0, 0, 0)) for k, again in enumerate([5, 0, 0])]
    profile = Profile(tuple(layers), "", "cpu", 1)
    assert profile.balance(2) == [1, 2]
    assert profile.balance(2, recompute=False) in ([1, 2], [2, 1])
    assert profile.costs(recompute=False) == [1, 1, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda profile: profile.costs(by="color"), "by must be 'time' or 'size', not 'color'"),
        (lambda profile: profile.costs("size", chunks=0), "chunks must be 1 or more, not 0"),
        (lambda profile: profile.costs("size", param_scale=-1), "param_scale must be 0 or more, not -1"),
        (lambda profile: profile.balance(4), "3 layers cannot be split into 4 partitions"),
    ],
)
def test_mistakes(profile: Profile, call: Callable[[Profile], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(profile)
