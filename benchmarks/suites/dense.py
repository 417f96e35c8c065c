"""Attention with masks and biases that are made beforehand, forward and backward.

SDPA takes mask and bias as one float mask and chooses its own kernel; FlexAttention takes a block mask. Both are made
beforehand. FlashAttention-2 (PyTorch's), FlashAttention-4 (where flash-attn-4 is installed) and cuDNN run without mask
and bias only.
"""

from functools import partial

import torch
from frame import Demand, Setting, Suite
from limit import limit_of
from peers import CUDNN, FLASH2, FLASH4, FLEX, OURS, PEERS, SDPA, Build, has_flash_attention_4, ours
from problem import Inputs, Problem, named, square
from rows import BACKWARD, BOTH, FORWARD, Row
from timing import Call, call_for

from flash_dmattn import KeyIntervalMask


def dense(label: str, *sizes: int, **options) -> Problem:
    return named(label, square("", *sizes, **options))


def sliding_window(seqlen: int, device: str) -> KeyIntervalMask:
    return KeyIntervalMask.sliding_window(seqlen, seqlen, min(1024, seqlen), device=device)


def documents(seqlen: int, device: str) -> KeyIntervalMask:
    return KeyIntervalMask.documents(ids=torch.arange(seqlen, device=device) // min(700, seqlen))


def documents_of_all_lengths(seqlen: int, device: str) -> KeyIntervalMask:
    """Documents of a 512th to a 16th of the length."""
    lengths = torch.tensor([max(1, seqlen // 512) * (13 * i % 32 + 1) for i in range(32)])
    ends = lengths.cumsum(0).clamp(max=seqlen)
    return KeyIntervalMask.documents(torch.cat([ends.new_zeros(1), ends]).int().to(device), seqlen)


PACKED = "causal, packed documents of 64 to 2048 rows"
LONG = {"kv_heads": 4, "is_causal": True}
TOP_K = {"kv_heads": 8, "is_causal": True, "bias": "B Hkv 1 Sk"}
WORKLOADS = {
    "cpu": [
        dense("random mask [B,H,S,S], key bias", 1, 8, 2048, 64, mask="B H Sq Sk", bias="B H 1 Sk"),
        dense("causal", 1, 8, 2048, 64, is_causal=True),
        dense("bool mask of the keys of largest bias", 1, 8, 2048, 64, window=256, **TOP_K),
    ],
    "cuda": [
        dense("no mask, no bias", 2, 16, 4096, 64),
        dense("no mask, no bias", 2, 16, 4096, 128),
        dense("causal", 2, 16, 4096, 128, is_causal=True),
        dense("causal", 2, 16, 4096, 256, is_causal=True),
        dense("dense bias [1,H,S,S]", 2, 16, 4096, 64, bias="1 H Sq Sk"),
        dense("dense bias [1,H,S,S]", 2, 16, 4096, 128, bias="1 H Sq Sk"),
        dense("dense bias [B,H,S,S]", 2, 16, 4096, 128, bias="B H Sq Sk"),
        dense("dense bias [B,1,S,S]", 2, 16, 4096, 128, bias="B 1 Sq Sk"),
        dense("dense bias [1,H,S,S]", 16, 16, 1024, 64, bias="1 H Sq Sk"),
        dense("key bias", 2, 16, 4096, 128, bias="B H 1 Sk"),
        dense("pair bias [1,H,S,S], key mask", 384, 4, 384, 32, mask="B 1 1 Sk", bias="1 H Sq Sk"),
        dense("bool mask of the keys of largest bias", 1, 32, 8192, 128, window=1024, **TOP_K),
        dense("causal", 1, 16, 16384, 128, **LONG),
        dense("causal, sliding window of 1024", 1, 16, 16384, 128, intervals=sliding_window, **LONG),
        dense("causal, documents of 700", 1, 16, 16384, 128, intervals=documents, **LONG),
        dense("causal, packed sequences", 32, 16, 512, 128, packed=True, **LONG),
        dense(PACKED, 1, 16, 32768, 64, intervals=documents_of_all_lengths, packed=True, max_seqlen=2048, **LONG),
        dense(PACKED, 1, 16, 32768, 128, intervals=documents_of_all_lengths, packed=True, max_seqlen=2048, **LONG),
        dense("causal, max_seqlen 8192 for packed sequences", 128, 16, 256, 128, packed=True, max_seqlen=8192, **LONG),
        dense("decode, key mask", 8, 32, 131072, 128, seqlen_q=1, window=2048, **TOP_K),
    ],
}
CHECKED = WORKLOADS["cpu"][0].name


def on_hopper(workload: str, peer: str, forward: float, backward: float) -> list[Demand]:
    """At most so many times the peer's time."""
    return [Demand(workload, FORWARD, forward, (peer,)), Demand(workload, BACKWARD, backward, (peer,))]


DEMANDS = {
    "cpu": [Demand(CHECKED, FORWARD, 1 / 0.8, (SDPA,)), Demand(CHECKED, BOTH, 1 / 2.0, (SDPA,))],
    "cuda": [
        *on_hopper("no mask, no bias, B2 H16 S4096 D64", CUDNN, 1.20, 1.35),
        *on_hopper("no mask, no bias, B2 H16 S4096 D128", CUDNN, 1.15, 1.30),
        *on_hopper("causal, B2 H16 S4096 D128", CUDNN, 1.20, 1.35),
        *on_hopper("causal, B2 H16 S4096 D256", CUDNN, 1.35, 1.40),
        *on_hopper("dense bias [1,H,S,S], B2 H16 S4096 D64", FLEX, 0.75, 0.60),
        *on_hopper("dense bias [1,H,S,S], B2 H16 S4096 D128", FLEX, 0.80, 0.60),
        *on_hopper("dense bias [B,H,S,S], B2 H16 S4096 D128", FLEX, 0.80, 0.50),
        *on_hopper("key bias, B2 H16 S4096 D128", FLEX, 0.85, 0.55),
        *on_hopper("pair bias [1,H,S,S], key mask, B384 H4 S384 D32", FLEX, 0.75, 0.65),
        *on_hopper("bool mask of the keys of largest bias, B1 H32/8 S8192 D128 w1024", FLEX, 0.65, 0.60),
        *on_hopper("causal, B1 H16/4 S16384 D128", FLEX, 0.80, 0.75),
        *on_hopper("causal, sliding window of 1024", FLEX, 0.80, 0.75),
        *on_hopper("causal, documents of 700", FLEX, 0.80, 0.75),
        *on_hopper("causal, packed sequences", FLASH2, 0.70, 0.75),
    ],
}


def measure(problem: Problem, setting: Setting) -> list[Row]:
    builders, asked = builders_of(setting), getattr(setting.options, "direction", None)
    rows = []
    if asked != BACKWARD:
        rows += time_directions(problem, [FORWARD], builders, setting)
    if asked != FORWARD and problem.seqlen_q > 1:  # a step of decoding is never differentiated
        rows += time_directions(problem, [BOTH, BACKWARD], builders, setting)
    return rows


def builders_of(setting: Setting) -> dict[str, Build]:
    peers = [SDPA] if setting.device == "cpu" else [p for p in PEERS if p != FLASH4 or has_flash_attention_4()]
    available = PEERS | {name: partial(ours, backend) for name, backend in setting.own.items()}
    return {name: available[name] for name in setting.names(OURS, *peers)}


def time_directions(problem: Problem, directions: list[str], builders: dict[str, Build], setting: Setting) -> list[Row]:
    """Every direction of every implementation."""
    # FlexAttention compiled for one shape is what a user has, not code generalized from two.
    torch.compiler.reset()
    inputs = setting.inputs(problem)
    inputs = inputs if directions == [FORWARD] else inputs.requiring_grad()
    rows = []
    for direction in directions:
        makers = {name: partial(make_call, direction, build, inputs) for name, build in builders.items()}
        rows += setting.time(problem.name, direction, makers, limit_of(direction, inputs))
    return rows


def make_call(direction: str, build: Build, inputs: Inputs) -> Call:
    return call_for(direction, build(inputs), inputs.dout)


def add_direction(parser) -> None:
    parser.add_argument("--direction", choices=[FORWARD, BACKWARD], help="only this one (default: both)")


def in_direction(options, problems: list[Problem]) -> list[Problem]:
    return [problem for problem in problems if options.direction != BACKWARD or problem.seqlen_q > 1]


SUITES = {
    "dense": Suite(
        "dense",
        __doc__,
        WORKLOADS,
        measure,
        (OURS, *PEERS),
        DEMANDS,
        dtypes={"cpu": ["float32", "bfloat16"], "cuda": ["bfloat16"]},
        samples=7,
        has_backends=True,
        arguments=add_direction,
        choose=in_direction,
    )
}
