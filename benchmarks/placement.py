"""Which device each partition is on, and which layers it has."""

from __future__ import annotations

__all__ = ["even", "placed", "threaded"]


def placed(devices: list[str], n: int) -> list[str]:
    """Return the device of each partition. Where there are fewer devices than partitions, neighbours share one."""
    count = min(n, len(devices))
    return [devices[j * count // n] for j in range(n)]


def threaded(peer: str, threads: str, n: int, device: str = "cpu") -> list[str]:
    """Return the device of each partition: one for all if `threads` is 'inline', and if it is 'workers' one for each.

    Ours has a worker thread for each device. Beside one GPU there is only the CPU: there 'workers' has both in turn,
    with a copy at each boundary. The original runs every partition of 'cpu' in one worker thread, and does not tell
    'cpu:0' from 'cpu:1': it measures the same twice.
    """
    if threads == "workers" and device == "cpu" and peer == "ours":
        return [f"cpu:{j}" for j in range(n)]
    in_turn = [device, "cpu"] if threads == "workers" and peer != "plain" else [device]
    return [in_turn[j % len(in_turn)] for j in range(n)]


def even(layers: int, n: int) -> list[int]:
    """Return a balance that gives each partition as many layers as the others, or one more."""
    return [layers * (j + 1) // n - layers * j // n for j in range(n)]
