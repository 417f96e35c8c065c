"""Empty tensors, and tensors that are transposed, sliced or expanded."""

import pytest
import torch
from paths import LISTS, both, case, cpu, on, triton

SIZES = [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2), (2, 0, 0, 2), (2, 5, 5, 0)]


@pytest.mark.parametrize("bias_rows", ["none", "key", "dense"])
@pytest.mark.parametrize("batch, seqlen_q, seqlen_k, heads", SIZES)
@on(*both("none", "bool"), *triton("none"))
def test_empty_tensors(path, batch, seqlen_q, seqlen_k, heads, bias_rows):
    tensors = path.inputs(batch, seqlen_q, seqlen_k, heads, heads, 64 if path.on_cuda else 8)
    if bias_rows != "none":
        tensors.append(path.randn(1, 1, 1 if bias_rows == "key" else seqlen_q, seqlen_k))
    leaves = [x.requires_grad_() for x in tensors]
    mask = None if path.mask == "none" else path.rand_mask(1, 1, seqlen_q, seqlen_k)
    bias = leaves[3] if bias_rows != "none" else None
    for causal in (False, True):
        out, lse = path.function(*leaves[:3], mask, bias, is_causal=causal, return_lse=True)
        gradients = torch.autograd.grad([out, lse], leaves, [torch.randn_like(out), torch.randn_like(lse)])
        assert out.shape == leaves[0].shape and lse.shape == (batch, heads, seqlen_q)
        assert (out == 0).all() and (lse == -torch.inf).all()
        for gradient, leaf in zip(gradients, leaves, strict=True):
            assert gradient.shape == leaf.shape and (gradient == 0).all()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("seqlen_q", [0, 5, 300])
@on(*cpu(*LISTS))
def test_lists_without_keys(path, seqlen_q, heads):
    mask = path.make_mask(2, heads, seqlen_q, 0)
    tensors = [torch.randn(2, n, 2, 16, requires_grad=True) for n in (seqlen_q, 0, 0)]
    out = path.function(*tensors, mask)
    assert out.shape == (2, seqlen_q, 2, 16) and (out == 0).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), tensors))


STRIDED = [
    *(case(path, torch.bfloat16) for path in both("bool", "bool lists", "interval lists")),
    *(case(path, torch.float32) for path in [*cpu("bool", "bool lists", "interval lists"), *triton("bool")]),
]


@pytest.mark.parametrize("path, dtype", STRIDED)
def test_strides(path, dtype):
    """Transposed, sliced and expanded inputs, masks, biases and gradients."""
    rows, keys, head_dim = (140, 270, 64) if path.on_cuda else (20, 70, 16) if path.backend else (70, 90, 16)
    query, key, value = path.inputs(2, rows, keys, 4, 4, head_dim, dtype=dtype)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    key = path.randn(2, 2 * keys, 4, head_dim, dtype=dtype)[:, ::2]
    value = path.randn(2, keys, 1, head_dim, dtype=dtype).expand(2, keys, 4, head_dim)
    mask = path.rand_mask(2, keys, 4, rows).permute(0, 2, 3, 1)
    if path.mask == "intervals":
        mask = path.rand_intervals(2, 4, keys, rows=rows)
    dense = path.randn(keys, rows, dtype=dtype).T.expand(2, 4, rows, keys)
    by_key = path.randn(keys, 2, dtype=dtype).T[:, None, None].expand(2, 4, 1, keys)
    by_row = path.randn(rows, 1, dtype=dtype).expand(2, 4, rows, keys)
    dout = path.randn(2, 4, rows, head_dim, dtype=dtype).transpose(1, 2) / 8
    for bias in (dense,) if path.backend else (dense, by_key, by_row):  # the Triton interpreter is slow
        path.check((query, key, value), mask, bias, dout=dout)
    path.check((query, key, value), mask, dense, dout=dout[..., :1].expand(2, rows, 4, head_dim))
    if path.backend:
        return
    part = slice(1, 1 + head_dim // 2)
    path.check((query[..., part], key[..., part], value[..., part]), mask, dense)


@on(*cpu("none"))
def test_a_head_dimension_that_is_not_contiguous(path):
    query, key, value = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in path.inputs(1, 40, 40, 2, 2, 40))
    path.check((query, key, value), dout=torch.randn(1, 40, 2, 80)[..., ::2])
