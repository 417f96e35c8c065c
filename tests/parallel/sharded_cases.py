"""Problems of context parallel attention, on the ranks of a group and on one process that has the whole sequence."""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from helpers import assert_close, in_float64, reference

from flash_dmattn import KeyIntervalMask
from flash_dmattn.parallel import context_parallel_attention, count_traffic

on_two = pytest.mark.parametrize("ranks", ["two"], indirect=True)
on_both = pytest.mark.parametrize("ranks", ["two", "four"], indirect=True)


@dataclass(frozen=True)
class Case:
    """A problem whose whole tensors every process makes alike; `of_rank` cuts out the part of a rank."""

    lengths: tuple[int, ...]
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 8
    value_dim: int | None = None  # None: head_dim
    dtype: torch.dtype = torch.float64
    bias: tuple | None = None  # its shape, with "S" for the sequence
    bias_dtype: torch.dtype | None = None
    tied: int = 0  # the number of different biases; 0: all differ
    masked: float = 0.0  # the fraction of biases that are -inf
    mask: tuple | None = None  # the shape of a bool mask, with "S" for the sequence
    intervals: str | None = None  # of make_intervals
    cu_seqlens: tuple[int, ...] | None = None
    relative: tuple | None = None  # the shape of a relative bias, alike on all ranks
    layout: str = "contiguous"
    options: dict = field(default_factory=dict)

    @property
    def seqlen(self):
        return sum(self.lengths)

    def shape(self, layout):
        return tuple(self.seqlen if size == "S" else size for size in layout)

    def make(self):
        """(query, key, value), mask, bias, dout, dlse"""
        generator = torch.Generator().manual_seed(1)

        def normal(*shape, dtype=self.dtype):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        value_dim = self.value_dim or self.head_dim
        sizes = (self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, value_dim)
        rows = [normal(self.batch, self.seqlen, *heads_and_dim) for heads_and_dim in sizes]
        bias = mask = None
        if self.bias is not None:
            bias = normal(*self.shape(self.bias), dtype=self.bias_dtype or self.dtype)
            if self.tied:
                bias = (bias * self.tied / 4).round()
            gone = torch.rand(bias.shape, generator=generator) < self.masked
            bias = bias.masked_fill(gone, -torch.inf)
        if self.mask is not None:
            mask = torch.rand(self.shape(self.mask), generator=generator) < 0.6
        elif self.intervals is not None:
            mask = make_intervals(self, generator)
        lse_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        dlse = normal(self.batch, self.heads, self.seqlen, dtype=lse_dtype) / 8
        return rows, mask, bias, normal(self.batch, self.seqlen, self.heads, value_dim) / 8, dlse


def make_relative(case):
    """[relative bias], or [] where there is none"""
    if case.relative is None:
        return []
    return [torch.randn(case.relative, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(case.dtype)]


def make_intervals(case, generator):
    seqlen = case.seqlen
    if case.intervals == "window":
        return KeyIntervalMask.sliding_window(seqlen, seqlen, (13, 5))
    if case.intervals == "documents":
        cuts = torch.tensor([0, 5, 30, 31, seqlen // 2 + 7, seqlen], dtype=torch.int32)
        return KeyIntervalMask.documents(cuts, seqlen)
    if case.intervals == "padding":
        real = torch.rand(case.batch, seqlen, generator=generator) < 0.5
        return KeyIntervalMask.padding(real)
    if case.intervals == "unbounded":  # from any number of int32 to any other
        limits, bounds = torch.iinfo(torch.int32), torch.randint(0, seqlen, (2, 1, 1, seqlen), generator=generator)
        is_open = torch.rand(bounds.shape, generator=generator) < 0.5
        start, end = torch.where(is_open, torch.tensor([limits.min, limits.max]).view(2, 1, 1, 1), bounds).int()
        return KeyIntervalMask(start, end)
    heads = {"any": case.kv_heads, "any_of_query_heads": case.heads, "any_for_all": 1}[case.intervals]
    batch = 1 if heads == 1 else case.batch
    start = torch.randint(-5, seqlen, (batch, heads, seqlen), generator=generator, dtype=torch.int32)
    length = torch.randint(-3, seqlen // 2, start.shape, generator=generator, dtype=torch.int32)
    return KeyIntervalMask(start, start + length)


def of_rank(case, whole, dim, rank):
    """The part of a rank in one dimension of a tensor."""
    if whole is None or whole.shape[dim] == 1 != case.seqlen:
        return whole
    if case.layout == "zigzag":
        chunks = whole.chunk(2 * len(case.lengths), dim)
        return torch.cat([chunks[rank], chunks[2 * len(case.lengths) - 1 - rank]], dim)
    return whole.split(case.lengths, dim)[rank]


def sharded(case, alone=False):
    """(out, lse, dq, dk, dv, dbias, drelative_bias) of this rank, in the world group or alone in a group of one; and
    its traffic."""
    of_each = [dist.new_group([rank]) for rank in range(dist.get_world_size())] if alone else None
    rank, group = (0, of_each[dist.get_rank()]) if alone else (dist.get_rank(), None)
    rows, mask, bias, dout, dlse = case.make()
    device = device_of_rank()
    rows = [of_rank(case, x, 1, rank).to(device) for x in rows]
    dout, dlse = of_rank(case, dout, 1, rank).to(device), of_rank(case, dlse, 2, rank).to(device)
    mask, bias = (None if x is None else x.to(device) for x in (mask, bias))
    if isinstance(mask, KeyIntervalMask):
        mask = mask._of_same_kind(of_rank(case, mask.intervals, 3, rank))
    elif mask is not None:
        mask = of_rank(case, mask, 2 if mask.shape[2] != 1 else 3, rank)
    if bias is not None:
        bias = of_rank(case, bias, 2 if bias.shape[2] != 1 else 3, rank)
    if case.cu_seqlens is not None:
        rows, dout, dlse = [x[0] for x in rows], dout[0], dlse[0]
        bias = None if bias is None else bias[0, :, 0].T
        if isinstance(mask, KeyIntervalMask):
            mask = mask._of_same_kind(mask.intervals[:, 0].transpose(1, 2))
        elif mask is not None:
            mask = mask[0, :, 0].T
    options = dict(case.options, layout=case.layout)
    if case.cu_seqlens is not None:
        options["cu_seqlens"] = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=device)
    relative = [x.to(device) for x in make_relative(case)]
    leaves = [x.detach().clone().requires_grad_() for x in (*rows, bias, *relative) if x is not None]
    if relative:
        options["relative_bias"] = leaves[-1]
    with count_traffic() as traffic:
        out, lse = context_parallel_attention(
            *leaves[:3], mask, leaves[3] if bias is not None else None, group=group, return_lse=True, **options
        )
        gradients = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    return [x.detach().cpu() for x in (out, lse, *gradients)], traffic


def device_of_rank():
    return torch.device("cuda", dist.get_rank()) if "nccl" in dist.get_backend_config() else torch.device("cpu")


def joined(case, parts):
    """The whole (out, lse, dq, dk, dv, dbias, drelative_bias) of the ranks' parts."""
    results = []
    for i, tensors in enumerate(zip(*parts)):
        if case.relative is not None and i == len(parts[0]) - 1:
            results.append(sum(tensors))  # each rank has the gradient of its rows
            continue
        if case.cu_seqlens is not None:
            tensors = [x[None] if i != 5 else x.T[None, :, None] for x in tensors]
        dim = 2 if i == 1 else 1
        if i == 5:
            dim = 3 if case.bias[3] == "S" and case.bias[2] == 1 else 2
            if case.bias[dim] == 1:
                results.append(sum(tensors))
                continue
        if case.layout == "zigzag":
            halves = [x.chunk(2, dim) for x in tensors]
            tensors = [half[0] for half in halves] + [half[1] for half in reversed(halves)]
        results.append(torch.cat(tensors, dim))
    return results


def whole(case, dtype=None):
    """(out, lse, dq, dk, dv, dbias, drelative_bias) of the reference on one process."""
    rows, mask, bias, dout, dlse = case.make()
    options = dict(case.options)
    for name in ("fixed_shapes", "shard_lengths", "sparse"):
        options.pop(name, None)
    if isinstance(mask, KeyIntervalMask):
        mask = mask.to_dense(case.seqlen) if case.cu_seqlens is None else mask
    if case.cu_seqlens is not None:
        mask = varlen_mask(case, mask, bias, options)
    if dtype is not None:
        rows, dout, dlse = [x.to(dtype) for x in rows], dout.to(dtype), dlse.to(dtype)
        bias = None if bias is None else in_float64(bias)
    relative = [x if dtype is None else in_float64(x) for x in make_relative(case)]
    leaves = [x.detach().requires_grad_() for x in (*rows, bias, *relative) if x is not None]
    if relative:
        options["relative_bias"] = leaves[-1]
    out, lse = reference(*leaves[:3], mask, leaves[3] if bias is not None else None, return_lse=True, **options)
    return [
        out.detach(),
        lse.detach(),
        *torch.autograd.grad([out, lse], leaves, [dout.to(out.dtype), dlse.to(lse.dtype)]),
    ]


def varlen_mask(case, mask, bias, options):
    """bool (1, {H|Hkv|1}, S, S): the dense mask of packed sequences."""
    window = options.pop("window_size", None)
    heads = max([1, *(pairs.shape[1] for pairs in (mask, bias) if pairs is not None)])
    visible = torch.zeros(1, heads, case.seqlen, case.seqlen, dtype=torch.bool)
    for first, behind in itertools.pairwise(case.cu_seqlens):
        part, length = slice(first, behind), behind - first
        seen = torch.ones(1, 1, length, length, dtype=torch.bool)
        if window is not None:
            seen = KeyIntervalMask.topk(bias[..., part], window).to_dense()
        elif isinstance(mask, KeyIntervalMask):
            seen = mask._of_same_kind(mask.intervals[..., part]).to_dense(length)
        elif mask is not None:
            seen = mask[..., part].expand(-1, -1, length, -1)
        visible[:, :, part, part] = seen.repeat_interleave(heads // seen.shape[1], dim=1)
    return visible


def check(ranks, case):
    """Asserts that every output and gradient equals one process's; returns the traffic of each rank."""
    results, traffic = zip(*ranks.results(sharded, case))
    ours = joined(case, results)
    exact = whole(case, torch.float64)
    biases = {"dbias": case.bias, "drelative_bias": case.relative}
    names = ("out", "lse", "dq", "dk", "dv", *(name for name, shape in biases.items() if shape is not None))
    if case.dtype == torch.float64:
        for name, x, y in zip(names, ours, exact, strict=True):
            assert x.shape == y.shape, name
            assert torch.allclose(x, y, rtol=0, atol=1e-11), f"{name} is off by {(x - y).abs().max()}"
    else:
        assert_close(ours, whole(case), exact, case.dtype, names)
    return traffic


def lengths_for(ranks, even=True):
    if even:
        return (24,) * ranks.size
    return (37, 20) if ranks.size == 2 else (37, 5, 0, 30)
