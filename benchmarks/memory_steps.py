"""The child of memory.py: counts the bytes of a step of a model of eight layers, or of a random model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.allocations import peaks_of, reports
from benchmarks.peers import Answer, Request, pipeline, serve
from benchmarks.random_models import random_model

__all__ = ["LAYERS", "MODELS"]

LAYERS = 8


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


class Scale(nn.Module):
    """Multiply each column by a weight: an output as large as the input, and hardly any parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def first_steps(request: Request) -> Answer:
    """Return the peak of each of the first steps, in bytes of tensors or in resident bytes, above rest."""
    layers = nn.Sequential(*[layer for _ in range(6) for layer in (Scale(), nn.Tanh())])
    x = torch.rand(request["m"] * request["mib"] * 256, 1024)
    model = pipeline(layers, request)
    model(x[:8]).sum().backward()  # What is made once and kept, for another number of rows.
    rest, peaks = resident("VmRSS"), []

    def step() -> None:
        model(x).sum().backward()

    for _ in range(request["first"]):
        if request["counts"] == "tensors":
            peaks += peaks_of(step, [torch.device("cpu")])
        else:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # The highest mark is the present one.
            step()
            peaks.append(resident("VmHWM") - rest)
    return {"peaks": peaks}


def resident(key: str) -> int:
    """Return the bytes that are resident now, ``'VmRSS'``, of these what no file backs, ``'RssAnon'``, or the most that
    were until now, ``'VmHWM'``. Linux.
    """
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024


def answer(peer: str, request: Request) -> Answer:
    """Return the highest peak of some steps, and whether all have the same."""
    if "first" in request:
        return first_steps(request)
    device = torch.device(request["device"])
    if "seed" in request:
        drawn = random_model(request["seed"])
        layers, x = drawn.layers.to(device), drawn.x.to(device)
    else:
        torch.manual_seed(0)
        make, width, _ = MODELS[request["model"]]
        layers = make(width).to(device)
        x = sample(request["model"], request["m"], device, request["scale"])
    model = layers if peer == "plain" else pipeline(layers, request)

    def step() -> None:
        # The output is the loss's own: as in `loss_fn(model(x)).backward()`, nothing else holds it.
        torch.autograd.backward(model(x).square().mean())

    step()  # What is made once and kept is made here.
    peaks = []
    for _ in range(request["steps"]):
        if not request["accumulate"]:
            layers.zero_grad(set_to_none=True)
        peaks += peaks_of(step, [device])
    return {"peak": max(peaks), "same_each_step": len(set(peaks)) == 1}


if __name__ == "__main__":
    torch.set_num_threads(1)
    reports()
    serve(answer)
