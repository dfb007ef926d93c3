"""Track the running statistics of whole mini-batches, though the pipeline shows a batch norm only micro-batches.

Split into micro-batches, a mini-batch moves the running statistics of a plain batch norm several times, and not to
where it would have moved them at once. A deferred batch norm sets the moments of each micro-batch aside. At the end of
the mini-batch (`mini_batch`), all of them make a single update::

    micro-batch 0 ──► normalise ──► moments ──┐
    micro-batch 1 ──► normalise ──► moments ──┼──► merge ──► running statistics
    micro-batch 2 ──► normalise ──► moments ──┘
                      a layer fails ────────────► discard all
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.lazy import LazyModuleMixin

from torchgpipe.devices.torch_internals import BatchNormBase
from torchgpipe.model.settings import verify_chunks
from torchgpipe.model.shallow_copy import shallow_copy
from torchgpipe.norms.accumulator import Accumulator, accumulation_dtype, accumulators, is_tracking
from torchgpipe.norms.convert import convert
from torchgpipe.norms.moments import Moments, merge
from torchgpipe.replay.phase import is_recomputing

__all__ = ["DeferredBatchNorm", "verify_unshared"]

M = TypeVar("M", bound=nn.Module)


class DeferredBatchNorm(BatchNormBase):
    """A batch norm that sees micro-batches, and tracks the running statistics of whole mini-batches.

    In training the layer normalises each micro-batch by the micro-batch's own mean and variance, with the kernel and
    the gradients of :class:`~torch.nn.BatchNorm2d`. But ``running_mean``, ``running_var`` (unbiased) and
    ``num_batches_tracked`` become what one run on the whole mini-batch would make them. In evaluation the layer is a
    plain batch norm.

    A mini-batch ends with the forward of the :class:`~torchgpipe.GPipe` that contains the layer, whatever the number of
    micro-batches. In a loop of your own, it ends with a block of :func:`mini_batch`, or else after ``chunks`` runs.
    Recomputation does not count.

    With several processes, the mini-batch is that of the process.

    Moments of float16 and bfloat16 are taken and merged in float32. The keys of ``state_dict`` are those of
    :class:`~torch.nn.BatchNorm2d`; moments of an unfinished mini-batch are not saved. Entries that only the original
    torchgpipe has, such as ``sum`` and ``sum_squares``, are dropped on loading. ::

        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model = DeferredBatchNorm.convert_deferred_batch_norm(model, chunks=4)

    Shape:
        - Input: (batch, channels, ...), with at least two values per channel in training
        - Output: the shape of the input

    Args:
        num_features: the number of channels
        eps: the number that is added to the variance, for numerical stability
        momentum: the weight of the newest mini-batch in the running statistics; None for the plain average of all
            mini-batches
        affine: whether the layer has a weight and a bias
        chunks: the number of runs after which a mini-batch ends, where nothing else marks its end
        device: the device of the parameters and buffers
        dtype: the type of the parameters and buffers

    Attributes:
        chunks (int): see above

    Raises:
        ValueError: ``chunks`` is not a positive integer.
    """

    chunks: int
    _unfinished: list[Moments]
    #: The class of the layer that this one was converted from; None if it was made by the constructor.
    _converted_from: type[Any] | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, device=device, dtype=dtype)
        self.chunks = verify_chunks(chunks)

    @classmethod
    def convert_deferred_batch_norm(cls, module: M, chunks: int = 1) -> M:
        """Return a module in which every batch norm is deferred.

        ``module`` is not changed. Its batch norms and the modules around them are replaced by new ones; all other
        modules are shared. A new module has the very parameters, buffers and hooks of the module that it replaces: what
        is trained, tracked or moved through one of them is seen through the other.

        A converted layer is an instance of this class, and no longer of :class:`~torch.nn.BatchNorm2d`. A batch norm of
        a class with a ``forward`` of its own is refused, because its running statistics could not be deferred. Derive
        such a class from :class:`DeferredBatchNorm`.

        Left alone are :class:`~torch.nn.SyncBatchNorm`, :class:`~torch.nn.InstanceNorm2d` and its like, lazy
        layers that have not run yet, and layers without running statistics. Layers that are deferred by the same number
        of chunks already are left alone as well, and so is a module with nothing to convert in it.

        Args:
            module: a batch norm, or a module with some inside
            chunks: the number of runs after which a mini-batch ends, where nothing else marks its end

        Returns:
            the module with deferred batch norms

        Raises:
            TypeError: a batch norm has a ``forward`` of its own, or ``chunks`` is not an integer.
            ValueError: ``chunks`` is not positive, or a batch norm is inside of what ``torch.compile()`` has returned.
        """
        chunks = verify_chunks(chunks)

        def deferred(module: nn.Module) -> nn.Module:
            if isinstance(module, DeferredBatchNorm):
                if module.chunks == chunks:
                    return module
                copy = shallow_copy(module, type(module))
            elif _is_deferrable(module):
                copy = shallow_copy(module, cls)
                copy._converted_from = type(module)
            else:
                return module
            copy.chunks, copy._unfinished = chunks, []
            return copy

        return cast(M, convert(module, deferred))

    @classmethod
    def revert_deferred_batch_norm(cls, module: M) -> M:
        """Return a module in which every converted batch norm has the class that it had before.

        This is the way back from :meth:`convert_deferred_batch_norm`, on the same terms: ``module`` is not
        changed, and its parameters, buffers and hooks are shared. Moments of an unfinished mini-batch are left behind.

        Args:
            module: a converted batch norm, or a module with some inside

        Returns:
            the module with plain batch norms
        """

        def plain(module: nn.Module) -> nn.Module:
            if not (isinstance(module, DeferredBatchNorm) and module._converted_from):
                return module
            copy: nn.Module = shallow_copy(module, module._converted_from)
            for name in ("chunks", "_unfinished", "_converted_from"):
                del vars(copy)[name]
            return copy

        return cast(M, convert(module, plain))

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a micro-batch.

        Args:
            input: of shape (batch, channels, ...)

        Returns:
            the normalised micro-batch, of the same shape

        Raises:
            ValueError: the input has the wrong number of dimensions, or a single value per channel in training.
        """
        if not is_tracking(self):
            return super().forward(input)
        running_mean, running_var = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        self._check_input_dim(input)
        if is_recomputing():
            return self._normalise(input, None, None)
        n = len(input) * math.prod(input.shape[2:])
        dtype = accumulation_dtype(running_mean.dtype)
        mean, var = torch.zeros_like(running_mean, dtype=dtype), torch.zeros_like(running_var, dtype=dtype)
        if running_mean.dtype == dtype:
            # With a momentum of 1 the kernel writes the moments that it normalises by into these tensors.
            output = self._normalise(input, mean, var)
        else:
            output = self._normalise(input, None, None)
            if n > 0:
                var, mean = torch.var_mean(input.detach().to(dtype), [0, *range(2, input.dim())])
        self._track(Moments(n, mean, var))
        return output

    def _normalise(self, input: Tensor, mean: Tensor | None, var: Tensor | None) -> Tensor:
        return batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)

    def _track(self, moments: Moments) -> None:
        if torch.compiler.is_dynamo_compiling():
            from torchgpipe.devices.uncompiled import uncompiled

            uncompiled(self._track, moments)
            return
        mini_batch = accumulators.get()
        if mini_batch is not None:
            if self not in mini_batch:  # Another worker's partition may have this layer as well.
                mini_batch.setdefault(self, Accumulator(self))
            mini_batch[self].parts.append(moments)
            return
        self._unfinished.append(moments)
        if len(self._unfinished) >= self.chunks:
            parts, self._unfinished = self._unfinished, []
            with torch.no_grad():
                # The layer may have been moved or cast between two runs.
                Accumulator(self).update(merge([part.to(moments.mean) for part in parts]))

    def reset_running_stats(self) -> None:
        """Reset the running statistics to those of a new layer, and discard the moments of an unfinished mini-batch."""
        super().reset_running_stats()
        self._unfinished = []

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, chunks={self.chunks}"  # type: ignore[no-untyped-call]

    def _check_input_dim(self, input: Tensor) -> None:
        if self._converted_from is not None:
            self._converted_from._check_input_dim(self, input)
        elif input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("sum", "sum_squares", "counter", "tracked"):  # entries of the original
            if name not in self._buffers and name not in self._parameters:
                state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._unfinished = []


def verify_unshared(parts: Iterable[nn.Module]) -> None:
    """Check that no deferred batch norm is in several partitions, which run different micro-batches at a time.

    Raises:
        ValueError: one is, and which of its runs belong together is unknown.
    """
    seen: dict[nn.Module, tuple[int, str]] = {}
    for j, part in enumerate(parts):
        for name, norm in part.named_modules():
            if isinstance(norm, DeferredBatchNorm) and seen.setdefault(norm, (j, name))[0] != j:
                raise ValueError(
                    f"the deferred batch norm '{name}' of partition {j} is '{seen[norm][1]}' of partition "
                    f"{seen[norm][0]}, and partitions run different micro-batches at a time; give a balance that has "
                    "both uses in one partition, make a copy of it (copy.deepcopy), or leave it as it is "
                    "(deferred_batch_norm=False)"
                )


def _is_deferrable(module: nn.Module) -> bool:
    """Return whether a module that is not deferred is a batch norm whose running statistics can be.

    Raises:
        TypeError: it is one with a ``forward`` of its own.
    """
    if not isinstance(module, BatchNormBase) or isinstance(module, (nn.SyncBatchNorm, LazyModuleMixin)):
        return False
    if not module.track_running_stats or module.running_mean is None or module.running_var is None:
        return False
    if getattr(module.forward, "__func__", None) is not BatchNormBase.forward:
        raise TypeError(
            f"a batch norm with a forward of its own cannot be deferred, but {type(module).__name__} has one; derive "
            "the class from torchgpipe.batchnorm.DeferredBatchNorm, or make it a layer with a plain batch norm inside"
        )
    return True
