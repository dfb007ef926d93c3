"""The partitions of a `GPipe` are modules: their hooks, their mode and `.compile()` take effect."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.conftest import Pipe
from tests.gpipe.helpers import make_input, make_model


def test_hooks_on_partitions_act_for_each_micro_batch(pipe: Pipe) -> None:
    model = pipe(make_model(3), [1, 2], chunks=3, checkpoint="never")
    calls: list[Any] = []
    for j, partition in enumerate(model.partitions):
        partition.register_forward_pre_hook(lambda _module, args, j=j: calls.append(("before", j, len(args[0]))))
        partition.register_forward_hook(lambda _module, _args, output, j=j: calls.append(("after", j, len(output))))
    model(make_input(5))
    for j in range(2):
        assert [call for call in calls if call[1] == j] == [
            ("before", j, 2), ("after", j, 2),
            ("before", j, 2), ("after", j, 2),
            ("before", j, 1), ("after", j, 1),
        ]  # fmt: skip


def test_hooks_on_partitions_can_change_what_goes_in_and_out(pipe: Pipe, checkpoint: str) -> None:
    model = pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2, checkpoint=checkpoint)
    model.partitions[0].register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    model.partitions[1].register_forward_hook(lambda _module, _args, output: output * 3)
    x = make_input()
    output = model(x)
    assert torch.equal(output, (x + 1) * 3)
    output.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_backward_hooks_on_layers_and_partitions_fire_for_each_micro_batch(pipe: Pipe, checkpoint: str) -> None:
    model = pipe(make_model(3), [1, 2], chunks=3, checkpoint=checkpoint)
    sizes: dict[str, list[int]] = {"layer": [], "partition": []}
    model[1].register_full_backward_hook(lambda _module, _inputs, grads: sizes["layer"].append(len(grads[0])))
    model.partitions[1].register_full_backward_hook(
        lambda _module, _inputs, grads: sizes["partition"].append(len(grads[0]))
    )
    model(make_input(5)).sum().backward()
    assert sizes == {"layer": [1, 2, 2], "partition": [1, 2, 2]}


def test_partitions_are_in_the_mode_of_the_model(pipe: Pipe) -> None:
    model = pipe(make_model(2), [1, 1])
    seen = []
    for partition in model.partitions:
        partition.register_forward_hook(lambda module, _args, _output: seen.append(module.training))
    model.eval()
    model(make_input())
    assert seen == [False, False]
    model.train()
    model(make_input())
    assert seen[2:] == [True, True]
