"""The code that documentation and docstrings show for several processes runs in several processes."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchgpipe
from tests import snippets
from tests.distributed.launch import launch
from torchgpipe.distributed import Checkpoints, DistributedGPipe

pytestmark = pytest.mark.slow

DOCS = Path(torchgpipe.__file__).parent.parent / "docs"


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(16, 64, generator=draw), torch.randint(10, (16,), generator=draw)


def run(found: list[snippets.Snippet], source: str, folder: str, **names: Any) -> dict[str, Any]:
    """Run code that initialises its process group, in a process that already has one; return all names."""
    os.chdir(folder)
    dist.init_process_group = lambda **options: None
    dist.destroy_process_group = lambda: None
    for snippet in found:
        snippets.run(snippet, source, names)
    return names


def page(folder: str) -> None:
    text = (DOCS / "scaling.rst").read_text().replace('"cuda"', '"cpu"')
    text = text.replace("range(begin, 1000)", "range(begin, 10)").replace("% 100 == 0", "% 5 == 0")
    found = snippets.in_rst(text)
    assert len(found) >= 2
    loss_fn = nn.functional.cross_entropy
    run(found, "scaling.rst", folder, replicas=1, stages=2, balance=[1, 2], loss_fn=loss_fn)
    valid = dist.get_rank() == 0 and Checkpoints("runs/first", nn.Linear(1, 1)).steps()
    assert valid is False or 10 in valid


def replicas_page(folder: str) -> None:
    """Train two replicas of two stages, which have the same weights afterwards."""
    names = run(snippets.in_rst((DOCS / "guide" / "data-parallel.rst").read_text()), "data-parallel.rst", folder)
    for parameter in names["model"].parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, group=names["mesh"].get_group(0), group_src=0)
        assert torch.equal(first, parameter.detach())


def trainer_page(folder: str) -> None:
    """Train over two processes, and then the plain model in this one, by the plain Trainer."""
    names = run(snippets.in_rst((DOCS / "scaling" / "trainer.rst").read_text()), "trainer.rst", folder, torch=torch)
    plain = names["AutoModelForCausalLM"].from_pretrained("llama", dtype=torch.float32)
    names["settings"].output_dir, names["settings"].save_strategy = f"plain-{dist.get_rank()}", "no"
    import transformers

    trainer = transformers.Trainer(plain, names["settings"], train_dataset=names["dataset"])
    trainer.train()
    ours, expected = [
        [row[key] for row in each.state.log_history for key in ("loss", "grad_norm") if key in row]
        for each in (names["trainer"], trainer)
    ]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-3, atol=1e-4)
    tuned = names["AutoModelForCausalLM"].from_pretrained("tuned", dtype=torch.float32)
    torch.testing.assert_close(tuned.state_dict(), plain.state_dict(), rtol=1e-2, atol=1e-4)


def docstring(folder: str) -> None:
    found = snippets.in_docstring(DistributedGPipe.__doc__)
    assert len(found) == 1
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10))
    data = [batch(step) for step in range(3)]
    names = {"torch": torch, "timedelta": timedelta, "DistributedGPipe": DistributedGPipe, "module": module}
    run(found, "DistributedGPipe", folder, data=data, **names)


def test_code_of_the_page(tmp_path: Path) -> None:
    launch(2, page, str(tmp_path))


def test_code_of_the_page_on_replicas(tmp_path: Path) -> None:
    launch(4, replicas_page, str(tmp_path))


def test_code_of_the_page_on_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    launch(2, trainer_page, str(tmp_path))


def test_code_of_the_docstring(tmp_path: Path) -> None:
    launch(2, docstring, str(tmp_path))
