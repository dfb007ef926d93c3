"""Balance partitions automatically, under the signatures that torchgpipe has had since 0.0.5.

They differ from :mod:`torchgpipe_balancing` in the order of arguments, and the size takes the optimizer and the
micro-batches into account. The measurements and the split are the same. ::

    from torchgpipe import GPipe
    from torchgpipe.balance import balance_by_time

    balance = balance_by_time(2, model, sample)
    model = GPipe(model, balance, chunks=8)
"""

from torchgpipe.balance import blockpartition as blockpartition
from torchgpipe.balance import profile as profile
from torchgpipe.balance.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
