"""torchvision beside a build of PyTorch that it does not fit: its operators are missing, and it cannot be imported.

A CPU build of PyTorch with the torchvision of PyPI is such a pair. timm, peft, lightning and most of transformers
import torchvision, though they need none of its operators. So the tests declare those that the import looks for, and
use none.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

__all__ = ["declare_missing_operators"]

#: Kept, because the declarations end with the library.
_LIBRARIES: list[torch.library.Library] = []


def declare_missing_operators() -> None:
    """Declare the operators that importing torchvision looks for, unless its own library can be loaded."""
    package = find_spec("torchvision")
    if package is None or package.origin is None or _LIBRARIES:
        return
    for path in Path(package.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(path)
            return
        except OSError:
            continue
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)
