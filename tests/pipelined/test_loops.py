"""Training loops in the manner of the scripts of timm, torchvision and diffusers, with their own helpers.

A batch norm sees a micro-batch; these models have none, but for one test, which compares micro-batch by micro-batch.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.conftest import Devices
from tests.pipelined.helpers import CHUNKS, assert_close, counted_calls, gradients

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")
diffusers = pytest.importorskip("diffusers")
for _module in ("timm.data", "timm.loss", "timm.optim", "timm.scheduler", "timm.utils"):
    importlib.import_module(_module)

from diffusers.optimization import get_cosine_schedule_with_warmup  # noqa: E402
from diffusers.training_utils import EMAModel  # noqa: E402

from torchgpipe import pipelined  # noqa: E402

pytestmark = pytest.mark.slow

CLASSES = 5
Train = Callable[[Any], dict[str, Any]]


def images(rows: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw images (rows, 3, 16, 16) and their classes (rows,)."""
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 3, 16, 16, generator=draw, dtype=torch.float64),
        torch.randint(CLASSES, (rows,), generator=draw),
    )


def vision_transformer_of_timm() -> Any:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2, "num_classes": CLASSES}
    return timm.models.VisionTransformer(**sizes).double()


def vision_transformer_of_torchvision() -> Any:
    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 8, "num_layers": 4, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    model = torchvision.models.VisionTransformer(num_classes=CLASSES, **sizes)
    nn.init.normal_(model.heads.head.weight)  # else it is zero, and nothing below has a gradient
    return model.double()


def residual_network_of_torchvision() -> Any:
    torch.manual_seed(0)
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES).double()


def unet_of_diffusers() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).double()


def in_pipeline(build: Callable[[], Any], devices: Devices, chunks: int = CHUNKS) -> Any:
    return pipelined(build(), (images(2)[0],), chunks=chunks, devices=devices(2))


def assert_trained_alike(build: Callable[[], Any], train: Train, devices: Devices) -> dict[str, Any]:
    """Train both models, and assert that all that ``train`` returns is equal; return it."""
    ours, plain = train(in_pipeline(build, devices)), train(build())
    assert_close(ours, plain)
    return ours


# ------------------------------------------------------------------------------------------------ in the manner of timm


def test_a_script_of_timm(devices: Devices) -> None:
    """Mixed images with soft targets, clipped gradients, SGD with momentum, a cosine, and averaged weights."""

    def train(model: Any) -> dict[str, Any]:
        mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=0.0, label_smoothing=0.1, num_classes=CLASSES)
        loss_fn = timm.loss.SoftTargetCrossEntropy()
        optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9, weight_decay=1e-3)
        scheduler = timm.scheduler.CosineLRScheduler(optimizer, t_initial=3, warmup_t=1, warmup_lr_init=0.01)
        average = timm.utils.ModelEmaV3(model, decay=0.9)
        meter = timm.utils.AverageMeter()
        scaler = timm.utils.NativeScaler(device="cpu")
        model.train()
        for step in range(4):
            input, target = images(seed=step)
            torch.manual_seed(step)
            input, target = mixed(mixup, input, target, step)
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

    assert_trained_alike(vision_transformer_of_timm, train, devices)


def mixed(mixup: Any, input: Tensor, target: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Mix images by numbers that depend on the seed only; timm draws them from NumPy."""
    import numpy

    numpy.random.seed(seed)
    return mixup(input.clone(), target)  # type: ignore[no-any-return]


def test_the_features_of_a_model_of_timm(devices: Devices) -> None:
    """Methods that are not `forward` run the plain model."""
    model, plain = in_pipeline(vision_transformer_of_timm, devices), vision_transformer_of_timm()
    input = images()[0]
    assert_close(model.forward_features(input), plain.forward_features(input))
    assert_close(model.forward_head(model.forward_features(input)), plain(input))


# ----------------------------------------------------------------------------------------- in the manner of torchvision


@pytest.mark.parametrize("precision", ["float64", "bfloat16, unscaled", "bfloat16, scaled"])
def test_a_script_of_torchvision(precision: str, devices: Devices) -> None:
    """Smoothed labels, decay for weights but not for norms, a warm-up, clipping, and averaged weights.

    With a single micro-batch nothing rounds differently, so mixed precision is compared to the last bit.
    """
    mixed_precision = precision != "float64"

    def train(model: Any) -> dict[str, Any]:
        groups = torchvision_decay(model)
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
        warmup = LinearLR(optimizer, start_factor=0.1, total_iters=2)
        schedule = SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, 3)], milestones=[2])
        loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=precision.endswith(" scaled"))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        losses = []
        for step in range(4):
            input, target = images(seed=step)
            input = input.float() if mixed_precision else input
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision):
                loss = loss_fn(model(input), target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            average.update_parameters(model)
            losses.append(loss.detach())
        return {"losses": torch.stack(losses), "weights": model.state_dict(), "averages": average.state_dict()}

    if not mixed_precision:
        assert_trained_alike(vision_transformer_of_torchvision, train, devices)
        return
    model = in_pipeline(vision_transformer_of_torchvision, devices, chunks=1).float()
    assert_close(train(model), train(vision_transformer_of_torchvision().float()), 0.0)


def torchvision_decay(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups of parameters: those of norms, which do not decay, and all others."""
    norms = [p for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]
    kept = {id(p) for p in norms}
    others = [p for p in model.parameters() if id(p) not in kept]
    return [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": 1e-3}]


def test_batch_norms_see_micro_batches(devices: Devices) -> None:
    """The reference is the plain model on one micro-batch after the other; statistics are counted once for each."""
    ours, plain = in_pipeline(residual_network_of_torchvision, devices), residual_network_of_torchvision()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (ours, plain)]
    for step in range(3):
        input, target = images(6, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(ours(input), target).backward()
        F.cross_entropy(torch.cat([plain(part) for part in input.chunk(CHUNKS)]), target).backward()
        assert_close(gradients(ours), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
    assert_close(ours.state_dict(), plain.state_dict())
    input = images(5)[0]
    with torch.no_grad():
        assert_close(ours.eval()(input), plain.eval()(input))


# ------------------------------------------------------------------------------------------- in the manner of diffusers


def test_a_script_of_diffusers(devices: Devices) -> None:
    """The model predicts the noise; its averaged weights sample images at the end."""
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

    model = pipelined(unet_of_diffusers(), (clean[:2], steps[:2]), chunks=CHUNKS, devices=devices(2))
    with counted_calls(model.mid_block) as calls:
        ours = train(model)
    assert calls[: 2 * 3] == [3] * 6, "two micro-batches in each of three steps"
    assert_close(ours, train(unet_of_diffusers()))


def test_a_saved_model_of_diffusers(devices: Devices, tmp_path: Any) -> None:
    clean, steps = torch.randn(2, 1, 8, 8, dtype=torch.float64), torch.tensor([1, 2])
    model = pipelined(unet_of_diffusers(), (clean, steps), chunks=CHUNKS, devices=devices(2))
    model.save_pretrained(tmp_path)
    loaded = diffusers.UNet2DModel.from_pretrained(tmp_path, torch_dtype=torch.float64)
    assert type(loaded) is diffusers.UNet2DModel
    assert loaded.config["_class_name"] == "UNet2DModel"
    assert_close(loaded.state_dict(), unet_of_diffusers().state_dict(), 0.0)


# --------------------------------------------------------------------------------------------------- averages by copies


def test_an_average_by_deepcopy(devices: Devices) -> None:
    """A copy is a pipeline of its own: it evaluates, and the model trains on without it."""
    model, plain = in_pipeline(vision_transformer_of_timm, devices), vision_transformer_of_timm()
    average = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for step in range(2):
        input, target = images(seed=step)
        for one, optimizer in zip((model, plain), optimizers):
            optimizer.zero_grad()
            F.cross_entropy(one(input), target).backward()
            optimizer.step()
    assert_close(average.state_dict(), vision_transformer_of_timm().state_dict(), 0.0)
    assert_close(model.state_dict(), plain.state_dict())
    with torch.no_grad():
        for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
            kept.lerp_(parameter, 0.5)
        halfway = {name: (a + b) / 2 for (name, a), b in zip(states(), plain.state_dict().values())}
        plain.load_state_dict(halfway)
        input = images(6)[0]
        with counted_calls(average.blocks[0]) as calls:
            assert_close(average(input), plain(input))
    assert calls == [3, 3]


def states() -> list[tuple[str, Tensor]]:
    return list(vision_transformer_of_timm().state_dict().items())


def test_the_optimizer_may_be_older_than_the_pipeline(devices: Devices) -> None:
    """Parameters keep their identity."""

    def train(model: Any, optimizer: Any) -> Any:
        for step in range(2):
            input, target = images(seed=step)
            optimizer.zero_grad()
            F.cross_entropy(model(input), target).backward()
            optimizer.step()
        return model.state_dict()

    models = [vision_transformer_of_timm() for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    pipelined(models[0], (images(2)[0],), chunks=CHUNKS, devices=devices(2))
    assert_close(*map(train, models, optimizers))
