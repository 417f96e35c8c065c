"""Draws rows as bars: a panel for each workload, flash_dmattn beside its peers.

    python benchmarks/run.py draw benchmarks/results/h200.json --to figures.svg --workload Doge --workload "decode: B8"

Forward and backward of one workload are added. Each panel has its own scale, from 0. --workload is a text in "SUITE:
WORKLOAD"; where the figures come from stands below the panels.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import describe, in_short
from rows import BACKWARD, BOTH, FORWARD, Row, read

OURS, TRIANGLE = "flash_dmattn", "triangle_attention"
COLOURS = {True: "#1f6f8b", False: "#b8bfc6"}  # ours, and the peers'
COLUMNS, WIDTH, BAR = 3, 3.6, 0.26  # inches
GIB = 2**30
SIZES = {
    r"B1 ": "",
    r"B(\d+) ": r"batch \1, ",
    r"H(\d+)/(\d+) ": r"\1 query heads, \2 KV heads, ",
    r"H(\d+) ": r"\1 heads, ",
    r"Sk(\d+)": r"\1 keys,",
    r"S(\d+)": r"\1 tokens,",
    r"D(\d+)": r"head dimension \1",
}
# The suites that are drawn: a title, and the implementations where not all are drawn.
SUITES = {
    "dense": ("Attention", None),
    "sparse": ("Sparse attention", None),
    "prefill": ("Prefill", None),
    "decode": ("Decoding step", (OURS, "top-k by hand", "SDPA, all keys")),
    "train": ("Training step", None),
    "generate": ("Text generation", None),
    "triangle": ("Triangle attention", None),
}


@dataclass(frozen=True)
class Bar:
    name: str
    value: float | None
    instead: str = ""  # of the value, why there is none


@dataclass(frozen=True)
class Panel:
    key: str  # "suite: workload"
    title: str
    details: str
    unit: str
    bars: list[Bar]


def panels_of(rows: list[Row]) -> Iterator[Panel]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.suite, row.workload, row.dtype), []).append(row)
    for (suite, workload, dtype), group in groups.items():
        if suite not in SUITES:
            continue
        title, sizes = headline(suite, workload), spelled(workload)
        if directions := drawn_directions({row.direction for row in group if row.seconds is not None}):
            name = " and ".join(direction.replace(" + ", " and ") for direction in directions)
            name = "ms" if suite in ("train", "generate") else f"ms, {name}"
            bars = bars_of(suite, group, directions, "seconds", 1e3)
            yield Panel(f"{suite}: {workload}", title, f"{name}; {sizes}; {dtype}", "ms", bars)
        if suite == "train" and any(row.get("peak_bytes") is not None for row in group):
            bars = bars_of(suite, group, [group[0].direction], "peak_bytes", 1 / GIB)
            yield Panel(
                f"{suite}: {workload}",
                f"Memory of a {title[0].lower()}{title[1:]}",
                f"GiB at the peak; {sizes}; {dtype}",
                "GiB",
                bars,
            )


def headline(suite: str, workload: str) -> str:
    """What a reader must know first: "Training step, Doge, 8,192 tokens"."""
    kind = re.match(r"(?:(?!B\d)[^,\[])*", workload)[0].strip()
    if kind == "top-k mask":
        window = re.search(r" w(\d+)", workload)
        kind = f"{int(window[1]):,} keys per row"
    length = re.search(r"\bS(k?)(\d+)", workload)
    parts = [SUITES[suite][0], kind, f"{int(length[2]):,} {'keys' if length[1] else 'tokens'}" if length else ""]
    return ", ".join(part for part in parts if part)


def spelled(workload: str) -> str:
    """With the sizes of its name in words: "B2 H32/8 S4096" as "batch 2, 32 query heads, 8 KV heads, 4096 tokens"."""
    text = re.sub(r" w(\d+)", r", \1 visible keys per row", workload)
    for sign, words in SIZES.items():
        text = re.sub(rf"(?<![A-Za-z0-9,]){sign}", words, text)
    return text.replace(",,", ",").rstrip(",")


def drawn_directions(measured: set[str]) -> list[str]:
    """Those whose sum is drawn."""
    if BOTH in measured:
        return [BOTH]
    if FORWARD in measured:
        return [FORWARD, BACKWARD] if BACKWARD in measured else [FORWARD]
    return sorted(measured - {BACKWARD, "topk", "key lists"})[:1]


def bars_of(suite: str, group: list[Row], directions: list[str], figure: str, scale: float) -> list[Bar]:
    """A bar for each implementation; of several ways, "name: way", the fastest in each direction."""
    names = SUITES[suite][1] or dict.fromkeys(row.implementation.partition(": ")[0] for row in group)
    bars = []
    for name in names:
        mine = [row for row in group if row.implementation.partition(": ")[0] == name]
        found = [[row for row in mine if row.direction == direction] for direction in directions]
        if not all(found):
            continue
        values = [min((x for row in rows if (x := row.get(figure)) is not None), default=None) for rows in found]
        refusal = next((row.refusal for rows in found for row in rows if row.refusal), "")
        if in_short(refusal) == "refused":
            continue  # the peer does not support the workload
        total = None if None in values else scale * sum(values)
        bars.append(Bar(name, total, in_short(refusal) if total is None else ""))
    return bars


def draw_panel(axes: Axes, panel: Panel) -> None:
    places = range(len(panel.bars))
    values = [one.value or 0 for one in panel.bars]
    axes.barh(places, values, color=[COLOURS[one.name.startswith((OURS, TRIANGLE))] for one in panel.bars], height=0.7)
    for place, one in zip(places, panel.bars):
        text = one.instead if one.value is None else f"{one.value:.3g} {panel.unit}"
        axes.annotate(text, (one.value or 0, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, [one.name for one in panel.bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max([*values, 1e-9]))  # room for the number
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    details = fill(panel.details, 52, break_on_hyphens=False)
    axes.set_title(
        fill(panel.title, 33, break_on_hyphens=False),
        fontsize=9,
        fontweight="bold",
        loc="left",
        pad=6 + 8 * (1 + details.count("\n")),
    )
    axes.text(0, 1.02, details, fontsize=6.5, color="#555555", transform=axes.transAxes, va="bottom")


def draw(panels: list[Panel], places: list[str], path: Path) -> None:
    """As SVG or PNG, by the name; the same panels make the same file."""
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    height = 1.0 + BAR * max(len(panel.bars) for panel in panels)
    figure = Figure(
        figsize=(WIDTH * columns, height * rows + 0.2 * len(places)), layout="constrained", facecolor="white"
    )
    cells = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(cells, panels):
        draw_panel(axes, panel)
    for axes in cells[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("\n".join(["Shorter bars are better.", *places]), fontsize=7)
    with matplotlib.rc_context({"svg.hashsalt": "flash_dmattn", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def picture(path: str) -> Path:
    if Path(path).suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"must end with .svg or .png, got {path}")
    if not Path(path).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {Path(path).parent}")
    return Path(path)


def main(arguments: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="run.py draw", description=__doc__, formatter_class=form)
    parser.add_argument("json", nargs="+", type=Path, help="written with --json or --update")
    parser.add_argument("--to", required=True, type=picture, metavar="FILE", help="the picture, .svg or .png")
    parser.add_argument("--workload", action="append", metavar="TEXT", help="only these; may be repeated")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for path in options.json:
        try:
            rows += read(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"{path}: {type(error).__name__}: {error}")
    asked = options.workload or [""]
    selected = [row for row in rows if any(text in f"{row.suite}: {row.workload}" for text in asked)]
    panels = [panel for panel in panels_of(selected) if panel.bars]
    if not panels:
        parser.error("nothing in these files is drawn" + (" for these workloads" if options.workload else ""))
    keys = {panel.key for panel in panels}
    drawn = [row for row in selected if f"{row.suite}: {row.workload}" in keys]
    draw(panels, list(dict.fromkeys(describe(row.environment | {"commit": row.commit}) for row in drawn)), options.to)
    print(f"{len(panels)} panels: {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
