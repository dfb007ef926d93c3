"""Take parts out of the engine, one at a time, and check that a test fails each time.

    python tests/mutation.py             runs all and writes the table, mutations.md
    python tests/mutation.py WORD ...    runs those with one of the words in their names, and prints the outcome only
    python tests/mutation.py --check     only checks that all can be applied, and that the table lists them

A mutation is found by the name of a function or class, in any file, and by the syntax tree of the code inside: neither
moving nor reformatting code makes a mutation stale. A mutation that is not found exactly once is an error: change it
together with the engine.

The tests run on copies of the sources, without comments.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutations.md"
COPIES = 2

HEADER = """\
# Mutations

Parts of the engine whose removal the tests notice. Written by `python tests/mutation.py`; the test is the first that
fails in the files that were run.

| taken out | of | noticed by |
| --- | --- | --- |
"""


class Mutation(NamedTuple):
    """A part of the engine to leave out.

    Attributes:
        name: the effect of the part that is left out
        place: the qualified name of the function, class or variable that contains the part
        old: consecutive statements, or an expression
        new: the same without the part; an expression replaces an expression
        tests: the files that should notice, without ``test_`` and ``.py``, as in ``skip/portal``
    """

    name: str
    place: str
    old: str
    new: str
    tests: str = "engine/streams engine/overlap"

    def apply(self, sources: Mapping[Path, str]) -> tuple[Path, str]:
        """Return the file that changes, and its mutated source.

        Raises:
            ValueError: the place does not have the old code exactly once.
        """
        found: list[tuple[Path, str]] = []
        count = 0
        for path, source in sources.items():
            if self.place.rpartition(".")[2] not in source:
                continue
            tree = ast.parse(source)
            exchange = _Exchange(_statements(self.old), _statements(self.new))
            for name, definition in _definitions(tree):
                if name == self.place:
                    exchange.visit(definition)
            if exchange.count:
                found.append((path, ast.unparse(tree)))
                count += exchange.count
        if count != 1:
            raise ValueError(f"'{self.name}' is stale: its code occurs {count} times in {self.place}")
        return found[0]


def _statements(code: str) -> list[ast.stmt]:
    return ast.parse(dedent(code).strip("\n")).body


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield functions, classes and variables with their qualified names, as in ``Class.method.inner``."""
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name, node
            inner = f"{prefix}{node.name}."
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield prefix + ast.unparse(target), node
        yield from _definitions(node, inner)


class _Exchange(ast.NodeTransformer):
    """Replace old code by new code, and count how often."""

    def __init__(self, old: list[ast.stmt], new: list[ast.stmt]) -> None:
        self.count = 0
        self._new = new
        self._expression: ast.expr | None = None
        if len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr):
            self._expression = new[0].value
            self._old = _dumps([old[0].value])
        else:
            self._old = _dumps(old)

    def visit(self, node: ast.AST) -> ast.AST:
        if self._expression is not None and isinstance(node, ast.expr) and _dumps([node]) == self._old:
            self.count += 1
            return self._expression
        self.generic_visit(node)
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and self._expression is None:
                self._exchange_in(block)
        return node

    def _exchange_in(self, block: list[ast.stmt]) -> None:
        n = len(self._old)
        for k in reversed(range(len(block) - n + 1)):
            if _dumps(block[k : k + n]) == self._old:
                block[k : k + n] = self._new
                self.count += 1


def _dumps(nodes: Sequence[ast.AST]) -> list[str]:
    return [ast.dump(node) for node in nodes]


MUTATIONS = [
    # ---------------------------------------------------------------------------------------------------- waits
    Mutation(
        "a copy waits for what computes the output",
        "_copy",
        "route.leaving.wait(route.ready[i])",
        "pass",
    ),
    Mutation(
        "... where there is no graph",
        "wait",
        """
        mark_ready(routes, i)
        return leaves
        """,
        """
        mark_ready([], i)
        for route in routes:
            route.ready[i] = route.leaving.mark()
        return leaves
        """,
    ),
    Mutation(
        "... where there is a graph",
        "Wait.forward",
        """
        ctx.routes, ctx.i = routes, i
        mark_ready(routes, i)
        """,
        """
        ctx.routes, ctx.i = routes, i
        for route in routes:
            route.ready[i] = route.leaving.mark()
        """,
    ),
    Mutation(
        "... after a cell that is not checkpointed",
        "_pass_plain",
        """
        if call.leaving:
            output = output.replace(wait(call.leaving, cell.i, output.leaves))
        """,
        "for route in call.leaving:\n    route.ready[cell.i] = route.leaving.mark()",
    ),
    Mutation(
        "... after a checkpointed cell",
        "_pass_checkpointed",
        """
        if call.leaving:
            leaves = wait(call.leaving, cell.i, leaves)
        """,
        "for route in call.leaving:\n    route.ready[cell.i] = route.leaving.mark()",
    ),
    Mutation(
        "... before a skip is copied",
        "PartitionCall.__init__",
        "self.leaving += [portal.route for portal in sending if portal.route is not None]",
        "pass",
    ),
    Mutation(
        "the computation waits for the copy of its input",
        "_copy",
        "route.target.wait(route.arriving.mark())",
        "pass",
    ),
    Mutation(
        "the copy of a gradient waits for what computes it",
        "copy_back",
        "route.grads_leaving.wait(route.target.mark())",
        "pass",
    ),
    Mutation(
        "the computation waits for the copy of its gradient",
        "wait_back",
        "route.source.wait(route.back[i])",
        "pass",
    ),
    Mutation(
        "... and not its recomputation",
        "_pass_checkpointed",
        """
        if call.leaving:
            leaves = wait(call.leaving, cell.i, leaves)
        if node is None:
            return cell.end(leaves), None
        tied: Lane = Recompute.apply(node, leaves[0])
        """,
        """
        tied: Lane = None if node is None else Recompute.apply(node, leaves[0])
        if call.leaving:
            leaves = wait(call.leaving, cell.i, leaves)
        if node is None:
            return cell.end(leaves), None
        """,
    ),
    # -------------------------------------------------------------------------------------------------- records
    Mutation(
        "what is copied is recorded on the stream that reads it",
        "_move",
        "leaving.record(leaf)",
        "pass",
    ),
    Mutation(
        "what has arrived is recorded on the stream that computes with it",
        "_move",
        "target.record(new)",
        "pass",
    ),
    # -------------------------------------------------------------------------------------------------- streams
    Mutation(
        "copies run beside the computation of the source",
        "_move",
        "leaving.use()",
        "arriving.use()",
    ),
    Mutation(
        "copies run beside the computation of the target",
        "_move",
        "arriving.use()",
        "leaving.use()",
    ),
    Mutation(
        "a copy waits for its own micro-batch only",
        "_copy",
        "route.leaving.wait(route.ready[i])",
        "route.leaving.wait(route.source.mark())",
    ),
    Mutation(
        "the computation waits for its own gradient only",
        "wait_back",
        "route.source.wait(route.back[i])",
        "route.source.wait(route.grads_arriving.mark())",
    ),
    Mutation(
        "a worker is on the stream of its device",
        "_Crew._serve_tasks",
        "worker.stream.use()",
        "suppress()",
    ),
    Mutation(
        "with one device, the caller is on the stream of its device",
        "Pipeline.run",
        "with self._calls[0].stream.use():\n    self._run_inline(batches)",
        "self._run_inline(batches)",
    ),
    Mutation(
        "a recomputation is on the stream of its device",
        "PartitionCall.recomputing",
        "return self._recomputing() if self._norms or self._buffers else self.stream.use()",
        "return self._recomputing() if self._norms or self._buffers else scratch_statistics([])",
    ),
    Mutation(
        "... also with running statistics",
        "PartitionCall._recomputing",
        "self.stream.use()",
        "scratch_statistics([])",
    ),
    # -------------------------------------------------------------------------------------------------- lifetimes
    Mutation(
        "a cell does not keep its input",
        "Cell.begin",
        "self._input = batch.replace(())",
        "self._input = batch",
        "leaks",
    ),
    Mutation(
        "a cell does not keep its output",
        "Cell.compute",
        "output.leaves = ()",
        "pass",
        "leaks engine/checkpoint",
    ),
    Mutation(
        "a recomputed graph is freed when it is differentiated",
        "Recomputation.differentiate",
        "(leaves, roots), self._graph = self._graph, None",
        "leaves, roots = self._graph",
        "leaks engine/checkpoint autograd",
    ),
    Mutation(
        "an error is not kept by the frame that raises it",
        "run_in_workers",
        """
        try:
            raise error
        finally:
            del error
        """,
        "raise error",
        "faults leaks",
    ),
    Mutation(
        "... nor by the workers",
        "_Crew.work",
        "(self._errors, {})",
        "(self._errors, self._errors)",
        "faults leaks",
    ),
    Mutation(
        "a batch drops a skip that has arrived",
        "_receive",
        "arrived = tuple([portal.receive(i, skips.pop(portal.key)) for portal in portals])",
        "arrived = tuple([portal.receive(i, skips[portal.key]) for portal in portals])",
        "engine/streams",
    ),
    # ------------------------------------------------------------------------------------------------- dependency
    Mutation(
        "a cell comes after the cell before it, by its input",
        "_pass_plain",
        """
        if lane is not None and tie(batch, [lane]):
            lane = None
        """,
        "pass",
        "engine/dependency",
    ),
    Mutation(
        "... or by its output",
        "_pass_plain",
        """
        if lane is not None and tie(output, [lane]):
            lane = None
        """,
        "pass",
        "engine/streams",
    ),
    Mutation(
        "a cell that is not checkpointed begins a lane",
        "_pass_plain",
        """
        if call.lane_device is not None and lane is None and cell.i < cell.m - 1:
            output, lane = _branch(output)
        """,
        "pass",
        "engine/dependency",
    ),
    Mutation(
        "... at all of its outputs",
        "_branch",
        "graph = {k: leaf for k, leaf in enumerate(batch.leaves) if leaf is not None and leaf.requires_grad}",
        "graph = {k: leaf for k, leaf in enumerate(batch.leaves[:1]) if leaf is not None and leaf.requires_grad}",
        "engine/dependency",
    ),
    Mutation(
        "a checkpointed cell ends the lane of the cell before it",
        "_pass_checkpointed",
        "Checkpoint.apply(Recomputation(cell), lane, call.gradients.phony, *batch.leaves)",
        "Checkpoint.apply(Recomputation(cell), None, call.gradients.phony, *batch.leaves)",
        "engine/dependency",
    ),
    Mutation(
        "a checkpointed cell begins a lane",
        "_pass_checkpointed",
        "return cell.end(leaves[1:]), tied",
        "return cell.end(leaves[1:]), None",
        "engine/dependency",
    ),
    Mutation(
        "the last lanes end in the output",
        "Pipeline._run_in_workers",
        """
        if open_lanes:
            tie(batches[-1], open_lanes)
        """,
        "pass",
        "engine/dependency engine/checkpoint engine/streams",
    ),
    Mutation(
        "Fork gives a phony of its input",
        "Fork.forward",
        "return *[x.detach() for x in xs], get_phony(xs[0].device)",
        "ctx.mark_non_differentiable(phony := get_phony(xs[0].device))\nreturn *[x.detach() for x in xs], phony",
        "engine/dependency",
    ),
    Mutation(
        "Join takes the phonies",
        "join",
        "result: Tensor = Join.apply(x, *phonies)",
        "result: Tensor = Join.apply(x)",
        "engine/dependency",
    ),
    Mutation(
        "recomputation does not wait for the gradient",
        "Recompute.backward",
        "ctx.checkpoint.recomputation.second_run(ctx.checkpoint.saved_tensors)",
        "pass",
        "engine/checkpoint engine/streams",
    ),
    # ----------------------------------------------------------------------------------------- the second run
    Mutation(
        "recomputation draws the numbers of the first run",
        "_replay",
        "draw.generator.set(draw.before)",
        "pass",
        "replay/random engine/streams",
    ),
    Mutation(
        "the generators continue as if it had drawn nothing",
        "_replay",
        "draw.generator.set(state)",
        "pass",
        "replay/random",
    ),
    Mutation(
        "numbers that were not noted are not taken for those of a cell",
        "_pass_plain",
        "call.random.forget()",
        "pass",
        "replay/random",
    ),
    Mutation(
        "... nor those of a cell that keeps its graph",
        "_pass_kept",
        "call.random.forget()",
        "pass",
        "replay/random",
    ),
    Mutation(
        "a generator's state is freed when its cell has been differentiated",
        "Recomputation.differentiate",
        "self._drawn and not runs_again",
        "False",
        "leaks",
    ),
    Mutation(
        "... unless the graph is kept",
        "Recomputation.differentiate",
        "self._drawn and not runs_again",
        "self._drawn",
        "leaks replay/random",
    ),
    Mutation(
        "... and no sooner",
        "Recomputation._recompute",
        "outputs = recomputing(cell.compute, leaves)",
        "outputs = recomputing(cell.compute, leaves); self._drawn = ()",
        "replay/random",
    ),
    Mutation(
        "... and without it nothing is drawn anew",
        "Recomputation.differentiate",
        "self._drawn = None",
        "self._drawn = ()",
        "replay/random",
    ),
    Mutation(
        "a layer's own generator is noted",
        "RandomStates._generators",
        "(() if self._seeded else _generators(self._device)) + generators_of(self._modules)",
        "() if self._seeded else _generators(self._device)",
        "replay/random",
    ),
    Mutation(
        "a generator that was not noted is refused",
        "RandomStates.replay",
        "self._refuse_new_generators()",
        "pass",
        "replay/random",
    ),
    Mutation(
        "... in every backward pass",
        "RandomStates.replay",
        "self._checked_in != this_pass",
        "self._checked_in is None",
        "replay/random",
    ),
    Mutation(
        "a replay on one device disturbs no other",
        "_replay",
        "_replays[device] != replays[device]",
        "_replays != replays",
        "replay/random",
    ),
    Mutation(
        "one thread at a time copies a generator's state",
        "_copying",
        "threading.Lock()",
        "nullcontext()",
        "replay/random",
    ),
    Mutation(
        "... and the last one after forward",
        "Pipeline._run_inline",
        "self._calls[0].random.forget()",
        "pass",
        "leaks",
    ),
    Mutation(
        "workers take turns where they share a generator",
        "sharing_generator",
        'device.type == "cpu" or len(set(devices)) == 1',
        "False",
        "replay/random",
    ),
    Mutation(
        "... and no others",
        "sharing_generator",
        'device.type == "cpu" or len(set(devices)) == 1',
        "True",
        "engine/threads replay/random",
    ),
    Mutation(
        "an accelerator leaves the CPU's generator to the CPU",
        "RandomStates.end",
        'self._beside and generator.device.type == "cpu"',
        "False",
        "engine/threads",
    ),
    Mutation(
        "recomputation counts on copies of the running statistics",
        "scratch_statistics",
        "norm._buffers[name] = statistic.clone()",
        "pass",
        "replay/statistics",
    ),
    Mutation(
        "the running statistics are put back",
        "scratch_statistics",
        "buffers[name] = statistic",
        "pass",
        "replay/statistics",
    ),
    Mutation(
        "the first run knows that it is checkpointing",
        "Recomputation.first_run",
        "outputs = checkpointing(cell.compute, leaves)",
        "outputs = cell.compute(leaves)",
        "replay/phase transparency gpipe/inputs",
    ),
    Mutation(
        "the second run knows that it is recomputing",
        "Recomputation._recompute",
        "outputs = recomputing(cell.compute, leaves)",
        "outputs = cell.compute(leaves)",
        "replay/phase engine/checkpoint",
    ),
    Mutation(
        "the second run has the caller's settings",
        "Recomputation.second_run",
        "self._graph = self.cell.call.ambient.run(self._recompute, saved)",
        "import torch\nwith torch.enable_grad():\n    self._graph = self._recompute(saved)",
        "replay/ambient",
    ),
    Mutation(
        "... at every backward pass",
        "Ambient._run",
        "self._set_already.get(thread) == this_pass",
        "thread in self._set_already",
        "replay/ambient",
    ),
    Mutation(
        "after an error no later cell starts",
        "_Crew._run_tasks",
        "number >= self._end",
        "False",
        "faults",
    ),
    Mutation(
        "a cell waits for its input",
        "Pipeline._tasks",
        "[] if j == 0 else [numbers[i, j - 1]]",
        "[]",
        "engine/threads",
    ),
    Mutation(
        "workers leave together",
        "_Crew._serve_tasks",
        "self._leaving.wait()",
        "None",
        "replay/ambient",
    ),
    Mutation(
        "workers of the CPU share its cores",
        "_Crew._share_of_cores",
        "threads // sharing",
        "threads",
        "engine/threads",
    ),
    Mutation(
        "... for the length of the call",
        "_Crew.work",
        "torch.set_num_threads(threads)",
        "None",
        "engine/threads",
    ),
    Mutation(
        "the first error in the order of the schedule is raised",
        "_Crew.work",
        "min(errors)",
        "max(errors)",
        "faults",
    ),
    Mutation(
        "a worker has the caller's settings",
        "_Crew._serve",
        "ambient.run(self._serve_tasks, worker)",
        "self._serve_tasks(worker)",
        "replay/ambient",
    ),
    Mutation(
        "a partition that starts in place works on a copy",
        "PartitionCall.__init__",
        "starts_in_place(partition)",
        "False",
        "engine/inplace",
    ),
    Mutation(
        "a change of the input in place is refused",
        "Recomputation.first_run",
        "versions(leaves) != untouched",
        "False",
        "engine/inplace",
    ),
    Mutation(
        "a recomputation with other parameters is refused",
        "Recomputation.second_run",
        "self._refuse_changed()",
        "pass",
        "autograd",
    ),
    Mutation(
        "... at every backward pass anew",
        "PartitionCall.changed",
        "self._unchanged_in == current_pass()",
        "self._unchanged_in is not None",
        "autograd",
    ),
    # ------------------------------------------------------------------------------------ gradients of parameters
    Mutation(
        "a gradient that would be lost is refused",
        "differentiate_into",
        "_refuse_captured(roots, [*leaves, *owned])\nwanted = [k for k in range(len(sums)) if owned[k].requires_grad]",
        "wanted = [k for k in range(len(sums)) if owned[k].requires_grad]",
        "engine/gradient_listeners engine/gradient_layers",
    ),
    Mutation(
        "each gradient is added to .grad as soon as it is computed",
        "ParameterGradients._begin_pass",
        "takes_all and not self._anything_listens()",
        "False",
        "engine/gradients",
    ),
    Mutation(
        "... unless there is a listener",
        "ParameterGradients._begin_pass",
        "takes_all and not self._anything_listens()",
        "takes_all",
        "autograd",
    ),
    Mutation(
        "... to a parameter",
        "has_hooks",
        "has_gradient_hooks(tensor)",
        "False",
        "autograd engine/gradient_listeners",
    ),
    Mutation(
        "... or to its node",
        "has_hooks",
        "len(hooks) > 1",
        "False",
        "autograd engine/gradient_listeners",
    ),
    Mutation(
        "... or the pass names its inputs",
        "ParameterGradients._begin_pass",
        "will_run(self._leaf)",
        "True",
        "autograd engine/gradient_listeners",
    ),
    Mutation(
        "... or a parameter was frozen at the call",
        "ParameterGradients._anything_listens",
        "any([parameter.requires_grad for parameter in self._owned[len(self._parameters) :]])",
        "False",
        "autograd",
    ),
    Mutation(
        "... or DistributedDataParallel is around the call",
        "ParameterGradients._anything_listens",
        "self._listens_always",
        "False",
        "engine/gradient_listeners",
    ),
    Mutation(
        "gradients that a backward pass does not ask for are not computed",
        "ParameterGradients._begin_pass",
        "takes_all or will_run(self.phony.grad_fn)",
        "True",
        "engine/gradients",
    ),
    Mutation(
        "a backward pass alone keeps its sums",
        "ParameterGradients.differentiate",
        "at_end_of_pass(this.end)",
        "Deliver.kept = this",
        "engine/gradients autograd",
    ),
    Mutation(
        "hooks of parameters receive only the whole gradient",
        "differentiate_into",
        "without_hooks(inputs[len(leaves) :])",
        "without_hooks([])",
        "autograd",
    ),
    Mutation(
        "hooks that layers put on their inputs are called once",
        "Recomputation._recompute",
        "gradient_hooks(leaf).clear()",
        "pass",
        "engine/gradient_layers",
    ),
    Mutation(
        "the last micro-batch is not in the caller's graph",
        "Pipeline._mode",
        "any(self._stops)",
        "False",
        "engine/gradients leaks",
    ),
    Mutation(
        "... but in one that does not keep its inputs",
        "Enter.forward",
        "ctx.entrance, ctx.first = (entrance, first)",
        "ctx.entrance, ctx.first, ctx.tensors = (entrance, first, tensors)",
        "leaks",
    ),
    Mutation(
        "... and takes gradients from its own outputs only",
        "_Entrance.take",
        "taken is None",
        "False",
        "engine/gradient_layers",
    ),
    # ------------------------------------------------------------------------------------------------------ steps
    Mutation(
        "in a step, too, a cell marks where its output is ready",
        "Executor._run",
        "mark_ready(self._front.leaving(j), i)",
        "for route in self._front.leaving(j):\n    route.ready[i] = route.leaving.mark()",
        "step",
    ),
    Mutation(
        "... and waits for its gradient",
        "Executor._backward",
        "wait_back(front.leaving(j), i)",
        "pass",
        "step",
    ),
    Mutation(
        "... and copies its input to its device",
        "_MicroBatches.forward",
        "batch.leaves if call.arriving is None else copy_forward(call.arriving, i, batch.leaves)",
        "batch.leaves",
        "engine/step_streams",
    ),
    Mutation(
        "... and its skips",
        "_MicroBatches.forward",
        "(skip,) if portal.route is None else copy_forward(portal.route, i, (skip,))",
        "(skip,)",
        "engine/step_streams",
    ),
    Mutation(
        "... and the gradient of its input back",
        "Executor._return",
        "route is not None",
        "False",
        "engine/step_streams",
    ),
    Mutation(
        "in a step, a copy waits for what computes its leaves",
        "_copy",
        "route.leaving.wait(route.ready[i])",
        "pass",
        "engine/step_streams",
    ),
    Mutation(
        "... and the computation waits for the copy",
        "_copy",
        "route.target.wait(route.arriving.mark())",
        "pass",
        "engine/step_streams",
    ),
    Mutation(
        "... and the copy of a gradient for what computes the gradient",
        "copy_back",
        "route.grads_leaving.wait(route.target.mark())",
        "pass",
        "engine/step_streams",
    ),
    Mutation(
        "... and the computation for the copy of its gradient",
        "wait_back",
        "route.source.wait(route.back[i])",
        "pass",
        "engine/step_streams",
    ),
    Mutation(
        "... and what is copied is recorded on the stream that reads it",
        "_move",
        "leaving.record(leaf)",
        "pass",
        "engine/step_streams",
    ),
    Mutation(
        "... and what has arrived on the stream that computes with it",
        "_move",
        "target.record(new)",
        "pass",
        "engine/step_streams",
    ),
    Mutation(
        "what has been copied requires grad as before",
        "copy_forward",
        "new.requires_grad_(old.requires_grad)",
        "pass",
        "engine/step_streams",
    ),
    Mutation(
        "a step on one device is on the stream of its device",
        "Executor.run",
        "streams[0].use()",
        "nullcontext()",
        "engine/step_streams",
    ),
    Mutation(
        "a failing hook takes back what other hooks have let pass",
        "Delivery.undo",
        "before.detach().copy_(copied)",
        "pass",
        "step_faults",
    ),
    Mutation(
        "complex outputs that weigh nothing have a real loss",
        "_nothing",
        "leaf.reshape(-1)[:0].sum().real",
        "leaf.reshape(-1)[:0].sum()",
        "step_transparency",
    ),
    Mutation(
        "a cell whose backward comes next is not recomputed",
        "at_once",
        "kind == 'F' and after[1:] == (i, j)",
        "False",
        "step",
    ),
    Mutation(
        "the views of a divided partition run backward in reverse",
        "agenda_of",
        "1 if kind == 'F' else -1",
        "1",
        "step_options",
    ),
    Mutation(
        "neighbours on one device are joined",
        "agenda_of",
        "columns[-1].append(view)",
        "columns.append([view])",
        "step_joined",
    ),
    Mutation(
        "... only if the program runs one after the other",
        "_are_neighbours",
        "all(((Action('F', i, a), Action('F', i, b)) in followers and (Action('B', i, b), Action('B', i, a)) in "
        "followers for i in forward))",
        "True",
        "step_joined",
    ),
    Mutation(
        "... and not if they share parameters",
        "joinable",
        "counts[parameter] > 1",
        "False",
        "step_joined",
    ),
    Mutation(
        "... and not if the second starts in place",
        "joinable",
        "starts_in_place(views[k + 1])",
        "False",
        "step_joined",
    ),
    Mutation(
        "errors in the backward of joined partitions name the partition",
        "Joined._mark",
        "leaf.register_hook(self._markers[k])",
        "pass",
        "step_joined",
    ),
    Mutation(
        "a partition that runs as a whole is not divided",
        "divide",
        "_runs_as_a_whole(partition)",
        "False",
        "step_options",
    ),
    Mutation(
        "values beside the loss have no graph",
        "_without_graph",
        "leaf.detach()",
        "leaf",
        "step_options",
    ),
    Mutation(
        "replicas add up their gradients",
        "with_gradients",
        "replicas is not None and replicas.exist and sums",
        "False",
        "distributed/step_replicas",
    ),
    Mutation(
        "a replica that fails tells the others",
        "Replicas.together",
        "failed",
        "False",
        "distributed/step_replicas",
    ),
    Mutation(
        "replicas compare what they exchange",
        "Replicas.together",
        "highest != ~lowest",
        "False",
        "distributed/step_replicas",
    ),
    Mutation(
        "replicas agree that all hooks have run",
        "with_gradients",
        'nullcontext() if replicas is None else replicas.together("the end of the step")',
        "nullcontext()",
        "distributed/step_replicas",
    ),
    Mutation(
        "replicas begin with equal parameters",
        "Replicas.begin_equal",
        "dist.broadcast(values, group=self.group, group_src=0)",
        "pass",
        "distributed/step_replicas",
    ),
    Mutation(
        "a step that fails puts gradients back",
        "Delivery.undo",
        "parameter.grad = before",
        "pass",
        "step",
    ),
    Mutation(
        "each layer has a seed of its own",
        "LayerSeeds._seeded",
        "generator.manual_seed(seed)",
        "pass",
        "step",
    ),
    Mutation(
        "a split backward changes gradients by hooks once",
        "SplitBackward.differentiate_weights",
        "handle = node.register_prehook(lambda _, arrived=arrived: arrived)",
        "handle = node.register_prehook(lambda _: None)",
        "step",
    ),
    Mutation(
        "a parameter of several nodes is not split",
        "_branches",
        "owners.setdefault(id(below), node) is not node",
        "False",
        "step",
    ),
    Mutation(
        "backward of a step is outside of autocast",
        "Executor._backward",
        "self._ambient.without_autocast()",
        "nullcontext()",
        "step",
    ),
    Mutation(
        "a step begins with casts of its own",
        "Ambient.fresh_casts",
        "torch.clear_autocast_cache if self.autocast_caches else lambda: None",
        "lambda: None",
        "step",
    ),
    Mutation(
        "... and its cells share them",
        "PartitionCall.forget_casts",
        "self.ambient.autocast_caches and (not self.in_program)",
        "self.ambient.autocast_caches",
        "step",
    ),
    # ------------------------------------------------------------------------------------------------------ skips
    Mutation(
        "a skip is brought to the device of its pop",
        "Portal.receive",
        "return tensor if self.route is None else copy(self.route, i, (tensor,))[0]",
        "return tensor",
        "skip/portal",
    ),
    Mutation(
        "a skip has streams of its own",
        "make_calls",
        'portals = {key: Portal(key, route(a, c, "skip ")) for ends in skips.leaving for key, a, c in ends}',
        "portals = {key: Portal(key, route(a, c)) for ends in skips.leaving for key, a, c in ends}",
        "skip/portal",
    ),
    Mutation(
        "a skip does not travel with the batch",
        "_send",
        """
        skips.update(zip([portal.key for portal in portals], batch.leaves[width:]))
        return batch.replace(batch.leaves[:width])
        """,
        """
        skips.update(zip([portal.key for portal in portals], batch.leaves[width:]))
        return batch
        """,
        "skip/portal",
    ),
    Mutation(
        "a skip within a partition has no portal",
        "SkipLayout.__init__",
        "source != target",
        "True",
        "skip/portal",
    ),
    Mutation(
        "a popped skip is freed with the layer that pops it",
        "_run_with_skips",
        "batch.leaves = batch.leaves[:width]",
        "batch = batch.replace(batch.leaves[:width])",
        "skip/leaks",
    ),
    Mutation(
        "... also if the partition works on copies",
        "_run_on_copies",
        """
        batch.leaves = tuple([None if leaf is None else leaf.clone() for leaf in batch.leaves])
        return run(batch)
        """,
        "return run(batch.replace(tuple([None if leaf is None else leaf.clone() for leaf in batch.leaves])))",
        "skip/leaks",
    ),
    Mutation(
        "a popped skip is held by its layer alone",
        "SkipTracker.pop",
        "return self.skips.pop(key)",
        "return self.skips[key]",
        "skip/tracker skip/leaks",
    ),
    Mutation(
        "a cell leaves its tracker",
        "SkipTracker.__exit__",
        "_current.tracker = self._outer",
        "pass",
        "skip/tracker",
    ),
    Mutation(
        "a skip that a plain model has left is freed with its layer",
        "_ThreadTracker.stash",
        "self._layers[key] = weakref.ref(layer, lambda _: skips.pop(key, None))",
        "pass",
        "skip/tracker",
    ),
    Mutation(
        "... and no later skip is",
        "_ThreadTracker.stash",
        "self._layers[key] = weakref.ref(layer, lambda _: skips.pop(key, None))",
        "weakref.finalize(layer, skips.pop, key, None)",
        "skip/tracker",
    ),
    Mutation(
        "an error is raised in the layer where it has yielded",
        "_run",
        "step = steps.throw(error)",
        "raise error",
        "skip/skippable",
    ),
    Mutation(
        "a layer does what it has declared",
        "drive.driven",
        "_driving.layer, _driving.open = outer, outer_open",
        "_driving.layer, _driving.open = outer, outer_open; open_.clear()",
        "skip/skippable",
    ),
    Mutation(
        "skips that no longer match are refused",
        "SkipLayout.__init__",
        "source is None or source > target",
        "False",
        "skip/layout",
    ),
    # -------------------------------------------------------------------------------------------------- frames
    Mutation(
        "a gradient on its way is not changed by the next micro-batch",
        "unshare",
        "parameter.grad = grad.clone()",
        "pass",
        "bugs frames/hard_cases",
    ),
    Mutation(
        "... in frames",
        "Executor._backward",
        "unshare(fresh)",
        "pass",
        "frames/hard_cases",
    ),
    Mutation(
        "a tensor of an earlier column is imported",
        "Frame.home",
        "return self._columns[max(0, bisect_right(self._starts, number) - 1)]",
        "return self.column",
        "frames/pipelined",
    ),
    Mutation(
        "a frame waits until a thread is left to it",
        "_agenda_of",
        "needs[number].append(ended.popleft())",
        "pass",
        "frames/pipelined",
    ),
    Mutation(
        "an import that was changed in place is imported again",
        "Crossing.forget",
        "self._known = {key: one for key, one in self._known.items() if versions([one.alias]) != [one.version]}",
        "self._known = {}",
        "frames/hard_cases",
    ),
    Mutation(
        "glue brings its arguments",
        "Glue.__torch_function__",
        "before, args = args, mapped(args, self._crossing.bring_operand)",
        "before = args",
        "frames/pipelined",
    ),
    Mutation(
        "glue does not act in other threads",
        "Glue.__torch_function__",
        "is_else = self.is_off or getattr(here.visitor, 'frame', None) is not frame",
        "is_else = self.is_off",
        "frames/hard_cases",
    ),
    Mutation(
        "an input is cut from the graph of the caller",
        "MiniBatch._cut",
        "tensor.detach()",
        "tensor",
        "frames/hard_cases",
    ),
    Mutation(
        "random numbers follow a micro-batch from device to device",
        "RandomNumbers._swapped",
        "generator.set_state(states[kind])",
        "generator.manual_seed(mixed(self._base, i, 1))",
        "frames/pipelined",
    ),
    Mutation(
        "a parameter that was replaced after forward stays replaced",
        "Aliases.installed",
        "registered(module._parameters, name) is parameter",
        "True",
        "frames/hard_cases",
    ),
    Mutation(
        "a mini-batch forgets its frames",
        "MiniBatch._drop",
        "self._frames, self._forward, self._finish = ([], None, None)",
        "pass",
        "frames/pipelined frames/hard_cases",
    ),
]


def main() -> None:
    words = sys.argv[1:]
    sources = read(ROOT)
    stale = faults(sources)
    if words == ["--check"]:
        sys.exit("\n".join([*stale, *faults_of_table()]) or 0)
    if stale:
        sys.exit("\n".join(stale))
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.name for word in words)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(COPIES) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for k in range(COPIES):
            copies.put(make_copy(Path(folder) / str(k)))

        def outcome(mutation: Mutation) -> str | None:
            copy = copies.get()
            try:
                return noticed(mutation, copy)
            finally:
                copies.put(copy)

        outcomes = list(zip(chosen, pool.map(outcome, chosen), strict=True))
        # A test that fails without mutations would notice every mutation.
        result = run_tests(copies.get(), sorted({test for _, test in outcomes if test}))
        if result.returncode != 0:
            sys.exit(f"tests fail without a mutation:\n{result.stdout}{result.stderr}")
    if not words:
        TABLE.write_text(HEADER + "".join(row(mutation, test) for mutation, test in outcomes))
    missed = [mutation.name for mutation, test in outcomes if test is None]
    sys.exit(f"no test notices: {'; '.join(missed)}" if missed else 0)


def read(root: Path) -> dict[Path, str]:
    """Return the sources of the engine."""
    return {path: path.read_text() for path in sorted((root / "torchgpipe").rglob("*.py"))}


def faults(sources: Mapping[Path, str]) -> list[str]:
    """Return the errors of the mutations that cannot be applied."""
    result = []
    for mutation in MUTATIONS:
        try:
            path, mutated = mutation.apply(sources)
            compile(mutated, path, "exec")
        except (SyntaxError, ValueError) as error:
            result.append(str(error))
    return result


def faults_of_table() -> list[str]:
    """Return the faults of the table: other mutations, or tests that do not exist."""
    table = TABLE.read_text()
    rows = [line.split(" | ") for line in table.removeprefix(HEADER).splitlines()]
    listed = [(name.removeprefix("| "), place.strip("`")) for name, place, _ in rows]
    if not table.startswith(HEADER) or listed != [(each.name, each.place) for each in MUTATIONS]:
        return ["mutations.md lists other mutations: run all"]
    result = []
    for name, _, test in rows:
        file, _, function = test.removesuffix(" |").strip("`").partition("::")
        path = ROOT / "tests" / file
        if not path.exists() or f"def {function.split('::')[-1]}(" not in path.read_text():
            result.append(f"'{name.removeprefix('| ')}' was noticed by {file}::{function}, which does not exist")
    return result


def row(mutation: Mutation, test: str | None) -> str:
    name = "**no test**" if test is None else f"`{test.removeprefix('tests/').partition('[')[0]}`"
    return f"| {mutation.name} | `{mutation.place}` | {name} |\n"


def make_copy(folder: Path) -> Path:
    for part in ("torchgpipe", "torchgpipe_balancing", "tests", "benchmarks"):
        if (ROOT / part).exists():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path, source in read(folder).items():
        path.write_text(ast.unparse(ast.parse(source)))  # the form in which mutated files are written
    return folder


def targets(mutation: Mutation) -> list[str]:
    paths = [Path("tests", name) for name in mutation.tests.split()]
    return [str(path.with_name(f"test_{path.name}.py")) for path in paths]


def noticed(mutation: Mutation, copy: Path) -> str | None:
    """Return the first test that fails, or None."""
    sources = read(copy)
    file, mutated = mutation.apply(sources)
    file.write_text(mutated)
    try:
        result = run_tests(copy, targets(mutation))
    finally:
        file.write_text(sources[file])
    if result.returncode == 0:
        print(f"MISSED: {mutation.name}", flush=True)
        return None
    # The name may contain spaces in its brackets.
    failed = re.search(r"^FAILED (\S+?(?:\[.*?\])?)(?: - .*)?$", result.stdout, re.MULTILINE)
    if result.returncode != 1 or failed is None:
        sys.exit(f"'{mutation.name}' does not fail in a test:\n{result.stdout}{result.stderr}")
    print(f"{mutation.name}\n    {failed[0]}", flush=True)
    return failed[1]


def run_tests(copy: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    # Sources change within a second, which bytecode files do not notice.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


if __name__ == "__main__":
    main()
