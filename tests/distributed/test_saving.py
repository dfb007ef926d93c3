"""What a user needs around a model over several processes: optimizers, clipping, and saving for any other number."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import torchgpipe
from tests.distributed.launch import launch
from torchgpipe.distributed import Checkpoints

pytestmark = pytest.mark.slow


class Tied(nn.Module):
    """The head has the weights of the embedding; in between is a layer with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


IDS = torch.arange(16) * 3 % 8


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double()


def piped(model: nn.Module, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return torchgpipe.pipelined(
        model, IDS[:4], chunks=4, balance="parameters", loss_fn=F.cross_entropy, mesh=mesh, **options
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: Any, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    """Return the losses, and the norms of the gradients before they were clipped."""
    rows = []
    for _ in range(2):
        loss = model.step(IDS, target=IDS)
        rows.append((loss.item(), model.clip_grad_norm_(0.5).item()))
        optimizer.step()
        optimizer.zero_grad()
    return rows


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    rows = []
    for _ in range(2):
        losses = [F.cross_entropy(model(ids), ids) / 4 for ids in IDS.chunk(4)]
        for loss in losses:
            loss.backward()
        rows.append((sum([loss.item() for loss in losses]), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()))
        optimizer.step()
        optimizer.zero_grad()
    return rows


def save(folder: str) -> tuple[list[tuple[float, float]], set[str]]:
    model = piped(tied())
    optimizer = adam(model)
    checkpoints = Checkpoints(f"{folder}/files", model, optimizer)
    rows = train(model, optimizer)
    checkpoints.save(2, {"step": 2}, asynchronous=True)
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/dcp")
    checkpoints.wait()
    assert {name for name, _ in model.named_parameters()} <= {*model.state_dict()}
    return rows + train(model, optimizer), {*model.state_dict()}


def go_on(folder: str) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    """Load into weights from the meta device, and from the files with the state of the optimizer."""
    with torch.device("meta"):
        model = Tied().double()
    piped(model)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    model.load_state_dict(state)
    values = {name: value.tolist() for name, value in model.state_dict().items()}

    model = piped(tied())
    optimizer = adam(model)
    assert Checkpoints(f"{folder}/files", model, optimizer).load() == {"step": 2}
    return values, train(model, optimizer)


def test_any_number_of_processes_and_the_plain_model_go_on(tmp_path: Path) -> None:
    plain = tied()
    optimizer = adam(plain)
    before = train_plain(plain, optimizer)
    saved = copy.deepcopy(plain.state_dict())
    after = train_plain(plain, optimizer)
    rows = launch(2, save, str(tmp_path))
    assert set.union(*[names for _, names in rows]) == {*saved} and all([names < {*saved} for _, names in rows])
    for losses, _ in rows:
        assert losses == [pytest.approx(row, rel=1e-9) for row in before + after]

    for n in (3, 1):
        for values, losses in launch(n, go_on, str(tmp_path)):
            assert losses == [pytest.approx(row, rel=1e-9) for row in after]
            for name, value in values.items():
                torch.testing.assert_close(torch.tensor(value, dtype=saved[name].dtype), saved[name])
    model = tied()
    model.requires_grad_(False)
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.testing.assert_close(model.state_dict(), saved)
    assert Checkpoints(tmp_path / "files", model).load() == {"step": 2}
    torch.testing.assert_close(model.state_dict(), saved)


def use(whole: dict[str, Tensor]) -> None:
    """Do what people do with a model; every process does the same."""
    model, x = piped(tied()), IDS
    twin = copy.deepcopy(model)
    assert [type(p) for p in twin.parameters()] == [nn.Parameter] * len([*model.parameters()])
    loss = model.step(x, target=x)
    assert torch.equal(twin.step(x, target=x), loss)

    twin.half()
    assert twin.step(x, target=x).dtype == torch.float16
    twin.double().load_state_dict(whole)
    assert torch.equal(twin.step(x, target=x), loss)
    twin.load_state_dict(piped(tied()).state_dict(), assign=True)
    twin.zero_grad()
    assert torch.equal(twin.step(x, target=x), loss)
    assert twin.head.weight.grad is None or twin.head.weight.is_leaf
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**whole, "other": x})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})

    model.zero_grad()
    model.requires_grad_(False)
    model.blocks[0].requires_grad_(True)
    model.step(x, target=x)
    model.requires_grad_(True).eval()
    with torch.no_grad():
        model(x)
    with pytest.raises(RuntimeError, match=r"a part of the model only, rank \d, .* load it into the plain model"):
        model.unpipelined()
    with pytest.raises(TypeError, match=r"cannot be pickled; save its state_dict\(\)"):
        pickle.dumps(model)
    [*model.parameters()][-1].requires_grad_(False)  # another one in each process
    with pytest.raises(RuntimeError, match=r"requires_grad_\(\) of a module"):
        model.step(x, target=x)


def test_copies_casts_and_frozen_parameters() -> None:
    launch(2, use, tied().state_dict())


def gpt2() -> Any:
    importlib.import_module("tests.conftest")  # In another process, transformers needs what it prepares.
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=4, n_layer=3, n_head=1, n_positions=8))


def save_pretrained(folder: str, made: Callable[[], Any]) -> None:
    ids = torch.arange(8).view(2, 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torchgpipe.pipelined(made(), {"input_ids": ids}, chunks=2, balance="parameters", mesh=mesh, verify=False)
    for n in (1, 2):  # The second one replaces the first.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(n)
        model.save_pretrained(folder)


def test_transformers_load_what_all_processes_have_saved(tmp_path: Path) -> None:
    expected = gpt2()
    launch(2, save_pretrained, str(tmp_path), gpt2)
    loaded, info = type(expected).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name) + 3)


def lora() -> Any:
    plain = gpt2()  # imports transformers in the way that another process needs
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(
        r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    return get_peft_model(plain, options)


def test_adapters_of_all_processes_are_one_file(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    launch(2, save_pretrained, str(tmp_path), lora)
    loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path)
    adapters = [parameter for name, parameter in loaded.named_parameters() if "lora_B" in name]
    assert len(adapters) == 3 and all([bool((parameter == 3).all()) for parameter in adapters])
    weights = [parameter for name, parameter in loaded.named_parameters() if "modules_to_save.default.weight" in name]
    assert len(weights) == 1 and bool((weights[0] == 4).all())
