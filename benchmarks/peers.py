"""The peers that are measured, each in a process of its own.

The original and ours share the name `torchgpipe`, so no process may use both. A peer is a child process that
looks for modules in its own folder first, and then in this checkout, where the benchmarks are; it refuses to start
when it has found `torchgpipe` anywhere but in its folder. The third peer, `plain`, runs layers without a pipeline;
only the skips of such layers are ours.

Children stay alive for a round and answer one request at a time, while the others wait on an empty pipe:

    parent   ask A        ask B        ask A ...
    A        ####|        .            ####|
    B        .            ####|        .

so two figures that are compared were measured within seconds of each other, under the same load.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

__all__ = ["PEERS", "Answer", "Case", "Peer", "Request", "examples_on_path", "install", "pipeline", "running", "serve"]

Request = dict[str, Any]
Answer = dict[str, Any]
#: Ways of which each does the same: by its name the peer, and the request.
Case = Mapping[str, tuple[str, Request]]

CHECKOUT = Path(__file__).resolve().parent.parent
INSTALLED = CHECKOUT / ".peers"

#: A peer's name, and what pip calls it where it is not this checkout.
REQUIREMENTS = {"original": "torchgpipe==0.0.7"}
PEERS = ("ours", "original", "plain")


def examples_on_path() -> None:
    """Let this process import the examples, which import each other by their names alone."""
    if (examples := str(CHECKOUT / "examples")) not in sys.path:
        sys.path.append(examples)


def install(name: str) -> Path:
    """Return the folder that a peer is imported from, which may be its name. Install it there if it is missing."""
    if name not in REQUIREMENTS:
        return Path(name) if os.sep in name else CHECKOUT

    requirement = REQUIREMENTS[name]
    package, version = requirement.split("==")
    # Without its dependencies: it runs on the torch that ours runs on.
    folder = INSTALLED / package
    if not (folder / f"{package}-{version}.dist-info").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), requirement], check=True)
    return folder


class Peer:
    """A child process that runs one of the measuring scripts and answers requests.

    Args:
        environment: variables that it is given beside the usual ones
    """

    def __init__(self, name: str, script: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self.name = name
        environment = {
            **os.environ,
            **environment,
            "BENCHMARK_PEER": name,
            "PYTHONPATH": os.pathsep.join([str(install(name)), str(CHECKOUT)]),
            "PYTHONSAFEPATH": "1",  # or the working directory, which may be the checkout, would come first
        }

        self._stderr: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{Path(script).stem}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment,
        )

    def ask(self, request: Request) -> Answer:
        """Ask one request, and wait for the answer.

        Raises:
            RuntimeError: the child raised, or ended.

        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # The child ended; its last words on stderr are raised below.

        line = self._process.stdout.readline()
        if not line:
            self._stderr.seek(0)
            raise RuntimeError(f"peer {self.name!r} ended:\n{self._stderr.read()[-4000:]}")

        answer: Answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"peer {self.name!r} failed on {request}:\n{answer['error']}")
        return answer

    def close(self) -> None:
        """End the child."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextmanager
def running(
    names: Iterable[str], script: str | Mapping[str, str], environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[dict[str, Peer]]:
    """Keep a process for each of these peers in a ``with`` block; all run one script, or each its own."""
    scripts = {name: script if isinstance(script, str) else script[name] for name in names}
    with ExitStack() as stack:
        yield {name: stack.enter_context(Peer(name, child, environment)) for name, child in scripts.items()}


def pipeline(layers: Any, request: Request) -> Any:
    """Return layers in the pipeline of the `torchgpipe` that this process finds, as a request describes it."""
    from torchgpipe import GPipe

    places = {"devices": request["devices"], "chunks": request["m"], "checkpoint": request["mode"]}
    return GPipe(layers, request["balance"], **places)


def serve(answer: Callable[[str, Request], Answer]) -> None:
    """Call `answer(peer, request)` for each request until the parent closes the pipe. It runs in the child."""
    # Answers go to the real stdout. What a library prints goes to stderr, or it would stand between two answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    name = os.environ["BENCHMARK_PEER"]
    _refuse_another(name)

    for line in sys.stdin:
        try:
            reply = answer(name, json.loads(line))
        except Exception:
            reply = {"error": traceback.format_exc()}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _refuse_another(name: str) -> None:
    import torchgpipe

    expected = Path(os.environ["PYTHONPATH"].partition(os.pathsep)[0]).resolve()
    imported = Path(str(torchgpipe.__file__)).resolve()
    if imported.parent.parent != expected:
        raise ImportError(f"peer {name!r} found torchgpipe in {imported.parent}, not in {expected}")
