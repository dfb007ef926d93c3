"""What a step takes and returns beside input, target and loss: other values, a scaler, named layers, own programs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import Devices
from tests.test_step import assert_equal, data, grads_of, mlp, plain_step, stepping
from torchgpipe import GPipe, is_recomputing
from torchgpipe.schedule import Action, program

# ------------------------------------------------------------------------------------------------ other values


def scored(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.mse_loss(output, target), {"output": output, "count": (output > target).sum()}


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("rows", [7, 1])
def test_values_beside_the_loss_are_gathered_without_a_graph(devices: Devices, checkpoint: str, rows: int) -> None:
    x, y = data(rows=rows)
    model = stepping(mlp(), devices(4), loss_fn=scored, checkpoint=checkpoint)
    loss, values = model.step(x, y)
    reference = stepping(mlp(), devices(4), checkpoint=checkpoint)
    assert torch.equal(loss, reference.step(x, y))
    assert_equal(grads_of(model), grads_of(reference))
    outputs = [mlp()(part) for part in x.chunk(4)]
    assert torch.equal(values["output"], torch.cat(outputs)) and not values["output"].requires_grad
    counts = [(output > part).sum() for output, part in zip(outputs, y.chunk(4), strict=True)]
    assert values["count"].tolist() == counts


def test_values_without_gradients_and_of_a_micro_batch_of_weight_0(devices: Devices) -> None:
    x, y = data()
    model = stepping(mlp(), devices(4), loss_fn=scored, weight=lambda target: float(target[0, 0] > 0))
    with torch.no_grad():
        _, values = model.step(x, y)
    assert {float(part[0, 0] > 0) for part in y.chunk(4)} == {0.0, 1.0}
    assert len(values["output"]) == 8


def test_values_that_cannot_be_gathered_are_refused(devices: Devices) -> None:
    x, y = data()
    model = stepping(mlp(), devices(4), loss_fn=lambda a, b: (F.mse_loss(a, b), "good"))
    with pytest.raises(TypeError, match="what loss_fn returns beside the loss must consist of tensors and None"):
        model.step(x, y)
    model = stepping(mlp(), devices(4), loss_fn=lambda a, b: (F.mse_loss(a, b), a, b))
    with pytest.raises(ValueError, match="a tensor of one number, or a pair of this loss and other values, but it is"):
        model.step(x, y)
    asked: list[int] = []

    def sometimes(a: Tensor, b: Tensor) -> Any:
        asked.append(0)
        return F.mse_loss(a, b) if len(asked) > 2 else (F.mse_loss(a, b), a)

    with pytest.raises(ValueError, match="other values beside the loss for some micro-batches only"):
        stepping(mlp(), devices(4), loss_fn=sometimes, checkpoint="never").step(x, y)


# ------------------------------------------------------------------------------------------------ a scaler


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_scaler_scales_gradients_and_not_the_loss(devices: Devices, checkpoint: str) -> None:
    x, y = data()
    model, plain = stepping(mlp(), devices(4), checkpoint=checkpoint), mlp()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    for _ in range(2):
        loss = model.step(x, y, scaler=ours)
        scaled = plain_step(
            plain, list(x.chunk(4)), lambda i, out: theirs.scale(F.mse_loss(out, y.chunk(4)[i]) * (2 / 8)), "1F1B"
        )
        assert torch.equal(loss * 1024, scaled.to(loss))
        assert_equal(grads_of(model), grads_of(plain))
        for scaler, optimizer in zip((ours, theirs), optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_equal(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_a_scaler_skips_a_step_with_infinite_gradients(devices: Devices) -> None:
    x, y = data()
    model = stepping(mlp().float(), devices(4))
    before = copy.deepcopy(model.state_dict())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    model.step(x.float(), y.float() * 1e9, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    assert_equal(model.state_dict(), before)


# ------------------------------------------------------------------------------------------------ named layers


class Look(nn.Module):
    """Notes when it is recomputed."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6).double()
        self.name, self.seen = name, seen

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            self.seen.append(self.name)
        return self.line(x).tanh()


def watched(devices: list[str], **options: Any) -> tuple[GPipe, list[str]]:
    torch.manual_seed(0)
    seen: list[str] = []
    module = nn.Sequential()
    for name in "abcdef":
        module.add_module(name, Look(name, seen))
    return stepping(module, devices, balance=[3, 3], **options), seen


def test_layers_that_are_named_are_recomputed_one_by_one(devices: Devices) -> None:
    """The last layer of the last partition runs backward next, so it is not."""
    x, y = data()
    model, seen = watched(devices(2), checkpoint=["b", "c", "f"])
    plain, _ = watched(["cpu"] * 2, checkpoint="never")
    assert torch.equal(model.step(x, y), plain.step(x, y))
    assert_equal(grads_of(model), grads_of(plain))
    assert "".join(seen) == "cb" * 4
    assert "checkpoint=('b', 'c', 'f')" in repr(model)
    seen.clear()
    F.mse_loss(model(x), y).backward()
    assert sorted(seen) == sorted("bcf" * 4)
    seen.clear()
    model.eval()
    F.mse_loss(model(x), y).backward()
    assert not seen


def test_errors_and_events_name_the_partition_of_a_named_layer(devices: Devices) -> None:
    x, y = data()
    model, _ = watched(devices(2), checkpoint=["b", "e"])
    model.set_submodule("f", nn.Linear(5, 5).double())
    with pytest.raises(RuntimeError) as info:
        model.step(x, y)
    assert info.value.__notes__[0].startswith("micro-batch 0 of 4, partition 1 (layers 'f'..'f')")


def test_names_that_cannot_be_checkpointed_are_refused(devices: Devices) -> None:
    x, y = data()
    model, _ = watched(devices(2), checkpoint=("a", "c"))
    with pytest.raises(ValueError, match=r"checkpoint names \['g'\], but the layers of the pipeline are \['a', 'b'"):
        model.checkpoint = ["a", "g"]
    model.partitions[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="checkpoint names layers of partition 0, which is compiled or has hooks"):
        model.step(x, y)
    model.checkpoint = ["d", "e", "f"]
    model.step(x, y)


# ------------------------------------------------------------------------------------------------ own programs


def depth_first(m: int, places: list[int]) -> list[list[Action]]:
    """Return a program in which each micro-batch goes forward and backward before the next one starts."""
    rows: list[list[Action]] = [[] for _ in set(places)]
    for i in range(m):
        for j, place in enumerate(places):
            rows[place].append(Action("F", i, j))
        for j in reversed(range(len(places))):
            rows[places[j]].append(Action("B", i, j))
    return rows


def test_a_function_makes_programs_for_any_number_of_micro_batches(devices: Devices) -> None:
    model, plain = stepping(mlp(), devices(4), schedule=depth_first), mlp()
    for rows in (8, 3):
        x, y = data(rows=rows)
        loss = model.step(x, y)
        targets = y.chunk(4)
        expected = plain_step(
            plain,
            list(x.chunk(4)),
            lambda i, output, targets=targets, rows=rows: (  # type: ignore[misc]
                F.mse_loss(output, targets[i]) * (len(targets[i]) / rows)
            ),
            "1F1B",
        )
        assert torch.equal(loss, expected.to(loss))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-13, atol=1e-15)


def test_programs_that_do_not_fit_are_refused_when_the_pipeline_is_made() -> None:
    x, y = data(rows=3)
    four = ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]
    with pytest.raises(ValueError, match="1F1B wants the partitions of a device next to each other"):
        stepping(mlp(), four)
    GPipe(mlp(), [1] * 4, devices=four)  # never steps
    with pytest.raises(ValueError, match="this program cannot run"):
        stepping(mlp(), four, schedule=[[Action("F", 0, 0)], []])
    model = stepping(mlp(), four, schedule=program("Interleaved1F1B", 4, [0, 1, 0, 1]))
    with pytest.raises(ValueError, match="the program is for 4 micro-batches, but the mini-batch has 3"):
        model.step(x, y)
    with pytest.raises(ValueError, match="V-Half wants partitions that are placed like a V"):
        model.schedule = "V-Half"
    assert model.schedule == program("Interleaved1F1B", 4, [0, 1, 0, 1])
