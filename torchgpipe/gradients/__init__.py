"""The gradients of parameters: aliases, and their sums, delivered once."""

__all__: list[str] = []
