"""A mini-batch of several processes: what they agree on before it, and what they tell each other behind it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.batch.given import order_of
from torchgpipe.batch.inputs import SplitBatch
from torchgpipe.devices.torch_internals import has_call_hooks
from torchgpipe.model.values import each, mapped
from torchgpipe.processes.processes import Processes
from torchgpipe.replay.random_numbers import Draws, RandomNumbers
from torchgpipe.run.mini_batch import MiniBatch
from torchgpipe.run.remote_doors import RemoteDoors
from torchgpipe.spine.abstract import Abstract, abstracted, described, values_told, without_devices
from torchgpipe.spine.settings import Settings, find_door, iterate_tensors
from torchgpipe.spine.weights import users_of

__all__ = ["Together", "checksum_of_values"]


class Together:
    """What the processes of a pipeline do together.

    Args:
        processes: the processes
        settings: the settings of the model

    Attributes:
        processes, settings: see above
        doors: the modules of other processes
    """

    def __init__(self, processes: Processes, settings: Settings) -> None:
        self.processes, self.settings = processes, settings
        self.doors = RemoteDoors(processes, settings)

    def find_users(self, module: nn.Module) -> dict[Tensor, frozenset[int]]:
        """Note and return the columns that use each parameter of a model, which may have got others."""
        self.doors.users = users_of(module, self.settings)
        self.doors.buffers = {
            id(tensor): (tensor, self.settings.column_of(full))
            for full, child, name, tensor in iterate_tensors(module)
            if name in child._buffers and find_door(full, self.settings.doors) is not None
        }
        return self.doors.users

    def begin(self, module: nn.Module, batch: SplitBatch, numbers: RandomNumbers, modes: Any, kind: str) -> None:
        """Agree with the other processes on a mini-batch.

        Args:
            module: the model
            batch: its micro-batches
            numbers: its random numbers, which get the seed of the first process
            modes: the modes of the modules
            kind: what runs, such as the name of a schedule

        Raises:
            RuntimeError: the others have prepared another one.
        """
        trained = tuple([(parameter.requires_grad, str(parameter.dtype)) for parameter in self.doors.users])
        for parameter in self.doors.users:
            if parameter.requires_grad and not parameter.is_leaf:
                raise ValueError("a parameter that is computed from others cannot be shared by processes")
        parts = batch.arguments
        needing = [path for part in parts for path, tensor in each(tuple(part)) if tensor.requires_grad]
        if needing and torch.is_grad_enabled():
            raise ValueError(
                f"the argument '{needing[0]}' requires grad, which only one of several processes could give it; "
                "compute it in a module of the model, or pass detach()"
            )
        of_modes, of_weights = _checksum(modes), _checksum(trained)
        # A process may have more: a model of transformers within a module puts some there in its first call.
        of_hooks = _checksum(tuple(map(has_call_hooks, module.modules())))
        has_stages = self.settings.has_stages
        alike = {
            "another schedule": kind,
            "other chunks, or another number of rows": [*batch.sizes],
            "another order= of its micro-batches": order_of(batch.window),
            "another grad mode": torch.is_grad_enabled(),
            "arguments of other shapes or dtypes, or other numbers": _checksum(described([*map(tuple, parts)], [])),
            "other values in its arguments: seed what shuffles and draws them alike": not has_stages
            and checksum_of_values(parts),
            "other modules, or other ones in train() or eval()": module.training if has_stages else of_modes,
            "parameters of another dtype, or frozen: freeze by requires_grad_() of a module, as model.parameters() are "
            "those of one process": not has_stages and of_weights,
        }
        told = self.processes.agree(alike, (numbers.seed, [*numbers.follows], of_modes, of_weights, of_hooks))
        seeds, follows, *of_each = zip(*told)
        numbers.seed = next(filter(None, seeds), 0)
        numbers.follows = Draws(*map(any, zip(*follows)))  # What one process draws, all others pass on.
        self.doors.use(_checksum(tuple(of_each)))

    def end(self, mini_batch: MiniBatch, told: Any) -> list[Any]:
        """Tell the others how a mini-batch went, and return what each has told.

        Raises:
            RuntimeError: the processes have come to other crossings.
        """
        numbers, processes = mini_batch.random_numbers, self.processes
        log = repr(mini_batch.crossings)
        rows = processes.gather((zlib.crc32(log.encode()), tuple(numbers.drawn), told), "the end of the mini-batch")
        if len({row[0] for row in rows}) > 1:
            logs = processes.gather(mini_batch.crossings, "what has crossed")
            raise RuntimeError(_difference(logs))
        for _, drawn, _ in rows:
            numbers.also(Draws(*drawn))
        return [told for _, _, told in rows]

    def told(self, value: Any, *, gather: bool) -> Any:
        """Return what other processes are told of a value: numbers, and the forms of tensors, or all of it."""
        return abstracted(value), values_told(value, gather=gather)

    def heard(self, told: tuple[Abstract, Sequence[Tensor | None]]) -> Any:
        """Return a value that another process has told, with stand-ins for tensors that it has not."""
        forms, values = told
        last = len(self.settings.devices) - 1
        tensors = iter(values)
        return mapped(
            forms.made((), last, self.settings.devices[last]),
            lambda stand_in: stand_in if (value := next(tensors)) is None else value.to(stand_in.device),
        )


@lru_cache(maxsize=1024)
def _checksum(key: Any) -> int:
    """Return a number that stands for what a mini-batch is like, the same in all processes."""
    return zlib.crc32(without_devices(repr(key)).encode())


def checksum_of_values(parts: Iterable[Any]) -> int:
    """Return a number that tells mini-batches with other values apart, by at most some hundred of each tensor."""
    checksum = 0
    for part in parts:
        for _, tensor in each(part):
            if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta:
                count = tensor.numel()
                numbers = torch.arange(0, count, max(1, count // 509), device=tensor.device)
                data = tensor.detach().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.detach()
                some = data.take(numbers).cpu()
                checksum = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def _difference(logs: Sequence[Sequence[Sequence[str]]]) -> str:
    """Return an error that tells the first crossing that processes disagree on."""
    for i, each_log in enumerate(zip(*logs)):
        for number, crossings in enumerate(zip_longest(*each_log, fillvalue="nothing")):
            if len(set(crossings)) > 1:
                said = "; ".join([f"process {rank}: {crossing}" for rank, crossing in enumerate(crossings)])
                return (
                    f"processes have come to other crossings in micro-batch {i} (number {number}: {said}), so what "
                    "they have computed is wrong: something in the forward differs between processes, such as the "
                    "time, the order of a set, a hook, or values that one process has and the forward has read unseen"
                )
    return "processes have run other numbers of micro-batches"
