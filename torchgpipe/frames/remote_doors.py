"""What a module of another process returns here: stand-ins, whose forms follow from those of the arguments.

The first time, the module runs on the stand-ins, as far as that needs no values; a module whose forward looks at
values, as one that routes tokens to experts, is known by what its owner has published. After that, the forms are
looked up.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import (
    call_hooks,
    forgiving,
    no_hook,
    plain_call,
    versions,
    with_forward_hooks,
)
from torchgpipe.frames.abstract import Abstract, abstracted, described, leaves_of, without_devices
from torchgpipe.frames.door import Door
from torchgpipe.frames.hooked import HookedCalls, show_calls
from torchgpipe.frames.kept import KeptAttributes, Place, put_values, values_of
from torchgpipe.frames.settings import Settings
from torchgpipe.model.values import Exchanged, container, copied, each, is_cache, mapped, walk
from torchgpipe.processes.messages import shift_of
from torchgpipe.processes.processes import Processes
from torchgpipe.processes.stand_in import Form, StandIn, form_of

__all__ = ["RemoteDoors", "run_on_stand_ins"]


#: The most calls that are remembered.
_MOST = 10_000


class _Effect(NamedTuple):
    """What a call of a module does, as far as other processes need to know it.

    Attributes:
        forms: what it returns, what hooks inside see, and what it leaves in attributes
        hooked: the names of the modules inside that have hooks, in the order of their calls; see `HookedCalls`
        changed: the numbers of the tensors among its arguments that it changes in place
        attributes: which attributes it sets; see `KeptAttributes`
    """

    forms: Abstract
    hooked: list[str]
    changed: list[int]
    attributes: list[Place]


class _Published(NamedTuple):
    """What others may have been told of a call of a module of this process.

    Attributes:
        effect: what they are told
        returned: what tells what the module returns from anything else that it might
        adds: whether the module changes lists and dicts that it is given; None if it is given none
    """

    effect: _Effect
    returned: Any
    adds: bool | None


class _Noted(NamedTuple):
    """A call of a module of this process.

    Attributes:
        key: what tells it from others
        given: the tensors among its arguments
        held: what lists and dicts among them hold; None if there are none
        hooked: what hooks inside see
        versions: of the tensors, if the call is the first of its kind
        attributes: of the module, if the call is the first of its kind
    """

    key: Any
    given: list[Tensor]
    held: list[int] | None
    hooked: HookedCalls
    versions: list[int]
    attributes: KeptAttributes | None


class RemoteDoors:
    """The calls of modules whose columns are in several processes.

    Args:
        processes: the processes
        settings: the settings of the model
    """

    def __init__(self, processes: Processes, settings: Settings) -> None:
        self._processes, self._settings = processes, settings
        self._kinds = sorted({device.type for device in settings.devices})
        self._modes = 0
        #: The dicts of the hooks in the modules behind doors, which stay the same during a mini-batch.
        self._hooks: dict[Door, list[dict[int, Any]]] = {}
        #: The strides in which tensors cross, by their places: fake tensors do not know those of every convolution; and
        #: the shift, see `shift_of`.
        self._strides: dict[Any, tuple[tuple[int, ...], int]] = {}
        #: What modules of other processes do; None if that is to be seen again each time.
        self._known: dict[Any, _Effect | None] = {}
        #: Of those that only return something, what that is.
        self._returned: dict[Any, Abstract] = {}
        #: Of modules of this process, what others may have been told.
        self._published: dict[Any, _Published] = {}

    def use(self, modes: int) -> None:
        """Begin a mini-batch; ``modes`` stands for the modes of all modules, and for which parameters are trained."""
        self._modes, self._hooks = modes, {}

    def place(self, *place: Any) -> Any:
        """Return what stands for the place of a crossing in mini-batches of this kind."""
        return self._modes, *place

    def lay_out(self, tensor: Tensor, place: Any, target: int, tag: int) -> Tensor:
        """Return a tensor with the strides of its place, which are sent the first time, with its shift."""
        if place not in self._strides:
            self._strides[place] = tensor.stride(), shift_of(tensor)
            self._processes.messages.send_numbers([*tensor.stride(), shift_of(tensor)], target, tag)
        stride, _ = self._strides[place]
        if stride == tensor.stride():
            return tensor
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    def find_strides(self, form: Form, place: Any, source: int, tag: int) -> tuple[Form, int]:
        """Return a form with the strides of its place, and the shift; both are received the first time."""
        if place not in self._strides:
            numbers = self._processes.messages.receive_numbers(len(form.shape) + 1, source, tag)
            self._strides[place] = tuple(numbers[:-1]), numbers[-1]
        stride, shift = self._strides[place]
        return form._replace(stride=stride), shift

    def _note(self, door: Door, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        """Return what tells a call from others as far as forms go, and the tensors among the arguments."""
        given: list[Tensor] = []
        casts = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in self._kinds]
        flags = door.name, self._modes, torch.is_grad_enabled(), self._has_hooks(door), *casts
        return (flags, described(args, given, door.layers), described(kwargs, given, door.layers)), given

    def _has_hooks(self, door: Door) -> bool:
        """Return whether modules have hooks now, which may see what they return."""
        return any(self._hooks_of(door))

    def _hooks_of(self, door: Door) -> list[dict[int, Any]]:
        hooks = self._hooks.get(door)
        if hooks is None:  # Walking through the modules takes as long as all of the rest.
            hooks = self._hooks[door] = [kind for child in door.module.modules() for kind in call_hooks(child)]
        return hooks

    # ------------------------------------------------------------------------------------------------- of this process

    def begin(self, door: Door, args: Any, kwargs: Any) -> _Noted:
        """Note a call of a module of this process."""
        key, given = self._note(door, args, kwargs)
        published, hooked = self._published.get(key), HookedCalls(door.module, None if self._has_hooks(door) else ())
        if published is not None:
            return _Noted(key, given, None if published.adds is None else _held((args, kwargs)), hooked, [], None)
        held = _held((args, kwargs)) if _can_change((args, kwargs)) else None
        return _Noted(key, given, held, hooked, versions(given), KeptAttributes(door.module))

    def end(
        self, door: Door, noted: _Noted, args: Any, kwargs: Any, output: Any, tensors: Sequence[Tensor]
    ) -> tuple[list[Place], list[Tensor]]:
        """Publish what a module has done, the first time.

        Args:
            door: the door
            noted: what `begin` has returned
            args, kwargs: the arguments
            output: what the module has returned
            tensors: the tensors in that

        Returns:
            the attributes that the module has set, and the arguments that it has changed in place

        Raises:
            RuntimeError: the module has done something else for such arguments before, or has returned a stand-in.
        """
        key, given, held, hooked, before, attributes = noted
        if any([isinstance(tensor, StandIn) for tensor in tensors]):
            raise RuntimeError(
                f"'{door.name}' has computed with a tensor of another process that was no argument of it; pass it as "
                "an argument: an attribute, a closure or a global is not sent"
            )
        returned, adds = described(output, []), None if held is None else held != _held((args, kwargs))
        if attributes is not None:
            changed = [k for k, (a, b) in enumerate(zip(before, versions(given))) if a != b]
            places = attributes.set_since()
            forms = abstracted((output, hooked.seen, values_of(door.module, places)), given)
            if len(self._published) >= _MOST:
                self._published.clear()
            self._published[key] = _Published(_Effect(forms, hooked.names, changed, places), returned, adds)
            self._processes.publish(_word_of(key), pickle.dumps(self._published[key].effect))
        effect, *expected = self._published[key]
        if [returned, adds] != expected or leaves_of(tensors, given) != effect.forms.leaves[: len(tensors)]:
            now = "has changed a list or a dict that it was given" if adds else f"returns {_shown(output)}"
            raise RuntimeError(
                f"'{door.name}' {now}, and did something else before for arguments of the same shapes: other processes "
                "cannot know that; let shapes, numbers and what there is depend on the shapes of the arguments alone, "
                "return numbers as tensors, or give a balance that keeps the module and all that use it in one process"
            )
        return effect.attributes, [given[k] for k in effect.changed]

    # ----------------------------------------------------------------------------------------------- of other processes

    def pass_by(
        self, door: Door, args: Any, kwargs: Any, column: int, import_tensor: Callable[[Tensor], Tensor]
    ) -> tuple[Any] | None:
        """Return stand-ins for what a module returns that is known to do nothing else; None for any other.

        Every process passes by most modules of a model, so this walks through the arguments once.

        Args:
            door: the door
            args, kwargs: the arguments, not imported yet
            column: the column of the module
            import_tensor: imports an argument into that column
        """
        key, given = self._note(door, args, kwargs)
        returned = self._returned.get(key)
        if returned is None:
            return None
        imported = [*map(import_tensor, given)]
        if [tensor.requires_grad for tensor in imported] != [tensor.requires_grad for tensor in given]:
            return None  # A tensor that all processes have was changed in place by a column that trains.
        return (returned.made(imported, column, self._settings.devices[column]),)

    def call(
        self, door: Door, args: Any, kwargs: Any, column: int, replace: Callable[[Tensor], object]
    ) -> tuple[Any, list[Tensor]]:
        """Call a module of another process.

        Args:
            door: the door
            args, kwargs: the arguments, imported
            column: the column of the module
            replace: lets the column own an argument that all processes have had until now

        Returns:
            stand-ins for what the module returns, and for what it puts into its arguments
        """
        key, given = self._note(door, args, kwargs)
        if key not in self._known:
            if len(self._known) >= _MOST:  # As of a module that gets another number in each step.
                self._known.clear()
                self._returned.clear()
            effect = self._known[key] = self._found(door, key, args, kwargs, given)
            # Others, as caches, are imported in another order, which is to be the same in all processes.
            if effect is not None and not any(effect[1:]) and abstracted((args, kwargs)).is_plain:
                self._returned[key] = effect.forms._replace(value=effect.forms.value[0])
        effect = self._known[key]
        if effect is None:  # The hooks inside, too, want to see stand-ins.
            failed: list[Any] = []
            kept = KeptAttributes(door.module)
            with with_forward_hooks(door.module, lambda hook: forgiving(hook, failed)):
                output, changed = run_on_stand_ins(door, args, kwargs, given)
            kept.exchange(lambda tensor: _owned(tensor, column))
            if failed:  # What it would have returned, its process knows.
                effect = self._known[key] = self._looked_up(door, key, "a hook inside reads values")
                output, _, _ = effect.forms.made(given, column, self._settings.devices[column])
            _change(given, changed, replace)
            known = {id(tensor) for tensor in given}
            output = mapped(
                output, lambda tensor: tensor if id(tensor) in known else _owned(tensor, column), objects=True
            )
            return output, [one for _, one in each((args, kwargs), objects=True) if id(one) not in known]
        output, seen, kept = effect.forms.made(given, column, self._settings.devices[column])
        _change(given, effect.changed, replace)
        show_calls(door.module, effect.hooked, seen)
        put_values(door.module, effect.attributes, kept)
        return output, []

    def _found(self, door: Door, key: Any, args: Any, kwargs: Any, given: list[Tensor]) -> _Effect | None:
        """Return what a module does; None if it does more than can be told."""
        # In copies of containers, as a module that changes one runs again.
        args, kwargs = copied((args, kwargs))
        held, kept, hooks = _held((args, kwargs)), KeptAttributes(door.module), [*map(len, self._hooks_of(door))]
        try:
            with with_forward_hooks(door.module, lambda _: no_hook):
                output, changed = run_on_stand_ins(door, args, kwargs, given)
        except Exception as error:
            return self._looked_up(door, key, f"it does not run without values: {error}")
        finally:
            # Who installs hooks in a first run notes that in an attribute, and would install them again.
            keeps = [*map(len, self._hooks_of(door))] != hooks or kept.put_back()
        forms = abstracted((output, [], []), given)
        is_known = forms.is_plain and not (keeps or self._has_hooks(door)) and _held((args, kwargs)) == held
        return _Effect(forms, [], changed, []) if is_known else None

    def _looked_up(self, door: Door, key: Any, why: str) -> _Effect:
        """Return what the process of a module has published."""
        what = f"the shapes that '{door.name}' returns ({why})"
        found: _Effect = pickle.loads(self._processes.look_up(_word_of(key), what))
        return found


def _owned(tensor: Tensor, column: int) -> StandIn:
    """Return a stand-in that a column owns: the tensor itself, if it is one, as hooks may have kept it."""
    if not isinstance(tensor, StandIn):
        return StandIn(form_of(tensor), column, tensor.requires_grad)
    tensor.home = column
    return tensor


def run_on_stand_ins(door: Door, args: Any, kwargs: Any, given: Sequence[Tensor] = ()) -> tuple[Any, list[int]]:
    """Run a module on stand-ins; return its output, and the numbers of those of ``given`` that it changes in place."""
    # A cache is filled where its values are.
    args, kwargs = _with_own_caches(args), _with_own_caches(kwargs)
    # A leaf that requires grad may not be changed in place, and a module may get one that is none in its own process.
    nodes: dict[int, tuple[Tensor, Tensor]] = {}

    def node(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, StandIn) or not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        return nodes.setdefault(id(tensor), (tensor, tensor.clone()))[1]

    exchanged = Exchanged(args, kwargs, node)
    used = [nodes[id(tensor)][1] if id(tensor) in nodes else tensor for tensor in given]
    before = versions(used)
    with torch.random.fork_rng(devices=[]):
        output = plain_call(door.module)(*exchanged.args, **exchanged.kwargs)
    exchanged.hand_over()
    changed = [k for k, (a, b) in enumerate(zip(before, versions(used))) if a != b]
    originals = {id(new): tensor for tensor, new in nodes.values()}
    return mapped(output, lambda tensor: originals.get(id(tensor), tensor), objects=True), changed


@torch.no_grad()
def _change(given: list[Tensor], changed: list[int], replace: Callable[[Tensor], object]) -> None:
    """Change arguments in place: a stand-in has versions and a home, and of others a column has the values now."""
    for k in changed:
        if isinstance(given[k], StandIn):
            given[k].zero_()
        else:
            replace(given[k])


def _held(value: Any) -> list[int]:
    """Return the identities of all that containers hold, which a call may change."""
    return [id(item) for path, item in walk(value, objects=True) if path and not is_cache(item)]


def _can_change(value: Any) -> bool:
    """Return whether the arguments of a call hold lists, dicts or objects that the call might change."""
    args, kwargs = value
    held = walk((*args, *kwargs.values()), objects=True)
    return any([not isinstance(item, tuple) and container(item, objects=True) is not None for _, item in held])


def _shown(value: Any) -> list[Any]:
    """Return the shapes of the tensors in a value, and its numbers and words."""
    items = [item for _, item in walk(value, objects=True) if container(item, objects=True) is None]
    return [tuple(item.shape) if isinstance(item, Tensor) else item for item in items]


def _with_own_caches(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(item) if is_cache(item) else item for key, item in value.items()}
    return tuple([copied(item) if is_cache(item) else item for item in value])


def _word_of(key: Any) -> str:
    """Return a key as a word that is the same in all processes: devices have other numbers, and stand-ins strides."""
    return re.sub(r"stride=\([^)]*\)", "", without_devices(repr(key)))
