"""What processes tell each other is plain data: nothing that comes from the store or the network is unpickled."""

from __future__ import annotations

import ast
import pickle
import random
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

import torchgpipe
from tests.distributed.launch import launch
from tests.front.test_processes import FEATURES, Experts
from torchgpipe.processes import messages, wire
from torchgpipe.processes.stand_in import StandIn, form_of
from torchgpipe.processes.wire import pack, unpack
from torchgpipe.spine.abstract import Abstract, abstracted, see


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self._trace,)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Held:
    x: Any
    by: Any = None


def told(value: Any) -> Any:
    return unpack(pack(value))


def test_plain_data_arrives_as_it_was() -> None:
    form = form_of(torch.zeros(2, 3))
    for value in (
        *[None, True, 1, 2.5, float("inf"), "é", 1 + 2j, ..., slice(1, None), torch.Size([2]), torch.bfloat16, form],
        *[[1, (2, [None])], {"a": 1, 3: (True,), (1, 2): {}}, torch.device("cuda:1"), random.getstate()],
    ):
        assert told(value) == value and type(told(value)) is type(value)
    array = torch.arange(6).view(2, 3).t().numpy()  # what a model reads to hand it to scipy
    assert (told(array) == array).all()


@pytest.mark.parametrize(
    "change",
    [
        *[lambda x: x, lambda x: x.t(), lambda x: x[1:, 2:4], lambda x: x.expand(3, 4, 6), lambda x: x[0, 0]],
        *[lambda x: x[:0], lambda x: x > 0, lambda x: x.to(torch.bfloat16), lambda x: torch.complex(x, -x).conj()],
    ],
)
def test_tensors_arrive_with_their_strides(change: Callable[[Tensor], Tensor]) -> None:
    """Products are rounded by these, and sums by where a tensor begins."""
    tensor = change(torch.randn(4, 6))
    _, found, after = told([0, tensor, torch.ones(2)])
    assert torch.equal(found, tensor) and form_of(found) == form_of(tensor) and after.tolist() == [1, 1]
    assert found.storage_offset() == tensor.storage_offset() % 16


def test_a_planted_pickle_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    named = pack(1).numpy().tobytes().replace(b"1", b'{"os.system": "touch"}').replace(b"\1", b"\x16", 1)
    for data in (pickle.dumps(Bomb(trace)), named, b"\0", pack([torch.ones(3)]).numpy().tobytes()[:-1]):
        with pytest.raises(RuntimeError, match="what another process has told cannot be read"):
            unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    assert not trace.exists()


def crossed(value: Any, arguments: tuple[Tensor, ...] = ()) -> Any:
    """Return what comes to stand for a value in another process that has seen the same classes."""
    forms: Abstract = told(abstracted(value, arguments))
    return forms.made(arguments, 0, torch.device("cpu"))


def test_containers_of_classes_that_the_sample_has_shown_arrive() -> None:
    x = torch.randn(2, 3)
    output = Pair(OrderedDict(a=x, b=[x, None]), Held(x, by=(1, x > 0)))
    see(output)
    found = crossed(output)
    assert type(found) is Pair and type(found.left) is OrderedDict and type(found.right) is Held
    assert type(found.left["a"]) is StandIn and found.left["a"] is found.left["b"][0] is found.right.x
    assert found.right.by[0] == 1 and found.right.by[1].dtype == torch.bool
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    see(packed)
    assert crossed(packed).batch_sizes.tolist() == [2, 1, 1] and crossed(packed).data.shape == (4, 2)


def test_a_class_that_only_the_other_process_has_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that is found by its name alone could be any, such as one that removes a file when it is freed."""
    data = pack(abstracted(Pair(torch.ones(1), 2)))
    monkeypatch.setattr(wire, "_seen", {})
    with pytest.raises(RuntimeError, match=r"no module has returned an object of .*Pair'> here for the sample; give"):
        unpack(data)


def test_what_cannot_be_told_is_refused_by_name_where_it_is_used() -> None:
    held = Held(torch.ones(2), by=torch.relu)
    held.x.held = held  # type: ignore[attr-defined]
    found = crossed((held, torch.eye(2).to_sparse, {1}))
    assert found[0].x.shape == (2,)
    for value, kind in ((found[0].by, "builtin_function_or_method"), (found[2], "set")):
        with pytest.raises(AttributeError, match=f"uses 'scale' of an object of <class '{kind}'> that another process"):
            value.scale()


def step_with_a_planted_pickle(trace: Path) -> str:
    """Let the second process send a pickle where the first waits for what experts return."""
    model: Any = nn.Sequential(*[Experts() for _ in range(4)])
    sample = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(1))
    mesh = dist.init_device_mesh("cpu", (2,))
    torchgpipe.pipelined(model, sample, chunks=2, mesh=mesh, loss_fn=F.mse_loss, balance="parameters", verify=False)
    if dist.get_rank() == 1:
        bomb = torch.frombuffer(bytearray(pickle.dumps(Bomb(trace))), dtype=torch.uint8)
        messages.pack = lambda _, lead: torch.cat([torch.empty(lead, dtype=torch.uint8), bomb])  # type: ignore[assignment, misc]
    try:
        model.step(sample, target=torch.zeros_like(sample))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_planted_pickle_ends_the_step(tmp_path: Path) -> None:
    """What a module returns was unpickled, and anybody may send that who reaches a port."""
    first, second = launch(2, step_with_a_planted_pickle, tmp_path / "trace", timeout=10.0)
    assert "what another process has told cannot be read" in first
    assert "what another process has told cannot be read" in second and not (tmp_path / "trace").exists()


def test_nothing_of_the_packages_unpickles_what_others_send() -> None:
    modules = r"(pickle|dill|marshal|shelve|multiprocessing)\b"
    for path in (*Path("torchgpipe").rglob("*.py"), *Path("torchgpipe_balancing").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call)) else ""
            assert not re.match(rf"(import|from) ([\w.]*\.)?{modules}", text), path
            assert not re.match(r"[\w.]*(gather|scatter|broadcast|send|recv)_object(_list)?\(", text), (
                path
            )  # all_gather_object and its like
            if text.startswith("torch.load("):
                assert "weights_only=True" in text, path
