"""The child of memory_capacity.py: counts the bytes of a training step of a whole model.

footprint   in the second step, with an optimizer that keeps one number a parameter (RMSprop): "kept": parameters,
            buffers, gradients and the optimizer's state; "activations": the most that is allocated beside these at any
            time of the step; "peak": both together. Each is a list with a figure for each GPU. CPU devices share one
            memory, and so they have one figure for all of them.
balances    the balances by size of a whole model
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.allocations import memories, peaks_of, reports
from benchmarks.models import amoebanetd, gpt, resnet, unet
from benchmarks.peers import Answer, Request, serve
from benchmarks.tasks import TASKS, Task, inputs
from benchmarks.training_steps import runner

__all__ = ["MAKERS", "answer"]

MAKERS: dict[str, Callable[..., nn.Sequential]] = {"amoebanetd": amoebanetd, "gpt": gpt, "resnet": resnet, "unet": unet}


def task_of(request: Request) -> Task:
    """Return what a request asks to train: one of the tasks by its name, or a model with its arguments."""
    if "size" in request:
        return TASKS[request["size"]][request["model"]]
    make, args = MAKERS[request["model"]], request["args"]
    return Task(lambda: make(*args), tuple(request["sample"]), request["batch"], request["m"])


def balances(peer: str, request: Request) -> Answer:
    """Return the balance by size for each number of partitions, found on the CPU: sizes are the same on all devices."""
    from torchgpipe_balancing import profile

    task = task_of(request)
    if request["partitions"] == [1]:
        with torch.device("meta"):
            return {"balances": [[len(task.make())]]}
    sample = inputs(task, max(1, task.batch // task.chunks), "cpu")
    report = profile(task.make(), sample, device="cpu", timeout=0.0)
    return {"balances": [report.balance(n, by="size", param_scale=3.0) for n in request["partitions"]]}


def footprint(peer: str, request: Request) -> Answer:
    """Return the number of parameters, and bytes; or the reason why there are none."""
    gc.collect()
    places = memories(request["devices"])
    if places[0].type == "cpu":
        reports()
    elif request.get("limit") is not None:
        for device in places:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, request["limit"] / total), device)
    try:
        return footprint_of(peer, task_of(request), request, places)
    except torch.OutOfMemoryError:
        return {"none": "out of memory"}


def footprint_of(peer: str, task: Task, request: Request, places: list[torch.device]) -> Answer:
    torch.manual_seed(0)
    module = task.make()
    run = runner(peer, module, request)
    x = inputs(task, request["batch"], request["devices"][0])
    optimizer = torch.optim.RMSprop(module.parameters(), lr=0.0)

    def forward_and_backward() -> None:
        torch.autograd.backward(run(x).square().mean())

    forward_and_backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    above = peaks_of(forward_and_backward, places)

    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    tensors = [*module.parameters(), *module.buffers(), *state(optimizer), *gradients]
    held = [bytes_in(memory, tensors) for memory in places]
    # The gradients are made by the step, and counted once.
    activations = [most - bytes_in(memory, gradients) for most, memory in zip(above, places, strict=True)]
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "kept": held,
        "activations": activations,
        "peak": [a + b for a, b in zip(held, activations, strict=True)],
    }


def bytes_in(memory: torch.device, tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if memories([tensor.device]) == [memory])


def state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for of_parameter in optimizer.state.values():
        yield from (value for value in of_parameter.values() if isinstance(value, Tensor))


def answer(peer: str, request: Request) -> Answer:
    return {"footprint": footprint, "balances": balances}[request["kind"]](peer, request)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer)
