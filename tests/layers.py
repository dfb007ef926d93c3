"""Layers shared by several tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Apply", "Using", "Weighted", "With"]


class Apply(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.function(*inputs, **keywords)


class Using(nn.Module):
    """A layer that calls ``function(linear, *inputs)`` with a linear map of its own."""

    def __init__(self, function: Callable[..., Any], width: int = 4, **options: Any) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(width, width, **options)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.linear, *inputs)


class Weighted(nn.Module):
    """A layer that calls ``function(input, *weights)`` with weights of these shapes."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([torch.rand(shape) for shape in shapes])

    def forward(self, input: Tensor) -> Any:
        return self.function(input, *self.weights)


class With(nn.Module):
    """A layer that calls ``function(module, *inputs)`` with any module."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.module, *inputs)
