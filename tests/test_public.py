"""The public surface is one list. Every name on it is documented with all its arguments, and shown in an example."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import torchgpipe
from tests import snippets

ROOT = Path(torchgpipe.__file__).parent.parent
REFERENCE = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.rst")))

#: The names that users may rely on, module by module.
PUBLIC: dict[str, list[str]] = {
    "torchgpipe": [
        "GPipe",
        "MicroBatches",
        "NoChunk",
        "follow",
        "is_checkpointing",
        "is_recomputing",
        "pipelined",
        "plan",
        "record",
        "windows",
    ],
    "torchgpipe.skip": ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"],
    "torchgpipe.model.comparison": ["Compared", "Comparison"],
    "torchgpipe.balance": ["balance_by_size", "balance_by_time"],
    "torchgpipe.batchnorm": ["DeferredBatchNorm", "mini_batch"],
    "torchgpipe.schedule": [
        "Action",
        "Simulation",
        "draw_svg",
        "draw_text",
        "fastest",
        "program",
        "simulate",
        "verify",
    ],
    "torchgpipe.distributed": ["Checkpoints", "DistributedGPipe"],
    "torchgpipe.pipe": ["BalanceError", "LocalRRef", "NoChunk", "Pipe", "PipeSequential", "WithDevice"],
    "torchgpipe.timeline.timeline": ["Timeline"],
    "torchgpipe.timeline.span": ["Row", "Span"],
    "torchgpipe.timeline.report": ["DeviceUse", "Report"],
    "torchgpipe_balancing": [
        "Check",
        "DoesNotFit",
        "LayerProfile",
        "Plan",
        "Profile",
        "Report",
        "balance_by_parameters",
        "balance_by_size",
        "balance_by_time",
        "partition",
        "profile",
    ],
}

#: Modules that also have names for the rest of the library.
SHARED = {
    "torchgpipe.schedule",
    "torchgpipe.batchnorm",
    "torchgpipe.model.comparison",
    "torchgpipe.timeline.span",
}

NAMES = [f"{module}.{name}" for module, names in PUBLIC.items() for name in names]


def named(name: str) -> Any:
    """Return the object of a full name."""
    if name in PUBLIC:
        return importlib.import_module(name)
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("module", PUBLIC)
def test_a_public_module_has_these_names(module: str) -> None:
    names = set(importlib.import_module(module).__all__)
    assert names >= set(PUBLIC[module])
    assert module in SHARED or names == set(PUBLIC[module])


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_in_the_reference(name: str) -> None:
    module, _, last = name.rpartition(".")
    directive = re.compile(
        rf"^\.\. auto(class|exception|function|decorator):: ({re.escape(name)}|{last})$", re.MULTILINE
    )
    whole = re.compile(rf"^\.\. automodule:: {re.escape(module)}\n +:members:", re.MULTILINE)
    assert directive.search(REFERENCE) or whole.search(REFERENCE), f"no page of docs/reference/ has {name}"


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_tells_of_its_arguments(name: str) -> None:
    for member, thing in snippets.documented(named(name)):
        text = inspect.getdoc(thing) or ""
        assert text, f"{name}{member} has no docstring"
        if not callable(thing) or (isinstance(thing, type) and "__init__" not in vars(thing)):
            continue
        parameters = [p for p in inspect.signature(thing).parameters.values() if p.name not in ("self", "cls")]
        fields = dict.fromkeys(re.findall(r"^ +\*{0,2}([\w, ]+?)(?: \([^)]*\))?:", text, re.MULTILINE))
        told = {word.strip() for field in fields for word in field.split(",")}
        if member == "" or not _forwards(parameters):
            missing = [p.name for p in parameters if p.name not in told]
            assert not missing, f"{name}{member} does not tell of {missing}"


def _forwards(parameters: list[inspect.Parameter]) -> bool:
    """Return whether the arguments are forwarded to another function unchanged."""
    return all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def test_each_public_name_is_shown_at_work() -> None:
    """The example is in a page or a docstring, all of which tests/test_docs.py runs."""
    pages = [snippets.in_rst(path.read_text()) for path in (ROOT / "docs").rglob("*.rst")]
    pages += [snippets.in_docstring(inspect.getdoc(t)) for name in NAMES for _, t in snippets.documented(named(name))]
    code = "\n".join(snippet.code for page in pages for snippet in page)
    returned = {"LayerProfile", "LocalRRef", "Profile", "Report", "Timeline", "Row", "Span", "DeviceUse"}
    returned |= {"Check", "Compared", "Comparison", "Plan"}
    names = {name.rpartition(".")[2] for name in NAMES} - returned - {"BalanceError"}  # never raised
    assert not [name for name in sorted(names) if not re.search(rf"\b{name}\b", code)]


def test_the_page_about_stability_has_this_list() -> None:
    page = " ".join((ROOT / "docs/project/stability.rst").read_text().split())
    for module, names in PUBLIC.items():
        assert f"- ``{module}``: {', '.join(f'``{name}``' for name in names)}" in page, module


def test_the_page_about_stability_names_what_ran_on_the_gpu() -> None:
    page = (ROOT / "docs/project/stability.rst").read_text()
    results = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results/gpu").glob("*.json")]
    for result in results:
        about = result["about"]
        told = {about["commit"].rstrip("+"), about["torch"], about["python"], *about["gpus"]}
        if result["slice"] == "tests":
            told.add(f"The {len(result['result']['failed'])} tests that failed")
        assert [name for name in told if name not in page] == []


def test_scripts_of_the_package_are_functions() -> None:
    for script in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values():
        module, _, function = script.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_no_page_installs_the_package_from_the_index() -> None:
    """``pip install 'torchgpipe[plot]'`` installs the original's last release, 0.0.7."""
    pages = [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    for folder, suffix in [("docs", "rst"), ("examples", "py"), ("torchgpipe", "py"), ("torchgpipe_balancing", "py")]:
        pages += (ROOT / folder).rglob(f"*.{suffix}")
    sent = re.compile(r"torchgpipe\[\w|pip install '?torchgpipe")
    assert [page.name for page in pages if sent.search(page.read_text())] == []
