"""Device-side dispatch for large bool masks: the device selects key lists where they are short, else dense blocks."""

import pytest
import torch
from gpu_inputs import NEEDS_CUDA, on_gpu, randn
from helpers import check

from flash_dmattn import KeyLists, create_mask, flash_dmattn_func, flash_dmattn_func_auto, ops
from flash_dmattn.ops.schema import Arguments, BackwardArguments

pytestmark = NEEDS_CUDA

ROWS, KEYS = 700, 2112


def causal(rows=ROWS, keys=KEYS):
    return torch.ones(1, 1, rows, keys, dtype=torch.bool, device="cuda").tril(keys - rows)


def rand(*shape, visible):
    return torch.rand(*shape, device="cuda") < visible


def top_k(heads=2, batches=1):
    bias = randn(batches, heads, 1, KEYS)
    return create_mask(bias, causal(), batches, ROWS, KEYS, 300, torch.finfo(bias.dtype).min)


def some_columns(batches, heads, rows=ROWS):
    """Each row sees half of one tenth of the keys."""
    return rand(batches, heads, 1, KEYS, visible=0.1) & rand(batches, heads, rows, KEYS, visible=0.5)


def blocks():
    """Documents: blocks are empty or full."""
    document = torch.arange(KEYS, device="cuda") // 320
    return (document[None, -ROWS:, None] == document[None, None])[None]


SHORT = {
    "causal top-k": (top_k, True),
    "for each query head": (lambda: some_columns(1, 4), False),
    "one for all": (lambda: some_columns(1, 1), True),
    "of each batch element": (lambda: some_columns(2, 2), False),
    "nothing visible in some heads": (lambda: some_columns(2, 4) & rand(2, 4, 1, 1, visible=0.5), True),
    "nothing visible": (lambda: torch.zeros(1, 2, ROWS, KEYS, dtype=torch.bool, device="cuda"), False),
    "not contiguous": (lambda: some_columns(1, 2, 2 * ROWS)[:, :, ::2], False),
}
LONG = {
    "half of all pairs": (lambda: rand(1, 2, ROWS, KEYS, visible=0.5), True),  # every list holds all keys
    "all pairs": (lambda: torch.ones(2, 1, ROWS, KEYS, dtype=torch.bool, device="cuda"), False),
    "documents": (blocks, False),
}
MASKS = {**SHORT, **LONG}


def list_mask(mask, is_causal):
    bits, tiles, *lists = ops.pack_and_list_mask(mask, ROWS, KEYS, is_causal, 60)
    return ops.MaskTensors(bits, tiles, None, *lists)


@pytest.mark.parametrize("case", MASKS)
def test_lists_are_built_only_where_they_are_short(case):
    make, is_causal = MASKS[case]
    mask = make()
    made, whole = list_mask(mask, is_causal), KeyLists.build(mask, ROWS, KEYS, is_causal)
    packed = ops.pack_mask(mask, ROWS, KEYS, is_causal, None, None)
    assert torch.equal(made.mask_summaries, packed[1])
    if case in LONG:
        assert (made.kv_indptr == -1).all()
        return
    assert torch.equal(made.kv_indptr, whole.kv_indptr)
    listed = whole.kv_indices.shape[0]
    assert torch.equal(made.kv_indices[:listed], whole.kv_indices) and torch.equal(
        made.kv_row_bits[:listed], whole.kv_row_bits
    )


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "key bias"])
@pytest.mark.parametrize("head_dim, dtype", [(64, torch.bfloat16), (128, torch.float16), (192, torch.bfloat16)])
@pytest.mark.parametrize("case", MASKS)
def test_outputs_and_gradients_match_the_reference(case, head_dim, dtype, with_bias):
    make, is_causal = MASKS[case]
    bias = randn(1, 2, 1, KEYS, dtype=dtype) if with_bias else None
    check(on_gpu(2, ROWS, KEYS, 4, 2, head_dim, dtype=dtype), make(), bias, is_causal=is_causal, softcap=10.0)


@pytest.mark.parametrize("case", MASKS)
def test_the_device_selects_lists_where_they_are_short(case):
    make, is_causal = MASKS[case]
    tensors, mask, bias = on_gpu(2, ROWS, KEYS, 4, 2, 128), make(), randn(1, 2, 1, KEYS)
    by = {
        sparse: flash_dmattn_func(*tensors, mask, bias, is_causal=is_causal, sparse=sparse, return_lse=True)
        for sparse in ("auto", "lists", "tiles")
    }
    way = by["tiles" if case in LONG else "lists"]
    assert all(torch.equal(ours, alone) for ours, alone in zip(by["auto"], way))


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_batch_elements_share_masks(batches):
    check(on_gpu(4, ROWS, KEYS, 4, 2, 64), some_columns(batches, 2), randn(batches, 2, 1, KEYS), is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("visible", [0.1, 1.0])
def test_more_rows_than_keys(visible, is_causal):
    rows = KEYS + 300
    mask = rand(1, 2, 1, KEYS, visible=visible) & rand(1, 2, rows, KEYS, visible=0.7)
    check(on_gpu(1, rows, KEYS, 4, 2, 64), mask, is_causal=is_causal)


@torch.no_grad()
@pytest.mark.parametrize("case", ["causal top-k", "half of all pairs"])
def test_a_cache_that_is_filled_in_part(case):
    mask, lengths = MASKS[case][0](), torch.tensor([KEYS, 900], dtype=torch.int32, device="cuda")
    query, key, value = on_gpu(2, ROWS, KEYS, 4, 2, 64)
    mask[..., 900:] = False
    out = flash_dmattn_func(query, key, value, mask, is_causal=True, cache_seqlens=lengths)
    for number, length in enumerate(lengths.tolist()):
        own = slice(number, number + 1)
        rest = (key[own, :length], value[own, :length], mask[..., :length])
        exact = flash_dmattn_func_auto("reference")(query[own], *rest, is_causal=True)
        torch.testing.assert_close(out[own], exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("batch, heads", [(0, 4), (2, 0)])
def test_empty_batches_and_rows(batch, heads):
    mask = torch.ones(batch, min(heads, 1), ROWS, KEYS, dtype=torch.bool, device="cuda")
    query, key, value = on_gpu(batch, ROWS, KEYS, heads, heads, 64)
    assert flash_dmattn_func(query, key, value, mask).shape == query.shape


@pytest.mark.parametrize("case", ["causal top-k", "half of all pairs"])
def test_a_deterministic_gradient_of_a_relative_bias(case):
    """Each launch has exact sums of its own; the one that was not selected must not write its zeros."""
    make, is_causal = MASKS[case]
    mask, tensors, table = make(), on_gpu(1, ROWS, KEYS, 4, 2, 64), randn(1, 4, 513, dtype=torch.float32)
    dout = torch.randn_like(tensors[0])

    def gradient(masks):
        options = {"softmax_scale": 0.125, "is_causal": is_causal, "deterministic": True}
        arguments = Arguments(*tensors, relative_bias=table, **masks._asdict(), **options)
        out, lse = ops.attention_forward(*arguments)
        return ops.attention_backward(*BackwardArguments(dout, None, out, lse, False, True, *arguments))[-1]

    if case in LONG:
        alone = ops.MaskTensors(*ops.pack_mask(mask, ROWS, KEYS, is_causal, None, None))
    else:
        lists = KeyLists.build(mask, ROWS, KEYS, is_causal)
        alone = ops.MaskTensors(kv_indices=lists.kv_indices, kv_indptr=lists.kv_indptr, kv_row_bits=lists.kv_row_bits)
    assert torch.equal(gradient(list_mask(mask, is_causal)), gradient(alone))


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", ["causal top-k", "half of all pairs"])
def test_unwritten_memory_is_not_read(case):
    make, is_causal = MASKS[case]
    check(on_gpu(2, ROWS, KEYS, 4, 2, 64), make(), randn(1, 2, 1, KEYS), is_causal=is_causal)


def attend_and_differentiate(tensors, mask, bias, dout):
    leaves = [x.detach().requires_grad_() for x in (*tensors, bias)]
    out = flash_dmattn_func(*leaves[:3], mask, leaves[3], is_causal=True)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("case", ["causal top-k", "half of all pairs"])
def test_the_host_does_not_wait(case):
    """The replay of a CUDA graph dispatches on the contents of the mask at replay."""
    tensors, mask, bias = on_gpu(2, ROWS, KEYS, 4, 2, 64), MASKS[case][0](), randn(1, 2, 1, KEYS)
    dout = torch.randn_like(tensors[0])
    first = attend_and_differentiate(tensors, mask, bias, dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend_and_differentiate(tensors, mask, bias, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend_and_differentiate(tensors, mask, bias, dout)
    graph.replay()
    for ours, alone in zip(captured, first):
        torch.testing.assert_close(ours, alone, rtol=2e-2, atol=2e-2)
    other = MASKS["half of all pairs" if case == "causal top-k" else "causal top-k"][0]()
    expected = attend_and_differentiate(tensors, other, bias, dout)
    mask.copy_(other)
    graph.replay()
    for ours, alone in zip(captured, expected):
        torch.testing.assert_close(ours, alone, rtol=2e-2, atol=2e-2)


def test_operator():
    # The capacity beyond the lists is not written, so outputs cannot be compared.
    parts = ("test_schema", "test_autograd_registration", "test_faketensor")
    for percent in (0, 37, 100):
        torch.library.opcheck(ops.pack_and_list_mask, (top_k(), ROWS, KEYS, True, percent), test_utils=parts)
    query, key, value = on_gpu(2, ROWS, KEYS, 4, 2, 64)
    options = (*(None,) * 5, 0.3, 0.0, True, False)
    arguments = (query.requires_grad_(), key, value, None, None, *list_mask(top_k(), True), *options)
    torch.library.opcheck(ops.attention_forward, arguments, atol=1e-2, rtol=1e-1)


def test_percent_bounds_the_length_of_lists():
    mask = some_columns(1, 2)  # every list holds a tenth of the keys
    for percent, are_made in ((0, False), (5, False), (20, True), (100, True)):
        *_, spans, _ = ops.pack_and_list_mask(mask, ROWS, KEYS, False, percent)
        assert (spans >= 0).all() if are_made else (spans == -1).all(), percent
    with pytest.raises(ValueError, match="percent must be from 0 to 100, got 101"):
        ops.pack_and_list_mask(mask, ROWS, KEYS, False, 101)


def test_mask_and_lists_are_accepted_only_together():
    query, key, value = on_gpu(1, ROWS, KEYS, 4, 2, 64)
    masks, options = list_mask(top_k(), True), (*(None,) * 5, 0.3, 0.0, True, False)
    message = "mask and kv_indices are given together as pack_and_list_mask returned them, .* without a dense attn_bias"
    for bias, given in ((randn(1, 2, ROWS, KEYS), masks), (None, masks._replace(kv_row_bits=None))):
        with pytest.raises(ValueError, match=message):
            ops.attention_forward(query, key, value, bias, None, *given, *options)


@pytest.mark.parametrize("shape", [(1, 2, 1, KEYS), (1, 2, 0, KEYS), (0, 2, ROWS, KEYS)], ids=str)
def test_masks_without_rows_of_their_own_are_refused(shape):
    mask = torch.ones(shape, dtype=torch.bool, device="cuda")
    with pytest.raises(ValueError, match=r"mask must not be empty, and have a row per query row, got shape \("):
        ops.pack_and_list_mask(mask, shape[2], KEYS, False, 60)


def test_compile_fullgraph():
    tensors, mask, bias = on_gpu(2, ROWS, KEYS, 4, 2, 64), top_k(), randn(1, 2, 1, KEYS)

    def layer(query, key, value, mask, bias):
        return flash_dmattn_func(query * 2, key, value, mask, bias.exp(), is_causal=True).sin()

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        leaves = [x.detach().clone().requires_grad_() for x in (*tensors, bias)]
        out = function(*leaves[:3], mask, leaves[3])
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for ours, eager in zip(*results):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


def made_of(mask, monkeypatch, **options):
    """The operators that a call uses to pack its mask."""
    made = []

    def noting(name, operator):
        return lambda *arguments: (made.append(name), operator(*arguments))[1]

    with monkeypatch.context() as patch:
        for name in ("pack_mask", "pack_and_list_mask"):
            patch.setattr(ops, name, noting(name, getattr(ops, name)))
        flash_dmattn_func(*on_gpu(1, ROWS, KEYS, 4, 2, 64), mask, **{"is_causal": True, **options})
    return made


def test_masks_that_the_device_inspects(monkeypatch):
    mask = top_k()
    assert made_of(mask, monkeypatch) == ["pack_and_list_mask"]
    assert made_of(mask, monkeypatch, attn_bias=randn(1, 2, 1, KEYS)) == ["pack_and_list_mask"]
    for options in ({"sparse": "tiles"}, {"deterministic": True}, {"attn_bias": randn(1, 2, ROWS, KEYS)}):
        assert made_of(mask, monkeypatch, **options) == ["pack_mask"], options
    for other in (rand(1, 2, 1, KEYS, visible=0.5), causal()[..., :1]):
        assert made_of(other, monkeypatch) == ["pack_mask"], other.shape
    assert made_of(mask, monkeypatch, sparse="lists") == []
