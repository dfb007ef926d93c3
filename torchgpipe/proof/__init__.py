"""Comparing what a pipeline computes with what the plain model computes."""

__all__: list[str] = []
