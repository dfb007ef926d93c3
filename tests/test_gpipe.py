"""`GPipe` as its users meet it: construction, attributes, names, what goes in, what comes out."""

from __future__ import annotations

import ast
import copy
import io
import pickle
import re
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import replicate

from tests.conftest import Devices, Pipe, with_accelerators
from tests.layers import Apply
from tests.plain import assert_same, outcome, plain_outcome
from torchgpipe import GPipe, NoChunk
from torchgpipe.pipe import Pipe as RemovedPipe

Pair = namedtuple("Pair", ["first", "second"])


def make_model(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2, dtype=torch.float64) for _ in range(layers)))


def make_input(batch: int = 6) -> Tensor:
    return torch.randn(batch, 2, dtype=torch.float64, requires_grad=True)


def assert_transparent(pipe: Pipe, module: nn.Sequential, balance: list[int], *inputs: Any, chunks: int = 2) -> None:
    """Asserts that the pipeline does what the plain module does, in every checkpoint mode."""
    expected = plain_outcome(copy.deepcopy(module), *inputs, chunks=chunks)
    for checkpoint in ["always", "except_last", "never"]:
        model = pipe(copy.deepcopy(module), balance, chunks=chunks, checkpoint=checkpoint)
        assert_same(outcome(model, *inputs), expected)


class Recorder(nn.Module):
    """A layer that remembers its inputs and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, *inputs: Any) -> Any:
        self.seen.append(inputs if len(inputs) > 1 else inputs[0])
        return inputs[0]


# The module


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]), nn.Identity, None, print])
def test_module_must_be_sequential(module: Any) -> None:
    with pytest.raises(TypeError, match=r"^module must be nn\.Sequential to be partitioned"):
        GPipe(module, [1])


def test_the_layers_of_another_module_are_shown_as_a_sequential() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(2, 2), nn.Linear(2, 2)
            self.blocks = nn.ModuleList([nn.Linear(2, 2)])

    for module, code in [
        (Model(), "nn.Sequential(model.embed, model.head, *model.blocks)"),
        (nn.ModuleList([nn.Linear(1, 1)]), "nn.Sequential(*model)"),
        (nn.Linear(1, 1), "nn.Sequential(first, second, ...)"),
    ]:
        with pytest.raises(TypeError, match=re.escape(f"got {type(module).__name__}; write it")) as caught:
            GPipe(module, [1])
        assert code in str(caught.value)


def test_a_subclass_of_sequential_is_one() -> None:
    class Model(nn.Sequential):
        pass

    x = make_input()
    module = Model(*make_model(2))
    assert torch.equal(GPipe(module, [1, 1], devices=["cpu", "cpu"])(x), module(x))


def test_duplicate_children_are_refused_and_named() -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="duplicate children") as caught:
        GPipe(nn.Sequential(OrderedDict(encoder=layer, middle=nn.ReLU(), decoder=layer)), [2, 1])
    assert "'encoder'" in str(caught.value)
    assert "'decoder'" in str(caught.value)


def test_a_parameter_in_partitions_on_different_devices_is_refused_and_both_owners_named() -> None:
    module = nn.Sequential(
        OrderedDict(encoder=nn.Linear(1, 1), middle=nn.ReLU(), decoder=nn.Sequential(nn.Linear(1, 1)))
    )
    module.decoder[0].weight = module.encoder.weight
    with pytest.raises(
        ValueError, match=r"^module with duplicate parameters in distinct children is not supported"
    ) as caught:
        GPipe(module, [1, 2], devices=["cpu:0", "cpu:1"])
    assert "encoder.weight" in str(caught.value)
    assert "decoder.0.weight" in str(caught.value)


def test_a_layer_used_inside_two_others_on_different_devices_is_refused() -> None:
    shared = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="duplicate parameters"):
        GPipe(nn.Sequential(nn.Sequential(shared), nn.Sequential(shared)), [1, 1], devices=["cpu:0", "cpu:1"])


def test_all_duplicate_parameters_are_reported_at_once() -> None:
    module = make_model(3)
    module[2].weight, module[2].bias = module[0].weight, module[0].bias
    with pytest.raises(ValueError, match="duplicate parameters") as caught:
        GPipe(module, [1, 2], devices=["cpu:0", "cpu:1"])
    assert all(name in str(caught.value) for name in ["0.weight", "2.weight", "0.bias", "2.bias"])


def test_a_parameter_in_partitions_on_one_device_works(checkpoint: str) -> None:
    def tied() -> nn.Sequential:
        # Powers of two: sums are exact, in whatever order.
        module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        with torch.no_grad():
            module[0].weight.copy_(torch.tensor([[1.0, 2.0], [-4.0, 1.0]]))
            module[0].bias.copy_(torch.tensor([1.0, -1.0]))
            module[2].bias.copy_(torch.tensor([2.0, 0.5]))
        module[2].weight = module[0].weight
        return module

    x = torch.arange(8.0).reshape(4, 2).requires_grad_()
    plain = tied()
    model = GPipe(tied(), [1, 1, 1], devices=["cpu", "cpu", "cpu"], chunks=2, checkpoint=checkpoint)
    assert_same(outcome(model, x), plain_outcome(plain, x, chunks=2))


def test_a_parameter_twice_in_one_partition_works(pipe: Pipe) -> None:
    module = make_model(3)
    module[1].weight = module[0].weight
    model = pipe(module, [2, 1], chunks=2)
    model(make_input()).sum().backward()
    assert model[0].weight is model[1].weight
    assert model[0].weight.grad is not None


def test_an_empty_sequential_returns_its_input() -> None:
    model = GPipe(nn.Sequential(), [])
    x, y = make_input(), make_input(3)
    assert model(x) is x
    assert model((x, [y, None])) == (x, [y, None])
    assert len(model) == 0
    assert list(model) == []
    assert model.balance == model.devices == list(model.partitions) == []


def test_the_wrapped_sequential_is_not_changed(pipe: Pipe) -> None:
    module = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.BatchNorm1d(2), c=nn.Dropout()))
    layers, state = list(module.named_children()), set(vars(module))
    parameters = dict(module.named_parameters())
    pipe(module, [1, 2], chunks=2)
    assert list(module.named_children()) == layers
    assert set(vars(module)) == state
    assert all(parameters[name] is parameter for name, parameter in module.named_parameters())
    module(torch.randn(4, 2)).sum().backward()


def test_wrapping_leaves_every_layer_in_the_mode_that_it_is_in(pipe: Pipe) -> None:
    """A frozen batch norm, eval'ed inside a training model, was put into training by wrapping."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    module[1].eval()
    model = pipe(module, [1, 2])
    assert model.training
    assert [layer.training for layer in module] == [True, False, True]

    module.eval()
    module[2].train()
    model = pipe(module, [1, 2])
    assert not model.training
    assert [layer.training for layer in module] == [False, False, True]


# The balance


def test_balance_is_required() -> None:
    with pytest.raises(ValueError, match=r"balance is required") as caught:
        GPipe(make_model(3))
    assert "3" in str(caught.value)
    _assert_points_to_balancing(caught.value)


@pytest.mark.parametrize("balance", [[], [1], [1, 1], [2, 2], [1, 1, 1, 1], [7]])
def test_balance_with_another_sum(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="module and sum of balance have different length") as caught:
        GPipe(make_model(3), balance)
    first_line = str(caught.value).splitlines()[0]
    assert "3" in first_line
    assert str(sum(balance)) in first_line
    _assert_points_to_balancing(caught.value)


@pytest.mark.parametrize("balance", [[0, 3], [3, 0], [-1, 4], [1, -1, 3]])
def test_balance_with_an_empty_partition(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="all balance numbers must be positive integer") as caught:
        GPipe(make_model(3), balance)
    first_line = str(caught.value).splitlines()[0]
    assert str(balance) in first_line
    assert "3" in first_line
    _assert_points_to_balancing(caught.value)


@pytest.mark.parametrize("balance", [3, "12", ["1", "2"], [1.0, 2.0], [1.5, 1.5], [None, 3], [[1], [2]]], ids=str)
def test_balance_takes_integers_only(balance: Any) -> None:
    """The errors were those of int(), and fractions were cut off without a word."""
    with pytest.raises(TypeError, match="balance takes a list of integers") as caught:
        GPipe(make_model(3), balance)
    assert repr(balance) in str(caught.value)
    _assert_points_to_balancing(caught.value)


@pytest.mark.parametrize(
    ("balance", "accelerators", "partitions"),
    [
        ([4, 4], 0, 2),
        ([1, 1, 1], 0, 3),
        ([0, 3], 0, 2),
        ([1] * 12, 0, 5),
        ([], 0, 2),
        (None, 0, 2),
        (None, 4, 4),
        (None, 8, 5),
    ],
)
def test_as_many_partitions_are_recommended_as_were_given(
    monkeypatch: pytest.MonkeyPatch, balance: Any, accelerators: int, partitions: int
) -> None:
    """It was 4, always."""
    with_accelerators(monkeypatch, accelerators)
    with pytest.raises(ValueError, match=f"partitions={partitions}\\)"):
        GPipe(make_model(5), balance)


def _assert_points_to_balancing(error: Exception) -> None:
    assert "torchgpipe.balance" in str(error)
    assert "torchgpipe_balancing" in str(error)


@pytest.mark.parametrize("balance", [(1, 2), iter([1, 2]), torch.tensor([1, 2]), numpy.array([1, 2]), range(1, 3)])
def test_balance_may_be_any_iterable_of_integers(balance: Any) -> None:
    model = GPipe(make_model(3), balance, devices=["cpu", "cpu"])
    assert model.balance == [1, 2]
    assert [type(number) for number in model.balance] == [int, int]


def test_balance_may_be_a_keyword() -> None:
    assert GPipe(make_model(3), balance=[3], devices=["cpu"]).balance == [3]


def test_options_are_keywords_only() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        GPipe(make_model(1), [1], ["cpu"])


# The devices


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the default is the accelerators")
def test_without_an_accelerator_every_partition_is_on_the_cpu() -> None:
    model = GPipe(make_model(3), [1, 1, 1])
    assert model.devices == [torch.device("cpu")] * 3


def test_devices_is_a_list_with_a_device_for_each_partition() -> None:
    model = GPipe(make_model(3), [1, 2], devices=("cpu:0", torch.device("cpu:1")))
    assert model.devices == [torch.device("cpu:0"), torch.device("cpu:1")]
    assert isinstance(model.devices, list)


def test_devices_may_come_from_a_generator() -> None:
    model = GPipe(make_model(2), [1, 1], devices=(f"cpu:{j}" for j in range(2)))
    assert model.devices == [torch.device("cpu:0"), torch.device("cpu:1")]


def test_more_devices_than_partitions_are_left_alone() -> None:
    assert GPipe(make_model(2), [2], devices=["cpu:0", "cpu:1", "cuda:7"]).devices == [torch.device("cpu:0")]


def test_too_few_devices() -> None:
    with pytest.raises(IndexError, match="too few devices to hold given partitions") as caught:
        GPipe(make_model(3), [1, 1, 1], devices=["cpu:0", "cpu:1"])
    assert "(devices: 2, partitions: 3)" in str(caught.value)
    assert "devices=['cpu:0', 'cpu:0', 'cpu:1']" in str(caught.value)


@pytest.mark.parametrize(("accelerators", "shared"), [(1, [0, 0, 0, 0, 0]), (2, [0, 0, 0, 1, 1]), (4, [0, 0, 1, 2, 3])])
def test_too_few_accelerators_and_the_list_that_shares_them(
    monkeypatch: pytest.MonkeyPatch, accelerators: int, shared: list[int]
) -> None:
    with_accelerators(monkeypatch, accelerators)
    with pytest.raises(IndexError, match="too few devices to hold given partitions") as caught:
        GPipe(make_model(5), [1] * 5)
    found = re.search(r"devices=(\[.*?\])", str(caught.value))
    assert found is not None
    devices = ast.literal_eval(found[1])
    assert devices == [f"cpu:{index}" for index in shared]
    assert GPipe(make_model(5), [1] * 5, devices=devices)(make_input()).shape == (6, 2)


def test_nothing_runs_on_the_meta_device() -> None:
    """It was taken, and the call failed: 'meta' does not have a corresponding module registered as 'torch.meta'."""
    with pytest.raises(ValueError, match=r"meta device, which devices\[1\] is"):
        GPipe(make_model(2), [1, 1], devices=["cpu", "meta"])


@pytest.mark.parametrize("order", [["cpu", "cpu", "cpu"], ["cpu:0", "cpu:1", "cpu:0"], ["cpu:1", "cpu:1", "cpu:0"]])
def test_a_device_may_repeat(order: list[str], checkpoint: str) -> None:
    module, x = make_model(3), make_input()
    model = GPipe(copy.deepcopy(module), [1, 1, 1], devices=order, chunks=3, checkpoint=checkpoint)
    assert_same(outcome(model, x), plain_outcome(module, x, chunks=3))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_input_on_another_device_is_copied_to_the_first() -> None:
    model = GPipe(make_model(2), [1, 1], devices=["cuda:0", "cpu"], chunks=2)
    x = make_input()
    output = model(x)
    assert output.device == torch.device("cpu")
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.device == x.device


# A model on the meta device


@pytest.mark.parametrize(
    "layer",
    [
        lambda **kwargs: nn.Linear(2, 2, **kwargs),
        lambda **kwargs: nn.Embedding(4, 2, **kwargs),
        lambda **kwargs: nn.Conv1d(2, 2, 1, **kwargs),
        lambda **kwargs: nn.LayerNorm(2, **kwargs),
        lambda **kwargs: nn.BatchNorm1d(2, **kwargs),
        lambda **kwargs: nn.TransformerEncoderLayer(2, 1, 4, **kwargs),
    ],
    ids=["Linear", "Embedding", "Conv1d", "LayerNorm", "BatchNorm1d", "TransformerEncoderLayer"],
)
def test_a_model_on_the_meta_device_comes_into_being_as_if_made_there(layer: Callable[..., nn.Module]) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(layer(), nn.ReLU(), layer())
    torch.manual_seed(1)
    model = GPipe(nn.Sequential(layer(device="meta"), nn.ReLU(), layer(device="meta")), [1, 2], devices=["cpu"] * 2)
    for name, tensor in model.state_dict().items():
        expected = plain.state_dict()[name]
        assert tensor.device == expected.device
        assert tensor.dtype == expected.dtype
        # How many numbers an initialisation draws is its own affair, but constants are what they should be.
        assert torch.isfinite(tensor).all()
        if (expected == expected.flatten()[0]).all():
            assert torch.equal(tensor, expected), name
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_an_optimizer_made_on_the_meta_device_trains_what_comes_into_being(pipe: Pipe, checkpoint: str) -> None:
    """Its parameters were others, and it trained nothing, silently."""

    class Weight(nn.Parameter):
        pass

    with torch.device("meta"):
        module = make_model(2)
    module[0].weight = weight = Weight(module[0].weight.detach())
    weight.kind, seen = "mine", []
    handle = weight.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter is weight))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5)

    model, x = pipe(module, [1, 1], chunks=2, checkpoint=checkpoint), make_input()
    assert model[0].weight is weight
    assert (type(weight), weight.kind, weight.device.type) == (Weight, "mine", "cpu")
    plain = nn.Sequential(*make_model(2))
    plain.load_state_dict(model.state_dict())
    for part in x.chunk(2):
        plain(part).sum().backward()
    model(x).sum().backward()
    assert torch.equal(weight.grad, 2 * plain[0].weight.grad)
    assert seen == [True]
    optimizer.step()
    for name, parameter in plain.named_parameters():
        assert not torch.equal(parameter, model.get_parameter(name)), f"{name} is not trained"

    handle.remove()
    model.zero_grad()
    model.load_state_dict(plain.state_dict())
    model(x).sum().backward()
    assert torch.equal(weight.grad, plain[0].weight.grad)


def test_a_parameter_that_cannot_come_into_being_as_itself_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta"))
    reference = weakref.ref(module[1].bias)
    with pytest.raises(ValueError, match=r"parameter '1\.bias' is on the meta device .*weak reference.*optimizer"):
        GPipe(module, [1, 1], devices=["cpu"] * 2)
    assert reference() is module[1].bias
    assert all(parameter.is_meta for parameter in module.parameters()), "nothing has changed"

    del reference
    view = module[1].bias.view(2)
    with pytest.raises(ValueError, match=r"parameter '1\.bias' is on the meta device .*holding references"):
        GPipe(module, [1, 1], devices=["cpu"] * 2)
    assert view.is_meta


def test_a_frozen_parameter_on_the_meta_device_stays_frozen() -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"))
    module[0].weight.requires_grad_(False)
    model = GPipe(module, [1], devices=["cpu"])
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, True]


def test_a_layer_on_the_meta_device_that_cannot_initialise_itself_is_refused() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, device="meta"))

    module = nn.Sequential(OrderedDict(first=nn.Linear(2, 2, device="meta"), scale=nn.Sequential(Scale())))
    with pytest.raises(ValueError, match="meta device") as caught:
        GPipe(module, [1, 1], devices=["cpu"] * 2)
    assert "'scale.0' (Scale)" in str(caught.value)
    assert "before wrapping" in str(caught.value)
    assert module[0].weight.is_meta, "nothing has been done halfway"


def test_real_tensors_beside_those_on_the_meta_device_keep_their_values() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))
            self.register_buffer("table", torch.arange(64.0))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

    try:
        model = GPipe(nn.Sequential(Table()), [1], devices=["cpu"])
    except ValueError as error:
        assert "meta device" in str(error)
    else:
        assert torch.equal(model[0].table, torch.arange(64.0))
        assert torch.equal(model[0].weight, torch.ones(2))


# The other options


@pytest.mark.parametrize(("chunks", "number"), [(1, 1), (4, 4), (True, 1), (numpy.int64(3), 3), (torch.tensor(3), 3)])
def test_chunks_is_any_integer(chunks: Any, number: int) -> None:
    model = GPipe(make_model(1), [1], devices=["cpu"], chunks=chunks)
    assert model.chunks == number
    assert type(model.chunks) is int


@pytest.mark.parametrize("chunks", [2.9, 4.0, Fraction(4), None, "4", [2], float("nan")], ids=repr)
def test_chunks_is_nothing_else(chunks: Any) -> None:
    with pytest.raises(TypeError, match="number of chunks must be positive integer") as caught:
        GPipe(make_model(1), [1], devices=["cpu"], chunks=chunks)
    assert repr(chunks) in str(caught.value)


def test_settings_between_two_calls(pipe: Pipe) -> None:
    """What could be set and was not looked at, or not before the call, was an error of PyTorch's or nothing at all."""
    recorder = Recorder()
    model = pipe(nn.Sequential(*make_model(1), recorder), [1, 1], chunks=2, checkpoint="always")
    model.chunks, model.checkpoint = numpy.int64(3), "never"
    model(make_input())
    assert [len(batch) for batch in recorder.seen] == [2, 2, 2]
    assert (model.chunks, type(model.chunks), model.checkpoint) == (3, int, "never")
    with pytest.raises(ValueError, match="number of chunks must be positive integer, but got 0"):
        model.chunks = 0
    with pytest.raises(TypeError, match=r"but got 4\.0"):
        model.chunks = 4.0
    with pytest.raises(ValueError, match=r"checkpoint is not one of .*, but 'nevr'"):
        model.checkpoint = "nevr"
    assert (model.chunks, model.checkpoint) == (3, "never")


def test_deferred_batch_norms_follow_chunks(pipe: Pipe) -> None:
    module, x = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).double(), make_input()
    model = pipe(copy.deepcopy(module), [1, 1], chunks=2, deferred_batch_norm=True)
    model.chunks = 3
    assert model[0].chunks == 3
    model(x)
    module(x)
    torch.testing.assert_close(model[0].running_var, module[0].running_var)


@pytest.mark.parametrize("name", ["balance", "devices"])
def test_where_layers_are_cannot_be_set(pipe: Pipe, name: str) -> None:
    model = pipe(make_model(2), [1, 1])
    before = getattr(model, name)
    with pytest.raises(
        AttributeError, match=rf"{name} of a GPipe cannot be set, .*: GPipe\(model\.unwrap\(\), \.\.\.\)"
    ):
        setattr(model, name, [2, 0])
    getattr(model, name).append("changes a list of the caller's own")
    assert getattr(model, name) == before


def test_a_lazy_layer_cannot_be_checkpointed_later_on() -> None:
    model = GPipe(nn.Sequential(nn.LazyLinear(3)), [1], devices=["cpu"], checkpoint="never")
    with pytest.raises(ValueError, match="parameters without a shape cannot be checkpointed"):
        model.checkpoint = "always"


def test_its_representation_shows_how_it_is_divided() -> None:
    model = GPipe(make_model(3), [1, 2], devices=["cpu:0", "cpu:1"], chunks=4)
    lines = repr(model).splitlines()
    assert lines[0] == "GPipe("
    assert lines[1] == "  balance=[1, 2], devices=['cpu:0', 'cpu:1'], chunks=4, checkpoint='except_last'"
    assert lines[2].startswith("  (0): Linear(")


@pytest.mark.parametrize("mode", ["sometimes", "ALWAYS", "", None, 1])
def test_checkpoint_must_be_one_of_three(mode: Any) -> None:
    with pytest.raises(ValueError, match="checkpoint is not one of 'always', 'except_last', or 'never'") as caught:
        GPipe(make_model(1), [1], devices=["cpu"], checkpoint=mode)
    assert str(mode) in str(caught.value)


def test_lazy_layers_get_their_shape_in_the_pipeline_or_are_refused(pipe: Pipe, checkpoint: str) -> None:
    """Nearly nothing can be asked of a parameter without a shape, and a checkpoint would have to know it."""
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 2)).double()
    if checkpoint != "never":
        with pytest.raises(ValueError, match="parameters without a shape cannot be checkpointed"):
            pipe(module, [1, 2], checkpoint=checkpoint)
        return
    model = pipe(module, [1, 2], chunks=2, checkpoint=checkpoint)
    model(make_input()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_defaults() -> None:
    model = GPipe(make_model(1), [1])
    assert model.chunks == 1
    assert model.checkpoint == "except_last"


def test_attributes(pipe: Pipe, devices: Devices) -> None:
    module = make_model(3)
    model = pipe(module, [1, 2], chunks=4, checkpoint="always")
    assert model.balance == [1, 2]
    assert model.devices == [torch.device(device) for device in devices(2)]
    assert model.chunks == 4
    assert model.checkpoint == "always"
    assert isinstance(model.partitions, list)
    assert [list(partition) for partition in model.partitions] == [[module[0]], [module[1], module[2]]]
    assert all(isinstance(partition, nn.Sequential) for partition in model.partitions)


def test_the_cpu_is_one_place_whatever_its_index(pipe: Pipe) -> None:
    model = pipe(make_model(3), [1, 2])
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cpu")}
    assert model(make_input()).device == torch.device("cpu")


# The layers


def test_len_indexing_and_iteration_go_over_the_layers(pipe: Pipe) -> None:
    module = make_model(3)
    model = pipe(module, [1, 2])
    assert len(model) == 3
    assert list(model) == list(module)
    assert [model[0], model[1], model[2]] == list(module)
    assert [model[-1], model[-2], model[-3]] == list(reversed(module))
    for index in [3, -4]:
        with pytest.raises(IndexError):
            model[index]


def test_a_layer_replaced_by_setattr_is_the_one_that_runs(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(OrderedDict(a=nn.Identity(), b=nn.Identity(), c=nn.Identity())), [1, 2], chunks=2)
    x = make_input()
    assert torch.equal(model(x), x)
    model.b = Apply(lambda x: x * 3)
    assert torch.equal(model(x), x * 3)
    assert model.partitions[1][0] is model.b is model[1]
    model.a = Apply(lambda x: x + 1)
    assert torch.equal(model(x), (x + 1) * 3)


def test_a_parameter_of_a_replaced_layer_gets_its_gradient(pipe: Pipe, checkpoint: str) -> None:
    model = pipe(make_model(3), [1, 2], chunks=2, checkpoint=checkpoint)
    model(make_input()).sum().backward()
    setattr(model, "1", nn.Linear(2, 2, bias=False, dtype=torch.float64))
    model[0].weight = nn.Parameter(torch.eye(2, dtype=torch.float64))
    model(make_input()).sum().backward()
    assert dict(model.named_parameters()).keys() == {"0.weight", "0.bias", "1.weight", "2.weight", "2.bias"}
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_layer_replaced_in_a_nested_one_runs(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Sequential(nn.Identity()), nn.Identity()), [1, 1], chunks=2)
    model[0][0] = Apply(lambda x: x * 3)
    x = make_input()
    assert torch.equal(model(x), x * 3)


def test_convert_sync_batchnorm(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.BatchNorm1d(2), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(2))), [1, 2], chunks=2)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert isinstance(model.partitions[0][0], nn.SyncBatchNorm)
    assert isinstance(model[2][0], nn.SyncBatchNorm)
    model(torch.randn(6, 2)).sum().backward()
    assert model[0].num_batches_tracked == 2


def test_a_layer_cannot_be_replaced_in_the_view_alone(pipe: Pipe) -> None:
    """It would run, but not be among the model's parameters."""
    model = pipe(make_model(2), [1, 1])
    with pytest.raises(TypeError, match=r"model.set_submodule\('0', layer\)"):
        model.partitions[0][0] = nn.Identity()


def test_layers_that_come_or_go_are_an_error_at_the_call(pipe: Pipe) -> None:
    """One that was added was listed and saved, but never ran; one that had gone was a KeyError of its name alone."""
    model = pipe(make_model(3), [1, 2])
    model.add_module("head", nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"\['head'\] was added; .*unwrap\(\)"):
        model(make_input())
    del model.head, model._modules["1"]
    with pytest.raises(RuntimeError, match=r"\['1'\] was deleted; put nn.Identity\(\)"):
        model(make_input())


# Partitions as modules


def test_hooks_on_partitions_act_for_each_micro_batch(pipe: Pipe) -> None:
    model = pipe(make_model(3), [1, 2], chunks=3, checkpoint="never")
    calls: list[Any] = []
    for j, partition in enumerate(model.partitions):
        partition.register_forward_pre_hook(lambda _module, args, j=j: calls.append(("before", j, len(args[0]))))
        partition.register_forward_hook(lambda _module, _args, output, j=j: calls.append(("after", j, len(output))))
    model(make_input(5))
    for j in range(2):
        assert [call for call in calls if call[1] == j] == [
            ("before", j, 2), ("after", j, 2),
            ("before", j, 2), ("after", j, 2),
            ("before", j, 1), ("after", j, 1),
        ]  # fmt: skip


def test_hooks_on_partitions_can_change_what_goes_in_and_out(pipe: Pipe, checkpoint: str) -> None:
    model = pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2, checkpoint=checkpoint)
    model.partitions[0].register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    model.partitions[1].register_forward_hook(lambda _module, _args, output: output * 3)
    x = make_input()
    output = model(x)
    assert torch.equal(output, (x + 1) * 3)
    output.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_backward_hooks_on_layers_and_partitions_fire_for_each_micro_batch(pipe: Pipe, checkpoint: str) -> None:
    model = pipe(make_model(3), [1, 2], chunks=3, checkpoint=checkpoint)
    sizes: dict[str, list[int]] = {"layer": [], "partition": []}
    model[1].register_full_backward_hook(lambda _module, _inputs, grads: sizes["layer"].append(len(grads[0])))
    model.partitions[1].register_full_backward_hook(
        lambda _module, _inputs, grads: sizes["partition"].append(len(grads[0]))
    )
    model(make_input(5)).sum().backward()
    assert sizes == {"layer": [1, 2, 2], "partition": [1, 2, 2]}


# torch.compile looks at every input's `.grad` and hides the warning about it, unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["workers"], indirect=True)
def test_compiled_partitions(pipe: Pipe) -> None:
    module, x = make_model(3), make_input()
    expected = plain_outcome(module, x, chunks=2)
    model = pipe(copy.deepcopy(module), [1, 2], chunks=2)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _example: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # as backend="eager" does

    for partition in model.partitions:
        partition.compile(backend=backend)
    assert_same(outcome(model, x), expected)
    assert len(graphs) >= 2, "both partitions were compiled"
    torch.compiler.reset()


def test_partitions_are_in_the_mode_of_the_model(pipe: Pipe) -> None:
    model = pipe(make_model(2), [1, 1])
    seen = []
    for partition in model.partitions:
        partition.register_forward_hook(lambda module, _args, _output: seen.append(module.training))
    model.eval()
    model(make_input())
    assert seen == [False, False]
    model.train()
    model(make_input())
    assert seen[2:] == [True, True]


# A module as any other


def test_train_and_eval_reach_the_layers(pipe: Pipe) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5)))
    model = pipe(module, [1, 1])
    assert model.eval() is model
    assert not any(layer.training for layer in module.modules() if layer is not module)
    x = torch.randn(4, 2)
    assert torch.equal(model(x), model(x))
    model.train()
    assert all(layer.training for layer in module.modules())


def test_zero_grad(pipe: Pipe) -> None:
    model = pipe(make_model(2), [1, 1], chunks=2)
    model(make_input()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_apply_visits_every_module_once(pipe: Pipe) -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Linear(1, 1)))
    model = pipe(module, [1, 1])
    visited: list[nn.Module] = []
    model.apply(visited.append)
    assert visited == [module[0], module[1][0], module[1][1], module[1], model]


def test_hooks_on_the_model_act_once_per_call(pipe: Pipe) -> None:
    model = pipe(make_model(2), [1, 1], chunks=3)
    calls = []
    model.register_forward_pre_hook(lambda _module, args: calls.append(("forward pre", args[0].shape)))
    model.register_forward_hook(lambda _module, _args, output: calls.append(("forward", output.shape)))
    model.register_full_backward_hook(lambda _module, _inputs, grads: calls.append(("backward", grads[0].shape)))
    model(make_input()).sum().backward()
    assert calls == [("forward pre", (6, 2)), ("forward", (6, 2)), ("backward", (6, 2))]


def test_requires_grad_freezes_all(pipe: Pipe) -> None:
    model = pipe(make_model(2), [1, 1], chunks=2)
    model.requires_grad_(False)
    assert not model(make_input().detach()).requires_grad
    x = make_input()
    model(x).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


# Names


def test_names_are_those_of_the_wrapped_model_for_every_balance(pipe: Pipe) -> None:
    module = nn.Sequential(
        OrderedDict(embed=nn.Linear(2, 2), norm=nn.BatchNorm1d(2), block=nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    )
    parameters = [name for name, _ in module.named_parameters()]
    buffers = [name for name, _ in module.named_buffers()]
    modules = [name for name, _ in module.named_modules()]
    children = [name for name, _ in module.named_children()]
    state = list(module.state_dict())
    for balance in [[3], [1, 2], [2, 1], [1, 1, 1]]:
        model = pipe(module, balance)
        assert [name for name, _ in model.named_parameters()] == parameters
        assert [name for name, _ in model.named_buffers()] == buffers
        assert [name for name, _ in model.named_modules()] == modules
        assert [name for name, _ in model.named_children()] == children
        assert list(model.state_dict()) == state
        assert model.get_parameter("block.0.weight") is module.block[0].weight
        assert model.embed is module.embed


def test_a_state_dict_goes_from_plain_to_pipeline_and_back(pipe: Pipe) -> None:
    plain, other = make_model(3), make_model(3)
    model = pipe(make_model(3), [1, 2])
    assert str(model.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert str(other.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    x = make_input()
    assert torch.equal(plain(x), model(x))
    assert torch.equal(plain(x), other(x))


def originals_keys(module: nn.Sequential, balance: list[int]) -> dict[str, Tensor]:
    """The state of ``module`` under the keys that the original GPipe gave them."""
    partition_of = [str(j) for j, count in enumerate(balance) for _ in range(count)]
    owner = dict(zip((name for name, _ in module.named_children()), partition_of))
    return {f"partitions.{owner[key.partition('.')[0]]}.{key}": value for key, value in module.state_dict().items()}


@pytest.mark.parametrize("saved_under", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_a_state_dict_of_the_original_loads_whatever_balance_it_was_saved_under(
    pipe: Pipe, saved_under: list[int]
) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2)))
    state = originals_keys(module, saved_under)
    keys = list(state)
    assert keys[0] == "partitions.0.0.weight"
    module[1].running_mean.add_(1)
    model = pipe(copy.deepcopy(module).requires_grad_(False).apply(_scramble), [1, 2])
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert list(state) == keys, "the user's dict is not touched"
    for name, value in module.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_state_dict_of_the_original_with_named_layers_inside_another_model(pipe: Pipe) -> None:
    module = nn.Sequential(OrderedDict(encoder=nn.Linear(2, 2), decoder=nn.Linear(2, 2)))
    state = {f"body.{key}": value for key, value in originals_keys(module, [1, 1]).items()}
    assert "body.partitions.1.decoder.weight" in state
    model = nn.ModuleDict({"body": pipe(copy.deepcopy(module).apply(_scramble), [2])})
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(model["body"].decoder.weight, module.decoder.weight)


def _scramble(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.add_(1)


def test_keys_that_fit_no_layer_are_still_reported(pipe: Pipe) -> None:
    model = pipe(make_model(2), [1, 1])
    state = originals_keys(make_model(2), [1, 1])
    state["partitions.1.7.weight"] = state.pop("partitions.1.1.weight")
    with pytest.raises(RuntimeError, match=r"Error.* in loading state_dict") as caught:
        model.load_state_dict(state)
    assert "7.weight" in str(caught.value)
    assert "1.weight" in str(caught.value)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["1.weight"]
    assert len(result.unexpected_keys) == 1


@pytest.mark.parametrize("strict", [True, False])
def test_two_old_keys_never_become_one(pipe: Pipe, strict: bool) -> None:
    """PyTorch's Pipe counted the layers of each partition from 0: the one that was read last was loaded for both."""
    old = {"partitions.0.0.weight": torch.zeros(2, 2), "partitions.1.0.weight": torch.ones(2, 2)}
    for state in [old, {"0.weight": torch.ones(2, 2), "partitions.0.0.weight": torch.zeros(2, 2)}]:
        model = nn.ModuleDict({"body": pipe(make_model(2), [1, 1])})
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match=r"'body.partitions.0.0.weight'.*'body.(partitions.1.)?0.weight'"):
            model.load_state_dict({f"body.{key}": value for key, value in state.items()}, strict=strict)
        if state is old:
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_old_keys_whose_layers_are_in_another_order_are_refused(pipe: Pipe) -> None:
    """Those of PyTorch's Pipe for a layer without parameters and two with, which would have been loaded crosswise."""
    with pytest.raises(RuntimeError, match=r"'partitions.1.0.weight' .* earlier layer than 'partitions.0.1.weight'"):
        pipe(make_model(2), [1, 1]).load_state_dict(
            {"partitions.0.1.weight": torch.zeros(2, 2), "partitions.1.0.weight": torch.ones(2, 2)}, strict=False
        )


OF_THE_PIPELINE = ["chunks", "forward", "balance", "devices", "checkpoint", "partitions", "_partitions", "follow"]
OF_ANY_MODULE = ["training", "to", "cuda", "state_dict", "add_module", "T_destination", "_modules", "_parameters"]
OF_ANY_OBJECT = ["__len__", "__class__"]


@pytest.mark.parametrize("name", [*OF_THE_PIPELINE, *OF_ANY_MODULE, *OF_ANY_OBJECT])
def test_a_layer_with_the_name_of_an_attribute_works_or_is_refused_by_name(pipe: Pipe, name: str) -> None:
    module = make_model(2)
    # Sequential itself refuses the names that it has, but not when they are written to the table directly.
    module._modules[name] = module._modules.pop("1")
    x = make_input()
    try:
        model = pipe(module, [1, 1], chunks=2)
    except ValueError as error:
        assert f"'{name}'" in str(error)
        assert "rename" in str(error)
    else:
        assert torch.equal(model(x), torch.cat([module._modules[name](module[0](part)) for part in x.chunk(2)]))
        assert f"{name}.weight" in model.state_dict()


@pytest.mark.parametrize("name", ["layer", "pipeline", "weight", "module", "run", "input", "0x", "größe"])
def test_a_layer_with_any_other_name_works(pipe: Pipe, name: str) -> None:
    module = nn.Sequential(OrderedDict([(name, nn.Linear(2, 2, dtype=torch.float64)), ("last", nn.Identity())]))
    x = make_input()
    assert torch.equal(pipe(module, [1, 1])(x), module(x))


# Copies


def copied(model: GPipe, how: str) -> GPipe:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("after", ["nothing", "forward", "backward"])
def test_a_copy_is_a_model_of_its_own(pipe: Pipe, how: str, after: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.Tanh(), nn.BatchNorm1d(2, dtype=torch.float64))
    model = pipe(module, [1, 2], chunks=2, checkpoint="always")
    x = make_input()
    if after != "nothing":
        output = model(x)
    if after == "backward":
        output.sum().backward()
    twin = copied(model, how)
    assert twin.devices == model.devices
    assert twin.balance == model.balance
    assert twin.chunks == 2
    assert twin.checkpoint == "always"
    assert [list(partition) for partition in twin.partitions] == [[twin[0]], [twin[1], twin[2]]]
    model.zero_grad()
    assert_same(outcome(twin, x), outcome(model, x))
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.any()
    setattr(twin, "1", nn.Identity())
    assert isinstance(model.partitions[1][0], nn.Tanh)
    assert isinstance(twin.partitions[1][0], nn.Identity)


# Moving and casting


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.cpu(),
        lambda model: model.cuda(),
        lambda model: model.cuda(0),
        lambda model: model.cuda(device=0),
        lambda model: model.to("cpu"),
        lambda model: model.to("cuda:0"),
        lambda model: model.to(0),
        lambda model: model.to(torch.device("cpu")),
        lambda model: model.to("cpu", torch.float64),
        lambda model: model.to(device="cpu"),
        lambda model: model.to(device="cpu", dtype=torch.float64),
        lambda model: model.to(torch.zeros(1)),
        lambda model: model.to(tensor=torch.zeros(1)),
        lambda model: model.to("meta"),
        lambda model: model.to_empty(device="meta"),
    ],
)
def test_moving_is_denied(pipe: Pipe, move: Callable[[GPipe], Any]) -> None:
    model = pipe(make_model(2), [1, 1])
    with pytest.raises(TypeError, match="denied to move parameters and buffers") as caught:
        move(model)
    assert "devices" in str(caught.value)
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("name", ["cuda", "cpu", "xpu", "to"])
def test_what_moves_other_modules_is_documented_as_it_is_here(name: str) -> None:
    assert "TypeError" in (vars(GPipe)[name].__doc__ or "")


def test_data_parallel_around_it_is_refused() -> None:
    """It ran copies of the pipeline in threads. Without parameters it can be tried here."""
    for model in [GPipe(nn.Sequential(nn.Tanh()), [1], devices=["cpu"]), RemovedPipe(nn.Sequential(nn.Tanh()))]:
        with pytest.raises(RuntimeError, match=rf"around a {type(model).__name__}: .*DistributedDataParallel"):
            replicate(nn.Sequential(model), [0, 1])


def test_the_denial_is_a_new_exception_each_time(pipe: Pipe) -> None:
    """The original raised one shared instance, whose traceback grew with every use."""
    model = pipe(make_model(1), [1])
    caught = []
    for _ in range(2):
        with pytest.raises(TypeError) as info:
            model.cpu()
        caught.append(info.value)
    assert caught[0] is not caught[1]
    lengths = []
    for error in caught:
        traceback, length = error.__traceback__, 0
        while traceback is not None:
            traceback, length = traceback.tb_next, length + 1
        lengths.append(length)
    assert lengths[0] == lengths[1]


def test_a_module_around_it_cannot_move_it_either(pipe: Pipe) -> None:
    parent = nn.Sequential(pipe(make_model(2), [1, 1]))
    with pytest.raises(TypeError, match="denied to move parameters and buffers"):
        parent.to("meta")
    with pytest.raises(TypeError, match="denied to move parameters and buffers"):
        parent.to_empty(device="meta")
    assert not any(parameter.is_meta for parameter in parent.parameters())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_of_a_module_around_it_is_denied_too(pipe: Pipe) -> None:
    parent = nn.Sequential(pipe(make_model(2), [1, 1]))
    with pytest.raises(TypeError, match="denied to move parameters and buffers"):
        parent.cuda()


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda model: model.to(torch.float32), torch.float32),
        (lambda model: model.to(dtype=torch.float32), torch.float32),
        (lambda model: model.to(device=None, dtype=torch.float32), torch.float32),
        (lambda model: model.to(torch.bfloat16, non_blocking=True), torch.bfloat16),
        (lambda model: model.half(), torch.float16),
        (lambda model: model.bfloat16(), torch.bfloat16),
        (lambda model: model.float(), torch.float32),
        (lambda model: model.double(), torch.float64),
        (lambda model: model.type(torch.float32), torch.float32),
        (lambda model: nn.Sequential(model).to(torch.float32)[0], torch.float32),
        (lambda model: nn.Sequential(model).half()[0], torch.float16),
    ],
)
def test_casting_works(pipe: Pipe, cast: Callable[[GPipe], GPipe], dtype: torch.dtype) -> None:
    model = pipe(make_model(2), [1, 1], chunks=2)
    assert cast(model) is model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    output = model(make_input().detach().to(dtype))
    assert output.dtype == dtype
    output.sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {dtype}


def test_share_memory_and_memory_format_are_no_moves(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()), [1, 1])
    assert model.share_memory() is model
    assert model.to(memory_format=torch.channels_last) is model


# What goes in


@pytest.mark.parametrize(
    ("batch", "chunks"), [(6, 3), (6, 1), (5, 2), (7, 4), (5, 4), (2, 3), (1, 4), (0, 1), (0, 3), (9, 100)]
)
def test_a_mini_batch_is_split_as_torch_chunk_does(pipe: Pipe, checkpoint: str, batch: int, chunks: int) -> None:
    recorder = Recorder()
    module, x = nn.Sequential(*make_model(2), recorder), make_input(batch)
    expected = plain_outcome(module, x, chunks=chunks)
    recorder.seen.clear()
    model = pipe(module, [1, 2], chunks=chunks, checkpoint=checkpoint)
    output = model(x)
    assert output.shape == (batch, 2)
    assert [len(micro_batch) for micro_batch in recorder.seen] == [len(chunk) for chunk in x.chunk(chunks)]
    assert_same(outcome(model, x), expected)


def sum_of(value: Any) -> Tensor:
    """A layer's input, whatever it is, as one tensor."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        parts = [sum_of(item) for item in value if item not in (None, ())]
        return sum(parts[1:], parts[0])
    return value.to(torch.float64)


@pytest.mark.parametrize(
    "nest",
    [
        lambda x, y: x,
        lambda x, y: (x,),
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: {"x": x, "y": y},
        lambda x, y: (x, None),
        lambda x, y: (x, [y, {"again": x, "nothing": None}], ()),
        lambda x, y: {"deep": [({"x": x},), None], "y": y},
        lambda x, y: (x, x),
        lambda x, y: OrderedDict(y=y, x=x),
        lambda x, y: Pair(x, (y,)),
    ],
)
def test_nested_inputs(pipe: Pipe, nest: Callable[[Tensor, Tensor], Any]) -> None:
    recorder = Recorder()
    value = nest(make_input(5), make_input(5))
    pipe(nn.Sequential(recorder, Apply(sum_of)), [1, 1], chunks=2, checkpoint="never")(value)
    assert [type(micro_batch) for micro_batch in recorder.seen] == [type(value)] * 2
    if not isinstance(value, Pair | OrderedDict):  # which the comparison does not know
        assert_transparent(pipe, nn.Sequential(Apply(sum_of), *make_model(2)), [1, 2], value)


def test_containers_keep_their_types_all_the_way(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2)
    x, y = make_input(4), make_input(4)
    value = {"pair": Pair(x, y), "list": [x, None], "tuple": (y,), "empty": (), "ordered": OrderedDict(b=x, a=y)}
    output = model(value)
    assert list(output) == list(value)
    assert type(output["pair"]) is Pair
    assert torch.equal(output["pair"].second, y)
    assert type(output["list"]) is list
    assert output["list"][1] is None
    assert type(output["tuple"]) is tuple
    assert output["empty"] == ()
    assert list(output["ordered"]) == ["b", "a"]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_several_positional_inputs_are_the_arguments_of_the_first_layer(pipe: Pipe, chunks: int) -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, dtype=torch.float64))

        def forward(self, x: Tensor, y: Tensor, flags: list[Tensor | None]) -> Tensor:
            assert flags[1] is None
            assert flags[0] is not None
            return x * self.weight + torch.where(flags[0], y, 0)

    inputs = make_input(), make_input(), [torch.arange(12).reshape(6, 2) % 3 == 0, None]
    assert_transparent(pipe, nn.Sequential(Add(), *make_model(2)), [1, 2], *inputs, chunks=chunks)
    assert_transparent(pipe, nn.Sequential(Add(), *make_model(2)), [2, 1], *inputs, chunks=chunks)


@pytest.mark.parametrize("chunks", [1, 3])
def test_keyword_inputs_are_those_of_the_first_layer(pipe: Pipe, checkpoint: str, chunks: int) -> None:
    """Split like the others, but for None and NoChunk, and differentiated through checkpoints too."""

    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None, table: Any = None, extra: Any = 0) -> Tensor:
            assert extra is None
            assert mask is not None
            assert len(x) == len(mask)
            return (x * mask) @ table["w"]

    module = nn.Sequential(Masked(), *make_model(2))
    weight = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    inputs = make_input(), make_input(), {"w": NoChunk(weight)}, None
    expected = plain_outcome(copy.deepcopy(module), *inputs, chunks=chunks)
    model = pipe(module, [1, 2], chunks=chunks, checkpoint=checkpoint)
    for run in [
        lambda x, mask, table, extra: model(x, table=table, extra=extra, mask=mask),
        lambda x, mask, table, extra: model(mask=mask, x=x, extra=extra, table=table),
    ]:
        assert_same(outcome(model, *inputs, run=run), expected)


def test_a_keyword_input_that_does_not_fit_is_named(pipe: Pipe) -> None:
    x, model = make_input(), pipe(nn.Sequential(Apply(lambda x, mask: x)), [1], chunks=2)
    with pytest.raises(ValueError, match=r"\[0\] is \(6, 2\), \['mask'\]\[1\] is \(5, 2\)"):
        model(x, mask=[None, make_input(5)])
    with pytest.raises(TypeError, match=r"input must consist of .* but \['mask'\] is str"):
        model(x, mask="causal")
    with pytest.raises(TypeError, match="unexpected keyword argument 'musk'"):
        model(x, musk=x)
    with pytest.raises(TypeError, match=r"no layer .* keyword inputs \['mask'\]"):
        pipe(nn.Sequential(), [])(x, mask=x)


def test_later_layers_get_one_value(pipe: Pipe) -> None:
    """A tuple that the first layer returns is one argument of the next, in the same partition or not."""
    for balance in [[1, 1], [2]]:
        recorder = Recorder()
        pipe(nn.Sequential(Apply(lambda x, y: (y, x)), recorder), balance)(make_input(2), make_input(2))
        ((a, b),) = recorder.seen
        assert a.shape == b.shape == (2, 2)


def test_a_tuple_is_one_input(pipe: Pipe) -> None:
    recorder = Recorder()
    pipe(nn.Sequential(recorder), [1])((make_input(2), make_input(2)))
    assert [type(value) for value in recorder.seen] == [tuple]


def test_no_input(pipe: Pipe) -> None:
    with pytest.raises(TypeError, match="no tensor"):
        pipe(make_model(1), [1])()


@pytest.mark.parametrize("value", [None, (), [None, None], {}, {"a": None}, NoChunk(torch.zeros(2))])
def test_an_input_without_a_tensor_to_split(pipe: Pipe, value: Any) -> None:
    with pytest.raises(TypeError, match="no tensor"):
        pipe(make_model(1), [1])(value)


@pytest.mark.parametrize(
    ("inputs", "path", "kind"),
    [
        (("text",), "itself", "str"),
        ((3,), "itself", "int"),
        (((torch.zeros(2, 2), 0.5),), "[1]", "float"),
        (([torch.zeros(2, 2), "text"],), "[1]", "str"),
        (({"x": torch.zeros(2, 2), "label": {"name": "text"}},), "['label']['name']", "str"),
        ((torch.zeros(2, 2), (None, {"flag": True})), "[1][1]['flag']", "bool"),
        (((torch.zeros(2, 2), {1, 2}),), "[1]", "set"),
        (((torch.zeros(2, 2), numpy.zeros(2)),), "[1]", "ndarray"),
    ],
)
def test_other_leaves_of_the_input_are_refused_by_path_and_type(
    pipe: Pipe, inputs: tuple[Any, ...], path: str, kind: str
) -> None:
    with pytest.raises(TypeError) as caught:
        pipe(nn.Sequential(nn.Identity()), [1], chunks=2)(*inputs)
    assert path in str(caught.value)
    assert kind in str(caught.value)
    assert "input" in str(caught.value)


def test_all_other_leaves_of_the_input_are_listed(pipe: Pipe) -> None:
    with pytest.raises(TypeError) as caught:
        pipe(nn.Sequential(nn.Identity()), [1])((torch.zeros(2), "text", [3]))
    for part in ["[1]", "str", "[2][0]", "int"]:
        assert part in str(caught.value)


def test_other_leaves_at_a_boundary_are_refused_by_layer_path_and_type(pipe: Pipe, checkpoint: str) -> None:
    module = nn.Sequential(
        OrderedDict(first=nn.Identity(), second=Apply(lambda x: (x, {"name": "text"})), third=nn.Identity())
    )
    model = pipe(module, [2, 1], chunks=2, checkpoint=checkpoint)
    with pytest.raises(TypeError) as caught:
        model(make_input())
    for part in ["'second'", "Apply", "[1]['name']", "str"]:
        assert part in str(caught.value)


def test_other_leaves_at_the_end_are_refused_too(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(OrderedDict(first=nn.Identity(), last=Apply(lambda x: (x, 1.5)))), [1, 1])
    with pytest.raises(TypeError) as caught:
        model(make_input())
    for part in ["'last'", "Apply", "[1]", "float"]:
        assert part in str(caught.value)


def test_between_layers_of_one_partition_anything_goes(pipe: Pipe, checkpoint: str) -> None:
    module = nn.Sequential(Apply(lambda x: (x, "text", 3)), Apply(lambda value: value[0] * value[2]))
    model = pipe(module, [2], chunks=2, checkpoint=checkpoint)
    x = make_input()
    output = model(x)
    assert torch.equal(output, x * 3)
    output.sum().backward()


def test_different_batch_sizes_are_listed_with_path_and_shape(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Identity()), [1], chunks=2)
    with pytest.raises(ValueError) as caught:
        model({"x": torch.zeros(6, 4), "rest": [torch.zeros(6), torch.zeros(5, 4)], "none": None})
    for part in ["['x']", "(6, 4)", "['rest'][0]", "(6,)", "['rest'][1]", "(5, 4)", "NoChunk"]:
        assert part in str(caught.value)


def test_different_batch_sizes_of_positional_inputs(pipe: Pipe) -> None:
    with pytest.raises(ValueError) as caught:
        pipe(nn.Sequential(Apply(torch.add)), [1])(torch.zeros(6, 4), torch.zeros(5, 4))
    for part in ["[0]", "(6, 4)", "[1]", "(5, 4)", "NoChunk"]:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [torch.tensor(1.0), (torch.zeros(3), torch.tensor(1.0)), [torch.tensor(1)] * 2])
def test_a_tensor_without_a_batch_dimension(pipe: Pipe, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        pipe(nn.Sequential(nn.Identity()), [1])(value)
    assert "()" in str(caught.value)


# NoChunk


def test_no_chunk_is_passed_whole_to_every_micro_batch(pipe: Pipe) -> None:
    recorder = Recorder()
    x, table = make_input(), torch.randn(7, 3)
    model = pipe(nn.Sequential(recorder, Apply(lambda value: value[0])), [1, 1], chunks=3, checkpoint="never")
    model((x, NoChunk(table), {"scalar": NoChunk(table[0, 0])}))
    assert len(recorder.seen) == 3
    for micro_batch in recorder.seen:
        assert len(micro_batch[0]) == 2
        assert torch.equal(micro_batch[1], table)
        assert torch.equal(micro_batch[2]["scalar"], table[0, 0])


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_gradient_of_no_chunk_is_summed(pipe: Pipe, chunks: int) -> None:
    weight = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    module = nn.Sequential(Apply(lambda x, weight: x @ weight), *make_model(2))
    assert_transparent(pipe, module, [1, 2], make_input(), NoChunk(weight), chunks=chunks)


def test_no_chunk_beyond_the_first_partition(pipe: Pipe) -> None:
    """At a boundary it is a tensor as any other."""
    weight = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    module = nn.Sequential(
        Apply(lambda value: (value[0].tanh(), value[1])),
        Apply(lambda value: value[0] @ value[1]),
        *make_model(1),
    )
    assert_transparent(pipe, module, [1, 1, 1], (make_input(), NoChunk(weight)), chunks=3)


@pytest.mark.parametrize("value", [None, 3, "text", [torch.zeros(1)]])
def test_no_chunk_takes_a_tensor(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^NoChunk only supported for tensors, found: .*" + type(value).__name__):
        NoChunk(value)


# What comes out


@pytest.mark.parametrize(
    "nest",
    [
        lambda x: (x,),
        lambda x: (x, x + 1),
        lambda x: [x, None],
        lambda x: {"x": x, "parts": (x * 2, [x > 0])},
        lambda x: (x.detach(), x.argmax(1), x),
        lambda x: (x, x),
        lambda x: (x.view(-1, 1), x.t().t()),
        lambda x: {"nothing": None, "x": (x, ())},
    ],
)
def test_nested_outputs_at_boundaries_and_at_the_end(pipe: Pipe, nest: Callable[[Tensor], Any]) -> None:
    for chunks in [1, 2, 4]:
        assert_transparent(pipe, nn.Sequential(*make_model(2), Apply(nest)), [1, 2], make_input(5), chunks=chunks)
        module = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), Apply(nest), nn.Identity())
        assert_transparent(pipe, module, [1, 1, 1], make_input(5), chunks=chunks)


def test_none_is_an_output(pipe: Pipe) -> None:
    assert pipe(nn.Sequential(Apply(lambda x: None)), [1], chunks=2)(make_input()) is None
    module = nn.Sequential(Apply(lambda x: None), Apply(lambda x: torch.ones(1)))
    assert torch.equal(pipe(module, [1, 1], chunks=2)(make_input()), torch.ones(2))


def test_micro_batches_may_come_out_in_other_sizes(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Identity(), Apply(lambda x: x.sum(0, keepdim=True))), [1, 1], chunks=3)
    assert model(make_input()).shape == (3, 2)


def test_an_output_without_dimensions_cannot_be_gathered(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(Apply(torch.sum)), [1], chunks=2)
    with pytest.raises(ValueError, match="dimension"):
        model(make_input())


def test_outputs_of_different_structure_cannot_be_gathered(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(Apply(lambda x: (x, x) if len(x) == 2 else x)), [1], chunks=2, checkpoint="never")
    with pytest.raises(ValueError, match="structure"):
        model(make_input(3))
