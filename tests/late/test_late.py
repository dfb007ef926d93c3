"""The accelerator itself: it finds a race where there is one and none where there is none, whatever the timing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import late

pytestmark = pytest.mark.late

DEVICE = "late:1"


@pytest.fixture(autouse=True)
def current() -> object:
    with torch.device(DEVICE), torch.late.device(DEVICE):  # type: ignore[attr-defined]
        yield


@pytest.fixture
def side() -> torch.Stream:
    return torch.late.Stream(DEVICE)  # type: ignore[attr-defined, no-any-return]


def on(stream: torch.Stream) -> object:
    return torch.late.stream(stream)  # type: ignore[attr-defined]


def on_two_streams(side: torch.Stream, *, ordered: bool) -> Tensor:
    """Add on one stream, and multiply on another."""
    current = torch.accelerator.current_stream()
    with late.held(current):
        y = torch.ones(1000) + 1
        if ordered:
            side.wait_event(current.record_event())
        with on(side):
            z = y * 2
        y.record_stream(side)
        if not ordered:
            side.synchronize()
    side.synchronize()
    return z


def test_a_use_that_no_event_orders_is_found(side: torch.Stream) -> None:
    z = on_two_streams(side, ordered=False)
    assert z.cpu().isnan().all()  # Fresh memory is NaN until it is written.
    (hazard,) = late.hazards()
    assert "reads what add.out on late:1 default stream writes, without waiting for it" in hazard


@pytest.mark.parametrize("made", [lambda: torch.ones(1000) + 1, lambda: torch.arange(1000.0)], ids=["add", "arange"])
def test_a_use_that_no_event_orders_is_found_where_the_timing_is_good(side: torch.Stream, made: Any) -> None:
    """The ``out=`` of ``arange`` had no memory yet when uses were noted, so that it was written without a trace."""
    y = made()
    with late.delays(0), on(side):
        z = y * 2
    y.record_stream(side)
    side.synchronize()
    assert any("without waiting for it" in hazard for hazard in late.hazards())
    del z


def test_a_use_that_an_event_orders_is_none(side: torch.Stream) -> None:
    assert on_two_streams(side, ordered=True).cpu().unique().tolist() == [4]


def test_what_is_overwritten_while_another_stream_reads_is_found(side: torch.Stream) -> None:
    x = torch.ones(1000)
    side.wait_event(torch.accelerator.current_stream().record_event())
    with on(side):
        y = x * 2
    x.zero_()
    side.synchronize()
    (hazard,) = late.hazards()
    assert "overwrites what" in hazard
    del y


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_is_freed_while_another_stream_reads(side: torch.Stream, recorded: bool) -> None:
    x = torch.full((1000,), 3.0)
    side.wait_event(torch.accelerator.current_stream().record_event())
    with late.held(side):
        with on(side):
            y = x * 2
        if recorded:
            x.record_stream(side)
        del x
        torch.accelerator.current_stream().synchronize()
    side.synchronize()
    result = y.cpu()
    if recorded:
        assert result.unique().tolist() == [6]
    else:
        assert result.isnan().all()
        assert ["is freed while" in hazard for hazard in late.hazards()] == [True]


def test_a_conjugate_view_is_conjugate() -> None:
    """Gradients of complex layers were those of other weights, and copies went round until the stack was full."""
    x = torch.randn(3, 3, dtype=torch.complex128, device="cpu")
    assert torch.equal((x.to("late:0") @ x.to("late:0").conj()).cpu(), x @ x.conj())
    assert torch.equal(x.to("late:0").conj().to("late:1").imag.cpu(), x.conj().imag)


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="at least two devices, late:0 and late:1"):
        torch.ones(3, device="late:0") + torch.ones(3, device="late:1")


def test_the_autograd_engine_has_a_thread_for_each_device() -> None:
    threads = {}

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
            threads[grad.device.index] = threading.get_ident()
            return grad

    x = torch.ones(3, device="late:0", requires_grad=True)
    Seen.apply(Seen.apply(x).to("late:2")).sum().backward()
    assert len({*threads.values(), threading.get_ident()}) == 3


def test_a_failure_of_queued_work_is_raised_where_the_host_waits() -> None:
    wrong = torch.ones(3)[torch.tensor([7])]
    with pytest.raises(RuntimeError, match="from work launched before"):
        wrong.cpu()


#: So slow that nothing here depends on when the host launches. Nobody waits until it is through.
SPEED = late.Speed(flops=1e9, bandwidth=1e8, link=1e7, kernel=0, latency=0)


def test_on_the_clock_work_takes_the_time_of_its_flop_or_its_bytes() -> None:
    x = torch.empty(1000, 1000)
    with late.on_clock(SPEED):
        late.intervals()
        for work in (lambda: x @ x, lambda: x.to("late:2"), lambda: x + x):
            work()
        found = late.intervals()
    assert [one.kind for one in found] == ["kernel", "copy", "kernel"]
    torch.testing.assert_close([one.end - one.start for one in found], [2.0, 0.4, 0.12])


def test_on_the_clock_streams_go_on_at_once_and_wait_for_events(side: torch.Stream) -> None:
    x = torch.empty(1000, 1000)
    with late.on_clock(SPEED):
        late.intervals()
        y = x @ x
        computed = torch.accelerator.current_stream().record_event()
        with on(side):
            x + x
            side.wait_event(computed)
            y + y
        first, beside, behind = late.intervals()
    assert beside.end < first.end == behind.start
