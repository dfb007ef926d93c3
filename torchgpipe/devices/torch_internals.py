"""Every private name of PyTorch that the packages use, each with its reason.

A name that begins with an underscore may change in any release of PyTorch. So only this file reaches such names, and
other files import them from here under plain names. Each entry says what needs it, since which release of PyTorch the
name does what is needed (2.0 stands for "2.0 or earlier"), and what could take its place. Tests of what needs an entry
fail without it.

Six names of modules are not wrapped: ``_parameters``, ``_buffers``, ``_modules``, ``_apply``,
``_load_from_state_dict``, and ``_reset_parameters``. Modules outside PyTorch read, define and override them, so PyTorch
cannot change them quietly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, Self, cast

import torch
from torch import Tensor, nn, overrides
from torch.autograd import forward_ad, profiler
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FUSED_ATTENTION",
    "GROUPED_PRODUCT",
    "PLAIN_ATTENTION",
    "READ_VALUE",
    "BatchNormBase",
    "DispatchMode",
    "active_data_parallel",
    "add_each",
    "all_nonzero",
    "apply_directly",
    "at_end_of_pass",
    "attention_on_meta",
    "base_of",
    "caches_parametrizations",
    "call_hooks",
    "can_move_data",
    "classes_handle_operations",
    "current_pass",
    "default_store",
    "disabled_torch_function",
    "dispatch_modes",
    "draws_of_distributions",
    "exchange_memory",
    "fake_tensor_mode",
    "forget_parametrizations",
    "forward_hooks",
    "forward_mode_is_active",
    "frame_of",
    "function_modes",
    "gradient_hooks",
    "handling_operations",
    "has_call_hooks",
    "has_gradient_hooks",
    "hooks_behind_accumulation",
    "is_batched",
    "is_checkpointed",
    "is_compiled",
    "is_of_compiler",
    "is_optimized",
    "is_saved",
    "is_shared",
    "is_wrapper",
    "keeps_graph",
    "make_wrapper",
    "memory_of",
    "named_group",
    "next_sequence_number",
    "own_call",
    "parameter_like",
    "plain_call",
    "pop_dispatch_mode",
    "pop_function_mode",
    "profiler_runs",
    "push_dispatch_mode",
    "push_function_mode",
    "pytree",
    "replace_call",
    "run_backward",
    "runs_compiled",
    "saved_tensors_hooks_in_use",
    "sequence_number",
    "shares_memory",
    "show_call",
    "storage_key",
    "timeout_of",
    "transforms_are_active",
    "uses_cuda_graphs",
    "versions",
    "will_run",
    "without_dispatch",
    "without_dispatch_modes",
    "without_function_mode",
    "written",
]

# ------------------------------------------------------------------------------------------------ the autograd engine

#: Return the number of the backward pass that this thread is in, or -1 outside of backward.
#:
#: What is checked or summed once for each pass is found by this number. Since 2.0. The public
#: `torch.autograd.graph.register_multi_grad_hook` has the same need, and would show another way.
current_pass: Callable[[], int] = torch._C._current_graph_task_id

#: Keep a callback until the backward pass that this thread is in ends, and call it if the pass succeeds.
#:
#: A pass keeps its sums of gradients alive through the callback, so that the sums go with a pass that fails, too. Since
#: 2.0. DistributedDataParallel and FSDP end their passes with it. A node that runs last could take its place for a pass
#: that succeeds.
at_end_of_pass: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

#: Return whether the graph of the backward pass that this thread is in will be kept (``retain_graph=True``).
#:
#: A cell's own graph and the random states for its second run go when the caller's graph goes. Since 2.7 or a little
#: earlier. Without it, both would have to be kept until the output of the pipeline is dropped.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

#: Return whether the backward pass that this thread is in runs a node.
#:
#: It tells ``backward()`` from ``backward(inputs=...)`` and ``torch.autograd.grad``, which must add to no other
#: ``.grad``. Since 2.0. The hooks of `torch.autograd.graph.register_multi_grad_hook` are placed with it. Without it,
#: gradients would always have to be summed beside ``.grad``.
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node

#: Run a backward pass: ``run_backward(roots, grads, keep_graph, create_graph, inputs, allow_unreachable=,
#: accumulate_grad=)``.
#:
#: A cell is differentiated by a pass of its own. The public `torch.autograd.backward` and `torch.autograd.grad` check
#: their arguments first, for faults that cannot occur here, which adds a sixth to the host time of a small cell. With
#: `GradientEdge` as roots since 2.7 or a little earlier. The public functions can take its place.
run_backward: Callable[..., tuple[Tensor | None, ...]] = torch.autograd.Variable._execution_engine.run_backward

#: Apply an autograd function: the attribute ``apply`` of a function's class.
#:
#: The public `torch.autograd.Function.apply` looks for function transforms first, which adds 3 to 4% to the host time
#: of a small cell. Since 2.0. Without this attribute a class has the public one.
apply_directly: Any = vars(torch._C._FunctionBase)["apply"]

#: Return the number that the next autograd node of this thread will get.
#:
#: A frame notes it where a column begins, and `sequence_number` tells the column of any node after that. Since 2.7 or a
#: little earlier. Without it, every operation of a model would have to be seen.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def sequence_number(node: Any) -> int:
    """Return the number of an autograd node among those of its thread; see `next_sequence_number`. Since 2.1."""
    number: int = node._sequence_nr()
    return number


# ---------------------------------------------------------------------------------------------- the state of a thread

#: Return the function modes of this thread, from the outermost. The default device is one of them.
#:
#: A layer runs in the modes of the call of its pipeline, in whichever thread it runs. Since 2.0. A mode's own
#: ``__enter__`` cannot take the place of pushing the mode, because some modes reset what they count there.
function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
push_function_mode: Callable[[Any], None] = overrides._push_mode
pop_function_mode: Callable[[], Any] = overrides._pop_mode

#: Return the dispatch modes of this thread, from the outermost. See `function_modes`.
dispatch_modes: Callable[[], list[Any]] = dispatch._get_current_dispatch_mode_stack
push_dispatch_mode: Callable[[Any], None] = dispatch._push_mode
pop_dispatch_mode: Callable[[], Any] = dispatch._pop_mode

#: Leave all dispatch modes of this thread for a ``with`` block.
#:
#: A mode such as that of fake tensors would take part in copying a generator's state. Since 2.0. Popping the modes one
#: by one could take its place.
without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = dispatch._disable_current_modes


#: Return whether classes of tensors handle operations in this thread, by ``__torch_function__``.
#:
#: A backward that such a tensor handles runs without, and so would a second run of a layer. Since 2.1. Without it, the
#: second run of a layer whose weights are of such a class would compute something else.
classes_handle_operations: Callable[[], bool] = torch._C._is_torch_function_enabled


def handling_operations(enabled: bool) -> AbstractContextManager[Any]:
    """Let classes of tensors handle operations in a ``with`` block, or not; see `classes_handle_operations`."""
    guard: Any = torch._C._EnableTorchFunction if enabled else torch._C.DisableTorchFunctionSubclass
    return guard()  # type: ignore[no-any-return]


#: What a class of tensors has for `__torch_function__` if function modes are to see its operations, and itself is not.
#:
#: A stand-in for a tensor of another process handles operations below autograd. Since 1.11. A method that calls
#: `Tensor.__torch_function__` without subclasses would do the same, for a few microseconds an operation.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl

#: What distributions draw from, beside public functions.
#:
#: Over processes, each would draw its own gamma, beta or Dirichlet numbers between two modules. Since 1.0.
draws_of_distributions: tuple[Any, ...] = (torch._standard_gamma, torch._sample_dirichlet)

#: In a ``with`` block of it, operations change the form of a stand-in itself. Since 2.0.
without_dispatch: Any = torch._C._DisableTorchDispatch


@contextmanager
def without_function_mode(is_it: Callable[[Any], bool]) -> Iterator[None]:
    """Take the topmost function mode off the stack for a ``with`` block, if it is the one that is meant.

    Operations need not even pass it by. Since 2.0. Without it, what a mode does itself would come to the mode again.
    """
    modes = function_modes()
    found = bool(modes) and is_it(modes[-1])
    if found:
        pop_function_mode()
    try:
        yield
    finally:
        if found:
            push_function_mode(modes[-1])


def saved_tensors_hooks_in_use() -> tuple[Any, Any] | None:
    """Return the topmost pair of hooks for saved tensors of this thread, or None.

    A layer saves its tensors through the hooks of the call, in whichever thread it runs. Since 2.8. Without it,
    `torch.autograd.graph.saved_tensors_hooks` around a pipeline would reach layers in the caller's thread only.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def is_checkpointed() -> bool:
    """Return whether a ``torch.utils.checkpoint`` that is not reentrant is around what runs in this thread.

    Since 2.8, by the module of its hooks for saved tensors. Without it, what a checkpoint mixes up in a pipeline would
    fail later, or not at all.
    """
    hooks = saved_tensors_hooks_in_use()
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


#: Return whether a function transform of `torch.func`, such as `vmap` or `grad`, is active in this thread.
#:
#: Transforms have no way through a pipeline's autograd functions, so they are refused with a remedy. Since 2.0.
#: Without it, PyTorch's own errors would have to do.
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor stands for several, as gradients of ``torch.autograd.grad(is_grads_batched=True)`` do.

    A cell is differentiated by an engine call of its own, which knows no such tensors. Since 2.0. Without it, the error
    would be that of PyTorch, which names no way out.
    """
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def forward_mode_is_active() -> bool:
    """Return whether a dual level of `torch.autograd.forward_ad` is entered.

    Tangents have no way through a pipeline's autograd functions, and would vanish. Since 2.0. Unpacking every input
    would tell of those with a tangent.
    """
    return forward_ad._current_level >= 0


def profiler_runs() -> bool:
    """Return whether ``torch.profiler`` runs.

    A label for the profiler costs as much as a small layer, also if the profiler does not run. Since 2.1. Without it,
    labels would have to be an option of the user's.
    """
    return profiler._is_profiler_enabled


# ------------------------------------------------------------------------------------------------------------ tensors


def versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the version of each tensor, which counts changes in place; 0 for None and for inference tensors.

    A second run must find the inputs, parameters and buffers of the first. Since 2.0; `torch.autograd.graph` documents
    the counter, but has no public name for it. Without it, a changed tensor would give other gradients silently.
    """
    try:
        return [0 if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:  # Asking each tensor before would take as long again, in every cell.
        return [0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


#: Add to each tensor of a list the one at its position in another, in place, as one call.
#:
#: Python runs the handler of a signal between two calls. So Ctrl-C at the end of a step comes before all gradients were
#: added, or behind. Since 1.9, and without a public name; an `add_` for each could take its place.
add_each: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_add_


def gradient_hooks(tensor: Tensor) -> dict[int, Callable[[Tensor], Tensor | None]]:
    """Return the hooks that were registered with ``tensor.register_hook``.

    If there are any, changing the dict changes the hooks of the tensor. A hook must hear the gradient of the mini-batch
    and not that of each micro-batch. Since 2.0. There is no public list of hooks; a handle from ``register_hook`` has
    the dict too, as ``handle.hooks_dict_ref()``.
    """
    hooks: Any = tensor._backward_hooks
    return hooks or {}


def hooks_behind_accumulation(tensor: Tensor) -> dict[int, Callable[[Tensor], None]]:
    """Return the hooks that were registered with ``tensor.register_post_accumulate_grad_hook``.

    If there are any, changing the dict changes the hooks of the tensor. Autograd also calls them if no gradient has
    arrived; see `gradient_hooks`. Since 2.1.
    """
    hooks: Any = tensor._post_accumulate_grad_hooks
    return hooks or {}


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether a tensor has hooks that hear its gradient, before or after accumulation.

    Gradients of such a parameter are summed beside ``.grad``; see `gradient_hooks`. Since 2.1.
    """
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def shares_memory(tensor: Tensor) -> bool:
    """Return whether another tensor has the memory of ``tensor``, or a part of it.

    AccumulateGrad makes a gradient that arrives the ``.grad`` of a parameter, and later adds to it in place, although a
    view of the same memory may be on its way to another cell. Since 2.1. Without it, every first gradient of a step
    would have to be copied.
    """
    storage = tensor.untyped_storage()
    # The tensor counts, and so does the object that stands for its storage here.
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


#: What `_use_count` says of a gradient that only the backward of a Function holds; before 2.13, the engine did as well.
_HELD_BY_PYTHON = 1 if torch.__version__ >= "2.13" else 2


def is_shared(tensor: Tensor) -> bool:
    """Return whether something beside the caller's Python code holds ``tensor`` or its memory, such as autograd.

    A gradient on its way to another device may be the sum of a parameter's gradients as well, to which autograd adds in
    place as soon as nobody else holds it. Since 2.3 or a little earlier. Without it, every gradient would be copied on
    its device before it is sent.
    """
    return bool(tensor._use_count() > _HELD_BY_PYTHON) or shares_memory(tensor)  # type: ignore[attr-defined]


def memory_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the memory of a tensor's elements: of a sparse tensor, that of its values.

    Within a function transform, such as `torch.func.vmap`, a tensor has none of its own, but that of a tensor which it
    stands for. Since 2.0. Without it, a model that uses these could not be watched.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    return tensor.untyped_storage()


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def parameter_like(parameter: Tensor, values: Tensor, *, requires_grad: bool) -> Tensor:
    """Return a parameter with the memory of ``values``, and of the class of ``parameter``.

    What stands for a tensor among a parameter's attributes is no parameter, but ``values`` itself.

    `torch.nn.Parameter` makes such a one for classes of tensors, but not for its own subclasses. Since 2.0. Without it,
    a model could have no alias of these.
    """
    kind = type(parameter)
    if not (requires_grad or isinstance(parameter, nn.Parameter)):
        return values
    if not issubclass(kind, nn.Parameter):
        return nn.Parameter(values, requires_grad=requires_grad)
    return Tensor._make_subclass(kind, values, requires_grad)


#: Make a tensor of a class that has a shape, strides, a dtype and a device, and no memory.
#:
#: A stand-in for a tensor of another process is one. Since 1.11, for classes that wrap tensors. A tensor on the meta
#: device could take its place, but autocast goes by the device.
make_wrapper: Any = Tensor._make_wrapper_subclass


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors share as long as they have the same memory.

    A plan counts each memory once, on the meta device as well, where all tensors have the address 0. Since 2.0. On
    other devices ``untyped_storage().data_ptr()`` does the same.
    """
    return int(memory_of(tensor)._cdata)


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a view is a part of; None for one that is no view.

    Parts of a mini-batch share a version, and a view whose base was changed gets another node. Since 2.0. PyTorch has
    no public name for it.
    """
    return tensor._base


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor wraps others, which hold its values, as quantised weights of torchao do. Since 2.1."""
    return dispatch.is_traceable_wrapper_subclass(tensor)


def can_move_data(tensor: Tensor, device: torch.device) -> bool:
    """Return whether ``tensor.data`` can be given memory on another device.

    Not every backend lets it; `torch.nn.Module.to` then makes new parameters. A tensor that wraps others would leave
    them where they are. Since 2.1. Trying it and catching the error could take its place, but for such tensors.
    """
    return not is_wrapper(tensor) and bool(
        torch._has_compatible_shallow_copy_type(tensor, torch.empty(0, dtype=tensor.dtype, device=device))
    )


def exchange_memory(tensor: Tensor, other: Tensor) -> None:
    """Exchange all of two tensors but their identities and the hooks of ``tensor``.

    A parameter on the meta device gets memory, and stays the object that an optimizer has. `torch.utils.swap_tensors`
    exchanges the memory. Hooks are called by the memory, and known by the parameter: assigning the hooks tells the
    new memory of them. Since 2.2 or a little later. Without it, hooks on meta parameters would be lost.

    Raises:
        RuntimeError: something else holds the memory of a tensor, or a weak reference to it.
    """
    hooks, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks, after


# ------------------------------------------------------------------------------------------------------------ modules

# BatchNormBase: the base of all batch norms. `DeferredBatchNorm` takes its parameters and buffers from it, and users'
# own batch norms are recognised by it. Since 2.0. A tuple of the public batch norms could take its place.

# pytree: nested containers and the registration of new kinds. Since 2.4 or a little earlier, when keys were added. The
# package optree does the same.


#: The operation with which Python reads a value. Since 2.0; on the meta device it raises.
READ_VALUE = torch.ops.aten._local_scalar_dense.default

#: Attention by a fused kernel, which has a meta kernel; that of the meta device itself is the plain formula. Since 2.2.
FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
PLAIN_ATTENTION = torch.ops.aten._scaled_dot_product_attention_math

#: The products of a model's experts in one operation, which `FlopCounterMode` does not know. Since 2.8.
GROUPED_PRODUCT = torch.ops.aten._grouped_mm


@contextmanager
def attention_on_meta(computes: Callable[..., Tensor]) -> Iterator[None]:
    """Let a function compute attention on the meta device in a ``with`` block, wherever it is called. Since 2.2.

    A function mode would not see the attention within `torch.nn.functional.multi_head_attention_forward`.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", computes, "AutogradMeta")
        yield


def all_nonzero() -> AbstractContextManager[Any]:
    """Let all elements count as not zero on the meta device in a ``with`` block, where `nonzero` raises. Since 2.5."""
    from torch.fx.experimental import _config

    return cast(Any, _config).patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[no-any-return]


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The base of modes that see each operation below autograd.

    There, weights are brought when they are needed, and reads of those that have left are refused. Since 2.0; the
    methods since 2.6. Function modes do not see functions of autograd. Without `_should_skip_dynamo`, PyTorch would
    import its compiler, which takes seconds. PyTorch's ``__enter__`` notes in a flag of the process that a mode is
    active: where two threads end their modes in another order, it stays set, and compiled code is compiled anew.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Self:
        push_dispatch_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        pop_dispatch_mode()


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation below autograd writes to, given the operation and its arguments.

    The schema of the operation tells; a function of Python has none. Since 2.0. Without it, a weight that a forward
    changes in place would lose the change as soon as the weight leaves its device.
    """
    if not hasattr(func, "_schema"):
        return []
    arguments = {**kwargs, **{argument.name: value for argument, value in zip(func._schema.arguments, args)}}
    return [
        arguments[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in arguments
    ]


def caches_parametrizations() -> bool:
    """Return whether any thread of the process is within `torch.nn.utils.parametrize.cached`.

    All threads share its cache. Since 2.0. Without it, a layer that another thread makes compute its weight once more
    in one of its two runs would save other tensors than in the other run.
    """
    return parametrize._cache_enabled > 0


def forget_parametrizations() -> None:
    """Forget what was computed from parametrized parameters within `torch.nn.utils.parametrize.cached`.

    A weight that a run without a graph has computed cannot be differentiated in a run with one. Since 2.0. Without it,
    a checkpointed pipeline could not run within ``cached()``.
    """
    if parametrize._cache_enabled:
        parametrize._cache.clear()


def has_call_hooks(module: nn.Module) -> bool:
    """Return whether ``module`` has hooks that its call runs, before or after its forward or its backward.

    A partition with hooks runs as a whole: it can be neither divided nor joined. Since 2.0. There is no public list of
    hooks; a partition that notes in ``register_forward_hook`` and its like what is registered could take its place.
    """
    return any(call_hooks(module))


def call_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the hooks of `has_call_hooks`, in the dicts that hold them as long as the module is there."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks that the call of ``module`` runs before and after its forward, in the dicts that hold them.

    An adapter outside of a model may be called by one, and goes to the device of the layer; and a second run must not
    leave those that it has installed. Since 2.0. There is no public list of hooks.
    """
    return module._forward_pre_hooks, module._forward_hooks


def show_call(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Call the hooks of ``module`` behind its forward with arguments and an output; what they return is left out.

    They may keep what a module of another process takes or returns, of which there is a stand-in here. Since 2.0. There
    is no public list of hooks.
    """
    for number, hook in [*module._forward_hooks.items()]:
        # One that reads values fails; the process that has them runs it, too, and tells of errors.
        kwargs: list[Any] = [{}] if number in module._forward_hooks_with_kwargs else []
        with suppress(Exception):
            hook(module, args, *kwargs, output)


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called.

    In a step, each layer of a partition has a seed of its own, but a compiled partition runs as a whole. Since 2.2. A
    flag that `Partition.compile` sets could take its place.
    """
    return getattr(module, "_compiled_call_impl", None) is not None


def is_optimized(module: nn.Module) -> bool:
    """Return whether ``module`` is what ``torch.compile(module)`` returns.

    Such a module has no Python code to stop in. Since 2.0. The class is `torch._dynamo.OptimizedModule`, whose import
    takes longer than that of this package.
    """
    return hasattr(module, "_orig_mod")


def runs_compiled(function: Any) -> bool:
    """Return whether ``function`` is what ``torch.compile(function)`` returns, as a decorator of a forward.

    Such a function has no Python code to stop in. Since 2.0. Without it, such a model would run unpipelined.
    """
    return hasattr(function, "_torchdynamo_orig_callable")


def uses_cuda_graphs(module: nn.Module) -> bool:
    """Return whether ``module`` was compiled into CUDA graphs, as by ``compile(mode="reduce-overhead")``.

    Such graphs are kept for each thread. The configuration is public, the name of the option is that of the default
    backend. In 2.11. The arguments of `Partition.compile` would tell of partitions, but not of layers.
    """
    call = module if is_optimized(module) else getattr(module, "_compiled_call_impl", None)
    configuration = getattr(call, "get_compiler_config", lambda: None)()
    return isinstance(configuration, dict) and bool(configuration.get("triton.cudagraphs"))


def is_of_compiler(error: BaseException) -> bool:
    """Return whether PyTorch's compiler has raised an error.

    Its errors do not say what a pipeline has to do with them. Since 2.0. Importing the classes takes longer than the
    import of this package.
    """
    return type(error).__module__ == "torch._dynamo.exc"


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Return whether the ``state_dict`` of ``module`` has a buffer of its own.

    A buffer on the meta device can only be loaded. Since 2.0. Making a ``state_dict`` would tell as well.
    """
    return buffer not in module._non_persistent_buffers_set


def own_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what `replace_call` or ``module.compile()`` has put in the place of calling ``module``, or None."""
    call: Callable[..., Any] | None = module._compiled_call_impl
    return call


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Return what calling ``module`` does if nothing has replaced it: its hooks and its forward."""
    call: Callable[..., Any] = module._call_impl
    return call


def replace_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let ``module(...)`` run ``call``; None for the module's own hooks and forward.

    A frame must stop before a module is called, in front of the module's hooks and of code that was compiled. A forward
    hook would be compiled with the module, and break its graph. The place is that of ``module.compile()``, and copies
    and pickles leave it out. Since 2.2. A pre-hook and a forward hook could take its place, at that price.
    """
    if call is None:
        vars(module).pop("_compiled_call_impl", None)  # The class has None.
    else:
        module._compiled_call_impl = call


# -------------------------------------------------------------------------------------------------- several processes


def active_data_parallel() -> Any:
    """Return the DistributedDataParallel whose forward is under way in this process, or None.

    Its hooks are at the parameters in C++, where Python cannot see them. Since 2.0, for PyTorch's compiler. Without
    it, the user would have to tell the pipeline of the wrapper.
    """
    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]


def default_store() -> Any:
    """Return the store of the process group, where processes leave words for each other.

    A process says there why it fails, before it closes its connections. Since 2.0. A store that the caller makes and
    passes could take its place.
    """
    return torch.distributed.distributed_c10d._get_default_store()


def named_group(like: Any, name: str, timeout: timedelta, backend: str) -> Any:
    """Return a new group of the processes of another one, under a name that is the same in all of them.

    A function of PyTorch's own wants all processes of a launch for that, or takes a name from how many groups a process
    has now. Since 2.0. Groups that the caller makes and passes could take its place.
    """
    c10d = torch.distributed.distributed_c10d
    ranks = c10d.get_process_group_ranks(like)
    rank = ranks.index(c10d.get_rank())
    group, _ = c10d._new_process_group_helper(
        len(ranks), rank, ranks, c10d.Backend(backend), default_store(), c10d.GroupName(name), timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {global_rank: k for k, global_rank in enumerate(ranks)}
    return group


def timeout_of(group: Any) -> timedelta:
    """Return how long the processes of a group wait for each other.

    Groups beside it, which a pipeline makes for itself, wait as long. Since 2.0. Asking the caller for the timeout once
    more could take its place.
    """
    result: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return result


def fake_tensor_mode() -> Any:
    """Return a mode in which layers run on tensors that have no data.

    It tells the shapes that cross from process to process. Since 2.0. Running the layers on the meta device could take
    its place, for layers that have no device of their own. It is imported here, because its import takes as long as
    that of this whole package.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


# ------------------------------------------------------------------------------------------------------------- Python


def frame_of(ident: int) -> Any:
    """Return the frame that a thread of this number runs, or None.

    An error names the line that a micro-batch waits in. Of Python, documented in spite of its name; `faulthandler`
    prints all threads, to a file only.
    """
    return sys._current_frames().get(ident)
