"""The pipeline as users see it: a module around a Sequential."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.device import canonical_device, default_devices
from torchgpipe.devices.typing import Device
from torchgpipe.engine.pipeline import Mechanisms, Pipeline
from torchgpipe.model.data_parallel import verify_layers
from torchgpipe.model.microbatch import Batch, gather, scatter
from torchgpipe.model.old_keys import OldKey, by_name, take_old_keys
from torchgpipe.model.partition import Partition, layers_of, split
from torchgpipe.model.placement import place
from torchgpipe.model.settings import CheckpointMode, checkpoint_stop, fixed, verify_checkpoint, verify_chunks
from torchgpipe.model.verify import verify_balance, verify_divided, verify_module, verify_names
from torchgpipe.norms.deferred import DeferredBatchNorm
from torchgpipe.norms.mini_batch import mini_batch
from torchgpipe.skip.verify import verify_skippables

__all__ = ["GPipe"]


class GPipe(nn.Module):
    """Trains a :class:`~torch.nn.Sequential` on several devices, by pipeline parallelism and checkpointing.

    The layers are split into partitions, one for each device. A mini-batch is split into micro-batches, which
    follow each other through the partitions, so that the devices work at the same time. Outputs and gradients
    are those of the plain model::

        model = GPipe(nn.Sequential(a, b, c, d), balance=[1, 1, 2], chunks=8)
        loss_fn(model(input), target).backward()

    The method is that of `GPipe <https://arxiv.org/abs/1811.06965>`_, on PyTorch as described by
    `torchgpipe <https://arxiv.org/abs/2004.09910>`_.

    The layers keep their names: parameters, modules and ``state_dict`` are named as in ``module``, whatever the
    balance. They may be replaced under these names; the one that is registered at a call is the one that runs.
    Indexing, iteration and ``len`` go over the layers.

    Args:
        module: the model; its parameters are moved to their devices
        balance: the number of layers in each partition
        devices: the device of each partition; more are ignored, and one may occur several times (default: all
            accelerators of the machine, or the CPU for every partition where there is none)
        chunks: the number of micro-batches that a mini-batch is split into, as :func:`torch.chunk` does
        checkpoint: which micro-batches keep only the input of each partition and are computed again at
            backward: ``'always'`` all, ``'except_last'`` all but the last, which would be computed again at once,
            or ``'never'`` any
        deferred_batch_norm: whether batch norms track the running statistics of the whole mini-batch instead of
            those of each micro-batch; see :class:`~torchgpipe.batchnorm.DeferredBatchNorm`

    Attributes:
        balance (list[int]): the number of layers in each partition; read-only
        devices (list[torch.device]): the device of each partition; read-only
        chunks (int): the number of micro-batches; can be set between two calls
        checkpoint (str): the checkpoint mode; can be set between two calls
        partitions (list[nn.Sequential]): views on the layers of each partition

    Raises:
        TypeError: ``module`` is not a :class:`~torch.nn.Sequential`, ``balance`` no list of integers, or ``chunks`` no
            integer.
        ValueError: the balance does not fit the module, another argument is out of its range, or layers cannot
            be partitioned because they share parameters or have a name that the pipeline needs.
        IndexError: there are fewer devices than partitions.
    """

    # A front with other customs has others: of what the layers are, how values become micro-batches and micro-batches
    # an output, and how layers follow each other, in a partition and on their own.
    _layers_of = staticmethod(layers_of)
    _scatter = staticmethod(scatter)
    _gather = staticmethod(gather)
    _partition_type: type[Partition] = Partition
    _sequential_type: type[nn.Sequential] = nn.Sequential

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: CheckpointMode = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        verify_module(module)
        verify_skippables(module)
        self._balance = verify_balance(balance, len(self._layers_of(module)))
        self._chunks = verify_chunks(chunks)
        self._checkpoint = verify_checkpoint(checkpoint)
        self._devices = _verify_devices(devices, len(self.balance))
        self.training = module.training
        _verify_initialised(module, self.checkpoint)
        self._mechanisms = Mechanisms()
        self._defers = deferred_batch_norm
        self._unwrapped = False
        self._partitions: list[Partition] = []
        verify_names(self, module)
        verify_layers(module.modules(), self.devices)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        self._partitions = split(self._layers_of(module), self.balance, self._partition_type)
        place(self._partitions, self.devices)
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
        """The number of micro-batches that the next mini-batch is split into; deferred batch norms follow it."""
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
        mode = verify_checkpoint(checkpoint)
        _verify_initialised(self, mode)
        self._checkpoint = mode

    @property
    def partitions(self) -> list[Partition]:
        """Views on the layers of each partition, up to date with those that are registered now."""
        layers = self._layers_of(self)
        verify_divided(layers, self._partitions)
        for partition in self._partitions:
            partition.follow(layers, self.training)
        return self._partitions

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs a mini-batch through the pipeline.

        Args:
            *inputs: a tensor of shape (batch, ...), or tuples, lists and dicts of such tensors, None, and
                :class:`NoChunk`; several inputs are the arguments of the first layer. Inputs on another device
                are copied to ``devices[0]``.
            **keywords: keyword arguments of the first layer, of the same kinds, as in ``model(x, mask=mask)``

        Returns:
            what the last layer returns, gathered along dimension 0, on ``devices[-1]``

        Raises:
            TypeError: an input, or what a layer returns at the end of a partition, is something else.
            ValueError: the tensors differ in dimension 0.
            RuntimeError: the pipeline has been unwrapped.
            Exception: what a layer raises, with a note that tells the micro-batch and the partition.
        """
        if torch.compiler.is_dynamo_compiling():
            # It would trace the engine. Layers and partitions that are compiled by themselves stay so.
            from torchgpipe.devices.uncompiled import uncompiled

            return uncompiled(self.forward, *inputs, **keywords)
        if self._unwrapped:
            raise RuntimeError(
                f"this {type(self).__name__} has been unwrapped, and its layers may be on other devices by now; call "
                "the module that unwrap() has returned, or wrap that again"
            )
        if not self._partitions:
            if keywords:
                raise TypeError(f"there is no layer that could take the keyword inputs {[*keywords]}")
            return Batch.of(inputs[0] if len(inputs) == 1 else inputs, "input").value
        verify_layers(self.modules(), self.devices)
        batches = self._scatter(inputs, self.chunks, self.devices[0], keywords)
        with mini_batch(len(batches), self):
            pipeline = Pipeline(self.partitions, self.devices, len(batches), self._mechanisms)
            pipeline.run(batches, self._checkpoint_stop(len(batches)))
            return self._gather(batches)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each partition by itself, with the arguments of :func:`torch.compile`.

        The pipeline around them is left out: ``torch.compile(model)``, or a compiled function that calls the model,
        runs it as it is. Single layers can be compiled as well.
        """
        for partition in self.partitions:
            partition.compile(*args, **kwargs)

    def unwrap(self) -> nn.Sequential:
        """Gives the layers back as a plain Sequential, to be wrapped again under another balance, say. ::

            optimizer = torch.optim.Adam(model.parameters())
            ...
            model = GPipe(model.unwrap(), balance=[1, 3], chunks=8)
            optimizer.load_state_dict(optimizer.state_dict())

        Its layers are those of the pipeline, under their names, in their modes, and on the devices that they are
        on. So an optimizer keeps its parameters and its state. The last line is for parameters that have come to
        another device: it brings what the optimizer keeps for them there, and changes nothing else.

        Batch norms that were deferred by ``deferred_batch_norm=True`` are plain again, new layers with the same
        parameters, buffers and hooks. Hooks on the pipeline itself and on its partitions stay behind.

        From now on this pipeline shows the layers, but runs them no more.

        Returns:
            a new Sequential
        """
        self._unwrapped = True
        module = self._sequential_type(OrderedDict(self.named_children()))
        module.training = self.training
        return DeferredBatchNorm.revert_deferred_batch_norm(module) if self._defers else module

    def _checkpoint_stop(self, m: int) -> int:
        return checkpoint_stop(self.checkpoint, m) if self.training else 0

    def __len__(self) -> int:
        return len(self._layers_of(self))

    def __getitem__(self, index: int | slice) -> nn.Module:
        layers = list(self._layers_of(self).items())
        if not isinstance(index, slice):
            return layers[index][1]
        part = self._sequential_type()
        part._modules.update(layers[index])
        return part

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers_of(self).values())

    def extra_repr(self) -> str:
        """Return what ``repr(model)`` shows before the layers: how they are divided, and where the parts are."""
        devices = list(map(str, self._devices))
        return f"balance={self._balance}, devices={devices}, chunks={self._chunks}, checkpoint={self._checkpoint!r}"

    # The pipeline manages the place of parameters and buffers; only their dtype may change.

    def cuda(self, device: Device | None = None) -> GPipe:
        """Refuse to move the layers to a GPU: they are on the devices of the pipeline.

        Args:
            device: is not looked at

        Raises:
            TypeError: always; ``devices=`` of the constructor chooses where layers are.
        """
        raise _moving_denied(self)

    def cpu(self) -> GPipe:
        """Refuse to move the layers to the CPU: they are on the devices of the pipeline.

        A file for machines without these devices is written from ``state_dict()`` and read with ``map_location``.

        Raises:
            TypeError: always; ``model.unwrap().cpu()`` moves the plain model.
        """
        raise _moving_denied(self)

    def xpu(self, device: Device | None = None) -> GPipe:
        """Refuse to move the layers to an XPU, as :meth:`cuda` does.

        Args:
            device: is not looked at

        Raises:
            TypeError: always.
        """
        raise _moving_denied(self)

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Casts parameters and buffers, as ``to(dtype)`` does on any module.

        Raises:
            TypeError: a device is given, or a tensor, which has one.
        """
        if any(isinstance(arg, (Tensor, torch.device, str, int)) for arg in args if not isinstance(arg, bool)):
            raise _moving_denied(self)
        if kwargs.get("device") is not None or kwargs.get("tensor") is not None:
            raise _moving_denied(self)
        return super().to(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> GPipe:
        # A module around this one is moved by this method of its children, and nothing else.
        for device in set(self.devices):
            probe = torch.empty(0, device=device)
            if fn(probe).device != probe.device:
                raise _moving_denied(self)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _replicate_for_data_parallel(self) -> GPipe:
        # DataParallel calls it of all modules in it, in the caller's thread, before it runs anything.
        raise RuntimeError(
            f"nn.DataParallel cannot be around a {type(self).__name__}: it would run a copy of all layers on each GPU, "
            "where the pipeline already uses several; leave nn.DataParallel out, or for copies of the whole pipeline "
            "use nn.parallel.DistributedDataParallel with a process for each"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes the keys of the original as well, ``partitions.<j>.<name>``, whatever balance they were saved under."""
        error_msgs: list[str] = args[-1]
        take_old_keys(state_dict, prefix, self._read_old_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _read_old_keys(self, keys: list[OldKey]) -> dict[str, str]:
        return by_name(keys, [*self._layers_of(self)])


def _moving_denied(pipeline: GPipe) -> TypeError:
    return TypeError(
        f"denied to move parameters and buffers, because {type(pipeline).__name__} should manage device placement; "
        "choose devices when it is made, or unwrap() it and wrap the layers again"
    )


def _verify_devices(devices: Iterable[Device] | None, n: int) -> list[torch.device]:
    if isinstance(devices, (str, int, torch.device)):
        raise TypeError(f"devices must be a list with a device for each partition, but got {devices!r}")
    known = default_devices(n) if devices is None else [canonical_device(device) for device in devices]
    if len(known) < n:
        there = known or default_devices(n)
        shared = [str(there[j * len(there) // n]) for j in range(n)]
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(known)}, partitions: {n}); let neighbours share "
            f"one: devices={shared}, or take a balance with fewer partitions"
        )
    on_meta = [f"devices[{j}]" for j, device in enumerate(known[:n]) if device.type == "meta"]
    if on_meta:
        raise ValueError(
            f"nothing can be computed on the meta device, which {', '.join(on_meta)} is; a model may be made there, "
            "but devices are those that it is to run on, such as 'cuda:0' or 'cpu'"
        )
    return known[:n]


def _verify_initialised(module: nn.Module, checkpoint: CheckpointMode) -> None:
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy and checkpoint != "never":
        raise ValueError(
            f"parameters without a shape cannot be checkpointed, but there are {lazy}; run the module once on a "
            "sample before wrapping it, or use checkpoint='never'"
        )
