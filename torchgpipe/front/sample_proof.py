"""The proof of a pipelined model; see `torchgpipe.proof.proof`.

The pipeline runs column by column: all micro-batches pass the first column before one enters the second. So state that
one column leaves on the model for a later one is always that of another micro-batch, which shows. Numbers that a column
leaves, such as a length, are changed behind it if the caller gives the micro-batches: those of a later mini-batch may
differ in it. In evaluation the pipeline runs once more, with a worker for each device, as it will from then on: what
modules keep for one device at a time, or a lock around a forward, shows there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.batch.given import MicroBatches
from torchgpipe.batch.inputs import Arguments, SplitBatch, resized, window_of
from torchgpipe.batch.outputs import join, verify_known
from torchgpipe.batch.rule import Rule
from torchgpipe.cell.cell import Export
from torchgpipe.devices.torch_internals import is_of_compiler
from torchgpipe.front.proof_plain import PlainSide
from torchgpipe.front.variation import vary_sample
from torchgpipe.gradients.aliases import Aliases
from torchgpipe.model.comparison import Compared, Comparison, difference_of
from torchgpipe.model.fingerprint import Fingerprint, combined, dense, fingerprint
from torchgpipe.model.untouched import Buffers, in_mode, untouched
from torchgpipe.model.values import each
from torchgpipe.pipeline.numbers import compute_shares, joiner, list_rules
from torchgpipe.pipeline.pipeline import Pipeline
from torchgpipe.pipeline.whole import Whole
from torchgpipe.processes.wire import register
from torchgpipe.proof.proof import Number, PlainFails, PlainRun, take_fingerprints, without_zeros
from torchgpipe.run.kept import KeptAttributes
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


def prove(pipeline: Pipeline, sample: Arguments, target: Any = None, *, verifies: bool = True) -> FramesProof:
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
    if window_of(sample) is None and splitter.rows and count > 1:
        rows = splitter.rows if splitter.rows >= 4 else max(4, 2 * splitter.rows)
        sample, target = splitter.resized(sample, rows), resized(target, splitter.rows, rows)
        variations = vary_sample(splitter, sample, settings.study.labels, must_differ=verifies)
    settings.study.rules.clear()
    batches = [[splitter.micro_batches(one, count) for one in alike] for alike in variations]
    return _prove(pipeline, batches, target, verifies=verifies)


def verify(pipeline: Pipeline, batch: SplitBatch, target: Any) -> Comparison:
    """Compare a pipelined model with the plain model on a mini-batch; see `prove`."""
    return _prove(pipeline, [[batch]], target).comparison


def _prove(
    pipeline: Pipeline, variations: list[list[SplitBatch]], target: Any, *, verifies: bool = True
) -> FramesProof:
    """Return the proof on the first mini-batch that the plain model takes; see `prove` and `vary_sample`.

    Raises:
        OthersFail: the first process, which alone runs the plain model, has failed.
    """
    batches, processes = [*chain(*variations)], pipeline.settings.processes
    whole = None if processes is None else Whole(pipeline, processes)
    with nullcontext() if processes is None else processes.all_together("the end of the proof"), whole or nullcontext():
        proofs = [FramesProof(pipeline, batch, target, whole, k) for k, batch in enumerate(batches)]
        if whole is not None and whole.processes.rank:
            return _follow(pipeline, proofs, whole)
        for k, proof in enumerate(proofs):
            if k:
                pipeline.settings.study.rules.clear()
            try:
                if verifies:
                    proof.run()
                    for other in variations[0][k + 1 :]:  # Few labels count, so a rule may fit by chance.
                        proof.confirm_rules(other)
                    break
                if proof.find_rules():
                    break
            except PlainFails as failure:
                if k + 1 == len(proofs):
                    raise failure.error from failure.__cause__
        if whole is not None:
            whole.tell(*proof.state(), proof.comparison.rows, proof.comparison.skipped, proof.differing)
        return proof


def _follow(pipeline: Pipeline, proofs: Sequence[FramesProof], whole: Whole) -> FramesProof:
    """Run the pipeline whenever the first process tells it, and return the proof that it ends with."""
    module, study, devices = pipeline.module, pipeline.settings.study, pipeline.settings.devices
    with torch.inference_mode(False), without_zeros(module), without_compiler(module):
        while True:
            k, is_evaluation, training, study.rules, study.divides, *end = whole.tell()
            proof: FramesProof = proofs[k]
            if end:
                proof.comparison.rows, proof.comparison.skipped, proof.differing = end
                return proof
            grads = torch.set_grad_enabled(not is_evaluation)
            with in_mode(module, training), untouched(module, devices), grads:
                proof.run_evaluation() if is_evaluation else proof.run_pipeline(None)


class FramesProof(PlainSide):
    """The comparison of a pipelined model with the plain model on one mini-batch; see `PlainSide` for the arguments."""

    def run(self) -> Comparison:
        """See `Proof.run`."""
        with without_compiler(self._module):
            return super().run()

    def _run_apart(self) -> tuple[bool, PlainRun]:
        found = super()._run_apart()
        if not self._with_loss:
            self._find_divisors()
        return found

    def state(self, *, is_evaluation: bool = False) -> tuple[Any, ...]:
        """Return what all processes must know of this proof before they run the pipeline."""
        study = self._settings.study
        return self.number, is_evaluation, self._module.training, study.rules, study.divides

    def find_rules(self) -> bool:
        """Find out how numbers of micro-batches are joined, by their values, and compare nothing.

        Returns:
            whether the model takes the mini-batch
        """
        if self._has_rows or self._batch.given:
            with torch.inference_mode(False), torch.no_grad(), without_compiler(self._module), suppress(Exception):
                self._find_divisors()
                if self._has_rows:
                    with in_mode(self._module, False):
                        self._compare_numbers(self._batch)
                return True
        return False

    # ------------------------------------------------------------------------------------------------------------ rows

    def with_numbers(self, i: int | None) -> tuple[Any, dict[str, Number]]:
        try:
            return super().with_numbers(i)
        except Exception as error:
            if i is None:
                self.explain_failure(error, sum(self._sizes))
            raise

    def compare_number(self, path: str, together: Number, apart: Sequence[Number]) -> None:
        rules = list_rules(self._settings, self._batch, path) if self._loss is None else []
        tried = [compute_shares(self._settings, self._batch, rule) for rule in rules] or [[*self._factors.values()]]
        values = [number._replace(gradients=None) for number in apart]
        by_value = [k for k, shares in enumerate(tried) if self.fits(together, values, shares)]
        fitting = [k for k in by_value if self.fits(together, apart, tried[k])]
        k = [*fitting, *by_value, 0][0]
        may_differ = path in self._settings.may_differ
        if len(rules) > 1 and (fitting or (by_value and may_differ)):
            self._settings.study.rules[path] = rules[k]
        if not fitting and may_differ:
            self.differing.append(path)
            return
        joined = torch.stack([number.value * share for number, share in zip(apart, tried[k])]).sum()
        fault = ""
        if not fitting and by_value:
            fault = self._describe_gradient_of(path, self.differing_most(together, apart, tried[k]))
        elif not fitting:
            fault = self._describe_number(path, together, apart, joined)
        name = "loss" if self._loss is not None else f"'{path}'"
        self.comparison.add_number(f"{name}, rows together and apart", together.value, joined, fault)

    def compare_outputs_of_rows(self, together: Any, apart: list[Any], *, training: bool, draws: bool) -> None:
        try:
            whole = joiner(self._settings, self._batch)
            joined = dict(each(join(apart, self._sizes, self._settings.study.kinds[training], whole)))
        except (TypeError, ValueError) as error:
            if self._settings.loss_fn is None and not self._with_loss:
                self.comparison.note("outputs", f"{error} ({self._decisions()})")
            return
        for path, tensor in each(together):
            ours = joined.get(path)
            is_known = tensor.dim() == 0 and tensor.is_floating_point() and not self._with_loss
            if is_known or (draws and ours is not None and ours.shape == tensor.shape):
                continue
            if ours is not None and path in self._settings.may_differ:
                difference, largest = difference_of(tensor, ours)
                if difference > self.comparison.loose * largest:
                    self.differing.append(path)
                continue
            fault, loose = self._describe_coupling(path, tensor, ours), self.comparison.loose
            self.comparison.add(f"'{path}', rows together and apart", tensor, ours, fault, tolerance=loose)

    def _find_divisors(self) -> None:
        """Find out which numbers are divided by ``num_items_in_batch``, which many models accept and ignore."""
        study, (args, kwargs) = self._settings.study, self._batch.parts[0]
        window = MicroBatches([(args, {**kwargs, "num_items_in_batch": count}) for count in (7, 14)])
        proof = FramesProof(
            self._pipeline, study.splitter.micro_batches(Arguments((window,), {}), 2), None, self._whole
        )
        with torch.no_grad(), in_mode(self._module, False), suppress(Exception):  # It may not take this argument.
            inspect.signature(self._model._torchgpipe_forward).bind_partial(num_items_in_batch=7)
            (_, of_seven), (_, of_fourteen) = proof.with_numbers(0), proof.with_numbers(1)
            for path, number in of_seven.items():
                study.divides[path] = self.fits(number, [of_fourteen[path]], [2.0])

    def confirm_rules(self, batch: SplitBatch) -> None:
        """Compare the values of numbers of another mini-batch by the rules that are known."""
        if self._settings.study.rules and self.comparison.is_equal:
            with torch.inference_mode(False), torch.no_grad(), in_mode(self._module, False), suppress(Exception):
                self.comparison.rows += self._compare_numbers(batch)

    def _compare_numbers(self, batch: SplitBatch) -> list[Compared]:
        """Compare the values of the numbers of a mini-batch alone, and find their rules if these are not known."""
        before, sizes, comparison = self._batch, self._sizes, self.comparison
        self._batch, self._sizes, self.comparison = batch, batch.sizes, Comparison(self._settings.study.epsilon)
        try:
            parts = [self.with_numbers(i)[1] for i in range(len(self._sizes))]
            for path, number in self.with_numbers(None)[1].items():
                self.compare_number(path, number, [part[path] for part in parts if path in part])
            return self.comparison.rows
        finally:
            self._batch, self._sizes, self.comparison = before, sizes, comparison

    # -------------------------------------------------------------------------------------------------------- pipeline

    def compare_pipeline(self, apart: PlainRun) -> None:
        settings = self._settings
        paths = {path for output in apart.outputs for path, _ in each(output)}
        unknown = sorted({*settings.may_differ} - paths.union({"loss"}, *settings.study.kinds.values()))
        if unknown:
            raise ValueError(f"may_differ names {unknown}, but the outputs of the model are {sorted(paths)}")
        if settings.loss_fn is None:
            verify_known(apart.outputs[0])
        if self._whole is not None and [*self._outside.take()]:
            raise ValueError(
                "the model trains a tensor that is no parameter of it, which one process has alone: over several "
                "processes, make it an nn.Parameter of a module of the model"
            )
        with self._in_parts(), self._untouched():
            gradients, buffers = self.run_pipeline(apart)
        if gradients is not None and apart.gradients is not None:
            faults = [(name, ours, self._describe_gradient(j, name)) for name, (j, ours) in gradients.items()]
            self.compare_gradients(apart.gradients, faults)
        said = f"is changed in another way than by the plain model; {_COUNTS_AGAIN}; or {_advise(self._module)}"
        self.compare_named("buffer '{}'", apart.buffers, buffers, f"the buffer '{{}}' {said}", self.comparison.tight)

    def run_pipeline(self, apart: PlainRun | None) -> tuple[_Gradients | None, dict[str, Tensor]]:
        """Run the pipeline, and compare its outputs, in the first of several processes.

        Args:
            apart: what the plain model has computed; None in other processes

        Returns:
            the gradients, or None if outputs differ; and the buffers that have changed
        """
        pipeline, settings = self._pipeline, self._settings
        loss = self._loss = self._loss_of(self._batch)
        together, has_last = pipeline.together, self._has_last()
        outputs: dict[int, dict[str, Tensor]] = {}
        names, taken = self.names(), None

        def finish(i: int, output: Any, export: Callable[[Tensor], Export] | None) -> None:
            assert export is not None
            if has_last:
                for tensor, grad in self.roots(i, output):
                    export(tensor).add(grad)
                outputs[i] = _dense(output)

        with (
            pipeline.aliased(backward=True, watches=True) as aliases,
            nullcontext() if together is None else together.processes.at_step(),
        ):
            buffers = Buffers(self._module)
            mini_batch = pipeline.mini_batch_for_proof(self._batch, finish, aliases, self.patience)
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
            goes_on = apart is not None and self.comparison.is_equal and apart.gradients is not None
            if together is not None:
                goes_on = together.processes.gather(goes_on, "whether outputs are equal")[0]
            if goes_on:
                gradients = _ColumnGradients(aliases, names)
                # Gradients of shared parameters are added up over processes first.
                after = gradients.take_column if together is None else lambda j: None
                with self._refusing():
                    mini_batch.run_columns_backward(after, split=settings.schedule in SPLITTING)
                if together is not None:
                    add_shared(together.users, mini_batch.aliases, together.processes)
                    for j in range(len(self._devices)):
                        gradients.take_column(j)
                taken = self._of_all(gradients.take())
                taken |= {name: (0, one) for name, one in take_fingerprints(self._outside.take()).items()}
            # After backward, because a layer that runs again there may change its buffers again.
            return taken, self._of_all(buffers.changed())

    def _has_last(self) -> bool:
        """Return whether this process has the last column."""
        processes = self._settings.processes
        return processes is None or processes.is_mine(len(self._devices) - 1)

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
        for name, j in settings.doors.items() if self._batch.given else ():
            # One that is called again later has what it has left itself.
            if (settings.processes is None or settings.processes.is_mine(j)) and name not in settings.again:
                kept.setdefault(j, []).append(KeptAttributes(self._module.get_submodule(name)))
        return kept if len(kept) > 1 else {}

    def compare_evaluation(self, outputs: list[Any]) -> None:
        with self._in_parts(is_evaluation=True):
            ours = self.run_evaluation()
        where = f"in evaluation, with a thread for each device; {_advise(self._module)}"
        self._compare_outputs(outputs, ours, ", in evaluation", where, self.comparison.loose)

    def run_evaluation(self) -> dict[int, dict[str, Tensor]]:
        """Run the pipeline forward, and return the outputs of the micro-batches, in the first process."""
        pipeline, has_last, ours = self._pipeline, self._has_last(), dict[int, dict[str, Tensor]]()

        def finish(i: int, output: Any, _: Any) -> None:
            if has_last:
                ours[i] = _dense(output)

        with (
            self._refusing(),
            pipeline.aliased(backward=False) as aliases,
            nullcontext() if pipeline.together is None else pipeline.together.processes.at_step(),
        ):
            pipeline.mini_batch_for_proof(
                self._batch, finish, aliases, self.patience, backward=False
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
            self.compare_named(f"'{{}}' {what}{mode}", output, actual, fault, tolerance)

    # ---------------------------------------------------------------------------------------------------------- faults

    def _describe_coupling(self, path: str, whole: Tensor, joined: Tensor | None) -> str:
        shape = f"of shape {tuple(whole.shape)} for {sum(self._sizes)} rows"
        if joined is not None and joined.shape != whole.shape:
            shape += f", and {tuple(joined.shape)} joined from micro-batches of {self._sizes} rows,"
        return (
            f"the output '{path}' {shape} is not what the rows apart give: the rows are coupled, as by x.mean(0), an "
            f"attention over rows or a contrastive loss, and cannot be split; or {self._remedy()} ({self._decisions()})"
            + f"; or it is random in evaluation, too: may_differ=['{path}'] lets it differ, with a warning"
            * self._draws
        )

    def _describe_number(self, path: str, together: Number, apart: Sequence[Number], joined: Tensor) -> str:
        sizes = self._sizes
        whole, parts = _show_number(together.value), " and ".join([_show_number(part.value) for part in apart])
        said = f"the output '{path}' of {sum(sizes)} rows is {whole}, and that of the rows apart {parts}, joined "
        said += _show_number(joined)
        if self.fits(together, apart, [1.0] * len(apart)):
            return f"{said}; it is a sum: give reduce='sum'"
        if self.fits(together, apart, [size / sum(sizes) for size in sizes]):
            return f"{said}; it is a mean over rows: leave out reduce, or give weight=lambda arguments: rows"
        return (
            f"{said}; if it is a weighted mean, as over tokens or classes, give weight=, which returns that of a "
            "micro-batch; else the rows are coupled, as by a contrastive loss or the balancing of experts, and it "
            f"cannot be split; may_differ=['{path}'] lets it differ, with a warning"
        )

    def _describe_gradient_of(self, path: str, name: str) -> str:
        chunks = self._settings.chunks
        return (
            f"the gradient of {name} does not follow that of the output '{path}': the rows are "
            "coupled, or a torch.autograd.Function, as for an auxiliary loss, adds a gradient of its own, which would "
            f"count once for each micro-batch, {chunks} times; let it add 1/{chunks} of that, and give "
            f"may_differ=['{path}'], or add the auxiliary loss to '{path}' instead"
        )

    def _describe_gradient(self, j: int, name: str) -> str:
        where = self._settings.labels[j]
        return f"the gradient of {name} in {where} is not that of the plain model; {_advise(self._module)}"


class _ColumnGradients:
    """The gradients of the pipeline, taken column by column, so that no more than those of a column take memory.

    Args:
        aliases: have the gradients
        names: the names of parameters
    """

    def __init__(self, aliases: Aliases, names: Mapping[Tensor, str]) -> None:
        self._aliases, self._names = aliases, names
        #: By the name of a parameter, its first column and its gradient.
        self._taken: _Gradients = {}

    def take_column(self, j: int) -> None:
        """Take the gradients of the parameters whose first column is ``j``."""
        for parameter, grad in self._aliases.take_of(j):
            self._taken[self._names[parameter]] = j, None if grad is None else fingerprint(grad)

    def take(self) -> _Gradients:
        """Return all gradients.

        The backward of an earlier column adds to those of a later one if a function runs layers again, as Reformer
        does.
        """
        for parameter, grad in zip(self._aliases.trained, self._aliases.take()):
            if grad is not None:
                j, before = self._taken[self._names[parameter]]
                self._taken[self._names[parameter]] = j, combined(before, fingerprint(grad))
        return self._taken


def _is_ours(error: BaseException) -> bool:
    """Return whether an error is raised by this library, and not by a model that goes through it."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_globals.get("__name__", "").startswith("torchgpipe.")


def _dense(output: Any) -> dict[str, Tensor]:
    """Return the tensors in an output by path, as other processes can be told them."""
    return {path: dense(tensor) for path, tensor in each(output)}


def _show_number(tensor: Tensor) -> str:
    return f"{tensor.detach().item():.6g}"


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
