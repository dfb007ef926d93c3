"""Train a Llama of transformers over several processes, kill one of them, and go on from the last checkpoint.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or the second run finds the addresses of ended processes
    torchrun --nproc-per-node 2 --max-restarts 1 examples/processes.py

takes less than a minute on two CPU cores. Every process runs this script and makes the same calls; each keeps the
weights of its own half of the model. The last process kills itself at step 12 of the first run. The other one says that
it has waited in vain; torchrun starts both again, and they go on with the checkpoint of step 10.

In the end the model is saved as a whole, and the first process loads it without torchgpipe.
The example needs `pip install transformers`.
"""

import argparse
import os
import signal
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import torchgpipe
from torchgpipe.distributed import Checkpoints

CONTEXT = 64  # characters


def text() -> Tensor:
    """Return the manual that comes with Python, as numbers of characters."""
    return torch.tensor(list("\n".join([text for _, text in sorted(topics.items())]).encode("ascii", "replace")))


def windows(characters: Tensor, batch: int, step: int) -> dict[str, Tensor]:
    """Return the arguments of a step: the same in all processes of a pipeline."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(characters) - CONTEXT, (batch,), generator=draw)
    ids = torch.stack([characters[start : start + CONTEXT] for start in starts])
    return {"input_ids": ids, "labels": ids}


def build(options: argparse.Namespace) -> LlamaForCausalLM:
    """Make the same model in every process; one that fits into none is made on the meta device, and loaded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(options: argparse.Namespace) -> list[float]:
    """Train, and return the losses, which are those of a run that nobody has interrupted."""
    characters, model = text(), build(options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torchgpipe.pipelined(model, windows(characters, 4, 0), chunks=4, mesh=mesh, balance="parameters")
    rank, is_first_run = dist.get_rank(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"rank {rank} has {count / 1000:.0f} thousand parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoints = Checkpoints(options.checkpoints, model, optimizer)
    state = checkpoints.load() or {"losses": []}
    losses: list[float] = state["losses"]
    for step in range(len(losses), options.steps):
        if step == options.kill_at and is_first_run and rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model.step(**windows(characters, options.batch, step))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step:2}  loss {losses[-1]:.4f}", flush=True)
        if (step + 1) % 5 == 0:
            checkpoints.save(step + 1, {"losses": losses}, asynchronous=True)
    checkpoints.wait()
    model.save_pretrained(options.checkpoints / "model")
    return losses


@torch.no_grad()
def loss_of_saved(options: argparse.Namespace) -> float:
    """Return the loss of the model that was saved, as a plain script loads it, on the batch of the next step."""
    model = LlamaForCausalLM.from_pretrained(options.checkpoints / "model")
    return float(model(**windows(text(), options.batch, options.steps)).loss)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Llama over several processes.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill-at", type=int, default=12, help="the step at which the last process kills itself once")
    parser.add_argument("--checkpoints", type=Path, default=Path("demo/processes"))
    options = parser.parse_args()
    if os.environ.get("MASTER_ADDR", "127.0.0.1") in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    train(options)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"step {options.steps}  loss {loss_of_saved(options):.4f}, of the plain model that was saved", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
