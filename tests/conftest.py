"""Fixtures of all tests: the kinds of devices for a pipeline, and the conditions of exact comparison.

Pipelines take two ways through the engine. If all partitions are on one device, the caller's thread runs the cells;
otherwise each device has a worker. A test that takes `devices` or `pipe` runs once for each way. A new kind of device
is a new line in `VARIANTS`.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

from benchmarks.campaigns.architectures.operators import register_missing
from tests import late
from tests.rounding import rounding
from torchgpipe import GPipe

# Sums of floating point numbers depend on the number of threads that share the work.
torch.set_num_threads(1)

# torchvision may be there and not fit, and then nothing that imports it could be imported.
register_missing()

# PyTorch 2.11.0 that is built for CUDA and finds no GPU crashes when threads compile, also without a pipeline. Without
# this call it does not.
if torch.__version__ < "2.12" and not torch.cuda.is_available():
    torch._C._ensureCUDADeviceGuardSet = lambda: None

# `--hypothesis-profile=campaign`, or the environment variable, searches long and at random.
_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    "print_blob": True,
}
settings.register_profile("ci", derandomize=True, database=None, max_examples=30, **_COMMON)
settings.register_profile("quick", derandomize=True, database=None, max_examples=5, **_COMMON)
settings.register_profile("campaign", max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "5000")), **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what is marked slow, and the runs with workers")
    parser.addoption("--late", action="store_true", help="run what is marked late, on that accelerator, and only that")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--late") and late.available():
        # Before the workers of xdist start, and before the first backward. It stays the current accelerator of this
        # process, so other tests, which expect none, run without it.
        os.environ.setdefault("LATE_MEMORY", "512")  # MiB, so that a test can fill it
        late.load()


class Devices(Protocol):
    def __call__(self, n: int) -> list[str]:
        """Return the names of ``n`` devices for ``n`` partitions."""


class Pipe(Protocol):
    def __call__(self, module: nn.Sequential, balance: Iterable[int], **options: Any) -> GPipe:
        """Return a pipeline of the tested kind, by default with one device per partition."""


#: The kinds of devices that are on every machine.
VARIANTS: dict[str, Callable[[int], str]] = {
    "inline": lambda j: "cpu",
    "workers": lambda j: f"cpu:{j}",
}
ALL_VARIANTS = {**VARIANTS, "late": lambda j: f"late:{j % 4}", "cuda": lambda j: f"cpu:{j}" if j else "cuda:0"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    decided = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "variant" in metafunc.fixturenames and not any("variant" in names for names in decided):
        asked = metafunc.definition.get_closest_marker("on_late") is not None
        accelerators = ["late", *(["cuda"] if torch.cuda.is_available() else [])] if asked else []
        marked = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in accelerators]
        metafunc.parametrize("variant", [*VARIANTS, *marked], indirect=True, scope="session")


@pytest.fixture(scope="session")
def variant(request: pytest.FixtureRequest) -> str:
    """Return the name of the kind of devices."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def devices(variant: str) -> Devices:
    """Return devices for a pipeline: one device for all partitions, or one for each."""
    return lambda n: [ALL_VARIANTS[variant](j) for j in range(n)]


@pytest.fixture(scope="session")
def pipe(devices: Devices) -> Pipe:
    """Return a function that wraps a module as ``GPipe`` does, on `devices`."""

    def wrap(module: nn.Sequential, balance: Iterable[int], **options: Any) -> GPipe:
        balance = list(balance)
        options.setdefault("devices", devices(len(balance)))
        return GPipe(module, balance, **options)

    return wrap


@pytest.fixture(scope="module")
def rounded() -> Iterator[None]:
    """Let products round differently with their number of rows, so that no comparison counts on one kind of CPU.

    Not on `late`, whose streams are threads that cannot wait for the interpreter.
    """
    with nullcontext() if late.loaded() else rounding():
        yield


@pytest.fixture
def cpu_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let devices of the CPU have workers in a call, as accelerators have; for layers that draw nothing."""
    one = "torchgpipe.drive.autograd.in_one_thread"
    monkeypatch.setattr(one, lambda devices: len(set(devices)) == 1)


@pytest.fixture(params=["always", "except_last", "never"])
def checkpoint(request: pytest.FixtureRequest) -> str:
    """Return each of the checkpoint modes."""
    mode: str = request.param
    return mode


def with_accelerators(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Make the machine one with ``n`` accelerators, ``'cpu:0'``, ``'cpu:1'``, ..., or with none."""
    monkeypatch.setattr("torchgpipe.devices.device._accelerator", lambda: torch.device("cpu") if n else None)
    for module in (torch.accelerator, torch.cuda):
        monkeypatch.setattr(module, "device_count", lambda: n)


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("--late") and not late.available():
        return "tests on the accelerator in host memory are left out: there is no C++ compiler"
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without tests on that accelerator in a run with ``--late``: libraries of clients take seconds.

    On Windows, import none that starts processes by a server that forks, or locks files as POSIX does.
    """
    if collection_path.suffix != ".py":
        return None
    if sys.platform == "win32":
        needs = re.compile(r"^(from tests\.distributed\S* import|import fcntl$)", re.MULTILINE)
        return True if needs.search(collection_path.read_text(encoding="utf-8")) else None
    if config.getoption("--late"):
        marked = re.search(r"mark\.(on_)?late|needs_accelerator|NEEDS_ACCELERATOR", collection_path.read_text())
        return None if marked else True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def leave_out(item: pytest.Item) -> bool:
        on_late, on_gpus = (item.get_closest_marker(name) is not None for name in ("late", "cuda"))
        if not on_late if config.getoption("--late") else on_late and not on_gpus:
            return True
        return config.getoption("--quick") and (item.get_closest_marker("slow") or _variant(item) == "workers")

    left_out = [item for item in items if leave_out(item) or config.getoption("--late") > late.loaded()]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--late") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def _variant(item: pytest.Item) -> object:
    return item.callspec.params.get("variant") if hasattr(item, "callspec") else None


@pytest.fixture(autouse=True, scope="module")
def young_heap() -> None:
    """Exclude objects that imports and earlier files have left from collections and from tests that count objects.

    Without this, each collection took a second in the later files of a run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Let cycles stay, so that a test sees what they hold."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT be a KeyboardInterrupt, also in a background job, which ignores the signal."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(autouse=True)
def hazards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test on `late` fail if it has used memory that no event orders.

    Not on a GPU, where tests that are marked late run as well: to ask `late` is to load it, and the GPU would no longer
    be the current accelerator.
    """
    checked = late.loaded() and request.node.get_closest_marker("late") is not None
    if checked:
        late.hazards()
    yield
    if checked:
        torch.accelerator.synchronize()
        found = late.hazards()
        assert not found, "\n".join(found)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Make every test independent of the tests before it."""
    torch.manual_seed(0)
