"""Relative position biases with their gradient: biases that are computed from a table, not stored.

"no bias" is our own call without any bias, "dense bias" our own call with the materialized one. FlexAttention reads the
same table, which its score_mod captures, by the same index. SDPA takes the materialized bias. T5's table is made from
its buckets before the call, since a model makes it once for all layers. With ALiBi every call makes its table from the
slopes, whose gradient is measured.

What --check requires on CUDA are goals: most of the published rows (results/h200.json) miss them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from frame import MIB, Demand, Setting, Suite
from limit import limit_of
from peers import FLEX, OURS, SDPA
from problem import Inputs, Problem, named, square
from rows import BACKWARD, BOTH, FORWARD, Row
from timing import Call, Operation, call_for
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import flash_dmattn_func, relative
from flash_dmattn.backends import flex

MEMORY = "memory"  # of forward and backward
NO_BIAS, DENSE_BIAS = f"{OURS}, no bias", f"{OURS}, dense bias"
TABLE, T5, ALIBI, IMAGE = "table", "t5", "alibi", "image"
BUCKETS, MAX_DISTANCE = 32, 128
DENSE_SCORES = 2**31  # a larger materialized bias is left out


@dataclass(frozen=True)
class Relative(Problem):
    kind: str = TABLE

    @property
    def grid(self) -> tuple[int, int] | None:
        side = math.isqrt(self.seqlen_q)
        return (side, side) if self.kind == IMAGE else None

    def shrunk(self, by: int) -> Relative:
        length = max(1, self.seqlen_q // by)
        length = math.isqrt(length) ** 2 if self.kind == IMAGE else length
        return replace(self, seqlen_q=length, seqlen_k=length)

    def parameters(self, device: str) -> Tensor:
        """float32, the learned parameters."""
        if self.kind == ALIBI:
            return relative.alibi_slopes(self.heads, device)
        if self.kind == T5:
            buckets = torch.randn(BUCKETS, self.heads, device=device)
            return relative.t5(buckets, max_distance=MAX_DISTANCE).contiguous()
        sizes = {
            TABLE: (1, self.heads, 2 * self.seqlen_k - 1),
            IMAGE: (1, self.heads, *(2 * size - 1 for size in self.grid or ())),
        }
        return torch.randn(sizes[self.kind], device=device)

    def table(self, parameters: Tensor) -> Tensor:
        """The argument relative_bias."""
        return relative.alibi(parameters, self.seqlen_k) if self.kind == ALIBI else parameters


def workload(label: str, *sizes: int, kind: str, **options) -> Relative:
    return named(label, Relative(**vars(square("", *sizes, **options)), kind=kind))


EVERY_DISTANCE, BUCKETED, IMAGES = "every distance", "T5's buckets", "image"
LINEAR = "causal, ALiBi"
WORKLOADS = {
    "cpu": [
        workload(EVERY_DISTANCE, 1, 8, 1024, 64, kind=TABLE),
        workload(BUCKETED, 1, 8, 1024, 64, kind=T5),
        workload(LINEAR, 1, 8, 1024, 64, kind=ALIBI, is_causal=True),
        workload(IMAGES, 1, 8, 1024, 64, kind=IMAGE),
    ],
    "cuda": [
        workload(EVERY_DISTANCE, 2, 16, 4096, 64, kind=TABLE),
        workload(EVERY_DISTANCE, 2, 16, 4096, 128, kind=TABLE),
        workload(BUCKETED, 2, 16, 4096, 64, kind=T5),
        workload(BUCKETED, 2, 16, 4096, 128, kind=T5),
        workload(LINEAR, 1, 16, 16384, 128, kind=ALIBI, is_causal=True, kv_heads=4),
        workload(IMAGES, 8, 12, 4096, 64, kind=IMAGE),
        workload("image windows", 4096, 4, 49, 32, kind=IMAGE),
        workload(EVERY_DISTANCE, 1, 16, 32768, 64, kind=TABLE),
    ],
}


def of_none(name: str, forward: float, backward: float) -> list[Demand]:
    """At most so many times our own call without a bias."""
    return [Demand(name, FORWARD, forward, (NO_BIAS,)), Demand(name, BACKWARD, backward, (NO_BIAS,))]


# Goals on CUDA: results/h200.json misses most of them.
DEMANDS = {
    "cpu": [Demand(one.name, BOTH, 1.0, (SDPA,)) for one in WORKLOADS["cpu"]],
    "cuda": [
        *of_none(f"{EVERY_DISTANCE}, B2 H16 S4096", 1.12, 1.20),
        *of_none(BUCKETED, 1.05, 1.08),
        *of_none(LINEAR, 1.08, 1.12),
        *of_none(f"{IMAGES}, B8", 1.25, 1.5),
        Demand(f"{EVERY_DISTANCE}, B2 H16 S4096", BOTH, 0.25, (FLEX,)),
        Demand(f"{EVERY_DISTANCE}, B1 H16 S32768", MEMORY, 64 * MIB, figure="extra_bytes"),
    ],
}


# Implementations: each function takes inputs and the parameters of the bias, which has a gradient if query has one


def ours(inputs: Inputs, parameters: Tensor) -> Operation:
    problem, tensors = inputs.problem, [inputs.query, inputs.key, inputs.value]

    def forward() -> Tensor:
        bias = {"relative_bias": problem.table(parameters), "grid": problem.grid}
        return flash_dmattn_func(*tensors, is_causal=problem.is_causal, **bias)

    return Operation(forward, [*tensors, parameters])


def without_bias(inputs: Inputs, _) -> Operation:
    tensors, is_causal = [inputs.query, inputs.key, inputs.value], inputs.problem.is_causal
    return Operation(lambda: flash_dmattn_func(*tensors, is_causal=is_causal), tensors)


def dense_bias(inputs: Inputs, parameters: Tensor) -> Tensor:
    problem = inputs.problem
    if problem.seqlen_q * problem.seqlen_k * problem.heads > DENSE_SCORES:
        raise ValueError("left out: the materialized bias has more than 2**31 elements")
    table = problem.table(parameters.detach())
    bias = relative.dense(table, problem.seqlen_q, problem.seqlen_k).to(inputs.query.dtype)
    return bias.contiguous().requires_grad_(inputs.query.requires_grad)


def ours_dense(inputs: Inputs, parameters: Tensor) -> Operation:
    leaves = [inputs.query, inputs.key, inputs.value, dense_bias(inputs, parameters)]
    is_causal = inputs.problem.is_causal
    return Operation(lambda: flash_dmattn_func(*leaves[:3], None, leaves[3], is_causal=is_causal), leaves)


def sdpa(inputs: Inputs, parameters: Tensor) -> Operation:
    problem, bias = inputs.problem, dense_bias(inputs, parameters)
    if problem.is_causal:
        hidden = torch.ones(bias.shape[2:], dtype=torch.bool, device=bias.device).triu(1)
        bias = bias.detach().masked_fill(hidden, -torch.inf).requires_grad_(bias.requires_grad)
    leaves = [inputs.query, inputs.key, inputs.value, bias]

    def forward() -> Tensor:
        rows = (x.transpose(1, 2) for x in leaves[:3])
        grouped = problem.kv_heads < problem.heads
        return scaled_dot_product_attention(*rows, leaves[3], enable_gqa=grouped).transpose(1, 2)

    return Operation(forward, leaves)


def flex_attention(inputs: Inputs, parameters: Tensor) -> Operation:
    # Its compiled backward otherwise reuses saved tensors as scratch memory, and can run only once.
    functorch_config.donated_buffer = False
    problem, tensors = inputs.problem, [inputs.query, inputs.key, inputs.value]
    block_mask = flex.block_mask_of(inputs.query, inputs.key, None, problem.is_causal)
    options = {"softmax_scale": problem.head_dim**-0.5, "is_causal": problem.is_causal, "softcap": 0.0}

    def forward() -> Tensor:
        table = problem.table(parameters)
        return flex.attention(
            *tensors, None, None, relative_bias=table, **options, deterministic=False, block_mask=block_mask
        )[0]

    return Operation(forward, [*tensors, parameters])


Build = Callable[[Inputs, Tensor], Operation]
IMPLEMENTATIONS: dict[str, Build] = {
    OURS: ours,
    NO_BIAS: without_bias,
    DENSE_BIAS: ours_dense,
    SDPA: sdpa,
    FLEX: flex_attention,
}


def measure(problem: Relative, setting: Setting) -> list[Row]:
    torch.compiler.reset()  # FlexAttention compiled for one shape is what a user has
    peers = [NO_BIAS, DENSE_BIAS, SDPA, *([FLEX] if setting.device == "cuda" else [])]
    names, rows = setting.names(OURS, *peers), []
    torch.manual_seed(setting.seed)
    parameters = problem.parameters(setting.device)
    for direction in (FORWARD, BOTH, BACKWARD):
        needs_grad = direction != FORWARD
        inputs = setting.inputs(problem)
        inputs = inputs.requiring_grad() if needs_grad else inputs
        given = parameters.detach().requires_grad_(needs_grad)
        makers = {name: partial(make_call, direction, IMPLEMENTATIONS[name], inputs, given) for name in names}
        rows += setting.time(problem.name, direction, makers, limit_of(direction, inputs))
        if direction == BOTH and setting.device == "cuda" and OURS in names:
            extra = extra_bytes(makers[OURS](), inputs, given)
            rows.append(setting.row(problem.name, MEMORY, OURS, extra_bytes=extra))
    return rows


def extra_bytes(call: Call, inputs: Inputs, parameters: Tensor) -> int:
    """Peak GPU memory beyond the inputs, out, lse and the gradients."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = call()
    peak = torch.cuda.max_memory_allocated() - before
    del gradients  # kept until here: they are part of the peak
    leaves = (inputs.query, inputs.key, inputs.value, parameters)
    return peak - inputs.query.nbytes - inputs.dlse.nbytes - sum(leaf.nbytes for leaf in leaves)


def make_call(direction: str, build: Build, inputs: Inputs, parameters: Tensor) -> Call:
    return call_for(direction, build(inputs, parameters), inputs.dout)


SUITES = {
    "relative": Suite(
        "relative",
        __doc__,
        WORKLOADS,
        measure,
        tuple(IMPLEMENTATIONS),
        DEMANDS,
        dtypes={"cpu": ["float32"], "cuda": ["bfloat16"]},
        samples=5,
    )
}
