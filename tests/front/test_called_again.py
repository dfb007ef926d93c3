"""Modules that are called again after others: each call computes in the partition that the model has come to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.front.models import TWO, Block, Hidden, chain, gradients, same
from torchgpipe import is_recomputing, pipelined
from torchgpipe.spine.arrange import _seconds
from torchgpipe.spine.layout import Part
from torchgpipe.spine.spine import Call

WORDS, WIDTH = 7, 4

IDS = torch.randint(WORDS, (6, 5), generator=torch.Generator().manual_seed(0))
X = torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Predict(nn.Module):
    """Predicts one token further: by its own block, and with the embedding and the head that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.join, self.block = nn.Linear(2 * WIDTH, WIDTH), Block(WIDTH)

    def forward(self, h: Tensor, ids: Tensor, embed: nn.Module, head: nn.Module) -> tuple[Tensor, Tensor]:
        h = self.block(self.join(torch.cat([h, embed(ids)], -1)))
        return h, head(h)


class Language(nn.Module):
    """Predicts the next tokens: the blocks predict one, and each further module one more."""

    def __init__(self, blocks: int = 4, further: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, dropout) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.further = nn.ModuleList([Predict() for _ in range(further)])

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        logits = [self.head(self.norm(h))]
        for k, predict in enumerate(self.further, 1):
            h, further = predict(h, ids.roll(-k, 1), self.embed, self.head)
            logits.append(further)
        losses = [functional.cross_entropy(each.flatten(0, 1), ids.roll(-1, 1).flatten()) for each in logits]
        return {"logits": torch.stack(logits, 1), "loss": sum(losses, torch.zeros(()))}


def output(x: Tensor) -> dict[str, Tensor]:
    return {"logits": x, "loss": x.square().mean()}


def again(self: Any, x: Tensor) -> dict[str, Tensor]:
    a, b, c = self.layers
    return output(a(c(b(a(x)))))


def run(self: Any, x: Tensor) -> dict[str, Tensor]:
    for layer in self.layers:
        x = layer(x)
    return output(x)


def shared_norm(self: Any, x: Tensor) -> dict[str, Tensor]:
    norm, *blocks = self.layers
    for block in blocks:
        x = x + block(norm(x))
    return output(norm(x))


class Recurrent(nn.RNN):
    """Keeps another list of its parameters, which led to those of the column of the first call."""

    def forward(self, *args: Any) -> Any:
        assert all([known is mine for known, mine in zip(self._flat_weights, self._parameters.values(), strict=True)])
        return super().forward(*args)


def recurrent(self: Any, x: Tensor) -> dict[str, Tensor]:
    rnn, b, c = self.layers
    return output(rnn(c(b(rnn(x)[0])))[0])


def exits(self: Any, x: Tensor) -> dict[str, Tensor]:
    """Return what the head makes of the output of each block."""
    *blocks, head = self.layers
    outputs = []
    for block in blocks:
        x = block(x)
        outputs.append(head(x))
    return output(torch.stack(outputs, 1))


def looped(self: Any, x: Tensor) -> dict[str, Tensor]:
    return run(self, run(self, run(self, x)["logits"])["logits"])


class Pair(nn.Module):
    """An encoder and a decoder with one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList([Block(WIDTH) for _ in range(2)])
        self.decoder = nn.ModuleList([Block(WIDTH) for _ in range(2)])

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        h, y = self.shared(ids), None
        for block in self.encoder:
            h = block(h)
        y = self.shared(ids.roll(1, 1))
        for block in self.decoder:
            y = block(y, mask=h)
        return output(y @ self.shared.weight.t())


class Turned(nn.Linear):
    """Has a constant."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("turn", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.turn.cos()


class Scaled(nn.Module):
    """Multiplies by a weight, in a function of its own, as fused norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Hidden.apply(x, self.weight)
        return result


def blocks(n: int, dropout: float = 0.0) -> list[nn.Module]:
    return [Block(WIDTH, dropout) for _ in range(n)]


#: How to make a model, its input, and the modules of its spine.
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "further tokens": (Language, IDS, 9),
    "a, b, c, a": (lambda: chain(again, *blocks(3)), X, 3),
    "shared norm": (lambda: chain(shared_norm, nn.LayerNorm(WIDTH), *blocks(4)), X, 5),
    "exits": (lambda: chain(exits, *blocks(4), nn.Linear(WIDTH, WIDTH)), X, 5),
    "looped": (lambda: chain(looped, *blocks(3)), X, 3),
    "encoder and decoder": (Pair, IDS, 5),
    "constant": (lambda: chain(again, Turned(), nn.Linear(4, 4), nn.Linear(4, 4)), X, 3),
    "recurrent": (lambda: chain(recurrent, Recurrent(4, 4, batch_first=True), *blocks(2)), X[:, None], 3),
    "function of its own": (lambda: chain(again, Scaled(), nn.Linear(4, 4), nn.Linear(4, 4)), X, 3),
}

#: The number of partitions, the schedule, and other settings.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {"schedule": "1F1B"}),
    "three": (3, {"schedule": "ZeroBubble"}),
    "recomputed": (3, {"schedule": "GPipe", "checkpoint": True}),
    "offload": (3, {"offload": True, "partitions": 3}),
    "round two devices": (2, {"schedule": "Interleaved1F1B", "partitions": 4}),
}


def compare(model: Any, plain: nn.Module, x: Tensor) -> None:
    """Compare a call, its backward and a step with the plain model on the micro-batches, and a call without a graph."""
    # A copy on another device has other strides, with which products may round differently.
    slack = 1e-12 if any([device.type == "late" for device in model._runs().settings.devices]) else 0.0
    parts = [plain(part) for part in x.chunk(3)]
    sum([part["loss"] / 3 for part in parts]).backward()  # type: ignore[union-attr]
    expected, logits = gradients(plain), torch.cat([part["logits"] for part in parts])
    result = model(x)
    torch.testing.assert_close(result["logits"].cpu(), logits, rtol=slack, atol=slack)
    result["loss"].backward()
    same(gradients(model), expected)
    loss = model.step(x)
    torch.testing.assert_close(loss.cpu(), sum([part["loss"].detach() / 3 for part in parts]), rtol=1e-14, atol=0)
    same(gradients(model), expected)
    with torch.no_grad():
        torch.testing.assert_close(model(x)["logits"].cpu(), logits, rtol=slack, atol=slack)


#: Each model in each way: three in five on the host, and the others on the accelerator.
PAIRS = [
    pytest.param(name, way, "late", marks=pytest.mark.late) if (row + column) % 5 < 2 else (name, way, "cpu")
    for row, name in enumerate(MODELS)
    for column, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("name", "way", "kind"), PAIRS)
def test_each_call_computes_where_the_model_is(name: str, way: str, kind: str) -> None:
    make, x, parts = MODELS[name]
    n, options = WAYS[way]
    if options.get("partitions", n) > parts:
        pytest.skip("the spine is shorter")
    torch.manual_seed(0)
    model: Any = make().double()
    plain = copy.deepcopy(model)
    devices = [f"{kind}:{k}" for k in range(n)]
    pipelined(model, x[:2], chunks=3, devices=devices, balance="parameters", **options)
    assert len(model.layout.spine) == parts
    compare(model, plain, x)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("late", marks=pytest.mark.late)])
@pytest.mark.parametrize("again_at_backward", [(), True, ["layers.0.dropout", "layers.1"]])
def test_dropout_follows_the_micro_batch(kind: str, again_at_backward: Any) -> None:
    results = []
    for n in (1, 2, 3):
        torch.manual_seed(0)
        model = chain(again, *blocks(3, dropout=0.5)).double()
        options: Any = {"devices": [f"{kind}:{k}" for k in range(n)], "checkpoint": again_at_backward}
        pipelined(model, X[:2], chunks=3, balance="parameters", **options)
        torch.manual_seed(1)
        stepped = model.step(X).cpu(), gradients(model)
        loss = model(X)["loss"]
        loss.backward()
        results.append((*stepped, loss.detach().cpu(), gradients(model)))
    for result in results[1:]:
        assert result[::2] == results[0][::2]
        same(result[1], results[0][1])
        same(result[3], results[0][3])


def test_autocast() -> None:
    """Each twin has casts of its own."""
    torch.manual_seed(0)
    model: Any = Language()
    plain = copy.deepcopy(model)
    pipelined(model, IDS[:2], chunks=3, devices=["cpu:0", "cpu:1", "cpu:2"], balance="parameters")
    with torch.autocast("cpu", torch.bfloat16):
        result = model(IDS)
        parts = [plain(part) for part in IDS.chunk(3)]
        assert torch.equal(result["logits"], torch.cat([part["logits"] for part in parts]))
        result["loss"].backward()
        sum([part["loss"] / 3 for part in parts]).backward()  # type: ignore[union-attr]
    same(gradients(model), gradients(plain), tolerance=0.02)


def own_checkpoints(self: Any, x: Tensor) -> dict[str, Tensor]:
    a, b, c = self.layers
    for layer in (a, b, c, a):
        x = checkpoint(layer, x, use_reentrant=False)
    return output(x)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("late", marks=pytest.mark.late)])
def test_within_checkpoints_of_the_model(kind: str) -> None:
    """The second run calls the module of the first column again, in a worker of another device."""
    torch.manual_seed(0)
    model = chain(own_checkpoints, *blocks(3)).double()
    plain = copy.deepcopy(model)
    pipelined(model, X[:2], chunks=3, devices=[f"{kind}:{k}" for k in range(3)], balance="parameters")
    compare(model, plain, X)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("late", marks=pytest.mark.late)])
def test_weights_that_are_frozen_tied_copied_and_new(kind: str) -> None:
    torch.manual_seed(0)
    model: Any = Language().double()
    model.head.weight = model.embed.weight
    model.head.bias.requires_grad_(False)
    plain = copy.deepcopy(model)
    pipelined(model, IDS[:2], chunks=3, devices=[f"{kind}:{k}" for k in range(3)], balance="parameters")
    compare(model, plain, IDS)
    compare(copy.deepcopy(model), plain, IDS)
    model.embed.requires_grad_(False)
    model.head = nn.Linear(WIDTH, WORDS).double()
    compare(model, copy.deepcopy(model).unpipelined().cpu(), IDS)


def test_modules_within_run_again_at_backward() -> None:
    """As they do in the first call."""
    phases: list[bool] = []
    model = chain(again, *blocks(3)).double()
    model.layers[0].up.register_forward_pre_hook(lambda *_: phases.append(is_recomputing()))
    pipelined(model, X[:2], chunks=3, devices=TWO, balance="parameters", checkpoint=["layers.0.up"])
    phases.clear()
    model.step(X)
    assert sorted(phases) == 6 * [False] + 6 * [True]


def test_hooks_hear_every_call() -> None:
    model, plain = (chain(again, *blocks(3)).double() for _ in range(2))
    heard: dict[Any, list[str]] = {model: [], plain: []}
    for each in (model, plain):
        down = each.layers[0].down
        down.register_forward_hook(lambda *_, told=heard[each]: told.append("forward"))
        down.register_full_backward_hook(lambda *_, told=heard[each]: told.append("backward"))
    pipelined(model, X[:2], chunks=3, devices=TWO, balance="parameters")
    heard[model].clear()
    model(X)["loss"].backward()
    sum([plain(part)["loss"] for part in X.chunk(3)]).backward()  # type: ignore[union-attr]
    assert sorted(heard[model]) == sorted(heard[plain])


def data_dependent(self: Any, x: Tensor, repeats: bool = False) -> dict[str, Tensor]:
    a, b, c = self.layers
    x = c(b(a(x)))
    return output(a(x) if repeats else x)


def test_a_sample_that_takes_the_way() -> None:
    """It is what the error asks for."""
    model = chain(data_dependent, *blocks(3)).double()
    plain = copy.deepcopy(model)
    pipelined(model, X[:2], chunks=3, devices=TWO, balance="parameters")
    with pytest.raises(RuntimeError, match=r"'layers\.0' belongs to partition 0, .* give a sample that takes this way"):
        model.step(X, repeats=True)
    pipelined(model.unpipelined(), (X[:2], True), chunks=3, devices=TWO, balance="parameters")
    compare(model, plain, X)
    expected = sum([plain(part, True)["loss"].detach() / 3 for part in X.chunk(3)])
    torch.testing.assert_close(model.step(X, repeats=True), expected, rtol=1e-14, atol=0)


def test_a_module_that_takes_the_place_has_no_twin() -> None:
    """A batch norm would count in two places."""
    model = chain(shared_norm, nn.LayerNorm(WIDTH), *blocks(4)).double()
    pipelined(model, X[:2], chunks=3, devices=TWO, balance="parameters")
    model.layers[0] = nn.BatchNorm1d(WIDTH).double()
    with pytest.raises(RuntimeError, match=r"'layers\.0' belongs to partition 0"):
        model.step(X)


class Remembers(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return super().forward(x) + self.last


@pytest.mark.parametrize("first", [nn.BatchNorm1d(4), Remembers(4, 4)])
def test_what_has_more_than_weights_is_kept_together(first: nn.Module) -> None:
    """The error names a way that works: a twin by hand."""
    model = chain(again, first, *blocks(2)).double()
    with pytest.raises(ValueError, match=r"1 parts .* as 'layers.0' is called again .* shares the weights"):
        pipelined(model, X[:2], chunks=3, devices=TWO, balance="parameters")
    twin = copy.deepcopy(first)
    twin.weight, twin.bias = first.weight, first.bias
    model = chain(run, first, *blocks(2), twin).double().eval()
    plain = copy.deepcopy(model)
    compare(pipelined(model, X[:2], chunks=3, devices=TWO, balance="parameters"), plain, X)


def test_the_time_of_a_later_call_counts_where_it_computes() -> None:
    parts = [Part([name], 1, 1) for name in "abc"]
    names = ["", "a", "b", "a", "c", "within c", "b", "c"]
    calls = [Call(name, k, end=k + (name == "c"), seconds=float(10**k)) for k, name in enumerate(names)]
    calls[5].name = "a"
    assert _seconds(parts, SimpleNamespace(calls=calls)) == [10.0, 1100.0, 11010000.0]  # type: ignore[arg-type]
