"""The operators check their own arguments: compiled and exported graphs skip the checks in Python."""

from dataclasses import replace

import pytest
import torch
from helpers import inputs, rand_mask

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func, ops
from flash_dmattn.ops.schema import Arguments

BATCH, ROWS, KEYS, HEADS, KV_HEADS = 4, 5, 7, 4, 2
TOO_LONG = 2**31 - 2**17 + 1


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def as_list(*keys):
    """The arguments of one list that all batch elements, heads and rows share."""
    listed = torch.full((64,), -1, dtype=torch.int32)
    listed[: len(keys)] = torch.tensor(keys, dtype=torch.int32)
    return {"kv_indices": listed, "kv_indptr": torch.tensor([0, 64]).view(2, 1, 1, 1)}


def lists(*spans, **others):
    return {
        "kv_indices": torch.full((64,), -1, dtype=torch.int32),
        "kv_indptr": torch.zeros(2, *spans).long(),
        **others,
    }


UNSORTED = r"kv_indices must ascend from 0 within a list, with -1 after its last key, got {} at {}, in the list from 0"

# The arguments beside query, key and value, the error and its message.
FIXED = {
    "mask of 3 batch elements": ({"mask": rand_mask(3, 1, 5, 7)}, ValueError, "dimension 0 must be 1 or 4 or divide 4"),
    "mask of no batch element": ({"mask": rand_mask(0, 1, 5, 7)}, ValueError, "dimension 0 must be 1 or 4 or divide 4"),
    "mask of 3 heads": ({"mask": rand_mask(4, 3, 5, 7)}, ValueError, "dimension 1 must be 1 or 2 or 4, got shape"),
    "mask of 8 heads": ({"mask": rand_mask(1, 8, 5, 7)}, ValueError, "dimension 1 must be 1 or 2 or 4, got shape"),
    "mask of 4 rows": ({"mask": rand_mask(1, 1, 4, 7)}, ValueError, "dimension 2 must be 1 or 5, got shape"),
    "mask of 6 keys": ({"mask": rand_mask(1, 1, 5, 6)}, ValueError, "dimension 3 must be 1 or 7, got shape"),
    "mask of integers": ({"mask": ints(1, 1, 5, 7)}, TypeError, "attn_mask must be bool"),
    "bias of 3 batch elements": ({"bias": torch.zeros(3, 1, 5, 7)}, ValueError, "dimension 0 must be 1 or 4 or divide"),
    "bias of 8 heads": ({"bias": torch.zeros(1, 8, 1, 7)}, ValueError, "dimension 1 must be 1 or 2 or 4, got shape"),
    "bias of 4 rows": ({"bias": torch.zeros(1, 1, 4, 7)}, ValueError, "dimension 2 must be 1 or 5, got shape"),
    "bias of half": ({"bias": torch.zeros(1, 1, 5, 7).half()}, TypeError, "attn_bias must be float32"),
    "intervals of 2 batch elements": ({"intervals": ints(2, 2, 1, 7)}, ValueError, "dimension 0 must be 1 or 4, got"),
    "intervals of 8 heads": ({"intervals": ints(2, 1, 8, 7)}, ValueError, "dimension 1 must be 1 or 2 or 4, got shape"),
    "intervals of 8 keys": ({"intervals": ints(2, 1, 1, 8)}, ValueError, "dimension 2 must be 7, got shape"),
    "intervals without ends": ({"intervals": ints(1, 1, 1, 7)}, ValueError, "must be starts and ends"),
    "intervals of 64 bits": ({"intervals": ints(2, 1, 1, 7).long()}, TypeError, "attn_mask.start must be int32"),
    "lists of 3 batch elements": (lists(3, 1, 1), ValueError, "kv_indptr must be of 4 batch elements or a number that"),
    "lists of 8 heads": (lists(1, 8, 1), ValueError, "kv_indptr must be of 4, 2 or 1 heads, got 8"),
    "lists of 2 tiles": (lists(1, 1, 2), ValueError, "kv_indptr must be of 1 m_blocks, got 2"),
    "spans with gaps": (
        {**lists(), "kv_indptr": torch.zeros(2, 4, 2, 1).long().transpose(1, 2)},
        ValueError,
        "kv_indptr must be contiguous",
    ),
    "spans of 32 bits": ({**lists(), "kv_indptr": ints(2, 1, 1, 1)}, TypeError, "kv_indptr must be int64, got int32"),
    "keys of 64 bits": (lists(1, 1, 1, kv_indices=torch.zeros(64).long()), TypeError, "kv_indices must be int32"),
    "keys in rows": (lists(1, 1, 1, kv_indices=ints(8, 8)), ValueError, "kv_indices must have shape"),
    "row bits of 64 bits": (lists(1, 1, 1, kv_row_bits=ints(64, 4).long()), TypeError, "kv_row_bits must be int32"),
    "row bits with gaps": (lists(1, 1, 1, kv_row_bits=ints(4, 64).T), ValueError, "kv_row_bits must be contiguous"),
    "row bits of 32 rows": (
        lists(1, 1, 1, kv_row_bits=ints(64, 1)),
        ValueError,
        r"kv_row_bits must be \(capacity, 4\)",
    ),
    "a list that begins below 0": (
        {**as_list(0), "kv_indptr": torch.tensor([-64, 64]).view(2, 1, 1, 1)},
        ValueError,
        "kv_indptr must lie within the 64 kv_indices, got a list from -64 to 64",
    ),
    "a list that begins with -1": (as_list(-1, 3), ValueError, UNSORTED.format(-1, 0)),
    "a list that begins far below 0": (as_list(-(2**31), 3), ValueError, UNSORTED.format(-(2**31), 0)),
    "a negative key in a list": (as_list(1, -5, 3), ValueError, UNSORTED.format(-5, 1)),
    "keys that descend": (as_list(5, 2), ValueError, UNSORTED.format(2, 1)),
    "a key beyond the keys before others": (as_list(1, 10**9, 3), ValueError, UNSORTED.format(3, 2)),
    "a key twice": (as_list(1, 4, 4), ValueError, UNSORTED.format(4, 2)),
    "lengths of 64 bits": ({"seqused_k": torch.full((4,), 7)}, TypeError, "cache_seqlens must be int32"),
    "lengths of 3 batch elements": ({"seqused_k": ints(3)}, ValueError, "cache_seqlens must have query's batch size 4"),
    "lengths beyond the keys": (
        {"seqused_k": ints(4) + 8},
        ValueError,
        "cache_seqlens must be from 0 to 7, the number of keys",
    ),
}

CU_Q, CU_K = ints(5) + torch.arange(5).int() * ROWS, ints(5) + torch.arange(5).int() * KEYS
VARIABLE = {
    "mask of other keys": ({"mask": rand_mask(27, 1)}, ValueError, "dimension 0 must be 28, got shape"),
    "mask of other rows": ({"mask": rand_mask(19, 1, 7)}, ValueError, "dimension 0 must be 20, got shape"),
    "mask of 3 heads": ({"mask": rand_mask(20, 3, 7)}, ValueError, "dimension 1 must be 1 or 2 or 4, got shape"),
    "mask of fixed length": ({"mask": rand_mask(4, 1, 5, 7)}, ValueError, "attn_mask must be .total_k"),
    "bias of other keys": ({"bias": torch.zeros(27, 1)}, ValueError, "dimension 0 must be 28, got shape"),
    "bias of 6 columns": ({"bias": torch.zeros(20, 1, 6)}, ValueError, "dimension 2 must be 7, got shape"),
    "intervals of other keys": ({"intervals": ints(2, 27, 1)}, ValueError, "dimension 0 must be 28, got shape"),
    "lists of 2 sequences": (lists(2, 1, 1), ValueError, "kv_indptr must be of 4 sequences, got 2"),
    "lists of 1 sequence": (lists(1, 1, 1), ValueError, "kv_indptr must be of 4 sequences, got 1"),
    "max_seqlen below the rows": ({"max_seqlen_q": 4}, ValueError, "max_seqlen_q must be at least the longest"),
    "max_seqlen below 0": ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be at least the longest sequence 7"),
    "offsets beyond the keys": (
        {"cu_seqlens_k": CU_K + CU_K},
        ValueError,
        "cu_seqlens_k must be non-decreasing from 0 to 28",
    ),
    "offsets of 3 sequences": ({"cu_seqlens_k": ints(4)}, ValueError, r"must both have B \+ 1 elements, got 5 and 4"),
    "offsets of 64 bits": ({"cu_seqlens_k": CU_K.long()}, TypeError, "cu_seqlens_k must be int32"),
    "offsets with gaps": (
        {"cu_seqlens_k": torch.stack([CU_K, CU_K], dim=1)[:, 0]},
        ValueError,
        "cu_seqlens_k must be contiguous",
    ),
}


def rows_of(is_varlen):
    tensors = inputs(BATCH, ROWS, KEYS, HEADS, KV_HEADS, 8)
    return [x.flatten(0, 1) for x in tensors] if is_varlen else tensors


def arguments_of(is_varlen, given):
    sequences = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": ROWS, "max_seqlen_k": KEYS}
    return Arguments(*rows_of(is_varlen), **{**(sequences if is_varlen else {}), **given})


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", [*FIXED, *(f"variable length: {case}" for case in VARIABLE)])
def test_the_operators_refuse(case, direction):
    is_varlen = case.startswith("variable length: ")
    given, error, message = VARIABLE[case.removeprefix("variable length: ")] if is_varlen else FIXED[case]
    if direction == "backward" and "seqused_k" in given:
        pytest.skip("cache_seqlens has no gradient")
    arguments = arguments_of(is_varlen, given)
    out, lse = ops.attention_forward(*arguments_of(is_varlen, {}))
    with pytest.raises(error, match=message):
        if direction == "forward":
            ops.attention_forward(*arguments)
        else:
            ops.attention_backward(out, None, out, lse, arguments.bias is not None, False, *arguments)


def test_keys_beyond_the_last_one_are_skipped():
    """As on CUDA: a cache may hold fewer keys than its lists were built for."""
    tensors = [x.requires_grad_() for x in rows_of(False)]
    arguments = Arguments(*tensors, **as_list(0, 3, 6, 7, 100, 2**31 - 1))
    expected = flash_dmattn_func(tensors[0], *(x[:, [0, 3, 6]] for x in tensors[1:]), softmax_scale=1.0)
    out, _ = ops.attention_forward(*arguments)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    for ours, theirs in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, tensors, dout)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rows", [1, ROWS, 300])
def test_lists_of_a_caller_that_are_not_sorted_are_refused(rows):
    tensors = inputs(1, rows, 400, 2, 1, 8)
    built = KeyLists.build(rand_mask(1, 1, rows, 400, visible=0.3), rows)
    flash_dmattn_func(*tensors, built)
    below = torch.cat([torch.tensor([-2], dtype=torch.int32), built.kv_indices[1:]])
    for keys in (built.kv_indices.flip(0), below, torch.full_like(built.kv_indices, 10**6)):
        with pytest.raises(ValueError, match="kv_indices must ascend from 0 within a list"):
            flash_dmattn_func(*tensors, replace(built, kv_indices=keys))


def test_lists_of_fewer_sequences_are_refused():
    rows = [torch.randn(8, heads, 8) for heads in (2, 1, 1)]
    cu = torch.tensor([0, 2, 4, 6, 8], dtype=torch.int32)
    built = KeyLists.build(KeyIntervalMask(ints(8, 1), ints(8, 1) + 2), 2, 2, cu_seqlens_q=cu, cu_seqlens_k=cu)
    flash_dmattn_varlen_func(*rows, built, None, cu, cu, 2, 2)
    for batches in (1, 2):
        fewer = replace(built, kv_indptr=built.kv_indptr[:, :batches].contiguous())
        with pytest.raises(ValueError, match=f"kv_indptr must be of 4 sequences, got {batches}"):
            flash_dmattn_varlen_func(*rows, fewer, None, cu, cu, 2, 2)


def test_lengths_of_more_than_31_bits_are_refused():
    query, key, value = inputs(1, 1, 1, 1, 1, 8)
    long_rows = query.expand(1, TOO_LONG, 1, 8)
    with pytest.raises(ValueError, match="the number of query rows must be from 0 to 2147352576, got 2147352577"):
        flash_dmattn_func(long_rows, key, value)
    with pytest.raises(ValueError, match="the number of keys must be from 0 to 2147352576, got 2147352577"):
        flash_dmattn_func(query, long_rows, long_rows)
    mask, start = torch.ones(1, 1, 1, 1, dtype=torch.bool), ints(1, 1, 1)
    for seqlen_q, seqlen_k, name in ((TOO_LONG, 1, "seqlen_q"), (1, TOO_LONG, "seqlen_k")):
        message = f"{name} must be from 0 to 2147352576, got 2147352577"
        with pytest.raises(ValueError, match=message):
            KeyLists.build(mask, seqlen_q, seqlen_k)
        with pytest.raises(ValueError, match=message):
            KeyLists.build(KeyIntervalMask(start, start), seqlen_q, seqlen_k)
        with pytest.raises(ValueError, match=message):
            KeyLists.from_indices(ints(1, 1, 1, 1), seqlen_q, seqlen_k, tile_rows=seqlen_q)


def test_the_largest_length():
    most = TOO_LONG - 1
    assert KeyLists.from_indices(ints(1, 1, 1, 1), 1, most, tile_rows=64).seqlen_k == most


@pytest.mark.parametrize("name", ["keys_per_row", "limit"])
def test_negative_bounds_of_lists_are_refused(name):
    options = {"keys_per_row": None, "limit": None, name: -1000}
    with pytest.raises(ValueError, match=f"{name} must not be negative, got -1000"):
        ops.build_key_lists(None, ints(2, 1, 1, 1000), 1, 1000, False, None, None, *options.values())


def test_lists_that_all_rows_share_are_one_a_sequence():
    """More would be of m_blocks that the lists do not have."""
    query, key, value = (torch.randn(1000, 1, 8) for _ in range(3))
    cu = torch.tensor([0, 1000], dtype=torch.int32)
    spans = torch.zeros(2, 1, 1, 2, dtype=torch.int64)
    sequences = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 1000, "max_seqlen_k": 1000}
    with pytest.raises(ValueError, match="kv_indptr must be of 1 m_blocks, got 2"):
        ops.attention_forward(*Arguments(query, key, value, kv_indices=ints(8), kv_indptr=spans, **sequences))


@pytest.mark.parametrize("given", ["mask", "rows of a mask", "intervals", "bias", "window"])
def test_export_refuses_masks_and_biases_of_other_sequences(given):
    """On CUDA the operators that pack a mask, list it or select keys see neither the keys nor the offsets' values."""
    masks = {"mask": rand_mask(27, 1), "rows of a mask": rand_mask(19, 1, 7)}
    masks["intervals"] = KeyIntervalMask(ints(27, 1), ints(27, 1) + ROWS)
    bias = torch.zeros(27, 1) if given in ("bias", "window") else None
    options = {"is_causal": True, "window_size": 3} if given == "window" else {}

    class Layer(torch.nn.Module):
        def forward(self, query, key, value):
            return flash_dmattn_varlen_func(
                query, key, value, masks.get(given), bias, CU_Q, CU_K, ROWS, KEYS, **options
            )

    with pytest.raises(ValueError, match=r"must have the (28 keys|20 rows) of all sequences, got shape \((27|19), 1"):
        torch.export.export(Layer(), tuple(rows_of(True)))
