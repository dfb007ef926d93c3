"""Write what the pages show as printed, from runs of their own code.

    python docs/shown.py              # writes docs/shown/*.txt
    python docs/shown.py --measure    # also measures anew what depends on the machine: a plan, its check, a step

The code of a page runs here as it stands on the page, and what it prints is the file that the page includes below it.
The report of a timeline is that of a step which `--measure` has recorded, with blocks that sleep, so that devices work
side by side on any machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import torchgpipe  # noqa: E402
from tests import snippets  # noqa: E402
from torchgpipe import GPipe  # noqa: E402
from torchgpipe.command.main import main as main_of_commands  # noqa: E402
from torchgpipe.timeline.span import Row, Span  # noqa: E402
from torchgpipe.timeline.timeline import Timeline  # noqa: E402

FOLDER = ROOT / "docs" / "shown"
RECORDED = FOLDER / "step.json"
DEVICES, MICRO_BATCHES, SECONDS = 3, 6, 0.1


def printed(page: str, block: int, *, alone: bool = False) -> str:
    """Return what a block of code of a page prints, after those before it, or alone."""
    names: dict[str, Any] = {"__name__": "page"}
    torch.manual_seed(0)
    path = ROOT / "docs" / page
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for snippet in snippets.in_rst(path.read_text())[block if alone else 0 : block + 1]:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                snippets.run(snippet, path, names)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def commanded(*line: str) -> str:
    """Return what a command prints, in a folder with the configuration of a model of 8B, and the flux.py of a page."""
    configuration = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096},
        **{"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    }
    with tempfile.TemporaryDirectory() as at, contextlib.chdir(at):
        Path("folder").mkdir()
        Path("folder", "config.json").write_text(json.dumps(configuration))
        page = ROOT / "docs" / "recipes" / "diffusion-lora.rst"
        Path("flux.py").write_text(snippets.in_rst(page.read_text())[0].code)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert not main_of_commands([*line])
    wrapped = [textwrap.wrap(text, 100, subsequent_indent=8 * " ") or [""] for text in output.getvalue().splitlines()]
    return "\n".join(part for each in wrapped for part in each) + "\n"


def record() -> None:
    """Record a step of blocks that sleep, under 1F1B."""
    from benchmarks.schedules import Sleeping

    blocks = nn.Sequential(*[Sleeping(SECONDS) for _ in range(DEVICES)])
    devices = [f"cpu:{j}" for j in range(DEVICES)]
    model = GPipe(
        blocks,
        [1] * DEVICES,
        devices=devices,
        chunks=MICRO_BATCHES,
        checkpoint="never",
        loss_fn=lambda output, _: output.mean(),
    )
    x = torch.zeros(MICRO_BATCHES, 1, requires_grad=True)
    with torchgpipe.record(model, steps=1) as timeline:
        for _ in range(3):
            model.step(x)
    spans = [span for span in timeline.spans if span.computes]
    began = min(span.start for span in spans)
    cells = [
        [span.partition, span.kind, span.micro_batch, round(span.start - began, 6), round(span.end - began, 6)]
        for span in spans
    ]
    RECORDED.write_text("[\n" + ",\n".join(json.dumps(cell) for cell in cells) + "\n]\n")


def timeline() -> Timeline:
    """Return the timeline of the recorded step."""
    rows = [Row(j, torch.device("cpu", j), (str(j),)) for j in range(DEVICES)]
    spans = [
        Span(0, kind, i, j, rows[j].device, "computing", rows[j].layers, start, end)
        for j, kind, i, start, end in json.loads(RECORDED.read_text())
    ]
    recorded = Timeline()
    recorded._fill(rows, {0: MICRO_BATCHES}, spans, {})
    return recorded


def measured() -> Iterator[tuple[str, str]]:
    """Yield the name and the contents of each file whose contents depend on the speed of the machine."""
    plan, head, check = re.split(r"(?m)^( +predicted )", printed("planning.rst", 0))
    yield "plan", plan
    yield "check", head + check
    yield "fit", commanded("fit", "folder", "--devices", "2x24GiB", "--lora", "16", "--length", "1024")  # a minute
    yield "flux", commanded("fit", "flux.py:flux", "--devices", "2x24GiB")  # two minutes
    yield "qlora", commanded("fit", "folder", "--devices", "2x16GiB", "--frozen-4bit", "--length", "1024")


def files() -> Iterator[tuple[str, str]]:
    """Yield the name and the contents of each other file."""
    yield "report", f"{timeline().report()}\n"
    yield "verify", printed("any-model.rst", 1)
    yield "cards", printed("planning.rst", 2, alone=True)  # on the meta device, where nothing is measured
    yield "layout", printed("any-model.rst", 0)  # after the other run, in which kernels have been loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="measure anew what depends on the machine")
    FOLDER.mkdir(exist_ok=True)
    if parser.parse_args().measure:
        record()
        for name, text in measured():
            (FOLDER / f"{name}.txt").write_text(text)
    for name, text in files():
        (FOLDER / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main()
