"""A pipelined model is still the user's own object: its class, its names, its tensors, its files."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.pipelined.helpers import (
    CHUNKS,
    MODELS,
    TWO,
    assert_close,
    assert_trains_alike,
    batch,
    counted_calls,
    in_pipeline,
    llama,
    sample,
    t5,
)

transformers = pytest.importorskip("transformers", minversion="5")

from torchgpipe import pipelined  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("losses_in_float64")]


@pytest.fixture
def model() -> Any:
    """Return a pipelined decoder."""
    return in_pipeline(llama())


def assert_runs_as_plain(model: Any, plain: Any = None) -> None:
    """Assert the plain model's losses and gradients, in micro-batches, on copies of the weights."""
    model.zero_grad()
    with counted_calls(model.model.layers[0]) as calls:
        assert_trains_alike(model, llama() if plain is None else plain, steps=1)
    assert calls == [2] * CHUNKS


# ------------------------------------------------------------------------------------------------------ the same object


def all_of(model: nn.Module) -> dict[str, Any]:
    """Return the parameters and buffers by name, the modules, and the keys of the state."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {**tensors, "modules": [key for key, _ in model.named_modules()], "keys": list(model.state_dict())}


def test_it_is_the_users_own_object_there_and_back() -> None:
    """Optimizers, hooks and references from before remain those of the model, trainers decide by the signature which
    columns of the data to keep, and others of the class are left alone."""
    name = "t5"
    model, plain = MODELS[name](), MODELS[name]()
    kind, before = type(plain), all_of(model)
    attributes = {key: dict(vars(module)) for key, module in model.named_modules()}
    in_pipeline(model)
    assert isinstance(model, kind) and issubclass(type(model), kind) and type(plain) is kind
    for attribute in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(model), attribute) == getattr(kind, attribute)
    for attribute in ("step", "layout", "unpipelined"):
        assert hasattr(model, attribute) and not hasattr(plain, attribute)
    assert not hasattr(model, "hf_device_map"), "trainers would not move it"
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(model).forward) == inspect.signature(kind.forward)
    assert not hasattr(type(model).forward, "__wrapped__"), "accelerate would unwrap it, and lose the pipeline"
    assert "pipeline" in (type(model).__doc__ or "").lower() + (type(model).forward.__doc__ or "").lower()
    assert "pipeline" in repr(model) and f"chunks={CHUNKS}" in repr(model)
    model(**batch(name)).loss.backward()
    after = all_of(model)
    assert list(after) == list(before)
    assert all(value is before[key] or value == before[key] for key, value in after.items())

    assert model.unpipelined() is model
    assert type(model) is kind and repr(model) == repr(plain)
    for key, module in model.named_modules():
        assert set(vars(module)) == set(attributes[key]), key
        for hooks in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            assert list(vars(module)[hooks]) == list(attributes[key][hooks]), (key, hooks)
    layer = next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0]
    with counted_calls(layer) as calls:
        output = model(**batch(name))
        assert_close(output.logits, plain(**batch(name)).logits)
        assert calls == [4]
        in_pipeline(model, chunks=4)
        calls.clear()  # The proof calls hooks, too.
        assert_close(model(**batch(name)).logits, output.logits)
    assert calls == [1] * 4


def test_what_is_set_on_the_model_is_seen(model: Any) -> None:
    """Hooks of the model are called once per call, those of a layer once per micro-batch. A part of it runs plain."""
    ids = batch("llama")["input_ids"]
    with counted_calls(model.model.layers[0]) as calls:
        assert_close(model.model(ids).last_hidden_state, llama().model(ids).last_hidden_state)
    assert calls == [4]
    model.config.use_cache = False
    model.training_notes = {"run": 3}
    assert copy.deepcopy(model).training_notes == {"run": 3}
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append("before the model"))
    model.register_forward_hook(lambda *_: seen.append("after the model"))
    model.model.layers[1].register_forward_hook(lambda *_: seen.append("layer"))
    assert model(**batch("llama")).get("past_key_values") is None
    assert seen == ["before the model", "layer", "layer", "after the model"]


# ----------------------------------------------------------------------------------------------------- copies and files


def test_a_copy_is_a_pipeline_and_independent(model: Any) -> None:
    """A copy runs its own layers, and outlives the model."""
    copied = copy.deepcopy(pickle.loads(pickle.dumps(model)))
    assert isinstance(copied, transformers.LlamaForCausalLM)
    with torch.no_grad(), counted_calls(model.model.layers[0]) as calls:
        for parameter in copied.parameters():
            parameter.mul_(2)
        copied(**batch("llama"))
    assert calls == []
    assert_runs_as_plain(model)
    del model
    plain = llama()
    plain.load_state_dict(copied.state_dict())
    assert_runs_as_plain(copied, plain)


def test_files_are_those_of_the_plain_model_to_the_last_byte(tmp_path: Path) -> None:
    model, plain = in_pipeline(t5()), t5()
    model.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "plain")
    written = [{path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("ours", "plain")]
    assert written[0] == written[1]
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_close(state, plain.state_dict(), 0.0)

    loaded = type(plain).from_pretrained(tmp_path / "ours", dtype=torch.float64)
    assert loaded.config.architectures == [type(plain).__name__]
    assert_close(loaded.state_dict(), state, 0.0)
    nn.init.zeros_(next(loaded.parameters()))
    assert str(in_pipeline(loaded).load_state_dict(state)) == "<All keys matched successfully>"
    assert_trains_alike(loaded, plain, steps=1)


def test_weights_are_loaded_from_one_file_after_the_other(tmp_path: Path) -> None:
    """No memory has to hold them all. The embedding is the head, too, and is in one file only."""
    accelerate = pytest.importorskip("accelerate")
    files = pytest.importorskip("safetensors.torch")
    plain = llama(tie_word_embeddings=True)
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(plain.config, dtype=torch.float64)
    model.tie_weights()
    # The model looks at the values of the mask, and the meta device has none.
    pipelined(model, {"input_ids": sample("llama")["input_ids"]}, chunks=CHUNKS, devices=TWO)
    assert not any(parameter.is_meta for parameter in model.parameters())
    paths = list(tmp_path.glob("*.safetensors"))
    assert len(paths) > 1
    for path in paths:
        model.load_state_dict(files.load_file(path), strict=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_runs_as_plain(model, plain)


# -------------------------------------------------------------------------------------------------------------- changes


def test_the_vocabulary_grows_afterwards(model: Any) -> None:
    """There are a new embedding and a new head."""
    plain = llama()
    for one in (model, plain):
        torch.manual_seed(4)
        one.resize_token_embeddings(40, mean_resizing=False)
    assert_runs_as_plain(model, plain)
