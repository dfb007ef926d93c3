"""The Trainer of transformers, with a window of gradient accumulation in one step of the pipeline.

The Trainer calls `training_step` with one batch after the other, and its optimizer after the last one of a window. Here
all but the last call only note the batch. So callbacks, logging, clipping, saving and resuming are the Trainer's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from torchgpipe.batch.given import MicroBatches
from torchgpipe.front.pipelined_module import runs_of

__all__ = ["PipelineTrainer"]


class PipelineTrainer(Trainer):  # type: ignore[misc]
    """A Trainer of transformers, for a model that :func:`torchgpipe.pipelined` has pipelined.

    The ``gradient_accumulation_steps`` batches of an optimizer's step are the micro-batches of one ``model.step``. They
    are not split, padded or joined, and may have one row. A window of one batch is split into ``chunks``.

    The loss must be the model's own, and is that of the plain Trainer.

    Args:
        *args: as for the Trainer
        **kwargs: as for the Trainer

    Raises:
        TypeError: the model is not pipelined.
        ValueError: the loss is not the model's own, or the optimizer steps in backward; or there are several processes,
            and the Trainer knows of them, or saves the optimizer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._window: list[Any] = []
        if not hasattr(self.model, "step"):
            raise TypeError(
                f"PipelineTrainer takes a pipelined model, but got {type(self.model).__name__}; call "
                "torchgpipe.pipelined(model, sample) before, or use transformers.Trainer"
            )
        no_use = {
            "compute_loss_func": self.compute_loss_func is not None,
            "label_smoothing_factor": self.label_smoother is not None,
            "compute_loss": type(self).compute_loss is not Trainer.compute_loss,
            f"optim={self.args.optim.value}": "lomo" in self.args.optim,
            f"torchrun, processes: {self.args.world_size}": self.args.parallel_mode.value == "distributed",
        }
        if any(no_use.values()):
            raise ValueError(
                f"PipelineTrainer takes the loss that the model returns, in one process, so it has no use for "
                f"{[name for name, is_set in no_use.items() if is_set]}; leave that out, or use transformers.Trainer, "
                "which gives the pipelined model one batch at a time. A pipeline over several processes is one process "
                "to the Trainer: see 'The Trainer over several processes'"
            )
        runs = runs_of(self.model)
        if runs is not None and runs.settings.processes is not None:
            self._begin_over_processes()

    def _begin_over_processes(self) -> None:
        """Let the Trainer, which knows of one process, clip the gradients of all."""
        if self.args.save_strategy != "no" and not self.args.save_only_model:
            raise ValueError(
                "each process has the optimizer's state of its own parameters, and a Trainer would save all of them to "
                "one file; set save_only_model=True or save_strategy='no', and save the optimizer with "
                "torchgpipe.distributed.Checkpoints"
            )
        self.accelerator.clip_grad_norm_ = self._clip_all

    def _clip_all(self, _parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        self.accelerator.unscale_gradients()
        norm: Tensor = self.model.clip_grad_norm_(max_norm, norm_type)
        return norm

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of a window, and their labels; see the Trainer."""
        self._window = []  # What a callback has interrupted is not trained.
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Note a batch; after the last one of a window, run them all forward and backward.

        Args:
            model: the pipelined model
            inputs: the batch
            num_items_in_batch: the labels of the window, if the model divides its loss by them

        Returns:
            the loss of the window at its last batch, and 0 before
        """
        counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        batch = dict(self._prepare_inputs(inputs))
        self._window.append({**batch, "num_items_in_batch": num_items_in_batch} if counts else batch)
        if len(self._window) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # a schedule-free one
        window, self._window = self._window, []
        # Without a count, the Trainer takes the mean of the losses, whatever they have counted.
        weights = None if counts else [1.0] * len(window)
        args, named = ((), window[0]) if len(window) == 1 else ((MicroBatches(window, weights=weights),), {})
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            loss: Tensor = model.step(*args, scaler=self.accelerator.scaler, **named)
        return loss.to(self.args.device)
