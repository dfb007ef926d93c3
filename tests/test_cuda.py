"""On a GPU, where work is launched now and finished later.

One GPU is enough: with the CPU it makes two devices, and it has streams that must wait for each other. Slow kernels
that write to memory full of NaN make a missing wait visible.
"""

from __future__ import annotations

import copy as python_copy
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import DEVICE, KIND, LATE, NEEDS_ACCELERATOR, backend, be_slow, is_there
from tests.layers import Apply
from torchgpipe import GPipe, is_recomputing
from torchgpipe.devices.stream import AcceleratorStream
from torchgpipe.engine.copy import Route, copy, wait

pytestmark = NEEDS_ACCELERATOR

GPU = DEVICE
MODES = ["always", "except_last", "never"]
DEVICES = [[GPU], [GPU, GPU], [GPU, "cpu"], ["cpu", GPU], [GPU, "cpu", GPU], ["cpu", GPU, "cpu"]]
if LATE:
    DEVICES = [[GPU, GPU], [GPU, "cpu"], ["cpu", "late:1"], [GPU, "late:1", GPU], [GPU, "late:1", "late:2", "late:3"]]
CHUNKS = 3
WIDTH = 64

#: Where the input is.
HOMES = ["cpu"] if LATE else ["cpu", GPU]

every_devices = pytest.mark.parametrize("devices", DEVICES, ids=lambda devices: "-".join(devices))
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def dirty_memory() -> Iterator[None]:
    """Fill the memory that is allocated next with NaN, and finish all launched work."""
    if LATE:  # which does so by itself
        yield
        return
    dirt = [torch.full((size,), float("nan"), device=GPU) for size in (1 << 10, 1 << 16, 1 << 20, 1 << 22)]
    backend.synchronize()
    del dirt
    yield
    backend.synchronize()


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if is_there(grads[0]):
            be_slow()
        return grads[0] * 1


def slow(input: Tensor) -> Tensor:
    """Write the output late, and the gradient of the input too."""
    if is_there(input):
        be_slow()
    output: Tensor = _SlowBackward.apply(input)  # type: ignore[no-untyped-call]
    return output


def build(n: int) -> tuple[nn.Sequential, list[int]]:
    """Return layers for ``n`` partitions, and the balance."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(n):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Apply(slow)]
    return nn.Sequential(*layers).double(), [3] * n


def batch(device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4 * CHUNKS, WIDTH, dtype=torch.float64, generator=generator)
    return x.to(device).requires_grad_()


def place(layers: nn.Sequential, balance: list[int], devices: list[str]) -> nn.Sequential:
    rest = iter(layers)
    for count, device in zip(balance, devices, strict=True):
        for _ in range(count):
            next(rest).to(device)
    return layers


def run_plain(layers: nn.Sequential, balance: list[int], devices: list[str], x: Tensor) -> Tensor:
    """Run the plain model with its layers on their devices, one micro-batch after the other."""
    outputs = []
    for value in x.chunk(CHUNKS):
        rest = iter(layers)
        for count, device in zip(balance, devices, strict=True):
            value = value.to(device)
            for _ in range(count):
                value = next(rest)(value)
            backend.synchronize()
        outputs.append(value)
    return torch.cat(outputs)


def assert_close(actual: Tensor | None, expected: Tensor | None, what: str = "") -> None:
    assert actual is not None
    assert expected is not None
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")


def assert_same_step(model: GPipe, layers: nn.Sequential, devices: list[str], x: Tensor) -> None:
    """Compare a training step of ``model`` with one of a copy of the plain ``layers``."""
    plain = python_copy.deepcopy(layers)
    plain.zero_grad()
    model.zero_grad()
    x2 = x.detach().clone().requires_grad_()

    output = model(x)
    output.square().sum().backward()
    backend.synchronize()
    expected = run_plain(plain, model.balance, devices, x2)
    expected.square().sum().backward()
    backend.synchronize()

    assert output.device == torch.device(devices[-1])
    assert_close(output, expected, "output")
    assert_close(x.grad, x2.grad, "gradient of the input")
    for (name, parameter), its in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(parameter.grad, its.grad, f"gradient of {name}")
    for (name, buffer), its in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert_close(buffer, its, name)


# ---------------------------------------------------------------------------------------------------- numbers


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # where the parameters are made on another one
@pytest.mark.parametrize("home", HOMES)
@every_mode
@every_devices
def test_a_training_step_is_that_of_the_plain_model(devices: list[str], mode: str, home: str) -> None:
    """Forward and backward copy in both directions, wherever the input is, on the default stream and on another.

    The stream and the device of the call are current in the layers, also in a recomputation that starts while another
    stream is current. The output can be used at once, by the caller's stream and by the host.
    """
    seen: list[tuple[bool, Any]] = []

    def note(input: Tensor) -> Tensor:
        if is_there(input) and input.device.index == 0:
            seen.append((is_recomputing(), (backend.current_stream(GPU), backend.current_device())))
        return input * 1

    layers, balance = build(len(devices))
    layers.append(Apply(note)).insert(0, Apply(note))
    balance[0] += 1
    balance[-1] += 1
    model = GPipe(layers, balance, devices=devices, chunks=CHUNKS, checkpoint=mode)
    backend.synchronize()
    mine = backend.Stream(GPU)
    for current in (backend.current_stream(GPU), mine):
        seen.clear()
        with backend.stream(current):
            assert_same_step(model, layers, devices, batch(home))
        runs = [now for _, now in seen if GPU in (devices[0], devices[-1])]
        assert set(runs) <= {(current, 0)} and bool(runs) == (GPU in (devices[0], devices[-1]))
        assert any(again for again, _ in seen) == (mode != "never" and bool(runs))
    seen.clear()
    with backend.stream(mine):
        loss = model(batch(home)).square().sum()
    loss.backward()
    backend.synchronize()
    assert {now for _, now in seen} <= {(mine, 0)}
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            output = model.eval()(batch(home))
            assert output.grad_fn is None
            used = output * 1
            values = output.tolist()
            assert_close(torch.tensor(values, dtype=torch.float64), used)
            assert_close(used, run_plain(layers, balance, devices, batch(home)))


@every_mode
@every_devices
def test_what_the_caller_has_launched_is_waited_for(devices: list[str], mode: str) -> None:
    """The input is still being computed when the model is called, and the gradient when backward is called."""
    layers, balance = build(len(devices))
    model = GPipe(layers, balance, devices=devices, chunks=CHUNKS, checkpoint=mode)
    x = batch(GPU).detach()
    expected = run_plain(layers, balance, devices, x + 1).detach()

    late = torch.full_like(x, float("nan"))
    be_slow()
    late.copy_(x + 1)
    late.requires_grad_()
    output = model(late)
    assert_close(output, expected)

    grad = torch.full_like(output, float("nan"))
    if is_there(output):
        be_slow()
    grad.fill_(2)
    output.backward(grad)
    backend.synchronize()
    plain = python_copy.deepcopy(layers)
    plain.zero_grad()
    run_plain(plain, balance, devices, x + 1).sum().mul(2).backward()
    backend.synchronize()
    assert late.grad is not None
    for parameter, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(parameter.grad, its.grad)


def test_the_default_is_every_gpu() -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2)), [1])
    assert model.devices == [torch.device(GPU)]
    assert model[0].weight.device == torch.device(GPU)
    assert GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=[KIND]).devices == [torch.device(GPU)]


# ------------------------------------------------------------------------------------- copies between streams


def stream() -> AcceleratorStream:
    return AcceleratorStream(torch.device(GPU), backend.Stream(GPU))


@pytest.fixture
def route() -> Route:
    """Return the streams of two devices on one GPU, where a copy is launched on one stream only."""
    side, back = stream(), stream()
    return Route(source=stream(), leaving=side, arriving=side, target=stream(), grads_leaving=back, grads_arriving=back)


N = 1 << 20


def written_late(value: float, **options: Any) -> Tensor:
    """Return a tensor that is NaN until the current stream writes it."""
    tensor = torch.full((N,), float("nan"), device=GPU, **options)
    be_slow()
    return tensor.fill_(value)


def assert_filled(tensor: Tensor | None, value: float) -> None:
    backend.synchronize()
    assert tensor is not None
    assert tensor.unique().tolist() == [value]


def test_a_copy_waits_for_the_source_and_the_target_for_the_copy(route: Route) -> None:
    with route.source.use():
        (x,) = wait([route], 0, (written_late(1),))
    with route.leaving.use():
        be_slow()
    with route.target.use():
        (moved,) = copy(route, 0, (x,))
        result = moved + 1
    assert_filled(result, 2)


def test_the_copy_of_a_gradient_waits_in_the_same_way(route: Route) -> None:
    with route.source.use():
        leaf = written_late(1).requires_grad_()
        (x,) = wait([route], 0, (leaf * 2,))
    with route.target.use():
        (moved,) = copy(route, 0, (x,))
        result = moved * 3
        grad = written_late(5)
        result.backward(grad)
    assert_filled(leaf.grad, 30)


def test_memory_is_not_used_again_before_it_was_copied(route: Route) -> None:
    """The sender frees the tensor before its copy has begun."""
    with route.source.use():
        x = torch.ones(N, device=GPU)
        (x,) = wait([route], 0, (x,))  # type: ignore[assignment]
    with route.leaving.use():
        be_slow()
    with route.target.use():
        (moved,) = copy(route, 0, (x,))
    del x
    with route.source.use():
        dirt = [torch.full((N,), float("nan"), device=GPU) for _ in range(4)]
    assert_filled(moved, 1)
    del dirt


def test_memory_is_not_used_again_before_the_target_has_read_it(route: Route) -> None:
    """The receiver frees the copy before the kernel that reads it has begun."""
    with route.source.use():
        (x,) = wait([route], 0, (torch.ones(N, device=GPU),))
    with route.target.use():
        (moved,) = copy(route, 0, (x,))
        be_slow()
        result = moved + 1  # type: ignore[operator]
    del moved
    with route.arriving.use():
        dirt = [torch.full((N,), float("nan"), device=GPU) for _ in range(4)]
    assert_filled(result, 2)
    del dirt


# ---------------------------------------------------------------------------------------- what the caller set


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_mode
@every_devices
def test_autocast(devices: list[str], mode: str, dtype: torch.dtype) -> None:
    """Backward runs outside of the block. Layers on the CPU are not affected."""
    dtypes: list[tuple[str, bool, torch.dtype]] = []

    class Linear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            output = super().forward(input)
            dtypes.append((output.device.type, is_recomputing(), output.dtype))
            return output.float()

    layers = nn.Sequential(*[Linear(WIDTH, WIDTH) for _ in devices])
    model = GPipe(layers, [1] * len(devices), devices=devices, chunks=CHUNKS, checkpoint=mode)
    x = batch().detach().float()
    with torch.autocast(KIND, dtype):
        loss = model(x).square().sum()
    loss.backward()

    expected = {(KIND, dtype), ("cpu", torch.float32)}
    assert {(kind, its) for kind, _, its in dtypes} <= expected
    assert any(again for _, again, _ in dtypes) == (mode != "never")

    grads = [parameter.grad for parameter in layers.parameters()]
    layers.zero_grad()
    with torch.autocast(KIND, dtype, cache_enabled=False):
        run_plain(layers, [1] * len(devices), devices, x).square().sum().backward()
    for actual, parameter in zip(grads, layers.parameters(), strict=True):
        assert actual is not None
        assert parameter.grad is not None
        torch.testing.assert_close(actual, parameter.grad, rtol=0.05, atol=0.05 * parameter.grad.abs().max().item())


# --------------------------------------------------------------------------------------------- random numbers


def draw_on_cpu(input: Tensor) -> Tensor:
    """Draw from the CPU's generator, whatever the device."""
    return input * torch.rand(input.shape, dtype=input.dtype).to(input.device)


@every_mode
@every_devices
def test_dropout(devices: list[str], mode: str) -> None:
    """The masks are those of checkpoint='never' under the same seed, and backward advances no generator."""

    def step(checkpoint: str) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [
            layer
            for device in devices
            for layer in (
                nn.Linear(WIDTH, WIDTH),
                nn.Dropout(0.5),
                # Refused where workers draw from one generator.
                Apply(draw_on_cpu) if device == "cpu" or len({*devices}) == 1 else nn.Identity(),
                nn.AlphaDropout(0.2),
            )
        ]
        model = GPipe(
            nn.Sequential(*layers).double(),
            [4] * len(devices),
            devices=devices,
            chunks=CHUNKS,
            checkpoint=checkpoint,
        )
        x = batch()
        torch.manual_seed(7)
        output = model(x)
        before = torch.get_rng_state(), backend.get_rng_state(GPU)
        output.square().sum().backward()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(backend.get_rng_state(GPU), before[1])
        results = [output.detach(), x.grad, *[parameter.grad for parameter in model.parameters()]]
        return [result for result in results if result is not None]

    for actual, expected in zip(step(mode), step("never"), strict=True):
        assert_close(actual, expected)


# ----------------------------------------------------------------------------------------------------- memory


def memory_of(step: Callable[[], Any]) -> tuple[int, int]:
    """Return the bytes at the peak of a step and after it, above those before it.

    The last of several steps counts, because libraries allocate workspaces for every thread in the first steps.
    """
    for _ in range(4):
        gc.collect()
        backend.synchronize()
        before = backend.memory_allocated(GPU)
        backend.reset_peak_memory_stats(GPU)
        step()
        backend.synchronize()
    return backend.max_memory_allocated(GPU) - before, backend.memory_allocated(GPU) - before


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())])


#: A mini-batch is 32 MiB between two layers; on `late`, where the CPU computes, 256 KiB.
ROWS = 1 << (15 if not LATE else 8)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@every_mode
@pytest.mark.parametrize("devices", [[GPU], [GPU, GPU], [GPU, "cpu"], ["cpu", GPU]], ids=str)
def test_nothing_is_left_on_the_gpu(devices: list[str], mode: str) -> None:
    """After backward, no more memory is in use than before it, once the gradients are allocated."""
    model = GPipe(deep(), [16 // len(devices)] * len(devices), devices=devices, chunks=4, checkpoint=mode)
    x = torch.rand(256, 256)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(x).sum().backward()

    _, left = memory_of(step)
    assert left == 0


@pytest.mark.usefixtures("no_collection")
def test_peak_memory_against_the_plain_model() -> None:
    """Without checkpointing, the peak is that of the plain model; with checkpointing, a fraction of it."""
    x = torch.rand(ROWS, 256, device=GPU)
    plain = deep().to(GPU)

    def in_micro_batches() -> None:
        plain.zero_grad(set_to_none=False)
        torch.cat([plain(part) for part in x.chunk(8)]).sum().backward()

    expected, _ = memory_of(in_micro_batches)
    peaks = {}
    for mode in MODES:
        model = GPipe(python_copy.deepcopy(plain), [4] * 4, devices=[GPU] * 4, chunks=8, checkpoint=mode)

        def step(model: GPipe = model) -> None:
            model.zero_grad(set_to_none=False)
            model(x).sum().backward()

        peaks[mode], _ = memory_of(step)
    between_layers = x.nbytes
    # The order of freeing can add one micro-batch, an eighth.
    assert peaks["never"] <= expected + between_layers // 4
    # Plain: eight activations and the output. Checkpointed: the inputs of three partitions (the first input belongs
    # to the caller), and the output in micro-batches and as a whole, which makes five of nine.
    assert peaks["always"] <= 0.7 * expected
    assert peaks["always"] <= peaks["except_last"] <= peaks["never"]


# ----------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("phase", ["forward", "recomputation"])
@pytest.mark.parametrize("devices", [[GPU, "cpu"], ["cpu", GPU], [GPU, GPU]], ids=str)
def test_a_fault_on_the_gpu(devices: list[str], phase: str) -> None:
    """The note tells the place, the model works on, and the memory of the GPU is freed."""

    armed: list[None] = []

    def fail(input: Tensor) -> Tensor:
        if armed and is_recomputing() == (phase == "recomputation"):
            raise ValueError("fails")
        return input

    layers, balance = build(2)
    layers.append(Apply(fail))
    balance[-1] += 1
    model = GPipe(layers, balance, devices=devices, chunks=CHUNKS, checkpoint="always")
    for _ in range(3):
        model(batch()).sum().backward()
    gc.collect()
    backend.synchronize()
    before = backend.memory_allocated(GPU)

    armed.append(None)
    with pytest.raises(ValueError, match="fails") as caught:
        model(batch()).sum().backward()
    (note,) = caught.value.__notes__
    assert f"partition 1 (layers '3'..'6') on {devices[1]}, during {phase}" in note
    del caught
    # The engine's GPU thread drops the error and its ready tasks when it gets to them: each pass through this thread
    # gives it the time.
    for _ in range(1000):
        torch.ones((), device=GPU, requires_grad=True).backward()
        if backend.memory_allocated(GPU) <= before:
            break
    assert backend.memory_allocated(GPU) <= before

    armed.clear()
    assert_same_step(model, layers, devices, batch())


# --------------------------------------------------------------------------------------------------- training


# Not over the CPU and a GPU: there GradScaler divides by a scale whose copy to the CPU it does not wait for.
@every_mode
@pytest.mark.parametrize("devices", [[GPU], [GPU, GPU]], ids=str)
def test_training_with_a_grad_scaler(devices: list[str], mode: str) -> None:
    """A training loop as users write it: half precision, scaled losses, clipping."""

    def train(run: Callable[[nn.Sequential], Callable[[Tensor], Tensor]]) -> list[float]:
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in devices])
        model = run(layers)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(KIND, init_scale=2.0**10)
        x = batch(GPU).detach().float()
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast(KIND, torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            for parameter in layers.parameters():  # clip_grad_norm_ needs all parameters on one device
                nn.utils.clip_grad_value_([parameter], 0.1)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses

    balance = [1] * len(devices)
    actual = train(lambda layers: GPipe(layers, balance, devices=devices, chunks=CHUNKS, checkpoint=mode))
    expected = train(lambda layers: partial(run_plain, place(layers, balance, devices), balance, devices))
    assert actual == pytest.approx(expected, rel=1e-2)
    assert actual[-1] < actual[0]


# ------------------------------------------------------------------------------------------------------- steps


def slow_by_hooks(input: Tensor) -> Tensor:
    """Keep the GPU busy in forward and backward. Without a function of Python, whose backward cannot be split."""
    output = input * 1
    if is_there(input):
        be_slow()
        if output.requires_grad:
            output.register_hook(lambda _: be_slow())
    return output


PLACES: dict[str, list[list[str]]] = {
    "GPipe": [[GPU, GPU], [GPU, "cpu"], ["cpu", GPU]],
    "1F1B": [[GPU, GPU], [GPU, "cpu"], ["cpu", GPU]],
    "ZeroBubble": [[GPU, GPU], [GPU, "cpu"], ["cpu", GPU]],
    "Interleaved1F1B": [[GPU, GPU], [GPU, "cpu", GPU, "cpu"], ["cpu", GPU, "cpu", GPU]],
    "V-Half": [[GPU, GPU], [GPU, "cpu", "cpu", GPU], ["cpu", GPU, GPU, "cpu"]],
}
if LATE:
    ROW = [f"late:{index}" for index in range(4)]
    PLACES = {
        "GPipe": [ROW, [GPU, "cpu"]],
        "1F1B": [ROW, ["cpu", GPU]],
        "ZeroBubble": [ROW, [GPU, "cpu"]],
        "Interleaved1F1B": [ROW[:2] * 2, ["cpu", GPU, "cpu", GPU]],
        "V-Half": [[*ROW[:2], *ROW[1::-1]], [GPU, "cpu", "cpu", GPU]],
    }


@pytest.mark.parametrize("home", HOMES)
@every_mode
@pytest.mark.parametrize(
    "schedule, devices",
    [(schedule, devices) for schedule, own in PLACES.items() for devices in own],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_step_gives_the_gradients_of_the_micro_batches(
    schedule: str, devices: list[str], mode: str, home: str
) -> None:
    """No device waits for ever: `benchmarks.campaigns.cuda_tests` ends a test that takes more than a minute."""
    torch.manual_seed(0)
    balance = [3] * len(devices)
    layers = nn.Sequential(
        *[layer for _ in devices for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), Apply(slow_by_hooks))]
    ).double()
    plain = python_copy.deepcopy(layers)
    loss_fn = nn.MSELoss()
    model = GPipe(layers, balance, devices=devices, chunks=CHUNKS, checkpoint=mode, schedule=schedule, loss_fn=loss_fn)
    x = batch(home)
    x2 = x.detach().clone().requires_grad_()
    y = torch.rand(len(x), WIDTH, dtype=torch.float64).to(home)

    place(plain, balance, devices)
    expected = loss_fn(run_plain(plain, balance, devices, x2), y.to(devices[-1]))
    expected.backward()
    backend.synchronize()
    for step in (1, 2):
        loss = model.step(x, y)
        backend.synchronize()
        assert_close(loss, expected, "loss")
        for actual, its in zip((x, *model.parameters()), (x2, *plain.parameters()), strict=True):
            assert its.grad is not None
            assert_close(actual.grad, step * its.grad, "gradient")
