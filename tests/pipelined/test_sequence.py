"""One sequence over all devices: chunks that hand on their keys and values give what the plain model gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Devices
from tests.pipelined.helpers import VOCABULARY, assert_close, gradients, llama, mistral, sample
from torchgpipe import GPipe, MicroBatches, pipelined

transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("losses_in_float64")]

CHUNKS = [7, 6, 3, 1]

#: Measured times could leave a first partition without a layer.
TWO_HALVES: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"], "balance": [3, 4]}


def frozen_llama() -> Any:
    """Return a model whose first keys and values need no gradient."""
    model = llama()
    for module in (model.model.embed_tokens, model.model.layers[0]):
        module.requires_grad_(False)
    return model


def sequences() -> dict[str, Tensor]:
    """Return two sequences of 17 tokens, one with labels that do not count at a border, one with padding."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, sum(CHUNKS)), generator=draw)
    mask = (torch.arange(sum(CHUNKS)) < torch.tensor([[17], [12]])).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 5:9] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def window(model: Any, chunks: int | Sequence[int] = CHUNKS) -> MicroBatches:
    return MicroBatches.of_sequence(sequences(), chunks, transformers.DynamicCache(config=model.config))


@pytest.mark.parametrize("make", [llama, mistral, frozen_llama])
def test_chunks_give_what_the_plain_model_gives(make: Callable[[], Any], devices: Devices) -> None:
    """To the last bit if the plain model runs the same chunks with a cache, and whole sequences but for rounding."""
    plain, whole = make(), make()
    outputs = [plain(**chunk) for chunk in window(plain)]
    expected = sum([output.loss for output in outputs])
    expected.backward()
    whole(**sequences(), use_cache=False).loss.backward()
    assert_close(gradients(plain), gradients(whole))

    model = pipelined(make(), sample("llama"), chunks=2, balance="parameters", devices=devices(3))
    for run in (lambda: model.step(window(model)), lambda: _call(model, [output.logits for output in outputs])):
        model.zero_grad()
        loss = run()
        assert torch.equal(loss, expected)
        for name, parameter in model.named_parameters():
            grad = plain.get_parameter(name).grad
            assert (parameter.grad is None) == (grad is None), name
            assert grad is None or torch.equal(parameter.grad, grad), name


def _call(model: Any, logits: list[Tensor]) -> Tensor:
    outputs = model(window(model))
    pairs = zip(outputs, logits, strict=True)
    assert all([torch.equal(output.logits, expected) for output, expected in pairs])
    loss: Tensor = sum([output.loss for output in outputs])
    loss.backward()
    return loss.detach()


def test_a_loss_function_has_a_target_for_each_chunk() -> None:
    """Its targets are shifted by whoever gives them; so a model without `shift_labels` trains on chunks, too."""
    model, plain = llama(), llama()
    batch = sequences()
    expected = plain(**batch, use_cache=False).loss
    shifted = nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    model = pipelined(model, batch, chunks=2, loss_fn=loss_fn, reduce="mean", **TWO_HALVES)
    cache = transformers.DynamicCache(config=model.config)
    targets = MicroBatches(shifted.split(CHUNKS, 1))
    assert_close(model.step(MicroBatches.of_sequence(batch, CHUNKS, cache), target=targets), expected.detach())


def test_no_keys_are_left_behind() -> None:
    """The caller's cache stays empty, and serves the next run. A bug: calls without gradients filled it."""
    model = pipelined(llama(), sample("llama"), chunks=2, **TWO_HALVES)
    given = window(model, 4)
    first = model.step(given)
    with torch.no_grad():
        losses = [output.loss for output in model(given)]
    assert torch.equal(sum(losses), first)
    assert given[0]["past_key_values"].get_seq_length() == 0
    assert torch.equal(model.step(given), first)


# ------------------------------------------------------------------------------------------------------- refused


def _packed() -> dict[str, Any]:
    ids = sequences()["input_ids"]
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(9), torch.arange(8)])[None]}


def _of(batch: dict[str, Any], chunks: Any = 2, cache: Any = None) -> MicroBatches:
    new = transformers.DynamicCache(config=llama().config)
    return MicroBatches.of_sequence(batch, chunks, new if cache is None else cache)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _of(_packed()), "position_ids begin anew, as those of packed documents"),
        (lambda: _of(sequences(), 18), r"lengths \[1, .*, 0\], but the sequence has 17"),
        (lambda: _of(sequences(), [9, 9]), r"lengths \[9, 9\], but the sequence has 17"),
        (lambda: _of({**sequences(), "pixel_values": torch.ones(2, 17)}), r"'pixel_values': \(2, 17\)"),
        (lambda: _of({**sequences(), "attention_mask": torch.ones(2, 1, 17, 17)}), r"\(2, 1, 17, 17\)"),
        (
            lambda: _of(sequences(), cache=transformers.StaticCache(config=llama().config, max_cache_len=17)),
            r"can be differentiated, .* got StaticCache with layers of \['StaticLayer'\]",
        ),
        (lambda: _of(sequences(), cache=transformers.DynamicCache()), "DynamicCache with"),
        (lambda: GPipe(nn.Sequential(nn.Linear(2, 2)), [1])(_of(sequences())), "GPipe cannot take"),
        (lambda: pipelined(llama(), _of(sequences())), "the sample of pipelined cannot take"),
    ],
    ids=["packed", "too many", "too long", "unknown tensor", "mask", "static", "no layers", "GPipe", "sample"],
)
def test_what_cannot_be_cut(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def _filled(model: Any) -> MicroBatches:
    given = window(model)
    llama()(**given[0])
    return given


def _without_shifted_labels(model: Any) -> MicroBatches:
    """Return chunks for a model whose loss is its own: it looks at labels only."""
    model.loss_function = lambda logits, labels, **_: nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten()
    )
    return window(model)


def _without_cache(model: Any) -> MicroBatches:
    """Return chunks for a model whose last layer attends to its own chunk only, as one that trains without a cache."""
    attention = model.model.layers[3].self_attn
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "past_key_values": None, "attention_mask": None}), with_kwargs=True
    )
    return window(model)


def _looking_ahead(model: Any) -> MicroBatches:
    """Return chunks for a model whose first layer attends to all tokens. A bug: it trained on other numbers."""
    model.model.layers[0].self_attn.is_causal = False
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )
    return window(model)


def _without_cache_in_training(model: Any) -> MicroBatches:
    attention = model.model.layers[3].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "past_key_values": None} if module.training else kwargs),
        with_kwargs=True,
    )
    return window(model.train())


@pytest.mark.parametrize(
    ("give", "message", "options"),
    [
        (_filled, "the cache of a sequence has 7 tokens already", {}),
        (_without_shifted_labels, "'loss' of a sequence is .* chunks nan: .* does not take shift_labels", {}),
        (_without_cache, r"'logits' of a sequence is not that of its chunks: .* without the cache", {}),
        (_looking_ahead, r"'logits' of a sequence is not that of its chunks: the model attends to later", {}),
        (_without_cache_in_training, r"behind chunk 0 .* should have 7 tokens, but \{3: 0\} have others", {}),
        (window, r"layers \[0\] of the cache .* are not in the first partition", {"balance": [1, 6]}),
        (window, "chunks of a sequence cannot run again at backward", {"checkpoint": True}),
    ],
    ids=["filled", "own loss", "no cache", "looks ahead", "no cache in training", "balance", "checkpoint"],
)
def test_what_is_refused(give: Callable[[Any], MicroBatches], message: str, options: dict[str, Any]) -> None:
    """And leaves no gradient."""
    model = pipelined(llama(), sample("llama"), chunks=2, **(TWO_HALVES | options))
    given = give(model)
    for run in (model.step, model):
        with pytest.raises((ValueError, RuntimeError), match=message):
            run(given)
    assert not any([parameter.grad is not None for parameter in model.parameters()])


def test_verify_refuses_chunks() -> None:
    model = pipelined(llama(), sample("llama"), chunks=2, **TWO_HALVES)
    with pytest.raises(TypeError, match="verify cannot take"):
        model.verify(window(model))


def test_losses_of_routers_are_refused_and_may_be_left_out() -> None:
    """They were added once for each chunk."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3, output_router_logits=True,
    )  # fmt: skip
    model: Any = transformers.MixtralForCausalLM(config)
    batch = {"input_ids": sequences()["input_ids"], "labels": sequences()["input_ids"]}
    options: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"], "may_differ": ["loss", "aux_loss"]}
    with pytest.warns(UserWarning, match="differ between rows"):
        pipelined(model, batch, chunks=2, balance="parameters", **options)
    with pytest.raises(ValueError, match=r"'loss' of a sequence is .* output_router_logits=False"):
        model.step(MicroBatches.of_sequence(batch, 2, transformers.DynamicCache(config=config)))
    expected = model(**batch, use_cache=False, output_router_logits=False).loss
    chunks = MicroBatches.of_sequence(
        {**batch, "output_router_logits": False}, 2, transformers.DynamicCache(config=config)
    )
    torch.testing.assert_close(model.step(chunks), expected.detach())
