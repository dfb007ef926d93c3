"""Windows of real architectures: micro-batches of other lengths, sizes and rows give the sum of plain backwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.pipelined.helpers import CLOSE, TWO, VOCABULARY, assert_close, gradients, llama, t5
from torchgpipe import MicroBatches, pipelined

for library in ("diffusers", "transformers"):
    pytest.importorskip(library)

#: The libraries' own, about their own.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Architecture(NamedTuple):
    """A model, and its micro-batches by number: each of other sizes.

    Attributes:
        make: returns the model
        draw: returns a micro-batch
        is_exact: whether its gradients are equal to the last bit; a weight or a value that several partitions use gets
            a sum from each
    """

    make: Callable[[], Any]
    draw: Callable[[int], Any]
    is_exact: bool = True


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def packed(k: int) -> dict[str, Any]:
    """Return sequences that are packed into one row: positions begin again, and first labels do not count."""
    lengths = [2 + (k + j) % 4 for j in range(1 + k % 3)]
    ids, positions = tokens(1, sum(lengths)), torch.cat([torch.arange(length) for length in lengths])[None]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    labels = ids.masked_fill(positions == 0, -100)
    marks = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths), "max_length_k": max(lengths)}
    return {"input_ids": ids, "position_ids": positions, "labels": labels, **marks}


def translation(k: int) -> dict[str, Any]:
    mask = {"attention_mask": torch.ones(1 + k % 2, 4 + k, dtype=torch.long)} if k % 2 else {}
    return {"input_ids": tokens(1 + k % 2, 4 + k), "labels": tokens(1 + k % 2, 3 + k % 4), **mask}


def flux() -> Any:
    from diffusers import FluxTransformer2DModel

    layers = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
    sizes = {"in_channels": 4, "joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": (2, 2, 4)}
    return FluxTransformer2DModel(patch_size=1, **layers, **sizes).double()


def latents(k: int) -> dict[str, Any]:
    """Return an image of 2 x (2 + k) latents with a prompt of 3 + k tokens."""
    here = torch.zeros(4 + 2 * k, 3)
    here[:, 1], here[:, 2] = torch.arange(4 + 2 * k) // (2 + k), torch.arange(4 + 2 * k) % (2 + k)
    states = {"hidden_states": normal(1, 4 + 2 * k, 4), "encoder_hidden_states": normal(1, 3 + k, 8)}
    places = {"img_ids": here, "txt_ids": torch.zeros(3 + k, 3)}
    return {
        **states,
        **places,
        "pooled_projections": normal(1, 8),
        "timestep": torch.tensor([0.5]),
        "return_dict": False,
    }


ARCHITECTURES = {
    "Llama, packed sequences": Architecture(llama, packed),
    "T5": Architecture(t5, translation, is_exact=False),
    "Flux, latents of other sizes": Architecture(flux, latents, is_exact=False),
}


def loss_of(output: Any, _target: Any = None) -> Tensor:
    loss: Tensor = output[0].square().mean() if isinstance(output, tuple) else output.loss
    return loss


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_window_gives_the_sum_of_plain_backwards(name: str) -> None:
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    plain = architecture.make()
    model = copy.deepcopy(plain)
    sample = MicroBatches([architecture.draw(k) for k in (2, 1)])
    pipelined(model, sample, devices=TWO, balance="parameters", loss_fn=loss_of, checkpoint="T5" in name)
    window, weights = [architecture.draw(k) for k in (0, 3, 1)], [1.0, 2.0, 0.5]

    def verify(is_step: bool) -> None:
        losses = [loss_of(plain(**batch)) for batch in window]
        for i in range(3) if is_step else reversed(range(3)):
            losses[i].backward(torch.full_like(losses[i], weights[i] / 3.5))
        assert_close(gradients(model), gradients(plain), 0.0 if architecture.is_exact else CLOSE)
        plain.zero_grad()
        model.zero_grad()

    model.step(MicroBatches(window, weights=weights))
    verify(is_step=True)
    losses = [loss_of(output) for output in model(MicroBatches(window))]
    torch.autograd.backward(losses, [torch.full_like(loss, w / 3.5) for loss, w in zip(losses, weights)])
    verify(is_step=False)
