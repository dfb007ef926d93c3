"""GPT-2, a model that is no `nn.Sequential`: pipelined, and placed naively; and the child for it.

A device is a core here: naive placement and the plain model have one thread, as only one of their devices works at a
time; a pipelined model has a thread for each of its two workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.campaigns.architectures.operators import register_missing
from benchmarks.peers import Answer, Request, serve

__all__ = ["OURS", "gpt2", "place_naively"]

VOCABULARY = 512

#: The ways that pipeline a model.
OURS = ("call", "1F1B", "GPipe")


def gpt2(layers: int, width: int, context: int) -> tuple[nn.Module, dict[str, int]]:
    """Return a GPT-2 without dropout, and the block at which the second of two partitions begins."""
    register_missing()
    from transformers import GPT2Config, GPT2LMHeadModel  # type: ignore[import-not-found, unused-ignore]

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=max(1, width // 64),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config), {f"transformer.h.{layers // 2}": 1}


# ---- Naive placement.


def place_naively(module: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Place modules on devices, and let each move its arguments there when it is called, as `device_map` does.

    Args:
        module: the model
        devices: for names of modules, their devices
    """
    for name, device in devices.items():
        child = module.get_submodule(name).to(device)

        def move(_: nn.Module, args: Any, kwargs: Any, device: torch.device = device) -> Any:
            return moved(args, device), moved(kwargs, device)

        child.register_forward_pre_hook(move, with_kwargs=True)


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)([moved(item, device) for item in value])
    if type(value) is dict:
        return {key: moved(item, device) for key, item in value.items()}
    return value


# ---- The child.


def batch_of(request: Request) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (request["m"] * request["rows"], request["context"])
    ids = torch.randint(VOCABULARY, shape, generator=generator)
    return {"input_ids": ids, "labels": ids}


def train(request: Request) -> Answer:
    """Return the seconds of each step, by the clock and of CPU, and the loss."""
    from benchmarks.timing import timed
    from torchgpipe import pipelined

    way, m = request["way"], request["m"]
    model, starts = gpt2(request["layers"], request["width"], request["context"])
    batch = batch_of(request)
    if way in OURS:
        sample = {name: tensor[:2] for name, tensor in batch.items()}
        schedule = "1F1B" if way == "call" else way
        pipelined(model, sample, chunks=m, devices=["cpu:0", "cpu:1"], balance=starts, schedule=schedule)
    elif way == "naive":
        names = [name for name, child in model.named_modules() if not list(child.children())]
        place_naively(model, {name: torch.device("cpu") for name in names})

    def call() -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        torch.autograd.backward(loss)
        return loss.detach()

    def one_by_one() -> Tensor:
        total = torch.zeros(())
        for ids in batch["input_ids"].chunk(m):
            loss = model(input_ids=ids, labels=ids)["loss"] / m
            torch.autograd.backward(loss)
            total += loss.detach()
        return total

    runs: dict[str, Callable[[], Any]] = {
        "naive": call,
        "micro-batches": one_by_one,
        "call": call,
    }

    def start() -> None:
        model.zero_grad(set_to_none=True)

    return timed(runs.get(way, lambda: model.step(**batch)), start, ["cpu"], request)


def answer(peer: str, request: Request) -> Answer:
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if request["way"] in OURS else 1)
    try:
        return train(request)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer)
