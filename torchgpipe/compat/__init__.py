"""Offer the interfaces of other libraries on top of the same pipeline."""

__all__: list[str] = []
