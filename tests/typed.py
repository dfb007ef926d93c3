"""Programs that use the library, for the type checker: ``make types`` reads this file, and nothing runs it.

Each line with ``type: ignore`` is a mistake that the checker must notice: an unneeded ignore is an error.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, assert_type

import torch
from torch import Tensor, nn

from torchgpipe import GPipe, MicroBatches, pipelined
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.pipe import Pipe
from torchgpipe.skip import Namespace, Skippable, skippable, stash
from torchgpipe_balancing import Profile

__all__: list[str] = []


@skippable(stash=["skip"])
class Stash(Skippable, nn.Module):
    def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", input)
        return input


def skips(ns: Namespace) -> None:
    assert_type(Stash().isolate(ns), Stash)
    assert_type(Stash().isolate(ns, only=["skip"]).stashable_names, frozenset[str])
    Stash().isolate("ns")  # type: ignore[arg-type]


def settings(module: nn.Sequential, profile: Profile) -> None:
    model = GPipe(module, [1, 2], chunks=4, checkpoint="always")
    GPipe(module, [1, 2], checkpoint="allways")  # type: ignore[arg-type]
    Pipe(module, checkpoint="exceptlast")  # type: ignore[arg-type]
    DistributedGPipe(module, [1, 2], schedule="1F1B", checkpoint="never")
    DistributedGPipe(module, [1, 2], schedule="1F2B")  # type: ignore[arg-type]
    profile.balance(2, by="memory")  # type: ignore[arg-type]
    model.checkpoint = "never"
    model.checkpoint = "nevr"  # type: ignore[assignment]
    model.chunks = 4.0  # type: ignore[assignment]
    model.checkpoint = ["1", "2"]
    assert_type(model.checkpoint, Literal["always", "except_last", "never"] | tuple[str, ...])
    assert_type(model.balance, list[int])
    assert_type(model.devices, list[torch.device])


def any_model(module: nn.Transformer, sample: Tensor) -> None:
    assert_type(pipelined(module, (sample,), chunks=4), nn.Transformer)
    pipelined(module, (sample,), chunks=4, schedule="1F2B")  # type: ignore[arg-type]
    assert_type(pipelined(module, MicroBatches([(sample,)])), nn.Transformer)
