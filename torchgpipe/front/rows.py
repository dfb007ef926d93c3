"""Rows together and rows apart: what the plain model gives for a mini-batch at once, and for its micro-batches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchgpipe.batch.inputs import Arguments
from torchgpipe.batch.outputs import join
from torchgpipe.front.plain import Number, PlainModel
from torchgpipe.model.comparison import difference_of
from torchgpipe.model.untouched import in_mode
from torchgpipe.model.values import each
from torchgpipe.pipeline.numbers import Numbers
from torchgpipe.proof.proof import OF_ROWS, differing_most

__all__ = ["Rows", "have_equal_tensors"]


class Rows:
    """The comparison of rows together with rows apart.

    Args:
        plain: the plain model, with the table
    """

    def __init__(self, plain: PlainModel) -> None:
        self._plain, self._comparison, self._sizes = plain, plain.comparison, plain.sizes
        self._module, self._settings = plain.pipeline.module, plain.pipeline.settings

    def compare(self, training: bool) -> None:
        """Compare the outputs, and the numbers among them with their gradients."""
        comparison, plain = self._comparison, self._plain
        with in_mode(self._module, training):
            parts = [plain.numbers_of(i) for i in range(len(self._sizes))]
            draws = plain.drew
            together, numbers = plain.numbers_of(None)
            self._compare_outputs(together, [output for output, _ in parts], training=training, draws=draws)
            for path, number in numbers.items() if not draws else ():
                apart = [part[path] for _, part in parts if path in part]
                if path:
                    self._compare_number(path, number, apart)
                elif name := self._differing_most(number, apart, [1.0] * len(apart)):
                    comparison.note("gradients, rows together and apart", OF_ROWS.format(name))
            if not comparison.is_equal:
                self._explain_change(training)

    def find_divisors(self) -> None:
        """Find out which numbers are divided by ``num_items_in_batch``, which many models accept and ignore."""
        divides, (args, kwargs) = self._settings.study.divides, self._plain.batch.parts[0]
        given = [Arguments(args, {**kwargs, "num_items_in_batch": count}) for count in (7, 14)]
        other = self._plain.of(replace(self._plain.batch, arguments=given, given=True))
        with torch.no_grad(), in_mode(self._module, False), suppress(Exception):  # It may not take this argument.
            inspect.signature(self._module._torchgpipe_forward).bind_partial(num_items_in_batch=7)
            (_, of_seven), (_, of_fourteen) = other.numbers_of(0), other.numbers_of(1)
            for path, number in of_seven.items():
                divides[path] = self._fits(number, [of_fourteen[path]], [2.0])

    def _fits(self, together: Number, apart: Sequence[Number], shares: Sequence[float]) -> bool:
        """Return whether a number of all rows, and its gradient, are those of micro-batches with these shares."""
        return self._has_value(together, apart, shares) and not self._differing_most(together, apart, shares)

    def _has_value(self, together: Number, apart: Sequence[Number], shares: Sequence[float]) -> bool:
        """Return whether a number of all rows is that of micro-batches with these shares."""
        parts = [float(number.value) * share for number, share in zip(apart, shares) if share]  # Of no labels, nan.
        loose = self._comparison.loose
        largest = max(map(abs, parts), default=0.0)
        return math.isclose(float(together.value), sum(parts), rel_tol=loose, abs_tol=loose * largest)

    def _differing_most(self, together: Number, apart: Sequence[Number], shares: Sequence[float]) -> str:
        """Return the name of the gradient of a number that differs most; '' if none does."""
        parts = [(share / number.scale, number.gradients) for number, share in zip(apart, shares) if share]
        return differing_most(together.gradients, parts, self._comparison.loose)

    def _explain_change(self, training: bool) -> None:
        """Say so if what differs between rows together and apart differs from call to call."""
        plain, comparison, outputs = self._plain, self._comparison, list[Any]()
        with plain.running(self._sizes), torch.no_grad():
            for _ in range(2):
                with plain.drawing_as(0):
                    outputs.append(plain.without_graph(plain.run(0)))
        if not have_equal_tensors(*outputs):
            fault = _CHANGES.format("training" if training else "evaluation")
            comparison.rows = [row._replace(fault=fault) if row.fault else row for row in comparison.rows]

    def _compare_number(self, path: str, together: Number, apart: Sequence[Number]) -> None:
        """Compare a number of all rows with those of the micro-batches, by the rule that fits."""
        settings, comparison = self._settings, self._comparison
        with_loss = self._plain.with_loss
        numbers, indices = Numbers(settings, self._plain.batch), range(len(self._sizes))
        rules = [] if with_loss else numbers.rules(path)
        tried = [[*map(numbers.shares(rule).of, indices)] for rule in rules] or [[number.share for number in apart]]
        by_value = [k for k, shares in enumerate(tried) if self._has_value(together, apart, shares)]
        fitting = [k for k in by_value if not self._differing_most(together, apart, tried[k])]
        k = [*fitting, *by_value, 0][0]
        may_differ = path in settings.may_differ
        if len(rules) > 1 and (fitting or (by_value and may_differ)):
            settings.study.rules[path] = rules[k]
        if not fitting and may_differ:
            self._tell_differing(path)
            return
        joined = torch.stack([number.value * share for number, share in zip(apart, tried[k])]).sum()
        fault = ""
        if not fitting and by_value:
            fault = self._describe_gradient_of(path, self._differing_most(together, apart, tried[k]))
        elif not fitting:
            fault = self._describe_number(path, together, apart, joined)
        name = "loss" if with_loss else f"'{path}'"
        comparison.note(f"{name}, rows together and apart", fault, float(together.value), float(joined))

    def _tell_differing(self, path: str) -> None:
        self._comparison.tell(
            f"{[path]} differ between rows together and rows apart; the pipeline gives what micro-batches give, each "
            "by itself"
        )

    def _compare_outputs(self, together: Any, apart: list[Any], *, training: bool, draws: bool) -> None:
        settings, with_loss, loose = self._settings, self._plain.with_loss, self._comparison.loose
        try:
            scalar = Numbers(settings, self._plain.batch).join
            joined = dict(each(join(apart, self._sizes, settings.study.kinds[training], scalar)))
        except (TypeError, ValueError) as error:
            if settings.loss_fn is None and not with_loss:
                self._comparison.note("outputs", f"{error} ({self._plain.decisions()})")
            return
        for path, tensor in each(together):
            ours = joined.get(path)
            is_known = tensor.dim() == 0 and tensor.is_floating_point() and not with_loss
            if is_known or (draws and ours is not None and ours.shape == tensor.shape):
                continue
            if ours is not None and path in settings.may_differ:
                difference, largest = difference_of(tensor, ours)
                if difference > loose * largest:
                    self._tell_differing(path)
                continue
            fault = self._describe_coupling(path, tensor, ours)
            self._comparison.add(f"'{path}', rows together and apart", tensor, ours, fault, tolerance=loose)

    # ---------------------------------------------------------------------------------------------------------- faults

    def _describe_coupling(self, path: str, whole: Tensor, joined: Tensor | None) -> str:
        plain = self._plain
        shape = f"of shape {tuple(whole.shape)} for {sum(self._sizes)} rows"
        if joined is not None and joined.shape != whole.shape:
            shape += f", and {tuple(joined.shape)} joined from micro-batches of {self._sizes} rows,"
        return (
            f"the output '{path}' {shape} is not what the rows apart give: the rows are coupled, as by x.mean(0), an "
            f"attention over rows or a contrastive loss, and cannot be split; or {plain.remedy()} ({plain.decisions()})"
        )

    def _describe_number(self, path: str, together: Number, apart: Sequence[Number], joined: Tensor) -> str:
        sizes = self._sizes
        whole, parts = _show_number(together.value), " and ".join([_show_number(part.value) for part in apart])
        said = f"the output '{path}' of {sum(sizes)} rows is {whole}, and that of the rows apart {parts}, joined "
        said += _show_number(joined)
        if self._fits(together, apart, [1.0] * len(apart)):
            return f"{said}; it is a sum: give reduce='sum'"
        if self._fits(together, apart, [size / sum(sizes) for size in sizes]):
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


_CHANGES = (
    "the model changes from call to call, in {}: the same rows give other outputs the second time, without a pipeline "
    "either, so micro-batches cannot give what all rows give; switch off what it observes or counts, as by "
    "model.apply(torch.ao.quantization.disable_observer)"
)


def have_equal_tensors(a: Any, b: Any) -> bool:
    """Return whether two outputs have the same tensors."""
    left, right = dict(each(a)), dict(each(b))
    return left.keys() == right.keys() and all([difference_of(left[path], right[path])[0] == 0 for path in left])


def _show_number(tensor: Tensor) -> str:
    return f"{tensor.detach().item():.6g}"
