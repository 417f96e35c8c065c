"""The key lists that a device builds, against the dense masks that they stand for."""

import pytest
import torch
from lists import check_lists
from paths import CAUSAL, LISTS, both, case
from sequences import Sequences, slices

from flash_dmattn import KeyLists


@CAUSAL
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (128, 64), (129, 255), (700, 300), (300, 5000)])
@pytest.mark.parametrize("path", [case(path) for path in both(*LISTS)])
def test_lists_hold_the_keys_that_their_rows_see(path, seqlen_q, seqlen_k, causal):
    mask = path.make_mask(2, 3, seqlen_q, seqlen_k)
    dense = mask.to_dense(seqlen_q) if path.mask == "intervals" else mask
    lists = KeyLists.build(mask, seqlen_q, is_causal=causal)
    # A mask that is the same for all rows has one list, which leaves causality to the kernels.
    check_lists(lists, dense.tril(seqlen_k - seqlen_q) if causal and not lists.row_broadcast else dense)


@CAUSAL
@pytest.mark.parametrize("path", [case(path) for path in both(*LISTS)])
def test_lists_of_variable_length(path, causal):
    s = Sequences(path.device)
    mask = s.mask(path.mask, 2, visible=0.05)
    lists = KeyLists.build(mask, s.longest_q, s.longest_k, causal, s.cu_q, s.cu_k)
    packed = s.dense(mask)
    dense = torch.zeros(5, 2, 1 if path.mask == "key" else s.longest_q, s.longest_k, dtype=torch.bool)
    for b, (rows, keys) in enumerate(zip(slices(s.cu_q), slices(s.cu_k))):
        n, m = rows.stop - rows.start, keys.stop - keys.start
        one = packed[keys].T[:, None] if path.mask == "key" else packed[rows, :, :m].transpose(0, 1)
        one = one.tril(m - n) if causal and path.mask != "key" else one
        dense[b, :, : one.shape[1], :m] = one
    check_lists(lists, dense)
