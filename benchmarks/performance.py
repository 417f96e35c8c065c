"""Times the same work through SDPA, FlexAttention and ours, for forward_performance.py and backward_performance.py.

SDPA takes mask and bias as one float mask and FlexAttention a block mask; both are made beforehand and not timed. SDPA
chooses its own kernel; "sdpa-flash" is its FlashAttention-2 and "sdpa-cudnn" cuDNN's, without mask and bias. Of a
packed batch ours is told where the sequences lie, in numbers on the GPU; the others know that they are equally long.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from problem import DTYPES, Inputs, Problem, causal_pairs, make_inputs
from report import (
    REFUSALS,
    add_common,
    argument_parser,
    console,
    describe,
    environment,
    file_to_write,
    parse,
    progress,
    require_workloads,
    sentence,
    write_json,
)
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_dmattn import KeyIntervalMask, flash_dmattn_func_auto, flash_dmattn_varlen_func
from flash_dmattn.backends import flex, reference

# What an NVIDIA H200 reaches, measured: 16-bit matrix products, and copies.
PEAK_FLOPS = 790e12
PEAK_BYTES = 4.3e12

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"
CHECKED = "random mask, key bias"  # on the CPU


def square(name: str, batch: int, heads: int, seqlen: int, head_dim: int, **options) -> Problem:
    """As many keys as rows, and as many key/value heads as heads unless the options say otherwise."""
    options = {"kv_heads": heads, "seqlen_q": seqlen, "seqlen_k": seqlen} | options
    return Problem(name, batch=batch, heads=heads, head_dim=head_dim, **options)


def sliding_window(seqlen: int, device: str) -> KeyIntervalMask:
    return KeyIntervalMask.sliding_window(seqlen, seqlen, min(1024, seqlen), device=device)


def documents(seqlen: int, device: str) -> KeyIntervalMask:
    return KeyIntervalMask.documents(ids=torch.arange(seqlen, device=device) // min(700, seqlen))


LONG = {"kv_heads": 4, "is_causal": True}
TOP_W = {"kv_heads": 8, "is_causal": True, "bias": "B Hkv 1 Sk"}
WORKLOADS = {
    "cpu": [
        square(CHECKED, 1, 8, 2048, 64, mask="B H Sq Sk", bias="B H 1 Sk"),
        square("causal", 1, 8, 2048, 64, is_causal=True),
        square("dynamic mask, w 256", 1, 8, 2048, 64, window=256, **TOP_W),
    ],
    "cuda": [
        square("no mask, no bias, D64", 2, 16, 4096, 64),
        square("no mask, no bias, D128", 2, 16, 4096, 128),
        square("causal, D128", 2, 16, 4096, 128, is_causal=True),
        square("causal, D256", 2, 16, 4096, 256, is_causal=True),
        square("bias [1,H,S,S], D64", 2, 16, 4096, 64, bias="1 H Sq Sk"),
        square("bias [1,H,S,S], D128", 2, 16, 4096, 128, bias="1 H Sq Sk"),
        square("bias [B,H,S,S], D128", 2, 16, 4096, 128, bias="B H Sq Sk"),
        square("key bias, D128", 2, 16, 4096, 128, bias="B H 1 Sk"),
        square("pair bias, key mask", 384, 4, 384, 32, mask="B 1 1 Sk", bias="1 H Sq Sk"),
        square("dynamic mask, w 1024", 1, 32, 8192, 128, window=1024, **TOP_W),
        square("long causal", 1, 16, 16384, 128, **LONG),
        square("sliding window 1024", 1, 16, 16384, 128, intervals=sliding_window, **LONG),
        square("documents of 700", 1, 16, 16384, 128, intervals=documents, **LONG),
        square("packed, 32 x 512", 32, 16, 512, 128, packed=True, **LONG),
        square("decode, w 2048", 8, 32, 131072, 128, seqlen_q=1, window=2048, **TOP_W),
    ],
}


# The implementations: each gives the function to time, and what it is differentiated in.


@dataclass(frozen=True)
class Work:
    forward: Callable[[], Tensor]  # gives (B, Sq, H, D)
    leaves: list[Tensor]


def ours(backend: str, inputs: Inputs) -> Work:
    if inputs.problem.packed and backend == inputs.query.device.type:  # the others have no packed batches
        return packed(inputs)
    attention = flash_dmattn_func_auto(backend)
    return Work(lambda: inputs.attend(attention)[0], list(inputs.leaves().values()))


def packed(inputs: Inputs) -> Work:
    problem, leaves = inputs.problem, [inputs.query, inputs.key, inputs.value]
    rows = torch.arange(problem.batch + 1, dtype=torch.int32, device=inputs.query.device) * problem.seqlen_q

    def forward() -> Tensor:
        tensors = [leaf.flatten(0, 1) for leaf in leaves]
        lengths = (rows, rows, problem.seqlen_q, problem.seqlen_k)
        out = flash_dmattn_varlen_func(*tensors, None, None, *lengths, is_causal=problem.is_causal)
        return out.unflatten(0, (problem.batch, -1))

    return Work(forward, leaves)


def needs_float_mask(inputs: Inputs) -> bool:
    problem = inputs.problem
    # PyTorch aligns causality to the top left corner.
    causal_in_mask = problem.is_causal and problem.seqlen_q != problem.seqlen_k
    return inputs.mask is not None or inputs.bias is not None or causal_in_mask


def sdpa(inputs: Inputs) -> Work:
    problem = inputs.problem
    leaves = [inputs.query, inputs.key, inputs.value]
    needs_mask = needs_float_mask(inputs)
    mask = float_mask(inputs).requires_grad_(inputs.query.requires_grad) if needs_mask else None

    def forward() -> Tensor:
        query, key, value = leaves
        if problem.kv_heads < problem.heads:  # not all of its kernels take enable_gqa=True
            key, value = (x.repeat_interleave(problem.heads // problem.kv_heads, dim=2) for x in (key, value))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        is_causal = problem.is_causal and not needs_mask
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal).transpose(1, 2)

    return Work(forward, [*leaves, mask] if needs_mask else leaves)


@torch.no_grad()
def float_mask(inputs: Inputs) -> Tensor:
    """Mask, bias and causality as SDPA takes them: added to the scores, in query's dtype."""
    problem, query = inputs.problem, inputs.query
    visible = causal_pairs(problem, query.device) if problem.is_causal else query.new_ones(1, 1, 1, 1, dtype=torch.bool)
    if inputs.mask is not None:
        visible = visible & reference.expand_shared(inputs.bool_mask(), problem.batch, problem.heads)
    bias = query.new_zeros(1, 1, 1, problem.seqlen_k)
    if inputs.bias is not None:
        bias = reference.expand_shared(inputs.bias, problem.batch, problem.heads).to(query.dtype)
    return torch.where(visible, bias, -torch.inf)


def sdpa_by(backend: SDPBackend, name: str) -> Callable[[Inputs], Work]:
    """SDPA by one of its kernels alone, without mask and bias."""

    def peer(inputs: Inputs) -> Work:
        if needs_float_mask(inputs):
            raise ValueError(f"{name} is compared without mask and bias")
        work = sdpa(inputs)

        def forward() -> Tensor:
            with sdpa_kernel(backend):
                return work.forward()

        return Work(forward, work.leaves)

    return peer


def flex_attention(inputs: Inputs) -> Work:
    # Its compiled backward otherwise reuses saved tensors as scratch memory, and can run only once.
    functorch_config.donated_buffer = False
    problem = inputs.problem
    block_mask = flex.block_mask_of(inputs.query, inputs.key, inputs.mask, problem.is_causal)
    options = {"softmax_scale": problem.head_dim**-0.5, "is_causal": problem.is_causal, "softcap": problem.softcap}
    tensors = (inputs.query, inputs.key, inputs.value, None, inputs.bias)

    def forward() -> Tensor:
        return flex.attention(*tensors, **options, deterministic=False, block_mask=block_mask)[0]

    return Work(forward, list(inputs.leaves().values()))


PEERS = {
    "sdpa": sdpa,
    "sdpa-flash": sdpa_by(SDPBackend.FLASH_ATTENTION, "FlashAttention-2"),
    "sdpa-cudnn": sdpa_by(SDPBackend.CUDNN_ATTENTION, "cuDNN"),
    "flex": flex_attention,
}


# Timing


def call_for(quantity: str, work: Work, dout: Tensor) -> Callable[[], object]:
    """The call whose time is the quantity."""
    if quantity == FORWARD:
        return work.forward
    if quantity == BOTH:
        return lambda: torch.autograd.grad(work.forward(), work.leaves, dout)
    out = work.forward()
    return lambda: torch.autograd.grad(out, work.leaves, dout, retain_graph=True)


def median_on_cuda(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(call, warmup=100, rep=500, return_mode="median") / 1e3


def medians_on_cpu(calls: dict[str, Callable[[], object]], samples: int) -> dict[str, float]:
    """Taken in turns, so that what else the machine does slows all of them alike."""
    seconds = {name: [] for name in calls}
    for _ in range(samples):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def medians(calls: dict[str, Callable[[], object]], samples: int, device: str) -> dict[str, float]:
    """The seconds that each call takes."""
    if device == "cpu":
        return medians_on_cpu(calls, samples)
    return {name: median_on_cuda(call) for name, call in calls.items()}


@dataclass(frozen=True)
class Timing:
    workload: str
    dtype: str
    quantity: str
    implementation: str
    seconds: float | None = None
    refusal: str = ""  # why there is no time
    fraction_of_limit: float | None = None


def time_workload(
    problem: Problem,
    dtype: str,
    quantities: list[str],
    builders: dict[str, Callable],
    seed: int,
    samples: int,
    device: str,
) -> list[Timing]:
    """Every quantity of every implementation, on one problem."""
    # FlexAttention compiled for one shape is what a user has, not code that was generalized from two.
    torch.compiler.reset()
    inputs = make_inputs(problem, DTYPES[dtype], device, seed)
    inputs = inputs if quantities == [FORWARD] else inputs.requiring_grad()
    timings = []
    for quantity in quantities:
        makers = {name: partial(make_call, quantity, build, inputs) for name, build in builders.items()}
        clock = median_on_cuda if device == "cuda" else None
        timings += time_calls((problem.name, dtype, quantity), makers, samples, clock, limit_of(quantity, inputs))
    return timings


def make_call(quantity: str, build: Callable[[Inputs], Work], inputs: Inputs) -> Callable[[], object]:
    return call_for(quantity, build(inputs), inputs.dout)


def time_calls(
    key: tuple[str, str, str],
    makers: dict[str, Callable[[], Callable[[], object]]],
    samples: int,
    clock: Callable[[Callable[[], object]], float] | None = None,
    limit: float | None = None,
    refused: tuple[type[Exception], ...] = REFUSALS,
) -> list[Timing]:
    """Of one workload, dtype and quantity: the seconds of the call that each maker gives, or why there are none.

    `clock` times one call; what that holds is free again before the next is made. None takes `samples` of all of them
    on the CPU, in turns.
    """
    calls, seconds, refusals = {}, {}, {}
    for name, make in makers.items():
        try:
            if clock is None:
                calls[name] = called_once(make)
            else:
                seconds[name] = clock(called_once(make))
        except refused as error:
            refusals[name] = sentence(error)
    seconds |= medians_on_cpu(calls, samples)
    fractions = {name: limit / taken for name, taken in seconds.items() if limit is not None}
    return [Timing(*key, name, seconds.get(name), refusals.get(name, ""), fractions.get(name)) for name in makers]


def called_once(make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    call = make()
    call()
    return call


# The limit


def limit_of(quantity: str, inputs: Inputs, mask_is_given: bool = True) -> float | None:
    """`least_seconds` where it holds: on CUDA, of 16 bits."""
    query = inputs.query
    return least_seconds(quantity, inputs, mask_is_given) if query.is_cuda and query.element_size() == 2 else None


def least_seconds(quantity: str, inputs: Inputs, mask_is_given: bool = True) -> float:
    """No implementation can take less on an H200: it must multiply every visible pair and move every tensor once."""
    if quantity == BOTH:
        return sum(least_seconds(one, inputs, mask_is_given) for one in (FORWARD, BACKWARD))
    problem = inputs.problem
    mask = size(inputs.mask) if mask_is_given else 0
    rows_of_key = rows_that_see(inputs)
    seen = (rows_of_key > 0).unflatten(1, (problem.kv_heads, -1)).any(dim=2)
    rows, keys = size(inputs.query), size(inputs.key) + size(inputs.value)
    lse = 4 * problem.batch * problem.heads * problem.seqlen_q
    keys_seen = keys * seen.sum().item() / seen.numel()
    if quantity == FORWARD:
        products = 2  # scores, out
        moved = 2 * rows + keys_seen + mask + size(inputs.bias) + lse
    else:
        products = 5  # scores, dp, dq, dk, dv
        moved = 4 * rows + keys_seen + keys + mask + 2 * size(inputs.bias) + lse
    flops = products * 2 * problem.head_dim * rows_of_key.sum().item()
    return max(flops / PEAK_FLOPS, moved / PEAK_BYTES)


def rows_that_see(inputs: Inputs) -> Tensor:
    """How many rows see a key, (B, H, Sk)."""
    problem, mask = inputs.problem, inputs.mask
    if isinstance(mask, KeyIntervalMask):  # of `window`: -inf is in it
        start, end = (rows.clamp(0, problem.seqlen_q) for rows in (mask.start, mask.end))
    elif mask is None and inputs.bias is None:
        start = torch.zeros(1, 1, problem.seqlen_k, dtype=torch.int32, device=inputs.query.device)
        end = start + problem.seqlen_q
    else:
        return reference.visible_scores(inputs.query, inputs.key, mask, inputs.bias, problem.is_causal).sum(dim=2)
    if problem.is_causal:
        own = torch.arange(problem.seqlen_k, device=start.device) - (problem.seqlen_k - problem.seqlen_q)
        start = torch.maximum(start, own)
    rows = (end - start).clamp(min=0)
    return rows.repeat_interleave(problem.heads // rows.shape[1], dim=1).expand(problem.batch, -1, -1)


def size(tensor: Tensor | KeyIntervalMask | None) -> int:
    """Bytes in memory: what is expanded counts once."""
    if isinstance(tensor, KeyIntervalMask):
        return size(tensor.start) + size(tensor.end)
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


# What is shown


def ratio(timings: dict[str, Timing], name: str, peer: str) -> float | None:
    """How many times as fast as the peer."""
    taken, its = (timings[who].seconds if who in timings else None for who in (name, peer))
    return its / taken if taken is not None and its is not None else None


def grouped(timings: list[Timing]) -> dict[tuple[str, str, str], dict[str, Timing]]:
    """By implementation, for each workload, dtype and quantity."""
    groups: dict[tuple[str, str, str], dict[str, Timing]] = {}
    for timing in timings:
        groups.setdefault((timing.workload, timing.dtype, timing.quantity), {})[timing.implementation] = timing
    return groups


def table(timings: list[Timing], names: list[str], peers: list[str]) -> Table:
    pairs = [(name, peer) for name in names for peer in peers]
    on_cuda = any(timing.fraction_of_limit is not None for timing in timings)
    table = Table("workload", "dtype", "medians of")
    for header in (
        *(f"{name} [ms]" for name in (*names, *peers)),
        *(f"{name}'s speed over {peer}'s" for name, peer in pairs),
        *(f"{name}, of the H200's limit" for name in names if on_cuda),
    ):
        table.add_column(header.replace("[", r"\["), justify="right", max_width=14)
    for key, group in grouped(timings).items():
        timed = [group.get(name, Timing(*key, name)) for name in (*names, *peers)]
        milliseconds = [shown(timing.seconds, "{:.2f}", 1e3) or in_short(timing.refusal) for timing in timed]
        ratios = [shown(ratio(group, *pair), "{:.2f} x") for pair in pairs]
        fractions = [shown(group[name].fraction_of_limit, "{:.0%}") for name in names if on_cuda]
        table.add_row(*map(escape, key), *milliseconds, *ratios, *fractions)
    return table


def in_short(refusal: str) -> str:
    short = {"out of memory": "no memory", "left out": "left out"}
    return next((short[text] for text in short if text in refusal), "refused" if refusal else "")


def shown(number: float | None, form: str, scale: float = 1.0) -> str:
    return "" if number is None else form.format(scale * number)


def plot(timings: list[Timing], quantities: list[str], where: str, path: Path) -> None:
    """A panel for each quantity: milliseconds of every implementation, workload by workload."""
    groups = grouped(timings)
    labels = list(dict.fromkeys(f"{workload}\n{dtype}" for workload, dtype, _ in groups))
    figure = Figure(figsize=(2 + 1.6 * len(labels), 4 * len(quantities)), layout="constrained")
    for axes, quantity in zip(figure.subplots(len(quantities), squeeze=False)[:, 0], quantities):
        for name in dict.fromkeys(timing.implementation for timing in timings):
            seconds = [group[name].seconds for (*_, timed), group in groups.items() if timed == quantity]
            axes.plot([math.nan if s is None else 1e3 * s for s in seconds], "o", label=name)
        axes.set(title=quantity, ylabel="ms", yscale="log")
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        axes.margins(x=0.5 / len(labels))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.supxlabel(where, fontsize=7)
    figure.savefig(path, format="png", dpi=150)


@dataclass(frozen=True)
class Demand:
    workload: str
    quantity: str
    peer: str
    speed: float  # at least, over the peer's


def of_hopper(workload: str, peer: str, forward: float, backward: float) -> list[Demand]:
    """What is asked for on an H200: at most so many times the peer's time."""
    return [Demand(workload, FORWARD, peer, 1 / forward), Demand(workload, BACKWARD, peer, 1 / backward)]


DEMANDS = {
    "cpu": [Demand(CHECKED, FORWARD, "sdpa", 0.8), Demand(CHECKED, BOTH, "sdpa", 2.0)],
    "cuda": [
        *of_hopper("no mask, no bias, D64", "sdpa-cudnn", 1.20, 1.35),
        *of_hopper("no mask, no bias, D128", "sdpa-cudnn", 1.15, 1.30),
        *of_hopper("causal, D128", "sdpa-cudnn", 1.20, 1.35),
        *of_hopper("causal, D256", "sdpa-cudnn", 1.35, 1.40),
        *of_hopper("bias [1,H,S,S], D64", "flex", 0.75, 0.60),
        *of_hopper("bias [1,H,S,S], D128", "flex", 0.80, 0.60),
        *of_hopper("bias [B,H,S,S], D128", "flex", 0.80, 0.50),
        *of_hopper("key bias, D128", "flex", 0.85, 0.55),
        *of_hopper("pair bias, key mask", "flex", 0.75, 0.65),
        *of_hopper("dynamic mask, w 1024", "flex", 0.65, 0.60),
        *of_hopper("long causal", "flex", 0.80, 0.75),
        *of_hopper("sliding window 1024", "flex", 0.80, 0.75),
        *of_hopper("documents of 700", "flex", 0.80, 0.75),
        *of_hopper("packed, 32 x 512", "sdpa-flash", 0.70, 0.75),
    ],
}


def too_slow(timings: list[Timing], name: str, demands: list[Demand]) -> list[str]:
    """A sentence for each speed that --check asks for and that was not reached, or not measured."""
    asked = [
        (key, demand, ratio(group, name, demand.peer))
        for key, group in grouped(timings).items()
        for demand in demands
        if key[0] == demand.workload and key[2] == demand.quantity
    ]
    if not asked:
        names = dict.fromkeys(f"'{demand.workload}'" for demand in demands)
        return [f"--check: nothing was run of {', '.join(names)}"]
    return [
        f"{', '.join(key)}: {shown(speed, '{:.2f}') or 'unknown'} x {demand.peer}'s speed, "
        f"at least {demand.speed:.2f} is asked for"
        for key, demand, speed in asked
        if speed is None or speed < demand.speed
    ]


def main(quantities: list[str], description: str, arguments: list[str] | None = None) -> int:
    """The exit status: 1 where ours gave no time, or was slower than --check allows."""
    parser = argument_parser(description, backends="the device's kernels")
    parser.add_argument("--peer", action="append", choices=PEERS, help="may be repeated (default: sdpa; on CUDA all)")
    add_common(
        parser,
        dtype={"action": "append", "help": "may be repeated (default: bfloat16; float32 on the CPU)"},
        workload={},
        shrink={"help": "divide lengths and windows, for a quick look"},
        threads={},
        samples={"default": 7},
        check={},
    )
    parser.add_argument("--plot", type=file_to_write, metavar="FILE", help="draw the times there, as PNG")
    options = parse(parser, arguments)
    on_cpu = options.device == "cpu"
    names = options.backend or [options.device]
    peers = options.peer or (["sdpa"] if on_cpu else list(PEERS))
    dtypes = options.dtype or (["float32", "bfloat16"] if on_cpu else ["bfloat16"])
    demands = [demand for demand in DEMANDS[options.device] if demand.quantity in quantities]
    if options.check and (missing := {demand.peer for demand in demands} - set(peers)):
        parser.error(f"--check compares with {', '.join(sorted(missing))} too")
    problems = [
        shrunk(problem, options.shrink)
        for problem in WORKLOADS[options.device]
        # A step of decoding is never differentiated.
        if options.workload in problem.name and (quantities == [FORWARD] or problem.seqlen_q > 1)
    ]
    require_workloads(parser, options, problems)
    torch.set_num_threads(options.threads)

    on, where = console(), environment(options.device)
    says = describe(where) if options.shrink == 1 else f"{describe(where)}, lengths and windows / {options.shrink}"
    on.print(says, highlight=False)
    builders = {**{name: partial(ours, name) for name in names}, **{peer: PEERS[peer] for peer in peers}}
    timings = []
    with progress(on) as bar:
        task = bar.add_task("", total=len(problems) * len(dtypes))
        for problem in problems:
            for dtype in dtypes:
                bar.update(task, description=f"{problem.name}, {dtype}")
                timings += time_workload(
                    problem, dtype, quantities, builders, options.seed, options.samples, options.device
                )
                bar.advance(task)

    on.print(table(timings, names, peers))
    for name, refusal in dict.fromkeys((timing.implementation, timing.refusal) for timing in timings if timing.refusal):
        on.print(f"[yellow]{name}[/]: {escape(refusal)}")
    if options.json:
        write_json(options.json, where, shrink=options.shrink, seed=options.seed, timings=list(map(asdict, timings)))
    if options.plot:
        plot(timings, quantities, says, options.plot)
    failures = too_slow(timings, names[0], demands) if options.check else []
    for failure in failures:
        on.print(f"[bold red]{escape(failure)}[/]")
    refused = any(timing.refusal for timing in timings if timing.implementation in names)
    return 1 if failures or refused else 0


def shrunk(problem: Problem, by: int) -> Problem:
    window = None if problem.window is None else max(1, problem.window // by)
    lengths = {"seqlen_q": max(1, problem.seqlen_q // by), "seqlen_k": max(1, problem.seqlen_k // by)}
    return replace(problem, window=window, **lengths)
