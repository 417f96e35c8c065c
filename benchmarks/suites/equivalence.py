"""Compares every backend with the float64 reference over many configurations: out, lse and every gradient.

    python benchmarks/backward_equivalence.py                                 # every backend that runs here
    python benchmarks/forward_equivalence.py                                  # out and lse only
    python benchmarks/backward_equivalence.py --backend cpu --dtype bfloat16 --config softcap --outputs
    TRITON_INTERPRET=1 python benchmarks/backward_equivalence.py --device cpu --backend triton

An output passes where

    max|ours - ref64| <= 2 max|eager - ref64| + slack

ref64 is the `reference` backend in float64, eager the same backend in the dtype that is tested. The exit status is 1
where a backend misses the tolerance, or where nothing was compared.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace

import torch
from frame import add_backends, argument_parser, parse, positive
from problem import (
    DTYPES,
    Inputs,
    Problem,
    all_minus_inf_at_head,
    blank_head,
    blank_rows,
    blank_tiles,
    make_inputs,
    nothing_visible,
    padded,
    some_minus_inf,
    surrounded,
)
from report import console, describe, environment, progress, sentence
from rich.markup import escape
from rich.table import Table
from rows import BACKWARD, FORWARD, finite
from torch import Tensor

from flash_dmattn import backends, flash_dmattn_func_auto

# Exceptions with which a backend refuses a call; running out of memory is a RuntimeError too.
REFUSALS = (TypeError, ValueError, RuntimeError)
SLACK = {torch.float16: 1e-5, torch.bfloat16: 1e-5, torch.float32: 1e-6, torch.float64: 1e-11}
GRADIENTS = {"query": "dq", "key": "dk", "value": "dv", "bias": "dbias"}

PASS, MISS, NOT_SUPPORTED = "PASS", "MISS", "not supported"
STYLES = {PASS: "green", MISS: "bold red", NOT_SUPPORTED: "yellow"}


def configurations(size: str) -> list[Problem]:
    """The problems to compare. Unless the name differs there are more keys than rows."""
    short, long = {"small": (29, 70), "full": (255, 1000)}[size]
    base = Problem("", batch=2, heads=4, kv_heads=2, seqlen_q=short, seqlen_k=long, head_dim=32)

    def config(name: str, **changes) -> Problem:
        return replace(base, name=name, **changes)

    key_bias = {"bias": "B Hkv 1 Sk"}
    square, more_rows = {"seqlen_q": long}, {"seqlen_q": long, "seqlen_k": short}
    small_heads = {"batch": 1, "heads": 2, "kv_heads": 1}
    return [
        config("plain"),
        config("causal", is_causal=True),
        config("scale", softmax_scale=0.7),
        config("softcap", softcap=2.0),
        config("softcap, causal, key bias", softcap=2.0, is_causal=True, **key_bias),
        config("softcap, mask, dense bias", softcap=2.0, mask="B H Sq Sk", bias="1 H Sq Sk"),
        config("lse unused, key bias", uses_lse=False, **key_bias),
        # Lengths
        config("square", **square),
        config("square, causal, key bias", is_causal=True, **square, **key_bias),
        config("more rows than keys", **more_rows),
        config("more rows than keys, causal", is_causal=True, **more_rows, **key_bias),
        config("one row", seqlen_q=1),
        config("one row, causal, key bias", seqlen_q=1, is_causal=True, **key_bias),
        config("one row, dense bias", seqlen_q=1, mask="B Hkv Sq Sk", bias="B H Sq Sk"),
        config("one key", seqlen_k=1, **key_bias),
        config("no rows", seqlen_q=0, **key_bias),
        config("no keys", seqlen_k=0, **key_bias),
        config("no batch", batch=0, bias="1 1 Sq Sk"),
        *(
            config(f"length {n}", seqlen_q=n, seqlen_k=n, is_causal=True, **small_heads, **key_bias)
            for n in (2, 7, 63, 64, 65, 127, 129)
        ),
        # Heads
        *(
            config(f"heads {heads}/{kv_heads}", batch=1, heads=heads, kv_heads=kv_heads, is_causal=True, **key_bias)
            for heads, kv_heads in ((3, 3), (4, 1), (6, 3), (8, 1), (8, 2))
        ),
        *(
            config(f"head dim {head_dim}", head_dim=head_dim, is_causal=True, **small_heads, **key_bias)
            for head_dim in (8, 12, 40, 64, 80, 96, 128, 192, 200, 256)
        ),
        # Masks
        *(
            config(f"mask [{mask}]", mask=mask)
            for mask in ("B H Sq Sk", "B Hkv Sq Sk", "B 1 Sq Sk", "1 H Sq Sk", "1 1 Sq Sk", "1 Hkv 1 Sk", "B H Sq 1")
        ),
        config("mask, causal", mask="B Hkv Sq Sk", is_causal=True),
        config("mask and key bias, square", mask="B Hkv Sq Sk", **key_bias, **square),
        config("mask and dense bias, more rows", mask="1 H Sq Sk", bias="B 1 Sq Sk", **more_rows),
        config("padding", mask="B 1 1 Sk", mask_values=padded),
        config("padding, causal, key bias", mask="B 1 1 Sk", mask_values=padded, is_causal=True, **key_bias),
        # Biases
        *(
            config(f"bias [{bias}]", bias=bias)
            for bias in ("B H 1 Sk", "B Hkv 1 Sk", "B 1 1 Sk", "1 H 1 Sk", "1 1 1 Sk")
        ),
        config("bias [B Hkv 1 Sk] float32", bias_dtype=torch.float32, **key_bias),
        config("bias [1 1 1 Sk] float32, causal", bias="1 1 1 Sk", bias_dtype=torch.float32, is_causal=True),
        *(
            config(f"bias [{bias}]", bias=bias)
            for bias in ("B H Sq Sk", "B Hkv Sq Sk", "1 H Sq Sk", "B 1 Sq Sk", "1 Hkv Sq Sk", "1 1 Sq Sk")
        ),
        config("bias [1 H Sq Sk], square, causal", bias="1 H Sq Sk", is_causal=True, **square),
        config("bias constant along the keys [B H Sq 1]", bias="B H Sq 1"),
        config("bias constant along the keys [1 Hkv 1 1]", bias="1 Hkv 1 1", is_causal=True),
        # Dynamic masks: each row sees the keys of largest bias
        config("top-k", window=16, **key_bias),
        config("top-k, causal, float32 bias", window=16, is_causal=True, bias_dtype=torch.float32, **key_bias),
        config("top-k, dense bias", window=16, bias="B H Sq Sk"),
        config("top-k, one row", window=16, seqlen_q=1, is_causal=True, **key_bias),
        *(
            config(f"top-k by intervals{where}", window=16, as_intervals=True, is_causal=True, **lengths, **key_bias)
            for where, lengths in ((", square", square), (", one row", {"seqlen_q": 1}), (", more rows", more_rows))
        ),
        config("top-k by intervals, a mask a head", window=16, as_intervals=True, is_causal=True, bias="B H 1 Sk"),
        # Nothing visible
        config("rows see nothing", mask="B H Sq Sk", mask_values=blank_rows, **key_bias),
        config("tiles see nothing", mask="B Hkv Sq Sk", mask_values=blank_tiles, bias="1 H Sq Sk"),
        config("a head sees nothing", mask="1 Hkv Sq Sk", mask_values=blank_head, **key_bias),
        config("nothing is visible", mask="B 1 1 Sk", mask_values=nothing_visible, bias="B H Sq Sk"),
        config("-inf in the key bias", bias_values=some_minus_inf, **key_bias),
        config("-inf in the dense bias, causal", bias="1 H Sq Sk", bias_values=some_minus_inf, is_causal=True),
        config("-inf in the bias of all rows", bias="B H Sq 1", bias_values=some_minus_inf),
        config("a head's bias is -inf", bias="B Hkv Sq Sk", bias_values=all_minus_inf_at_head),
    ]


def forward_outputs(attention: Callable, inputs: Inputs) -> dict[str, Tensor]:
    with torch.no_grad():
        out, lse = inputs.attend(attention)
    return {"out": out, "lse": lse}


def backward_outputs(attention: Callable, inputs: Inputs) -> dict[str, Tensor]:
    """The forward's outputs and every gradient."""
    inputs = inputs.requiring_grad()
    out, lse = inputs.attend(attention)
    loss_terms = [(out, inputs.dout), (lse, inputs.dlse)] if inputs.problem.uses_lse else [(out, inputs.dout)]
    # Without keys there may be nothing to differentiate. A gradient that is missing elsewhere is zero, hence a miss.
    outputs, their_gradients = zip(*(term for term in loss_terms if term[0].requires_grad))
    leaves = inputs.leaves()
    gradients = torch.autograd.grad(outputs, leaves.values(), their_gradients, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(map(GRADIENTS.get, leaves), gradients))}


OutputsOf = Callable[[Callable, Inputs], dict[str, Tensor]]
OUTPUTS_OF: dict[str, OutputsOf] = {FORWARD: forward_outputs, BACKWARD: backward_outputs}


@dataclass(frozen=True)
class Deviation:
    error: float
    tolerance: float
    ratio: float


@dataclass(frozen=True)
class Outcome:
    config: str
    backend: str
    verdict: str
    reason: str = ""  # why not supported, or the error that made it a miss
    outputs: dict[str, Deviation] = field(default_factory=dict)

    def worst(self) -> str:
        return max(self.outputs, key=lambda name: self.outputs[name].ratio)


def max_error(values: Tensor, exact: Tensor) -> float:
    """max|values - exact|, with -inf equal to -inf; infinite where a value is NaN, or infinite without reason."""
    if values.shape != exact.shape:
        return math.inf
    values = values.double()
    difference = (values - exact).abs().masked_fill(values == exact, 0)
    return difference.nan_to_num(nan=math.inf).max().item() if difference.numel() else 0.0


def deviation(ours: Tensor, eager: Tensor, exact: Tensor, slack: float) -> Deviation:
    error, eager_error = max_error(ours, exact), max_error(eager, exact)
    # An eager result that overflowed must not excuse everything.
    tolerance = slack + (2 * eager_error if math.isfinite(eager_error) else 0)
    return Deviation(error, tolerance, error / tolerance)


def compare(
    backend: str, inputs: Inputs, outputs_of: OutputsOf, eager: dict[str, Tensor], exact: dict[str, Tensor]
) -> Outcome:
    config = inputs.problem.name
    try:
        ours = outputs_of(flash_dmattn_func_auto(backend), inputs)
    except REFUSALS as error:
        return Outcome(config, backend, NOT_SUPPORTED, sentence(error))
    except Exception as error:
        return Outcome(config, backend, MISS, f"{type(error).__name__}: {sentence(error)}")
    slack = SLACK[inputs.query.dtype]
    outputs = {name: deviation(ours[name], eager[name], exact[name], slack) for name in exact}
    missed = any(not output.ratio <= 1 for output in outputs.values())
    return Outcome(config, backend, MISS if missed else PASS, outputs=outputs)


def compare_backends(
    problem: Problem, names: list[str], outputs_of: OutputsOf, dtype: torch.dtype, device: str, seed: int
) -> list[Outcome]:
    # FlexAttention's code for one problem does not serve the next, and counts against its recompile limit.
    torch.compiler.reset()
    reference = flash_dmattn_func_auto("reference")
    inputs = make_inputs(problem, dtype, device, seed).map(surrounded)
    eager = outputs_of(reference, inputs)
    exact = outputs_of(reference, inputs.map(lambda x: x.double() if x.is_floating_point() else x))
    return [compare(name, inputs, outputs_of, eager, exact) for name in names]


def compare_all(problems: list[Problem], jobs: int, on, *arguments: object) -> list[Outcome]:
    """In the order of the problems; `jobs` of them at a time, each in a process."""
    outcomes: dict[str, list[Outcome]] = {}
    with progress(on) as bar:
        task = bar.add_task("", total=len(problems))
        for problem, compared in compared_with(jobs, problems, *arguments):
            outcomes[problem.name] = compared
            bar.update(task, description=problem.name, advance=1)
    return [outcome for problem in problems for outcome in outcomes[problem.name]]


def compared_with(jobs: int, problems: list[Problem], *arguments: object) -> Iterator[tuple[Problem, list[Outcome]]]:
    """In the order of completion."""
    if jobs == 1:
        yield from ((problem, compare_backends(problem, *arguments)) for problem in problems)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(compare_backends, problem, *arguments): problem for problem in problems}
        yield from ((futures[future], future.result()) for future in as_completed(futures))


def cell(outcome: Outcome, show_outputs: bool, reasons: list[str]) -> str:
    verdict = f"[{STYLES[outcome.verdict]}]{outcome.verdict}[/]"
    if not outcome.outputs:
        if outcome.reason not in reasons:
            reasons.append(outcome.reason)
        return f"{verdict} ({reasons.index(outcome.reason) + 1})"
    worst = outcome.worst()
    ratios = {name: output.ratio for name, output in outcome.outputs.items() if show_outputs or name == worst}
    return f"{verdict} " + "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())


def table(outcomes: list[Outcome], names: list[str], show_outputs: bool) -> Table:
    """Below it each reason of what is not supported, once."""
    shown = "every output's" if show_outputs else "the worst output's"
    table = Table("configuration", *names, title=f"{shown} error / tolerance", title_justify="left")
    by_config: dict[str, list[str]] = {}
    reasons: list[str] = []
    for outcome in outcomes:
        by_config.setdefault(outcome.config, []).append(cell(outcome, show_outputs, reasons))
    for config, cells in by_config.items():
        table.add_row(escape(config), *cells)
    table.caption = "\n".join(f"({number}) {escape(reason)}" for number, reason in enumerate(reasons, 1))
    table.caption_justify = "left"
    return table


def default_backends(device: str) -> list[str]:
    """Every available one that runs on the device, except the reference."""
    other_device = "cuda" if device == "cpu" else "cpu"
    return [name for name in backends.get_available_backends() if name not in ("reference", other_device)]


def equivalence_parser():
    parser = argument_parser(__doc__, "equivalence")
    add_backends(parser, "every available one that runs on the device")
    parser.add_argument("--direction", choices=OUTPUTS_OF, default=BACKWARD, help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, help="(default: bfloat16; float32 on the CPU)")
    parser.add_argument("--size", choices=["small", "full"], help="of the inputs (default: small on the CPU)")
    parser.add_argument("--config", default="", metavar="TEXT", help="only configurations with this text in the name")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--outputs", action="store_true", help="show every output, not only the worst")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where something missed, or where nothing was compared."""
    parser = equivalence_parser()
    options = parse(parser, arguments)
    on_cpu = options.device == "cpu"
    dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
    size = options.size or ("small" if on_cpu else "full")
    names = options.backend or default_backends(options.device)
    problems = [problem for problem in configurations(size) if options.config in problem.name]
    if not problems:
        parser.error(f"--config: no configuration has {options.config!r} in its name")

    on, where = console(), environment(options.device)
    on.print(f"{options.direction}, {dtype}, {size}; {describe(where)}", highlight=False)
    for name in backends.NAMES:
        if (reason := backends.load(name).why_unavailable()) is not None:
            on.print(f"[yellow]{name} is not available:[/] {escape(reason)}")
    outputs_of = OUTPUTS_OF[options.direction]
    outcomes = compare_all(problems, options.jobs, on, names, outputs_of, DTYPES[dtype], options.device, options.seed)
    on.print(table(outcomes, names, options.outputs))

    counts = {verdict: sum(outcome.verdict == verdict for outcome in outcomes) for verdict in STYLES}
    on.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if options.json:
        content = {"environment": where, "dtype": dtype, "size": size, "outcomes": list(map(asdict, outcomes))}
        options.json.write_text(json.dumps(finite(content), indent=2, allow_nan=False) + "\n")
    if not counts[PASS] and not counts[MISS]:
        on.print("[bold red]nothing was compared[/]")
        return 1
    return 1 if counts[MISS] else 0
