"""Do the tests see it when a part of the machinery is missing? Each mutation takes one out; a test has to fail.

    python tests/mutation.py             runs all and writes the table, mutations.md
    python tests/mutation.py WORD ...    runs those with one of the words in their names, and prints the outcome only

It works on copies of the sources. A mutation whose text is not found exactly once is an error: change it together
with the engine. Whether that is so `test_mutation.py` looks at every run of the tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from textwrap import dedent, indent
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutations.md"
COPIES = 2

HEADER = """\
# Mutations

What the tests notice when it is taken out of the engine. Written by `python tests/mutation.py`; the test is the first
of the files that were run that fails.

| taken out | in torchgpipe/ | noticed by |
| --- | --- | --- |
"""


class Mutation(NamedTuple):
    """A part of the engine to leave out.

    Attributes:
        name: what is left out
        file: where, in torchgpipe/
        old: the lines as they are; how far they are indented does not matter
        new: the lines without it
        tests: the files that should notice, without ``test_`` and ``.py``, as in ``skip/portal``
    """

    name: str
    file: str
    old: str
    new: str
    tests: str = "streams"

    def apply(self, source: str) -> str:
        """The mutated source.

        Raises:
            ValueError: the old lines are not there, or more than once.
        """
        lines = [line.rstrip() for line in dedent(self.old).strip("\n").splitlines()]
        pattern = r"^(?P<indent> *)" + r"\n(?P=indent)".join(map(re.escape, lines)) + "$"
        found = list(re.finditer(pattern, source, re.MULTILINE))
        if len(found) != 1:
            raise ValueError(f"'{self.name}' is stale: its text occurs {len(found)} times in {self.file}")
        (match,) = found
        new = indent(dedent(self.new).strip("\n"), match["indent"])
        return source[: match.start()] + new + source[match.end() :]


MUTATIONS = [
    # ---------------------------------------------------------------------------------------------------- waits
    Mutation(
        "a copy waits for what computes the output",
        "copy.py",
        "route.leaving.wait(route.ready[i])",
        "pass",
    ),
    Mutation(
        "... where there is no graph",
        "copy.py",
        """
        _mark_ready(routes, i)
        return leaves
        """,
        """
        _mark_ready([], i)
        for route in routes:
            route.ready[i] = route.leaving.mark()
        return leaves
        """,
    ),
    Mutation(
        "... where there is a graph",
        "copy.py",
        """
        ctx.routes, ctx.i = routes, i
        _mark_ready(routes, i)
        """,
        """
        ctx.routes, ctx.i = routes, i
        for route in routes:
            route.ready[i] = route.leaving.mark()
        """,
    ),
    Mutation(
        "... after a cell that is not checkpointed",
        "cell.py",
        """
        if stage.leaving:
            output = output.replace(wait(stage.leaving, self._i, output.leaves))
        """,
        "for route in stage.leaving:\n    route.ready[self._i] = route.leaving.mark()",
    ),
    Mutation(
        "... after a checkpointed cell",
        "cell.py",
        """
        if stage.leaving:
            leaves = wait(stage.leaving, self._i, leaves)
        """,
        "for route in stage.leaving:\n    route.ready[self._i] = route.leaving.mark()",
    ),
    Mutation(
        "... before a skip is copied",
        "cell.py",
        "self.leaving += [portal.route for portal in sending if portal.route is not None]",
        "",
    ),
    Mutation(
        "the computation waits for the copy of its input",
        "copy.py",
        "route.target.wait(route.arriving.mark())",
        "pass",
    ),
    Mutation(
        "the copy of a gradient waits for what computes it",
        "copy.py",
        "route.arriving.wait(route.target.mark())",
        "pass",
    ),
    Mutation(
        "the computation waits for the copy of its gradient",
        "copy.py",
        "route.source.wait(route.back[ctx.i])",
        "pass",
    ),
    Mutation(
        "... and not its recomputation",
        "cell.py",
        """
        if stage.leaving:
            leaves = wait(stage.leaving, self._i, leaves)
        if node is None:
            return self._output.replace(leaves), None
        tied: Lane = Recompute.apply(node, leaves[0])
        """,
        """
        tied: Lane = None if node is None else Recompute.apply(node, leaves[0])
        if stage.leaving:
            leaves = wait(stage.leaving, self._i, leaves)
        if node is None:
            return self._output.replace(leaves), None
        """,
    ),
    # -------------------------------------------------------------------------------------------------- records
    Mutation(
        "what is copied is recorded on the stream that reads it",
        "copy.py",
        "leaving.record(leaf)  # allocated on the source's stream, read on this one",
        "pass",
    ),
    Mutation(
        "what has arrived is recorded on the stream that computes with it",
        "copy.py",
        "target.record(new)  # allocated on the arriving stream, read by the computation",
        "pass",
    ),
    # -------------------------------------------------------------------------------------------------- streams
    Mutation(
        "copies run beside the computation of the source",
        "copy.py",
        "with leaving.use(), arriving.use():",
        "with arriving.use():",
    ),
    Mutation(
        "copies run beside the computation of the target",
        "copy.py",
        "with leaving.use(), arriving.use():",
        "with leaving.use():",
    ),
    Mutation(
        "a copy waits for its own micro-batch only",
        "copy.py",
        "route.leaving.wait(route.ready[i])",
        "route.leaving.wait(route.source.mark())",
    ),
    Mutation(
        "so does the computation for its own gradient only",
        "copy.py",
        "route.source.wait(route.back[ctx.i])",
        "route.source.wait(route.leaving.mark())",
    ),
    Mutation(
        "a worker is on the stream of its device",
        "worker.py",
        """
        with worker.stream.use():
            while (cell := worker.cells.get()) is not None:
                self._serve_one(worker, *cell)
        """,
        """
        while (cell := worker.cells.get()) is not None:
            self._serve_one(worker, *cell)
        """,
    ),
    Mutation(
        "so is the caller where there is one device",
        "pipeline.py",
        "with self._stages[0].stream.use():\n    self._run_inline(batches, checkpoint_stop)",
        "self._run_inline(batches, checkpoint_stop)",
    ),
    Mutation(
        "so is a recomputation",
        "cell.py",
        "return self._again() if self.norms or self._buffers else self.stream.use()",
        "return self._again() if self.norms or self._buffers else scratch_statistics([])",
    ),
    Mutation(
        "so is a recomputation with running statistics",
        "cell.py",
        "with self.stream.use(), exclusive(self.norms), scratch_statistics(self.norms):",
        "with exclusive(self.norms), scratch_statistics(self.norms):",
    ),
    # -------------------------------------------------------------------------------------------------- lifetimes
    Mutation(
        "a cell does not keep its input",
        "cell.py",
        "self._input = batch.replace(())",
        "self._input = batch",
        "leaks",
    ),
    Mutation(
        "a cell does not keep its output",
        "cell.py",
        "output.leaves = ()  # The structure is needed again, for what autograd makes of the leaves.",
        "pass",
        "leaks checkpoint",
    ),
    Mutation(
        "a recomputed graph goes when it is differentiated",
        "checkpoint.py",
        "(leaves, outputs, sources), self._graph = self._graph, None",
        "leaves, outputs, sources = self._graph",
        "leaks checkpoint autograd",
    ),
    Mutation(
        "an error that was raised is not kept by who has raised it",
        "worker.py",
        """
        try:
            raise error
        finally:
            del error  # A frame that holds its own exception is a cycle, and keeps tensors alive.
        """,
        "raise error",
        "faults leaks",
    ),
    Mutation(
        "... nor by the workers",
        "worker.py",
        "self._errors.clear()  # They know the frames they come from, and so this object.",
        "pass",
        "faults leaks",
    ),
    Mutation(
        "a batch lets go of a skip that has arrived",
        "cell.py",
        "arrived = tuple([portal.receive(i, skips.pop(portal.key)) for portal in portals])",
        "arrived = tuple([portal.receive(i, skips[portal.key]) for portal in portals])",
        "streams",
    ),
    # ------------------------------------------------------------------------------------------------- dependency
    Mutation(
        "a cell comes after the one before it, by its input",
        "cell.py",
        """
        if lane is not None and tie(batch, [lane]):
            lane = None
        """,
        "pass",
        "dependency",
    ),
    Mutation(
        "... or by its output",
        "cell.py",
        """
        if lane is not None and tie(output, [lane]):
            # No input required grad. The output does nearly as well: the engine takes this cell's nodes before
            # those of the cell before it, which the same thread has created earlier.
            lane = None
        """,
        "pass",
        "streams",
    ),
    Mutation(
        "a cell that is not checkpointed begins a lane",
        "cell.py",
        """
        if stage.phony is not None and lane is None and self._i < self._m - 1:
            output, lane = _branch(output)
        """,
        "pass",
        "dependency",
    ),
    Mutation(
        "... at all of its outputs",
        "cell.py",
        "graph = {k: leaf for k, leaf in enumerate(batch.leaves) if leaf is not None and leaf.requires_grad}",
        "graph = {k: leaf for k, leaf in enumerate(batch.leaves[:1]) if leaf is not None and leaf.requires_grad}",
        "dependency",
    ),
    Mutation(
        "a checkpointed cell ends the lane of the one before it",
        "cell.py",
        "leaves: Leaves = Checkpoint.apply(self, lane, sums, *batch.leaves, *parameters)",
        "leaves: Leaves = Checkpoint.apply(self, None, sums, *batch.leaves, *parameters)",
        "dependency",
    ),
    Mutation(
        "a checkpointed cell begins a lane",
        "cell.py",
        "return self._output.replace(leaves[1:]), tied",
        "return self._output.replace(leaves[1:]), None",
        "dependency",
    ),
    Mutation(
        "the last lanes end in the output",
        "pipeline.py",
        """
        if open_lanes:
            tie(batches[-1], open_lanes)
        """,
        "pass",
        "dependency checkpoint streams",
    ),
    Mutation(
        "Fork gives a phony of its input",
        "dependency.py",
        "return *[x.detach() for x in xs], get_phony(xs[0].device)",
        "ctx.mark_non_differentiable(phony := get_phony(xs[0].device))\nreturn *[x.detach() for x in xs], phony",
        "dependency",
    ),
    Mutation(
        "Join takes the phonies",
        "dependency.py",
        "result: Tensor = Join.apply(x, *phonies)",
        "result: Tensor = Join.apply(x)",
        "dependency",
    ),
    Mutation(
        "recomputation does not wait for the gradient",
        "checkpoint.py",
        "ctx.checkpoint.recomputation.second_run(ctx.checkpoint)",
        "pass",
        "checkpoint streams",
    ),
    # ----------------------------------------------------------------------------------------- the second run
    Mutation(
        "recomputation draws the numbers of the first run",
        "random.py",
        "draw.generator.set(draw.before)",
        "pass",
        "random streams",
    ),
    Mutation(
        "the generators go on as if it had drawn nothing",
        "random.py",
        "draw.generator.set(state)",
        "pass",
        "random",
    ),
    Mutation(
        "numbers that nobody noted are not taken for those of a cell",
        "cell.py",
        "stage.random.forget()",
        "pass",
        "random",
    ),
    Mutation(
        "a generator's state goes when its cell has been differentiated",
        "checkpoint.py",
        "if self._drawn and not keeps_graph():",
        "if False:",
        "leaks",
    ),
    Mutation(
        "... unless the graph is kept",
        "checkpoint.py",
        "if self._drawn and not keeps_graph():",
        "if self._drawn:",
        "leaks random",
    ),
    Mutation(
        "... and no sooner",
        "checkpoint.py",
        "outputs = recomputing(self.compute, leaves)",
        "outputs = recomputing(self.compute, leaves); self._drawn = ()",
        "random",
    ),
    Mutation(
        "... and without it nothing is drawn anew",
        "checkpoint.py",
        "self._drawn = None  # It goes with what the engine lets go of: a generator's state takes kilobytes.",
        "self._drawn = ()",
        "random",
    ),
    Mutation(
        "a layer's own generator is noted",
        "random.py",
        "return _generators(self._device) + _generators_of(self._modules)",
        "return _generators(self._device)",
        "random",
    ),
    Mutation(
        "what is drawn from one that was not noted is refused",
        "random.py",
        "if _note(unknown).contents != untouched.contents:",
        "if False:",
        "random",
    ),
    Mutation(
        "... and taken back",
        "random.py",
        "for generator, state in zip(unknown, untouched.states):",
        "for generator, state in ():",
        "random",
    ),
    Mutation(
        "... and such a generator is looked for in every pass",
        "random.py",
        "if self._unknown_in != this_pass:",
        "if self._unknown_in is None:",
        "random",
    ),
    Mutation(
        "one thread at a time copies a generator's state",
        "random.py",
        "_copying = threading.Lock()",
        "_copying = nullcontext()",
        "random",
    ),
    Mutation(
        "... and the last one after forward",
        "pipeline.py",
        "self._stages[0].random.forget()  # The last state takes kilobytes.",
        "pass",
        "leaks",
    ),
    Mutation(
        "workers take turns where they share a generator",
        "random.py",
        'return any(device.type == "cpu" for device in devices)',
        "return False",
        "random",
    ),
    Mutation(
        "recomputation counts on copies of the running statistics",
        "statistics.py",
        "norm._buffers[name] = statistic.clone()",
        "pass",
        "batchnorm",
    ),
    Mutation(
        "the running statistics are put back",
        "statistics.py",
        "buffers[name] = statistic",
        "pass",
        "batchnorm",
    ),
    Mutation(
        "the first run knows that it is checkpointing",
        "checkpoint.py",
        "outputs = checkpointing(self.compute, leaves)",
        "outputs = self.compute(leaves)",
        "phase transparency gpipe",
    ),
    Mutation(
        "the second run knows that it is recomputing",
        "checkpoint.py",
        "outputs = recomputing(self.compute, leaves)",
        "outputs = self.compute(leaves)",
        "phase checkpoint",
    ),
    Mutation(
        "the second run is in what the caller had set",
        "checkpoint.py",
        "self._graph = self.site.ambient.run(self._recompute, checkpoint.saved_tensors)",
        "with torch.enable_grad():\n    self._graph = self._recompute(checkpoint.saved_tensors)",
        "ambient",
    ),
    Mutation(
        "... at every backward pass",
        "ambient.py",
        "here = current_pass(), get_ident()",
        "here = 0, get_ident()",
        "ambient",
    ),
    Mutation(
        "after an error no step is handed out",
        "worker.py",
        "if errors or step is None:",
        "if step is None:",
        "faults",
    ),
    Mutation(
        "... and its worker runs none of the same step",
        "worker.py",
        "if not worker.failed:",
        "if True:",
        "faults",
    ),
    Mutation(
        "the first error in the order of the schedule is raised",
        "worker.py",
        "self._outcome.put(errors[0] if errors else None)",
        "self._outcome.put(errors[-1] if errors else None)",
        "faults",
    ),
    Mutation(
        "a worker is in what the caller has set",
        "worker.py",
        "ambient.run(self._serve_all, worker)",
        "self._serve_all(worker)",
        "ambient",
    ),
    Mutation(
        "a partition that starts in place works on a copy",
        "cell.py",
        "if _starts_in_place(partition):",
        "if False:",
        "inplace",
    ),
    Mutation(
        "a change of the input in place is refused",
        "checkpoint.py",
        "if _versions(leaves) != versions:",
        "if False:",
        "inplace",
    ),
    Mutation(
        "a recomputation with other parameters is refused",
        "checkpoint.py",
        "self._refuse_changed()",
        "pass",
        "autograd",
    ),
    Mutation(
        "... at every backward pass anew",
        "cell.py",
        "if self._unchanged_in == current_pass():",
        "if self._unchanged_in is not None:",
        "autograd",
    ),
    Mutation(
        "a gradient that would get lost is refused",
        "checkpoint.py",
        "raise self._captured(node.variable)",
        "pass",
        "autograd",
    ),
    # ------------------------------------------------------------------------------------ sums of gradients
    Mutation(
        "a large gradient joins its sum as soon as it is computed",
        "checkpoint.py",
        "hooks = sums.take_from(sources)",
        "hooks = []",
        "accumulation",
    ),
    Mutation(
        "... if it takes much memory beside the activations of its layer",
        "accumulation.py",
        "self._at_once = {*self._present, *(heavy if len(heavy) > 1 else ())}",
        "self._at_once = {*self._present}",
        "accumulation",
    ),
    Mutation(
        "... which are not the parameter itself, cast or transposed",
        "accumulation.py",
        "layer = node if len(edges) > 1 else seen[node] or node",
        "layer = node",
        "accumulation",
    ),
    Mutation(
        "... or is to join what is there",
        "accumulation.py",
        "self._at_once = {*self._present, *(heavy if len(heavy) > 1 else ())}",
        "self._at_once = {*(heavy if len(heavy) > 1 else ())}",
        "accumulation",
    ),
    Mutation(
        "... also in a cell that is not checkpointed",
        "cell.py",
        "accumulation.take_from(output.leaves, before)",
        "pass",
        "accumulation",
    ),
    Mutation(
        "hooks are taken off nodes that a layer has kept",
        "accumulation.py",
        "hook.remove()",
        "pass",
        "accumulation",
    ),
    Mutation(
        "... and know the accumulation only as long as others do",
        "accumulation.py",
        "this = ref(self)",
        "this = lambda: self",
        "accumulation",
    ),
    Mutation(
        "... also in a graph of a recomputation",
        "checkpoint.py",
        "hook.remove()",
        "pass",
        "accumulation",
    ),
    Mutation(
        "a hook returns nothing that PyTorch cannot compare",
        "accumulation.py",
        "if grad is None or any([one is not None and one.is_nested for one in grads]):",
        "if grad is None:",
        "accumulation",
    ),
    Mutation(
        "no sum changes what somebody else holds",
        "accumulation.py",
        "if _is_alone(sums, k):",
        "if True:",
        "accumulation",
    ),
    Mutation(
        "... nor what another tensor shows a part of",
        "accumulation.py",
        "return is_whole and _holders(tensors, k) == _LIST_ALONE",
        "return _holders(tensors, k) == _LIST_ALONE",
        "accumulation",
    ),
    Mutation(
        "... nor is it handed on as if nobody did",
        "accumulation.py",
        "sums[k] = grad",
        "sums[k] = grad.detach()",
        "accumulation",
    ),
    Mutation(
        "... a view of something that nobody holds can be changed",
        "accumulation.py",
        "sums[k] = sums[k].detach()",
        "pass",
        "accumulation",
    ),
    Mutation(
        "each backward pass has its own sums",
        "accumulation.py",
        "this_pass = current_pass()",
        "this_pass = 0",
        "accumulation",
    ),
    Mutation(
        "a backward pass keeps its sums",
        "accumulation.py",
        "at_end_of_pass(sums.end)",
        "pass",
        "accumulation",
    ),
    Mutation(
        "... and nothing else does",
        "accumulation.py",
        "self._passes: WeakValueDictionary[int, Sums] = WeakValueDictionary()",
        "self._passes = {}",
        "accumulation",
    ),
    Mutation(
        "gradients that a backward pass has no use for are not computed",
        "accumulation.py",
        "if not will_run(self.phony.grad_fn):",
        "if False:",
        "accumulation",
    ),
    Mutation(
        "what comes after the sums were delivered goes the usual way",
        "accumulation.py",
        "return None if sums.delivered else sums",
        "return sums",
        "accumulation threads",
    ),
    Mutation(
        "there is no sum beside the gradient of an earlier pass",
        "accumulation.py",
        "elif k in self._present:",
        "elif False:",
        "accumulation",
    ),
    Mutation(
        "... unless a hook is to see the new gradient",
        "accumulation.py",
        "if not parameter.is_leaf or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:",
        "if not parameter.is_leaf:",
        "accumulation",
    ),
    Mutation(
        "... or its precision is low",
        "accumulation.py",
        "if grad.element_size() < 4:  # In half precision, many small additions to a large number lose too much.",
        "if False:",
        "accumulation",
    ),
    Mutation(
        "the engine adds something where all has been added",
        "accumulation.py",
        "sums[k] = _zeros(self._present[k].variable)",
        "pass",
        "accumulation",
    ),
    Mutation(
        "... which changes nothing",
        "accumulation.py",
        "return like.new_zeros(()).neg().expand_as(like)",
        "return like.new_zeros(()).expand_as(like)",
        "accumulation",
    ),
    Mutation(
        "there is a sum beside a gradient that the pass does not add to",
        "accumulation.py",
        "return will_accumulate(node)",
        "return True",
        "accumulation",
    ),
    Mutation(
        "hooks of parameters hear the whole gradient only",
        "checkpoint.py",
        "with without_hooks(wanted):\n    return gradients(roots, root_grads, wanted)",
        "return gradients(roots, root_grads, wanted)",
        "autograd",
    ),
    # ------------------------------------------------------------------------------------------------------ skips
    Mutation(
        "a skip is brought to the device of its pop",
        "skip/portal.py",
        "return tensor if self.route is None else copy(self.route, i, (tensor,))[0]",
        "return tensor",
        "skip/portal",
    ),
    Mutation(
        "a skip has streams of its own",
        "pipeline.py",
        'portals = {key: Portal(key, route(a, c, "skip ")) for ends in skips.leaving for key, a, c in ends}',
        "portals = {key: Portal(key, route(a, c)) for ends in skips.leaving for key, a, c in ends}",
        "skip/portal",
    ),
    Mutation(
        "a skip goes no way that the batch goes",
        "cell.py",
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
        "skip/layout.py",
        "if source != target:",
        "if True:",
        "skip/portal",
    ),
    Mutation(
        "a skip that is popped goes with the layer that pops it",
        "cell.py",
        "batch.leaves = batch.leaves[:width]",
        "batch = batch.replace(batch.leaves[:width])",
        "skip/leaks",
    ),
    Mutation(
        "... also if the partition works on copies",
        "cell.py",
        """
        batch.leaves = tuple([None if leaf is None else leaf.clone() for leaf in batch.leaves])
        return call(batch)
        """,
        "return call(batch.replace(tuple([None if leaf is None else leaf.clone() for leaf in batch.leaves])))",
        "skip/leaks",
    ),
    Mutation(
        "who pops a skip has it alone",
        "skip/tracker.py",
        "return self.skips.pop(key)",
        "return self.skips[key]",
        "skip/tracker skip/leaks",
    ),
    Mutation(
        "a cell leaves its tracker",
        "skip/tracker.py",
        "_current.tracker = self._outer",
        "pass",
        "skip/tracker",
    ),
    Mutation(
        "a skip that a plain model has left goes with its layer",
        "skip/tracker.py",
        "self._layers[key] = weakref.ref(layer, lambda _: skips.pop(key, None))",
        "pass",
        "skip/tracker",
    ),
    Mutation(
        "... and no later one goes with it",
        "skip/tracker.py",
        "self._layers[key] = weakref.ref(layer, lambda _: skips.pop(key, None))",
        "weakref.finalize(layer, skips.pop, key, None)",
        "skip/tracker",
    ),
    Mutation(
        "a layer hears of an error where it has yielded",
        "skip/skippable.py",
        "step = steps.throw(error)",
        "raise error",
        "skip/skippable",
    ),
    Mutation(
        "what a layer has declared it does",
        "skip/skippable.py",
        "if open_:",
        "if False:",
        "skip/skippable",
    ),
    Mutation(
        "skips that no longer match are refused",
        "skip/layout.py",
        "if source is None or source > target:",
        "if False:",
        "skip/layout",
    ),
]


def main() -> None:
    words = sys.argv[1:]
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.name for word in words)]
    for mutation in chosen:
        mutation.apply((ROOT / "torchgpipe" / mutation.file).read_text())
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
        # A test that fails anyway would notice everything.
        result = run_tests(copies.get(), sorted({test for _, test in outcomes if test}))
        if result.returncode != 0:
            sys.exit(f"tests fail without a mutation:\n{result.stdout}{result.stderr}")
    if not words:
        TABLE.write_text(HEADER + "".join(row(mutation, test) for mutation, test in outcomes))
    missed = [mutation.name for mutation, test in outcomes if test is None]
    sys.exit(f"no test notices: {'; '.join(missed)}" if missed else 0)


def row(mutation: Mutation, test: str | None) -> str:
    name = "**nobody**" if test is None else f"`{test.removeprefix('tests/').partition('[')[0]}`"
    return f"| {mutation.name} | {mutation.file} | {name} |\n"


def make_copy(folder: Path) -> Path:
    for part in ("torchgpipe", "torchgpipe_balancing", "tests"):
        if (ROOT / part).exists():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def targets(mutation: Mutation) -> list[str]:
    paths = [Path("tests", name) for name in mutation.tests.split()]
    return [str(path.with_name(f"test_{path.name}.py")) for path in paths]


def noticed(mutation: Mutation, copy: Path) -> str | None:
    """The first test that fails, or None."""
    file = copy / "torchgpipe" / mutation.file
    source = file.read_text()
    mutated = mutation.apply(source)
    compile(mutated, file, "exec")
    file.write_text(mutated)
    try:
        result = run_tests(copy, targets(mutation))
    finally:
        file.write_text(source)
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
