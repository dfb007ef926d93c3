"""Everything that makes the second run of a layer equal the first: settings, random numbers, phase, state."""

__all__: list[str] = []
