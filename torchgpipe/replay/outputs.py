"""Compare what the two runs of a layer return, once for each structure of its inputs.

A layer may compute with what nobody gives back to it: a number outside of all layers, or Python's random numbers. Then
its second run returns something else. So two sums of each output are noted at the first run, and compared after the
second, for which the host waits once. Later runs with inputs of the same shapes wait for nothing.

The sums may differ a little, where kernels add in any order, or the compiler has made two graphs. Such errors are a few
eps of single elements, in either direction. So they move a sum by a few eps of the tensor's norm, and `_EPS` of these
are tolerated, beside the rounding of the sums themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import dispatch_modes

__all__ = ["Comparison"]

_EPS = 64

#: By module, the structures of inputs of which both runs have returned the same.
_equal: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()


class Comparison:
    """What a first run returns, if that is to be compared.

    Args:
        module: the module that runs
        kind: what tells runs of the module apart, beside their inputs
        inputs: its inputs

    Attributes:
        is_due: whether the outputs are to be compared
    """

    __slots__ = ("_key", "_module", "_sums", "is_due")

    def __init__(self, module: nn.Module, kind: Hashable, inputs: Iterable[Tensor | None]) -> None:
        self._module, self._sums = module, list[Tensor | None]()
        self._key = (kind, module.training, *[None if x is None else (x.shape, x.dtype) for x in inputs])
        # A dispatch mode would see the sums, and tensors of some modes have no values.
        self.is_due = self._key not in _equal.get(module, ()) and not dispatch_modes()

    def note(self, outputs: Iterable[Tensor | None]) -> None:
        """Note what the first run has returned."""
        if self.is_due:
            self._sums = [_sums(output) for output in outputs]

    def difference(self, outputs: Sequence[Tensor | None]) -> str | None:
        """Return what the second run has returned in place of what the first had, or None."""
        if not self.is_due or self._key in _equal.get(self._module, ()):
            return None
        for k, (before, output) in enumerate(zip(self._sums, outputs)):
            now = _sums(output)
            if before is not None and now is not None and output is not None:
                (*firsts, norm), (*seconds, _) = before.tolist(), now.tolist()
                tolerance = _EPS * (torch.finfo(output.dtype).eps * norm + torch.finfo(now.dtype).eps * firsts[1])
                for first, second in zip(firsts, seconds):
                    if abs(first - second) > tolerance:
                        return (
                            f"output {k}, of shape {tuple(output.shape)}, sums to {second:.6g} instead of {first:.6g}"
                        )
        _equal.setdefault(self._module, set()).add(self._key)
        return None


def _sums(output: Tensor | None) -> Tensor | None:
    """Return a sum and a sum of absolute values, both with weights that tell elements apart, and the norm."""
    if output is None or output.layout is not torch.strided or not (output.is_floating_point() or output.is_complex()):
        return None
    with torch.no_grad():
        values = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
        values = values.flatten().to(torch.promote_types(values.dtype, torch.float32))
        weighted = values * (1 + torch.arange(len(values), device=values.device).to(values.dtype) / max(1, len(values)))
        return torch.stack([weighted.sum(), weighted.abs().sum(), values.norm()])
