"""Weights and activations in host memory."""

__all__: list[str] = []
