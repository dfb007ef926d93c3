"""Each private name of PyTorch does what the packages rely on, and no other file reaches one.

When a new release of PyTorch breaks the packages, the failures here say which name it was and what depends on it: a
docstring says what is relied on, and what breaks without it.
"""

from __future__ import annotations

import ast
import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchgpipe
from tests.layers import Apply
from torchgpipe.devices import torch_internals as internals

ROOT = Path(torchgpipe.__file__).parent.parent
HOME = ROOT / "torchgpipe" / "devices" / "torch_internals.py"


class AtBackward(torch.autograd.Function):
    """Calls a function at backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def one() -> Tensor:
    return torch.ones((), requires_grad=True)


def at_backward(call: Callable[[], Any]) -> Tensor:
    """Return a tensor whose backward calls ``call``."""
    result: Tensor = AtBackward.apply(one(), call)
    return result


# ------------------------------------------------------------------------------------------------ the autograd engine


def test_a_pass_has_a_number() -> None:
    """Each backward pass has a number of its own. Without that, what is checked once for each pass is not checked."""
    numbers: list[int] = []
    inner = at_backward(lambda: numbers.append(internals.current_pass()))

    def begin() -> None:
        numbers.append(internals.current_pass())
        inner.backward()
        numbers.append(internals.current_pass())

    at_backward(begin).backward()
    outer, within, again = numbers
    assert outer == again != within
    assert min(numbers) >= 0
    assert internals.current_pass() == -1


def test_a_callback_at_the_end_of_a_pass() -> None:
    """A callback is called when its pass has succeeded. Without that, sums of gradients are dropped too early."""
    events: list[str] = []
    late = at_backward(lambda: events.append("late"))
    first = AtBackward.apply(late, lambda: internals.at_end_of_pass(lambda: events.append("end")))
    first.backward()
    assert events == ["late", "end"]


def test_whether_the_graph_is_kept() -> None:
    """A pass tells whether it keeps its graph. Without that, random states and graphs of cells go too early."""
    kept: list[bool] = []
    x = at_backward(lambda: kept.append(internals.keeps_graph()))
    x.backward(retain_graph=True)
    x.backward()
    assert kept == [True, False]


def test_which_nodes_a_pass_runs() -> None:
    """A pass tells whether it runs a node. Without that, torch.autograd.grad adds to .grad of parameters."""
    runs: list[bool] = []
    wanted, other = one(), one()
    node = (other * 1).grad_fn.next_functions[0][0]
    x = AtBackward.apply(wanted * other, lambda: runs.append(internals.will_run(node)))
    x.backward(retain_graph=True)
    x.backward(retain_graph=True, inputs=[wanted])
    torch.autograd.grad(x, wanted)
    assert runs == [True, False, False]


def test_nodes_are_numbered_in_their_thread() -> None:
    """Autograd nodes have ascending numbers. Without that, a frame cannot tell the column of a tensor."""
    x = one()
    before = internals.next_sequence_number()
    first = x * 2
    then = internals.next_sequence_number()
    second = AtBackward.apply(first, print)
    numbers = [internals.sequence_number(tensor.grad_fn) for tensor in (first, second)]
    assert before <= numbers[0] < then <= numbers[1] < internals.next_sequence_number()


def test_a_pass_from_an_edge() -> None:
    """A pass takes edges as roots. Without that, no cell can be differentiated."""
    x, unused = one(), one()
    roots = (get_gradient_edge(x * 3),)
    keep, create_graph = True, False
    arguments = (roots, (torch.ones(()),), keep, create_graph)
    options = {"allow_unreachable": True}
    assert internals.run_backward(*arguments, (x, unused), accumulate_grad=False, **options) == (3, None)
    assert x.grad is None
    internals.run_backward(*arguments, (), accumulate_grad=True, **options)
    assert x.grad == 3


def test_a_function_applied_directly() -> None:
    """A function can be applied without Function.apply. Without that, no cell can run."""

    class Direct(AtBackward):
        apply = internals.apply_directly

    calls: list[int] = []
    x = one()
    Direct.apply(x, lambda: calls.append(1)).backward()
    assert calls == [1]
    assert x.grad == 1


# ---------------------------------------------------------------------------------------------- the state of a thread


def in_a_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize(
    ("kind", "modes", "push", "pop"),
    [
        (TorchFunctionMode, internals.function_modes, internals.push_function_mode, internals.pop_function_mode),
        (TorchDispatchMode, internals.dispatch_modes, internals.push_dispatch_mode, internals.pop_dispatch_mode),
    ],
    ids=["function", "dispatch"],
)
def test_the_stack_of_modes(kind: Any, modes: Any, push: Any, pop: Any) -> None:
    """The modes of a thread can be listed, pushed and popped. Without that, layers in workers miss the modes."""
    outer, inner = kind(), kind()
    with outer, inner:
        assert modes() == [outer, inner]
        assert in_a_thread(modes) == []
        assert pop() is inner
        assert modes() == [outer]
        push(inner)
        assert modes() == [outer, inner]
    assert modes() == []


def test_a_mode_off_the_stack() -> None:
    """A mode is off the stack for a block, if it is the topmost. Without that, it would see what it does itself."""
    outer, inner = TorchFunctionMode(), TorchFunctionMode()
    with outer, inner:
        with internals.without_function_mode(lambda mode: mode is inner):
            assert internals.function_modes() == [outer]
        with internals.without_function_mode(lambda mode: mode is outer):
            assert internals.function_modes() == [outer, inner]
        with pytest.raises(KeyError), internals.without_function_mode(lambda mode: mode is inner):
            raise KeyError
        assert internals.function_modes() == [outer, inner]
    with internals.without_function_mode(lambda mode: True):
        assert not internals.function_modes()


def test_a_default_device_is_a_function_mode() -> None:
    """A default device is a function mode. Without that, layers in workers miss the default device."""
    with torch.device("meta"):
        (mode,) = internals.function_modes()
    internals.push_function_mode(mode)
    try:
        assert torch.ones(1).is_meta
    finally:
        internals.pop_function_mode()


def test_without_dispatch_modes() -> None:
    """All dispatch modes can be left. Without that, random states cannot be noted under fake tensors."""
    mode = internals.fake_tensor_mode()
    with mode, internals.without_dispatch_modes():
        assert internals.dispatch_modes() == []
        assert torch.ones(1).numpy() == 1


def test_the_hooks_for_saved_tensors() -> None:
    """The topmost hooks for saved tensors are known. Without that, layers in workers save without them."""
    assert internals.saved_tensors_hooks_in_use() is None
    with saved_tensors_hooks(abs, abs):
        with saved_tensors_hooks(round, round):
            assert internals.saved_tensors_hooks_in_use() == (round, round)
        assert internals.saved_tensors_hooks_in_use() == (abs, abs)


def profiled(call: Callable[[Tensor], Tensor]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        call(one())


def in_forward_mode(call: Callable[[Tensor], Tensor]) -> None:
    with torch.autograd.forward_ad.dual_level():
        call(one())


#: What tells what is around a function, what breaks without it, and a call of a function with that around it.
AROUND: list[tuple[Callable[[], bool], str, Callable[[Callable[[Tensor], Tensor]], Any]]] = [
    (internals.transforms_are_active, "transforms fail obscurely", lambda call: torch.func.grad(call)(one())),
    (internals.transforms_are_active, "transforms fail obscurely", lambda call: torch.func.vmap(call)(torch.ones(2))),
    (internals.is_checkpointed, "a checkpoint is unnoticed", lambda call: checkpoint(call, one(), use_reentrant=False)),
    (internals.forward_mode_is_active, "tangents vanish in a pipeline", in_forward_mode),
    (internals.profiler_runs, "its trace has no labels, or each cell pays for them", profiled),
]


@pytest.mark.parametrize(("tells", "breaks", "call_within"), AROUND)
def test_what_is_around_a_function(tells: Callable[[], bool], breaks: str, call_within: Any) -> None:
    seen: list[bool] = []

    def square(x: Tensor) -> Tensor:
        seen.append(tells())
        return x * x

    call_within(square)
    square(one())
    assert seen == [True, False], f"without that, {breaks}"


# ------------------------------------------------------------------------------------------------------------ tensors


def test_tensors_are_added_to_each_in_one_call() -> None:
    """Ctrl-C would leave some gradients of a step added, and others not."""
    sums = [torch.ones(2), torch.zeros(3)]
    internals.add_each(sums, [torch.full((2,), 2.0), torch.ones(3)])
    assert [one.tolist() for one in sums] == [[3, 3], [1, 1, 1]]
    assert type(internals.add_each).__name__ == "builtin_function_or_method"


def test_versions() -> None:
    """A tensor counts changes in place. Without that, a second run may start from other inputs."""
    x = torch.ones(2)
    with torch.inference_mode():
        inference = torch.ones(2)
    before = internals.versions([x, None, inference])
    x.view(-1).mul_(2)
    assert internals.versions([x, None, inference]) == [before[0] + 1, 0, 0]


@pytest.mark.parametrize(
    ("hooks_of", "register"),
    [
        (internals.gradient_hooks, "register_hook"),
        (internals.hooks_behind_accumulation, "register_post_accumulate_grad_hook"),
    ],
)
def test_gradient_hooks(hooks_of: Callable[[Tensor], dict[int, Any]], register: str) -> None:
    """Hooks of a tensor are in a dict that can be changed. Without that, hooks hear parts of a gradient."""
    x, heard = one(), []
    assert not hooks_of(x) and not internals.has_gradient_hooks(x)
    handle = getattr(x, register)(lambda _: heard.append("old"))
    assert internals.has_gradient_hooks(x)
    (key,) = hooks_of(x)
    hooks_of(x)[key] = lambda _: heard.append("new")
    x.backward()
    handle.remove()
    x.backward()
    assert heard == ["new"] and not internals.has_gradient_hooks(x)


def test_memory_is_exchanged_and_hooks_stay() -> None:
    """Two tensors can exchange all but their hooks. Without that, parameters on the meta device lose their hooks."""
    parameter = nn.Parameter(torch.ones(2, device="meta"))
    heard = []
    parameter.register_hook(lambda grad: heard.append("before"))
    parameter.register_post_accumulate_grad_hook(lambda p: heard.append("after"))
    internals.exchange_memory(parameter, nn.Parameter(torch.ones(2)))
    parameter.sum().backward()
    assert torch.equal(parameter, torch.ones(2))
    assert heard == ["before", "after"]


def test_whether_memory_is_shared_and_a_tensor_is_held() -> None:
    """Those who share or hold a tensor are counted. Without that, a gradient on its way is changed in place."""
    tensor, parameter = torch.ones(3), torch.ones(3, requires_grad=True)
    assert not internals.shares_memory(tensor) and not internals.is_shared(tensor)
    view = tensor[None]
    assert internals.shares_memory(tensor) and internals.is_shared(tensor)
    del view
    graphs = [parameter * tensor for _ in range(2)]  # Before PyTorch 2.13, the engine is expected to be one holder.
    assert not internals.shares_memory(tensor) and internals.is_shared(tensor)
    del graphs
    assert not internals.is_shared(tensor)


def test_whether_an_error_is_of_the_compiler() -> None:
    with pytest.raises(Exception) as raised:
        torch.compile(lambda x: x.sin() if x.sum() > 0 else x, backend="eager", fullgraph=True)(torch.ones(2))
    assert internals.is_of_compiler(raised.value)
    assert not internals.is_of_compiler(RuntimeError())


def test_whether_classes_of_tensors_handle_operations() -> None:
    assert internals.classes_handle_operations()
    with internals.handling_operations(False):
        assert not internals.classes_handle_operations()
        with internals.handling_operations(True):
            assert internals.classes_handle_operations()
        assert not internals.classes_handle_operations()


def test_a_parameter_like_another() -> None:
    class Own(nn.Parameter):
        pass

    class Kind(Tensor):
        pass

    for parameter in (nn.Parameter(torch.ones(2)), Own(torch.ones(2)), nn.Parameter(torch.ones(2).as_subclass(Kind))):
        alias = internals.parameter_like(parameter, parameter, requires_grad=True)
        assert type(alias) is type(parameter) and isinstance(alias, nn.Parameter)
        assert alias is not parameter and alias.is_leaf and alias.requires_grad
        assert alias.data_ptr() == parameter.data_ptr()


def test_whether_data_can_move() -> None:
    """It is known where .data can go. Without that, an optimizer trains parameters that the pipeline has left."""
    assert internals.can_move_data(torch.ones(1), torch.device("cpu"))
    assert not internals.can_move_data(torch.ones(1), torch.device("meta"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memories_have_numbers(device: str) -> None:
    """Tensors that share memory are known. Without that, a plan counts no memory of a model on the meta device."""
    one, other = torch.empty(4, device=device), torch.empty(4, device=device)
    assert internals.storage_key(one) == internals.storage_key(one[1:].detach()) != internals.storage_key(other)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_the_memory_of_sparse_tensors_and_within_transforms() -> None:
    """The memory behind a tensor is known. Without that, a model that uses sparse ones or transforms is not watched."""
    x = torch.eye(2)
    for sparse in (x.to_sparse().coalesce(), x.to_sparse_csr()):
        assert internals.memory_of(sparse).data_ptr() == sparse.values().data_ptr()
    seen: list[int] = []
    torch.func.vmap(lambda row: seen.append(internals.memory_of(row).data_ptr()) or row)(x)
    assert [*seen, internals.memory_of(x).data_ptr()] == [x.data_ptr()] * 2


def test_operations_are_seen_below_autograd() -> None:
    """An operation tells what it writes to. Without that, a weight in host memory loses what a forward changes."""
    seen: list[list[Any]] = []

    class Note(internals.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(internals.written(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    x, y = torch.ones(2), torch.ones(2)
    with Note():
        x + y
        x.add_(y)
        torch.add(x, y, out=y)
    assert [len(own) for own in seen] == [0, 1, 1]
    assert seen[1][0] is x and seen[2][0] is y


# ------------------------------------------------------------------------------------------------------------ modules


def test_the_base_of_batch_norms() -> None:
    """All batch norms have one base. Without that, deferred batch norms replace only some of them."""
    kinds = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d]
    assert all(issubclass(kind, internals.BatchNormBase) for kind in kinds)
    assert not issubclass(nn.InstanceNorm1d, internals.BatchNormBase)


def test_nested_containers() -> None:
    """Nested containers are flattened with their paths. Without that, layers cannot return containers."""
    value = {"a": [1, (2, None)]}
    leaves, spec = internals.pytree.tree_flatten(value)
    assert leaves == [1, 2, None]
    assert internals.pytree.tree_unflatten(leaves, spec) == value
    paths = [internals.pytree.keystr(path) for path, _ in internals.pytree.tree_flatten_with_path(value)[0]]
    assert paths == ["['a'][0]", "['a'][1][0]", "['a'][1][1]"]
    assert internals.pytree.tree_leaves(value) == leaves
    assert internals.pytree.tree_map_only(int, str, value) == {"a": ["1", ("2", None)]}


def test_cached_parametrizations_can_be_forgotten() -> None:
    """The cache of parametrizations can be cleared. Without that, checkpointed cells fail within cached()."""
    calls: list[Tensor] = []

    def double(weight: Tensor) -> Tensor:
        calls.append(weight)
        return 2 * weight

    layer = nn.Linear(1, 1)
    parametrize.register_parametrization(layer, "weight", Apply(double))
    with parametrize.cached():
        assert internals.caches_parametrizations()
        calls.clear()
        _ = layer.weight, layer.weight
        internals.forget_parametrizations()
        _ = layer.weight
        assert len(calls) == 2
    assert not internals.caches_parametrizations()


def test_the_data_parallel_wrapper_whose_forward_is_under_way(tmp_path: Path) -> None:
    """The active DistributedDataParallel is known. Without that, gradients in replicas differ."""
    seen: list[Any] = []

    class Look(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            active = internals.active_data_parallel()
            seen.append((active, internals.joins_unevenly(active)))
            return super().forward(x)

    assert internals.active_data_parallel() is None
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapper = DistributedDataParallel(Look(1, 1))
        wrapper(torch.ones(1, 1))
        with wrapper.join():
            wrapper(torch.ones(1, 1))
        with wrapper.join(throw_on_early_termination=True):
            wrapper(torch.ones(1, 1))
    finally:
        dist.destroy_process_group()
    assert seen == [(wrapper, False), (wrapper, True), (wrapper, False)]
    assert internals.active_data_parallel() is None


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_a_module_tells_that_it_has_hooks(kind: str) -> None:
    """A module tells its hooks. Without that, a partition is divided or joined, and its hooks are not called."""
    layer = nn.Linear(2, 2)
    assert not internals.has_call_hooks(layer)
    handle = getattr(layer, f"register_{kind}")(print)
    assert internals.has_call_hooks(layer)
    handle.remove()
    assert not internals.has_call_hooks(layer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from imports of the compiler
def test_a_module_tells_that_it_was_compiled() -> None:
    """Compilers leave marks. Without that, code that cannot stop runs in a step, or CUDA graphs in threads that end."""
    plain = nn.Linear(2, 2)
    assert not (internals.is_compiled(plain) or internals.is_optimized(plain) or internals.uses_cuda_graphs(plain))
    modes = {"reduce-overhead": True, "max-autotune": True, "max-autotune-no-cudagraphs": False, "default": False}
    for mode, cuda_graphs in modes.items():
        layer = nn.Linear(2, 2)
        returned = torch.compile(layer, mode=mode)
        assert internals.is_optimized(returned) and internals.uses_cuda_graphs(returned) is cuda_graphs
        layer.compile(mode=mode)
        assert internals.is_compiled(layer) and not internals.is_optimized(layer)
        assert internals.uses_cuda_graphs(layer) is cuda_graphs
    assert internals.runs_compiled(torch.compile(plain.forward)) and not internals.runs_compiled(plain.forward)
    plain.compile(backend="eager")
    assert internals.is_compiled(plain) and not internals.uses_cuda_graphs(plain)


def test_the_call_of_a_module_is_replaced() -> None:
    """A module runs what takes the place of its call. Without that, frames do not stop where partitions begin."""
    module = nn.Linear(1, 1)
    module.register_forward_hook(lambda *_: "hooked")  # type: ignore[arg-type]
    assert internals.own_call(module) is None
    internals.replace_call(module, lambda x: (x, internals.plain_call(module)(x)))
    x = torch.ones(1)
    assert module(x) == (x, "hooked")
    assert copy.deepcopy(module)(x) == "hooked"
    internals.replace_call(module, None)
    assert module(x) == "hooked"
    module.compile(backend="eager")
    assert internals.own_call(module) is not None


def test_buffers_that_are_saved() -> None:
    """Buffers that are not saved are known. Without that, a buffer on the meta device stays nan."""
    module = nn.Module()
    module.register_buffer("a", torch.ones(1))
    module.register_buffer("b", torch.ones(1), persistent=False)
    assert (internals.is_saved(module, "a"), internals.is_saved(module, "b")) == (True, False)


# -------------------------------------------------------------------------------------------------- several processes


def test_fake_tensors() -> None:
    """Layers run on fake tensors. Without that, the shapes between processes are unknown."""
    mode = internals.fake_tensor_mode()
    with mode:
        output = nn.Linear(2, 3)(mode.from_tensor(torch.ones(4, 2)))
    assert output.shape == (4, 3)
    assert output.device.type == "cpu"


# ----------------------------------------------------------------------------------------------- all are in one file

FILES = [path for package in ("torchgpipe", "torchgpipe_balancing") for path in sorted((ROOT / package).rglob("*.py"))]

#: Names of modules that cannot change quietly, because modules outside PyTorch read and override them.
OF_MODULES = {"_apply", "_buffers", "_load_from_state_dict", "_modules", "_parameters", "_reset_parameters"}

#: Names of named tuples, public in spite of the underscore.
OF_TUPLES = {"_asdict", "_fields", "_replace"}

#: Names of ours on classes of users.
OF_USERS = {"_drives_forward"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Yield what a file defines: functions, classes, variables, and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def private_names_of_others(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """Yield the private names in a file that are not among ``ours``, or that come from torch in any case."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("torchgpipe"):
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if any(map(is_private, f"{node.module}.{alias.name}".split(".")))
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if any(map(is_private, alias.name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner.startswith("torch.") or owner == "torch" or node.attr not in ours:
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value) and name.value not in ours:
                yield ast.unparse(node)


def test_the_reader_finds_private_names() -> None:
    """Without this, a fault in the reader would let everything pass."""
    code = """if True:
        import torch._dynamo
        from torch._C import _autograd
        from torch.nn.modules.batchnorm import _BatchNorm
        torch._C._current_graph_task_id(); tensor._version; getattr(tensor, "_base"); self._own; tensor.__class__
    """
    assert sorted(private_names_of_others(ast.parse(code), {"_own"})) == [
        "getattr(tensor, '_base')",
        "tensor._version",
        "torch._C",
        "torch._C._autograd",
        "torch._C._current_graph_task_id",
        "torch._dynamo",
        "torch.nn.modules.batchnorm._BatchNorm",
    ]


def test_frame_of() -> None:
    frame: Any = internals.frame_of(threading.get_ident())
    while frame.f_code.co_name != "test_frame_of":
        frame = frame.f_back
    assert frame.f_globals["__name__"] == __name__


def test_no_other_file_reaches_a_private_name_of_torch() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    ours = (
        {name for path, tree in trees.items() if path != HOME for name in defined_in(tree)}
        | OF_MODULES
        | OF_TUPLES
        | OF_USERS
    )
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in trees.items()
        if path != HOME
        for name in private_names_of_others(tree, ours)
    }
    assert not found, f"give these names a plain one in {HOME.relative_to(ROOT)}, with a reason and a test: {found}"


def test_each_name_is_tested_and_used() -> None:
    """An entry that nothing needs goes."""
    tests = Path(__file__).read_text()
    others = "\n".join(path.read_text() for path in FILES if path != HOME)
    for name in internals.__all__:
        assert f"internals.{name}" in tests, f"{name} has no test"
        assert name in others, f"{name} is used nowhere"
