"""The sm90 kernel that recomputes the gradient of a dense bias: of one that heads or many batch elements share, with a
softcap, and of packed sequences."""

from math import ceil

import pytest
import torch
from gpu_inputs import CAUSAL, intervals, mask_of, on_gpu, randn
from helpers import assert_close, check, eager, reference, run
from sm90 import check_masked_parts, kernels_of, key_mask, offsets

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.hopper, pytest.mark.usefixtures("use")]

HEAD_DIMS = pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])


def recomputes(tensors, bias, **options):
    names = kernels_of(tensors, None, bias, **options)[1]
    return "sm90::dbias_kernel" in names and "sm80" not in names


def test_which_calls_use_it():
    def served(batch, batches, heads, head_dim=64, **options):
        return recomputes(on_gpu(batch, 200, 264, 4, 2, head_dim), randn(batches, heads, 200, 264), **options)

    assert served(9, 1, 4) and served(18, 2, 4) and served(9, 1, 4, deterministic=True, is_causal=True)
    assert served(2, 2, 2) and served(2, 2, 1) and served(2, 1, 1)  # heads share the bias
    assert served(2, 1, 4, softcap=4.0)
    assert served(2, 2, 4, 72, softcap=4.0) and served(2, 2, 4, 256, softcap=4.0)  # nothing is shared
    assert not served(8, 1, 4) and not served(2, 2, 4) and not served(2, 2, 4, 256)
    assert not served(2, 2, 4, softcap=4.0)


@pytest.mark.parametrize("head_dim, least", [(32, 128), (64, 192), (128, 192)])
def test_it_is_selected_automatically_from_a_length_on(head_dim, least, monkeypatch):
    monkeypatch.delenv("FLASH_DMATTN_ARCH")
    for keys in (least - 8, least):
        tensors, bias = on_gpu(9, 72, keys, 4, 2, head_dim), randn(1, 4, 72, keys)
        assert recomputes(tensors, bias) == (keys == least)


@CAUSAL
@pytest.mark.parametrize("rows, keys", [(300, 440), (440, 300), (2, 264), (129, 8), (128, 128)])
@HEAD_DIMS
def test_lengths(head_dim, rows, keys, causal):
    """Tiles that reach beyond the rows and the keys, and rows that causality leaves no key."""
    check(on_gpu(10, rows, keys, 2, 1, head_dim), None, randn(1, 2, rows, keys), is_causal=causal)


@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "is_causal": True}], ids=["plain", "softcap and causal"])
@pytest.mark.parametrize("kind", ["keys", "scores", "intervals"])
@HEAD_DIMS
def test_masks(head_dim, kind, options):
    """Contributors see different blocks, the first one nothing at all."""
    tensors, bias = on_gpu(10, 300, 440, 4, 2, head_dim), randn(2, 2, 300, 440)
    if kind == "keys":
        mask = key_mask(10, 2, 440)
    elif kind == "scores":
        mask = mask_of(10, 4, 300, 440)
        mask[0] = mask[1, :, :256] = mask[2, :, :, 128:] = False
        mask[3:] |= torch.rand(7, 1, 1, 1, device="cuda") < 0.5  # full blocks
    else:
        mask = intervals(10, 2, 440, rows=300)
    check(tensors, mask, bias, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch, heads", [(300, 2), (33, 8)])
def test_splits_of_the_contributors(batch, heads, dtype):
    """One or two tiles: the contributors are split among CTAs, whose sums a second kernel adds up."""
    tensors = [x.to(dtype) for x in on_gpu(batch, 130, 72, heads, heads, 64)]
    check(tensors, None, randn(1, 1, 130, 72, dtype=dtype))
    mask = key_mask(batch, 1, 72)
    mask[: batch // 2] = False  # the first splits have no visible score
    check(tensors, mask, randn(1, heads, 130, 72, dtype=dtype))


@CAUSAL
@pytest.mark.parametrize("heads", [8, 1])
def test_the_gradient_is_repeatable(heads, causal):
    leaves = [x.requires_grad_() for x in (*on_gpu(16, 300, 440, 8, 4, 64), randn(1, heads, 300, 440))]
    mask = mask_of(16, 1, 300, 440)
    mask[1::2, :, :128] = False
    out = flash_dmattn_func(*leaves[:3], mask, leaves[3], is_causal=causal)
    dout = torch.randn_like(out)
    first, *others = (torch.autograd.grad(out, leaves[3], dout, retain_graph=True)[0] for _ in range(5))
    assert first.isfinite().all() and first.any()
    assert all(torch.equal(first, x) for x in others)


@pytest.mark.parametrize("batches", [1, 10])
@pytest.mark.parametrize("by_row", [False, True])
@HEAD_DIMS
def test_masked_rows_and_keys_may_hold_nan(head_dim, by_row, batches, poisoned_allocations):
    """The rows and keys that a contributor does not see, and the biases that no contributor sees."""
    batch, rows, keys = 10, 300, 264
    masked_rows = torch.rand(batch, rows, device="cuda") < (0.2 if by_row else 0)
    masked_keys = torch.rand(batch, keys, device="cuda") < 0.2
    masked_rows[1, :130] = by_row
    masked_keys[0, 120:] = masked_keys[:, 200:210] = True
    mask = ~masked_keys[:, None, None, :]
    if by_row:
        mask = mask & ~masked_rows[:, None, :, None]
    tensors = on_gpu(batch, rows, keys, 4, 2, head_dim)
    bias, hidden = randn(batches, 4, rows, keys), ~(mask if batches > 1 else mask.any(0, keepdim=True))
    *_, dbias = check_masked_parts(tensors, mask, bias, masked_rows, masked_keys, hidden)
    assert (dbias[hidden.expand_as(bias)] == 0).all()


@CAUSAL
@pytest.mark.parametrize("kind", ["none", "keys", "scores"])
@pytest.mark.parametrize("heads, lengths", [(4, [100, 0, 300, 256]), (48, [40, 100])], ids=["tiles", "splits"])
@pytest.mark.parametrize("head_dim, bias_heads", [(64, 1), (128, 1), (128, None)])
def test_packed_sequences(head_dim, bias_heads, heads, lengths, kind, causal):
    """Heads share the bias, or nothing is shared."""
    total, longest, cu_seqlens = sum(lengths), ceil(max(lengths) / 8) * 8, offsets(lengths)
    shapes = [(total, heads, head_dim)] * 3 + [(total, bias_heads or heads, longest)]
    leaves = query, key, value, bias = [randn(*shape).requires_grad_() for shape in shapes]
    mask = {"none": None, "keys": mask_of(total, 1), "scores": mask_of(total, 1, longest)}[kind]
    dout = randn(total, heads, head_dim) / 8
    limits = {"max_seqlen_q": max(lengths), "max_seqlen_k": longest}
    options = {"attn_mask": mask, "attn_bias": bias, "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, **limits}
    out = flash_dmattn_varlen_func(query, key, value, is_causal=causal, **options)
    dbias = torch.autograd.grad(out, leaves, dout)[3]
    for begin, length in zip(cu_seqlens.tolist(), lengths):
        if length == 0:
            continue
        rows = slice(begin, begin + length)

        def alone(scores, rows=rows, length=length):
            return scores[rows, :, :length].permute(1, 0, 2)[None]

        tensors = [x[None, rows].detach() for x in (query, key, value)]
        mask_alone = alone(mask) if kind == "scores" else mask[rows].T[None, :, None] if kind == "keys" else None
        douts = dout[None, rows], torch.zeros(1, heads, length, device="cuda")
        rounded = run(eager, tensors, mask_alone, alone(bias), *douts, is_causal=causal)[5]
        tensors, douts = [x.double() for x in tensors], [x.double() for x in douts]
        exact = run(reference, tensors, mask_alone, alone(bias).double(), *douts, is_causal=causal)[5]
        assert_close([alone(dbias)], [rounded], [exact], torch.bfloat16, ("dbias",))
        assert not dbias[rows, :, length:].any()
