"""Masks and biases whose batch dimension is B/n: n consecutive batch elements share an entry."""

import functools

import pytest
import torch
from helpers import check, inputs, rand_mask, reference, run

from flash_dmattn import (
    TRITON_AVAILABLE,
    KeyIntervalMask,
    KeyLists,
    create_mask,
    flash_dmattn_func,
    flash_dmattn_func_auto,
)
from flash_dmattn.broadcast import expand_shared

BATCH, HEADS, KV_HEADS, ROWS, KEYS = 6, 4, 2, 70, 83
needs_triton = pytest.mark.skipif(not TRITON_AVAILABLE, reason="Triton is not available")


def tensors_of(dtype=torch.float64):
    return inputs(BATCH, ROWS, KEYS, HEADS, KV_HEADS, 16, dtype)


def results(function, tensors, mask, bias, **options):
    query = tensors[0]
    dout = torch.randn(query.shape, generator=torch.Generator().manual_seed(1)).to(query.dtype)
    dlse = torch.randn(BATCH, HEADS, ROWS, generator=torch.Generator().manual_seed(2))
    return run(function, tensors, mask, bias, dout, dlse, **options)


def expanded(pairs):
    return None if pairs is None else pairs.repeat_interleave(BATCH // pairs.shape[0], dim=0)


def test_expand_shared_repeats_entries():
    pairs = torch.arange(6).view(3, 2, 1, 1)
    assert (
        expand_shared(pairs, 6, 4)[:, :, 0, 0].tolist() == [[0, 0, 1, 1]] * 2 + [[2, 2, 3, 3]] * 2 + [[4, 4, 5, 5]] * 2
    )
    assert expand_shared(pairs[:1], 6, 4).shape == (1, 4, 1, 1)


@pytest.mark.parametrize("function", ["cpu", "reference", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("batches", [3, 2])
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("rows", [ROWS, 1])
def test_a_shared_entry_equals_a_copy_for_each_batch_element(function, batches, heads, rows):
    """The gradient of a shared entry is the sum over the batch elements that share it."""
    dtype = torch.float32 if function == "triton" else torch.float64
    tensors = tensors_of(dtype)
    bias = torch.randn(batches, heads, rows, KEYS, dtype=dtype)
    mask = rand_mask(5 - batches, 1, ROWS, KEYS)
    options = {"is_causal": rows == 1, "softcap": 3.0 if heads == 2 else 0.0}
    *ours, dbias = results(flash_dmattn_func_auto(function), tensors, mask, bias, **options)
    *wanted, each = results(reference, tensors, expanded(mask), expanded(bias), **options)
    wanted.append(each.unflatten(0, (batches, BATCH // batches)).sum(1))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for x, y in zip((*ours, dbias), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [ROWS, 1])
def test_no_batch_elements(rows):
    """No batch element shares the two entries: their gradient is 0."""
    tensors = [x.requires_grad_() for x in inputs(0, rows, KEYS, HEADS, KV_HEADS, 16)]
    bias = torch.randn(2, 2, rows, KEYS, requires_grad=True)
    out = flash_dmattn_func(*tensors, rand_mask(2, 1, rows, KEYS), bias)
    *_, dbias = torch.autograd.grad(out.sum(), (*tensors, bias))
    assert out.shape == (0, rows, HEADS, 16) and dbias.shape == bias.shape and not dbias.any()


def test_flex():
    tensors = tensors_of(torch.float32)
    mask, bias = rand_mask(2, 4, ROWS, KEYS), torch.randn(3, 2, ROWS, KEYS)
    with torch.no_grad():
        ours = flash_dmattn_func_auto("flex")(*tensors, mask, bias, return_lse=True)
        wanted = reference(*tensors, expanded(mask), expanded(bias), return_lse=True)
    for x, y in zip(ours, wanted):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sparse", ["tiles", "lists"])
@pytest.mark.parametrize("batches", [6, 3, 2, 1])
@pytest.mark.parametrize("rows", [ROWS, 1])
def test_tiles_and_lists(dtype, sparse, batches, rows):
    tensors = tensors_of(dtype)
    for mask_rows in (ROWS, 1):
        mask = rand_mask(5 - batches if batches in (2, 3) else batches, 1, mask_rows, KEYS)
        bias = torch.randn(batches, 2, rows, KEYS).to(dtype)
        check(tensors, mask, bias, function=functools.partial(flash_dmattn_func, sparse=sparse), is_causal=True)


def test_many_tiles():
    """Several blocks of rows and keys, and more batch elements than threads."""
    tensors = inputs(8, 300, 1100, 2, 1, 16)
    check(tensors, rand_mask(2, 1, 1, 1100), torch.randn(4, 2, 300, 1100))


def test_key_lists_made_once():
    tensors = tensors_of(torch.float32)
    mask = rand_mask(3, 1, ROWS, KEYS, visible=0.2)
    lists = KeyLists.build(mask, ROWS)
    assert lists.batches == 3
    bias = torch.randn(2, 4, 1, KEYS)
    ours = results(flash_dmattn_func, tensors, lists, bias)
    for x, y in zip(ours, results(flash_dmattn_func, tensors, mask, bias, sparse="tiles")):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [ROWS, 1])
def test_bias_that_is_the_same_along_the_keys(rows):
    bias = torch.randn(3, 2, rows, 1)
    bias[1, :, 0] = -torch.inf
    check(tensors_of(torch.float32), rand_mask(2, 1, ROWS, KEYS), bias)


def test_probabilities():
    tensors = tensors_of()
    mask, bias = rand_mask(2, 4, ROWS, KEYS), torch.randn(3, 2, ROWS, KEYS, dtype=torch.float64)
    probs = flash_dmattn_func(*tensors, mask, bias, return_attn_probs=True)[2]
    torch.testing.assert_close(probs, reference(*tensors, expanded(mask), expanded(bias), return_attn_probs=True)[2])


@pytest.mark.parametrize("pairs", [(3, 1, ROWS, KEYS), (2, 4, 1, KEYS)], ids=str)
def test_vmap_is_one_call(pairs, monkeypatch):
    """A bias of B/n for each of three calls, and one for all of them: a call with a larger batch where nothing is
    repeated; per-call gradients either way."""
    from flash_dmattn import ops

    tensors = tensors_of(torch.float32)
    biases = torch.randn(3, *pairs)
    calls = []
    forward = ops.attention_forward
    monkeypatch.setattr(ops, "attention_forward", lambda *args: calls.append(args[0].shape[0]) or forward(*args))

    def loss(bias):
        return flash_dmattn_func(*tensors, None, bias).square().sum()

    values = torch.func.vmap(loss)(biases)
    assert calls[-1] == 3 * BATCH
    for value, bias in zip(values, biases):
        torch.testing.assert_close(value, loss(bias))
    for gradient, bias in zip(torch.func.vmap(torch.func.grad(loss))(biases), biases):
        torch.testing.assert_close(gradient, torch.func.grad(loss)(bias), rtol=1e-4, atol=1e-4)
    scales = torch.tensor([1.0, 2.0])
    of_one = torch.func.vmap(lambda scale: flash_dmattn_func(scale * tensors[0], *tensors[1:], None, biases[0]))(scales)
    torch.testing.assert_close(of_one[1], flash_dmattn_func(2 * tensors[0], *tensors[1:], None, biases[0]))


def test_compiled_for_every_batch_size():
    """One graph for any B and n."""

    def loss(query, key, value, mask, bias):
        return flash_dmattn_func(query, key, value, mask, bias).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for outer, n in ((2, 3), (3, 5), (2, 4)):
        tensors = [x.requires_grad_() for x in inputs(outer * n, 20, 20, 2, 2, 8)]
        mask, bias = rand_mask(outer * n, 1, 1, 20), torch.randn(outer, 2, 20, 20, requires_grad=True)
        gradients = [
            torch.autograd.grad(function(*tensors, mask, bias), (*tensors, bias)) for function in (compiled, loss)
        ]
        for x, y in zip(*gradients):
            torch.testing.assert_close(x, y)


def test_create_mask():
    bias, allowed = torch.randn(3, 2, 1, 40), rand_mask(2, 1, 20, 40)
    mask = create_mask(bias, allowed, BATCH, 20, 40, 8, torch.finfo(torch.float32).min)
    wanted = create_mask(expanded(bias), expanded(allowed), BATCH, 20, 40, 8, torch.finfo(torch.float32).min)
    assert torch.equal(mask, wanted) and mask.shape[0] == BATCH
    alone = create_mask(bias, None, BATCH, 20, 40, 8, torch.finfo(torch.float32).min)
    assert alone.shape[0] == 3 and alone.sum(-1).eq(8).all()


def test_numbers_of_entries_that_do_not_divide_the_batch_are_refused():
    tensors = tensors_of(torch.float32)
    for batches in (4, 5, 12):
        message = rf"dimension 0 must be 1 or 6 or divide 6, got shape \({batches}, 1, 1, 83\)"
        with pytest.raises(ValueError, match="attn_bias must be .*" + message):
            flash_dmattn_func(*tensors, None, torch.randn(batches, 1, 1, KEYS))
        with pytest.raises(ValueError, match="attn_mask must be .*" + message):
            flash_dmattn_func(*tensors, rand_mask(batches, 1, 1, KEYS))
    with pytest.raises(ValueError, match=r"attention_bias must be \({B\|B/n\|1}, .*got shape \(4, 2, 1, 40\)"):
        create_mask(torch.randn(4, 2, 1, 40), None, BATCH, 20, 40, 8, -1.0)


def test_intervals_are_for_all_or_for_each():
    tensors = tensors_of(torch.float32)
    start = torch.zeros(3, 1, KEYS, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"attn_mask.start must be \({B\|1}, .*dimension 0 must be 1 or 6, got"):
        flash_dmattn_func(*tensors, KeyIntervalMask(start, start + 5))
    with pytest.raises(ValueError, match=r"window_size needs attn_bias .*\({6\|1}, .*got shape \(3, 1, 1, 83\)"):
        flash_dmattn_func(*tensors, None, torch.randn(3, 1, 1, KEYS), is_causal=True, window_size=8)
