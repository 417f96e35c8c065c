"""Shared by the tests: random inputs, poisoned memory, and the criterion of correctness."""

import itertools

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_dmattn import KeyIntervalMask, flash_dmattn_func, flash_dmattn_func_auto, relative
from flash_dmattn.broadcast import expand_shared

# The matrix of sequence lengths, and every broadcast of a mask or bias for B = 2, H = 4, Hkv = 2.
LENGTHS = [1, 2, 7, 63, 64, 65, 127, 129, 255, 1000]
BROADCASTS = list(itertools.product([2, 1], [4, 2, 1], ["Sq", 1], ["Sk", 1]))
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")
SLACK = {torch.float64: 1e-11, torch.float32: 1e-6, torch.bfloat16: 1e-5, torch.float16: 1e-5}

IS_PYTORCH_2_9 = torch.__version__.startswith("2.9.")

reference = flash_dmattn_func_auto("reference")


def inputs(batch=2, seqlen_q=65, seqlen_k=65, heads=2, kv_heads=2, head_dim=16, dtype=torch.float32, device="cpu"):
    """Random query, key and value, (B, S, heads, D)."""
    shapes = ((seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads))
    return [torch.randn(batch, seqlen, n, head_dim, device=device).to(dtype) for seqlen, n in shapes]


def on_xpu(*shape):
    """A tensor on a device that has no kernels, wherever the tests run."""
    with FakeTensorMode():
        return torch.zeros(shape, device="xpu")


def shaped(broadcast, seqlen_q, seqlen_k):
    """The shape of one of BROADCASTS for these sequence lengths."""
    return tuple({"Sq": seqlen_q, "Sk": seqlen_k}.get(size, size) for size in broadcast)


def rand_mask(*shape, visible=0.6, device="cpu"):
    return torch.rand(*shape, device=device) < visible


def rand_intervals(*shape, rows, longest=200, device="cpu"):
    """A KeyIntervalMask of random intervals: some are empty, some begin before row 0, some end after the last row."""
    start = torch.randint(-10, max(rows, 1), shape, dtype=torch.int32, device=device)
    return KeyIntervalMask(start, start + torch.randint(-5, longest, shape, dtype=torch.int32, device=device))


def masked_by(masked, bias, by):
    """The bias with -inf (by="-inf") or the least finite number of its dtype (by="least") where `masked` is True."""
    return bias.masked_fill(masked, -torch.inf if by == "-inf" else torch.finfo(bias.dtype).min)


def in_float64(bias):
    """The bias in float64, with -inf in place of the least finite number of its dtype, which masks as well."""
    return bias.double().masked_fill(bias <= torch.finfo(bias.dtype).min, -torch.inf)


def surrounded(tensor, fill=torch.nan, margin=4):
    """A copy of the tensor as a view into memory that holds `fill` on all sides of every dimension."""
    around = torch.full([size + 2 * margin for size in tensor.shape], fill, dtype=tensor.dtype, device=tensor.device)
    view = around[tuple(slice(margin, margin + size) for size in tensor.shape)]
    view.copy_(tensor)
    return view


def run(function, tensors, mask, bias, dout, dlse, *, relative_bias=None, **options):
    """(out, lse, dq, dk, dv, dbias, drelative_bias) of a function with flash_dmattn_func's arguments; no gradient of a
    bias that is None."""
    leaves = [x.detach().requires_grad_() for x in (*tensors, bias, relative_bias) if x is not None]
    if relative_bias is not None:
        options["relative_bias"] = leaves[-1]
    out, lse = function(*leaves[:3], mask, leaves[3] if bias is not None else None, return_lse=True, **options)
    gradients = torch.autograd.grad([out, lse], leaves, [dout.to(out.dtype), dlse.to(lse.dtype)])
    return out.detach(), lse.detach(), *gradients


def eager(query, key, value, mask, bias, *, relative_bias=None, grid=None, **options):
    """The reference in the dtype of its inputs: a relative bias becomes a dense bias of query's dtype."""
    if relative_bias is not None:
        batch, heads = query.shape[0], query.shape[2]
        dense = relative.dense(relative_bias, query.shape[1], key.shape[1]).to(query.dtype)
        both = [expand_shared(x, batch, heads) for x in (dense, bias) if x is not None]
        bias = sum(both[1:], both[0])
    return reference(query, key, value, mask, bias, **options)


def assert_close(ours, eager, exact, dtype, names=None):
    """Asserts max|ours - exact| <= 2 max|eager - exact| + SLACK for each output, -inf in the same places and no NaN.

    names: of the outputs; None means the first of NAMES.
    """
    names = NAMES[: len(exact)] if names is None else names
    for name, x, y, z in zip(names, ours, eager, exact, strict=True):
        assert x.shape == z.shape, name
        infinite = z.isinf()
        assert torch.equal(x[infinite].double(), z[infinite].double()), f"{name}: -inf in the wrong places"
        x, y, z = x[~infinite].double(), y[~infinite].double(), z[~infinite].double()
        if z.numel():
            assert not z.isnan().any() and not x.isnan().any(), f"{name} has NaN"
            off, eager_off = (x - z).abs().max().item(), (y - z).abs().max().item()
            limit = 2 * eager_off + SLACK[dtype]
            assert off <= limit, f"{name} is off by {off:.2e}, eager by {eager_off:.2e}"


def check_float32_bias(tensors, mask, bias, *, function=flash_dmattn_func, **options):
    """Compares out, lse and every gradient with the float64 reference, for a dense float32 bias beside 16-bit queries.

    Eager computes with such a bias in float32: kernels with products of 16 bits are compared with the largest number of
    each result instead. A bias that is rounded to 16 bits makes all results wrong by more.
    """
    query = tensors[0]
    dout = torch.randn_like(query)
    dlse = torch.randn(query.shape[0], query.shape[2], query.shape[1], device=query.device)
    ours = run(function, tensors, mask, bias, dout, dlse, **options)
    wide = [in_float64(x) for x in (*tensors, bias)]
    exact = run(reference, wide[:3], mask, wide[3], dout.double(), dlse.double(), **options)
    assert ours[5].dtype == torch.float32
    for name, x, y in zip(NAMES, ours, exact, strict=True):
        assert torch.equal(x.isinf(), y.isinf()) and not x.isnan().any(), name
        x, y = (z.double().masked_fill(z.isinf(), 0) for z in (x, y))
        largest = 1.0 if name == "lse" else y.abs().max().item()
        assert (x - y).abs().max() <= 0.04 * largest, name


def check(
    tensors, mask=None, bias=None, *, function=flash_dmattn_func, dense=None, dout=None, relative_bias=None, **options
):
    """Compares out, lse and every gradient with the float64 reference, and returns ours.

    `dense` is the mask of the reference, where it is another form of `mask`.
    """
    query = tensors[0]
    batch, seqlen_q, heads, _ = query.shape
    # Small enough that the rounding of one sum of a thousand terms stays under the criterion's absolute part.
    if dout is None:
        dout = query.new_empty(*query.shape[:-1], tensors[2].shape[-1]).normal_() / 8
    dlse = torch.randn(batch, heads, seqlen_q, device=query.device) / 8
    ours = run(function, tensors, mask, bias, dout, dlse, relative_bias=relative_bias, **options)
    dense = mask if dense is None else dense
    rounded = run(eager, tensors, dense, bias, dout, dlse, relative_bias=relative_bias, **options)
    double = [None if x is None else in_float64(x) for x in (*tensors, bias, relative_bias)]
    exact = run(
        reference, double[:3], dense, double[3], dout.double(), dlse.double(), relative_bias=double[4], **options
    )
    leaves = {"dq": tensors[0], "dk": tensors[1], "dv": tensors[2], "dbias": bias, "drelative_bias": relative_bias}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    for (name, leaf), x in zip(leaves.items(), ours[2:], strict=True):
        assert x.dtype == leaf.dtype, name
    assert_close(ours, rounded, exact, query.dtype, ("out", "lse", *leaves))
    return ours
