"""Few rows on the CPU, as in decoding: the kernels split the keys into runs."""

from functools import partial

import pytest
import torch
from helpers import check, inputs, rand_intervals, rand_mask

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func


def test_intervals_and_lists():
    tensors, bias = inputs(2, 7, 900, 4, 2, 16), torch.randn(2, 2, 1, 900)
    mask = rand_intervals(2, 2, 900, rows=7, longest=6)
    unstructured = rand_mask(1, 2, 7, 900, visible=0.1)
    for given, dense in ((mask, mask.to_dense(7)), (unstructured, unstructured)):
        for sparse in ("tiles", "lists"):

            def function(query, key, value, _, bias, given=given, sparse=sparse, **options):
                return flash_dmattn_func(query, key, value, given, bias, sparse=sparse, **options)

            check(tensors, dense, bias, function=function)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_lists_in_several_splits(rows, heads):
    """Lists of different lengths, shared by all heads, by the heads of a group, or by none."""
    tensors, mask = inputs(2, rows, 3000, 4, 2, 16), rand_mask(2, heads, rows, 3000, visible=0.3)
    mask[0, 0] = False
    mask[1, -1, :, 100:] = False
    check(tensors, mask, torch.randn(2, 4, 1, 3000), function=partial(flash_dmattn_func, sparse="lists"))


def test_nan_of_a_listed_key_reaches_only_the_rows_that_see_it():
    query, key, value = inputs(1, 3, 2000, 4, 2, 16)
    mask = rand_mask(1, 4, 3, 2000, visible=0.2)
    mask[..., 700], mask[:, 1, 2, 700] = False, True
    clean = flash_dmattn_func(query, key, value, mask.clone().index_fill_(3, torch.tensor([700]), False))
    key[:, 700], value[:, 700] = torch.nan, torch.nan
    out = flash_dmattn_func(query, key, value, mask, sparse="lists")
    assert out[0, 2, 1].isnan().all()
    out[0, 2, 1] = clean[0, 2, 1]
    torch.testing.assert_close(out, clean)


def test_masked_runs_of_keys_may_hold_nan():
    """Whole runs of keys are masked from some heads or from all; masked keys hold NaN."""
    query, key, value = inputs(1, 4, 1500, 4, 2, 16)
    mask = torch.ones(1, 4, 4, 1500, dtype=torch.bool)
    mask[:, :, :, 200:900] = False
    mask[:, 1, :, :1100] = False
    mask[:, 2] = False
    key[:, 200:900], value[:, 200:900] = torch.nan, torch.nan
    out, lse, *_ = check((query, key, value), mask)
    assert (out[:, :, 2] == 0).all() and (lse[:, 2] == -torch.inf).all()


@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_reaches_only_the_rows_and_heads_that_see_it(where):
    query, key, value = inputs(1, 3, 600, 2, 2, 16)
    clean = flash_dmattn_func(query, key, value, is_causal=True)
    {"query": query, "key": key, "value": value}[where][:, -1, 0] = torch.nan  # of the last row and key, of one head
    out = flash_dmattn_func(query, key, value, is_causal=True)
    assert out[:, -1, 0].isnan().any()
    torch.testing.assert_close(out[:, :-1], clean[:, :-1])
    torch.testing.assert_close(out[:, :, 1], clean[:, :, 1])


@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("rows", [1, 8])
def test_the_backward_recomputes_the_scores_of_the_forward(rows, size):
    """Scores of 1e5 round by a large part of p: dv sums to dout over the keys only if p equals the forward's."""
    query, key, value = (x.requires_grad_() for x in inputs(1, rows, 1000, 4, 2, 64))
    out = flash_dmattn_func(query * size, key * size, value)
    dout = torch.randn_like(out)
    (dvalue,) = torch.autograd.grad(out, value, dout)
    expected = dout.unflatten(2, (2, 2)).sum(dim=(1, 3))
    torch.testing.assert_close(dvalue.sum(dim=1), expected, rtol=1e-4, atol=1e-4)


def test_a_sequence_does_not_depend_on_its_neighbors():
    lengths_q, lengths_k = [1, 3, 0, 2, 8], [300, 1, 5, 0, 900]
    starts_q, starts_k = ([0, *torch.tensor(x).cumsum(0).tolist()] for x in (lengths_q, lengths_k))
    query, key, value = (x[0].requires_grad_() for x in inputs(1, sum(lengths_q), sum(lengths_k), 4, 2, 16))
    offsets = [torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k)]
    out = flash_dmattn_varlen_func(query, key, value, None, None, *offsets, 8, 900)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (query, key, value), dout)
    for b in range(len(lengths_q)):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        leaves = [x.detach()[None, part].requires_grad_() for x, part in ((query, rows), (key, keys), (value, keys))]
        alone = flash_dmattn_func(*leaves)
        torch.testing.assert_close(out[rows], alone[0])
        ours = (gradients[0][rows], gradients[1][keys], gradients[2][keys])
        for x, y in zip(ours, torch.autograd.grad(alone, leaves, dout[None, rows])):
            torch.testing.assert_close(x, y[0])


def test_a_cache_that_is_filled_in_part():
    query, key, value = inputs(3, 2, 700, 4, 2, 16)
    filled = torch.tensor([700, 2, 300], dtype=torch.int32)
    key[1, 2:], value[1, 2:] = torch.nan, torch.nan
    out = flash_dmattn_func(query, key, value, is_causal=True, cache_seqlens=filled)
    for b, n in enumerate(filled.tolist()):
        alone = flash_dmattn_func(query[b : b + 1], key[b : b + 1, :n], value[b : b + 1, :n], is_causal=True)
        torch.testing.assert_close(out[b], alone[0])


@pytest.mark.parametrize("sparse", ["auto", "tiles", "lists"])
@pytest.mark.parametrize("window_size", [0, 3, 40])
def test_a_window_without_rows(poisoned_allocations, window_size, sparse):
    tensors, bias = inputs(2, 0, 40, 4, 2, 16), torch.randn(2, 2, 1, 40, requires_grad=True)
    out = flash_dmattn_func(*tensors, None, bias, is_causal=True, window_size=window_size, sparse=sparse)
    assert out.shape == (2, 0, 4, 16)
    (dbias,) = torch.autograd.grad(out.sum(), bias)
    assert torch.equal(dbias, torch.zeros_like(bias))
