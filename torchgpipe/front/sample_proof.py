"""The proof of a pipelined model; see `torchgpipe.proof.proof`.

The pipeline runs column by column: all micro-batches pass the first column before one enters the second. So state that
one column leaves on the model for a later one is always that of another micro-batch, which shows. Numbers that a column
leaves, such as a length, are changed behind it if the caller gives the micro-batches: those of a later mini-batch may
differ in it. In evaluation the pipeline runs once more, with a worker for each device, as it will from then on: what
modules keep for one device at a time, or a lock around a forward, shows there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.batch.inputs import Arguments, SplitBatch, resized
from torchgpipe.batch.outputs import verify_known
from torchgpipe.batch.rule import Rule
from torchgpipe.cell.cell import Export
from torchgpipe.devices.memory import ran_out_of_memory
from torchgpipe.devices.torch_internals import BatchNormBase, is_of_compiler
from torchgpipe.front.plain import PlainModel, quote
from torchgpipe.front.rows import Rows, have_equal_tensors
from torchgpipe.front.variation import vary_sample
from torchgpipe.model.comparison import Compared, Comparison
from torchgpipe.model.fingerprint import Fingerprint, combined, dense, fingerprint
from torchgpipe.model.untouched import in_mode
from torchgpipe.model.values import each
from torchgpipe.pipeline.pipeline import Pipeline
from torchgpipe.pipeline.whole import Whole
from torchgpipe.processes.wire import register
from torchgpipe.proof.proof import Run, compare_gradients, has_nan, nan_error, take_fingerprints, without_zeros
from torchgpipe.replay.random import generators_in
from torchgpipe.run.kept import KeptAttributes
from torchgpipe.run.visitors import unobserved
from torchgpipe.schedule.programs import SPLITTING
from torchgpipe.spine.sample import without_compiler
from torchgpipe.spine.weights import add_shared

__all__ = ["prove", "verify"]

K = TypeVar("K")
V = TypeVar("V")

#: Gradients by the names of parameters, each with the first column of its parameter.
_Gradients: TypeAlias = dict[str, tuple[int, Fingerprint | None]]

register(Compared)
register(Fingerprint)
register(Rule)


class _PlainFails(Exception):
    """The plain model does not take the mini-batch, or not as micro-batches; its argument is what to tell the user."""


def prove(pipeline: Pipeline, sample: Arguments, target: Any, *, verifies: bool) -> Comparison:
    """Prove a pipelined model on its sample: compare it with the plain model on a mini-batch made of the sample.

    There are two micro-batches, of two rows at least, if the sample can be split at all. The sample is varied as far as
    the model takes that. Micro-batches that the caller gives are taken as they are.

    Args:
        pipeline: what runs the pipelined model
        sample: the arguments of one micro-batch, or `MicroBatches`
        target: the target of the loss function; None to compare what the model returns
        verifies: whether to compare, and not only to look for the rules of numbers
    """
    settings = pipeline.settings
    splitter, count = settings.study.splitter, min(2, settings.chunks)
    variations = [[sample]]
    if sample.window is None and splitter.rows and count > 1:
        rows = splitter.rows if splitter.rows >= 4 else max(4, 2 * splitter.rows)
        sample, target = splitter.resized(sample, rows), resized(target, splitter.rows, rows)
        variations = vary_sample(splitter, sample, settings.study.labels, must_differ=verifies)
    settings.study.rules.clear()
    batches = [[splitter.micro_batches(one, count) for one in alike] for alike in variations]
    return _prove(pipeline, batches, target, verifies=verifies)


def verify(pipeline: Pipeline, batch: SplitBatch, target: Any) -> Comparison:
    """Compare a pipelined model with the plain model on a mini-batch; see `prove`."""
    return _prove(pipeline, [[batch]], target, verifies=True)


def _prove(pipeline: Pipeline, variations: list[list[SplitBatch]], target: Any, *, verifies: bool) -> Comparison:
    """Return the comparison on the first mini-batch that the plain model takes; see `prove` and `vary_sample`.

    Raises:
        OthersFail: the first process, which alone runs the plain model, has failed.
    """
    batches, processes = [*chain(*variations)], pipeline.settings.processes
    whole = None if processes is None else Whole(pipeline, processes)
    with nullcontext() if processes is None else processes.all_together("the end of the proof"), whole or nullcontext():
        proofs = [SampleProof(pipeline, batch, target, whole, k) for k, batch in enumerate(batches)]
        if whole is not None and whole.processes.rank:
            return _follow(pipeline, proofs, whole)
        for k, proof in enumerate(proofs):
            if k:
                pipeline.settings.study.rules.clear()
            try:
                if verifies:
                    proof.run()
                    for other in proofs[k + 1 : len(variations[0])]:  # Few labels count, so a rule may fit by chance.
                        proof.confirm_rules(other)
                    break
                if proof.find_rules():
                    break
            except _PlainFails as failure:
                if k + 1 == len(proofs):
                    raise failure.args[0] from failure.__cause__
        if whole is not None:
            whole.tell(*proof.state(), proof.comparison.rows, proof.comparison.told)
        return proof.comparison


def _follow(pipeline: Pipeline, proofs: Sequence[SampleProof], whole: Whole) -> Comparison:
    """Run the pipeline whenever the first process tells it, and return the comparison that it ends with."""
    module, study = pipeline.module, pipeline.settings.study
    with torch.inference_mode(False), without_zeros(module), without_compiler(module):
        while True:
            k, is_evaluation, training, study.rules, study.divides, *end = whole.tell()
            proof: SampleProof = proofs[k]
            if end:
                proof.comparison.rows, proof.comparison.told = end
                return proof.comparison
            with in_mode(module, training), torch.set_grad_enabled(not is_evaluation):
                proof.run_evaluation() if is_evaluation else proof.run_pipeline(None)


class SampleProof:
    """The comparison of a pipelined model with the plain model on one mini-batch.

    Args:
        pipeline: what runs the pipelined model
        batch: the mini-batch
        target: the target of the loss function; None to compare what the model returns
        whole: the plain model over several processes
        number: the number of the proof, in all processes

    Attributes:
        comparison: the table
    """

    def __init__(self, pipeline: Pipeline, batch: SplitBatch, target: Any, whole: Whole | None, number: int) -> None:
        self._pipeline, self._settings, self._module = pipeline, pipeline.settings, pipeline.module
        self._whole, self._number = whole, number
        self._devices = self._settings.devices
        self._has_rows = not batch.given and len(batch.sizes) > 1
        self.comparison = Comparison(self._settings.study.epsilon)
        self._plain = PlainModel(pipeline, batch, target, whole, self.comparison)
        self._rows = Rows(self._plain)

    @property
    def patience(self) -> float:
        """The seconds after which a micro-batch that only waits is taken to wait for ever."""
        return 2.0 + 10 * self._plain.seconds

    def run(self) -> None:
        """Run everything.

        Raises:
            _PlainFails: the plain model does not take the micro-batches.
        """
        plain, module, comparison = self._plain, self._module, self.comparison
        modes = torch.inference_mode(False), torch.enable_grad()
        with modes[0], modes[1], without_compiler(module), plain.outside, without_zeros(module):
            training, apart = self._run_apart()
            self._refuse_nan(apart.outputs)
            unclear = [name for name, grad in apart.gradients.items() if grad and math.isnan(grad.norm)]
            if unclear:
                comparison.skip(f"gradients of the parameters {unclear}, which are nan in the plain model")
            norms = [child for child in module.modules() if isinstance(child, BatchNormBase)]
            # A layer that changes its buffers, as a spectral norm does, may compute with them.
            couples = apart.draws or bool(generators_in(module.modules()) or apart.buffers or norms)
            evaluated: list[Any] | None = None
            if len(plain.sizes) > 1:
                if self._has_rows and not (training and couples):
                    self._rows.compare(training)
                if training and comparison.is_equal:
                    evaluated = self._evaluated(apart, couples)
            if comparison.is_equal:
                begin = len(comparison.rows)
                if evaluated is not None:  # Before, as the outputs take memory.
                    with in_mode(module, False), torch.no_grad():
                        self._compare_evaluation(evaluated)
                end = len(comparison.rows)
                with in_mode(module, training):
                    self._compare_pipeline(apart)
                # What differs in training is told first.
                comparison.rows += [comparison.rows.pop(begin) for _ in range(begin, end)]

    def _run_apart(self) -> tuple[bool, Run]:
        """Run the plain model on each micro-batch, in training if it can be, or else in evaluation."""
        for training in (True, False):
            try:
                with in_mode(self._module, training):
                    run = self._plain.apart()
                break
            except Exception as error:
                if ran_out_of_memory(error):
                    raise
                if not training:
                    raise _PlainFails(error) from error
                self.comparison.skip(f"training, in which the plain model fails on the sample ({quote(error)})")
        if not self._plain.with_loss:
            self._rows.find_divisors()
        return training, run

    def _evaluated(self, apart: Run, couples: bool) -> list[Any] | None:
        """Compare rows in evaluation, unless the model does there what it does in training; return the outputs."""
        try:
            with in_mode(self._module, False), torch.no_grad():
                run = self._plain.apart(backward=False)
        except Exception as error:
            if couples:
                raise _PlainFails(error) from error
            self.comparison.skip(f"evaluation, in which the plain model fails on the sample ({quote(error)})")
            return None
        self._refuse_nan(run.outputs)
        if self._has_rows and (couples or not all(map(have_equal_tensors, run.outputs, apart.outputs))):
            self._rows.compare(False)
        return list(run.outputs)

    def _refuse_nan(self, outputs: Sequence[Any]) -> None:
        """Refuse outputs that have nan in the plain model, which shows nothing.

        Raises:
            _PlainFails: there are such.
        """
        tensors = self._settings.study.splitter.tensors
        inputs = chain(*[tensors(part).items() for part in self._plain.batch.parts])
        known = chain(inputs, self._module.named_parameters(), self._module.named_buffers())
        with unobserved():
            named = [dict(each(output)) for output in outputs]
            for path, tensor in named[0].items():
                found = [has_nan(output[path]) for output in named if path in output]
                if not any(found):
                    continue
                source = next((f", as '{name}' has" for name, value in known if has_nan(value)), "")
                if all(found) or tensor.dim() or source:  # A mean over no labels is nan.
                    raise _PlainFails(nan_error(path, source))

    def state(self, *, is_evaluation: bool = False) -> tuple[Any, ...]:
        """Return what all processes must know of this proof before they run the pipeline."""
        study = self._settings.study
        return self._number, is_evaluation, self._module.training, study.rules, study.divides

    # ----------------------------------------------------------------------------------------------- rules of numbers

    def find_rules(self) -> bool:
        """Find out how numbers of micro-batches are joined, by their values, and compare nothing.

        Returns:
            whether the model takes the mini-batch
        """
        module = self._module
        if self._has_rows or self._plain.batch.given:
            with torch.inference_mode(False), torch.no_grad(), without_compiler(module), suppress(Exception):
                self._rows.find_divisors()
                if self._has_rows:
                    self._rows.compare(False)
                return True
        return False

    def confirm_rules(self, other: SampleProof) -> None:
        """Compare the values of the numbers of another mini-batch by the rules that are known."""
        if self._settings.study.rules and self.comparison.is_equal:
            with torch.inference_mode(False), torch.no_grad(), suppress(Exception):
                other._rows.compare(False)
                self.comparison.rows += other.comparison.rows

    # -------------------------------------------------------------------------------------------------------- pipeline

    def _compare_pipeline(self, apart: Run) -> None:
        settings = self._settings
        paths = {path for output in apart.outputs for path, _ in each(output)}
        unknown = sorted({*settings.may_differ} - paths.union({"loss"}, *settings.study.kinds.values()))
        if unknown:
            raise ValueError(f"may_differ names {unknown}, but the outputs of the model are {sorted(paths)}")
        if settings.loss_fn is None:
            verify_known(apart.outputs[0])
        if self._whole is not None and [*self._plain.outside.take()]:
            raise ValueError(
                "the model trains a tensor that is no parameter of it, which one process has alone: over several "
                "processes, make it an nn.Parameter of a module of the model"
            )
        with self._in_parts():
            gradients, buffers = self.run_pipeline(apart)
        if gradients is not None:
            fault = f"the gradient of {{}} in {{}} is not that of the plain model; {_advise(self._module)}"
            faults = {name: fault.format(name, settings.labels[j]) for name, (j, _) in gradients.items()}
            ours, scaled = {name: one for name, (_, one) in gradients.items()}, lambda k: self._plain.apart(scale=k)
            compare_gradients(self.comparison, apart, scaled, ours, faults)
        said = f"is changed in another way than by the plain model; {_COUNTS_AGAIN}; or {_advise(self._module)}"
        self.comparison.add_named(
            "buffer '{}'", apart.buffers, buffers, f"the buffer '{{}}' {said}", self.comparison.tight
        )

    def run_pipeline(self, apart: Run | None) -> tuple[_Gradients | None, dict[str, Tensor]]:
        """Run the pipeline, and compare its outputs, in the first of several processes.

        Args:
            apart: what the plain model has computed; None in other processes

        Returns:
            the gradients, or None if outputs differ; and the buffers that have changed
        """
        pipeline, settings = self._pipeline, self._settings
        loss = self._plain.loss = self._plain.loss_of(self._plain.batch)
        together, has_last = pipeline.together, pipeline.has_last
        outputs: dict[int, dict[str, Tensor]] = {}
        names, taken = self._plain.names(), None

        def finish(i: int, output: Any, export: Callable[[Tensor], Export] | None) -> None:
            assert export is not None
            if has_last:
                for tensor, grad in self._plain.roots(i, output):
                    export(tensor).add(grad)
                outputs[i] = _dense(output)

        with (
            self._plain.untouched() as changed,
            pipeline.aliased(backward=True, watches=True) as aliases,
            pipeline.at_step(),
        ):
            mini_batch = pipeline.mini_batch_for_proof(self._plain.batch, finish, aliases, self.patience)
            kept, undo = self._kept_by_columns(), list[Callable[[], None]]()
            with self._refusing():
                mini_batch.run_columns_forward(lambda j: undo.extend([one.disturb() for one in kept.get(j, ())]))
            for put_back in reversed(undo):
                put_back()
            if together is not None:
                together.end(mini_batch, None)
            ours = self._of_all(outputs)
            total = self._of_all({"": loss.sum()} if loss is not None and has_last else {})
            if apart is not None:
                where = f"when it leaves {settings.labels[-1]}; {_advise(self._module)}"
                self._compare_outputs(apart.outputs, ours, "", where, self.comparison.tight)
                if apart.loss is not None:
                    fault = "the loss of the pipeline is not that of the plain model"
                    self.comparison.add("loss", apart.loss, total[""], fault, tolerance=self.comparison.tight)
            goes_on = apart is not None and self.comparison.is_equal and bool(apart.gradients)
            if together is not None:
                goes_on = together.processes.gather(goes_on, "whether outputs are equal")[0]
            if goes_on:
                found: _Gradients = {}

                def take(j: int) -> None:
                    # Column by column, so that no more than the gradients of a column take memory. An earlier one adds
                    # to those of a later one if a function runs layers again, as Reformer does.
                    for parameter, grad in aliases.take_of(j):
                        _, before = found.get(names[parameter], (j, None))
                        found[names[parameter]] = j, before if grad is None else combined(before, fingerprint(grad))

                # Gradients of shared parameters are added up over processes first.
                with self._refusing():
                    after = take if together is None else lambda j: None
                    mini_batch.run_columns_backward(after, split=settings.schedule in SPLITTING)
                if together is not None:
                    add_shared(together.doors.users, mini_batch.aliases, together.processes)
                for j in range(len(self._devices)):
                    take(j)
                taken = self._of_all(found)
                taken |= {name: (0, one) for name, one in take_fingerprints(self._plain.outside.take()).items()}
            # After backward, because a layer that runs again there may change its buffers again.
            return taken, self._of_all(changed())

    def _in_parts(self, *, is_evaluation: bool = False) -> AbstractContextManager[None]:
        """Let all processes run the pipeline in a ``with`` block."""
        if self._whole is None:
            return nullcontext()
        return self._whole.in_parts(*self.state(is_evaluation=is_evaluation))

    def _of_all(self, named: dict[K, V]) -> dict[K, V]:
        """Return, in the first process, what all have, by names."""
        return named if self._whole is None else self._whole.processes.collect(named, "what the pipeline has computed")

    def _kept_by_columns(self) -> dict[int, list[KeptAttributes]]:
        """Return what the modules of each column keep, if several columns of this process take given micro-batches."""
        settings, kept = self._settings, dict[int, list[KeptAttributes]]()
        for name, j in settings.doors.items() if self._plain.batch.given else ():
            # One that is called again later has what it has left itself.
            if (settings.processes is None or settings.processes.is_mine(j)) and name not in settings.again:
                kept.setdefault(j, []).append(KeptAttributes(self._module.get_submodule(name)))
        return kept if len(kept) > 1 else {}

    def _compare_evaluation(self, outputs: list[Any]) -> None:
        with self._in_parts(is_evaluation=True):
            ours = self.run_evaluation()
        where = f"in evaluation, with a thread for each device; {_advise(self._module)}"
        self._compare_outputs(outputs, ours, ", in evaluation", where, self.comparison.loose)

    def run_evaluation(self) -> dict[int, dict[str, Tensor]]:
        """Run the pipeline forward, and return the outputs of the micro-batches, in the first process."""
        pipeline, ours = self._pipeline, dict[int, dict[str, Tensor]]()

        def finish(i: int, output: Any, _: Any) -> None:
            if pipeline.has_last:
                ours[i] = _dense(output)

        with self._refusing(), self._plain.untouched(), pipeline.aliased(backward=False) as aliases, pipeline.at_step():
            pipeline.mini_batch_for_proof(
                self._plain.batch, finish, aliases, self.patience, backward=False
            ).run_forward_half()
            return self._of_all(ours)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Refuse a model that fails in the pipeline only, in a ``with`` block."""
        try:
            yield
        except Exception as error:
            if _is_ours(error) or is_of_compiler(error):
                raise
            raise ValueError(
                f"a micro-batch fails in the pipeline ({type(error).__name__}: {error}), but not in the plain model; "
                "perhaps the model keeps state for a later layer, which another micro-batch has changed by then: "
                "return it instead, or give a balance that keeps both in one partition"
            ) from error

    def _compare_outputs(
        self, plain: list[Any], ours: dict[int, dict[str, Tensor]], mode: str, where: str, tolerance: float
    ) -> None:
        for i in range(len(plain)):
            what, output, actual = f"of micro-batch {i}", dict(each(plain.pop(0))), ours.pop(i)
            fault = f"the output '{{}}' {what} is not that of the plain model, {where}"
            self.comparison.add_named(f"'{{}}' {what}{mode}", output, actual, fault, tolerance)


def _is_ours(error: BaseException) -> bool:
    """Return whether an error is raised by this library, and not by a model that goes through it."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_globals.get("__name__", "").startswith("torchgpipe.")


def _dense(output: Any) -> dict[str, Tensor]:
    """Return the tensors in an output by path, as other processes can be told them."""
    return {path: dense(tensor) for path, tensor in each(output)}


_COUNTS_AGAIN = (
    "a layer with a checkpoint of its own changes it again at backward, where micro-batches come in another order: "
    "switch that off, and let pipelined(checkpoint=...) recompute the layer"
)


def _advise(module: nn.Module) -> str:
    return (
        "an operation may have taken or changed a tensor in a way that the pipeline does not see, or the model keeps "
        f"state that another micro-batch changes; print({type(module).__name__}.layout) shows the partitions: give a "
        "balance that keeps what belongs together in one, or return state from one module to the next"
    )
