"""The commands of the library."""

__all__: list[str] = []
