"""Training whole models: how fast it is, on how many devices, beside other libraries; and whether it learns the same.

    speed       the speed-up of a model on n devices, beside the ideal and torchgpipe 0.0.7 (`training_speed.py`)
    step        `GPipe.step` on two cores, beside PyTorch's own schedules (`training_cores.py`)
    pipelined   GPT-2 through `torchgpipe.pipelined` on two cores, beside naive placement
    accuracy    a ResNet, plain and with deferred batch norm, over several seeds (`training_accuracy.py`)

Figures are medians over turns, and a turn's figure is the median of its steps. `step` and `pipelined` mean nothing
where other processes take a core.

    python -m benchmarks.training                            # speed, of small models: some minutes on two cores
    python -m benchmarks.training --models gpt --turns 2     # of one of them: a minute
    python -m benchmarks.training --only step pipelined      # twenty minutes on two idle cores
    python -m benchmarks.training --size gpu                 # the real models, on one large GPU; paper: on several
    python -m benchmarks.training --scale 16 --turns 9 --steps 1   # mini-batches of sixteen times the size
    python -m benchmarks.training --only step --device cuda:0      # on one GPU, and on it and the CPU
"""

from __future__ import annotations

from typing import Any

from benchmarks import training_accuracy, training_cores, training_speed
from benchmarks.cost import MODES
from benchmarks.program import Part, Program

PARTS = {
    "speed": Part(
        "speed",
        training_speed.measure,
        {
            "speed-up over the plain model on one device": training_speed.speed,
            "what was aimed at": training_speed.speed_targets,
        },
    ),
    "step": Part(
        "step:speed",
        training_cores.step,
        {"a step of two partitions": training_cores.step_speed},
    ),
    "pipelined": Part(
        "pipelined:speed",
        training_cores.pipelined,
        {"GPT-2 on two cores": training_cores.pipelined_speed},
        cpu=True,
    ),
    "accuracy": Part(
        "transparency",
        training_accuracy.measure,
        {
            "accuracy on test images, mean ± standard deviation": training_accuracy.transparency,
            "mean loss of each epoch": training_accuracy.training_curves,
        },
        lambda result: [f"{result['data']}, {result['seeds']} seeds, {result['epochs']} epochs"],
    ),
}
MODELS = [*training_speed.MODELS, "mlp"]


def main() -> None:
    options: dict[str, Any] = {"sizes": training_speed.PARTITIONS, "peers": training_speed.PEERS, "devices": True}
    program = Program("training", __doc__, PARTS, ("speed",), device=True, seconds="turn", **options)
    program.add("--models", nargs="+", choices=MODELS, default=MODELS, help="of speed and step")
    program.add("--turns", type=int, default=3, help="of each way")
    program.add("--steps", type=int, default=3, help="in a turn, whose figure is their median")
    program.add("--partitions", nargs="+", type=int, help="n, of speed")
    program.add("--checkpoint", nargs="+", choices=MODES, default=list(MODES), help="of speed")
    program.add("--scale", type=int, default=1, help="how many times the usual mini-batch of speed")
    program.add("--chunks", nargs="+", type=int, default=[4, 8, 16], help="m, of step")
    program.add("--shrink", type=int, default=1, help="how many times smaller step and pipelined are")
    program.add("--batches", nargs="+", type=int, default=[32, 64, 128], help="sizes of mini-batches, of accuracy")
    program.add("--epochs", type=int, default=6, help="of accuracy")
    program.add("--seeds", type=int, default=5, help="of accuracy, how many")
    program.run()


if __name__ == "__main__":
    main()
