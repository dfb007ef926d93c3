"""No page says that something was not measured, or is not there, when a result or a feature shows that it is.

Pages said that nothing had been measured on GPUs beside a table of figures from one, and that `pipelined` is for one
process after it had got a mesh.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import torchgpipe

ROOT = Path(torchgpipe.__file__).parent.parent
PAGES = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),  # which says what was true at its time
    *ROOT.glob("benchmarks/**/README.md"),
    *(path for path in ROOT.glob("docs/**/*.rst") if "_build" not in path.parts),
]

#: What was measured on GPUs, by the name of the slice.
MEASURED = {path.stem: json.loads(path.read_text()) for path in ROOT.glob("benchmarks/results/gpu/*.json")}
GPUS = [done["about"]["gpus"] for done in MEASURED.values() if not done["dry run"]]


class Claim(NamedTuple):
    """A sentence that pages may have.

    Attributes:
        pattern: finds it, on a page whose lines are joined
        wrong: whether it is contradicted
        found: a sentence that a page once had, or may have; the pattern must find it
    """

    pattern: str
    wrong: bool
    found: str


CLAIMS = {
    "nothing ran on a GPU": Claim(
        r"\b(nothing|none|no|not)\b[^.|]{0,60}\b(measured|run|taken|tested)\b[^.|]{0,20} on (a |any )?GPUs?\b",
        bool(GPUS),
        "On two CPU cores: nothing has been measured on GPUs yet.",
    ),
    "only simulated": Claim(
        r"\bon CPUs and on a simulated accelerator only\b",
        bool(GPUS),
        "`GPipe.step` is new, and has run on CPUs and on a simulated accelerator only.",
    ),
    "only one GPU": Claim(
        r"\bnot (yet|run) on several\b|\bnothing on several GPUs\b",
        any(len(gpus) > 1 for gpus in GPUS),
        "Tested on one GPU, not yet on several.",
    ),
    "only the host time of steps": Claim(
        r"\bonly its host time has been measured\b",
        "step" in MEASURED,
        "Its tests have run on one GPU as well, where only its host time has been measured.",
    ),
    "no connection": Claim(
        r"\bopens no connection by itself\b",
        "mesh" in inspect.signature(torchgpipe.pipelined).parameters,
        "It opens no connection by itself.",
    ),
    "pipelined in one process": Claim(
        r"\b(pipelined|torchgpipe)\b[^.|]{0,20} for one machine\b",
        "mesh" in inspect.signature(torchgpipe.pipelined).parameters,
        "`GPipe` and `pipelined` are for one machine and one process.",
    ),
}


def joined(page: Path) -> str:
    return " ".join(page.read_text().split())


@pytest.mark.parametrize("name", CLAIMS)
def test_no_page_says_what_a_result_or_a_feature_contradicts(name: str) -> None:
    claim = CLAIMS[name]
    assert re.search(claim.pattern, claim.found, re.IGNORECASE)
    if claim.wrong:
        says = {page.name: re.search(claim.pattern, joined(page), re.IGNORECASE) for page in PAGES}
        assert not {page: found[0] for page, found in says.items() if found}


def test_pages_name_the_gpu_that_was_measured() -> None:
    """The first page once named an H100, and the results an H200."""
    measured = {name for gpus in GPUS for gpu in gpus for name in gpu.split()}
    named = {name for page in PAGES for name in re.findall(r"\b[ABHV]\d{3}\b", joined(page))}
    assert named <= measured
