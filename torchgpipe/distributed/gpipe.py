"""Train over several processes with a module that holds the layers of its own stages.

A step, in every process:

1. Split the input into micro-batches, as in one process.
2. Find the shapes at all boundaries. For new shapes, make a schedule of PyTorch's.
3. Agree with all processes that they have prepared the same step, and on the weight of all targets. Only then send.
4. Run the stages of this process under the schedule, forward and backward.
5. Add up the gradients of the replicas, and receive the loss from the last stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.devices.device import canonical_device, default_device
from torchgpipe.devices.typing import Device
from torchgpipe.distributed.fake_model import FakeModel
from torchgpipe.distributed.outputs import Outputs
from torchgpipe.distributed.preparation import Preparation
from torchgpipe.distributed.prepared_step import PreparedStep
from torchgpipe.distributed.processes import Processes
from torchgpipe.distributed.schedules import ScheduleName, name_of, verify_fit, verify_schedule
from torchgpipe.distributed.stage import StepCall, verify_release
from torchgpipe.distributed.step_gradients import StepGradients
from torchgpipe.gradients.clip import clip_grad_norm
from torchgpipe.model import microbatch
from torchgpipe.model.loss import LossFunction, MeanLoss, Weight, verify_loss
from torchgpipe.model.old_keys import by_name, take_old_keys
from torchgpipe.model.partition import Partition, layers_of, split
from torchgpipe.model.placement import place, verify_sharing
from torchgpipe.model.settings import CheckpointMode, checkpoint_stop, fixed, verify_chunks
from torchgpipe.model.verify import verify_balance, verify_module, verify_names
from torchgpipe.norms.deferred import DeferredBatchNorm
from torchgpipe.norms.mini_batch import mini_batch
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

    The stages and their schedules are those of ``torch.distributed.pipelining``. Micro-batches, skips, checkpointing,
    batch norms and names are those of :class:`~torchgpipe.GPipe`; losses and gradients are those of the plain model.

    Args:
        module: the model; this process keeps the layers of its own partitions
        balance: the number of layers in each partition. There is one partition for each process of a pipeline or,
            for the interleaved schedules, the same number of partitions for each.
        chunks: the number of micro-batches that a mini-batch is split into, as :func:`torch.chunk` does
        schedule: the name of a schedule, as in :class:`~torchgpipe.GPipe`: ``'GPipe'`` or ``'1F1B'``; with several
            partitions in each process ``'GPipe'``, ``'Interleaved1F1B'`` or ``'ZeroBubble'``. PyTorch's own names,
            ``'LoopedBFS'`` and ``'InterleavedZeroBubble'``, are taken as well.
        checkpoint: which micro-batches are recomputed during backward, as in :class:`~torchgpipe.GPipe`
        loss_fn: takes the output and the target of a micro-batch, and returns the mean loss
        weight: takes the target of a micro-batch, and returns the weight of its loss in the mean over all
            micro-batches; for a mean over tokens, the number of tokens (default: as in :class:`~torchgpipe.GPipe`)
        deferred_batch_norm: as in :class:`~torchgpipe.GPipe`
        mesh: the processes, (stages,) or (replicas, stages) (default: one pipeline of all processes)
        device: where this process computes (default: its current accelerator, or the CPU if there is none)
        timeout: how long a process waits for another before it raises (default: the timeouts of the groups of
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
        RuntimeError: there is no process group, or PyTorch is older than 2.13.
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
        verify_release()
        verify_module(module)
        verify_skippables(module)
        self._balance = verify_balance(balance, len(module))
        self._processes = processes = Processes(mesh, timeout, len(self.balance))
        self._schedule = verify_schedule(schedule, len(self.balance), processes.size)
        self._chunks, self._checkpoint = verify_chunks(chunks), verify_fit(checkpoint, self._schedule)
        self.device = default_device() if device is None else canonical_device(device)
        self.stages = processes.stages
        self.training = module.training
        verify_loss(loss_fn, weight, None)
        # In a tuple, because a module such as nn.MSELoss() would become a layer.
        self._loss = loss_fn, weight
        self._defers = deferred_batch_norm
        self._partitions: list[Partition] = []
        verify_names(self, module)

        self._fake = FakeModel(module, self.balance, self.device)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        partitions = split(layers_of(module), self.balance)
        verify_sharing(partitions, [f"stage {j}" for j in range(len(partitions))])
        self._partitions = [partitions[j] for j in self.stages]
        place(self._partitions, [self.device] * len(self.stages))
        for partition in self._partitions:
            for name, layer in partition._modules.items():
                self.add_module(name, layer)
        self._preparation = Preparation(self._schedule, self._fake, self._partitions, processes, self.device)
        self._preparation.verify(self.chunks)

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
        chunks = verify_chunks(chunks)
        self._preparation.verify(chunks)
        self._chunks = chunks
        if self._defers:
            for norm in self.modules():
                if isinstance(norm, DeferredBatchNorm):
                    norm.chunks = chunks

    @property
    def checkpoint(self) -> CheckpointMode:
        """The checkpoint mode of the next mini-batch."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: CheckpointMode) -> None:
        self._checkpoint = verify_fit(checkpoint, self._schedule)

    def extra_repr(self) -> str:
        """Return the balance and the settings, which ``repr(model)`` shows before the layers of this process."""
        return (
            f"balance={self._balance}, stages={self.stages}, device='{self.device}', chunks={self._chunks}, "
            f"schedule='{name_of(self._schedule)}', checkpoint={self._checkpoint!r}"
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
        processes, backward = self._processes, torch.is_grad_enabled()
        mean = MeanLoss(loss_fn, weight, input, target, self.chunks, self.device)
        with processes.at_step():
            processes.step += 1
            prepared = self._prepare(input, mean, backward)
            gradients = StepGradients(self.parameters() if backward else [], processes.replica_group, self.device)
            try:
                gradients.begin()
                self._run(prepared, mean)
                with processes.exchanging("the gradients of the replicas", processes.replica_group):
                    gradients.end()
            except BaseException:
                gradients.undo()
                raise
            loss = mean.sum().double()  # A process without the last stage does not know another dtype.
            processes.receive_from_last(loss, "the loss")
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
        processes, outputs = self._processes, Outputs(self.device)
        with processes.at_step():
            processes.step += 1
            prepared = self._prepare(input, outputs, backward=False)
            self._run(prepared, outputs)
            if not (self._is_last or gather):
                return None
            batches = outputs.batches(prepared.outputs)
            if gather:
                for leaf in [leaf for batch in batches for leaf in batch.leaves if leaf is not None]:
                    processes.receive_from_last(leaf, "the output")
            return (microbatch.gather if microbatch.window_of(input) is None else microbatch.values_of)(batches)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all stages, as :func:`torch.nn.utils.clip_grad_norm_` does for a plain model.

        Args:
            max_norm: the largest norm of all gradients together; larger gradients are scaled down to it
            norm_type: the type of the norm: 2.0 for the Euclidean one, ``float("inf")`` for the largest absolute value

        Returns:
            the norm before clipping, in every process
        """
        pipeline, parameters = self._processes.pipeline_group, [*self.parameters()]

        def gather(norm: Tensor) -> list[Tensor]:
            norms = [torch.empty_like(norm, device=self.device) for _ in range(self._processes.size)]
            dist.all_gather(norms, norm.to(self.device), group=pipeline)
            return norms

        with self._processes.at_step(), self._processes.exchanging("the norm of the gradients", pipeline):
            return clip_grad_norm(parameters, parameters, max_norm, norm_type, gather)

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

    def _prepare(self, input: Any, ending: MeanLoss | Outputs, backward: bool) -> PreparedStep:
        """Prepare a step, and wait until all processes are ready for it."""
        try:
            # Only the first stage reads the values of the input.
            where = self.device if 0 in self.stages else torch.device("meta")
            inputs = microbatch.scatter((input,), self.chunks, where)
            weight = ending.prepare(inputs) if self._is_last else 0.0
            prepared = self._preparation.step(
                self, inputs, backward=backward, chunks=self.chunks, checkpoint=self.checkpoint
            )
        except Exception:
            self._processes.agree(0, 0.0, self.device, failed=True)
            raise
        ending.total = self._processes.agree(prepared.checksum, weight, self.device, failed=False)
        prepared.inputs = inputs
        return prepared

    def _run(self, prepared: PreparedStep, ending: MeanLoss | Outputs) -> None:
        """Run a prepared step on the layers that the model has now, which may have been replaced."""
        m = len(prepared.inputs)
        stop = checkpoint_stop(self.checkpoint, m) if self.training else 0
        layout = SkipLayout([list(partition.modules()) for partition in self._fake.partitions])
        for partition in self._partitions:
            partition.follow(layers_of(self), self.training)
        try:
            with mini_batch(m, self, self._processes.replica_group):
                prepared.run(StepCall(prepared.inputs, stop, ending.finish), layout, self._processes)
        except BaseException:
            self._preparation.clear()  # PyTorch's stages have stopped in the middle.
            raise
