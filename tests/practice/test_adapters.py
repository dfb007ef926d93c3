"""Frozen layers with small adapters: leading frozen layers run once and get no gradient."""

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

sys.path.append(str(Path(torchgpipe.__file__).parent.parent / "examples"))
pytest.importorskip("tqdm")

from adapters import Adapted, Block, adapt, main


@pytest.fixture
def module() -> nn.Sequential:
    """Return four frozen blocks, the last two with adapters that are no longer zero."""
    module = nn.Sequential(*[Block(8) for _ in range(4)]).requires_grad_(False)
    adapt(module[2], rank=2)
    adapt(module[3], rank=2)
    for layer in module.modules():
        if isinstance(layer, Adapted):
            nn.init.normal_(layer.up.weight)
    return module.double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, 8, dtype=torch.float64)


def test_frozen_layers_in_front_run_once_and_are_not_differentiated(
    pipe: Pipe, module: nn.Sequential, x: Tensor
) -> None:
    model = pipe(module, [2, 1, 1], chunks=2, checkpoint="always")
    runs, backwards = [0] * 4, [0] * 4

    def count(k: int) -> Any:
        def hook(layer: nn.Module, args: Any, output: Tensor) -> None:
            runs[k] += 1
            if output.requires_grad:
                output.register_hook(lambda _: backwards.__setitem__(k, backwards[k] + 1))

        return hook

    for k, layer in enumerate(module):
        layer.register_forward_hook(count(k))
    model(x).sum().backward()
    assert runs == [2, 2, 4, 4]
    assert backwards == [0, 0, 2, 2]


def test_layers_are_frozen_and_thawed_between_steps(pipe: Pipe, checkpoint: str, x: Tensor) -> None:
    """Gradual unfreezing works because the pipeline reads `requires_grad` at each call."""
    module = nn.Sequential(*[Block(8) for _ in range(3)]).double()
    model = pipe(copy.deepcopy(module), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    for thawed in [[2], [1, 2], [0, 1, 2], [0]]:
        for layers in [module, model]:
            for k, layer in enumerate(layers):
                layer.requires_grad_(k in thawed)
        assert_same(outcome(model, x), plain_outcome(module, x, chunks=2))


def test_adapters_are_saved_alone_and_put_beside_the_same_model(pipe: Pipe, module: nn.Sequential, x: Tensor) -> None:
    model = pipe(copy.deepcopy(module), [2, 2], chunks=2)
    adapters = {name: tensor for name, tensor in model.state_dict().items() if model.get_parameter(name).requires_grad}
    assert len(adapters) == 2 * 4 * 2  # two blocks, with adapters at four layers each
    for layer in module.modules():
        if isinstance(layer, Adapted):
            nn.init.zeros_(layer.up.weight)
    other = pipe(module, [1, 3], chunks=2)
    assert not torch.equal(other(x), model(x))
    missing, unexpected = other.load_state_dict(adapters, strict=False)
    assert not unexpected and not any(".down" in name or ".up" in name for name in missing)
    assert torch.equal(other(x), model(x))


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--steps", "2", "--batch", "4", "--width", "8", "--layers", "3", "--blocks", "1", "--rank", "1"])
    out = capsys.readouterr().out
    assert "8 of " in out and "down.weight" in out
