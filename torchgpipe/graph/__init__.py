"""Graphs of autograd: the doors to its engine, cuts, order, backward in two halves."""

__all__: list[str] = []
