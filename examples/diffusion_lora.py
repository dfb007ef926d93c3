"""Train LoRA adapters of a diffusion transformer of diffusers, in a pipeline and without one, and draw with them.

    python examples/diffusion_lora.py                      # in less than a minute on two CPU cores
    python examples/diffusion_lora.py --rank 8 --window 8

A small Flux learns by flow matching to draw digits from 0 to 7, of the 1797 images of 8 by 8 pixels that come with
scikit-learn. Then it is frozen, and peft adds adapters, which learn 8 and 9. They are trained twice from the same
weights: by a loop that accumulates the gradients of a window of batches, and by one `step` of a pipeline, in which the
batches of a window are on different devices at the same time. Batches are whole images or parts of them, so they differ
in size, and nothing is padded. The script prints the losses of both side by side, and saves the pipeline's adapters.

The example uses all accelerators of the machine. On a CPU the partitions share the cores.
It needs `pip install diffusers peft scikit-learn`.
"""

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

import torchgpipe
from torchgpipe import MicroBatches

SHADES = " .:-=+*#%@"
SIZES = [(8, 8), (8, 6), (6, 8)]  # rows and columns of pixels

#: The arguments of the model for a batch, and what it is to predict.
Batch = tuple[dict[str, Any], Tensor]


def new_model(width: int) -> FluxTransformer2DModel:
    """Return a Flux whose tokens are squares of 2 by 2 pixels, and whose text is the number as one of ten."""
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=width // 16,
        joint_attention_dim=10,
        pooled_projection_dim=10,
        axes_dims_rope=(4, 6, 6),
    )


def pack(images: Tensor) -> Tensor:
    """Return the tokens (batch, squares, 4) of images (batch, rows, columns)."""
    return images.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).flatten(1, 2)


def arguments(tokens: Tensor, numbers: Tensor, times: Tensor, size: tuple[int, int]) -> dict[str, Any]:
    rows, columns = torch.meshgrid(torch.arange(size[0] // 2), torch.arange(size[1] // 2), indexing="ij")
    kinds = F.one_hot(numbers, 10).float()
    return {
        "hidden_states": tokens,
        "timestep": times,
        "pooled_projections": kinds,
        "encoder_hidden_states": kinds[:, None],
        "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1).float(),
        "txt_ids": torch.zeros(1, 3),
        "return_dict": False,
    }


def batches(least: int, most: int, count: int, rows: int, seed: int) -> list[Batch]:
    """Return noisy images of numbers from `least` to `most`, each batch of one size, and where the noise is to go."""
    digits, generator = load_digits(), torch.Generator().manual_seed(seed)
    images, numbers = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)
    chosen = ((numbers >= least) & (numbers <= most)).nonzero()[:, 0]
    made = []
    for k in range(count):
        height, width = size = SIZES[k % len(SIZES)]
        some = chosen[torch.randint(len(chosen), (rows,), generator=generator)]
        tokens = pack(images[some, :height, :width])
        noise, times = torch.randn(tokens.shape, generator=generator), torch.rand(rows, generator=generator)
        noisy = torch.lerp(tokens, noise, times[:, None, None])
        made.append((arguments(noisy, numbers[some], times, size), noise - tokens))
    return made


def loss_fn(output: tuple[Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target)


def train(model: Any, data: list[Batch], window: int, lr: float) -> list[float]:
    """Train what is not frozen, by `step` if the model is a pipeline; return the loss of each window."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=lr)
    model.train()
    losses = []
    for first in range(0, len(data), window):
        inputs, targets = zip(*data[first : first + window])
        optimizer.zero_grad()
        if hasattr(model, "step"):
            weights = [1] * len(inputs)  # The batches of a window weigh the same.
            loss = model.step(MicroBatches(inputs, weights=weights), target=MicroBatches(targets)).item()
        else:
            loss = 0.0
            for input, target in zip(inputs, targets):
                share: Any = loss_fn(model(**input), target) / len(inputs)
                share.backward()
                loss += share.item()
        optimizer.step()
        losses.append(loss)
    return losses


@torch.no_grad()
def draw(model: Any, numbers: list[int], seed: int, steps: int = 20) -> Tensor:
    """Return images (count, 8, 8) that the model makes of noise."""
    model.eval()
    tokens = torch.randn(len(numbers), 16, 4, generator=torch.Generator().manual_seed(seed))
    for k in range(steps, 0, -1):
        times = torch.full((len(numbers),), k / steps)
        tokens -= model(**arguments(tokens, torch.tensor(numbers), times, (8, 8)))[0].to(tokens.device) / steps
    return tokens.view(-1, 4, 4, 2, 2).transpose(2, 3).reshape(-1, 8, 8)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    torch.manual_seed(options.seed)
    plain = new_model(options.width)
    print(f"{sum(p.numel() for p in plain.parameters())} parameters learn 0 to 7 ...", flush=True)
    losses = train(plain, batches(0, 7, options.steps, 64, options.seed), 1, 3e-3)
    part = max(1, len(losses) // 10)
    print(f"loss {sum(losses[:part]) / part:.3f}, then {sum(losses[-part:]) / part:.3f}")

    plain.requires_grad_(False)
    plain.add_adapter(LoraConfig(r=options.rank, target_modules=["to_q", "to_k", "to_v", "proj_mlp", "net.2"]))
    model: Any = copy.deepcopy(plain)
    data = batches(8, 9, options.window * options.windows, options.batch, options.seed + 1)
    samples = MicroBatches([input for input, _ in data[:2]])  # of two sizes
    torchgpipe.pipelined(model, samples, loss_fn=loss_fn)
    print(f"\nAs a pipeline:\n{model.layout}\n")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trained} parameters, in adapters, learn 8 and 9 ...", flush=True)
    ours, theirs = (train(one, data, options.window, 1e-2) for one in (model, plain))
    print(f"{'windows':>12}{'pipeline':>14}{'plain':>14}{'difference':>14}")
    part = max(1, options.windows // 10)
    for first in range(0, options.windows, part):
        last = min(first + part, options.windows)
        one, other = (sum(losses[first:last]) / (last - first) for losses in (ours, theirs))
        print(f"{f'{first}-{last - 1}':>12}{one:>14.6f}{other:>14.6f}{one - other:>14.6f}")

    with tempfile.TemporaryDirectory() as folder:
        model.save_lora_adapter(folder)
        (file,) = Path(folder).iterdir()
        print(f"\nSaved {file.stat().st_size / 1e3:.0f} kB of adapters")
    print("Numbers that it draws, 8 and 9:")
    images = draw(model, [8, 8, 9, 9], options.seed)
    shades = ((images + 1) / 2 * len(SHADES)).long().clamp(0, len(SHADES) - 1)
    for row in range(8):
        print("   ".join("".join(2 * SHADES[shade] for shade in image[row]) for image in shades.tolist()))


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train LoRA adapters of a diffusion transformer, in a pipeline and without one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--width", type=int, default=32, help="length of the vector at each token, a multiple of 16")
    add("--rank", type=int, default=4, help="rank of the adapters")
    add("--window", type=int, default=4, help="batches whose gradients are accumulated")
    add("--batch", type=int, default=8, help="images in a batch")
    add("--steps", type=int, default=300, help="steps that learn 0 to 7")
    add("--windows", type=int, default=60, help="windows that learn 8 and 9")
    add("--seed", type=int, default=0, help="seed of weights, batches, noise and drawings")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # The tensors are small: more threads would wait for each other.
    main()
