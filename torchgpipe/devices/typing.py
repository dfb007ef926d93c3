"""Type aliases that several files share."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Device", "Leaf", "Leaves"]

#: A device, as users may write it.
Device: TypeAlias = torch.device | int | str

#: An element of a nested input or output, without the containers around it.
Leaf: TypeAlias = Tensor | None
Leaves: TypeAlias = tuple[Leaf, ...]
