"""The idle share of schedules, published beside simulated: a part of published.py.

The models, their times and the idle shares are those of P. Qi et al., `Zero Bubble Pipeline Parallelism
<https://arxiv.org/abs/2401.10241>`_, 2024, tables 5 and 6: four language models on 8 to 32 GPUs, with three numbers of
micro-batches each. F, I and W are the milliseconds of a micro-batch in a stage; the last number is that of a transfer.

The paper's measure looks at each stage from its own start to its own end, and takes the longest:

    share  =  1  -  work of the busiest stage / longest stage

Ours are simulated with the published times: `1F1B` as it is, ZB-H1 and interleaved as `torchgpipe.schedule.fastest`
makes them for these times and for the memory beside them. That shortens the step from the first start to the last end.
ZB-H2 has more memory than it needs for that, and ends its stages as apart as they begin, so it is written out here. An
interleaved stage has as many parts as there are layers.

The schedules by their names are simulated at equal times of F, I and W, from the first start to the last end. Published
beside them are 1F1B, its interleaved kind and ZB-H1, and the schedules of a V (`Pipeline Parallelism with Controllable
Memory <https://arxiv.org/abs/2405.15362>`_, 2024), as the papers' own programs simulate.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from benchmarks.program import Progress
from benchmarks.records import Row, table_of
from torchgpipe.schedule import Action, Program, ScheduleName, Simulation, fastest, program, simulate
from torchgpipe.schedule.programs import usual_places

__all__ = ["NAMED", "SETTINGS", "measure", "measure_named", "published_bubbles", "published_schedules"]


SCHEDULES = ("1F1B", "interleaved", "ZB-H1", "ZB-H2")

#: The numbers of devices of `NAMED`.
DEVICES = (4, 8, 16, 32)

#: By name, with four micro-batches for each device: the idle share, and the micro-batches that are kept.
NAMED: dict[ScheduleName, tuple[tuple[float | None, float], ...]] = {
    "1F1B": ((0.158, 4), (0.179, 8), (0.190, 16), (0.195, 32)),
    "Interleaved1F1B": ((0.086, 5.5), (0.099, 11.5), (0.105, 23.5), (0.108, 47.5)),
    "ZeroBubble": ((0.059, 4), (0.068, 8), (0.072, 16), (0.075, 32)),
    "V-Min": ((0.103, 2), (0.123, 4), (0.133, 6), (None, 12)),
    "V-Half": ((0.050, 3), (0.081, 5), (0.096, 9), (0.104, 17)),
    "ZB-V": ((0.030, 4), (0.035, 8), (0.038, 16), (0.039, 32)),
}


class Setting(NamedTuple):
    """A model in a pipeline, with what has been published of it.

    Attributes:
        model: its parameters, as they are printed
        n, m: the stages, and the micro-batches
        parts: the parts of a stage of the interleaved schedule
        times: of F, I, W and a transfer
        published: the idle shares of `SCHEDULES`
    """

    model: str
    n: int
    m: int
    parts: int
    times: tuple[float, float, float, float]
    published: tuple[float, float, float, float]


SETTINGS = [
    Setting("1.5B", 8, 24, 3, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1055, 0.1585, 0.1083)),
    Setting("1.5B", 8, 32, 3, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.0818, 0.1242, 0.0837)),
    Setting("1.5B", 8, 64, 3, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0443, 0.0674, 0.0444)),
    Setting("6.2B", 8, 24, 4, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.0808, 0.1323, 0.0698)),
    Setting("6.2B", 8, 32, 4, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.0628, 0.1045, 0.0559)),
    Setting("6.2B", 8, 64, 4, (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0320, 0.0554, 0.0294)),
    Setting("14.6B", 16, 48, 3, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1104, 0.1397, 0.0672)),
    Setting("14.6B", 16, 64, 3, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.0852, 0.1088, 0.0516)),
    Setting("14.6B", 16, 128, 3, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0445, 0.0576, 0.0266)),
    Setting("28.3B", 32, 96, 2, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1493, 0.1421, 0.0641)),
    Setting("28.3B", 32, 128, 2, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1164, 0.1106, 0.0490)),
    Setting("28.3B", 32, 256, 2, (10.402, 10.248, 7.698, 0.460), (0.1352, 0.0617, 0.0594, 0.0257)),
]


def zb_h2(n: int, m: int) -> Program:
    """Return ZB-H2: stage j runs 2 (n - j) - 1 micro-batches ahead, and leaves W of 2 j of them for its end."""
    rows = []
    for j in range(n):
        ahead, behind = min(m, 2 * (n - j) - 1), 2 * j
        row = [Action("F", i, j) for i in range(ahead)]
        for i in range(m):
            row.append(Action("I", i, j))
            row += [Action("F", i + ahead, j)] * (i + ahead < m)
            row += [Action("W", i - behind, j)] * (i >= behind)
        rows.append(row + [Action("W", i, j) for i in range(max(0, m - behind), m)])
    return rows


def simulations(setting: Setting) -> dict[str, Simulation]:
    """Return the simulations of a setting, by schedule."""
    _, n, m, parts, (f, i, w, transfer), _ = setting
    costs = {"F": f, "I": i, "W": w, "B": i + w}
    of_part = {kind: cost / parts for kind, cost in costs.items()}
    stages = [*range(n)]
    interleaved = fastest(
        m, stages * parts, of_part, [1 / parts] * n * parts, limits=2 * n, transfer=transfer, split=False
    )
    return {
        "1F1B": simulate(program("1F1B", m, stages), costs, transfer=transfer),
        "interleaved": simulate(interleaved, of_part, [1 / parts] * n * parts, transfer=transfer),
        "ZB-H1": simulate(fastest(m, stages, costs, limits=n, transfer=transfer), costs, transfer=transfer),
        "ZB-H2": simulate(zb_h2(n, m), costs, transfer=transfer),
    }


def idle_share(simulation: Simulation) -> float:
    """Return the idle share of the longest stage, in the paper's measure."""
    spans = [row[-1][1] + simulation.cost(row[-1][0]) - row[0][1] for row in simulation.starts]
    return 1 - max(simulation.busy) / max(spans)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate each setting. Nothing is computed, so the machine does not matter."""
    progress, rows = Progress(len(SETTINGS)), []
    for setting in SETTINGS:
        progress(f"{setting.model}, {setting.n} stages, {setting.m} micro-batches")
        ours = simulations(setting)
        rows.append(
            {
                **{"model": setting.model, "n": setting.n, "m": setting.m},
                "published": dict(zip(SCHEDULES, setting.published)),
                "ours": {name: idle_share(simulation) for name, simulation in ours.items()},
                "kept": {name: max(simulation.peaks) for name, simulation in ours.items()},
            }
        )
    return {"unit": "idle share of the longest stage; micro-batches that a device keeps", "rows": rows}


def published_bubbles(result: dict[str, Any]) -> str:
    """Return a table of the idle shares, published and ours, with the micro-batches that a device keeps."""

    def both(name: str) -> Any:
        def text(row: Row) -> str:
            return f"{row['published'][name]:.4f}, {row['ours'][name]:.4f} ({row['kept'][name]:.0f})"

        return text

    return table_of(result["rows"], {"model": "model", "n": "n", "m": "m", **{name: both(name) for name in SCHEDULES}})


def measure_named(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate each schedule by its name. Nothing is computed, so the machine does not matter."""
    rows = []
    for name, published in NAMED.items():
        for n, (idle, kept) in zip(DEVICES, published):
            places = usual_places(name, n)
            simulation = simulate(program(name, 4 * n, places), memory=[n / len(places)] * len(places))
            ours = {"idle": simulation.bubble, "kept": max(simulation.peaks)}
            rows.append({"name": name, "n": n, "published": {"idle": idle, "kept": kept}, "ours": ours})
    return {"unit": "idle share of a step; micro-batches that a device keeps", "rows": rows}


def published_schedules(result: dict[str, Any]) -> str:
    """Return a table of the schedules by their names: ours, and published."""

    def shown(of: Row) -> str:
        return f"{of['idle']:.1%} ({of['kept']:g})" if of["idle"] is not None else "-"

    columns: dict[str, Any] = {"schedule": "name"}
    for n in DEVICES:
        columns[f"n = {n}: ours, published"] = lambda row, n=n: f"{shown(row[n]['ours'])}, {shown(row[n]['published'])}"
    rows: dict[str, Row] = {}
    for row in result["rows"]:
        rows.setdefault(row["name"], {"name": row["name"]})[row["n"]] = row
    return table_of([*rows.values()], columns)
