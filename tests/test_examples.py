"""The examples run, at a small size."""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchgpipe
from tests.distributed.launch import launch
from torchgpipe.schedule import NAMES

pytestmark = pytest.mark.slow

EXAMPLES = Path(torchgpipe.__file__).parent.parent / "examples"

#: Settings of the language model, at a small size.
SMALL = "--dtype float64 --batch 6 --layers 2 --width 8 --heads 2 --context 8"
OF_MODEL = "matplotlib tqdm"


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that calls the main of an example with command line arguments."""
    threads = torch.get_num_threads()

    def run(name: str, arguments: str, needs: str = "") -> Any:
        for module in needs.split():
            pytest.importorskip(module, minversion="5" if module == "transformers" else None)
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()

    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def example(main: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs an example, and returns what it prints."""

    def run(*arguments: str) -> str:
        main(*arguments)
        return capsys.readouterr().out

    return run


Example = Callable[..., str]


def test_offload(example: Example) -> None:
    lines = example("offload", "--width 4 --layers 2 --steps 2").splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["weights on cpu", "weights in host memory"]
    assert lines[2] == "the losses are equal"


def test_rebalance(example: Example) -> None:
    # With a tolerance of 0 every phase ends in a rebalancing, whatever the times are.
    small = "--sizes 8 16 --steps 2 --batch 8 --width 4 --features 8 --timeout 0 --partitions 3 --tolerance 0 --table"
    lines = example("rebalance", small, "tqdm").splitlines()
    phases = [line for line in lines if re.match(r"\d+ px, balance \[\d+, \d+, \d+\]: .* ms a step, loss \d", line)]
    assert [line.partition(" ")[0] for line in phases] == ["8", "8", "16", "16"]
    assert sum(line.startswith("The slowest partition takes") for line in lines) == 2
    assert sum(line.startswith("total") for line in lines) == 3


def said_in_a_group(name: str, arguments: str) -> str:
    """Run an example in a process that has a process group, and return its output."""
    sys.path.append(str(EXAMPLES))
    sys.argv = [f"{name}.py", *arguments.split()]
    dist.init_process_group = dist.destroy_process_group = lambda *args, **options: None
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()):
        names = runpy.run_path(str(EXAMPLES / f"{name}.py"))
        if name == "ddp":  # whose main starts the processes
            names["train"](dist.get_rank(), "", names["parse_options"](arguments.split()))
        else:
            names["main"]()
    return said.getvalue()


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_ddp() -> None:
    pytest.importorskip("tqdm")
    said, nothing = launch(2, said_in_a_group, "ddp", "--steps 3 --batch 16")
    first, second = said.splitlines()
    assert first == "parameters of the processes differ by 0.0"
    assert "of new excerpts are recognised" in second
    assert nothing == ""


def test_distributed_language_model_learns_what_the_pipeline_in_one_process_learns(
    tmp_path: Path, example: Example
) -> None:
    small = f"{SMALL} --steps 6 --curve {tmp_path / 'curve.png'}"
    once = example("language_model", f"--pipeline --sample 1 --timeline {tmp_path / 'timeline.svg'} {small}", OF_MODEL)
    said = launch(2, said_in_a_group, "distributed_language_model", small)
    assert all(re.match(rf"rank {rank}\b", text) for rank, text in enumerate(said))
    losses = re.findall(r"\d\.\d{6}", said[0])
    assert len(losses) == 2
    assert re.findall(r"\d\.\d{6}", once) == losses


def said_of_processes(arguments: str, restarts: int) -> str:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    try:
        return said_in_a_group("processes", arguments)
    except RuntimeError as error:
        return str(error)


def test_processes_go_on_after_one_was_killed(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    small = f"--layers 2 --width 16 --batch 4 --steps 8 --kill-at 7 --checkpoints {tmp_path}"
    waited, _ = launch(2, said_of_processes, small, 0, victim=1)
    assert "rank 0, partition 0 of 2 has waited in step" in waited and "from rank 1, in vain" in waited
    said, _ = launch(2, said_of_processes, small, 1)
    assert re.findall(r"^step (.)  loss \d", said.replace("step  ", "step "), re.MULTILINE) == ["5", "6", "7", "8"]
    assert said.rstrip().endswith("of the plain model that was saved")


def test_language_model_tells_the_costs_of_micro_batches_pipeline_and_recomputation_apart(
    tmp_path: Path, example: Example
) -> None:
    """The demo once showed a pipeline beside the whole mini-batch only: a reader saw that it is slower, but not why."""
    drawn = " ".join([f"--{name} {tmp_path / name}.svg" for name in ("timeline", "gain", "curve")])
    out = example("language_model", f"{SMALL} --sample 1 --sleep 0.001 {drawn} --steps 2", OF_MODEL)
    assert re.search(r"difference +0\.000000 +0\.000000\n", out)
    ways = ["plain, whole", "plain, in 4 micro-batches"]
    ways += [f"pipeline, checkpoint={mode!r}" for mode in ("never", "except_last")]
    assert re.findall(r"^ *(p.*\S) +\d+ +\d+\.\d\d$", out, re.MULTILINE) == ways
    # It ends with what several devices gain.
    assert re.search(r"\n +plain, one device +\d+\n1F1B, 4 devices, idle \d+% of the time +\d+ +\d\.\d\dx\n", out)
    assert (tmp_path / "gain.svg").exists()


def test_schedules_give_equal_losses(example: Example) -> None:
    out = example("schedules", "--chunks 2")
    lines = re.findall(r"^(\S+): (loss 0\.\d+, then 0\.\d{6}); measured \d+\.\d ms a step$", out, re.MULTILINE)
    assert sorted(name for name, _ in lines) == sorted(NAMES)
    assert len({losses for _, losses in lines}) == 1
    assert out.count("device 0 F0") == len(lines)


def test_adapters(example: Example) -> None:
    out = example("adapters", "--steps 2 --batch 4 --width 8 --layers 3 --blocks 1 --rank 1", "tqdm")
    assert "8 of " in out and "down.weight" in out


@pytest.mark.parametrize(("model", "needs"), [("gpt2", "transformers"), ("resnet50", "torchvision")])
def test_taken_apart(model: str, needs: str, example: Example) -> None:
    out = example("taken_apart", f"{model} --steps 1 --batch 4", f"tqdm {needs}")
    for what in ("logits", "gradients"):
        assert float(out.partition(f"{what} differ by at most ")[2].split()[0]) < 1e-4
    theirs, ours = out.rsplit("the original, with what was learnt: ")[1].split("; the pipeline: ")
    assert float(theirs) == pytest.approx(float(ours), abs=1e-2)


def test_unet(tmp_path: Path, example: Example) -> None:
    picture = tmp_path / "new" / "unet.png"
    small = f"--steps 2 --depth 2 --width 2 --size 16 --batch 4 --balance 2 2 2 --out {picture}"
    out = example("unet", small, OF_MODEL)
    assert picture.stat().st_size > 0
    assert "mean IoU" in out and "no shapes" in out
    assert "The losses of the 2 steps differ by at most 0.0e+00" in out
    assert "0 and 2" in out and "2 and 3" not in out  # three partitions


def test_accumulate(example: Example) -> None:
    lines = example("accumulate", "--steps 4 --window 3 --layers 2 --width 8").splitlines()
    losses = [line.split()[1:] for line in lines if re.match(r" +\d-\d ", line)]
    assert len(losses) == 4
    for ours, plain, _ in losses:
        assert float(ours) == pytest.approx(float(plain), rel=1e-5)


@pytest.mark.parametrize("more", ["", "--recompute --schedule GPipe"])
def test_volumes(more: str, example: Example) -> None:
    lines = example("volumes", f"--steps 2 --window 3 --size 8 --width 2 {more}").splitlines()
    rows = [line.split()[1:] for line in lines if re.match(r" +(\d-\d|background|ball|rod) ", line)]
    assert len(rows) == 2 + 3
    for ours, plain, _ in rows:
        assert float(ours) == pytest.approx(float(plain), rel=1e-4)


def test_mixed_precision(main: Callable[..., Any]) -> None:
    small, dtypes = "--steps 3 --batch 4 --context 8 --dtype", ("float32", "bfloat16", "float16")
    losses = {dtype: main("mixed_precision", f"{small} {dtype}", OF_MODEL) for dtype in dtypes}
    for dtype in dtypes[1:]:
        assert losses[dtype] == pytest.approx(losses["float32"], rel=0.01) and losses[dtype] != losses["float32"]


def test_sequences(example: Example) -> None:
    out = example("sequences", "--steps 2 --batch 8 --width 4 --longest 5", "tqdm")
    assert re.match(r"\d+\.\d% of 1000 new numbers of up to 5 digits", out)


def test_huggingface(example: Example) -> None:
    small = "--steps 8 --batch 6 --layers 2 --width 16 --chunks 3"
    out = example("huggingface", small, "transformers accelerate")
    assert "model.embed_tokens" in out, "the table of the partitions"
    rows = re.findall(r"^ +(\d\.\d{7}) +(\d\.\d{7}) +-?\d\.\d{7}$", out, re.MULTILINE)
    assert len(rows) == 2
    for ours, plain in rows:
        assert float(ours) == pytest.approx(float(plain), rel=1e-5)


def test_lora(example: Example) -> None:
    small = "--steps 4 --batch 6 --layers 2 --width 16 --chunks 3 --schedule ZeroBubble"
    out = example("lora", small, "transformers peft")
    assert len(re.findall(r"^loss \d\.\d{3}, then \d\.\d{3}$", out, re.MULTILINE)) == 2
    trained, total = map(int, re.findall(r"^(\d+) of (\d+) parameters", out, re.MULTILINE)[0])
    assert 0 < trained < total / 2
    assert re.search(r"^Saved \d+ kB of adapters", out, re.MULTILINE)


def test_qlora(example: Example) -> None:
    small = "--steps 3 --batch 6 --layers 2 --width 64 --chunks 3"
    out = example("qlora", small, "transformers peft accelerate bitsandbytes")
    assert "base_model.model.model.embed_tokens" in out, "the table of the partitions"
    rows = re.findall(r"^ +(\d) +(\d\.\d{4}) +(\d\.\d{4})$", out, re.MULTILINE)
    assert [step for step, *_ in rows] == ["1", "2", "3"]
    for _, ours, plain in rows:
        assert float(ours) == pytest.approx(float(plain), rel=1e-3)  # in bfloat16
    assert re.search(r"^Saved \d+ kB of adapters, and \d+ kB of weights with them merged$", out, re.MULTILINE)


@pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning")  # as TRL 1.16 uses it
def test_dpo(example: Example) -> None:
    out = example("dpo", "--steps 3 --batch 3 --layers 2 --width 16 --chunks 3", "transformers peft trl")
    assert "base_model.model.model.embed_tokens" in out, "the table of the partitions"
    number = r"(-?\d\.\d+)"
    rows = re.findall(rf"^ +\d  {number} +{number} +{number} +{number}$", out, re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        loss, margin, *plain = map(float, row)
        assert [loss, margin] == pytest.approx(plain, abs=2e-3)


def test_diffusion(example: Example) -> None:
    lines = example("diffusion", "--steps 10 --batch 6 --width 8 --chunks 3", "diffusers sklearn").splitlines()
    losses = [line.split()[1:] for line in lines if re.match(r" +\d-\d ", line)]
    assert len(losses) == 10
    for ours, plain, _ in losses:
        assert float(ours) == pytest.approx(float(plain), rel=1e-4)
    assert lines[-9] == "Digits that it draws:" and {len(line) for line in lines[-8:]} == {4 * 16 + 3 * 3}


def test_diffusion_lora(example: Example) -> None:
    small = "--steps 2 --batch 2 --width 16 --rank 2 --window 3 --windows 3"
    lines = example("diffusion_lora", small, "diffusers peft sklearn").splitlines()
    losses = [line.split()[1:] for line in lines if re.match(r" +\d-\d ", line)]
    assert len(losses) == 3
    for ours, plain, _ in losses:
        assert float(ours) == pytest.approx(float(plain), rel=1e-5)
    assert any(re.fullmatch(r"Saved \d+ kB of adapters", line) for line in lines)
    assert {len(line) for line in lines[-8:]} == {4 * 16 + 3 * 3}
