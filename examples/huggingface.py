"""Fine-tune a language model of transformers with its Trainer, through a pipeline and without one.

    python examples/huggingface.py                      # in less than a minute on two CPU cores
    python examples/huggingface.py --layers 8 --chunks 8

First a small Llama learns English, one character after another, from the manual that comes with Python. The result is
saved, loaded and fine-tuned on the names of Python's modules: once as a pipeline, and once as it is. Only the call of
`pipelined` differs. The script prints the losses of both side by side. They agree in the first digits: float32 rounds
the sums of a mini-batch and of its micro-batches differently.

The example uses all accelerators of the machine. On a CPU the partitions share the cores.
It needs `pip install accelerate transformers`.
"""

import argparse
import sys
import tempfile
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

import torchgpipe

CONTEXT = 48  # characters


class Windows(Dataset[dict[str, Tensor]]):
    """All windows of a text, each as the arguments of a language model."""

    def __init__(self, text: str) -> None:
        self.characters = torch.tensor(list(text.encode("ascii", "replace")))

    def __len__(self) -> int:
        return len(self.characters) - CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.characters[index : index + CONTEXT]
        return {"input_ids": window, "labels": window}


def manual() -> Windows:
    return Windows("\n".join(text for _, text in sorted(topics.items())))


def names() -> Windows:
    return Windows("\n".join(sorted(sys.stdlib_module_names)))


def new_model(options: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, text: Windows, steps: int, lr: float, options: argparse.Namespace) -> list[float]:
    """Train with the Trainer of transformers, and return about ten losses, each the mean of some steps."""
    settings = TrainingArguments(
        output_dir=options.folder,
        max_steps=steps,
        per_device_train_batch_size=options.batch,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        logging_steps=max(1, steps // 10),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=options.seed,
    )
    trainer = Trainer(model, settings, train_dataset=text)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    set_seed(options.seed)
    with tempfile.TemporaryDirectory() as options.folder:
        model = new_model(options)
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{count} parameters learn English ...", flush=True)
        losses = train(model, manual(), options.steps, 3e-3, options)
        print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}")
        model.save_pretrained(options.folder)

        plain = LlamaForCausalLM.from_pretrained(options.folder)
        model = LlamaForCausalLM.from_pretrained(options.folder)
        ids = torch.randint(128, (2, CONTEXT))
        torchgpipe.pipelined(model, {"input_ids": ids, "labels": ids}, chunks=options.chunks)
        print(f"\nAs a pipeline:\n{model.layout}\n")

        columns = {
            "pipeline": train(model, names(), options.steps // 4, 1e-3, options),
            "plain": train(plain, names(), options.steps // 4, 1e-3, options),
        }
    print("The losses of fine-tuning:")
    print("".join(f"{name:>14}" for name in [*columns, "difference"]))
    for ours, theirs in zip(*columns.values()):
        print(f"{ours:>14.7f}{theirs:>14.7f}{ours - theirs:>14.7f}")

    model.unpipelined().to(model.device).eval()  # Its layers were on all devices.
    prompt = torch.tensor([list(b"\nas")], device=model.device)
    said = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=True)
    print(f"\nNames that it makes up: {''.join(map(chr, said[0].tolist())).split()}")


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a language model with the Trainer of transformers, through a pipeline and without one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, help="layers of the model")
    add("--width", type=int, default=64, help="length of the vector at each character")
    add("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    add("--batch", type=int, default=32, help="windows of text in a mini-batch")
    add("--steps", type=int, default=300, help="steps that learn English; fine-tuning takes a quarter as many")
    add("--seed", type=int, default=0, help="seed of weights, batches and samples")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # The tensors are small: more threads would wait for each other.
    main()
