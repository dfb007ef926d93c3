"""The examples run, at a small size."""

from __future__ import annotations

import io
import re
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchgpipe
from tests.distributed.launch import launch, needs_stages
from torchgpipe.schedule import NAMES

pytestmark = pytest.mark.slow

EXAMPLES = Path(torchgpipe.__file__).parent.parent / "examples"


def test_offload(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / "offload.py"))["main"]
    main(["--width", "4", "--layers", "2", "--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["weights on cpu", "weights in host memory"]
    assert lines[2] == "the losses are equal"


def test_rebalance(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    threads = torch.get_num_threads()
    main = runpy.run_path(str(EXAMPLES / "rebalance.py"))["main"]
    try:
        # With a tolerance of 0 every phase ends in a rebalancing, whatever the times are.
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


def distributed_language_model(arguments: list[str]) -> str:
    """Run the example in a process that has a process group, and return its output."""
    sys.path.append(str(EXAMPLES))
    sys.argv = ["distributed_language_model.py", *arguments]
    dist.init_process_group = dist.destroy_process_group = lambda **options: None
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()):
        runpy.run_path(str(EXAMPLES / "distributed_language_model.py"))["main"]()
    return said.getvalue()


@needs_stages
def test_distributed_language_model_learns_what_the_pipeline_in_one_process_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    small = ["--dtype", "float64", "--steps", "6", "--batch", "6", "--layers", "2", "--width", "8", "--heads", "2"]
    small += ["--context", "8", "--curve", str(tmp_path / "curve.png")]
    said = launch(2, distributed_language_model, small)
    assert all(re.match(rf"rank {rank}\b", text) for rank, text in enumerate(said))

    once = ["--pipeline", "--sample", "1", "--timeline", str(tmp_path / "timeline.svg")]
    monkeypatch.setattr(sys, "argv", ["language_model.py", *once, *small])
    runpy.run_path(str(EXAMPLES / "language_model.py"))["main"]()
    losses = re.findall(r"\d\.\d{6}", said[0])
    assert len(losses) == 2
    assert re.findall(r"\d\.\d{6}", capsys.readouterr().out) == losses


def test_language_model_tells_the_costs_of_micro_batches_pipeline_and_recomputation_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo once showed a pipeline beside the whole mini-batch only: a reader saw that it is slower, but not why."""
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    small = ["--dtype", "float64", "--steps", "2", "--batch", "6", "--layers", "2", "--width", "8", "--heads", "2"]
    small += ["--context", "8", "--sample", "1", "--curve", str(tmp_path / "curve.png")]
    monkeypatch.setattr(sys, "argv", ["language_model.py", *small, "--timeline", str(tmp_path / "timeline.svg")])
    sys.argv += ["--gain", str(tmp_path / "gain.svg"), "--sleep", "0.001"]
    runpy.run_path(str(EXAMPLES / "language_model.py"))["main"]()

    out = capsys.readouterr().out
    assert re.search(r"difference +0\.000000 +0\.000000\n", out)
    ways = ["plain, whole", "plain, in 4 micro-batches"]
    ways += [f"pipeline, checkpoint={mode!r}" for mode in ("never", "except_last")]
    assert re.findall(r"^ *(p.*\S) +\d+ +\d+\.\d\d$", out, re.MULTILINE) == ways

    # It ends with what several devices gain.
    assert re.search(r"\n +plain, one device +\d+\n1F1B, 4 devices, idle \d+% of the time +\d+ +\d\.\d\dx\n", out)
    assert (tmp_path / "gain.svg").exists()


@pytest.mark.parametrize("schedule", ["1F1B", "ZeroBubble"])
def test_language_model_learns_the_same_under_a_schedule(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    small = ["--dtype", "float64", "--steps", "3", "--batch", "6", "--layers", "2", "--width", "8", "--heads", "2"]
    small += ["--context", "8", "--sample", "1", "--curve", str(tmp_path / "curve.png"), "--partitions", "2"]
    small += ["--timeline", str(tmp_path / "timeline.svg"), "--schedule", schedule]
    small += ["--gain", str(tmp_path / "gain.svg"), "--sleep", "0.001"]
    monkeypatch.setattr(sys, "argv", ["language_model.py", *small])
    runpy.run_path(str(EXAMPLES / "language_model.py"))["main"]()

    out = capsys.readouterr().out
    assert re.search(r"difference +0\.000000 +0\.000000\n", out)
    assert f"{schedule}, checkpoint='never'" in out
    assert (tmp_path / "timeline.svg").exists()


def test_schedules_give_equal_losses(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "schedules.py"))["main"](["--chunks", "2"])
    out = capsys.readouterr().out
    lines = re.findall(r"^(\S+): (loss 0\.\d+, then 0\.\d{6}); measured \d+\.\d ms a step$", out, re.MULTILINE)
    assert sorted(name for name, _ in lines) == sorted(NAMES)
    assert len({losses for _, losses in lines}) == 1
    assert out.count("device 0 F0") == len(lines)


@pytest.mark.parametrize(("count", "shared"), [(0, None), (1, [0, 0, 0, 0]), (3, [0, 0, 1, 2]), (6, [0, 1, 2, 3])])
def test_four_partitions_share_fewer_accelerators(
    count: int, shared: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo ARGS='--partitions 2'` once raised an IndexError with one GPU."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    devices_for = runpy.run_path(str(EXAMPLES / "language_model.py"))["devices_for"]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    assert devices_for(4) == (shared and [torch.device("cuda", index) for index in shared])


def test_mixed_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    monkeypatch.syspath_prepend(EXAMPLES)
    threads = torch.get_num_threads()
    main = runpy.run_path(str(EXAMPLES / "mixed_precision.py"))["main"]
    try:
        losses = {
            dtype: main(["--dtype", dtype, "--steps", "3", "--batch", "4", "--context", "8"])
            for dtype in ("float32", "bfloat16", "float16")
        }
    finally:
        torch.set_num_threads(threads)
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.01) and losses["bfloat16"] != losses["float32"]
    assert losses["float16"] == pytest.approx(losses["float32"], rel=0.01) and losses["float16"] != losses["float32"]


def test_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    main = runpy.run_path(str(EXAMPLES / "sequences.py"))["main"]
    main(["--steps", "2", "--batch", "8", "--width", "4", "--longest", "5"])
    assert re.match(r"\d+\.\d% of 1000 new numbers of up to 5 digits", capsys.readouterr().out)


def test_huggingface(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("accelerate")
    main = runpy.run_path(str(EXAMPLES / "huggingface.py"))["main"]
    main(["--steps", "8", "--batch", "6", "--layers", "2", "--width", "16", "--chunks", "3"])

    out = capsys.readouterr().out
    assert "model.embed_tokens" in out, "the table of the partitions"
    rows = re.findall(r"^ +(\d\.\d{7}) +(\d\.\d{7}) +-?\d\.\d{7}$", out, re.MULTILINE)
    assert len(rows) == 2
    for ours, plain in rows:
        assert float(ours) == pytest.approx(float(plain), rel=1e-5)


@pytest.mark.parametrize("schedule", ["1F1B", "ZeroBubble"])
def test_lora(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("peft")
    main = runpy.run_path(str(EXAMPLES / "lora.py"))["main"]
    main(["--steps", "4", "--batch", "6", "--layers", "2", "--width", "16", "--chunks", "3", "--schedule", schedule])

    out = capsys.readouterr().out
    assert len(re.findall(r"^loss \d\.\d{3}, then \d\.\d{3}$", out, re.MULTILINE)) == 2
    trained, total = map(int, re.findall(r"^(\d+) of (\d+) parameters", out, re.MULTILINE)[0])
    assert 0 < trained < total / 2
    assert re.search(r"^Saved \d+ kB of adapters", out, re.MULTILINE)


def test_diffusion(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("sklearn")
    main = runpy.run_path(str(EXAMPLES / "diffusion.py"))["main"]
    main(["--steps", "10", "--batch", "6", "--width", "8", "--chunks", "3"])

    lines = capsys.readouterr().out.splitlines()
    losses = [line.split()[1:] for line in lines if re.match(r" +\d-\d ", line)]
    assert len(losses) == 10
    for ours, plain, _ in losses:
        assert float(ours) == pytest.approx(float(plain), rel=1e-4)
    assert lines[-9] == "Digits that it draws:" and {len(line) for line in lines[-8:]} == {4 * 16 + 3 * 3}
