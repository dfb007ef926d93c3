"""Notice what a second run would not find as the first run has found it: the modes and parameters of modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["Found", "registered"]


class Found:
    """Modules as they are now.

    Args:
        modules: the modules

    Attributes:
        layers: the modules, each with its mode and its parameters by name
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = [(module, module.training, list(module._parameters.items())) for module in modules]

    def changed(self) -> str | None:
        """Return what is another one now, or None."""
        for module, training, parameters in self.layers:
            if module.training != training:
                return f"it was in {'training' if training else 'evaluation'} mode"
            for name, parameter in parameters:
                if registered(module._parameters, name) is not parameter:
                    return f"'{name}' of a {type(module).__name__} was another parameter"
        return None


def registered(tensors: Any, name: str) -> Tensor | None:
    """Return a parameter or buffer by name, or None. The dicts of TorchScript modules have no ``get``."""
    if name not in tensors:
        return None
    tensor: Tensor | None = tensors[name]
    return tensor
