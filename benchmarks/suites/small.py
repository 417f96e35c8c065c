"""Small calls on the CPU beside SDPA: short sequences, decoding, image windows.

SDPA has its tensors in its own layout, (B, H, S, D), and grouped heads as such. Both take turns, in batches of a few
milliseconds. Times are the least of all batches; "over_sdpa" is the median of our time over SDPA's, batch by batch, so
that other load on the machine slows both alike.
"""

import statistics
import time
from dataclasses import dataclass

import torch
from frame import Demand, Setting, Suite
from peers import OURS, SDPA, sdpa_in_its_layout, whole_call
from problem import Problem, named, square
from rows import BOTH, FORWARD, Row
from timing import Call, call_for

from flash_dmattn import flash_dmattn_func

BATCH_SECONDS = 0.01


@dataclass(frozen=True)
class Small:
    problem: Problem
    directions: tuple[str, ...] = (FORWARD,)
    at_most: float = 1 / 0.8  # times SDPA's time, with --check

    @property
    def name(self) -> str:
        return self.problem.name


def small(label: str, *sizes: int, directions: tuple[str, ...] = (FORWARD,), at_most: float = 1 / 0.8, **options):
    return Small(named(label, square("", *sizes, **options)), directions, at_most)


def few_rows(batch: int, heads: int, kv_heads: int, rows: int, keys: int, head_dim: int) -> Small:
    problem = named("decode", square("", batch, heads, rows, head_dim, kv_heads=kv_heads, seqlen_k=keys))
    return Small(problem)


BOTH_DIRECTIONS = (FORWARD, BOTH)
WORKLOADS = [
    small("host time", 1, 1, 16, 16, directions=BOTH_DIRECTIONS, at_most=1 / 0.5),
    few_rows(8, 8, 8, 1, 2048, 64),
    few_rows(1, 32, 8, 1, 4096, 128),
    few_rows(1, 8, 8, 1, 512, 64),
    few_rows(1, 8, 8, 8, 2048, 64),
    small("image windows, bias [1,H,S,S]", 256, 4, 49, 32, directions=BOTH_DIRECTIONS, bias="1 H Sq Sk"),
    small("short", 1, 8, 128, 64, directions=BOTH_DIRECTIONS),
]
DEMANDS = [
    Demand(one.name, direction, one.at_most, figure="over_sdpa") for one in WORKLOADS for direction in one.directions
]


def compare(calls: list[Call], samples: int) -> tuple[float, float, float]:
    """The least seconds of two calls, and the median of the first's over the second's."""

    def seconds(call: Call, times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - started) / times

    for call in calls:
        call()
    times = [max(1, int(BATCH_SECONDS / seconds(call, 3))) for call in calls]
    batches = [[seconds(call, n) for call, n in zip(calls, times)] for _ in range(samples)]
    first, second = map(min, zip(*batches))
    return first, second, 1 / statistics.median(b / a for a, b in batches)


def measure(one: Small, setting: Setting) -> list[Row]:
    rows = []
    for threads in [setting.options.threads] if setting.options.threads else [2, 1]:
        torch.set_num_threads(threads)
        inputs = setting.inputs(one.problem)
        name = f"{one.name}, {threads} thread{'s' if threads > 1 else ''}"
        for direction in one.directions:
            given = inputs if direction == FORWARD else inputs.requiring_grad()
            calls = [
                call_for(direction, whole_call(flash_dmattn_func, given), given.dout),
                call_for(direction, sdpa_in_its_layout(given), given.dout.transpose(1, 2).contiguous()),
            ]
            ours, theirs, over = compare(calls, setting.samples)
            rows.append(setting.row(name, direction, OURS, seconds=ours, over_sdpa=over))
            rows.append(setting.row(name, direction, SDPA, seconds=theirs))
    return rows


SUITES = {
    "small": Suite(
        "small",
        __doc__,
        {"cpu": WORKLOADS},
        measure,
        demands={"cpu": DEMANDS},
        dtypes={"cpu": ["float32", "bfloat16"]},
        samples=25,
        unit="us",
    )
}
