"""Memory: whether an error says that it has run out, how much is in use, what tensors take, and sizes for people."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import storage_key

__all__ = ["bytes_of", "memory_in_use", "ran_out_of_memory", "read_size", "return_freed", "shown_size", "storages_of"]

#: What PyTorch's allocator of the CPU says, on Linux and on Windows; its errors have no type of their own.
_OF_THE_CPU = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the memory of a device has run out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_THE_CPU)


def memory_in_use(device: torch.device) -> tuple[int, int, int] | None:
    """Return the bytes of an accelerator that tensors take, that PyTorch has reserved, and that there are.

    Returns:
        None for a device of another kind, such as the CPU, and for an accelerator that cannot tell
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    try:
        _, total = torch.accelerator.get_memory_info(device)
    except RuntimeError:  # Not every kind of accelerator can tell, and this must not replace the error of the caller.
        return None
    return torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device), total


def return_freed() -> None:
    """Return freed memory of the host to the system.

    The C library of Linux keeps blocks of up to 32 MiB for later, in a heap for each thread. Phases with other threads
    and other sizes would add up.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all elements of the tensors. Sparse tensors have no storage, and do not count."""
    return sum([tensor.nbytes for tensor in tensors if tensor.layout is torch.strided])


def storages_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the key and the bytes of each storage behind the tensors, once. Sparse tensors do not count."""
    return {
        storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors if tensor.layout is torch.strided
    }


def shown_size(size: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def read_size(text: str) -> float:
    """Return the bytes that a text such as ``'14GiB'`` or ``'14 GB'`` tells; a GiB has 2**30 of them, a GB 10**9.

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(?:([kmgt])(i?))?b?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"a size is a number of bytes, or a text such as '14GiB' or '14 GB', but got {text!r}")
    number, prefix, binary = match.groups()
    power = 0 if prefix is None else 1 + "kmgt".index(prefix.lower())
    return float(number) * float((1024 if binary else 1000) ** power)
