"""Take a model that is not sequential apart into layers, and train it through a pipeline: ResNet-50 and GPT-2.

Both models are made by their libraries with random weights, so nothing is downloaded. Their `forward` is rewritten as
an `nn.Sequential` of the same modules. The example checks that logits and gradients are those of the original.

    python examples/taken_apart.py gpt2          # needs transformers; learns Python's source code, byte by byte
    python examples/taken_apart.py resnet50      # needs torchvision; tells images of source code from bytecode

Each takes less than a minute on two CPU cores. A `state_dict` of the original is loaded under the names of the layers,
and saved under the names of the original: `names_in` is the table.
"""

import argparse
import marshal
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from torchgpipe import GPipe
from torchgpipe.skip import pop, skippable, stash

# ---- ResNet, as in torchvision. Its forward is a chain of calls; only the flattening is no module.


def resnet_layers(model: nn.Module) -> nn.Sequential:
    """Return the layers and blocks of a torchvision ResNet: images (batch, 3, height, width) to (batch, classes)."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for name, child in model.named_children():
        if name == "fc":
            layers["flatten"] = nn.Flatten()
        if isinstance(child, nn.Sequential):
            layers.update((f"{name}_{index}", block) for index, block in child.named_children())
        else:
            layers[name] = child
    return nn.Sequential(layers)


# ---- GPT-2, as in transformers. Blocks share a mask, and the first and the last layer share their weights.


@skippable(stash=["table"])
class Embed(nn.Module):
    """Embed tokens (batch, time) as vectors (batch, time, width), make a mask, and stash the embedding table."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.config = transformer.config
        self.wte, self.wpe, self.drop = transformer.wte, transformer.wpe, transformer.drop

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None
    ) -> Generator[stash, None, tuple[Tensor, Tensor | None]]:
        from transformers.masking_utils import create_causal_mask

        yield stash("table", self.wte.weight)
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        mask = create_causal_mask(self.config, x, attention_mask, past_key_values=None)
        return self.drop(x), mask


class Block(nn.Module):
    """A block that also passes on the mask."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        x, mask = value
        return self.block(x, attention_mask=mask), mask


@skippable(pop=["table"])
class Score(nn.Module):
    """Score the next token (batch, time, vocabulary) by the table of the first layer."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.ln_f = transformer.ln_f

    def forward(self, value: tuple[Tensor, Tensor | None]) -> Generator[pop, Tensor, Tensor]:
        table = yield pop("table")
        return F.linear(self.ln_f(value[0]), table)


def gpt2_layers(model: Any) -> nn.Sequential:
    """Return the layers of a transformers GPT2LMHeadModel: tokens (batch, time) to logits (batch, time, vocabulary).

    An attention mask (batch, time), which is 0 at padding, may be a second input.

    Raises:
        ValueError: the last layer has weights of its own, which these layers would not use.
    """
    if model.lm_head.weight is not model.transformer.wte.weight:
        raise ValueError(
            "lm_head has weights of its own; set tie_word_embeddings=True, or write a layer that uses them"
        )
    blocks = [(f"h_{index}", Block(block)) for index, block in enumerate(model.transformer.h)]
    return nn.Sequential(
        OrderedDict([("embed", Embed(model.transformer)), *blocks, ("score", Score(model.transformer))])
    )


# ---- Weights.


def names_in(layers: nn.Module, model: nn.Module) -> dict[str, str]:
    """Map each name in the `state_dict` of ``model`` to the name of the same tensor in that of ``layers``.

    Call this before the layers are wrapped: a pipeline copies buffers to their devices, which makes new tensors.
    """
    known = {id(tensor): name for name, tensor in layers.state_dict(keep_vars=True).items()}
    return {name: known[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}


def as_in_layers(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    return {names[name]: tensor for name, tensor in state.items()}


def as_in_model(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    return {name: state[ours] for name, ours in names.items()}


# ---- Data.


def sources() -> list[Path]:
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def texts(options: argparse.Namespace) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that draws windows of source code (batch, time), and the same windows one byte later."""
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources()[:40])), dtype=torch.uint8)

    def draw() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - 65, (options.batch, 1))
        taken = text[starts + torch.arange(65)].long()
        return taken[:, :-1], taken[:, 1:]

    return draw


def pictures(options: argparse.Namespace) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that draws gray images (batch, 3, 32, 32) of source code, class 0, and of bytecode, class 1."""
    side, files = 32, [path.read_bytes() for path in sources()[:40]]
    kinds = [files, [marshal.dumps(compile(source, "", "exec", dont_inherit=True)) for source in files]]
    kinds = [[file for file in kind if len(file) > side**2] for kind in kinds]

    def draw() -> tuple[Tensor, Tensor]:
        classes = torch.randint(2, (options.batch,))
        images = []
        for kind in classes.tolist():
            file = kinds[kind][int(torch.randint(len(kinds[kind]), ()))]
            start = int(torch.randint(len(file) - side**2, ()))
            images.append(torch.frombuffer(bytearray(file[start : start + side**2]), dtype=torch.uint8))
        gray = torch.stack(images).view(-1, 1, side, side) / 127.5 - 1
        return gray.expand(-1, 3, -1, -1), classes

    return draw


# ---- Models and training.


def gpt2() -> tuple[nn.Module, nn.Sequential]:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4, bos_token_id=None, eos_token_id=None
    )
    config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = 0.0  # Each model would draw another mask.
    model = transformers.GPT2LMHeadModel(config)
    return model, gpt2_layers(model)


def resnet50() -> tuple[nn.Module, nn.Sequential]:
    import torchvision

    model = torchvision.models.resnet50(num_classes=2)
    return model, resnet_layers(model)


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), target.flatten().to(scores.device))


def original_step(model: nn.Module, input: Tensor, target: Tensor, chunks: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and gradients of the original, run micro-batch by micro-batch, as batch norms run in a pipeline."""
    outputs = [model(part) for part in input.chunk(chunks)]
    scores = torch.cat([getattr(output, "logits", output) for output in outputs])
    loss_of(scores, target).backward()
    return scores.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    torch.manual_seed(options.seed)
    draw = {"gpt2": texts, "resnet50": pictures}[options.model](options)
    make = {"gpt2": gpt2, "resnet50": resnet50}[options.model]

    # The original, and a pipeline with other weights, which loads those of the original.
    original, (other, layers) = make()[0], make()
    names = names_in(layers, other)
    partitions = min(torch.accelerator.device_count() or 2, len(layers))
    balance = [len(part) for part in torch.arange(len(layers)).tensor_split(partitions)]
    model = GPipe(layers, balance, chunks=options.chunks)
    model.load_state_dict(as_in_layers(original.state_dict(), names))

    input, target = draw()
    scores, gradients = original_step(original, input, target, options.chunks)
    actual = model(input)
    loss_of(actual, target).backward()
    ours: dict[str, Any] = {name: model.get_parameter(names[name]).grad for name in gradients}
    apart = max(float((ours[name].cpu() - gradient).abs().max()) for name, gradient in gradients.items())
    print(f"{len(layers)} layers, {balance} of them on {[str(device) for device in model.devices]}")
    print(f"logits differ by at most {float((actual.detach().cpu() - scores).abs().max()):.1e} from the original's")
    print(f"gradients differ by at most {apart:.1e}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    with tqdm(range(options.steps), desc=options.model, unit=" steps") as progress:
        for _ in progress:
            input, target = draw()
            loss = loss_of(model(input), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)

    original.load_state_dict(as_in_model(model.state_dict(), names))
    input, target = draw()
    with torch.inference_mode():
        scores, actual = original.eval()(input), model.eval()(input)
    scores = getattr(scores, "logits", scores)
    losses = [float(loss_of(each, target)) for each in [scores, actual]]
    print("the original, with what was learnt: {:.3f}; the pipeline: {:.3f}".format(*losses))


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Take a model of a library apart into layers, and train it through a pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", choices=["gpt2", "resnet50"])
    add("--chunks", type=int, default=2, help="micro-batches in a mini-batch")
    add("--batch", type=int, default=16, help="windows or images in a mini-batch")
    add("--steps", type=int, default=40, help="number of training steps")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--seed", type=int, default=0, help="seed of weights and batches")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # The tensors are small: more threads would wait for each other.
    main()
