"""Plan a pipeline: measure a model, search for what fits the devices and is fastest, and say why."""

from __future__ import annotations

__all__: list[str] = []
