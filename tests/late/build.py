"""Builds the library, once for each state of its sources and each PyTorch: `python -m tests.late`.

The headers of PyTorch take the compiler most of the time, so all files are compiled as one: their unnamed namespaces
are one, too. No more is needed than a compiler: no ninja, no setuptools. Whoever builds holds a lock of the folder, and
all others wait for it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
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
    import fcntl  # Not on Windows, where all other tests import this file.

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
    headers = [
        flag
        for path in [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        for flag in ("-isystem", path)
    ]
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu", "-ltorch_python"]
    everything = "".join(f'#include "{source.name}"\n' for source in sorted(SOURCES.glob("*.cpp")))
    target.parent.mkdir(exist_ok=True)
    building = target.with_suffix(".new")
    command = [compiler() or "g++", *FLAGS, f"-I{SOURCES}", *headers, "-shared", "-x", "c++", "-", *libraries]
    subprocess.run([*command, "-o", str(building)], check=True, text=True, input=everything)
    building.replace(target)  # in one step: whoever sees it sees all of it
