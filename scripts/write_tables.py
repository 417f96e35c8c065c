"""Writes the tables of README.md and docs/measured.md from benchmarks/results/h200.json.

python scripts/write_tables.py            # writes them between the markers <!-- table: NAME --> and <!-- end -->
python scripts/write_tables.py --check    # exit status 1 where a page differs; a test of benchmarks/ runs this
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from performance_bars import slower  # noqa: E402
from rows import BACKWARD, BOTH, FORWARD, Row, read  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "measured.md")
BLOCK = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
MIB, GIB = 2**20, 2**30
OURS = "flash_dmattn"

Text = Callable[[list[Row]], str]  # the rows of one workload to the text of a cell


# Cells


def significant(value: float) -> str:
    """Three digits."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


@dataclass(frozen=True)
class Figure:
    direction: str
    name: str = "seconds"
    scale: float = 1e3
    form: Callable[[float], str] = fixed(2)
    unit: str = ""

    def text(self, rows: list[Row], implementation: str) -> str | None:
        """None where nothing was measured; of several ways, "name: way", the best."""
        found = [
            row
            for row in rows
            if row.direction == self.direction and row.implementation.partition(": ")[0] == implementation
        ]
        values = [value for row in found if (value := row.get(self.name)) is not None]
        best = max if self.name == "tokens_per_second" else min
        return self.form(self.scale * best(values)) + self.unit if values else None


def cell(*implementations: str, of: Iterable[Figure], between: str = " / ") -> Text:
    """The figures of the first implementation that has one."""
    figures = list(of)

    def text(rows: list[Row]) -> str:
        for implementation in implementations:
            texts = [figure.text(rows, implementation) for figure in figures]
            if known := [one for one in texts if one is not None]:
                return between.join(known)
        return ""

    return text


def speedup(implementations: tuple[str, ...], over: str) -> Text:
    def text(rows: list[Row]) -> str:
        seconds = {row.implementation: row.seconds for row in rows if row.direction == BOTH}
        ours = [seconds[name] for name in implementations if name in seconds]
        return f"{seconds[over] / ours[-1]:.2f}" if ours and over in seconds else ""

    return text


def columns(names: Iterable[str], of: Iterable[Figure], **options) -> dict[str, Text]:
    """A column for each implementation, under its name."""
    return {name: cell(name, of=list(of), **options) for name in names}


# Tables


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        measured: what the cells hold, and their unit.
        columns: heading to the text of a cell; a column without text is left out.
        suite: with `workloads` empty, every workload of this suite with `needs` in its name is a line.
        workloads: (suite, workload) to the label of its line.
        commands: measure the rows again.
        notes: (label, heading) to the text of a cell that nothing was measured for.
    """

    measured: str
    columns: dict[str, Text]
    commands: tuple[str, ...]
    suite: str = ""
    needs: str = ""
    workloads: dict[tuple[str, str], str] = field(default_factory=dict)
    packages: tuple[str, ...] = ("torch", "cudnn", "triton")
    notes: dict[tuple[str, str], str] = field(default_factory=dict)

    def lines(self, rows: list[Row]) -> dict[tuple[str, str], str]:
        """(suite, workload) to the label of its line."""
        return self.workloads or {
            (row.suite, row.workload): row.workload
            for row in rows
            if row.suite == self.suite and self.needs in row.workload
        }

    def markdown(self, rows: list[Row]) -> str:
        lines = self.lines(rows)
        if not lines:
            return "\n\n".join(["Not measured yet.", "\n".join(f"    {line}" for line in self.commands)])
        groups = {key: [row for row in rows if (row.suite, row.workload) == key] for key in lines}
        empty = [key for key, group in groups.items() if not group]
        if empty:
            raise ValueError(f"{RESULTS.name} has no rows of {empty}")
        cells = {
            name: [self.notes.get((label, name)) or text(groups[key]) for key, label in lines.items()]
            for name, text in self.columns.items()
        }
        cells = {name: column for name, column in cells.items() if any(column)}  # of peers that were measured
        table = [["workload", *cells], ["---"] * (1 + len(cells))]
        table += [list(line) for line in zip(lines.values(), *cells.values())]
        body = "\n".join("| " + " | ".join(line) + " |" for line in table).replace("|  |", "| |")
        caption = textwrap.fill(f"{self.measured} {self.origin(groups, lines)}", 120, break_on_hyphens=False)
        return "\n\n".join([caption, body.replace("|  |", "| |"), "\n".join(f"    {line}" for line in self.commands)])

    def origin(self, groups: dict[tuple[str, str], list[Row]], lines: dict[tuple[str, str], str]) -> str:
        """The GPU, the versions, and the commits of the first implementation, which is ours."""
        first = next(iter(groups.values()))[0]
        versions = ", ".join(version_of(package, first.environment) for package in self.packages)
        commits: dict[str, list[str]] = {}
        for key, group in groups.items():
            of_ours = (row.commit for row in group if row.implementation == group[0].implementation)
            for commit in dict.fromkeys(of_ours):
                commits.setdefault(commit, []).append(lines[key])
        most = max(commits, key=lambda commit: len(commits[commit]))
        others = ", ".join(f"{commit} ({'; '.join(names)})" for commit, names in commits.items() if commit != most)
        origin = f"{most}, other rows at {others}" if others else most
        return f"{first.environment['device']}, {first.dtype}; {versions}. Measured at commit {origin}."


def version_of(package: str, environment: dict[str, object]) -> str:
    names = {"torch": "PyTorch", "cudnn": "cuDNN", "triton": "Triton"}
    version = str(environment[package])
    if package == "cudnn":
        number = int(version)
        version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return f"{names.get(package, package)} {version.partition('+')[0]}"


TWO = (Figure(FORWARD), Figure(BACKWARD))
THREE_DIGITS = (Figure(FORWARD, form=fixed(3)), Figure(BACKWARD, form=fixed(3)))
DECODE = [Figure(FORWARD, form=fixed(3))]
PREFILL = (Figure(FORWARD, form=fixed(3)), Figure(BOTH, form=fixed(3)))
STEP = (
    Figure("training step", form=significant, unit=" ms"),
    Figure("training step", "peak_bytes", 1 / GIB, significant, " GiB"),
)
TOKENS = [Figure("generated token", "tokens_per_second", 1, fixed(0))]
SERVED = [Figure("served token", "tokens_per_second", 1, fixed(0))]
PARALLEL = (Figure(FORWARD, form=fixed(1)), Figure(BOTH, form=fixed(1)))
SHARDED = ("flash_dmattn, zigzag", OURS)
UPDATE = "--device cuda --update benchmarks/results/h200.json"
TOP_K = "top-k mask, B1 H32/8 S{} D128 w{}"


def run(arguments: str) -> tuple[str, ...]:
    return (f"python benchmarks/run.py {arguments} {UPDATE}",)


def microseconds(name: str) -> Text:
    return cell(name, of=[Figure("host time", scale=1e6, form=fixed(0))])


def milliseconds(name: str, direction: str, digits: int) -> Text:
    return cell(name, of=[Figure(direction, form=fixed(digits))])


class Slower:
    """The workloads in which a peer is faster."""

    def markdown(self, rows: list[Row]) -> str:
        return slower(rows)


TABLES = {
    "slower": Slower(),
    "readme": Table(
        "Median time in ms, forward / backward with the gradient of the bias. S8192 to S131072: causal, each row sees "
        "the w keys of largest bias, 32 query heads, 8 KV heads, head dimension 128; without the selection of these "
        "keys, which takes 0.03 to 0.12 ms. The others: batch 2, 4096 tokens, 16 heads, head dimension 128.",
        {
            OURS: cell(OURS, of=TWO),
            "FlexAttention": cell("FlexAttention", of=TWO),
            "SDPA with the bias": cell("SDPA", of=TWO),
            "cuDNN, all keys, no bias": cell("cuDNN, all keys", "cuDNN", of=TWO),
        },
        (*run("sparse"), *run("dense")),
        workloads={
            ("sparse", TOP_K.format(8192, 1024)): "S8192, w 1024",
            ("dense", "bool mask of the keys of largest bias, B1 H32/8 S8192 D128 w1024"): "the same as a bool mask",
            ("sparse", TOP_K.format(32768, 2048)): "S32768, w 2048",
            ("sparse", TOP_K.format(131072, 2048)): "S131072, w 2048",
            ("dense", "dense bias [B,H,S,S], B2 H16 S4096 D128"): "dense bias [B,H,S,S]",
            ("dense", "key bias, B2 H16 S4096 D128"): "key bias",
            ("dense", "causal, B2 H16 S4096 D128"): "causal, no bias",
        },
        notes={("S131072, w 2048", "FlexAttention"): "no block mask of this size"},
    ),
    "dense": Table(
        "Median time in ms, forward / backward with the gradient of the bias.",
        {
            OURS: cell(OURS, of=TWO),
            "FlashAttention-4": cell("FlashAttention-4", of=TWO),
            "cuDNN": cell("cuDNN", of=TWO),
            "SDPA": cell("SDPA", of=TWO),
            "FlexAttention": cell("FlexAttention", of=TWO),
            "FlashAttention-2": cell("FlashAttention-2", of=TWO),
        },
        run("dense"),
        suite="dense",
    ),
    "sparse": Table(
        "Median time in ms, forward / backward with the gradient of the bias; the forward builds the key lists. "
        "`topk` makes the mask.",
        {
            "`topk`": milliseconds(OURS, "topk", 2),
            **columns([OURS, "FlexAttention", "cuDNN, all keys", "cuDNN, dense S x w"], TWO),
        },
        run("sparse"),
        suite="sparse",
        needs="H32/8 S",
        workloads={
            ("sparse", TOP_K.format(8192, 1024)): TOP_K.format(8192, 1024),
            ("sparse", TOP_K.format(32768, 2048)): TOP_K.format(32768, 2048),
            ("sparse", TOP_K.format(131072, 2048)): TOP_K.format(131072, 2048),
            ("sparse", "decode, top-k mask, B8 H32/8 Sk131072 D128 w2048"): "decode, lists made beforehand, "
            "B8 H32/8 Sk131072 D128 w2048",
        },
    ),
    "indices": Table(
        "Median time in ms, forward / backward.",
        columns([OURS, "flash_dmattn, top-k mask", "FlexAttention", "cuDNN, all keys", "cuDNN, dense S x w"], TWO),
        run("sparse --workload indices"),
        suite="sparse",
        needs="indices",
    ),
    "million": Table(
        "Median time in ms, peak memory of forward and backward with the inputs.",
        {
            "`topk`": milliseconds(OURS, "topk", 2),
            "key lists": milliseconds(OURS, "key lists", 2),
            "forward": milliseconds(OURS, FORWARD, 2),
            "backward": milliseconds(OURS, BACKWARD, 2),
            "peak, GiB": cell(OURS, of=[Figure(BOTH, "peak_bytes", 1 / GIB)]),
            "peak over q, k, v, out and their gradients": cell(OURS, of=[Figure(BOTH, "peak_over_tensors", 1)]),
        },
        run("sparse --workload S1048576"),
        suite="sparse",
        needs="S1048576",
    ),
    "decode": Table(
        "Median time of one call in ms.",
        columns([OURS, "top-k by hand", "top-k by hand, CUDA graph", "SDPA, all keys"], DECODE),
        run("decode"),
        suite="decode",
    ),
    "prefill": Table(
        "Median time of one call in ms: forward, forward and backward with the gradient of the bias.",
        columns([OURS, "cuDNN, all keys", "FlexAttention"], PREFILL, between=", "),
        run("prefill"),
        suite="prefill",
    ),
    "selection": Table(
        "Median GPU time in ms, 8 heads.",
        {
            "both": milliseconds(OURS, "selection", 3),
            "`topk`": milliseconds("flash_dmattn, topk", "selection", 3),
            "key lists": milliseconds("flash_dmattn, key lists", "selection", 3),
        },
        run("selection"),
        suite="selection",
    ),
    "serving": Table(
        "Median time of one call in ms. The share is the least time that memory bandwidth and matrix products allow, "
        "divided by the measured time.",
        {
            OURS: cell(OURS, of=DECODE),
            "share": cell(OURS, of=[Figure(FORWARD, "fraction_of_limit", 100, fixed(0), " %")]),
            "contiguous": cell("flash_dmattn, contiguous", of=DECODE),
            "CUDA graph": cell("flash_dmattn, CUDA graph", of=DECODE),
            "`batch_invariant`": cell("flash_dmattn, batch_invariant", of=DECODE),
            "part of a whole prefill": cell("flash_dmattn, its part of a whole prefill", of=DECODE),
            **columns(["top-k by hand", "SDPA, all keys", "FlexAttention"], DECODE),
            **columns(["FlashAttention-2, pages", "FlashAttention-4, pages"], DECODE),
        },
        run("serving"),
        suite="serving",
    ),
    "host": Table(
        "Median time in us until a call returns, B1 H8 S128 D64.",
        {OURS: microseconds(OURS), "SDPA": microseconds("SDPA")},
        run("host"),
        suite="host",
        packages=("torch",),
    ),
    "train": Table(
        "Median time of a training step and its peak memory, weights included.",
        columns([OURS, "SDPA", "eager"], STEP, between=", "),
        run("train"),
        suite="train",
        packages=("torch", "transformers"),
    ),
    "attention": Table(
        "Median time in ms of forward and backward with the gradient of the position bias.",
        columns([OURS, "SDPA", "eager"], [Figure(BOTH)]),
        run("attention"),
        suite="attention",
        packages=("torch", "transformers"),
    ),
    "relative": Table(
        "Median time in ms, forward / backward with the gradients of the learned parameters.",
        columns([OURS, "flash_dmattn, no bias", "flash_dmattn, dense bias", "SDPA", "FlexAttention"], TWO),
        run("relative"),
        suite="relative",
    ),
    "generate": Table(
        "Tokens per second.",
        columns([OURS, "SDPA", "eager"], TOKENS),
        run("generate --workload Doge"),
        suite="generate",
        workloads={
            ("generate", f"Doge, 4 layers, B{batch} Sk{seqlen}, static cache"): f"Doge, B{batch} Sk{seqlen}"
            for seqlen in (8192, 131072)
            for batch in (1, 8)
        },
        packages=("torch", "transformers"),
    ),
    "generate_batch": Table(
        "Tokens per second.",
        columns([OURS, "SDPA, all keys"], SERVED),
        run("generate_batch"),
        suite="generate_batch",
        packages=("torch", "transformers"),
    ),
    "triangle": Table(
        "Median time in ms, forward / backward with the gradient of the bias.",
        columns(["triangle_attention", "plain batch"], THREE_DIGITS) | columns(["cuEquivariance", "SDPA"], TWO),
        run("triangle"),
        suite="triangle",
        packages=("torch",),
    ),
    "parallel": Table(
        "Median time in ms: forward, forward and backward. Bytes are those of forward and backward.",
        {
            "one GPU": cell("one rank", of=PARALLEL, between=", "),
            "two GPUs": cell(*SHARDED, of=PARALLEL, between=", "),
            "speed-up": speedup(("flash_dmattn", "flash_dmattn, zigzag"), "one rank"),
            "one GPU, half the tokens": cell("one rank, S / ranks", of=PARALLEL, between=", "),
            "PyTorch's ring": cell("PyTorch's ring attention", of=PARALLEL, between=", "),
            "sent per GPU, MiB": cell(*SHARDED, of=[Figure(BOTH, "sent_bytes", 1 / MIB, significant)]),
            "peak per GPU, GiB": cell(*SHARDED, of=[Figure(BOTH, "peak_bytes", 1 / GIB, significant)]),
            "peak of the ring": cell("PyTorch's ring attention", of=[Figure(BOTH, "peak_bytes", 1 / GIB, significant)]),
        },
        (f"torchrun --nproc-per-node 2 benchmarks/run.py parallel {UPDATE}",),
        suite="parallel",
        packages=("torch",),
    ),
    "memory": Table(
        "Peak memory of forward and backward with the gradient of the bias, in MiB.",
        {
            "beyond the inputs": cell(OURS, of=[Figure(BOTH, "peak_bytes", 1 / MIB, fixed(0))]),
            "beyond inputs, outputs and gradients": cell(OURS, of=[Figure(BOTH, "extra_bytes", 1 / MIB, fixed(0))]),
            "the same, bytes for each element of (B, S, H, D)": cell(
                OURS, of=[Figure(BOTH, "extra_bytes_per_element", 1, fixed(1))]
            ),
        },
        run("memory"),
        suite="memory",
        packages=("torch",),
    ),
}


def page(text: str, rows: list[Row]) -> str:
    """The text with its tables."""
    return BLOCK.sub(lambda match: f"<!-- table: {match[1]} -->\n{TABLES[match[1]].markdown(rows)}\n<!-- end -->", text)


def main(arguments: list[str]) -> int:
    rows, differing = read(RESULTS), []
    for path in PAGES:
        text = path.read_text()
        if (written := page(text, rows)) != text:
            differing.append(path.name)
            if "--check" not in arguments:
                path.write_text(written)
    if differing and "--check" in arguments:
        print(f"{', '.join(differing)}: run `python scripts/write_tables.py`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
