"""A GPT-2 taken apart into layers has the logits and gradients of the original.

`test_examples.py` takes a ResNet apart, too, and loads what was learnt into the original.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from tests.conftest import Pipe

sys.path.append(str(Path(torchgpipe.__file__).parent.parent / "examples"))
pytest.importorskip("tqdm")

from taken_apart import gpt2_layers, names_in


def step(model: Any, *inputs: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return logits and gradients."""
    model.zero_grad()
    output = model(*inputs)
    output = getattr(output, "logits", output)
    output.square().mean().backward()
    return output.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(params=["sdpa", "eager"])
def gpt2(request: pytest.FixtureRequest) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=3, n_head=2, bos_token_id=None, eos_token_id=None
    )
    config._attn_implementation = request.param
    config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config).double()


def test_gpt2(pipe: Pipe, checkpoint: str, gpt2: Any) -> None:
    """With a mask of padding, as a second input."""
    lengths = torch.tensor([[3], [8], [1], [5], [8], [2]])
    inputs = [torch.randint(11, (6, 8)), (torch.arange(8) < lengths).long()]
    logits, gradients = step(with_mask(gpt2), *inputs)
    layers = gpt2_layers(gpt2)
    names = names_in(layers, gpt2)
    actual, grads = step(pipe(layers, [1, 2, 2], chunks=3, checkpoint=checkpoint), *inputs)
    torch.testing.assert_close(actual, logits)
    torch.testing.assert_close(grads, {names[name]: gradient for name, gradient in gradients.items()})


def with_mask(model: nn.Module) -> nn.Module:
    """Return the model with the mask as its second input, under the names of its own parameters."""
    masked = copy.copy(model)
    forward = model.forward
    vars(masked)["forward"] = lambda tokens, mask=None: forward(tokens, attention_mask=mask)
    return masked


def test_gpt2_with_two_tables_is_refused(gpt2: Any) -> None:
    gpt2.lm_head.weight = nn.Parameter(gpt2.lm_head.weight.detach().clone())
    with pytest.raises(ValueError, match="lm_head has weights of its own"):
        gpt2_layers(gpt2)
