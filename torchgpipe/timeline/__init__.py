"""What ran when, measured: recording a pipeline, and looking at it."""

__all__: list[str] = []  # The engine needs the recorder's protocol, and nothing that draws.
