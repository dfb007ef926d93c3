"""What `GPipe` refuses, when it is made, set or called: the error names what is wrong, where, and the next move."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe, with_accelerators
from tests.gpipe.helpers import make_input, make_model
from tests.layers import Apply
from torchgpipe import GPipe, NoChunk

#: What is called, the class of its error, and what its text has in it; after ``'^'`` comes how it begins.
Row: TypeAlias = tuple[Callable[[], Any], type[Exception], list[str]]


def check(row: Row) -> None:
    call, error, parts = row
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    for part in parts:
        assert text.startswith(part[1:]) if part.startswith("^") else part in text


# The constructor


def named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def tied() -> nn.Sequential:
    module = named(encoder=nn.Linear(1, 1), middle=nn.ReLU(), decoder=nn.Sequential(nn.Linear(1, 1)))
    module.decoder[0].weight, module.decoder[0].bias = module.encoder.weight, module.encoder.bias
    return module


def wrap(layers: int = 1, balance: Any = (1,), **options: Any) -> Any:
    return GPipe(make_model(layers), balance, **{"devices": ["cpu"] * 9, **options})


LAYER = nn.Linear(1, 1)
TWO = ["cpu:0", "cpu:1"]
BALANCING = ["torchgpipe.plan(module, sample, batch=...)", "torchgpipe_balancing"]
NO_SEQUENTIAL = ["^module must be nn.Sequential to be partitioned, ", "torchgpipe.pipelined"]
SHARED = ["^module with duplicate parameters in distinct children is not supported"]

MAKING: list[Row] = [
    *[
        (lambda module=module: GPipe(module, [1]), TypeError, NO_SEQUENTIAL)
        for module in (LAYER, nn.ModuleList([LAYER]), nn.Identity, None, print)
    ],
    (lambda: GPipe(named(a=LAYER, b=LAYER), [1, 1]), ValueError, ["duplicate children", "'a'", "'b'"]),
    (lambda: GPipe(tied(), [1, 2], devices=TWO), ValueError, [*SHARED, "encoder.weight", "decoder.0.bias"]),
    (lambda: GPipe(nn.Sequential(nn.Sequential(LAYER), nn.Sequential(LAYER)), [1, 1], devices=TWO), ValueError, SHARED),
    # The balance.
    (lambda: GPipe(make_model(3)), ValueError, ["balance is required", "3", *BALANCING]),
    # More of them are in model/test_verify.py.
    (lambda: wrap(3, []), ValueError, ["(module: 3, sum of balance: 0)", *BALANCING]),
    (lambda: wrap(3, [2, 2]), ValueError, ["(module: 3, sum of balance: 4)", *BALANCING]),
    (lambda: wrap(3, [1, -1, 3]), ValueError, ["^all balance numbers must be positive integers ", *BALANCING]),
    # The errors were once those of int(), and fractions were silently truncated.
    *[
        (lambda balance=balance: wrap(3, balance), TypeError, ["takes a list of integers", repr(balance), *BALANCING])
        for balance in (3, "12", ["1", "2"], [1.0, 2.0], [1.5, 1.5], [None, 3], [[1], [2]])
    ],
    (lambda: GPipe(make_model(1), [1], ["cpu"]), TypeError, ["positional argument"]),
    # The devices. A string would be read letter by letter.
    *[
        (lambda device=device: wrap(2, [1, 1], devices=device), TypeError, ["^devices must be ", f"=[{device!r}] * 2"])
        for device in ("cpu", 0, torch.device("cpu"))
    ],
    (lambda: wrap(3, [1, 1, 1], devices=TWO), IndexError, ["too few devices", "=['cpu:0', 'cpu:0', 'cpu:1']"]),
    # The meta device was once accepted, and the call failed: it has no module.
    (lambda: wrap(2, [1, 1], devices=["cpu", "meta"]), ValueError, ["meta device, which devices[1] is"]),
    # Settings; for chunks, see model/test_settings.py.
    *[
        (lambda mode=mode: wrap(checkpoint=mode), ValueError, ["checkpoint is not one of 'always', ", str(mode)])
        for mode in ("sometimes", "", None, 1)
    ],
    *[
        (lambda name=name: wrap(**{name: "mse"}), TypeError, [f"^{name} must be a function, ", "but got 'mse'"])
        for name in ("loss_fn", "weight")
    ],
    (lambda: NoChunk([torch.zeros(1)]), TypeError, ["^NoChunk only supported for tensors, found: ", "list"]),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("row", MAKING)
def test_the_constructor(row: Row) -> None:
    check(row)


BY_DEFAULT = [(None, 0, 2), (None, 4, 4), (None, 8, 5)]


@pytest.mark.parametrize(
    ("balance", "accelerators", "partitions"),
    [([4, 4], 0, 2), ([1] * 3, 0, 3), ([0, 3], 0, 2), ([1] * 12, 0, 5), ([], 0, 2), *BY_DEFAULT],
)
def test_the_recommended_number_of_partitions_is_the_given_one(
    monkeypatch: pytest.MonkeyPatch, balance: Any, accelerators: int, partitions: int
) -> None:
    """The message once recommended 4 partitions in every case."""
    with_accelerators(monkeypatch, accelerators)
    with pytest.raises(ValueError, match=f"partitions={partitions}\\)"):
        GPipe(make_model(5), balance)


# The call


def eye() -> Tensor:
    return torch.eye(4).to_sparse()


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


ZEROS = torch.zeros(2, 2)
#: The layers of one partition, the inputs, the error, and what its text has in it.
CALLS: list[tuple[list[nn.Module], tuple[Any, ...], type[Exception], list[str]]] = [
    ([LAYER], (), TypeError, ["no tensor"]),
    *[
        ([LAYER], (value,), TypeError, ["no tensor"])
        for value in (None, (), [None, None], {}, {"a": None}, NoChunk(torch.zeros(2)))
    ],
    # Values that are no tensors.
    ([nn.Identity()], ("text",), TypeError, ["input", "itself", "str"]),
    ([nn.Identity()], ((ZEROS, numpy.zeros(2), [3]),), TypeError, ["input", "[1]", "ndarray", "[2][0]", "int"]),
    ([nn.Identity()], (ZEROS, (None, {"flag": True})), TypeError, ["input", "[1][1]['flag']", "bool"]),
    # Tensors that cannot be split. The errors were once those of an operation that they lack.
    ([nn.Identity()], (eye(),), TypeError, ["along dimension 0: the value itself is torch.sparse_coo ", "NoChunk"]),
    ([nn.Identity()], (ZEROS, eye()), TypeError, ["along dimension 0: [1] is torch.sparse_coo "]),
    ([nn.Identity()], (nested(),), TypeError, ["along dimension 0: the value itself is nested ", "NoChunk"]),
    ([nn.Identity()], (ZEROS, nested()), TypeError, ["along dimension 0: [1] is nested "]),
    *[
        ([nn.Identity()], (value,), ValueError, ["()"])
        for value in (torch.tensor(1.0), (torch.zeros(3), torch.tensor(1.0)), [torch.tensor(1)] * 2)
    ],
    (
        [nn.Identity()],
        ({"x": torch.zeros(6, 4), "rest": [torch.zeros(6), torch.zeros(5, 4)], "none": None},),
        ValueError,
        ["['x']", "(6, 4)", "['rest'][0]", "(6,)", "['rest'][1]", "(5, 4)", "NoChunk"],
    ),
    # Outputs.
    ([Apply(torch.sum)], (ZEROS,), ValueError, ["dimension"]),
    ([Apply(lambda x: (x, x) if len(x) == 2 else x)], (torch.zeros(3, 2),), ValueError, ["structure"]),
    ([nn.Identity(), Apply(lambda x: (x, 1.5))], (ZEROS,), TypeError, ["layer '1' (Apply)", "[1]", "float"]),
    ([nn.Identity(), Apply(lambda x: (x, NoChunk(x)))], (ZEROS,), TypeError, ["layer '1' (Apply)", "[1]", "NoChunk"]),
]


@pytest.mark.parametrize(("layers", "inputs", "error", "parts"), CALLS)
def test_the_call(
    pipe: Pipe, layers: list[nn.Module], inputs: tuple[Any, ...], error: type[Exception], parts: list[str]
) -> None:
    model = pipe(nn.Sequential(*layers), [1] * len(layers), chunks=2, checkpoint="never")
    check((lambda: model(*inputs), error, parts))


def test_other_values_at_a_boundary(pipe: Pipe, checkpoint: str) -> None:
    module = named(first=nn.Identity(), second=Apply(lambda x: (x, {"name": "text"})), third=nn.Identity())
    model = pipe(module, [2, 1], chunks=2, checkpoint=checkpoint)
    check((lambda: model(make_input()), TypeError, ["'second'", "Apply", "[1]['name']", "str"]))


def test_a_keyword_input_that_does_not_fit_is_named(pipe: Pipe) -> None:
    x, model = make_input(), pipe(nn.Sequential(Apply(lambda x, mask: x)), [1], chunks=2)
    check((lambda: model(x, mask=[None, make_input(5)]), ValueError, ["[0] is (6, 2), ['mask'][1] is (5, 2)"]))
    check((lambda: model(x, mask="causal"), TypeError, ["input must consist of ", "but ['mask'] is str"]))
    check((lambda: model(x, musk=x), TypeError, ["unexpected keyword argument 'musk'"]))
    check((lambda: pipe(nn.Sequential(), [])(x, mask=x), TypeError, ["no layer ", "keyword inputs ['mask']"]))
