"""Running statistics of PyTorch's norms: in training, a norm writes them at every run, and computes with none of them.

So they are the one kind of state of which a second run needs no earlier value: see `state`.
"""

from __future__ import annotations

from torch import nn

from torchgpipe.devices.torch_internals import BatchNormBase

__all__ = ["Norm", "only_written"]

#: The layers that keep running statistics; users' own subclasses are included. Lazy ones change their class later.
Norm = (
    BatchNormBase,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LazyInstanceNorm1d,
    nn.LazyInstanceNorm2d,
    nn.LazyInstanceNorm3d,
)


def only_written(module: nn.Module) -> tuple[str, ...]:
    """Return the buffers that a module writes in training and never reads; a forward of the user's may read them."""
    if isinstance(module, Norm) and type(module).forward.__module__.startswith(("torch.", "torchgpipe.")):
        return "running_mean", "running_var", "num_batches_tracked"
    return ()
