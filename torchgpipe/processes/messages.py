"""Messages from process to process, each found by its tag.

Both ends of a message know its tag and its form beforehand, so nothing but the tensor is sent. Sending waits for
nobody: the sender keeps a tensor until it has left. Receiving waits for the message.

Gloo sends a tensor when the receiver has asked for it. If the question comes while the sender is busy with a message of
the same connection, a thread of gloo's waits for the sender in a loop, which takes the core from a sender that shares
it: longer than a short layer. So who knows what comes next asks for it beforehand, at the end of an action, and the
message has arrived when it is needed.

Where the group of processes cannot send from the memory of an accelerator, the host copies a tensor to its own memory
first, and behind the message back to the device.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.devices.torch_internals import is_shared, versions
from torchgpipe.devices.typing import Leaf
from torchgpipe.processes.stand_in import Form

__all__ = ["Messages"]


class _Asked(NamedTuple):
    """A tensor that is to be received, its elements where they arrive, and what waits for them."""

    tensor: Tensor
    flat: Tensor
    work: Any


class Messages:
    """The messages of one process to the others of its pipeline.

    Args:
        group: the processes, for tensors
        control: the same processes, for what the host sends and reads

    Attributes:
        counts: how many messages and bytes were sent, by what they are
        expects: whether it is of use to expect messages
    """

    def __init__(self, group: Any, control: Any) -> None:
        self._group, self._control = group, control
        self._on_devices = "nccl" in dist.get_backend(group)
        self._sending: deque[tuple[Any, Tensor, Tensor, int]] = deque()
        self._lock = threading.Lock()
        #: By the rank that it comes from and its tag, what is expected, and what was asked for.
        self._expected: dict[tuple[int, int], Form] = {}
        self._asked: dict[tuple[int, int], _Asked] = {}
        self._abandoned: list[_Asked] = []
        # NCCL runs operations in the order in which they are given: what comes later would have to wait.
        self.expects = not self._on_devices
        self.counts: Counter[str] = Counter()

    def send(self, tensor: Tensor, to: int, tag: int, what: str = "tensors") -> None:
        """Send the values of a tensor, which must not change before they have left; see `flush`."""
        given = tensor = tensor.detach()
        if not tensor.numel():
            return
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
        self.counts[f"{what} sent"] += 1
        self.counts[f"{what} bytes"] += tensor.nbytes
        flat = tensor.as_strided((tensor.numel(),), (1,))
        if flat.device.type != "cpu" and not self._on_devices:
            flat = flat.cpu()
        self._begin_to_send(given, flat, to, tag)

    def _begin_to_send(self, given: Tensor, flat: Tensor, to: int, tag: int) -> None:
        with self._lock:
            while self._sending and self._sending[0][0].is_completed():
                self._verify(*self._sending.popleft())
            work = dist.isend(flat, group=self._group, group_dst=to, tag=tag)
            self._sending.append((work, given, flat, versions([given])[0]))

    def expect(self, form: Form, source: int, tag: int) -> None:
        """Let `ask` make room for the next tensor with a tag, which `receive` returns."""
        if self.expects and all(form.shape):
            self._expected[source, tag] = form

    def ask(self) -> None:
        """Ask for what is expected."""
        with self._lock:
            for (source, tag), form in self._expected.items():
                self._asked[source, tag] = self._ask(form, source, tag)
            self._expected.clear()

    def abandon(self, form: Form, source: int, tag: int) -> None:
        """Throw away what was expected, when it comes: the sender has sent it for that."""
        if all(form.shape):
            self._abandoned.append(self._asked_for(form, source, tag))

    def receive(self, form: Form, source: int, tag: int) -> Tensor:
        """Return a tensor of this form with the values that come from ``source``."""
        if not all(form.shape):
            return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=form.device)
        tensor, flat, work = self._asked_for(form, source, tag)
        work.wait()
        if flat.device != tensor.device:
            tensor.as_strided((tensor.numel(),), (1,)).copy_(flat)
        return tensor

    def _asked_for(self, form: Form, source: int, tag: int) -> _Asked:
        with self._lock:
            self._expected.pop((source, tag), None)
            return self._asked.pop((source, tag), None) or self._ask(form, source, tag)

    def _ask(self, form: Form, source: int, tag: int) -> _Asked:
        tensor = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=form.device)
        if not _is_dense(tensor):
            tensor = torch.empty(form.shape, dtype=form.dtype, device=form.device)
        flat = tensor.as_strided((tensor.numel(),), (1,))
        if flat.device.type != "cpu" and not self._on_devices:
            flat = torch.empty_like(flat, device="cpu")
        return _Asked(tensor, flat, dist.irecv(flat, group=self._group, group_src=source, tag=tag))

    def send_gradients(self, grads: Sequence[Leaf], forms: Sequence[Form], to: int, tag: int) -> None:
        """Send gradients, and which of them exist, with their strides: sums in another order round.

        Args:
            grads: the gradients, or None
            forms: the forms of what they are gradients of
            to: the rank that receives them
            tag: the tag
        """
        laid = [grad if grad is None or _is_dense(grad) else grad.contiguous() for grad in grads]
        header = [number for grad in laid for number in ([0] if grad is None else [1, *grad.stride()])]
        header += [0] * (_length_of(forms) - len(header))
        self.counts["gradients sent"] += len(grads) - laid.count(None)
        self.counts["gradients bytes"] += sum([grad.nbytes for grad in laid if grad is not None])
        if not self._on_devices:
            packed, places = torch.empty(_packed(forms).shape, dtype=torch.uint8), _places(forms)
            packed[: 8 * len(header)].view(torch.int64).copy_(torch.tensor(header))
            for place, grad in zip(places, laid):
                if grad is not None:
                    _flat(packed, place, grad).copy_(grad.detach().as_strided((grad.numel(),), (1,)))
            self._begin_to_send(packed, packed, to, tag)
            return
        # Autograd adds the gradient of the next micro-batch in place to what it shares.
        laid = [grad.clone() if grad is not None and is_shared(grad) else grad for grad in laid]
        self._send_numbers(header, to, tag)
        for grad in laid:
            if grad is not None and grad.numel():
                self._begin_to_send(grad, grad.detach().as_strided((grad.numel(),), (1,)), to, tag)

    def expect_gradients(self, forms: Sequence[Form], source: int, tag: int) -> None:
        """See `expect`, of what `send_gradients` will send."""
        self.expect(_packed(forms), source, tag)

    def receive_gradients(self, forms: Sequence[Form], source: int, tag: int) -> list[Leaf]:
        """Return what `send_gradients` has sent."""
        length = _length_of(forms)
        if self._on_devices:
            numbers = iter(self._receive_numbers(length, source, tag))
        else:
            packed = self.receive(_packed(forms), source, tag)
            numbers = iter(packed[: 8 * length].view(torch.int64).tolist())
        strides = [[next(numbers) for _ in form.shape] if next(numbers) else None for form in forms]
        laid = [None if own is None else form._replace(stride=tuple(own)) for own, form in zip(strides, forms)]
        if self._on_devices:
            return [None if form is None else self.receive(form, source, tag) for form in laid]
        return [
            None if form is None else _flat(packed, place, form).as_strided(form.shape, form.stride).to(form.device)
            for form, place in zip(laid, _places(forms))
        ]

    def tell(self, value: Any, to: Sequence[int], tag: int) -> None:
        """Send an object that can be pickled to several processes."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for rank in to:
            self._send_numbers([len(data)], rank, tag)
            with self._lock:
                work = dist.isend(data, group=self._control, group_dst=rank, tag=tag)
                self._sending.append((work, data, data, 0))

    def hear(self, source: int, tag: int) -> Any:
        """Return what `tell` of ``source`` has sent."""
        data = torch.empty(self._receive_numbers(1, source, tag)[0], dtype=torch.uint8)
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
        while self._abandoned:
            self._abandoned.pop().work.wait()

    def forget(self) -> None:
        """Forget what was to be sent and received, after a failure."""
        self._sending.clear()
        self._expected.clear()
        self._asked.clear()
        self._abandoned.clear()

    def _verify(self, _: Any, tensor: Tensor, sent: Tensor, version: int) -> None:
        if versions([tensor]) != [version]:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} was changed in place while it was sent to another process; "
                "change a copy, tensor.clone()"
            )

    def _send_numbers(self, numbers: Sequence[int], to: int, tag: int) -> None:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self.counts["headers sent"] += 1
        with self._lock:
            work = dist.isend(tensor, group=self._control, group_dst=to, tag=tag)
            self._sending.append((work, tensor, tensor, 0))

    def _receive_numbers(self, count: int, source: int, tag: int) -> list[int]:
        numbers = torch.empty(count, dtype=torch.int64)
        dist.recv(numbers, group=self._control, group_src=source, tag=tag)
        result: list[int] = numbers.tolist()
        return result


def _length_of(forms: Sequence[Form]) -> int:
    return sum([1 + len(form.shape) for form in forms])


#: Gradients begin at multiples of so many bytes, as tensors of their own do.
_ALIGNMENT = 64


def _places(forms: Sequence[Form]) -> list[int]:
    """Return where the gradients of each form begin behind the numbers in a message, and where the message ends."""
    places = [_aligned(8 * _length_of(forms))]
    for form in forms:
        places.append(_aligned(places[-1] + math.prod(form.shape) * form.dtype.itemsize))
    return places


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _packed(forms: Sequence[Form]) -> Form:
    """Return the form of a message with gradients."""
    return Form((_places(forms)[-1],), (1,), torch.uint8, torch.device("cpu"))


def _flat(packed: Tensor, place: int, like: Tensor | Form) -> Tensor:
    """Return the elements of a gradient in a message."""
    return packed[place : place + math.prod(like.shape) * like.dtype.itemsize].view(like.dtype)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill their memory without gaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
