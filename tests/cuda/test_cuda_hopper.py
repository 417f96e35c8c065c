"""The kernels for compute capability 9.0, where they differ from those for 8.0: more tiles than blocks, what the copy
engine reads and what it cannot, garbage that comes with a tile, gradients that blocks share.

Every other test of the GPU runs on both (conftest.py); here lengths and strides are such that calls do not go back to
the kernels for 8.0, unless that is what is tested.
"""

import functools
import itertools
import random
import re
import subprocess
import sys

import pytest
import torch
from gpu_inputs import intervals, on_gpu, randn, takes_gpu_memory
from helpers import NAMES, assert_close, check, in_float64, rand_mask, reference, run, surrounded

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
BIASES = pytest.mark.parametrize("pairs", ["none", "key", "dense"])


@pytest.fixture(autouse=True)
def use(monkeypatch):
    """A function by which a test chooses the kernels; at first the newest."""

    def use(architecture):
        monkeypatch.setenv("FLASH_DMATTN_ARCH", architecture)

    use("sm90")
    return use


def bias_of(pairs, batch, heads, rows, keys, dtype=torch.bfloat16):
    return None if pairs == "none" else randn(batch, heads, 1 if pairs == "key" else rows, keys, dtype=dtype)


def mask_of(*shape, visible=0.6):
    return rand_mask(*shape, visible=visible, device="cuda")


# Which kernels serve a call


def names_of(call):
    """Of the kernels that a call launches."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "flash_dmattn" in event.name and "kernel" in event.name]
    if not kernels:
        pytest.skip("the profiler sees no kernels")
    return " ".join(kernels)


def kernels_of(tensors, mask=None, bias=None, **options):
    """The names of those of the forward and of the backward."""
    leaves = [x.requires_grad_() for x in (*tensors, bias) if x is not None]
    results = []
    forward = names_of(lambda: results.append(flash_dmattn_func(*tensors, mask, bias, **options)))
    return forward, names_of(lambda: torch.autograd.grad(results[0], leaves, torch.randn_like(results[0])))


def generations(*args, **options):
    """Those of the kernels of the forward and of the backward."""
    return tuple(set(re.findall("sm[89]0", names)) for names in kernels_of(*args, **options))


@BIASES
@pytest.mark.parametrize("head_dim", [8, 32, 64, 96, 128, 192, 256])
def test_new_kernels_serve(head_dim, pairs, use):
    tensors, mask = on_gpu(2, 200, 264, 4, 2, head_dim), mask_of(2, 1, 200, 264)
    bias = bias_of(pairs, 2, 4, 200, 264)
    for deterministic in (False, True):
        served = generations(tensors, mask, bias, is_causal=True, deterministic=deterministic)
        assert served == ({"sm90"}, {"sm90"})
    use("sm80")
    assert generations(tensors, mask, bias_of(pairs, 2, 4, 200, 264)) == ({"sm80"}, {"sm80"})


@pytest.mark.parametrize("pairs", ["none", "key"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_new_kernels_serve_key_lists(head_dim, pairs):
    tensors, mask = on_gpu(2, 200, 264, 4, 2, head_dim), intervals(1, 2, 264, rows=200)
    bias = bias_of(pairs, 2, 4, 200, 264)
    assert generations(tensors, mask, bias, is_causal=True, sparse="lists") == ({"sm90"}, {"sm90"})
    assert generations(tensors, mask, bias, sparse="lists", deterministic=True)[1] == {"sm80"}


@pytest.mark.parametrize("pairs", ["none", "key"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("head_dim", [136, 192, 200, 256])
def test_new_kernels_serve_key_lists_of_large_heads_that_share_them(head_dim, kv_heads, pairs):
    tensors, mask = on_gpu(2, 200, 264, 4, kv_heads, head_dim), intervals(1, kv_heads, 264, rows=200)
    bias = bias_of(pairs, 2, kv_heads, 200, 264)
    forward, backward = kernels_of(tensors, mask, bias, is_causal=True, sparse="lists")
    assert "sm80" not in forward + backward and "gather_group" in backward
    assert generations(tensors, mask, bias, sparse="lists", deterministic=True)[1] == {"sm80"}
    # Lists of their own.
    if kv_heads == 2:
        assert generations(tensors, intervals(1, 4, 264, rows=200), bias, sparse="lists")[1] == {"sm80"}


def test_which_kernel_serves_lists_that_heads_share():
    """Long ones, and those of 64 rows, if the heads of a group do share them."""

    def takes_groups(kv_heads, mask, keys=1000, bias_heads=1, **options):
        tensors = on_gpu(1, 600, keys, 4, kv_heads, 64)
        return "gather_group" in kernels_of(tensors, mask, randn(1, bias_heads, 1, keys), **options)[1]

    assert takes_groups(2, mask_of(1, 2, 600, 1000), sparse="lists")
    assert not takes_groups(2, mask_of(1, 2, 600, 400), 400, sparse="lists")
    assert not takes_groups(2, mask_of(1, 4, 600, 1000), sparse="lists")
    assert not takes_groups(2, mask_of(1, 2, 600, 1000), bias_heads=4, sparse="lists")
    assert not takes_groups(4, mask_of(1, 4, 600, 1000), sparse="lists")
    indices = torch.rand(1, 4, 10, 1000, device="cuda").topk(50).indices.int()
    for kv_heads, heads, shared in ((2, 2, True), (2, 4, False), (4, 4, True)):
        lists = KeyLists.from_indices(indices[:, :heads], 600, 1000, tile_rows=64)
        assert takes_groups(kv_heads, lists) == shared


@pytest.mark.parametrize(("head_dim", "pairs"), [(64, "dense"), (192, "key"), (256, "dense")])
def test_other_key_lists_go_to_the_old_kernels(head_dim, pairs):
    """With dense biases; of large heads with biases of their own."""
    tensors, mask = on_gpu(2, 200, 264, 4, 2, head_dim), mask_of(1, 2, 200, 264)
    bias = bias_of(pairs, 2, 4, 200, 264)
    assert generations(tensors, mask, bias, sparse="lists")[1] == {"sm80"}


def test_unasked_the_new_kernels_serve_long_sequences(monkeypatch):
    monkeypatch.delenv("FLASH_DMATTN_ARCH")
    assert generations(on_gpu(1, 2048, 2048, 4, 4, 128), None, randn(1, 4, 1, 2048)) == ({"sm90"}, {"sm90"})


@pytest.mark.parametrize(("keys", "generation"), [(512, "sm80"), (1024, "sm90")])
def test_unasked_the_new_kernels_serve_lists_of_large_heads_where_there_are_many_keys(keys, generation, monkeypatch):
    monkeypatch.delenv("FLASH_DMATTN_ARCH")
    tensors, mask = on_gpu(1, 200, keys, 4, 2, 256), intervals(1, 2, keys, rows=200)
    assert generations(tensors, mask, sparse="lists")[1] == {generation}


# What the copy engine cannot read: of query, key and value, (tensors, bias).
UNCOPIED = {
    "rows of 1001 biases": lambda q, k, v: ((q, *on_gpu(2, 1, 1001, 4, 4, 64)[1:]), randn(2, 4, 200, 1001)),
    "a bias that is not aligned": lambda q, k, v: ((q, k, v), randn(2, 4, 200, 272)[..., 3:267]),
    "a transposed bias": lambda q, k, v: ((q, k, v), randn(2, 4, 264, 200).transpose(-1, -2)),
    "a bias expanded along rows": lambda q, k, v: ((q, k, v), randn(2, 4, 1, 264).expand(2, 4, 200, 264)),
    "a bias expanded along heads": lambda q, k, v: ((q, k, v), randn(2, 1, 200, 264).expand(2, 4, 200, 264)),
    "every other bias": lambda q, k, v: ((q, k, v), randn(2, 4, 200, 528)[..., ::2]),
    "values expanded along heads": lambda q, k, v: ((q, k, v[:, :, :1].expand_as(v)), randn(2, 4, 200, 264)),
    "keys expanded along the batch": lambda q, k, v: ((q, k[:1].expand_as(k), v), None),
    "queries expanded along rows": lambda q, k, v: ((q[:, :1].expand_as(q), k, v), None),
}


@CAUSAL
@pytest.mark.parametrize("what", UNCOPIED)
def test_what_cannot_be_copied(what, causal):
    tensors, bias = UNCOPIED[what](*on_gpu(2, 200, 264, 4, 4, 64))
    check(tensors, mask_of(2, 1, 1, tensors[1].shape[1]), bias, is_causal=causal)
    assert generations(tensors, None, bias, is_causal=causal) == ({"sm80"}, {"sm80"})


def test_few_rows_go_to_the_old_kernels():
    assert generations(on_gpu(2, 64, 264, 4, 4, 64))[0] == {"sm80"}


# Rows, keys and strides


@takes_gpu_memory(12)
@CAUSAL
@BIASES
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_more_tiles_than_blocks_at_once(head_dim, pairs, causal):
    """Twice as many and more: a block does one after the other, and its rings go round many times."""
    batch, heads, seqlen = 2, 16, 1800
    assert batch * heads * (seqlen // 192) > 2 * torch.cuda.get_device_properties(0).multi_processor_count
    tensors = on_gpu(batch, seqlen, seqlen, heads, heads // 2, head_dim)
    check(tensors, None, bias_of(pairs, 1, heads, seqlen, seqlen), is_causal=causal)


@takes_gpu_memory(12)
@pytest.mark.parametrize("mask_rows", [1, 1800])
def test_more_masked_tiles_than_blocks_at_once(mask_rows):
    mask = mask_of(2, 1, mask_rows, 1800)
    mask[1, :, :, 300:900] = False
    mask[0, :, :, 1000:] = True
    check(on_gpu(2, 1800, 1800, 16, 2, 64), mask, randn(2, 1, 1, 1800))


@pytest.mark.parametrize(
    "layout", ["heads before rows", "every other row", "part of the columns", "one batch, one head"]
)
def test_strides_that_can_be_copied(layout):
    query, key, value = on_gpu(2, 200, 264, 4, 4, 64)
    bias, dout = randn(2, 4, 200, 264), torch.randn_like(query) / 8
    if layout == "heads before rows":
        query, key, value, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value, dout))
        bias = bias.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "every other row":
        query, key, value = (torch.cat([x, x], 1).unflatten(1, (-1, 2))[:, :, 1] for x in (query, key, value))
        bias = randn(2, 4, 400, 264)[:, :, ::2]
    elif layout == "part of the columns":
        query, key, value, bias = (surrounded(x, margin=8) for x in (query, key, value, bias))
    else:
        query, key, value, dout, bias = (
            query[:1, :, :1],
            key[1:, :, 1:2],
            value[:1, :, 3:],
            dout[1:, :, 2:3],
            bias[:1, :1],
        )
    check((query, key, value), mask_of(1, 1, 200, 264), bias, dout=dout, is_causal=True)


# Broadcasts, and gradients that are shared


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_dense_bias_that_batch_elements_share(head_dim, batch, heads):
    """Where they see different tiles, and where nobody sees one."""
    tensors = on_gpu(batch, 300, 440, 4, 2, head_dim)
    mask = mask_of(batch, 2, 300, 440)
    mask[0, :, :, :256] = False
    mask[:, 1, 128:256] = False
    bias = randn(1, heads, 300, 440)
    *_, dbias = check(tensors, mask, bias, is_causal=True)
    if heads == 4:
        assert (dbias[0][~mask.any(0).repeat_interleave(2, 0)] == 0).all()
    check(tensors, None, bias)
    check(tensors, intervals(batch, 1, 440, rows=300), bias, sparse="tiles", softcap=4.0)


def test_gradients_of_lse_alone():
    leaves = [x.requires_grad_() for x in (*on_gpu(2, 200, 264, 4, 2, 64), randn(2, 4, 200, 264))]
    dlse = torch.randn(2, 4, 200, device="cuda")
    results = []
    for function, xs in ((flash_dmattn_func, leaves), (reference, [x.double() for x in leaves])):
        _, lse = function(*xs[:3], None, xs[3], return_lse=True, is_causal=True)
        results.append(torch.autograd.grad(lse, leaves, dlse.to(lse), allow_unused=True, materialize_grads=True))
    for ours, exact in zip(*results):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=2e-2, atol=2e-3)


# A dense bias that many batch elements share: kernels of their own


def hiding_bias(heads, rows, keys, dtype=torch.bfloat16):
    """Some rows and pairs of it hide, in every way."""
    bias = randn(1, heads, rows, keys, dtype=dtype)
    bias[:, :, rows // 7] = torch.finfo(dtype).min
    bias[:, :, rows // 5, ::3] = bias[:, :, rows // 3, 1::2] = -torch.inf
    bias[:, :, rows // 3, ::2] = torch.finfo(dtype).min
    return bias


def key_mask(batch, heads, keys):
    """Of the first batch element nothing is visible, of the second the first keys alone."""
    mask = mask_of(batch, heads, 1, keys, visible=0.5)
    mask[0] = mask[1, ..., keys // 3 :] = False
    return mask


def serves_pairs(*args, **options):
    """Whether the kernels of their own serve the forward, and the backward."""
    return tuple("pair_" in names for names in kernels_of(*args, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "keys"), [(65, 8), (128, 128), (136, 200), (200, 136), (256, 256), (320, 264), (384, 384), (72, 384)]
)
def test_pair_bias(rows, keys, dtype):
    tensors, bias = on_gpu(20, rows, keys, 4, 4, 32, dtype=dtype), hiding_bias(4, rows, keys, dtype)
    for mask in (None, key_mask(20, 1, keys), key_mask(20, 4, keys)):
        check(tensors, mask, bias)
    assert serves_pairs(tensors, mask, bias) == (True, True)


@pytest.mark.parametrize(("rows", "keys"), [(72, 392), (1000, 200), (512, 512)])
def test_pair_bias_over_longer_sequences(rows, keys):
    """Of which the forward alone has kernels of its own."""
    tensors, mask, bias = on_gpu(16, rows, keys, 2, 2, 32), key_mask(16, 1, keys), hiding_bias(2, rows, keys)
    check(tensors, mask, bias)
    assert serves_pairs(tensors, mask, bias) == (True, False)


def large_rows(tensors, bias):
    tensors[0][::3, :, ::2] *= 30
    tensors[0][1::3, 100:110] *= 40


def large_keys(tensors, bias):
    """Beside rows that have seen nothing before."""
    tensors[1][::2, 200:] *= 30
    tensors[1][1::2, :100] *= 20
    bias[:, :, 50:90, :200] = bias[:, :, 90:100] = -torch.inf


def wide_biases(tensors, bias):
    bias[:, :, 64:128] *= 25
    bias[:, 1, 200:, 300:] = 70


def biases_of_two_levels(tensors, bias):
    """Of which the mask hides the upper."""
    bias[..., ::2] += 100


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("change", [large_rows, large_keys, wide_biases, biases_of_two_levels])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bases_of_the_softmax_of_pair_bias(dtype, change, masked):
    """Where the largest bias of a row does as a base of its exponents, and where it does not."""
    tensors, bias = on_gpu(20, 384, 384, 4, 4, 32, dtype=dtype), randn(1, 4, 384, 384, dtype=dtype)
    change(tensors, bias)
    mask = key_mask(20, 1, 384) if masked else None
    if masked and change is biases_of_two_levels:
        mask[..., ::2] = False
    double = [x.double() for x in tensors], mask, bias.double()
    exact = reference(*double[0], *double[1:], return_lse=True)
    eager = reference(*tensors, mask, bias, return_lse=True)
    assert_close(flash_dmattn_func(*tensors, mask, bias, return_lse=True), eager, exact, dtype)


@pytest.mark.parametrize("head_dim", [8, 24, 32])
@pytest.mark.parametrize("layout", ["heads before rows", "every other row", "part of the columns"])
def test_strides_of_pair_bias(layout, head_dim):
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
def test_pair_biases_of_some_batch_elements_each(mask_batch):
    """Three biases, of twenty batch elements each; masks shared likewise or not."""
    tensors = on_gpu(60, 200, 136, 4, 4, 32)
    bias = torch.cat([hiding_bias(4, 200, 136) for _ in range(3)])
    mask = mask_of(mask_batch, 1, 1, 136)
    check(tensors, mask, bias)
    assert serves_pairs(tensors, mask, bias) == (True, True)


def test_more_heads_than_blocks_at_once():
    """Of pair bias: each has a tile of its own, and the batch is not cut."""
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
}


@pytest.mark.parametrize("what", UNSHARED)
def test_what_the_kernels_of_pair_bias_leave_to_others(what):
    options, sizes, served = UNSHARED[what]
    batch = sizes.get("batch", 20)
    keys = sizes.get("keys", 264)
    tensors = on_gpu(batch, 200, keys, 4, sizes.get("kv_heads", 4), sizes.get("head_dim", 32))
    mask, bias = mask_of(batch, 1, sizes.get("mask_rows", 1), keys), randn(1, sizes.get("bias_heads", 4), 200, keys)
    check(tensors, mask, bias, **options)
    assert serves_pairs(tensors, mask, bias, **options) == served


@pytest.mark.parametrize("in_bias", [False, True])
def test_garbage_beside_pair_bias(in_bias, poisoned_allocations):
    mask, bias = key_mask(20, 1, 264), hiding_bias(4, 200, 264)
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
    """Tiles of keys that are full, in part and not at all visible follow each other in the same memory."""
    lengths = torch.randint(0, 385, (80, 1, 1, 1), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    lengths[::5] = 384
    check(on_gpu(80, 200, 384, 2, 2, 32), torch.arange(384, device="cuda") < lengths, randn(1, 2, 200, 384))


def test_hidden_keys_of_pair_bias_are_not_infinite():
    """What float16 cannot hold of them is not multiplied by their zeros."""
    mask, bias = key_mask(20, 1, 136), randn(1, 4, 200, 136, dtype=torch.float16)
    mask[..., 40] = False
    tensors = on_gpu(20, 200, 136, 4, 4, 32, dtype=torch.float16)
    tensors[2] += 64
    dout, dlse = torch.randn_like(tensors[0]) + 64, torch.zeros(20, 4, 200, device="cuda")

    def results(hidden):
        bias[..., 40] = hidden
        return run(flash_dmattn_func, tensors, mask, bias.clone(), dout, dlse)

    for name, high, low in zip(NAMES, results(20), results(-20)):
        assert torch.equal(high, low), name
        assert name == "lse" or high.isfinite().all(), name


def test_pair_bias_is_bitwise_the_same_again():
    """In every gradient, asked for or not."""
    tensors, mask, bias = on_gpu(40, 384, 384, 4, 4, 32), key_mask(40, 1, 384), randn(1, 4, 384, 384)
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(40, 4, 384, device="cuda")
    first = run(flash_dmattn_func, tensors, mask, bias, dout, dlse)
    for deterministic in [False, True] * 25:
        again = run(flash_dmattn_func, tensors, mask, bias, dout, dlse, deterministic=deterministic)
        assert all(torch.equal(x, y) for x, y in zip(again, first))


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("least", [-1e9, -1e10, -2e38])
def test_rows_of_large_biases(least, batch, use):
    """As additive masks that are not made of -inf leave them: their softmax is that of what else is in the scores."""
    bias = torch.full((1, 4, 200, 264), least, device="cuda", dtype=torch.bfloat16)
    bias[:, :, ::2, :100] = 0
    tensors = on_gpu(batch, 200, 264, 4, 4, 32)
    exact, exact_lse = reference(*(x.double() for x in tensors), None, bias.double(), return_lse=True)
    for architecture in ("sm80", "sm90"):
        use(architecture)
        out, lse = flash_dmattn_func(*tensors, None, bias, return_lse=True)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-4)
        # Of float32, what is added to such a bias is lost: all keys are alike.
        for rows, right in ((slice(0, None, 2), exact[:, ::2]), (slice(1, None, 2), tensors[2].double().mean(1, True))):
            torch.testing.assert_close(out[:, rows].double(), right.expand_as(out[:, rows]), rtol=2e-2, atol=2e-2)


# What nobody sees may hold anything

KINDS = ["bool", "bool by lists", "keys alone", "bias", "intervals", "intervals by lists", "causal"]


def hiding(kind, rows, keys):
    """(mask, bias, options, rows that see nothing, keys that nobody sees), the last two as (2, rows) and (2, keys)."""
    hidden_rows = torch.rand(2, rows, device="cuda") < 0.2
    hidden_keys = torch.rand(2, keys, device="cuda") < 0.2
    hidden_rows[1, :130] = hidden_keys[0, 120:] = True
    if kind in ("bool", "bool by lists"):
        mask = ~hidden_rows[:, None, :, None] & ~hidden_keys[:, None, None, :]
        by_lists = kind == "bool by lists"
        options = {"sparse": "lists"} if by_lists else {}
        return mask, randn(2, 4, 1 if by_lists else rows, keys), options, hidden_rows, hidden_keys
    hidden_rows[:] = False
    if kind == "keys alone":
        return ~hidden_keys[:, None, None, :], None, {}, hidden_rows, hidden_keys
    if kind == "bias":
        bias = randn(2, 1, 1, keys).masked_fill(hidden_keys[:, None, None, :], -torch.inf)
        return None, bias, {}, hidden_rows, hidden_keys
    if kind in ("intervals", "intervals by lists"):
        sparse = "tiles" if kind == "intervals" else "lists"
        start = torch.zeros(2, 1, keys, device="cuda", dtype=torch.int32)
        end = torch.full_like(start, rows).masked_fill(hidden_keys[:, None], -3)
        return KeyIntervalMask(start, end), randn(2, 2, 1, keys), {"sparse": sparse}, hidden_rows, hidden_keys
    hidden_rows[:, : rows - keys] = True  # causality with more rows than keys
    hidden_keys[:] = False
    return None, randn(2, 4, rows, keys), {"is_causal": True}, hidden_rows, hidden_keys


@pytest.mark.parametrize("head_dim", [32, 40, 64, 96, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_garbage_that_nobody_sees(kind, head_dim, poisoned_allocations):
    rows, keys = (440, 264) if kind == "causal" else (300, 264)
    mask, bias, options, hidden_rows, hidden_keys = hiding(kind, rows, keys)
    query, key, value = on_gpu(2, rows, keys, 4, 2, head_dim)
    dout, dlse = torch.randn_like(query) / 8, torch.randn(2, 4, rows, device="cuda") / 8

    def results(fill):
        of_rows, of_keys = hidden_rows[:, :, None, None], hidden_keys[:, :, None, None]
        tensors = [x.masked_fill(of, fill) for x, of in ((query, of_rows), (key, of_keys), (value, of_keys))]
        filled = dout.masked_fill(of_rows, fill), dlse.masked_fill(hidden_rows[:, None], fill)
        return run(flash_dmattn_func, tensors, mask, bias, *filled, **options)

    clean, dirty = results(0), results(torch.nan)
    for name, x, y in zip(NAMES, dirty, clean):
        assert not x.isnan().any(), name
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3, msg=name)
    out, lse, dq, dk, dv, *_ = dirty
    assert (out[hidden_rows] == 0).all() and (dq[hidden_rows] == 0).all()
    assert (lse.transpose(1, 2)[hidden_rows] == -torch.inf).all()
    assert (dk[hidden_keys] == 0).all() and (dv[hidden_keys] == 0).all()


@CAUSAL
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("pairs", ["none", "key"])
@pytest.mark.parametrize(("head_dim", "heads"), [(64, 8), (96, 6), (128, 4), (128, 8)])
def test_lists_that_heads_share(head_dim, heads, pairs, softcap, causal, poisoned_allocations):
    """More tiles of rows than slots for the sums of their dQ; rows that see nothing, and keys that nobody sees."""
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
    few = slice(-2, None)  # of the last batch elements: the slots have been used before
    expected = run(by_lists, clean, mask, bias, clean_dout, dlse)
    for name, x, y in zip(NAMES, run(by_lists, tensors, mask, bias, dout, dlse), expected):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3, msg=name)
    of_few = [x[few] for x in clean], mask[few], None if bias is None else bias[few]
    in_double = [x[few].double() for x in clean], mask[few], None if bias is None else in_float64(bias[few])
    options = {"is_causal": causal, "softcap": softcap}
    eager = run(reference, *of_few, clean_dout[few], dlse[few], **options)
    exact = run(reference, *in_double, clean_dout[few].double(), dlse[few].double(), **options)
    assert_close([x[few] for x in expected], eager, exact, torch.bfloat16)


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)


@CAUSAL
@BIASES
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_variable_length_between_garbage(head_dim, pairs, causal, poisoned_allocations):
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


# The same again, the same as the others, and much


@BIASES
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_forward_is_bitwise_the_same_again(head_dim, pairs):
    tensors, mask = on_gpu(2, 700, 904, 16, 4, head_dim), mask_of(2, 1, 700, 904)
    bias = bias_of(pairs, 2, 16, 700, 904)
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask, "softcap": 5.0}):
        first = flash_dmattn_func(*tensors, attn_bias=bias, return_lse=True, **options)
        for _ in range(50):
            again = flash_dmattn_func(*tensors, attn_bias=bias, return_lse=True, **options)
            assert all(torch.equal(x, y) for x, y in zip(again, first))


def tiles_of(batch, rows, keys):
    """A mask of which each row tile sees few key tiles, others in each batch element, and some none."""
    few = torch.rand(batch, 1, -(-rows // 128), -(-keys // 128), device="cuda") < 0.3
    few[:, :, 3] = False
    of_pairs = few.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :rows, :keys]
    return of_pairs & mask_of(batch, 1, rows, keys)


@pytest.mark.parametrize("bias_shape", [None, (2, 4, 1), (2, 8, 900), (1, 8, 900)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 192, 256])
def test_deterministic_gradients_are_bitwise_the_same_again(head_dim, bias_shape):
    """Blocks wait for those before them where all visit a tile of rows and where few do; more of them than at once."""
    rows, keys = 900, 2568
    tensors, dout = on_gpu(2, rows, keys, 8, 4, head_dim), randn(2, rows, 8, head_dim) / 8
    bias = None if bias_shape is None else randn(*bias_shape, keys)
    dlse = torch.randn(2, 8, rows, device="cuda") / 8
    window = KeyIntervalMask.sliding_window(rows, keys, 300, device="cuda")
    masks = (None, mask_of(2, 1, rows, keys), tiles_of(2, rows, keys), window)
    for mask in masks:
        for causal in (False, True):

            def gradients(mask=mask, **options):
                given = {"sparse": "auto" if mask is None else "tiles", **options}
                return run(flash_dmattn_func, tensors, mask, bias, dout, dlse, **given)

            first = gradients(is_causal=causal, deterministic=True)
            for _ in range(50):
                again = gradients(is_causal=causal, deterministic=True)
                assert all(torch.equal(x, y) for x, y in zip(again, first))
            for name, x, y in zip(NAMES, first, gradients(is_causal=causal)):
                assert distance(x.float(), y.float()) < 2e-2, name


def test_deterministic_gradients_of_variable_length():
    rows, keys = [700, 0, 129, 70, 1, 500], [1300, 40, 129, 0, 65, 264]
    cu_q, cu_k = offsets(rows), offsets(keys)
    tensors = [randn(sum(n), h, 128).requires_grad_() for n, h in ((rows, 4), (keys, 2), (keys, 2))]
    dout, results = randn(sum(rows), 4, 128), []
    for _ in range(50):
        out = flash_dmattn_varlen_func(
            *tensors, None, None, cu_q, cu_k, max(rows), max(keys), is_causal=True, deterministic=True
        )
        results.append(torch.autograd.grad(out, tensors, dout))
    assert all(torch.equal(x, y) for again in results for x, y in zip(again, results[0]))


def random_call(chance: random.Random):
    """(tensors, mask, bias, options) of any kind, small."""
    batch, (heads, kv_heads) = chance.choice([1, 2, 3, 4]), chance.choice([(1, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
    rows = chance.choice([65, 100, 127, 128, 129, 191, 192, 193, 300, 449])
    keys = chance.choice([1, 8, 63, 64, 65, 128, 129, 200, 256, 384, 520])
    head_dim = chance.choice([8, 32, 40, 64, 64, 96, 128, 128, 192, 256])
    dtype = chance.choice([torch.bfloat16, torch.float16])

    def broadcast():
        return chance.choice([batch, 1]), chance.choice([heads, kv_heads, 1])

    mask = bias = None
    options = {"is_causal": chance.random() < 0.5, "softcap": chance.choice([0.0, 0.0, 4.0])}
    options["sparse"] = chance.choice(["tiles", "lists"])
    options["deterministic"] = chance.random() < 0.3
    kind = chance.choice(["none", "key", "dense", "intervals"])
    if kind == "intervals":
        mask = intervals(*broadcast(), keys, rows=rows)
    elif kind != "none":
        mask = mask_of(*broadcast(), 1 if kind == "key" else rows, keys, visible=chance.choice([0.02, 0.5, 0.98]))
    else:
        options["sparse"] = "auto"
    kind = chance.choice(["none", "key", "dense"])
    if kind != "none":
        bias = randn(*broadcast(), 1 if kind == "key" else rows, keys, dtype=dtype)
    return on_gpu(batch, rows, keys, heads, kv_heads, head_dim, dtype=dtype), mask, bias, options


def distance(ours, others):
    """How far apart, in units of the largest number and a little more; inf where only one is."""
    apart = torch.where(ours == others, 0, (ours - others).abs())
    largest = others.masked_fill(others.isinf(), 0).abs().amax()
    return apart.nan_to_num(torch.inf, torch.inf).amax() / (largest + 2e-3)


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_are_as_by_the_old_kernels(seed, use):
    """A thousand each: no hang, no NaN, and nowhere farther apart than their roundings."""
    chance = random.Random(seed)
    for number in range(1000):
        tensors, mask, bias, options = random_call(chance)
        dout = torch.randn_like(tensors[0])
        dlse = torch.randn(dout.shape[0], dout.shape[2], dout.shape[1], device="cuda")
        results = []
        for architecture in ("sm90", "sm80"):
            use(architecture)
            results.append(run(flash_dmattn_func, tensors, mask, bias, dout, dlse, **options))
        apart = torch.stack([distance(x.float(), y.float()) for x, y in zip(*results)])
        assert (apart < 5e-2).all(), (
            f"call {number}, {options}: {dict(zip(NAMES, apart.tolist()))} of {[x.shape for x in tensors]}, "
            f"mask {type(mask)} {getattr(mask, 'shape', '')}, bias {getattr(bias, 'shape', None)}"
        )


def test_threads_that_have_called_nothing_before():
    """One of a server, and autograd's: to describe tensors to the copy engine the driver wants a context of each."""
    program = """
import threading
import torch
from flash_dmattn import flash_dmattn_func

def tensors(*shape):
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]

def forward(out):
    with torch.no_grad():
        out.append(flash_dmattn_func(*long))

long, pairs = tensors(1, 512, 2, 128), tensors(64, 256, 2, 32)
bias = torch.randn(1, 2, 256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
torch.cuda.synchronize()
out = []
thread = threading.Thread(target=forward, args=(out,))
thread.start()
thread.join()
assert torch.equal(out[0], flash_dmattn_func(*long))
flash_dmattn_func(*pairs, attn_bias=bias).sum().backward()
assert all(x.grad.isfinite().all() for x in (*pairs, bias))
print("done")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split() == ["done"], ran.stderr


@takes_gpu_memory(16)
@pytest.mark.parametrize("which", ["rows", "keys"])
def test_rows_of_more_than_32_bits_of_elements(which):
    """Sq or Sk x B x H x D > 2^31; the other is short."""
    many, few, heads, head_dim = 131136, 136, 64, 128
    rows, keys = (many, few) if which == "rows" else (few, many)
    assert 2 * many * heads * head_dim > 2**31

    def made(seqlen):
        return torch.empty(2, seqlen, heads, head_dim, dtype=torch.bfloat16, device="cuda").normal_()

    query = made(rows)
    key = made(keys)
    value = made(keys) if which == "rows" else key
    bias = randn(1, heads, 1, keys)
    out, lse = flash_dmattn_func(query, key, value, attn_bias=bias, return_lse=True)
    for batch, head, last in ((0, 0, slice(0, 70)), (1, heads - 1, slice(rows - 70, rows))):
        one = [query[batch, None, last, head, None], *(x[batch, None, :, head, None] for x in (key, value))]
        exact, exact_lse = reference(*(x.double() for x in one), None, bias[:, head, None].double(), return_lse=True)
        ours, atol = out[batch, None, last, head, None].double(), 2e-2 * exact.abs().max().item()
        torch.testing.assert_close(ours, exact, rtol=2e-2, atol=atol)
        torch.testing.assert_close(lse[batch, head, last].double(), exact_lse[0, 0], rtol=1e-4, atol=1e-3)


@takes_gpu_memory(20)
def test_dense_bias_of_more_than_32_bits_of_elements():
    seqlen = 46408
    bias = torch.empty(1, 1, seqlen, seqlen, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    assert bias.numel() > 2**31
    leaves = [*(x.requires_grad_() for x in on_gpu(1, seqlen, seqlen, 1, 1, 32)), bias]
    dout = torch.randn_like(leaves[0])
    out = flash_dmattn_func(*leaves[:3], None, bias)
    dq, *_, dbias = torch.autograd.grad(out, leaves, dout)
    tail = slice(seqlen - 70, seqlen)
    inputs = [leaves[0][:, tail], *leaves[1:3], bias[:, :, tail]]
    exact_leaves = [x.detach().double().requires_grad_() for x in inputs]
    exact = reference(*exact_leaves[:3], None, exact_leaves[3])
    exact_dq, *_, exact_dbias = torch.autograd.grad(exact, exact_leaves, dout[:, tail].double())
    for ours, right in ((out[:, tail], exact), (dq[:, tail], exact_dq), (dbias[:, :, tail], exact_dbias)):
        torch.testing.assert_close(ours.double(), right, rtol=2e-2, atol=2e-2 * right.abs().max().item())
