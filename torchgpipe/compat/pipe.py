"""Run code that was written for PyTorch's ``torch.distributed.pipeline.sync``, which PyTorch 2.4 removed.

The pipeline is the same. It differs from :class:`~torchgpipe.GPipe` in three conventions: the layers are on their
devices already, a tuple between two layers is several arguments of any type, and the output comes in a reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.batch.microbatch import NoChunk
from torchgpipe.compat import arguments
from torchgpipe.devices.device import canonical_device
from torchgpipe.devices.torch_internals import pytree
from torchgpipe.devices.typing import Device
from torchgpipe.gpipe import GPipe
from torchgpipe.model.partition import Partition, layers_of
from torchgpipe.model.settings import CheckpointMode
from torchgpipe.model.shallow_copy import shallow_copy
from torchgpipe.model.verify import verify_module

__all__ = ["BalanceError", "LocalRRef", "NoChunk", "Pipe", "PipeSequential", "WithDevice"]


class BalanceError(ValueError):
    """Never raised, because there is no balance that could be wrong. It exists for code that catches it."""


class WithDevice(nn.Module):
    """Tell a :class:`Pipe` the device of a layer, mainly of a layer without parameters.

    The pipeline unwraps the layer. If the layer has parameters, they are moved to the device.

    Args:
        module: the layer
        device: the device to run the layer on
    """

    def __init__(self, module: nn.Module, device: Device) -> None:
        super().__init__()
        self.module = module
        self.device = torch.device(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class PipeSequential(nn.Sequential):
    """A Sequential whose layers may take several arguments: a tuple is the arguments of the next layer. ::

        assert PipeSequential(nn.Bilinear(8, 8, 2))(input, input).shape == (16, 2)

    A :class:`Pipe` calls its layers in this way anyway, and also the layers of an :class:`~torch.nn.Sequential` that is
    nested in it. So this class is needed only to run such layers without a pipeline, and for deeper nesting.
    """

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if not len(self):
            return inputs
        layers = iter(self)
        value = next(layers)(*inputs, **keywords)
        for layer in layers:
            value = layer(*value) if isinstance(value, tuple) else layer(value)
        return value


def _layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers by name. As in the removed Pipe, those in a nested Sequential count one by one."""
    layers: dict[str, nn.Module] = {}
    for name, layer in layers_of(module).items():
        if isinstance(layer, nn.Sequential) and getattr(layer.forward, "__func__", None) in _ONE_AFTER_THE_OTHER:
            layers.update({f"{name}.{inner}": each for inner, each in layer._modules.items()})
        else:
            layers[name] = layer
    return layers


_ONE_AFTER_THE_OTHER = (nn.Sequential.forward, PipeSequential.forward)


class _Partition(PipeSequential, Partition):
    """Consecutive layers of a `Pipe`."""


@dataclass(frozen=True, eq=False)
class LocalRRef:
    """A reference to a local value: the output of a :class:`Pipe`.

    It has the methods of :class:`torch.distributed.rpc.RRef` that make sense for a local value.

    Attributes:
        value: the output
    """

    value: Any

    def local_value(self) -> Any:
        """Return the output."""
        return self.value

    def to_here(self, timeout: float = -1.0) -> Any:
        """Return the output.

        Args:
            timeout: ignored, because there is nothing to wait for
        """
        return self.value

    def is_owner(self) -> bool:
        """Return True."""
        return True

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run backward from an output with a single element, such as a loss that the last layer returns.

        Args:
            dist_autograd_ctx_id: must be -1, the local autograd
            retain_graph: whether backward can be run once more

        Raises:
            RuntimeError: the output has more than one element.
            ValueError: ``dist_autograd_ctx_id`` is not -1.
        """
        if dist_autograd_ctx_id != -1:
            raise ValueError(
                f"the output knows no context of distributed autograd, but {dist_autograd_ctx_id} is asked for; "
                "call backward() without it"
            )
        torch.autograd.backward(self.value, retain_graph=retain_graph)


# DistributedDataParallel must find the tensors of the output, or it takes all parameters for unused. It looks into
# dataclasses, but for a static graph only into containers that pytree knows.
pytree.register_pytree_node(
    LocalRRef, lambda reference: ([reference.value], None), lambda values, _: LocalRRef(*values)
)


class Pipe(GPipe):
    """Train a Sequential whose layers are on their devices already, as ``torch.distributed.pipeline.sync.Pipe`` did::

        first, last = nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 4).to("cuda:1")
        model = Pipe(nn.Sequential(first, nn.ReLU(), last), chunks=8)
        output = model(input).local_value()

    Consecutive layers on one device are a partition. The device of a layer is that of its parameters, or of its buffers
    if it has no parameters. A layer with neither runs on the device of the layer before it; at the start, on the device
    of the first layer that has one. :class:`WithDevice` puts a layer elsewhere.

    The layers in a nested :class:`~torch.nn.Sequential` count as layers of the pipeline, one by one, for ``len``,
    indexing, iteration and partitions. They keep their names, such as ``'0.2'``. The nested Sequential itself is not
    called, and neither are its hooks. Only one level is flattened, and no subclass with a ``forward`` of its own.

    A tuple that a layer returns is the arguments of the next layer, as in :class:`PipeSequential`. Values that are not
    tensors are passed on unchanged, but each value needs at least one tensor. Tensors inside objects other than tuples,
    lists and dicts are not seen: they are not copied to the next device, and a checkpointed micro-batch loses their
    gradient.

    All other behaviour and attributes are those of :class:`~torchgpipe.GPipe`.

    Args:
        module: the model, with all layers on the devices to run on
        chunks: the number of micro-batches to split a mini-batch into, as :func:`torch.chunk` does
        checkpoint: the micro-batches that keep only the input of each partition: ``'always'`` all, ``'except_last'``
            all but the last, or ``'never'`` none
        deferred_batch_norm: whether batch norms track the running statistics of the whole mini-batch

    Raises:
        TypeError: ``module`` is not a :class:`~torch.nn.Sequential`, or a batch norm cannot be deferred.
        ValueError: a layer is on several devices or on the meta device, an argument is out of its range, or layers
            cannot be partitioned because they share parameters across devices or have the name of an attribute of the
            pipeline.
    """

    _layers_of = staticmethod(_layers_of)
    _scatter = staticmethod(arguments.scatter)
    _gather = staticmethod(arguments.gather)
    _partition_type = _Partition
    _sequential_type = PipeSequential

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: CheckpointMode = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        verify_module(module)
        places = dict(zip(module._modules, _devices(module)))
        module = _as_they_run(module)
        along = [places[name.partition(".")[0]] for name in _layers_of(module)]
        runs = [(device, len(list(run))) for device, run in groupby(along)]
        super().__init__(
            module,
            [count for _, count in runs],
            devices=[device for device, _ in runs],
            chunks=chunks,
            checkpoint=checkpoint,
            deferred_batch_norm=deferred_batch_norm,
        )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run a step: the removed Pipe had none.

        Raises:
            TypeError: always.
        """
        raise TypeError("a Pipe has no step; wrap the layers in torchgpipe.GPipe(..., schedule=..., loss_fn=...)")

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run a mini-batch through the pipeline.

        Args:
            *inputs: the arguments of the first layer. Tensors of shape (batch, ...) are split into micro-batches.
                Tensors in :class:`NoChunk`, values of other types, and tensors inside them go whole to each
                micro-batch. Tensors on other devices are copied to ``devices[0]``.
            **keywords: keyword arguments of the first layer, likewise

        Returns:
            a reference to the output of the last layer, a :class:`LocalRRef`, whose ``local_value()`` returns it. A
            tensor, alone or an item of a tuple or list, is concatenated along dimension 0, on ``devices[-1]``. Any
            other value is replaced by a list with the value of each micro-batch.

        Raises:
            TypeError: there is no tensor among the inputs, or none in the output of a partition.
            ValueError: the input tensors differ in dimension 0, or the outputs of micro-batches in structure.
            RuntimeError: the pipeline has been unwrapped.
            Exception: any exception of a layer is raised unchanged, with a note that names the micro-batch and the
                partition.
        """
        if torch.compiler.is_dynamo_compiling():  # Not later: the reference cannot be traced either.
            from torchgpipe.devices.uncompiled import uncompiled

            return uncompiled(self.forward, *inputs, **keywords)
        return LocalRRef(super().forward(*inputs, **keywords))

    def _old_layers(self) -> list[str] | None:
        """Refuse the removed Pipe's keys, ``partitions.<j>.<k>.<name>``: read as names, they may exchange layers."""
        return None


def _devices(module: nn.Sequential) -> list[torch.device]:
    """Return the device of each layer.

    Raises:
        ValueError: a layer is on several devices, or on the meta device.
    """
    devices_of_each = [_own_devices(layer) for layer in module]
    misplaced = [
        f"layer '{name}' ({type(layer).__name__}) is on {', '.join(map(str, devices))}"
        for (name, layer), devices in zip(module.named_children(), devices_of_each)
        if len(devices) > 1 or any(device.type == "meta" for device in devices)
    ]
    if misplaced:
        raise ValueError(
            "each layer should have all parameters on a single device, please use .to() to place the module on a "
            f"single device, or WithDevice(layer, device): {'; '.join(misplaced)}"
        )
    current = next((devices[0] for devices in devices_of_each if devices), torch.device("cpu"))
    result = []
    for devices in devices_of_each:
        current = devices[0] if devices else current
        result.append(current)
    return result


def _own_devices(layer: nn.Module) -> list[torch.device]:
    if isinstance(layer, WithDevice):
        return [canonical_device(layer.device)]
    tensors: list[Tensor] = [*layer.parameters()] or [*layer.buffers()]
    return list(dict.fromkeys([tensor.device for tensor in tensors]))


def _as_they_run(module: nn.Sequential) -> nn.Sequential:
    """Return the layers under their names, without `WithDevice`, and nested Sequentials as PipeSequentials."""
    result = nn.Sequential()
    result.training = module.training
    for name, layer in module.named_children():
        layer = layer.module if isinstance(layer, WithDevice) else layer
        result.add_module(name, shallow_copy(layer, PipeSequential) if type(layer) is nn.Sequential else layer)
    return result
