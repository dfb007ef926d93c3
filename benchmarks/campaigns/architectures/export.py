"""Asks `torch.distributed.pipelining.pipeline` to split an architecture where ours begins its second partition.

It exports the whole model, so the model has to be free of control flow that depends on data. Caches are switched off,
because a graph that returns one cannot be split. A split counts if the outputs of its stages are those of the model.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.campaigns.architectures.catalogue import Architecture

__all__ = ["export"]


def export(architecture: Architecture) -> dict[str, Any]:
    """Split an architecture in two by exporting it; return the verdict."""
    from torch.distributed.pipelining import SplitPoint, pipeline
    from torch.utils._pytree import tree_leaves

    from torchgpipe import pipelined

    model = architecture.build()
    if hasattr(model, "config") and hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    args, kwargs = architecture.inputs(2, Generator().manual_seed(100))
    result = {"name": architecture.name, "kind": architecture.kind}
    try:
        options: dict[str, Any] = {} if architecture.loss is None else {"loss_fn": lambda output, target: output}
        layout = pipelined(model, (args, kwargs), chunks=2, devices=["cpu"] * 2, balance="parameters", **options).layout
        model.unpipelined()  # type: ignore[operator]
        begin = layout.partitions[1].parts[0].name.split("..")[0]
    except Exception as error:
        return {**result, "export": f"no place to split: {type(error).__name__}"}
    try:
        pipe = pipeline(model, args, kwargs, split_spec={begin: SplitPoint.BEGINNING})
        if pipe.num_stages != 2:
            return {**result, "export": f"{pipe.num_stages} stages"}
        ours = [leaf for leaf in tree_leaves(pipe(*args, **kwargs)) if isinstance(leaf, Tensor)]
        theirs = [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]
        near = len(ours) == len(theirs) and all(torch.allclose(a, b, atol=1e-8) for a, b in zip(ours, theirs))
        return {**result, "export": "split" if near else "differs"}
    except Exception as error:
        line = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
        return {**result, "export": f"refused: {line}", "trace": traceback.format_exc()[-2000:]}
