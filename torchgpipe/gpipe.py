"""Wrap a Sequential in a module that runs it as a pipeline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchgpipe.batch.given import order_of
from torchgpipe.batch.loss import Losses, LossFunction, Weight, verify_loss
from torchgpipe.batch.loss_proof import LossProof
from torchgpipe.batch.microbatch import (
    Batch,
    WholeArguments,
    gather,
    rows_of,
    scatter,
    sizes_of,
    tell_of_few,
    values_of,
    window_of,
)
from torchgpipe.cell.layers_column import Mechanisms
from torchgpipe.cell.views import divide
from torchgpipe.devices.links import verify_links
from torchgpipe.devices.memory import bytes_of
from torchgpipe.devices.typing import Device
from torchgpipe.drive.autograd import ForwardPass
from torchgpipe.drive.step import run_step
from torchgpipe.gradients.failed_step import all_or_nothing
from torchgpipe.model.attached import with_attached
from torchgpipe.model.comparison import Comparison
from torchgpipe.model.old_keys import take_old_keys
from torchgpipe.model.partition import Partition, layers_of, split
from torchgpipe.model.placement import move_buffers, place
from torchgpipe.model.settings import (
    CheckpointMode,
    LayerNames,
    checkpoint_stop,
    fixed,
    verify_checkpoint_or_layers,
    verify_chunks,
)
from torchgpipe.model.values import copy_without_graph, mapped
from torchgpipe.model.verify import (
    verify_balance,
    verify_devices,
    verify_divided,
    verify_initialised,
    verify_layer_names,
    verify_module,
    verify_threads,
)
from torchgpipe.norms.deferred import DeferredBatchNorm, verify_unshared
from torchgpipe.norms.mini_batch import mini_batch
from torchgpipe.offload.host_memory import HostMemory
from torchgpipe.offload.verify import cycled, verify_fits, verify_home, verify_offload
from torchgpipe.proof.sequential import SequentialProof
from torchgpipe.replay.random_numbers import RandomNumbers
from torchgpipe.schedule import Program, Schedule, places_of, program_of, verified
from torchgpipe.schedule.programs import usual
from torchgpipe.skip.verify import verify_skippables

__all__ = ["GPipe"]


class GPipe(nn.Module):
    """Train a :class:`~torch.nn.Sequential` on several devices, by pipeline parallelism and checkpointing.

    The layers are split into partitions, one for each device. A mini-batch is split into micro-batches, which
    follow each other through the partitions, so that the devices work at the same time. Outputs and gradients
    equal those of the plain model::

        model = GPipe(nn.Sequential(a, b, c, d), balance=[1, 1, 2], chunks=8)
        loss_fn(model(input), target).backward()

    The method is `GPipe <https://arxiv.org/abs/1811.06965>`_, implemented in PyTorch as
    `torchgpipe <https://arxiv.org/abs/2004.09910>`_ describes.

    The layers keep their names: parameters, modules and ``state_dict`` are named as in ``module``, whatever the
    balance. A layer can be replaced under its name: a call runs the layers that are registered then.
    Indexing, iteration and ``len`` go over the layers; ``model[0] = layer`` also moves the layer to its device.

    Args:
        module: the model; its parameters are moved to their devices
        balance: the number of layers in each partition
        devices: the device of each partition; a device may occur several times, and surplus devices are ignored
            (default: all accelerators of the machine, or the CPU for every partition if there is none)
        chunks: the number of micro-batches to split a mini-batch into, as :func:`torch.chunk` does
        checkpoint: the micro-batches that keep only the input of each partition and are recomputed during backward:
            ``'always'`` or True all, ``'except_last'`` all but the last, which would be recomputed at once, ``'never'``
            or False none. Or a list of names of layers: each of these layers keeps only its input, in all
            micro-batches, and is recomputed by itself; the other layers are not recomputed
        deferred_batch_norm: whether batch norms track the running statistics of the whole mini-batch instead of
            those of each micro-batch; see :class:`~torchgpipe.batchnorm.DeferredBatchNorm`
        schedule: for :meth:`step`, the name of a schedule (``'GPipe'``, ``'1F1B'``, ``'Interleaved1F1B'``,
            ``'ZeroBubble'``, ``'V-Min'``, ``'V-Half'``, ``'ZB-V'`` or ``'LayerMajor'``), a program of your own, such as
            :func:`torchgpipe.schedule.fastest` makes, or a function that takes the number of micro-batches and the
            places of the partitions (default: ``'1F1B'``, or under ``offload`` ``'LayerMajor'``)
        loss_fn: for :meth:`step`, takes the output and the target of a micro-batch, and returns the loss, or a pair of
            the loss and other values. The loss is a mean over rows or labels, or for losses of PyTorch what they say;
            the first step proves any other function on two micro-batches together
        weight: for :meth:`step`, takes the target of a micro-batch, on the device where the caller has it, and returns
            the weight of its loss in the mean over all micro-batches; for a mean over tokens, the number of tokens
            (default: its integers that are not ``loss_fn.ignore_index`` or -100, each with its class weight, or its
            rows)
        reduce: for :meth:`step`, ``'mean'`` or ``'sum'``: how the losses of micro-batches are joined (default: as
            ``loss_fn`` says, if it is one of PyTorch, or else the weighted mean)
        no_chunk: names of arguments of the first layer that every micro-batch gets whole, as if in :class:`NoChunk`;
            ``'target'`` is the target of :meth:`step`
        offload: whether parameters stay in host memory, for :meth:`step`, and for calls without a gradient: those of a
            partition come to its device when it computes, and leave afterwards, so a model may be larger than all
            devices. Devices are then used in turn, partition ``j`` on ``devices[j % len(devices)]``. What cells hand to
            each other and what recomputation keeps waits in host memory, too; with ``'weights'``, on the devices
        slots: under ``offload``, the partitions whose parameters have room on a device at a time; or a list of one
            number for each device, in the order of ``devices``
        pin: under ``offload``, the bytes of parameters that may be pinned in host memory, for all devices together or a
            list as above (default: half of the memory that is free), which CUDA copies beside the computation

    Attributes:
        balance (list[int]): the number of layers in each partition; read-only
        devices (list[torch.device]): the device of each partition; read-only
        chunks (int): the number of micro-batches; may be set between two calls
        checkpoint (str | tuple[str, ...]): the checkpoint mode, or names of layers; may be set between two calls
        schedule (str | list | Callable): the schedule of a step; may be set between two steps
        partitions (list[nn.Sequential]): views on the layers of each partition

    Raises:
        TypeError: ``module`` is not a :class:`~torch.nn.Sequential`, ``balance`` is not a list of integers, ``chunks``
            is not an integer, or a batch norm cannot be deferred.
        ValueError: the balance does not fit the module, an argument is out of its range, layers cannot be partitioned
            because they share parameters across devices or have the name of an attribute of the pipeline, or there is a
            loss function and the devices do not fit the schedule.
        IndexError: there are fewer devices than partitions.
    """

    # `compat.pipe.Pipe` is the same pipeline with other conventions, and overrides these five: how layers are counted,
    # how inputs are split and outputs gathered, and how values go from layer to layer, in a partition and after
    # `unwrap`.
    _layers_of = staticmethod(layers_of)
    _scatter = staticmethod(scatter)
    _gather: Callable[[list[Batch]], Any] = staticmethod(gather)
    _partition_type: type[Partition] = Partition
    _sequential_type: type[nn.Sequential] = nn.Sequential

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: CheckpointMode | LayerNames | bool = "except_last",
        deferred_batch_norm: bool = False,
        schedule: Schedule | None = None,
        loss_fn: LossFunction | None = None,
        weight: Weight | None = None,
        reduce: Literal["mean", "sum"] | None = None,
        no_chunk: str | Collection[str] = (),
        offload: bool | Literal["weights"] = False,
        slots: int | Sequence[int] = 2,
        pin: int | Sequence[int | None] | None = None,
    ) -> None:
        super().__init__()
        verify_module(module)
        verify_skippables(module)
        self._balance = verify_balance(balance, len(self._layers_of(module)))
        self._chunks = verify_chunks(chunks)
        self._checkpoint = verify_checkpoint_or_layers(checkpoint, self._layers_of(module))
        limits = verify_offload(offload, slots, pin)
        if offload:
            verify_home(module.named_parameters())
            devices = cycled(devices, len(self.balance))
        self._devices = verify_devices(devices, len(self.balance))
        self._host_memory = None if limits is None else HostMemory(self._devices, *limits)
        verify_links(self._devices, 2)
        self._watched: set[Any] = set()
        self.training = module.training
        verify_initialised(module, self.checkpoint)
        self._mechanisms = Mechanisms()
        verify_loss(loss_fn, weight, reduce)
        # In a tuple, because a module such as nn.MSELoss() would become a layer.
        self._loss = loss_fn, weight, reduce
        self._loss_proof = LossProof()
        self._whole = WholeArguments(no_chunk, next(iter(self._layers_of(module).values()), None))
        self.schedule = schedule if schedule is not None else usual(offload=bool(offload))
        self._defers = deferred_batch_norm
        self._unwrapped = False
        self._begun = False
        self._partitions: list[Partition] = []
        verify_layer_names(self, module)
        verify_threads(module.modules(), self.devices)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        self._partitions = split(self._layers_of(module), self.balance, self._partition_type)
        verify_unshared(self._partitions)
        if limits is not None:
            sizes = [
                (partition._label, self._devices[partition._index], bytes_of(with_attached(partition.parameters())))
                for partition in self._partitions
            ]
            verify_fits(sizes, limits[0])
        place(self._partitions, self.devices, offload=bool(offload))
        for name, layer in module._modules.items():
            self.add_module(name, layer)

    @property
    def balance(self) -> list[int]:
        """The number of layers in each partition."""
        return list(self._balance)

    @balance.setter
    def balance(self, balance: Any) -> None:
        raise fixed(self, "balance", f"wrap them again: {type(self).__name__}(model.unwrap(), ...)")

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition."""
        return list(self._devices)

    @devices.setter
    def devices(self, devices: Any) -> None:
        raise fixed(self, "devices", f"wrap them again: {type(self).__name__}(model.unwrap(), ...)")

    @property
    def chunks(self) -> int:
        """The number of micro-batches to split the next mini-batch into; deferred batch norms follow it."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = verify_chunks(chunks)
        if self._defers:
            for norm in self.modules():
                if isinstance(norm, DeferredBatchNorm):
                    norm.chunks = self._chunks

    @property
    def checkpoint(self) -> CheckpointMode | tuple[str, ...]:
        """The checkpoint mode of the next mini-batch, or the names of the layers that are checkpointed."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: CheckpointMode | LayerNames | bool) -> None:
        mode = verify_checkpoint_or_layers(checkpoint, self._layers_of(self))
        verify_initialised(self, mode)
        self._checkpoint = mode

    @property
    def schedule(self) -> Schedule:
        """The schedule of the next :meth:`step`."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        schedule = verified(schedule)
        if self._loss[0] is not None:  # The devices of a pipeline without a loss, and so without steps, need not fit.
            program_of(schedule, self._chunks if callable(schedule) else None, self._places)
        self._schedule = schedule

    @property
    def partitions(self) -> list[Partition]:
        """Views on the layers of each partition, as they are registered now."""
        layers = self._layers_of(self)
        verify_divided(layers, self._partitions)
        for partition in self._partitions:
            partition.follow(layers, self.training)
        return self._partitions

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run a mini-batch through the pipeline.

        Args:
            *inputs: the arguments of the first layer: tensors of shape (batch, ...), None, :class:`NoChunk`, and
                tuples, lists and dicts of these; or :class:`MicroBatches`. Tensors on other devices are copied to
                ``devices[0]``.
            **keywords: keyword arguments of the first layer, of the same types, as in ``model(x, mask=mask)``

        Returns:
            the output of the last layer, gathered along dimension 0, on ``devices[-1]``; of :class:`MicroBatches`, a
            list of the output of each

        Raises:
            TypeError: an input, or the output of a partition, has another type.
            ValueError: the input tensors differ in dimension 0, or the outputs of micro-batches in structure.
            RuntimeError: the pipeline has been unwrapped.
            Exception: any exception of a layer is raised unchanged, with a note that names the micro-batch and the
                partition.
        """
        if torch.compiler.is_dynamo_compiling():
            # The compiler would trace the engine. Layers and partitions that were compiled themselves stay compiled.
            from torchgpipe.devices.uncompiled import uncompiled

            return uncompiled(self.forward, *inputs, **keywords)
        self._refuse_unwrapped()
        if not self._partitions:
            if keywords:
                raise TypeError(f"there is no layer that could take the keyword inputs {[*keywords]}")
            return Batch.of(inputs[0] if len(inputs) == 1 else inputs, "input").value
        verify_threads((*self._partitions, *self.modules()), self.devices)
        inputs, keywords = self._whole.wrap(inputs, keywords)
        batches = self._scatter(inputs, self.chunks, self.devices[0], keywords)
        self._begin((inputs, keywords), 5)
        gathered = self._gather if window_of((inputs, keywords)) is None else values_of
        if self._host_memory is not None:
            return self._forward_from_host_memory(batches, gathered)
        with self._mechanisms.lock.held(), mini_batch(len(batches)):
            views, devices, checkpointed = self._views(len(batches))
            ForwardPass(views, devices, batches, checkpointed, self._mechanisms).run()
            return gathered(batches)

    def _forward_from_host_memory(self, batches: list[Batch], gather: Callable[[list[Batch]], Any]) -> Any:
        """Run a mini-batch without a graph: the forward half of the program, which is all that a step needs."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"under offload=True, a {type(self).__name__} trains by step(): its backward brings the weights back; "
                "call model.step(input, target), evaluate in torch.no_grad(), or use torchgpipe.pipelined(module, "
                "sample, offload=True), which takes loss.backward(), too"
            )
        outputs: dict[int, Batch] = {}

        def finish(i: int, output: Batch) -> Tensor:
            outputs[i] = output
            return torch.zeros(1)

        def gathered() -> Any:
            return gather([outputs[i] for i in range(len(batches))])

        program = program_of("LayerMajor", len(batches), self._places)
        with mini_batch(len(batches)):
            return self._run_program(self._views(len(batches)), batches, program, "LayerMajor", finish, gathered)

    def _run_program(
        self,
        views: tuple[list[Partition], list[torch.device], list[int]],
        inputs: list[Batch],
        program: Program,
        schedule: Schedule,
        finish: Callable[[int, Batch], Tensor],
        gathered: Callable[[], Any],
    ) -> Any:
        partitions, devices, checkpointed = views
        kind: Any = None  # The first mini-batch of a kind is watched, see `residence`.
        if self._host_memory is not None:
            kind = torch.is_grad_enabled(), *[(id(module), module.training) for module in self.modules()]
        result = run_step(
            partitions,
            devices,
            inputs,
            program,
            finish,
            self._mechanisms,
            gather=gathered,
            checkpointed=checkpointed,
            backward=torch.is_grad_enabled(),
            schedule=schedule,
            random_numbers=RandomNumbers(self, devices),
            host_memory=self._host_memory,
            watches=kind is not None and kind not in self._watched,
        )
        self._watched.add(kind)
        return result

    def step(self, input: Any, target: Any = None, *, scaler: torch.amp.GradScaler | None = None) -> Any:
        """Run a mini-batch forward and backward under the schedule; under :func:`torch.no_grad` only forward. ::

            layers = nn.Sequential(a, b, c, d)
            model = GPipe(layers, balance=[2, 2], chunks=8, schedule="1F1B", loss_fn=loss_fn)
            loss = model.step(input, target=target)
            optimizer.step()
            optimizer.zero_grad()

        Gradients are added to ``.grad``, as ``backward()`` does. A step that fails leaves ``.grad``, buffers,
        attributes of layers and random numbers as they were, so that it may run again. Each
        micro-batch has a seed in each step, so dropout is the same for any balance, schedule, checkpoint mode and
        number of devices. A micro-batch whose backward through a partition comes next on its device is not recomputed
        there.

        Args:
            input: a tensor of shape (batch, ...), or nested tensors as in :meth:`forward`; one value, the argument of
                the first layer; or :class:`MicroBatches`, such as a window of accumulation
            target: the target of the loss function: tensors of shape (batch, ...), lists with an item for each row,
                :class:`NoChunk`, and tuples, lists and dicts of these; of any shapes if there is one micro-batch; None
                if the loss function needs none; :class:`MicroBatches` if the input is
            scaler: scales the loss before backward, so that small gradients in half precision do not vanish; afterwards
                call ``scaler.step(optimizer)`` and ``scaler.update()``, as usual

        Returns:
            the loss of all micro-batches, a tensor without dimensions, on ``devices[-1]``. If the loss function returns
            a pair, so does a step: the loss, and the other values of all micro-batches, without a graph and gathered
            along dimension 0. Tensors without dimensions, such as counts, become a tensor of shape (micro-batches,).
            Of :class:`MicroBatches`, the other values are a list of those of each.

        Raises:
            TypeError, ValueError: the input or the target does not fit.
            ValueError: ``loss_fn`` gives another number for two micro-batches together than the mean of what it gives
                for each; ``.grad`` is as it was before.
            Exception: any exception of a layer or the loss function, with a note of the micro-batch and partition.
        """
        if torch.compiler.is_dynamo_compiling():
            from torchgpipe.devices.uncompiled import uncompiled

            return uncompiled(self.step, input, target, scaler=scaler)
        with self._mechanisms.lock.held(alone=True), all_or_nothing(self, self._loss[0], self._devices):
            return self._step(input, target, scaler)

    def _step(self, input: Any, target: Any, scaler: torch.amp.GradScaler | None) -> Any:
        if self._loss[0] is None:
            raise ValueError(f"a step needs a loss: {type(self).__name__}(..., loss_fn=...)")
        if not self._partitions:
            raise ValueError("a step needs layers, but there are none in the pipeline")
        (input,), _ = self._whole.wrap((input,), {})
        self._refuse_unwrapped()
        verify_threads((*self._partitions, *self.modules()), self.devices)
        inputs = self._scatter((input,), self.chunks, self.devices[0], {})
        self._begin(input, 4)
        losses = self._losses(input, target, self.chunks, self._loss_proof)
        program = program_of(self._schedule, len(inputs), self._places, order_of(window_of(input), self))
        views = self._views(len(inputs))
        finish = losses.finish if scaler is None else lambda i, output: scaler.scale(losses.finish(i, output))
        with mini_batch(len(inputs)):
            return self._run_program(views, inputs, program, self._schedule, finish, losses.result)

    def _losses(self, input: Any, target: Any, chunks: int, proof: LossProof | None = None) -> Losses:
        sizes, whole = sizes_of(input, chunks), "target" in self._whole.names
        return Losses(*self._loss, target, sizes, window_of(input), self.devices[-1], whole=whole, proof=proof)

    def verify(self, *inputs: Any, target: Any = None, **keywords: Any) -> Comparison:
        """Compare the pipeline with its own layers on a mini-batch, without side effects. ::

            print(model.verify(input, target=target))

        The layers run one by one, micro-batch by micro-batch. The table compares the output, changed buffers and the
        gradients of all parameters; the loss of a step, with its buffers and gradients; and without a pipeline, the
        output and the loss of all rows together with those of the micro-batches, with their gradients, unless there
        are batch norms or buffers that change. All of this is done in training and in evaluation. If layers draw random
        numbers in training, nothing is compared there, and the table says so.

        Args:
            *inputs: as for the model
            target: as for :meth:`step`, which is also compared if a target is given and there is one input
            **keywords: as for the model

        Returns:
            a table to print; ``is_equal`` says whether the two agree, and ``faults`` lists what differs

        Raises:
            RuntimeError: weights are in host memory, or the pipeline has been unwrapped.
            ValueError: the output has nan without a pipeline, which shows nothing.
            Exception: what a layer raises without a pipeline.
        """
        self._refuse_unwrapped()
        if self._host_memory is not None:
            raise RuntimeError(
                "verify() runs the layers without a program, so it cannot bring weights from host memory; make a GPipe "
                "of a smaller model of the same layers without offload, or use torchgpipe.pipelined(..., offload=True),"
                " whose proof can"
            )
        first = self.devices[0] if self._partitions else torch.device("cpu")
        inputs, keywords = self._whole.wrap(inputs, keywords)

        splits = window_of((inputs, keywords)) is None

        def fresh(value: Any) -> Any:  # Layers may work in place.
            return mapped(value, copy_without_graph, objects=True)

        return SequentialProof(
            self,
            splits=splits,
            batches=lambda chunks: self._scatter(fresh(inputs), chunks, first, fresh(keywords)),
            gather=self._gather if splits else values_of,
            pipeline=lambda: self.forward(*fresh(inputs), **fresh(keywords)),
            loss=partial(self._losses, inputs[0], target)
            if target is not None and self._loss[0] is not None and len(inputs) == 1
            else None,
            step=lambda: self.step(fresh(inputs[0]), target),
        ).run()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each partition separately, with the arguments of :func:`torch.compile`.

        The pipeline itself is not compiled, not even by ``torch.compile(model)`` or in a compiled function that calls
        the model. Single layers can be compiled as well: ``layer.compile()``.

        Each partition has its own limit of recompilations, unless ``isolate_recompiles=False``. Before PyTorch 2.13 all
        partitions share one limit, and the rest of a longer pipeline stays uncompiled: raise
        ``torch._dynamo.config.recompile_limit``.
        """
        for partition in self.partitions:
            partition.compile(*args, **kwargs)

    def unwrap(self) -> nn.Sequential:
        """Return the layers as a plain Sequential, for instance to wrap them again with another balance. ::

            optimizer = torch.optim.Adam(model.parameters())
            ...
            model = GPipe(model.unwrap(), balance=[1, 3], chunks=8)
            optimizer.load_state_dict(optimizer.state_dict())

        The Sequential has the same layers as the pipeline, with their names, modes and devices. So an optimizer keeps
        its parameters and its state. If wrapping again moves parameters to other devices, the last line moves the
        optimizer's state to them, and changes nothing else.

        Batch norms that ``deferred_batch_norm=True`` has deferred are replaced by plain ones with the same parameters,
        buffers and hooks. Hooks on the pipeline itself and on its partitions are not carried over.

        Afterwards this pipeline still shows the layers, but calling it raises an error.

        Returns:
            a new Sequential
        """
        self._unwrapped = True
        module = self._sequential_type(OrderedDict(self.named_children()))
        module.training = self.training
        if self._host_memory is not None:
            move_buffers(module, torch.device("cpu"))
        return DeferredBatchNorm.revert_deferred_batch_norm(module) if self._defers else module

    def _begin(self, inputs: Any, stacklevel: int) -> None:
        """Look at the rows of the first mini-batch in training; see `tell_of_few`."""
        if not self._begun and torch.is_grad_enabled():
            self._begun = True
            if len(set(self._devices)) > 1 and window_of(inputs) is None:
                tell_of_few(rows_of(inputs), self._chunks, stacklevel)

    def _refuse_unwrapped(self) -> None:
        if self._unwrapped:
            raise RuntimeError(
                f"this {type(self).__name__} has been unwrapped, and its layers may be on other devices by now; call "
                "the module that unwrap() has returned, or wrap that again"
            )

    def _views(self, m: int) -> tuple[list[Partition], list[torch.device], list[int]]:
        """Return the partitions, their devices, and how many of ``m`` micro-batches are checkpointed in each of them.

        If layers are checkpointed by name, partitions are divided, so that each of these layers is alone.
        """
        partitions, checkpoint = self.partitions, self._checkpoint if self.training else "never"
        if isinstance(checkpoint, str):
            return partitions, self.devices, [checkpoint_stop(checkpoint, m)] * len(partitions)
        views = divide(partitions, set(checkpoint))
        checkpointed = [0 if set(checkpoint).isdisjoint(view._modules) else m for view in views]
        return views, [self._devices[view._index] for view in views], checkpointed

    @property
    def _pipeline_devices(self) -> list[torch.device]:
        """The devices, for a pipeline that has this one as a layer."""
        return self._devices

    @property
    def _places(self) -> list[int]:
        """The index of the device of each partition, for programs."""
        return places_of(self._devices)

    def __len__(self) -> int:
        return len(self._layers_of(self))

    def __getitem__(self, index: int | slice) -> nn.Module:
        layers = list(self._layers_of(self).items())
        if not isinstance(index, slice):
            return layers[index][1]
        part = self._sequential_type()
        part._modules.update(layers[index])
        return part

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        self.set_submodule(list(self._layers_of(self))[index], layer)
        place(self.partitions, self.devices, offload=self._host_memory is not None)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers_of(self).values())

    def extra_repr(self) -> str:
        """Return the settings that ``repr(model)`` shows before the layers."""
        devices = list(map(str, self._devices))
        return f"balance={self._balance}, devices={devices}, chunks={self._chunks}, checkpoint={self._checkpoint!r}"

    # The pipeline manages the place of parameters and buffers; only their dtype may change.

    def cuda(self, device: Device | None = None) -> GPipe:
        """Refuse to move the layers to a GPU: the pipeline has placed them.

        Args:
            device: ignored

        Raises:
            TypeError: always; choose devices with ``devices=`` of the constructor.
        """
        raise _moving_denied(self)

    def cpu(self) -> GPipe:
        """Refuse to move the layers to the CPU: the pipeline has placed them.

        To load the weights on a machine without these devices, save ``state_dict()`` and load it with ``map_location``.

        Raises:
            TypeError: always; use ``model.unwrap().cpu()`` to move the plain model.
        """
        raise _moving_denied(self)

    def xpu(self, device: Device | None = None) -> GPipe:
        """Refuse to move the layers to an XPU: the pipeline has placed them.

        Args:
            device: ignored

        Raises:
            TypeError: always.
        """
        raise _moving_denied(self)

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Cast parameters and buffers, as ``to(dtype)`` does on any module.

        Raises:
            TypeError: the arguments include a device, or a tensor, which has a device.
        """
        if any(isinstance(arg, (Tensor, torch.device, str, int)) for arg in args if not isinstance(arg, bool)):
            raise _moving_denied(self)
        if kwargs.get("device") is not None or kwargs.get("tensor") is not None:
            raise _moving_denied(self)
        return super().to(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> GPipe:
        # Moving a module around this one calls only this method of its children, and neither `to` nor `cuda`.
        for device in {*self.devices, *([torch.device("cpu")] if self._host_memory is not None else [])}:
            probe = torch.empty(0, device=device)
            if fn(probe).device != probe.device:
                raise _moving_denied(self)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _replicate_for_data_parallel(self) -> GPipe:
        # DataParallel calls this method of every module inside, in the caller's thread, before it runs anything.
        raise RuntimeError(
            f"nn.DataParallel cannot be around a {type(self).__name__}: it would run a copy of all layers on each GPU, "
            "where the pipeline already uses several; leave nn.DataParallel out, or for copies of the whole pipeline "
            "use nn.parallel.DistributedDataParallel with a process for each"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load keys of the original as well, ``partitions.<j>.<name>``, whatever the balance at the time of saving."""
        error_msgs: list[str] = args[-1]
        take_old_keys(state_dict, prefix, self._old_layers(), error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _old_layers(self) -> list[str] | None:
        """Return the layers whose names old keys may have."""
        return [*self._layers_of(self)]


def _moving_denied(pipeline: GPipe) -> TypeError:
    return TypeError(
        f"denied to move parameters and buffers, because {type(pipeline).__name__} should manage device placement; "
        "choose devices when it is made, or unwrap() it and wrap the layers again"
    )
