"""The trial of other projects' scripts: what it compares, and that the lines of the recipes are marked as such."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.campaigns.diffusion_lora import CASES, ROOT, beside

RECIPES = ROOT / "docs" / "recipes"


def test_gradients_are_compared_by_the_norm_of_their_difference() -> None:
    one = {"losses": [1.0, 2.0], "grads": [[torch.tensor([3.0]), torch.tensor([4.0])], [torch.tensor([1.0])]]}
    other = {"losses": [1.0, 2.5], "grads": [[torch.tensor([3.0]), torch.tensor([4.5])], [torch.tensor([1.0])]]}
    assert beside(one, other) == {"losses": {"plain": [1.0, 2.0], "ours": [1.0, 2.5]}, "gradients": 0.1}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("name", CASES)
def test_a_recipe_is_a_difference_that_git_reads_and_calls_the_pipeline(name: str, tmp_path: Path) -> None:
    recipe = RECIPES / f"{name}.diff"
    counted = subprocess.run(
        ["git", "apply", "--numstat", str(recipe)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert counted.stdout
    added = [line[1:].strip() for line in recipe.read_text().splitlines() if line.startswith("+")]
    assert any(line.startswith("torchgpipe.pipelined(") for line in added)
    assert any(line.startswith("torchgpipe.follow(") for line in added) == (name != "diffusers")
