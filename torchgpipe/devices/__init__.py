"""Devices and their streams, and what is asked of PyTorch's engine: what all other rooms stand on."""

__all__: list[str] = []
