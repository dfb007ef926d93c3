"""Batch norms that track the running statistics of the whole mini-batch."""

__all__: list[str] = []
