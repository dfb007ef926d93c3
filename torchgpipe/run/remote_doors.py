"""What a module of another process returns here: stand-ins, whose forms follow from those of the arguments.

A module runs in its own process only. What it returns, what it puts into its arguments and its attributes, and what
hooks inside see, that process tells when the module first gets arguments of some forms; the others wait for it there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import call_hooks, versions
from torchgpipe.model.values import container, each, is_cache, mapped, refill, walk
from torchgpipe.processes.processes import Processes
from torchgpipe.processes.stand_in import StandIn
from torchgpipe.processes.wire import register
from torchgpipe.run.hooked import hooked_calls, show_calls
from torchgpipe.run.kept import Attribute, KeptAttributes, put_values, values_of
from torchgpipe.spine.abstract import Abstract, abstracted, described, leaves_of, without_devices
from torchgpipe.spine.door import Door
from torchgpipe.spine.settings import Settings

__all__ = ["RemoteDoors"]


#: The most calls that are remembered behind a mini-batch.
_MOST = 2_000


@register
class _Effect(NamedTuple):
    """What a call of a module does, as far as other processes need to know it.

    Attributes:
        forms: what it returns, what hooks inside see, what it leaves in attributes, and the arguments behind it, if it
            has changed a list or a dict among them
        hooked: the names of the modules inside that have hooks, in the order of their calls; see `hooked_calls`
        changed: the numbers of the tensors among its arguments that it changes in place
        attributes: which attributes it sets; see `KeptAttributes`
    """

    forms: Abstract
    hooked: list[str]
    changed: list[int]
    attributes: list[Attribute]


class _Called(NamedTuple):
    """A call of a module of this process.

    Attributes:
        output: what it has returned
        given: the tensors among its arguments
        changed: those of them that it has changed in place
        seen: what hooks inside have seen
        attributes: which attributes it has set
    """

    output: Any
    given: list[Tensor]
    changed: list[Tensor]
    seen: list[Any]
    attributes: list[Attribute]


class RemoteDoors:
    """The calls of modules whose columns are in several processes.

    Args:
        processes: the processes
        settings: the settings of the model

    Attributes:
        processes: see above
        users: the columns that use each parameter
        buffers: the buffers in modules of the spine, by their ids, each with its column
    """

    def __init__(self, processes: Processes, settings: Settings) -> None:
        self.processes, self._settings = processes, settings
        self.users: dict[Tensor, frozenset[int]] = {}
        self.buffers: dict[int, tuple[Tensor, int]] = {}
        self._kinds = sorted({device.type for device in settings.devices})
        self._modes = 0
        #: The dicts of the hooks in the modules behind doors, which stay the same during a mini-batch.
        self._hooks: dict[Door, list[dict[int, Any]]] = {}
        #: The words of all that was told, which all processes know.
        self._told: set[str] = set()
        #: What modules do, by what tells their calls from others here.
        self._known: dict[Any, _Effect] = {}
        #: Of modules of this process, the forms that they return, and leave in attributes and arguments.
        self._returned: dict[Any, Any] = {}
        #: The attributes that modules of this process have set in any call: others have stand-ins there.
        self._attributes: dict[str, set[Attribute]] = {}

    def use(self, modes: int) -> None:
        """Begin a mini-batch; ``modes`` stands for the modes of all modules, their hooks, and what is trained."""
        self._modes, self._hooks = modes, {}
        if len(self._told) > _MOST:  # In all processes alike. As of a module that gets another number in each step.
            self.processes.messages.forget(self._told)
            for known in (self._told, self._known, self._returned):
                known.clear()

    def _note(self, door: Door, column: int, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        """Return what tells a call from others as far as forms go, and the tensors among the arguments."""
        given: list[Tensor] = []
        casts = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in self._kinds]
        flags = door.name, column, self._modes, torch.is_grad_enabled(), *casts
        return (flags, described(args, given), described(kwargs, given)), given

    def _has_hooks(self, door: Door) -> bool:
        """Return whether modules have hooks now, which may see what they return."""
        if door not in self._hooks:  # Walking through the modules takes as long as all of the rest.
            self._hooks[door] = [kind for child in door.module.modules() for kind in call_hooks(child)]
        return not self._settings.has_stages and any(self._hooks[door])

    # ------------------------------------------------------------------------------------------------- of this process

    def call(self, door: Door, column: int, args: Any, kwargs: Any, run: Callable[[], Any]) -> _Called:
        """Call a module of this process, and tell all others what it has done, the first time.

        Args:
            door: the door
            column: its column
            args, kwargs: the arguments
            run: calls the module with them

        Raises:
            RuntimeError: the module has done something else for such arguments before, or has returned a stand-in.
        """
        key, given = self._note(door, column, args, kwargs)
        held = _held((args, kwargs)) if _can_change((args, kwargs)) else None
        is_new = key not in self._known
        before, attributes = (versions(given), KeptAttributes(door.module)) if is_new else ([], None)
        with hooked_calls(door.module, is_needed=self._has_hooks(door)) as (names, seen):
            output = run()
        tensors = [tensor for _, tensor in each(output, objects=True)]
        if any([isinstance(tensor, StandIn) for tensor in tensors]):
            raise RuntimeError(
                f"'{door.name}' has computed with a tensor of another process that was no argument of it; pass it as "
                "an argument: an attribute, a closure or a global is not sent"
            )
        is_filled = held is not None and held != _held((args, kwargs))
        arguments = (args, kwargs) if is_filled else None
        if attributes is not None:
            changed = [k for k, (a, b) in enumerate(zip(before, versions(given))) if a != b]
            places = self._attributes.setdefault(door.name, set())
            places.update(() if self._settings.has_stages else attributes.set_since())
            forms = abstracted((output, seen, values_of(door.module, sorted(places)), arguments), given)
            effect = self._known[key] = _Effect(forms, names, changed, sorted(places))
        effect = self._known[key]
        kept = values_of(door.module, effect.attributes)
        returned = described((output, kept, arguments), [])
        if attributes is not None:
            self._returned[key], word = returned, _word_of(key)
            if word not in self._told:  # It is that of calls with other strides.
                self._told.add(word)
                self.processes.send(effect, self.processes.others, word)
        leaves = effect.forms.leaves[: len(tensors)]
        if returned != self._returned[key] or leaves_of(tensors, given) != leaves:
            now = "has changed a list or a dict that it was given" if is_filled else f"returns {_shown(output)}"
            for (_, name), value in zip(effect.attributes, kept):
                now += f" with {_shown(value)} as its attribute '{name}'"
            raise RuntimeError(
                f"'{door.name}' {now}, and did something else before for arguments of the same shapes: other processes "
                "cannot know that; let shapes, numbers and what there is depend on the shapes of the arguments alone, "
                "return numbers as tensors, count in a buffer, or give a balance that keeps the module and all that "
                "use it in one process"
            )
        return _Called(output, given, [given[k] for k in effect.changed], seen, effect.attributes)

    # ----------------------------------------------------------------------------------------------- of other processes

    def pass_by(
        self,
        door: Door,
        args: Any,
        kwargs: Any,
        column: int,
        import_all: Callable[[list[Tensor]], list[Tensor]],
        replace: Callable[[Tensor], object],
        hear: Callable[..., _Effect],
    ) -> Any:
        """Do here what a module of another process does there, and return what it returns, with stand-ins.

        Every process passes by most modules of a model, so this walks through the arguments once.

        Args:
            door: the door
            args, kwargs: the arguments, not imported yet
            column: the column of the module
            import_all: imports the tensors among them, and in caches among them
            replace: lets the column own an argument that all processes have had until now
            hear: returns what another process tells, see `Processes.receive`
        """
        key, given = self._note(door, column, args, kwargs)
        imported = import_all(given)
        if [one.requires_grad for one in imported] != [one.requires_grad for one in given]:
            # A tensor that all processes have was changed in place by a column that trains.
            new = {id(one): other for one, other in zip(given, imported)}
            key, _ = self._note(door, column, *mapped((args, kwargs), lambda one: new[id(one)], objects=True))
        effect = self._known.get(key)
        if effect is None:
            word, what = _word_of(key), f"the shapes that '{door.name}' returns"
            self._told.add(word)
            effect = self._known[key] = hear(self.processes.owners[column], word, what, keeps=True)
        output, seen, kept, arguments = effect.forms.made(imported, column, self._settings.devices[column])
        _change(imported, effect.changed, replace)
        show_calls(door.module, effect.hooked, seen)
        put_values(door.module, effect.attributes, kept)
        if arguments is not None:
            originals = {id(one): other for one, other in zip(imported, given)}
            refill((args, kwargs), mapped(arguments, lambda one: originals.get(id(one), one), objects=True))
        return output


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


def _word_of(key: Any) -> str:
    """Return a word for a key, the same in all processes: devices have other numbers, and stand-ins strides."""
    text = re.sub(r"stride=\([^)]*\)", "", without_devices(repr(key)))
    return sha256(text.encode()).hexdigest()[:40]
