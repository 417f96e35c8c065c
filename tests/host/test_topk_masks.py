"""The causal top-k mask as key intervals, against a row-by-row selection."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dmattn import (
    KeyIntervalMask,
    create_mask,
)
from flash_dmattn.masks import topk

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def rand_bias(shape, dtype, generator):
    """A bias of few different values, so that there are ties; one of them is -inf."""
    values = torch.tensor([-torch.inf, -1.5, -0.0, 0.0, 0.25, 3.0], dtype=dtype)
    return values[torch.randint(0, len(values), shape, generator=generator)]


def brute_force_topk(bias, window_size, seqlen_q=None):
    """bool (B, H, Sq, Sk) of a bias (B, H, Sk), row after row."""
    batch, heads, keys = bias.shape
    rows = keys if seqlen_q is None else seqlen_q
    mask = torch.zeros(batch, heads, rows, keys, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            values = bias[b, h].tolist()
            for i in range(rows):
                seen = [j for j in range(min(i + keys - rows + 1, keys)) if values[j] > -torch.inf]
                best = sorted(seen, key=lambda j: (values[j], j))[max(len(seen) - window_size, 0) :]
                mask[b, h, i, best] = True
    return mask


def most_keys_of_rows(dense, n):
    """The largest number of keys that n consecutive rows see together."""
    rows = dense.shape[2]
    return max(dense[:, :, i : i + n].any(dim=2).sum(dim=-1).max().item() for i in range(max(rows - n, 0) + 1))


@settings(deadline=None, max_examples=150)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    keys=st.integers(0, 20),
    window_size=st.integers(0, 22),
    seqlen_q=st.none() | st.integers(0, 24),
    dtype=st.sampled_from(DTYPES),
    ties=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_topk_against_brute_force(batch, heads, keys, window_size, seqlen_q, dtype, ties, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, keys)
    bias = rand_bias(shape, dtype, generator) if ties else torch.randn(shape, generator=generator).to(dtype)
    mask = KeyIntervalMask.topk(bias, window_size, seqlen_q)
    assert mask.shape == shape and mask.keys_per_row == window_size
    assert torch.equal(mask.to_dense(seqlen_q), brute_force_topk(bias, window_size, seqlen_q))


@pytest.mark.parametrize("keys", [255, 256, 257])
@pytest.mark.parametrize("window_size", [1, 37, 128, 254, 255, 256, 257])
def test_topk_is_create_mask(keys, window_size):
    bias = torch.randn(2, 2, 1, keys).bfloat16()  # with ties
    causal = torch.ones(keys, keys, dtype=torch.bool).tril()[None, None]
    dense = create_mask(bias, causal, 2, keys, keys, window_size, -torch.inf)
    mask = KeyIntervalMask.topk(bias, window_size)
    assert torch.equal(mask.to_dense(), dense)
    for n in (1, 2, 64, keys):
        assert most_keys_of_rows(dense, n) <= mask.keys_per_row + n - 1


def test_topk_of_a_constant_is_a_sliding_window():
    for keys, window_size in ((8, 3), (100, 7), (128, 128), (5, 9)):
        mask, window = KeyIntervalMask.topk(torch.full((1, 1, keys), 0.5), window_size), window_size
        assert torch.equal(mask.to_dense(), KeyIntervalMask.sliding_window(keys, keys, window).to_dense())


def test_a_key_that_dropped_out_does_not_return_and_one_that_its_bias_masks_is_never_seen():
    bias = torch.tensor([[[3.0, 1.0, -torch.inf, 2.0, 2.0, 0.0]]])
    mask = KeyIntervalMask.topk(bias, 2)
    rows = ["100000", "110000", "110000", "100100", "100010", "100010"]
    assert torch.equal(mask.to_dense()[0, 0], torch.tensor([[c == "1" for c in row] for row in rows]))
    least = bias.masked_fill(bias == -torch.inf, torch.finfo(bias.dtype).min)
    assert torch.equal(KeyIntervalMask.topk(least, 2).to_dense(), mask.to_dense())
    for value in (-torch.inf, torch.finfo(bias.dtype).min):
        for window_size in (2, 9):
            assert not KeyIntervalMask.topk(torch.full((1, 1, 4), value), window_size).to_dense().any()


def test_a_step_of_decoding():
    bias = torch.randn(3, 2, 1, 50)
    mask = KeyIntervalMask.topk(bias, 8, seqlen_q=1)
    best = bias[:, :, 0].topk(8).indices
    assert torch.equal(mask.to_dense(1)[:, :, 0], torch.zeros(3, 2, 50, dtype=torch.bool).scatter(2, best, True))


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=5),
    heads=st.integers(1, 2),
    window_size=st.integers(0, 10),
    as_many_rows=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_topk_of_variable_length(lengths, heads, window_size, as_many_rows, seed):
    lengths = torch.tensor([(0, 0), *((k if as_many_rows else q, k) for q, k in lengths)])
    cu_seqlens_q, cu_seqlens_k = lengths.cumsum(0).T.int()
    bias = rand_bias((cu_seqlens_k[-1], heads), torch.float32, torch.Generator().manual_seed(seed))
    mask = KeyIntervalMask.topk_varlen(
        bias, window_size, cu_seqlens_k, cu_seqlens_q=None if as_many_rows else cu_seqlens_q
    )
    assert mask.shape == bias.shape and mask.is_varlen and mask.keys_per_row == window_size
    for (rows, _), first, last in zip(lengths[1:].tolist(), cu_seqlens_k[:-1], cu_seqlens_k[1:]):
        expected = brute_force_topk(bias[first:last].T[None], window_size, rows)
        assert torch.equal(mask.sequence(first, last).to_dense(rows), expected)
    both = mask & KeyIntervalMask(*torch.zeros(2, len(bias), 1, dtype=torch.int32))
    assert both.shape == bias.shape


def test_topk_of_nothing():
    for shape, seqlen_q in (((0, 2, 9), 1), ((2, 0, 9), 4), ((1, 1, 9), 0), ((1, 1, 0), 3)):
        mask = KeyIntervalMask.topk(torch.zeros(shape), 2, seqlen_q)
        assert mask.shape == shape and not mask.to_dense(seqlen_q).any()


def test_topk_passes_no_gradient_and_leaves_the_bias_alone():
    bias = torch.randn(1, 2, 40, requires_grad=True)
    before = bias.detach().clone()
    mask = KeyIntervalMask.topk(bias, 4)
    assert not mask.start.requires_grad and not mask.end.requires_grad
    assert torch.equal(bias, before)


def test_topk_compiles_as_one_graph():
    def visible(bias):
        return (KeyIntervalMask.topk(bias, 3) & KeyIntervalMask.causal(20, 20)).to_dense()

    bias = torch.randn(2, 2, 20)
    compiled = torch.compile(visible, fullgraph=True, backend="eager")
    assert torch.equal(compiled(bias), visible(bias))


def same_rows(a, b, rows):
    """Whether rows see the same keys: ends before the start and ends beyond the last row are equivalent."""
    ends = [mask.end.clamp(max=rows).maximum(mask.start) for mask in (a, b)]
    return torch.equal(a.start, b.start) and torch.equal(*ends)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [100, 4096, 5000, 8192])
def test_topk_on_cuda_is_topk_on_the_cpu(dtype, keys):
    bias = torch.cat([rand_bias((2, 3, keys), dtype, None), torch.randn(2, 3, keys).to(dtype)])
    for window_size, seqlen_q in ((0, None), (1, None), (77, None), (4096, None), (77, 1), (77, 20), (77, keys + 3)):
        mask = KeyIntervalMask.topk(bias, window_size, seqlen_q)
        on_cuda = KeyIntervalMask.topk(bias.cuda(), window_size, seqlen_q)
        assert on_cuda.device.type == "cuda"
        assert same_rows(on_cuda.to("cpu"), mask, rows=seqlen_q or keys)
    cu_seqlens = torch.tensor([0, 7, 7, keys // 2, keys], dtype=torch.int32)
    mask = KeyIntervalMask.topk_varlen(bias[0].T, 20, cu_seqlens)
    for longest in (None, keys):
        on_cuda = KeyIntervalMask.topk_varlen(bias[0].T.cuda(), 20, cu_seqlens.cuda(), max_seqlen_k=longest)
        assert same_rows(on_cuda.to("cpu"), mask, rows=keys)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 33, 4095, 4096, 4097, 8192, 100_003, 2**20, 2**20 + 5])
def test_prefixes_of_a_permutation_on_cuda(size):
    """Queries at random prefixes, not only those of topk."""
    values = torch.randperm(size, dtype=torch.int32)
    last = torch.randint(size, (777,), dtype=torch.int32)
    wanted = (last * torch.rand(777)).int()
    arguments, levels = (values, last, wanted), (size - 1).bit_length()
    found = topk.kth_smallest_of_prefixes(*arguments, levels)
    assert torch.equal(topk.kth_smallest_of_prefixes(*(x.cuda() for x in arguments), levels).cpu(), found)
    one = 100
    assert found[one] == values[: last[one] + 1].sort().values[wanted[one]]


def test_infinities_of_both_signs_are_no_nan():
    """Their sum is NaN, by which a window that covers all keys looks for NaN."""
    bias = torch.randn(1, 1, 1, 9)
    bias[..., :2] = torch.tensor([torch.inf, -torch.inf])
    topk.refuse_nan(bias, name="bias")
    bias[..., 5] = torch.nan
    with pytest.raises(ValueError, match="^bias must not be NaN where window_size selects by it"):
        topk.refuse_nan(bias, name="bias")
