"""Semantics at the edges: NaN, lse, huge biases, biases that are constant along the keys."""

import pytest
import torch
from helpers import check, inputs, masked_by, rand_mask, reference, run
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


@pytest.mark.parametrize("function", [flash_dmattn_func, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_additive_mask_of_a_batch_that_is_padded_on_the_left(dtype, function):
    """The additive mask of transformers: padding rows hold only the least finite number, and see nothing."""
    tensors = inputs(2, 40, 40, 4, 2, 16, dtype)
    real = torch.arange(40) >= torch.tensor([[13], [0]])
    visible = real[:, None, None, :] & torch.ones(40, 40, dtype=torch.bool).tril()
    additive = torch.zeros(2, 1, 40, 40, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    dout, dlse = torch.randn_like(tensors[0]), torch.zeros(2, 4, 40)
    masked = run(function, tensors, visible, torch.zeros_like(additive), dout, dlse)
    ours = run(function, tensors, None, additive, dout, dlse)
    assert all(torch.equal(a, b) for a, b in zip(ours, masked))
    out, lse, dq, *_, dbias = ours
    assert (out[0, :13] == 0).all() and (lse[0, :, :13] == -torch.inf).all()
    assert (dq[0, :13] == 0).all() and (dbias[~visible] == 0).all() and dq.abs().sum() > 0
    if function is flash_dmattn_func:
        check(tensors, None, additive)


def test_a_bias_masks_by_its_own_dtype():
    """A float32 bias with bfloat16 inputs: float32 has numbers below the least of bfloat16."""
    tensors = inputs(1, 20, 30, 2, 2, 8, torch.bfloat16)
    for visible, least in ((True, torch.bfloat16), (False, torch.float32)):
        all_least = torch.full((1, 1, 1, 30), torch.finfo(least).min)
        _, lse = flash_dmattn_func(*tensors, None, all_least, return_lse=True)
        assert ((lse > -torch.inf) == visible).all()


def test_nan_in_the_bias_masks_nothing():
    bias = torch.zeros(1, 1, 20, 30)
    bias[..., 7, 3] = NAN
    for function in (flash_dmattn_func, reference):
        out = function(*inputs(1, 20, 30), None, bias)
        assert out[:, 7].isnan().all() and not out[:, :7].isnan().any()


@pytest.mark.parametrize("value", [-1e9, -1e30])
@pytest.mark.parametrize("function", [reference, flash_dmattn_func], ids=["reference", "cpu"])
def test_rows_whose_biases_are_huge(function, value):
    """A float32 lse of such a bias loses the logarithm of the number of keys. The reference does not depend on it, nor
    do CPU kernels whose tile has all keys of a row."""
    tensors = inputs(1, 20, 30)
    bias = torch.full((1, 1, 20, 30), value)
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(1, 2, 20)
    ours = run(function, tensors, None, bias, dout, dlse)
    # The scores vanish in the sum with the bias, but have gradients.
    expected = run(reference, tensors, None, torch.zeros_like(bias), dout, dlse, softmax_scale=1e-30)
    torch.testing.assert_close(ours[0], expected[0])
    torch.testing.assert_close(ours[4:], expected[4:])
    probs = function(*tensors, None, bias, return_attn_probs=True)[2]
    torch.testing.assert_close(probs.sum(-1), torch.ones(1, 2, 20))


def test_a_nan_key_reaches_only_the_rows_that_see_it():
    query, key, value = inputs(1, 200, 200, 2, 2, 16)
    poisoned = value.clone()
    poisoned[:, 150] = NAN
    poisoned_key = key.clone()
    poisoned_key[:, 160] = NAN
    out = flash_dmattn_func(query, poisoned_key, poisoned, is_causal=True)
    torch.testing.assert_close(out[:, :150], flash_dmattn_func(query, key, value, is_causal=True)[:, :150])
    assert out[:, 150:].isnan().all()


def test_a_row_of_nan_is_nan():
    query, key, value = inputs(1, 20, 20, 1, 1, 8)
    query[:, 7] = NAN
    out, lse = flash_dmattn_func(query, key, value, return_lse=True)
    assert out[:, 7].isnan().all() and lse[..., 7].isnan().all() and not out[:, :7].isnan().any()


@pytest.mark.parametrize("bias_shape", [(1, 1, 20, 1), (2, 2, 20, 1), (1, 4, 1, 1)], ids=str)
@pytest.mark.parametrize("by", ["-inf", "least"])
def test_nan_in_a_row_that_its_bias_masks(bias_shape, by):
    query, key, value = inputs(2, 20, 30, 4, 2, 8)
    masked = torch.zeros(bias_shape, dtype=torch.bool)
    masked[0, 0, 0] = True
    bias = masked_by(masked, torch.zeros(bias_shape), by)
    masked = masked.expand(bias.shape[0], -1, 20, 1).repeat_interleave(4 // bias.shape[1], dim=1)
    query = query.masked_fill(masked.transpose(1, 2), NAN)
    check((query, key, value), None, bias)


@pytest.mark.parametrize("bias_shape", [(2, 1, 1, 1), (2, 4, 1, 1), (2, 2, 20, 1)], ids=str)
@pytest.mark.parametrize("by", ["-inf", "least"])
def test_nan_in_keys_of_which_the_bias_masks_every_row(bias_shape, by):
    """A batch element that is padding, as a whole or with one of its key/value heads."""
    query, key, value = inputs(2, 20, 30, 4, 2, 8)
    heads = slice(None) if bias_shape[1] == 1 else slice(0, bias_shape[1] // 2)
    masked = torch.zeros(bias_shape, dtype=torch.bool)
    masked[1, heads] = True
    kv_heads = slice(None) if bias_shape[1] == 1 else 0
    for rows in (key, value):
        rows[1, :, kv_heads] = NAN
    bias = masked_by(masked, torch.randn(bias_shape), by)
    check((query, key, value), None, bias, relative_bias=torch.randn(1, 2, 7))
    check((query, key, value), rand_mask(2, 2, 20, 30), bias, is_causal=True)


@pytest.mark.parametrize("bias_shape", [None, (1, 1, 1, 30), (1, 2, 20, 30), (1, 2, 20, 1), (1, 1, 1, 1)], ids=str)
def test_the_gradient_of_empty_rows_may_be_nan(bias_shape):
    """logaddexp of two empty rows has a NaN gradient: it must not pass through lse."""
    mask = rand_mask(1, 1, 20, 30)
    mask[:, :, 4] = False
    bias = [] if bias_shape is None else [torch.randn(bias_shape)]
    leaves = [x.requires_grad_() for x in (*inputs(1, 20, 30), *bias)]
    out, lse = flash_dmattn_func(*leaves[:3], mask, *leaves[3:], return_lse=True)
    dlse = torch.ones_like(lse)
    dlse[..., 4] = NAN
    for gradient in torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), dlse)):
        assert gradient.isfinite().all() and gradient.abs().sum() > 0


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_two_calls_over_disjoint_keys_merge_exactly(causal):
    """With lse and its gradient, attention over two parts of the keys merges to attention over all."""
    query, key, value = (x.double().requires_grad_() for x in inputs(1, 40, 90, 4, 2, 8))
    bias = torch.randn(1, 2, 1, 90, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(40, 90, dtype=torch.bool).tril(50)[None, None] if causal else rand_mask(1, 1, 40, 90)

    def part(keys):
        return flash_dmattn_func(query, key[:, keys], value[:, keys], mask[..., keys], bias[..., keys], return_lse=True)

    whole, whole_lse = flash_dmattn_func(query, key, value, mask, bias, return_lse=True)
    (out_a, lse_a), (out_b, lse_b) = part(slice(0, 30)), part(slice(30, 90))
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((x - lse).exp().transpose(1, 2)[..., None] for x in (lse_a, lse_b))
    merged = weight_a * out_a + weight_b * out_b
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(lse, whole_lse)

    dout, dlse = torch.randn_like(whole), torch.randn_like(lse)
    leaves = [query, key, value, bias]
    merged_gradients = torch.autograd.grad([merged, lse], leaves, [dout, dlse])
    for a, b in zip(merged_gradients, torch.autograd.grad([whole, whole_lse], leaves, [dout, dlse])):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 50, 1), (1, 2, 50, 1), (2, 4, 50, 1), (1, 4, 1, 1)], ids=str)
def test_a_bias_that_is_constant_along_the_keys(shape, dtype):
    tensors = inputs(2, 50, 70, 4, 2, 8, dtype)
    bias = torch.randn(shape).to(dtype)
    mask = rand_mask(2, 2, 50, 70)
    out, *_ = check(tensors, mask, bias)
    assert torch.equal(out, flash_dmattn_func(*tensors, mask))
    masked = torch.zeros(shape, dtype=torch.bool)
    masked.view(-1)[0] = True
    for by in ("-inf", "least"):
        *_, dbias = check(tensors, None, masked_by(masked, bias, by))
        assert (dbias[masked] == 0).all()


def test_a_bias_that_is_constant_along_the_keys_gets_no_gradient_from_out():
    tensors = [x.requires_grad_() for x in inputs(1, 20, 30)]
    bias = torch.randn(1, 1, 20, 1, requires_grad=True)
    out = flash_dmattn_func(*tensors, None, bias)
    assert not torch.autograd.grad(out.sum(), bias, allow_unused=True, materialize_grads=True)[0].any()
    assert torch.equal(out, flash_dmattn_func(*tensors))


def test_the_mask_is_never_copied():
    """A mask whose rows overlap in memory: 2^22 elements in 2^12 bytes."""
    query, key, value = inputs(1, 1 << 11, 1 << 11, 1, 1, 8)
    mask = torch.ones(1 << 12, dtype=torch.bool).as_strided((1, 1, 1 << 11, 1 << 11), (0, 0, 1, 1))
    assert torch.equal(flash_dmattn_func(query, key, value, mask), flash_dmattn_func(query, key, value))


@pytest.mark.parametrize("sparse", ["tiles", "lists"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("bias_rows", [None, 1, 300], ids=["no bias", "key bias", "dense bias"])
@pytest.mark.parametrize("kind", ["causal", "documents", "mask", "bias"])
def test_a_nan_row_reaches_only_the_keys_that_it_sees(kind, bias_rows, softcap, sparse):
    """A row of query and a row of dout hold NaN; keys of the same block that only other rows see are unaffected."""
    query, key, value = inputs(1, 300, 300, 2, 1, 16)
    visible = torch.zeros(300, 300, dtype=torch.bool)
    visible[:130, :130] = visible[130:, 130:] = True
    mask = {
        "causal": KeyIntervalMask.causal(300, 300),
        "documents": KeyIntervalMask.documents(torch.tensor([0, 130, 300], dtype=torch.int32), 300),
        "mask": visible[None, None],
        "bias": torch.ones(1, 1, 1, 300, dtype=torch.bool),
    }[kind]
    hit = torch.ones(300, 300, dtype=torch.bool).tril()[200] if kind == "causal" else visible[200]
    bias = None if bias_rows is None else torch.randn(1, 1, bias_rows, 300)
    if kind == "bias":
        masked = torch.zeros(1, 1, 300, 300).masked_fill(~visible, -torch.inf)
        bias = masked if bias is None else bias + masked
    options = {"is_causal": kind == "causal", "softcap": softcap, "sparse": sparse}
    dout, dlse = torch.randn_like(query), torch.randn(1, 2, 300)

    def gradients(row):
        dirty, dirty_dout = query.clone(), dout.clone()
        if row is not None:
            dirty[:, row] = NAN
            dirty_dout[:, row + 1] = NAN
        return run(flash_dmattn_func, (dirty, key, value), mask, bias, dirty_dout, dlse, **options)

    others = torch.ones(300, dtype=torch.bool)
    others[200:202] = False
    hit = hit | torch.ones(300, 300, dtype=torch.bool).tril()[201] if kind == "causal" else hit
    _, _, dq, dk, dv, *dbias = gradients(200)
    _, _, clean_dq, clean_dk, clean_dv, *clean_dbias = gradients(None)
    # Next to NaN, sums are taken in another order.
    rounding = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(dq[:, others], clean_dq[:, others], **rounding)
    for ours, clean in ((dk, clean_dk), (dv, clean_dv)):
        assert ours[:, hit].isnan().all()
        torch.testing.assert_close(ours[:, ~hit], clean[:, ~hit], **rounding)
    for ours, clean in zip(dbias, clean_dbias):
        rows = others if ours.shape[2] > 1 else slice(None)
        torch.testing.assert_close(ours[:, :, rows][..., ~hit], clean[:, :, rows][..., ~hit], **rounding)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlen", [1, 127, 129, 257, 385, 513])
@pytest.mark.parametrize("scale", [300, 3000])
def test_scores_of_a_hundred_thousand_and_more(scale, seqlen, causal):
    """The backward recomputes the p of the forward from such scores, at least as exactly as PyTorch's attention."""
    query, key, value = inputs(2, seqlen, seqlen, 2, 2, 64)
    tensors, dout = (query * scale, key * scale, value), torch.randn_like(query)

    def sdpa(query, key, value, is_causal):
        rows = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=is_causal).transpose(1, 2)

    def outputs(function, tensors, **options):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = function(*leaves, is_causal=causal, **options)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out))

    exact = outputs(reference, [x.double() for x in tensors])
    peers = [outputs(peer, tensors) for peer in (sdpa, reference)]
    mask = torch.ones(1, 1, 1, seqlen, dtype=torch.bool)
    for sparse in ("tiles", "lists"):
        ours = outputs(flash_dmattn_func, tensors, attn_mask=mask, sparse=sparse)
        for name, x, true, *others in zip(("out", "dq", "dk", "dv"), ours, exact, *peers):
            off, *others_off = ((y - true).abs().max().item() for y in (x, *others))
            # With one key p is 1, and ds is the rounding error of <do, v>, multiplied by a key of that size.
            slack = 1e-6 if name in ("out", "dv") else 1e-5 * scale
            assert off <= 2 * max(others_off) + slack, f"{sparse}: {name} is off by {off:.1e}, others by {others_off}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sparse, keys", [("tiles", 500), ("lists", 250)])
def test_gradients_of_large_scores_are_those_of_the_math_path(sparse, keys, dtype):
    """With scores of standard deviation 5000 a row's softmax is one key, or two. A D_i of the rounded out would be off
    by a hundred times as much as PyTorch's path "math", which saves p."""
    query, *rows = inputs(1, 256, keys, 2, 2, 64)
    tensors, bias = [x.to(dtype) for x in (query * 5000, *rows)], torch.randn(1, 2, 256, keys).to(dtype)
    dout = torch.randn_like(tensors[0])
    mask = torch.ones(1, 1, 1, keys, dtype=torch.bool)

    def math(query, key, value, bias):
        rows = (x.transpose(1, 2) for x in (query, key, value))
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=bias).transpose(1, 2)

    def gradients(function, *tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(function(*leaves), leaves, dout.to(tensors[0].dtype))

    exact = gradients(math, *(x.double() for x in (*tensors, bias)))
    peer = gradients(math, *tensors, bias)
    ours = gradients(lambda q, k, v, b: flash_dmattn_func(q, k, v, mask, b, sparse=sparse), *tensors, bias)
    for name, x, y, true in zip(("dq", "dk", "dv", "dbias"), ours, peer, exact):
        off, peer_off = ((z - true).abs().max().item() for z in (x, y))
        # The scores themselves are rounded by 1e-3, here and there in another order.
        assert off <= 4 * peer_off, f"{name} is off by {off:.1e}, the math path by {peer_off:.1e}"


@pytest.mark.parametrize("by_lists", [False, True], ids=["tiles", "lists"])
def test_the_backward_over_some_of_the_keys_of_lse(by_lists):
    """As in ring attention: lse and out are of all keys, and each call has a part of them."""
    tensors, dout = inputs(1, 50, 300, 4, 2, 32), torch.randn(1, 50, 4, 32)
    leaves = [x.requires_grad_() for x in tensors]
    out, lse = flash_dmattn_func(*leaves, return_lse=True)
    exact = torch.autograd.grad(reference(*leaves), leaves, dout)
    query, key, value = (x.detach() for x in tensors)
    mask = torch.ones(1, 1, 1, 150, dtype=torch.bool)
    masks = KeyLists.build(mask, 50).packed(None) if by_lists else ops.MaskTensors()
    parts = []
    for keys in (slice(150), slice(150, None)):
        rows = (query, key[:, keys].contiguous(), value[:, keys].contiguous(), out.detach(), lse.detach())
        options = (None, 32**-0.5, 0.0, False, False, False)
        parts.append(ops.compiled_module().mha_bwd(dout, None, *rows, masks, *options))
    dquery, dkey, dvalue = parts[0][0] + parts[1][0], *(torch.cat([a, b], 1) for a, b in zip(*(p[1:3] for p in parts)))
    for ours, expected in zip((dquery, dkey, dvalue), exact):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("rows", [5, 1])
def test_no_heads_with_a_bias_that_is_constant_along_the_keys(rows):
    query = torch.randn(2, 5, 0, 8)
    assert flash_dmattn_func(query, query, query, attn_bias=torch.zeros(1, 0, rows, 1)).shape == query.shape
