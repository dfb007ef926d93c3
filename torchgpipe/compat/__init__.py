"""Interfaces of other libraries, in front of the same pipeline."""

__all__: list[str] = []
