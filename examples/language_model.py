"""Train a language model through a pipeline, then the same model without one, and compare the losses.

The model is an ordinary ``nn.Sequential`` and the training loop is an ordinary training loop: the pipeline is one line
in ``build``. Both runs start from the same seed and see the same batches. Their results differ by rounding, because a
pipeline sums the gradients of its micro-batches. Training amplifies the difference: in float32 the final losses differ
by some thousandths; in float64 (``--dtype float64``) they agree to the digits shown. Then a few steps are timed: of the
plain model, of the plain model in the pipeline's micro-batches, and of the pipeline without and with recomputation.
This shows the cost of each. On CPU cores there is no gain. So at the end, blocks that sleep stand for the kernels of
GPUs: a step of them runs plain, and then under 1F1B on four devices.

    python examples/language_model.py                    # both, in a minute or so on two CPU cores
    python examples/language_model.py --pipeline         # only through the pipeline
    python examples/language_model.py --plain            # only without it
    python examples/language_model.py --text novel.txt   # learn another text
    python examples/language_model.py --schedule 1F1B    # each step of the pipeline is a `GPipe.step`

The text is read byte by byte, so there is no tokenizer. By default the text is the source code of Python's standard
library, which every machine has. The example uses all accelerators of the machine. If there are more partitions
(``--partitions``), neighbours share one; without accelerators, all share the CPU. Under a schedule, each partition on
the CPU has a worker of its own.
"""

import argparse
import statistics
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from torchgpipe import GPipe, record
from torchgpipe.timeline.timeline import Timeline

# ---- The model. A pipeline may cut it between any two layers of the Sequential.


class Embedding(nn.Module):
    """Embed bytes (batch, time) as vectors (batch, time, width): the byte, its position, and the bytes just before."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.recent = nn.Conv1d(width, width, kernel_size=4)

    def forward(self, text: Tensor) -> Tensor:
        x = self.byte(text) + self.position(torch.arange(text.shape[1], device=text.device))
        before = F.pad(x.mT, (3, 0))  # on the left only: no byte sees a later byte
        return x + self.recent(before).mT


class Block(nn.Module):
    """A pre-norm transformer block: attention to earlier positions, then a network at each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        # (batch, time, 3 * width) to three tensors (batch, heads, time, width / heads)
        split = self.query_key_value(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(attended.transpose(1, 2).flatten(2))
        return x + self.think(x)


def language_model(layers: int, width: int, heads: int, context: int) -> nn.Sequential:
    """Return a model from bytes (batch, time) to scores of the next byte at each position (batch, time, 256)."""
    return nn.Sequential(
        Embedding(width, context),
        *(Block(width, heads) for _ in range(layers)),
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256)),
    )


def build(options: argparse.Namespace, pipeline: bool) -> nn.Sequential | GPipe:
    """Build the same model with or without a pipeline, on its devices."""
    torch.manual_seed(options.seed)
    model = language_model(options.layers, options.width, options.heads, options.context)
    if options.dtype == "float64":
        model.double()

    if pipeline:
        partitions = options.partitions or min(torch.accelerator.device_count() or 4, len(model))
        balance = [len(part) for part in torch.arange(len(model)).tensor_split(partitions)]
        devices = devices_for(partitions)
        if options.schedule is None:
            return GPipe(model, balance, devices=devices, chunks=options.chunks, checkpoint=options.checkpoint)
        return GPipe(
            model,
            balance,
            devices=devices or [f"cpu:{j}" for j in range(partitions)],
            chunks=options.chunks,
            checkpoint=options.checkpoint,
            schedule=options.schedule,
            loss_fn=mean_loss,
        )

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return model.to(accelerator or torch.device("cpu"))


def describe(model: nn.Sequential | GPipe) -> str:
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters in {len(model)} layers"
    if isinstance(model, GPipe):
        devices = [str(device) for device in model.devices]
        return f"{size}, {list(model.balance)} of them on {devices}, checkpoint={model.checkpoint!r}"
    return f"{size}, all on {str(next(model.parameters()).device)!r}"


def devices_for(partitions: int) -> list[torch.device] | None:
    """Return an accelerator for each partition, shared by neighbours if there are fewer; None if there is none."""
    kind, count = torch.accelerator.current_accelerator(), min(torch.accelerator.device_count(), partitions)
    return [torch.device(kind.type, j * count // partitions) for j in range(partitions)] if kind and count else None


# ---- The text.


def read_text(path: Path | None, most: int = 4_000_000) -> tuple[Tensor, Tensor]:
    """Return the bytes to train on, and the last twentieth of the text, which is held out."""
    files = [path] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:most]
    learn, held_out = torch.frombuffer(bytearray(text), dtype=torch.uint8).tensor_split([len(text) * 19 // 20])
    return learn, held_out


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return the windows of the text that begin at ``starts``, and the targets, which are one byte later."""
    taken = text[starts[:, None] + torch.arange(context + 1)].long()
    return taken[:, :-1], taken[:, 1:]


# ---- Training.


@dataclass
class Run:
    """The results of a training run. Losses are in nats per byte."""

    name: str
    losses: list[float] = field(default_factory=list)  # one for each step
    held_out: dict[int, float] = field(default_factory=dict)  # on held-out text, after that many steps
    sample: str = ""
    timeline: Timeline | None = None  # of the last step, through a pipeline

    @property
    def training_loss(self) -> float:
        last = self.losses[-20:]
        return sum(last) / len(last)

    @property
    def held_out_loss(self) -> float:
        return self.held_out[len(self.losses)]


def train(options: argparse.Namespace, pipeline: bool, learn: Tensor, held_out: Tensor) -> Run:
    model = build(options, pipeline)
    print(describe(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps, pct_start=0.1)

    run = Run("pipeline" if pipeline else "plain")
    order = torch.Generator().manual_seed(options.seed)
    tokens = options.batch * options.context
    with tqdm(desc=run.name, total=options.steps * tokens, unit=" tokens", unit_scale=True) as progress:
        for step in range(1, options.steps + 1):
            starts = torch.randint(len(learn) - options.context, (options.batch,), generator=order)
            with record(model) if pipeline and step == options.steps else nullcontext() as run.timeline:
                loss = loss_and_gradients(model, learn, starts, options)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

            run.losses.append(loss.item())
            progress.set_postfix(loss=f"{run.losses[-1]:.3f}", refresh=False)
            progress.update(tokens)
            if step % 50 == 0 or step == options.steps:
                run.held_out[step] = evaluate(model, held_out, options)

    run.sample = generate(model, options)
    return run


def loss_at(model: nn.Module, text: Tensor, starts: Tensor, options: argparse.Namespace) -> Tensor:
    """Return the mean loss on the windows of the text that begin at ``starts``."""
    inputs, targets = windows(text, starts, options.context)
    first = next(model.parameters())  # on the device of the first layer; the last layer may be on another
    with torch.autocast(first.device.type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
        scores = model(inputs.to(first.device)).to(first.dtype)
    return mean_loss(scores, targets)


def mean_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten().to(scores.device))


def loss_and_gradients(
    model: nn.Module, text: Tensor, starts: Tensor, options: argparse.Namespace, share: float = 1.0
) -> Tensor:
    """Run forward and backward on the windows that begin at ``starts``, and return their mean loss.

    The gradients are those of ``share`` times this loss; under a schedule ``share`` is 1.
    """
    if isinstance(model, GPipe) and options.schedule is not None:
        with torch.autocast(model.devices[0].type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
            return model.step(*windows(text, starts, options.context))
    loss = loss_at(model, text, starts, options)
    (loss * share).backward()
    return loss


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor, options: argparse.Namespace) -> float:
    """Return the mean loss on 128 windows, evenly spaced over the held-out text."""
    model.eval()
    starts = torch.linspace(0, len(held_out) - options.context - 1, 128).long()
    losses = [loss_at(model, held_out, some, options).item() for some in starts.split(32)]
    model.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def generate(model: nn.Module, options: argparse.Namespace) -> str:
    """Return the prompt, continued byte by byte."""
    model.eval()
    device = next(model.parameters()).device
    draw = torch.Generator().manual_seed(options.seed)
    text = torch.tensor([list(options.prompt.encode())])
    for _ in range(options.sample):
        scores = model(text[:, -options.context :].to(device))[:, -1]
        chances = F.softmax(scores.float().cpu() / 0.7, dim=-1)  # a temperature below 1 prefers likely bytes
        text = torch.cat([text, chances.multinomial(1, generator=draw)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


# ---- The cost of a step.


def time_steps(options: argparse.Namespace, text: Tensor, steps: int = 6) -> dict[str, float]:
    """Return the median seconds of forward and backward of a mini-batch in each way of running the model.

    The ways take turns, so that other load on the machine slows all of them.
    """
    plain = build(options, pipeline=False)
    ways = {"plain, whole": (plain, 1), f"plain, in {options.chunks} micro-batches": (plain, options.chunks)}
    for mode in dict.fromkeys(["never", "except_last", options.checkpoint]):
        of_mode = argparse.Namespace(**{**vars(options), "checkpoint": mode})
        way = f"{options.schedule or 'pipeline'}, checkpoint={mode!r}"
        ways[way] = (build(of_mode, pipeline=True), 1)

    starts = torch.linspace(0, len(text) - options.context - 1, options.batch).long()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(1 + steps):
        for way, (model, parts) in ways.items():
            begin = time.perf_counter()
            for part in starts.chunk(parts):
                loss_and_gradients(model, text, part, options, len(part) / len(starts))
            for device in {parameter.device for parameter in model.parameters()}:
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
            seconds[way].append(time.perf_counter() - begin)
            model.zero_grad()
    return {way: statistics.median(times[1:]) for way, times in seconds.items()}  # the first step also sets up


# ---- What several devices gain.


class Sleep(torch.autograd.Function):
    """Sleep in forward, and twice as long in backward, as a device would compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Sleeping(nn.Module):
    """A block that keeps its device busy without a core."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.scale, self.seconds)


def show_gain(seconds: float, path: Path, devices: int = 4, chunks: int = 8) -> None:
    """Run a step of blocks that sleep, plain and under 1F1B, print both times, and draw the latter."""
    blocks, input = nn.Sequential(*[Sleeping(seconds) for _ in range(devices)]), torch.zeros(chunks, 1)
    begin = time.perf_counter()
    for part in input.chunk(chunks):
        (blocks(part).mean() / chunks).backward()
    plain = time.perf_counter() - begin

    places = [f"cpu:{j}" for j in range(devices)]
    model = GPipe(
        blocks,
        [1] * devices,
        devices=places,
        chunks=chunks,
        checkpoint="never",
        schedule="1F1B",
        loss_fn=lambda output, _: output.mean(),
    )
    model.step(input)  # The first step also starts the workers.
    begin = time.perf_counter()
    model.step(input)
    piped = time.perf_counter() - begin
    with record(model) as timeline:
        model.step(input)
    idle = timeline.report().bubble

    print(f"{devices} devices side by side; the blocks sleep for as long as a GPU would compute:\n")
    print(f"{f'a step in {chunks} micro-batches':>36}{'ms':>8}{'faster':>9}")
    print(f"{'plain, one device':>36}{1000 * plain:>8.0f}")
    print(f"{f'1F1B, {devices} devices, idle {idle:.0%} of the time':>36}{1000 * piped:>8.0f}{plain / piped:>8.2f}x")
    print(
        "\nThe language model above gains nothing on a CPU: the plain model already uses all cores for each operation,"
    )
    print(
        "and the partitions share the same cores. Blocks that sleep need no core, so they overlap, as on several GPUs."
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    timeline.plot(path)
    print(f"\nThis step under 1F1B is drawn in {path}.")


# ---- Output.


def draw_losses(runs: list[Run], path: Path) -> None:
    """Draw the losses of the runs over each other, and below them the difference of two runs at each step."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    rows = figure.subplots(len(runs), sharex=True, squeeze=False, height_ratios=[3, 1][: len(runs)])[:, 0]
    for run, color, width in zip(runs, ("tab:orange", "black"), (4, 1)):
        rows[0].plot(range(1, len(run.losses) + 1), run.losses, color=color, linewidth=width, label=run.name)
    for run, color, width in zip(runs, ("tab:blue", "white"), (4, 1)):
        steps, losses = list(run.held_out), list(run.held_out.values())
        rows[0].plot(
            steps, losses, "o-", color=color, linewidth=width, markersize=2 * width, label=f"{run.name}, held-out text"
        )
    rows[0].set(title="The loss of a language model", ylabel="nats per byte")
    rows[0].legend(facecolor="gainsboro")
    rows[0].grid(alpha=0.3)

    if len(runs) == 2:
        difference = [abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses)]
        rows[1].plot(range(1, len(difference) + 1), difference, color="tab:gray", linewidth=1)
        rows[1].set(ylabel="difference", yscale="log" if any(difference) else "linear")  # zeros have no logarithm
        rows[1].grid(alpha=0.3)
    rows[-1].set(xlabel="step")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def print_losses(runs: list[Run]) -> None:
    columns = [(run.name, run.training_loss, run.held_out_loss) for run in runs]
    table = [("", "training loss", "held-out loss"), *columns]
    print("\n".join("".join(f"{x:>16}" if isinstance(x, str) else f"{x:>16.6f}" for x in row) for row in table))
    if len(runs) == 2:
        apart = [abs(a - b) for a, b in zip(columns[0][1:], columns[1][1:])]
        print(f"{'difference':>16}" + "".join(f"{x:>16.6f}" for x in apart))


def print_times(seconds: dict[str, float]) -> None:
    """Print the milliseconds of a step in each way, and the ratio to the first way."""
    first = next(iter(seconds.values()))
    print(f"{'forward and backward of a step':>36}{'ms':>8}{'ratio':>8}")
    for way, of_way in seconds.items():
        print(f"{way:>36}{1000 * of_way:>8.0f}{of_way / first:>8.2f}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a language model through a pipeline, then without one, and compare the losses.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pipeline", action="store_true", help="train only through the pipeline")
    which.add_argument("--plain", action="store_true", help="train only the plain model")

    add = parser.add_argument_group("the pipeline").add_argument
    add("--partitions", type=int, default=0, help="0 for one per accelerator, or four on the CPU")
    add("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    add("--checkpoint", default="never", choices=["always", "except_last", "never"], help="what to recompute")
    add("--schedule", choices=["GPipe", "1F1B", "ZeroBubble"], help="train by `model.step` under this schedule")

    add_model_and_training(parser)

    add = parser.add_argument_group("the results").add_argument
    add("--prompt", default="def ", help="start of the generated sample")
    add("--sample", type=int, default=400, help="bytes to generate")
    add("--curve", type=Path, default=Path("demo/language_model.png"), help="where to draw the losses")
    add("--timeline", type=Path, default=Path("demo/timeline.svg"), help="where to draw the pipeline's last step")
    add("--gain", type=Path, default=Path("demo/side_by_side.svg"), help="where to draw devices side by side")
    add("--sleep", type=float, default=0.02, help="seconds of a block in it")
    return parser.parse_args()


def add_model_and_training(parser: argparse.ArgumentParser) -> None:
    """Add the options that examples with the same model and text share."""
    add = parser.add_argument_group("the model").add_argument
    add("--layers", type=int, default=6, help="transformer blocks")
    add("--width", type=int, default=128, help="length of the vector at each position")
    add("--heads", type=int, default=4, help="attention heads, which divide the width")
    add("--context", type=int, default=64, help="bytes that the model sees at once")

    add = parser.add_argument_group("training").add_argument
    add("--text", type=Path, help="file to train on, instead of Python's standard library")
    add("--steps", type=int, default=120, help="number of training steps")
    add("--batch", type=int, default=32, help="windows of text in a mini-batch")
    add("--lr", type=float, default=5e-3, help="highest learning rate")
    add(
        "--dtype",
        default="float32",
        choices=["float64", "float32", "bfloat16"],
        help="bfloat16 trains under autocast, and is slow on most CPUs",
    )
    add("--seed", type=int, default=0, help="seed of the initial weights, the batches, and the sample")


def main() -> None:
    options = parse_options()
    learn, held_out = read_text(options.text)
    if len(held_out) <= options.context:
        raise SystemExit(f"the text is too short: a twentieth of it must be longer than --context {options.context}")
    which = [True] if options.pipeline else [False] if options.plain else [True, False]
    runs = [train(options, pipeline, learn, held_out) for pipeline in which]

    draw_losses(runs, options.curve)
    print(f"\nA sample that the {runs[0].name} model has generated:\n\n{runs[0].sample}\n")
    print_losses(runs)
    if len(runs) == 2:
        print()
        print_times(time_steps(options, learn))
    print(f"\nThe loss curves are in {options.curve}.")
    if runs[0].timeline is not None:
        options.timeline.parent.mkdir(parents=True, exist_ok=True)
        runs[0].timeline.plot(options.timeline)
        print(f"The timeline of the pipeline's last step is in {options.timeline}.")
    if len(runs) == 2:
        print()
        show_gain(options.sleep, options.gain)


if __name__ == "__main__":
    main()
