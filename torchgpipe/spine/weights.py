"""The weights of a model over several processes: each process keeps those that its columns use.

In the place of the others are stand-ins. A parameter that columns of several processes use, such as a tied one, has a
copy in each of these processes, and the sum of its gradients, in the order of the columns, arrives at each copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.gradients.aliases import Aliases
from torchgpipe.gradients.sums import sum_of
from torchgpipe.processes.processes import Processes
from torchgpipe.processes.stand_in import StandIn, form_of
from torchgpipe.spine.settings import Settings, find_door, iterate_tensors

__all__ = [
    "add_shared",
    "begin_alike",
    "clip_together",
    "fetch",
    "keep_own",
    "own",
    "own_slots",
    "put",
    "stand_ins_of",
    "users_of",
]

T = TypeVar("T", bound=Tensor)


def _placed(
    module: nn.Module, settings: Settings, processes: Processes
) -> Iterator[tuple[str, nn.Module, str, Tensor, list[int]]]:
    """Yield all places of parameters and buffers, see `iterate_tensors`, and the ranks that have the tensor.

    The first of them is that of the first column.
    """
    users = users_of(module, settings)
    for full, child, name, tensor in [*iterate_tensors(module)]:
        if name in child._parameters:
            columns = sorted(users[tensor])
        elif find_door(full, settings.doors) is not None:
            columns = [settings.column_of(full)]
        else:
            columns = [*range(len(processes.owners))]
        yield full, child, name, tensor, [*dict.fromkeys([processes.owners[c] for c in columns])]


def put(child: nn.Module, name: str, tensor: Tensor) -> Any:
    """Put a tensor in the place of a parameter or a buffer, and return that."""
    place: dict[str, Any] = child._parameters if name in child._parameters else child._buffers
    before = place[name]
    if isinstance(child, nn.RNNBase):
        setattr(child, name, tensor)  # It keeps another list of its parameters.
    else:
        place[name] = tensor
    return before


def keep_own(module: nn.Module, settings: Settings, processes: Processes) -> None:
    """Put stand-ins in the place of the parameters and buffers that no column of this process uses."""
    remote: dict[Tensor, Tensor] = {}
    for full, child, name, tensor, ranks in _placed(module, settings, processes):
        if isinstance(tensor, StandIn) or processes.rank in ranks:
            continue
        column = settings.column_of(full)
        stand_in = remote.get(tensor)
        if stand_in is None:
            stand_in = StandIn(form_of(tensor)._replace(device=settings.devices[column]), column)
            if name in child._parameters:
                stand_in = remote[tensor] = nn.Parameter(stand_in, tensor.requires_grad)
                vars(stand_in).update(vars(tensor))
        put(child, name, stand_in)


@torch.no_grad()
def begin_alike(module: nn.Module, settings: Settings, processes: Processes) -> None:
    """Give the copies of a tensor in several processes the same values, those of its first process.

    Else models that were made under other seeds would have an embedding and a tied head of other values, for ever: the
    proof cannot tell that from two parameters, and gradients are summed over the copies alike.
    """
    done = set[Tensor]()
    for full, _, _, tensor, ranks in _placed(module, settings, processes):
        if tensor not in done and not tensor.is_meta and len(ranks) > 1:
            done.add(tensor)
            if processes.rank == ranks[0]:
                processes.send(tensor, ranks[1:], "values")
            elif processes.rank in ranks:
                tensor.copy_(processes.receive(ranks[0], "values", f"the values of '{full}'"))


def fetch(module: nn.Module, settings: Settings, processes: Processes) -> list[tuple[nn.Module, str, Tensor]]:
    """Return what the first process does not have, in host memory, with the places; in the others, send it.

    Raises:
        ValueError: it is no plain tensor.
    """
    found: dict[str, Any] = {}
    for full, _, _, tensor, ranks in _placed(module, settings, processes):
        if 0 not in ranks and processes.rank == ranks[0]:
            processes.send(tensor, [0], "weights")
        elif 0 not in ranks and processes.rank == 0:
            found[full] = processes.receive(ranks[0], "weights", f"'{full}' of the plain model")
    made: dict[Tensor, Tensor] = {}
    places = []
    for full, child, name, tensor in iterate_tensors(module):
        if full in found:
            values = found[full]
            if not isinstance(values, Tensor):
                raise ValueError(
                    f"'{full}' is a {values.kind}, which the first process cannot fetch to run the plain model; give "
                    "verify=False, and verify the model in one process"
                )
            if tensor not in made and name in child._parameters:
                values = nn.Parameter(values, tensor.requires_grad)
                vars(values).update(vars(tensor))
            elif tensor not in made:
                values = values.to(settings.devices[settings.column_of(full)])
            places.append((child, name, made.setdefault(tensor, values)))
    return places


def own(named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield those of named tensors that this process has."""
    return ((name, tensor) for name, tensor in named if not isinstance(tensor, StandIn))


def stand_ins_of(module: nn.Module) -> list[StandIn]:
    """Return the parameters and buffers that this process does not have."""
    return [tensor for _, _, _, tensor in iterate_tensors(module) if isinstance(tensor, StandIn)]


def users_of(module: nn.Module, settings: Settings) -> dict[Tensor, frozenset[int]]:
    """Return the columns that use each parameter."""
    return {
        parameter: frozenset(settings.users.get(name) or [settings.column_of(name)])
        for name, parameter in nn.Module.named_parameters(module, remove_duplicate=False)
    }


def own_slots(
    module: nn.Module, settings: Settings, users: Mapping[Tensor, frozenset[int]] | None
) -> list[tuple[nn.Module, str, int]]:
    """Return every place of a parameter that this process has, each with its column in this process."""
    slots, processes = settings.slots(module), settings.processes
    if processes is None or users is None:
        return slots
    own: list[tuple[nn.Module, str, int]] = []
    for child, name, column in slots:
        parameter = child._parameters[name]
        if parameter is None or isinstance(parameter, StandIn):
            continue
        mine = [c for c in sorted(users[parameter]) if processes.is_mine(c)]
        own.append((child, name, column if column in mine else mine[0]))
    return own


def add_shared(users: Mapping[Tensor, frozenset[int]], aliases: Aliases, processes: Processes) -> None:
    """Add up the gradients of parameters that several processes have, in the order of the columns, in all of them.

    The process of the first column adds up, and gives the others the sum.

    Args:
        users: the columns of each parameter
        aliases: the aliases, which have the gradients
        processes: the processes
    """
    shared = [
        (parameter, sorted(columns))
        for parameter, columns in users.items()
        if parameter.requires_grad and len({processes.owners[c] for c in columns}) > 1
    ]
    for parameter, columns in shared:
        first, *others = dict.fromkeys([processes.owners[c] for c in columns])
        mine = [*filter(processes.is_mine, columns)]
        if not mine:
            continue
        grads, total = _taken(aliases, parameter, mine), None
        what = "the gradient of a parameter that several processes have"
        if processes.rank == first:
            for rank in others:
                grads |= processes.receive(rank, "shared", what)
            for c in sorted(grads):
                total = sum_of(total, grads[c].to(parameter.device))
            processes.send(total, others, "shared")
        else:
            processes.send(grads, [first], "shared")
            total = processes.receive(first, "shared", what)
        alias = aliases.at(parameter, mine[0])
        assert alias is not None
        alias.grad = None if total is None else total.to(alias.device)


def _taken(aliases: Aliases, parameter: Tensor, mine: Sequence[int]) -> dict[int, Tensor]:
    """Take the gradients of a parameter that have arrived in columns of this process."""
    grads: dict[int, Tensor] = {}
    for c in mine:
        alias = aliases.at(parameter, c)
        if alias is not None and alias.grad is not None:
            if alias.grad.layout is not torch.strided:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} that several processes have gets a sparse "
                    "gradient; make its module without sparse=True"
                )
            grads[c], alias.grad = alias.grad, None
    return grads


def clip_together(
    module: nn.Module, settings: Settings, processes: Processes, max_norm: float, norm_type: float
) -> Tensor:
    """Clip the gradients of a model over several processes; one that several have counts in the first of them.

    Returns:
        the norm of all gradients before, which is that of the norms of all processes
    """
    counted = [
        parameter.grad
        for parameter, columns in users_of(module, settings).items()
        if not isinstance(parameter, StandIn) and processes.is_mine(min(columns)) and parameter.grad is not None
    ]
    norm = nn.utils.get_total_norm(counted, norm_type).double().cpu()
    norms = torch.stack(processes.gather(norm, "the norm of the gradients"))
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, total)
    return total
