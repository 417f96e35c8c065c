"""Masked rows and keys may hold NaN: the sm90 kernels copy whole blocks, masked parts included."""

import functools
import itertools

import pytest
import torch
from gpu_inputs import CAUSAL, mask_of, on_gpu, randn
from helpers import NAMES, assert_close, in_float64, reference, run
from sm90 import BIASES, bias_of, check_masked_parts, offsets

from flash_dmattn import KeyIntervalMask, flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.hopper, pytest.mark.usefixtures("use")]


KINDS = ["bool", "bool by lists", "keys alone", "bias", "intervals", "intervals by lists", "causal"]


def masking(kind, rows, keys):
    """(mask, bias, options, rows that see nothing (2, rows), keys that no row sees (2, keys))."""
    masked_rows = torch.rand(2, rows, device="cuda") < 0.2
    masked_keys = torch.rand(2, keys, device="cuda") < 0.2
    masked_rows[1, :130] = masked_keys[0, 120:] = True
    if kind in ("bool", "bool by lists"):
        mask = ~masked_rows[:, None, :, None] & ~masked_keys[:, None, None, :]
        by_lists = kind == "bool by lists"
        options = {"sparse": "lists"} if by_lists else {}
        return mask, randn(2, 4, 1 if by_lists else rows, keys), options, masked_rows, masked_keys
    masked_rows[:] = False
    if kind == "keys alone":
        return ~masked_keys[:, None, None, :], None, {}, masked_rows, masked_keys
    if kind == "bias":
        bias = randn(2, 1, 1, keys).masked_fill(masked_keys[:, None, None, :], -torch.inf)
        return None, bias, {}, masked_rows, masked_keys
    if kind in ("intervals", "intervals by lists"):
        sparse = "tiles" if kind == "intervals" else "lists"
        start = torch.zeros(2, 1, keys, device="cuda", dtype=torch.int32)
        end = torch.full_like(start, rows).masked_fill(masked_keys[:, None], -3)
        return KeyIntervalMask(start, end), randn(2, 2, 1, keys), {"sparse": sparse}, masked_rows, masked_keys
    masked_rows[:, : rows - keys] = True  # causality with more rows than keys
    masked_keys[:] = False
    return None, randn(2, 4, rows, keys), {"is_causal": True}, masked_rows, masked_keys


@pytest.mark.parametrize("head_dim", [32, 40, 64, 96, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_masked_rows_and_keys_may_hold_nan(kind, head_dim, poisoned_allocations):
    rows, keys = (440, 264) if kind == "causal" else (300, 264)
    mask, bias, options, masked_rows, masked_keys = masking(kind, rows, keys)
    tensors = on_gpu(2, rows, keys, 4, 2, head_dim)
    out, lse, dq, dk, dv, *_ = check_masked_parts(tensors, mask, bias, masked_rows, masked_keys, **options)
    assert (out[masked_rows] == 0).all() and (dq[masked_rows] == 0).all()
    assert (lse.transpose(1, 2)[masked_rows] == -torch.inf).all()
    assert (dk[masked_keys] == 0).all() and (dv[masked_keys] == 0).all()


@CAUSAL
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("pairs", ["none", "key"])
@pytest.mark.parametrize(("head_dim", "heads"), [(64, 8), (96, 6), (128, 4), (128, 8)])
def test_lists_shared_by_the_heads_of_a_group(head_dim, heads, pairs, softcap, causal, poisoned_allocations):
    """More row blocks than slots for the partial sums of dQ; empty rows, and keys that no row sees."""
    batch, rows, keys = 24, 400, 1200
    tensors, mask = on_gpu(batch, rows, keys, heads, 2, head_dim), mask_of(batch, 2, rows, keys)
    mask[:, :, 130:135] = mask[:, :, 300:] = mask[..., 200:330] = mask[-1, 1] = False
    query, key, value = tensors
    key[:, 200:330], value[:, 200:330] = torch.nan, torch.inf
    query[:, 130:135] = torch.nan
    bias = bias_of(pairs, batch, 2, rows, keys)
    dout, dlse = torch.randn_like(query) / 8, torch.randn(batch, heads, rows, device="cuda") / 8
    dout[:, 130:135] = torch.nan
    by_lists = functools.partial(flash_dmattn_func, sparse="lists", is_causal=causal, softcap=softcap)

    clean, clean_dout = [x.nan_to_num(0, 0, 0) for x in tensors], dout.nan_to_num(0)
    few = slice(-2, None)  # the last batch elements, which reuse slots
    expected = run(by_lists, clean, mask, bias, clean_dout, dlse)
    for name, x, y in zip(NAMES, run(by_lists, tensors, mask, bias, dout, dlse), expected):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3, msg=name)
    of_few = [x[few] for x in clean], mask[few], None if bias is None else bias[few]
    in_double = [x[few].double() for x in clean], mask[few], None if bias is None else in_float64(bias[few])
    options = {"is_causal": causal, "softcap": softcap}
    eager = run(reference, *of_few, clean_dout[few], dlse[few], **options)
    exact = run(reference, *in_double, clean_dout[few].double(), dlse[few].double(), **options)
    assert_close([x[few] for x in expected], eager, exact, torch.bfloat16)


@CAUSAL
@BIASES
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_sequences_of_nan_do_not_reach_others(head_dim, pairs, causal, poisoned_allocations):
    """Sequences 2 and 6 are NaN throughout, and so is the dense bias beyond each sequence's keys."""
    rows, keys, dirty = [300, 0, 129, 70, 1, 200, 65, 193], [257, 40, 129, 0, 65, 264, 64, 8], (2, 6)
    cu_q, cu_k, longest_q, longest_k = offsets(rows), offsets(keys), max(rows), max(keys)
    of_q = [slice(a, b) for a, b in itertools.pairwise(cu_q.tolist())]
    of_k = [slice(a, b) for a, b in itertools.pairwise(cu_k.tolist())]
    total_q, total_k = sum(rows), sum(keys)
    tensors = [randn(n, h, head_dim) for n, h in ((total_q, 4), (total_k, 2), (total_k, 2))]
    dout, dlse = randn(total_q, 4, head_dim) / 8, torch.randn(4, total_q, device="cuda") / 8
    shape = {"none": None, "key": (total_k, 2), "dense": (total_q, 4, longest_k)}[pairs]
    bias = None if shape is None else randn(*shape)
    mask = None if shape is None else mask_of(*shape, visible=0.8)
    if pairs == "dense":
        for q, n in zip(of_q, keys):
            bias[q, :, n:] = torch.nan
    for b in dirty:
        for x, of in zip((*tensors, dout), (of_q, of_k, of_k, of_q)):
            x[of[b]] = torch.nan
        if bias is not None:
            bias[of_k[b] if pairs == "key" else of_q[b]] = torch.nan

    def packed(*args, **options):
        return flash_dmattn_varlen_func(*args, cu_q, cu_k, longest_q, longest_k, **options)

    out, lse, dq, dk, dv, *dbias = run(packed, tensors, mask, bias, dout, dlse, is_causal=causal)
    for b, (q, k) in enumerate(zip(of_q, of_k)):
        if b in dirty or rows[b] == 0:
            assert b in dirty or ((dk[k] == 0).all() and (dv[k] == 0).all())
            continue
        if keys[b] == 0:
            assert (out[q] == 0).all() and (lse[:, q] == -torch.inf).all() and (dq[q] == 0).all()
            continue

        def alone(pairs_of_all, q=q, k=k):
            if pairs_of_all is None:
                return None
            if pairs == "key":
                return pairs_of_all[k].T[None, :, None]
            return pairs_of_all[q, :, : k.stop - k.start].transpose(0, 1)[None]

        one = [tensors[0][None, q], tensors[1][None, k], tensors[2][None, k]]
        pairs_of_one, douts = (alone(mask), alone(bias)), (dout[None, q], dlse[None, :, q])
        eager = run(reference, one, *pairs_of_one, *douts, is_causal=causal)
        in_double = alone(mask), None if bias is None else in_float64(alone(bias))
        exact = run(reference, [x.double() for x in one], *in_double, *(x.double() for x in douts), is_causal=causal)
        ours = [out[None, q], lse[None, :, q], dq[None, q], dk[None, k], dv[None, k], *(alone(x) for x in dbias)]
        assert_close(ours, eager, exact, torch.bfloat16)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 192, 256])
def test_a_bias_without_gradient_of_the_next_sequence_does_not_reach_this_one(head_dim, deterministic):
    """The last block of 70 rows has the bias of the next sequence in it, which is NaN beyond that one's 8 keys."""
    rows, keys = [70, 100], [264, 8]
    cu_q, cu_k = offsets(rows), offsets(keys)
    tensors = [randn(n, 2, head_dim).requires_grad_() for n in (sum(rows), sum(keys), sum(keys))]
    bias, dout = randn(sum(rows), 2, max(keys)), randn(sum(rows), 2, head_dim)

    def gradients(tensors, bias, dout, cu_q, cu_k):
        options = {"deterministic": deterministic}
        out = flash_dmattn_varlen_func(*tensors, None, bias, cu_q, cu_k, max(rows), max(keys), **options)
        return torch.autograd.grad(out, tensors, dout)

    bias[70:, :, 8:] = torch.nan
    own = [x[:n].detach().requires_grad_() for x, n in zip(tensors, (70, 264, 264))]
    expected = gradients(own, bias[:70], dout[:70], cu_q[:2], cu_k[:2])
    for x, y in zip(gradients(tensors, bias, dout, cu_q, cu_k), expected):
        assert x.isfinite().all()
        torch.testing.assert_close(x[: len(y)], y, rtol=1e-2, atol=1e-3)
