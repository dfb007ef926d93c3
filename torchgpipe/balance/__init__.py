"""Automatic balancing, under the signatures that torchgpipe has had since 0.0.5.

They differ from those of :mod:`torchgpipe_balancing` in the order of arguments, and in that size knows of the
optimizer and of micro-batches. What is measured, and how it is split, is the same. ::

    from torchgpipe import GPipe
    from torchgpipe.balance import balance_by_time

    balance = balance_by_time(2, model, sample)
    model = GPipe(model, balance, chunks=8)
"""

from torchgpipe.balance import blockpartition as blockpartition
from torchgpipe.balance import profile as profile
from torchgpipe.balance.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
