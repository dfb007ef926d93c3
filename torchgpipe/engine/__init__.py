"""How a mini-batch runs: cells, recomputation, gradients, copies between devices, and a worker for each device."""

__all__: list[str] = []
