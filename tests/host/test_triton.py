"""The Triton backend against the float64 reference: on a GPU if one is available, else in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

import helpers  # noqa: E402
from gpu_inputs import takes_gpu_memory  # noqa: E402
from helpers import assert_close, run, surrounded  # noqa: E402

from flash_dmattn import flash_dmattn_func_auto  # noqa: E402
from flash_dmattn.backends import reference  # noqa: E402
from flash_dmattn.backends import triton as backend  # noqa: E402

pytestmark = pytest.mark.skipif(backend.why_unavailable() is not None, reason=str(backend.why_unavailable()))

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Several blocks of rows and keys; the last ones are partial.
LONG, LONGER = (300, 417) if DEVICE == "cuda" else (70, 93)
PLAIN = {"softmax_scale": 0.2, "is_causal": False, "softcap": 0.0, "deterministic": True}


def attention(*args, **options):
    return flash_dmattn_func_auto("triton")(*args, **{**PLAIN, **options})


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def rand_mask(*shape, visible=0.6):
    return helpers.rand_mask(*shape, visible=visible, device=DEVICE)


def inputs(batch=1, seqlen_q=LONG, seqlen_k=LONGER, heads=2, kv_heads=1, head_dim=16, dtype=torch.float32):
    return helpers.inputs(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, dtype, DEVICE)


def no_dlse(query):
    batch, seqlen_q, heads, _ = query.shape
    return torch.zeros(batch, heads, seqlen_q, device=DEVICE)


def check(tensors, mask=None, bias=None, *, causal=False, softcap=0.0, dout=None):
    options = {**PLAIN, "is_causal": causal, "softcap": softcap}
    return helpers.check(tensors, mask, bias, function=attention, dout=dout, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_everything_at_once(dtype):
    tensors = inputs(batch=2, heads=4, kv_heads=2, head_dim=40, dtype=dtype)
    mask, bias = rand_mask(2, 1, LONG, LONGER), randn(1, 2, LONG, LONGER, dtype=dtype)
    check(tensors, mask, bias, causal=True, softcap=2.0)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_grouped_heads(kv_heads):
    tensors = inputs(batch=2, heads=4, kv_heads=kv_heads, seqlen_q=9, seqlen_k=20)
    check(tensors, rand_mask(2, kv_heads, 9, 20), randn(2, kv_heads, 1, 20))


@pytest.mark.parametrize("rows, keys", [(9, 20), (1, 20), (9, 1), (1, 1)])
@pytest.mark.parametrize("batch, heads", [(2, 4), (1, 2), (2, 1), (1, 1)])
def test_mask_broadcast(batch, heads, rows, keys):
    query, key, value = inputs(batch=2, heads=4, kv_heads=2, seqlen_q=9, seqlen_k=20)
    mask = rand_mask(batch, heads, rows, keys)
    ours = backend.attention(query, key, value, mask, None, **PLAIN)
    eager = reference.attention(query, key, value, mask, None, **PLAIN)
    exact = reference.attention(query.double(), key.double(), value.double(), mask, None, **PLAIN)
    assert_close(ours, eager, exact, torch.float32)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("batch, heads", [(2, 4), (1, 4), (2, 2), (1, 2), (2, 1), (1, 1)])
def test_bias_broadcast(batch, heads, rows):
    tensors = inputs(batch=2, heads=4, kv_heads=2, seqlen_q=9, seqlen_k=20)
    check(tensors, bias=randn(batch, heads, rows, 20))


@pytest.mark.parametrize("rows", [1, LONG])
@pytest.mark.parametrize("heads", [1, 2])
def test_bias_of_several_tiles(rows, heads):
    check(inputs(dtype=torch.float16), bias=randn(1, heads, rows, LONGER, dtype=torch.float16), causal=True)


def test_float32_key_bias():
    """Neither the bias nor its gradient is rounded to the query's dtype."""
    tensors = inputs(dtype=torch.bfloat16, seqlen_k=64)
    bias = 8 + randn(1, 1, 1, 64) / 64  # bfloat16 would keep about none of the differences
    *_, dbias = check(tensors, bias=bias)
    assert dbias.dtype == torch.float32
    assert not torch.equal(dbias, dbias.bfloat16().float())


def test_key_mask_and_key_bias():
    """Without causality the kernel keeps one row for a block, with causality a whole block."""
    for causal in (False, True):
        check(inputs(), rand_mask(1, 1, 1, LONGER), randn(1, 2, 1, LONGER), causal=causal)


def test_expanded_bias():
    """An expanded bias has stride 0 but its full shape, and a gradient for each element."""
    tensors = inputs(batch=2, seqlen_q=9, seqlen_k=20)
    *_, dbias = check(tensors, bias=randn(1, 1, 9, 20).expand(2, 2, 9, 20))
    assert not torch.equal(dbias[0], dbias[1])


def test_empty_rows():
    tensors = inputs(heads=2, kv_heads=1)
    mask = rand_mask(1, 2, LONG, LONGER)
    mask[:, 0, 3:40] = False  # a part of a tile, and a whole one
    mask[:, 1, 7] = False
    mask[..., 65:] &= mask[..., :1]
    bias = randn(1, 2, LONG, LONGER)
    out, lse, dq, _, _, dbias = check(tensors, mask, bias)
    for head, rows in ((0, slice(3, 40)), (1, slice(7, 8))):
        assert (lse[:, head, rows] == -torch.inf).all()
        for zero in (out[:, rows, head], dq[:, rows, head], dbias[:, head, rows]):
            assert (zero == 0).all()


def test_nothing_visible_at_all():
    tensors = inputs(seqlen_q=20, seqlen_k=30)
    out, lse, *gradients = check(tensors, rand_mask(1, 1, 1, 1, visible=0.0), randn(1, 1, 1, 30))
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((gradient == 0).all() for gradient in gradients)


def test_gradient_of_empty_rows_may_be_nan():
    """logaddexp of two empty rows has a NaN gradient: it must not pass through lse."""
    query, key, value = (x.requires_grad_() for x in inputs(seqlen_q=20, seqlen_k=30))
    mask = rand_mask(1, 1, 20, 30)
    mask[:, :, 4] = False
    out, lse = backend.attention(query, key, value, mask, None, **PLAIN)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    dlse[..., 4] = torch.nan
    for gradient in torch.autograd.grad((out, lse), (query, key, value), (dout, dlse)):
        assert gradient.isfinite().all() and gradient.abs().sum() > 0


@pytest.mark.parametrize("by", ["-inf", "least"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, LONG])
def test_a_bias_that_masks(rows, dtype, by):
    """A score that the bias masks equals a masked score."""
    tensors = inputs(dtype=dtype)
    unmasked, masked_keys = randn(1, 1, rows, LONGER, dtype=dtype), rand_mask(1, 1, rows, LONGER)
    masked_keys[..., 5:6, :] |= rows > 1
    bias = helpers.masked_by(masked_keys, unmasked, by)
    *_, dbias = check(tensors, bias=bias)
    assert (dbias[masked_keys] == 0).all()
    dout = torch.ones_like(tensors[0])
    ours = run(attention, tensors, None, bias, dout, no_dlse(dout))
    masked = run(attention, tensors, ~masked_keys, unmasked, dout, no_dlse(dout))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, masked))


def test_a_bias_masks_by_its_own_dtype():
    for visible, least in ((True, torch.bfloat16), (False, torch.float32)):
        bias = torch.full((1, 1, 1, LONGER), torch.finfo(least).min, device=DEVICE)
        _, lse = attention(*inputs(dtype=torch.bfloat16), None, bias, return_lse=True)
        assert ((lse > -torch.inf) == visible).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_very_negative_bias(dtype):
    """Half the least finite number masks nothing and does not overflow."""
    bias = randn(1, 1, 20, 30, dtype=dtype)
    bias[..., ::2] = torch.finfo(dtype).min / 2
    check(inputs(seqlen_q=20, seqlen_k=30, dtype=dtype), bias=bias)


@pytest.fixture
def poisoned_allocations():
    """New tensors are filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("mask_rows, bias_heads, bias_rows", [(LONG, 2, LONG), (LONG, 1, LONG), (1, 1, 1)])
def test_poisoned_surroundings(poisoned_allocations, causal, mask_rows, bias_heads, bias_rows):
    """NaN surrounds every tensor and fills uninitialized memory; True surrounds the mask."""
    tensors = [surrounded(x, torch.nan) for x in inputs(head_dim=40)]
    mask = surrounded(rand_mask(1, 2, mask_rows, LONGER), True)
    bias = surrounded(randn(1, bias_heads, bias_rows, LONGER), torch.nan)
    dout = surrounded(randn(1, LONG, 2, 40), torch.nan)
    check(tensors, mask, bias, causal=causal, dout=dout)


@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter sums in another order")
def test_sums_over_many_rows():
    """In float32 dk and dv are no worse than eager's: their products are summed a tile of rows at a time.

    On an H200 they are off by 0.8 times as much as eager's; as one chain of additions it was 1.4 times.
    """
    options, off = {**PLAIN, "is_causal": True}, []
    for _ in range(20):
        tensors, mask, bias = inputs(head_dim=40), rand_mask(1, 2, LONG, LONGER), randn(1, 2, LONG, LONGER)
        douts = [randn(1, LONG, 2, 40), randn(1, 2, LONG) / 8]
        in_double = [x.double() for x in tensors], mask, bias.double(), *(x.double() for x in douts)
        exact = run(helpers.reference, *in_double, **options)[3:5]
        both = [run(f, tensors, mask, bias, *douts, **options)[3:5] for f in (attention, helpers.reference)]
        off.append([[(x - z).abs().max().item() for x, z in zip(gradients, exact)] for gradients in both])
    ours, eager = torch.tensor(off).mean(0)
    assert (ours <= 1.1 * eager).all(), (ours, eager)


@pytest.mark.parametrize("masked_by", ["key mask", "mask", "key bias", "bias", "causal"])
def test_masked_keys_may_hold_nan(masked_by):
    seqlen_q = LONGER if masked_by == "causal" else LONG
    query, key, value = inputs(seqlen_q=seqlen_q)
    seen = torch.arange(LONGER, device=DEVICE) < LONG - 3
    mask = bias = None
    if masked_by == "causal":
        mask = seen[None, None, :, None]  # masks the rows that would see NaN keys
    elif masked_by.endswith("mask"):
        mask = seen.expand(1, 1, 1 if masked_by == "key mask" else LONG, LONGER)
    else:
        bias = randn(1, 1, 1 if masked_by == "key bias" else LONG, LONGER).masked_fill(~seen, -torch.inf)
    key[:, ~seen] = torch.nan
    value[:, ~seen] = torch.nan
    out, _, dq, dk, dv, *_ = check((query, key, value), mask, bias, causal=masked_by == "causal", softcap=3.0)
    assert (dk[:, ~seen] == 0).all() and (dv[:, ~seen] == 0).all()


def test_rows_that_see_nothing_may_hold_nan():
    query, key, value = inputs()
    sees = torch.arange(LONG, device=DEVICE) < LONG - 9
    query[:, ~sees] = torch.nan
    dout = torch.randn_like(query)
    dout[:, ~sees] = torch.nan
    mask = rand_mask(1, 1, LONG, LONGER) & sees[:, None]
    *_, dq, dk, dv = run(attention, (query, key, value), mask, None, dout, no_dlse(query))
    assert (dq[:, ~sees] == 0).all()
    assert dk.isfinite().all() and dv.isfinite().all()


def test_gradient_of_out_alone():
    tensors = inputs(seqlen_q=20, seqlen_k=30)
    dout = torch.randn_like(tensors[0])
    leaves = [x.requires_grad_() for x in tensors]
    alone = torch.autograd.grad(attention(*leaves), leaves, dout)
    assert all(torch.equal(a, b) for a, b in zip(alone, run(attention, tensors, None, None, dout, no_dlse(dout))[2:]))


def test_gradient_of_lse_alone():
    query, key, value = (x.requires_grad_() for x in inputs(seqlen_q=20, seqlen_k=30))
    _, lse = backend.attention(query, key, value, None, None, **PLAIN)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (query, key, value))
    _, exact = reference.attention(query.double(), key.double(), value.double(), None, None, **PLAIN)
    for ours, wanted in zip((dq, dk), torch.autograd.grad(exact.sum(), (query, key)), strict=True):
        assert torch.allclose(ours, wanted, atol=1e-5) and ours.abs().sum() > 0
    assert (dv == 0).all()


@pytest.mark.parametrize("wanted", range(4), ids=["query", "key", "value", "bias"])
@pytest.mark.parametrize("bias_heads, bias_rows", [(2, 20), (1, 20), (1, 1)])
def test_one_gradient_alone(wanted, bias_heads, bias_rows):
    tensors = inputs(seqlen_q=20, seqlen_k=30)
    bias = randn(1, bias_heads, bias_rows, 30)
    dout = torch.randn_like(tensors[0])
    together = run(attention, tensors, None, bias, dout, no_dlse(dout))[2:]
    leaves = [x.detach().requires_grad_(i == wanted) for i, x in enumerate((*tensors, bias))]
    out, _ = backend.attention(*leaves[:3], None, leaves[3], **PLAIN)
    out.backward(dout)
    assert [x.grad is not None for x in leaves] == [i == wanted for i in range(4)]
    assert torch.equal(leaves[wanted].grad, together[wanted])


def test_bitwise_reproducible():
    tensors = inputs(batch=2, dtype=torch.bfloat16)
    bias = randn(1, 1, LONG, LONGER, dtype=torch.bfloat16)
    runs = [run(attention, tensors, None, bias, tensors[0], no_dlse(tensors[0]), is_causal=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.skipif(DEVICE != "cuda", reason="needs the memory and the speed of a GPU")
@takes_gpu_memory(6)
def test_a_mask_of_more_than_2_31_elements():
    """A mask of more than 2^31 elements."""
    seqlen = 46400
    query, key, value = inputs(seqlen_q=seqlen, seqlen_k=seqlen, heads=1, dtype=torch.float16)
    mask = torch.zeros(1, 1, seqlen, seqlen, dtype=torch.bool, device=DEVICE)
    mask[..., -70:, ::3] = True
    out, lse = backend.attention(query, key, value, mask, None, **PLAIN)
    exact = reference.attention(
        query[:, -70:].double(), key.double(), value.double(), mask[..., -70:, :], None, **PLAIN
    )
    assert (lse[..., :-70] == -torch.inf).all()
    assert torch.allclose(lse[..., -70:].double(), exact[1], atol=1e-4)
    assert torch.allclose(out[:, -70:].double(), exact[0], atol=1e-3)


def test_float64_is_refused():
    query, key, value = (x.double() for x in inputs(seqlen_q=3, seqlen_k=3))
    with pytest.raises(TypeError, match="float64"):
        attention(query, key, value)


def test_double_backward_is_refused():
    query, key, value = (x.requires_grad_() for x in inputs())
    bias = randn(1, 2, 1, LONGER).requires_grad_()
    out = attention(query, key, value, None, bias)
    gradients = torch.autograd.grad(out.square().sum(), (query, bias), create_graph=True)
    with pytest.raises(RuntimeError, match="does not support double backward; use the backend 'reference'"):
        gradients[0].sum().backward(retain_graph=True)
    (dkey,) = torch.autograd.grad(attention(query, key, value).sum(), key, create_graph=True)
    with pytest.raises(RuntimeError, match="does not support double backward"):
        (dkey.sum() + query.sum()).backward()


def in_new_process(program, **environment):
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_importable_without_triton():
    program = """
import sys
sys.modules["triton"] = None
from flash_dmattn.backends import triton as backend
print(backend.why_unavailable())
"""
    assert in_new_process(program) == "triton is not installed"


def test_refused_without_gpu_and_interpreter():
    program = """
import torch
from flash_dmattn.backends import triton as backend
x = torch.zeros(1, 2, 1, 8)
print(backend.why_unavailable())
try:
    backend.attention(x, x, x, None, None, softmax_scale=1.0, is_causal=False, softcap=0.0, deterministic=False)
except RuntimeError as error:
    print(error)
"""
    why, error = in_new_process(program, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="").splitlines()
    assert why.startswith("no GPU is visible") and why in error


def test_tiles_for_every_head_dimension():
    for by_size in backend.TILES.values():
        assert set(by_size) == {dtype.itemsize for dtype in backend.DTYPES}
        for tiles in by_size.values():
            assert list(tiles) == sorted(tiles) and max(tiles) == 256


@pytest.mark.skipif(DEVICE == "cuda", reason="only the interpreter needs it")
def test_a_broken_interpreter_is_reported(monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            raise TypeError("only 0-dimensional arrays can be converted")

    monkeypatch.setattr(backend, "_loop_kernel", Broken())
    reason = backend.why_not_interpreted.__wrapped__()
    assert "only 0-dimensional arrays" in reason and reason.endswith("install triton>=3.7 or numpy<2.5")
    monkeypatch.setattr(backend, "why_not_interpreted", lambda: reason)
    with pytest.raises(RuntimeError, match="the backend 'triton' is not available: the interpreter of Triton"):
        attention(*inputs())
