"""Start processes that work together on this machine only, and leave none running.

The processes are forked from a server that has imported everything. So starting them is cheap, and each test starts
its own.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from tests import late

__all__ = ["Crash", "launch"]

# the server of `torch.multiprocessing`
_SERVER = multiprocessing.get_context("forkserver")
# Also what PyTorch imports when it first needs fake tensors, and the clients that tests train, if they are installed:
# in each process, that would take longer than the tests.
_FAKE = ["torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch._dynamo"]
_MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama")]
_CLIENTS = ["tests.pipelined.helpers", "transformers.trainer", *_MODELS, "accelerate", "lightning", "peft"]
_OURS = ["torchgpipe.distributed", "tests.conftest", "tests.distributed.launch"]
_SERVER.set_forkserver_preload([*_OURS, *_FAKE, *([] if late.loaded() else _CLIENTS)])


@functools.cache
def _start_server() -> None:
    """Wait until the server has imported everything, which counts in no limit."""
    process = _SERVER.Process(target=int)
    process.start()
    process.join()


class Crash(AssertionError):
    """A process ended with an exception."""


def launch(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 20.0,
    victim: int | None = None,
    limit: float = 60.0,
) -> list[Any]:
    """Call ``function(*args)`` in ``n`` processes of one group.

    Args:
        timeout: the timeout of the group, in seconds
        victim: the rank of a process that fails or hangs on purpose; it may end in any way, and is killed when all
            others have ended
        limit: the seconds after which a process counts as hanging and is killed

    Returns:
        the results of all processes by rank; None for a process that was killed

    Raises:
        Crash: a process raised an exception, or hangs.
    """
    _start_server()
    with TemporaryDirectory() as folder:
        pipes = [_SERVER.Pipe(duplex=False) for _ in range(n)]
        each = [(rank, n, folder, timeout, victim is None, pipes[rank][1], function, args) for rank in range(n)]
        processes = [_SERVER.Process(target=_run, args=own, daemon=True) for own in each]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        end = monotonic() + limit
        replies: list[Any] = []
        try:
            for rank, (receiver, _) in enumerate(pipes):
                try:
                    if rank == victim:
                        replies.append((True, None))
                    elif receiver.poll(max(0.0, end - monotonic())):
                        replies.append(receiver.recv())
                    else:
                        replies.append("hangs")
                except EOFError:
                    replies.append((True, None))
                receiver.close()
        finally:
            for rank, process in enumerate(processes):
                process.kill() if "hangs" in replies or rank == victim else process.join(10)
                process.kill()
                process.join()
    faults = [f"rank {rank}: {reply}" for rank, reply in enumerate(replies) if reply == "hangs"]
    faults += [f"rank {rank}:\n{reply[1]}" for rank, reply in enumerate(replies) if reply != "hangs" and not reply[0]]
    if faults:
        raise Crash("\n".join(faults))
    return [value for _, value in replies]


def _run(
    rank: int,
    n: int,
    folder: str,
    timeout: float,
    together: bool,
    reply: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), n)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=timeout))
        value = function(*args)
        if together:
            dist.barrier()
            dist.destroy_process_group()
        reply.send((True, value))
    except BaseException:
        reply.send((False, traceback.format_exc()))
        raise SystemExit(1) from None
