"""Make a model on the meta device, where it has shapes and no memory, with a sample.

A model is a function of a user, or a configuration that transformers reads, with weights to train of all of it, of LoRA
adapters (by PEFT), or of adapters on weights that are frozen in four bits, as bitsandbytes keeps them.
"""

from __future__ import annotations

import copy
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import pytree

__all__ = ["Loaded", "configured", "function_of", "moved_to_meta", "on_meta", "with_adapters"]

#: The weights that share a scale of 32 bits.
_BLOCK = 64


class Loaded(NamedTuple):
    """A model, a sample, and perhaps arguments of a plan, such as its loss function and the target of that."""

    model: nn.Module
    sample: Any
    options: dict[str, Any]


def function_of(text: str) -> Loaded:
    """Return what a function in a file returns.

    Args:
        text: ``file.py:function``

    Raises:
        ValueError: there is no such file or function, or it returns something else.
    """
    path, _, name = text.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise ValueError(f"give a function that returns a model and a sample, as file.py:function, but got {text!r}")
    sys.path.insert(0, str(Path(path).resolve().parent))  # As for a script.
    function = runpy.run_path(path).get(name)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    made = function()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ValueError(
            f"{name} must return a module and a sample, or these and a dict of arguments of the pipeline, such as "
            f"{{'loss_fn': ..., 'target': ...}}, but returned {type(made).__name__}"
        )
    return Loaded(made[0], made[1], dict(made[2]) if len(made) == 3 else {})


def on_meta(text: str, dtype: torch.dtype | None = None) -> Loaded:
    """Return what a function in a file returns, made on the meta device, floating point numbers perhaps in a type."""
    with torch.device("meta"):
        model, *arguments = function_of(text)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to("meta", dtype if tensor.is_floating_point() else None)

    sample, options = pytree.tree_map_only(Tensor, moved, arguments)
    return Loaded(moved_to_meta(model).to(dtype), sample, options)


def moved_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device; the model itself if it is there.

    `Module.to` would give a parameter with two names a copy for each.
    """
    if all(parameter.is_meta for parameter in model.parameters()):
        return model
    moved: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        moved[id(parameter)] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    return copy.deepcopy(model, moved)


def configured(name: str, dtype: torch.dtype | None, length: int) -> Loaded:
    """Return the model of a configuration, with one row for a sample.

    Args:
        name: a folder with a ``config.json``, or a name that transformers knows
        dtype: of the weights (default: bfloat16)
        length: the tokens of a row, if the model reads tokens

    Raises:
        ValueError: transformers reads no configuration there, or the model reads something else.
    """
    _leave_out_torchvision()
    try:
        import transformers
    except ImportError:
        raise ValueError(f"{name!r} needs transformers, which is not there: pip install transformers") from None
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"transformers reads no configuration from {name!r}; give a folder with a config.json, a name that is in "
            f"its cache, or file.py:function ({str(error).partition(chr(10))[0]})"
        ) from None
    config.use_cache, dtype = False, dtype or torch.bfloat16
    kind: Any = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if kind is not None:
            config.dtype = dtype
            model = kind(config).to(dtype)
        else:
            try:
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            except ValueError:
                model = transformers.AutoModel.from_config(config, dtype=dtype)
    return Loaded(model.train(), _sample(model, dtype, length), {})


def _leave_out_torchvision() -> None:
    """Let transformers not find a torchvision that does not fit PyTorch; no model needs it."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = None  # type: ignore[assignment]


def _sample(model: Any, dtype: torch.dtype, length: int) -> dict[str, Tensor]:
    """Return a row for a model of transformers."""
    config, kind = model.config, type(model).__name__
    sizes = getattr(config, "image_size", 224)
    if model.main_input_name == "input_ids":
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        length = min(length, getattr(text, "max_position_embeddings", None) or length)
        row = {"input_ids": torch.zeros(1, length, dtype=torch.long, device="meta")}
    elif model.main_input_name == "pixel_values":
        height, width = sizes if isinstance(sizes, (list, tuple)) else (sizes, sizes)
        channels = getattr(config, "num_channels", 3)
        row = {"pixel_values": torch.zeros(1, channels, height, width, dtype=dtype, device="meta")}
    else:
        raise ValueError(f"{kind} reads {model.main_input_name}; give a function that makes it with a sample")
    if "labels" in inspect.signature(model.forward).parameters:
        of_row = "SequenceClassification" in kind or "input_ids" not in row
        row["labels"] = torch.zeros(1 if of_row else (1, length), dtype=torch.long, device="meta")
    return row


def with_adapters(model: nn.Module, rank: int | None, *, four_bits: bool) -> nn.Module:
    """Return a model whose own weights are frozen, perhaps in four bits, with LoRA adapters of a rank on its layers.

    Raises:
        ValueError: PEFT is not there, or the rank is not positive.
    """
    if rank is not None and rank < 1:
        raise ValueError(f"--lora must be a rank of 1 or more, but got {rank}")
    _leave_out_torchvision()
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("adapters need PEFT, which is not there: pip install peft") from None
    if four_bits:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        for module in list(model.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear and child is not head:
                    setattr(module, name, _Linear4Bit(child))
    made: nn.Module = get_peft_model(model, LoraConfig(r=rank or 16, target_modules="all-linear"))
    return made


class _Linear4Bit(nn.Linear):
    """A linear layer with a frozen weight of four bits, and a scale for each block of it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.bias = linear.bias
        packed = torch.empty((linear.weight.numel() + 1) // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("absmax", torch.empty(-(-linear.weight.numel() // _BLOCK), device="meta"))

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _Product4Bit.apply(input, self.in_features, self.out_features)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias


class _Product4Bit(torch.autograd.Function):
    """The product with a weight of four bits, which backward unpacks again: it keeps nothing."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, inputs: int, outputs: int) -> Tensor:
        return nn.functional.linear(input, input.new_empty(outputs, inputs))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise NotImplementedError("only forward runs on the meta device")
