"""The plain model over several processes, for a proof: no micro-batch is under way beside another, and nothing is cut.

All processes run the model's own forward in step. The owner of a module runs it and tells the others what it has
returned, so all operations between the modules compute with values, everywhere. In the graph, a call of a module is a
node in all processes, whose backward runs in the owner, which tells the others the gradients of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.devices.generators import generators_of, go_on_from, state_of
from torchgpipe.devices.torch_internals import keeps_graph, versions
from torchgpipe.devices.typing import Leaf
from torchgpipe.frames.abstract import abstracted
from torchgpipe.frames.door import Door
from torchgpipe.frames.hooked import HookedCalls, show_calls
from torchgpipe.frames.kept import KeptAttributes, put_values, values_of
from torchgpipe.frames.remote_doors import can_change
from torchgpipe.frames.together import Together
from torchgpipe.frames.visitors import InOnePiece, unobserved
from torchgpipe.frames.weights import add_shared
from torchgpipe.gradients.aliases import Aliases
from torchgpipe.graph.function import Function
from torchgpipe.graph.phony import get_phony
from torchgpipe.model.values import Exchanged, each, is_cache, mapped, put_in_place, refill
from torchgpipe.processes.processes import Processes
from torchgpipe.processes.stand_in import NoValues, StandIn

__all__ = ["JointRun"]

#: Takes the roots of a graph before it is differentiated.
Note = Callable[[Sequence[Tensor]], None]


class JointRun(InOnePiece):
    """The visitor of a run in one piece in all processes; see `InOnePiece`.

    Args:
        module: the model
        together: what the processes do together
        aliases: the aliases of the parameters of this process
        *args: as for `InOnePiece`

    Attributes:
        note: is told of each graph of a module before it is differentiated; a proof looks for leaves outside
    """

    def __init__(self, module: nn.Module, together: Together, aliases: Aliases, *args: Any) -> None:
        super().__init__(*args)
        self.note: Note = lambda roots: None
        self._together, self._aliases, self._users = together, aliases, together.users
        self._processes = together.processes
        self._buffers = together.buffers
        #: By their ids, what modules have kept and hooks inside have seen in this process, with what that is in the
        #: graph of all.
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        #: What stands for parameters that another process takes the gradients of.
        self.dummies: dict[Tensor, Tensor] = {}

    def own(self) -> list[Tensor]:
        """Return the leaves that stand for parameters."""
        return [*self._aliases.all(), *self.dummies.values()]

    def add_shared(self) -> None:
        """Add up the gradients of parameters that several processes have."""
        for dummy in self.dummies.values():
            dummy.grad = None
        add_shared(self._users, self._aliases, self._processes, meets=True)

    def __exit__(self, *error: Any) -> None:
        self._seen = {}  # Its graph leads to the calls, and these here: no collector sees that circle.
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def ended(self, output: Any) -> Any:
        """See `InOnePiece.ended`; the output may hold what hooks have seen."""
        seen, self._seen = self._seen, {}
        with unobserved():
            return mapped(output, lambda tensor: seen.get(id(tensor), (None, tensor))[1])

    def _with_values(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the model's with its values: of a parameter, one process takes the gradients."""
        if id(tensor) in self._seen:
            return self._seen[id(tensor)][1]
        processes, buffer = self._processes, self._buffers.get(id(tensor))
        if buffer is not None:
            return processes.shared(tensor, processes.owners[buffer[1]], "a buffer")
        parameter = self._aliases.parameter_of(tensor)
        users = self._users.get(parameter) if tensor.grad_fn is None else None
        if users is None:
            if isinstance(tensor, StandIn):
                raise NoValues(
                    f"a hook or a module has kept something of shape {tuple(tensor.shape)} that was computed inside of "
                    "a module of another process; let a hook keep what the module takes or returns, and the module "
                    "return what the model needs"
                )
            return tensor
        first = min(users)
        if len({processes.owners[c] for c in users}) < processes.size and parameter not in self.dummies:
            values = processes.shared(parameter, processes.owners[first], "a parameter")
            self.dummies[parameter] = values.requires_grad_(parameter.requires_grad)
        if processes.is_mine(first):
            alias = self._aliases.at(tensor, first)
            return tensor if alias is None else alias
        if parameter not in self.dummies:
            self.dummies[parameter] = parameter.detach().requires_grad_(parameter.requires_grad)
        return self.dummies[parameter]

    def visit(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Run a module in the process of its column, and return what it returns, in all processes."""
        if self._is_off:  # Within a module of the spine.
            return door.call_module(args, kwargs)
        self.move_to(door.column)
        processes, j = self._processes, door.column
        with unobserved():
            exchanged = Exchanged(args, kwargs, self._copied, caches=False)
        args, kwargs = exchanged.args, exchanged.kwargs
        given = {id(tensor): tensor for tensor in _held(args, kwargs)}
        device, owner = self._devices[j], processes.owners[j]
        call = _Call(processes, owner, door.name, lambda roots: self.note(roots))
        with self._switched_off(), unobserved():
            with saved_tensors_hooks(_itself, _itself):  # Else a checkpoint around it would run again in one process.
                outcome = (call.run if owner == processes.rank else call.hear)(door, args, kwargs, given, device)
            made = mapped((outcome.output, outcome.added, outcome.seen), call.filled, objects=True)
            # What is a buffer or a frozen weight in the owner is none to others, which have its values from now on.
            constants = {id(one) for _, one in each(made, objects=True) if not one.requires_grad} - given.keys()
            made = mapped(made, lambda one: one.detach() if id(one) in constants else one, objects=True)
            inputs = [tensor for tensor in given.values() if tensor.requires_grad]
            output, added, seen, changed = call.in_graph((*made, [*outcome.changed.values()]), inputs, given)
            put_in_place((args, kwargs), dict(zip(map(id, outcome.added), added)))
            self._seen.update({id(one): (one, other) for one, other in zip(outcome.seen, seen)})
            for key, tensor in zip(outcome.changed, changed):
                given[key].copy_(tensor)
            exchanged.hand_over()
            return output


def _held(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among arguments, but for those in caches, which are what their owners have put there."""
    values = [value for value in (*args, *kwargs.values()) if not is_cache(value)]
    return [tensor for _, tensor in each(values, objects=True)]


def _added(args: Any, kwargs: Any, given: Mapping[int, Tensor]) -> list[Tensor]:
    """Return the tensors that a call has put into the containers that it was given."""
    found = {id(tensor): tensor for tensor in _held(args, kwargs)}
    return [tensor for key, tensor in found.items() if key not in given]


class _Outcome(NamedTuple):
    """What a call of a module has given, with stand-ins or values.

    Attributes:
        output: what the module has returned
        added: what it has put into its arguments
        seen: what attributes have kept, and what hooks inside have seen
        changed: the arguments that it has changed in place, as they are now, by the ids of those given
    """

    output: Any
    added: list[Tensor]
    seen: list[Tensor]
    changed: dict[int, Tensor]


class _Call:
    """A call of a module in all processes.

    Args:
        processes: the processes
        owner: the rank of the process that has the module
        name: the name of the module
        note: is told of the graph before it is differentiated
    """

    def __init__(self, processes: Processes, owner: int, name: str, note: Note) -> None:
        self._processes, self._owner, self._name, self._note = processes, owner, name, note
        #: In the owner, the arguments that require grad, by the ids of those given.
        self._leaves: dict[int, Tensor] = {}
        self._outputs: list[Tensor] = []
        #: What was given, by the ids of its clones; and the values that the owner has told, by those of stand-ins.
        self._values: dict[int, Tensor] = {}

    def filled(self, tensor: Tensor) -> Tensor:
        """Return a tensor that has values in all processes for one of the module's."""
        return self._values.get(id(tensor), tensor)

    def run(self, door: Door, args: Any, kwargs: Any, given: dict[int, Tensor], device: torch.device) -> _Outcome:
        """Run the module, and tell the others."""

        def begin(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            return self._leaves.setdefault(id(tensor), tensor.detach().requires_grad_())

        # It may change its arguments.
        clones = {key: begin(tensor).clone() for key, tensor in given.items()}
        self._values = {id(clone): given[key] for key, clone in clones.items()}
        exchanged = Exchanged(args, kwargs, lambda tensor: clones[id(tensor)], caches=False)
        before = versions([*clones.values()])
        begun = [state_of(generator) for generator in generators_of(device)]
        calls, kept = HookedCalls(door.module), KeptAttributes(door.module)
        try:
            output = door.call_module(exchanged.args, exchanged.kwargs)
        finally:
            calls.remove()
        exchanged.hand_over()
        now = versions([*clones.values()])
        changed = {key: clone for (key, clone), a, b in zip(clones.items(), before, now) if a != b}
        added = _added(args, kwargs, given)
        places = kept.set_since()
        attributes = values_of(door.module, places)
        told = mapped((output, added, attributes, *calls.seen), self.filled, objects=True)
        values = [
            [None if id(tensor) in given else tensor.detach().cpu() for _, tensor in each(part, objects=True)]
            for part in told
        ]
        numbers = [k for k, key in enumerate(given) if key in changed]
        changes = [(k, clone.detach().cpu(), clone.requires_grad) for k, clone in zip(numbers, changed.values())]
        states = [state_of(generator) for generator in generators_of(device)]
        # Those of processes differ, and to take over one would look as if the module had drawn from it.
        drawn = [None if torch.equal(before, state) else state for before, state in zip(begun, states)]
        # The containers among the arguments, too, which the module may have changed.
        filled = mapped((args, kwargs), self.filled, objects=True) if can_change((args, kwargs)) else None
        forms = abstracted((told[0], told[2], told[3:], filled), [*given.values()])
        self._told((values, forms, calls.names, places, changes, drawn))
        seen = [tensor for _, tensor in each((attributes, calls.seen), objects=True)]
        return _Outcome(output, added, seen, changed)

    def hear(self, door: Door, args: Any, kwargs: Any, given: dict[int, Tensor], device: torch.device) -> _Outcome:
        """Do here what the owner tells.

        Raises:
            OthersFail: the module has failed there.
        """
        values, forms, names, places, changes, states = self._told(None)
        tensors = [*given.values()]
        output, attributes, seen, filled = forms.made(tensors, door.column, device)
        if filled is not None:
            refill((args, kwargs), filled)
        for generator, state in zip(generators_of(device), states):
            if state is not None:
                go_on_from(generator, state)
        added = _added(args, kwargs, given)
        for part, told in zip((output, added, attributes, *seen), values, strict=True):
            stand_ins = [tensor for _, tensor in each(part, objects=True)]
            for stand_in, value in zip(stand_ins, told, strict=True):
                if value is not None:
                    self._values[id(stand_in)] = value.to(stand_in.device).requires_grad_(stand_in.requires_grad)
        # A module may set an attribute once, so what needs no graph has its values from now on.
        with_values = mapped(attributes, lambda one: one if one.requires_grad else self.filled(one))
        put_values(door.module, places, with_values)
        show_calls(door.module, names, seen)
        changed = {
            id(tensors[k]): value.to(tensors[k].device).requires_grad_(requires_grad)
            for k, value, requires_grad in changes
        }
        noted = [tensor for _, tensor in each((attributes, seen), objects=True)]
        return _Outcome(output, added, noted, changed)

    def in_graph(self, output: Any, inputs: list[Tensor], given: dict[int, Tensor]) -> Any:
        """Return the output with a node of autograd for the call."""
        made = {id(tensor): tensor for _, tensor in each(output, objects=True) if tensor.requires_grad}
        outputs = {key: tensor for key, tensor in made.items() if key not in given}
        if not outputs or not torch.is_grad_enabled():
            return output
        self._outputs = [*outputs.values()]
        phony = get_phony(self._outputs[0].device).requires_grad_()
        joined = _Joint.apply(self, len(outputs), phony, *[one.detach() for one in self._outputs], *inputs)
        by_id = dict(zip(outputs, joined))
        if self._owner != self._processes.rank:
            self._outputs = []
        return mapped(output, lambda tensor: by_id.get(id(tensor), tensor), objects=True)

    def differentiate(self, grads: Sequence[Leaf]) -> Sequence[Leaf]:
        """Differentiate the module in its process, and return the gradients of its arguments."""
        if self._owner != self._processes.rank:
            return self._told(None, "the backward of ")  # type: ignore[no-any-return]
        pairs = [(one, grad) for one, grad in zip(self._outputs, grads) if grad is not None]
        if pairs:
            self._note([one for one, _ in pairs])
            torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs], retain_graph=keeps_graph())
        own: list[Leaf] = [leaf.grad for leaf in self._leaves.values()]
        for leaf in self._leaves.values():
            leaf.grad = None
        self._told([None if grad is None else grad.cpu() for grad in own], "the backward of ")
        return own

    def _told(self, value: Any, of: str = "") -> Any:
        """Return what the owner tells of the module, or of its backward; see `Processes.meet` for its failure."""
        return self._processes.tell_all(value, self._owner, f"{of}the module '{self._name}'")


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class _Joint(Function):
    """Forward: the outputs of a module. Backward: see `_Call.differentiate`."""

    @staticmethod
    def forward(ctx: Any, call: _Call, count: int, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.count = call, count
        ctx.places = [tensor.device for tensor in tensors[count:]]
        return tuple([tensor.detach() for tensor in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[Leaf, ...]:
        own = [
            None if grad is None else grad.to(place)
            for grad, place in zip(ctx.call.differentiate(grads), ctx.places, strict=True)
        ]
        return (None, None, None, *[None] * ctx.count, *own)
