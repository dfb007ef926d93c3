"""Messages from process to process, each found by its tag.

Both ends of a message know its tag and its form beforehand, so nothing but the tensor is sent. Sending waits for
nobody: the sender keeps a tensor until it has left. Receiving waits for the message.

Where the group of processes cannot send from the memory of an accelerator, the host copies a tensor to its own memory
first, and behind the message back to the device.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.devices.torch_internals import is_shared, versions
from torchgpipe.devices.typing import Leaf
from torchgpipe.processes.stand_in import Form

__all__ = ["Messages"]


class Messages:
    """The messages of one process to the others of its pipeline.

    Args:
        group: the processes, for tensors
        control: the same processes, for what the host sends and reads

    Attributes:
        counts: how many messages and bytes were sent, by what they are
    """

    def __init__(self, group: Any, control: Any) -> None:
        self._group, self._control = group, control
        self._on_devices = "nccl" in dist.get_backend(group)
        self._sending: deque[tuple[Any, Tensor, Tensor, int]] = deque()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def send(self, tensor: Tensor, to: int, tag: int, what: str = "tensors") -> None:
        """Send the values of a tensor, which must not change before they have left; see `flush`."""
        given = tensor = tensor.detach()
        if not tensor.numel():
            return
        for d in range(tensor.dim()):
            if tensor.stride(d) == 0:
                tensor = tensor.narrow(d, 0, 1)  # It is expanded at the other end.
        if not _is_dense(tensor.shape, tensor.stride()):
            tensor = tensor.contiguous()
        self.counts[f"{what} sent"] += 1
        self.counts[f"{what} bytes"] += tensor.nbytes
        flat = tensor.as_strided((tensor.numel(),), (1,))
        if flat.device.type != "cpu" and not self._on_devices:
            flat = flat.cpu()
        with self._lock:
            while self._sending and self._sending[0][0].is_completed():
                self._verify(*self._sending.popleft())
            work = dist.isend(flat, group=self._group, group_dst=to, tag=tag)
            self._sending.append((work, given, flat, versions([given])[0]))

    def receive(self, form: Form, source: int, tag: int) -> Tensor:
        """Return a tensor of this form with the values that come from ``source``.

        The strides, too, or products would be rounded in another way; except of tensors that overlap themselves.
        """
        shape = [*form.shape]
        options: dict[str, Any] = {"dtype": form.dtype, "device": form.device}
        if 0 in shape:
            return torch.empty_strided(shape, form.stride, **options)
        for d, stride in enumerate(form.stride):
            shape[d] = shape[d] if stride else 1
        if _is_dense(shape, form.stride):
            tensor = torch.empty_strided(shape, form.stride, **options)
            return self._fill(tensor, source, tag).expand(form.shape)
        tensor = self._fill(torch.empty(shape, **options), source, tag)
        if _is_apart(shape, form.stride):
            tensor = torch.empty_strided(shape, form.stride, **options).copy_(tensor)
        return tensor.expand(form.shape)

    def _fill(self, tensor: Tensor, source: int, tag: int) -> Tensor:
        flat = tensor.as_strided((tensor.numel(),), (1,))
        if flat.device.type == "cpu" or self._on_devices:
            dist.recv(flat, group=self._group, group_src=source, tag=tag)
        else:
            on_host = torch.empty_like(flat, device="cpu")
            dist.recv(on_host, group=self._group, group_src=source, tag=tag)
            flat.copy_(on_host)
        return tensor

    def send_gradients(self, grads: Sequence[Leaf], forms: Sequence[Form], to: int, tag: int) -> None:
        """Send gradients, and before them which of these exist, with their strides: sums in another order round.

        Args:
            grads: the gradients, or None
            forms: the forms of what they are gradients of
            to: the rank that receives them
            tag: the tag
        """
        # Autograd adds the gradient of the next micro-batch in place to what it shares.
        laid = [grad.clone() if grad is not None and is_shared(grad) else grad for grad in grads]
        header = [number for grad in laid for number in ([0] if grad is None else [1, *grad.stride()])]
        header += [0] * (_length_of(forms) - len(header))
        self.send_numbers(header, to, tag)
        for grad in laid:
            if grad is not None:
                self.send(grad, to, tag, "gradients")

    def receive_gradients(self, forms: Sequence[Form], source: int, tag: int) -> list[Leaf]:
        """Return what `send_gradients` has sent."""
        header = iter(self.receive_numbers(_length_of(forms), source, tag))
        strides = [[next(header) for _ in form.shape] if next(header) else None for form in forms]
        return [
            None if stride is None else self.receive(form._replace(stride=tuple(stride)), source, tag)
            for form, stride in zip(forms, strides)
        ]

    def tell(self, value: Any, to: Sequence[int], tag: int) -> None:
        """Send an object that can be pickled to several processes."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for rank in to:
            self.send_numbers([len(data)], rank, tag)
            with self._lock:
                work = dist.isend(data, group=self._control, group_dst=rank, tag=tag)
                self._sending.append((work, data, data, 0))

    def hear(self, source: int, tag: int) -> Any:
        """Return what `tell` of ``source`` has sent."""
        data = torch.empty(self.receive_numbers(1, source, tag)[0], dtype=torch.uint8)
        dist.recv(data, group=self._control, group_src=source, tag=tag)
        return pickle.loads(data.numpy().tobytes())

    def flush(self) -> None:
        """Wait until all has left.

        Raises:
            RuntimeError: a tensor was changed before that.
        """
        while self._sending:
            with self._lock:
                sent = self._sending.popleft()
            sent[0].wait()
            self._verify(*sent)

    def forget(self) -> None:
        """Forget what was to be sent, after a failure."""
        self._sending.clear()

    def _verify(self, _: Any, tensor: Tensor, sent: Tensor, version: int) -> None:
        if versions([tensor]) != [version]:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} was changed in place while it was sent to another process; "
                "change a copy, tensor.clone()"
            )

    def send_numbers(self, numbers: Sequence[int], to: int, tag: int) -> None:
        """Send integers."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self.counts["headers sent"] += 1
        with self._lock:
            work = dist.isend(tensor, group=self._control, group_dst=to, tag=tag)
            self._sending.append((work, tensor, tensor, 0))

    def receive_numbers(self, count: int, source: int, tag: int) -> list[int]:
        """Return ``count`` integers that come from ``source``."""
        numbers = torch.empty(count, dtype=torch.int64)
        dist.recv(numbers, group=self._control, group_src=source, tag=tag)
        result: list[int] = numbers.tolist()
        return result


def _length_of(forms: Sequence[Form]) -> int:
    return sum([1 + len(form.shape) for form in forms])


def _is_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether all elements of a tensor have places of their own."""
    extent = 1
    for stride, size in sorted(zip(strides, shape)):
        if size != 1:
            if stride < extent:
                return False
            extent += stride * (size - 1)
    return True


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements of a tensor fill their memory without gaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(strides, shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
