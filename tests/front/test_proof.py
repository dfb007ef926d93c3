"""A pipelined model proves itself on its sample: what is compared, what is let through, what stays behind: nothing."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.front.models import TWO, Chain, chain, gradients, same
from torchgpipe import MicroBatches, pipelined
from torchgpipe.front.sample_proof import SampleProof
from torchgpipe.model.comparison import Comparison
from torchgpipe.model.fingerprint import fingerprint
from torchgpipe.run import threads


class Net(nn.Module):
    """Four blocks with dropout and batch norm, and a loss that balances rows, as experts do."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"out": x, "balance": x.softmax(1).mean(0).square().sum()}


def two(model: nn.Module, sample: Tensor | None = None, **options: Any) -> Any:
    """Pipeline a model on two devices."""
    sample = torch.randn(2, 4) if sample is None else sample
    return pipelined(model, sample, chunks=3, devices=TWO, balance="parameters", **options)


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in np.random.get_state()]]


@pytest.mark.parametrize("option", ["may_differ", "verify"])
def test_nothing_stays_behind(option: str) -> None:
    model: Any = Net()
    model.blocks[2].eval()
    heard: list[Any] = []
    for parameter in model.parameters():
        parameter.register_hook(heard.append)
        parameter.register_post_accumulate_grad_hook(heard.append)
    model.blocks[0][0].weight.grad = torch.ones(4, 4)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters, modes, before = dict(model.named_parameters()), [one.training for one in model.modules()], states()
    with pytest.warns(UserWarning, match=r"\['balance'\] differ between rows together and rows apart"):
        two(model, torch.randn(3, 4), **{option: ["balance"]})
    after = states()
    torch.randn(3, 4)
    assert after[1:] == before[1:]
    assert [one.training for one in model.modules()] == modes
    assert all([parameters[name] is parameter for name, parameter in model.named_parameters()])
    assert all([torch.equal(state[name], tensor) for name, tensor in model.state_dict().items()])
    assert model.blocks[0][0].weight.grad.equal(torch.ones(4, 4))
    assert model.blocks[0][0].bias.grad is None
    assert not heard

    random_state = torch.get_rng_state()
    table = model.verify(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not heard
    assert table.is_equal  # The balance may still differ.
    assert "'balance', rows together and apart" not in [row.name for row in table.rows]


@pytest.mark.parametrize("inference", [False, True])
def test_the_callers_tensors_stay_as_they_are_and_may_be_of_inference_mode(inference: bool) -> None:
    """The pipeline ran on the caller's own memory: the model changed it, and what inference mode made was refused."""
    model: Any = chain(lambda self, x: Chain.forward(self, x.mul_(2)))
    with torch.inference_mode(inference):
        x = torch.randn(6, 4)
        before = x.clone()
    pipelined(model, x, chunks=1, devices=TWO, balance="parameters")
    with torch.inference_mode(inference):
        assert model.verify(x).is_equal
    assert torch.equal(x, before)


def test_the_balancing_of_experts_is_refused_unless_it_is_named() -> None:
    with pytest.raises(ValueError, match=r"may_differ=\['balance'\] lets it differ, with a warning .*verify=False"):
        two(Net())
    assert not two(Net(), verify=False).verify(torch.randn(4, 4)).is_equal


def test_everything_is_compared() -> None:
    model = two(Chain(), loss_fn=nn.MSELoss())
    table = model.verify(torch.randn(6, 4), target=torch.randn(6, 4))
    assert table.is_equal
    assert {row.name for row in table.rows} == {
        "loss, rows together and apart",
        "'value', rows together and apart",
        "loss",
        *[f"'value' of micro-batch {i}{mode}" for i in range(3) for mode in ("", ", in evaluation")],
        *[f"gradient of '{name}'" for name, _ in model.named_parameters()],
    }
    assert str(table).splitlines()[-1] == "equal, but for the order of sums"


def test_a_loss_function_is_compared_on_the_target_of_the_sample() -> None:
    def total(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    sample, target = torch.randn(2, 4), torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"the output 'loss' of 4 rows .*; it is a sum: give reduce='sum'"):
        two(Chain(), sample, loss_fn=total, target=target)
    two(Chain(), sample, loss_fn=total, target=target, reduce="sum")


def test_the_first_tensor_that_differs_is_named_with_its_partition() -> None:
    """Nobody looks at numbers in a box, where the second partition finds those of another micro-batch."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if k == 0:
                self.kept.numbers = x.detach().mean(1).tolist()
        return x + torch.tensor(self.kept.numbers)[:, None]

    torch.manual_seed(0)
    model = chain(forward)
    model.kept = SimpleNamespace()
    with pytest.raises(ValueError, match=r"the output 'value' of micro-batch 0 is not .* when it leaves partition 1"):
        two(model)


def casts(self: Chain, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return Chain.forward(self, x).float()


def draws_in_evaluation(self: Chain, x: Tensor) -> Any:
    """Rows together draw other numbers than rows apart, but the pipeline draws what the rows apart draw."""
    x = Chain.forward(self, x)
    return x + torch.randn_like(x) * 0.1, x


def drops_layers(source: Callable[[], float]) -> Callable[[Chain, Tensor], Any]:
    """Drop layers by Python or NumPy, as speech models do: the order of micro-batches decides on what each drops."""

    def forward(self: Chain, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = torch.tanh(layer(x))
            x = x if self.training and source() < 0.5 else y
        return x

    return forward


@pytest.mark.parametrize(
    "forward", [casts, draws_in_evaluation, drops_layers(random.random), drops_layers(np.random.rand)]
)
def test_what_is_no_fault(forward: Callable[..., Any]) -> None:
    np.random.seed(0)
    random.seed(0)
    before = states()
    two(chain(forward))
    assert states()[1:] == before[1:]


def only_evaluates(self: Chain, x: Tensor) -> Any:
    """Change what tanh has saved, so that there is no backward."""
    x = torch.tanh(self.layers[0](x))
    x.mul_(2)
    return Chain.forward(self, x)


def fails_in_training(self: Chain, x: Tensor) -> Any:
    if self.training:
        raise TypeError("targets are missing")
    return Chain.forward(self, x)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [(only_evaluates, "gradients, because the plain"), (fails_in_training, "training, in which")],
)
def test_what_is_not_compared_is_told_with_the_reason(forward: Callable[..., Any], reason: str) -> None:
    """A plain backward that failed, for want of memory even, skipped the comparison without a word."""
    with pytest.warns(UserWarning, match=f"not compared: {reason}"):
        model = two(chain(forward).eval())
    x = torch.randn(6, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(x), forward(model.unpipelined(), x))


def test_a_backward_without_memory_is_an_error() -> None:
    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise torch.OutOfMemoryError("the device is full")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        two(chain(lambda self, x: Full.apply(Chain.forward(self, x))))
    assert "give a sample of fewer rows" in raised.value.__notes__[-1]


def test_autocast_around_it_rounds_coarsely() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        two(Chain())


def couples(self: Any, x: Tensor) -> Tensor:
    if not x.is_floating_point():
        x = self.words(x).mean(1)
    return (y := Chain.forward(self, x)) - y.mean(0)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "sample",
    [
        *[torch.zeros(2, 4), torch.ones(2, 4), torch.ones(1, 4), torch.ones(4, 4), torch.zeros(8, 4)],
        *[torch.full((2, 6), 1), torch.full((4, 6), 3), torch.zeros(4, 6, dtype=torch.long)],
        *[torch.arange(6).repeat(2, 1), torch.arange(6).repeat(3, 1), torch.arange(6)[None], torch.full((2, 4), 1e-38)],
    ],
    ids=str,
)
def test_a_sample_whose_rows_are_equal_shows_what_couples_them(sample: Tensor) -> None:
    """The usual dummies were accepted for what couples rows: a row minus their mean is zero."""
    model = chain(couples)
    model.words = nn.Embedding(9, 4)
    with pytest.raises(ValueError, match="the rows are coupled"):
        two(model, sample)


def test_a_sample_that_cannot_be_varied_is_refused() -> None:
    model = chain(lambda self, x: Chain.forward(self, x.float()))
    with pytest.raises(
        ValueError, match=r"all rows of the sample are equal in \['x'\], and cannot be varied.* give a s"
    ):
        two(model, torch.zeros(4, 4, dtype=torch.bool))


def test_sizes_that_shapes_are_computed_of_stay() -> None:
    """Mistral's and Phi-4's images have a size each, and equal sizes were varied like the ids of tokens."""
    model = chain(lambda self, x, sizes: Chain.forward(self, x.view(-1, *sizes[0]).flatten(1)))
    sizes = torch.full((2, 2), 2)
    pipelined(model, (torch.randn(2, 4), sizes), chunks=2, devices=TWO, balance="parameters")
    two(model.unpipelined(), (torch.randn(1, 4), sizes[:1]))


def test_rows_in_another_dimension_are_refused_and_taken_as_micro_batches() -> None:
    """HiDream has the layers of its text encoder before the rows."""

    def forward(self: Any, x: Tensor, layers: Tensor) -> Tensor:
        return Chain.forward(self, x + layers.sum(0))  # type: ignore[no-any-return]

    plain, batches = chain(forward).double(), [(torch.randn(2, 4), torch.randn(3, 2, 4)) for _ in range(2)]
    batches = [(x.double(), layers.double()) for x, layers in batches]
    model = copy.deepcopy(plain)
    with pytest.raises(RuntimeError, match="size of tensor") as failed:
        pipelined(model, batches[0], chunks=2, devices=TWO)
    assert any(["give the micro-batches yourself" in note for note in failed.value.__notes__])
    pipelined(model, (MicroBatches(batches),), devices=TWO)
    for ours, batch in zip(model(MicroBatches(batches)), batches):
        ours.sum().backward(retain_graph=True)
        plain(*batch).sum().backward()
    same(gradients(model), gradients(plain))


@pytest.mark.parametrize("ids", [[0, 0], [1, 1], [3, 3], [0, 3]], ids=str)
@pytest.mark.parametrize("how", ["counts", "means", "trims"])
def test_equal_classes_show_what_couples_them(ids: list[int], how: str) -> None:
    """Beside other rows that differ, the same class everywhere was left alone, or each row got one of its own."""

    def forward(self: Any, x: Tensor, ids: Tensor) -> Tensor:
        if how == "counts":
            x = x * torch.bincount(ids)[ids][:, None]
        elif how == "means":
            x = x + (words := self.words(ids)) - words.mean(0)
        else:
            x = x * (torch.arange(4) < ids.max())
        return Chain.forward(self, x)  # type: ignore[no-any-return]

    model = chain(forward)
    model.words = nn.Embedding(5, 4)
    with pytest.raises(ValueError, match="the rows are coupled"):
        pipelined(model, (torch.randn(2, 4), torch.tensor(ids)), chunks=2, devices=TWO, balance="parameters")


@pytest.mark.parametrize("lengths", [[4, 4], [1, 1], [3]], ids=str)
def test_lengths_stay_lengths(lengths: list[int]) -> None:
    """Lengths were drawn like words, so that one was 0, which no model takes."""

    def forward(self: Any, words: Tensor, lengths: Tensor) -> Tensor:
        rows = nn.utils.rnn.pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        return Chain.forward(self, self.recurrent(rows)[1][0])  # type: ignore[no-any-return]

    model = chain(forward)
    model.words, model.recurrent = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True)
    sample = torch.randint(9, (len(lengths), 4)), torch.tensor(lengths)
    pipelined(model, sample, chunks=2, devices=TWO, balance="parameters")


def test_what_a_model_asks_of_its_rows_is_kept_if_it_must_be() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        assert torch.equal(x.sum(1), torch.ones(len(x)))
        return Chain.forward(self, x)  # type: ignore[no-any-return]

    two(chain(forward), torch.eye(4)[[1, 1]])


def test_what_has_equal_rows_by_nature_stays_equal() -> None:
    """A model may look at the positions of the first row only; others were put into repeated rows."""

    def forward(self: Any, x: Tensor, positions: Tensor) -> Tensor:
        assert torch.equal(positions, positions[:1].expand_as(positions))
        return Chain.forward(self, x) + positions[0] * 0.1  # type: ignore[no-any-return]

    sample = (torch.randn(2, 4), torch.arange(4).repeat(2, 1))
    model: Any = pipelined(chain(forward), sample, chunks=3, devices=TWO, balance="parameters")
    assert model(torch.randn(6, 4), torch.arange(4).repeat(6, 1)).shape == (6, 4)


def returns_a_number(number: Callable[..., Tensor], head: bool = False) -> Any:
    """Return a model whose output is a number, perhaps behind a head that begins at zero."""

    def forward(self: Any, x: Tensor, **more: Any) -> dict[str, Tensor]:
        x = Chain.forward(self, x)
        return {"loss": number(x, **more), "temperature": torch.full((), 3.0, dtype=x.dtype)}

    model = chain(forward).double()
    if head:
        nn.init.zeros_(model.layers[-1].weight)
        nn.init.zeros_(model.layers[-1].bias)
    return model


def by_items(x: Tensor, num_items_in_batch: int | None = None) -> Tensor:
    return x.square().sum() / (len(x) if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.parametrize(
    ("number", "head", "more"),
    [
        *[(lambda x: x.sum(), False, {}), (lambda x: x.sum(), True, {}), (lambda x: x.mean(), True, {})],
        *[(by_items, False, {}), (by_items, False, {"num_items_in_batch": 6})],
    ],
    ids=["sum", "sum of zeros", "mean of zeros", "without items", "with items"],
)
def test_how_numbers_are_joined_is_found_by_value_and_gradient(
    number: Callable[..., Tensor], head: bool, more: dict[str, int]
) -> None:
    """A head that begins at zero hides a sum; a number that is no loss was summed up like one."""
    model = returns_a_number(number, head)
    plain, x = copy.deepcopy(model), torch.randn(6, 4, dtype=torch.float64)
    output, expected = two(model, x[:2])(x, **more), plain(x, **more)
    output["loss"].backward()
    expected["loss"].backward()
    torch.testing.assert_close(dict(output), dict(expected))
    same(gradients(model), gradients(plain))


@pytest.mark.parametrize("shift", ["no", "sliced", "padded", "rows"])
@pytest.mark.parametrize(("name", "rows", "verify"), [("labels", 1, True), ("targets", 2, True), ("labels", 2, False)])
def test_which_labels_weigh_a_loss_is_found_whatever_they_are_called(
    name: str, shift: str, rows: int, verify: bool
) -> None:
    """The sample has no padding, which is what batches have: it is put into the sample."""

    def forward(self: Any, ids: Tensor, **more: Tensor) -> Tensor:
        logits, labels = Chain.forward(self, self.words(ids)), more[name]
        if shift == "sliced":
            logits, labels = logits[:, :-1], labels[:, 1:]
        elif shift == "padded":
            labels = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        if shift == "rows":
            return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1).mean()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model = chain(forward).double()
    model.words = nn.Embedding(4, 4).double()
    plain, ids = copy.deepcopy(model), torch.randint(4, (6, 5))
    labels = ids.clone()
    for row in range(6):
        labels[row, 5 - row // 2 :] = -100
    labels[3, 0] = -100
    model = two(model, {"ids": ids[:rows], name: ids[:rows].clone()}, verify=verify)
    assert model.verify(ids, **{name: ids.clone()}).is_equal  # Without padding, any rule fits.
    torch.testing.assert_close(model(ids, **{name: labels}), plain(ids, **{name: labels}))


def loss_of(rule: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return a model that takes a batch of words and labels, and returns its loss."""

    def forward(self: Any, batch: dict[str, Tensor]) -> Tensor:
        losses = functional.cross_entropy(
            Chain.forward(self, self.words(batch["ids"])).transpose(1, 2), batch["labels"], reduction="none"
        )
        return rule(losses, batch["mask"] if "mask" in batch else batch["labels"])

    model = chain(forward).double()
    model.words = nn.Embedding(4, 4).double()
    return model


@pytest.mark.parametrize(
    ("rule", "mask"),
    [
        (lambda losses, labels: (losses * (labels != 0)).sum() / (labels != 0).sum(), False),
        (lambda losses, mask: (losses * mask).sum() / mask.sum(), True),
        (lambda losses, labels: (losses * (w := torch.tensor([1.0, 2, 3, 4])[labels])).sum() / w.sum(), False),
        (lambda losses, _: losses.mean().sqrt(), False),
    ],
    ids=["padding is 0", "mask", "classes weigh", "root"],
)
def test_numbers_that_the_sample_does_not_show_to_be_no_means_are_refused(rule: Any, mask: bool) -> None:
    """Without padding in the sample they looked like means; repeated rows had the same words in another order."""
    ids = torch.tensor([[1, 2, 3, 1, 2], [3, 2, 1, 2, 3]])
    batch = {"ids": ids, "labels": ids.clone(), **({"mask": torch.ones(2, 5)} if mask else {})}
    with pytest.raises(ValueError, match=r"if it is a weighted mean, .* give weight="):
        two(loss_of(rule), (batch,))


def test_labels_within_an_argument_weigh_a_loss() -> None:
    model = loss_of(lambda losses, labels: losses.sum() / (labels != -100).sum())
    plain, ids = copy.deepcopy(model), torch.randint(4, (6, 5))
    labels = ids.where(torch.arange(5) < torch.arange(1, 7)[:, None], -100)
    two(model, ({"ids": ids[:2], "labels": ids[:2].clone()},))
    batch = {"ids": ids, "labels": labels}
    torch.testing.assert_close(model(batch), plain(batch))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [2, 4])
def test_a_short_row_whose_first_label_is_left_out_shows_its_rule(seed: int, length: int) -> None:
    """Rows were made of it by drawing, so most of their labels were left out as well, and a wrong rule fitted."""

    def forward(self: Any, ids: Tensor, labels: Tensor) -> Tensor:
        logits = Chain.forward(self, self.words(ids))
        return functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])

    torch.manual_seed(seed)
    model = chain(forward).double()
    model.words = nn.Embedding(4, 4).double()
    plain, ids = copy.deepcopy(model), torch.randint(4, (6, length))
    labels = ids.where(torch.arange(length) <= torch.arange(6)[:, None] % length, -100)
    labels[:, 0] = -100
    two(model, {"ids": ids[:1], "labels": torch.tensor([[-100, *range(1, length)]])})
    torch.testing.assert_close(model(ids, labels), plain(ids, labels))


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.long, (4, 5)), (torch.int8, (4, 5)), (torch.bool, (4, 5)), (torch.bool, (4,))], ids=str
)
def test_places_that_count_are_found_whatever_they_are_called(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A sample in which all of them count looked like a mean over rows, unless they were called a mask."""

    def forward(self: Any, x: Tensor, valid: Tensor) -> Tensor:
        losses = Chain.forward(self, x).square().mean(-1)
        return ((losses if valid.dim() > 1 else losses.mean(1)) * valid).sum() / valid.sum()

    x, plain = torch.randn(4, 5, 4).double(), chain(forward).double()
    sample = {"x": x, "valid": torch.ones(shape, dtype=dtype)}
    with pytest.raises(ValueError, match=r"if it is a weighted mean, .* give weight="):
        two(copy.deepcopy(plain), sample)
    model = two(copy.deepcopy(plain), sample, weight=lambda arguments: arguments["valid"].sum())
    valid = torch.ones(shape, dtype=dtype)
    valid[1:3] = 0
    valid[3, ...] = 1
    torch.testing.assert_close(model(x, valid=valid), plain(x, valid))


@pytest.mark.parametrize("step", [False, True])
def test_a_number_that_the_sample_did_not_give_may_change_a_loss(step: bool) -> None:
    def forward(self: Any, x: Tensor, count: int | None = None) -> Tensor:
        x = Chain.forward(self, x)
        return x.mean() if count is None else x.sum() / count

    x = torch.randn(6, 4)
    model = two(chain(forward))
    with pytest.raises(ValueError, match=r"may depend on \['count'\], which the sample did not give; give pipelined a"):
        (model.step if step else model)(x, count=24)
    model = pipelined(chain(forward), (x[:2], 8), chunks=3, devices=TWO, balance="parameters")
    torch.testing.assert_close(model(x, 24), forward(model.unpipelined(), x, 24))


@pytest.mark.parametrize("label", [0, 1, 3])
@pytest.mark.parametrize("shape", [(2,), (2, 5)], ids=str)
def test_labels_of_one_class_show_that_classes_have_weights(label: int, shape: tuple[int, ...]) -> None:
    """With the usual dummies for labels, a mean weighted by classes was taken for one over labels."""

    def forward(self: Any, ids: Tensor, y: Tensor) -> Tensor:
        logits = Chain.forward(self, self.words(ids))
        return functional.cross_entropy(logits.reshape(-1, 4), y.flatten(), torch.tensor([1.0, 5.0, 0.2, 2.0]))

    model = chain(forward)
    model.words = nn.Embedding(4, 4)
    with pytest.raises(ValueError, match="if it is a weighted mean, as over tokens or classes, give weight="):
        two(model, {"ids": torch.randint(4, shape), "y": torch.full(shape, label)})


def test_tensors_that_modules_keep_in_training_only_are_watched() -> None:
    """The model was in evaluation when it was pipelined; gradients of a loss that a layer keeps were lost later."""

    class Keeping(nn.Linear):
        kept: Tensor

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(super().forward(x))
            if self.training:
                self.kept = x.square().mean()
            return x

    for k in range(4):
        model = two(chain(Chain.forward, *[Keeping(4, 4) for _ in range(4)]).eval()).train()
        model(torch.randn(6, 4))
        with pytest.raises(RuntimeError, match="was differentiated by itself"):
            model.layers[k].kept.backward()


def test_a_lock_around_a_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch waited for a lock that one held which had stopped at a boundary, without an end."""

    class Locked(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__["lock"] = threading.Lock()

        def forward(self, x: Tensor) -> Any:
            with self.lock:
                return super().forward(x)

    monkeypatch.setattr(SampleProof, "patience", 0.1)
    with pytest.raises(RuntimeError, match=r"micro-batch 1 waits for ever in .*test_proof.py:\d+.* take the lock aro"):
        two(Locked())


def test_what_a_first_run_moves_between_a_layer_and_its_parameter_is_put_back() -> None:
    class Packed(nn.Module):
        """A layer that takes the scale of its weight from it in its first run, as quantised ones do."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-9, 9, (4, 4)).double(), requires_grad=False)
            self.weight.scale, self.scale = torch.tensor(0.01), None  # type: ignore[assignment]
            self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            weight: Any = self.weight
            if weight.scale is not None:
                self.scale, weight.scale = weight.scale, None
            return x @ (weight * self.scale) + self.bias

    def made() -> Any:
        torch.manual_seed(0)
        return chain(Chain.forward, *[Packed() for _ in range(4)])

    x, model = torch.randn(6, 4, dtype=torch.float64), two(made(), torch.randn(2, 4, dtype=torch.float64))
    assert all([layer.scale is None and layer.weight.scale is not None for layer in model.layers])
    assert torch.equal(model(x), torch.cat([made()(part) for part in x.chunk(3)]))
    assert torch.equal(model.unpipelined()(x), made()(x))


def test_what_layers_count_and_put_on_parameters_is_put_back() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.seen, self.last, self.lists = Counter[str](), deque[int](), defaultdict[str, list[int]](list)
            self.array, self.source, self.numbers = np.zeros(2), random.Random(1), np.random.default_rng(1)

        def forward(self, x: Tensor) -> Tensor:
            self.seen["calls"] += 1
            self.last.append(1)
            self.lists["calls"].append(1)
            self.array += 1
            self.source.random(), self.numbers.random()
            self.weight.calls = 1  # type: ignore[assignment]
            self.bias.requires_grad_(False)
            return torch.tanh(super().forward(x))

    def state(layer: Any) -> list[Any]:
        kept = layer.seen, layer.last, layer.lists, layer.array, layer.source.getstate(), layer.numbers.bit_generator
        return [*map(str, (*kept[:-1], kept[-1].state, vars(layer.weight))), layer.bias.requires_grad]

    model = chain(Chain.forward, *[Counting() for _ in range(4)])
    before = [state(layer) for layer in model.layers]
    two(model)
    assert [state(layer) for layer in model.layers] == before


def test_leaves_outside_of_the_model_are_compared_and_stay_as_they_are() -> None:
    heard: list[Tensor] = []
    outside = torch.ones(4, requires_grad=True)
    outside.grad = torch.full((4,), 7.0)
    outside.register_hook(heard.append)
    outside.register_post_accumulate_grad_hook(heard.append)
    model = two(chain(lambda self, x: Chain.forward(self, x) * outside))
    table = model.verify(torch.randn(6, 4))
    assert "gradient of leaf 0 outside of the model" in [row.name for row in table.rows]
    assert not heard
    assert torch.equal(outside.grad, torch.full((4,), 7.0))
    model(torch.randn(6, 4)).sum().backward()
    assert heard


def test_a_leaf_outside_that_one_micro_batch_alone_uses_is_no_fault() -> None:
    """It had no entry in one of two runs that were compared, and moved the entries of others."""
    some, all_ = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)

    def forward(self: Any, x: Tensor) -> dict[str, Tensor]:
        is_large = x[:, :1] > 5
        x = Chain.forward(self, x.clamp(max=1))
        x = (torch.where(is_large, x * some, x) if is_large.any() else x) * all_
        return {"out": x, "loss": x.mean()}

    sample = torch.randn(4, 4)
    sample[0, 0] = 6
    table = two(chain(forward), sample).verify(sample)
    assert "gradient of leaf 1 outside of the model" in [row.name for row in table.rows]


def test_a_thread_that_begins_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that had not begun had no number, so the time that it had computed could not be asked for."""
    asked, begin, count = threading.Event(), threads._Thread.run, itertools.count()
    computed = threads.seconds_of

    def begins_late(self: Any) -> None:
        if not self.name.endswith(" 0"):
            asked.wait()
        begin(self)

    def seconds_of(ident: int) -> float:
        try:
            return computed(ident) + next(count)
        finally:
            asked.set()

    monkeypatch.setattr(threads._Thread, "run", begins_late)
    monkeypatch.setattr(threads, "seconds_of", seconds_of)
    monkeypatch.setattr(SampleProof, "patience", 0.01)
    two(Chain())


@pytest.mark.parametrize(("lost", "sign"), [(0.45, 0.0), (0.2, -1.0), (0.01, 0.0), (0.01, -1.0)])
def test_a_lost_gradient_is_noticed_in_half_precision(lost: float, sign: float) -> None:
    """Beside a largest gradient of 1, one of 0.45 could be lost, and one of 0.2 reversed, without a word."""
    comparison = Comparison(torch.finfo(torch.bfloat16).eps)
    grads = {"large": torch.ones(8), "small": torch.full((8,), lost)}
    plain = {name: fingerprint(grad.bfloat16()) for name, grad in grads.items()}
    ours = {**plain, "small": fingerprint((grads["small"] * sign).bfloat16())}
    for name in plain:
        comparison.add_gradient(name, plain[name], ours[name], "differs", lambda: 0.0)
    assert [row.fault for row in comparison.rows] == ["", "differs"]


def test_a_gradient_that_is_zero_but_for_rounding_may_differ_by_it() -> None:
    """A skip from the first block to all others adds up gradients in another order, which the bias of a key feels."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.query = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, first: Tensor) -> Tensor:
            scores = self.query(x)[:, :, None] * self.key(first)[:, None, :].sum(-1, keepdim=True)
            return x + (scores.squeeze(-1) * 0 + self.key(first)).softmax(1) + first

    def forward(self: Any, x: Tensor) -> Tensor:
        first = x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = layer(x, first)
        return x

    for dtype in (torch.float32, torch.bfloat16):
        model = chain(forward, nn.Linear(4, 4), *[Attention() for _ in range(5)]).to(dtype)
        pipelined(
            model, torch.randn(2, 4, dtype=dtype), chunks=3, devices=["cpu:0", "cpu:1", "cpu:2"], balance=[2, 2, 2]
        )


class Reversible(torch.autograd.Function):
    """Layers that keep nothing: backward runs all of them again, and differentiates them itself, as in Reformer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = y = x.detach().requires_grad_()
            for layer in ctx.layers:
                y = layer(y)
        y.backward(*grads)
        return x.grad, None


def test_a_function_that_runs_layers_of_later_partitions_again_is_no_fault() -> None:
    """The gradients of a later partition arrive in the backward of the first one, which took them for lost."""

    def forward(self: Any, x: Tensor) -> Any:
        return Reversible.apply(self.layers[0](x), self.layers[1:])

    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    plain, x = chain(forward, nn.Linear(4, 4), *blocks).double(), torch.randn(4, 4, dtype=torch.float64)
    x.requires_grad_()
    model: Any = pipelined(copy.deepcopy(plain), x, chunks=2, devices=TWO, balance=[2, 3])
    model(x).square().sum().backward()
    for part in x.chunk(2):
        plain(part).square().sum().backward()
    same(gradients(model), gradients(plain))


def test_statistics_that_a_checkpoint_of_the_models_own_counts_again() -> None:
    """They are counted twice in the plain model, too: the second time at backward, and a split backward counts on."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) + x  # type: ignore[no-untyped-call]
        return x

    def net(momentum: float | None) -> Any:
        norms = [nn.BatchNorm1d(4, momentum=momentum) for _ in range(4)]
        return chain(forward, *[nn.Sequential(nn.Linear(4, 4), norm) for norm in norms])

    x = torch.randn(4, 4)
    pipelined(net(None), x, chunks=2, devices=TWO)  # The average of all runs, in any order.
    for momentum, schedule in [(0.1, "1F1B"), (None, "ZeroBubble")]:
        with pytest.raises(ValueError, match=r"buffer .* again at backward.* pipelined\(checkpoint=...\)"):
            pipelined(net(momentum), x, chunks=2, devices=TWO, schedule=schedule)


def test_rows_that_are_not_in_dimension_0_are_told_with_what_is_split() -> None:
    """The error was that of the layer, which says nothing about rows."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.GRU(4, 4, batch_first=True)
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor, state: Tensor) -> Any:
            return self.head(self.recurrent(x, state)[0])

    with pytest.raises(RuntimeError, match="hidden size") as raised:
        pipelined(Recurrent(), (torch.randn(3, 5, 4), torch.randn(1, 3, 4)), chunks=2, devices=TWO)
    assert "split along dimension 0: ['x']; passed whole: ['state']" in raised.value.__notes__[-1]


class Penalty(torch.autograd.Function):
    """Adds a gradient of its own on the way back, as that of an auxiliary loss, whatever the loss of the model is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(own)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, torch.ones_like(ctx.saved_tensors[0])


def penalised(made: Callable[[Chain, Tensor], Tensor], has_loss: bool) -> Any:
    """Return a model with an auxiliary loss, which adds its gradient by itself."""

    def forward(self: Chain, x: Tensor) -> Tensor:
        x = Chain.forward(self, x)
        x = Penalty.apply(x, made(self, x) * self.share)  # type: ignore[no-untyped-call]
        return x.square().mean() if has_loss else x

    model: Any = chain(forward).double()
    model.share = 1.0
    return model


def balance(self: Chain, x: Tensor) -> Tensor:
    return x.softmax(1).mean(0).square().sum()


@pytest.mark.parametrize("has_loss", [True, False])
def test_a_gradient_that_does_not_follow_the_loss_is_refused(has_loss: bool) -> None:
    """It counts once for each micro-batch. A bug: micro-batches were weighed behind backward, and it was not seen."""
    said = r"'value': .* let it add 1/3 of that, and give may_differ=\['value'\]" if has_loss else "does not follow"
    with pytest.raises(ValueError, match=r"the gradient of 'layers.*" + said):
        two(penalised(balance, has_loss), torch.randn(2, 4).double())
    if has_loss:
        model, plain = penalised(balance, True), penalised(balance, True)
        plain.load_state_dict(model.state_dict())
        x, model.share = torch.randn(2, 4).double().repeat(3, 1), 1 / 3
        with pytest.warns(UserWarning, match=r"\['value'\] differ"):
            two(model, x[:2], may_differ=["value"])
        for run in (model, plain):
            run(x).backward()
        same(gradients(model), gradients(plain))


@pytest.mark.parametrize("has_loss", [True, False])
def test_a_gradient_of_each_row_that_does_not_follow_the_loss_is_right(has_loss: bool) -> None:
    """A penalty that is a sum over rows has the same gradient in any micro-batches."""
    two(penalised(lambda self, x: x.abs().sum(), has_loss), torch.randn(2, 4).double())


class Zero(nn.Module):
    """A model that couples its rows, behind gates and a head that begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.gates = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(4, 4)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        for block, gate in zip(self.blocks, self.gates):
            x = x + gate * block(x - x.mean(0)).relu()
        y: Tensor = self.head(x)
        return y


def test_zeros_hide_no_rows_that_are_coupled() -> None:
    """A bug: all that a head of zeros gives is zero, and so are all gradients but its own."""
    model = Zero()
    with pytest.raises(ValueError, match=r"'value' of shape \(4, 4\) .* the rows are coupled"):
        two(model)
    assert not any([parameter.any() for parameter in (model.gates, *model.head.parameters())])


@pytest.mark.parametrize("where", ["sample", "weight", "forward"])
def test_nan_proves_nothing(where: str) -> None:
    """Every nan was taken for equal to any other, so a sample of nan proved a model that couples its rows."""
    model: Any = chain(lambda self, x: Chain.forward(self, x - x.mean(0)) * (float("nan") if where == "forward" else 1))
    x = torch.randn(2, 4)
    if where == "weight":
        model.layers[1].weight.data.fill_(torch.nan)
    named = {"sample": ", as 'x' has", "weight": r", as 'layers\.1\.weight' has"}
    with pytest.raises(ValueError, match=f"the output 'value' has nan in the plain model{named.get(where, '')}: every"):
        two(model, x * torch.nan if where == "sample" else x)


def test_a_model_that_changes_from_call_to_call_is_told_so() -> None:
    """A bug: observers of quantisation were told that their rows were coupled."""
    quantised = [nn.Sequential(nn.Linear(4, 4), torch.ao.quantization.FakeQuantize()) for _ in range(4)]
    model = nn.Sequential(*quantised)
    model(torch.randn(8, 4))
    with pytest.raises(ValueError, match=r"changes from call to call, in evaluation: .*disable_observer"):
        two(model)
    model.apply(torch.ao.quantization.disable_observer)
    two(model)


def test_weights_that_change_in_evaluation_only_are_refused_and_stay() -> None:
    """As those of RWKV. A bug: a model in training was told that its rows were coupled, and had other weights then."""

    def forward(self: Chain, x: Tensor) -> Tensor:
        if not self.training:
            with torch.no_grad():
                self.layers[1].weight.div_(2)
        return Chain.forward(self, x)

    model: Any = chain(forward)
    before = model.layers[1].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"changes the parameter 'layers\.1\.weight' .* off, as by rescale_every=0"):
        two(model)
    assert torch.equal(model.layers[1].weight, before)
