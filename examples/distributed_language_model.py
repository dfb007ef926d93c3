"""Train the language model of language_model.py in several processes, each of which holds a part of the layers.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/distributed_language_model.py

takes about a minute on two CPU cores. The same training in one process, on the same text:

    python examples/language_model.py --pipeline

The losses differ by rounding, which grows during training; with ``--dtype float64`` they agree to the digits shown.
Every process runs this script and makes the same calls; only the first process prints and draws.
After an interruption, start the script again with the same ``--checkpoints`` to resume from the last checkpoint.

The processes find each other over the loopback interface of this machine, which other machines cannot reach.
docs/scaling.rst shows how to start them on several machines.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from language_model import Run, add_model_and_training, draw_losses, language_model, read_text, windows
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from torchgpipe.distributed import Checkpoints, DistributedGPipe


def cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    # Under autocast the scores have half the precision.
    return F.cross_entropy(scores.to(torch.promote_types(scores.dtype, torch.float32)).flatten(0, 1), target.flatten())


def build(options: argparse.Namespace) -> DistributedGPipe:
    """Build the model of language_model.py. Build a larger one on the meta device."""
    torch.manual_seed(options.seed)
    model = language_model(options.layers, options.width, options.heads, options.context)
    if options.dtype == "float64":
        model.double()
    balance = [len(part) for part in torch.arange(len(model)).tensor_split(dist.get_world_size())]
    return DistributedGPipe(
        model,
        balance,
        chunks=options.chunks,
        schedule=options.schedule,
        checkpoint=options.checkpoint,
        loss_fn=cross_entropy,
    )


def train(options: argparse.Namespace, learn: Tensor, held_out: Tensor) -> Run:
    model = build(options)
    print(f"{model.place}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters on {model.device}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps, pct_start=0.1)
    run = Run("distributed")

    checkpoints = Checkpoints(options.checkpoints, model, optimizer) if options.checkpoints else None
    if checkpoints and (state := checkpoints.load()):
        schedule.load_state_dict(state["schedule"])
        run.losses, run.held_out = state["losses"], state["held_out"]

    order = torch.Generator().manual_seed(options.seed)
    tokens = options.batch * options.context
    total = options.steps * tokens
    progress = tqdm(desc=run.name, total=total, unit=" tokens", unit_scale=True, disable=not first())
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(learn) - options.context, (options.batch,), generator=order)
        progress.update(tokens)
        if step <= len(run.losses):
            continue  # The checkpoint has this step; only its random numbers are drawn again.
        loss = loss_at(model, learn, starts, options)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

        run.losses.append(loss.item())
        progress.set_postfix(loss=f"{run.losses[-1]:.3f}", refresh=False)
        if step % 50 == 0 or step == options.steps:
            run.held_out[step] = evaluate(model, held_out, options)
            if checkpoints:
                state = {"schedule": schedule.state_dict(), "losses": run.losses, "held_out": run.held_out}
                checkpoints.save(step, state, asynchronous=True)
    progress.close()
    if checkpoints:
        checkpoints.wait()
    return run


def loss_at(model: DistributedGPipe, text: Tensor, starts: Tensor, options: argparse.Namespace) -> Tensor:
    """Return the mean loss on the windows of the text that begin at ``starts``; add up its gradients if they are on."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
        return model.step(*windows(text, starts, options.context))


@torch.no_grad()
def evaluate(model: DistributedGPipe, held_out: Tensor, options: argparse.Namespace) -> float:
    """Return the mean loss on 128 windows, evenly spaced over the held-out text."""
    model.eval()
    starts = torch.linspace(0, len(held_out) - options.context - 1, 128).long()
    losses = [loss_at(model, held_out, some, options).item() for some in starts.split(32)]
    model.train()
    return sum(losses) / len(losses)


def first() -> bool:
    return dist.get_rank() == 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a language model through a pipeline over several processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument_group("the pipeline").add_argument
    add("--chunks", type=int, default=4, help="number of micro-batches in a mini-batch")
    add("--schedule", default="1F1B", choices=["GPipe", "1F1B"], help="order of the micro-batches")
    add("--checkpoint", default="except_last", choices=["always", "except_last", "never"], help="what to recompute")
    add_model_and_training(parser)
    add = parser.add_argument_group("the results").add_argument
    add("--checkpoints", type=Path, help="folder to save to every 50 steps, and to go on from")
    add("--curve", type=Path, default=Path("demo/distributed_language_model.png"), help="where to draw the losses")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    # torchrun sets these. Without it, there is a pipeline of one process.
    for name, value in [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")]:
        os.environ.setdefault(name, value)
    if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(timeout=timedelta(minutes=2))

    learn, held_out = read_text(options.text)
    run = train(options, learn, held_out)
    if first():
        draw_losses([run], options.curve)
        print(f"training loss {run.training_loss:.6f}, held-out loss {run.held_out_loss:.6f}")
        print(f"The loss curve is in {options.curve}.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
