"""Convert a model, its optimizer and its random state to plain values by name, and back.

The names are those of the plain model. So the values of all processes can be joined, and loaded into a model with
another balance or into the plain model.
"""

from __future__ import annotations

import copy
from itertools import chain, count, islice
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.devices.generators import Generator, device_generator, go_on_from, state_of

__all__ = [
    "collect_optimizer",
    "collect_random",
    "restore_model",
    "restore_optimizer",
    "restore_random",
    "verify_optimizer",
]


def restore_model(model: nn.Module, saved: dict[str, Any]) -> None:
    """Load the parameters and buffers that ``model`` has.

    Raises:
        RuntimeError: ``saved`` lacks a tensor of the model, or has it in another shape.
    """
    state = model.state_dict()
    _verify_saved([f"model.{name}" for name in state if name not in saved])
    model.load_state_dict({name: saved[name] for name in state})


def collect_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings and the state of each parameter, by its name."""
    names, saved = verify_optimizer(model, optimizer), {}
    for group in optimizer.param_groups:
        # The names of a group, if the optimizer has them, are those of this process.
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for parameter in group["params"]:
            saved[names[parameter]] = {"settings": settings, "state": optimizer.state.get(parameter, {})}
    return saved


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load the settings and the state of the parameters that ``optimizer`` has.

    Raises:
        RuntimeError: ``saved`` lacks a parameter, or has different settings for the parameters of one group.
    """
    names = verify_optimizer(model, optimizer)
    owned = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    _verify_saved([f"optimizer.{name}" for name in chain(*owned) if name not in saved])
    groups, index = [], count()
    for group, own in zip(optimizer.param_groups, owned):
        settings = saved[own[0]]["settings"] if own else group
        for name in own:
            if saved[name]["settings"] != settings:
                raise RuntimeError(
                    f"a group of the optimizer has parameters that were saved with different settings: '{name}' "
                    f"with {saved[name]['settings']}, others with {settings}; make the groups of the run that was saved"
                )
        groups.append({**settings, "params": [*islice(index, len(own))]})
    state = {k: saved[name]["state"] for k, name in enumerate(chain(*owned)) if saved[name]["state"]}
    optimizer.load_state_dict(copy.deepcopy({"state": state, "param_groups": groups}))


def verify_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Return the names of the model's parameters.

    Raises:
        ValueError: the optimizer has a parameter that the model does not have.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model does not have; "
                    "make the optimizer from model.parameters()"
                )
    return names


def collect_random(model: nn.Module) -> dict[str, Tensor]:
    """Return the random states of the CPU and of the accelerators that ``model`` is on."""
    return {name: state_of(generator) for name, generator in _generators(model).items()}


def restore_random(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Restore the random states of the devices that were saved; leave those of other devices."""
    for name, generator in _generators(model).items():
        if name in saved:
            go_on_from(generator, saved[name])


def _verify_saved(missing: list[str]) -> None:
    if missing:
        raise RuntimeError(f"the checkpoint has no {', '.join(missing)}; load it into the model that was saved")


def _generators(model: nn.Module) -> dict[str, Generator]:
    devices = {torch.device("cpu"), *[parameter.device for parameter in model.parameters()]}
    return {str(device): device_generator(device) for device in devices}
