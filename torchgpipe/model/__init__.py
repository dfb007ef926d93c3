"""From a Sequential to partitions in their places; nested values, what a run leaves behind, and tables that compare."""

__all__: list[str] = []
