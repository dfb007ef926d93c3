"""The settings that all pipelines have, and deferred batch norms as well: what is accepted, and what it means."""

from __future__ import annotations

from typing import Any

__all__ = ["checkpoint_stop", "verify_checkpoint", "verify_chunks"]


def verify_chunks(chunks: Any) -> int:
    """The number of micro-batches.

    Args:
        chunks: a number, or what ``int()`` makes one of

    Raises:
        ValueError: it is none, or below 1.
    """
    try:
        number = int(chunks)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number <= 0:
        raise ValueError(f"number of chunks must be positive integer, but got {chunks!r}")
    return number


def verify_checkpoint(checkpoint: Any) -> str:
    """The checkpoint mode.

    Raises:
        ValueError: it is none.
    """
    mode = str(checkpoint)
    if mode not in ("always", "except_last", "never"):
        raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never', but {mode!r}")
    return mode


def checkpoint_stop(checkpoint: Any, m: int) -> int:
    """How many of ``m`` micro-batches, from the first on, are checkpointed in training.

    Raises:
        ValueError: ``checkpoint`` is no mode.
    """
    return {"always": m, "except_last": m - 1, "never": 0}[verify_checkpoint(checkpoint)]
