"""Train adapters of peft (LoRA) on a frozen language model of transformers, in a pipeline.

    python examples/lora.py                      # in less than a minute on two CPU cores
    python examples/lora.py --rank 8 --schedule ZeroBubble

First a small GPT-2 learns English, one character after another, from the manual that comes with Python. Then peft
freezes it and adds adapters, which learn the names of Python's modules. One call makes the model with its adapters a
pipeline, which trains under a schedule. In the end only the adapters are saved. Then they are merged into the model,
which is a plain one again.

The example uses all accelerators of the machine. On a CPU the partitions share the cores.
It needs `pip install peft transformers`.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, get_args

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import torchgpipe
from torchgpipe.schedule import ScheduleName

CONTEXT = 48  # characters


def encode(text: str) -> Tensor:
    return torch.tensor(list(text.encode("ascii", "replace")))


def manual() -> Tensor:
    return encode("\n".join(text for _, text in sorted(topics.items())))


def names() -> Tensor:
    return encode("\n".join(sorted(sys.stdlib_module_names)))


def train(model: Any, text: Tensor, steps: int, lr: float, options: argparse.Namespace) -> list[float]:
    """Train what is not frozen, by `step` if the model is a pipeline, and return the losses."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=lr)
    generator = torch.Generator().manual_seed(options.seed)
    model.train()
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (options.batch, 1), generator=generator)
        ids = text[starts + torch.arange(CONTEXT)]
        optimizer.zero_grad()
        if hasattr(model, "step"):
            loss = model.step(input_ids=ids, labels=ids)
        else:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        nn.utils.clip_grad_norm_(wanted, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def summary(losses: list[float]) -> str:
    part = max(1, len(losses) // 10)
    return f"loss {sum(losses[:part]) / part:.3f}, then {sum(losses[-part:]) / part:.3f}"


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    torch.manual_seed(options.seed)
    sizes = {"n_embd": options.width, "n_layer": options.layers, "n_head": 4, "n_positions": 2 * CONTEXT}
    base = GPT2LMHeadModel(GPT2Config(vocab_size=128, bos_token_id=None, eos_token_id=None, **sizes))
    print(f"{sum(p.numel() for p in base.parameters())} parameters learn English ...", flush=True)
    print(summary(train(base, manual(), options.steps, 3e-3, options)))

    config = LoraConfig(r=options.rank, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    sample = {"input_ids": names()[:CONTEXT].expand(2, -1), "labels": names()[:CONTEXT].expand(2, -1)}
    torchgpipe.pipelined(model, sample, chunks=options.chunks, schedule=options.schedule)
    print(f"\nAs a pipeline:\n{model.layout}\n")
    trained, total = model.get_nb_trainable_parameters()
    print(f"{trained} of {total} parameters, in adapters, learn names ...", flush=True)
    print(summary(train(model, names(), options.steps // 2, 1e-2, options)))

    model.unpipelined()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        size = (Path(folder) / "adapter_model.safetensors").stat().st_size
    merged = model.merge_and_unload().eval()
    merged.to(merged.device)  # Its layers were on all devices.
    whole = sum(p.numel() * p.element_size() for p in merged.parameters())
    print(f"Saved {size / 1e3:.0f} kB of adapters, for a model of {whole / 1e3:.0f} kB")
    prompt = encode("\nas")[None].to(merged.device)
    said = merged.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=True, pad_token_id=0
    )
    print(f"Names that it makes up: {''.join(map(chr, said[0].tolist())).split()}")


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train adapters of peft on a frozen language model, in a pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, help="layers of the model")
    add("--width", type=int, default=64, help="length of the vector at each character")
    add("--rank", type=int, default=4, help="rank of the adapters")
    add("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    add("--schedule", choices=get_args(ScheduleName), default="1F1B", help="order of forward and backward in a step")
    add("--batch", type=int, default=32, help="windows of text in a mini-batch")
    add("--steps", type=int, default=200, help="steps that learn English; names take half as many")
    add("--seed", type=int, default=0, help="seed of weights, batches and samples")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # The tensors are small: more threads would wait for each other.
    main()
