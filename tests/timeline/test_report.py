"""The figures of a report equal figures computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import torchgpipe
from tests.timeline.synthetic import ideal, rows, span
from torchgpipe import GPipe
from torchgpipe.timeline.report import Report
from torchgpipe.timeline.span import Span, covered


def report(spans: Sequence[Span], n: int, m: int, devices: Sequence[str] | None = None) -> Report:
    return Report(spans, rows(n, devices), dict.fromkeys({span.step for span in spans}, m), {})


def test_overlapping_time_counts_once() -> None:
    spans = [
        span("forward", 0, 0, 0.0, 2.0),
        span("forward", 1, 0, 1.0, 3.0),
        span("forward", 2, 0, 1.5, 1.6),
        span("forward", 3, 0, 5.0, 6.0),
    ]
    assert covered(spans) == 4.0
    assert covered([]) == 0.0


@pytest.mark.parametrize(("m", "n"), [(1, 1), (4, 1), (4, 2), (8, 4), (32, 8)])
def test_an_ideal_step_has_the_ideal_bubble(m: int, n: int) -> None:
    made = report(ideal(m, n), n, m)
    assert made.duration == 4 * (m + n - 1)  # forward 1, recomputation 1, backward 2
    assert made.bubble == pytest.approx((n - 1) / (m + n - 1))
    assert made.ideal_bubble == pytest.approx((n - 1) / (m + n - 1))
    assert made.costs == [4.0] * n
    assert made.slowest_by == 0
    assert made.recomputation == 0.25
    assert made.failed is None


def test_shares_of_a_device() -> None:
    #        0    1    2    3    4    5    6    7    8    9    10
    # cuda:0 ├─forward─┤├copy┤           (copies while nothing computes)     ├backward─┤
    # cuda:1           ├wait┤├forward──────┤├backward─┤├copy┤
    spans = [
        span("forward", 0, 0, 0, 2),
        span("copy", 0, 0, 2, 3, stream="leaving", other=1),
        span("wait", 0, 1, 2, 3, other=0),
        span("forward", 0, 1, 3, 5),
        span("backward", 0, 1, 5, 7),
        span("copy", 0, 1, 6.5, 8, stream="gradient leaving", other=0),
        span("wait", 0, 0, 7, 8, other=1),
        span("backward", 0, 0, 8, 10),
    ]
    made = Report(spans, rows(2), {0: 1}, {torch.device("cuda:0"): 3 * 2**20})
    first, second = made.devices
    assert (first.busy, first.copying, first.idle) == pytest.approx((0.4, 0.1, 0.5))
    assert (second.busy, second.copying, second.idle) == pytest.approx((0.4, 0.15, 0.5))
    assert (first.peak_memory, second.peak_memory) == (3 * 2**20, None)
    assert made.bubble == pytest.approx(0.6)
    assert made.ideal_bubble == 0.5
    assert "3.0 MiB" in str(made)
    assert "n/a" in str(made)


def test_the_slowest_partition() -> None:
    # The partitions take 1, 4 and 1 seconds per micro-batch; the mean is 2.
    spans = [span("forward", i, j, 10 * i + j, 10 * i + j + (4 if j == 1 else 1)) for i in range(3) for j in range(3)]
    made = report(spans, 3, 3)
    assert made.costs == [1, 4, 1]
    assert (made.slowest, made.slowest_by) == (1, 1.0)
    assert "partition 1" in str(made)


def test_steps_are_added_up_and_what_is_between_them_does_not_count() -> None:
    later = [replace(span, start=span.start + 100, end=span.end + 100) for span in ideal(8, 2, step=1)]
    made = Report([*ideal(4, 2), *later], rows(2), {0: 4, 1: 8}, {})
    assert made.duration == 4 * 5 + 4 * 9
    assert made.costs == [4, 4]
    assert made.ideal_bubble == pytest.approx((1 / 5 + 1 / 9) / 2)
    assert made.bubble == pytest.approx(1 - (16 + 32) / (20 + 36))


def test_steps_that_overlap_count_once() -> None:
    """Two forwards run first, and one backward follows for both."""
    spans = [
        span("forward", 0, 0, 0, 1),
        span("forward", 0, 0, 1, 2, step=1),
        span("backward", 0, 0, 2, 4, step=1),
        span("backward", 0, 0, 4, 6),
    ]
    assert report(spans, 1, 1).duration == 6
    assert report(spans, 1, 1).bubble == 0


def test_a_failed_step_is_reported_up_to_the_fault() -> None:
    made = report([span("forward", 0, 0, 0, 1), span("forward", 1, 0, 1, 2, failed=True)], 1, 2)
    assert made.failed is not None
    assert "failed in forward of micro-batch 1 on partition 0" in str(made)


def test_where_no_cell_has_run_there_is_nothing_to_report() -> None:
    with pytest.raises(ValueError, match="nothing to report"):
        report([span("copy", 0, 0, 0, 1, other=1)], 2, 1)


def test_the_report_of_a_recording() -> None:
    model = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu", "cpu"], chunks=2)
    with torchgpipe.record(model) as timeline:
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()
    made = timeline.report()
    assert [use.peak_memory for use in made.devices] == [None]
    assert 0 < made.devices[0].busy <= 1
    assert 0 < made.recomputation < 1
    assert made.bubble == pytest.approx(1 - made.devices[0].busy)
    assert max(map(len, str(made).splitlines())) <= 100
