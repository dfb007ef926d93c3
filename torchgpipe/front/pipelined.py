"""Pipelining any module, in place: the module stays the user's own object, of a class that is made on the fly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import nn

from torchgpipe.batch.given import MicroBatches, verify_independent
from torchgpipe.batch.inputs import Arguments, arguments_of
from torchgpipe.batch.loss import NO_LOSS_FUNCTION, verify_loss
from torchgpipe.devices.device import canonical_device, default_device, working_devices
from torchgpipe.devices.links import verify_links
from torchgpipe.devices.memory import bytes_of, ran_out_of_memory
from torchgpipe.devices.torch_internals import is_optimized, own_call, runs_compiled
from torchgpipe.devices.typing import Device
from torchgpipe.front.pipelined_module import (
    ATTRIBUTES,
    has_argument,
    is_pipelined,
    make_pipelined,
    runs_of,
    verify_fitting,
)
from torchgpipe.front.sample_proof import prove
from torchgpipe.gpipe import GPipe
from torchgpipe.gradients.aliases import weights_of
from torchgpipe.model.settings import verify_chunks, verify_names, verify_number
from torchgpipe.offload.verify import verify_fits, verify_home, verify_offload
from torchgpipe.pipeline.pipeline import Pipeline
from torchgpipe.pipeline.together import checksum_of_values
from torchgpipe.processes.processes import Processes
from torchgpipe.schedule import Schedule, verified
from torchgpipe.schedule.programs import APART, usual
from torchgpipe.spine.arrange import arrange
from torchgpipe.spine.move import move
from torchgpipe.spine.sample import Study
from torchgpipe.spine.settings import Settings, iterate_tensors
from torchgpipe.spine.weights import begin_alike, keep_own

__all__ = ["pipelined", "pipelined_apart", "runs_of", "verify_module"]

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=nn.Module)

#: How many partitions a device has under ``offload``, unless ``partitions`` says it.
_PARTITIONS_EACH = 8

#: The arguments that must be the same in all processes.
_ALIKE = ["chunks", "partitions", "balance", "schedule", "checkpoint", "no_chunk", "reduce", "verify", "gather"]


class _Apart(NamedTuple):
    """A sample of `pipelined_apart`, and what it has shown, if it ran before."""

    sample: Any
    studied: Study | None


def pipelined(
    module: M,
    sample: Any,
    *,
    chunks: int | None = None,
    devices: Iterable[Device] | None = None,
    partitions: int | None = None,
    balance: str | Sequence[int] | Mapping[str, int] | Mapping[str, str] = "time",
    schedule: Schedule | None = None,
    loss_fn: Callable[..., Any] | None = None,
    weight: Callable[..., Any] | None = None,
    reduce: str | None = None,
    no_chunk: Collection[str] = (),
    checkpoint: bool | Collection[str] = (),
    verify: bool | Collection[str] = True,
    may_differ: Collection[str] = (),
    target: Any = None,
    offload: bool | Literal["weights"] = False,
    slots: int | Sequence[int] = 2,
    pin: int | Sequence[int | None] | None = None,
    mesh: DeviceMesh | None = None,
    timeout: timedelta | None = None,
    gather: bool = False,
) -> M:
    """Pipeline any module over several devices, in place. ::

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])

            def forward(self, x):
                for block in self.blocks:
                    x = x + block(x).relu()
                return x

        model, sample = Model(), torch.randn(2, 8)
        torchgpipe.pipelined(model, sample, chunks=4, loss_fn=lambda output, _: output.mean())
        model(torch.randn(16, 8)).sum().backward()  # the loop does not change
        loss = model.step(torch.randn(16, 8))  # or: forward and backward

    The module's own forward runs unchanged, once for each micro-batch, in a thread that stops where a partition begins.
    Outputs and gradients equal those of the plain module, run micro-batch by micro-batch. The sample proves it, or the
    model is refused. The module stays the object that it is: its class, names, ``state_dict`` and parameters are the
    user's. It gains five attributes: ``step``, ``verify``, ``clip_grad_norm_``, ``layout`` and ``unpipelined``.
    ``model.verify(...)`` compares another mini-batch with the plain module, and returns a
    :class:`~torchgpipe.model.comparison.Comparison`.

    Args:
        module: the model; its parameters are moved to their devices
        sample: the arguments of one micro-batch, of any number of rows: a tuple, a dict, or (tuple, dict); or
            :class:`MicroBatches`, best two that differ: then mini-batches are never split, and the first shows what the
            model calls
        chunks: the number of micro-batches to split a mini-batch into, as :func:`torch.chunk` does; without use where
            the sample is :class:`MicroBatches`
        devices: the device of each partition (default: all accelerators of the machine, or a partition for each core)
        partitions: the number of partitions (default: one for each device, or under ``offload`` up to eight)
        balance: ``'time'``, ``'parameters'`` or ``'size'``: what to balance; or the number of parts of the spine in
            each partition; or a dict from names of modules to their partitions, or to devices as in a ``device_map``;
            a part that is not named joins the part before it
        schedule: for ``step``; see :class:`GPipe` (default: ``'1F1B'``, or under ``offload`` ``'LayerMajor'``)
        loss_fn: for ``step``, takes the output and the target of a micro-batch, and returns the loss, or a pair of the
            loss and other values; see :class:`GPipe` (default: the output's own ``loss``, or the number that the output
            is or begins with)
        weight: takes the target of a micro-batch, or a dict of its arguments where a step is given no target, and
            returns the weight of its loss in the mean; without ``loss_fn``, of all numbers that the model returns
            (default: its labels that count, or its rows)
        reduce: ``'mean'`` or ``'sum'``: how numbers that micro-batches return, such as losses, are joined (default: as
            ``loss_fn`` says, if it is one of PyTorch, or else the weighted mean; for numbers that the model returns,
            the rule by which the sample gives what all rows give at once: a mean over labels or rows, or the sum)
        no_chunk: names of arguments that every micro-batch gets whole; ``'target'`` is the target of ``step``
        checkpoint: names of modules that keep only their inputs, and run again at backward; True or ``'always'`` for
            all of the spine, False or ``'never'`` for none (default: none, or under ``offload`` all)
        verify: whether to run the sample, varied where its rows are equal, through the pipeline and the plain module,
            in training and in evaluation, and compare outputs, changed buffers and the gradients of all parameters; and
            in the plain module, all rows together with those of the micro-batches. What cannot be compared is a
            :class:`UserWarning`. Names stand for True and ``may_differ``
        may_differ: the names of outputs, such as a loss that balances experts over the batch, that may differ between
            rows together and rows apart, with a warning
        target: the target of the sample, with which ``verify`` compares the loss of ``loss_fn``, too
        offload: whether parameters stay in host memory: those of a partition are on its device only while it
            computes, so a model may be larger than all devices. What recomputation keeps waits in host memory,
            too; with ``'weights'``, on the devices
        slots: under ``offload``, the partitions whose parameters have room on a device at a time; or a list of one
            number for each device, in the order of ``devices``
        pin: under ``offload``, the bytes of parameters that may be pinned in host memory, for all devices together or a
            list as above (default: half of the memory that is free), which CUDA copies beside the computation
        mesh: the processes, (stages,) or (replicas, stages): each makes the same model, best on the meta device, and
            keeps the weights of its own partitions (default: this process alone). ``devices`` are those of this
            process, and partitions go round the processes. ``parameters()`` and ``state_dict()`` are those of this
            process, so all processes save them, with ``torch.distributed.checkpoint`` or ``save_pretrained``;
            ``load_state_dict`` takes them or those of the whole model. Clip gradients with ``model.clip_grad_norm_``,
            as the function of PyTorch would take the norm of one process
        timeout: how long a process waits for another (default: that of the process group)
        gather: whether all processes get the outputs of the model; if not, they get numbers, such as a loss, and
            stand-ins without values for other tensors

    Returns:
        ``module``

    Raises:
        TypeError: ``module`` cannot be pipelined, or an argument has another type.
        ValueError: the module has nothing to split, an argument does not fit, or the pipeline does not compute what the
            plain module computes; the error names the first tensor that differs.
        RuntimeError: a micro-batch waits for ever, as for a lock, and the error names the line; or the forward does
            what no pipeline can.
        Exception: what the plain module raises on the sample, with a note.
    """
    verify_module(module)
    apart = isinstance(sample, _Apart)
    sample, studied = sample if apart else (sample, None)
    window = sample if isinstance(sample, MicroBatches) else arguments_of(sample).window
    verify_independent(window, "the sample of pipelined")
    if chunks is None and window is None:
        raise TypeError(
            "pipelined needs chunks=, the number of micro-batches that a mini-batch is split into; or give the sample "
            "as torchgpipe.MicroBatches([...]), if mini-batches are never split"
        )
    count = len(window or ()) if chunks is None else verify_chunks(chunks)
    schedule = verified(schedule if schedule is not None else usual(offload=bool(offload)))
    limits = verify_offload(offload, slots, pin)
    if offload:
        verify_home(module.named_parameters())
        # All micro-batches pass a partition before the next one, so all their activations would be kept.
        checkpoint = True if isinstance(checkpoint, tuple) and not checkpoint else checkpoint
    verify_loss(loss_fn, weight, reduce)
    if target is not None and loss_fn is None:
        raise ValueError(NO_LOSS_FUNCTION)
    whole = verify_names("no_chunk", no_chunk)
    partitions = None if partitions is None else verify_number("partitions", partitions)
    balance, devices = _by_numbers(balance, devices)
    processes = None if mesh is None else Processes(mesh, timeout)
    if offload and processes is not None:
        raise ValueError("offload= is for one process; over several, leave it out, and give more processes")
    rounds = _PARTITIONS_EACH if offload else 1
    places, fixed = _devices(processes, devices, partitions, balance, rounds=rounds)
    arguments = arguments_of(sample if window is None else window[0])
    with nullcontext() if processes is None else processes.all_together("the study of the sample"):
        if processes is not None:
            given = [arguments] if window is None else [*map(arguments_of, window)]
            own = locals()
            alike = {name: own[name] for name in _ALIKE}
            alike = {name: repr(sorted(one) if isinstance(one, Set) else one) for name, one in alike.items()}
            processes.verify_alike({**alike, "sample": checksum_of_values(given)})
        settings = arrange(
            module,
            arguments,
            places,
            fixed=fixed,
            balance=balance,
            no_chunk=[name for name in whole if name != "target" or has_argument(module.forward, name)],
            checkpoint=checkpoint,
            apart=apart or schedule in APART or bool(offload) or processes is not None,
            studied=studied,
            splits=window is None,
            chunks=count,
            schedule=schedule,
            loss_fn=loss_fn,
            weight=weight,
            reduce=reduce,
            whole_target="target" in whole,
            may_differ=[
                *verify_names("may_differ", may_differ),
                *verify_names("verify", () if isinstance(verify, bool) else verify),
            ],
            offload=limits,
            processes=processes,
            gathers=gather,
        )
    for batch in window or ():
        settings.study.splitter.see(arguments_of(batch))
    if limits is not None:
        verify_fits(_sizes(module, settings), limits[0])
    verify_fitting(settings, schedule)
    if devices is None and limits is None and processes is None and len({*places}) == 1:
        warnings.warn(
            f"torchgpipe.pipelined: {places[0]} is the only device here, so there is one partition, which saves no "
            "weights; give devices= of several, or offload=True where a model is larger than the device",
            stacklevel=2,
        )
    verify_links(settings.devices, 2)
    if processes is not None:
        begin_alike(module, settings, processes)
        keep_own(module, settings, processes)
        processes.begin_equal([tensor for _, _, _, tensor in iterate_tensors(module)])
    with nullcontext() if processes is None else processes.all_together("the weights of this process"):
        move(module, settings)
    runs = make_pipelined(module, settings)
    if not settings.study.on_meta and (verify is not False or (studied is None and settings.study.returns_numbers)):
        try:
            # One micro-batch twice, or no frame would meet another.
            several = window if window is None or len(window) > 1 else MicroBatches([*window, *window])
            proved = arguments if several is None else Arguments((several,), {})
            _prove(runs, proved, target, verifies=verify is not False)
        except BaseException as error:
            if ran_out_of_memory(error):
                error.add_note(
                    "while the sample ran through the plain model and the pipeline, to compare them: give a sample of "
                    "fewer rows or shorter ones, or verify=False, which skips the comparison"
                )
            if processes is None:  # Of several, each has a part only.
                cast(Any, module).unpipelined()
            else:
                processes.fail(error)  # Others may not have failed, and would wait.
            raise
    return module


def pipelined_apart(module: M, sample: Any, *, studied: Study | None = None, **options: Any) -> M:
    """Pipeline a module with every partition as a column of its own, to measure each of them by itself.

    Neighbours on one device are run one by one, which takes longer and changes no result.

    Args:
        module: as for `pipelined`
        sample: as for `pipelined`
        studied: what the sample has shown, so that it does not run again
        **options: as for `pipelined`

    Returns:
        ``module``
    """
    return pipelined(module, _Apart(sample, studied), **options)


def _sizes(module: nn.Module, settings: Settings) -> list[tuple[str, torch.device, int]]:
    """Return the label, the device and the bytes of the weights of each column."""
    weights: list[dict[torch.Tensor, None]] = [{} for _ in settings.devices]
    for parameter, column in weights_of(settings.slots(module)):
        weights[column][parameter] = None
    return list(zip(settings.labels, settings.devices, map(bytes_of, weights)))


def _prove(runs: Pipeline, sample: Arguments, target: Any, *, verifies: bool) -> None:
    """Compare a pipelined module with the plain one on the sample.

    Args:
        runs: what runs the module
        sample: its arguments
        target: the target of its loss function, if that is to be compared
        verifies: whether to refuse what differs; if not, only the rules of its numbers are looked for

    Raises:
        ValueError: the two differ.
    """
    comparison = prove(runs, sample, target, verifies=verifies)
    if verifies and not comparison.is_equal:
        raise ValueError(f"{comparison.faults[0]} (verify=False skips this comparison, and results may be wrong)")
    for message in comparison.told:
        warnings.warn(f"torchgpipe.pipelined: {message}", UserWarning, stacklevel=3)  # the caller of pipelined


def _by_numbers(
    balance: str | Sequence[int] | Mapping[str, Any], devices: Iterable[Device] | None
) -> tuple[str | Sequence[int] | Mapping[str, int], Iterable[Device] | None]:
    """Return a balance with numbers of partitions, and devices, where the balance has devices, as a device_map has."""
    named = balance if isinstance(balance, Mapping) else {}
    if not named or not all([isinstance(place, (str, torch.device)) for place in named.values()]):
        return balance, devices
    if devices is not None:
        raise TypeError("balance names devices, so devices= has no use; leave one of them out")
    own = {name: canonical_device(device) for name, device in named.items()}
    places = [*dict.fromkeys(own.values())]
    return {name: places.index(device) for name, device in own.items()}, places


def _devices(
    processes: Processes | None,
    devices: Iterable[Device] | None,
    partitions: int | None,
    balance: str | Sequence[int] | Mapping[str, int],
    *,
    rounds: int,
) -> tuple[list[torch.device], bool]:
    """Return the device of each partition, and whether so many partitions were asked for.

    Args:
        processes: the processes, which get to know their partitions; None for this one alone
        devices: as for `pipelined`
        partitions: as for `pipelined`
        balance: as for `pipelined`
        rounds: how often partitions go round the devices if their number is not given
    """
    n, asked_by = partitions, "partitions="
    counts: Any = [*balance.values()] if isinstance(balance, Mapping) else balance
    if not isinstance(counts, str):
        if not isinstance(counts, Sequence) or not all([type(count) is int and count >= 0 for count in counts]):
            raise TypeError(
                "balance must be 'time', 'parameters' or 'size', a list with the number of parts in each partition, or "
                f"a dict from names to the numbers of partitions, but got {balance!r}"
            )
        asked_by = "balance="
        n = n or (1 + max(counts, default=0) if isinstance(balance, Mapping) else len(counts))
    if isinstance(devices, (str, int, torch.device)):
        raise TypeError(
            f"devices must be a list of each partition's device, such as ['cuda:0', 'cuda:1'], but got {devices!r}"
        )
    if devices is not None:
        own = [canonical_device(device) for device in devices]
    else:
        own = working_devices()[:n] if processes is None else [default_device()]
    if not own:
        raise ValueError("devices must name at least one device, but is empty")
    ranks = range(1 if processes is None else processes.size)
    places = [(rank, device) for rank in ranks for device in own]
    if n is not None and (n < 1 or n % len(places)):
        there = f"{len(own)} devices" if processes is None else f"{len(ranks)} processes with {len(own)} devices each"
        raise ValueError(
            f"{n} partition{'s do' if n != 1 else ' does'} not go evenly round {there}, and {asked_by} asks for that; "
            "give a device for each partition, or a multiple of the devices as partitions"
        )
    asked = n is not None or (rounds == 1 and (devices is not None or own[0].type != "cpu"))
    spread = [places[j % len(places)] for j in range(n or rounds * len(places))]
    if processes is not None:
        processes.owners = [rank for rank, _ in spread]
    return [device for _, device in spread], asked or processes is not None


def verify_module(module: Any) -> None:
    """Refuse what cannot be pipelined.

    Raises:
        TypeError: this is no module, or one that is compiled, wrapped or pipelined already.
    """
    if not isinstance(module, nn.Module):
        made = "; make the model first, Model()" if isinstance(module, type) else ""
        raise TypeError(f"module must be an nn.Module, but is {type(module).__name__}{made}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("a ScriptModule has no Python forward to stop; pipeline the module that it was made from")
    if is_optimized(module) or own_call(module) is not None or runs_compiled(module.forward):
        raise TypeError(
            "the whole model is compiled, so there is nothing to stop at; pipeline the plain model, and compile its "
            "blocks: for block in model.layers: block.compile()"
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(f"pipeline the module inside, and then wrap it in {type(module).__name__}")
    if "forward" in vars(module):
        raise TypeError(
            "the module has a forward of its own as an attribute, perhaps from accelerate, which would hide the "
            "pipeline; load the model without device_map, and call pipelined before prepare"
        )
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise TypeError(f"'{name}' is a ScriptModule, which has no Python forward to see; use the plain module")
        if is_pipelined(child) or isinstance(child, GPipe):
            undone = "unwrap()" if isinstance(child, GPipe) else "unpipelined()"
            raise TypeError(
                f"{f'the module {name!r} inside' if name else 'the module'} is a pipeline already; call {undone} first"
            )
    taken = [name for name in ATTRIBUTES if hasattr(module, name)]
    if taken:
        raise TypeError(f"{type(module).__name__} has attributes {taken}, which a pipelined module needs; rename them")
