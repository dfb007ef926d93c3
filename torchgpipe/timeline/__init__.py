"""Record when each cell, copy and wait of a pipeline runs; `torchgpipe.record` is the way in."""

__all__: list[str] = []
