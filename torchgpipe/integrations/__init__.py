"""Trainers of other libraries, each imported only by those who have the library."""

__all__: list[str] = []
