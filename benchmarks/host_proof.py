"""The cost of the proof of a pipelined model, GPT-2 with 124 million parameters; and the child that measures it.

`pipelined` runs its sample through the plain model and through the pipeline, and compares outputs and gradients. The
time of the proof is that of `pipelined`, less that of `pipelined(..., verify=False)`. It stands beside a forward and
backward of the plain model on as many rows as the proof has, its sample twice. Memory is that of the process at its
highest, beyond what it had with the plain model, over the bytes of the parameters.
"""

from __future__ import annotations

import argparse
import sys
from time import perf_counter
from typing import Any

import torch

from benchmarks.peers import Answer, Request, running, serve
from benchmarks.program import Progress
from benchmarks.records import MIB, ratios, shown, spread, table_of

__all__ = ["measure", "pipelined_proof"]


def answer(peer: str, request: Request) -> Answer:
    """Return the seconds of `pipelined` or of a plain step, and the MiB beyond the plain model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from torchgpipe import pipelined

    torch.manual_seed(0)
    shape = {} if request["layers"] == 12 else {"n_layer": request["layers"], "n_embd": 24, "n_head": 2}
    model: Any = GPT2LMHeadModel(GPT2Config(loss_type="ForCausalLM", **shape))
    ids = torch.randint(model.config.vocab_size, (request["rows"], request["tokens"]))
    sample = {"input_ids": ids, "labels": ids}
    weights = sum(parameter.nbytes for parameter in model.parameters())
    before = _peak()
    start = perf_counter()
    if request["way"] == "plain":
        twice = torch.cat([ids, ids])
        torch.autograd.backward(model(input_ids=twice, labels=twice).loss)
    else:
        verify = request["way"] == "proof"
        pipelined(model, sample, chunks=4, devices=["cpu:0", "cpu:1"], balance="parameters", verify=verify)
    return {"seconds": perf_counter() - start, "memory": (_peak() - before) / weights, "weights": weights / MIB}


def _peak() -> int:
    import resource  # Not on Windows, where tests import this file.

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Take the time with the proof, without it, and of the plain model, each in a process of its own."""
    ways = ("proof", "without", "plain")
    progress = Progress(args.turns * len(ways))
    shape = {"layers": args.gpt2, "rows": 2, "tokens": 128}
    turns = []
    for _ in range(args.turns):
        turn = {}
        for way in ways:
            progress(f"proof of GPT-2: {way}")
            with running(["ours"], "host_proof.py") as peers:
                turn[way] = peers["ours"].ask({**shape, "way": way})
        turns.append(turn)
    taken = [turn["proof"]["seconds"] - turn["without"]["seconds"] for turn in turns]
    row = {
        "model": f"GPT-2, {shape['layers']} layers",
        **shape,
        "weights": turns[0]["plain"]["weights"],
        "seconds": {way: spread(turn[way]["seconds"] for turn in turns) for way in ways},
        "proof": spread(taken),
        "proof/plain": ratios([turn["plain"]["seconds"] for turn in turns], taken),
        "memory": {way: spread(turn[way]["memory"] for turn in turns) for way in ways},
    }
    return {"rows": [row]}


def pipelined_proof(result: dict[str, Any]) -> str:
    """Return a table of the seconds and the memory of a proof."""
    columns = {
        **{"model": "model", "parameters, MiB": "weights:.0f"},
        "sample": lambda row: f"{row['rows']} x {row['tokens']}",
        "pipelined without proof, s": lambda row: shown(row["seconds"]["without"]),
        **{"proof, s": "proof", "over a plain step": "proof/plain"},
        "memory / parameters": lambda row: shown(row["memory"]["proof"]),
        "of a plain step": lambda row: shown(row["memory"]["plain"]),
    }
    return table_of(result["rows"], columns)


if __name__ == "__main__":
    from benchmarks.campaigns.architectures.operators import register_missing

    register_missing()
    serve(answer)
