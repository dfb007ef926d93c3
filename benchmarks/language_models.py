"""Language models that are no `nn.Sequential`: pipelined, placed naively, split by export; and the child for it.

A device is a core here: naive placement and the plain model have one thread, as only one of their devices works at a
time; a pipelined model has a thread for each of its two workers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.gpt import Attention, Embedding, FeedForward
from benchmarks.peers import Answer, Request, serve

__all__ = ["GPT", "OURS", "language_model", "language_models", "place_naively", "split_by_export"]

VOCABULARY = 512

#: The ways that pipeline a model.
OURS = ("call", "1F1B", "GPipe")


class GPT(nn.Module):
    """A language model that returns its own loss and its logits, as those of transformers do.

    Args:
        layers: the number of blocks
        width: the length of the vectors
        heads: of each attention
        context: the largest length of an input
    """

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = Embedding(VOCABULARY, context, width)
        self.blocks = nn.ModuleList([nn.Sequential(Attention(width, heads), FeedForward(width)) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def language_models() -> list[str]:
    """Return the language models that there are: our own, and GPT-2 if transformers is installed."""
    return ["gpt", *(["gpt2"] if find_spec("transformers") else [])]


def language_model(name: str, layers: int, width: int, context: int) -> tuple[nn.Module, dict[str, int]]:
    """Return a language model without dropout, and the block at which the second of two partitions begins."""
    torch.manual_seed(0)
    heads = max(1, width // 64)
    if name == "gpt":
        return GPT(layers, width, heads, context), {f"blocks.{layers // 2}": 1}
    from benchmarks.campaigns.architectures.operators import register_missing

    register_missing()
    from transformers import GPT2Config, GPT2LMHeadModel  # type: ignore[import-not-found, unused-ignore]

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
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


# ---- Splitting by export.


def split_by_export(module: nn.Module, sample: dict[str, Tensor] | Tensor, starts: Mapping[str, int]) -> Any:
    """Return the model split by `torch.distributed.pipelining.pipeline`, which can be called in one process."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    args, kwargs = ((sample,), None) if isinstance(sample, Tensor) else ((), sample)
    return pipeline(module, args, kwargs, split_spec=dict.fromkeys(starts, SplitPoint.BEGINNING))


# ---- The child.


def made_for(request: Request) -> tuple[Any, dict[str, int]]:
    return language_model(request["model"], request["layers"], request["width"], request["context"])


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
    model, starts = made_for(request)
    batch = batch_of(request)
    parts = batch["input_ids"].chunk(m)
    models = [model, copy.deepcopy(model)] if way == "halves" else [model]
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

    def one_by_one(model: Any, micro_batches: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(())
        for ids in micro_batches:
            loss = model(input_ids=ids, labels=ids)["loss"] / m
            torch.autograd.backward(loss)
            total += loss.detach()
        return total

    runs: dict[str, Callable[[], Any]] = {
        "naive": call,
        "micro-batches": lambda: one_by_one(model, parts),
        "call": call,
        "halves": lambda: sum(pool.map(one_by_one, models, (parts[: m // 2], parts[m // 2 :]))),
    }

    def start() -> None:
        for copied in models:
            copied.zero_grad(set_to_none=True)

    with ThreadPoolExecutor(2) as pool:
        return timed(runs.get(way, lambda: model.step(**batch)), start, ["cpu"], request)


def split(request: Request) -> Answer:
    """Return the seconds that it takes to split a model by export and to pipeline it; or why it cannot be done."""
    from torchgpipe import pipelined

    outcomes: Answer = {}
    batch = batch_of({**request, "m": 1})
    plain, starts = made_for(request)
    expected = float(plain(**batch)["loss"].detach())
    for way in ("export", "pipelined"):
        model, _ = made_for(request)
        start = perf_counter()
        try:
            if way == "export":
                made = split_by_export(model, batch, starts)
            else:
                made = pipelined(model, batch, chunks=1, devices=["cpu:0", "cpu:1"], balance=starts)
            seconds = perf_counter() - start
            output = made(**batch)  # A split by export returns the tensors of the output, without their names.
            loss = output[0] if isinstance(output, tuple) else output["loss"]
            difference = abs(float(loss.detach()) - expected)
            outcomes[way] = {"seconds": seconds, "output": type(output).__name__, "difference": difference}
        except Exception as error:
            outcomes[way] = {"fails": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    return outcomes


def answer(peer: str, request: Request) -> Answer:
    if request["kind"] == "split":
        return split(request)
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if request["way"] in OURS else 1)
    try:
        return train(request)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer)
