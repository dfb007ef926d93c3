"""Offer the old Pipe of PyTorch on top of the same pipeline."""

__all__: list[str] = []
