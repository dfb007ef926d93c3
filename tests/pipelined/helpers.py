"""Tiny models of the clients' libraries with random weights, batches for them, and comparisons.

A mini-batch and its micro-batches round differently, and nothing else tells a pipelined model from the plain one. So
the models are in float64, and results may differ by `CLOSE`: more than the rounding errors of some training steps, and
far less than a wrong weight of a micro-batch, a wrong gradient or a missed row would change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.campaigns.architectures.operators import register_missing
from torchgpipe import pipelined

# Before the first import of a client: they read it once, and then ask no server for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
register_missing()

CLOSE = 1e-9
CHUNKS = 2
TWO = ["cpu:0", "cpu:1"]
VOCABULARY = 32
#: The deviation of random weights: with the usual 0.02, layers of this width would hardly change anything.
SPREAD = 0.3

# ----------------------------------------------------------------------------------------------------------- the models


def _model(kind: str, config: str, **settings: Any) -> Any:
    import transformers

    marks = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": SPREAD}
    torch.manual_seed(0)
    made = getattr(transformers, config)(vocab_size=VOCABULARY, **(marks | settings))
    return getattr(transformers, kind)(made).double()


def llama(**options: Any) -> Any:
    """Return a decoder with rotary positions and grouped queries."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return _model("LlamaForCausalLM", "LlamaConfig", pad_token_id=0, **(sizes | heads | options))


def gpt2() -> Any:
    """Return a decoder whose embedding is its head, too."""
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _model("GPT2LMHeadModel", "GPT2Config", n_layer=4, n_embd=16, n_head=2, n_positions=64, **drops)


def mistral() -> Any:
    """Return a decoder whose tokens see a window of five."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return _model("MistralForCausalLM", "MistralConfig", pad_token_id=0, sliding_window=5, **(sizes | heads))


def bert() -> Any:
    """Return an encoder that classifies sequences, and whose loss is a plain mean of the rows."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return _model("BertForSequenceClassification", "BertConfig", num_attention_heads=2, num_labels=3, **(sizes | drops))


def t5() -> Any:
    """Return an encoder and a decoder with one embedding."""
    sizes = {"num_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "dropout_rate": 0.0}
    marks = {"pad_token_id": 0, "decoder_start_token_id": 0}
    return _model("T5ForConditionalGeneration", "T5Config", **(sizes | marks))


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert, "t5": t5}


def in_pipeline(model: Any, chunks: int = CHUNKS, **options: Any) -> Any:
    """Pipeline a model of `MODELS`, or adapters around one, with a worker for each of its two devices."""
    return pipelined(model, sample(model.config.model_type), chunks=chunks, **{"devices": TWO, **options})


# ---------------------------------------------------------------------------------------------------------- the batches


def rows(name: str, count: int, length: int = 7, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return the rows of a data set for a model in `MODELS`, each with labels of its own number and with padding."""
    draw = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (length,), generator=draw)
        real = int(torch.randint(length // 2, length + 1, (), generator=draw))
        mask = (torch.arange(length) < real).long()
        row = {"input_ids": ids * mask, "attention_mask": mask}
        if name == "bert":
            row["labels"] = torch.randint(3, (), generator=draw)
        elif name == "t5":
            row["labels"] = torch.randint(3, VOCABULARY, (length - 2,), generator=draw)
            row["labels"][real:] = -100
        else:
            row["labels"] = ids.masked_fill(mask == 0, -100)
        result.append(row)
    return result


def batch(name: str, count: int = 4, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """Return one mini-batch for a model in `MODELS`."""
    return collate(rows(name, count, length, seed))


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def sample(name: str, count: int = 2) -> dict[str, Tensor]:
    """Return the arguments of one micro-batch for a model in `MODELS`."""
    return batch(name, count, seed=99)


# ------------------------------------------------------------------------------------------------------ the comparisons


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(actual: Any, expected: Any, tolerance: float = CLOSE) -> None:
    """Assert that two values of the same structure hold numbers that differ by at most ``tolerance``."""
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected)
        for key in expected:
            try:
                assert_close(actual[key], expected[key], tolerance)
            except AssertionError as error:
                error.add_note(f"at {key!r}")
                raise
    elif expected is None:
        assert actual is None
    else:
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def assert_trains_alike(ours: Any, plain: Any, *, name: str | None = None, steps: int = 3, seed: int = 0) -> None:
    """Train both with AdamW, and assert equal losses and gradients, and none for what is frozen.

    Sequences become longer than those of the sample, and have padding, so they have different numbers of labels.
    """
    name = name or ours.config.model_type
    models = (ours, plain)
    optimizers = [torch.optim.AdamW((p for p in one.parameters() if p.requires_grad), lr=1e-2) for one in models]
    for step in range(steps):
        losses = []
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            losses.append(model(**batch(name, length=7 + step, seed=seed + step)).loss)
            losses[-1].backward()
        assert_close(*losses)
        assert_close(gradients(ours), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
    trained = [key for key, parameter in ours.named_parameters() if parameter.requires_grad]
    assert any(gradients(ours)[key] is not None for key in trained)
    for key, gradient in gradients(ours).items():
        assert gradient is None or key in trained, key


@contextmanager
def losses_in_float64() -> Iterator[None]:
    """Let ``.float()`` of a tensor leave float64 alone.

    Transformers computes the losses of decoders in float32, whatever the type of the model, and float32 rounds the sum
    of a mini-batch and those of its micro-batches differently in the seventh digit. A module is still cast: tests of
    bfloat16 once ran in float64, where autocast does nothing.
    """
    original, cast = Tensor.float, nn.Module.float
    Tensor.float = lambda self, **options: self if self.dtype == torch.float64 else original(self, **options)  # type: ignore[method-assign]
    nn.Module.float = lambda self: self._apply(lambda t: t.to(torch.float32) if t.is_floating_point() else t)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del Tensor.float  # which is inherited again
        nn.Module.float = cast  # type: ignore[method-assign]


@contextmanager
def counted_calls(module: nn.Module) -> Iterator[list[int]]:
    """Yield a list that gets the number of rows of each call of ``module`` with a tensor first: of each micro-batch."""
    calls: list[int] = []

    def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        calls.append(len(first))

    handle = module.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()
