"""A cell: micro-batch i in column j, forward, again, and backward."""

__all__: list[str] = []
