"""Pipeline parallelism for PyTorch: over the devices of one machine from one script, or over processes."""

from typing import TYPE_CHECKING, Any

from torchgpipe.batch.given import MicroBatches, windows
from torchgpipe.batch.microbatch import NoChunk
from torchgpipe.gpipe import GPipe
from torchgpipe.replay.phase import is_checkpointing, is_recomputing

if TYPE_CHECKING:
    from torchgpipe.front.follow import follow
    from torchgpipe.front.pipelined import pipelined
    from torchgpipe.timeline.recorder import record
    from torchgpipe_balancing.planning.plan import plan

__all__ = [
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
]

__version__ = "1.0.0.dev0"


def __getattr__(name: str) -> Any:
    # Fronts: imported by those who ask for them.
    if name == "follow":
        from torchgpipe.front.follow import follow

        return follow
    if name == "pipelined":
        from torchgpipe.front.pipelined import pipelined

        return pipelined
    if name == "record":
        from torchgpipe.timeline.recorder import record

        return record
    if name == "plan":
        from torchgpipe_balancing.planning.plan import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
