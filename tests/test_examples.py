"""The examples run, small."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

import torchgpipe

EXAMPLES = Path(torchgpipe.__file__).parent.parent / "examples"


def test_rebalance(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    threads = torch.get_num_threads()
    main = runpy.run_path(str(EXAMPLES / "rebalance.py"))["main"]
    try:
        # A tolerance of 0 rebalances after every phase, whatever the times are.
        small = (
            "--sizes 8 16 --steps 2 --batch 8 --width 4 --features 8 --timeout 0 --partitions 3 --tolerance 0 --table"
        )
        main(small.split())
    finally:
        torch.set_num_threads(threads)

    lines = capsys.readouterr().out.splitlines()
    phases = [line for line in lines if re.match(r"\d+ px, balance \[\d+, \d+, \d+\]: .* ms a step, loss \d", line)]
    assert [line.partition(" ")[0] for line in phases] == ["8", "8", "16", "16"]
    assert sum(line.startswith("The slowest partition takes") for line in lines) == 2
    assert sum(line.startswith("total") for line in lines) == 3


def test_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    main = runpy.run_path(str(EXAMPLES / "sequences.py"))["main"]
    main(["--steps", "2", "--batch", "8", "--width", "4", "--longest", "5"])
    assert re.match(r"\d+\.\d% of 1000 new numbers of up to 5 digits", capsys.readouterr().out)
