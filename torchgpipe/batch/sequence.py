"""Causal sequences, cut along their length into chunks that hand on their keys and values in a cache.

A chunk is what the plain model takes, after the chunks before it and with the same cache. Its labels are shifted before
the cut, because the last token of a chunk predicts the first one of the next.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchgpipe.model.settings import verify_number

__all__ = ["CarriedCache", "cut_sequence"]

#: What has a token of the sequence in each place of dimension 1, as transformers names it.
_OF_TOKENS = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "labels")

#: The layers of caches that make new tensors of old ones, so that autograd can follow. Others write in place, or round.
_GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer")

#: The tokens that show whether chunks give what the whole sequence gives.
_SHORT = 16

#: The label that transformers leaves out of a loss.
_IGNORED = -100


class CarriedCache(NamedTuple):
    """The keys and values that the chunks of one sequence hand on.

    Attributes:
        cache: an empty cache
        ends: for each chunk, the number of tokens up to its end
        batch: the arguments of the whole sequence
    """

    cache: Any
    ends: Sequence[int]
    batch: Mapping[str, Any]

    def verify_empty(self) -> None:
        """Check that nothing has filled the cache.

        Raises:
            ValueError: there are tokens in it.
        """
        tokens = max([layer.get_seq_length() for layer in self.cache.layers])
        if tokens:
            raise ValueError(f"the cache of a sequence has {tokens} tokens already; give an empty one")

    def short(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the arguments of a short sequence, without padding and with labels, and those of its two halves."""
        short = {k: value[:, :_SHORT] if isinstance(value, Tensor) else value for k, value in self.batch.items()}
        if "attention_mask" in short:
            short["attention_mask"] = torch.ones_like(short["attention_mask"])
        if "labels" in short:
            short["labels"] = short.get("input_ids", short["labels"])
        halves, _ = cut_sequence(short, 2, copy.deepcopy(self.cache))
        return {**short, "use_cache": False}, halves


def cut_sequence(
    batch: Mapping[str, Any], chunks: int | Sequence[int], cache: Any
) -> tuple[list[dict[str, Any]], CarriedCache]:
    """Return the arguments of each chunk, and what the chunks hand on; see `MicroBatches.of_sequence`."""
    _verify_growing(cache)
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    places = tensors.get("position_ids")
    if places is not None and "attention_mask" not in tensors and bool((places.diff(dim=1) != 1).any()):
        raise ValueError(
            "position_ids begin anew, as those of packed documents, but the chunks of a sequence attend to all chunks "
            "before; give each document as a sequence of its own, or train on whole sequences"
        )
    ends = [0, *_ends(tensors, chunks)]
    whole = {**batch, "past_key_values": cache, "use_cache": False}
    if "labels" in tensors:
        following = pad(tensors["labels"], (0, 1), value=_IGNORED)[:, 1:]
        whole.setdefault("num_items_in_batch", int((following != _IGNORED).sum()))
        # A model that takes these, and not the shifted ones, has none at all: its loss is not a number, or 0.
        tensors |= {"labels": torch.full_like(following, _IGNORED), "shift_labels": following}
    parts = []
    for begin, end in pairwise(ends):
        cut = {name: tensor[:, 0 if name == "attention_mask" else begin : end] for name, tensor in tensors.items()}
        parts.append({**whole, **{name: tensor.contiguous() for name, tensor in cut.items()}})
    return parts, CarriedCache(cache, ends[1:], batch)


def _verify_growing(cache: Any) -> None:
    kinds = sorted({type(layer).__name__ for layer in getattr(cache, "layers", ())})
    if not kinds or not {*kinds} <= {*_GROWING} or getattr(cache, "offloading", False):
        raise TypeError(
            f"of_sequence takes DynamicCache(config=model.config) with layers of {[*_GROWING]}, which can be "
            f"differentiated, but got {type(cache).__name__} with layers of {kinds}"
        )


def _ends(tensors: Mapping[str, Tensor], chunks: int | Sequence[int]) -> list[int]:
    """Return for each chunk the number of tokens up to its end."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    known = all([name in _OF_TOKENS or (name == "attention_mask" and len(shapes[name]) == 2) for name in shapes])
    lengths = {shape[1:2] for shape in shapes.values()}
    if not known or len(lengths) != 1 or lengths == {()}:
        raise TypeError(
            f"of_sequence cuts {', '.join(_OF_TOKENS)}, and an attention_mask of two dimensions, along dimension 1, "
            f"which has one size, but got {shapes}"
        )
    ((length,),) = lengths
    if not isinstance(chunks, Sequence) or isinstance(chunks, str):
        verify_number("chunks", chunks)
        chunks = [length // chunks + (k < length % chunks) for k in range(chunks)] if chunks > 0 else []
    chunks = [verify_number("each of chunks", chunk) for chunk in chunks]
    if sum(chunks) != length or min(chunks) < 1:
        raise ValueError(f"the chunks have the lengths {[*chunks]}, but the sequence has {length} tokens")
    return [*accumulate(chunks)]
