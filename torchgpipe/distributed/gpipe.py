"""Train over several processes with a module that holds the layers of its own partitions.

A step, in every process:

1. Split the input into micro-batches, as in one process.
2. Find the forms of all that crosses between partitions, for new shapes on tensors without data.
3. Agree with all processes that they have prepared the same step, and on the weight of all targets. Only then send.
4. Run the own part of the schedule's program, forward and backward.
5. Add up the gradients of the replicas, and receive the loss from the last partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.cell.layers_column import Mechanisms
from torchgpipe.devices.device import canonical_device, default_device
from torchgpipe.devices.typing import Device
from torchgpipe.distributed.forms import Forms
from torchgpipe.distributed.micro_batches import Crossings, RemoteMicroBatches, part_of_program
from torchgpipe.drive.step import run_step
from torchgpipe.gradients.clip import clip_grad_norm, not_for_norms
from torchgpipe.model import microbatch
from torchgpipe.model.given import order_of
from torchgpipe.model.loss import Losses, LossFunction, Weight, verify_loss
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.old_keys import by_name, take_old_keys
from torchgpipe.model.partition import Partition, layers_of, split
from torchgpipe.model.placement import place, verify_sharing
from torchgpipe.model.settings import CheckpointMode, checkpoint_stop, fixed, verify_checkpoint, verify_chunks
from torchgpipe.model.verify import verify_balance, verify_module, verify_names
from torchgpipe.norms.deferred import DeferredBatchNorm, verify_unshared
from torchgpipe.norms.mini_batch import mini_batch
from torchgpipe.processes.processes import Processes
from torchgpipe.replay.random_numbers import RandomNumbers, modes_of
from torchgpipe.schedule.programs import NAMES, ScheduleName, program_of, usual_places
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.verify import verify_skippables

__all__ = ["DistributedGPipe"]


class DistributedGPipe(nn.Module):
    """Train a :class:`~torch.nn.Sequential` in several processes, each of which holds a part of the layers.

    Every process makes the same model, best on the meta device, and calls the same methods in the same order::

        torch.distributed.init_process_group(timeout=timedelta(minutes=2))
        loss_fn = torch.nn.functional.cross_entropy
        model = DistributedGPipe(module, balance=[2, 2], chunks=8, loss_fn=loss_fn)
        optimizer = torch.optim.Adam(model.parameters())
        for input, target in data:
            loss = model.step(input, target=target)
            optimizer.step()
            optimizer.zero_grad()

    Schedules, micro-batches, skips, checkpointing, batch norms, random numbers and names are those of
    :class:`~torchgpipe.GPipe`; losses and gradients are those of the plain model.

    Args:
        module: the model; this process keeps the layers of its own partitions
        balance: the number of layers in each partition. There is one partition for each process of a pipeline or,
            for the interleaved schedules, the same number of partitions for each.
        chunks: the number of micro-batches that a mini-batch is split into, as :func:`torch.chunk` does
        schedule: the name of a schedule, as in :class:`~torchgpipe.GPipe`; with several partitions in each process
            ``'GPipe'``, ``'Interleaved1F1B'``, ``'ZeroBubble'``, ``'V-Half'`` or ``'LayerMajor'``. PyTorch's own names,
            ``'LoopedBFS'`` and ``'InterleavedZeroBubble'``, are taken as well.
        checkpoint: which micro-batches are recomputed during backward, as in :class:`~torchgpipe.GPipe`
        loss_fn: takes the output and the target of a micro-batch, and returns the mean loss
        weight: takes the target of a micro-batch, and returns the weight of its loss in the mean over all
            micro-batches; for a mean over tokens, the number of tokens (default: as in :class:`~torchgpipe.GPipe`)
        deferred_batch_norm: as in :class:`~torchgpipe.GPipe`
        mesh: the processes, (stages,) or (replicas, stages) (default: one pipeline of all processes)
        device: where this process computes (default: its current accelerator, or the CPU if there is none)
        timeout: how long a process waits for another before it raises (default: the timeout of the groups of
            ``mesh``, or of the process group)

    Attributes:
        balance (list[int]): the number of layers in each partition; read-only
        chunks (int): the number of micro-batches; can be set between two steps, in every process
        checkpoint (str): the checkpoint mode; can be set between two steps, in every process
        stages (list[int]): the indices of the partitions in this process
        device (torch.device): where this process computes

    Raises:
        TypeError: ``module`` is not a :class:`~torch.nn.Sequential`, or ``chunks`` is not an integer.
        ValueError: the balance does not fit the module or the processes, another argument is out of its range, or
            partitions share a parameter.
        RuntimeError: there is no process group.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        chunks: int = 1,
        schedule: ScheduleName = "1F1B",
        checkpoint: CheckpointMode = "except_last",
        loss_fn: LossFunction | None = None,
        weight: Weight | None = None,
        deferred_batch_norm: bool = False,
        mesh: DeviceMesh | None = None,
        device: Device | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__()
        verify_module(module)
        verify_skippables(module)
        self._balance = verify_balance(balance, len(module))
        if mesh is None:
            mesh = _all_processes()
        self._processes = Processes(mesh, timeout, "stage")
        self._schedule, self._processes.owners = _placed(schedule, len(self._balance), self._processes.size)
        self._chunks, self._checkpoint = verify_chunks(chunks), verify_checkpoint(checkpoint)
        self.device = default_device() if device is None else canonical_device(device)
        self.stages = [j for j in range(len(self._balance)) if self._processes.is_mine(j)]
        self.training = module.training
        verify_loss(loss_fn, weight, None)
        # In a tuple, because a module such as nn.MSELoss() would become a layer.
        self._loss = loss_fn, weight
        self._defers = deferred_batch_norm
        self._mechanisms = Mechanisms()
        #: How often layers have drawn random numbers that were known to draw none.
        self._surprises = 0
        self._partitions: list[Partition] = []
        verify_names(self, module)

        self._forms = Forms(module, self._balance, self.device)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        partitions = split(layers_of(module), self._balance)
        verify_unshared(partitions)
        self._skips = SkipLayout([list(each.modules()) for each in partitions])
        verify_sharing(partitions, [f"stage {j}" for j in range(len(partitions))])
        self._partitions = [partitions[j] for j in self.stages]
        place(self._partitions, [self.device] * len(self.stages))
        for own in self._partitions:
            for name, layer in own._modules.items():
                self.add_module(name, layer)

    @property
    def balance(self) -> list[int]:
        """The number of layers in each partition."""
        return list(self._balance)

    @balance.setter
    def balance(self, balance: Any) -> None:
        raise fixed(self, "balance", "make a new one from the whole model, and load the last checkpoint into it")

    @property
    def chunks(self) -> int:
        """The number of micro-batches of the next mini-batch, also for deferred batch norms."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = verify_chunks(chunks)
        if self._defers:
            for norm in self.modules():
                if isinstance(norm, DeferredBatchNorm):
                    norm.chunks = self._chunks

    @property
    def checkpoint(self) -> CheckpointMode:
        """The checkpoint mode of the next mini-batch."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: CheckpointMode) -> None:
        self._checkpoint = verify_checkpoint(checkpoint)

    def extra_repr(self) -> str:
        """Return the balance and the settings, which ``repr(model)`` shows before the layers of this process."""
        return (
            f"balance={self._balance}, stages={self.stages}, device='{self.device}', chunks={self._chunks}, "
            f"schedule='{self._schedule}', checkpoint={self._checkpoint!r}"
        )

    def step(self, input: Any, target: Any = None) -> Tensor:
        """Run a mini-batch forward and backward; under :func:`torch.no_grad` only forward.

        Gradients are added to ``.grad``, as ``backward()`` does. A mini-batch may be smaller than the others. Each
        replica is given its own part of the data; the loss and the gradients are those of all parts.

        Args:
            input: a tensor of shape (batch, ...), nested tensors as in :class:`~torchgpipe.GPipe`, or
                :class:`~torchgpipe.MicroBatches`. Only the first stage reads the values; other processes may pass
                tensors of the same shapes on the meta device.
            target: the target of the loss function, of the same batch size, or :class:`~torchgpipe.MicroBatches` if
                the input is; only the last stage reads it

        Returns:
            the mean loss, a tensor without dimensions, in every process

        Raises:
            TypeError, ValueError: the input or the target does not fit; nothing was sent.
            RuntimeError: another process was called with another input, has failed, or did not answer within the
                timeout. The message names this process and the process that it has waited for.
            Exception: what a layer raises, with notes.
        """
        loss_fn, weight = self._loss
        if loss_fn is None:
            raise ValueError("a step needs a loss: DistributedGPipe(..., loss_fn=...); eval_step gives the output")
        processes = self._processes

        def begin() -> Losses:
            sizes, window = microbatch.sizes_of(input, self.chunks), microbatch.window_of(input)
            return Losses(loss_fn, weight, None, target, sizes, window, self.device, takes_values=False)

        with processes.at_step():
            _, losses = self._run(input, begin)
            # A process without the last stage does not know another dtype.
            loss: Tensor = losses.sum().to(self.device, torch.float64)
            processes.broadcast(loss, processes.last, "the loss")
            processes.add_replicas(loss, "the loss of the replicas")
        return loss

    @torch.no_grad()
    def eval_step(self, input: Any, *, gather: bool = False) -> Any:
        """Run a mini-batch forward, without gradients.

        Args:
            input: as in :meth:`step`
            gather: whether to return the output in all processes of a pipeline

        Returns:
            the output of the last layer, gathered along dimension 0; of :class:`~torchgpipe.MicroBatches`, a list of
            the output of each; None in processes without the last stage, unless ``gather`` is set

        Raises:
            Exception: as in :meth:`step`
        """
        with self._processes.at_step():
            forms, outputs = self._run(input, _Outputs)
            if not (self._is_last or gather):
                return None
            batches = [outputs.batches.get(i) or _empty(of[-1]) for i, of in enumerate(forms)]
            if gather:
                for leaf in [leaf for batch in batches for leaf in batch.leaves if leaf is not None]:
                    self._processes.broadcast(leaf, self._processes.last, "the output")
            return (microbatch.gather if microbatch.window_of(input) is None else microbatch.values_of)(batches)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        parameters = super().parameters(recurse)
        return parameters if self._processes.size == 1 else not_for_norms(parameters)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all stages, as :func:`torch.nn.utils.clip_grad_norm_` does for a plain model.

        Args:
            max_norm: the largest norm of all gradients together; larger gradients are scaled down to it
            norm_type: the type of the norm: 2.0 for the Euclidean one, ``float("inf")`` for the largest absolute value

        Returns:
            the norm before clipping, in every process
        """
        parameters = [*super().parameters()]
        return clip_grad_norm(
            parameters,
            parameters,
            max_norm,
            norm_type,
            lambda norm: self._processes.gather(norm, "the norm of the gradients"),
        )

    @property
    def place(self) -> str:
        """The rank and the stages of this process, as text for logs."""
        return self._processes.place

    @property
    def steps(self) -> int:
        """The number of calls of :meth:`step` and :meth:`eval_step` so far."""
        return self._processes.step

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load keys of the original torchgpipe, too, as :class:`~torchgpipe.GPipe` does."""
        error_msgs: list[str] = args[-1]
        take_old_keys(state_dict, prefix, lambda keys: by_name(keys, [*self._modules]), error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # ---- One step.

    @property
    def _is_last(self) -> bool:
        return self.stages[-1] == len(self.balance) - 1

    def _run(self, input: Any, begin: Callable[[], Losses | _Outputs]) -> tuple[Sequence[Sequence[Batch]], Any]:
        """Prepare a step, run it when all processes are ready for it.

        Args:
            input: as in :meth:`step`
            begin: returns what takes the outputs of the last stage

        Returns:
            the forms of what has crossed, and what has taken the outputs
        """
        processes, partitions, training = self._processes, self._partitions, self.training
        # Only the first stage reads the values of the input.
        where = self.device if 0 in self.stages else torch.device("meta")
        inputs = microbatch.scatter((input,), self._chunks, where)
        m = len(inputs)
        ending = begin() if self._is_last else _Outputs()
        for partition in partitions:  # Layers may have been replaced.
            partition.follow(layers_of(self), training)
        forms, checksum = self._forms.of(inputs, self)
        order = order_of(microbatch.window_of(input), self)
        program = part_of_program(
            self._schedule, m, tuple(processes.owners), processes.rank, None if order is None else tuple(order)
        )
        alike = {
            "another balance: measure it in one process, and send it to the others": self._balance,
            "another schedule": self._schedule,
            "other chunks": self._chunks,
            "another checkpoint mode": self._checkpoint,
            "another order= of its micro-batches": order,
            "arguments of other shapes, another model, mode or grad mode, or other parameters frozen: freeze by "
            "requires_grad_() of a module, as model.parameters() are those of one process": checksum,
        }
        # Whether the layers draw is known for the modes of all processes together. Seeds go from the first one on.
        modes, ending.total = processes.agree(alike, hash((modes_of(self), self._surprises)), ending.total)
        numbers = RandomNumbers(self, [self.device], tuple(modes))
        stop = checkpoint_stop(self._checkpoint, m) if training else 0
        with mini_batch(m):
            run_step(
                partitions,
                [self.device] * len(partitions),
                inputs,
                program,
                ending.finish,
                self._mechanisms,
                gather=lambda: None,
                checkpointed=[stop] * len(partitions),
                backward=torch.is_grad_enabled(),
                schedule=self._schedule,
                random_numbers=numbers,
                kind=partial(RemoteMicroBatches, Crossings(processes, self._skips, forms)),
                processes=processes,
            )
        self._surprises += numbers.is_surprised
        return forms, ending


class _Outputs:
    """The outputs of a mini-batch that has no loss here; see `Losses`."""

    total = 0.0

    def __init__(self) -> None:
        self.batches: dict[int, Batch] = {}

    def finish(self, i: int, output: Batch) -> Tensor:
        self.batches[i] = output
        return torch.zeros(1)

    def sum(self) -> Tensor:
        return torch.zeros(())


def _empty(form: Batch) -> Batch:
    """Return a batch of this form to receive another process's."""
    leaves = [x if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in form.leaves]
    return form.replace(tuple(leaves))


def _all_processes() -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "DistributedGPipe needs a process group: call torch.distributed.init_process_group(...) first, in every "
            "process, which torchrun starts; in a single process, use GPipe"
        )
    world: Any = dist.group.WORLD
    return DeviceMesh.from_group(world, "cpu")  # A mesh of a new group could have another timeout.


#: Names that PyTorch has for schedules.
_THEIRS = {"loopedbfs": "GPipe", "interleavedzerobubble": "ZeroBubble"}


def _placed(name: str, partitions: int, processes: int) -> tuple[ScheduleName, list[int]]:
    """Return the name of a schedule as it is written, and the process of each partition under it.

    Args:
        name: the name in any case
        partitions: the number of partitions
        processes: the number of processes

    Raises:
        ValueError: there is no such schedule, or it does not fit the numbers of partitions and processes.
    """
    known = {**{each.lower(): each for each in NAMES}, **_THEIRS}
    if name.lower() not in known:
        raise ValueError(f"schedule must be one of {', '.join(NAMES)}, but got {name!r}")
    schedule = cast(ScheduleName, known[name.lower()])
    if schedule == "1F1B" and partitions > processes:
        raise ValueError(
            f"1F1B has one stage in each process, but there are {partitions} partitions in the balance and "
            f"{processes} processes in a pipeline; for several stages in each, use schedule='Interleaved1F1B'"
        )
    if partitions % processes:
        raise ValueError(
            f"the number of partitions must be a multiple of the number of processes in a pipeline, but there are "
            f"{partitions} partitions and {processes} processes; change the balance"
        )
    usual = usual_places(schedule, processes)
    places = usual if len(usual) == partitions else [j % processes for j in range(partitions)]
    program_of(schedule, 1, places)  # Refuses what does not fit.
    return schedule, places
