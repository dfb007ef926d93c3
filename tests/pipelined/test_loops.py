"""Training loops in the manner of the scripts of timm and diffusers, with their own helpers.

A batch norm sees a micro-batch; these models have none. Averages are copies: they evaluate as pipelines of their own.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pipelined.helpers import CHUNKS, TWO, assert_close, counted_calls

timm = pytest.importorskip("timm")
diffusers = pytest.importorskip("diffusers")
for _module in ("timm.data", "timm.loss", "timm.optim", "timm.scheduler", "timm.utils"):
    importlib.import_module(_module)

from diffusers.optimization import get_cosine_schedule_with_warmup  # noqa: E402
from diffusers.training_utils import EMAModel  # noqa: E402

from torchgpipe import pipelined  # noqa: E402

pytestmark = pytest.mark.slow

CLASSES = 5


def images(rows: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw images (rows, 3, 16, 16) and their classes (rows,)."""
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 3, 16, 16, generator=draw, dtype=torch.float64),
        torch.randint(CLASSES, (rows,), generator=draw),
    )


def vision_transformer_of_timm() -> Any:
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2, "num_classes": CLASSES}
    torch.manual_seed(0)
    return timm.models.VisionTransformer(**sizes).double()


def unet_of_diffusers() -> Any:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
    torch.manual_seed(0)
    return diffusers.UNet2DModel(block_out_channels=(8, 16), attention_head_dim=4, **sizes, **blocks).double()


def in_pipeline(model: Any, chunks: int = CHUNKS) -> Any:
    return pipelined(model, (images(2)[0],), chunks=chunks, devices=TWO)


# ------------------------------------------------------------------------------------------------ in the manner of timm


def train_like_timm(model: Any) -> dict[str, Any]:
    """Train with mixed images and soft targets, clipped gradients, SGD with momentum, a cosine, and averages."""
    mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=0.0, label_smoothing=0.1, num_classes=CLASSES)
    loss_fn = timm.loss.SoftTargetCrossEntropy()
    optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9, weight_decay=1e-3)
    scheduler = timm.scheduler.CosineLRScheduler(optimizer, t_initial=3, warmup_t=1, warmup_lr_init=0.01)
    average = timm.utils.ModelEmaV3(model, decay=0.9)
    meter = timm.utils.AverageMeter()
    scaler = timm.utils.NativeScaler(device="cpu")
    model.train()
    for step in range(4):
        numpy.random.seed(step)  # by which timm mixes
        input, target = mixup(*images(seed=step))
        loss = loss_fn(model(input), target)
        optimizer.zero_grad()
        if step % 2:
            scaler(loss, optimizer, clip_grad=0.5, clip_mode="norm", parameters=model.parameters())
        else:
            loss.backward()
            timm.utils.dispatch_clip_grad(model.parameters(), 0.5, mode="agc")
            optimizer.step()
        average.update(model, step=step)
        meter.update(loss.item(), len(input))
        scheduler.step(step + 1)
    model.eval()
    with torch.no_grad():
        input, target = images(seed=9)
        scores, averaged = model(input), average.module(input)
    return {
        "loss": torch.tensor(meter.avg),
        "right": torch.tensor(timm.utils.accuracy(scores, target, topk=(1, 3))),
        "averaged": averaged,
        "weights": model.state_dict(),
        "averages": average.module.state_dict(),
    }


def test_a_script_of_timm() -> None:
    """The optimizer of a script may be older than the pipeline, and its average a copy of it."""
    ours, plain = in_pipeline(vision_transformer_of_timm()), vision_transformer_of_timm()
    assert_close(train_like_timm(ours), train_like_timm(plain))
    # Methods that are not `forward` run the plain model.
    features = ours.forward_features(images()[0])
    assert_close(features, plain.forward_features(images()[0]))
    assert_close(ours.forward_head(features), plain(images()[0]))


# ------------------------------------------------------------------------------------------- in the manner of diffusers


def test_a_script_of_diffusers(tmp_path: Any) -> None:
    """The model predicts the noise; its averaged weights sample images at the end, and are saved."""
    noises = diffusers.DDPMScheduler(num_train_timesteps=20)
    draw = torch.Generator().manual_seed(1)
    clean = torch.randn(6, 1, 8, 8, generator=draw, dtype=torch.float64)
    steps = torch.randint(20, (6,), generator=draw)

    def train(model: Any) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.95, 0.999))
        schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=3)
        average = EMAModel(model.parameters(), decay=0.9, model_cls=type(model), model_config=model.config)
        losses = []
        for step in range(3):
            noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            predicted = model(noises.add_noise(clean, noise, steps), steps, return_dict=step > 0)
            loss = F.mse_loss(predicted.sample if step else predicted[0], noise)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            average.step(model.parameters())
            losses.append(loss.detach())
        weights = copy.deepcopy(model.state_dict())
        average.copy_to(model.parameters())
        sampling = diffusers.DDPMPipeline(unet=model, scheduler=noises)
        sampling.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(4)
        sampled = sampling(batch_size=4, generator=generator, num_inference_steps=3, output_type="np").images
        return {"losses": torch.stack(losses), "weights": weights, "sampled": torch.tensor(sampled)}

    model = pipelined(unet_of_diffusers(), (clean[:2], steps[:2]), chunks=CHUNKS, devices=TWO)
    with counted_calls(model.mid_block) as calls:
        ours = train(model)
    assert calls[: 2 * 3] == [3] * 6, "two micro-batches in each of three steps"
    assert_close(ours, train(unet_of_diffusers()))

    model.save_pretrained(tmp_path)
    loaded = diffusers.UNet2DModel.from_pretrained(tmp_path, torch_dtype=torch.float64)
    assert type(loaded) is diffusers.UNet2DModel
    assert loaded.config["_class_name"] == "UNet2DModel"
    assert_close(loaded.state_dict(), model.state_dict(), 0.0)
