"""Bars for the performance page of the site, from benchmarks/results/h200.json: flash_dmattn and every peer that was
measured, with the ratio of their times and the fraction of the GPU's limit.

scripts/site_hooks.py adds them to the tables of docs/measured.md. scripts/write_tables.py uses `slower`, the table of
the workloads in which a peer is faster.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from rows import BACKWARD, BOTH, FORWARD, Row  # noqa: E402

OURS = ("flash_dmattn", "triangle_attention")
# Suites with peers.
SUITES = ("dense", "sparse", "prefill", "decode", "serving", "train", "attention", "generate", "generate_batch")
SUITES += ("triangle", "relative", "host")
# What computes less than the call, or is this library in another form.
NOT_COMPARED = "is compared without"  # a peer that takes no mask and no bias
NOT_PEERS = ("cuDNN, dense S x w", "plain batch")


@dataclass(frozen=True)
class Measured:
    """One implementation of a workload."""

    name: str
    seconds: float | None
    limit: float | None = None  # the part of the GPU's limit that it reaches
    refusal: str = ""


@dataclass(frozen=True)
class Comparison:
    """One workload: this library first, then its peers."""

    suite: str
    workload: str
    direction: str
    ours: Measured
    peers: list[Measured]


def is_shown(name: str) -> bool:
    return name in OURS or (name not in NOT_PEERS and not name.startswith(OURS))


def directions_of(rows: list[Row]) -> list[str]:
    """The directions whose sum is compared."""
    measured = {row.direction for row in rows if row.seconds is not None}
    if BOTH in measured:
        return [BOTH]
    if FORWARD in measured:
        return [FORWARD, BACKWARD] if BACKWARD in measured else [FORWARD]
    return sorted(measured - {BACKWARD, "topk", "key lists"})[:1]


def measured(name: str, rows: list[Row], directions: list[str]) -> Measured | None:
    """The fastest of several ways, "name: way", in each direction; None where not all directions were measured."""
    parts = []
    for direction in directions:
        found = [row for row in rows if row.direction == direction and row.implementation.partition(": ")[0] == name]
        timed = [row for row in found if row.seconds is not None]
        if not timed:
            refusal = next((row.refusal for row in found if row.refusal), "")
            if NOT_COMPARED in refusal:
                return None
            return Measured(name, None, refusal=refusal.splitlines()[0]) if refusal else None
        parts.append(min(timed, key=lambda row: row.seconds))
    seconds = sum(row.seconds for row in parts)
    limits = [row.get("fraction_of_limit") for row in parts]
    known = None not in limits
    return Measured(name, seconds, sum(x * row.seconds for x, row in zip(limits, parts)) / seconds if known else None)


def comparisons(rows: Iterable[Row], each_direction: bool = False) -> list[Comparison]:
    """Compares forward and backward together, or each."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.suite in SUITES:
            groups.setdefault((row.suite, row.workload), []).append(row)
    result = []
    for (suite, workload), group in groups.items():
        names = dict.fromkeys(row.implementation.partition(": ")[0] for row in group)
        shown = [name for name in names if is_shown(name)]
        sums = [[one] for one in (FORWARD, BACKWARD)] if each_direction else []
        for directions in [one for one in sums if one[0] in {row.direction for row in group}] or [directions_of(group)]:
            found = [one for name in shown if (one := measured(name, group, directions)) is not None]
            ours = [one for one in found if one.name in OURS and one.seconds is not None]
            peers = [one for one in found if one.name not in OURS]
            if ours and peers:
                direction = " and ".join(directions).replace(" + ", " and ")
                result.append(Comparison(suite, workload, direction, ours[0], peers))
    return result


def slower(rows: Iterable[Row]) -> str:
    """The table of all workloads in which a peer takes at most 0.99 of the time, in Markdown."""
    lines = ["| workload | direction | flash_dmattn | faster | |", "| --- | --- | --- | --- | --- |"]
    for one in comparisons(rows, each_direction=True):
        for peer in one.peers:
            if peer.seconds is not None and peer.seconds < 0.995 * one.ours.seconds:  # 1.00 where it is rounded
                times = (f"{1e3 * seconds:.3g} ms" for seconds in (one.ours.seconds, peer.seconds))
                cells = (f"{one.suite}: {one.workload}", one.direction, *times)
                ratio = f"{peer.name}, {peer.seconds / one.ours.seconds:.2f} of the time"
                lines.append("| " + " | ".join((*cells, ratio)) + " |")
    return "\n".join(lines)


def bar(one: Measured, ours: Measured, longest: float) -> str:
    name = f'<span class="bar-name">{html.escape(one.name)}</span>'
    if one.seconds is None:
        return f'<div class="bar">{name}<span class="bar-text">cannot: {html.escape(one.refusal)}</span></div>'
    ratio = one.seconds / ours.seconds
    kind = " ours" if one is ours else " faster" if ratio < 1 else ""
    texts = [f"{1e3 * one.seconds:.3g} ms"]
    texts += [] if one is ours else [f"{ratio:.2f} x" + (", faster" if ratio < 1 else "")]
    texts += [] if one.limit is None else [f"{100 * one.limit:.0f} % of the limit"]
    width = f"width: {100 * one.seconds / longest:.1f}%"
    track = f'<span class="bar-track"><span class="bar-fill" style="{width}"></span></span>'
    return f'<div class="bar{kind}">{name}{track}<span class="bar-text">{" · ".join(texts)}</span></div>'


def bars(comparison: Comparison, label: str) -> str:
    """HTML: a bar as long as the time for each implementation."""
    everyone = [comparison.ours, *comparison.peers]
    longest = max(one.seconds for one in everyone if one.seconds is not None)
    title = f"{html.escape(label)}: {comparison.direction}"
    lines = [f'<div class="bars"><p class="bars-title">{title}</p>']
    return "\n".join([*lines, *(bar(one, comparison.ours, longest) for one in everyone), "</div>"])
