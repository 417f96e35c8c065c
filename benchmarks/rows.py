"""Rows of measured figures: what a suite returns, and the file that keeps them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"
KEY = ("suite", "workload", "dtype", "direction", "implementation")
NOT_FIGURES = (*KEY, "refusal", "commit", "environment")


@dataclass(frozen=True)
class Row:
    """One implementation at one workload.

    Attributes:
        direction: FORWARD, BACKWARD, BOTH, or the step that is measured, such as "topk".
        figures: by name, as "seconds", "peak_bytes", "fraction_of_limit"; a list holds one number per rank.
        refusal: why there are no figures.
        commit, environment: where the figures come from; empty until `stamped`.
    """

    suite: str
    workload: str
    dtype: str
    direction: str
    implementation: str
    figures: dict[str, float | list[float]] = field(default_factory=dict)
    refusal: str = ""
    commit: str | None = None
    environment: dict[str, object] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in KEY)

    def get(self, figure: str) -> float | None:
        """The figure; of one number per rank the largest."""
        value = self.figures.get(figure)
        return max(value) if isinstance(value, list) else value

    @property
    def seconds(self) -> float | None:
        return self.get("seconds")


def stamped(rows: Iterable[Row], where: dict[str, object]) -> list[Row]:
    """The rows with the commit and the environment (`report.environment`) that measured them."""
    rest = {name: value for name, value in where.items() if name != "commit"}
    return [replace(row, commit=where["commit"], environment=rest) for row in rows]


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """`old` with rows of the same key replaced by those of `new`; rows of one suite and workload stay together."""
    rows = list(({row.key: row for row in old} | {row.key: row for row in new}).values())
    suites = list(dict.fromkeys(row.suite for row in rows))
    workloads = list(dict.fromkeys(row.workload for row in rows))
    return sorted(rows, key=lambda row: (suites.index(row.suite), workloads.index(row.workload)))


def read(path: Path) -> list[Row]:
    content = json.loads(path.read_text())
    environments = content["environments"]
    return [
        Row(
            *(entry[name] for name in KEY),
            {name: value for name, value in entry.items() if name not in NOT_FIGURES},
            entry.get("refusal", ""),
            entry["commit"],
            environments[entry["environment"]],
        )
        for entry in content["rows"]
    ]


def write(path: Path, rows: list[Row]) -> None:
    """One row a line; `environment` in a row is an index into `environments`."""
    environments: list[dict[str, object]] = []
    lines = []
    for row in rows:
        if row.environment not in environments:
            environments.append(row.environment)
        refusal = {"refusal": row.refusal} if row.refusal else {}
        where = {"commit": row.commit, "environment": environments.index(row.environment)}
        lines.append(dict(zip(KEY, row.key)) | row.figures | refusal | where)
    path.write_text(f'{{\n"environments": {listed(environments)},\n"rows": {listed(lines)}\n}}\n')


def listed(entries: list[dict[str, object]]) -> str:
    return "[\n  " + ",\n  ".join(json.dumps(finite(entry), allow_nan=False) for entry in entries) + "\n]"


def finite(value: object) -> object:
    """`value` with "inf" and "nan" for the numbers that JSON cannot write."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
