"""Networks of MONAI and nnU-Net in a pipeline of two partitions on the CPU, beside themselves: a part of volumes.py.

Each is small, and gets a window of four volumes, whose gradients the plain network accumulates. Compared are the loss,
the gradients of all parameters bit by bit, and the scores of a larger volume in evaluation, patch by patch.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.campaigns.architectures.operators import register_missing
from benchmarks.program import Progress
from benchmarks.records import Row, table_of
from torchgpipe import MicroBatches, pipelined

__all__ = ["measure", "volume_networks"]

CLASSES = 3


def networks() -> dict[str, Callable[[], nn.Module]]:
    """Return what makes each network, by its name."""
    register_missing()
    from dynamic_network_architectures.architectures import unet as of_nnunet
    from monai.networks import nets as of_monai

    norms: dict[str, Any] = {"norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"affine": True}}
    norms |= {"nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True}, "conv_bias": True}
    levels = 4, (4, 8, 16, 16), nn.Conv3d, 3, [1, 2, 2, 2]
    dyn = 3, 1, CLASSES, [3] * 4, [1, 2, 2, 2], [2] * 3, (4, 8, 16, 16)
    swin = {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}
    return {
        "UNet": lambda: of_monai.UNet(3, 1, CLASSES, (4, 8, 16, 16), (2, 2, 2), num_res_units=2),
        "BasicUNet": lambda: of_monai.BasicUNet(3, 1, CLASSES, features=(4, 4, 8, 8, 8, 4)),
        "DynUNet": lambda: of_monai.DynUNet(*dyn),
        "DynUNet, deep supervision": lambda: of_monai.DynUNet(*dyn, deep_supervision=True, deep_supr_num=2),
        "SegResNet": lambda: of_monai.SegResNet(3, 8, 1, CLASSES),
        "SwinUNETR": lambda: of_monai.SwinUNETR(1, CLASSES, **swin),
        "UNETR": lambda: of_monai.UNETR(1, CLASSES, (32, 32, 32), 4, 24, 48, 2),
        "PlainConvUNet": lambda: of_nnunet.PlainConvUNet(1, *levels, 2, 3, 2, **norms),
        "PlainConvUNet, deep supervision": lambda: of_nnunet.PlainConvUNet(
            1, *levels, 2, 3, 2, deep_supervision=True, **norms
        ),
        "ResidualEncoderUNet, deep supervision": lambda: of_nnunet.ResidualEncoderUNet(
            1, *levels, (1, 2, 2, 2), 3, 1, deep_supervision=True, **norms
        ),
    }


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare each network with and without recomputation."""
    from importlib.metadata import version

    torch.set_num_threads(1)
    made, rows = networks(), list[Row]()
    progress = Progress(2 * len(made))
    versions = {name: version(name) for name in ("monai", "dynamic_network_architectures")}
    for name, make in made.items():
        for recomputed in (False, True):
            progress(f"{name}{', recomputed' * recomputed}")
            row: Row = {"network": name, "recomputed": recomputed}
            try:
                row |= compared(make, recomputed=recomputed)
            except ValueError as error:
                row["refused"] = str(error)[:300]
            rows.append(row)
            yield {"versions": versions, "rows": rows}


def compared(make: Callable[[], nn.Module], *, recomputed: bool) -> Row:
    """Return by how much losses, gradients and scores differ."""
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceCELoss

    dice_and_entropy = DiceCELoss(to_onehot_y=True, softmax=True)

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        total = torch.zeros(())
        if isinstance(output, Tensor):  # Of DynUNet, those of all heads are one.
            output = output.unbind(1) if output.dim() == 6 else [output]
        for k, scores in enumerate(output):
            at = nn.functional.interpolate(target.float(), scores.shape[2:])
            total = total + dice_and_entropy(scores, at) / 2**k
        return total

    torch.manual_seed(0)
    model: Any = make()
    plain, edge = copy.deepcopy(model), 64 if type(model).__name__ == "SwinUNETR" else 32
    volumes = [torch.randn(1, 1, edge, edge, edge) for _ in range(4)]
    classes = [torch.randint(CLASSES, (1, 1, edge, edge, edge)) for _ in range(4)]
    sample, target = MicroBatches(volumes[:2]), MicroBatches(classes[:2])
    devices, checkpoint = ["cpu:0", "cpu:1"], recomputed
    pipelined(model, sample, target=target, loss_fn=loss_fn, devices=devices, checkpoint=checkpoint)
    loss, expected = model.step(MicroBatches(volumes), target=MicroBatches(classes)).item(), 0.0
    for volume, of_volume in zip(volumes, classes):
        one: Any = loss_fn(plain(volume), of_volume) / 4
        one.backward()
        expected += one.item()
    pairs = zip(model.parameters(), plain.parameters())
    row: Row = {"time of a device": max(sum(part.seconds for part in one.parts) for one in model.layout.partitions)}
    row["time of a device"] /= sum(part.seconds for one in model.layout.partitions for part in one.parts)
    row |= {"loss": loss, "plain": expected, "gradients": all(_same(a.grad, b.grad) for a, b in pairs)}
    larger, scores = torch.randn(1, 1, edge + 16, edge, edge), []
    for network in (model.eval(), plain.eval()):

        def first(patch: Tensor, network: Any = network) -> Any:
            output = network(patch)
            return output[0] if isinstance(output, (list, tuple)) else output

        with torch.no_grad():
            scores.append(sliding_window_inference(larger, (edge,) * 3, 1, first))
    return {**row, "scores": torch.equal(*scores)}


def _same(grad: Tensor | None, expected: Tensor | None) -> bool:
    return (grad is None or not grad.any()) if expected is None else grad is not None and torch.equal(grad, expected)


def volume_networks(result: dict[str, Any]) -> str:
    """Return a table of the networks."""
    lines = []
    for row in result["rows"]:
        if not row["recomputed"]:
            again = next(
                other for other in result["rows"] if other["network"] == row["network"] and other["recomputed"]
            )
            lines.append({**row, "again": again})

    def verdict(row: Row, key: str) -> str:
        ways = (row, row["again"])
        return "refused" if any("refused" in way for way in ways) else "same" if all(way[key] for way in ways) else "no"

    columns: dict[str, Any] = {"network": "network", "gradients": lambda row: verdict(row, "gradients")}
    columns["scores of patches"] = lambda row: verdict(row, "scores")
    columns["time of the slower device"] = lambda row: f"{row['time of a device']:.0%}" if "loss" in row else "-"
    return table_of(lines, columns)
