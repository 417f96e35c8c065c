"""Integers of NumPy are integers wherever the functions take one."""

import numpy as np
import pytest
import torch
from helpers import inputs

from flash_dmattn import (
    KeyIntervalMask,
    KeyLists,
    create_mask,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    flash_dmattn_varlen_qkvpacked_func,
    pad_input,
)

Q, K, V = inputs(1, 12, 12, 2, 2, 8)
BIAS = torch.randn(1, 2, 1, 12)
CU = torch.tensor([0, 5, 12], dtype=torch.int32)
INDICES = torch.randint(0, 12, (1, 1, 3, 4), dtype=torch.int32)
WINDOW = {"attn_bias": BIAS, "is_causal": True}


def intervals(mask):
    sizes = [size for size in (mask.rows, mask.keys_per_row) if size is not None]
    assert all(type(size) is int for size in sizes)
    return mask.intervals, *sizes


def lists(keys):
    assert type(keys.seqlen_q) is int and type(keys.seqlen_k) is int
    return keys.kv_indices, keys.kv_indptr, keys.seqlen_q, keys.seqlen_k


CALLS = {
    "window_size": lambda n: flash_dmattn_func(Q, K, V, window_size=n(3), **WINDOW),
    "window_size of all keys": lambda n: flash_dmattn_func(Q, K, V, window_size=n(12), **WINDOW),
    "another backend": lambda n: flash_dmattn_func_auto("reference")(Q, K, V, window_size=n(3), **WINDOW),
    "max_seqlen_q, max_seqlen_k": lambda n: flash_dmattn_varlen_func(
        Q[0], K[0], V[0], None, BIAS[0, :, 0].T, CU, CU, n(7), n(9), is_causal=True, window_size=n(3)
    ),
    "max_seqlen": lambda n: flash_dmattn_varlen_qkvpacked_func(torch.stack([Q, K, V], 2)[0], None, None, CU, n(7)),
    "rows, keys_per_row": lambda n: intervals(
        KeyIntervalMask(*torch.zeros(2, 1, 1, 9, dtype=torch.int32), keys_per_row=n(3), rows=n(9))
    ),
    "causal": lambda n: intervals(KeyIntervalMask.causal(n(5), n(9))),
    "sliding_window": lambda n: intervals(KeyIntervalMask.sliding_window(n(5), n(9), n(3))),
    "sliding_window of two sides": lambda n: intervals(KeyIntervalMask.sliding_window(n(5), n(9), (n(3), n(0)))),
    "documents": lambda n: intervals(KeyIntervalMask.documents(CU, n(12))),
    "padding": lambda n: intervals(KeyIntervalMask.padding(torch.tensor([4, 2]), n(9))),
    "topk": lambda n: intervals(KeyIntervalMask.topk(BIAS, n(3), n(1))),
    "topk_varlen": lambda n: intervals(
        KeyIntervalMask.topk_varlen(BIAS[0, :, 0].T, n(3), CU, max_seqlen_k=n(9)),
    ),
    "to_dense": lambda n: KeyIntervalMask.topk(BIAS, 3).to_dense(n(12)),
    "index of a mask": lambda n: intervals(KeyIntervalMask.topk(BIAS, 3)[n(0)]),
    "index of lists": lambda n: lists(KeyLists.build(KeyIntervalMask.topk(BIAS, 3), 12)[n(0)]),
    "lists": lambda n: lists(KeyLists.build(KeyIntervalMask.topk(BIAS, 3), n(12), n(12))),
    "indices": lambda n: lists(KeyLists.from_indices(INDICES, n(12), n(12), tile_rows=n(4))),
    "create_mask": lambda n: create_mask(BIAS, None, n(1), n(12), n(12), n(3), -1e9, n(2)),
    "pad_input": lambda n: pad_input(Q[0], torch.arange(12), n(2), n(9)),
}


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8, lambda i: np.array([i])[0]])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_numpy_integers(call, integer):
    expected, result = call(int), call(integer)
    if isinstance(expected, torch.Tensor):
        expected, result = (expected,), (result,)
    for x, y in zip(result, expected, strict=True):
        assert torch.equal(x, y) if isinstance(y, torch.Tensor) else x == y


@pytest.mark.parametrize(
    "value, error", [(np.int64(-1), ValueError), (np.float64(3), TypeError), (np.True_, TypeError)]
)
def test_no_counts(value, error):
    with pytest.raises(error, match="window_size must"):
        flash_dmattn_func(Q, K, V, window_size=value, **WINDOW)
