"""Train a Sequential over several processes, each of which holds the layers of its own partitions.

This is a front of `torchgpipe.pipeline`: it runs a model whose modules are the partitions, one behind the other. Those
of other processes have no layers here. Which module belongs where is known beforehand, so there is no sample to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.batch import microbatch
from torchgpipe.batch.inputs import Arguments, SplitBatch, Splitter
from torchgpipe.batch.loss import LossFunction, Weight, verify_loss
from torchgpipe.batch.microbatch import NoChunk
from torchgpipe.cell.views import starts_in_place
from torchgpipe.devices.device import canonical_device, default_device
from torchgpipe.devices.typing import Device, Leaf, Leaves
from torchgpipe.front.pipelined_module import make_pipelined
from torchgpipe.gradients.clip import not_for_norms
from torchgpipe.model.old_keys import take_old_keys
from torchgpipe.model.partition import Partition, layers_of, split
from torchgpipe.model.placement import place, verify_sharing
from torchgpipe.model.settings import CheckpointMode, fixed, verify_checkpoint, verify_chunks
from torchgpipe.model.values import mapped
from torchgpipe.model.verify import verify_balance, verify_layer_names, verify_module
from torchgpipe.norms.deferred import DeferredBatchNorm, verify_unshared
from torchgpipe.norms.mini_batch import mini_batch
from torchgpipe.processes.processes import Processes
from torchgpipe.processes.stand_in import StandIn, form_of
from torchgpipe.schedule.programs import NAMES, ScheduleName, program_of, usual_places
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.namespace import SkipKey
from torchgpipe.skip.tracker import SkipTracker
from torchgpipe.skip.verify import verify_skippables
from torchgpipe.spine.layout import Layout
from torchgpipe.spine.sample import Study
from torchgpipe.spine.settings import Settings

__all__ = ["DistributedGPipe"]


class _Stage(Partition):
    """A partition whose skips of other partitions are arguments and results.

    Attributes:
        _popped: the skips that arrive; private, or no layer could have this name
        _stashed: the skips that leave
    """

    _popped: Sequence[SkipKey]
    _stashed: Sequence[SkipKey]

    def forward(self, input: Any, skips: Leaves) -> tuple[Any, Leaves]:  # type: ignore[override]
        if starts_in_place(self):  # Else it would change what a recomputation starts from.
            input = mapped(input, Tensor.clone)
        tracker = SkipTracker(zip(self._popped, skips))
        with tracker:
            return super().forward(input), tracker.take(self._stashed)


class _Stages(nn.Module):
    """All partitions, one behind the other."""

    def forward(self, input: Any) -> Any:
        skips: dict[SkipKey, Leaf] = {}
        for stage in cast(Iterable[_Stage], self.children()):
            input, stashed = stage(input, tuple([skips.pop(key) for key in stage._popped]))
            skips.update(zip(stage._stashed, stashed))
        return input


class _Rows(Splitter):
    """Splits inputs as a GPipe does, without a sample: each tensor has the rows in dimension 0.

    Args:
        forward: the model's forward
        device: where this process computes
        reads: whether this process reads the input, and not another one
    """

    def __init__(self, forward: Any, device: torch.device, *, reads: bool) -> None:
        super().__init__(forward, Arguments((), {}), ())
        self._device, self._reads = device, reads

    def micro_batches(self, arguments: Arguments, chunks: int) -> SplitBatch:
        def stand_in(tensor: Tensor) -> Tensor:
            return StandIn(form_of(tensor)._replace(device=self._device), 0, tensor.requires_grad)

        batches = microbatch.scatter(arguments.args, chunks, self._device if self._reads else None)
        (input,) = arguments.args
        sizes = microbatch.sizes_of(input, chunks)
        values = [batch.value if self._reads else mapped(batch.value, stand_in) for batch in batches]
        given = [Arguments((value,), {}) for value in values]
        return SplitBatch(self, given, max(1, sum(sizes)), sizes, True, microbatch.window_of(input))


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
            ``'GPipe'``, ``'Interleaved1F1B'``, ``'ZeroBubble'``, ``'LayerMajor'``, or those of a V
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
        processes = self._processes = Processes(mesh, timeout, "stage")
        processes.owners = _placed(schedule, len(self._balance), processes.size)
        n, chunks, checkpoint = len(self._balance), verify_chunks(chunks), verify_checkpoint(checkpoint)
        self.device = default_device() if device is None else canonical_device(device)
        self.stages = [j for j in range(n) if processes.is_mine(j)]
        self._is_last = n - 1 in self.stages
        self.training = module.training
        verify_loss(loss_fn, weight, None)
        verify_layer_names(self, module)

        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, chunks)
        stages = cast(list[_Stage], split(layers_of(module), self._balance, _Stage))
        verify_unshared(stages)
        skips = SkipLayout([list(each.modules()) for each in stages])
        verify_sharing(stages, [f"stage {j}" for j in range(n)])
        with processes.all_together("the layers of this process"):
            alike = {"balance": self._balance, "schedule": schedule, "chunks": chunks, "checkpoint": checkpoint}
            processes.verify_alike(alike)
            own = [stages[j] for j in self.stages]
            place(own, [self.device] * len(own))
            processes.begin_equal([tensor for stage in own for tensor in (*stage.parameters(), *stage.buffers())])
        model, labels = _Stages(), [f"{stage._label} on {self.device}" for stage in stages]
        for j, stage in enumerate(stages):
            stage._popped, stage._stashed = [[key for key, _, _ in of[j]] for of in (skips.arriving, skips.leaving)]
            if j in self.stages:
                for name, layer in stage._modules.items():
                    self.add_module(name, layer)
            else:
                stage._modules.clear()
            model.add_module(f"stage {j}", stage)
        self._settings = Settings(
            chunks=chunks,
            devices=[self.device] * n,
            members=[[j] for j in range(n)],
            labels=labels,
            parts=[[*stage._modules] for stage in stages],
            doors={f"stage {j}": j for j in range(n)},
            processes=processes,
            schedule=schedule,
            loss_fn=loss_fn,
            weight=weight if self._is_last else None,  # Others have no target.
            study=Study([], _Rows(model.forward, self.device, reads=0 in self.stages)),
            layout=Layout([], []),
        )
        # In a tuple, because these modules have other names.
        self._model: tuple[Any] = (model,)
        self.checkpoint = checkpoint
        make_pipelined(model, self._settings)

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
        return self._settings.chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._settings.chunks = verify_chunks(chunks)

    @property
    def checkpoint(self) -> CheckpointMode:
        """The checkpoint mode of the next mini-batch."""
        return self._settings.checkpoint or "never"

    @checkpoint.setter
    def checkpoint(self, checkpoint: CheckpointMode) -> None:
        settings, settings.checkpoint = self._settings, verify_checkpoint(checkpoint)
        settings.recomputed = set() if settings.checkpoint == "never" else {*settings.doors}

    def extra_repr(self) -> str:
        """Return the balance and the settings, which ``repr(model)`` shows before the layers of this process."""
        return (
            f"balance={self._balance}, stages={self.stages}, device='{self.device}', chunks={self.chunks}, "
            f"schedule='{self._settings.schedule}', checkpoint={self.checkpoint!r}"
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
        if self._settings.loss_fn is None:
            raise ValueError("a step needs a loss: DistributedGPipe(..., loss_fn=...); eval_step gives the output")
        # Elsewhere, one that fits any input.
        target = target if self._is_last else NoChunk(torch.empty(0))
        return self._run(input, lambda model: model.step(input, target=target))  # type: ignore[no-any-return]

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
        self._settings.gathers = gather
        output = self._run(input, lambda model: model(input))
        return output if self._is_last or gather else None

    def _run(self, input: Any, run: Callable[[Any], Any]) -> Any:
        """Return what ``run`` returns for the model, which gets the layers that are registered by now."""
        (model,) = self._model
        model.training = self.training
        for stage in model.children():
            stage.follow(layers_of(self), self.training)
        with mini_batch(max(1, len(microbatch.sizes_of(input, self.chunks)))):
            return run(model)

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
        return self._model[0].clip_grad_norm_(max_norm, norm_type)  # type: ignore[no-any-return]

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
        take_old_keys(state_dict, prefix, [*self._modules], error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _all_processes() -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "DistributedGPipe needs a process group: call torch.distributed.init_process_group(...) first, in every "
            "process, which torchrun starts; in a single process, use GPipe"
        )
    world: Any = dist.group.WORLD
    return DeviceMesh.from_group(world, "cpu")  # A mesh of a new group could have another timeout.


def _placed(schedule: ScheduleName, partitions: int, processes: int) -> list[int]:
    """Return the process of each partition under a schedule.

    Raises:
        ValueError: there is no such schedule, or it does not fit the numbers of partitions and processes.
    """
    if schedule not in NAMES:
        raise ValueError(f"schedule must be one of {', '.join(NAMES)}, but got {schedule!r}")
    if partitions % processes:
        raise ValueError(
            f"the number of partitions must be a multiple of the number of processes in a pipeline, but there are "
            f"{partitions} partitions and {processes} processes; change the balance"
        )
    usual = usual_places(schedule, processes)
    places = usual if len(usual) == partitions else [j % processes for j in range(partitions)]
    program_of(schedule, 1, places)  # Refuses what does not fit.
    return places
