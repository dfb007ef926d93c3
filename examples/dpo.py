"""Train a policy on preferences, by the DPOTrainer of TRL, as a pipeline and as the plain model.

    python examples/dpo.py                 # in less than a minute on two CPU cores
    python examples/dpo.py --chunks 8

A tiny Llama with random weights and LoRA adapters learns to prefer the right sum of two numbers to a wrong one. The
reference model is the policy with its adapters off. Two policies train on the same pairs: one is a pipeline, and the
other is plain. Their losses stand side by side, and the margins by which they prefer what is right.

The example uses all accelerators of the machine, the first one last, where TRL has its batches. On a CPU the partitions
share the cores. It needs `pip install peft transformers trl`.
"""

import argparse
import string
import tempfile
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import DPOConfig, DPOTrainer

import torchgpipe


def tokenizer() -> Any:
    """Return a tokenizer of single characters."""
    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    vocabulary = {token: k for k, token in enumerate([*marks.values(), *string.printable])}
    characters = Tokenizer(models.BPE(vocabulary, [], unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=characters, **marks)


def policy(options: argparse.Namespace) -> Any:
    torch.manual_seed(options.seed)
    sizes = {"hidden_size": options.width, "intermediate_size": 2 * options.width, "num_hidden_layers": options.layers}
    marks = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    base = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes, **marks))
    return get_peft_model(base, LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def pairs() -> Any:
    sums = [(a, b) for a in range(10) for b in range(10)]
    return Dataset.from_list(
        [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a + b + 1} or so"} for a, b in sums]
    )


def train(model: Any, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the loss and the margin of each step."""
    on_cpu = not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        settings = DPOConfig(
            folder,
            per_device_train_batch_size=options.batch,
            max_steps=options.steps,
            learning_rate=1e-2,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=on_cpu,
            dataloader_pin_memory=not on_cpu,
        )
        if settings.n_gpu > 1:
            settings._n_gpu = 1  # Or TRL refuses the plain policy, around which the Trainer would put nn.DataParallel.
        trainer = DPOTrainer(model, args=settings, train_dataset=pairs(), processing_class=tokenizer())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [(entry["loss"], entry["rewards/margins"]) for entry in trainer.state.log_history if "loss" in entry]


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    disable_progress_bars()
    ids = torch.randint(3, 100, (2, 16))
    count = torch.cuda.device_count()
    devices = [f"cuda:{j}" for j in reversed(range(count))] or None
    sample = {"input_ids": ids, "labels": ids}
    model = torchgpipe.pipelined(policy(options), sample, chunks=options.chunks, devices=devices)
    print(f"As a pipeline:\n{model.layout}\n", flush=True)
    ours, plain = train(model, options), train(policy(options), options)
    print("        pipelined            plain")
    print("step    loss  margin     loss  margin")
    for step, (mine, theirs) in enumerate(zip(ours, plain, strict=True), 1):
        print(f"{step:4}  {mine[0]:.4f}  {mine[1]:6.3f}   {theirs[0]:.4f}  {theirs[1]:6.3f}")


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a policy on preferences, as a pipeline and as the plain model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, help="layers of the model")
    add("--width", type=int, default=64, help="length of the vector at each character")
    add("--rank", type=int, default=4, help="rank of the adapters")
    add("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    add("--batch", type=int, default=8, help="pairs in a mini-batch, of two rows each")
    add("--steps", type=int, default=10, help="steps of training")
    add("--seed", type=int, default=0, help="seed of the weights")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # The tensors are small: more threads would wait for each other.
    main()
