"""The frame of all suites: arguments, the loop over workloads, tables, `--check`, and the files that are written."""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import fill

import torch
from peers import OURS
from problem import DTYPES, Inputs, Problem, make_inputs, shrunk
from report import CHANGES, commit, console, describe, environment, in_short, progress, sentence
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rows import Row, merged, read, stamped, write
from timing import Call, median_on_cuda, time_calls

from flash_dmattn.backends import NAMES, require

MIB, GIB = 2**20, 2**30
# Figures that tables show: unit and scale. Seconds are shown in the suite's unit.
SHOWN = {
    "fraction_of_limit": ("% of what an H200 can reach", 100.0),
    "over_sdpa": ("time over SDPA's, median of batches", 1.0),
    "peak_bytes": ("MiB at the peak", 1 / MIB),
    "peak_over_tensors": ("peak, over query, key, value, out and their gradients", 1.0),
    "extra_bytes": ("MiB beyond inputs, outputs and gradients", 1 / MIB),
    "extra_bytes_per_element": ("the same, bytes for each element of (B, S, H, D)", 1.0),
    "sent_bytes": ("MiB sent by the rank that sends most", 1 / MIB),
    "sent_over_budget": ("the same, over keys, values, gradients and bias of one window", 1.0),
    "tokens_per_second": ("tokens per second", 1.0),
    "loss": ("loss", 1.0),
}
UNITS = {"ms": 1e3, "us": 1e6}


@dataclass(frozen=True)
class Setting:
    """What a measurement needs beside its workload.

    Attributes:
        own: the backend of each of our implementations, by name.
        selected: the names after `--implementation`; empty means the suite's defaults.
        options: all arguments, for the suite's own.
    """

    suite: str
    device: str
    dtype: str
    samples: int = 3
    seed: int = 0
    own: dict[str, str | None] = field(default_factory=dict)
    selected: tuple[str, ...] = ()
    options: argparse.Namespace = field(default_factory=argparse.Namespace)

    def names(self, *default: str) -> list[str]:
        """The implementations to measure; OURS stands for all of `own`."""
        return [name for one in self.selected or default for name in (self.own if one == OURS else (one,))]

    def inputs(self, problem: Problem) -> Inputs:
        return make_inputs(problem, DTYPES[self.dtype], self.device, self.seed)

    def row(self, workload: str, direction: str, implementation: str, refusal: str = "", **figures) -> Row:
        known = {name: value for name, value in figures.items() if value is not None}
        return Row(self.suite, workload, self.dtype, direction, implementation, known, refusal)

    def time(
        self,
        workload: str,
        direction: str,
        makers: dict[str, Callable[[], Call]],
        limit: float | None = None,
        clock: Callable[[Call], float] | None = None,
    ) -> list[Row]:
        """`time_calls`, on CUDA by `median_on_cuda` unless another clock is given."""
        clock = clock or (median_on_cuda if self.device == "cuda" else None)
        return time_calls((self.suite, workload, self.dtype, direction), makers, self.samples, clock, limit)


@dataclass(frozen=True)
class Demand:
    """What `--check` requires: a figure is at most so many times that of the best peer, or without peers a number.

    Attributes:
        workload: how the workload's name begins.
        plus: a direction of our own whose figure is added.
        peer_direction: the peers' direction, where it is another than ours.
    """

    workload: str
    direction: str
    at_most: float
    peers: tuple[str, ...] = ()
    figure: str = "seconds"
    implementation: str = OURS
    plus: str = ""
    peer_direction: str = ""

    def missed(self, workload: str, rows: list[Row]) -> str | None:
        """A sentence where the figure is larger, or was not measured."""
        directions = [self.direction, *([self.plus] if self.plus else [])]
        ours = [value_of(best(rows, direction, self.implementation), self.figure) for direction in directions]
        taken, asked, of = sum(ours), self.at_most, ""
        if self.peers:
            peers = [best(rows, self.peer_direction or self.direction, peer, self.figure) for peer in self.peers]
            peers = [peer for peer in peers if peer is not None and peer.get(self.figure) is not None]
            peer = min(peers, key=lambda row: row.get(self.figure), default=None)
            taken /= value_of(peer, self.figure)
            beside = f" ({self.peer_direction})" if self.peer_direction else ""
            of = f" x {self.figure} of {' or '.join(self.peers) if peer is None else peer.implementation}{beside}"
        elif self.figure == "seconds":
            taken, asked, of = 1e3 * taken, 1e3 * asked, " ms"
        if taken <= asked:
            return None
        got = "not measured" if math.isnan(taken) else f"{taken:.3g}{of}"
        what = "" if self.figure == "seconds" or self.peers else f", {self.figure}"
        return f"{workload}, {' and '.join(directions[::-1])}{what}: {got}, at most {asked:.3g}{of} is allowed"


def best(rows: list[Row], direction: str, name: str, figure: str = "seconds") -> Row | None:
    """An implementation's row; where it has several ways, "name: way", the fastest, or the first that was refused."""
    ways = [
        row
        for row in rows
        if row.direction == direction and (row.implementation == name or row.implementation.startswith(f"{name}: "))
    ]
    measured = [row for row in ways if row.get(figure) is not None]
    return min(measured, key=lambda row: row.get(figure)) if measured else next(iter(ways), None)


def value_of(row: Row | None, figure: str) -> float:
    value = None if row is None else row.get(figure)
    return math.nan if value is None else value


def by_workload(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Groups the rows by workload and dtype."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.workload, row.dtype), []).append(row)
    return groups


def failures(demands: list[Demand], rows: list[Row], ours: str = OURS) -> list[str]:
    """A sentence for each demand on what was run that is missed; one sentence where no demand is on it.

    `ours` is the implementation that demands on OURS are checked for.
    """
    demands = [replace(x, implementation=ours) if x.implementation == OURS else x for x in demands]
    applied = [
        (demand, ", ".join(key), group)
        for key, group in by_workload(rows).items()
        for demand in demands
        if key[0].startswith(demand.workload) and any(row.direction == demand.direction for row in group)
    ]
    if not applied:
        names = dict.fromkeys(f"{demand.workload!r}" for demand in demands)
        return [f"--check: nothing was run of {', '.join(names)}"]
    return [sentence for demand, name, group in applied if (sentence := demand.missed(name, group)) is not None]


@dataclass(frozen=True)
class Suite:
    """Workloads and the function that measures one of them.

    Attributes:
        about: the help text; its first line says what is measured.
        workloads: by device; each has a `name`.
        measure: from a workload and a Setting to rows. An exception becomes a row with a refusal.
        implementations: the choices of `--implementation`.
        demands: by device, what `--check` requires.
        dtypes: by device, the default.
        threads: of the CPU, the default; None leaves PyTorch's.
        own: how the names of our implementations begin: their refusals make the exit status 1.
        arguments: adds options of the suite's own.
        choose: from the options and the workloads to those to run.
        start: runs first; returns whether this process prints and writes.
    """

    name: str
    about: str
    workloads: dict[str, list]
    measure: Callable[[object, Setting], list[Row]]
    implementations: tuple[str, ...] = ()
    demands: dict[str, list[Demand]] = field(default_factory=dict)
    dtypes: dict[str, list[str]] = field(default_factory=lambda: {"cpu": ["float32"], "cuda": ["bfloat16"]})
    samples: int = 3
    threads: int | None = 2
    unit: str = "ms"
    own: str = OURS
    has_backends: bool = False
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    choose: Callable[[argparse.Namespace, list], list] = lambda options, workloads: workloads
    start: Callable[[argparse.Namespace], bool] = lambda options: True


# Arguments


def file_to_write(path: str) -> Path:
    """An argument that names a file; a missing folder is found before anything is measured."""
    if not Path(path).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {Path(path).parent}")
    return Path(path)


def file_to_update(path: str) -> Path:
    """An argument that names a file of rows, or a new one; another file is found before anything is measured."""
    try:
        read(file_to_write(path))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError):
        raise argparse.ArgumentTypeError(f"{path} holds no rows of --json or --update") from None
    return Path(path)


def positive(number: str) -> int:
    if int(number) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return int(number)


def argument_parser(about: str, name: str) -> argparse.ArgumentParser:
    """With the options of everything that runs attention."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"run.py {name}", description=about, formatter_class=form)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=here, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write everything that was measured")
    return parser


def add_backends(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--backend", action="append", choices=NAMES, help=f"may be repeated (default: {default})")


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """The arguments; the device and the backends are available."""
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch finds no CUDA device")
    for name in getattr(options, "backend", None) or ():
        try:
            require(name)
        except RuntimeError as error:
            parser.error(str(error))
    return options


def suite_parser(suite: Suite) -> argparse.ArgumentParser:
    parser = argument_parser(suite.about, suite.name)
    parser.add_argument(
        "--update",
        type=file_to_update,
        metavar="FILE",
        help="replace the rows of the same key in this file, or make it",
    )
    parser.add_argument("--plot", type=file_to_write, metavar="FILE", help="draw the figures there, as PNG or SVG")
    parser.add_argument("--workload", default="", metavar="TEXT", help="only the workloads with this text in the name")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="may be repeated (default: bfloat16 on CUDA)")
    parser.add_argument("--shrink", type=positive, default=1, metavar="N", help="divide lengths and windows")
    parser.add_argument("--threads", type=positive, help=f"of the CPU (default: {suite.threads or 'all'})")
    parser.add_argument(
        "--samples", type=positive, default=suite.samples, help="where do_bench does not choose (default: %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="exit status 1 where a figure is worse than required")
    if suite.implementations:
        parser.add_argument(
            "--implementation", action="append", choices=suite.implementations, help="may be repeated (default: most)"
        )
    if suite.has_backends:
        add_backends(parser, "the device's kernels")
    suite.arguments(parser)
    return parser


def selected_workloads(suite: Suite, options: argparse.Namespace, parser: argparse.ArgumentParser) -> list:
    """The workloads to run, at their size; ends with a message where the options do not fit together."""
    available = suite.choose(options, suite.workloads.get(options.device, []))
    workloads = [workload for workload in available if options.workload in workload.name]
    if not suite.workloads.get(options.device):
        parser.error(f"--device {options.device}: this suite measures nothing there")
    if not workloads:
        parser.error(f"--workload: no workload has {options.workload!r} in its name")
    demands = suite.demands.get(options.device, [])
    if options.check and (options.shrink > 1 or not demands):
        parser.error("--check requires nothing of this device or with --shrink")
    if options.check and getattr(options, "implementation", None):
        names = [workload.name for workload in workloads]
        asked = [demand for demand in demands if any(name.startswith(demand.workload) for name in names)]
        if missing := {peer for demand in asked for peer in demand.peers} - set(options.implementation):
            parser.error(f"--check compares with {', '.join(sorted(missing))} too")
    if options.update and options.shrink > 1:
        parser.error("--update takes figures of full size, without --shrink")
    if options.update and (source := commit() or "").endswith(CHANGES):
        parser.error(f"--update takes figures of a commit, got {source}")
    return [shrunk(workload, options.shrink) for workload in workloads]


# The loop


def main(suite: Suite, arguments: list[str] | None = None) -> int:
    """The exit status: 1 where one of our implementations was refused or failed, or missed what --check requires."""
    parser = suite_parser(suite)
    options = parse(parser, arguments)
    workloads = selected_workloads(suite, options, parser)
    if threads := options.threads or suite.threads:
        torch.set_num_threads(threads)
    reports = suite.start(options)
    backends = getattr(options, "backend", None)
    own = {OURS if name == options.device else f"{OURS}, {name}": name for name in backends or [options.device]}
    names = tuple(getattr(options, "implementation", None) or ())

    on, where = console(quiet=not reports), environment(options.device)
    note = "" if options.shrink == 1 else f", lengths and windows / {options.shrink}"
    on.print(describe(where) + note, highlight=False)
    dtypes = options.dtype or suite.dtypes[options.device]
    rows: list[Row] = []
    with progress(on) as bar:
        task = bar.add_task("", total=len(workloads) * len(dtypes))
        for workload in workloads:
            for dtype in dtypes:
                bar.update(task, description=f"{workload.name}, {dtype}")
                setting = Setting(suite.name, options.device, dtype, options.samples, options.seed, own, names, options)
                rows += stamped(measured(suite, workload, setting), where)
                if reports:  # after each workload, in case a later one ends the process
                    save(rows, options)
                bar.advance(task)

    show(on, suite, rows)
    if options.plot and reports:
        from draw import draw, panels_of

        draw(list(panels_of(rows)), [describe(where)], options.plot)
    missed = failures(suite.demands[options.device], rows, next(iter(own))) if options.check and reports else []
    for failure in missed:
        on.print(f"[bold red]{escape(failure)}[/]")
    refused = any(row.refusal for row in rows if row.implementation.startswith(suite.own))
    return 1 if missed or refused else 0


def save(rows: list[Row], options: argparse.Namespace) -> None:
    if options.json:
        write(options.json, rows)
    if options.update:
        kept = read(options.update) if options.update.exists() else []
        write(options.update, merged(kept, rows))


def measured(suite: Suite, workload, setting: Setting) -> list[Row]:
    """The workload's rows, or one with the reason why there are none."""
    try:
        free_memory(setting.device)
        return list(suite.measure(workload, setting))
    except Exception as error:
        return [setting.row(workload.name, "", suite.own, refusal=sentence(error))]


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


# Tables


def show(on: Console, suite: Suite, rows: list[Row]) -> None:
    """A table for each figure, and below the reasons of what is missing."""
    for figure in ("seconds", *SHOWN):
        refused = figure == "seconds" and any(row.refusal for row in rows)
        if refused or any(row.get(figure) is not None for row in rows):
            on.print(table(suite, figure, rows))
    refusals: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.refusal:
            refusals.setdefault((row.implementation, row.refusal), []).append(row.workload)
    for (implementation, refusal), workloads in refusals.items():
        everywhere = {row.workload for row in rows} == set(workloads)
        places = "everywhere" if everywhere else ", ".join(dict.fromkeys(workloads))
        on.print(f"[yellow]{escape(implementation)}[/], {escape(places)}: {escape(refusal)}")


def table(suite: Suite, figure: str, rows: list[Row]) -> Table:
    """A line for each workload, dtype and direction, a column for each implementation.

    Of several ways, "name: way", the fastest is shown. Seconds have beside them how many times the first column's time
    they are.
    """
    unit, scale = (suite.unit, UNITS[suite.unit]) if figure == "seconds" else SHOWN[figure]
    names = dict.fromkeys(row.implementation.partition(": ")[0] for row in rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for header in (f"{suite.name}, {unit}", "dtype", ""):
        table.add_column(header)
    for name in names:
        table.add_column(escape(fill(name, 16)), justify="right", no_wrap=True)
    for (workload, dtype), group in by_workload(rows).items():
        for direction in dict.fromkeys(row.direction for row in group):
            cells = list(cells_of([best(group, direction, name, figure) for name in names], figure, scale))
            if figure == "seconds" or any(cells):
                table.add_row(*map(escape, (workload, dtype, direction, *cells)))
    return table


def cells_of(found: list[Row | None], figure: str, scale: float) -> Iterator[str]:
    first = value_of(found[0], figure)
    for place, row in enumerate(found):
        value = value_of(row, figure)
        if math.isnan(value):
            yield in_short(row.refusal) if row is not None and figure == "seconds" else ""
            continue
        way = row.implementation.partition(": ")[2] if figure == "seconds" else ""
        times = "" if place == 0 or figure != "seconds" or math.isnan(first) else f"{value / first:6.2f}x"
        digits = next((n for n, bound in ((3, 10), (2, 100), (1, 1000)) if abs(scale * value) < bound), 0)
        yield f"{scale * value:.{digits}f}{times}" + (f"\n{way}" if way else "")
