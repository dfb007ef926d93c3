"""Commands: what they print, for people and for programs, and that an error is one line and a status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchgpipe
from torchgpipe import GPipe
from torchgpipe.command.load import moved_to_meta, on_meta
from torchgpipe.command.main import main
from torchgpipe.command.report import read_memories
from torchgpipe.devices import links
from torchgpipe.devices.memory import storages_of
from torchgpipe.schedule import program, simulate
from torchgpipe_balancing.held import SavedTensors

USERS = """
import torch
from torch import nn

def layers():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(8)])
    return model, torch.randn(4, 64), {"loss_fn": lambda output, target: output.square().mean(), "reduce": "mean"}

def with_target():
    model, sample, _ = layers()
    return model, sample, {"loss_fn": nn.functional.mse_loss, "target": torch.randn(4, 64)}

def without_target():
    return *with_target()[:2], {"loss_fn": nn.functional.mse_loss}
class Mapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x

def compared():
    return Mapping(), torch.randn(4, 64), {"loss_fn": nn.functional.mse_loss, "target": torch.randn(4, 64)}

def broken():
    raise ZeroDivisionError("a bug\\nof the user")

def nothing():
    return 3

class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x, mask):
        if mask.all():
            for block in self.blocks:
                q = block(x).unflatten(-1, (4, 8)).transpose(1, 2)
                x = x + nn.functional.scaled_dot_product_attention(query=q, key=q, value=q).transpose(1, 2).flatten(2)
        return x

def reading():
    return Reading(), {"x": torch.randn(2, 64, 32), "mask": torch.ones(2, 64, dtype=torch.bool)}
"""


@pytest.fixture
def users(tmp_path: Path) -> Path:
    path = tmp_path / "users.py"
    path.write_text(USERS)
    return path


def kept_by(run: Callable[[], torch.Tensor], owned: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return a loss, and the bytes that autograd keeps for its backward, without those of tensors that are there."""
    saved, there = SavedTensors(), storages_of(owned)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda one: one.tensor):
        loss = run()
    return loss, sum([size for key, size in saved.memories().items() if key not in there])


def data(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_schedule_is_drawn_and_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = data(capsys, "schedule", "ZB-V", "-n", 3, "-m", 6, "--svg", tmp_path / "it.svg")
    simulated = simulate(program("ZB-V", 6, [0, 1, 2, 2, 1, 0]))
    assert told["idle"] == pytest.approx(simulated.bubble)
    assert told["kept"] == [peak / 2 for peak in simulated.peaks]
    assert [[tuple(action) for action in row] for row in told["program"]] == program("ZB-V", 6, [0, 1, 2, 2, 1, 0])
    assert (tmp_path / "it.svg").read_text().startswith("<svg")
    assert main(["schedule", "1F1B", "-n", "2", "-m", "3", "--costs", "1,2,1"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("device 1 ...")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("paint", "invalid choice: 'paint'"),
        ("schedule 2F2B", "schedule must be one of GPipe"),
        ("schedule 1F1B -n 0", "-n and -m must be 1 or more"),
        ("schedule 1F1B -m three", "invalid int value: 'three'"),
        ("schedule 1F1B --costs 1,2", "--costs must be three positive numbers"),
        ("schedule 1F1B --costs 1,nan,1", "--costs must be three positive numbers"),
        ("schedule 1F1B --svg /nowhere/it.svg", "No such file"),
        ("links --devices cuda:77", "'cuda:77' is not there"),
        ("plan {users}:layers", "required: --batch"),
        ("plan {users}:gone --batch 8", "has no function 'gone'"),
        ("plan {users}:layers --batch 8 --devices cpu:0,cpu:1 --memory 1x2GiB", "memory has 1 numbers"),
        ("fit {users}:layers", "required: --devices"),
        ("fit {users}:layers --devices two", "a size is a number of bytes"),
        ("fit {users}:layers --devices 0x2GiB", "devices are given as 2x24GiB"),
        ("fit {users}:layers --devices 2x24", "devices are given as 2x24GiB, or 24GiB,16GiB, but got '2x24'"),
        ("fit {users}:layers --devices 2x1GiB --batch 0", "--batch and --length must be 1 or more"),
        ("fit {users}:layers --devices 2x1GiB --lora 0", "--lora must be a rank of 1 or more"),
        ("fit {users}:nothing --devices 2x1GiB", "must return a module and a sample, .* but returned int"),
        ("fit {users}:broken --devices 2x1GiB", "ZeroDivisionError: a bug of the user, in .*users.py:\\d+$"),
        ("fit {users}:without_target --devices 2x1GiB", "loss_fn failed without a target; give that of the sample"),
        ("plan {users}:without_target --batch 8", "loss_fn failed without a target; give that of the sample"),
        ("fit /nowhere --devices 2x1GiB", "transformers reads no configuration from '/nowhere'"),
    ],
)
def test_an_error_is_one_line_and_a_status(
    line: str, message: str, users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = main(line.format(users=users).split())
    except SystemExit as stopped:
        status = stopped.code
    out, error = capsys.readouterr()
    assert (status, out) == (1, "")
    assert error.count("\n") == 1
    assert re.search(message, error)


def test_links_are_measured_and_a_broken_one_says_what_to_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = data(capsys, "links", "--devices", "cpu:0,cpu:1")
    assert (first["from"], first["to"], second["works"]) == ("cpu:0", "cpu:1", True)
    assert first["latency"] > 0
    assert main(["links", "--devices", "cpu"]) == 0
    assert capsys.readouterr().out == "no links: the only device is cpu\n"

    def broken(devices: Any, stacklevel: int) -> None:
        links.warnings.warn("copies are broken", stacklevel=2)

    monkeypatch.setattr("torchgpipe.command.links.verify_links", broken)
    assert main(["links", "--devices", "cpu:0,cpu:1"]) == 0
    assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().out


def test_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    told = data(capsys, "env")
    assert (told["torchgpipe"], told["torch"]) == (torchgpipe.__version__, torch.__version__)
    assert main(["env"]) == 0
    assert f"torch       {torch.__version__}" in capsys.readouterr().out


def test_a_plan_is_what_the_function_of_a_file_asks_for(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", f"{users}:layers", "--batch", 8, "--devices", "cpu:0,cpu:1", "--seconds", 0]
    told = data(capsys, *line)
    assert sum(told["balance"]) == 8
    assert told["schedule"] in torchgpipe.schedule.NAMES  # type: ignore[attr-defined]
    assert len(told["memory"]) == 2


def test_what_fits_is_counted(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = data(capsys, "fit", f"{users}:layers", "--devices", "2x4MiB", "--batch", 32)
    namespace: dict[str, Any] = {}
    exec(USERS, namespace)
    model, sample, options = namespace["layers"]()
    optimizer = torch.optim.AdamW(model.parameters())
    weights = list(model.parameters())
    loss, kept = kept_by(lambda: options["loss_fn"](model(sample), None), [*weights, sample])
    loss.backward()
    optimizer.step()
    states = [state for of in optimizer.state.values() for state in of.values() if state.numel() > 1]
    assert told["parameters"] == sum([weight.numel() for weight in weights])
    assert told["weights"] == told["gradients"] == sum([weight.nbytes for weight in weights])
    assert told["optimizer"] == sum([state.nbytes for state in states])
    assert told["activations"] == kept
    assert told["operations"] == 8 * 2 * 2 * 4 * 64 * 256
    ways = {way["name"]: way for way in told["ways"]}
    assert not ways["one card"]["fits"] and ways["1F1B"]["fits"]
    assert ways["device_map"]["idle"] == pytest.approx(0.5, abs=0.02)
    assert 1.5 < ways["ZeroBubble"]["speed"] < 2
    assert max(ways["1F1B, recomputed"]["devices"]) < max(ways["1F1B"]["devices"])
    for way in told["ways"]:
        if "torchgpipe." in way["write"]:
            made = way["write"].replace("cuda:", "cpu:")
            names = {"torchgpipe": torchgpipe, "model": namespace["layers"]()[0], "target": None}
            names |= {"loss_fn": nn.functional.mse_loss, "input": torch.randn(32, 64), "target": torch.randn(32, 64)}
            exec(made, names)
            assert isinstance(names["model"], GPipe)
            assert names["loss"].isfinite()


def test_a_loss_function_has_its_target_and_ways_need_a_layer_a_device(
    users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = data(capsys, "fit", f"{users}:with_target", "--devices", "9x4MiB")
    assert [way["name"] for way in told["ways"]] == ["one card", "one card, recomputed", "offload"]
    line = ["plan", f"{users}:with_target", "--batch", 8, "--devices", "cpu:0,cpu:1", "--seconds", 0]
    assert sum(data(capsys, *line)["balance"]) == 8


def test_a_network_of_convolutions_is_counted_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Volumes come one at a time, so a micro-batch has one row."""
    from torchgpipe_balancing.planning.fit import fit

    monkeypatch.syspath_prepend(Path(torchgpipe.__file__).parent.parent / "examples")
    from volumes import UNet, loss_fn

    model, volume, classes = UNet((2, 4, 4)), torch.randn(1, 1, 8, 8, 8), torch.zeros(1, 8, 8, 8).long()
    _, kept = kept_by(lambda: loss_fn(model(volume), classes), [*model.parameters(), volume])
    given: dict[str, Any] = {"loss_fn": loss_fn, "target": classes.to("meta")}
    found = fit(moved_to_meta(model), volume.to("meta"), [2.0**20] * 2, **given)
    assert (found.rows, found.chunks, found.activations) == (1, 8, kept)


def test_a_loss_function_is_counted_with_its_target(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was once given no target, as the first example of the documentation, and failed; and the lines had no loss."""
    told = data(capsys, "fit", f"{users}:compared", "--devices", "2x1MiB", "--batch", 16)
    assert told["activations"] == 5 * 4 * 64 * 4  # The output of each tanh, and the difference.
    written = {way["name"]: way["write"] for way in told["ways"]}["1F1B"]
    namespace: dict[str, Any] = {}
    exec(USERS, namespace)
    model, sample, options = namespace["compared"]()
    x, y = torch.randn(16, 64), torch.randn(16, 64)
    expected = nn.functional.mse_loss(model(x), y)
    names = {"torchgpipe": torchgpipe, "model": model, "sample": sample, "input": x, "target": y}
    exec(written.replace("cuda:", "cpu:"), names | {"loss_fn": options["loss_fn"]}, names)
    torch.testing.assert_close(names["loss"], expected.detach())


def test_a_model_that_looks_at_values_is_counted_with_fused_attention(users: Path) -> None:
    from torchgpipe_balancing.planning.fit import fit

    model, sample, options = on_meta(f"{users}:reading")
    found = fit(model, sample, read_memories("1MiB,2 MiB"), batch=8, **options)
    matrices = 4 * 2 * 4 * 64 * 64 * 4  # Of all pairs of tokens, by layer and head.
    assert 0 < found.activations < matrices
    assert found.operations > 4 * 2 * 2 * 64 * 32 * 32
    assert [way.name for way in found.ways][:2] == ["one card", "one card, recomputed"]


def configuration(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        max_position_embeddings=32,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    return folder


def test_a_configuration_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = configuration(tmp_path)
    told = data(capsys, "fit", folder, "--devices", "2x1GiB", "--dtype", "fp32")
    assert told["weights"] == told["gradients"] == 4 * told["parameters"]
    assert "'model.layers." in told["ways"][-2]["write"]
    half = data(capsys, "fit", folder, "--devices", "2x1GiB")
    assert 2 * half["weights"] == told["weights"]


def test_a_configuration_whose_model_reads_more_than_a_row_of_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.CLIPConfig(text_config=sizes, vision_config=sizes, architectures=["CLIPModel"])
    config.save_pretrained(tmp_path)
    assert main(["fit", str(tmp_path), "--devices", "2x1GiB"]) == 1
    assert "with input_ids the model fails; give a function that makes it with a sample" in capsys.readouterr().err


def test_adapters(tmp_path: Path, users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    line = ["fit", configuration(tmp_path), "--devices", "2x1GiB", "--dtype", "fp32"]
    whole, lora, four = [data(capsys, *line, *option) for option in ([], ["--lora", 16], ["--frozen-4bit"])]
    assert lora["gradients"] == four["gradients"] == lora["weights"] - whole["weights"]
    assert lora["parameters"] == four["parameters"] == whole["parameters"] + lora["gradients"] // 4
    half = data(capsys, "fit", f"{users}:layers", "--devices", "2x1GiB", "--lora", 4, "--dtype", "bf16")
    assert half["gradients"] == 4 * 8 * 2 * 4 * (64 + 256)  # In float32, as PEFT has them.
    # All weights but those of the embedding, the norms and the head, in place of 32 bits; a scale for each 64.
    linear = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert lora["weights"] - four["weights"] == linear * (4 - 1 / 2)


def test_python_runs_the_commands_without_what_libraries_warn_of(users: Path) -> None:
    users.write_text(f"import logging, warnings; warnings.warn('old'); logging.warning('odd'){USERS}")
    command = [sys.executable, "-m", "torchgpipe", "fit", f"{users}:layers", "--devices", "2x4MiB"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("264,704 parameters") and not done.stderr


def test_a_pipe_that_is_closed_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "torchgpipe", "schedule", "1F1B"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
