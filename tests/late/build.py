"""Builds the library, once for each state of its sources and each PyTorch: `python -m tests.late`.

The headers of PyTorch take the compiler most of the time, so they are compiled once for all files. No more is needed
than a compiler: no ninja, no setuptools. Whoever builds holds a lock of the folder, and all others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import torch
from torch.utils import cpp_extension

__all__ = ["NoCompiler", "build", "compiler", "library"]

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parent.parent.parent / "build" / "late"
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-w"]


class NoCompiler(RuntimeError):
    """There is no library, and nothing to build it with."""


def compiler() -> str | None:
    """Return the C++ compiler, as the environment names it, or g++; None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def library() -> Path:
    """Return where the library of these sources and this PyTorch is, or will be."""
    state = hashlib.sha256(repr((torch.__version__, sys.version, FLAGS)).encode())
    for source in sorted(SOURCES.iterdir()):
        state.update(source.name.encode() + source.read_bytes())
    return BUILT / state.hexdigest()[:16] / "late_C.so"


def build() -> Path:
    """Build the library unless it is there, and return where it is.

    Raises:
        NoCompiler: it is not there, and there is no compiler.
        subprocess.CalledProcessError: the compiler says so.
    """
    target = library()
    if target.exists():
        return target
    if compiler() is None:
        raise NoCompiler("no C++ compiler: CXX is not set, and there is no g++")
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            start = monotonic()
            print("Building the accelerator in host memory, which takes a minute the first time ...", flush=True)
            _build(target)
            print(f"... built in {monotonic() - start:.0f} s", flush=True)
    return target


def _build(target: Path) -> None:
    found = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    compile = [compiler() or "g++", *FLAGS, *[flag for path in found for flag in ("-isystem", path)]]
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        # First found, the copy of the sources beside the compiled header is what is compiled.
        here = Path(shutil.copytree(SOURCES, Path(folder, "csrc")))

        def run(*command: object) -> None:
            subprocess.run([*map(str, command)], check=True, cwd=here)

        def object_of(source: Path) -> Path:
            run(*compile, "-c", source.name, "-o", source.with_suffix(".o"))
            return source.with_suffix(".o")

        run(*compile, "-x", "c++-header", "torch.h", "-o", "torch.h.gch")
        # The longest first.
        sources = sorted(here.glob("*.cpp"), key=lambda path: (path.stem != "bindings", -path.stat().st_size))
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = [*threads.map(object_of, sources)]
        names = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        run(
            compile[0],
            "-shared",
            *objects,
            *[f"-L{path}" for path in cpp_extension.library_paths()],
            *names,
            "-o",
            "late_C.so",
        )
        target.parent.mkdir(exist_ok=True)
        (here / "late_C.so").replace(target)  # in one step: whoever sees it sees all of it
