"""softmax_scale as a tensor: one number, or one per head, with a gradient."""

import pytest
import torch
from helpers import SLACK, assert_close, inputs, reference

from flash_dmattn import (
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_kvpacked_func,
    flash_dmattn_varlen_func,
    flash_dmattn_with_kvcache,
)

HEADS = 4


def scaled_by_hand(query, key, value, bias, scale, **options):
    """The reference, of queries that PyTorch multiplies in their dtype."""
    per_head = scale.to(query.dtype) if scale.ndim == 0 else scale.to(query.dtype)[:, None]
    return reference(query * per_head, key, value, None, bias, 1.0, return_lse=True, **options)


def run(function, tensors, douts, **options):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    outs = function(*leaves, **options)
    gradients = torch.autograd.grad(outs, leaves, [d.to(x.dtype) for d, x in zip(douts, outs)])
    return outs[0].detach(), outs[1].detach(), *gradients[:3], gradients[4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (HEADS,)], ids=["number", "per head"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "window_size": 9}], ids=["dense", "window"])
def test_a_tensor_is_the_scale_of_the_scores(dtype, shape, options):
    def ours(query, key, value, bias, scale, **options):
        return flash_dmattn_func(query, key, value, None, bias, scale, return_lse=True, **options)

    off = []  # of the gradient of the scale: one or four numbers, whose errors are compared over several draws
    for _ in range(10):
        query, key, value = inputs(2, 33, 33, HEADS, 2, 16, dtype=dtype)
        bias, scale = torch.randn(2, 2, 1, 33).to(dtype), torch.rand(shape, dtype=torch.float64) + 0.1
        tensors = (query, key, value, bias, scale.to(torch.promote_types(dtype, torch.float32)))
        douts = torch.randn(2, 33, HEADS, 16).double() / 8, torch.randn(2, HEADS, 33).double() / 8
        *exact, exact_dscale = run(scaled_by_hand, [x.double() for x in tensors], douts, **options)
        *eager, eager_dscale = run(scaled_by_hand, tensors, douts, **options)
        *outputs, dscale = run(ours, tensors, douts, **options)
        assert_close(outputs, eager, exact, dtype)
        assert dscale.shape == shape and dscale.dtype == tensors[4].dtype
        off.append([(x - exact_dscale).abs().mean() for x in (dscale, eager_dscale)])
    ours_off, eager_off = torch.tensor(off).mean(dim=0)
    assert ours_off <= 2 * eager_off + SLACK[dtype]


def test_a_tensor_equals_the_number():
    query, key, value = inputs(dtype=torch.float64)
    expected = flash_dmattn_func(query, key, value, softmax_scale=0.3, return_attn_probs=True)
    for scale in (torch.tensor(0.3, dtype=torch.float64), torch.full((2,), 0.3, dtype=torch.float64)):
        ours = flash_dmattn_func(query, key, value, softmax_scale=scale, return_attn_probs=True)
        for x, y in zip(ours, expected):
            assert torch.allclose(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (HEADS,)], ids=["number", "per head"])
def test_masked_rows_may_hold_nan(shape):
    query, key, value = inputs(1, 6, 9, HEADS, 2, 16, dtype=torch.float64)
    mask = torch.ones(1, 1, 6, 9, dtype=torch.bool)
    mask[:, :, 2] = False
    gradients = []
    for fill in (0.0, torch.nan, torch.inf):
        query[:, 2] = fill
        scale = torch.full(shape, 0.3, dtype=torch.float64, requires_grad=True)
        out = flash_dmattn_func(query, key, value, mask, softmax_scale=scale)
        gradients += torch.autograd.grad(out.square().sum(), scale)
    assert gradients[0].abs().sum() > 0
    assert all(torch.allclose(gradient, gradients[0], rtol=1e-12) for gradient in gradients)


@pytest.mark.parametrize("shape", [(), (HEADS,)], ids=["number", "per head"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cache_of_keys_takes_a_tensor(dtype, shape):
    query, key, value = inputs(2, 3, 40, HEADS, 2, 16, dtype=dtype)
    scale = torch.rand(shape) + 0.1
    by_hand = (query.to(torch.promote_types(dtype, torch.float32)) * scale.view(-1, 1)).to(dtype)
    results = [
        flash_dmattn_with_kvcache(given, key, value, cache_seqlens=40, softmax_scale=by, return_lse=True)
        for given, by in ((query, scale), (by_hand, 1.0))
    ]
    for x, y in zip(*results):
        assert torch.equal(x, y)
    with pytest.raises(ValueError, match="softmax_scale must not require grad"):
        flash_dmattn_with_kvcache(query, key, value, cache_seqlens=40, softmax_scale=scale.requires_grad_())
    with pytest.raises(ValueError, match="softmax_scale must be a number, or a tensor .* got shape"):
        flash_dmattn_with_kvcache(query, key, value, cache_seqlens=40, softmax_scale=torch.ones(HEADS + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_number_on_the_cpu_serves_cuda(where):
    query, key, value = inputs(dtype=torch.bfloat16, device="cuda")
    scale = torch.tensor(0.3, device=where, requires_grad=True)
    out = flash_dmattn_func(query, key, value, softmax_scale=scale)
    by_hand = (query.float() * 0.3).bfloat16()
    assert torch.equal(out, flash_dmattn_func(by_hand, key, value, softmax_scale=1.0))
    (gradient,) = torch.autograd.grad(out.float().square().sum(), scale)
    assert gradient.device.type == where and gradient.isfinite()


def test_packed_and_compiled_calls_and_other_backends():
    query, key, _ = inputs(1, 20, 20, HEADS, 2, 16, dtype=torch.float64)
    scale = torch.rand(HEADS, dtype=torch.float64)
    expected = flash_dmattn_func(query * scale[:, None], key, key, softmax_scale=1.0)
    cu_seqlens = torch.tensor([0, 20], dtype=torch.int32)
    sequences = (None, None, cu_seqlens, cu_seqlens, 20, 20)
    results = [
        flash_dmattn_kvpacked_func(query, torch.stack([key, key], dim=2), softmax_scale=scale),
        flash_dmattn_varlen_func(query[0], key[0], key[0], *sequences, softmax_scale=scale)[None],
        flash_dmattn_func_auto("reference")(query, key, key, softmax_scale=scale),
        torch.compile(flash_dmattn_func, fullgraph=True, backend="eager")(query, key, key, softmax_scale=scale),
    ]
    for result in results:
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (
            {"softmax_scale": torch.ones(3)},
            ValueError,
            r"a number, or a tensor \(\) or \(H\) for H = 4 heads, got shape \(3,\)",
        ),
        ({"softmax_scale": torch.ones(4, 1)}, ValueError, r"softmax_scale must be .*, got shape \(4, 1\)"),
        ({"softmax_scale": torch.ones(4, dtype=torch.int64)}, TypeError, "softmax_scale must be floating, got int64"),
        (
            {"softmax_scale": torch.ones(4, device="meta")},
            RuntimeError,
            "softmax_scale must be on query's device cpu, got meta",
        ),
        ({"softmax_scale": 1.0, "scale": 1.0}, ValueError, "scale is the former name of softmax_scale, got both"),
    ],
)
def test_what_is_no_scale(options, error, message):
    with pytest.raises(error, match=message):
        flash_dmattn_func(*inputs(1, 5, 5, HEADS, 2, 8), **options)
