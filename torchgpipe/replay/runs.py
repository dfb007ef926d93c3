"""The two runs of layers that keep only their inputs, and run again at backward.

The second run must do what the first run did, and leave no trace. Here is all that this takes, for any front, but for
the settings of the caller, which `Ambient.run` enters:

    the input           must not be changed by the first run
    parameters, modes   must be those of the first run
    random numbers      are drawn again; see `random`
    state of layers     is that before the first run, and is put back; see `state`
    phase               tells a layer which run it is in; see `phase`
    output              is compared, at first always, then ever more rarely; see `outputs`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.generators import OUTSIDE
from torchgpipe.devices.torch_internals import current_pass, dispatch_modes, forget_parametrizations, versions
from torchgpipe.replay.exclusive import exclusive
from torchgpipe.replay.outputs import counts_of, difference_of, is_compared, sums
from torchgpipe.replay.phase import first_run, second_run
from torchgpipe.replay.random import Drawn, RandomStates
from torchgpipe.replay.state import Snapshot, State

__all__ = ["Layers", "Run"]

T = TypeVar("T")


class Layers:
    """What the runs of some modules share during a call.

    Args:
        modules: the modules
        random: notes the random numbers that they draw
        where: returns their name, for errors
        copying: how they may work on a copy of their input, for errors
        otherwise: what to do instead of recomputing them, for errors

    Attributes:
        parameters: their parameters, each once
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        random: RandomStates,
        where: Callable[[], str],
        *,
        copying: str,
        otherwise: str,
    ) -> None:
        self.random, self.where, self.copying, self.otherwise = random, where, copying, otherwise
        #: The modules, each with its mode and its parameters by name.
        self._found = [(module, module.training, list(module._parameters.items())) for module in modules]
        self.state = State(modules)
        #: How often they have run, by the structure of their inputs.
        self.counts = counts_of(modules[0])
        # A dict, because several layers can own one parameter. Parameters of lazy layers cannot be asked for anything.
        owned = {parameter: None for _, _, named in self._found for _, parameter in named if parameter is not None}
        self.parameters = list(owned)
        self._versioned = [parameter for parameter in owned if not is_lazy(parameter) and not parameter.is_inference()]
        #: The backward pass in which the layers were last found unchanged.
        self._unchanged_in: int | None = None

    def exclusively(self) -> AbstractContextManager[None]:
        """Keep other threads from running modules with buffers for a ``with`` block."""
        return exclusive(self.state.owners) if self.state.owners else _nothing

    def versions(self) -> list[int]:
        """Return the versions of all parameters, which count changes in place."""
        return versions(self._versioned)

    def changed(self) -> str | None:
        """Return what is no longer as the call found it, or None. The layers are looked at once in a backward pass."""
        if self._unchanged_in == current_pass():
            return None
        for module, training, parameters in self._found:
            if module.training != training:
                return f"it was in {'training' if training else 'evaluation'} mode"
            now = module._parameters
            for name, parameter in parameters:
                if name not in now or now[name] is not parameter:
                    return f"'{name}' of a {type(module).__name__} was another parameter"
        self._unchanged_in = current_pass()
        return None


_nothing = nullcontext()


class Run:
    """A run that can be repeated.

    Args:
        layers: what runs
        tensors: returns the tensors in what a run returns

    Attributes:
        is_compared: whether what the two runs return is to be compared
    """

    __slots__ = ("_kept", "_layers", "_sums", "_tensors", "_versions", "is_compared")

    def __init__(self, layers: Layers, tensors: Callable[[Any], Iterable[Tensor | None]]) -> None:
        self._layers, self._tensors = layers, tensors
        self.is_compared = False
        self._sums: list[Tensor | None] = []
        #: The random numbers that the first run drew, and what layers kept before it.
        self._kept: tuple[Drawn, Snapshot] | None = None

    @property
    def is_repeatable(self) -> bool:
        """Whether the first run has finished, and what it drew is not forgotten."""
        return self._kept is not None

    def first(self, compute: Callable[[], T], inputs: Sequence[Tensor | None]) -> T:
        """Return what ``compute`` returns, which is the first run.

        Args:
            compute: runs the layers
            inputs: the tensors that they are given

        Raises:
            RuntimeError: it has changed its input in place.
        """
        layers, untouched = self._layers, versions(inputs)
        # Without sizes: a model of sentences has new ones in many mini-batches.
        structure = tuple([None if x is None else x.dim() for x in inputs])
        forget_parametrizations()
        with layers.exclusively():
            drawn, state = layers.random.begin(), layers.state.begin()
            with first_run():
                result = compute()
            draws = layers.random.end(drawn)
            self._kept = draws, state
            state.end()
        # Another thread may have drawn these numbers, too, so nothing else tells whether they were drawn again.
        is_shared = any([draw.generator in OUTSIDE for draw in draws])
        # A dispatch mode would see the sums, and tensors of some modes have no values.
        self.is_compared = (is_compared(layers.counts, structure) or is_shared) and not dispatch_modes()
        self._versions = layers.versions()
        forget_parametrizations()
        if versions(inputs) != untouched:
            raise RuntimeError(
                f"{layers.where()} changes its input in place, so recomputation would start from another input; "
                f"{layers.copying}, or {layers.otherwise}"
            )
        if self.is_compared:
            self._sums = [*map(sums, self._tensors(result))]
        return result

    def second(self, compute: Callable[[], T]) -> T:
        """Return what ``compute`` returns, which is the second run.

        Raises:
            RuntimeError: the layers, their parameters, their random numbers or, if that is compared, what they return
                are not those of the first run.
        """
        layers = self._layers
        change = layers.changed()
        if change is None and layers.versions() != self._versions:
            change = "a parameter was changed in place since"
        if change is not None:
            raise RuntimeError(
                f"{layers.where()} is not what it was at forward ({change}), so recomputation would give other "
                f"gradients; call backward() before optimizer.step(), train() and eval(), or {layers.otherwise}"
            )
        if self._kept is None:
            raise RuntimeError(
                f"{layers.where()} cannot run again, because what it drew and kept is forgotten: a backward pass has "
                "differentiated it and failed afterwards; call the pipeline again before the next backward()"
            )
        drawn, state = self._kept
        forget_parametrizations()
        with layers.exclusively(), layers.random.replay(drawn), state.again(), second_run():
            result = compute()
        forget_parametrizations()
        difference = difference_of(self._sums, self._tensors(result)) if self.is_compared else None
        if difference is not None:
            raise self.another(difference)
        return result

    def another(self, difference: str) -> RuntimeError:
        """Return the error for a second run that has computed something else."""
        return RuntimeError(
            f"{self._layers.where()} has not computed in recomputation what it computed before ({difference}), so "
            "gradients would be wrong; let it compute with its inputs, with buffers, or with numbers and small tensors "
            "among the attributes of its modules, which are as they were before, so that it can change them without "
            f"asking is_recomputing(), or {self._layers.otherwise}"
        )

    def forget(self) -> None:
        """Forget what takes memory, when there is no further run: copies, and states of generators in kilobytes."""
        self._kept = None
