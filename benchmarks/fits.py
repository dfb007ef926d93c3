"""Whether a model fits, counted without weights: beside what autograd keeps of it where it runs.

For each architecture of the catalogue, in float32 on the CPU: the bytes of its parameters, and those that a forward of
two rows keeps for its backward, each memory once, without parameters, buffers and arguments. Beside them is what
`python -m torchgpipe fit` counts on the meta device.

    python -m benchmarks.fits    # ten minutes, on any machine
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.campaigns.architectures import CATALOGUE, KINDS
from benchmarks.campaigns.architectures.catalogue import Architecture
from benchmarks.campaigns.architectures.operators import register_missing
from benchmarks.program import Part, Program, Progress
from benchmarks.records import Row, table_of
from torchgpipe.batch.outputs import own_loss
from torchgpipe.command.load import moved_to_meta
from torchgpipe.devices.memory import storages_of
from torchgpipe.devices.torch_internals import pytree
from torchgpipe.model.values import each
from torchgpipe_balancing.held import SavedTensors
from torchgpipe_balancing.planning.fit import fit

__all__ = ["compared", "fits", "misses"]

#: How far the bytes that are kept may be off, as a share.
CLOSE = 0.15


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run and count each architecture."""
    register_missing()
    names = args.names or [*CATALOGUE]
    progress, rows = Progress(len(names)), list[Row]()
    for name in names:
        progress(name)
        rows.append(compared(CATALOGUE[name]))
        if len(rows) % 20 == 0 or len(rows) == len(names):
            yield {"unit": "bytes of parameters, and kept for backward", "rows": rows}


def compared(architecture: Architecture) -> Row:
    """Return what an architecture keeps, and what is counted of it; the error of the count, if it fails."""
    torch.manual_seed(0)
    model = architecture.make().float().train()
    with suppress(AttributeError, ValueError):  # As usual, where a model can; the catalogue, of float64, has a loop.
        model.set_experts_implementation("grouped_mm")
    args, kwargs = pytree.tree_map_only(Tensor, _single, architecture.inputs(2, Generator().manual_seed(1)))
    loss = _mean if architecture.loss else own_loss
    row: Row = {"name": architecture.name, "kind": architecture.kind}
    row["weights"] = sum([parameter.nbytes for parameter in model.parameters()])
    row["kept"] = _kept(model, args, kwargs, loss)
    try:
        options: dict[str, Any] = {"no_chunk": [*architecture.whole]} if architecture.whole else {}
        if architecture.loss is not None:
            options |= {"loss_fn": lambda output, _: _mean(output), "reduce": "mean"}
        sample = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args or kwargs)
        found = fit(moved_to_meta(model), sample, [2.0**34] * 2, **options)
        row["counted"] = {"weights": found.weights, "kept": found.activations}
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
    return row


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _mean(output: Any) -> Tensor:
    return torch.stack([tensor.mean() for _, tensor in each(output) if tensor.is_floating_point()]).sum()


def _kept(model: nn.Module, args: Any, kwargs: Any, loss: Callable[[Any], Any]) -> int:
    """Return the bytes that autograd keeps after a forward."""
    saved = SavedTensors()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda one: one.tensor):
        output = model(*args, **kwargs)
        of_loss = loss(output)
        of_loss = _mean(output) if of_loss is None else of_loss
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    owned = storages_of([*model.parameters(), *model.buffers(), *given])
    kept = saved.memories()
    del of_loss
    return sum([size for key, size in kept.items() if key not in owned])


def _off(row: Row) -> float:
    return float(row["counted"]["kept"] / row["kept"] - 1)


def fits(result: dict[str, Any]) -> str:
    """Return a table by kind: how many are counted, and how well."""
    lines = []
    for kind in KINDS:
        rows = [row for row in result["rows"] if row["kind"] == kind]
        counted = [row for row in rows if "counted" in row]
        if counted:
            exact = sum([row["counted"]["weights"] == row["weights"] for row in counted])
            close = sum([abs(_off(row)) <= CLOSE for row in counted])
            off = statistics.median([abs(_off(row)) for row in counted])
            lines.append(
                {"kind": kind, "of": len(rows), "counted": len(counted), "weights": exact, "kept": close, "off": off}
            )
    columns: dict[str, Any] = {"kind": "kind", "architectures": "of", "counted": "counted", "weights exact": "weights"}
    columns |= {"kept within 15%": "kept", "median miss": lambda line: f"{line['off']:.1%}"}
    return table_of(lines, columns)


def misses(result: dict[str, Any]) -> str:
    """Return a table of those that are not counted, or whose bytes are off by more."""
    lines = [row for row in result["rows"] if "error" in row or abs(_off(row)) > CLOSE]

    def what(row: Row) -> str:
        return str(row["error"]) if "error" in row else f"counted / kept: {1 + _off(row):.2f}"

    return table_of(lines, {"architecture": "name", "kind": "kind", "what": what})


PARTS = {"architectures": Part("fits", measure, {"by kind": fits, "misses": misses}, cpu=True)}


def main() -> None:
    program = Program("fits", __doc__, PARTS)
    program.add("--names", nargs="+", help="architectures (default: all)")
    program.run()


if __name__ == "__main__":
    main()
