"""The child of diffusion_lora.py: one run of a trainer's own script, with a tiny Flux, whose gradients it notes.

What the script trains on is random and made here. Packages that it imports and does not need are empty ones. Nothing
else of a trainer is replaced, but in sd-scripts the sizes, which are constants there, and how text encoders are loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import string
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.campaigns.architectures.operators import register_missing

__all__ = ["make_models"]

#: What ai-toolkit imports for other models than Flux, or for other tasks than this.
EMPTY = (
    "albumentations kornia lycoris optimum lpips pytorch_fid torchao controlnet_aux open_clip librosa mutagen av "
    "gradio torchaudio extensions_built_in.diffusion_models"
)
WIDTH = 32  # of texts and of the transformer


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (), {"__init__": lambda self, *args, **options: None})


class _Empty(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 -- of a package
    __getattr__ = _Kind.__getattr__


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the empty packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        empty = any(name == one or name.startswith(f"{one}.") for one in EMPTY.split())
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if empty else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def make_models(folder: Path) -> None:
    """Write a tiny Flux pipeline of diffusers, and four images with captions."""
    import diffusers as d
    import transformers as t
    from PIL import Image

    torch.manual_seed(0)
    letters = [*string.ascii_lowercase, *string.digits]
    tokens = ["<|startoftext|>", "<|endoftext|>", "!", *letters, *[f"{letter}</w>" for letter in letters]]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({token: k for k, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    clip = t.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77, pad_token="!")
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *[(letter, -3.0) for letter in letters]]
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"vocab_size": len(tokens), "num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    t5 = t.T5Config(vocab_size=64, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    vae = d.AutoencoderKL(
        **{"block_out_channels": (8, 16), "norm_num_groups": 4, "shift_factor": 0.1, "scaling_factor": 0.4},
        **{"use_quant_conv": False, "use_post_quant_conv": False},
        **{"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2},
    )
    flux = d.FluxTransformer2DModel(
        **{"in_channels": 16, "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 16},
        **{"num_attention_heads": 2, "joint_attention_dim": WIDTH, "pooled_projection_dim": WIDTH},
        **{"guidance_embeds": True, "axes_dims_rope": (4, 6, 6)},
    )
    texts = (t.CLIPTextModel(t.CLIPTextConfig(**sizes)), clip, t.T5EncoderModel(t5), t.T5Tokenizer(pieces, extra_ids=0))
    d.FluxPipeline(d.FlowMatchEulerDiscreteScheduler(shift=3.0), vae, *texts, flux).save_pretrained(folder)
    for part in ("images", "captioned"):
        (folder / part).mkdir()
        for k in range(4):
            pixels = torch.randint(256, (64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(k))
            Image.fromarray(pixels.numpy()).save(folder / part / f"{k}.png")
    for k in range(4):
        (folder / "captioned" / f"{k}.txt").write_text(f"image {k}")


def shrink_kohya(folder: Path) -> None:
    """Give sd-scripts a tiny Flux, whose sizes are constants there, and let it load the text encoders of a folder."""
    from safetensors.torch import save_file
    from transformers import CLIPTextModel, PreTrainedTokenizerFast, T5EncoderModel

    models, utils, texts = (importlib.import_module(f"library.{name}") for name in MODULES)
    spec = models.configs["dev"]
    sizes = {"hidden_size": WIDTH, "num_heads": 2, "depth": 2, "depth_single_blocks": 4, "axes_dim": [4, 6, 6]}
    spec.params = dataclasses.replace(spec.params, vec_in_dim=WIDTH, context_in_dim=WIDTH, **sizes)
    spec.ae_params = dataclasses.replace(spec.ae_params, ch=32, ch_mult=[1, 1, 1, 1], num_res_blocks=1)
    utils.load_clip_l = lambda *args, **options: CLIPTextModel.from_pretrained(folder / "text_encoder")
    utils.load_t5xxl = lambda *args, **options: T5EncoderModel.from_pretrained(folder / "text_encoder_2")

    def tokenizer(self: Any, kind: type, name: str, **options: Any) -> Any:
        part, pad, end = ("_2", "<pad>", "</s>") if "T5" in kind.__name__ else ("", "!", "<|endoftext|>")
        path = folder / f"tokenizer{part}" / "tokenizer.json"
        return PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token=pad, eos_token=end)

    texts.FluxTokenizeStrategy._load_tokenizer = tokenizer
    torch.manual_seed(0)
    save_file(models.Flux(spec.params).state_dict(), folder / "flux.safetensors")
    save_file(models.AutoEncoder(spec.ae_params).state_dict(), folder / "ae.safetensors")


MODULES = ("flux_models", "flux_utils", "strategy_flux")


def note(path: str) -> None:
    """Let each step of an optimizer write what there is by then: losses, gradients, and bytes by device."""
    import accelerate
    import diffusers
    import transformers

    losses, grads, held = list[float](), list[list[torch.Tensor]](), Counter[str]()
    versions = {module.__name__: module.__version__ for module in (accelerate, diffusers, transformers)}
    plain = accelerate.Accelerator.backward

    def backward(self: Any, loss: torch.Tensor, **options: Any) -> Any:
        losses.append(loss.item())
        return plain(self, loss, **options)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grads.append([parameter.grad.detach().float().cpu() for parameter in trained])
        if not held:
            held.update(sum_bytes([one for one in gc.get_objects() if type(one) is nn.Parameter]))
        torch.save({"losses": losses, "grads": grads, "bytes": dict(held), "versions": versions}, path)

    accelerate.Accelerator.backward = backward
    register_optimizer_step_pre_hook(before)


def sum_bytes(parameters: list[nn.Parameter]) -> Counter[str]:
    held = Counter[str]()
    for parameter in parameters:
        held[str(parameter.device)] += parameter.nbytes
    return held


def main(trainer: str, out: str, devices: str, folder: str, script: str, *arguments: str) -> None:
    """Run a script of a trainer in its checkout, which is the working directory.

    Args:
        trainer: its name
        out: where the notes are written
        devices: those of the pipeline, or cpu without one
        folder: that of the models
        script: the script
        *arguments: its arguments
    """
    if devices.startswith("late"):
        from tests import late

        late.load()
    torch.set_num_threads(1)
    register_missing()
    note(out)
    sys.meta_path.insert(0, _Finder())
    sys.path[:0] = [os.getcwd(), str(Path(script).resolve().parent)]
    if trainer == "sd-scripts":
        shrink_kohya(Path(folder))
    import torchgpipe

    vars(torchgpipe)["pipelined"] = functools.partial(torchgpipe.pipelined, devices=devices.split(","))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
