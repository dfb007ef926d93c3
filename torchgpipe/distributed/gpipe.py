"""The pipeline over several processes, as users see it: a module that holds the layers of its own stage.

A step, on every process:

1. The input is split into micro-batches, as in one process. Nothing is sent yet.
2. The shapes at all boundaries follow from it; for shapes that are new a schedule of PyTorch's is made.
3. The processes agree: whether all could prepare the same step, and how much the losses of all weigh.
4. The schedule runs the stages of this process, forward and backward.
5. Replicas add up their gradients. The last stage tells all others the loss.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.devices.device import canonical_device, default_device
from torchgpipe.devices.typing import Device
from torchgpipe.distributed.boundary import Boundary, Shapes, leaves_of, on_meta
from torchgpipe.distributed.plan import Plan, ScheduleName, make_plan, name_of, verify_fit, verify_schedule
from torchgpipe.distributed.processes import Processes
from torchgpipe.distributed.replicas import Gradients, clip_grad_norm
from torchgpipe.distributed.stage import Call
from torchgpipe.model import microbatch
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.old_keys import by_name, take_old_keys
from torchgpipe.model.partition import Partition, layers_of, split
from torchgpipe.model.placement import place, verify_sharing
from torchgpipe.model.settings import CheckpointMode, checkpoint_stop, fixed, verify_chunks
from torchgpipe.model.verify import verify_balance, verify_module, verify_names
from torchgpipe.norms.deferred import DeferredBatchNorm
from torchgpipe.norms.mini_batch import mini_batch
from torchgpipe.skip.layout import inspect_skip_layout
from torchgpipe.skip.verify import verify_skippables

__all__ = ["DistributedGPipe"]

#: From the output and the target of a micro-batch to its mean loss.
LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
#: From the target of a micro-batch to how much its mean loss weighs.
Weight: TypeAlias = Callable[[Any], float | int | Tensor]


class DistributedGPipe(nn.Module):
    """Trains a :class:`~torch.nn.Sequential` in several processes, each of which holds one part of the layers.

    Every process makes the same model, best on the meta device, and calls the same methods in the same order::

        torch.distributed.init_process_group(timeout=timedelta(minutes=2))
        loss_fn = torch.nn.functional.cross_entropy
        model = DistributedGPipe(module, balance=[2, 2], chunks=8, loss_fn=loss_fn)
        optimizer = torch.optim.Adam(model.parameters())
        for input, target in data:
            loss = model.step(input, target)
            optimizer.step()
            optimizer.zero_grad()

    The stages and their schedules are those of ``torch.distributed.pipelining``. Micro-batches, skips, checkpointing,
    batch norms and names are those of :class:`~torchgpipe.GPipe`; losses and gradients are those of the plain model.

    Args:
        module: the model; this process keeps the layers of its own partitions
        balance: the number of layers in each partition; their number is that of the processes of a pipeline or,
            for the schedules that interleave, a multiple of it
        chunks: the number of micro-batches that a mini-batch is split into, as :func:`torch.chunk` does
        schedule: by its name in PyTorch without the word Schedule: ``'GPipe'`` or ``'1F1B'``; with several partitions
            in each process ``'LoopedBFS'``, ``'Interleaved1F1B'`` or ``'InterleavedZeroBubble'``
        checkpoint: which micro-batches are computed again at backward, as in :class:`~torchgpipe.GPipe`
        loss_fn: gives the mean loss of a micro-batch, from its output and its target
        weight: gives what that loss weighs in the mean over all micro-batches, from the target; for a mean over tokens,
            their number (default: the size of the micro-batch)
        deferred_batch_norm: as in :class:`~torchgpipe.GPipe`
        mesh: the processes: (stages,) or (replicas, stages); default: one pipeline of all
        device: where this process computes (default: its current accelerator, or the CPU where there is none)
        timeout: how long a process waits for another before it gives up (default: that of the groups of ``mesh``, or
            of the process group)

    Attributes:
        balance (list[int]): the number of layers in each partition; read-only
        chunks (int): the number of micro-batches; can be set between two steps, in every process
        checkpoint (str): the checkpoint mode; can be set between two steps, in every process
        stages (list[int]): the indices of the partitions in this process
        device (torch.device): where they are

    Raises:
        TypeError: ``module`` is not a :class:`~torch.nn.Sequential`, or ``chunks`` no integer.
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
        self._processes = processes = Processes(mesh, timeout, len(self.balance))
        self._schedule = verify_schedule(schedule, len(self.balance), processes.size)
        self._chunks, self._checkpoint = verify_chunks(chunks), verify_fit(checkpoint, self._schedule)
        self.device = default_device() if device is None else canonical_device(device)
        self.stages = processes.stages
        self.training = module.training
        self._loss_fn, self._weight = loss_fn, weight
        self._defers = deferred_batch_norm
        self._plans: dict[Any, Plan] = {}
        self._partitions: list[Partition] = []
        verify_names(self, module)

        self._shapes = Shapes(module, self.balance, self.device)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        partitions = split(layers_of(module), self.balance)
        verify_sharing(partitions, [f"stage {j}" for j in range(len(partitions))])
        self._partitions = [partitions[j] for j in self.stages]
        place(self._partitions, [self.device] * len(self.stages))
        for partition in self._partitions:
            for name, layer in partition._modules.items():
                self.add_module(name, layer)
        self._verify_schedule_of(self.chunks)

    @property
    def balance(self) -> list[int]:
        """The number of layers in each partition."""
        return list(self._balance)

    @balance.setter
    def balance(self, balance: Any) -> None:
        raise fixed(self, "balance", "make another one of the whole model, and load what Checkpoints have saved")

    @property
    def chunks(self) -> int:
        """The number of micro-batches that the next mini-batch is split into; deferred batch norms follow it."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        chunks = verify_chunks(chunks)
        self._verify_schedule_of(chunks)
        self._chunks = chunks
        self._plans.clear()
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
        self._plans.clear()  # Their checksums, by which processes agree, have the mode before.

    def extra_repr(self) -> str:
        """Return what ``repr(model)`` shows before the layers of this process: how the model is divided and run."""
        return (
            f"balance={self._balance}, stages={self.stages}, device='{self.device}', chunks={self._chunks}, "
            f"schedule='{name_of(self._schedule)}', checkpoint={self._checkpoint!r}"
        )

    def step(self, input: Any, target: Any = None) -> Tensor:
        """Runs a mini-batch forward and backward; under :func:`torch.no_grad` only forward.

        Gradients are added to those that the parameters have, as ``backward()`` does. A mini-batch may be smaller than
        the others. In replicas, each gives its own part of the data, and the loss and the gradients are those of all.

        Args:
            input: a tensor of shape (batch, ...), or nested tensors as in :class:`~torchgpipe.GPipe`. Only the first
                stage reads it; the others may be given a tensor on the meta device, for its shape.
            target: likewise, for the loss function; only the last stage reads it

        Returns:
            the mean loss, a tensor without dimensions, in every process

        Raises:
            TypeError, ValueError: the input or the target does not fit; nothing was sent.
            RuntimeError: another process was called with something else, has refused, has failed, or did not answer
                within the timeout of the process group. The message names this process and the one that it waited for.
            Exception: what a layer raises, with notes.
        """
        processes, backward = self._processes, torch.is_grad_enabled()
        losses: list[Tensor] = []
        if self._loss_fn is None:
            raise ValueError("a step needs a loss: DistributedGPipe(..., loss_fn=...); eval_step gives the output")
        targets: list[Batch] = []
        weights: list[float] = []

        def prepare(m: int, size: int) -> float:
            if self._is_last:
                targets.extend(microbatch.scatter((target,), self.chunks, self.device))
                _verify_target(target, targets, m, size)
                weights.extend(float(self._weigh(each)) for each in targets)
            return sum(weights)

        def finish(i: int, output: Batch) -> Tensor:
            loss = self._loss(output, targets[i], weights[i] / total if weights[i] else 0.0)
            losses.append(loss.detach())
            return loss

        with processes.at_step():
            processes.step += 1
            plan, total = self._prepare(input, prepare, backward)
            gradients = Gradients(self.parameters() if backward else [], processes.replicas)
            try:
                self._run(plan, finish)
            except BaseException:
                gradients.restore()
                raise
            with processes.exchanging("the gradients of the replicas", processes.replicas):
                gradients.reduce()
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            for part in losses:
                loss += part.squeeze()
            with processes.exchanging("the loss", processes.pipeline):
                dist.broadcast(loss, group=processes.pipeline, group_src=processes.last)
            if processes.replicas is not None:
                with processes.exchanging("the loss of the replicas", processes.replicas):
                    dist.all_reduce(loss, group=processes.replicas)
        return loss

    @torch.no_grad()
    def eval_step(self, input: Any, *, gather: bool = False) -> Any:
        """Runs a mini-batch forward.

        Args:
            input: as in :meth:`step`
            gather: whether all processes of a pipeline get the output

        Returns:
            what the last layer returns, gathered along dimension 0, in the process of the last stage, and None in
            the others

        Raises:
            Exception: as in :meth:`step`
        """
        processes, outputs = self._processes, dict[int, Batch]()

        def finish(i: int, output: Batch) -> Tensor:
            outputs[i] = output.replace(tuple([None if leaf is None else leaf.clone() for leaf in output.leaves]))
            return torch.zeros(1, device=self.device)

        with processes.at_step():
            processes.step += 1
            plan, _ = self._prepare(input, lambda m, size: 0.0, backward=False)
            self._run(plan, finish)
            if not (self._is_last or gather):
                return None
            batches = [outputs[i] for i in sorted(outputs)] or [_empty(form, self.device) for form in plan.outputs]
            if gather:
                with processes.exchanging("the output", processes.pipeline):
                    for leaf in [leaf for batch in batches for leaf in batch.leaves if leaf is not None]:
                        dist.broadcast(leaf, group=processes.pipeline, group_src=processes.last)
            return microbatch.gather(batches)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients of all stages, as :func:`torch.nn.utils.clip_grad_norm_` does those of a plain model.

        Args:
            max_norm: the largest norm that is left as it is
            norm_type: which norm: 2.0 for the Euclidean one, ``float("inf")`` for the largest absolute value

        Returns:
            the norm of the gradients of all stages before, in every process
        """
        pipeline = self._processes.pipeline
        with self._processes.at_step(), self._processes.exchanging("the norm of the gradients", pipeline):
            return clip_grad_norm(self.parameters(), max_norm, norm_type, pipeline, self.device)

    @property
    def place(self) -> str:
        """Which process this is, and what it holds, in words."""
        return self._processes.place

    @property
    def steps(self) -> int:
        """How many calls were made."""
        return self._processes.step

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes the keys of the original as well, as :class:`~torchgpipe.GPipe` does."""
        error_msgs: list[str] = args[-1]
        take_old_keys(state_dict, prefix, lambda keys: by_name(keys, [*self._modules]), error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # ---- The steps above.

    @property
    def _is_last(self) -> bool:
        return self.stages[-1] == len(self.balance) - 1

    def _weigh(self, target: Batch) -> float | int | Tensor:
        if self._weight is not None:
            return self._weight(target.value)
        return next(len(leaf) for leaf in target.leaves if leaf is not None)

    def _loss(self, output: Batch, target: Batch, share: float) -> Tensor:
        assert self._loss_fn is not None
        if share == 0:  # The mean of nothing may be nan.
            return sum(
                [(leaf * 0).sum() for leaf in output.leaves if leaf is not None], torch.zeros(1, device=self.device)
            )
        loss = self._loss_fn(output.value, target.value)
        if loss.numel() != 1:
            raise ValueError(
                f"loss_fn must return the mean loss of a micro-batch, but its shape is {tuple(loss.shape)}"
            )
        return loss.reshape(1) * share

    def _prepare(self, input: Any, weigh: Callable[[int, int], float], backward: bool) -> tuple[Plan, float]:
        """Makes or finds the plan of a step, and gives what all targets weigh together."""
        try:
            # Only the first stage reads the input. To the others it is a form.
            where = self.device if 0 in self.stages else torch.device("meta")
            batches = microbatch.scatter((input,), self.chunks, where)
            weight = weigh(len(batches), _rows(batches))
            plan = self._plan(batches, backward)
        except Exception:
            self._processes.agree(0, 0.0, self.device, failed=True)
            raise
        total = self._processes.agree(plan.checksum, weight, self.device, failed=False)
        plan.batches = batches
        return plan, total

    def _plan(self, batches: list[Batch], backward: bool) -> Plan:
        forms = [on_meta(batch) for batch in batches]
        described = [_describe(form) for form in forms]
        frozen = tuple([not parameter.requires_grad for parameter in self.parameters()])
        key = (tuple(described), backward, self.training, frozen)
        plan = self._plans.pop(key, None)
        if plan is None:
            self._shapes.follow(self)
            distinct = {text: self._shapes.forms(form) for text, form in zip(described, forms)}
            columns = zip(*[distinct[text] for text in described])
            boundaries = [Boundary(column, f"the output of stage {j - 1}") for j, column in enumerate(columns)]
            plan = self._make(boundaries, backward, self.chunks)
            known = [backward, self.training, self.checkpoint, *[list(map(_describe, b.forms)) for b in boundaries]]
            plan.checksum = zlib.crc32(repr(known).encode())
        self._plans[key] = plan
        while len(self._plans) > _MOST_PLANS:  # Each holds the buffers of its micro-batches.
            del self._plans[next(iter(self._plans))]
        return plan

    def _verify_schedule_of(self, chunks: int) -> None:
        """Raises now, and not at the first step, if the schedule cannot do with so many micro-batches."""
        sample = Boundary([Batch((torch.empty(1, device="meta"),))] * chunks, "a sample")
        self._make([sample] * (len(self.balance) + 1), backward=True, chunks=chunks)

    def _make(self, boundaries: list[Boundary], backward: bool, chunks: int) -> Plan:
        return make_plan(
            self._schedule,
            self._partitions,
            self._processes,
            self.device,
            boundaries,
            chunks=chunks,
            backward=backward,
        )

    def _run(self, plan: Plan, finish: Callable[[int, Batch], Tensor]) -> None:
        m = len(plan.batches)
        stop = checkpoint_stop(self.checkpoint, m) if self.training else 0
        call = Call(plan.batches, stop, finish)
        layout = inspect_skip_layout([list(partition.modules()) for partition in self._shapes.partitions])
        for partition, module in zip(self._partitions, plan.modules):
            partition.follow(layers_of(self), self.training)
            module.begin(call, layout)
        numbers, through = torch.arange(m), False
        try:
            with mini_batch(m, self, self._processes.replicas):
                plan.schedule.step(i=numbers, target=numbers)
                through = True
        except Exception as error:
            self._plans.clear()
            if through:
                with self._processes.exchanging("the statistics of the replicas", self._processes.replicas):
                    raise
            if error.__cause__ is not None:  # A layer's own error, which PyTorch has put into one of its own.
                raise error.__cause__ from error.__cause__.__cause__
            self._processes.lost(error, *plan.awaited(self._processes.owner))
        finally:
            plan.end()


#: As many shapes of mini-batches are prepared for: training, its last mini-batch, and evaluation likewise.
_MOST_PLANS = 4


def _verify_target(target: Any, targets: list[Batch], m: int, rows: int) -> None:
    its = _rows(targets)
    if (len(targets), its) != (m, rows):
        raise ValueError(
            f"input and target must have the same size in dimension 0, the batch, but have {rows} and {its}"
        )


def _rows(batches: list[Batch]) -> int:
    """The size of a mini-batch, which was split: of the leaves that are not passed whole, so of the most varied."""
    return max(
        sum([len(leaf) for leaf in column if leaf is not None and leaf.dim()])
        for column in zip(*[batch.leaves for batch in batches])
    )


def _empty(form: Batch, device: torch.device) -> Batch:
    leaves = [None if leaf is None else torch.empty_like(leaf, device=device) for leaf in form.leaves]
    return form.replace(tuple(leaves))


def _describe(form: Batch) -> str:
    leaves = [leaf if leaf is None else (leaf.dtype, tuple(leaf.shape), leaf.requires_grad) for leaf in leaves_of(form)]
    return f"{form.spec} {leaves}"
