"""From a Sequential to partitions in their places, and from a mini-batch to micro-batches."""

__all__: list[str] = []
