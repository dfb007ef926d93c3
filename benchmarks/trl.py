"""Preference and reinforcement learning by trainers of TRL: a pipelined policy beside the plain one.

The real DPOTrainer and GRPOTrainer train LoRA adapters of a small Llama with random weights. The reference model is the
policy with its adapters switched off. A step of GRPO generates completions first, token by token: there the devices of
a pipeline work one after the other.

Layers sleep, so that devices work side by side on any machine: forward for each token of each row, but at least as long
as a device takes to read their weights, which is what a token of generation costs; backward as long as forward, as
weights are frozen. Beside these times stands what sleep hides: the CPU time of the process, by which the pipeline is
dearer. Each way trains the same steps in every turn, and the turns of the ways alternate. A figure of a turn is its
median step, without the first; ratios are taken within a turn. Completions have a fixed length.

    pip install --target .peers/trl/site-packages trl datasets    # without torch and transformers: --no-deps
    python -m benchmarks.trl --folder .peers/trl/site-packages    # ten minutes
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from benchmarks.campaigns.architectures.operators import register_missing
from benchmarks.peers import examples_on_path
from benchmarks.program import Part, Program, Progress
from benchmarks.records import MIB, Row, ratios, shown, spread, table_of
from torchgpipe import pipelined
from torchgpipe.front.pipelined_module import runs_of

__all__ = ["PARTS"]

PEERS = ("trl", "transformers", "peft", "datasets")


#: The devices of each way.
WAYS = {"plain": 1, "pipelined, 2 devices": 2, "pipelined, 4 devices": 4}


class Sleep(Function):
    """Sleep forward, and as long backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sleep(ctx.seconds)
        return grad, None


def policy(args: argparse.Namespace) -> Any:
    """Return a Llama with random weights and LoRA adapters, always the same."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_hidden_layers": args.layers}
    marks = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    base = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes, **marks))

    def sleeps(_: Any, __: Any, output: Tensor) -> Any:
        return Sleep.apply(output, max(args.least, args.token * output.shape[:2].numel()))  # type: ignore[no-untyped-call]

    for layer in base.model.layers:
        layer.register_forward_hook(sleeps)
    return get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))


def by_dpo(model: Any, settings: dict[str, Any], args: argparse.Namespace) -> Any:
    """Return a trainer that prefers one of two completions."""
    from datasets import Dataset
    from dpo import tokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": prompt(k), "chosen": f"{k}" * args.tokens, "rejected": f"{9 - k}" * args.tokens} for k in range(10)
    ]
    config = DPOConfig(per_device_train_batch_size=args.rows // 2, **settings)  # Each pair is two rows.
    return DPOTrainer(model, args=config, train_dataset=Dataset.from_list(10 * rows), processing_class=tokenizer())


def by_grpo(model: Any, settings: dict[str, Any], args: argparse.Namespace) -> Any:
    """Return a trainer that rewards digits in completions of a fixed length."""
    from datasets import Dataset
    from dpo import tokenizer
    from trl import GRPOConfig, GRPOTrainer

    def digits(completions: list[str], **_: Any) -> list[float]:
        return [sum(map(str.isdigit, text)) / args.tokens for text in completions]

    lengths = {"max_completion_length": args.tokens, "generation_kwargs": {"min_new_tokens": args.tokens}}
    config = GRPOConfig(
        per_device_train_batch_size=args.rows, num_generations=args.rows // 2, beta=0.04, **lengths, **settings
    )
    rows = Dataset.from_list([{"prompt": prompt(k % 10)} for k in range(100)])
    return GRPOTrainer(model, digits, args=config, train_dataset=rows, processing_class=tokenizer())


def prompt(k: int) -> str:
    return f"Say {k} now: "


METHODS: dict[str, Callable[[Any, dict[str, Any], argparse.Namespace], Any]] = {"DPO": by_dpo, "GRPO": by_grpo}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train by each method, each way in turn."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.folder is not None:
        sys.path.insert(0, str(args.folder.resolve()))
    register_missing()
    examples_on_path()
    versions = {name: importlib.metadata.version(name) for name in PEERS}
    progress, rows = Progress(len(METHODS) * args.turns), list[Row]()
    for method in METHODS:
        runs: dict[str, list[Row]] = {way: [] for way in WAYS}
        for turn in range(args.turns):
            progress(f"{method}, turn {turn}")
            for way in [*WAYS][:: -1 if turn % 2 else 1]:
                runs[way].append(trained(method, way, args))
        rows += [summed_up(method, way, runs) for way in WAYS]
        yield {
            "versions": versions,
            "layers": args.layers,
            "chunks": args.chunks,
            "batch": args.rows,
            "unit": "seconds, bytes",
            "rows": rows,
        }


def trained(method: str, way: str, args: argparse.Namespace) -> Row:
    """Return the times of a run, its losses, and the bytes of the parameters on each device."""
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    devices, model = WAYS[way], policy(args)
    by_device = [sum([parameter.nbytes for parameter in model.parameters()])]
    if devices > 1:
        ids = torch.randint(3, 100, (2, 16))
        places = [f"cpu:{j}" for j in range(devices)]
        pipelined(model, {"input_ids": ids, "labels": ids}, chunks=args.chunks, balance="parameters", devices=places)
        runs = runs_of(model)
        assert runs is not None
        by_device = [0] * devices
        for name, parameter in model.named_parameters():
            by_device[runs.settings.column_of(name.rpartition(".")[0])] += parameter.nbytes
    steps: list[tuple[float, float, float]] = []
    generating = 0.0

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Notes how long a step takes, and how long of that it generates."""

        began = 0.0, 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal generating
            self.began, generating = (perf_counter(), process_time()), 0.0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            began, used = self.began
            steps.append((perf_counter() - began, generating, process_time() - used))

    generate = model.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal generating
        began = perf_counter()
        output = generate(*args, **kwargs)
        generating += perf_counter() - began
        return output

    model.generate = timed
    with tempfile.TemporaryDirectory() as folder, silenced():
        settings = {"output_dir": folder, "max_steps": args.steps + 1, "logging_steps": 1, "learning_rate": 1e-3}
        settings |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False}
        settings |= {"dataloader_pin_memory": False, "gradient_checkpointing": False}
        trainer = METHODS[method](model, settings, args)
        trainer.add_callback(Clock())
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    whole, part, used = ([step[k] for step in steps[1:]] for k in range(3))
    return {
        "step": statistics.median(whole),
        "generation": statistics.median(part),
        "training": statistics.median([a - b for a, b in zip(whole, part)]),
        "cpu": statistics.median(used),
        "losses": losses,
        "parameters": by_device,
    }


@contextmanager
def silenced() -> Iterator[None]:
    """Let nobody print what each trainer says of each step."""
    import datasets

    datasets.disable_progress_bars()
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115 -- closed below
    try:
        yield
    finally:
        sys.stdout.close()
        sys.stdout = out


def summed_up(method: str, way: str, runs: dict[str, list[Row]]) -> Row:
    """Return the row of a way: its times, and what it gains over the plain policy in one thread."""
    own, plain = runs[way], runs["plain"]
    row: Row = {"method": method, "way": way, "devices": WAYS[way]}
    for part in ("step", "generation", "training", "cpu"):
        times = [run[part] for run in own]
        if not any(times):
            continue  # DPO generates nothing.
        row[part] = spread(times)
        row[f"{part}, speed"] = ratios(times, [run[part] for run in plain])
    pairs = [(a, b) for run, other in zip(own, plain) for a, b in zip(run["losses"], other["losses"], strict=True)]
    row["losses differ by"] = max([abs(a - b) for a, b in pairs])
    row["largest loss"] = max([abs(b) for _, b in pairs])
    row["parameters"] = own[0]["parameters"]
    return row


def trainers_of_trl(result: dict[str, Any]) -> str:
    """Return a table of the ways of each method."""

    def speed(part: str) -> Callable[[Row], str]:
        return lambda row: shown(row.get(f"{part}, speed"), 2)

    columns: dict[str, Any] = {"method": "method", "policy": "way", "step, s": lambda row: shown(row["step"], 2)}
    columns |= {"of it generation, s": lambda row: shown(row.get("generation"), 2)}
    columns |= {f"{part}: speed over plain": speed(part) for part in ("step", "training", "generation")}
    columns |= {"CPU time of a step, s": lambda row: shown(row["cpu"], 2)}
    columns |= {"losses differ by at most": lambda row: f"{row['losses differ by']:.0e}"}
    columns |= {"parameters, MiB": lambda row: " + ".join([f"{part / MIB:.1f}" for part in row["parameters"]])}
    return table_of(result["rows"], columns)


PARTS = {"trainers": Part("trl", measure, {"trainers of TRL": trainers_of_trl}, cpu=True)}


def main() -> None:
    program = Program("trl", __doc__, PARTS)
    program.add("--folder", type=Path, help="where TRL and what it needs are, if they are not installed")
    program.add("--turns", type=int, default=3)
    program.add("--steps", type=int, default=2, help="steps of a turn that count")
    program.add("--layers", type=int, default=8)
    program.add("--width", type=int, default=32)
    program.add("--rows", type=int, default=16, help="rows of a mini-batch")
    program.add("--tokens", type=int, default=64, help="tokens of a completion")
    program.add("--chunks", type=int, default=8)
    program.add("--token", type=float, default=2e-4, help="seconds that a layer takes for a token of a row")
    program.add("--least", type=float, default=4e-3, help="seconds that a layer takes at least")
    program.run()


if __name__ == "__main__":
    main()
