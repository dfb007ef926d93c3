"""The links between devices, tested before they are believed.

Some machines have broken copies from one accelerator straight to another: zeros arrive, or what was in that memory
before, and nothing raises an error. So when a pipeline is made, known bytes cross every link once in a process. Over a
link that fails, tensors go through host memory from then on.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from itertools import permutations

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import without_dispatch_modes

__all__ = ["to", "verify_links"]

#: The bytes that cross a link: enough for several packets of any bus.
_BYTES = 2**22

#: By link, from one device to another, whether it delivers what it is given.
_works: dict[tuple[torch.device, torch.device], bool] = {}
_broken: set[tuple[torch.device, torch.device]] = set()
_lock = threading.Lock()


def verify_links(devices: Iterable[torch.device], stacklevel: int) -> None:
    """Test the links between accelerators that no pipeline of this process has tested.

    Args:
        devices: the devices of a pipeline
        stacklevel: as for :func:`warnings.warn`, from the caller of this function on

    Warns:
        UserWarning: a link delivers other bytes than it is given.
    """
    accelerators = [device for device in dict.fromkeys(devices) if device.type not in ("cpu", "meta")]
    with _lock:
        links = [link for link in permutations(accelerators, 2) if link not in _works]
        if not links:
            return
        with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
            pattern = (torch.arange(_BYTES, dtype=torch.int32, device="cpu") * 167 + 1).to(torch.uint8)
            for source, target in links:
                # Other bytes over each link, or what an earlier test has left in the memory would pass.
                wrong = _count_wrong(pattern + 31 * len(_works) % 256, source, target)
                _works[source, target] = not wrong
                if wrong:
                    _broken.add((source, target))
                    warnings.warn(
                        f"copies from {source} to {target} are broken: {wrong} of {_BYTES} bytes arrived wrong, as "
                        "where peer-to-peer access fails; torchgpipe copies through host memory there, which takes "
                        "longer; or use other devices, or mend the link (drivers, IOMMU or ACS settings)",
                        UserWarning,
                        stacklevel=stacklevel + 1,
                    )


def _count_wrong(known: Tensor, source: torch.device, target: torch.device) -> int:
    """Return how many known bytes are others after a copy."""
    torch.empty(_BYTES, dtype=torch.uint8, device=target).copy_(~known)  # Freed at once, for the copy to be put there.
    arrived = known.to(source).to(target).to("cpu")
    return int((arrived != known).sum())


def to(tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
    """Return a tensor on a device, as `Tensor.to` does, through host memory if the link is broken."""
    if _broken and (tensor.device, device) in _broken:
        return tensor.to("cpu").to(device)
    return tensor.to(device, copy=copy)
