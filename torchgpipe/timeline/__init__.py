"""Record when each cell, copy and wait of a pipeline runs, and look at the timeline."""

__all__: list[str] = []  # The engine needs the recorder's protocol, and nothing that draws.
