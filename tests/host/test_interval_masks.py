"""KeyIntervalMask: its algebra against dense masks, the rows that it is made for, and its errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dmattn import (
    KeyIntervalMask,
    KeyLists,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    relative,
)


def arange_mask(seqlen_q, seqlen_k):
    """Row i's own key i + (Sk - Sq) as a column, and the keys."""
    return torch.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q), torch.arange(seqlen_k)


def rand_intervals(batch, heads, keys, rows, generator):
    """Random intervals: some are empty, some begin before row 0 or end after the last row."""
    return torch.randint(-2, rows + 3, (2, batch, heads, keys), generator=generator, dtype=torch.int32)


@settings(deadline=None, max_examples=50)
@given(
    batch=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    heads=st.sampled_from([(1, 1), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4)]),
    rows=st.integers(0, 9),
    keys=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
def test_and_is_what_both_show(batch, heads, rows, keys, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (KeyIntervalMask(*rand_intervals(*sizes, keys, rows, generator)) for sizes in zip(batch, heads))
    dense = [mask.to_dense(rows).repeat_interleave(max(heads) // mask.heads, dim=1) for mask in (a, b)]
    both = a & b
    assert both.shape == (max(batch), max(heads), keys)
    assert torch.equal(both.to_dense(rows), dense[0] & dense[1])
    assert torch.equal((b & a).to_dense(rows), both.to_dense(rows))


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(0, 9), keys=st.integers(0, 9), seed=st.integers(0, 1000))
def test_dense_and_density(rows, keys, seed):
    start, end = rand_intervals(2, 3, keys, rows, torch.Generator().manual_seed(seed))
    mask = KeyIntervalMask(start, end)
    dense = mask.to_dense(rows)
    assert dense.shape == (2, 3, rows, keys) and dense.dtype == torch.bool
    for i in range(rows):
        assert torch.equal(dense[:, :, i], (start <= i) & (i < end))
    assert mask.density(rows).item() == pytest.approx(dense.double().mean().item() if dense.numel() else 0)
    assert mask.to_dense().shape == (2, 3, keys, keys)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype):
    """The number of visible scores of 1000 rows is not a finite float16."""
    mask, default = KeyIntervalMask.causal(1000, 1000), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert mask.density().dtype == torch.float32 and mask.density().item() == pytest.approx(0.5005)
        assert relative.window(7, 3).dtype == torch.float32
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 7), (7, 3), (1, 4), (0, 3), (3, 0)])
def test_causal_and_sliding_window(seqlen_q, seqlen_k):
    own, keys = arange_mask(seqlen_q, seqlen_k)
    assert torch.equal(KeyIntervalMask.causal(seqlen_q, seqlen_k).to_dense(seqlen_q)[0, 0], keys <= own)
    for window in (0, 1, 3, 20):
        mask = KeyIntervalMask.sliding_window(seqlen_q, seqlen_k, window)
        assert torch.equal(mask.to_dense(seqlen_q)[0, 0], (own - window < keys) & (keys <= own))
        assert mask.keys_per_row == window
    for left, right in ((0, 0), (2, 0), (1, 3), (0, 20)):
        mask = KeyIntervalMask.sliding_window(seqlen_q, seqlen_k, (left, right))
        assert torch.equal(mask.to_dense(seqlen_q)[0, 0], (own - left <= keys) & (keys <= own + right))
        assert mask.keys_per_row == left + right + 1
    for left, right in ((None, 1), (2, None), (None, None)):
        widest = [20 if side is None else side for side in (left, right)]
        ours, expected = (KeyIntervalMask.sliding_window(seqlen_q, seqlen_k, w) for w in ((left, right), tuple(widest)))
        assert torch.equal(ours.to_dense(), expected.to_dense())


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 7), (7, 3), (1, 4), (0, 3), (3, 0)])
def test_prefix_lm(seqlen_q, seqlen_k):
    own, keys = arange_mask(seqlen_q, seqlen_k)
    lengths = torch.tensor([0, seqlen_k, min(2, seqlen_k)])
    mask = KeyIntervalMask.prefix_lm(lengths, seqlen_q, seqlen_k)
    expected = (keys < lengths[:, None, None]) | (keys <= own)
    assert torch.equal(mask.to_dense()[:, 0], expected) and mask.rows == seqlen_q
    assert torch.equal(KeyIntervalMask.prefix_lm(lengths[2].item(), seqlen_q, seqlen_k).to_dense()[0, 0], expected[2])
    assert KeyIntervalMask.prefix_lm(lengths.int(), seqlen_q, seqlen_k, device="meta").device.type == "meta"
    compiled = torch.compile(KeyIntervalMask.prefix_lm, fullgraph=True, backend="eager")
    assert torch.equal(compiled(lengths, seqlen_q, seqlen_k).to_dense(), mask.to_dense())


@pytest.mark.parametrize("window", [0, 1, 3, 99, (2, 1), (None, 0), (0, None), (None, None)])
def test_sliding_window_varlen(window):
    """Sequences with more keys than rows, fewer, none, and keys after the last sequence."""
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 10, 14], [0, 5, 9, 9, 13]))
    mask = KeyIntervalMask.sliding_window_varlen(cu_seqlens_q, cu_seqlens_k, 15, window)
    assert mask.shape == (15, 1) and (mask.end[13:] == 0).all()
    for rows, first, last in zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k[:-1].tolist(), cu_seqlens_k[1:].tolist()):
        expected = KeyIntervalMask.sliding_window(rows, last - first, window)
        assert torch.equal(mask.sequence(first, last).to_dense(rows), expected.to_dense())
    query, key, value = (torch.randn(total, 2, 8, dtype=torch.float64) for total in (14, 13, 13))
    mask = KeyIntervalMask.sliding_window_varlen(cu_seqlens_q, cu_seqlens_k, 13, window)
    sequences = (cu_seqlens_q, cu_seqlens_k, 7, 5)
    out = flash_dmattn_varlen_func(query, key, value, mask, None, *sequences)
    if isinstance(window, tuple):
        table = relative.window(20, *window).double()
        expected = flash_dmattn_varlen_func(query, key, value, None, None, *sequences, relative_bias=table)
        torch.testing.assert_close(out, expected)


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 4), max_size=5), behind=st.integers(0, 3), batch=st.integers(1, 2), data=st.data()
)
def test_documents(lengths, behind, batch, data):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    seqlen = bounds[-1].item() + behind
    mask = KeyIntervalMask.documents(bounds.int(), seqlen)
    document = torch.full((seqlen,), -1)
    for number, (first, last) in enumerate(zip(bounds[:-1], bounds[1:])):
        document[first:last] = number
    same = (document[:, None] == document) & (document >= 0)
    assert mask.shape == (1, 1, seqlen)
    assert torch.equal(mask.to_dense()[0, 0], same)

    ids = data.draw(st.lists(st.integers(0, 2), min_size=batch * seqlen, max_size=batch * seqlen))
    ids = torch.tensor(ids, dtype=torch.long).view(batch, seqlen)
    runs = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).cumsum(1)[:, :seqlen]
    mask = KeyIntervalMask.documents(ids=ids)
    assert mask.shape == (batch, 1, seqlen)
    assert torch.equal(mask.to_dense()[:, 0], runs[:, :, None] == runs[:, None])
    assert torch.equal(KeyIntervalMask.documents(ids=ids[0]).to_dense(), mask.to_dense()[:1])


def test_padding():
    lengths = torch.tensor([0, 2, 5, 4])
    real = torch.arange(5) < lengths[:, None]
    for mask in (
        KeyIntervalMask.padding(lengths, 5),
        KeyIntervalMask.padding(lengths.to(torch.uint32), 5),
        KeyIntervalMask.padding(real),
        KeyIntervalMask.padding(real.int() * 3, 5),
    ):
        assert torch.equal(mask.to_dense(3), real[:, None, None].expand(4, 1, 3, 5))
    holes = torch.tensor([[1, 0, 1]])
    assert KeyIntervalMask.padding(holes).to_dense(1).flatten().tolist() == [True, False, True]


def test_masks_together():
    """Packed documents, a sliding window in each, and padding."""
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [4, 4, 2, 2, 2, 2, 2]])
    mask = (
        KeyIntervalMask.documents(ids=ids)
        & KeyIntervalMask.sliding_window(7, 7, 2)
        & KeyIntervalMask.padding(torch.tensor([7, 4]), 7)
    )
    i, j = torch.arange(7)[:, None], torch.arange(7)
    expected = (ids[:, :, None] == ids[:, None]) & (i - 2 < j) & (j <= i)
    expected[1, :, 4:] = False
    assert torch.equal(mask.to_dense()[:, 0], expected)
    assert mask.keys_per_row == 2
    assert (KeyIntervalMask.causal(7, 7) & mask).keys_per_row == 2
    assert (KeyIntervalMask.sliding_window(7, 7, 5) & mask).keys_per_row == 2
    assert (KeyIntervalMask.causal(7, 7) & KeyIntervalMask.causal(7, 7)).keys_per_row is None
    top = KeyIntervalMask.topk(torch.randn(2, 1, 7), 3)
    assert top.unstructured and (mask & top).unstructured and (top & mask).unstructured and not mask.unstructured


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_tensor_gives_the_rows_of_a_mask_without_them(rows):
    mask = KeyIntervalMask(torch.zeros(1, 1, 3).int(), torch.ones(1, 1, 3).int())
    assert (mask & torch.ones(1, 1, rows, 3, dtype=torch.bool)).shape == (1, 1, 3 if rows == 1 else rows, 3)


def test_repr():
    assert repr(KeyIntervalMask.causal(3, 5)) == "KeyIntervalMask(batches=1, heads=1, rows=3, keys=5, device='cpu')"
    mask = KeyIntervalMask.topk(torch.randn(2, 3, 1, 7), 4)
    assert repr(mask) == "KeyIntervalMask(batches=2, heads=3, rows=7, keys=7, keys_per_row=4, device='cpu')"
    varlen = KeyIntervalMask(*torch.zeros(2, 9, 2, dtype=torch.int32))
    assert repr(varlen) == "KeyIntervalMask(heads=2, keys=9, device='cpu')"
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    for window in ((None, 0), (2, None), (None, None), 2**40):
        fixed = KeyIntervalMask.sliding_window(3, 5, window)
        assert repr(fixed) == "KeyIntervalMask(batches=1, heads=1, rows=3, keys=5, keys_per_row=5, device='cpu')"
        packed = KeyIntervalMask.sliding_window_varlen(cu_seqlens, cu_seqlens, 5, window)
        assert repr(packed) == "KeyIntervalMask(heads=1, keys=5, keys_per_row=5, device='cpu')"


def test_to():
    assert KeyIntervalMask.topk(torch.randn(1, 1, 7), 3).to("meta").unstructured
    mask = KeyIntervalMask.sliding_window(4, 4, 2).to("meta")
    assert mask.device.type == "meta" and mask.end.device.type == "meta" and mask.keys_per_row == 2


INTERVALS = torch.zeros(2, 3, 4, dtype=torch.int32)
CU_SEQLENS = torch.tensor([0, 2], dtype=torch.int32)
MASK = KeyIntervalMask(INTERVALS, INTERVALS)
ERRORS = {
    "start type": (lambda: KeyIntervalMask([0], INTERVALS), TypeError, "start must be a torch.Tensor, got list"),
    "end dtype": (lambda: KeyIntervalMask(INTERVALS, INTERVALS.long()), TypeError, "end must be int32, got int64"),
    "ndim": (
        lambda: KeyIntervalMask(INTERVALS[0, 0], INTERVALS[0, 0]),
        ValueError,
        r"start must be \(\{B\|1\}, \{H\|Hkv\|1\}, Sk\), or \(total_k, \{H\|Hkv\|1\}\), got shape \(4,\)",
    ),
    "shapes": (
        lambda: KeyIntervalMask(INTERVALS, INTERVALS[..., :3]),
        ValueError,
        r"end must have start's shape \(2, 3, 4\), got \(2, 3, 3\)",
    ),
    "devices": (
        lambda: KeyIntervalMask(INTERVALS, INTERVALS.to("meta")),
        RuntimeError,
        "end must be on start's device cpu, got meta",
    ),
    "bound": (lambda: KeyIntervalMask(INTERVALS, INTERVALS, keys_per_row=-1), ValueError, "keys_per_row must not be"),
    "bound type": (lambda: KeyIntervalMask(INTERVALS, INTERVALS, keys_per_row=1.5), TypeError, "got float"),
    "& keys": (lambda: MASK & KeyIntervalMask.causal(5, 5), ValueError, r"same keys.* got \(2, 3, 4\) and \(1, 1, 5\)"),
    "& heads": (lambda: MASK & KeyIntervalMask(INTERVALS[:, :2], INTERVALS[:, :2]), ValueError, "head counts"),
    "& batches": (
        lambda: MASK & KeyIntervalMask(*torch.zeros(2, 3, 3, 4, dtype=torch.int32)),
        ValueError,
        r"got \(2, 3, 4\) and \(3, 3, 4\)",
    ),
    "& lengths": (lambda: MASK & KeyIntervalMask(INTERVALS[0], INTERVALS[0]), ValueError, "needs masks"),
    "& devices": (lambda: MASK & MASK.to("meta"), RuntimeError, "same device, got cpu and meta"),
    "& type": (lambda: MASK & 1, TypeError, "unsupported operand"),
    "& bool": (lambda: MASK & INTERVALS, TypeError, "the tensor of mask & tensor must be bool, got int32"),
    "| gap": (
        lambda: KeyIntervalMask(INTERVALS, INTERVALS + 1) | KeyIntervalMask(INTERVALS + 2, INTERVALS + 3),
        ValueError,
        "got 24 keys with a gap",
    ),
    "| type": (lambda: MASK | 1, TypeError, "unsupported operand"),
    "| tensor": (lambda: MASK | MASK.to_dense(), TypeError, r"a \| b of .* use a.to_dense\(\) \| b$"),
    "tensor |": (lambda: MASK.to_dense() | MASK, TypeError, r"a \| b of .* use a.to_dense\(\) \| b$"),
    "~": (lambda: ~MASK, TypeError, r"~mask of .* use ~mask.to_dense\(\)$"),
    "to a dtype": (lambda: MASK.to(torch.float32), TypeError, "device must be .* got torch.float32"),
    "unstructured": (
        lambda: KeyIntervalMask(INTERVALS, INTERVALS, unstructured="no"),
        TypeError,
        "unstructured must be a bool, got str",
    ),
    "index": (lambda: MASK[2], IndexError, "index 2 is out of range for 2 batch elements"),
    "index below 0": (lambda: MASK[-3], IndexError, "index -3 is out of range for 2 batch elements"),
    "index type": (lambda: MASK["a"], TypeError, "got str"),
    "index dtype": (
        lambda: MASK[torch.zeros(2)],
        TypeError,
        r"an int, a slice, or an int64 or bool tensor \(n\), got a float32 tensor",
    ),
    "index by a bool": (lambda: MASK[True], TypeError, r"an int, a slice, or an int64 or bool tensor \(n\), got bool"),
    "index of 0 dimensions": (
        lambda: MASK[torch.tensor(1)],
        IndexError,
        r"an int, a slice, or an int64 or bool tensor \(n\), got shape \(\)",
    ),
    "index varlen": (lambda: KeyIntervalMask(INTERVALS[0], INTERVALS[0])[0], ValueError, "no batch elements"),
    "dense varlen": (
        lambda: KeyIntervalMask(INTERVALS[0], INTERVALS[0]).to_dense(),
        ValueError,
        r"take sequence\(first, last\)",
    ),
    "sequence beyond the keys": (
        lambda: KeyIntervalMask(INTERVALS[0], INTERVALS[0]).sequence(0, 99),
        ValueError,
        r"first and last must be in order, from 0 to \d+ keys, got 0 and 99",
    ),
    "sequence of a str": (
        lambda: KeyIntervalMask(INTERVALS[0], INTERVALS[0]).sequence("0", 9),
        TypeError,
        "first must be an int, got str",
    ),
    "sequence of a float tensor": (
        lambda: KeyIntervalMask(INTERVALS[0], INTERVALS[0]).sequence(torch.tensor(1.9), 9),
        TypeError,
        r"first must be an int or an integer tensor \(\), got float32 of shape \(\)",
    ),
    "sequence of two keys": (
        lambda: KeyIntervalMask(INTERVALS[0], INTERVALS[0]).sequence(torch.tensor([0, 1]), 9),
        TypeError,
        r"first must be an int or an integer tensor \(\), got int64 of shape \(2,\)",
    ),
    "lengths of a selection": (
        lambda: KeyIntervalMask.topk_varlen(torch.zeros(2, 1), 2, [0, 2]),
        TypeError,
        r"cu_seqlens_k must be a torch.Tensor, got list: pass torch.as_tensor\(cu_seqlens_k, dtype=torch.int32\)",
    ),
    "varlen window offsets": (
        lambda: KeyIntervalMask.sliding_window_varlen(CU_SEQLENS, CU_SEQLENS, 1, 2),
        ValueError,
        "cu_seqlens_k must be non-decreasing from 0 to at most 1, the given total_k",
    ),
    "varlen windows of other sequences": (
        lambda: KeyIntervalMask.sliding_window_varlen(CU_SEQLENS[:1], CU_SEQLENS, 9, 2),
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must both have",
    ),
    "sequence": (lambda: MASK.sequence(0, 1), ValueError, r"has sequences, got \(2, 3, 4\)"),
    "rows": (lambda: MASK.to_dense(-1), ValueError, "seqlen_q must not be negative, got -1"),
    "causal": (lambda: KeyIntervalMask.causal(3.0, 4), TypeError, "seqlen_q must be an int, got float"),
    "window": (lambda: KeyIntervalMask.sliding_window(3, 4, -1), ValueError, "window_size must not be negative"),
    "window list": (
        lambda: KeyIntervalMask.sliding_window(3, 4, [1, 1]),
        TypeError,
        r"window_size must be an int or a tuple \(left, right\), got list",
    ),
    "window of two ints": (
        lambda: KeyIntervalMask.sliding_window(3, 4, 1, 1),
        TypeError,
        "device must be a torch.device or a str, got 1: pass both sides of a window as a tuple",
    ),
    "window of three": (
        lambda: KeyIntervalMask.sliding_window(3, 4, (1, 1, 1)),
        ValueError,
        r"window_size must be an int or a tuple \(left, right\), got \(1, 1, 1\)",
    ),
    "window pair": (
        lambda: KeyIntervalMask.sliding_window(3, 4, (1, -1)),
        ValueError,
        r"window_size\[1\] must not be negative, got -1: pass None for no limit",
    ),
    "prefix of floats": (
        lambda: KeyIntervalMask.prefix_lm(torch.ones(2), 3, 4),
        TypeError,
        "prefix_lens must be integers, got float32",
    ),
    "prefix of two dimensions": (
        lambda: KeyIntervalMask.prefix_lm(torch.ones(2, 1).int(), 3, 4),
        ValueError,
        r"prefix_lens must be \(B\), got shape \(2, 1\)",
    ),
    "prefix beyond the keys": (
        lambda: KeyIntervalMask.prefix_lm(5, 3, 4),
        ValueError,
        "prefix_lens must be from 0 to seqlen_k 4, got 5$",
    ),
    "prefix of another type": (
        lambda: KeyIntervalMask.prefix_lm([1], 3, 4),
        TypeError,
        "prefix_lens must be a torch.Tensor or an int, got list: pass torch.as_tensor",
    ),
    "documents of nothing": (
        lambda: KeyIntervalMask.documents(),
        ValueError,
        "documents takes cu_seqlens and seqlen, or ids by name, got none of them",
    ),
    "documents without a length": (
        lambda: KeyIntervalMask.documents(CU_SEQLENS),
        ValueError,
        "documents takes cu_seqlens and seqlen, or ids by name, got cu_seqlens alone",
    ),
    "documents twice": (
        lambda: KeyIntervalMask.documents(CU_SEQLENS, 2, ids=CU_SEQLENS),
        ValueError,
        "documents takes cu_seqlens and seqlen, or ids by name, got cu_seqlens and seqlen and ids",
    ),
    "cu_seqlens": (
        lambda: KeyIntervalMask.documents(CU_SEQLENS.long(), 2),
        TypeError,
        "cu_seqlens must be int32, got int64",
    ),
    "cu_seqlens that fall": (
        lambda: KeyIntervalMask.documents(torch.tensor([0, 6, 3], dtype=torch.int32), 8),
        ValueError,
        r"cu_seqlens must be non-decreasing from 0 to at most 8, the given seqlen, got cu_seqlens\[1:3\] = \[6, 3\]$",
    ),
    "many offsets": (
        lambda: KeyIntervalMask.documents(torch.arange(5000, dtype=torch.int32).fmod(4000), 5000),
        ValueError,
        r"the given seqlen, got cu_seqlens\[3999:4001\] = \[3999, 0\]$",
    ),
    "lengths of documents": (
        lambda: KeyIntervalMask.documents(torch.tensor([6, 2], dtype=torch.int32), 8),
        ValueError,
        r"got cu_seqlens\[0\] = 6: if these are lengths, pass torch.nn.functional.pad\(cu_seqlens.cumsum\(0, ",
    ),
    "cu_seqlens as a list": (
        lambda: KeyIntervalMask.documents([0, 6], 8),
        TypeError,
        r"cu_seqlens must be a torch.Tensor, got list: pass torch.as_tensor\(cu_seqlens, dtype=torch.int32\)",
    ),
    "topk varlen values": (
        lambda: KeyIntervalMask.topk_varlen(torch.zeros(5, 1), 2, torch.tensor([0, 9, 3], dtype=torch.int32)),
        ValueError,
        r"cu_seqlens_k must be non-decreasing from 0 to 5, the keys of bias, got cu_seqlens_k\[1:3\] = \[9, 3\]$",
    ),
    "topk varlen bound": (
        lambda: KeyIntervalMask.topk_varlen(torch.zeros(2, 1), 2, CU_SEQLENS, max_seqlen_k=1),
        ValueError,
        "max_seqlen_k must be at least the longest sequence 2, got 1",
    ),
    "ids": (lambda: KeyIntervalMask.documents(ids=torch.zeros(3)), TypeError, "ids must be integers, got float32"),
    "ids shape": (lambda: KeyIntervalMask.documents(ids=INTERVALS), ValueError, r"ids must be \(S\) or \(B, S\), got"),
    "padding": (
        lambda: KeyIntervalMask.padding(torch.tensor([3, 4])),
        ValueError,
        r"real must be a mask \(B, Sk\), or lengths \(B\) with seqlen_k, got int64 of shape \(2,\) and seqlen_k None",
    ),
    "padding dtype": (
        lambda: KeyIntervalMask.padding(torch.ones(2, 3)),
        TypeError,
        "real must be bool or integers, got float32",
    ),
    "padding length": (
        lambda: KeyIntervalMask.padding(torch.ones(2, 3, dtype=torch.bool), 4),
        ValueError,
        r"got bool of shape \(2, 3\) and seqlen_k 4",
    ),
    "padding lengths below 0": (
        lambda: KeyIntervalMask.padding(torch.tensor([3, -1]), 4),
        ValueError,
        "real must be lengths from 0 to seqlen_k 4, got -1$",
    ),
    "padding lengths above the keys": (
        lambda: KeyIntervalMask.padding(torch.tensor([3, 5]), 4),
        ValueError,
        "real must be lengths from 0 to seqlen_k 4, got 5$",
    ),
    "rows of variable length": (
        lambda: KeyIntervalMask(*torch.zeros(2, 3, 1, dtype=torch.int32), rows=3),
        ValueError,
        r"rows is for fixed length, got 3 with start of shape \(3, 1\)",
    ),
    "and of other rows": (
        lambda: KeyIntervalMask.causal(3, 5) & KeyIntervalMask.causal(5, 5),
        ValueError,
        "a & b needs masks of the same rows, got 3 and 5",
    ),
    "topk dtype": (lambda: KeyIntervalMask.topk(INTERVALS, 2), TypeError, "bias must be floating, got int32"),
    "topk of 8 bits": (
        lambda: KeyIntervalMask.topk(torch.zeros(1, 1, 3).to(torch.float8_e4m3fn), 2),
        TypeError,
        "bias must be floating of at least 16 bits, got float8_e4m3fn",
    ),
    "rows beyond int32": (
        lambda: KeyIntervalMask.causal(2**40, 4),
        ValueError,
        r"seqlen_q must be at most 2\^30 for a KeyIntervalMask, got 1099511627776",
    ),
    "topk rows beyond int32": (
        lambda: KeyIntervalMask.topk(torch.zeros(1, 1, 3), 2, 2**31),
        ValueError,
        r"seqlen_q must be at most 2\^30 for a KeyIntervalMask, got 2147483648",
    ),
    "topk bias of one dimension": (
        lambda: KeyIntervalMask.topk(torch.zeros(3), 2),
        ValueError,
        r"bias must be .*, got shape \(3,\): pass bias\[None, None\]$",
    ),
    "topk varlen bias of one dimension": (
        lambda: KeyIntervalMask.topk_varlen(torch.zeros(2), 2, CU_SEQLENS),
        ValueError,
        r"bias must be \(total_k, {H\|Hkv\|1}\), got shape \(2,\): pass bias\[:, None\]$",
    ),
    "topk dense bias": (
        lambda: KeyIntervalMask.topk(torch.zeros(1, 1, 3, 3), 2),
        ValueError,
        r"bias must be \(\{B\|1\}, \{H\|Hkv\|1\}, 1, Sk\) or .*, got shape \(1, 1, 3, 3\)",
    ),
    "topk window": (lambda: KeyIntervalMask.topk(torch.zeros(1, 1, 3), -1), ValueError, "window_size must not be"),
    "topk NaN": (
        lambda: KeyIntervalMask.topk(torch.tensor([[[0.0, torch.nan]]]), 2),
        ValueError,
        "^bias must not be NaN",
    ),
    "topk varlen shape": (
        lambda: KeyIntervalMask.topk_varlen(torch.zeros(1, 1, 3), 2, CU_SEQLENS),
        ValueError,
        r"bias must be \(total_k, \{H\|Hkv\|1\}\), got shape \(1, 1, 3\)",
    ),
    "topk varlen lengths": (
        lambda: KeyIntervalMask.topk_varlen(torch.zeros(2, 1), 2, CU_SEQLENS, cu_seqlens_q=CU_SEQLENS[:1]),
        ValueError,
        r"must both have B \+ 1 elements, got 1 and 2",
    ),
    "topk varlen device": (
        lambda: KeyIntervalMask.topk_varlen(torch.zeros(2, 1), 2, CU_SEQLENS.to("meta")),
        RuntimeError,
        "cu_seqlens_k must be on bias's device cpu, got meta",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("window", [65, 2**31 - 1, 2**31, 2**40, 2**70])
def test_a_window_that_is_wider_than_int32(window):
    for size, widest in ((window, (65, 0)), ((window, window), (65, 65)), ((0, window), (0, 65))):
        ours, expected = (KeyIntervalMask.sliding_window(65, 65, w) for w in (size, widest))
        assert torch.equal(ours.to_dense(), expected.to_dense())
        rows = torch.randn(1, 65, 1, 8)
        for sparse in ("tiles", "lists"):
            outs = [flash_dmattn_func(rows, rows, rows, mask, sparse=sparse) for mask in (ours, expected)]
            assert torch.equal(*outs)


OF_ROWS = {
    "causal": lambda rows: KeyIntervalMask.causal(rows, 9),
    "sliding_window": lambda rows: KeyIntervalMask.sliding_window(rows, 9, 3),
    "topk": lambda rows: KeyIntervalMask.topk(torch.arange(9.0)[None, None], 3, rows),
}
OF_AS_MANY_ROWS = {
    "documents": lambda: KeyIntervalMask.documents(torch.tensor([0, 4, 9], dtype=torch.int32), 9),
    "ids": lambda: KeyIntervalMask.documents(ids=torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2])),
    "topk": lambda: KeyIntervalMask.topk(torch.arange(9.0)[None, None], 3),
    "and": lambda: KeyIntervalMask.causal(9, 9) & KeyIntervalMask.padding(torch.ones(1, 9, dtype=torch.bool)),
    "and, the other way": lambda: KeyIntervalMask.padding(torch.ones(1, 9).int()) & KeyIntervalMask.causal(9, 9),
    "to": lambda: KeyIntervalMask.causal(9, 9).to("cpu"),
    "own": lambda: KeyIntervalMask(*torch.zeros(2, 1, 1, 9, dtype=torch.int32), rows=9),
}


@pytest.mark.parametrize("kind", OF_AS_MANY_ROWS)
def test_a_mask_refuses_rows_for_which_it_was_not_made(kind):
    mask, rows = OF_AS_MANY_ROWS[kind](), torch.randn(1, 9, 1, 8)
    assert mask.rows == 9 and mask.to_dense().shape[2] == 9 and "rows=9" in repr(mask)
    flash_dmattn_func(rows, rows, rows, mask)
    message = "was made for 9 query rows, got 1: make it for 1"
    for call in (
        lambda: flash_dmattn_func(rows[:, :1], rows, rows, mask),
        lambda: KeyLists.build(mask, 1),
        lambda: mask.to_dense(1),
        lambda: flash_dmattn_func_auto("reference")(rows[:, :1], rows, rows, mask),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("kind", OF_ROWS)
def test_the_last_row_of_a_mask_is_that_of_a_step_of_decoding(kind):
    query, key, value = (torch.randn(1, 9, 1, 8) for _ in range(3))
    of_nine, of_one = OF_ROWS[kind](9), OF_ROWS[kind](1)
    assert (of_nine.rows, of_one.rows) == (9, 1)
    whole = flash_dmattn_func(query, key, value, of_nine)
    torch.testing.assert_close(flash_dmattn_func(query[:, -1:], key, value, of_one), whole[:, -1:])
    assert torch.equal(of_one.to_dense()[:, :, 0], of_nine.to_dense()[:, :, -1])


def test_masks_for_any_number_of_rows():
    padding = KeyIntervalMask.padding(torch.ones(1, 9, dtype=torch.bool))
    packed = KeyIntervalMask.topk_varlen(torch.randn(9, 1), 2, torch.tensor([0, 9], dtype=torch.int32))
    assert padding.rows is None and packed.rows is None and packed.sequence(0, 9).rows is None
