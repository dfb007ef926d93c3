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
from torchgpipe.processes.elements import elements_of, restored, sent_shape
from torchgpipe.processes.pauses import Pauses
from torchgpipe.processes.stand_in import Form
from torchgpipe.processes.wire import in_two, pack, size_of, size_of_rest, unpack

__all__ = ["Messages"]


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
        given, flat = tensor.detach(), elements_of(tensor.detach())
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
        return restored(flat.to(form.device), form)

    def _asked_for(self, form: Form, source: int, tag: int, shift: int) -> _Asked:
        with self._lock:
            self._expected.pop((source, tag), None)
            return self._asked.pop((source, tag), None) or self._ask(form, source, tag, shift)

    def _ask(self, form: Form, source: int, tag: int, shift: int) -> _Asked:
        flat = torch.empty(math.prod(sent_shape(form)) + shift, dtype=form.dtype)[shift:]
        return _Asked(flat, dist.irecv(flat, group=self._group, group_src=source, tag=tag))

    def send_gradients(self, grads: Sequence[Leaf], forms: Sequence[Form], to: int, tag: int) -> None:
        """Send gradients, and which of them exist, with their strides: sums in another order round.

        Args:
            grads: the gradients, or None
            forms: the forms of what they are gradients of
            to: the rank that receives them
            tag: the tag
        """
        sizes = [grad.nbytes for grad in grads if grad is not None]
        self.counts["gradients sent"] += len(sizes)
        self.counts["gradients bytes"] += sum(sizes)
        packed = pack([*grads], size_of(forms))
        self._begin_to_send(packed, packed, to, tag)

    def expect_gradients(self, forms: Sequence[Form], source: int, tag: int) -> None:
        """See `expect`, of what `send_gradients` will send."""
        self.expect(_packed(forms), source, tag)

    def receive_gradients(self, forms: Sequence[Form], source: int, tag: int) -> list[Leaf]:
        """Return what `send_gradients` has sent."""
        grads: list[Leaf] = unpack(self.receive(_packed(forms), source, tag), forms[0].device)
        return grads

    def tell(self, value: Any, to: Sequence[int], tag: int) -> None:
        """Send plain data and tensors to several processes; see `pack`."""
        for part in filter(len, in_two(value)):
            for rank in to:
                self._begin_to_send(part, part, rank, tag)

    def hear(self, source: int, tag: int) -> Any:
        """Return what `tell` of ``source`` has sent."""
        first, _ = in_two(None)
        self.pauses.wait(partial(dist.recv, first, group=self._group, group_src=source, tag=tag))
        rest = first.new_empty(size_of_rest(first))
        if len(rest):
            self.pauses.wait(partial(dist.recv, rest, group=self._group, group_src=source, tag=tag))
        return unpack(torch.cat([first, rest]))

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

    def _verify(self, _: Any, tensor: Tensor, sent: Tensor, version: int) -> None:
        if versions([tensor]) != [version]:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} was changed in place while it was sent to another process; "
                "change a copy, tensor.clone()"
            )


def _packed(forms: Sequence[Form]) -> Form:
    """Return the form of a message with gradients."""
    return Form((size_of(forms),), (1,), torch.uint8, torch.device("cpu"))
