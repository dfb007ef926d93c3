"""Train LoRA adapters on a language model in 4 bits (QLoRA), by the Trainer, on two devices.

    python examples/qlora.py                      # in less than a minute on two CPU cores
    python examples/qlora.py --layers 8 --chunks 8

A tiny Llama with random weights is saved into a temporary folder, as if it had come from the Hub, and bitsandbytes
loads it in 4 bits. Two models train the same adapters on the same batches: one is a pipeline, by the PipelineTrainer,
and the other is plain, by the Trainer of transformers. The losses stand side by side. In the end the adapters are
saved, and merged into the weights that have not been packed.

The example uses all accelerators of the machine. On a CPU the partitions share the cores.
It needs `pip install accelerate bitsandbytes peft transformers`.
"""

import argparse
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import torchgpipe
from torchgpipe.integrations.transformers import PipelineTrainer

CONTEXT = 48  # characters


def pieces(options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Return pieces of the manual that comes with Python, a number for each character."""
    text = "\n".join(text for _, text in sorted(topics.items())).encode("ascii", "replace")
    generator = torch.Generator().manual_seed(options.seed)
    starts = torch.randint(len(text) - CONTEXT, (options.batch * options.steps,), generator=generator)
    rows = [torch.tensor(list(text[start : start + CONTEXT])) for start in starts.tolist()]
    return [{"input_ids": piece, "labels": piece} for piece in rows]


def save_a_model(folder: str, options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    sizes = {"hidden_size": options.width, "intermediate_size": 2 * options.width, "num_hidden_layers": options.layers}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, num_attention_heads=4, **sizes)).save_pretrained(folder)


def adapted(folder: str, options: argparse.Namespace) -> Any:
    """Return the model in 4 bits, without device_map, and with adapters."""
    packed = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=packed)
    torch.manual_seed(options.seed)
    return get_peft_model(base, LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def train(kind: Any, model: Any, folder: str, options: argparse.Namespace) -> list[float]:
    settings = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=options.batch,
        max_steps=options.steps,
        learning_rate=1e-2,
        bf16=True,
        optim="adamw_8bit",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    if settings.n_gpu > 1:
        settings._n_gpu = 1  # Or the Trainer puts nn.DataParallel around the plain model.
    trainer = kind(model, settings, train_dataset=pieces(options))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    with tempfile.TemporaryDirectory() as folder:
        weights, run, adapters = (f"{folder}/{name}" for name in ("weights", "run", "adapters"))
        save_a_model(weights, options)
        rows = pieces(options)[:2]
        sample = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        model = torchgpipe.pipelined(adapted(weights, options), sample, chunks=options.chunks)
        print(f"As a pipeline:\n{model.layout}\n", flush=True)
        losses = train(PipelineTrainer, model, run, options)
        plain = train(Trainer, adapted(weights, options), run, options)
        print("step  pipelined      plain")
        for step, pair in enumerate(zip(losses, plain, strict=True), 1):
            print(f"{step:4}  {pair[0]:9.4f}  {pair[1]:9.4f}")

        model.save_pretrained(adapters)
        size = (Path(adapters) / "adapter_model.safetensors").stat().st_size
        base = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
        merged = PeftModel.from_pretrained(base, adapters).merge_and_unload()
        merged.save_pretrained(f"{folder}/merged")
        whole = (Path(folder) / "merged" / "model.safetensors").stat().st_size
        print(f"Saved {size / 1e3:.0f} kB of adapters, and {whole / 1e3:.0f} kB of weights with them merged")


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train LoRA adapters on a language model in 4 bits, by the Trainer, on two devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, help="layers of the model")
    add("--width", type=int, default=64, help="length of the vector at each character")
    add("--rank", type=int, default=4, help="rank of the adapters")
    add("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    add("--batch", type=int, default=16, help="pieces of text in a mini-batch")
    add("--steps", type=int, default=10, help="steps of training")
    add("--seed", type=int, default=0, help="seed of weights and batches")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # The tensors are small: more threads would wait for each other.
    main()
