"""No other file reaches a private name of PyTorch, and what no other test would miss does what the packages rely on.

Whatever else is in the file of these names, tests of what needs it fail without it.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import torchgpipe
from torchgpipe.devices import torch_internals as internals

ROOT = Path(torchgpipe.__file__).parent.parent
HOME = ROOT / "torchgpipe" / "devices" / "torch_internals.py"


def test_tensors_are_added_to_each_in_one_call() -> None:
    """Ctrl-C would leave some gradients of a step added, and others not."""
    sums = [torch.ones(2), torch.zeros(3)]
    internals.add_each(sums, [torch.full((2,), 2.0), torch.ones(3)])
    assert [one.tolist() for one in sums] == [[3, 3], [1, 1, 1]]
    assert type(internals.add_each).__name__ == "builtin_function_or_method"


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from imports of the compiler
def test_modes_of_two_threads_end_in_any_order() -> None:
    """A flag of the process stayed set, and code that was compiled within a later mode was compiled anew each time."""
    outer, inner = internals.DispatchMode(), internals.DispatchMode()
    begun, ended = threading.Event(), threading.Event()

    def in_another_thread() -> None:
        with inner:
            begun.set()
            ended.wait(60)

    thread = threading.Thread(target=in_another_thread)
    with outer:
        thread.start()
        begun.wait(60)
    ended.set()
    thread.join()
    assert not is_in_torch_dispatch_mode()


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


def test_the_frame_of_a_thread() -> None:
    """An error could not name the line that a micro-batch waits in."""
    frame: Any = internals.frame_of(threading.get_ident())
    while frame.f_code.co_name != "test_the_frame_of_a_thread":
        frame = frame.f_back
    assert frame.f_globals["__name__"] == __name__


def test_whether_an_error_is_of_the_compiler() -> None:
    """Its errors do not say what a pipeline has to do with them."""
    with pytest.raises(Exception) as raised:
        torch.compile(lambda x: x.sin() if x.sum() > 0 else x, backend="eager", fullgraph=True)(torch.ones(2))
    assert internals.is_of_compiler(raised.value) and not internals.is_of_compiler(RuntimeError())


FILES = [path for package in ("torchgpipe", "torchgpipe_balancing") for path in sorted((ROOT / package).rglob("*.py"))]

#: Names of modules that cannot change quietly, because modules outside PyTorch read and override them.
OF_MODULES = {
    *("_apply", "_buffers", "_load_from_state_dict", "_modules", "_parameters", "_reset_parameters"),
}

#: Names of named tuples, public in spite of the underscore.
OF_TUPLES = {"_asdict", "_fields", "_replace"}

#: Names of ours on classes of users, a method of the Trainer of transformers that trainers override, and the attribute
#: in which Accelerate keeps the forward that it has wrapped.
OF_USERS = {"_drives_forward", "_original_forward", "_prepare_inputs"}


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
    assert not found, f"give these names a plain one in {HOME.relative_to(ROOT)}, with a reason: {found}"


def test_each_name_is_used() -> None:
    """An entry that nothing needs goes."""
    others = "\n".join(path.read_text() for path in FILES if path != HOME)
    assert not [name for name in internals.__all__ if name not in others]
