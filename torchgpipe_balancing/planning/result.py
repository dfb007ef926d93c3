"""A plan: what was chosen, why, and what to do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchgpipe_balancing.measure import undisturbed
from torchgpipe_balancing.planning import picture, text
from torchgpipe_balancing.planning.candidates import Candidate, PlanInput, least_seconds, most_partitions, problem_of
from torchgpipe_balancing.planning.check import Check, config_of, run_check
from torchgpipe_balancing.planning.model_under_test import ModelUnderTest, apply, release_memory
from torchgpipe_balancing.planning.problem import Outcome

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """A plan for a pipeline; print it, draw it, apply it, or check it. Returned by :func:`torchgpipe.plan`.

    Attributes:
        input: what was planned for: the costs, the devices in the order that was chosen, the mini-batch
        fitting: the ten best candidates that fit, the chosen one first; those that were run come before others
        sample: the sample
        usual: the best candidate under 1F1B, with which the chosen one is compared; None if that does not fit
        target: the target for the sample, if there was one
        options: further arguments of the pipeline
    """

    input: PlanInput
    fitting: tuple[Candidate, ...]
    sample: Any = field(repr=False, compare=False)
    usual: Candidate | None = None
    target: Any = field(default=None, repr=False, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def best(self) -> Candidate:
        """The candidate that was chosen."""
        return self.fitting[0]

    @property
    def balance(self) -> list[int]:
        """The number of layers in each partition."""
        return list(self.best.choice.balance)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition."""
        return [torch.device(self.input.devices[place].name) for place in self.best.places]

    @property
    def chunks(self) -> int:
        """The number of micro-batches."""
        return self.best.chunks

    @property
    def schedule(self) -> str:
        """The name of the schedule."""
        return self.best.schedule

    @property
    def recomputed(self) -> list[str]:
        """The names of the layers that are recomputed."""
        return [self.input.costs.layers[k].name for k in sorted(self.best.choice.recomputed)]

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.best.seconds

    @property
    def least_seconds(self) -> float:
        """A time that a step with these layers on these devices cannot be predicted to fall below."""
        return least_seconds(self.input, self.best)

    def outcome(self) -> Outcome:
        """Return what the plan costs, partition by partition, with its simulated step."""
        return problem_of(self.input, self.best).outcome(self.best.choice)

    def apply(self, model: nn.Module, **options: Any) -> Any:
        """Pipeline the model as planned. ::

            devices = ["cuda:0", "cuda:1"]
            plan = torchgpipe.plan(model, sample, batch=16, devices=devices, seconds=0.1)
            model = plan.apply(model, loss_fn=loss_fn)
            loss = model.step(input, target=target)

        Args:
            model: the model that the plan was made for, or one with the same layers
            **options: further arguments of :class:`~torchgpipe.GPipe` or :func:`~torchgpipe.pipelined`; those that the
                plan was made with need not be given again

        Returns:
            a :class:`~torchgpipe.GPipe` if the model is a Sequential; otherwise the model itself, pipelined in place

        Raises:
            ValueError: the model has other layers than those that were planned for.
        """
        layers = [layer.modules for layer in self.input.costs.layers]
        names = {name for name, _ in model.named_modules()}
        missing = [name for modules in layers for name in modules if name not in names]
        count = len(model) if isinstance(model, nn.Sequential) else len(layers)
        if missing or count != len(layers):
            raise ValueError(
                f"this plan is for a model with {len(layers)} layers, '{layers[0][0]}' to '{layers[-1][-1]}', but "
                f"{f'this model has no {missing[0]!r}' if missing else f'this model has {count}'}; plan again for it"
            )
        return apply(model, layers, config_of(self.input, self.best), self.sample, {**self.options, **options})

    def check(self, model: nn.Module, *, steps: int = 3) -> Check:
        """Run a copy of the model as planned, and compare measured with predicted. ::

            devices = ["cuda:0", "cuda:1"]
            plan = torchgpipe.plan(model, sample, batch=16, devices=devices, seconds=0.1)
            print(plan.check(model))

        Memory is what PyTorch has allocated on accelerators; no optimizer runs here, so there are no states of it.

        Args:
            model: the model, not yet pipelined
            steps: the number of steps to measure

        Returns:
            the seconds, and the bytes on accelerators, printed as a table
        """
        most = most_partitions(self.input.schedules, len(self.input.devices))
        with undisturbed(self.devices):
            tested = ModelUnderTest(model, self.sample, self.target, most, self.options)
            if tested.layers != [list(layer.modules) for layer in self.input.costs.layers]:
                raise ValueError("the model has other layers than those that were planned for; plan again for it")
            made = run_check(tested, self.input, self.best, steps)
        del tested
        release_memory(self.devices)
        return made

    def plot(self, path: str | PathLike[str] | None = None) -> str:
        """Draw the planned step: what each device does, and the memory that it holds, over time.

        Args:
            path: the file to write, such as ``'plan.svg'``

        Returns:
            the picture, as SVG
        """
        drawn = picture.draw(self.input, self.outcome())
        if path is not None:
            Path(path).write_text(drawn, encoding="utf-8")
        return drawn

    def __repr__(self) -> str:
        return f"<Plan for {text.describe_plan(self.input, self.best)}>"

    def __str__(self) -> str:
        return text.write_plan(self.input, self.fitting, self.usual, self.outcome())
