"""Other processes: who has which column, what they send to each other, and what stands for their tensors here."""

__all__: list[str] = []
