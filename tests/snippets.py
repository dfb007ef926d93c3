"""Find the code that pages and docstrings show, and run it unchanged.

The blocks of a page run in order, like a session, and later blocks may use the names of earlier ones. The names that a
reader of a docstring has (`model`, `input`, `target` and the like) come from `at_hand`. A block of ``py`` is code for
another library, which is coloured in the same way and not run.
"""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import torchgpipe
import torchgpipe_balancing
from tests.skip.layers import Pop, Stash
from torchgpipe.skip import pop, skippable, stash

FENCE = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(
    r"^( *)\.\. (?:code-block:: (?:python|pycon)|testsetup::)\n\n((?:\1 .*\n|\n)+)", flags=re.MULTILINE
)
OTHERS = re.compile(r"^( *)\.\. code-block:: py\n\n((?:\1 .*\n|\n)+)", flags=re.MULTILINE)
DIFFERENCE = re.compile(r"^(?:```diff\n|\.\. code-block:: diff\n\n)((?:[ +-] .*\n|   .*\n|\n)+)", flags=re.MULTILINE)
LITERAL = re.compile(r"::\n\n((?: .*\n?|\n)+)")


class Snippet(NamedTuple):
    """A block of code, and the line of the text where it begins."""

    line: int
    code: str


def in_markdown(text: str) -> list[Snippet]:
    return list(_found(FENCE, text, 1))


def in_rst(text: str) -> list[Snippet]:
    return list(_found(DIRECTIVE, text, 2))


def in_diff(text: str, marks: str) -> str:
    """Return the code of the first difference on a page: the lines that stay, and those with ``marks`` before them."""
    found = DIFFERENCE.search(text)
    assert found is not None
    lines = textwrap.dedent(found[1].replace("\n\n", "\n  \n")).splitlines()
    return "\n".join([line[2:] for line in lines if line[:2] in ("  ", marks, "")])


def of_others(text: str) -> list[Snippet]:
    """Return the code for other libraries, which is not run."""
    return list(_found(OTHERS, text, 2))


def in_docstring(text: str | None) -> list[Snippet]:
    """Return the blocks after ``::``; the CPU takes the place of GPUs."""
    return list(_found(LITERAL, inspect.cleandoc(text or "").replace("cuda:", "cpu:"), 1))


def _found(pattern: re.Pattern[str], text: str, group: int) -> Iterator[Snippet]:
    for match in pattern.finditer(text):
        yield Snippet(text.count("\n", 0, match.start(group)) + 1, textwrap.dedent(match[group]).strip("\n") + "\n")


def run(snippet: Snippet, source: str | Path, names: dict[str, Any]) -> None:
    """Run a snippet in ``names``; a snippet with prompts must give the shown output or raise the shown error."""
    if not snippet.code.startswith(">>>"):
        # Empty lines precede the code, so that a traceback shows the line of the page.
        exec(compile("\n" * (snippet.line - 1) + snippet.code, str(source), "exec"), names)
        return
    for example in doctest.DocTestParser().get_examples(snippet.code):
        wanted = example.want if example.exc_msg is None else example.exc_msg
        flags = sum(flag for flag, wants in example.options.items() if wants)
        shown = _shown(example, names)
        where = f"{source}, line {snippet.line + example.lineno}: {example.source}"
        assert doctest.OutputChecker().check_output(wanted, shown, flags), f"{where}\n{wanted}\nbut got\n{shown}"


def _shown(example: doctest.Example, names: dict[str, Any]) -> str:
    """Return the output of a session after an input. Python's own runner drops an error with a note, before 3.12."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            exec(compile(example.source, "<example>", "single"), names)
        except Exception as error:
            if example.exc_msg is None:
                raise
            return "".join(traceback.format_exception_only(error))
    return output.getvalue()


def at_hand(plain_model: bool) -> dict[str, Any]:
    """Return the names that an example may use: a model of four layers, its data, and a loss.

    Args:
        plain_model: whether the model is not wrapped yet
    """
    a, b, c, d = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)
    plain = nn.Sequential(a, b, c, d)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "torchgpipe": torchgpipe}
    names["torchgpipe_balancing"] = torchgpipe_balancing
    names.update({name: getattr(torchgpipe, name) for name in torchgpipe.__all__})
    names.update(__name__="example", a=a, b=b, c=c, d=d, plain=plain, sample=torch.randn(4, 8))
    names.update(input=torch.randn(16, 8), target=torch.randint(2, (16,)), loss_fn=nn.CrossEntropyLoss())
    names.update(
        mini_batch=names["input"], Stash=Stash, Middle=nn.Identity, Pop=Pop, stash=stash, pop=pop, skippable=skippable
    )
    names.update(optimizer=torch.optim.SGD(plain.parameters(), lr=0.1), steps=3)
    names["model"] = plain if plain_model else torchgpipe.GPipe(nn.Sequential(*plain), balance=[2, 2], chunks=4)
    return names


def documented(thing: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield a class or function and its public members that have docstrings, by name."""
    yield "", thing
    if inspect.isclass(thing):
        for name, member in vars(thing).items():
            if not name.startswith("_") and getattr(member, "__doc__", None):
                yield f".{name}", getattr(member, "fget", None) or getattr(member, "__func__", member)
