"""On a GPU, where work is launched now and finished later.

One GPU is enough: with the CPU it makes two devices, and it has streams that must wait for each other. Slow kernels
that write to memory full of NaN make a missing wait visible. The reference is the plain model on the CPU.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import DEVICE, KIND, LATE, NEEDS_ACCELERATOR, backend, be_slow, is_there
from tests.layers import Apply
from tests.plain import outcome, plain_outcome, run_plain
from tests.random_pipelines import MODES
from torchgpipe import GPipe, is_recomputing

pytestmark = NEEDS_ACCELERATOR

GPU = DEVICE
DEVICES = [[GPU], [GPU, GPU], [GPU, "cpu"], ["cpu", GPU], [GPU, "cpu", GPU], ["cpu", GPU, "cpu"]]
if LATE:
    DEVICES = [[GPU, "cpu"], [GPU, "late:1", GPU]]
CHUNKS = 3
WIDTH = 64

#: Where the input is.
HOMES = ["cpu"] if LATE else ["cpu", GPU]

every_devices = pytest.mark.parametrize("devices", DEVICES, ids=lambda devices: "-".join(devices))
# `test_transparency.py` draws all modes on `late`; this one has cells of both kinds.
every_mode = pytest.mark.parametrize("mode", ["except_last"] if LATE else MODES)


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


def slow(input: Tensor) -> Tensor:
    """Keep the GPU busy in forward and backward. Without a function of Python, whose backward cannot be split."""
    output = input * 1
    if is_there(input):
        be_slow()
        if output.requires_grad:
            output.register_hook(lambda _: be_slow())
    return output


def build(n: int) -> nn.Sequential:
    """Return three layers for each of ``n`` partitions."""
    torch.manual_seed(0)
    parts = [(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Apply(slow)) for _ in range(n)]
    return nn.Sequential(*[layer for part in parts for layer in part]).double()


def batch(device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4 * CHUNKS, WIDTH, dtype=torch.float64, generator=generator)
    return x.to(device).requires_grad_()


def on_cpu(module: Any) -> Any:
    """Return a copy on the CPU: of layers, of a tensor without a graph."""
    backend.synchronize()
    return copy.deepcopy(module).cpu() if isinstance(module, nn.Module) else module.detach().cpu()


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def assert_same_step(model: GPipe, layers: nn.Sequential, x: Tensor) -> None:
    """Compare a training step of ``model`` with one of a copy of the plain ``layers``."""
    expected = plain_outcome(on_cpu(layers), on_cpu(x).requires_grad_(), chunks=CHUNKS)
    assert_close(vars(outcome(model, x)), vars(expected))


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

    layers = build(len(devices)).append(Apply(note)).insert(0, Apply(note))
    balance = [3] * len(devices)
    balance[0] += 1
    balance[-1] += 1
    model = GPipe(layers, balance, devices=devices, chunks=CHUNKS, checkpoint=mode)
    backend.synchronize()
    mine = backend.Stream(GPU)
    for current in (backend.current_stream(GPU), mine):
        seen.clear()
        with backend.stream(current):
            assert_same_step(model, layers, batch(home))
        runs = [now for _, now in seen if GPU in (devices[0], devices[-1])]
        assert set(runs) <= {(current, 0)} and bool(runs) == (GPU in (devices[0], devices[-1]))
        assert any(again for again, _ in seen) == (mode != "never" and bool(runs))
    seen.clear()
    with backend.stream(mine):
        loss = model(batch(home)).square().sum()
    loss.backward()
    backend.synchronize()
    assert {now for _, now in seen} <= {(mine, 0)}
    model.eval()
    plain = run_plain(on_cpu(layers), batch(), chunks=CHUNKS).detach()
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            output = model(batch(home))
            assert output.grad_fn is None and output.device == torch.device(devices[-1])
            used = output * 1
            assert_close(torch.tensor(output.tolist(), dtype=torch.float64), plain)
            assert_close(used.cpu(), plain)


@every_mode
@every_devices
def test_what_the_caller_has_launched_is_waited_for(devices: list[str], mode: str) -> None:
    """The input is still being computed when the model is called, and the gradient when backward is called."""
    layers = build(len(devices))
    plain = on_cpu(layers)
    expected = run_plain(plain, batch() + 1, chunks=CHUNKS)
    expected.sum().mul(2).backward()
    model = GPipe(layers, [3] * len(devices), devices=devices, chunks=CHUNKS, checkpoint=mode)

    x = batch(GPU).detach()
    late = torch.full_like(x, float("nan"))
    be_slow()
    late.copy_(x + 1)
    output = model(late.requires_grad_())
    assert_close(on_cpu(output), expected.detach())
    grad = torch.full_like(output, float("nan"))
    if is_there(output):
        be_slow()
    output.backward(grad.fill_(2))
    backend.synchronize()
    assert late.grad is not None
    for parameter, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(parameter.grad.cpu(), its.grad)


# ---------------------------------------------------------------------------------------- what the caller set


@every_mode
@every_devices
def test_autocast(devices: list[str], mode: str) -> None:
    """Backward runs outside of the block. Layers on the CPU are not affected."""
    dtype = torch.bfloat16
    dtypes: list[tuple[str, bool, torch.dtype]] = []

    class Linear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            output = super().forward(input)
            dtypes.append((output.device.type, is_recomputing(), output.dtype))
            return output.float()

    layers = nn.Sequential(*[Linear(WIDTH, WIDTH) for _ in devices])
    plain = on_cpu(layers)
    model = GPipe(layers, [1] * len(devices), devices=devices, chunks=CHUNKS, checkpoint=mode)
    x = batch().detach().float()
    with torch.autocast(KIND, dtype):
        loss = model(x).square().sum()
    loss.backward()
    assert {(kind, its) for kind, _, its in dtypes} <= {(KIND, dtype), ("cpu", torch.float32)}
    assert any(again for _, again, _ in dtypes) == (mode != "never")
    run_plain(plain, x, chunks=CHUNKS).square().sum().backward()
    for parameter, its in zip(layers.parameters(), plain.parameters(), strict=True):
        atol = 0.05 * its.grad.abs().max().item()
        torch.testing.assert_close(parameter.grad.cpu(), its.grad, rtol=0.05, atol=atol)


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
        grads = [tensor.grad for tensor in (x, *model.parameters())]
        return [on_cpu(result) for result in (output, *grads)]

    assert_close(step(mode), step("never"))


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
        model = GPipe(copy.deepcopy(plain), [4] * 4, devices=[GPU] * 4, chunks=8, checkpoint=mode)

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

    layers = build(2).append(Apply(fail))
    model = GPipe(layers, [3, 4], devices=devices, chunks=CHUNKS, checkpoint="always")
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
    assert_same_step(model, layers, batch())


# ------------------------------------------------------------------------------------------------------- steps


PLACES: dict[str, list[list[str]]] = {
    "GPipe": [[GPU, GPU], [GPU, "cpu"], ["cpu", GPU]],
    "1F1B": [[GPU, GPU], [GPU, "cpu"], ["cpu", GPU]],
    "ZeroBubble": [[GPU, GPU], [GPU, "cpu"], ["cpu", GPU]],
    "Interleaved1F1B": [[GPU, GPU], [GPU, "cpu", GPU, "cpu"], ["cpu", GPU, "cpu", GPU]],
    "V-Half": [[GPU, GPU], [GPU, "cpu", "cpu", GPU], ["cpu", GPU, GPU, "cpu"]],
    "ZB-V": [[GPU, GPU], [GPU, "cpu", "cpu", GPU]],
    "V-Min": [[GPU, GPU], [GPU, "cpu", "cpu", GPU]],
}
if LATE:
    V = [GPU, "late:1", "late:1", GPU]
    PLACES = {"ZeroBubble": [[GPU, "cpu"]], "Interleaved1F1B": [[GPU, "late:1"] * 2], "ZB-V": [V], "V-Min": [V]}


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
    layers = build(len(devices)).eval()
    plain = on_cpu(layers)
    options: dict[str, Any] = {"chunks": CHUNKS, "checkpoint": mode, "schedule": schedule, "loss_fn": nn.MSELoss()}
    model = GPipe(layers, [3] * len(devices), devices=devices, **options)
    x, x2, y = batch(home), batch(), torch.rand(4 * CHUNKS, WIDTH, dtype=torch.float64)
    expected = nn.functional.mse_loss(run_plain(plain, x2, chunks=CHUNKS), y)
    expected.backward()
    for step in (1, 2):
        loss = model.step(x, y.to(home))
        assert_close(on_cpu(loss), expected.detach())
        for actual, its in zip((x, *model.parameters()), (x2, *plain.parameters()), strict=True):
            assert_close(on_cpu(actual.grad), step * its.grad)
