"""Train a diffusion model of diffusers on images of digits, through a pipeline and without one, and draw new digits.

    python examples/diffusion.py                      # in less than a minute on two CPU cores
    python examples/diffusion.py --steps 1000 --chunks 8

A U-Net learns to tell the noise that was added to the 1797 images of 8 by 8 pixels that come with scikit-learn. It is
trained twice from the same weights: once as a pipeline, and once as it is. Only the call of `pipelined` differs. The
script prints the losses of both side by side. In the end the averaged weights of the pipeline draw four digits.

The example uses all accelerators of the machine. On a CPU the partitions share the cores.
It needs `pip install diffusers scikit-learn`.
"""

import argparse
import copy

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchgpipe

SHADES = " .:-=+*#%@"


def digits() -> Tensor:
    """Return images (1797, 1, 8, 8) with values from -1 to 1."""
    return torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1


def new_model(options: argparse.Namespace) -> UNet2DModel:
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(options.width, 2 * options.width),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def train(model: UNet2DModel, noises: DDPMScheduler, options: argparse.Namespace) -> tuple[list[float], UNet2DModel]:
    """Return the losses, and the model with averaged weights."""
    images = digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    generator = torch.Generator().manual_seed(options.seed)
    losses = []
    for _ in range(options.steps):
        clean = images[torch.randint(len(images), (options.batch,), generator=generator)]
        noise = torch.randn(clean.shape, generator=generator)
        times = torch.randint(len(noises), (options.batch,), generator=generator)
        predicted = model(noises.add_noise(clean, noise, times), times).sample
        loss = F.mse_loss(predicted, noise.to(predicted.device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        losses.append(loss.item())
    return losses, average.module


@torch.no_grad()
def draw(model: UNet2DModel, noises: DDPMScheduler, count: int, seed: int) -> Tensor:
    """Return images (count, 8, 8) that the model makes of noise."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 8, 8, generator=generator)
    for time in noises.timesteps:
        predicted = model(images, time.expand(count)).sample.to(images.device)
        images = noises.step(predicted, time, images, generator=generator).prev_sample
    return images[:, 0]


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    torch.manual_seed(options.seed)
    noises = DDPMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
    plain = new_model(options)
    model = copy.deepcopy(plain)
    sample = torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long)
    torchgpipe.pipelined(model, sample, chunks=options.chunks)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, as a pipeline:\n{model.layout}\n", flush=True)

    ours, average = train(model, noises, options)
    theirs, _ = train(plain, noises, options)
    print(f"{'steps':>12}{'pipeline':>14}{'plain':>14}{'difference':>14}")
    part = max(1, options.steps // 10)
    for first in range(0, options.steps, part):
        steps = slice(first, min(first + part, options.steps))
        one, other = (sum(losses[steps]) / len(losses[steps]) for losses in (ours, theirs))
        print(f"{f'{steps.start}-{steps.stop - 1}':>12}{one:>14.6f}{other:>14.6f}{one - other:>14.6f}")

    print("\nDigits that it draws:")
    shades = ((draw(average, noises, 4, options.seed) + 1) / 2 * len(SHADES)).long().clamp(0, len(SHADES) - 1)
    for row in range(8):
        print("   ".join("".join(2 * SHADES[shade] for shade in image[row]) for image in shades.tolist()))


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a diffusion model on images of digits, through a pipeline and without one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--width", type=int, default=16, help="channels at full size")
    add("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    add("--batch", type=int, default=64, help="images in a mini-batch")
    add("--steps", type=int, default=200, help="training steps")
    add("--seed", type=int, default=0, help="seed of weights, batches, noise and drawings")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # The tensors are small: more threads would wait for each other.
    main()
