"""Tests of pipelined models from other libraries; torchvision's missing operators are registered before any import."""

from __future__ import annotations

from benchmarks.architectures.operators import register_missing

register_missing()
