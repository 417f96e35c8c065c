"""Draws what the other scripts measured as bars, ours beside its peers: time and memory.

    python benchmarks/draw.py results/*.json --to docs/figures.svg
    python benchmarks/draw.py results/*.json --to docs/figures.svg --workload Doge --workload S32768

It reads the JSON of models_performance.py (training: time and memory), sparse_performance.py (forward and backward,
added), forward_performance.py and backward_performance.py (forward and backward together), and call_performance.py
(decoding: of what goes several ways the fastest). Every workload has a panel and a scale of its own, from 0; where the
figures come from stands below.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from call_performance import AUTO, BY_HAND, DECODE, DENSE, named
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from performance import BACKWARD, BOTH, FORWARD, Timing, grouped, in_short
from report import describe, file_to_write

OURS = "flash_dmattn"
# What the scripts call an implementation, and what the picture does; others keep their name.
NAMES = {
    **dict.fromkeys(("cuda", "cpu", AUTO), OURS),
    "tiles": f"{OURS}, tiles",
    "sdpa": "SDPA",
    "sdpa-flash": "FlashAttention-2",
    "sdpa-cudnn": "cuDNN",
    "flex": "FlexAttention",
    "cudnn": "cuDNN, all keys",
    "cudnn-w": "cuDNN, dense S x w",
    BY_HAND: "top-k by hand",
    DENSE: "SDPA, all keys",
}
COLOURS = {True: "#1f6f8b", False: "#b8bfc6"}  # ours, and the peers'
COLUMNS, WIDTH, BAR = 3, 3.6, 0.26  # inches


@dataclass(frozen=True)
class Bar:
    name: str
    value: float | None
    instead: str = ""  # of the value, why there is none


@dataclass(frozen=True)
class Panel:
    workload: str
    what: str
    unit: str
    bars: list[Bar]


def panels_of(content: dict) -> Iterator[Panel]:
    """Of one file; none where it holds nothing that is drawn."""
    parts = content.get("parts", {})
    for workload, figures in by_workload(parts.get("train", [])).items():
        for what, quantity, scale, unit in (("a training step", "seconds", 1e3, "ms"), ("its peak", "gib", 1, "GiB")):
            bars = [bar(x["implementation"], x[quantity], scale, x["refusal"]) for x in figures]
            if any(one.value is not None for one in bars):
                yield Panel(workload, what, unit, bars)
    decoding = grouped([Timing(**timing) for timing in parts.get(DECODE, [])])
    for (workload, _, quantity), group in decoding.items():
        taken = {name: timing for name in (AUTO, BY_HAND, DENSE) if (timing := named(group, name)) is not None}
        if quantity == FORWARD and taken:
            bars = [bar(name, timing.seconds, 1e3, timing.refusal) for name, timing in taken.items()]
            yield Panel(workload, "a step of decoding", "ms", bars)
    yield from panels_of_timings(grouped([Timing(**timing) for timing in content.get("timings", [])]))


def panels_of_timings(groups: dict[tuple[str, str, str], dict[str, Timing]]) -> Iterator[Panel]:
    for workload, dtype in dict.fromkeys(key[:2] for key in groups):
        by_quantity = {quantity: group for (*of, quantity), group in groups.items() if of == [workload, dtype]}
        if BOTH in by_quantity:
            what, added = "forward and backward", [by_quantity[BOTH]]
        elif BACKWARD in by_quantity and FORWARD in by_quantity:
            what, added = "forward and backward", [by_quantity[FORWARD], by_quantity[BACKWARD]]
        elif FORWARD in by_quantity:
            what, added = "forward", [by_quantity[FORWARD]]
        else:
            continue
        bars = []
        for name in added[0]:
            refusals = [group[name].refusal for group in added if group[name].refusal]
            seconds = None if refusals else sum(group[name].seconds for group in added)
            bars.append(bar(name, seconds, 1e3, *refusals[:1]))
        yield Panel(workload, f"{what}, {dtype}", "ms", bars)


def by_workload(figures: list[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for figure in figures:
        groups.setdefault(figure["workload"], []).append(figure)
    return groups


def bar(name: str, value: float | None, scale: float, refusal: str = "") -> Bar:
    return Bar(NAMES.get(name, name), None if value is None else scale * value, in_short(refusal))


def draw_panel(axes: Axes, panel: Panel) -> None:
    places = range(len(panel.bars))
    values = [one.value or 0 for one in panel.bars]
    axes.barh(places, values, color=[COLOURS[one.name == OURS] for one in panel.bars], height=0.7)
    for place, one in zip(places, panel.bars):
        says = one.instead if one.value is None else f"{one.value:.3g} {panel.unit}"
        axes.annotate(says, (one.value or 0, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, [one.name for one in panel.bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max([*values, 1e-9]))  # room for the number
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(f"{panel.workload}\n{panel.what}", fontsize=9, loc="left")


def draw(panels: list[Panel], places: list[str], path: Path) -> None:
    """As SVG or PNG, by the name; the same panels give the same file."""
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    height = 0.7 + BAR * max(len(panel.bars) for panel in panels)
    figure = Figure(
        figsize=(WIDTH * columns, height * rows + 0.2 * len(places)), layout="constrained", facecolor="white"
    )
    cells = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(cells, panels):
        draw_panel(axes, panel)
    for axes in cells[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("\n".join(places), fontsize=7)
    with matplotlib.rc_context({"svg.hashsalt": "flash_dmattn", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def picture(path: str) -> Path:
    if Path(path).suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"must end with .svg or .png, got {path}")
    return file_to_write(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="+", type=Path, help="what the scripts wrote with --json")
    parser.add_argument("--to", required=True, type=picture, metavar="FILE", help="the picture, .svg or .png")
    parser.add_argument(
        "--workload", action="append", metavar="TEXT", help="only those with this in the name; may be repeated"
    )
    options = parser.parse_args(arguments)
    panels, places = [], {}
    for path in options.json:
        try:
            content = json.loads(path.read_text())
            found = list(panels_of(content))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            parser.error(f"{path}: {type(error).__name__}: {error}")
        chosen = [x for x in found if options.workload is None or any(text in x.workload for text in options.workload)]
        if chosen:
            panels += chosen
            places[describe(content["environment"])] = None
    if not panels:
        parser.error("nothing in these files is drawn" + (" for these workloads" if options.workload else ""))
    draw(panels, list(places), options.to)
    print(f"{len(panels)} panels: {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
