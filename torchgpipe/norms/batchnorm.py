"""Batch norms count a whole mini-batch, though a pipeline shows them parts of it.

Split into micro-batches, a mini-batch moves the running statistics of a batch norm several times,
and not to where it would have moved them at once. `DeferredBatchNorm` puts the moments of each micro-batch
aside, and when the mini-batch is at its end (`mini_batch`), all of them make a single update:

    micro-batch 0 ──► normalise ──► moments ──┐
    micro-batch 1 ──► normalise ──► moments ──┼──► merge ──► running statistics
    micro-batch 2 ──► normalise ──► moments ──┘
                      a layer fails ────────────► forget all

Moments belong to a call of the pipeline, not to the layer. So calls in several threads do not mix, and a call
that has failed leaves nothing behind. In DistributedDataParallel the mini-batch is that of all processes together:
before the update they exchange what they have seen, all layers at once, when every worker is through.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import new_class
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from torchgpipe.model.data_parallel import exchange, replicas, verify_even
from torchgpipe.model.settings import verify_chunks
from torchgpipe.model.shallow_copy import twin
from torchgpipe.norms.moments import Moments, merge
from torchgpipe.replay.phase import is_recomputing

__all__ = ["DeferredBatchNorm", "mini_batch"]

M = TypeVar("M", bound=nn.Module)


class _Tracked:
    """A layer and the moments that it has seen, in the order of its runs.

    Args:
        norm: the layer
        group: the processes whose moments count, too; None for this one alone
    """

    def __init__(self, norm: DeferredBatchNorm, group: Any = None) -> None:
        self.parts: list[Moments] = []
        self.group = group
        self._momentum = norm.momentum
        # Taken now: when it comes to the update, a recomputation in another thread may have put copies there.
        self._statistics = (cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var))
        self._num_batches = norm.num_batches_tracked

    @property
    def nothing(self) -> Moments:
        """The moments of no samples."""
        zeros = torch.zeros_like(self._statistics[0], dtype=_accumulated(self._statistics[0].dtype))
        return Moments(0, zeros, zeros)

    def commit(self, moments: Moments) -> None:
        """Updates the running statistics, as a batch norm does that sees all of it in one run."""
        with _commit_lock:
            factor = self._momentum or 0.0
            if self._num_batches is not None:
                self._num_batches.add_(1)
                if self._momentum is None:
                    factor = 1.0 / float(self._num_batches)
            if moments.n == 0:
                return
            for running, seen in zip(self._statistics, (moments.mean, moments.var)):
                running.copy_(seen * factor + running.to(seen.dtype) * (1 - factor))


_commit_lock = threading.Lock()


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    """The type of moments of what has ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def _merge_replicas(group: Any, layers: Sequence[_Tracked]) -> None:
    """Makes the updates of ``layers`` those of all processes: the first of each of them merged, then the second.

    Nearly always there is one. But a layer may have run several times, or in some processes only, and nobody
    knows before who has how many. What is sent has the same shape everywhere::

        number of updates, of each layer │ n, of each layer │ mean and var of each layer, one after the other
    """
    device = layers[0].nothing.mean.device
    merged: list[list[Moments]] = [[] for _ in layers]
    r, rounds = 0, 1
    while r < rounds:
        mine = [layer.parts[r] if r < len(layer.parts) else layer.nothing for layer in layers]
        head = torch.tensor([len(layer.parts) for layer in layers] + [moments.n for moments in mine])
        body = [statistic for moments in mine for statistic in (moments.mean, moments.var)]
        received = exchange(group, torch.cat([part.to(device, torch.float64) for part in (head, *body)]))
        # To merge them, their sizes have to be known here: the one time that this thread waits for the device.
        heads = torch.stack([values[: len(head)] for values in received]).long().tolist()
        bodies = [torch.split(values[len(head) :], [len(part) for part in body]) for values in received]
        for k, moments in enumerate(mine):
            parts = [
                Moments(sizes[len(layers) + k], *statistics[2 * k : 2 * k + 2]).to(moments.mean)
                for sizes, statistics in zip(heads, bodies)
                if r < sizes[k]
            ]
            if parts:
                merged[k].append(merge(parts))
        r, rounds = r + 1, max(max(sizes[: len(layers)]) for sizes in heads)
    for layer, updates in zip(layers, merged):
        layer.parts = updates


#: What is seen of the mini-batch that is under way. Workers and recomputations run in copies of this context.
_tracking: ContextVar[dict[nn.Module, _Tracked] | None] = ContextVar("torchgpipe_mini_batch", default=None)


@contextmanager
def mini_batch(m: int, model: nn.Module | None = None, group: Any = None) -> Iterator[None]:
    """Makes a ``with`` block one mini-batch to the deferred batch norms that run in it.

    At its end they update their running statistics; after an exception they forget what they have seen.
    :class:`~torchgpipe.GPipe` does so in each forward. In a loop of your own, put it around what is a batch::

        with mini_batch(4):
            for x, y in zip(input.chunk(4), target.chunk(4)):
                loss_fn(model(x), y).backward()

    In a block inside another one, the whole inner block is part of one micro-batch of the outer one.

    Args:
        m: the number of micro-batches; a layer that runs k times in each of them makes k updates, as it would
            on the whole mini-batch
        model: where it is called by :class:`~torch.nn.parallel.DistributedDataParallel`, the mini-batch of its
            layers is that of all processes
        group: the processes that have the same ``model``, where no DistributedDataParallel is there to tell

    Raises:
        ValueError: ``m`` is not positive.
        RuntimeError: the processes may have different numbers of mini-batches.
    """
    if m < 1:
        raise ValueError(f"the number of micro-batches in a mini-batch must be 1 or more, not {m}")
    outer = _tracking.get()
    mine = _of_all_processes(model, group)
    token = _tracking.set(mine)
    try:
        yield
        with torch.no_grad():
            for norm, tracked in mine.items():
                runs, rest = divmod(len(tracked.parts), m)
                # If the runs are not as many in each micro-batch, nobody can tell which belong together.
                stride = 1 if rest else runs
                tracked.parts = [merge(tracked.parts[run::stride]) for run in range(stride)]
                if outer is not None and norm in outer:
                    outer[norm].parts += tracked.parts
                elif outer is not None:
                    outer[norm] = tracked
            if outer is None:
                _commit(mine.values())
    finally:
        _tracking.reset(token)
        mine.clear()  # The graph keeps the context, for its recomputations.


def _of_all_processes(model: nn.Module | None, group: Any) -> dict[nn.Module, _Tracked]:
    """The layers that will exchange their moments, in the order of the model, which is the same everywhere.

    The order in which they run is not, and some may run in one process and not in another.
    """
    if model is not None and group is None:
        group = replicas()
    if model is None or group is None:
        return {}
    norms = [norm for norm in model.modules() if isinstance(norm, DeferredBatchNorm) and _is_tracking(norm)]
    if norms:
        verify_even()
    return {norm: _Tracked(norm, group) for norm in norms}


def _is_tracking(norm: DeferredBatchNorm) -> bool:
    """Whether a run would count."""
    has_statistics = norm.running_mean is not None and norm.running_var is not None
    return norm.training and norm.track_running_stats and has_statistics


def _commit(layers: Iterable[_Tracked]) -> None:
    groups: dict[Any, list[_Tracked]] = {}
    for layer in layers:
        groups.setdefault(layer.group, []).append(layer)
    for group, members in groups.items():
        if group is not None:
            _merge_replicas(group, members)
        for layer in members:
            for moments in layer.parts:
                layer.commit(moments)


class DeferredBatchNorm(_BatchNorm):
    """A batch norm whose running statistics are those of whole mini-batches, though it sees micro-batches.

    In training it normalises each micro-batch by the micro-batch's own mean and variance, with the kernel and
    the gradients of :class:`~torch.nn.BatchNorm2d`. But ``running_mean``, ``running_var`` (unbiased) and
    ``num_batches_tracked`` become what they would be after one run on the whole mini-batch. In evaluation it
    is a plain batch norm.

    A mini-batch ends with the forward of the :class:`~torchgpipe.GPipe` that the layer is in, however many
    micro-batches there were; or with a block of :func:`mini_batch`; or else after ``chunks`` runs.
    Recomputation does not count.

    Where the pipeline is in :class:`~torch.nn.parallel.DistributedDataParallel`, the mini-batch is that of all
    processes together. They exchange moments at the end of every forward in training, inside ``no_sync()`` as well, so
    all must run it equally often, as :class:`~torch.nn.SyncBatchNorm` has it.

    Moments of float16 and bfloat16 are taken and merged in float32. What is seen of an unfinished mini-batch
    is no part of ``state_dict``, whose keys are those of :class:`~torch.nn.BatchNorm2d`. Entries that the
    original torchgpipe has besides, such as ``sum`` and ``sum_squares``, are dropped in loading. ::

        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model = DeferredBatchNorm.convert_deferred_batch_norm(model, chunks=4)

    Shape:
        - Input: (batch, channels, ...), with two or more values of each channel in training
        - Output: as the input

    Args:
        num_features: the number of channels
        eps: is added to the variance under the root
        momentum: the share of the new mini-batch in the running statistics; None for a plain average over all
            mini-batches
        affine: whether there are a weight and a bias
        chunks: after how many runs a mini-batch ends, where nothing else marks its end
        device: where to make the parameters and buffers
        dtype: their type

    Attributes:
        chunks (int): the same

    Raises:
        ValueError: ``chunks`` is not a positive integer.
    """

    chunks: int
    _unfinished: list[Moments]

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
        """Gives a module in which every batch norm is deferred.

        ``module`` is not changed. What has to differ from it, its batch norms and the modules around them, is
        new; all else is shared. A new module has the very parameters, buffers and hooks of the one that it
        stands for: each sees what is trained or tracked through the other, and where it is moved.

        A converted layer still is an instance of its class, so a subclass of yours keeps its attributes and
        its methods. If it has a ``forward`` of its own, the running statistics are deferred where that calls
        the ``forward`` of the batch norm it derives from.

        Left alone are :class:`~torch.nn.SyncBatchNorm`, :class:`~torch.nn.InstanceNorm2d` and its like, lazy
        layers that have not run yet, and layers without running statistics. A layer that is already deferred,
        by the same number of chunks, stays what it is, and so does a module with nothing to convert in it.

        Args:
            module: a batch norm, or a module with some inside
            chunks: after how many runs a mini-batch ends, where nothing else marks its end

        Returns:
            the module with deferred batch norms

        Raises:
            ValueError: ``chunks`` is not a positive integer.
        """
        chunks = verify_chunks(chunks)

        def deferred(module: nn.Module) -> nn.Module:
            if not _is_to_defer(module, cls, chunks):
                return module
            double = twin(module, _deferred_type(type(module), cls))
            vars(double).update(chunks=chunks, _unfinished=[])
            return double

        return cast(M, _rebuilt(module, deferred, {}))

    @classmethod
    def revert_deferred_batch_norm(cls, module: M) -> M:
        """Gives a module in which every batch norm that was converted is what it was before.

        This is the way back from :meth:`convert_deferred_batch_norm`, on the same terms: ``module`` is not
        changed, and its parameters, buffers and hooks are shared. What is seen of an unfinished mini-batch is
        not in it.

        Args:
            module: a converted batch norm, or a module with some inside

        Returns:
            the module with plain batch norms
        """

        def plain(module: nn.Module) -> nn.Module:
            made_of = vars(type(module)).get("_made_of")
            if made_of is None:
                return module
            double: nn.Module = twin(module, made_of[0])
            del double.chunks, double._unfinished  # what the conversion has added
            return double

        return cast(M, _rebuilt(module, plain, {}))

    def forward(self, input: Tensor) -> Tensor:
        """Normalises a micro-batch.

        Args:
            input: of shape (batch, channels, ...)

        Returns:
            a tensor of the same shape

        Raises:
            ValueError: the input has the wrong number of dimensions, or in training one value a channel.
        """
        if not _is_tracking(self):
            return super().forward(input)
        mean, var = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        self._check_input_dim(input)
        if is_recomputing():
            return self._normalise(input, None, None)
        n = len(input) * math.prod(input.shape[2:])
        dtype = _accumulated(mean.dtype)
        exact = mean.dtype == dtype
        mean, var = torch.zeros_like(mean, dtype=dtype), torch.zeros_like(var, dtype=dtype)
        if exact:
            # With a momentum of 1 the kernel leaves here the very moments that it has normalised by.
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
        tracking = _tracking.get()
        if tracking is not None:
            if self not in tracking:
                tracking[self] = _Tracked(self)
            tracking[self].parts.append(moments)
            return
        self._unfinished.append(moments)
        if len(self._unfinished) >= self.chunks:
            parts, self._unfinished = self._unfinished, []
            with torch.no_grad():
                # The layer may have been moved or cast between its runs.
                _Tracked(self).commit(merge([part.to(moments.mean) for part in parts]))

    def reset_running_stats(self) -> None:
        """Makes the running statistics those of a new layer, and forgets what is seen of a mini-batch."""
        super().reset_running_stats()
        self._unfinished = []

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, chunks={self.chunks}"  # type: ignore[no-untyped-call]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in _NAMES_OF_THE_ORIGINAL:
            if name not in self._buffers and name not in self._parameters:
                state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._unfinished = []

    def __reduce_ex__(self, protocol: Any) -> Any:
        made_of = vars(type(self)).get("_made_of")
        if made_of is None:
            return super().__reduce_ex__(protocol)
        return _new, made_of, self.__getstate__()  # type: ignore[no-untyped-call]


_NAMES_OF_THE_ORIGINAL = ("sum", "sum_squares", "counter", "tracked")


def _rebuilt(
    module: nn.Module, change: Callable[[nn.Module], nn.Module], done: dict[nn.Module, nn.Module]
) -> nn.Module:
    """``module``, or a twin if ``change`` makes another of it or of something in it.

    ``done`` knows what stands for the modules that were seen before.

    Raises:
        ValueError: what would have to be another is in a module that always calls the one it was made for.
    """
    if module not in done:
        before: dict[str, nn.Module | None] = module._modules
        after = dict(before)
        for name, child in before.items():
            after[name] = child if child is None else _rebuilt(child, change, done)
        result = change(module)
        if result is module and any(after[name] is not child for name, child in before.items()):
            if "_orig_mod" in before:
                raise ValueError(
                    "batch norms cannot be exchanged within what torch.compile() has returned, which would go on "
                    "calling the old ones; compile in place and afterwards: GPipe(...).compile() or layer.compile()"
                )
            result = twin(module, type(module))
        if result is not module:
            vars(result)["_modules"] = after
        done[module] = result
    return done[module]


def _is_to_defer(module: nn.Module, deferred: type[DeferredBatchNorm], chunks: int) -> bool:
    return (
        isinstance(module, _BatchNorm)
        and not isinstance(module, (nn.SyncBatchNorm, LazyModuleMixin))
        and module.track_running_stats
        and module.running_mean is not None
        and module.running_var is not None
        and not (isinstance(module, deferred) and module.chunks == chunks)
    )


#: By the class that is not deferred yet, and the one that makes it so.
_types: dict[tuple[Any, Any], type[nn.Module]] = {}


def _deferred_type(plain: type[nn.Module], deferred: type[DeferredBatchNorm]) -> type[nn.Module]:
    """A class that is ``plain``, but inherits from ``deferred`` what it inherits from PyTorch's batch norm.

    In its order of resolution the user's classes and ``BatchNorm2d`` come first, then ``deferred``, then what
    they have in common. So ``super().forward`` of the user's class is ours.
    """
    if issubclass(plain, deferred):
        return plain
    key = (*vars(plain).get("_made_of", (plain,))[:1], deferred)
    if key not in _types:
        body = {"__module__": plain.__module__, "__doc__": plain.__doc__, "_made_of": key}
        made = new_class(f"Deferred{key[0].__name__}", key, {}, lambda names: names.update(body))
        _types.setdefault(key, made)  # Another thread may have been faster.
    return _types[key]


def _new(plain: type[nn.Module], deferred: type[DeferredBatchNorm]) -> nn.Module:
    """An empty instance, for copies and pickles: no module has the class itself under its name."""
    return object.__new__(_deferred_type(plain, deferred))
