"""A checkpoint fits any number of processes, stays valid when processes die, and runs no code when loaded."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.launch import launch
from tests.distributed.models import cross_entropy, everything, tokens, weigh
from torchgpipe import GPipe
from torchgpipe.distributed import Checkpoints, DistributedGPipe

pytestmark = pytest.mark.slow


def wrapped(balance: list[int], dropout: float = 0.0, **options: Any) -> DistributedGPipe:
    model = everything(dropout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * (len(balance) - 2))  # differs from the values that are loaded
    return DistributedGPipe(model, balance, chunks=4, loss_fn=cross_entropy, weight=weigh, **options)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, the first one empty in most processes."""
    decaying = [parameter for name, parameter in model.named_parameters() if name == "0.weight"]
    others = [parameter for name, parameter in model.named_parameters() if name != "0.weight"]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.Adam(groups, lr=0.05, betas=(0.8, 0.9))


def learn(model: DistributedGPipe, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(model.step(*tokens(8 + step)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def save(folder: str, balance: list[int]) -> list[float]:
    """Save after two steps, in the background of the next two, and return the losses of the latter."""
    model = wrapped(balance, 0.5)
    optimizer = adam(model)
    checkpoints = Checkpoints(folder, model, optimizer)
    assert checkpoints.load() is None
    learn(model, optimizer, range(2))
    # With the same stages, random numbers continue from the checkpoint.
    checkpoints.save(2, {"step": 2, "shape": (1, None)}, asynchronous=True)
    losses = learn(model, optimizer, range(2, 4))
    checkpoints.wait()

    torch.manual_seed(99)
    model = wrapped(balance, 0.5)
    optimizer = adam(model)
    assert Checkpoints(folder, model, optimizer).load() == {"step": 2, "shape": (1, None)}
    assert learn(model, optimizer, range(2, 4)) == losses

    return load(folder, balance)


def load(folder: str, balance: list[int]) -> list[float]:
    model = wrapped(balance)
    optimizer = adam(model)
    Checkpoints(folder, model, optimizer).load()
    return learn(model, optimizer, range(2, 4))


def learn_alone(folder: str, model: nn.Module) -> list[float]:
    optimizer = adam(model)
    assert Checkpoints(folder, model, optimizer).load()["step"] == 2
    losses = []
    for step in (2, 3):
        input, target = tokens(8 + step)
        loss = cross_entropy(model(input), target)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_another_number_of_processes_another_balance_or_no_pipeline_goes_on_from_it(tmp_path: Path) -> None:
    folder = str(tmp_path)
    losses, *others = launch(2, save, folder, [5, 7])
    assert all(other == losses for other in others)
    for again in launch(3, load, folder, [3, 3, 6]):
        assert again == pytest.approx(losses, rel=1e-12)

    # The plain model's batch norm sees the whole mini-batch at once, so there is one micro-batch.
    plain = learn_alone(folder, everything())
    piped = learn_alone(folder, GPipe(everything(), [6, 6], chunks=1))
    assert piped == pytest.approx(plain, rel=1e-12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]


def test_a_single_process_saves_for_another(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model = GPipe(copy.deepcopy(layers), [1, 1], chunks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoints = Checkpoints(tmp_path, model, optimizer, keep=2)
    for step in (1, 2, 3):
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        checkpoints.save(step, asynchronous=step == 2)
    assert checkpoints.steps() == [2, 3]
    state, drawn = values(model), torch.rand(3)

    assert Checkpoints(tmp_path, layers).load() is None  # None is the saved state
    torch.testing.assert_close(layers.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.rand(3), drawn)
    checkpoints.load(2)
    assert not torch.equal(values(model)["0.weight"], state["0.weight"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_has_plain_tensors_and_each_memory_once(asynchronous: bool, tmp_path: Path) -> None:
    first, last = nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False)
    last.weight = first.weight
    settings = {"rates": [0.1]}
    checkpoints = Checkpoints(tmp_path, nn.Sequential(first, last))
    checkpoints.save(1, settings, asynchronous=asynchronous)
    settings["rates"].append(0.2)
    with torch.no_grad():
        first.weight.zero_()
    checkpoints.wait()
    saved = torch.load(tmp_path / "step-00000001" / "rank-00000.pt", weights_only=True)
    a, b = saved["model"].values()
    assert type(a) is Tensor and a.data_ptr() == b.data_ptr() and bool(a.any())
    assert saved["state"] == {"rates": [0.1]}


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    checkpoints = Checkpoints(tmp_path, model)
    checkpoints.save(7)
    with pytest.raises(FileNotFoundError, match=r"step-00000006 is not there or not valid; valid are the steps \[7\]"):
        checkpoints.load(6)
    with pytest.raises(RuntimeError, match=r"has no model.1.weight, model.1.bias; load it into the model"):
        Checkpoints(tmp_path, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))).load()
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
        Checkpoints(tmp_path, nn.Sequential(nn.Linear(3, 4))).load()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(RuntimeError, match=r"has no optimizer.0.weight"):
        Checkpoints(tmp_path, model, optimizer).load()


def test_numbers_that_are_none(tmp_path: Path) -> None:
    """A bug: '3' was saved as step 30000000, and 1.5 under a name that belongs to no step."""
    keep: Any
    for keep in (0, -1, 1.5, None, "2"):
        with pytest.raises(ValueError, match=f"keep must be a positive integer, but got {keep!r}: the last checkpoint"):
            Checkpoints(tmp_path, nn.Linear(2, 2), keep=keep)
    checkpoints = Checkpoints(tmp_path, nn.Linear(2, 2))
    step: Any
    for step in ("3", 1.5, -1):
        for method in (checkpoints.save, checkpoints.load):
            with pytest.raises(ValueError, match=f"step must be an integer, 0 or more, but got {step!r}"):
                method(step)
    with pytest.raises(ValueError, match="but got None"):
        checkpoints.save(None)  # type: ignore[arg-type, unused-ignore]
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """A bug: the error came at the first save and printed all values of the parameter."""
    model = nn.Linear(3, 2)
    message = r"the optimizer has a parameter of shape \(4,\) that the model does not have; make"
    others = torch.optim.SGD([*model.parameters(), torch.zeros(4)])
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path, model, others)

    optimizer = torch.optim.SGD(model.parameters())
    checkpoints = Checkpoints(tmp_path, model, optimizer)
    checkpoints.save(1)
    optimizer.add_param_group({"params": [torch.zeros(4)]})
    for method in (checkpoints.save, checkpoints.load):
        with pytest.raises(ValueError, match=message):
            method(1)


def test_the_names_that_an_optimizer_has_do_not_tie_it_to_its_groups(tmp_path: Path) -> None:
    """A bug: the names of a group were taken for a setting, so other groups, as other processes have, were refused."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    both = [{"params": [*layer.named_parameters(name)], "lr": 0.5} for name, layer in model.named_children()]
    Checkpoints(tmp_path, model, torch.optim.SGD(both)).save(1)
    optimizer = torch.optim.SGD(model.named_parameters())
    Checkpoints(tmp_path, model, optimizer).load()
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.5 and group["param_names"] == [name for name, _ in model.named_parameters()]


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)

    def __init__(self, path: Path) -> None:
        self.path = str(path)


def test_nothing_that_is_loaded_runs_code(tmp_path: Path) -> None:
    model, trace = nn.Sequential(nn.Linear(3, 3)), tmp_path / "trace"
    checkpoints = Checkpoints(tmp_path / "run", model)
    checkpoints.save(1, Bomb(trace))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        checkpoints.load()
    (tmp_path / "run" / "step-00000001" / "rank-00000.pt").write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(RuntimeError, match=r"rank-00000\.pt cannot be read: [\s\S]*; load\(step=\.\.\.\)"):
        checkpoints.load()
    assert not trace.exists()


class Harmed(Checkpoints):
    """Checkpoints whose last process is harmed in the midst of saving one of these steps."""

    harms: dict[int, Callable[[], Any]]

    def _write_file(self, path: Path, *args: Any) -> None:
        super()._write_file(path, *args)
        for step, harm in self.harms.items():
            if dist.get_rank() == 1 and path.parent.name.startswith(f"step-{step:08}"):
                harm()


def harmed(folder: str, harms: dict[int, Callable[[], Any]] | None = None) -> Harmed:
    model = DistributedGPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    checkpoints = Harmed(folder, model)
    checkpoints.harms = harms or {}
    return checkpoints


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_space(*args: Any) -> Any:
    raise OSError("no space left")


def die_while_saving(folder: str) -> str:
    checkpoints = harmed(folder, {2: die})
    checkpoints.save(1, "first")
    checkpoints.save(2, "second", asynchronous=True)
    with pytest.raises(RuntimeError) as info:
        checkpoints.wait()
    return str(info.value)


def load_what_is_there(folder: str) -> Any:
    checkpoints = harmed(folder)
    state = checkpoints.load()
    checkpoints.save(2, "again")
    return state


def test_a_process_that_dies_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    said, _ = launch(2, die_while_saving, str(tmp_path), victim=1)
    assert said.startswith("rank 0, stage 0 of 2: could not save the checkpoint of step 2 in")
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "step-00000002.part"}
    assert launch(2, load_what_is_there, str(tmp_path)) == ["first", "first"]
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "step-00000002"}


def save_without_space(folder: str) -> str:
    checkpoints = harmed(folder, {1: run_out_of_space})
    with pytest.raises(RuntimeError) as info:
        checkpoints.save(1)
    assert checkpoints.steps() == []
    checkpoints.harms = {}
    checkpoints.save(1)
    return str(info.value)


def test_when_one_process_cannot_write_all_raise_and_the_next_checkpoint_is_saved(tmp_path: Path) -> None:
    first, last = launch(2, save_without_space, str(tmp_path))
    assert "rank 0, stage 0 of 2" in first and "another process has failed, and says why" in first
    assert "rank 1, stage 1 of 2" in last and "no space left" in last
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001"}


class Killed(BaseException):
    pass


class Fate:
    """Raise, as if the process were killed, before a checkpoint is renamed or in the middle of removing one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.after = after
        rename, rmtree = Path.rename, shutil.rmtree

        def strike_or_rename(path: Path, target: Path) -> Path:
            self.strike()
            return rename(path, target)

        def strike_or_remove(path: Path) -> None:
            (path / "rank-00000.pt").unlink(missing_ok=True)
            self.strike()
            rmtree(path)

        monkeypatch.setattr(Path, "rename", strike_or_rename)
        monkeypatch.setattr(shutil, "rmtree", strike_or_remove)

    def strike(self) -> None:
        self.after -= 1
        if self.after < 0:
            raise Killed


@pytest.mark.parametrize("step", [2, 3], ids=["of the same step", "of another step"])
def test_whenever_a_process_dies_the_last_checkpoint_can_be_loaded(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug: the old checkpoint of a step was removed before the new one had its name, and neither could be loaded."""
    model = nn.Linear(2, 2)
    found = []
    for after in range(10):
        folder = tmp_path / str(after)
        checkpoints = Checkpoints(folder, model)
        checkpoints.save(1, "oldest")
        checkpoints.save(2, "old")
        with monkeypatch.context() as context, suppress(Killed):
            fate = Fate(context, after)
            checkpoints.save(step, "new")
        again = Checkpoints(folder, model)
        for valid in again.steps():
            again.load(valid)
        found.append(again.load())
        again.save(step, "newest")
        assert again.load() == "newest"
        assert {path.name for path in folder.iterdir()} == {f"step-{step - 1:08}", f"step-{step:08}"}
        if fate.after >= 0:
            break
    assert fate.after >= 0  # The last checkpoint was saved without a fault.
    assert "".join(word[0] for word in found) in {"o" * k + "n" * (len(found) - k) for k in range(1, len(found))}


def save_replicas(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = wrapped([3, 9], mesh=mesh)
    optimizer = adam(model)
    replica = mesh.get_local_rank(0)
    model.step(*tokens(8 + replica))
    optimizer.step()
    Checkpoints(folder, model, optimizer).save(1)
    before = values(model)
    for _ in range(2):
        Checkpoints(folder, model, optimizer).load()
        for name, value in values(model).items():
            # Each replica has its own running statistics. Only those of the first replica are saved.
            if replica == 0 or name in dict(model.named_parameters()):
                assert torch.equal(value, before[name]), name


def test_replicas_save_what_they_have_in_common_once(tmp_path: Path) -> None:
    launch(4, save_replicas, str(tmp_path))
