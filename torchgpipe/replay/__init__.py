"""What the second run of a layer needs to be like the first: settings, random numbers, phase, running statistics."""

__all__: list[str] = []
