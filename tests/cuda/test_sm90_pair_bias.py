"""The sm90 pair bias kernels: one dense bias for many batch elements."""

import pytest
import torch
from gpu_inputs import mask_of, on_gpu, randn
from helpers import NAMES, assert_close, check, check_float32_bias, reference, run, surrounded
from sm90 import distance, hiding_bias, key_mask, serves_pairs

from flash_dmattn import flash_dmattn_func

pytestmark = [pytest.mark.gpu, pytest.mark.hopper, pytest.mark.usefixtures("use")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "keys"), [(65, 8), (128, 128), (136, 200), (200, 136), (256, 256), (320, 264), (384, 384), (72, 384)]
)
def test_pair_bias(rows, keys, dtype):
    tensors, bias = on_gpu(20, rows, keys, 4, 4, 32, dtype=dtype), hiding_bias(4, rows, keys, dtype)
    for mask in (None, key_mask(20, 1, keys), key_mask(20, 4, keys)):
        check(tensors, mask, bias)
    assert serves_pairs(tensors, mask, bias) == (True, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "keys"),
    [(65, 4), (128, 128), (136, 200), (200, 132), (256, 256), (320, 264), (264, 320), (384, 384), (72, 384)],
)
def test_a_float32_pair_bias(rows, keys, dtype):
    """Numbers that 16 bits do not hold: rounded to bfloat16 they are up to 1 off."""
    tensors, bias = on_gpu(20, rows, keys, 4, 4, 32, dtype=dtype), hiding_bias(4, rows, keys, torch.float32) * 4
    bias.clamp_(min=torch.finfo(torch.float32).min)
    bias[..., keys // 2] = -torch.inf
    bias += 250
    for mask in (None, key_mask(20, 1, keys), key_mask(20, 4, keys)):
        check_float32_bias(tensors, mask, bias)
    assert serves_pairs(tensors, mask, bias) == (True, True)


def test_a_float32_pair_bias_beyond_a_fixed_maximum():
    bias = randn(2, 4, 200, 264, dtype=torch.float32) * 4 + 3000
    check_float32_bias(on_gpu(36, 200, 264, 4, 4, 24), key_mask(36, 1, 264), bias)


@pytest.mark.parametrize(("rows", "keys"), [(72, 392), (1000, 200), (512, 512)])
def test_pair_bias_over_longer_sequences(rows, keys):
    """For longer sequences only the forward has a pair bias kernel."""
    tensors, mask, bias = on_gpu(16, rows, keys, 2, 2, 32), key_mask(16, 1, keys), hiding_bias(2, rows, keys)
    check(tensors, mask, bias)
    assert serves_pairs(tensors, mask, bias) == (True, False)


def large_rows(tensors, bias):
    tensors[0][::3, :, ::2] *= 30
    tensors[0][1::3, 100:110] *= 40


def large_keys(tensors, bias):
    """Some rows see nothing in the first key blocks."""
    tensors[1][::2, 200:] *= 30
    tensors[1][1::2, :100] *= 20
    bias[:, :, 50:90, :200] = bias[:, :, 90:100] = -torch.inf


def wide_biases(tensors, bias):
    bias[:, :, 64:128] *= 25
    bias[:, 1, 200:, 300:] = 70


def biases_of_two_levels(tensors, bias):
    """With a mask the keys of larger bias are masked."""
    bias[..., ::2] += 100


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("change", [large_rows, large_keys, wide_biases, biases_of_two_levels])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pair_bias_with_large_scores(dtype, change, masked):
    """With and without the fixed-maximum fast path, which takes the largest bias of a row as the softmax maximum."""
    tensors, bias = on_gpu(20, 384, 384, 4, 4, 32, dtype=dtype), randn(1, 4, 384, 384, dtype=dtype)
    change(tensors, bias)
    mask = key_mask(20, 1, 384) if masked else None
    if masked and change is biases_of_two_levels:
        mask[..., ::2] = False
    double = [x.double() for x in tensors], mask, bias.double()
    exact = reference(*double[0], *double[1:], return_lse=True)
    eager = reference(*tensors, mask, bias, return_lse=True)
    assert_close(flash_dmattn_func(*tensors, mask, bias, return_lse=True), eager, exact, dtype)


@pytest.mark.parametrize("change", [large_rows, large_keys, wide_biases, biases_of_two_levels])
def test_a_float32_pair_bias_has_the_results_of_one_in_16_bits(change):
    tensors, bias, mask = on_gpu(20, 384, 384, 4, 4, 32), randn(1, 4, 384, 384), key_mask(20, 1, 384)
    change(tensors, bias)
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(20, 4, 384, device="cuda")
    narrow = run(flash_dmattn_func, tensors, mask, bias, dout, dlse)
    wide = run(flash_dmattn_func, tensors, mask, bias.float(), dout, dlse)
    for name, x, y in zip(NAMES, narrow, wide, strict=True):
        assert distance(y.float(), x.float()) < 2e-2, name


@pytest.mark.parametrize("head_dim", [8, 24, 32])
@pytest.mark.parametrize("layout", ["heads before rows", "every other row", "part of the columns"])
def test_pair_bias_strides(layout, head_dim):
    query, key, value = on_gpu(16, 200, 136, 4, 4, head_dim)
    bias, dout = hiding_bias(4, 200, 136), torch.randn_like(query) / 8
    if layout == "heads before rows":
        query, key, value, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value, dout))
        bias = bias.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "every other row":
        query, key, value = (torch.cat([x, x], 1).unflatten(1, (-1, 2))[:, :, 1] for x in (query, key, value))
        bias = hiding_bias(4, 400, 136)[:, :, ::2]
    else:
        query, key, value, bias = (surrounded(x, margin=8) for x in (query, key, value, bias))
    check((query, key, value), key_mask(16, 1, 136), bias, dout=dout, softmax_scale=-0.3)
    assert serves_pairs((query, key, value), None, bias) == (True, True)


@pytest.mark.parametrize("mask_batch", [1, 3, 60])
def test_several_pair_biases_in_a_batch(mask_batch):
    """Three biases for twenty batch elements each, with masks that are shared in several ways."""
    tensors = on_gpu(60, 200, 136, 4, 4, 32)
    bias = torch.cat([hiding_bias(4, 200, 136) for _ in range(3)])
    mask = mask_of(mask_batch, 1, 1, 136)
    check(tensors, mask, bias)
    assert serves_pairs(tensors, mask, bias) == (True, True)


def test_pair_bias_with_more_heads_than_ctas():
    """Each head has a work tile of its own, and the batch is not split."""
    heads = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    check(on_gpu(16, 72, 72, heads, heads, 32), key_mask(16, 1, 72), hiding_bias(heads, 72, 72))


UNSHARED = {
    "causal": ({"is_causal": True}, {}, (False, False)),
    "softcap": ({"softcap": 5.0}, {}, (False, False)),
    "a mask by row": ({}, {"mask_rows": 200}, (False, False)),
    "a small batch": ({}, {"batch": 8}, (False, False)),
    "heads that share keys": ({}, {"kv_heads": 2}, (True, False)),
    "heads that share biases": ({}, {"bias_heads": 1}, (True, False)),
    "longer sequences": ({}, {"keys": 520}, (False, False)),
    "a larger head dimension": ({}, {"head_dim": 40}, (False, False)),
    "float32 biases, causal": ({"is_causal": True}, {"bias_dtype": torch.float32}, (False, False)),
    "float32 biases of keys at odd addresses": ({}, {"bias_dtype": torch.float32, "keys": 262}, (False, False)),
    "float32 biases that heads share": ({}, {"bias_dtype": torch.float32, "bias_heads": 1}, (True, False)),
    "float32 biases of longer sequences": ({}, {"bias_dtype": torch.float32, "keys": 388}, (False, False)),
}


@pytest.mark.parametrize("what", UNSHARED)
def test_calls_that_the_pair_bias_kernels_do_not_take(what):
    options, sizes, served = UNSHARED[what]
    batch = sizes.get("batch", 20)
    keys = sizes.get("keys", 264)
    tensors = on_gpu(batch, 200, keys, 4, sizes.get("kv_heads", 4), sizes.get("head_dim", 32))
    mask, bias_dtype = mask_of(batch, 1, sizes.get("mask_rows", 1), keys), sizes.get("bias_dtype", torch.bfloat16)
    bias = randn(1, sizes.get("bias_heads", 4), 200, keys, dtype=bias_dtype)
    (check if bias_dtype == torch.bfloat16 else check_float32_bias)(tensors, mask, bias, **options)
    assert serves_pairs(tensors, mask, bias, **options) == served


@pytest.mark.parametrize("in_bias", [False, True])
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pair_bias_with_nan_in_masked_rows_and_keys(bias_dtype, in_bias, poisoned_allocations):
    mask, bias = key_mask(20, 1, 264), hiding_bias(4, 200, 264, bias_dtype)
    tensors, dout = on_gpu(20, 200, 264, 4, 4, 32), torch.randn(20, 200, 4, 32, device="cuda").bfloat16() / 8
    mask[..., 40] = False
    if in_bias:
        bias[..., 40] = torch.nan
    dlse, unseen = torch.randn(20, 4, 200, device="cuda") / 8, ~mask[:, 0, 0, :, None, None]
    no_key = torch.zeros(20, 200, 1, 1, dtype=torch.bool, device="cuda")
    no_key[0] = True

    def results(fill):
        query, key, value = (x.masked_fill(of, fill) for x, of in zip(tensors, (no_key, unseen, unseen)))
        filled = dout.masked_fill(no_key, fill), dlse.masked_fill(no_key[:, None, :, 0, 0], fill)
        return run(flash_dmattn_func, (query, key, value), mask, bias, *filled)

    for name, dirty, clean in zip(NAMES, results(torch.nan), results(0)):
        assert not dirty.isnan().any(), name
        assert torch.equal(dirty, clean), name


def test_pair_bias_of_padded_sequences():
    """Full, partial and empty key blocks follow each other in the same stage of shared memory."""
    lengths = torch.randint(0, 385, (80, 1, 1, 1), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    lengths[::5] = 384
    check(on_gpu(80, 200, 384, 2, 2, 32), torch.arange(384, device="cuda") < lengths, randn(1, 2, 200, 384))


def test_pair_bias_multiplies_no_infinity_of_masked_keys():
    """Values of masked keys that overflow float16 are not multiplied by zero probabilities."""
    mask, bias = key_mask(20, 1, 136), randn(1, 4, 200, 136, dtype=torch.float16)
    mask[..., 40] = False
    tensors = on_gpu(20, 200, 136, 4, 4, 32, dtype=torch.float16)
    tensors[2] += 64
    dout, dlse = torch.randn_like(tensors[0]) + 64, torch.zeros(20, 4, 200, device="cuda")

    def results(value):
        bias[..., 40] = value
        return run(flash_dmattn_func, tensors, mask, bias.clone(), dout, dlse)

    for name, high, low in zip(NAMES, results(20), results(-20)):
        assert torch.equal(high, low), name
        assert name == "lse" or high.isfinite().all(), name


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pair_bias_is_bitwise_reproducible(bias_dtype):
    """All gradients are reproducible, with and without deterministic=True."""
    tensors, mask = on_gpu(40, 384, 384, 4, 4, 32), key_mask(40, 1, 384)
    bias = randn(1, 4, 384, 384, dtype=bias_dtype)
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(40, 4, 384, device="cuda")
    first = run(flash_dmattn_func, tensors, mask, bias, dout, dlse)
    for deterministic in [False, True] * 25:
        again = run(flash_dmattn_func, tensors, mask, bias, dout, dlse, deterministic=deterministic)
        assert all(torch.equal(x, y) for x, y in zip(again, first))
