"""A mini-batch and its micro-batches: how arguments are split, and outputs and losses joined and weighed."""

__all__: list[str] = []
