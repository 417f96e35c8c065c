"""Context parallel attention over rows and keys of several ranks equals attention on one process."""

from functools import partial

import numpy as np
import pytest
import torch
from sharded_cases import Case, check, joined, lengths_for, of_rank, on_both, on_two, sharded, whole

from flash_dmattn import flash_dmattn_func
from flash_dmattn.parallel import context_parallel_attention

pytestmark = pytest.mark.xdist_group("ranks")  # the processes are started by one worker


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
def test_empty_batches_and_shards(two, options):
    for batch in (0, 2):
        assert two.results(partial(nothing, batch, **options)) == [True, True]


@on_two
@pytest.mark.parametrize("lengths", [(1, 3), (3, 1)])
@pytest.mark.parametrize("heads, kv_heads", [(2, 1), (4, 2)])
def test_a_shard_of_one_row_whose_bias_masks_it(ranks, lengths, heads, kv_heads):
    """Its key is seen by the rows of the other rank."""
    for bias_heads in (1, heads):
        case = Case(lengths, batch=2, heads=heads, kv_heads=kv_heads, bias=(2, bias_heads, "S", 1), masked=0.6)
        check(ranks, case)


def masked_batch_element():
    """Whether gradients are finite where a bias per row masks a batch element that holds NaN."""
    rows = [torch.randn(2, 4, 2, 8) for _ in range(3)]
    for x in rows:
        x[1] = torch.nan
    bias = torch.zeros(2, 1, 4, 1)
    bias[1] = -torch.inf
    table = torch.zeros(1, 1, 5)
    leaves = [x.requires_grad_() for x in (*rows, table)]
    out = context_parallel_attention(*leaves[:3], attn_bias=bias, relative_bias=table)
    return all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


def test_a_batch_element_that_a_row_bias_masks_may_hold_nan(two):
    assert two.results(masked_batch_element) == [True, True]


@on_two
@pytest.mark.parametrize("lengths", [(9, 7), (1, 8)])
def test_widths_of_keys_that_are_no_multiple_of_a_number(ranks, lengths):
    """Keys, values, biases and intervals travel side by side as bytes."""
    sizes = {"dtype": torch.bfloat16, "head_dim": 7, "value_dim": 8}
    for bias_dtype in (torch.bfloat16, torch.float32):
        check(ranks, Case(lengths, intervals="window", bias=(1, 1, 1, "S"), bias_dtype=bias_dtype, **sizes))


@on_two
@pytest.mark.parametrize(
    "problem",
    [{}, {"bias": (1, 1, "S", "S")}, {"cu_seqlens": (0, 5, 30, 57)}],
    ids=["exchange", "all-gather", "variable length"],
)
def test_intervals_that_end_beyond_32_bits(ranks, problem):
    check(ranks, Case((30, 27), intervals="unbounded", **problem))


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
    check(ranks, Case(lengths_for(ranks, even), masked=0.2, options=options, **shape))


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
def test_masks_and_biases_shared_by_batch_elements(ranks, problem):
    check(ranks, Case(lengths_for(ranks), batch=4, heads=4, kv_heads=2, **problem))


PACKED = {  # by the number of ranks
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
        {"options": {"is_causal": True, "window_size": 6}, "bias": (1, 2, 1, "S"), "masked": 0.1},
        {"options": {"is_causal": True, "window_size": 6, "fixed_shapes": False}, "bias": (1, 1, 1, "S"), "tied": 3},
        {"options": {"is_causal": True, "window_size": 6, "fixed_shapes": True}, "bias": (1, 4, 1, "S"), "tied": 3},
        {"options": {"is_causal": True, "window_size": 1000}, "bias": (1, 2, 1, "S")},
        {"mask": (1, 2, 1, "S"), "bias": (1, 4, 1, "S"), "options": {"is_causal": True, "softcap": 2.0}},
        {"intervals": "any", "options": {"softmax_scale": 0.3}},
    ],
)
def test_packed_sequences(ranks, even, problem):
    check(ranks, Case(lengths_for(ranks, even), heads=4, kv_heads=2, cu_seqlens=PACKED[ranks.size][even], **problem))


DENSE = [
    {},
    {"mask": (1, 1, "S", "S")},
    {"mask": (2, 4, "S", "S"), "bias": (1, 2, "S", "S")},
    {"mask": (2, 2, 1, "S"), "bias": (2, 4, 1, "S")},
    {"mask": (2, 1, "S", 1), "bias": (1, 1, 1, "S"), "masked": 0.3},
    {"bias": (1, 1, "S", "S"), "options": {"softcap": 2.0}},
    {"bias": (2, 4, "S", "S"), "masked": 0.3},
    {"bias": (2, 2, "S", 1), "mask": (1, 4, 1, "S"), "masked": 0.3},
    {"bias": (1, 1, 1, 1)},
]


def dense_case(ranks, layout, is_causal, problem):
    """A problem in the layout "even", "uneven" or "zigzag"."""
    options = {"is_causal": is_causal, **problem.get("options", {})}
    return Case(
        lengths_for(ranks, layout != "uneven"),
        batch=2,
        heads=4,
        kv_heads=2,
        layout="zigzag" if layout == "zigzag" else "contiguous",
        **{**problem, "options": options},
    )


def of_portions(case, portion_bytes):
    """`sharded`, gathering `portion_bytes` of keys and values at once."""
    from flash_dmattn.parallel import dense

    usual, dense.HEAD_SLICE_BYTES = dense.HEAD_SLICE_BYTES, portion_bytes
    try:
        return sharded(case)
    finally:
        dense.HEAD_SLICE_BYTES = usual


@on_both
@pytest.mark.parametrize("layout", ["even", "uneven", "zigzag"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("problem", DENSE)
def test_dense(ranks, layout, is_causal, problem):
    check(ranks, dense_case(ranks, layout, is_causal, problem))


@on_both
def test_portions(ranks):
    """Gathering head by head and all heads at once give the same results."""
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


@on_both
@pytest.mark.parametrize("value_dim", [3, 20])
def test_a_value_of_another_head_dimension(ranks, value_dim):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 12, "value_dim": value_dim}
    window = {"is_causal": True, "window_size": np.int64(11)}
    check(ranks, Case(lengths_for(ranks, False), bias=(2, 2, 1, "S"), options=window, **sizes))
    check(ranks, Case(lengths_for(ranks), bias=(2, 4, "S", "S"), options={"is_causal": True}, **sizes))


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


@on_both
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("layout", ["even", "uneven", "zigzag"])
@pytest.mark.parametrize(
    "problem",
    [
        {"relative": (1, 4, 2 * 300 + 1)},
        {"relative": (2, 1, 2 * 9 + 1), "bias": (1, 2, 1, "S")},
        {"relative": (1, 2, 1), "bias": (2, 4, "S", "S"), "mask": (1, 1, 1, "S")},
    ],
)
def test_relative_bias_counts_distances_in_the_whole_sequence(ranks, layout, is_causal, problem):
    check(ranks, dense_case(ranks, layout, is_causal, problem))


@on_two
def test_relative_bias_with_intervals(ranks):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2}
    check(ranks, Case(lengths_for(ranks), intervals="any", relative=(1, 2, 2 * 30 + 1), **sizes))


def with_sinks(case):
    """Whether sinks on all ranks are those of one process: the outputs of this rank's rows, and the gradient."""
    rows, _, _, dout, _ = case.make()
    rank, sinks = torch.distributed.get_rank(), torch.linspace(-1, 1, case.heads, requires_grad=True)
    parts = [of_rank(case, x, 1, rank) for x in rows]
    out = context_parallel_attention(*parts, sinks=sinks)
    expected = of_rank(case, flash_dmattn_func(*rows, sinks=sinks), 1, rank)
    own = of_rank(case, dout, 1, rank)
    gradients = [torch.autograd.grad(x, sinks, own)[0] for x in (out, expected)]
    return torch.allclose(out, expected) and torch.allclose(*gradients)


def test_sinks(two):
    assert two.results(with_sinks, Case((24, 20), heads=4, kv_heads=2)) == [True, True]
