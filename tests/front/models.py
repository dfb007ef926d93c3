"""Models that are no Sequential, and the plain run that a pipelined one is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "TWO", "Block", "Chain", "Decoder", "Hidden", "batch", "chain", "decoder", "expect_plain", "gradients",
    "plain_loss", "same", "sample_of",
]  # fmt: skip

TWO = ["cpu:0", "cpu:1"]


class Hidden(torch.autograd.Function):
    """A product that no function mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, (grad * x).sum_to_size(y.shape)


class Chain(nn.Module):
    """Layers one after the other, by default four linear ones.

    Attributes:
        between: takes the model, the number of a layer, its output and the input of the model, and returns what takes
            the place of the output
    """

    between: Callable[..., Tensor] | None = None

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or [nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Any:
        first = x
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.between is not None:
                x = self.between(self, k, x, first)
        return x


def chain(forward: Callable[..., Any], *layers: nn.Module) -> Any:
    """Return a `Chain` of a class that has this forward."""
    return type("Net", (Chain,), {"forward": forward})(*layers)


class Block(nn.Module):
    """A block with a residual, as in a transformer."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.down(self.dropout(torch.relu(self.up(self.norm(x)))))
        return x + (y if mask is None else y * mask)


class Decoder(nn.Module):
    """A language model in small: tied weights, a parameter and masks in glue, hidden states, a loss of its own."""

    def __init__(self, layers: int = 4, width: int = 6, words: int = 11, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Parameter(torch.randn(8, width))
        self.layers = nn.ModuleList([Block(width, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor, labels: Tensor | None = None, table: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        first, hidden = x, [x]
        mask = torch.ones(ids.shape[1], 1, dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x = layer(x, mask=mask)
            hidden.append(x)
        x = self.norm(x + first * self.scale)
        if table is not None:
            x = x + table.mean()
        logits = self.head(x)
        output = {"logits": logits, "hidden": hidden}
        if labels is not None:
            output["loss"] = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return output


def decoder(**options: Any) -> Any:
    return Decoder(**options).double()


def batch(rows: int = 6, tokens: int = 5, words: int = 11) -> dict[str, Tensor]:
    """Return ids and labels, of which a third does not count."""
    labels = torch.randint(words, (rows, tokens))
    return {"ids": torch.randint(words, (rows, tokens)), "labels": labels.where(torch.rand(rows, tokens) > 0.3, -100)}


def sample_of(data: dict[str, Tensor], rows: int = 2) -> dict[str, Tensor]:
    return {name: tensor[:rows] for name, tensor in data.items()}


def plain_loss(model: Callable[..., Any], data: dict[str, Tensor], chunks: int) -> tuple[Tensor, list[Any]]:
    """Run a plain model micro-batch by micro-batch, backward too, and return the loss and all outputs."""
    total = int((data["labels"] != -100).sum())
    loss, outputs = torch.zeros((), dtype=torch.float64), []
    for ids, labels in zip(data["ids"].chunk(chunks), data["labels"].chunk(chunks)):
        output = model(ids, labels)
        share = output["loss"] * (int((labels != -100).sum()) / total)
        share.backward()
        loss = loss + share.detach()
        outputs.append(output)
    return loss, outputs


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return all gradients by the names in a model that is not compiled, on the host, and set them to None."""
    named = [(name.replace("_orig_mod.", ""), parameter) for name, parameter in model.named_parameters()]
    result = {name: None if parameter.grad is None else parameter.grad.cpu() for name, parameter in named}
    for parameter in model.parameters():
        parameter.grad = None
    return result


def same(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float = 1e-12) -> None:
    """Check that gradients are equal, but for the order in which float64 numbers were added."""
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        other = expected[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            torch.testing.assert_close(
                grad, other, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )


def expect_plain(
    model: Any, plain: nn.Module, data: dict[str, Tensor], *, chunks: int = 3, tolerance: float = 1e-12
) -> None:
    """Check the outputs, losses and gradients of a call and of a step of a `Decoder` against those of a plain one."""
    loss, outputs = plain_loss(plain, data, chunks)
    expected = gradients(plain)
    output = model(**data)
    # A copy on another device has other strides, with which products may round differently.
    slack = 0.0 if {parameter.device.type for parameter in model.parameters()} == {"cpu"} else tolerance
    for ours, parts in (
        (output["logits"], [one["logits"] for one in outputs]),
        (output["hidden"][2], [one["hidden"][2] for one in outputs]),
    ):
        torch.testing.assert_close(ours.cpu(), torch.cat(parts), rtol=slack, atol=slack)
    torch.testing.assert_close(output["loss"].cpu(), loss, rtol=slack or 1e-14, atol=0)
    output["loss"].backward()
    same(gradients(model), expected, tolerance)
    torch.testing.assert_close(model.step(**data).cpu(), loss, rtol=slack or 1e-14, atol=0)
    same(gradients(model), expected, tolerance)
