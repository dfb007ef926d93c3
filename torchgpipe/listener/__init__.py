"""What the library tells a listener about its work, and the labels in the trace of the profiler."""

__all__: list[str] = []
