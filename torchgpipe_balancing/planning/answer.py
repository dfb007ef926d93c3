"""The answer to a question: the alternatives that were found, and what would be with other devices."""

from __future__ import annotations

from dataclasses import dataclass

from torchgpipe_balancing.planning.alternatives import Alternative, Question, problem_of
from torchgpipe_balancing.planning.problem import Outcome

__all__ = ["Answer"]


@dataclass(frozen=True)
class Answer:
    """What was asked for, and what was found.

    Attributes:
        question: what was planned for: the costs, the devices, the mini-batch
        fitting: the ten best alternatives that fit, the chosen one first; those that were run come before others
        misfits: alternatives that do not fit, each with the bytes that devices lack
        without_limits: the seconds of the best step if memory had no limits
        with_more_memory: the seconds of the best step with one GiB more on each device
        with_one_more_device: the seconds of the best step with one more device like the last
    """

    question: Question
    fitting: tuple[Alternative, ...]
    misfits: tuple[tuple[Alternative, tuple[float, ...]], ...]
    without_limits: float
    with_more_memory: float
    with_one_more_device: float

    @property
    def best(self) -> Alternative:
        """The alternative that was chosen."""
        return self.fitting[0]

    def outcome(self, alternative: Alternative | None = None) -> Outcome:
        """Return what an alternative costs, partition by partition, with its simulated step.

        Args:
            alternative: one of ``fitting`` or ``misfits`` (default: the best)
        """
        one = alternative or self.best
        problem = problem_of(self.question, one.schedule, one.chunks)
        assert problem is not None
        return problem.outcome(one.choice)
