"""The child of memory.py, and of training.py where that asks for memory: counts the bytes of a training step.

peaks       the three figures of `allocations.py` of a model of eight layers, or of a random model
footprint   of a whole model, in the second step, with an optimizer that keeps one number a parameter (RMSprop):
            "kept": parameters, buffers, gradients and the optimizer's state; "activations": the most that is
            allocated beside these at any time of the step; "peak": both together. Each is a list with a figure for
            each GPU. CPU devices share one memory, and so they have one figure for all of them.
balances    the balances by size of a whole model
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.allocations import counted, memories, peaks, reports
from benchmarks.models import amoebanetd, gpt, resnet, unet
from benchmarks.peers import Answer, Request, pipeline, serve
from benchmarks.random_models import random_model
from benchmarks.tasks import TASKS, Task, inputs
from benchmarks.training_steps import runner

__all__ = ["LAYERS", "MAKERS", "MODELS"]

LAYERS = 8

# ---- Peaks, of models of eight layers.


def conv_net(width: int) -> nn.Sequential:
    """Return eight layers on images of 16 x 16: convolution, BatchNorm and ReLU; the last layer classifies."""

    def block(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(block(3), *[block(width) for _ in range(LAYERS - 2)], head)


def transformer(width: int) -> nn.Sequential:
    """Return eight layers on sequences of 32 tokens: an embedding, six encoder layers, a small projection.

    The projection is small so that the loss, which is not the pipeline's, does not make the peak.
    """

    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, batch_first=True)

    return nn.Sequential(nn.Embedding(100, width), *[block() for _ in range(LAYERS - 2)], nn.Linear(width, 8))


def mlp(width: int) -> nn.Sequential:
    """Return eight layers."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)])


#: What makes a model, its width, and the rows of a micro-batch, the same at every m: m is what grows. Narrow models on
#: several rows keep activations above all, wide ones on one row parameters.
MODELS: dict[str, tuple[Callable[[int], nn.Sequential], int, int]] = {
    "conv": (conv_net, 16, 4),
    "transformer": (transformer, 32, 4),
    "mlp": (mlp, 64, 4),
    "wide conv": (conv_net, 64, 1),
    "wide transformer": (transformer, 128, 1),
    "wide mlp": (mlp, 512, 1),
}


def sample(model: str, m: int, device: torch.device, scale: int) -> Tensor:
    """Return a mini-batch, with ``scale`` times the rows that the model's micro-batches have."""
    make, width, rows = MODELS[model]
    rows *= m * scale
    if make is conv_net:
        return torch.randn(rows, 3, 16, 16, device=device)
    if make is mlp:
        return torch.randn(rows, width, device=device)
    return torch.randint(100, (rows, 32), device=device)


def boundary_bytes(layers: nn.Sequential, x: Tensor, balance: list[int]) -> int:
    """Return the bytes that a micro-batch leaves at the partitions' ends: the least that checkpointing keeps."""
    count = 0
    with torch.no_grad():
        remaining = iter(layers)
        for size in balance:
            for _ in range(size):
                x = next(remaining)(x)
            count += x.numel() * x.element_size()
    return count


def peaks_of_a_step(peer: str, request: Request) -> Answer:
    device = torch.device(request["device"])
    m = request["m"]
    if "seed" in request:
        drawn = random_model(request["seed"])
        layers, x = drawn.layers.to(device), drawn.x.to(device)
    else:
        torch.manual_seed(0)
        make, width, _ = MODELS[request["model"]]
        layers = make(width).to(device)
        x = sample(request["model"], m, device, request["scale"])
    boundary = boundary_bytes(layers, x[: len(x) // m], request["balance"])
    model = layers if peer == "plain" else pipeline(layers, request)

    def forward() -> Tensor:
        # The output is the loss's own: as in `loss_fn(model(x)).backward()`, nothing else holds it.
        loss: Tensor = model(x).square().mean()
        return loss

    torch.autograd.backward(forward())  # What is made once and kept is made here.
    figures = []
    for _ in range(request["steps"]):
        if not request["accumulate"]:
            layers.zero_grad(set_to_none=True)
        figures.append(counted(forward, [device])[0])
    worst = {key: max(of_step[key] for of_step in figures) for key in figures[0]}
    return {
        **worst,
        "peak": max(worst["forward"], worst["backward"]),
        "same_each_step": all(of_step == figures[0] for of_step in figures),
        "boundary": boundary,
    }


# ---- The footprint of whole models.

MAKERS: dict[str, Callable[..., nn.Sequential]] = {"amoebanetd": amoebanetd, "gpt": gpt, "resnet": resnet, "unet": unet}


def task_of(request: Request) -> Task:
    """Return what a request asks to train: one of the tasks by its name, or a model with its arguments."""
    if "size" in request:
        return TASKS[request["size"]][request["model"]]
    make, args = MAKERS[request["model"]], request["args"]
    return Task(lambda: make(*args), tuple(request["sample"]), request["batch"], request["m"])


def balances(peer: str, request: Request) -> Answer:
    """Return the balance by size for each number of partitions, found on the CPU: sizes are the same on all devices."""
    from torchgpipe_balancing import profile

    task = task_of(request)
    if request["partitions"] == [1]:
        with torch.device("meta"):
            return {"balances": [[len(task.make())]]}
    sample = inputs(task, max(1, task.batch // task.chunks), "cpu")
    report = profile(task.make(), sample, device="cpu", timeout=0.0)
    return {"balances": [report.balance(n, by="size", param_scale=3.0) for n in request["partitions"]]}


def footprint(peer: str, request: Request) -> Answer:
    """Return the number of parameters, and bytes; or the reason why there are none."""
    gc.collect()
    places = memories(request["devices"])
    if places[0].type == "cpu":
        reports()
    elif request.get("limit") is not None:
        for device in places:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, request["limit"] / total), device)
    try:
        return footprint_of(peer, task_of(request), request, places)
    except torch.OutOfMemoryError:
        return {"none": "out of memory"}


def footprint_of(peer: str, task: Task, request: Request, places: list[torch.device]) -> Answer:
    torch.manual_seed(0)
    module = task.make()
    run = runner(peer, module, request)
    if run is None:
        return {"none": "skips"}
    x = inputs(task, request["batch"], request["devices"][0])
    optimizer = torch.optim.RMSprop(module.parameters(), lr=0.0)

    def forward() -> Tensor:
        return run(x).square().mean()

    torch.autograd.backward(forward())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    above = peaks(forward, places)

    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    tensors = [*module.parameters(), *module.buffers(), *state(optimizer), *gradients]
    held = [bytes_in(memory, tensors) for memory in places]
    # The gradients are made by the step, and counted once.
    activations = [most - bytes_in(memory, gradients) for most, memory in zip(above, places, strict=True)]
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "kept": held,
        "activations": activations,
        "peak": [a + b for a, b in zip(held, activations, strict=True)],
    }


def bytes_in(memory: torch.device, tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if memories([tensor.device]) == [memory])


def state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for of_parameter in optimizer.state.values():
        yield from (value for value in of_parameter.values() if isinstance(value, Tensor))


def answer(peer: str, request: Request) -> Answer:
    return {"peaks": peaks_of_a_step, "footprint": footprint, "balances": balances}[request["kind"]](peer, request)


if __name__ == "__main__":
    torch.set_num_threads(1)
    reports()
    serve(answer)
