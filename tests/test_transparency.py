"""Whatever the model, its partitions and its program, results equal the plain model's to the last bit.

`random_pipelines` draws models, and how they are cut and run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.plain import assert_same, outcome, run_plain
from tests.random_pipelines import Context, cases, make_exact
from tests.recipes import Double

pytestmark = pytest.mark.usefixtures("rounded")

executors = pytest.mark.parametrize("executor", ["call", "step"])
kinds = pytest.mark.parametrize("layers", ["any", "skips"])
worlds = pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.late)], ids=["host", "late"])


@worlds
@kinds
@executors
@given(data=st.data())
def test_any_model_gives_what_the_plain_model_gives(
    executor: str, layers: str, late: bool, data: st.DataObject
) -> None:
    case = data.draw(cases(executor, layers, late=late))
    assert_same(case.piped(), case.plain())


@executors
@given(data=st.data())
def test_any_model_with_shared_weights_gives_what_the_plain_model_gives(executor: str, data: st.DataObject) -> None:
    """A gradient of several parts is summed in any order; here no sum is rounded, so a program may split backward."""
    case = data.draw(cases(executor, exact=True))
    assert_same(case.piped(), case.plain())


@executors
@given(data=st.data(), seed=st.integers(0, 9))
def test_random_layers_draw_what_they_draw_without_checkpointing(executor: str, data: st.DataObject, seed: int) -> None:
    """A step draws the same under any program, too, and no backward advances the caller's generator."""
    case = data.draw(cases(executor, random=True))
    outcomes = []
    for each in (case, case.undisturbed()):
        torch.manual_seed(seed)
        outcomes.append(each.piped())
        outcomes[-1].buffers["state"] = torch.get_rng_state()
    assert_same(*outcomes)


@kinds
@executors
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data(), context=st.sampled_from([torch.no_grad, torch.inference_mode]))
def test_without_gradients(executor: str, layers: str, context: Context, data: st.DataObject) -> None:
    case = data.draw(cases(executor, layers))
    case.within = context
    assert_same(case.piped(), case.plain())


@executors
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_other_precisions(executor: str, dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(cases(executor, dtype=dtype))
    assert_same(case.piped(), case.plain())


@kinds
@executors
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data(), cache=st.booleans())
def test_autocast(executor: str, layers: str, cache: bool, data: st.DataObject) -> None:
    """Backward, with its recomputation, comes after the block.

    Micro-batches that share a cast weight sum its gradients in bfloat16; micro-batches that cast their own copy sum in
    float32. In the plain model they share if autocast keeps its cache. Checkpointed micro-batches never share, nor do
    those of a step. (A tensor in NoChunk may be shared in part: the tie between micro-batches sits on an input that
    needs a gradient, and autocast caches only the casts of leaves.)
    """
    case = data.draw(cases(executor, layers, dtype=torch.float32))
    assume(not cache or "arguments" not in case.names)
    case.within = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=cache)
    case.one_by_one = executor == "step" or (case.training and case.checkpoint not in ("never", []))
    assert_same(case.piped(), case.plain())


@pytest.mark.parametrize(
    "use",
    [
        lambda model, x: model(x) + model(x.flip(0)),
        lambda model, x: model(model(x)),
        lambda model, x: model(x)[:2] + model(x[:2]),
        lambda model, x: torch.cat([model(x[:1]), model(x[1:])]),
        lambda model, x: model(x) * model(x.detach()).detach(),
    ],
    ids=["twins", "on its own output", "of two sizes", "in turn", "one of them detached"],
)
def test_a_model_that_is_called_twice_before_backward(
    pipe: Pipe, checkpoint: str, use: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> None:
    layers = [nn.Linear(4, 4), Double(), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]
    module = nn.Sequential(*layers).double()
    make_exact(module)
    x = (torch.randint(-3, 4, (5, 4)) / 2).double().requires_grad_()
    model = pipe(copy.deepcopy(module), [1, 3, 2], chunks=2, checkpoint=checkpoint)
    plain = partial(run_plain, module, chunks=2)
    expected = outcome(module, x, run=lambda x: use(plain, x))
    assert_same(outcome(model, x, run=lambda x: use(model, x)), expected)
