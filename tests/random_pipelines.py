"""Random pipelines of a Sequential: models of `recipes`, cut and run in any way, beside the plain model.

A case is run by one of two executors, ``call`` (forward and backward by autograd) and ``step`` (a program), in one of
the worlds: on one device, with a worker for each device, in separate memory, and on the accelerator of the tests. The
plain model runs micro-batch by micro-batch, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import accumulate, pairwise
from random import Random
from typing import Any, TypeAlias

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import ALL_VARIANTS
from tests.plain import Outcome, assert_unchanged, gradients, loss_of, mapped, on_host, pieces, run_plain, tensors
from tests.recipes import KINDS, RECIPES, USES, First, Recipe, Skip, node
from tests.separate_memory import separate_memory
from torchgpipe import GPipe, NoChunk
from torchgpipe.schedule import Action, Program, program, simulate
from torchgpipe.schedule.action import needs, splits_of
from torchgpipe.skip import Namespace

__all__ = ["MODES", "WORLDS", "Case", "Context", "Placing", "cases", "in_order", "make_exact", "placings"]

MODES = ["always", "except_last", "never"]

Context: TypeAlias = Callable[[], AbstractContextManager[Any]]

#: The name of a device, given its number.
WORLDS = {**ALL_VARIANTS, "separate memory": ALL_VARIANTS["workers"]}


# Programs


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
        names += ["Interleaved1F1B", *["V-Min", "V-Half", "ZB-V"] * (n % 2 == 0)]
    name = draw(st.sampled_from(names))
    if one_device:
        places = [0] * n
    elif name in ("1F1B", "ZeroBubble"):
        steps = draw(st.lists(st.integers(0, 1), min_size=n - 1, max_size=n - 1))
        places = [min(place, 3) for place in accumulate(steps, initial=0)]  # The accelerator of the tests has four.
    elif name == "Interleaved1F1B":
        d = draw(st.sampled_from([d for d in range(1, min(n, 4) + 1) if n % d == 0]))
        places = [j % d for j in range(n)]
    elif name in ("V-Min", "V-Half", "ZB-V"):
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


def in_order(actions: Program) -> list[Action]:
    """Return the actions of all devices in the order of a simulation."""
    starts = simulate(actions).starts
    return [a for _, _, a in sorted([(t, d, a) for d, own in enumerate(starts) for a, t in own])]


# How a model is run

CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)

#: Losses of PyTorch over four classes, with which a step knows what micro-batches weigh, and that weight, given the
#: labels; None for a sum. Classes that are ignored make the weights differ.
CLASS_LOSSES: dict[str, tuple[nn.Module, Callable[[Tensor], float] | None]] = {
    "mean": (nn.CrossEntropyLoss(ignore_index=1), lambda labels: float((labels != 1).sum())),
    "sum": (nn.CrossEntropyLoss(ignore_index=1, reduction="sum"), None),
    "class weights": (
        nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=1),
        lambda labels: float(CLASS_WEIGHTS[labels[labels != 1]].sum()),
    ),
}


@dataclass
class Case:
    """A model and a way to run it.

    Attributes:
        executor: ``call`` or ``step``
        world: one of `WORLDS`
        names: of the recipes
        module: the plain model
        balance: the layers of each partition
        placing: the devices, and the program of a step
        chunks: the number of micro-batches
        checkpoint: the checkpoint mode, or the names of layers
        batches: the arguments of each mini-batch
        training: whether the model trains
        used: whether the loss uses each tensor of the output, by default all
        rows: those of the output that the loss of a call uses
        noisy: whether the loss draws a random number
        hooks: the numbers of parameters with hooks
        present: the numbers of parameters that have gradients before the first mini-batch
        weighted: whether micro-batches have weights of their own
        class_loss: the name of the loss of a step, if it is one of `CLASS_LOSSES`
        within: what the caller has entered around forward, or around a step
        one_by_one: whether micro-batches of the plain model enter it one by one
    """

    executor: str
    world: str
    names: list[str]
    module: nn.Sequential
    balance: list[int]
    placing: Placing
    chunks: int
    checkpoint: str | list[str]
    batches: list[tuple[Any, ...]]
    training: bool
    used: list[bool]
    rows: slice
    noisy: bool
    hooks: set[int]
    present: set[int]
    weighted: bool
    class_loss: str | None
    within: Context = nullcontext
    one_by_one: bool = False

    def pipeline(self) -> GPipe:
        options: dict[str, Any] = {}
        devices = [WORLDS[self.world](place) for place in self.placing.places]
        if self.executor == "step":
            options["schedule"] = self.placing.schedule or (lambda m, places: self.placing.make(m))
            if self.class_loss is not None:
                options["loss_fn"] = copy.deepcopy(CLASS_LOSSES[self.class_loss][0]).to(devices[-1])
            else:
                options["loss_fn"] = lambda output, target: self.loss(output)
                # The loss is any function: the mean of what it gives for micro-batches, by the user's word.
                options |= {"weight": self.weight} if self.weighted else {"reduce": "mean"}
        options |= {"devices": devices, "chunks": self.chunks, "checkpoint": self.checkpoint}
        return self.set_mode(GPipe(copy.deepcopy(self.module), self.balance, **options))

    def set_mode(self, model: Any) -> Any:
        model.train(self.training)
        for module in model.modules():
            if hasattr(module, "always_evaluated"):
                module.eval()
        return model

    def loss(self, output: Any) -> Tensor:
        loss = loss_of(output, self.used)
        loss = torch.zeros((), dtype=torch.float64) if loss is None else loss
        return loss * torch.rand(()) if self.noisy else loss

    def weight(self, target: Tensor) -> float:
        return 1.0 + float(target[0]) % 3

    def target(self, value: Any) -> Tensor:
        rows = torch.arange(len(next(tensors(value))), dtype=torch.float64)
        return rows if self.class_loss is None else (rows.long() * 5 + 3) % 4

    def share(self, output: Any, target: Tensor, targets: Sequence[Tensor]) -> Tensor:
        """Return the share of a micro-batch in the loss of a step, given the targets of all."""
        if self.class_loss is None:
            loss, weigh = self.loss(output), self.weight if self.weighted else lambda target: float(len(target))
        else:
            loss_fn, weigh = CLASS_LOSSES[self.class_loss]
            loss = loss_fn(output, target)
        if weigh is None:
            return loss.reshape(1)
        weight = weigh(target)
        # The mean over no labels is nan.
        return (loss if weight else output[:0].sum()).reshape(1) * (weight / sum(map(weigh, targets)))

    def undisturbed(self) -> Case:
        """Return the case without checkpointing; a step is on one device, with the same order of actions."""
        if self.executor == "call":
            return replace(self, checkpoint="never")
        placing = Placing([0] * len(self.balance), lambda m: [in_order(self.placing.make(m))], None)
        return replace(self, checkpoint="never", world="inline", placing=placing)

    def piped(self) -> Outcome:
        """Return the pipeline's outcome."""
        model = self.pipeline()
        with separate_memory(model) if self.world == "separate memory" else nullcontext():
            step, call = partial(self._step, model), partial(self._call, model, self.within)
            return self._outcome(model, step if self.executor == "step" else call)

    def plain(self) -> Outcome:
        """Return the plain model's outcome."""
        module = self.set_mode(copy.deepcopy(self.module))
        within, each = (nullcontext, self.within) if self.one_by_one else (self.within, nullcontext)
        if self.executor == "step":
            receiving = copy.deepcopy(module)
            outcome = self._outcome(receiving, partial(self._step_plainly, module, receiving, within, each))
            outcome.buffers = dict(module.named_buffers())
            return outcome
        run = partial(run_plain, module, chunks=self.chunks, each=each)
        return self._outcome(module, partial(self._call, run, within))

    def _outcome(self, model: nn.Module, run: Callable[..., Any]) -> Outcome:
        """Run copies of the mini-batches; return what ``run`` returns, what hooks hear, and what is in ``model``."""
        heard = self._listen(model)
        present = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        outputs, batches = [], copy.deepcopy(self.batches)
        for batch, before in zip(batches, self.batches):
            outputs.append(mapped(on_host, run(*batch)))
            assert_unchanged(batch, before)
        assert all(parameter.grad is grad for parameter, grad in present), "gradients that are there are added to"
        return Outcome(
            output=[*outputs, sorted(heard, key=lambda pair: pair[0])],
            input_grads=[on_host(x.grad) for x in tensors(batches)],
            param_grads=gradients(model),
            buffers={name: on_host(buffer) for name, buffer in model.named_buffers()},
        )

    def _listen(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        """Put hooks on some parameters and gradients into some, and return the list of what hooks will hear.

        With recomputation, a call is refused in which a parameter with hooks was not used. Without it, such hooks may
        be called as well, with no gradient or with an old one.
        """
        heard: list[tuple[str, Tensor]] = []
        generator = torch.Generator().manual_seed(5)
        known: dict[str, Any] = {}

        def before(name: str, grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            heard.append((name, on_host(grad)))
            return grad * 2

        def after(name: str, parameter: Tensor) -> None:
            if known.get(name) != (state := state_of(parameter.grad)):
                known[name] = state
                heard.append((f"{name}, accumulated", on_host(parameter.grad)))

        def state_of(grad: Tensor | None) -> tuple[int, int] | None:
            return None if grad is None else (id(grad), grad._version)

        for k, (name, parameter) in enumerate(model.named_parameters()):
            if not parameter.requires_grad:
                continue
            if k in self.hooks and k % 2:
                parameter.register_hook(partial(before, name))
            if k in self.hooks and k % 3:
                parameter.register_post_accumulate_grad_hook(partial(after, name))
            if k in self.present:
                parameter.grad = torch.randint(-3, 4, parameter.shape, generator=generator).to(parameter)
                known[name] = state_of(parameter.grad)
        return heard

    def _call(self, run: Callable[..., Any], within: Context, *inputs: Any) -> Any:
        with within():
            output = run(*inputs)
        torch.rand(3)  # as a caller may
        loss = self.loss(mapped(lambda tensor: tensor[self.rows], output))
        if loss.requires_grad:
            try:
                loss.backward()
            except RuntimeError as error:
                if "has a hook, but nothing that this pass differentiates has used" in str(error):
                    reject()
                raise
        return output

    def _step(self, model: GPipe, value: Any) -> Any:
        with self.within():
            return model.step(value, self.target(value))

    def _step_plainly(
        self, module: nn.Sequential, receiving: nn.Module, within: Context, each: Context, value: Any
    ) -> Tensor:
        """Differentiate one micro-batch at a time, and add gradients to ``receiving``, a copy without history.

        Those of a parameter are summed in the order of the program's backward actions on its partition.
        """
        ends = [*accumulate(self.balance, initial=0)]
        partitions = [module[start:end] for start, end in pairwise(ends)]
        with within():
            parts = pieces(value, self.chunks)
            targets = self.target(value).chunk(self.chunks)
            actions = in_order(self.placing.make(len(parts)))
            order = [(a.i, a.j) for a in actions if a.kind == "F"]
            outputs = list(parts)
            # A plain model keeps skips until they are popped, so micro-batches run as a whole; but norms see the order
            # in which a program of one's own takes them.
            for i, j in sorted(order) if self.placing.schedule else order:
                with each():
                    outputs[i] = partitions[j](outputs[i])
            with each():
                shares = [self.share(output, target, targets) for output, target in zip(outputs, targets)]
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        found = []
        for part, share in zip(parts, shares):
            leaves = [x for x in tensors(part) if x.requires_grad]
            grads = _differentiate(share, [*parameters, *leaves])
            found.append(dict(zip(parameters, grads)))
            for leaf, grad in zip(leaves, grads[len(parameters) :]):
                if grad is not None:
                    leaf.backward(grad)
        split = splits_of([actions])
        backwards = [(i, j) for kind, i, j in actions if kind == ("W" if split[i, j] else "B")]
        # A shared parameter has one sum, in the first of its partitions: such models do not round.
        home = {parameter: j for j in reversed(range(len(partitions))) for parameter in partitions[j].parameters()}
        receivers = [parameter for parameter in receiving.parameters() if parameter.requires_grad]
        for parameter, receiver in zip(parameters, receivers, strict=True):
            summands = [found[i][parameter] for i, j in backwards if j == home[parameter]]
            summands = [grad for grad in summands if grad is not None]
            if summands:
                torch.autograd.backward([receiver], [sum(summands[1:], summands[0])])
        return reduce(torch.add, [share.detach().squeeze() for share in shares])


def _differentiate(share: Tensor, wanted: list[Tensor]) -> list[Tensor | None]:
    if not (share.requires_grad and wanted):
        return [None] * len(wanted)
    return list(torch.autograd.grad(share, wanted, allow_unused=True))


# Drawing


@st.composite
def cases(
    draw: st.DrawFn,
    executor: str,
    layers: str = "any",
    *,
    late: bool = False,
    exact: bool = False,
    random: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Draw any model with any way to cut and run it.

    Args:
        executor: ``call`` or ``step``
        layers: ``any`` of the recipes, or ``skips`` between nodes
        late: whether it runs on the accelerator of the tests
        exact: whether no arithmetic rounds, so that sums do not depend on their order; layers then share weights
        random: whether layers and the loss draw random numbers
        dtype: of parameters and inputs
    """
    torch.manual_seed(draw(st.integers(0, 99)))
    steps = executor == "step"
    world = "late" if late else draw(st.sampled_from(["inline", "workers", "separate memory"]))
    if layers == "skips":
        names, parts, kind, gives, least = [], draw(_skipping()), "vector", "vector", 1
    else:
        recipes = draw(_recipes(steps, late, exact, random, dtype))
        names, kind, gives = [recipe.name for recipe in recipes], recipes[0].takes, recipes[-1].gives
        parts = [recipe.make() for recipe in recipes]
        least = int(steps or any(name.startswith(("batch norm", "instance norm")) for name in names))
    shared = exact and _share_weights(draw, parts)
    balance = draw(_compositions(len(parts)))
    module = _nest(draw, parts, balance).to(dtype)
    if exact:
        make_exact(module)
    n, one_device = len(balance), world == "inline" or shared
    if steps:
        placing = draw(placings(n, exact, own=layers == "any", one_device=one_device))
    else:
        places = (
            st.just([*range(n)]) | st.permutations(range(n)) | st.lists(st.integers(0, n - 1), min_size=n, max_size=n)
        )
        placing = Placing([0] * n if one_device else draw(places), lambda m: [], None)
    chunks = draw(st.sampled_from([1, 2, 4]) if exact and steps else st.integers(1, 5))
    rows = draw(st.lists(st.integers(least, 7), min_size=1, max_size=3 if exact or steps else 1))
    if exact and steps:
        # As many micro-batches as a power of two, of one size, so that their shares in the loss do not round either.
        rows = [count - count % chunks if count > chunks else 1 for count in rows]
    numbers = st.just(set()) | st.sets(st.integers(0, 12), max_size=4)
    has_classes = steps and gives == "vector" and dtype == torch.float64 and not (exact or random)
    return Case(
        executor=executor,
        world=world,
        names=names,
        module=module,
        balance=balance,
        placing=placing,
        chunks=chunks,
        checkpoint=draw(st.sampled_from(MODES) | st.lists(st.sampled_from([*module._modules]), unique=True)),
        batches=[mapped(partial(_cast, dtype), _make_inputs(draw, kind, count, exact)) for count in rows],
        training=late or draw(st.sampled_from([True, True, True, False])),
        used=draw(st.lists(st.sampled_from([True, True, False]), max_size=2)),
        rows=draw(st.sampled_from([slice(None), slice(None), slice(1), slice(1, None)])),
        noisy=random and draw(st.booleans()),
        hooks=draw(numbers),
        present=draw(numbers) if exact or steps else set(),
        weighted=steps and not exact and draw(st.booleans()),
        class_loss=draw(st.sampled_from([None, *CLASS_LOSSES])) if has_classes else None,
    )


@st.composite
def _recipes(draw: st.DrawFn, steps: bool, late: bool, exact: bool, random: bool, dtype: torch.dtype) -> list[Recipe]:
    unknown = {"complex"} if late or dtype != torch.float64 else set()
    unknown |= {"arguments"} if steps else set()
    kinds = ["vector", "vector", "vector", "tokens", "image", "pair", "mapping", "arguments", "complex"]
    kind = draw(st.sampled_from([kind for kind in kinds if kind not in unknown]))
    refused = {"random": not random, "sums": not exact, "not late": late}
    chosen: list[Recipe] = []
    length = draw(st.integers(1, 7))
    while len(chosen) < length:
        refused["in place"] = bool(chosen) and "fresh" not in chosen[-1].traits
        allowed = [
            recipe
            for recipe in RECIPES
            if recipe.takes == kind
            and recipe.gives not in unknown
            and ("exact" in recipe.traits or not exact)
            and not any(trait in recipe.traits for trait, is_refused in refused.items() if is_refused)
        ]
        chosen.append(draw(st.sampled_from(allowed)))
        kind = chosen[-1].gives
    return chosen


@st.composite
def _skipping(draw: st.DrawFn) -> list[nn.Module]:
    """Draw nodes with skips between them. Two skips of one name are of two namespaces, and of other nodes."""
    n = draw(st.integers(2, 7))
    pops: list[list[Skip]] = [[] for _ in range(n)]
    stashes: list[list[Skip]] = [[] for _ in range(n)]
    for _ in range(draw(st.integers(1, 5))):
        source = draw(st.integers(0, n - 2))
        target = draw(st.integers(source + 1, n - 1))
        taken = {skip.name for k in (source, target) for skip in pops[k] + stashes[k]}
        name = next(name for name in "abcde" if name not in taken)
        namespace = Namespace()
        stashes[source].append(Skip(name, namespace, draw(st.sampled_from([*KINDS]))))
        place = draw(st.integers(0, len(pops[target])))
        pops[target].insert(place, Skip(name, namespace, draw(st.sampled_from([*USES]))))
    return [node(pops[k], stashes[k], draw(st.sampled_from([True, True, False]))) for k in range(n)]


def _share_weights(draw: st.DrawFn, layers: list[nn.Module]) -> bool:
    """Make linear layers share one weight, or not."""
    linear = [layer for layer in layers if type(layer) is nn.Linear and layer.weight.requires_grad]
    shares = len(linear) > 1 and draw(st.booleans())
    for layer in linear[1:] if shares else []:
        layer.weight = linear[0].weight
    return shares


@st.composite
def _compositions(draw: st.DrawFn, total: int) -> list[int]:
    """Draw positive numbers with this sum."""
    numbers = []
    while total > 0:
        numbers.append(draw(st.integers(1, total)))
        total -= numbers[-1]
    return numbers


def _nest(draw: st.DrawFn, layers: list[nn.Module], balance: list[int]) -> nn.Sequential:
    """Return a Sequential in which the layers of some partitions are nested in a Sequential of their own."""
    nested: list[nn.Module] = []
    rest = iter(layers)
    for j, count in enumerate(balance):
        part = [next(rest) for _ in range(count)]
        if not isinstance(part[0], First) and draw(st.integers(0, 3)) == 0:
            part, balance[j] = [nn.Sequential(*part)], 1
        nested += part
    return nn.Sequential(*nested)


def make_exact(module: nn.Module) -> None:
    """Make parameters such small fractions of two that sums and products over several layers do not round."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape) / 2)


def _make_inputs(draw: st.DrawFn, kind: str, batch: int, exact: bool) -> tuple[Any, ...]:
    def number(*shape: int) -> Tensor:
        values = torch.randint(-3, 4, shape) / 2 if exact else torch.randn(shape)
        return values.requires_grad_(draw(st.sampled_from([True, True, False])))

    if kind == "arguments":
        return number(batch, 4), (number(batch, 4), None), NoChunk(number(4, 4))
    value: Any
    if kind == "vector":
        value = number(batch, 4)
    elif kind == "image":
        value = number(batch, 2, 2)
    elif kind == "tokens":
        value = torch.randint(8, (batch, 3))
    elif kind == "complex":
        value = torch.randint(-3, 4, (batch, 4)) * (1 - 0.5j)
        value = value.to(torch.complex128).requires_grad_(draw(st.booleans()))
    elif kind == "pair":
        value = number(batch, 4), number(batch, 4)
    else:
        value = {"x": number(batch, 4), "mask": torch.rand(batch, 4) > 0.5, "no": None}
    return (value,)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
