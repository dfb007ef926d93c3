"""Train a language model, and resume after an interruption from the last saved state.

    python examples/resume.py                    # some seconds on two CPU cores; stop it, and start it again
    python examples/resume.py --partitions 3     # resumes with another balance

A run that was killed and resumed has the same losses as an uninterrupted run, on the CPU to the last bit. So the file
has all state that the next step depends on: the parameters, the state of the optimizer and its schedule, and the
random states of the layers (there is dropout) and of the order of the batches. The file is written under a temporary
name, and replaces the old file when it is complete.

The model and the text are those of ``language_model.py``. The example uses all accelerators of the machine. On a
machine without accelerators the partitions share the CPU.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from language_model import devices_for, language_model, read_text, windows
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from torchgpipe import GPipe


def build(options: argparse.Namespace) -> GPipe:
    torch.manual_seed(0)
    model = language_model(layers=3, width=64, heads=4, context=options.context)
    model.insert(1, nn.Dropout(0.1))
    partitions = options.partitions or min(torch.accelerator.device_count() or 2, len(model))
    balance = [len(part) for part in torch.arange(len(model)).tensor_split(partitions)]
    return GPipe(model, balance, devices=devices_for(partitions), chunks=options.chunks)


class Run:
    """A training run whose complete state can be saved and loaded."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = build(options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=options.steps)
        self.order = torch.Generator().manual_seed(0)
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "order": self.order.get_state(),
            "random": random_states(),
            "losses": self.losses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.order.set_state(state["order"])
        set_random_states(state["random"])
        self.losses = state["losses"]

    def step(self, text: torch.Tensor, options: argparse.Namespace) -> None:
        starts = torch.randint(len(text) - options.context, (options.batch,), generator=self.order)
        inputs, targets = windows(text, starts, options.context)
        scores = self.model(inputs.to(self.model.devices[0]))
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten().to(scores.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses.append(loss.item())


def random_states() -> list[torch.Tensor]:
    """Return the random states of the CPU and of every accelerator."""
    if not torch.accelerator.is_available():
        return [torch.get_rng_state()]
    return [torch.get_rng_state(), *torch.get_device_module().get_rng_state_all()]


def set_random_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for index, state in enumerate(states[1 : 1 + torch.accelerator.device_count()]):
        torch.get_device_module().set_rng_state(state, index)


def save(state: dict[str, Any], path: Path) -> None:
    """Save atomically: if this is interrupted, the old file is still complete."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train, and resume after an interruption.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--file", type=Path, default=Path("demo/resume.pt"), help="file of the saved state")
    add("--every", type=int, default=5, help="number of steps between saves")
    add("--partitions", type=int, default=0, help="0 for one on each accelerator, or two on the CPU")
    add("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    add("--batch", type=int, default=16, help="windows of text in a mini-batch")
    add("--context", type=int, default=32, help="bytes in a window")
    add("--steps", type=int, default=100, help="number of training steps")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the losses of all steps, including those before an interruption."""
    options = parse_options(arguments)
    if not torch.accelerator.is_available():
        torch.set_num_threads(1)  # The model is small: more threads would wait for each other.
    options.file.parent.mkdir(parents=True, exist_ok=True)
    text, _ = read_text(None)
    run = Run(options)
    if options.file.exists():
        run.load_state_dict(torch.load(options.file, map_location="cpu", weights_only=True))
        print(f"resuming from {options.file} after step {len(run.losses)}")

    with tqdm(initial=len(run.losses), total=options.steps, unit=" steps") as progress:
        while len(run.losses) < options.steps:
            run.step(text, options)
            if len(run.losses) % options.every == 0 or len(run.losses) == options.steps:
                save(run.state_dict(), options.file)
            progress.set_postfix(loss=f"{run.losses[-1]:.3f}", refresh=False)
            progress.update()
    print(f"first loss {run.losses[0]:.3f}, last loss {run.losses[-1]:.3f}; delete {options.file} to start again")
    return run.losses


if __name__ == "__main__":
    main()
