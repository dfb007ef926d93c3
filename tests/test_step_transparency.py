"""Whatever the model, its partitions and the program, a step equals the plain model to the last bit.

The plain model runs the layers of a partition on a micro-batch where the program has a forward action, and is then
differentiated one micro-batch at a time. The gradients of a parameter are summed in the order of the program's backward
actions on the partition of the parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tests.skip.test_transparency
from tests.conftest import ALL_VARIANTS, VARIANTS
from tests.plain import loss_of, mapped, pieces, tensors
from tests.test_transparency import NOT_ON_LATE, Case, cases
from torchgpipe import GPipe
from torchgpipe.schedule import Action, Program, program, simulate
from torchgpipe.schedule.action import needs, splits_of


@dataclass
class Result:
    """The results of the steps of a model, and what its hooks have heard.

    Attributes:
        losses: of each step
        inputs: the gradients of the input tensors of each step
        grads: by parameter
        buffers: by name
        heard: what hooks of parameters were given
    """

    losses: list[Tensor]
    inputs: list[Tensor | None]
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    heard: list[tuple[str, Tensor]]


def assert_same(actual: Result, expected: Result) -> None:
    for mine, other in zip(actual.losses, expected.losses, strict=True):
        assert torch.equal(mine.nan_to_num(), other.to(mine).nan_to_num()), f"loss {mine} instead of {other}"
    assert_equal(dict(enumerate(actual.inputs)), dict(enumerate(expected.inputs)), "input")
    assert_equal(actual.grads, expected.grads, "gradient of")
    assert_equal(actual.buffers, expected.buffers, "buffer")
    heard = [sorted(result.heard, key=lambda pair: pair[0]) for result in (actual, expected)]
    assert [name for name, _ in heard[0]] == [name for name, _ in heard[1]]
    for (name, mine), (_, other) in zip(*heard):
        assert_equal({name: mine}, {name: other}, "heard by the hook of")


def assert_equal(actual: dict[Any, Any], expected: dict[Any, Any], what: str) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, f"{what} {name} is there"
        else:
            torch.testing.assert_close(
                actual[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda m, name=name: f"{what} {name}: {m}"
            )


# ------------------------------------------------------------------------------------------------ programs


def in_any_order(seed: int, m: int, places: list[int], splits: list[bool]) -> list[list[Action]]:
    """Return a program whose actions are in any legal order."""
    n = len(places)
    split = {(i, j): splits[j] for i in range(m) for j in range(n)}
    kinds = {True: "FIW", False: "FB"}
    left = [Action(kind, i, j) for i in range(m) for j in range(n) for kind in kinds[splits[j]]]  # type: ignore[arg-type]
    result: list[list[Action]] = [[] for _ in set(places)]
    done: set[Action] = set()
    chooses = Random(seed)
    while left:
        ready = [action for action in left if done.issuperset(needs(action, split, n))]
        action = chooses.choice(ready)
        left.remove(action)
        done.add(action)
        result[places[action.j]].append(action)
    return result


@dataclass
class Placing:
    """The device of each partition, and a schedule that fits.

    Attributes:
        places: the number of each device, by its first partition
        make: makes the program of ``m`` micro-batches
        schedule: the name of the schedule; None for a program of one's own
    """

    places: list[int]
    make: Callable[[int], Program]
    schedule: str | None


@st.composite
def placings(draw: st.DrawFn, n: int, exact: bool, *, own: bool = True, one_device: bool = False) -> Placing:
    """Draw a schedule and a placing that fits, for ``n`` partitions; only exact sums may depend on their order."""
    names = ["GPipe", "1F1B", "ZeroBubble", "LayerMajor", *["own"] * own]
    if not one_device:
        names += ["Interleaved1F1B", *["V-Half"] * (n % 2 == 0)]
    name = draw(st.sampled_from(names))
    places = [0] * n
    if not one_device:
        if name in ("1F1B", "ZeroBubble"):
            ends = draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))
            places = [sum(ends[:j]) for j in range(n)]
        elif name == "Interleaved1F1B":
            d = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
            places = [j % d for j in range(n)]
        elif name == "V-Half":
            places = [min(j, n - 1 - j) for j in range(n)]
        else:
            drawn = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
            places = [list(dict.fromkeys(drawn)).index(place) for place in drawn]
    if name != "own":
        return Placing(places, lambda m: program(name, m, places), name)  # type: ignore[arg-type]
    # A first half that does all the work would change the order of a sum.
    splits = draw(st.lists(st.booleans() if exact else st.just(False), min_size=n, max_size=n))
    seed = draw(st.integers(0, 999))
    return Placing(places, lambda m: in_any_order(seed, m, places, splits), None)


# ------------------------------------------------------------------------------------------------ running


@dataclass
class Run:
    """How a model is run.

    Attributes:
        module: the plain model
        balance: the layers of each partition
        placing: the devices, and the program
        device: the name of a device, given its number
        chunks: the number of micro-batches
        checkpoint: the checkpoint mode
        inputs: the input of each step
        hooks: the numbers of parameters with hooks
        present: the numbers of parameters that have gradients before the first step
        weighted: whether micro-batches have weights of their own
        prepare: sets the modes of the layers
        loss: from an output to the loss of a micro-batch
        within: what the forward of each micro-batch runs in
    """

    module: nn.Sequential
    balance: list[int]
    placing: Placing
    device: Callable[[int], str]
    chunks: int
    checkpoint: str | list[str]
    inputs: list[Any]
    hooks: set[int] = field(default_factory=set)
    present: set[int] = field(default_factory=set)
    weighted: bool = False
    prepare: Callable[[nn.Module], Any] = lambda module: None
    loss: Callable[[Any], Tensor | None] = loss_of
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    silent: bool = False

    def pipeline(self, **options: Any) -> GPipe:
        options.setdefault("checkpoint", self.checkpoint)
        options.setdefault("schedule", self.placing.schedule or (lambda m, places: self.placing.make(m)))
        model = GPipe(
            copy.deepcopy(self.module),
            self.balance,
            devices=[self.device(place) for place in self.placing.places],
            chunks=self.chunks,
            loss_fn=lambda output, target: self.loss_of(output),
            weight=self.weight if self.weighted else None,
            **options,
        )
        self.prepare(model)
        return model

    def stepped(self) -> Result:
        """Return the result of steps of the pipeline."""
        model = self.pipeline()

        def step(value: Any, target: Tensor) -> Any:
            with self.within():
                return model.step(value, target)

        return self._result(model, step)

    def in_line(self) -> Result:
        """Return the result of steps on one device, which keep all graphs, and run the actions in the same order."""
        one = copy.copy(self)
        one.placing = Placing([0] * len(self.balance), lambda m: [linear(self.placing.make(m))], None)
        one.device = lambda _: "cpu"
        one.checkpoint = "never"
        return one.stepped()

    def plain(self, whole: bool = False) -> Result:
        """Return the result of steps of the plain model; ``whole`` micro-batches run in order, with all layers."""
        module = copy.deepcopy(self.module)
        self.prepare(module)

        def step(value: Any, target: Tensor) -> Tensor:
            m = len(target.chunk(self.chunks))
            actions = linear(self.placing.make(m))
            parts: list[Any] = pieces(value, m)
            outputs = list(parts)
            layers = list(module)
            ends = [sum(self.balance[:j]) for j in range(len(self.balance) + 1)]
            order = [(a.i, a.j) for a in actions if a.kind == "F"]
            for i, j in sorted(order) if whole else order:
                with self.within():
                    for layer in layers[ends[j] : ends[j + 1]]:
                        outputs[i] = layer(outputs[i])
            weights = [self.weight(part) if self.weighted else float(len(part)) for part in target.chunk(self.chunks)]
            with self.within():
                shares = [self.loss_of(output).reshape(1) * (w / sum(weights)) for output, w in zip(outputs, weights)]
            parameters = [p for p in module.parameters() if p.requires_grad]
            split = splits_of([actions])
            leaves = [[x for x in tensors(part) if x.requires_grad] for part in parts]
            found: list[list[Tensor | None]] = []
            self.silent = True
            for share, own in zip(shares, leaves):
                wanted = [*parameters, *own]
                if share.requires_grad and wanted:
                    found.append(list(torch.autograd.grad(share, wanted, allow_unused=True)))
                else:
                    found.append([None] * len(wanted))
            self.silent = False
            for i, own in enumerate(leaves):
                for leaf, grad in zip(own, found[i][len(parameters) :]):
                    if grad is not None:
                        leaf.backward(grad)
            sums: dict[int, Tensor] = {}
            layers_of = [{id(p) for layer in layers[a:b] for p in layer.parameters()} for a, b in pairwise(ends)]
            for kind, i, j in actions:
                if kind not in ("B", "W") or (kind == "W") != split[i, j]:
                    continue
                for k, parameter in enumerate(parameters):
                    grad = found[i][k]
                    # A shared parameter has one sum in the first of its partitions: such models do not round.
                    first = next(j for j, ids in enumerate(layers_of) if id(parameter) in ids)
                    if grad is not None and first == j:
                        sums[k] = grad if k not in sums else sums[k] + grad
            for k, total in sums.items():
                torch.autograd.backward([parameters[k]], [total])
            loss = torch.zeros((), dtype=torch.float64)
            for share in shares:
                loss += share.detach().squeeze()
            return loss

        return self._result(module, step)

    def loss_of(self, output: Any) -> Tensor:
        loss = self.loss(output)
        return torch.zeros((), dtype=torch.float64) if loss is None else loss

    def weight(self, target: Tensor) -> float:
        return 1.0 + float(target[0]) % 3

    def _result(self, model: nn.Module, step: Callable[[Any, Tensor], Tensor]) -> Result:
        heard: list[tuple[str, Tensor]] = []
        generator = torch.Generator().manual_seed(5)
        for k, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.requires_grad and k in self.hooks:

                def hear(grad: Tensor, name: str = name) -> Tensor | None:
                    if self.silent:
                        return None
                    heard.append((name, grad.detach().to("cpu", copy=True)))
                    return grad * 2

                def after(parameter: Tensor, name: str = f"{name}, accumulated") -> None:
                    assert parameter.grad is not None
                    heard.append((name, parameter.grad.detach().to("cpu", copy=True)))

                if k % 2:
                    parameter.register_hook(hear)
                if k % 3:
                    parameter.register_post_accumulate_grad_hook(after)
            if parameter.requires_grad and k in self.present:
                values = torch.randint(-3, 4, parameter.shape, generator=generator)
                parameter.grad = values.to(parameter)
        present = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        losses, inputs = [], []
        for value in copy.deepcopy(self.inputs):
            rows = next(x for x in tensors(value)).shape[0]
            losses.append(step(value, torch.arange(rows, dtype=torch.float64)).cpu())
            inputs += [x.grad for x in tensors(value)]
        assert all(parameter.grad is grad for parameter, grad in present), "gradients that are there are added to"
        grads = {name: None if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()}
        return Result(losses, inputs, grads, {name: b.to("cpu", copy=True) for name, b in model.named_buffers()}, heard)


def linear(actions: Program) -> list[Action]:
    """Return the actions of all devices in the order of a simulation."""
    starts = simulate(actions).starts
    return [a for _, _, a in sorted([(t, d, a) for d, own in enumerate(starts) for a, t in own])]


@st.composite
def runs(
    draw: st.DrawFn,
    *,
    exact: bool = False,
    random: bool = False,
    allowed: Callable[[list[str]], bool] = lambda names: True,
    **options: Any,
) -> Run:
    """Draw a model of layers that are allowed, and a way to step it."""
    case: Case = draw(cases(exact=exact, random=random, **options).filter(lambda c: _fits(c) and allowed(c.names)))
    n = len(case.balance)
    shared = exact and len(set(map(id, _parameters(case.module)))) < len(list(_parameters(case.module)))
    variant = draw(st.sampled_from(sorted(VARIANTS)))
    placing = draw(placings(n, exact, one_device=shared or variant == "inline"))
    value = case.inputs[0]
    rows = len(next(tensors(value)))
    sizes = draw(st.lists(st.integers(1, rows), max_size=2))
    inputs = [value, *[_first(value, size) for size in sizes]]
    numbers = st.sets(st.integers(0, 12), max_size=4)
    return Run(
        module=case.module,
        balance=case.balance,
        placing=placing,
        device=VARIANTS[variant],
        chunks=case.chunks,
        checkpoint=case.checkpoint if isinstance(case.checkpoint, str) else list(map(str, case.checkpoint)),
        inputs=inputs,
        hooks=draw(st.just(set()) | numbers),
        present=draw(st.just(set()) | numbers),
        weighted=not exact and draw(st.booleans()),
        prepare=case.set_mode,
        loss=case.loss,
    )


def _fits(case: Case) -> bool:
    return len(case.inputs) == 1 and len(next(tensors(case.inputs[0]))) > 0 and case.names[0] != "arguments"


def _first(value: Any, rows: int) -> Any:
    """Return the first rows of a mini-batch."""
    return mapped(lambda x: x.detach()[:rows].clone().requires_grad_(x.requires_grad), value)


def _parameters(module: nn.Module) -> Any:
    for part in module.modules():
        yield from part._parameters.values()


# ------------------------------------------------------------------------------------------------ the promise


@given(run=runs())
def test_any_model_steps_as_the_plain_model(run: Run) -> None:
    assert_same(run.stepped(), run.plain())


@pytest.mark.late
@given(run=runs(training=st.just(True), allowed=NOT_ON_LATE.isdisjoint))
def test_any_model_waits_for_its_streams(run: Run) -> None:
    run.device = ALL_VARIANTS["late"]
    assert_same(run.stepped(), run.plain())


@given(run=runs(exact=True))
def test_any_model_with_shared_weights_steps_as_the_plain_model(run: Run) -> None:
    """No sum is rounded, so that a program may also split backward in any order."""
    run.chunks = 1 << (run.chunks.bit_length() - 1)
    # As many micro-batches as a power of two, of one size, so that their shares in the loss do not round either.
    rows = [len(next(tensors(value))) for value in run.inputs]
    sizes = [n - n % run.chunks if n > run.chunks else 1 for n in rows]
    run.inputs = [_first(value, size) for value, size in zip(run.inputs, sizes)]
    assert_same(run.stepped(), run.plain())


@given(run=runs(random=True), seed=st.integers(0, 9))
def test_random_layers_draw_the_same_under_any_program(run: Run, seed: int) -> None:
    """The reference is a step on one device without checkpointing."""
    results = []
    for step in (run.in_line, run.stepped):
        torch.manual_seed(seed)
        results.append(step())
        results[-1].buffers["state"] = torch.get_rng_state()
    assert_same(results[1], results[0])


@settings(max_examples=settings.default.max_examples // 4)
@given(run=runs(dtype=torch.float32))
def test_autocast(run: Run) -> None:
    """Each micro-batch casts weights itself, as in a plain model whose micro-batches enter autocast one by one."""
    run.within = partial(torch.autocast, "cpu", torch.bfloat16)
    assert_same(run.stepped(), run.plain())


@pytest.mark.parametrize(
    "device", [None, pytest.param(ALL_VARIANTS["late"], marks=pytest.mark.late)], ids=["cpu", "late"]
)
@given(case=tests.skip.test_transparency.cases(), data=st.data())
def test_any_skips_step_as_in_the_plain_model(
    case: tests.skip.test_transparency.Case, device: Callable[[int], str] | None, data: st.DataObject
) -> None:
    variant = data.draw(st.sampled_from(sorted(VARIANTS)))
    run = Run(
        module=case.module,
        balance=case.balance,
        placing=data.draw(
            placings(len(case.balance), exact=False, own=False, one_device=variant == "inline"), label="placing"
        ),
        device=device or VARIANTS[variant],
        chunks=case.chunks,
        checkpoint=case.checkpoint,
        inputs=[case.input],
        prepare=lambda module: module.train(
            case.training or device is not None
        ),  # `late` lacks batch norms in evaluation
    )
    assert_same(run.stepped(), run.plain(whole=True))
