"""What runs cells: a program, by workers, or autograd, by nodes of the caller's graph."""

__all__: list[str] = []
