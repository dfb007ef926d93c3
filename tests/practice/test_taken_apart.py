"""Models taken apart into layers have the logits, gradients and weights of the original.

The models' libraries may be missing. The mechanisms behind the recipes are tested without them.
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
from tests.plain import assert_same, outcome, plain_outcome
from torchgpipe import GPipe

sys.path.append(str(Path(torchgpipe.__file__).parent.parent / "examples"))
pytest.importorskip("tqdm")

from taken_apart import as_in_layers, as_in_model, gpt2_layers, names_in, resnet_layers


def step(model: Any, *inputs: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return logits and gradients."""
    model.zero_grad()
    output = model(*inputs)
    output = getattr(output, "logits", output)
    output.square().mean().backward()
    return output.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


# GPT-2


@pytest.fixture(params=["sdpa", "eager"])
def gpt2(request: pytest.FixtureRequest) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=3, n_head=2, bos_token_id=None, eos_token_id=None
    )
    config._attn_implementation = request.param
    config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config).double()


@pytest.mark.parametrize("padded", [False, True])
def test_gpt2(pipe: Pipe, checkpoint: str, gpt2: Any, padded: bool) -> None:
    inputs = [torch.randint(11, (6, 8))]
    if padded:
        inputs.append((torch.arange(8) < torch.tensor([[3], [8], [1], [5], [8], [2]])).long())
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


# Weights


class LikeResNet(nn.Module):
    """A model built like torchvision's ResNet: with stages, and without a module that flattens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        blocks = [nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(2)]
        self.layer1 = nn.Sequential(*blocks)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


def test_weights_go_from_the_original_to_the_pipeline_and_back(pipe: Pipe) -> None:
    """The original runs on micro-batches too, because batch norm normalises each."""
    model, other = LikeResNet().double(), LikeResNet().double()
    layers = resnet_layers(other)
    names = names_in(layers, other)
    gpipe = pipe(layers, [2, 4, 2], chunks=2)
    gpipe.load_state_dict(as_in_layers(model.state_dict(), names))
    x = torch.rand(4, 3, 8, 8, dtype=torch.float64)
    expected = outcome(model, x, run=lambda x: torch.cat([model(part) for part in x.chunk(2)]))
    actual = outcome(gpipe, x)
    expected.param_grads = {names[name]: gradient for name, gradient in expected.param_grads.items()}
    expected.buffers = {names[name]: buffer for name, buffer in expected.buffers.items()}
    assert_same(actual, expected)
    back = as_in_model(gpipe.state_dict(), names)
    assert list(back) == list(model.state_dict())
    assert all(map(torch.equal, back.values(), model.state_dict().values()))


# One table shared by the first and the last layer


def test_a_table_of_two_layers_on_one_device(checkpoint: str) -> None:
    """The last partition returns to the device of the first partition."""
    table, think, score = nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 11, bias=False)
    score.weight = table.weight
    module = nn.Sequential(table, think, score).double()
    x = torch.randint(11, (6, 3))
    expected = plain_outcome(copy.deepcopy(module), x, chunks=3)
    devices = ["cpu:0", "cpu:1", "cpu:0"]
    actual = outcome(GPipe(module, [1, 1, 1], devices=devices, chunks=3, checkpoint=checkpoint), x)
    torch.testing.assert_close(actual.param_grads, expected.param_grads)
    assert torch.equal(actual.output, expected.output)
