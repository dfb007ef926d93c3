"""What the proof of a pipelined model takes: GPT-2 with 124 million parameters; and the child that takes the time.

`pipelined` runs its sample through the plain model and through the pipeline, and compares outputs and gradients. The
time of the proof is that of `pipelined`, less that of `pipelined(..., verify=False)`. It stands beside a forward and
backward of the plain model on as many rows as the proof has, its sample twice. Memory is that of the process at its
highest, beyond what it had with the plain model, over the bytes of the parameters.
"""

from __future__ import annotations

import argparse
import resource
import sys
from time import perf_counter
from typing import Any

import torch

from benchmarks.campaigns.architectures.operators import register_missing
from benchmarks.peers import Answer, Request, running, serve
from benchmarks.program import Progress
from benchmarks.records import MIB, of_part, ratios, shown, spread, table

__all__ = ["pipelined_proof", "proof"]


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
        both = torch.cat([ids, ids])
        torch.autograd.backward(model(input_ids=both, labels=both).loss)
    else:
        verify = request["way"] == "proof"
        pipelined(model, sample, chunks=4, devices=["cpu:0", "cpu:1"], balance="parameters", verify=verify)
    return {"seconds": perf_counter() - start, "memory": (_peak() - before) / weights, "weights": weights / MIB}


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def proof(args: argparse.Namespace) -> dict[str, Any]:
    """Take the time with the proof, without it, and of the plain model, each in a process of its own."""
    ways = ("proof", "without", "plain")
    progress = Progress(args.turns * len(ways))
    shape = {"layers": 12 if args.width == 512 else 2, "rows": 2, "tokens": args.context}
    turns = []
    for k in range(args.turns):
        turn = {}
        for way in ways:
            progress(f"proof, turn {k}, {way}")
            with running(["ours"], "pipelined_proof.py") as peers:
                turn[way] = peers["ours"].ask({**shape, "way": way})
        turns.append(turn)
    seconds = {way: spread([turn[way]["seconds"] for turn in turns]) for way in ways}
    taken = [turn["proof"]["seconds"] - turn["without"]["seconds"] for turn in turns]
    row = {
        "model": f"GPT-2, {shape['layers']} layers",
        **shape,
        "weights": turns[0]["plain"]["weights"],
        "seconds": seconds,
        "proof": spread(taken),
        "proof/plain": ratios([turn["plain"]["seconds"] for turn in turns], taken),
        "memory": {way: spread([turn[way]["memory"] for turn in turns]) for way in ways},
    }
    return {"rows": [row]}


def pipelined_proof(result: dict[str, Any]) -> str:
    """Return a table of the seconds and the memory of a proof."""
    lines = [
        [
            row["model"],
            f"{row['weights']:.0f}",
            f"{row['rows']} x {row['tokens']}",
            shown(row["seconds"]["without"], 1),
            shown(row["proof"], 1),
            shown(row["proof/plain"], 1),
            shown(row["memory"]["proof"], 1),
            shown(row["memory"]["plain"], 1),
        ]
        for row in of_part(result, "proof")
    ]
    header = [
        "model",
        "parameters, MiB",
        "sample",
        "pipelined without proof, s",
        "proof, s",
        "over a plain step",
        "memory / parameters",
        "of a plain step",
    ]
    return table(lines, header) if lines else ""


if __name__ == "__main__":
    register_missing()
    serve(answer)
