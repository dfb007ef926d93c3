"""A pipelined model is still the user's own object: its class, its names, its tensors, its files."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipelined.helpers import (
    CHUNKS,
    MODELS,
    TWO,
    assert_close,
    batch,
    counted_calls,
    gradients,
    in_pipeline,
    llama,
    sample,
)

transformers = pytest.importorskip("transformers", minversion="5")

from torchgpipe import pipelined  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("losses_in_float64")]


@pytest.fixture
def model() -> Any:
    """Return a pipelined decoder."""
    return in_pipeline(llama())


def assert_runs_as_plain(model: Any, micro_batches: int = CHUNKS, plain: Any = None) -> None:
    """Assert the plain model's loss and gradients, in as many micro-batches."""
    plain = llama() if plain is None else plain
    results = []
    with counted_calls(model.model.layers[0]) as calls:
        for one in (model, plain):
            one.zero_grad()
            results.append(one(**batch("llama")))
            results[-1].loss.backward()
    assert len(calls) == micro_batches
    assert_close(results[0].loss, results[1].loss)
    assert_close(results[0].logits, results[1].logits)
    assert_close(gradients(model), gradients(plain))


# ------------------------------------------------------------------------------------------------------ the same object


def test_the_class_is_the_users(model: Any) -> None:
    """Others of the class are left alone; and trainers see no map of devices, which tells them not to move it."""
    kind, other = transformers.LlamaForCausalLM, llama()
    assert isinstance(model, kind) and issubclass(type(model), kind) and type(other) is kind
    for name in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(model), name) == getattr(kind, name)
    assert model.config.architectures in (None, ["LlamaForCausalLM"])
    assert model.base_model is model.model
    for name in ("step", "layout", "unpipelined"):
        assert hasattr(model, name) and not hasattr(other, name)
    assert not hasattr(model, "hf_device_map")


@pytest.mark.parametrize("name", MODELS)
def test_the_signature_of_forward(name: str) -> None:
    """Trainers decide by it which columns of the data to keep."""
    model = in_pipeline(MODELS[name]())
    plain = MODELS[name]()
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(model).forward) == inspect.signature(type(plain).forward)
    assert not hasattr(type(model).forward, "__wrapped__"), "accelerate would unwrap it, and lose the pipeline"


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_buffers(name: str) -> None:
    """Optimizers, hooks and references from before remain those of the model; tied tensors stay tied."""
    model = MODELS[name]()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    names, keys = [key for key, _ in model.named_modules()], list(model.state_dict())
    in_pipeline(model)
    assert [key for key, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    for before, after in ((parameters, model.named_parameters()), (buffers, model.named_buffers())):
        found = dict(after)
        assert list(found) == list(before)
        assert all(found[key] is before[key] for key in before)
    model(**batch(name)).loss.backward()
    assert list(model.state_dict()) == keys, "nothing comes into being later, neither"


def test_representation_and_help(model: Any) -> None:
    said = repr(model)
    assert said.startswith("LlamaForCausalLM(")
    assert "(lm_head): Linear" in said, "the layers are shown"
    assert "pipeline" in said.lower() and f"chunks={CHUNKS}" in said
    assert "pipeline" in (type(model).__doc__ or "").lower() + (type(model).forward.__doc__ or "").lower()


def test_what_is_set_on_the_model_is_seen(model: Any) -> None:
    model.config.use_cache = False
    model.training_notes = {"run": 3}
    assert model(**batch("llama")).get("past_key_values") is None
    assert copy.deepcopy(model).training_notes == {"run": 3}


# ----------------------------------------------------------------------------------------------------- copies and files


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved, lambda model: copy.deepcopy(pickled(model))])
def test_a_copy_is_a_pipeline_and_independent(duplicate: Callable[[Any], Any], model: Any) -> None:
    """A copy runs its own layers, and outlives the model."""
    copied = duplicate(model)
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
    assert_runs_as_plain(copied, plain=plain)


def test_a_saved_state(model: Any) -> None:
    """The plain model loads it, and the other way round."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert_close(state, llama().state_dict(), 0.0)
    other = llama()
    nn.init.zeros_(other.lm_head.weight)
    in_pipeline(other)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert_runs_as_plain(other)


@pytest.mark.parametrize("name", MODELS)
def test_save_pretrained(name: str, tmp_path: Path) -> None:
    """The files are those of the plain model, to the last byte."""
    model = in_pipeline(MODELS[name]())
    plain = MODELS[name]()
    model.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "plain")
    written = [{path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("ours", "plain")]
    assert written[0] == written[1]

    loaded = type(MODELS[name]()).from_pretrained(tmp_path / "ours", dtype=torch.float64)
    assert loaded.config.architectures == [type(MODELS[name]()).__name__]
    assert_close(loaded.state_dict(), model.state_dict(), 0.0)
    in_pipeline(loaded)
    assert_close(loaded(**batch(name)).logits, model(**batch(name)).logits)


# ------------------------------------------------------------------------------------------------------ moves and types


CASTS: dict[str, tuple[Callable[[Any], Any], torch.dtype]] = {
    "cpu": (lambda model: model.cpu(), torch.float64),
    "to where it is": (lambda model: model.to("cpu"), torch.float64),
    "to bfloat16": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "float": (lambda model: model.float(), torch.float32),
    "half": (lambda model: model.half(), torch.float16),
    "double": (lambda model: model.float().double(), torch.float64),
}


@pytest.mark.parametrize("cast", CASTS)
def test_casts(cast: str, model: Any) -> None:
    """Trainers move and cast, whatever a model says. Nothing rounds differently within a micro-batch."""
    change, dtype = CASTS[cast]
    plain, before, arguments = llama(), dict(model.named_parameters()), batch("llama")
    for one in (model, plain):
        assert change(one) is one
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    parts = zip(*(value.chunk(CHUNKS) for value in arguments.values()))
    with torch.no_grad():
        expected = [plain(**dict(zip(arguments, part))).logits for part in parts]
        assert_close(model(**arguments).logits, torch.cat(expected), 0.0)


# ------------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("name", MODELS)
def test_unpipelined(name: str) -> None:
    """All is as it was: class, attributes, hooks, parameters; and it becomes a pipeline again."""
    model = MODELS[name]()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    kind, parameters = type(model), dict(model.named_parameters())
    in_pipeline(model)
    model(**batch(name)).loss.backward()
    assert model.unpipelined() is model
    assert type(model) is kind and repr(model) == repr(MODELS[name]())
    for key, module in model.named_modules():
        assert set(vars(module)) == set(before[key]), key
        for hooks in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            assert list(vars(module)[hooks]) == list(before[key][hooks]), (key, hooks)
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    layer = next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0]
    with counted_calls(layer) as calls:
        output = model(**batch(name))
    assert calls == [4]
    assert_close(output.logits, MODELS[name]()(**batch(name)).logits)
    with counted_calls(layer) as calls:
        assert_close(in_pipeline(model, chunks=4)(**batch(name)).logits, output.logits)
    assert len(calls) == 4


def test_twice_is_refused(model: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="unpipelined"):
        in_pipeline(model)
    assert_runs_as_plain(model)


def test_a_refused_model_is_as_it_was() -> None:
    model = llama()
    before = dict(vars(model))
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        pipelined(model, {"no_such_argument": torch.zeros(2, 3)}, chunks=CHUNKS, devices=TWO)
    assert type(model) is transformers.LlamaForCausalLM and dict(vars(model)) == before


# ---------------------------------------------------------------------------------------------- what changes afterwards


class Doubled(nn.Module):
    """A layer around another."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x)


def replace_modules(model: Any) -> None:
    """Replace a layer within a block, the head, and a whole block of the spine."""
    model.model.layers[1].mlp.up_proj = Doubled(model.model.layers[1].mlp.up_proj)
    model.lm_head = Doubled(model.lm_head)
    model.model.layers[2] = copy.deepcopy(model.model.layers[2])


def replace_a_parameter(model: Any) -> None:
    layer = model.model.layers[3].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def grow_the_vocabulary(model: Any) -> None:
    """Make a new embedding and a new head."""
    torch.manual_seed(4)
    model.resize_token_embeddings(40, mean_resizing=False)


@pytest.mark.parametrize("change", [replace_modules, replace_a_parameter, grow_the_vocabulary])
def test_what_is_replaced_afterwards(change: Callable[[Any], None], model: Any) -> None:
    plain = llama()
    for one in (model, plain):
        change(one)
    assert_runs_as_plain(model, plain=plain)


def test_hooks_of_the_user(model: Any) -> None:
    """On the model, once per call; on a layer, once per micro-batch."""
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append("before the model"))
    model.register_forward_hook(lambda *_: seen.append("after the model"))
    model.model.layers[1].register_forward_hook(lambda *_: seen.append("layer"))
    model(**batch("llama")).loss.backward()
    assert seen == ["before the model", "layer", "layer", "after the model"]


def test_weights_come_into_being_on_their_devices() -> None:
    """A model made without memory for its weights gets them after it has become a pipeline."""
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        model = llama()
    assert all(parameter.is_meta for parameter in model.parameters())
    # The model looks at the values of the mask, and the meta device has none.
    arguments = {name: value for name, value in sample("llama").items() if name != "attention_mask"}
    pipelined(model, arguments, chunks=CHUNKS, devices=TWO)
    assert not any(parameter.is_meta for parameter in model.parameters())
    model.load_state_dict(llama().state_dict())
    assert_runs_as_plain(model)


def test_weights_are_loaded_from_one_file_after_the_other(tmp_path: Path) -> None:
    """No memory has to hold them all. The embedding is the head, too, and is in one file only."""
    accelerate = pytest.importorskip("accelerate")
    files = pytest.importorskip("safetensors.torch")
    plain = llama(tie_word_embeddings=True)
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(plain.config, dtype=torch.float64)
    model.tie_weights()
    pipelined(model, {"input_ids": sample("llama")["input_ids"]}, chunks=CHUNKS, devices=TWO)
    paths = list(tmp_path.glob("*.safetensors"))
    assert len(paths) > 1
    for path in paths:
        model.load_state_dict(files.load_file(path), strict=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_runs_as_plain(model, plain=plain)
