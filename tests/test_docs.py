"""The code in README, documentation and docstrings runs unchanged, and tables show the committed results."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import torchgpipe
import torchgpipe_balancing
from tests import snippets
from tests.conftest import with_accelerators
from tests.test_public import PUBLIC, named
from torchgpipe.schedule import program, simulate

pytestmark = [
    pytest.mark.usefixtures("rounded"),
    pytest.mark.filterwarnings("ignore:torchgpipe.pipelined. cpu.0 is the only device here"),
]

ROOT = Path(torchgpipe.__file__).parent.parent
MARKDOWN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
RST = sorted(path for path in (ROOT / "docs").rglob("*.rst") if "_build" not in path.parts)
# These run in several processes, in tests/distributed/test_docs.py.
for page in ("scaling.rst", "scaling/trainer.rst", "guide/data-parallel.rst"):
    RST.remove(ROOT / "docs" / page)


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a temporary folder, for examples that write files, and shorten measurements."""
    monkeypatch.chdir(tmp_path)
    for measure in (torchgpipe_balancing.balance_by_time, torchgpipe_balancing.profile):
        monkeypatch.setitem(measure.__kwdefaults__, "timeout", 0.0)
    later = importlib.import_module("torchgpipe.balance").balance_by_time
    monkeypatch.setitem(later.__kwdefaults__, "timeout", 0.0)


@pytest.mark.parametrize("page", [*MARKDOWN, ROOT / "CHANGELOG.md", *(ROOT / "benchmarks").glob("**/README.md")])
def test_links_of_a_page_in_markdown_lead_to_files(page: Path) -> None:
    """Those of the other pages are checked when the documentation is built."""
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def first_example(page: Path) -> str:
    """Return what a reader pastes first: the page up to the first pipeline, with the rest of that block."""
    text = page.read_text()
    blocks = [snippet.code for snippet in (snippets.in_markdown if page.suffix == ".md" else snippets.in_rst)(text)]
    first = next((k for k, code in enumerate(blocks) if re.search(r"\b(GPipe|Pipe)\(", code)), -1)
    return "\n".join(blocks[: 1 if page.suffix == ".md" else first + 1])


# Compiling takes seconds, and is on no first page.
FIRST = [page for page in [*MARKDOWN, *RST] if first_example(page) and page.name != "compile.rst"]


def test_there_is_code_to_run() -> None:
    """A fault in the reader would make all other tests pass."""
    assert len(snippets.in_markdown((ROOT / "README.md").read_text())) >= 2
    guide = snippets.in_rst((ROOT / "docs" / "guide" / "errors.rst").read_text())
    assert len(guide) >= 8 and any(snippet.code.startswith(">>>") for snippet in guide)
    assert len(snippets.in_docstring(torchgpipe.GPipe.__doc__)) == 1
    first = {"README.md", "index.rst", "getting-started.rst", "wrapping.rst", "sequences.rst"}
    assert first <= {page.name for page in FIRST}


@pytest.mark.parametrize("accelerators", [0, 1, 2])
@pytest.mark.parametrize("page", FIRST, ids=lambda page: page.name)
def test_the_first_example_of_a_page_runs_on_any_machine(
    page: Path, accelerators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's example once raised an IndexError with one GPU and with two."""
    with_accelerators(monkeypatch, accelerators)
    snippets.run(snippets.Snippet(1, first_example(page).replace("cuda:", "cpu:")), page, {"__name__": "page"})


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_code_of_a_page_in_markdown(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block runs by itself, on a machine with one GPU, where an example may lack devices."""
    with_accelerators(monkeypatch, 1)
    for snippet in snippets.in_markdown(page.read_text()):
        snippets.run(snippet, page, {"__name__": "page"})


class LanguageModel(torch.nn.Module):
    """The model of the first screen, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 9)])

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = tokens
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(x.mT, labels)


FIRST_SCREENS = [ROOT / "README.md", ROOT / "docs" / "index.rst"]


@pytest.mark.parametrize("page", FIRST_SCREENS, ids=lambda page: page.name)
def test_the_training_loop_of_the_first_screen(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown as a change of a loop, so it must run before and after the change."""
    with_accelerators(monkeypatch, 1)
    tokens = torch.randint(9, (16, 5))
    at_hand = {"torch": torch, "torchgpipe": torchgpipe, "LanguageModel": LanguageModel, "sample": (tokens, tokens)}
    for marks in ("- ", "+ "):
        code = snippets.in_diff(page.read_text(), marks)
        assert "loss.backward()" in code and ("pipelined" in code) == (marks == "+ ")
        exec(code, {**at_hand, "loader": [(tokens, tokens)]})


@pytest.mark.parametrize("page", FIRST_SCREENS, ids=lambda page: page.name)
def test_the_figures_of_the_first_screen_are_simulated(page: Path) -> None:
    def faster(name: str, m: int) -> str:
        return f"{4 * (1 - simulate(program(name, m, [*range(4)])).bubble):.1f}"

    shown = re.findall(r"\b\d\.\d(?= times)", " ".join(page.read_text().split()))[:3]
    assert shown == [faster("1F1B", 16), faster("ZeroBubble", 16), faster("1F1B", 4)]


def test_code_of_other_libraries_is_python() -> None:
    """Blocks of ``py`` are not run, but they are complete."""
    for page in RST:
        for snippet in snippets.of_others(page.read_text()):
            compile("\n" * (snippet.line - 1) + snippet.code, str(page), "exec")


def marked(page: Path) -> Any:
    """Return a page for `parametrize`; those that import a client take seconds."""
    clients = r"^ +(?:from|import) (?:accelerate|diffusers|transformers)\b"
    imports = re.search(clients, page.read_text(), flags=re.MULTILINE)
    return pytest.param(page, marks=[pytest.mark.slow] if imports else [], id=str(page.relative_to(ROOT / "docs")))


@pytest.mark.parametrize("page", [*map(marked, RST)])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile reads it
@pytest.mark.filterwarnings("ignore:GPU available but not used", "ignore:The 'train_dataloader' does not have many")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # Lightning 2.6 asks
def test_code_of_a_page_of_the_documentation(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block runs after the others, on a machine with one GPU."""
    with_accelerators(monkeypatch, 1)
    text = page.read_text()
    code = "\n".join([snippet.code for snippet in snippets.in_rst(text)])
    for client in ("accelerate", "diffusers", "lightning", "peft", "safetensors", "transformers"):
        if re.search(rf"^ *(from|import) {client}\b", code, flags=re.MULTILINE):
            pytest.importorskip(client, minversion="5" if client == "transformers" else None)
    names = {"__name__": "page"}
    try:
        for snippet in snippets.in_rst(text):
            snippets.run(snippet, page, names)
    finally:
        torch.compiler.reset()
        torch.set_default_dtype(torch.float32)


EXAMPLES = {
    name + member: snippets.in_docstring(thing.__doc__)
    for name in [*PUBLIC, *(f"{module}.{each}" for module, names in PUBLIC.items() for each in names)]
    for member, thing in snippets.documented(named(name))
    if snippets.in_docstring(inspect.getdoc(thing)) and name != "torchgpipe.distributed.DistributedGPipe"
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_code_of_a_docstring(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block runs by itself, with as many GPUs as it needs."""
    monkeypatch.setattr("torchgpipe.model.verify.default_devices", lambda n: [torch.device("cpu")] * n)
    if any(".plot(" in snippet.code for snippet in EXAMPLES[name]):
        pytest.importorskip("matplotlib")
    module = max((module for module in PUBLIC if name.startswith(module)), key=len)
    for snippet in EXAMPLES[name]:
        names = snippets.at_hand(plain_model=module in ("torchgpipe_balancing", "torchgpipe.balance"))
        names.update({public: named(f"{module}.{public}") for public in PUBLIC[module]})
        if name.startswith(("torchgpipe_balancing.Profile", "torchgpipe_balancing.Report")):
            names["profile"] = torchgpipe_balancing.profile(names["model"], names["sample"])
        snippets.run(snippet, name, names)


def test_a_package_index_shows_the_readme_without_links_to_nowhere() -> None:
    """Outside of the repository, a relative link or picture of the README leads nowhere."""
    pytest.importorskip("setuptools")
    text, readme = runpy.run_path(str(ROOT / "setup.py"))["description"](""), (ROOT / "README.md").read_text()
    assert not re.search(r"\]\((?!https?:)", text)
    assert snippets.in_markdown(text) == snippets.in_markdown(readme)
    assert "balance=[...], chunks=8)` (guide)" in text
    assert "\n*Picture: " in text and "(`docs/images/plan.svg` of the source distribution).*\n" in text


def test_links_of_the_readme_lead_to_the_published_site_if_there_is_one() -> None:
    pytest.importorskip("setuptools")
    text = runpy.run_path(str(ROOT / "setup.py"))["description"]("https://site.example/")
    links = re.findall(r"\]\(https://site\.example/(.+?)\.html\)", text)
    assert {"guide/index", "planning", "notebooks/quick-start"} <= set(links)
    for link in links:
        assert [*(ROOT / "docs").glob(f"{link}.*")], link


def test_a_package_index_shows_the_addresses_that_are_known() -> None:
    pytest.importorskip("setuptools")
    urls = runpy.run_path(str(ROOT / "setup.py"))["urls"]
    site, repository = "https://site.example/", "https://forge.example/owner/name"
    assert urls("", "") == {}
    assert urls("", repository)["Changelog"] == f"{repository}/blob/main/CHANGELOG.md"
    assert urls(site, repository) == {
        "Documentation": site,
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{site}project/changelog.html",
    }


def test_tables_are_those_of_the_results() -> None:
    """`python -m benchmarks.tables` writes them."""
    pytest.importorskip("matplotlib")
    tables = importlib.import_module("benchmarks.tables")
    for page in tables.pages():
        text = page.read_text()
        assert tables.render(text) == text, f"the tables of {page.name} are older than the results"


def test_figures_are_those_that_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python docs/figures.py` draws them."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    committed = {path.stem: path.read_text() for path in (ROOT / "docs" / "images").glob("*.svg")}
    for name, svg in importlib.import_module("figures").pictures():
        assert svg == committed.pop(name, None), f"{name}.svg is not what docs/figures.py draws"
    assert not committed, "nothing draws these"


def test_pages_name_the_gpu_that_was_measured() -> None:
    """The first page once named an H100, and the results an H200."""
    results = [json.loads(path.read_text()) for path in ROOT.glob("benchmarks/results/gpu/*.json")]
    measured = {name for one in results if not one["dry run"] for gpu in one["about"]["gpus"] for name in gpu.split()}
    assert {name for page in [*MARKDOWN, *RST] for name in re.findall(r"\b[ABHV]\d{3}\b", page.read_text())} <= measured


def without_numbers(text: str) -> str:
    """Return all but what differs from run to run."""
    return re.sub(r" *-?\d[\d.,]*(?:e-?\d+)?", "", text)


def test_what_pages_show_as_printed_is_printed_by_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python docs/shown.py` writes it."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    shown = importlib.import_module("shown")
    committed = {path.stem: path.read_text() for path in (ROOT / "docs" / "shown").glob("*.txt")}
    for name, text in shown.files():
        assert without_numbers(text) == without_numbers(committed.pop(name)), f"{name}.txt is older than the code"
    assert committed.keys() == {"plan", "check", "fit", "flux", "qlora"}  # which take longer
    check = torchgpipe_balancing.planning.check.Check(1.0, (1.0,), (), (), ())
    assert without_numbers(committed["check"]).split() == without_numbers(str(check)).split()
