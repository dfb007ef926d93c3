"""What works on Windows, tried without what POSIX has: modules, functions, signals, UTF-8 as the usual encoding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# PyTorch and the processes of `multiprocessing` need POSIX here: they are imported before, and the signals and the name
# of the platform go after the DataLoader, whose worker is spawned and runs the script, too.
SCRIPT = """
import importlib, multiprocessing, multiprocessing.popen_spawn_posix, os, pkgutil, signal, sys, warnings
import torch, torch._dynamo, torch.utils.data
from torch import nn

for name in ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "killpg", "register_at_fork", "sched_getaffinity", "sysconf", "uname"):
    delattr(os, name)
warnings.filterwarnings("error", category=EncodingWarning, module="torchgpipe")

import torchgpipe, torchgpipe_balancing

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    loader = torch.utils.data.DataLoader(list(torch.randn(16, 4)), batch_size=8, num_workers=1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blöcke = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

        def forward(self, x):
            for block in self.blöcke:
                x = x + block(x).tanh()
            return x

    def loss_fn(output, target):
        return output.square().mean()

    sample, given = torch.randn(8, 4), {"devices": ["cpu:0", "cpu:1"], "loss_fn": loss_fn}
    model = torchgpipe.pipelined(Model(), sample, chunks=2, **given)
    for batch in loader:
        model(batch).sum().backward()

    known = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
    for name in dir(signal):
        if name.startswith(("SIG", "ITIMER")) and not name.startswith("SIG_") and name not in known:
            delattr(signal, name)
    for name in ("alarm", "pause", "pthread_kill", "setitimer", "sigwait"):
        delattr(signal, name)
    sys.platform = "win32"
    for package in (torchgpipe, torchgpipe_balancing):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".integrations." not in module.name:
                importlib.import_module(module.name)
    with torchgpipe.record(model) as timeline:
        model.step(sample)
    timeline.plot("step.svg")
    timeline.save("step.json")
    offloaded = torchgpipe.pipelined(Model(), sample, chunks=2, partitions=4, offload=True, **given)
    offloaded.step(sample)
    plan = torchgpipe.plan(Model(), sample, batch=8, seconds=0, trials=0, chunks=2, schedule="1F1B", **given)
    plan.plot("plan.svg")
    plan.apply(Model()).step(sample)
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    torchgpipe_balancing.profile(layers, sample, timeout=0.0)
    torchgpipe.GPipe(layers, [2, 2], chunks=2, **given).step(sample)
    print("done")
"""


@pytest.mark.slow
def test_steps_plans_and_profiles_run_without_posix(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", script.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.stdout, result.returncode) == ("done\n", 0), result.stderr
