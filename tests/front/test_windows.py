"""Micro-batches that are given, of things that nobody could split, and what was found wrong with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data._utils import pin_memory

from tests.conftest import Devices
from tests.front.models import Hidden
from tests.plain import gradients
from torchgpipe import GPipe, MicroBatches, pipelined

WIDTH = 4


class Graphs:
    """A batch of graphs, as people write their own."""

    def __init__(self, x: Tensor, edges: Tensor) -> None:
        self.x, self.edges = x, edges


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, graphs: Graphs) -> Tensor:
        source, target = graphs.edges
        return torch.tanh(self.own(x) + torch.zeros_like(x).index_add(0, target, self.others(x)[source]))


class OverGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Convolution() for _ in range(4)])

    def forward(self, graphs: Graphs) -> Tensor:
        x = graphs.x
        for layer in self.layers:
            x = x + layer(x, graphs)
        return x.square().mean()


class OverSequences(nn.Module):
    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, packed: PackedSequence) -> Tensor:
        for layer in self.layers:
            packed, _ = layer(packed)
        padded, lengths = pad_packed_sequence(packed)
        return padded.square().sum() / lengths.sum()


class OverNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return (x.values() if x.layout is torch.jagged else torch.cat(x.unbind())).square().mean()


class UnderMasks(nn.Module):
    """Looks at the blocks of a mask, as FlexAttention does, which not every device has."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
            result: Tensor = self.linear(x) / mask.kv_num_blocks.sum()
            return result

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(4)])

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask)
        return x.square().mean()


def masked(length: int) -> tuple[Tensor, BlockMask]:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cpu", BLOCK_SIZE=2)
    return torch.randn(length, WIDTH, dtype=torch.float64), mask


def graphs(nodes: int) -> tuple[Graphs]:
    return (Graphs(torch.randn(nodes, WIDTH, dtype=torch.float64), torch.randint(nodes, (2, 3 * nodes))),)


def sequences(count: int) -> list[Tensor]:
    return [torch.randn(1 + 2 * k % 5, WIDTH, dtype=torch.float64) for k in range(count)]


def packed(count: int) -> tuple[PackedSequence]:
    return (pack_sequence(sequences(count), enforce_sorted=False),)


def nested(count: int, layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.nested_tensor(sequences(count), layout=layout)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "graphs of a class of the user's own": (OverGraphs, graphs),
    "packed sequences": (lambda: OverSequences(nn.RNN), packed),
    "masks of FlexAttention": (UnderMasks, masked),
}


@pytest.mark.on_late
@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_could_split_comes_to_the_first_device(kind: str, devices: Devices) -> None:
    """A bug: tensors in objects of a user's class and in masks stayed on the host, and the batch sizes of packed
    sequences, which have to stay there, did not."""
    make, draw = KINDS[kind]
    plain = make().double()
    model = pipelined(copy.deepcopy(plain), MicroBatches([draw(2), draw(3)]), devices=devices(3), balance="parameters")
    window = [draw(count) for count in (3, 1, 4)]
    model.step(MicroBatches(window, weights=[1, 1, 1]))
    for batch in window:
        loss = plain(*batch)
        loss.backward(torch.full_like(loss, 1 / 3))
    for name, grad in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], grad, rtol=1e-12, atol=1e-12)


def test_inputs_in_an_object_of_the_users_class_get_gradients(devices: Devices) -> None:
    """A bug: the backward of each micro-batch went on into what the caller had computed them with, and freed that."""
    plain = OverGraphs().double()
    model = pipelined(copy.deepcopy(plain), MicroBatches([graphs(2)]), devices=devices(2), balance="parameters")
    window, scale = [graphs(3), graphs(2)], torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
    found = []
    for run in (model, lambda batches: [plain(*batch) for batch in batches]):
        root = scale.exp()
        of_root = MicroBatches([(Graphs(batch.x * root, batch.edges),) for (batch,) in window])
        found += torch.autograd.grad(sum(run(of_root)), scale)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


class Labelled(nn.Module):
    """Classifies rows of a batch of the user's own class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def forward(self, batch: Graphs) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch.x), batch.edges)


def test_labels_in_an_object_weigh_as_labels_elsewhere(devices: Devices) -> None:
    """A bug: they were not found, so each micro-batch weighed the same."""
    x, labels = torch.randn(6, WIDTH, dtype=torch.float64), torch.tensor([0, 1, -100, 2, -100, -100])
    plain = Labelled().double()
    window = [(Graphs(x[rows], labels[rows]),) for rows in (slice(1), slice(1, 4), slice(4, 6))]
    model = pipelined(copy.deepcopy(plain), MicroBatches([window[1], window[0]]), devices=devices(2))
    torch.testing.assert_close(model.step(MicroBatches(window)), plain(Graphs(x, labels)).detach())


def test_a_model_may_change_its_input_in_place(devices: Devices) -> None:
    """A bug: the proof refused it, because each of its runs began with what the run before had left."""

    class Halving(OverNested):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(0.5)
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    x = torch.randn(2, WIDTH, dtype=torch.float64)
    model = pipelined(Halving().double(), MicroBatches([x.clone(), x.clone()]), devices=devices(2))
    given = x.clone()
    model.step(MicroBatches([given]))
    assert torch.equal(given, x * 0.5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_pass_if_they_are_jagged(devices: Devices) -> None:
    """PyTorch's functions of autograd do not take the strided ones, which PyTorch itself refuses at a boundary."""
    plain = OverNested().double()
    model = pipelined(copy.deepcopy(plain), MicroBatches([nested(2), nested(3)]), devices=devices(2))
    window = [nested(count) for count in (3, 1, 4)]
    sum(model(MicroBatches(window))).backward()
    for batch in reversed(window):
        plain(batch).backward()
    for name, grad in gradients(plain).items():
        assert torch.equal(gradients(model)[name], grad), name  # type: ignore[arg-type]
    strided = MicroBatches([nested(2, torch.strided)])
    with pytest.raises(RuntimeError) as caught:
        pipelined(copy.deepcopy(plain), strided, devices=["cpu:0", "cpu:1"])
    assert "during forward" in caught.value.__notes__[0]


@pytest.mark.parametrize("schedule", ["ZeroBubble", "V-Half", "ZB-V"])
def test_what_cannot_be_split_waits_for_what_earlier_micro_batches_have_left(schedule: str) -> None:
    """A bug: a micro-batch that uses a weight once left its gradient for later, behind that of the next, which used it
    twice and could leave nothing; so they were added in another order than in any loop."""

    class ForEach(OverNested):
        def forward(self, images: list[Tensor]) -> Tensor:
            for layer in self.layers:
                images = [layer(image).tanh() for image in images]
            return torch.cat(images).square().mean()

    plain = ForEach().double()
    window = [(sequences(count),) for count in (1, 3, 1, 1, 2, 1, 4)]
    places = ["cpu:0", "cpu:1"] if schedule == "ZeroBubble" else ["cpu:0", "cpu:1", "cpu:1", "cpu:0"]
    model = pipelined(copy.deepcopy(plain), MicroBatches(window[:2]), devices=places, schedule=schedule)  # type: ignore[arg-type]
    model.step(MicroBatches(window, weights=[1] * len(window)))
    for batch in window:
        loss = plain(*batch)
        loss.backward(torch.full_like(loss, 1 / len(window)))
    for name, grad in gradients(plain).items():
        assert torch.equal(gradients(model)[name], grad), name  # type: ignore[arg-type]


def test_a_module_of_the_spine_may_be_called_within_one_that_is_recomputed() -> None:
    """A bug: under offload with one partition, the inner call at backward was taken for one from outside of the model.

    A diffusion transformer calls the embedding within its first block at its end, too.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.outer(self.inner(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return (x + self.blocks[0].inner(x)).square().mean()  # type: ignore[operator]

    plain, x = Model().double(), torch.randn(2, WIDTH, dtype=torch.float64)
    model = pipelined(copy.deepcopy(plain), MicroBatches([x]), devices=["cpu"], partitions=1, offload=True)
    model.step(MicroBatches([x]))
    plain(x).backward()
    for name, grad in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], grad, rtol=1e-12, atol=1e-12)


class Optional(nn.Module):
    """Takes arguments that only some micro-batches have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(
        self, x: Tensor, gate: Tensor | None = None, scale: int = 1, num_items_in_batch: int | None = None
    ) -> Tensor:
        first = x = self.layers[0](x).tanh()
        for layer in self.layers[1:]:  # type: ignore[index]
            x = layer(x).tanh()
        if gate is not None:
            x = Product.apply(x * gate, first)
        return x.square().mean() * scale


class Product(Hidden):
    """Its node has this name in errors."""


def x_and(**others: Any) -> dict[str, Any]:
    return {"x": torch.randn(2, WIDTH, dtype=torch.float64), **others}


def test_each_way_through_the_model_is_verified_at_its_first_window() -> None:
    """A bug: the arguments of the first micro-batch stood for those of all, which may take other ways."""
    window = MicroBatches([x_and(), x_and()])
    model = pipelined(Optional().double(), window, devices=["cpu:0", "cpu:1"], balance="parameters")
    model.step(window)
    gate = torch.ones(WIDTH, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="'ProductBackward' takes a tensor"):
        model.step(MicroBatches([x_and(), x_and(gate=gate)]))


class Measuring(nn.Linear):
    length = 1

    def forward(self, x: Tensor) -> Tensor:
        self.length = len(x)
        return super().forward(x).tanh()


class Measured(nn.Module):
    """Reads the length in its last partition, where the first module may have set that of another micro-batch."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Measuring(WIDTH, WIDTH) for _ in range(4)])
        self.read = self.layers[3 if last else 0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum() / self.read.length  # type: ignore[operator]


def test_a_length_that_an_earlier_partition_keeps_is_refused() -> None:
    """Wrong in silence: all micro-batches of the sample had one length, and those of a later window did not."""
    places = ["cpu:0", "cpu:1"]
    window = [(torch.randn(rows, WIDTH, dtype=torch.float64),) for rows in (2, 2, 5, 3)]
    with pytest.raises(ValueError, match="keeps state that another micro-batch changes"):
        pipelined(Measured(last=False).double(), MicroBatches(window[:2]), devices=places, balance="parameters")
    plain = Measured(last=True).double()  # Set and read in one partition, which one micro-batch has at a time.
    model = pipelined(copy.deepcopy(plain), MicroBatches(window[:2]), devices=places, balance="parameters")
    loss = model.step(MicroBatches(window, weights=[1] * 4))
    assert loss.item() == pytest.approx(sum([plain(*batch).item() for batch in window]) / 4, rel=1e-12)


def test_numbers_count_as_seen_wherever_the_sample_has_them(devices: Devices) -> None:
    """A number may be what a loss is divided by, so one that the sample did not give wants weights."""
    model = pipelined(Optional().double(), MicroBatches([x_and(), x_and(scale=2)]), devices=devices(2))
    model.step(MicroBatches([x_and(), x_and(scale=3)]))
    model = pipelined(Optional().double(), MicroBatches([x_and(), x_and()]), devices=devices(2))
    window = [x_and(), x_and(scale=3)]
    with pytest.raises(ValueError, match=r"may depend on \['scale'\].* or give MicroBatches weights"):
        model.step(MicroBatches(window))
    model.step(MicroBatches(window, weights=[1, 2]))


def test_weights_that_contradict_each_other_are_refused(devices: Devices) -> None:
    """The weights of the target were ignored, and losses with and without a count were added up."""
    x, layers = torch.randn(2, WIDTH, dtype=torch.float64), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    model = GPipe(layers, [1, 1], devices=devices(2), loss_fn=nn.MSELoss())
    with pytest.raises(ValueError, match=r"the input has weights \[1\.0, 2\.0\], and the target \[2\.0, 1\.0\]"):
        model.step(MicroBatches([x, x], weights=[1, 2]), MicroBatches([x, x], weights=[2, 1]))
    counted = pipelined(Optional().double(), MicroBatches([x_and(), x_and()]), devices=devices(2))
    with pytest.raises(ValueError, match="num_items_in_batch is in some of the MicroBatches only"):
        counted.step(MicroBatches([x_and(), x_and(num_items_in_batch=4)]))


def test_what_pins_or_moves_batches_leaves_a_window_alone() -> None:
    """A bug: a DataLoader that pins memory took it for a list, and made another of it without the weights."""
    window = MicroBatches([torch.zeros(2), torch.zeros(3)], weights=[1, 2])
    assert pin_memory.pin_memory(window) is window


class NextTokens(nn.Module):
    """A language model of the user's own, whose loss leaves out the first label of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return nn.functional.cross_entropy(self.head(x)[:, :-1].reshape(-1, 9), labels[:, 1:].reshape(-1))


def test_labels_that_a_loss_leaves_out_do_not_count() -> None:
    """All labels counted, as rows together could not tell: a short sequence got too much weight, in silence."""

    def batch(length: int) -> tuple[Tensor, Tensor]:
        return torch.randint(9, (1, length)), torch.randint(9, (1, length))

    window = [batch(3), batch(7), batch(5)]
    model: Any = NextTokens().double()
    losses = [model(*one).detach() for one in window]
    pipelined(model, MicroBatches([batch(4), batch(6)]), devices=["cpu:0", "cpu:1"])
    torch.testing.assert_close(model.step(MicroBatches(window)), (2 * losses[0] + 6 * losses[1] + 4 * losses[2]) / 12)
