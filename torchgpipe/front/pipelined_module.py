"""The class of a pipelined module, made on the fly: that of the user's own with these methods in front of it."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.batch.given import verify_independent
from torchgpipe.batch.inputs import Arguments
from torchgpipe.batch.loss import NO_TARGET
from torchgpipe.front.sample_proof import verify
from torchgpipe.gradients.clip import not_for_norms
from torchgpipe.model.comparison import Comparison
from torchgpipe.model.placement import move_buffers
from torchgpipe.model.settings import verify_chunks
from torchgpipe.pipeline.pipeline import Pipeline
from torchgpipe.processes.stand_in import StandIn
from torchgpipe.schedule import Schedule, program_of, verified
from torchgpipe.spine.door import remove_door, this_thread
from torchgpipe.spine.layout import Layout
from torchgpipe.spine.settings import Settings
from torchgpipe.spine.weights import clip_together, own, stand_ins_of

__all__ = ["ATTRIBUTES", "has_argument", "is_pipelined", "make_pipelined", "runs_of", "verify_fitting"]

#: The attribute of the module with its settings.
_SETTINGS = "_torchgpipe"

#: The attribute with what runs it, which copies and pickles leave out.
_RUNS = "_torchgpipe_runs"

#: What a pipelined module has beside the attributes of its own class.
ATTRIBUTES = ("step", "verify", "clip_grad_norm_", "layout", "unpipelined")


def make_pipelined(module: nn.Module, settings: Settings) -> Pipeline:
    """Give a module its settings and the class of pipelined modules, and return what runs it."""
    vars(module)[_SETTINGS] = settings
    _tell_trainers(module, settings)
    kind: Any = type(module)
    module.__class__ = _subclass(kind)
    runs = runs_of(module)
    assert runs is not None
    runs.prepare()  # Methods beside forward have doors from now on.
    return runs


def is_pipelined(module: nn.Module) -> bool:
    """Return whether a module is pipelined."""
    return _SETTINGS in vars(module)


def runs_of(module: nn.Module) -> Pipeline | None:
    """Return what runs a pipelined module, or None if the module is not pipelined."""
    return module._runs() if isinstance(module, _Pipelined) else None


def _tell_trainers(module: Any, settings: Settings) -> None:
    """Note the devices where trainers look, so that they neither move nor wrap the module."""
    told = _device_map(settings)
    on_accelerators = {device for device in told.values() if device.type != "cpu"}
    if len(on_accelerators) > 1 or (on_accelerators and settings.offload is not None):
        module.hf_device_map = told


def _device_map(settings: Settings) -> dict[str, torch.device]:
    return {name: settings.devices[column] for name, column in settings.doors.items()}


class _Pipelined(nn.Module):
    """The methods of a pipelined module, in front of those of its own class."""

    def _called(self, args: Any, kwargs: Any) -> Any:
        """Run a mini-batch; see `Pipeline.forward`."""
        visitor = this_thread.visitor
        if visitor is not None and visitor.owner is self._runs().identity:  # The model calls itself.
            return self._torchgpipe_forward(*args, **kwargs)
        # For torch.fx, a proxy is in the place of the arguments.
        is_tracing: Callable[[], bool] = vars(torch.jit)["is_tracing"]  # Public, but not exported for types.
        if is_tracing() or torch.compiler.is_exporting() or not isinstance(args, tuple):
            raise RuntimeError(
                "a pipelined model cannot be traced or exported (torch.jit.trace, torch.export, torch.fx, torch.onnx), "
                "as its micro-batches run in threads; call model.unpipelined() first, which gives the plain model back"
            )
        if torch.compiler.is_dynamo_compiling():
            from torchgpipe.devices.uncompiled import uncompiled

            return uncompiled(self._called, args, kwargs)
        return self._runs().forward(args, kwargs)

    @property
    def _pipeline_devices(self) -> list[torch.device]:
        """The devices, for a `GPipe` that has this module as a layer."""
        return _settings_of(self).devices

    def step(self, *args: Any, target: Any = None, scaler: torch.amp.GradScaler | None = None, **kwargs: Any) -> Any:
        """Run a mini-batch forward and backward under the schedule; under :func:`torch.no_grad` only forward.

        Args:
            *args: as for the model
            target: the target of the loss function, if there is one, on any device; see :meth:`GPipe.step`
            scaler: scales the loss before backward; see :meth:`GPipe.step`
            **kwargs: as for the model

        Returns:
            the loss, a tensor without dimensions; if the loss function returns a pair, (loss, values)
        """
        runs = self._runs()
        if "forward" in vars(self) and not hasattr(self, "_original_forward"):  # Accelerate puts an autocast around it.
            raise RuntimeError(
                "the model has got a forward of its own as an attribute since it was pipelined, which a step would "
                "pass by: take it away, del model.forward, or train by loss = model(...) and loss.backward()"
            )
        if scaler is not None and has_argument(self._torchgpipe_forward, "scaler"):
            raise TypeError(
                "step(scaler=) scales the loss, and forward of the model has an argument of the same name; pass that "
                "one by position, and scale the loss in loss_fn"
            )
        try:
            return runs.step(args, target, kwargs, scaler)
        except (TypeError, ValueError) as error:
            if target is None and runs.settings.loss_fn is not None and len(args) > 1:  # The last may be meant for one.
                error.add_note(NO_TARGET)
            raise

    def verify(self, *args: Any, target: Any = None, **kwargs: Any) -> Comparison:
        """Compare the pipeline with the plain model on a mini-batch, and leave nothing behind. ::

            print(model.verify(input_ids, labels=labels))

        The pipeline and the plain model run on the same micro-batches, in training and in evaluation. The table
        compares outputs, changed buffers and the gradients of all parameters. Of the plain model alone, it compares the
        outputs of all rows together with those of the micro-batches, and numbers among them, such as a loss, with their
        gradients: in evaluation, if the model draws random numbers, has batch norms or changes buffers in training.

        Args:
            *args: as for the model
            target: as for :meth:`step`; with a target, the loss function is compared, too
            **kwargs: as for the model

        Returns:
            a table to print; ``is_equal`` says whether the two agree, and ``faults`` lists what differs

        Raises:
            ValueError: a micro-batch fails in the pipeline only.
            RuntimeError: a micro-batch waits for ever, as for a lock.
            Exception: what the plain model raises, with a note.
        """
        runs = self._runs()
        batch = runs.settings.study.splitter.micro_batches(Arguments(args, kwargs), runs.settings.chunks)
        verify_independent(batch.window, "verify")
        return verify(runs, batch, target)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the whole model, as :func:`torch.nn.utils.clip_grad_norm_` does, over all processes.

        Args:
            max_norm: the largest norm of all gradients together; larger gradients are scaled down to it
            norm_type: the type of the norm: 2.0 for the Euclidean one, ``float("inf")`` for the largest absolute value

        Returns:
            the norm before clipping, in every process
        """
        settings = _settings_of(self)
        if settings.processes is None:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return clip_together(self, settings, settings.processes, max_norm, norm_type)

    # Over processes: what a process has of the model is its own tensors; the others are stand-ins.

    def parameters(self, *args: Any, **kwargs: Any) -> Iterator[nn.Parameter]:
        parameters, processes = super().parameters(*args, **kwargs), _settings_of(self).processes
        return parameters if processes is None or processes.size == 1 else not_for_norms(parameters)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return own(super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return own(super().named_buffers(*args, **kwargs))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        for name in [name for name, value in state.items() if isinstance(value, StandIn)]:
            del state[name]
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if _settings_of(self).processes is not None:
            # A stand-in stays, whatever is given for it: nothing, or the tensor of another process.
            named = super().state_dict(keep_vars=True).items()
            given, before = OrderedDict(state_dict), vars(state_dict) if hasattr(state_dict, "__dict__") else {}
            vars(given).update(before)  # The versions of modules, which the loading of some looks at.
            given.update({name: value for name, value in named if isinstance(value, StandIn)})
            state_dict = given
        return super().load_state_dict(state_dict, *args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        for tensor in stand_ins_of(self):  # What all processes must agree on.
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    @property
    def _torchgpipe_forward(self) -> Callable[..., Any]:
        """The forward of the user's own class."""
        return functools.partial(_plain(self).forward, self)

    def _runs(self) -> Pipeline:
        """Return what runs this module, and make it if there is none, as for a copy; a shallow one has another's."""
        runs: Pipeline | None = vars(self).get(_RUNS)
        if runs is None or runs.module is not self:
            runs = vars(self)[_RUNS] = Pipeline(self, _settings_of(self))
        return runs

    @property
    def layout(self) -> Layout:
        """The spine, the partitions, and what crosses their boundaries; printed as a table."""
        return _settings_of(self).layout

    def unpipelined(self) -> Any:
        """Give the module its own class back, and return it; its parameters stay where they are.

        Under ``offload`` they are in host memory, and buffers go there, too.
        """
        processes = _settings_of(self).processes
        if processes is not None:
            raise RuntimeError(
                f"this process has a part of the model only, {processes.place}: save it, by "
                "torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=...) in all processes, and load "
                "it into the plain model, made anew"
            )
        if type(self).__mro__[1] is not _Pipelined:
            raise RuntimeError(
                f"{type(self).__name__} has got another class on top of the pipeline, perhaps by a parametrization or "
                "fully_shard; undo that first"
            )
        for child in self.modules():
            remove_door(child)
        vars(self).pop(_RUNS, None)
        settings = vars(self).pop(_SETTINGS)
        if vars(self).get("hf_device_map") == _device_map(settings):
            del self.hf_device_map
        self.__class__ = _plain(self)
        if settings.offload is not None:
            move_buffers(self, torch.device("cpu"))
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "checkpoint" and not hasattr(self, name):  # It would have no effect.
            raise AttributeError(
                "checkpoint of a pipelined model cannot be set; call unpipelined().to('cpu'), and then "
                "pipelined(..., checkpoint=...)"
            )
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # The pipeline manages the place of parameters and buffers; only their dtype may change.
        settings = _settings_of(self)
        at_home = [torch.device("cpu")] if settings.offload is not None else []
        for device in {*settings.devices, *at_home}:
            probe = torch.empty(0, device=device)
            moved = fn(probe).device
            if moved != probe.device and not moved.type == probe.device.type == "cpu":
                raise TypeError(
                    f"denied to move a pipelined {type(self).__name__}, whose partitions are on "
                    f"{[*map(str, settings.devices)]}"
                    + ", with weights in host memory" * (settings.offload is not None)
                    + ", where they stay: leave this call out, or call unpipelined() first"
                )
        # A class that overrides this method, as that of YOLOv5, may not know of `recurse`.
        applied = super()._apply(fn) if recurse else super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for tensor in stand_ins_of(self):
            tensor.renew_form()
        return applied

    def _replicate_for_data_parallel(self) -> Any:
        # DataParallel calls this method of every module inside, in the caller's thread, before it runs anything.
        raise RuntimeError(
            f"nn.DataParallel cannot be around a pipelined {type(self).__name__}: it would run a copy of the model on "
            "each GPU, where the pipeline already uses several; leave nn.DataParallel out, as a Trainer does if it "
            "gets the pipelined model itself, whose hf_device_map it reads"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        return (_rebuilt, (_plain(self),), *made[2:])

    def extra_repr(self) -> str:
        settings = _settings_of(self)
        devices = [str(partition.device) for partition in settings.layout.partitions]
        said = [super().extra_repr()]
        said += [f"pipelined: balance={settings.layout.balance}, devices={devices}, chunks={settings.chunks}"]
        if settings.offload is not None:
            slots, _, activations = settings.offload
            said += [f"offload={True if activations else 'weights'!r}, slots={slots}"]
        return ", ".join(filter(None, said))


def _setting(name: str, verified: Callable[[Settings, Any], Any]) -> property:
    """Return an attribute that is a setting, unless the module has an attribute of this name itself."""

    def read(module: Any) -> Any:
        own = {**module._parameters, **module._buffers, **module._modules, **vars(module)}
        return own[name] if name in own else getattr(_settings_of(module), name)

    def write(module: Any, value: Any) -> None:
        if name in vars(module):
            vars(module)[name] = value
        else:
            settings = _settings_of(module)
            setattr(settings, name, verified(settings, value))

    return property(read, write)


def verify_fitting(settings: Settings, schedule: Schedule) -> Schedule:
    schedule = verified(schedule)
    program_of(schedule, settings.chunks if callable(schedule) else None, settings.places)
    return schedule


_SETTABLE = {"chunks": lambda _, chunks: verify_chunks(chunks), "schedule": verify_fitting}


def _settings_of(module: nn.Module) -> Settings:
    settings: Settings = vars(module)[_SETTINGS]
    return settings


def _plain(module: nn.Module) -> Any:
    """Return the user's class of a pipelined module."""
    order = type(module).__mro__
    return order[order.index(_Pipelined) + 1]


@functools.cache
def _subclass(kind: Any) -> Any:
    """Return the class of pipelined modules of a class, which looks like that class."""
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": f"Pipelined by torchgpipe: has {', '.join(ATTRIBUTES)}.\n\n{kind.__doc__ or ''}",
        # Trainers read which arguments forward takes. No __wrapped__, which they would call past the pipeline.
        "forward": _forward_like(kind),
        **{method.__name__: method for method in _OF_TRANSFORMERS if hasattr(kind, method.__name__)},
        **{name: _setting(name, verified) for name, verified in _SETTABLE.items() if not hasattr(kind, name)},
    }
    return type(kind)(kind.__name__, (_Pipelined, kind), names)


def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Save the model as its own class does.

    Over several processes, all of them call this. The first one gets the weights of all into host memory, and writes
    the files of the plain model. What does not fit there is for ``torch.distributed.checkpoint``.
    """
    processes, save = _settings_of(self).processes, functools.partial(_plain(self).save_pretrained, self)
    if processes is None:
        return save(save_directory, *args, **kwargs)
    if processes.replica:
        return None
    state = dict(kwargs.pop("state_dict", None) or self.state_dict())
    with processes.all_together("the end of what save_pretrained writes"):
        state = processes.collect(state, "the weights that save_pretrained writes")
        if processes.rank == 0:
            save(save_directory, *args, **{**kwargs, "is_main_process": True, "state_dict": state})


def should_save_on_this_rank(self: Any, is_main_process: bool) -> Any:
    """Return whether save_pretrained writes in this process, where transformers would write in the first one only."""
    is_alone = _settings_of(self).processes is None
    return _plain(self).should_save_on_this_rank(self, is_main_process) if is_alone else is_main_process


#: The methods that replace those of a class that has them.
_OF_TRANSFORMERS = save_pretrained, should_save_on_this_rank


def has_argument(forward: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(forward).parameters


def _forward_like(kind: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._called(args, kwargs)

    forward.__doc__ = kind.forward.__doc__
    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return forward


def _rebuilt(kind: Any) -> Any:
    """Return a new pipelined module without state, for copies and pickles."""
    subclass = _subclass(kind)
    return subclass.__new__(subclass)
