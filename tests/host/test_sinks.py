"""Sinks: a logit of each head in the denominator of the softmax."""

import pytest
import torch
from helpers import SLACK, inputs

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def with_sinks(query, key, value, sinks, bias=None):
    """Attention to the keys and to one more of value 0, whose score is the sink. In the inputs' precision."""
    heads, batch = query.shape[2], query.shape[0]
    key, value = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("bihd,bjhd->bhij", query, key) / query.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    sink = sinks.expand(heads).to(scores.dtype)[None, :, None, None].expand(batch, heads, scores.shape[2], 1)
    probs = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", probs.to(value.dtype), value), probs


@on_devices
@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_output_and_gradients(device, size, scale):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = inputs(2, 70, 90, 4, 2, 64, dtype, device)
    sinks = torch.randn(size, device=device) * scale
    dout = torch.randn_like(tensors[0]) / 8

    def gradients(function, leaves):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = function(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))

    def ours(query, key, value, sinks):
        return flash_dmattn_func(query, key, value, sinks=sinks)

    def expected(*leaves):
        return with_sinks(*leaves)[0]

    exact = gradients(expected, [x.double() for x in (*tensors, sinks)])
    eager = gradients(expected, (*tensors, sinks))
    for x, y, z in zip(gradients(ours, (*tensors, sinks)), eager, exact):
        off, eager_off = (x.double() - z).abs().max(), (y.double() - z).abs().max()
        assert off <= 2 * eager_off + SLACK[dtype]


def test_lse_and_probabilities():
    query, key, value = inputs(2, 7, 9, 4, 2, 8, torch.float64)
    sinks = torch.randn(4).double()
    out, lse, probs = flash_dmattn_func(query, key, value, sinks=sinks, return_attn_probs=True)
    expected, expected_probs = with_sinks(query, key, value, sinks)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(probs, expected_probs)
    torch.testing.assert_close(lse, flash_dmattn_func(query, key, value, return_lse=True)[1])


def test_a_bias_that_is_constant_along_the_keys_moves_weight_from_the_sink():
    query, key, value = inputs(2, 7, 9, 2, 2, 8, torch.float64)
    bias, sinks = torch.randn(1, 2, 7, 1).double(), torch.zeros(2).double()
    out, _, probs = flash_dmattn_func(query, key, value, None, bias, sinks=sinks, return_attn_probs=True)
    expected, expected_probs = with_sinks(query, key, value, sinks, bias)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(probs, expected_probs)


@on_devices
def test_empty_rows_and_sinks_of_no_weight(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query, key, value = (x.requires_grad_() for x in inputs(1, 9, 5, 2, 2, 64, dtype, device))
    sinks = torch.tensor([-torch.inf, 0.5], device=device, requires_grad=True)
    out = flash_dmattn_func(query, key, value, is_causal=True, sinks=sinks)
    without = flash_dmattn_func(query, key, value, is_causal=True)
    assert (out[:, :4] == 0).all() and torch.equal(out[:, :, 0], without[:, :, 0])
    gradients = torch.autograd.grad(out.float().square().sum(), (query, key, value, sinks))
    assert all(x.isfinite().all() for x in gradients)
    assert gradients[3][0] == 0 and gradients[3][1] < 0


def test_variable_length():
    cu = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    query, key, value = (torch.randn(9, 2, 8).double() for _ in range(3))
    sinks = torch.randn(2).double()
    arguments = (query, key, value, None, None, cu, cu, 5, 5)
    out, _, probs = flash_dmattn_varlen_func(*arguments, sinks=sinks, return_attn_probs=True)
    for b, rows in ((0, slice(0, 4)), (2, slice(4, 9))):
        expected, expected_probs = with_sinks(*(x[None, rows] for x in (query, key, value)), sinks)
        torch.testing.assert_close(out[None, rows], expected)
        n = rows.stop - rows.start
        torch.testing.assert_close(probs[b : b + 1, :, :n, :n], expected_probs)


def test_compile_and_torch_func():
    query, key, value = inputs(1, 5, 7, 2, 2, 8)

    def layer(sinks):
        return flash_dmattn_func(query, key, value, sinks=sinks).square().sum()

    sinks = torch.randn(2, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(sinks), sinks)
    torch.testing.assert_close(torch.func.grad(layer)(sinks.detach()), expected)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(sinks), sinks)[0], expected)


@pytest.mark.parametrize("sink", [-4.0, -10.0, -20.0])
def test_a_sink_of_a_small_share_has_its_gradient(sink):
    """In float32 sigmoid(lse - sink) rounds to 1 there."""
    inputs_of_64_rows = [torch.randn(1, 64, 1, 16) for _ in range(4)]

    def gradient(dtype):
        query, key, value, dout = (x.to(dtype) for x in inputs_of_64_rows)
        sinks = torch.tensor([sink], dtype=dtype, requires_grad=True)
        return torch.autograd.grad(flash_dmattn_func(query, key, value, sinks=sinks), sinks, dout)[0].double()

    torch.testing.assert_close(gradient(torch.float32), gradient(torch.float64), rtol=1e-4, atol=0)
