"""Meta tensors: shapes, dtypes and errors without values."""

import pytest
import torch
from helpers import inputs, rand_mask

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func

SEQLEN, HEADS, KV_HEADS = 140, 4, 2
INDICES = torch.zeros(1, 1, SEQLEN, 4, dtype=torch.int32, device="meta")
MASKS = {
    "none": lambda: None,
    "bool": lambda: rand_mask(2, 1, SEQLEN, SEQLEN, device="meta"),
    "intervals": lambda: KeyIntervalMask.causal(SEQLEN, SEQLEN, "meta"),
    "lists": lambda: KeyLists.build(KeyIntervalMask.sliding_window(SEQLEN, SEQLEN, 5, "meta"), SEQLEN),
    "indices": lambda: KeyLists.from_indices(INDICES, SEQLEN, SEQLEN),
}


def on_meta(head_dim=8, dtype=torch.float32):
    tensors = inputs(2, SEQLEN, SEQLEN, HEADS, KV_HEADS, head_dim, dtype, device="meta")
    return [x.requires_grad_() for x in tensors]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("head_dim", [8, 10])
def test_shapes_and_dtypes(kind, head_dim):
    leaves = on_meta(head_dim, torch.bfloat16)
    out, lse = flash_dmattn_func(*leaves, MASKS[kind](), return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == (leaves[0].shape, torch.bfloat16, "meta")
    assert (lse.shape, lse.dtype) == ((2, HEADS, SEQLEN), torch.float32)
    gradients = torch.autograd.grad([out.sum(), lse.sum()], leaves)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]


@pytest.mark.parametrize("rows", [SEQLEN, 1])
def test_window_size(rows):
    query, key, value = on_meta()
    bias = torch.randn(2, KV_HEADS, 1, SEQLEN, device="meta", requires_grad=True)
    out = flash_dmattn_func(query[:, :rows], key, value, None, bias, is_causal=True, window_size=5)
    assert out.shape == (2, rows, HEADS, 8)
    assert torch.autograd.grad(out.sum(), bias)[0].shape == bias.shape


def test_unions():
    both = KeyIntervalMask.causal(SEQLEN, 9, "meta") | KeyIntervalMask.sliding_window(SEQLEN, 9, 3, "meta")
    assert (both.shape, both.device.type, both.rows) == ((1, 1, 9), "meta", SEQLEN)


def test_variable_length():
    ends = torch.zeros(3, dtype=torch.int32, device="meta")
    rows = [x[0] for x in on_meta()]
    assert flash_dmattn_varlen_func(*rows, None, None, ends, ends, 70, 70).shape == rows[0].shape


def test_errors():
    query, key, value = on_meta()
    with pytest.raises(ValueError, match="query's head count must be a multiple of key's, got 3 and 2"):
        flash_dmattn_func(query[:, :, :3], key, value)
    with pytest.raises(RuntimeError, match="attn_bias must be on query's device meta, got cpu"):
        flash_dmattn_func(query, key, value, attn_bias=torch.zeros(1, 1, 1, SEQLEN))
    with pytest.raises(RuntimeError, match="meta Tensors .* data-dependent shape"):
        KeyLists.build(MASKS["bool"](), SEQLEN)
