"""The tables of the results: how many architectures of each kind are exact, and which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.campaigns.architectures.catalogue import KINDS
from benchmarks.records import table

__all__ = ["architectures", "supported_models", "unsupported_models"]

Row = Mapping[str, Any]


def _of(result: Mapping[str, Any], kind: str) -> Sequence[Row]:
    return [row for row in result["rows"] if row["kind"] == kind]


def _exact(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["verdict"] == "exact"]


def supported_models(result: Mapping[str, Any]) -> str:
    """Return a table of the architectures whose every run equals the plain model's, by kind."""
    lines = []
    for kind in KINDS:
        names = sorted(row["name"] for row in _exact(_of(result, kind)))
        if names:
            prefix = f"{kind} "
            lines.append([kind, len(names), ", ".join(name.removeprefix(prefix) for name in names)])
    return table(lines, ["kind", "exact", "architectures"])


def unsupported_models(result: Mapping[str, Any]) -> str:
    """Return a table of the other architectures, with the reason."""
    refused = [row for row in result["rows"] if row["verdict"] != "exact"]
    return table([[row["name"], row["kind"], row["verdict"]] for row in refused], ["architecture", "kind", "verdict"])


def architectures(result: Mapping[str, Any]) -> str:
    """Return a table of the numbers of architectures that are exact, by kind."""
    lines = []
    for kind in (*KINDS, ""):
        rows = _of(result, kind) if kind else list(result["rows"])
        if rows:
            lines.append([kind or "all", len(rows), len(_exact(rows))])
    return table(lines, ["kind", "tried", "exact"])
