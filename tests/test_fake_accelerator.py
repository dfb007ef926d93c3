"""The fake accelerator is right: each of its rules, in the smallest scenario that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.fake_accelerator import FakeAccelerator, FakeStream, on_fake_devices
from torchgpipe import GPipe


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    with FakeAccelerator() as accelerator:
        yield accelerator


@pytest.fixture
def computing(fake: FakeAccelerator) -> FakeStream:
    return fake.stream("cpu:0", "computing")


@pytest.fixture
def side(fake: FakeAccelerator) -> FakeStream:
    return fake.stream("cpu:0", "side")


def ones(device: str = "cpu:0") -> torch.Tensor:
    return torch.ones(3, device=device)


def is_wrong(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().all())


# Rule 1: which stream an operation runs on


def test_runs_on_the_computing_stream_of_the_device_of_its_tensors(fake: FakeAccelerator) -> None:
    x, y = ones("cpu:0"), ones("cpu:1")
    x + x, y * y
    assert [(launch.name, str(launch.stream)) for launch in fake.launches[2:]] == [
        ("add", "computing of cpu:0"),
        ("mul", "computing of cpu:1"),
    ]


def test_runs_on_the_stream_in_use_if_it_is_of_the_device(fake: FakeAccelerator, side: FakeStream) -> None:
    x, y = ones("cpu:0"), ones("cpu:1")
    with side.use():
        assert fake.streams.current(torch.device("cpu:0")) is side
        side.wait(fake.stream("cpu:0", "computing").mark())
        x + x, y * y
    assert [launch.stream for launch in fake.launches[2:]] == [side, fake.stream("cpu:1", "computing")]
    assert fake.streams.current(torch.device("cpu:0")) is not side


def test_current_streams_are_nested(fake: FakeAccelerator, side: FakeStream) -> None:
    other, foreign = fake.stream("cpu:0", "other"), fake.stream("cpu:1", "foreign")
    with side.use(), foreign.use():
        with other.use():
            assert fake.current_stream(side.device) is other
            assert fake.current_stream(foreign.device) is foreign
        assert fake.current_stream(side.device) is side


def test_current_streams_belong_to_a_thread(fake: FakeAccelerator, side: FakeStream) -> None:
    with side.use(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(fake.current_stream, side.device).result() is not side


def test_current_device_is_that_of_the_current_stream(fake: FakeAccelerator, side: FakeStream) -> None:
    assert fake.current.device is None
    with side.use():
        with fake.stream("cpu:1", "side").use(), side.use():
            assert fake.current.device == torch.device("cpu:0")
        assert fake.current.device == torch.device("cpu:0")


def test_a_tensor_without_a_device_is_computed_on_the_current_device(fake: FakeAccelerator, side: FakeStream) -> None:
    x = torch.ones(3)
    x + x
    assert not fake.launches
    with side.use():
        y = x + x
    assert [launch.stream for launch in fake.launches] == [side]
    with pytest.raises(RuntimeError, match="cpu:0 and cpu:1"):
        y + ones("cpu:1")


# Rule 2: a read without a wait


def test_read_without_wait_is_wrong(fake: FakeAccelerator, side: FakeStream) -> None:
    x = ones() + 1
    with side.use():
        y = x * 2
    side.wait(fake.stream("cpu:0", "computing").mark())
    fake.stream("cpu:0", "computing").wait(side.mark())
    assert is_wrong(y)
    assert x.tolist() == [2, 2, 2]  # the right number on its own device
    assert fake.hazards == [
        "mul on side of cpu:0 reads what add on computing of cpu:0 has written without waiting for it"
    ]


def test_read_after_wait_is_right(fake: FakeAccelerator, computing: FakeStream, side: FakeStream) -> None:
    x = ones()
    side.wait(computing.mark())
    with side.use():
        y = x * 2
    computing.wait(side.mark())
    assert y.tolist() == [2, 2, 2] and not fake.hazards


def test_wait_reaches_only_what_was_launched_before(computing: FakeStream, side: FakeStream) -> None:
    side.wait(computing.mark())
    x = ones()
    with side.use():
        y = x * 2
    computing.wait(side.mark())
    assert is_wrong(y)


def test_wait_is_transitive(fake: FakeAccelerator, computing: FakeStream, side: FakeStream) -> None:
    x = ones()
    side.wait(computing.mark())
    third = fake.stream("cpu:0", "third")
    third.wait(side.mark())
    with third.use():
        y = x * 2
    computing.wait(third.mark())
    assert y.tolist() == [2, 2, 2] and not fake.hazards


def test_wait_is_one_way(fake: FakeAccelerator, computing: FakeStream, side: FakeStream) -> None:
    with side.use():
        x = ones()
    side.wait(computing.mark())
    assert is_wrong(x + 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_wrong_number_of_a_type_without_nan(dtype: torch.dtype, side: FakeStream) -> None:
    x = torch.zeros(3, dtype=dtype, device="cpu:0")
    with side.use():
        y = x.clone()
        assert y.tolist() != x.tolist()


def test_view_and_new_tensor_of_the_same_shape_read_nothing(fake: FakeAccelerator, side: FakeStream) -> None:
    x = ones()
    with side.use():
        x.view(3, 1).detach()[0]
        torch.zeros_like(x)
        x.new_empty(2)
    assert not fake.hazards


def test_read_through_a_view_is_a_read(computing: FakeStream, side: FakeStream) -> None:
    x = ones()
    with side.use():
        y = x.view(3, 1)[:2].detach() * 2
    computing.wait(side.mark())
    assert is_wrong(y)


def test_list_of_tensors_is_read(computing: FakeStream, side: FakeStream) -> None:
    x = ones()
    with side.use():
        y = torch.cat([torch.zeros(1), x])
    computing.wait(side.mark())
    assert y.isnan().tolist() == [False, True, True, True]


def test_what_is_older_needs_no_wait(fake: FakeAccelerator, side: FakeStream) -> None:
    with torch.utils._python_dispatch._disable_current_modes():
        older, placed = torch.ones(3), torch.ones(3)
    fake.place(placed, "cpu:0")
    with side.use():
        older + placed + torch.ones(3, device=placed.device)
    assert not fake.hazards
    with pytest.raises(RuntimeError, match="mixes"):
        placed + ones("cpu:1")


# Rule 3: memory that is reused


def test_memory_freed_without_record_is_used_again_at_once(
    fake: FakeAccelerator, computing: FakeStream, side: FakeStream
) -> None:
    x = ones()
    side.wait(computing.mark())
    with side.use():
        y = x * 2
        z = y + 1
    del x
    computing.wait(side.mark())
    assert is_wrong(y) and is_wrong(z)
    assert fake.hazards == [
        "what ones on computing of cpu:0 has written was freed, and its memory used again by computing of cpu:0, "
        "while mul on side of cpu:0 may still work on it"
    ]


def test_recorded_memory_is_kept_for_the_stream(fake: FakeAccelerator, computing: FakeStream, side: FakeStream) -> None:
    x = ones()
    side.wait(computing.mark())
    side.record(x[1:])
    with side.use():
        y = x * 2
    del x
    computing.wait(side.mark())
    assert y.tolist() == [2, 2, 2] and not fake.hazards


def test_record_is_for_one_stream(fake: FakeAccelerator, computing: FakeStream, side: FakeStream) -> None:
    x = ones()
    side.wait(computing.mark())
    fake.stream("cpu:0", "third").record(x)
    with side.use():
        y = x * 2
    del x
    computing.wait(side.mark())
    assert is_wrong(y)


def test_memory_is_safe_once_its_stream_has_waited(
    fake: FakeAccelerator, computing: FakeStream, side: FakeStream
) -> None:
    x = ones()
    side.wait(computing.mark())
    with side.use():
        y = x * 2
    computing.wait(side.mark())
    del x
    assert (y + 0).tolist() == [2, 2, 2] and not fake.hazards


def test_memory_belongs_to_the_stream_that_was_current_at_allocation(
    fake: FakeAccelerator, computing: FakeStream, side: FakeStream
) -> None:
    with side.use():
        x = ones()
    computing.wait(side.mark())
    y = x * 2
    del x
    assert is_wrong(y + 0)


def test_memory_lives_as_long_as_a_view(fake: FakeAccelerator, computing: FakeStream, side: FakeStream) -> None:
    x = ones()
    side.wait(computing.mark())
    with side.use():
        y = x * 2
    part = x[1:]
    del x
    computing.wait(side.mark())
    assert (y + part[0]).tolist() == [3, 3, 3] and not fake.hazards


def test_counts_the_memory_that_is_alive(fake: FakeAccelerator) -> None:
    x = ones()
    y = x + 1
    part = y[1:]
    assert fake.alive() == 2
    del x, y
    assert fake.alive() == 1
    del part
    assert fake.alive() == 0


def test_overwriting_what_is_still_read(fake: FakeAccelerator, computing: FakeStream, side: FakeStream) -> None:
    x = ones()
    side.wait(computing.mark())
    with side.use():
        y = x * 2
    x.zero_()
    computing.wait(side.mark())
    assert is_wrong(y) and x.tolist() == [0, 0, 0]
    assert "overwrites" in fake.hazards[0]


def test_modifying_what_is_still_written(fake: FakeAccelerator, computing: FakeStream, side: FakeStream) -> None:
    x = ones()
    with side.use():
        x.add_(1)
    computing.wait(side.mark())
    assert is_wrong(x)
    assert "modifies" in fake.hazards[0]


def test_modification_is_waited_for(fake: FakeAccelerator, computing: FakeStream, side: FakeStream) -> None:
    x = ones()
    side.wait(computing.mark())
    with side.use():
        x.add_(1)
    y = x + 0
    assert is_wrong(y) and x.tolist() == [2, 2, 2]


# Rule 4: several devices


def test_devices_do_not_mix() -> None:
    with FakeAccelerator(), pytest.raises(RuntimeError, match=r"add.* mixes tensors of cpu:0 and cpu:1"):
        ones("cpu:0") + ones("cpu:1")


@pytest.mark.parametrize("how", ["to", "copy_"])
def test_copy_between_devices(how: str, fake: FakeAccelerator) -> None:
    x = ones("cpu:0") + 1
    if how == "to":
        y = x.to("cpu:1")
    else:
        y = torch.empty(3, device="cpu:1")
        y.copy_(x)
    del x  # both devices wait for the copy, so that the memory cannot be reused too early
    assert (y + ones("cpu:1")).tolist() == [3, 3, 3] and not fake.hazards
    assert fake.launches[-3].name in ("_to_copy", "copy_")
    assert str(fake.launches[-3].stream) == "computing of cpu:0"


def test_copy_uses_the_current_streams_of_both_ends(fake: FakeAccelerator, computing: FakeStream) -> None:
    leaving, arriving = fake.stream("cpu:0", "leaving"), fake.stream("cpu:1", "arriving")
    x = ones("cpu:0")
    leaving.wait(computing.mark())
    with leaving.use(), arriving.use():
        y = x.to("cpu:1")
        right = y + 1
    wrong = y + 1
    fake.stream("cpu:1", "computing").wait(arriving.mark())
    assert right.tolist() == [2, 2, 2] and is_wrong(wrong)


def test_copy_reads_only_what_its_stream_has_waited_for(fake: FakeAccelerator) -> None:
    x = ones("cpu:0")
    with fake.stream("cpu:0", "leaving").use():
        y = x.to("cpu:1")
    assert is_wrong(y)


def test_cast_stays_on_the_device(fake: FakeAccelerator) -> None:
    x = ones("cpu:0").double()
    x + ones("cpu:0")
    assert {str(launch.stream) for launch in fake.launches} == {"computing of cpu:0"}


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:0"])
def test_unknown_device(device: str, fake: FakeAccelerator) -> None:
    with pytest.raises(ValueError, match="'cpu:0', 'cpu:1'"):
        fake.streams.current(torch.device(device))


# Rule 5: what the host sees


def test_host_sees_what_the_computing_stream_has_waited_for() -> None:
    with FakeAccelerator() as fake:
        side = fake.stream("cpu:0", "side")
        with side.use():
            x, y = ones(), ones()
            fake.stream("cpu:0", "computing").wait(side.mark())
            z = ones()
        del y
    assert not x.isnan().any() and z.isnan().all()


# All rules together


def test_backward_runs_on_the_device_of_the_gradient(fake: FakeAccelerator) -> None:
    x = ones("cpu:0").requires_grad_()
    y = x.mul(2).to("cpu:1").mul(3)
    fake.launches.clear()
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6, 6, 6]
    assert not fake.hazards


def test_two_launches_overlap_unless_one_waits(fake: FakeAccelerator, computing: FakeStream, side: FakeStream) -> None:
    ones()
    with side.use():
        ones()
    side.wait(computing.mark())
    ones()
    with side.use():
        ones()
    a, b, c, d = fake.launches
    assert a.overlaps(b) and b.overlaps(a) and a.precedes(c) and b.precedes(d)
    assert a.precedes(d) and not d.precedes(a) and c.overlaps(d) and not a.overlaps(a)


def test_on_fake_devices_gives_a_pipeline_its_streams_and_takes_them_back() -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu:0", "cpu:1"], chunks=2)
    mechanisms = model._mechanisms
    with on_fake_devices(nn.Sequential(model)) as fake:
        model(torch.ones(2, 2)).sum().backward()
    assert model._mechanisms is mechanisms
    devices = {(str(launch.stream.device), launch.stream.name == "computing") for launch in fake.launches}
    assert devices == {("cpu:0", True), ("cpu:0", False), ("cpu:1", True), ("cpu:1", False)}


def test_on_fake_devices_reports_what_went_wrong() -> None:
    with pytest.raises(AssertionError, match="without waiting"), on_fake_devices() as fake:
        x = ones()
        with fake.stream("cpu:0", "side").use():
            x + 1
    with pytest.raises(ZeroDivisionError), on_fake_devices() as fake:
        with fake.stream("cpu:0", "side").use():
            x + 1
        raise ZeroDivisionError
