"""Adapters of peft, on a model that becomes a pipeline before or after them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.pipelined.helpers import (
    CHUNKS,
    TWO,
    assert_close,
    assert_trains_alike,
    batch,
    counted_calls,
    gpt2,
    gradients,
    in_pipeline,
    llama,
    sample,
    t5,
)

pytest.importorskip("transformers", minversion="5")
peft = pytest.importorskip("peft")

from torchgpipe import pipelined  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("losses_in_float64")]

orders = pytest.mark.parametrize("order", ["adapters, pipelined", "pipelined, adapters"])


def lora(**options: Any) -> Any:
    """Return settings of adapters that change the output from the start."""
    usual = {"target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **usual | options)


def adapted(base: nn.Module, config: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Return the model with adapters that are the same at every call."""
    torch.manual_seed(1)
    model = peft.get_peft_model(base, config)
    for parameter in model.parameters():  # in place, so that nothing moves
        parameter.data = parameter.data.to(dtype)
    return model


def both(order: str, config: Any, base: Callable[[], nn.Module] = llama) -> tuple[Any, Any]:
    """Return a model with adapters that is pipelined before or after them, and the same without a pipeline."""
    plain = adapted(base(), config)
    if order.startswith("adapters"):
        return in_pipeline(adapted(base(), config)), plain
    return adapted(in_pipeline(base()), config), plain


#: The model, and settings of its adapters.
VARIANTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "in late layers only": (llama, {"layers_to_transform": [3]}),  # backward need not enter the first partition
    "encoder and decoder": (t5, {"target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"}),
    # peft keeps copies of such layers in a ModuleDict, which never are layers in a row.
    "beside layers that are trained whole": (llama, {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "DoRA": (llama, {"use_dora": True}),
    "tied": (gpt2, {"target_modules": ["wte", "c_attn"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_lora(variant: str) -> None:
    """Pipelined before or after the adapters, in turns: the tests below take both orders."""
    base, options = VARIANTS[variant]
    order = ["adapters, pipelined", "pipelined, adapters"][[*VARIANTS].index(variant) % 2]
    ours, plain = both(order, lora(**options), base)
    assert_trains_alike(ours, plain)
    if base is llama:
        with counted_calls(ours.base_model.model.model.layers[0]) as calls:
            ours(**batch("llama"))
        assert calls == [2, 2]


def test_an_adapter_for_each_row_is_refused_by_name() -> None:
    """`adapter_names` is a list with a name for each row, for inference."""
    ours, _ = both("adapters, pipelined", lora())
    ours.add_adapter("other", lora())
    ours.double().eval()
    with torch.no_grad(), pytest.raises(ValueError, match="adapter_names"):
        ours(**batch("llama"), adapter_names=["default", "other", "__base__", "default"])


@orders
def test_adapters_are_added_switched_and_disabled(order: str) -> None:
    models = both(order, lora())
    for model in models:
        torch.manual_seed(2)
        model.add_adapter("other", lora(target_modules=["down_proj"]))
        model.double()
    for adapter in ("other", "default"):
        for model in models:
            model.set_adapter(adapter)
            model.zero_grad()
        assert_trains_alike(*models)
    arguments = batch("llama")
    with models[0].disable_adapter(), models[1].disable_adapter():
        assert_close(models[0](**arguments).logits, models[1](**arguments).logits)
        assert_close(models[0](**arguments).logits, llama()(**arguments).logits)


@orders
def test_merge_and_unload(order: str) -> None:
    """What was a pipeline before the adapters still is one after them."""
    ours, plain = both(order, lora())
    assert_trains_alike(ours, plain)
    arguments = batch("llama")
    with torch.no_grad():
        before = ours(**arguments).logits
    merged, expected = ours.merge_and_unload(), plain.merge_and_unload()
    assert type(merged).__name__ == "LlamaForCausalLM"
    assert_close(merged.state_dict(), expected.state_dict())
    with torch.no_grad(), counted_calls(merged.model.layers[0]) as calls:
        assert_close(merged(**arguments).logits, before)
    assert calls == ([2, 2] if order.startswith("pipelined") else [4])


def test_saved_adapters(tmp_path: Path) -> None:
    """Only adapters are saved, under the plain model's names."""
    ours, plain = both("pipelined, adapters", lora())
    assert_trains_alike(ours, plain, steps=1)
    ours.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "plain")
    files = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("ours", "plain")]
    assert files[0] == files[1]

    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "ours").double()
    assert_close(peft.get_peft_model_state_dict(loaded), peft.get_peft_model_state_dict(plain))
    again = in_pipeline(llama())
    again = peft.PeftModel.from_pretrained(again, tmp_path / "plain", is_trainable=True).double()
    for model in (again, plain):
        model.zero_grad()
    assert_trains_alike(again, plain)


def test_adapters_below_bfloat16_are_in_float32() -> None:
    """peft does so by default. A single micro-batch rounds as the plain model's mini-batch does."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(peft.get_peft_model(llama().to(torch.bfloat16), lora()))
    ours, plain = models
    in_pipeline(ours, chunks=1)
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
    for around in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        for model in models:
            model.zero_grad()
        with around:
            loss, expected = ours.step(**batch("llama")), plain(**batch("llama")).loss
        expected.backward()
        assert_close(loss, expected.detach(), 0.0)
        assert_close(gradients(ours), gradients(plain), 0.0)


# --------------------------------------------------------------------------------------------- prompts that are trained


TOKENS: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
PROMPTS: dict[str, Callable[[], Any]] = {
    "p-tuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=8, **TOKENS),
    "projected prefix": lambda: peft.PrefixTuningConfig(prefix_projection=True, encoder_hidden_size=8, **TOKENS),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_tuned_prompts(kind: str) -> None:
    """Prompts come into being in the model's forward, once in each micro-batch."""
    assert_trains_alike(*both("adapters, pipelined", PROMPTS[kind]()))


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_before_a_pipeline(kind: str) -> None:
    """Prompts get their gradients through `inputs_embeds`, an input of the pipeline; prefixes through its cache."""
    base, config, arguments = llama(), PROMPTS[kind](), sample("llama")
    if "prefix" not in kind:
        del arguments["input_ids"]
        arguments["inputs_embeds"] = torch.zeros(2, 7, base.config.hidden_size, dtype=torch.float64)
    pipelined(base, arguments, chunks=CHUNKS, devices=TWO)
    assert_trains_alike(adapted(base, config), adapted(llama(), config))
