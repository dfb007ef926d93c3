"""The two runs of layers that keep only their inputs, and run again at backward.

The second run must do what the first run did, and leave no trace. Here is all that this takes, for any front, but for
the settings of the caller, which `Ambient.run` enters:

    the input           must not be changed by the first run
    parameters, modes   must be those of the first run
    random numbers      are drawn again; see `random`
    state of layers     is that before the first run, and is put back; see `state`
    phase               tells a layer which run it is in; see `phase`
    output              is compared once; see `outputs`
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.torch_internals import current_pass, forget_parametrizations, versions
from torchgpipe.replay.exclusive import exclusive
from torchgpipe.replay.found import Found
from torchgpipe.replay.outputs import Comparison
from torchgpipe.replay.phase import first_run, second_run
from torchgpipe.replay.random import Drawn, RandomStates
from torchgpipe.replay.state import Before, State

__all__ = ["Layers", "Run"]


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
        self.first = modules[0]
        self._found = Found(modules)
        self.state = State(modules)
        # A dict, because several layers can own one parameter. Parameters of lazy layers cannot be asked for anything.
        owned = {
            parameter: None for _, _, named in self._found.layers for _, parameter in named if parameter is not None
        }
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
        change = self._found.changed()
        if change is None:
            self._unchanged_in = current_pass()
        return change


_nothing = nullcontext()


class Run:
    """A run that can be repeated.

    Args:
        layers: what runs
        inputs: the tensors that they are given
        kind: what tells runs of these layers apart, beside their inputs

    Attributes:
        outputs: compares what the two runs return
    """

    __slots__ = ("_drawn", "_inputs", "_layers", "_state", "_versions", "outputs")

    def __init__(self, layers: Layers, inputs: Sequence[Tensor | None], kind: Hashable = None) -> None:
        self._layers = layers
        self._inputs: Sequence[Tensor | None] = inputs
        self._drawn: Drawn = ()
        #: What layers keep, as the first run has found it; None until that has finished, and once it is forgotten.
        self._state: Before | None = None
        self.outputs = Comparison(layers.first, kind, inputs)

    @property
    def is_repeatable(self) -> bool:
        """Whether the first run has finished, and what it drew is not forgotten."""
        return self._state is not None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Surround the first run.

        Raises:
            RuntimeError: it has changed its input in place.
        """
        layers, inputs, self._inputs = self._layers, self._inputs, ()
        untouched = versions(inputs)
        forget_parametrizations()
        with layers.exclusively():
            drawn, state = layers.random.begin(), layers.state.begin()
            with first_run():
                yield
            self._drawn = layers.random.end(drawn)
            state.end()
        self._state, self._versions = state, layers.versions()
        forget_parametrizations()
        if versions(inputs) != untouched:
            raise RuntimeError(
                f"{layers.where()} changes its input in place, so recomputation would start from another input; "
                f"{layers.copying}, or {layers.otherwise}"
            )

    @contextmanager
    def second(self) -> Iterator[None]:
        """Surround the second run.

        Raises:
            RuntimeError: the layers, their parameters or their random numbers are not those of the first run.
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
        if self._state is None:
            raise RuntimeError(
                f"{layers.where()} cannot run again, because what it drew and kept is forgotten: a backward pass has "
                "differentiated it and failed afterwards; call the pipeline again before the next backward()"
            )
        forget_parametrizations()
        with layers.exclusively(), layers.random.replay(self._drawn), self._state.again(), second_run():
            yield
        forget_parametrizations()

    def compare(self, outputs: Sequence[Tensor | None]) -> None:
        """Compare what the second run returns.

        Raises:
            RuntimeError: it is not what the first run has returned.
        """
        difference = self.outputs.difference(outputs)
        if difference is not None:
            raise RuntimeError(
                f"{self._layers.where()} has not computed in recomputation what it computed before ({difference}), so "
                "gradients would be wrong; let it compute with its inputs, and with buffers and plain attributes of "
                f"its modules, which recomputation has as they were before, or {self._layers.otherwise}"
            )

    def forget(self) -> None:
        """Forget what takes memory, when there is no further run: copies, and states of generators in kilobytes."""
        if self._drawn or (self._state is not None and self._state.holds_memory):
            self._drawn, self._state = (), None
