"""Context parallel attention on processes with gloo: against one process that has the whole sequence."""

import contextlib
import itertools
import json
import os
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import NAMES, assert_close, in_float64, reference
from programs import module_of
from ranks import Ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flash_dmattn import KeyIntervalMask, KeyLists
from flash_dmattn.parallel import context_parallel_attention, count_traffic, positions, shard, unshard

EXAMPLE, BENCHMARK = "examples/train_lm.py", "benchmarks/parallel_performance.py"
TINY = {"batch_size": 4, "seq_len": 32, "window": 8, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2}

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes, where pytest-xdist goes by groups


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


@pytest.fixture(scope="module")
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, "cpu:gloo,cuda:nccl")
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(request):
    return request.getfixturevalue(request.param)


on_two = pytest.mark.parametrize("ranks", ["two"], indirect=True)
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


def sharded(case, alone=False):
    """(out, lse, dq, dk, dv, dbias) of this rank, or of a group of this process alone; and what was sent."""
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
    leaves = [x.detach().clone().requires_grad_() for x in (*rows, bias) if x is not None]
    with count_traffic() as traffic:
        out, lse = context_parallel_attention(
            *leaves[:3], mask, leaves[3] if bias is not None else None, group=group, return_lse=True, **options
        )
        gradients = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    return [x.detach().cpu() for x in (out, lse, *gradients)], traffic


def device_of_rank():
    return torch.device("cuda", dist.get_rank()) if "nccl" in dist.get_backend_config() else torch.device("cpu")


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


def nothing(batch, **options):
    """Shapes and gradients where there is no batch element or no row."""
    rows = [torch.randn(batch, 6 * (batch == 0), n, 8, requires_grad=True) for n in (4, 2, 2)]
    bias = torch.randn(batch or 1, 2, 1, rows[0].shape[1], requires_grad=True)
    out = context_parallel_attention(*rows, attn_bias=bias, is_causal=True, **options)
    gradients = torch.autograd.grad(out.sum(), [*rows, bias])
    return out.shape == rows[0].shape and all(
        not x.any() and x.shape == y.shape for x, y in zip(gradients, [*rows, bias])
    )


@pytest.mark.parametrize("options", [{}, {"window_size": 3}, {"window_size": 3, "fixed_shapes": False}])
def test_nothing_to_attend_to(two, options):
    for batch in (0, 2):
        assert two.results(partial(nothing, batch, **options)) == [True, True]


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


@on_two
@pytest.mark.parametrize(
    "problem",
    [
        {"bias": (2, 2, 1, "S"), "intervals": "any"},
        {"bias": (2, 4, "S", 1), "intervals": "any_for_all"},
        {"bias": (2, 4, "S", "S"), "mask": (2, 1, 1, "S")},
        {"bias": (2, 1, 1, "S"), "mask": (4, 2, "S", "S")},
    ],
)
def test_batches_that_share(ranks, problem):
    check(ranks, Case(lengths_for(ranks), batch=4, heads=4, kv_heads=2, **problem))


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
        {"layout": "zigzag"},
        {"layout": "zigzag", "bias": (1, 4, 1, "S"), "mask": (1, 1, "S", "S")},
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


# What is sent


def halo(case, fixed_shapes):
    """How many keys a head this rank fetches for a window."""
    from flash_dmattn.parallel.halo import plan_of_selection
    from flash_dmattn.parallel.shards import Shards

    rank = dist.get_rank()
    bias = of_rank(case, case.make()[2], 3, rank)
    plan, mask = plan_of_selection(
        Shards(dist.group.WORLD, case.lengths), bias, case.options["window_size"], None, case.kv_heads, fixed_shapes
    )
    first = sum(case.lengths[:rank])
    # What the first rows see of other ranks, by the definition of the mask.
    dense = KeyIntervalMask.topk(case.make()[2], case.options["window_size"]).to_dense()
    needed = dense[:, :, first : first + case.lengths[rank], :first].any(dim=2).sum(dim=-1)
    return plan.fetched, sum(plan.to_receive), needed, mask.end.shape


@on_both
def test_no_more_keys_are_fetched_than_rows_see(ranks):
    case = Case((64,) * ranks.size, heads=4, kv_heads=4, bias=(1, 4, 1, "S"), options={"window_size": 20})
    for rank, (fetched, received, needed, shape) in enumerate(ranks.results(halo, case, False)):
        assert received == needed.sum() and fetched == needed.max() <= 20
        assert shape == (1, 4, fetched + 64)
        assert rank == 0 or fetched > 0
    for rank, (fetched, received, *_) in enumerate(ranks.results(halo, case, True)):
        assert fetched == 20 * rank and received == 4 * fetched


def check_best_keys(device):
    """Of more keys those that the last row sees, in order, and hidden ones only where there are no more."""
    from flash_dmattn.parallel.halo import best_keys

    generator = torch.Generator().manual_seed(0)
    for hidden, tied in ((0.0, 0), (0.3, 0), (0.0, 4), (0.97, 4)):
        bias = torch.randn(2, 3, 700, generator=generator)
        bias = (bias * tied).round() if tied else bias
        bias = bias.masked_fill(torch.rand(bias.shape, generator=generator) < hidden, -torch.inf)
        for count in (0, 1, 64, 100, 699):
            keys, is_one = (x.cpu() for x in best_keys(bias.to(device), count))
            assert keys.shape == is_one.shape == (2, 3, count) and keys.dtype == torch.int64
            is_one &= bias.gather(-1, keys) > -torch.inf
            wanted = KeyIntervalMask.topk(bias, count, 1).to_dense()[:, :, 0]
            for head in itertools.product(range(2), range(3)):
                assert torch.equal(keys[head][is_one[head]], wanted[head].nonzero().flatten())


def test_best_keys():
    check_best_keys("cpu")


@pytest.mark.gpu
def test_best_keys_on_gpus():
    check_best_keys("cuda")


@on_both
@pytest.mark.parametrize("fixed_shapes", [None, False])
def test_bytes_of_a_window(ranks, fixed_shapes):
    """Together the ranks send at most 1.2 times `w` keys and values a rank, their gradients, and the bias."""
    heads, head_dim, window = 2, 64, 32
    options = {"is_causal": True, "window_size": window, "fixed_shapes": fixed_shapes}
    case = Case(
        (128,) * ranks.size,
        heads=4,
        kv_heads=heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        bias=(1, heads, 1, "S"),
        bias_dtype=torch.float32,
        options=options,
    )
    traffic = check(ranks, case)
    keys = window * heads * head_dim * 2  # bytes
    bias = (case.seqlen - 128) * heads * 4
    assert sum(t.sent for t in traffic) == sum(t.received for t in traffic)
    assert sum(t.sent for t in traffic) <= 1.2 * ranks.size * (4 * keys + bias)
    assert max(t.collectives for t in traffic) <= 4  # bias, the worst keys, keys and values; their gradients


@on_both
def test_a_window_sends_the_same_at_any_length(ranks):
    def sent(length):
        options = {"is_causal": True, "window_size": 16}
        case = Case((length,) * ranks.size, bias=(1, 1, 1, "S"), options=options)
        return sum(traffic.sent for _, traffic in ranks.results(sharded, case))

    assert sent(300) <= 1.2 * sent(100)


# Layouts


def shard_and_join(layout, lengths):
    whole = torch.arange(2 * sum(lengths) * 3).view(2, -1, 3)
    part = shard(whole, layout=layout)
    places = positions(whole.shape[1], layout=layout)
    uneven = whole.split(lengths, 1)[dist.get_rank()]
    joined_again = unshard(part, layout=layout), unshard(part.transpose(1, 2), -1, layout=layout).transpose(1, 2)
    return (
        torch.equal(part, whole[:, places]),
        all(torch.equal(x, whole) for x in joined_again),
        layout == "zigzag" or torch.equal(unshard(uneven), whole),
    )


@on_both
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_shards(ranks, layout):
    for results in ranks.results(shard_and_join, layout, lengths_for(ranks, layout == "zigzag")):
        assert results == (True, True, True)


def shard_of_mask(layout="contiguous"):
    mask = KeyIntervalMask.sliding_window(21, 21, 5)
    part, places = shard(mask, layout=layout), positions(21)
    same = torch.equal(part.start, mask.start[..., places]) and torch.equal(part.end, mask.end[..., places])
    return same and part.rows == 21 and part.keys_per_row == 5


def test_shards_of_a_mask(two):
    assert two.results(shard_of_mask) == [True, True]
    assert all("contiguous" in failure.message for failure in two.run(shard_of_mask, "zigzag"))


# Groups and meshes


def attend_in(kind):
    """out and dkey of a window in a group of two ranks out of four, by a group and by a mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    group = {"group": mesh.get_group("context"), "mesh": mesh["context"]}[kind]
    rank = mesh.get_local_rank("context")
    case = Case((20, 20), bias=(1, 1, 1, "S"), options={"is_causal": True, "window_size": 7})
    rows, _, bias, *_ = case.make()
    key = of_rank(case, rows[1], 1, rank).requires_grad_()
    query, value, bias = of_rank(case, rows[0], 1, rank), of_rank(case, rows[2], 1, rank), of_rank(case, bias, 3, rank)
    out = context_parallel_attention(query, key, value, attn_bias=bias, group=group, **case.options)
    out.sum().backward()
    return out.detach(), key.grad


def test_groups_and_meshes(four):
    rows, _, bias, *_ = Case((20, 20), bias=(1, 1, 1, "S")).make()
    key = rows[1].requires_grad_()
    out = reference(rows[0], key, rows[2], attn_bias=bias, is_causal=True, window_size=7)
    out.sum().backward()
    for kind in ("group", "mesh"):
        results = four.results(attend_in, kind)
        for pair in (results[:2], results[2:]):
            assert torch.allclose(torch.cat([x for x, _ in pair], 1), out, rtol=0, atol=1e-11)
            assert torch.allclose(torch.cat([x for _, x in pair], 1), key.grad, rtol=0, atol=1e-11)


def wrong_group(kind):
    from torch.distributed.device_mesh import init_device_mesh

    rows = [torch.zeros(1, 4, 2, 8) for _ in range(3)]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    of_each = [dist.new_group([rank]) for rank in range(2)]
    group = {"number": 3, "mesh": mesh, "of others": of_each[1 - dist.get_rank()]}[kind]
    context_parallel_attention(*rows, group=group)


@pytest.mark.parametrize(
    "kind, error, message",
    [
        ("number", "TypeError", "ProcessGroup"),
        ("mesh", "ValueError", "one dimension"),
        ("of others", "ValueError", "hold"),
    ],
)
def test_wrong_groups_are_errors_on_every_rank(two, kind, error, message):
    for failure in two.run(wrong_group, kind):
        assert failure.kind == error and message in failure.message and "group must" in failure.message


def test_torch_distributed_must_be_initialized():
    rows = [torch.zeros(1, 4, 2, 8) for _ in range(3)]
    with pytest.raises(RuntimeError, match="init_process_group"):
        context_parallel_attention(*rows)


ALONE = [
    {"bias": (1, 2, 1, "S"), "options": {"is_causal": True, "window_size": 11}},
    {"bias": (1, 1, 1, "S"), "options": {"is_causal": True, "window_size": 5}, "cu_seqlens": (0, 7, 48)},
    {"bias": (1, 4, "S", "S"), "mask": (1, 1, "S", "S")},
    {"intervals": "any"},
    {"layout": "zigzag", "options": {"is_causal": True}},
]


@pytest.mark.parametrize("problem", ALONE)
def test_a_group_of_one(two, problem):
    case = Case((48,), heads=4, kv_heads=2, **problem)
    exact = whole(case, torch.float64)
    for ours, traffic in two.results(sharded, case, True):
        for x, y in zip(joined(case, [ours]), exact, strict=True):
            assert torch.allclose(x, y, rtol=0, atol=1e-11)
        assert traffic.sent == 0


# Errors


def attend(changes, common=()):
    """A call with what each rank changes of it: shapes of tensors, or options."""
    changes = {**dict(common), **changes.get(dist.get_rank(), changes.get("all", {}))}
    sizes = {"query": (1, 8, 4, 8), "key": (1, 8, 2, 8), "value": (1, 8, 2, 8), "attn_bias": None, "attn_mask": None}
    tensors = {}
    for name, shape in sizes.items():
        shape = changes.pop(name, shape)
        if isinstance(shape, tuple):
            tensors[name] = torch.zeros(shape, dtype=torch.bool if name == "attn_mask" else torch.float32)
        else:
            tensors[name] = shape
    if (dtype := changes.pop("key_dtype", None)) is not None:
        tensors["key"] = tensors["key"].to(dtype)
    if changes.pop("nan", False):
        tensors["attn_bias"][0, 0, 0, 3] = torch.nan
    if changes.pop("dtensor", False):
        mesh = DeviceMesh.from_group(dist.new_group([dist.get_rank()], use_local_synchronization=True), "cpu")
        tensors["value"] = DTensor.from_local(tensors["value"], mesh)
    if changes.pop("requires_grad", False):
        tensors["key"].requires_grad_()
    return context_parallel_attention(**tensors, **changes).shape


WINDOW = {"attn_bias": (1, 2, 1, 8), "is_causal": True, "window_size": 3}
REFUSED_BY_ONE = [
    ({"key_dtype": torch.float64}, {}, "TypeError", "key"),
    ({"key": (1, 9, 2, 8)}, {}, "ValueError", "value"),
    ({"key": (1, 9, 2, 8), "value": (1, 9, 2, 8)}, {}, "ValueError", "as many keys as rows"),
    ({"query": 3}, {}, "TypeError", "query"),
    ({"nan": True}, WINDOW, "ValueError", "NaN"),
    ({"is_causal": False}, WINDOW, "ValueError", "is_causal"),
    ({"softcap": -1.0}, {}, "ValueError", "softcap"),
    ({"layout": "ring"}, {}, "ValueError", "layout"),
    ({"layout": "zigzag"}, WINDOW, "ValueError", "zigzag"),
    ({"attn_bias": (1, 3, 1, 8)}, WINDOW, "ValueError", "attn_bias"),
    ({"attn_mask": KeyLists.build(KeyIntervalMask.causal(8, 8), 8)}, {}, "TypeError", "KeyLists"),
    ({"attn_mask": KeyIntervalMask.causal(16, 16)}, {}, "ValueError", "shard"),
    ({"dtensor": True}, {}, "TypeError", "to_local"),
    ({"cu_seqlens": torch.tensor([0, 16])}, {}, "TypeError", "cu_seqlens"),
    ({"fixed_shapes": "yes"}, WINDOW, "TypeError", "fixed_shapes"),
]


@pytest.mark.parametrize("change, common, error, message", REFUSED_BY_ONE)
def test_what_one_rank_refuses_raises_on_all(two, change, common, error, message):
    other, one = two.run(attend, {1: change}, common)
    assert one.kind == error and message in one.message, one
    assert other.kind == "RankError" and "rank 1" in other.message and message in other.message, other
    assert all(isinstance(shape, torch.Size) for shape in two.run(attend, {}, common))  # and the group goes on


REFUSED_BY_ALL = [
    ({1: {"is_causal": True}}, {}, "is causal"),
    ({1: {"query": (1, 8, 2, 8)}}, {}, "heads of query"),
    ({1: {"window_size": 4}}, WINDOW, "window size"),
    ({1: {"softmax_scale": 0.5}}, {}, "softmax scale"),
    ({1: {"requires_grad": True}}, {}, "gradients"),
    ({1: {"attn_bias": None}}, {"attn_bias": (1, 2, 1, 8)}, "attn bias"),
    ({1: {"attn_bias": (1, 1, 1, 8)}}, {"attn_bias": (1, 2, 1, 8)}, "heads of attn bias"),
    ({"all": {"attn_bias": (1, 2, 8, 8)}}, {}, "attn_bias must be"),
    ({"all": {"attn_mask": (1, 2, 1, 16)}}, {}, "attn_mask must be"),
    ({1: {"attn_mask": (1, 1, 8, 16)}}, {"attn_mask": (1, 1, 1, 8)}, "attn_mask must be"),
    ({"all": {"attn_mask": KeyIntervalMask.causal(8, 8)}}, {}, "made for 8"),
    ({1: {"query": (1, 12, 4, 8), "key": (1, 12, 2, 8), "value": (1, 12, 2, 8)}}, {"layout": "zigzag"}, "same length"),
    ({"all": dict.fromkeys(("query", "key", "value"), (1, 7, 2, 8))}, {"layout": "zigzag"}, "2 x 2"),
]


@pytest.mark.parametrize("changes, common, message", REFUSED_BY_ALL)
def test_what_does_not_fit_together_raises_on_all(two, changes, common, message):
    for failure in two.run(attend, changes, common):
        assert failure.kind == "ValueError" and message in failure.message, failure


def test_packed_sequences_must_be_the_same_and_end_with_the_rows(two):
    rows = dict.fromkeys(("query", "key", "value"), (8, 2, 8))

    def sequences(*cuts):
        return {"cu_seqlens": torch.tensor(cuts, dtype=torch.int32)}

    for failure in two.run(attend, {0: sequences(0, 5, 16), 1: sequences(0, 6, 16)}, rows):
        assert failure.kind == "ValueError" and "cu seqlens" in failure.message
    for failure in two.run(attend, {"all": sequences(0, 5, 15)}, rows):
        assert failure.kind == "ValueError" and "cu_seqlens" in failure.message


def test_lengths_that_are_given_are_not_asked_for(two):
    for problem in ({"bias": (1, 1, 1, "S"), "options": {"is_causal": True, "window_size": 9}}, {}):
        options = {**problem.get("options", {}), "shard_lengths": (30, 27)}
        check(two, Case((30, 27), **{**problem, "options": options}))
    for failure in two.run(attend, {"all": {"shard_lengths": (8, 8, 8)}}):
        assert failure.kind == "ValueError" and "shard_lengths" in failure.message
    for failure in two.run(attend, {"all": {"shard_lengths": (9, 9)}}):
        assert failure.kind == "ValueError" and "shard_lengths" in failure.message


def fail_midway():
    """Rank 1 fails after the ranks have agreed; rank 0 waits for it no longer than the group's time-out."""
    import time
    from datetime import timedelta

    from flash_dmattn.parallel import collectives

    group = dist.new_group(timeout=timedelta(seconds=2))
    rows = [torch.zeros(1, 4, 2, 8) for _ in range(3)]
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:
            error = torch.OutOfMemoryError("no room")
            stack.enter_context(mock.patch.object(collectives, "start_all_gather", side_effect=error))
        try:
            context_parallel_attention(*rows, group=group)
        except RuntimeError as error:
            return type(error).__name__, str(error), time.perf_counter() - started


def test_a_rank_that_fails_midway_is_not_waited_for_forever(two):
    waiting, failed = two.results(fail_midway)
    assert failed[:2] == ("OutOfMemoryError", "no room")
    assert waiting is not None and waiting[2] < 20


# With other parts of PyTorch


def checkpointed(case):
    """Gradients with the forward made once more in the backward, and without."""
    from torch.utils.checkpoint import checkpoint

    rank = dist.get_rank()
    rows, _, bias, dout, _ = case.make()
    tensors = [of_rank(case, x, 1, rank) for x in rows] + [of_rank(case, bias, 3, rank)]
    dout = of_rank(case, dout, 1, rank)

    def gradients(wrap):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = wrap(lambda q, k, v, b: context_parallel_attention(q, k, v, attn_bias=b, **case.options), *leaves)
        return torch.autograd.grad(out, leaves, dout)

    again = gradients(lambda function, *args: checkpoint(function, *args, use_reentrant=False))
    return all(map(torch.equal, gradients(lambda function, *args: function(*args)), again))


def test_checkpointing(two):
    for options in ({"is_causal": True, "window_size": 9}, {"is_causal": True}):
        assert two.results(checkpointed, Case((24, 24), bias=(1, 1, 1, "S"), options=options)) == [True, True]


def repeated(case):
    (first, _), (second, _) = sharded(case), sharded(case)
    return all(map(torch.equal, first, second))


@on_both
def test_the_same_bits(ranks):
    sizes = {"heads": 4, "kv_heads": 2, "dtype": torch.float32, "bias": (1, 2, 1, "S")}
    for options in ({"window_size": 15}, {}):
        case = Case(lengths_for(ranks, False), options={"is_causal": True, "deterministic": True, **options}, **sizes)
        assert all(ranks.results(repeated, case))


def under_autocast():
    rows = [torch.randn(1, 8, 2, 8) for _ in range(3)]
    bias = torch.randn(1, 2, 1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        return [
            context_parallel_attention(*rows, attn_bias=bias, is_causal=True, **options).dtype
            for options in ({"window_size": 3}, {})
        ]


def test_autocast(two):
    assert two.results(under_autocast) == [[torch.bfloat16] * 2] * 2


def compiled():
    """A graph goes on before and after the call."""
    rows = [torch.randn(1, 8, 2, 8) for _ in range(3)]

    def model(query, key, value):
        return context_parallel_attention(query * 2, key, value, is_causal=True) + 1

    return torch.allclose(torch.compile(model, backend="eager")(*rows), model(*rows))


def test_compile(two):
    assert two.results(compiled) == [True, True]


# DTensor: the operators over batch elements and heads


def over_dtensors(problem, dim, divided_bias):
    """How far (out, dq, dk, dv, dbias) of DTensors are from those of whole tensors, by default of 2 batch elements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from flash_dmattn import flash_dmattn_func

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    problem = dict(problem)
    batch = problem.pop("batch", 2)
    shapes = [(batch, 600, 4, 16), (batch, 600, 2, 16), (batch, 600, 2, 16)] + [problem.pop("bias", None)]
    mask, indices, tile_rows = (problem.pop(name, None) for name in ("mask", "indices", "tile_rows"))
    tensors = [torch.randn(shape) for shape in shapes if shape is not None]
    dout = torch.randn(shapes[0])

    def run(place):
        leaves = [place(x, dim) for x in tensors[:3]]
        leaves += [place(x, None if not divided_bias else {2: 1, 0: 0}[dim]) for x in tensors[3:]]
        leaves = [x.detach().requires_grad_() for x in leaves]
        bias = leaves[3] if len(leaves) == 4 else None
        generator, masks = torch.Generator().manual_seed(0), None
        if mask:
            masks = place(torch.rand(mask, generator=generator) < 0.6, {2: 1, 0: 0}[dim])
        elif indices:
            chosen = torch.randint(-1, 600, indices, generator=generator, dtype=torch.int32)
            masks = KeyLists.from_indices(place(chosen, {2: 1, 0: 0}[dim]), 600, 600, tile_rows=tile_rows)
        out = flash_dmattn_func(*leaves[:3], masks, bias, **problem)
        return out, *torch.autograd.grad(out, leaves, place(dout, dim))

    def distributed(tensor, dim):
        return distribute_tensor(tensor, mesh, [Replicate() if dim is None else Shard(dim)])

    ours, exact = run(distributed), run(lambda tensor, dim: tensor)
    assert ours[0].placements == (Shard(dim),) and ours[1].placements == (Shard(dim),)
    return max((x.full_tensor() - y).abs().max().item() for x, y in zip(ours, exact))


WINDOWED = {"is_causal": True, "window_size": 64}
# PyTorch 2.11 looks for the ranks' mesh in an operator's first argument alone, which for lists of keys is none.
MAKES_LISTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def skip_lists(problem):
    makes_lists = "indices" in problem or ("window_size" in problem and problem.get("sparse") != "tiles")
    if makes_lists and not MAKES_LISTS:
        pytest.skip("lists of keys of DTensors need PyTorch 2.13")


@pytest.mark.parametrize(
    "problem, dim, divided_bias",
    [
        ({}, 2, False),
        ({}, 0, False),
        ({"bias": (2, 2, 1, 600), "is_causal": True}, 2, True),
        ({"bias": (2, 1, 1, 600)}, 2, False),
        ({"bias": (1, 4, 600, 600)}, 0, False),
        ({"batch": 4, "bias": (2, 4, 600, 600), "mask": (4, 1, 1, 600)}, 0, True),
        ({"batch": 4, "bias": (2, 4, 600, 600), "mask": (2, 4, 1, 600)}, 2, True),
        ({"bias": (2, 4, 600, 600), "mask": (2, 4, 600, 600)}, 2, True),
        ({"bias": (2, 2, 1, 600), **WINDOWED}, 2, True),
        ({"bias": (2, 2, 1, 600), **WINDOWED}, 0, True),
        ({"bias": (2, 2, 1, 600), "sparse": "tiles", **WINDOWED}, 2, True),
        ({"bias": (1, 1, 1, 600), **WINDOWED}, 2, False),
        ({"bias": (1, 2, 1, 600), **WINDOWED}, 0, False),
        ({"indices": (2, 2, 600, 20), "tile_rows": 1}, 2, False),
        ({"indices": (2, 2, 10, 20), "tile_rows": 64, "is_causal": True}, 0, False),
    ],
)
def test_dtensors(two, problem, dim, divided_bias):
    skip_lists(problem)
    assert max(two.results(over_dtensors, problem, dim, divided_bias)) < 1e-5


def test_ranks_divide_what_batch_elements_share(two):
    for failure in two.run(over_dtensors, {"batch": 6, "bias": (3, 4, 1, 600)}, 0, False):
        assert "sharded over 2 ranks, which must divide them and the 3 of a mask or bias" in failure.message


def test_lists_of_dtensors_are_not_moved(two):
    skip_lists(WINDOWED)
    for failure in two.run(over_dtensors, {"bias": (1, 2, 1, 600), **WINDOWED}, 2, False):
        assert "lists of keys" in failure.message


# The benchmark


def benchmark(arguments):
    return module_of(BENCHMARK).main(arguments)


def test_parallel_performance(two, tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    path = tmp_path / "result.json"
    assert two.results(benchmark, ["--device=cpu", "--shrink=8", "--samples=1", f"--json={path}"]) == [0, 0]
    content = json.loads(path.read_text())
    assert (content["ranks"], content["shrink"]) == (2, 8)
    results = {(result["workload"], result["method"]): result for result in content["results"]}
    window, dense = "S2048 w128 H4/2 D64", "dense causal S1024 H4/2 D64"
    for key, result in results.items():
        if key != (dense, "PyTorch's ring"):  # for CUDA
            assert 0 < result["forward"] < result["both"], key
    ours, gathered = results[window, "ours"], results[window, "all-gather"]
    assert 0 < max(ours["sent"]) < 0.2 * max(gathered["sent"])
    assert max(ours["sent"] + ours["received"]) <= 1.2 * ours["budget"]
    # Keys and values to the other rank, twice; and the gradients of those that are its own back.
    of_others = 2 * 64 * 2 * 64 * 4
    assert results[dense, "zigzag"]["sent"] == [3 * of_others] * 2
    assert results[dense, "ours"]["sent"] == [2 * of_others, 3 * of_others]


def test_the_benchmark_says_what_was_missed():
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    script = module_of(BENCHMARK)
    strong, weak = next(iter(script.STRONG)), next(iter(script.WEAK))

    def measured(ours, sent):
        return [
            script.Measured(strong, script.ALONE, both=2.0),
            script.Measured(strong, script.OURS, both=ours, sent=[sent, 1], budget=100),
            script.Measured(weak, script.SHARE, both=1.0),
            script.Measured(weak, script.OURS, both=ours),
        ]

    assert script.failures(measured(1.0, 119)) == []
    assert len(script.failures(measured(1.0, 121))) == 1
    assert len(script.failures(measured(1.07, 119))) == 1  # weak scaling
    assert len(script.failures(measured(1.2, 119))) == 2


# The example


def train_example(options):
    with mock.patch.dict(os.environ, WORLD_SIZE=str(dist.get_world_size())):
        train_lm = module_of(EXAMPLE)
        return train_lm.train(train_lm.Config(**options))


def test_the_example_trains_as_one_process_does(four):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    train_lm = module_of(EXAMPLE)
    options = {**TINY, "steps": 4}
    alone = train_lm.train(train_lm.Config(**options))
    for context_parallel in (1, 2, 4):
        for losses in four.results(train_example, {**options, "context_parallel": context_parallel}):
            assert losses == pytest.approx(alone, rel=1e-4)


def test_the_example_refuses_ranks_that_do_not_fit(two):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    train_lm = module_of(EXAMPLE)
    for change, message in (
        ({"context_parallel": 3}, "must divide seq_len"),
        ({"context_parallel": 2}, "number of ranks"),
        ({"context_parallel": 2, "backend": "reference"}, "backend"),
    ):
        with pytest.raises(ValueError, match=message):
            train_lm.train(train_lm.Config(**{**TINY, "steps": 1, **change}))
    for failure in two.run(train_example, {**TINY, "steps": 1, "batch_size": 3}):
        assert failure.kind == "ValueError" and "batch_size" in failure.message


def heads_over_ranks():
    """How far the loss and the gradients of the example with its heads over the ranks are from the whole model's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    train_lm = module_of(EXAMPLE)
    config = train_lm.Config(**TINY)
    batch = train_lm.random_batch(train_lm.load_text(config)[0], config, torch.Generator().manual_seed(0))
    results = []
    for is_parallel in (False, True):
        model = train_lm.build_model(config)
        if is_parallel:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            whole, by_head = (Replicate(),) * 3, partial(ColwiseParallel, use_local_output=False)
            for block in model.blocks:
                plan = {
                    "attention": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
                    **{f"attention.{name}_proj": by_head() for name in "qkv"},
                    "attention.dt_proj": RowwiseParallel(output_layouts=Shard(-1), use_local_output=False),
                    "attention.o_proj": RowwiseParallel(),
                    "mlp.gate_proj": ColwiseParallel(),
                    "mlp.up_proj": ColwiseParallel(),
                    "mlp.down_proj": RowwiseParallel(),
                }
                parallelize_module(block, mesh, plan)
                attention = block.attention
                attention.A = torch.nn.Parameter(distribute_tensor(attention.A, mesh, [Shard(0)]))
        loss = train_lm.loss_of(model, batch, config)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append(
            (loss.detach(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()})
        )
    (loss, gradients), (parallel_loss, parallel_gradients) = results
    differences = {name: (gradients[name] - parallel_gradients[name]).abs().max().item() for name in gradients}
    return abs(loss - parallel_loss).item(), max(differences.values())


def test_tensor_parallel_by_heads(two):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    for loss, gradient in two.results(heads_over_ranks):
        assert loss < 1e-5 and gradient < 1e-5


# On two GPUs


ON_GPUS = [
    {"bias": (2, 2, 1, "S"), "hidden": 0.1, "options": {"is_causal": True, "window_size": 300}},
    {"bias": (2, 2, 1, "S"), "options": {"is_causal": True, "window_size": 300, "fixed_shapes": False}},
    {"bias": (1, 4, 1, "S"), "tied": 3, "options": {"is_causal": True, "window_size": 100}},
    {"bias": (2, 2, 1, "S"), "options": {"is_causal": True, "window_size": 100, "deterministic": True}},
    {
        "batch": 1,
        "bias": (1, 2, 1, "S"),
        "options": {"is_causal": True, "window_size": 100},
        "cu_seqlens": (0, 90, 800),
    },
    {"batch": 1, "cu_seqlens": (0, 90, 500, 800), "options": {"is_causal": True}},
    {"intervals": "window", "bias": (1, 1, 1, "S")},
    {"intervals": "any", "options": {"is_causal": True}},
    {"options": {"is_causal": True}},
    {"layout": "zigzag", "options": {"is_causal": True}},
    {"layout": "zigzag", "mask": (2, 2, 1, "S"), "bias": (2, 4, 1, "S"), "options": {"is_causal": True}},
    {"layout": "zigzag", "bias": (1, 4, "S", "S"), "options": {"is_causal": True}},
    {"mask": (2, 4, "S", "S"), "bias": (1, 2, "S", "S")},
]


@pytest.mark.gpu
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("problem", ON_GPUS)
def test_on_gpus(two_gpus, problem, even):
    if not even and problem.get("layout") == "zigzag":
        pytest.skip("zigzag shards are even")
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
    if "bias" in problem and problem["bias"][2] == 1:
        sizes["bias_dtype"] = torch.float32
    check(two_gpus, Case((400, 400) if even else (500, 300), **{**sizes, **problem}))


def window_of(tensors, **options):
    query, key, value, bias = tensors
    return context_parallel_attention(query, key, value, attn_bias=bias, is_causal=True, window_size=64, **options)


def new_tensors():
    shapes = ((1, 512, 4, 64), (1, 512, 2, 64), (1, 512, 2, 64))
    rows = [torch.randn(shape, device=device_of_rank(), dtype=torch.bfloat16) for shape in shapes]
    return [*rows, torch.randn(1, 2, 1, 512, device=device_of_rank())]


@torch.no_grad()
def captured():
    """Whether a CUDA graph gives what the call does, for tensors that came after it was captured."""
    static = new_tensors()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            window_of(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread of its own
        out = window_of(static)
    same = []
    for _ in range(2):
        for tensor, new in zip(static, new_tensors()):
            tensor.copy_(new)
        graph.replay()
        same.append(torch.allclose(out, window_of(static), rtol=0, atol=1e-2))
    return same


@pytest.mark.gpu
def test_cuda_graphs(two_gpus):
    assert two_gpus.results(captured) == [[True, True]] * 2


def in_a_group_of_nccl_alone():
    tensors = new_tensors()
    group = dist.new_group(backend="nccl")
    return torch.equal(window_of(tensors, group=group), window_of(tensors))


@pytest.mark.gpu
def test_a_group_of_nccl_alone(two_gpus):
    assert two_gpus.results(in_a_group_of_nccl_alone) == [True, True]
