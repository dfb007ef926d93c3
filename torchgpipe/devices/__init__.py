"""Devices and their streams, and every private name of PyTorch: the ground that all other rooms stand on."""

__all__: list[str] = []
