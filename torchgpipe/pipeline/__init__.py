"""What runs the mini-batches of any module: calls, steps, and what several processes do together."""

__all__: list[str] = []
