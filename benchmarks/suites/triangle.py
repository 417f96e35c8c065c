"""Triangle attention, where N rows share a pair bias, beside the same rows as a plain batch, and others.

triangle_attention: q (B, N, H, S, D), a bias (B, 1, H, S, S) with its gradient, and a key mask for each row.
plain batch: `flash_dmattn_func` over B N batch elements that all share one bias [1, H, S, S].
SDPA: bias and mask as one float mask in the query's dtype, expanded to every row in the call.
cuEquivariance: cuequivariance_torch.triangle_attention, where it is installed.

The peak memory is that of forward and backward beyond the inputs, on CUDA.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from frame import Demand, Setting, Suite, free_memory
from peers import SDPA
from problem import DTYPES
from report import sentence
from rows import BACKWARD, BOTH, FORWARD, Row
from timing import Call, Operation, call_for
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import flash_dmattn_func
from flash_dmattn.integrations.triangle import triangle_attention

OURS, PLAIN, CUEQUIVARIANCE = "triangle_attention", "plain batch", "cuEquivariance"


@dataclass(frozen=True)
class Workload:
    batch: int
    n: int
    seqlen: int
    heads: int = 4
    head_dim: int = 32
    float32_bias: bool = False

    @property
    def name(self) -> str:
        suffix = ", float32 bias" if self.float32_bias else ""
        return f"B{self.batch} N{self.n} H{self.heads} S{self.seqlen} D{self.head_dim}{suffix}"


WORKLOADS = [
    Workload(1, 384, 384),
    Workload(2, 192, 384),
    Workload(4, 96, 384),
    Workload(1, 512, 512),
    Workload(2, 256, 256),
    Workload(2, 256, 256, float32_bias=True),
    Workload(1, 384, 384, float32_bias=True),
    Workload(2, 128, 768, heads=8, head_dim=64),
]
DEMANDS = [Demand("", BOTH, 1.05, (PLAIN,), implementation=OURS)]


@dataclass(frozen=True)
class Inputs:
    query: Tensor  # (B, N, S, H, D), and so are key, value and dout
    key: Tensor
    value: Tensor
    bias: Tensor  # (B, 1, H, S, S)
    mask: Tensor  # bool (B, N, 1, 1, S)
    dout: Tensor


def make_inputs(workload: Workload, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    batch, n, seqlen, heads = workload.batch, workload.n, workload.seqlen, workload.heads

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    rows = [make(batch, n, seqlen, heads, workload.head_dim) for _ in range(4)]
    bias_dtype = torch.float32 if workload.float32_bias else dtype
    bias = make(batch, 1, heads, seqlen, seqlen, dtype=bias_dtype).requires_grad_()
    mask = torch.rand(batch, n, 1, 1, seqlen, generator=generator, device=device) < 0.9
    return Inputs(*(x.requires_grad_() for x in rows[:3]), bias, mask, rows[3])


# The implementations: each returns (B, N, S, H, D)


def ours(inputs: Inputs, function: Callable[..., Tensor] = triangle_attention) -> Operation:
    leaves = [inputs.query, inputs.key, inputs.value, inputs.bias]

    def forward() -> Tensor:
        query, key, value = (x.transpose(2, 3) for x in leaves[:3])
        return function(query, key, value, inputs.bias, mask=inputs.mask).transpose(2, 3)

    return Operation(forward, leaves)


def plain_batch(inputs: Inputs) -> Operation:
    bias = inputs.bias.detach()[:1, 0].clone().requires_grad_()
    leaves = [inputs.query, inputs.key, inputs.value, bias]
    mask = inputs.mask.flatten(0, 1)

    def forward() -> Tensor:
        out = flash_dmattn_func(*(x.flatten(0, 1) for x in leaves[:3]), mask, bias)
        return out.view_as(inputs.query)

    return Operation(forward, leaves)


def sdpa(inputs: Inputs) -> Operation:
    leaves = [inputs.query, inputs.key, inputs.value, inputs.bias]

    def forward() -> Tensor:
        biases = inputs.bias.to(inputs.query.dtype).masked_fill(~inputs.mask, -torch.inf).flatten(0, 1)
        rows = (x.flatten(0, 1).transpose(1, 2) for x in leaves[:3])
        return scaled_dot_product_attention(*rows, biases).transpose(1, 2).view_as(inputs.query)

    return Operation(forward, leaves)


def cuequivariance(inputs: Inputs) -> Operation:
    import cuequivariance_torch

    return ours(inputs, cuequivariance_torch.triangle_attention)


BUILDERS = {OURS: ours, PLAIN: plain_batch, SDPA: sdpa, CUEQUIVARIANCE: cuequivariance}
DEFAULT = [n for n in BUILDERS if n != CUEQUIVARIANCE or importlib.util.find_spec("cuequivariance_torch")]


# Measuring


def peak_of(call: Call) -> int:
    """Bytes on CUDA of a call that ran before, beyond what was allocated."""
    free_memory("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def measure(workload: Workload, setting: Setting) -> list[Row]:
    inputs = make_inputs(workload, DTYPES[setting.dtype], setting.device, setting.seed)
    names, rows = setting.names(*DEFAULT), []
    for direction in (FORWARD, BACKWARD, BOTH):
        rows += setting.time(workload.name, direction, {name: partial(made, direction, name, inputs) for name in names})
    for name in names if setting.device == "cuda" else ():
        try:
            rows.append(setting.row(workload.name, "memory", name, peak_bytes=peak_of(made(BOTH, name, inputs))))
        except Exception as error:
            rows.append(setting.row(workload.name, "memory", name, refusal=sentence(error)))
    return rows


def made(direction: str, name: str, inputs: Inputs) -> Call:
    return call_for(direction, BUILDERS[name](inputs), inputs.dout)


SUITES = {
    "triangle": Suite(
        "triangle",
        __doc__,
        dict.fromkeys(("cpu", "cuda"), WORKLOADS),
        measure,
        tuple(BUILDERS),
        dict.fromkeys(("cpu", "cuda"), DEMANDS),
        samples=7,
        own=OURS,
    )
}
