"""What peers get wrong: rows that see nothing, NaN where nothing is seen, lse, biases that the softmax cannot see."""

import pytest
import torch
from helpers import check, inputs, rand_mask, run, surrounded

from flash_dmattn import flash_dmattn_func

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_tiles_and_heads_that_see_nothing(dtype):
    tensors = inputs(2, 300, 600, 4, 2, 16, dtype)
    mask = rand_mask(2, 4, 300, 600)
    mask[0, 0, 5] = False  # a row
    mask[0, 1, :, :512] = False  # a tile of the forward
    mask[0, 2, :256] = False  # tiles of the backward
    mask[1, 3] = False  # a head
    bias = torch.randn(1, 4, 300, 600).to(dtype)
    out, lse, dq, *_ = check(tensors, mask, bias)
    hidden = ~mask.any(-1)
    assert hidden.sum() >= 1 + 256 + 300
    assert (lse[hidden] == -torch.inf).all()
    assert (out.transpose(1, 2)[hidden] == 0).all() and (dq.transpose(1, 2)[hidden] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_rows_above_the_first_key_see_nothing(dtype):
    out, lse, dq, *_ = check(inputs(1, 70, 40, 2, 1, 8, dtype), is_causal=True)
    assert (out[:, :30] == 0).all() and (lse[:, :, :30] == -torch.inf).all() and (dq[:, :30] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 1, 70), (2, 2, 50, 70), (1, 1, 50, 70)], ids=str)
def test_minus_infinity_in_the_bias_hides(shape, dtype):
    tensors = inputs(2, 50, 70, 2, 2, 8, dtype)
    hidden = rand_mask(*shape, visible=0.4)
    bias = torch.randn(shape).to(dtype)
    *ours, dbias = check(tensors, None, bias.masked_fill(hidden, -torch.inf))
    assert (dbias[hidden] == 0).all()
    masked = run(flash_dmattn_func, tensors, ~hidden, bias, torch.ones_like(ours[0]), torch.ones_like(ours[1]))
    infinite = run(
        flash_dmattn_func,
        *(tensors, None, bias.masked_fill(hidden, -torch.inf)),
        *(torch.ones_like(ours[0]), torch.ones_like(ours[1])),
    )
    assert all(torch.equal(a, b) for a, b in zip(masked, infinite))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_rows", [1, 70], ids=["key", "dense"])
def test_nan_around_every_tensor(bias_rows, dtype):
    tensors = [surrounded(x) for x in inputs(2, 70, 90, 4, 2, 12, dtype)]
    mask = surrounded(rand_mask(2, 2, 70, 90), fill=True)
    bias = surrounded(torch.randn(2, 2, bias_rows, 90).to(dtype))
    check(tensors, mask, bias, dout=surrounded(torch.randn_like(tensors[0])), is_causal=True)


@pytest.mark.parametrize("garbage", [NAN, float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_in_padding_reaches_nothing(dtype, garbage):
    """Keys and rows that take no part may hold anything; each visible key matters to the rows that see it alone."""
    query, key, value = inputs(2, 300, 300, 4, 2, 16, dtype)
    lengths = torch.tensor([170, 299])
    real = torch.arange(300) < lengths[:, None]
    mask = real[:, None, :, None] & real[:, None, None, :]
    bias = torch.randn(2, 4, 300, 300).to(dtype)
    dout = torch.randn_like(query)
    dlse = torch.zeros(2, 4, 300)
    clean = run(flash_dmattn_func, (query, key, value), mask, bias, dout, dlse)

    padding = ~real[:, :, None, None]
    dirty = [x.masked_fill(padding, garbage) for x in (query, key, value)]
    # No NaN in the bias: it has no place that would tell padding from a real number but the mask, which hides it.
    ours = run(flash_dmattn_func, dirty, mask, bias, dout.masked_fill(padding, garbage), dlse)
    # Where garbage was met, sums are taken in another order.
    rounding = (
        {"rtol": 1e-2, "atol": 1e-3} if dtype in (torch.bfloat16, torch.float16) else {"rtol": 1e-4, "atol": 1e-5}
    )
    for x, y in zip(ours, clean):
        torch.testing.assert_close(x, y, **rounding)


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


@pytest.fixture
def poisoned_allocations():
    """New tensors are filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_shape", [(2, 4, 1, 290), (1, 2, 300, 290), (2, 4, 300, 290)], ids=str)
def test_outputs_are_written_whole(poisoned_allocations, bias_shape, dtype):
    tensors = inputs(2, 300, 290, 4, 2, 16, dtype)
    check(tensors, rand_mask(2, 1, 300, 290), torch.randn(bias_shape).to(dtype), is_causal=True)


@pytest.mark.parametrize("bias_shape", [(1, 1, 20, 1), (2, 2, 20, 1), (1, 4, 1, 1)], ids=str)
def test_nan_in_a_row_that_its_bias_hides(bias_shape):
    query, key, value = inputs(2, 20, 30, 4, 2, 8)
    bias = torch.zeros(bias_shape)
    bias[0, 0, 0] = -torch.inf
    hidden = bias.expand(bias.shape[0], -1, 20, 1).repeat_interleave(4 // bias.shape[1], dim=1) == -torch.inf
    query = query.masked_fill(hidden.transpose(1, 2), NAN)
    check((query, key, value), None, bias)


def test_the_gradient_of_empty_rows_may_be_nan():
    """logaddexp of two empty rows has a NaN gradient: it must not pass through lse."""
    mask = rand_mask(1, 1, 20, 30)
    mask[:, :, 4] = False
    leaves = [x.requires_grad_() for x in inputs(1, 20, 30)]
    out, lse = flash_dmattn_func(*leaves, mask, return_lse=True)
    dlse = torch.ones_like(lse)
    dlse[..., 4] = NAN
    for gradient in torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), dlse)):
        assert gradient.isfinite().all() and gradient.abs().sum() > 0


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_two_calls_over_disjoint_keys_merge_exactly(causal):
    """With lse and its gradient, attention over a part of the keys and over the rest is attention over all."""
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
    hidden = bias.clone().flatten()
    hidden[0] = -torch.inf
    check(tensors, None, hidden.view(shape))


def test_a_bias_that_is_constant_along_the_keys_gets_no_gradient_from_out():
    tensors = [x.requires_grad_() for x in inputs(1, 20, 30)]
    bias = torch.randn(1, 1, 20, 1, requires_grad=True)
    out = flash_dmattn_func(*tensors, None, bias)
    assert not torch.autograd.grad(out.sum(), bias, allow_unused=True, materialize_grads=True)[0].any()
    assert torch.equal(out, flash_dmattn_func(*tensors))


def test_the_mask_is_never_copied():
    """A mask whose rows overlap in memory: 2^22 elements in the place of 2^12."""
    query, key, value = inputs(1, 1 << 11, 1 << 11, 1, 1, 8)
    mask = torch.ones(1 << 12, dtype=torch.bool).as_strided((1, 1, 1 << 11, 1 << 11), (0, 0, 1, 1))
    assert torch.equal(flash_dmattn_func(query, key, value, mask), flash_dmattn_func(query, key, value))
