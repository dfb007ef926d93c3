"""Lets torchvision be imported beside a build of torch that its operators were not compiled for.

Then its library does not load, and the import fails where it describes operators that are not there. Their schemas are
enough; the models here call none of them. As a program, it runs a script after that::

    python -m benchmarks.campaigns.architectures.operators examples/huggingface.py
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import torch

__all__ = ["register_missing"]

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

_libraries: list[torch.library.Library] = []  # The schemas last as long as their library.


def register_missing() -> None:
    """Define the operators that importing torchvision asks for, unless its own library has them."""
    spec = importlib.util.find_spec("torchvision")
    if _libraries or spec is None or spec.origin is None:
        return
    for path in sorted(Path(spec.origin).parent.glob("_C.*")):
        try:
            torch.ops.load_library(path)
            return
        except OSError:
            continue
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _libraries.append(library)


if __name__ == "__main__":
    register_missing()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
