"""Layers with skips in a plain Sequential compute what the same computation without skips does, to the last bit."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.plain import assert_same, outcome
from torchgpipe.skip import Namespace, pop, skippable, stash


@skippable(stash=["skip"])
class Down(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return super().forward(x).tanh()


@skippable(pop=["skip"])
class Up(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return super().forward(x * skip)


def nested(depth: int) -> nn.Sequential:
    downs: list[Any] = [Down(4, 4) for _ in range(depth)]
    ups: list[Any] = [Up(4, 4) for _ in range(depth)]
    for down, up in zip(downs, reversed(ups), strict=True):
        ns = Namespace()
        down.isolate(ns)
        up.isolate(ns)
    return nn.Sequential(*downs, *ups)


def without_skips(model: nn.Sequential, x: Tensor) -> Tensor:
    layers: list[Any] = list(model)
    skips = []
    for down in layers[: len(layers) // 2]:
        skips.append(x)
        x = nn.Linear.forward(down, x).tanh()
    for up in layers[len(layers) // 2 :]:
        x = nn.Linear.forward(up, x * skips.pop())
    return x


def test_a_plain_model_with_skips_computes_the_same() -> None:
    model = nested(3).double()
    x = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    assert_same(outcome(model, x), outcome(model, x, run=partial(without_skips, model)))


def test_several_threads_may_call_one_model() -> None:
    """Each thread has its own skips in flight."""

    def call(number: int) -> None:
        x = torch.full((1, 4), float(number))
        for layer in model:
            meeting.wait()
            x = layer(x)
        outputs[number] = x

    model, outputs = nested(2), {}
    meeting = threading.Barrier(3, timeout=60)
    threads = [threading.Thread(target=call, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, output in outputs.items():
        expected = without_skips(model, torch.full((1, 4), float(number)))
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
    assert len(outputs) == 3
