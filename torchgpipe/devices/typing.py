"""The type aliases that several files share, each defined once."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Device", "Leaf", "Leaves"]

#: What users may write where a device is wanted.
Device: TypeAlias = torch.device | int | str

#: What a nested input or output is made of, once its containers are taken off.
Leaf: TypeAlias = Tensor | None
Leaves: TypeAlias = tuple[Leaf, ...]
