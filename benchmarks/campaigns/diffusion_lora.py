"""LoRA of a tiny Flux in the scripts of other projects, as they are and with the lines of `docs/recipes`, side by side.

    python -m benchmarks.campaigns.diffusion_lora    # some minutes

The trainers are in `.peers` of this checkout: `sd-scripts-COMMIT`, `ai-toolkit-COMMIT` and `diffusers-COMMIT`, by eight
digits, and in `sd-scripts-packages` and so on what each imports beside what is installed (`pip install --no-deps
--target`). Each trainer is copied twice, and to one copy `docs/recipes/NAME.diff` is applied. Both run three steps of
four images, in a process each, from the same random numbers; their losses and the gradients of all adapters are
compared. Devices of `tests.late` are apart from the host and from each other, as GPUs are, and a tensor on a wrong one
is an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.campaigns.architectures.operators import register_missing
from benchmarks.campaigns.diffusion_lora_child import make_models
from benchmarks.peers import INSTALLED
from benchmarks.program import Part, Program, Progress
from benchmarks.records import KIB, Row, table_of

ROOT = Path(__file__).resolve().parents[2]
LATE, CPU = "late:0,late:1", "cpu:0,cpu:1"

KOHYA = """--pretrained_model_name_or_path {models}/flux.safetensors --ae {models}/ae.safetensors
 --clip_l - --t5xxl -
 --dataset_config {work}/data.toml --output_dir {work}/out --output_name lora --network_module networks.lora_flux
 --network_dim 4 --network_train_unet_only --cache_latents --cache_text_encoder_outputs --max_train_steps 3 --seed 0
 --optimizer_type AdamW --learning_rate 1e-3 --sdpa --timestep_sampling shift --guidance_scale 1
 --gradient_checkpointing
 --max_data_loader_n_workers 0 --save_model_as safetensors --model_prediction_type raw --t5xxl_max_token_length 16"""
PREVIEWS = " --sample_prompts {work}/prompts.txt --sample_every_n_steps 2"
DIFFUSERS = """--pretrained_model_name_or_path {models} --instance_data_dir {models}/images --instance_prompt photo
 --seed 0 --resolution 64 --train_batch_size 4 --max_train_steps 3 --learning_rate 1e-3 --lr_scheduler constant --rank 4
 --lr_warmup_steps 0 --repeats 2 --cache_latents --gradient_checkpointing --output_dir {work}/out"""
FILES = {
    "prompts.txt": "a cat --w 64 --h 64 --s 2 --d 1\n",
    "data.toml": """general = {{ caption_extension = ".txt" }}
[[datasets]]
resolution = 64
batch_size = 4
subsets = [{{ image_dir = "{models}/captioned", num_repeats = 2 }}]
""",
    "job.yaml": """{{job: extension, meta: {{name: tiny}}, config: {{name: tiny, process: [{{
type: sd_trainer, training_folder: "{work}/out", device: cpu, network: {{type: lora, linear: 4, linear_alpha: 4}},
datasets: [{{folder_path: "{models}/captioned", caption_ext: txt, cache_latents_to_disk: true, resolution: [64]}}],
train: {{batch_size: 4, steps: 3, train_unet: true, train_text_encoder: false, gradient_checkpointing: true, lr: 0.001,
  noise_scheduler: flowmatch, optimizer: adamw, skip_first_sample: true, disable_sampling: {quiet}, dtype: {dtype}}},
save: {{dtype: float32}}, model: {{name_or_path: "{models}", is_flux: true, low_vram: true}},
sample: {{sampler: flowmatch, sample_every: 2, width: 64, height: 64,
  prompts: [a cat], neg: "", sample_steps: 2}}}}]}}}}
""",
}


class Case(NamedTuple):
    """How a trainer is run: settings in words, its script, the arguments of that, the devices and what files need."""

    settings: str
    script: str
    arguments: str
    devices: str
    values: dict[str, str] = {}  # noqa: RUF012 -- never changed


DREAMBOOTH = "examples/dreambooth/train_dreambooth_lora_flux.py"
CASES = {
    "sd-scripts": [
        Case("float32, previews", "flux_train_network.py", KOHYA + PREVIEWS, LATE),
        Case("weights in fp8, bf16", "flux_train_network.py", f"{KOHYA} --mixed_precision bf16 --fp8_base", CPU),
    ],
    "ai-toolkit": [
        Case("float32", "run.py", "{work}/job.yaml", LATE, {"quiet": "true", "dtype": "float32"}),
        Case("bf16, previews", "run.py", "{work}/job.yaml", CPU, {"quiet": "false", "dtype": "bf16"}),
    ],
    "diffusers": [
        Case("float32", DREAMBOOTH, DIFFUSERS, LATE),
        Case("bf16", DREAMBOOTH, f"{DIFFUSERS} --mixed_precision bf16", CPU),
    ],
}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run each case of the trainers that are there."""
    register_missing()
    rows, progress = list[Row](), Progress(sum(map(len, CASES.values())))
    for name in CASES:
        (checkout,) = INSTALLED.glob(f"{name}-[0-9a-f]*")
        for case in CASES[name]:
            progress(f"{name}, {case.settings}")
            with tempfile.TemporaryDirectory() as folder:
                plain, ours = (run(name, case, Path(folder) / way, checkout) for way in ("plain", "ours"))
            rows.append(
                {"trainer": name, "commit": checkout.name[-8:], "settings": case.settings, **beside(plain, ours)}
            )
            rows[-1] |= {"devices": case.devices, "versions": ours["versions"], "bytes": ours["bytes"]}
            yield {"rows": rows}


def run(name: str, case: Case, work: Path, checkout: Path) -> dict[str, Any]:
    """Run a copy of the trainer, with our lines if the folder is called so, and return what was noted."""
    models, tree = work / "models", work / name
    make_models(models)
    shutil.copytree(checkout, tree, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    for file, text in FILES.items():
        values = {"quiet": "true", "dtype": "float32", **case.values, "models": models, "work": work}
        (work / file).write_text(text.format_map(values))
    ours = work.name == "ours"
    if ours:
        subprocess.run(["git", "apply", str(ROOT / "docs" / "recipes" / f"{name}.diff")], cwd=tree, check=True)
    child = [sys.executable, "-m", "benchmarks.campaigns.diffusion_lora_child", name, str(work / "notes.pt")]
    child += [case.devices if ours else "cpu", str(models), case.script]
    path = os.pathsep.join([str(INSTALLED / f"{name}-packages"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "SEED": "0", "OMP_NUM_THREADS": "1"}
    arguments = case.arguments.format(models=models, work=work).split()
    done = subprocess.run([*child, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    if not any(path.suffix == ".safetensors" for path in (work / "out").rglob("*")):
        raise RuntimeError(f"{name} has saved no adapters:\n{done.stdout[-2000:]}")
    noted: dict[str, Any] = torch.load(work / "notes.pt")
    return noted


def beside(plain: dict[str, Any], ours: dict[str, Any]) -> Row:
    """Compare losses, and the gradients of all adapters by the norm of their difference over their norm."""
    off = 0.0
    for one, other in zip(plain["grads"], ours["grads"], strict=True):
        expected, got = (torch.cat([tensor.flatten() for tensor in tensors]).double() for tensors in (one, other))
        off = max(off, float((expected - got).norm() / expected.norm()))
    return {"losses": {"plain": plain["losses"], "ours": ours["losses"]}, "gradients": off}


def diffusion_lora(result: dict[str, Any]) -> str:
    """Return a table of the trainers."""

    def loss(way: str) -> Any:
        return lambda row: f"{row['losses'][way][-1]:.5f}"

    def held(row: Row) -> str:
        apart = [row["bytes"].get(device, 0) / KIB for device in row["devices"].split(",")]
        return ", ".join([f"{size:.0f}" for size in apart]) if any(apart) else "one memory"

    columns: dict[str, Any] = {"script of": "trainer", "settings": "settings", "last loss as it is": loss("plain")}
    columns |= {"with our lines": loss("ours"), "gradients differ by": "gradients:.0e"}
    return table_of(result["rows"], {**columns, "KiB on each device": held})


PARTS = {"trainers": Part("diffusion_lora", measure, {"trainers": diffusion_lora}, cpu=True)}


def main() -> None:
    Program("diffusion_lora", __doc__, PARTS).run()


if __name__ == "__main__":
    main()
