"""Keep the outputs of a mini-batch that has no loss.

PyTorch's schedules differentiate the tensor that `finish` returns; see also `torchgpipe.model.loss`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchgpipe.model.microbatch import Batch

__all__ = ["Outputs"]


class Outputs:
    """The outputs of a mini-batch that has no loss.

    Args:
        device: where the last stage computes
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batches: dict[int, Batch] = {}
        self.total = 0.0

    def prepare(self, inputs: list[Batch]) -> float:
        """Return 0: there are no targets."""
        return 0.0

    def finish(self, i: int, output: Batch) -> Tensor:
        """Keep a copy of the output of micro-batch ``i``, and return zero as its loss."""
        self._batches[i] = output.replace(tuple([None if leaf is None else leaf.clone() for leaf in output.leaves]))
        return torch.zeros(1, device=self._device)

    def batches(self, forms: Sequence[Batch]) -> list[Batch]:
        """Return the outputs; in a process without the last stage, empty tensors to receive them."""
        if self._batches:
            return [self._batches[i] for i in range(len(forms))]
        return [
            form.replace(
                tuple([leaf if leaf is None else torch.empty_like(leaf, device=self._device) for leaf in form.leaves])
            )
            for form in forms
        ]
