"""The U-Net example and its benchmark of skips: equal results with and without portals, and exact counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import torchgpipe

ROOT = Path(torchgpipe.__file__).parent.parent
sys.path.append(str(ROOT / "examples"))

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from unet import counted_step, draw_images, main, unet, without_portals  # noqa: E402

pytestmark = pytest.mark.slow


# With [2, 2, 2], depth 2, width 2 and 4 images of 8 x 8, the skips are 4 x 2 x 8 x 8 from the first partition to the
# last, and 4 x 4 x 4 x 4 to the second. The activations at the ends of partitions are 4 x 4 x 2 x 2 and 4 x 4 x 4 x 4.
# A number has 4 bytes.
LONG, SHORT, FIRST, SECOND = 2048, 1024, 256, 1024


@pytest.mark.parametrize("chunks", [1, 4])
def test_what_is_copied_is_counted(checkpoint: str, chunks: int) -> None:
    model = unet(depth=2, width=2)
    images, _ = draw_images(4, 8, torch.Generator().manual_seed(0))
    expected = {
        "portals": {(0, 1): FIRST + SHORT, (0, 2): LONG, (1, 2): SECOND},
        "tuples": {(0, 1): FIRST + SHORT + LONG, (1, 2): SECOND + LONG},
    }
    ways = {"portals": (model, images), "tuples": (without_portals(model), (images,))}
    for way, (layers, input) in ways.items():
        devices = ["cpu:0", "cpu:1", "cpu:2"]
        _, copied = counted_step(layers, input, [2, 2, 2], devices, chunks, checkpoint)
        assert copied == {**expected[way], **{(b, a): count for (a, b), count in expected[way].items()}}


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "unet.png"
    small = "--steps 2 --depth 2 --width 2 --size 16 --batch 4 --balance 2 2 2 --out"
    main([*small.split(), str(picture)])
    printed = capsys.readouterr().out
    assert picture.stat().st_size > 0
    assert "mean IoU" in printed and "no shapes" in printed
    assert "The losses of the 2 steps differ by at most 0.0e+00" in printed
    assert "0 and 2" in printed and "2 and 3" not in printed  # three partitions
