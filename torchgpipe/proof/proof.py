"""The proof of a pipeline: what it computes on a mini-batch, beside what the plain model computes.

    rows together    the plain model, all rows at once              ─┐ equal but for rounding, with gradients of losses,
    rows apart       the plain model, micro-batch by micro-batch    ─┤ or rows are coupled, or split or joined wrongly
    pipeline         as it stands, micro-batch by micro-batch       ─┘ equal, or the cut has lost something

All of this runs in training as well as in evaluation, as far as it can. Rows together and apart draw other numbers, and
a batch norm couples them, so a model that draws or changes its buffers in training is compared by rows in evaluation
only. The pipeline draws what the plain model draws, and is compared in training with all gradients.

A gradient is kept as a fingerprint, so that no more than the gradients of one run take memory. Two gradients of other
bits may differ by the order of sums. How much rounding makes of that in a tensor, the plain model tells: its gradients
of 3 and 5 times the loss, over 3 and 5, differ from those of the loss by rounding alone.

What the sample would hide is brought to light. Where no loss is known, the gradients of rows begin at the outputs, with
fixed random numbers. Parameters that are zero, as those of heads and gates that are to begin so, have other values
during a proof, or nothing behind them would show. What is nan in the plain model would be equal to any nan: it is an
error, or not compared.

Nothing is left behind: gradients of parameters go to stand-ins, those of other leaves are set aside (`outside`), and
`untouched` puts back the rest.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.devices.memory import ran_out_of_memory, return_freed
from torchgpipe.devices.torch_internals import BatchNormBase
from torchgpipe.devices.typing import Leaf
from torchgpipe.model.comparison import Comparison, cotangent, difference_of
from torchgpipe.model.fingerprint import Fingerprint, dense, fingerprint, length, weighted_sum
from torchgpipe.model.untouched import Buffers, in_mode, untouched
from torchgpipe.proof.outside import Outside
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import generators_in

__all__ = [
    "Gradients",
    "Number",
    "PlainFails",
    "PlainRun",
    "Proof",
    "Roots",
    "Take",
    "take_fingerprints",
    "without_zeros",
]

#: The gradients of a run by the names of parameters; None for a parameter that has none.
Gradients = dict[str, Fingerprint | None]
#: Where backward begins, each tensor with its gradient.
Roots = list[tuple[Tensor, Tensor]]


class Take(ABC):
    """The stand-ins of parameters during a run."""

    @abstractmethod
    def own(self) -> list[Tensor]:
        """Return the stand-ins."""

    @abstractmethod
    def take(self) -> Iterable[tuple[str, Leaf]]:
        """Yield the gradients that have arrived, by the names of parameters, and leave none."""


class PlainFails(Exception):
    """The plain model does not take the mini-batch, or not as micro-batches.

    Attributes:
        error: what to tell the user
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class PlainRun(NamedTuple):
    """What the plain model has computed, micro-batch by micro-batch.

    Attributes:
        outputs: the output of each micro-batch, without a graph
        loss: the loss of a step, if a loss function is compared
        buffers: the buffers that have changed
        gradients: those of all micro-batches; None if the plain model cannot be differentiated
        draws: whether it draws random numbers
    """

    outputs: list[Any]
    loss: Tensor | None
    buffers: dict[str, Tensor]
    gradients: Gradients | None
    draws: bool


class Number(NamedTuple):
    """A number that a run has given, such as a loss.

    Attributes:
        value: the number
        gradients: its gradients; None if it has no graph
        scale: what backward has begun with: gradients that do not follow the loss show by it
    """

    value: Tensor
    gradients: Gradients | None
    scale: float = 1.0


class Proof(ABC):
    """The comparison of a pipeline with the plain model on one mini-batch.

    Args:
        module: the pipeline
        devices: the devices that it computes on
        sizes: the rows of each micro-batch
        epsilon: the rounding error of the coarsest numbers in the model, relative to 1
        splits: whether the micro-batches are parts of a mini-batch, which can run in one piece

    Attributes:
        comparison: the table
    """

    #: Whether the pipeline draws other random numbers than the plain model.
    draws_in_another_order = False
    #: What backward of the number of a micro-batch begins with, unless it is said.
    scale_apart = 1.0

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        sizes: Sequence[int],
        epsilon: float,
        *,
        splits: bool = True,
    ) -> None:
        self._has_rows = splits and len(sizes) > 1
        self._module, self._devices, self._sizes = module, devices, sizes
        self.comparison = Comparison(epsilon)
        self._outside = Outside()
        self._draws = False
        #: Whether the last run of some rows has drawn random numbers.
        self._drew = False
        #: The longest that the plain model has taken for a micro-batch.
        self._seconds = 0.0

    # ------------------------------------------------------------------------------------------- what a front gives

    @abstractmethod
    def run_plain(self, i: int | None) -> Any:
        """Run the plain model on micro-batch ``i``, or on all rows, and return its output."""

    @abstractmethod
    def tensors(self, output: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of an output by path."""

    @abstractmethod
    def without_graph(self, output: Any) -> Any:
        """Return an output with copies of its tensors, which the model may change later."""

    def without_modes(self) -> AbstractContextManager[object]:
        """Leave what is around the plain model, such as a mode that moves tensors, for a ``with`` block."""
        return nullcontext()

    @abstractmethod
    def numbers(self, i: int | None, output: Any) -> dict[str, Tensor]:
        """Return the losses and other numbers of a micro-batch, or of all rows, by path."""

    @abstractmethod
    def roots(self, i: int, output: Any) -> Roots:
        """Return the tensors that backward of a micro-batch begins at, each with its gradient."""

    @abstractmethod
    def roots_of_rows(self, i: int | None, output: Any) -> Roots:
        """Return the outputs with rows, each with its gradient, which for all rows is that of the micro-batches."""

    @abstractmethod
    def inputs(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors among the arguments by path."""

    @abstractmethod
    def sum_losses(self) -> Tensor | None:
        """Return the loss of the micro-batches that `roots` has got, if a loss function is compared."""

    @abstractmethod
    def compare_number(self, path: str, together: Number, apart: Sequence[Number]) -> None:
        """Compare a number of all rows with those of the micro-batches; see `fits`."""

    @abstractmethod
    def compare_outputs_of_rows(self, together: Any, apart: list[Any], *, training: bool, draws: bool) -> None:
        """Compare the output of all rows with those of the micro-batches."""

    @abstractmethod
    def running_plain(self) -> AbstractContextManager[Take]:
        """Let the plain model run in a ``with`` block, and take its gradients."""

    def draw_as(self, i: int) -> AbstractContextManager[object]:
        """Let micro-batch ``i`` draw its random numbers in a ``with`` block."""
        return nullcontext()

    @abstractmethod
    def compare_pipeline(self, apart: PlainRun) -> None:
        """Run the pipeline, forward and backward, and compare it with the plain model."""

    @abstractmethod
    def compare_evaluation(self, outputs: list[Any]) -> None:
        """Run the pipeline forward in evaluation, and compare it with the plain model."""

    @abstractmethod
    def draws(self) -> bool:
        """Return whether the plain model has drawn random numbers in the present run."""

    def surround(self, count: int) -> AbstractContextManager[object]:
        """Surround the run of so many micro-batches."""
        return nullcontext()

    @property
    def patience(self) -> float:
        """The seconds after which a micro-batch that only waits is taken to wait for ever."""
        return 2.0 + 10 * self._seconds

    # -------------------------------------------------------------------------------------------------------- the run

    def run(self) -> Comparison:
        """Run everything, and return the comparison.

        Raises:
            PlainFails: the plain model does not take the micro-batches.
        """
        with torch.inference_mode(False), torch.enable_grad(), self._outside, without_zeros(self._module):
            training, apart = self._run_apart()
            self._refuse_nan(apart.outputs)
            unclear = [name for name, grad in (apart.gradients or {}).items() if grad and math.isnan(grad.norm)]
            if unclear:
                self.skip(f"gradients of the parameters {unclear}, which are nan in the plain model")
            norms = [child for child in self._module.modules() if isinstance(child, BatchNormBase)]
            # A layer that changes its buffers, as a spectral norm does, may compute with them.
            self._draws |= bool(generators_in(self._module.modules()))
            couples = self._draws or bool(apart.buffers or norms)
            evaluated: list[Any] | None = None
            if len(self._sizes) > 1 and self.comparison.is_equal:
                if self._has_rows and not (training and couples):
                    self._compare_rows(training)
                if training and self.comparison.is_equal:
                    evaluated = self._evaluated(apart, couples)
            if self.comparison.is_equal:
                begin = len(self.comparison.rows)
                if evaluated is not None:  # Before, as the outputs take memory.
                    with in_mode(self._module, False), self._untouched(), torch.no_grad():
                        self.compare_evaluation(evaluated)
                end = len(self.comparison.rows)
                with in_mode(self._module, training):
                    self.compare_pipeline(apart)
                # What differs in training is told first.
                self.comparison.rows += [self.comparison.rows.pop(begin) for _ in range(begin, end)]
        return self.comparison

    def verify(self) -> Comparison:
        """Run everything, and return the comparison; what the plain model raises is raised."""
        try:
            return self.run()
        except PlainFails as failure:
            raise failure.error from failure.__cause__

    def _run_apart(self) -> tuple[bool, PlainRun]:
        """Run the plain model on each micro-batch, in training if it can be, or else in evaluation."""
        for training in (True, False):
            try:
                with in_mode(self._module, training):
                    run = self.apart()
            except Exception as error:
                if ran_out_of_memory(error):
                    raise
                if not training:
                    raise PlainFails(self.explain_failure(error)) from error
                self.skip(f"training, in which the plain model fails on the sample ({_quote(error)})")
                continue
            self._draws |= run.draws
            if not (run.draws and self.draws_in_another_order):
                break
            if training:
                self.skip("training, in which layers draw random numbers, and a pipeline draws in another order")
            else:
                self.comparison.note("random numbers", _DRAWS)
        return training, run

    def _evaluated(self, apart: PlainRun, couples: bool) -> list[Any] | None:
        """Compare rows in evaluation, unless the model does there what it does in training; return the outputs."""
        try:
            with in_mode(self._module, False), torch.no_grad():
                run = self.apart(backward=False)
        except Exception as error:
            if couples:
                raise PlainFails(self.explain_failure(error)) from error
            self.skip(f"evaluation, in which the plain model fails on the sample ({_quote(error)})")
            return None
        self._refuse_nan(run.outputs)
        if self._has_rows and (couples or not all(map(self._are_equal, run.outputs, apart.outputs))):
            self._compare_rows(False)
        return run.outputs

    def _are_equal(self, a: Any, b: Any) -> bool:
        left, right = dict(self.tensors(a)), dict(self.tensors(b))
        return left.keys() == right.keys() and all([difference_of(left[path], right[path])[0] == 0 for path in left])

    def _refuse_nan(self, outputs: Sequence[Any]) -> None:
        """Refuse outputs that have nan in the plain model, which shows nothing.

        Raises:
            PlainFails: there are such.
        """
        known = chain(self.inputs(), self._module.named_parameters(), self._module.named_buffers())
        with self.without_modes():
            named = [dict(self.tensors(output)) for output in outputs]
            for path, tensor in named[0].items():
                found = [_has_nan(output[path]) for output in named if path in output]
                if not any(found):
                    continue
                source = next((f", as '{name}' has" for name, value in known if _has_nan(value)), "")
                if all(found) or tensor.dim() or source:  # A mean over no labels is nan.
                    text = (
                        f"the output '{path}' has nan in the plain model{source}: every nan is like another, so "
                        "nothing would be compared; give a sample and weights that the model makes numbers of"
                    )
                    raise PlainFails(ValueError(text))

    def skip(self, reason: str) -> None:
        """Note what is not compared, with the reason."""
        if reason not in self.comparison.skipped:
            self.comparison.skipped.append(reason)

    def explain_failure(self, error: Exception) -> Exception:
        """Return what to raise if the plain model fails on its micro-batches."""
        return error

    # ------------------------------------------------------------------------------------------------ the plain model

    def apart(self, *, backward: bool = True, scale: int = 1) -> PlainRun:
        """Run the plain model on each micro-batch.

        Args:
            backward: whether to differentiate it
            scale: multiplies the gradients that backward begins with
        """
        outputs: list[Any] = []
        with self._untouched(), self.running_plain() as stand_ins, self.surround(len(self._sizes)):
            with self.without_modes():
                buffers = Buffers(self._module)
            for i in range(len(self._sizes)):
                begin = time.perf_counter()
                with self.draw_as(i):
                    output = self.run_plain(i)
                    self._seconds = max(self._seconds, time.perf_counter() - begin)
                    roots = self.roots(i, output) if backward else []
                    outputs.append(self.without_graph(output))
                backward = backward and self._differentiate(roots, stand_ins, scale=scale)
                del output, roots
            draws, loss = self.draws(), self.sum_losses() if backward else None
            with self.without_modes():
                changed = buffers.changed()
            gradients = self._gradients(stand_ins) if backward else None
        return PlainRun(outputs, loss, changed, gradients, draws)

    def _compare_rows(self, training: bool) -> None:
        """Compare rows together with rows apart, and the numbers among the outputs with their gradients."""
        with in_mode(self._module, training):
            parts = [self.with_numbers(i) for i in range(len(self._sizes))]
            draws = self._drew
            together, numbers = self.with_numbers(None)
            self.compare_outputs_of_rows(together, [output for output, _ in parts], training=training, draws=draws)
            for path, number in numbers.items() if not draws else ():
                apart = [part[path] for _, part in parts if path in part]
                if path:
                    self.compare_number(path, number, apart)
                elif not self.fits(number, apart, [1.0] * len(apart)):
                    name = self.differing_most(number, apart, [1.0] * len(apart))
                    self.comparison.note("gradients, rows together and apart", _OF_ROWS.format(name))
            if not self.comparison.is_equal:
                self._explain_change(training)

    def _explain_change(self, training: bool) -> None:
        """Say so if what differs between rows together and apart differs from call to call."""
        with self._untouched(), self.running_plain(), torch.no_grad():
            outputs = []
            for _ in range(2):
                with self.draw_as(0):
                    outputs.append(self.without_graph(self.run_plain(0)))
        if not self._are_equal(*outputs):
            fault = _CHANGES.format("training" if training else "evaluation")
            self.comparison.rows = [row._replace(fault=fault) if row.fault else row for row in self.comparison.rows]

    def with_numbers(self, i: int | None) -> tuple[Any, dict[str, Number]]:
        """Return the output of the plain model without its graph, and the numbers in it with their gradients.

        If there is no number, the gradients are those of the outputs, as a number without a name.

        Args:
            i: the micro-batch; None for all rows
        """
        numbers: dict[str, Number] = {}
        scale = 1.0 if i is None else self.scale_apart
        with self._untouched(), self.running_plain() as stand_ins, self.surround(1):
            with self.draw_as(i or 0):
                output = self.run_plain(i)
                found = self.numbers(i, output)
            self._gradients(stand_ins)  # What a forward differentiates itself has no part in them.
            with self.without_modes():
                seeds = {path: torch.full_like(value, scale) for path, value in found.items()}
                roots = {path: [(value, seeds[path])] * value.requires_grad for path, value in found.items()}
                if not roots:
                    roots, found = {"": self.roots_of_rows(i, output)}, {"": torch.zeros(())}
            for path, begin in roots.items():
                gradients = None
                # Nobody differentiates outputs in evaluation, where layers may have kernels without a backward.
                tells = bool(path) or self._module.training
                if begin and self._differentiate(begin, stand_ins, keep_graph=path != [*roots][-1], tells=tells):
                    gradients = self._gradients(stand_ins)
                numbers[path] = Number(found[path].detach(), gradients, scale if path else 1.0)
            self._drew = self.draws()
            return self.without_graph(output), numbers

    def _differentiate(
        self, roots: Roots, stand_ins: Take, *, scale: int = 1, keep_graph: bool = False, tells: bool = True
    ) -> bool:
        """Differentiate from roots, and return whether that was possible: a model that only evaluates may fail."""
        if not roots:
            return True
        tensors = [tensor for tensor, _ in roots]
        self._outside.note(tensors, stand_ins.own())
        try:
            with self.without_modes():
                grads = [grad * scale for _, grad in roots]
            # Without autocast, as the pipeline does.
            with Ambient().without_autocast():
                torch.autograd.backward(tensors, grads, retain_graph=keep_graph)
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            if tells:
                self.skip(f"gradients, because the plain model cannot be differentiated ({_quote(error)})")
            return False
        return True

    def _gradients(self, stand_ins: Take) -> Gradients:
        with self.without_modes():
            return take_fingerprints(stand_ins.take()) | take_fingerprints(self._outside.take())

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        with untouched(self._module, self._devices):
            yield
        return_freed()

    # ----------------------------------------------------------------------------------------------- the comparisons

    def fits(self, together: Number, apart: Sequence[Number], shares: Sequence[float]) -> bool:
        """Return whether a number of all rows, and its gradient, are those of micro-batches with these shares."""
        loose = self.comparison.loose
        # A mean over no labels is nan.
        apart, shares = (
            zip(*[(number, share) for number, share in zip(apart, shares) if share]) if any(shares) else ((), ())
        )
        parts = [float(number.value) * share for number, share in zip(apart, shares)]
        whole = float(together.value)
        if not math.isclose(whole, sum(parts), rel_tol=loose, abs_tol=loose * max(map(abs, parts), default=0.0)):
            return False
        gaps = self._gaps(together, apart, shares).values()
        return math.sqrt(sum([gap for gap, _ in gaps])) <= loose * math.sqrt(sum([size for _, size in gaps]))

    def _gaps(
        self, together: Number, apart: Sequence[Number], shares: Sequence[float]
    ) -> dict[str, tuple[float, float]]:
        """Return the squares of the difference and of the size of each gradient; nothing if a number has none."""
        if any([number.gradients is None for number in (together, *apart)]):
            return {}
        gaps: dict[str, tuple[float, float]] = {}
        for name, of_all in (together.gradients or {}).items():
            known = [(1.0, of_all)] if of_all is not None else []
            if any([name not in (number.gradients or {}) for number in apart]):
                continue  # A leaf outside of the model that no run before had used.
            terms = [(share / one.scale, (one.gradients or {}).get(name)) for one, share in zip(apart, shares)]
            joined = weighted_sum([(share, one) for share, one in terms if one is not None])
            size = max(_squared(length(joined)), *[_squared(one.norm) for _, one in known], 0.0)
            gaps[name] = _squared(length(weighted_sum(known), joined)), size
        return gaps

    def differing_most(self, together: Number, apart: Sequence[Number], shares: Sequence[float]) -> str:
        """Return the name of the gradient that differs most."""
        gaps = self._gaps(together, apart, shares)
        return max(gaps, key=lambda name: gaps[name][0], default="a parameter")

    def compare_named(
        self, what: str, plain: Mapping[str, Tensor], ours: Mapping[str, Tensor], fault: str, tolerance: float
    ) -> None:
        """Compare tensors by their names, which stand in ``what`` and ``fault`` for ``{}``; see `Comparison.add`."""
        for name in dict.fromkeys([*plain, *ours]):
            row, text = what.replace("{}", name), fault.replace("{}", name)
            self.comparison.add(row, plain.get(name), ours.get(name), text, tolerance=tolerance)

    def compare_gradients(
        self,
        expected: Mapping[str, Fingerprint | None],
        actual: Iterable[tuple[str, Fingerprint | None, str]],
        what: str = "",
    ) -> None:
        """Compare gradients of the pipeline with those of the plain model, and add the rows.

        Args:
            expected: those of the plain model
            actual: those of the pipeline, each with its name and what to say if it differs
            what: what they are gradients of, for the rows
        """
        doubtful: list[tuple[int, str, Fingerprint | None, str]] = []
        rows = self.comparison.rows
        for name, ours, fault in actual:
            # The plain model has no entry of a leaf outside of it that one micro-batch alone has used, or made.
            if name not in expected or (ours is None and expected[name] is None):
                continue
            row = self.comparison.compare_gradients(f"gradient of {name}{what}", expected.get(name), ours, fault)
            if row.fault:
                doubtful.append((len(rows), name, ours, fault))
            rows.append(row)
        noise = self._noise(expected) if doubtful else {}
        for k, name, ours, fault in doubtful:
            rows[k] = self.comparison.compare_gradients(
                rows[k].name, expected.get(name), ours, fault, noise=noise.get(name, 0.0)
            )

    def _noise(self, expected: Mapping[str, Fingerprint | None]) -> dict[str, float]:
        """Return the norm of the rounding of each gradient of the plain model."""
        noise: dict[str, float] = {}
        for scale in (3, 5):
            for name, scaled in (self.apart(scale=scale).gradients or {}).items():
                known = expected.get(name)
                if known is not None and scaled is not None:
                    gap = length(known.projections, weighted_sum([(1 / scale, scaled)]))
                    noise[name] = max(noise.get(name, 0.0), gap)
        return noise


_DRAWS = (
    "layers draw random numbers in evaluation, too, and a pipeline draws in another order, so nothing can be compared; "
    "let them draw in training only"
)
_CHANGES = (
    "the model changes from call to call, in {}: the same rows give other outputs the second time, without a pipeline "
    "either, so micro-batches cannot give what all rows give; switch off what it observes or counts, as by "
    "model.apply(torch.ao.quantization.disable_observer)"
)
_OF_ROWS = (
    "the gradient of {} is not the sum of those of the rows apart, without a pipeline either: the rows are coupled, as "
    "by x.mean(0) or an attention over rows, and cannot be split; or a torch.autograd.Function adds a gradient that "
    "does not follow that of its output, which would count once for each micro-batch"
)


@contextmanager
def without_zeros(module: nn.Module) -> Iterator[None]:
    """Give parameters that are zero other values in a ``with`` block, which are fixed, small and positive.

    Not a buffer, nor a tensor of a class of its own: what their zeros say is not known.
    """
    zeros = [
        (name, parameter.detach())
        for name, parameter in module.named_parameters()
        if type(parameter) is nn.Parameter and parameter.is_floating_point() and parameter.layout is torch.strided
        # Neither without values nor expanded.
        if not (parameter.is_meta or parameter.untyped_storage().nbytes() < parameter.nbytes or parameter.any())
    ]
    try:
        # In place, with a new version: copies of the weights elsewhere follow that.
        for name, zero in zeros:
            zero.copy_((cotangent(name, zero).abs() + 1) / 16)
        yield
    finally:
        for _, zero in zeros:
            zero.zero_()


def _has_nan(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and not tensor.is_meta and bool(dense(tensor).isnan().any())


def take_fingerprints(gradients: Iterable[tuple[str, Leaf]]) -> Gradients:
    """Return the fingerprints of gradients."""
    return {name: None if grad is None else fingerprint(grad) for name, grad in gradients}


def _squared(value: float) -> float:
    return value * value


def _quote(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"
