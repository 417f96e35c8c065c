"""Rows that see nothing, scores that the bias masks, and memory full of NaN where nothing is visible."""

import pytest
import torch
from helpers import NAMES, masked_by, run, surrounded
from paths import DTYPES, HALVES, LISTS, both, case, cpu, cuda, on

from flash_dmattn import KeyIntervalMask, flash_dmattn_func

HIDING = pytest.mark.parametrize("by", ["-inf", "least"])


def dtypes_of(path):
    return HALVES if path.on_cuda else DTYPES


def mask_with_empty_rows(path, rows, keys):
    """(2, 4, Sq, Sk): a row, a block of the forward, blocks of the backward and a head see nothing."""
    first, middle = 512 * keys // 600, 256 * rows // 300
    if path.mask == "intervals":
        mask = path.rand_intervals(2, 4, keys, rows=rows)
        start, end = mask.start.clone(), mask.end.clone()
        start[0, 1, :first] = rows + 100
        end[0, 2].clamp_(max=2 * rows // 3)
        end[1, 3] = -1
        return KeyIntervalMask(start, end)
    mask = path.rand_mask(2, 4, rows, keys, visible=0.02 if path.by_lists else 0.6)
    mask[0, 0, rows // 2] = False
    mask[0, 1, :, :first] = False
    mask[0, 2, :middle] = False
    mask[1, 3] = False
    return mask


EMPTY = both("bool", "bool lists", "intervals", "interval lists")


@pytest.mark.parametrize("path, dtype", [case(path, dtype) for path in EMPTY for dtype in dtypes_of(path)])
@pytest.mark.parametrize("rows, keys", [(300, 600), (2, 3000)])
def test_rows_that_see_nothing_are_zero(path, rows, keys, dtype):
    if path.on_cpu and rows == 2:
        keys = 600
    tensors = path.inputs(2, rows, keys, 4, 2, 64 if path.on_cuda else 16, dtype=dtype)
    mask = mask_with_empty_rows(path, rows, keys)
    for bias_shape in ((1, 4, rows, keys), (2, 2, 1, keys)) if path.on_cuda else ((1, 4, rows, keys),):
        out, lse, dq, *_ = path.check(tensors, mask, path.randn(*bias_shape, dtype=dtype))
        dense = mask.to_dense(rows) if path.mask == "intervals" else mask
        masked = ~dense.any(-1)
        assert masked[1, 3].all() and (lse[masked] == -torch.inf).all()
        assert (out.transpose(1, 2)[masked] == 0).all() and (dq.transpose(1, 2)[masked] == 0).all()


CAUSAL_ROWS = [case(path, dtype) for path in both("none") for dtype in dtypes_of(path)]


@pytest.mark.parametrize("path, dtype", CAUSAL_ROWS)
def test_causal_rows_above_the_first_key_see_nothing(path, dtype):
    out, lse, dq, *_ = path.check(path.inputs(1, 70, 40, 2, 1, 8, dtype=dtype), is_causal=True)
    assert (out[:, :30] == 0).all() and (lse[:, :, :30] == -torch.inf).all() and (dq[:, :30] == 0).all()


@on(*both("intervals", *LISTS))
def test_nothing_visible(path):
    mask = torch.zeros(1, 1, 1 if path.mask == "key" else 200, 140, dtype=torch.bool, device=path.device)
    if path.mask == "intervals":
        mask = KeyIntervalMask(*torch.full((2, 1, 1, 140), 7, dtype=torch.int32, device=path.device))
    tensors = path.inputs(1, 200, 140, 2, 1, 64 if path.on_cuda else 16)
    out, lse, *gradients = path.check(tensors, mask, path.randn(1, 2, 1, 140))
    assert (out == 0).all() and (lse == -torch.inf).all() and all((x == 0).all() for x in gradients)


# Biases that hide

HIDING_CASES = [
    *(case(path, dtype) for path in cpu("none") for dtype in DTYPES),
    *(case(path, torch.float32) for path in cpu("intervals", *LISTS)),
    *(case(path, dtype) for path in cuda("none") for dtype in HALVES),
    *(case(path, torch.bfloat16) for path in cuda("bool", "intervals", *LISTS)),
]


@HIDING
@pytest.mark.parametrize("path, dtype", HIDING_CASES)
@pytest.mark.parametrize("heads, rows", [((2, 4), 1), ((1, 2), 1), ((2, 2), 150), ((1, 1), 150)], ids=str)
def test_a_bias_that_masks_is_a_mask(path, heads, rows, by, dtype):
    """-inf and the least finite number of the bias's dtype mask exactly as a mask does, in empty rows and heads too."""
    query_rows, keys = (50, 70) if path.on_cpu and path.mask == "none" else (150, 200)
    head_dim = 64 if path.on_cuda else 8
    tensors = path.inputs(2, query_rows, keys, 4, 2, head_dim, dtype=dtype)
    shape = (*heads, min(rows, query_rows), keys)
    masked = path.rand_mask(*shape, visible=0.4)
    masked[..., :20] = True
    masked[:, :, 3:5] |= shape[2] > 1
    masked[:, 1:] |= shape[1] > 1
    bias, mask = path.randn(*shape, dtype=dtype), path.make_mask(2, 2, query_rows, keys)
    out, lse, *_, dbias = path.check(tensors, mask, masked_by(masked, bias, by))
    assert (dbias[masked] == 0).all()
    if shape[1] > 1:
        assert (lse[:, 4 // shape[1] :] == -torch.inf).all()
    if path.on_cpu and path.mask == "none":
        ones = torch.ones_like(out), torch.ones_like(lse)
        by_mask = run(flash_dmattn_func, tensors, ~masked, bias, *ones)
        by_bias = run(flash_dmattn_func, tensors, None, masked_by(masked, bias, by), *ones)
        assert all(torch.equal(a, b) for a, b in zip(by_mask, by_bias))


@on(*both("none", "intervals", *LISTS))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 256])
def test_a_float32_key_bias_is_not_rounded(path, head_dim, dtype):
    tensors = path.inputs(1, 150, 200, 4, 2, head_dim, dtype=dtype)
    mask, bias = path.make_mask(1, 2, 150, 200), path.randn(1, 2, 1, 200, dtype=torch.float32)
    *_, dbias = path.check(tensors, mask, bias)
    assert dbias.dtype == torch.float32
    large = bias + 300  # in 16 bits its fraction is rounded
    out, rounded = (path.function(*tensors, mask, x) for x in (large, large.to(dtype).float()))
    torch.testing.assert_close(out, path.function(*tensors, mask, bias), rtol=1e-2, atol=2e-2)
    assert not torch.equal(out, rounded)


# Memory full of NaN


def poisoned_cases():
    return [
        *(case(path, 12, dtype, 4) for path in cpu("bool") for dtype in DTYPES),
        *(case(path, 12, torch.float32, 4) for path in cpu("intervals", *LISTS)),
        # 4 elements around a tensor put it where TMA cannot read it, 8 where TMA can.
        *(case(path, 40, torch.bfloat16, 4) for path in cuda("bool", "intervals", *LISTS)),
        *(case(path, 64, torch.bfloat16, margin) for path in cuda("none", "bool", *LISTS) for margin in (4, 8)),
        *(case(path, head_dim, torch.bfloat16, 8) for path in cuda("bool lists") for head_dim in (128, 192, 256)),
    ]


@pytest.mark.parametrize("bias_shape", [None, (2, 4, 1), (1, 2, 300), (2, 4, 300)], ids=str)
@pytest.mark.parametrize("path, head_dim, dtype, margin", poisoned_cases())
@pytest.mark.usefixtures("poisoned_allocations")
def test_memory_around_tensors_and_new_memory_may_be_nan(path, head_dim, dtype, margin, bias_shape):
    def poison(tensor, fill=torch.nan):
        return surrounded(tensor, fill=fill, margin=margin)

    keys = 264 if margin == 8 else 290
    tensors = [poison(x) for x in path.inputs(2, 300, keys, 4, 2, head_dim, dtype=dtype)]
    mask = path.make_mask(2, 2, 300, keys)
    if path.mask == "intervals":
        mask = KeyIntervalMask(*(poison(x, fill=99) for x in (mask.start, mask.end)))
    elif mask is not None:
        mask = poison(mask, fill=True)
    bias = None if bias_shape is None else poison(path.randn(*bias_shape, keys, dtype=dtype))
    dout = poison(torch.randn_like(tensors[0]) / 8)
    path.check(tensors, mask, bias, dout=dout, is_causal=True)
    if path.on_cuda and path.kernels == "sm90":
        path.check(tensors, mask, bias, dout=dout)


def padded(path, lengths, seqlen):
    """(mask, rows that see nothing): of this kind, keys beyond the lengths masked from all rows."""
    real = torch.arange(seqlen, device=path.device) < lengths
    if path.mask == "intervals":
        end = torch.where(real, lengths, 0).int()[:, None]
        return KeyIntervalMask(torch.zeros_like(end), end), real
    if path.mask == "key":
        return real[:, None, None, :], torch.ones_like(real)
    return real[:, None, :, None] & real[:, None, None, :], real


PADDED = [
    *(case(path, dtype) for path in cpu("bool") for dtype in DTYPES),
    *(case(path, torch.float32) for path in cpu("intervals", *LISTS)),
    *(case(path, torch.bfloat16) for path in cuda("bool", "intervals", *LISTS)),
]


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.parametrize("path, dtype", PADDED)
def test_garbage_in_padding_reaches_nothing(path, dtype, garbage):
    """Rows and keys that take no part may hold anything, in the backward too; each row sees every real key."""
    query, key, value = path.inputs(2, 300, 300, 4, 2, 64 if path.on_cuda else 16, dtype=dtype)
    lengths = torch.tensor([[170], [299]], device=path.device)
    mask, real_rows = padded(path, lengths, 300)
    real_keys = torch.arange(300, device=path.device) < lengths
    bias = path.randn(2, 2, 1, 300, dtype=dtype) if path.by_lists else path.randn(2, 4, 300, 300, dtype=dtype)
    dout, dlse = torch.randn_like(query), torch.zeros(2, 4, 300, device=path.device)
    clean = run(path.function, (query, key, value), mask, bias, dout, dlse)

    def dirty(tensor, real):
        return tensor.masked_fill(~real[:, :, None, None], garbage)

    tensors = dirty(query, real_rows), dirty(key, real_keys), dirty(value, real_keys)
    ours = run(path.function, tensors, mask, bias, dirty(dout, real_rows), dlse)
    # Next to garbage, sums are taken in another order.
    half = dtype in (torch.bfloat16, torch.float16)
    rounding = {"rtol": 1e-2, "atol": 1e-3} if half else {"rtol": 1e-4, "atol": 1e-5}
    for name, x, y in zip(NAMES, ours, clean):
        torch.testing.assert_close(x, y, **rounding, msg=name)
