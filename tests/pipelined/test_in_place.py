"""A pipelined model is still the user's own object: its class, its names, its tensors, its files."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Devices
from tests.pipelined.helpers import CHUNKS, MODELS, assert_close, batch, counted_calls, gradients, llama, sample

transformers = pytest.importorskip("transformers", minversion="5")

from torchgpipe import pipelined  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("losses_in_float64")]


@pytest.fixture
def model(devices: Devices) -> Any:
    """Return a pipelined decoder."""
    return pipelined(llama(), sample("llama"), chunks=CHUNKS, devices=devices(2))


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


def test_the_model_itself_is_returned(devices: Devices) -> None:
    model = llama()
    assert pipelined(model, sample("llama"), chunks=CHUNKS, devices=devices(2)) is model
    assert_runs_as_plain(model)


def test_the_class(model: Any) -> None:
    kind = transformers.LlamaForCausalLM
    assert isinstance(model, kind) and issubclass(type(model), kind)
    for name in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(model), name) == getattr(kind, name)
    assert model.config.architectures in (None, ["LlamaForCausalLM"])
    assert model.base_model is model.model


@pytest.mark.parametrize("name", MODELS)
def test_the_signature_of_forward(name: str, devices: Devices) -> None:
    """Trainers decide by it which columns of the data to keep."""
    model = pipelined(MODELS[name](), sample(name), chunks=CHUNKS, devices=devices(2))
    plain = MODELS[name]()
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(model).forward) == inspect.signature(type(plain).forward)
    assert not hasattr(type(model).forward, "__wrapped__"), "accelerate would unwrap it, and lose the pipeline"


def test_other_models_of_the_class_are_left_alone(model: Any) -> None:
    other = llama()
    assert type(other) is transformers.LlamaForCausalLM
    assert_runs_as_plain(other, micro_batches=1)
    for name in ("step", "layout", "unpipelined"):
        assert hasattr(model, name) and not hasattr(other, name)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_buffers(name: str, devices: Devices) -> None:
    """Optimizers, hooks and references from before remain those of the model; tied tensors stay tied."""
    model = MODELS[name]()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    names, keys = [key for key, _ in model.named_modules()], list(model.state_dict())
    pipelined(model, sample(name), chunks=CHUNKS, devices=devices(2))
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


def test_a_deepcopy_is_a_pipeline_and_independent(model: Any) -> None:
    copied = copy.deepcopy(model)
    assert isinstance(copied, transformers.LlamaForCausalLM)
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
    with torch.no_grad(), counted_calls(model.model.layers[0]) as calls:
        for parameter in copied.parameters():
            parameter.mul_(2)
        copied(**batch("llama"))
    assert calls == [], "a copy runs its own layers"
    assert_runs_as_plain(model)
    plain = llama()
    plain.load_state_dict(copied.state_dict())
    assert_runs_as_plain(copied, plain=plain)


def test_a_copy_outlives_the_model(model: Any) -> None:
    copied = copy.deepcopy(copy.deepcopy(model))
    del model
    assert_runs_as_plain(copied)


def test_pickle(model: Any) -> None:
    restored = pickle.loads(pickle.dumps(model))
    assert isinstance(restored, transformers.LlamaForCausalLM)
    assert_runs_as_plain(restored)


def test_a_saved_model(model: Any, tmp_path: Path) -> None:
    torch.save(model, tmp_path / "whole.pt")
    assert_runs_as_plain(torch.load(tmp_path / "whole.pt", weights_only=False))


def test_a_saved_state(model: Any, devices: Devices) -> None:
    """The plain model loads it, and the other way round."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert_close(state, llama().state_dict(), 0.0)
    other = llama()
    nn.init.zeros_(other.lm_head.weight)
    pipelined(other, sample("llama"), chunks=CHUNKS, devices=devices(2))
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert_runs_as_plain(other)


@pytest.mark.parametrize("name", MODELS)
def test_save_pretrained(name: str, devices: Devices, tmp_path: Path) -> None:
    """The files are those of the plain model, to the last byte."""
    model = pipelined(MODELS[name](), sample(name), chunks=CHUNKS, devices=devices(2))
    plain = MODELS[name]()
    model.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "plain")
    written = [{path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("ours", "plain")]
    assert written[0] == written[1]

    loaded = type(MODELS[name]()).from_pretrained(tmp_path / "ours", dtype=torch.float64)
    assert loaded.config.architectures == [type(MODELS[name]()).__name__]
    assert_close(loaded.state_dict(), model.state_dict(), 0.0)
    pipelined(loaded, sample(name), chunks=CHUNKS, devices=devices(2))
    assert_close(loaded(**batch(name)).logits, model(**batch(name)).logits)


# ------------------------------------------------------------------------------------------------------ moves and types


def test_moving_to_where_it_is(model: Any) -> None:
    """Trainers call `.to()`, whatever a model says."""
    before = dict(model.named_parameters())
    assert model.to("cpu") is model
    assert model.cpu() is model
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert_runs_as_plain(model)


def test_trainers_see_an_ordinary_model_on_the_cpu(model: Any) -> None:
    """On several accelerators there is a map, which tells them neither to move nor to wrap the model."""
    assert not hasattr(model, "hf_device_map")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts(dtype: torch.dtype, model: Any) -> None:
    """Nothing rounds differently within a micro-batch."""
    plain = llama()
    for one in (model, plain):
        assert one.to(dtype) is one
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    assert_logits_of_micro_batches(model, plain)
    model.double()
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())


@pytest.mark.parametrize("cast", ["half", "float", "bfloat16", "double"])
def test_casting_methods(cast: str, model: Any) -> None:
    plain = llama()
    for one in (model, plain):
        assert getattr(one, cast)() is one
    assert_logits_of_micro_batches(model, plain)


def assert_logits_of_micro_batches(model: Any, plain: Any) -> None:
    arguments = batch("llama")
    parts = zip(*(value.chunk(CHUNKS) for value in arguments.values()))
    with torch.no_grad():
        expected = [plain(**dict(zip(arguments, part))).logits for part in parts]
        assert_close(model(**arguments).logits, torch.cat(expected), 0.0)


def test_training_and_evaluation(model: Any) -> None:
    assert model.eval() is model and not any(module.training for module in model.modules())
    assert model.train() is model and all(module.training for module in model.modules())
    assert model.requires_grad_(False) is model
    assert not model(**batch("llama")).loss.requires_grad


# ------------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("name", MODELS)
def test_unpipelined(name: str, devices: Devices) -> None:
    """All is as it was: class, attributes, hooks, parameters."""
    model = MODELS[name]()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    kind, parameters = type(model), dict(model.named_parameters())
    pipelined(model, sample(name), chunks=CHUNKS, devices=devices(2))
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


def test_again_after_unpipelined(model: Any, devices: Devices) -> None:
    model.unpipelined()
    pipelined(model, sample("llama"), chunks=4, devices=devices(3))
    assert_runs_as_plain(model, micro_batches=4)


def test_twice_is_refused(model: Any, devices: Devices) -> None:
    with pytest.raises((ValueError, TypeError), match="unpipelined"):
        pipelined(model, sample("llama"), chunks=CHUNKS, devices=devices(2))
    assert_runs_as_plain(model)


@pytest.mark.parametrize("name", ["step", "layout", "unpipelined"])
def test_a_model_with_attributes_of_our_names_is_refused(name: str, devices: Devices) -> None:
    class OfItsOwn(nn.Sequential):
        pass

    setattr(OfItsOwn, name, lambda self: "mine")
    model = OfItsOwn(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    with pytest.raises((ValueError, TypeError), match=name):
        pipelined(model, (torch.zeros(2, 2, dtype=torch.float64),), chunks=CHUNKS, devices=devices(2))
    assert type(model) is OfItsOwn and getattr(model, name)() == "mine"


def test_a_refused_model_is_as_it_was(devices: Devices) -> None:
    model = llama()
    before = dict(vars(model))
    with pytest.raises(Exception, match=r"."):
        pipelined(model, {"no_such_argument": torch.zeros(2, 3)}, chunks=CHUNKS, devices=devices(2))
    assert type(model) is transformers.LlamaForCausalLM and dict(vars(model)) == before
    assert_runs_as_plain(model, micro_batches=1)


# ---------------------------------------------------------------------------------------------- what changes afterwards


class Doubled(nn.Module):
    """A layer around another."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x)


def test_submodules_are_replaced_afterwards(model: Any) -> None:
    """A layer within a block, the head, and a whole block of the spine."""
    plain = llama()
    for one in (model, plain):
        one.model.layers[1].mlp.up_proj = Doubled(one.model.layers[1].mlp.up_proj)
        one.lm_head = Doubled(one.lm_head)
        one.model.layers[2] = copy.deepcopy(one.model.layers[2])
    assert_runs_as_plain(model, plain=plain)


def test_a_parameter_is_replaced_afterwards(model: Any) -> None:
    plain = llama()
    for one in (model, plain):
        one.model.layers[3].mlp.down_proj.weight = nn.Parameter(one.model.layers[3].mlp.down_proj.weight.detach() * 2)
    assert_runs_as_plain(model, plain=plain)


def test_the_vocabulary_grows(model: Any) -> None:
    """`resize_token_embeddings` makes a new embedding and a new head."""
    plain = llama()
    for one in (model, plain):
        torch.manual_seed(4)
        one.resize_token_embeddings(40, mean_resizing=False)
    assert_runs_as_plain(model, plain=plain)


def test_hooks_of_the_user(model: Any) -> None:
    """On the model, once per call; on a layer, once per micro-batch."""
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append("before the model"))
    model.register_forward_hook(lambda *_: seen.append("after the model"))
    model.model.layers[1].register_forward_hook(lambda *_: seen.append("layer"))
    model(**batch("llama")).loss.backward()
    assert seen == ["before the model", "layer", "layer", "after the model"]


def test_weights_come_into_being_on_their_devices(devices: Devices) -> None:
    """A model made without memory for its weights gets them after it has become a pipeline."""
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        model = llama()
    assert all(parameter.is_meta for parameter in model.parameters())
    # The model looks at the values of the mask, and the meta device has none.
    arguments = {name: value for name, value in sample("llama").items() if name != "attention_mask"}
    pipelined(model, arguments, chunks=CHUNKS, devices=devices(2))
    assert not any(parameter.is_meta for parameter in model.parameters())
    model.load_state_dict(llama().state_dict())
    assert_runs_as_plain(model)


def test_weights_are_loaded_from_one_file_after_the_other(devices: Devices, tmp_path: Path) -> None:
    """No memory has to hold them all. The embedding is the head, too, and is in one file only."""
    accelerate = pytest.importorskip("accelerate")
    files = pytest.importorskip("safetensors.torch")
    plain = llama(tie_word_embeddings=True)
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(plain.config, dtype=torch.float64)
    model.tie_weights()
    pipelined(model, {"input_ids": sample("llama")["input_ids"]}, chunks=CHUNKS, devices=devices(2))
    paths = list(tmp_path.glob("*.safetensors"))
    assert len(paths) > 1
    for path in paths:
        model.load_state_dict(files.load_file(path), strict=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_runs_as_plain(model, plain=plain)
