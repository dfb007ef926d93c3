"""Messages from process to process, each found by its tag.

Both ends of a message know its tag and its form beforehand, so nothing but the tensor is sent. Sending waits for
nobody: the sender keeps a tensor until it has left. Receiving waits for the message.

Gloo sends a tensor when the receiver has asked for it. If the question comes while the sender is busy with a message of
the same connection, a thread of gloo's waits for the sender in a loop, which takes the core from a sender that shares
it: longer than a short layer. So who knows what comes next asks for it beforehand, at the end of an action, and the
message has arrived when it is needed.

All messages are those of gloo, whose operations have tags: NCCL runs operations in their order, and both ends would
have to come to the same. So the host copies a tensor of an accelerator to its own memory first, and behind the message
back to the device.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.devices.torch_internals import versions
from torchgpipe.devices.typing import Leaf
from torchgpipe.processes.pauses import Pauses
from torchgpipe.processes.stand_in import Form

__all__ = ["Messages", "shift_of"]


class _Asked(NamedTuple):
    """The elements of a tensor that is to be received, and what waits for them."""

    flat: Tensor
    work: Any


class Messages:
    """The messages of one process to the others of its pipeline.

    Args:
        group: the processes; gloo, whose operations have tags

    Attributes:
        counts: how many messages and bytes were sent, by what they are
        pauses: what goes on while a message is waited for
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._sending: deque[tuple[Any, Tensor, Tensor, int]] = deque()
        self._lock = threading.Lock()
        #: By the rank that it comes from and its tag, what is expected, and what was asked for.
        self._expected: dict[tuple[int, int], tuple[Form, int]] = {}
        self._asked: dict[tuple[int, int], _Asked] = {}
        self._abandoned: list[_Asked] = []
        self.counts: Counter[str] = Counter()
        self.pauses = Pauses()

    def send(self, tensor: Tensor, to: int, tag: int, what: str = "tensors") -> None:
        """Send the values of a tensor, which must not change before they have left; see `flush`."""
        given, flat = tensor.detach(), _elements_of(tensor.detach())
        if not flat.numel():
            return
        self.counts[f"{what} sent"] += 1
        self.counts[f"{what} bytes"] += flat.nbytes
        self._begin_to_send(given, flat.cpu(), to, tag)

    def _begin_to_send(self, given: Tensor, flat: Tensor, to: int, tag: int) -> None:
        with self._lock:
            while self._sending and self._sending[0][0].is_completed():
                self._verify(*self._sending.popleft())
            work = dist.isend(flat, group=self._group, group_dst=to, tag=tag)
            self._sending.append((work, given, flat, versions([given])[0]))

    def expect(self, form: Form, source: int, tag: int, shift: int = 0) -> None:
        """Let `ask` make room for the next tensor with a tag, which `receive` returns."""
        if all(form.shape):
            with self._lock:
                self._expected[source, tag] = form, shift

    def ask(self) -> None:
        """Ask for what is expected."""
        with self._lock:
            for (source, tag), (form, shift) in self._expected.items():
                self._asked[source, tag] = self._ask(form, source, tag, shift)
            self._expected.clear()

    def abandon(self, form: Form, source: int, tag: int) -> None:
        """Throw away what was expected, when it comes: the sender has sent it for that."""
        if all(form.shape):
            self._abandoned.append(self._asked_for(form, source, tag, 0))

    def receive(self, form: Form, source: int, tag: int, shift: int = 0) -> Tensor:
        """Return a tensor of this form with the values that come from ``source``; see `shift_of`."""
        if not all(form.shape):
            return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=form.device)
        flat, work = self._asked_for(form, source, tag, shift)
        self.pauses.wait(work.wait)
        return _restored(flat.to(form.device), form)

    def _asked_for(self, form: Form, source: int, tag: int, shift: int) -> _Asked:
        with self._lock:
            self._expected.pop((source, tag), None)
            return self._asked.pop((source, tag), None) or self._ask(form, source, tag, shift)

    def _ask(self, form: Form, source: int, tag: int, shift: int) -> _Asked:
        flat = torch.empty(math.prod(_sent_shape(form)) + shift, dtype=form.dtype)[shift:]
        return _Asked(flat, dist.irecv(flat, group=self._group, group_src=source, tag=tag))

    def send_gradients(self, grads: Sequence[Leaf], forms: Sequence[Form], to: int, tag: int) -> None:
        """Send gradients, and which of them exist, with their strides: sums in another order round.

        Args:
            grads: the gradients, or None
            forms: the forms of what they are gradients of
            to: the rank that receives them
            tag: the tag
        """
        # 0 if there is no gradient, else one more than its shift, and its strides.
        header = [n for grad in grads for n in ([0] if grad is None else [1 + shift_of(grad), *grad.stride()])]
        header += [0] * (_length_of(forms) - len(header))
        flat = [None if grad is None else _elements_of(grad.detach()) for grad in grads]
        sizes = [elements.nbytes for elements in flat if elements is not None]
        self.counts["gradients sent"] += len(sizes)
        self.counts["gradients bytes"] += sum(sizes)
        packed, places = torch.empty(_packed(forms).shape, dtype=torch.uint8), _places(forms)
        packed[: 8 * len(header)].view(torch.int64).copy_(torch.tensor(header))
        for place, grad, elements in zip(places, grads, flat):
            if grad is not None and elements is not None:
                _part(packed, place, shift_of(grad), elements.numel(), elements.dtype).copy_(elements)
        self._begin_to_send(packed, packed, to, tag)

    def expect_gradients(self, forms: Sequence[Form], source: int, tag: int) -> None:
        """See `expect`, of what `send_gradients` will send."""
        self.expect(_packed(forms), source, tag)

    def receive_gradients(self, forms: Sequence[Form], source: int, tag: int) -> list[Leaf]:
        """Return what `send_gradients` has sent."""
        packed = self.receive(_packed(forms), source, tag)
        numbers = iter(packed[: 8 * _length_of(forms)].view(torch.int64).tolist())
        grads: list[Leaf] = []
        for form, place in zip(forms, _places(forms)):
            shift = next(numbers) - 1
            if shift < 0:
                grads.append(None)
                continue
            form = form._replace(stride=tuple([next(numbers) for _ in form.shape]))
            flat = _part(packed, place, shift, math.prod(_sent_shape(form)), form.dtype)
            grads.append(_restored(flat.to(form.device), form))
        return grads

    def tell(self, value: Any, to: Sequence[int], tag: int) -> None:
        """Send an object that can be pickled to several processes."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for rank in to:
            self.send_numbers([len(data)], rank, tag)
            with self._lock:
                work = dist.isend(data, group=self._group, group_dst=rank, tag=tag)
                self._sending.append((work, data, data, 0))

    def hear(self, source: int, tag: int) -> Any:
        """Return what `tell` of ``source`` has sent."""
        data = torch.empty(self.receive_numbers(1, source, tag)[0], dtype=torch.uint8)
        self.pauses.wait(partial(dist.recv, data, group=self._group, group_src=source, tag=tag))
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

    def send_numbers(self, numbers: Sequence[int], to: int, tag: int) -> None:
        """Send integers."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self.counts["headers sent"] += 1
        with self._lock:
            work = dist.isend(tensor, group=self._group, group_dst=to, tag=tag)
            self._sending.append((work, tensor, tensor, 0))

    def receive_numbers(self, count: int, source: int, tag: int) -> list[int]:
        """Return ``count`` integers that come from ``source``."""
        numbers = torch.empty(count, dtype=torch.int64)
        self.pauses.wait(partial(dist.recv, numbers, group=self._group, group_src=source, tag=tag))
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
        places.append(_aligned(places[-1] + math.prod(form.shape) * form.dtype.itemsize + _ALIGNMENT))
    return places


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _packed(forms: Sequence[Form]) -> Form:
    """Return the form of a message with gradients."""
    return Form((_places(forms)[-1],), (1,), torch.uint8, torch.device("cpu"))


def _part(packed: Tensor, place: int, shift: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the elements of a gradient in a message."""
    begin = place + shift * dtype.itemsize
    return packed[begin : begin + count * dtype.itemsize].view(dtype)


def shift_of(tensor: Tensor) -> int:
    """Return how many elements behind a multiple of 64 bytes a tensor begins: the CPU rounds some sums by that."""
    return tensor.storage_offset() * tensor.itemsize % _ALIGNMENT // tensor.itemsize


def _elements_of(tensor: Tensor) -> Tensor:
    """Return what is sent of a tensor: its elements in the order of its memory, each once."""
    for d in range(tensor.dim()):
        if tensor.stride(d) == 0 and tensor.shape[d]:
            tensor = tensor.narrow(d, 0, 1)
    if not _is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def _restored(flat: Tensor, form: Form) -> Tensor:
    """Return a tensor of this form with elements that `_elements_of` has given.

    It has the strides, too, or products would be rounded in another way; but for one that overlaps itself.
    """
    shape = _sent_shape(form)
    if _is_dense(shape, form.stride):
        return flat.as_strided(shape, form.stride).expand(form.shape)
    tensor = flat.view(shape)
    if _is_apart(shape, form.stride):
        shift, extent = shift_of(flat), 1 + sum([(size - 1) * step for size, step in zip(shape, form.stride)])
        room = torch.empty(shift + extent, dtype=form.dtype, device=form.device)
        tensor = room.as_strided(shape, form.stride, shift).copy_(tensor)
    return tensor.expand(form.shape)


def _sent_shape(form: Form) -> list[int]:
    """Return the shape of what is sent of a tensor: a dimension that is expanded is sent once."""
    return [size if stride or not size else 1 for size, stride in zip(form.shape, form.stride)]


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
