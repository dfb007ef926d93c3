"""The tags of messages: what is sent, of which micro-batch, and a number that both ends come to."""

from __future__ import annotations

__all__ = ["GRADIENTS", "NUMBERS", "PROOF", "SUMS", "TENSORS", "VALUES", "tag_of"]

#: What is sent: a tensor that crosses; gradients on their way back; a value that glue reads; random numbers; the
#: gradients of parameters that several processes have, and their sums; and what the first process gets for a proof.
TENSORS, GRADIENTS, VALUES, NUMBERS, SUMS, PROOF = range(6)

#: The most micro-batches, and the most messages of a kind for each of them; tags have 31 bits.
_MOST = 1 << 14


def tag_of(kind: int, i: int, number: int) -> int:
    """Return the tag of a message.

    Raises:
        ValueError: there are too many micro-batches or messages for a tag.
    """
    if i >= _MOST or number >= _MOST:
        raise ValueError(
            f"over processes, a mini-batch has at most {_MOST} micro-batches, {_MOST} crossings in each, and 128 "
            f"columns, but micro-batch {i} has a message of number {number}"
        )
    return (kind << 28) + (i << 14) + number
