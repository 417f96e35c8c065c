"""Packed batches in which most sequences are far shorter than the longest: their blocks are numbered consecutively."""

import pytest
import torch
from gpu_inputs import CAUSAL, intervals, mask_of, randn
from sequences import part_of, slices
from sm90 import names_of, offsets

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.hopper, pytest.mark.usefixtures("use")]

ROWS = [0, 3, 700, 0, 64, 1, 129, 128, 5, 0]
KEYS = [40, 3, 900, 0, 64, 130, 129, 1, 0, 0]
HEADS, KV_HEADS = 4, 2
LONGEST = -(-max(KEYS) // 8) * 8  # TMA reads dense biases of a multiple of 8 keys
# Rows and keys of no sequence, before the first and after the last.
BEFORE, AFTER = 70, 200


def boundaries(lengths):
    return offsets(lengths) + BEFORE


def total(lengths):
    return BEFORE + sum(lengths) + AFTER


def make_bias(kind):
    shape = {"key": (total(KEYS), HEADS), "dense": (total(ROWS), HEADS, LONGEST)}.get(kind)
    return None if shape is None else randn(*shape)


def make_mask(kind):
    if kind == "none":
        return None
    if kind in ("intervals", "lists"):
        return intervals(total(KEYS), KV_HEADS, rows=300)
    return mask_of(total(KEYS), KV_HEADS) if kind == "keys" else mask_of(total(ROWS), 1, LONGEST)


@CAUSAL
@pytest.mark.parametrize("mask_kind", ["none", "keys", "scores", "intervals", "lists"])
@pytest.mark.parametrize("bias_kind", ["none", "key", "dense", "relative"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sequences_are_as_if_they_were_alone(head_dim, bias_kind, mask_kind, causal, poisoned_allocations):
    if mask_kind == "lists" and bias_kind in ("dense", "relative"):
        pytest.skip("the sm80 kernels serve these lists")
    tensors = [randn(total(n), h, head_dim) for n, h in ((ROWS, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS))]
    bias, mask = make_bias(bias_kind), make_mask(mask_kind)
    relative_bias = randn(1, HEADS, 61) if bias_kind == "relative" else None
    leaves = [x.requires_grad_() for x in (*tensors, bias, relative_bias) if x is not None]
    options = {"attn_mask": mask, "attn_bias": bias, "relative_bias": relative_bias, "is_causal": causal}
    options |= {"sparse": "lists" if mask_kind == "lists" else "tiles", "return_lse": True}
    limits = {"cu_seqlens_q": boundaries(ROWS), "cu_seqlens_k": boundaries(KEYS)}
    limits |= {"max_seqlen_q": max(ROWS), "max_seqlen_k": LONGEST}
    out, lse = flash_dmattn_varlen_func(*tensors, **options, **limits)
    # Rows of no sequence have undefined outputs.
    dout, dlse = randn(*out.shape) / 8, torch.zeros_like(lse)
    gradients = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    sums = [torch.zeros(x.shape, device="cuda") for x in leaves[3:]]
    for i, (rows, keys) in enumerate(zip(slices(boundaries(ROWS)), slices(boundaries(KEYS)))):
        if ROWS[i] == 0:
            continue
        if KEYS[i] == 0:
            assert not out[rows].any() and not gradients[0][rows].any() and (lse[:, rows] == -torch.inf).all()
            continue
        parts = [x[part].detach()[None].requires_grad_() for x, part in zip(tensors, (rows, keys, keys))]
        part_of_bias = None if bias is None else part_of(bias.detach(), rows, keys).requires_grad_()
        part_options = options | {"attn_mask": part_of(mask, rows, keys), "attn_bias": part_of_bias}
        expected, expected_lse = flash_dmattn_func(*parts, **part_options)
        torch.testing.assert_close(out[rows], expected[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[:, rows], expected_lse[0], rtol=1e-3, atol=1e-3)
        own = [*parts, *(x for x in (part_of_bias, relative_bias) if x is not None)]
        expected = torch.autograd.grad(expected, own, dout[None, rows])
        for name, x, y, part in zip("qkv", gradients, expected, (rows, keys, keys)):
            torch.testing.assert_close(x[part], y[0], rtol=2e-2, atol=2e-2, msg=lambda m, n=name, i=i: f"d{n} {i}: {m}")
        if bias is not None:
            torch.testing.assert_close(part_of(gradients[3], rows, keys), expected[3], rtol=2e-2, atol=2e-2)
        if relative_bias is not None:
            sums[0] += expected[3]
    if relative_bias is not None:
        torch.testing.assert_close(gradients[3].float(), sums[0], rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_sequences_and_several_launches(head_dim, deterministic):
    """More sequences than threads of a CTA, and sums of dQ above 64 MiB; results repeat bit by bit."""
    lengths = torch.randint(0, 300, (700,)).tolist()
    lengths[350] = 5000
    leaves = [randn(sum(lengths), heads, head_dim).requires_grad_() for heads in (16, 8, 8)]
    limits = offsets(lengths), offsets(lengths), max(lengths), max(lengths)
    options = {"is_causal": True, "deterministic": deterministic}
    out = flash_dmattn_varlen_func(*leaves, None, None, *limits, **options)
    dout = randn(*out.shape)
    names = names_of(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    assert names.count("convert_dquery_kernel") > 1
    first, again = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(2))
    if deterministic:
        assert all(torch.equal(x, y) for x, y in zip(first, again))
    parts_of_sequences = slices(limits[0])
    for i in (0, 1, 349, 350, 351, 698, 699):
        part = parts_of_sequences[i]
        parts = [x[part].detach()[None].requires_grad_() for x in leaves]
        expected = flash_dmattn_func(*parts, is_causal=True)
        torch.testing.assert_close(out[part], expected[0], rtol=2e-2, atol=2e-2)
        for x, y in zip(first, torch.autograd.grad(expected, parts, dout[None, part])):
            torch.testing.assert_close(x[part], y[0], rtol=2e-2, atol=2e-2)


def test_the_time_does_not_depend_on_the_limit():
    """max_seqlen may be far above all lengths."""
    lengths = [256] * 64
    tensors = [randn(sum(lengths), 16, 128).requires_grad_() for _ in range(3)]
    cu_seqlens = offsets(lengths)

    def seconds(limit):
        def call():
            out = flash_dmattn_varlen_func(*tensors, None, None, cu_seqlens, cu_seqlens, limit, limit)
            torch.autograd.grad(out, tensors, torch.ones_like(out))

        call()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
        for event in events[:-1]:
            event.record()
            call()
        events[-1].record()
        torch.cuda.synchronize()
        return min(a.elapsed_time(b) for a, b in zip(events, events[1:]))

    assert "sm90" in names_of(lambda: flash_dmattn_varlen_func(*tensors, None, None, cu_seqlens, cu_seqlens, 256, 256))
    assert seconds(16384) < 2 * seconds(256)
