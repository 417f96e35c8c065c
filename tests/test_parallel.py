"""Context parallel attention on processes with gloo: against one process that has the whole sequence."""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from helpers import NAMES, assert_close, in_float64, reference
from ranks import Ranks

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_varlen_func
from flash_dmattn.parallel import context_parallel_attention, count_traffic, positions, shard, unshard


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(request):
    return request.getfixturevalue(request.param)


on_two = pytest.mark.parametrize("ranks", ["two"], indirect=True)
on_four = pytest.mark.parametrize("ranks", ["four"], indirect=True)
on_both = pytest.mark.parametrize("ranks", ["two", "four"], indirect=True)


@dataclass(frozen=True)
class Case:
    """A problem, of which every process makes the same tensors; whole ones, and `of_rank` their parts."""

    lengths: tuple[int, ...]
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 8
    dtype: torch.dtype = torch.float64
    bias: tuple | None = None  # its shape, with "S" for the sequence
    bias_dtype: torch.dtype | None = None
    tied: int = 0  # biases are one of so many numbers; 0: all differ
    hidden: float = 0.0  # the part of the biases that hide
    mask: tuple | None = None  # the shape of a bool mask, with "S" for the sequence
    intervals: str | None = None  # of make_intervals
    cu_seqlens: tuple[int, ...] | None = None
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

        rows = [normal(self.batch, self.seqlen, n, self.head_dim) for n in (self.heads, self.kv_heads, self.kv_heads)]
        bias = mask = None
        if self.bias is not None:
            bias = normal(*self.shape(self.bias), dtype=self.bias_dtype or self.dtype)
            if self.tied:
                bias = (bias * self.tied / 4).round()
            gone = torch.rand(bias.shape, generator=generator) < self.hidden
            bias = bias.masked_fill(gone, -torch.inf)
        if self.mask is not None:
            mask = torch.rand(self.shape(self.mask), generator=generator) < 0.6
        elif self.intervals is not None:
            mask = make_intervals(self, generator)
        lse_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        dlse = normal(self.batch, self.heads, self.seqlen, dtype=lse_dtype) / 8
        return rows, mask, bias, normal(self.batch, self.seqlen, self.heads, self.head_dim) / 8, dlse


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
    heads = {"any": case.kv_heads, "any_of_query_heads": case.heads, "any_for_all": 1}[case.intervals]
    batch = 1 if heads == 1 else case.batch
    start = torch.randint(-5, seqlen, (batch, heads, seqlen), generator=generator, dtype=torch.int32)
    length = torch.randint(-3, seqlen // 2, start.shape, generator=generator, dtype=torch.int32)
    return KeyIntervalMask(start, start + length)


def of_rank(case, whole, dim, rank):
    """A rank's part of a dimension."""
    if whole is None or whole.shape[dim] == 1 != case.seqlen:
        return whole
    if case.layout == "zigzag":
        chunks = whole.chunk(2 * len(case.lengths), dim)
        return torch.cat([chunks[rank], chunks[2 * len(case.lengths) - 1 - rank]], dim)
    return whole.split(case.lengths, dim)[rank]


def sharded(case):
    """(out, lse, dq, dk, dv, dbias) of this rank, and what was sent."""
    rank = dist.get_rank()
    rows, mask, bias, dout, dlse = case.make()
    rows = [of_rank(case, x, 1, rank) for x in rows]
    dout, dlse = of_rank(case, dout, 1, rank), of_rank(case, dlse, 2, rank)
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
        options["cu_seqlens"] = torch.tensor(case.cu_seqlens, dtype=torch.int32)
    leaves = [x.detach().clone().requires_grad_() for x in (*rows, bias) if x is not None]
    with count_traffic() as traffic:
        out, lse = context_parallel_attention(
            *leaves[:3], mask, leaves[3] if bias is not None else None, return_lse=True, **options
        )
        gradients = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    return [out.detach(), lse.detach(), *gradients], traffic


def joined(case, parts):
    """The whole (out, lse, dq, dk, dv, dbias) of the ranks' parts."""
    results = []
    for i, tensors in enumerate(zip(*parts)):
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
    """The same of one process, by the reference."""
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
    leaves = [x.detach().requires_grad_() for x in (*rows, bias) if x is not None]
    out, lse = reference(*leaves[:3], mask, leaves[3] if bias is not None else None, return_lse=True, **options)
    return [
        out.detach(),
        lse.detach(),
        *torch.autograd.grad([out, lse], leaves, [dout.to(out.dtype), dlse.to(lse.dtype)]),
    ]


def varlen_mask(case, mask, bias, options):
    """bool (1, {H|Hkv|1}, S, S): what packed sequences see, one sequence at a time."""
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
    """Every output and gradient as one process has it; returns the traffic of each rank."""
    results, traffic = zip(*ranks.results(sharded, case))
    ours = joined(case, results)
    exact = whole(case, torch.float64)
    if case.dtype == torch.float64:
        for name, x, y in zip(NAMES, ours, exact):
            assert x.shape == y.shape, name
            assert torch.allclose(x, y, rtol=0, atol=1e-11), f"{name} is off by {(x - y).abs().max()}"
    else:
        assert_close(ours, whole(case), exact, case.dtype)
    return traffic


def lengths_for(ranks, even=True):
    if even:
        return (24,) * ranks.size
    return (37, 20) if ranks.size == 2 else (37, 5, 0, 30)


# Fetching the keys that rows see


@on_both
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        {"bias": (1, 2, 1, "S"), "heads": 4, "kv_heads": 2, "batch": 2},
        {"bias": (2, 4, 1, "S"), "heads": 4, "kv_heads": 2, "batch": 2},
        {"bias": (2, 1, 1, "S"), "heads": 4, "kv_heads": 2, "batch": 2},
        {"bias": (1, 1, 1, "S"), "heads": 2, "kv_heads": 2},
    ],
)
@pytest.mark.parametrize("fixed_shapes", [True, False])
def test_window(ranks, even, shape, fixed_shapes):
    options = {"is_causal": True, "window_size": 11, "fixed_shapes": fixed_shapes}
    check(ranks, Case(lengths_for(ranks, even), hidden=0.2, options=options, **shape))


@on_both
@pytest.mark.parametrize("window", [0, 1, 23, 40, 1000])
@pytest.mark.parametrize("tied", [1, 3])
def test_window_sizes_and_ties(ranks, window, tied):
    options = {"is_causal": True, "window_size": window}
    check(ranks, Case(lengths_for(ranks), bias=(1, 1, 1, "S"), tied=tied, options=options))


@on_both
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("intervals", ["window", "documents", "padding", "any", "any_of_query_heads", "any_for_all"])
@pytest.mark.parametrize("bias", [None, (1, 1, 1, "S"), (2, 4, 1, "S"), (2, 2, "S", 1)])
def test_intervals(ranks, even, is_causal, intervals, bias):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2}
    check(
        ranks, Case(lengths_for(ranks, even), bias=bias, intervals=intervals, options={"is_causal": is_causal}, **sizes)
    )


PACKED = {  # by how many ranks there are
    2: {True: (0, 7, 7, 30, 48), False: (0, 37, 57)},
    4: {True: (0, 3, 60, 61, 96), False: (0, 37, 42, 42, 50, 72)},
}


@on_both
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(
    "problem",
    [
        {},
        {"options": {"is_causal": True}},
        {"options": {"is_causal": True, "window_size": 6}, "bias": (1, 2, 1, "S"), "hidden": 0.1},
        {"options": {"is_causal": True, "window_size": 6, "fixed_shapes": False}, "bias": (1, 1, 1, "S"), "tied": 3},
        {"options": {"is_causal": True, "window_size": 6, "fixed_shapes": True}, "bias": (1, 4, 1, "S"), "tied": 3},
        {"options": {"is_causal": True, "window_size": 1000}, "bias": (1, 2, 1, "S")},
        {"mask": (1, 2, 1, "S"), "bias": (1, 4, 1, "S"), "options": {"is_causal": True, "softcap": 2.0}},
        {"intervals": "any", "options": {"softmax_scale": 0.3}},
    ],
)
def test_packed_sequences(ranks, even, problem):
    check(ranks, Case(lengths_for(ranks, even), heads=4, kv_heads=2, cu_seqlens=PACKED[ranks.size][even], **problem))


# Gathering keys and values


DENSE = [
    {},
    {"mask": (1, 1, "S", "S")},
    {"mask": (2, 4, "S", "S"), "bias": (1, 2, "S", "S")},
    {"mask": (2, 2, 1, "S"), "bias": (2, 4, 1, "S")},
    {"mask": (2, 1, "S", 1), "bias": (1, 1, 1, "S"), "hidden": 0.3},
    {"bias": (1, 1, "S", "S"), "options": {"softcap": 2.0}},
    {"bias": (2, 4, "S", "S"), "hidden": 0.3},
    {"bias": (2, 2, "S", 1), "mask": (1, 4, 1, "S"), "hidden": 0.3},
    {"bias": (1, 1, 1, 1)},
]


def of_portions(case, portion_bytes):
    """`sharded`, with so many bytes of keys and values gathered at once."""
    from flash_dmattn.parallel import dense

    usual, dense.PORTION_BYTES = dense.PORTION_BYTES, portion_bytes
    try:
        return sharded(case)
    finally:
        dense.PORTION_BYTES = usual


@on_both
@pytest.mark.parametrize("layout", ["even", "uneven", "zigzag"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("problem", DENSE)
def test_dense(ranks, layout, is_causal, problem):
    options = {"is_causal": is_causal, **problem.get("options", {})}
    case = Case(
        lengths_for(ranks, layout != "uneven"),
        batch=2,
        heads=4,
        kv_heads=2,
        layout="zigzag" if layout == "zigzag" else "contiguous",
        **{**problem, "options": options},
    )
    check(ranks, case)


@on_both
def test_portions(ranks):
    """Heads one by one and all together: the same."""
    sizes = {"batch": 1, "heads": 8, "kv_heads": 4}
    for problem in (
        {},
        {"bias": (1, 8, "S", "S"), "mask": (1, 4, "S", "S")},
        {"bias": (1, 1, 1, "S"), "mask": (1, 1, 1, "S")},
    ):
        case = Case(lengths_for(ranks), options={"is_causal": True}, **sizes, **problem)
        for rank in ranks.results(compare_portions, case):
            assert rank == [True] * 6 or (rank == [True] * 5 and case.bias is None)


def compare_portions(case):
    one_by_one, together = of_portions(case, 1)[0], of_portions(case, 1 << 30)[0]
    return [torch.allclose(x, y, rtol=0, atol=1e-12) for x, y in zip(one_by_one, together)]


@on_two
def test_intervals_beside_a_dense_bias(ranks):
    for intervals in ("window", "any", "any_of_query_heads"):
        check(ranks, Case((30, 27), 2, 4, 2, bias=(1, 4, "S", "S"), intervals=intervals, options={"is_causal": True}))


@on_both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(ranks, dtype):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 20, "dtype": dtype}
    window = {"is_causal": True, "window_size": 30}
    check(
        ranks, Case(lengths_for(ranks, False), bias=(2, 2, 1, "S"), bias_dtype=torch.float32, options=window, **sizes)
    )
    check(ranks, Case(lengths_for(ranks), bias=(2, 4, 1, "S"), options={"is_causal": True}, **sizes))
