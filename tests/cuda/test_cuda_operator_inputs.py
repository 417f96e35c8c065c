"""The operators on CUDA check their own arguments, so that compiled calls read nothing outside the tensors."""

from dataclasses import replace

import pytest
import torch
from gpu_inputs import NEEDS_CUDA, mask_of, on_gpu
from helpers import surrounded

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func, ops
from flash_dmattn.ops.schema import Arguments, MaskTensors

pytestmark = NEEDS_CUDA

BATCH, SEQLEN, HEADS, KV_HEADS = 4, 200, 4, 2
TOO_LONG = 2**31 - 2**17 + 1


def rows(is_varlen=False):
    tensors = on_gpu(BATCH, SEQLEN, SEQLEN, HEADS, KV_HEADS, 64)
    return [x.flatten(0, 1) for x in tensors] if is_varlen else tensors


def offsets(sequences=BATCH):
    return torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * SEQLEN


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32, device="cuda")


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


# (batch elements, heads) of a mask: the message.
WRONG_SIZES = {
    (3, 1): "dimension 0 must be 1 or 4 or divide 4, got shape",
    (0, 1): "dimension 0 must be 1 or 4 or divide 4, got shape",
    (4, 3): "dimension 1 must be 1 or 2 or 4, got shape",
    (1, 8): "dimension 1 must be 1 or 2 or 4, got shape",
}
SIZES = pytest.mark.parametrize("sizes", WRONG_SIZES, ids=str)


@SIZES
@pytest.mark.parametrize("form", ["rows", "keys", "dispatched on the device"])
def test_compiled_calls_refuse_masks_of_other_batches_and_heads(form, sizes):
    seqlen_q, seqlen_k = (256, 2048) if form == "dispatched on the device" else (SEQLEN, SEQLEN)
    tensors = on_gpu(BATCH, seqlen_q, seqlen_k, HEADS, KV_HEADS, 64)
    mask = mask_of(*sizes, 1 if form == "keys" else seqlen_q, seqlen_k, visible=0.1)

    def layer(query, key, value, mask):
        return flash_dmattn_func(query, key, value, mask).cos()

    for function in (layer, compiled(layer)):
        with pytest.raises(ValueError, match=WRONG_SIZES[sizes]):
            function(*tensors, mask)


@SIZES
def test_compiled_calls_refuse_intervals_of_other_batches_and_heads(sizes):
    start = ints(*sizes, SEQLEN)

    def layer(query, key, value, start):
        return flash_dmattn_func(query, key, value, KeyIntervalMask(start, start + SEQLEN)).cos()

    for function in (layer, compiled(layer)):
        with pytest.raises(ValueError, match=WRONG_SIZES[sizes].replace(" or divide 4", "")):
            function(*rows(), start)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_packed_masks_that_do_not_fit_are_refused(direction):
    tensors = rows()
    bits, tiles = ops.pack_mask(mask_of(BATCH, HEADS, SEQLEN, SEQLEN), SEQLEN, SEQLEN, False, None, None)
    out, lse = ops.attention_forward(*Arguments(*tensors))
    wrong = {
        "mask must be .*, int32, got bool": ((bits > 0, tiles), TypeError),
        "mask_summaries must be .*, uint8, got int8": ((bits, tiles.to(torch.int8)), TypeError),
        "mask comes with mask_summaries": ((bits, None), ValueError),
        "mask must be on query's device": ((bits.cpu(), tiles), RuntimeError),
        "mask must be contiguous": ((bits.transpose(0, 1), tiles), ValueError),
        "mask_summaries must be contiguous": ((bits, tiles.transpose(1, 2)), ValueError),
        "mask must have 4 dimensions": ((bits[0], tiles), ValueError),
        "dimension 0 must be 1 or 4 or divide 4": ((bits[:3], tiles[:, :3].contiguous()), ValueError),
        "dimension 1 must be 1 or 2 or 4": ((bits[:, :3].contiguous(), tiles[:, :, :3].contiguous()), ValueError),
        "dimension 2 must be 1 or 200": ((bits[:, :, 1:].contiguous(), tiles), ValueError),
        "for these lengths": ((bits[..., :4].contiguous(), tiles), ValueError),
        "returned for these lengths": ((bits, tiles[..., :1].contiguous()), ValueError),
    }
    for message, ((mask, mask_summaries), error) in wrong.items():
        arguments = Arguments(*tensors, mask=mask, mask_summaries=mask_summaries)
        with pytest.raises(error, match=message):
            if direction == "forward":
                ops.attention_forward(*arguments)
            else:
                ops.attention_backward(out, None, out, lse, False, False, *arguments)


def test_packed_masks_of_other_sequences_are_refused():
    tensors, cu = rows(is_varlen=True), offsets()
    sequences = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": SEQLEN, "max_seqlen_k": SEQLEN}
    key_mask = ops.pack_mask(mask_of(BATCH * SEQLEN, HEADS), SEQLEN, SEQLEN, False, cu, cu)
    row_mask = ops.pack_mask(mask_of(BATCH * SEQLEN, HEADS, SEQLEN), SEQLEN, SEQLEN, False, cu, cu)
    for bits, tiles in (key_mask, row_mask):
        ops.attention_forward(*Arguments(*tensors, mask=bits, mask_summaries=tiles, **sequences))
        fewer = {"mask": bits[:3].contiguous(), "mask_summaries": tiles}
        with pytest.raises(ValueError, match="mask must be .*: dimension 0 must be (4|800), got shape"):
            ops.attention_forward(*Arguments(*tensors, **fewer, **sequences))
        fewer = {"mask": bits[:, :3].contiguous(), "mask_summaries": tiles[:, :, :3].contiguous()}
        with pytest.raises(ValueError, match="mask must be .*: dimension 1 must be 1 or 2 or 4, got shape"):
            ops.attention_forward(*Arguments(*tensors, **fewer, **sequences))


def test_compiled_calls_refuse_masks_and_biases_of_fewer_keys():
    tensors, cu = rows(is_varlen=True), offsets()
    bias = torch.zeros(BATCH * SEQLEN - 1, 1, device="cuda")
    cases = (
        (mask_of(BATCH * SEQLEN - 1, 1), None, {}),
        (None, bias, {}),
        (None, bias, {"window_size": 20, "is_causal": True}),
    )
    for mask, given, options in cases:

        def layer(*tensors, mask=mask, bias=given, options=options):
            return flash_dmattn_varlen_func(*tensors, mask, bias, cu, cu, SEQLEN, SEQLEN, **options)

        # Dynamo may wrap the error that a traced function raises.
        with pytest.raises(Exception, match="must have the 800 keys of all sequences, got shape"):
            compiled(layer)(*tensors)


def test_lists_of_fewer_sequences_are_refused():
    tensors, cu = rows(is_varlen=True), offsets()
    mask = KeyIntervalMask(ints(BATCH * SEQLEN, 1), ints(BATCH * SEQLEN, 1) + SEQLEN)
    built = KeyLists.build(mask, SEQLEN, SEQLEN, cu_seqlens_q=cu, cu_seqlens_k=cu)
    for batches in (1, 2):
        fewer = replace(built, kv_indptr=built.kv_indptr[:, :batches].contiguous())
        with pytest.raises(ValueError, match=f"kv_indptr must be of 4 sequences, got {batches}"):
            flash_dmattn_varlen_func(*tensors, fewer, None, cu, cu, SEQLEN, SEQLEN)


def test_lengths_of_more_than_31_bits_are_refused():
    query, key, value = on_gpu(1, 1, 1, 1, 1, 64)
    long_rows = query.expand(1, TOO_LONG, 1, 64)
    with pytest.raises(ValueError, match="the number of query rows must be from 0 to 2147352576, got 2147352577"):
        flash_dmattn_func(long_rows, key, value)
    with pytest.raises(ValueError, match="the number of keys must be from 0 to 2147352576, got 2147352577"):
        flash_dmattn_func(query, long_rows, long_rows)
    with pytest.raises(ValueError, match="seqlen_q must be from 0 to 2147352576, got 2147352577"):
        KeyLists.from_indices(ints(1, 1, 1, 1), TOO_LONG, 1, tile_rows=TOO_LONG)
    with pytest.raises(ValueError, match="seqlen_q must be from 0 to 2147352576, got 2147352577"):
        ops.topk_intervals(torch.zeros(1, 1, 8, device="cuda"), 4, TOO_LONG, None, None, None)


@pytest.mark.parametrize("height, width", [(1, 3_000_000), (1 << 23, 1)])
def test_grids_of_positions_that_the_kernels_cannot_divide_are_refused(height, width):
    tokens = height * width
    bias = torch.zeros(1, 1, 2 * height - 1, 2 * width - 1, device="cuda")
    message = f"h below 2\\^23 and h \\* w \\* w below 2\\^40 .* got a grid of {height} x {width}"
    with pytest.raises(ValueError, match=message):
        flash_dmattn_func(*on_gpu(1, tokens, tokens, 1, 1, 8), relative_bias=bias, grid=(height, width))


def test_offsets_of_intervals_are_checked():
    for offsets in (ints(0), ints(2, 3)):
        with pytest.raises(ValueError, match="cu_seqlens_q must (have|be)"):
            ops.topk_intervals(torch.zeros(8, 1, device="cuda"), 4, 8, offsets, offsets, None)


def test_a_packed_mask_with_lists_has_no_dense_bias():
    tensors, mask = on_gpu(1, 64, 128, 1, 1, 64), mask_of(1, 1, 64, 128)
    bits, tiles, *lists = ops.pack_and_list_mask(mask, 64, 128, False, 100)
    given = MaskTensors(bits, tiles, None, *lists)
    for dtype in (torch.bfloat16, torch.float32):
        bias = torch.zeros(1, 1, 64, 128, dtype=dtype, device="cuda")
        with pytest.raises(ValueError, match="without a dense attn_bias"):
            ops.attention_forward(*Arguments(*tensors, bias, **given._asdict()))


@pytest.mark.parametrize("kind", ["tiles", "lists"])
def test_masks_in_memory_that_is_not_aligned(kind):
    """Views of the operators' results may begin anywhere, as one element of a batch does."""
    tensors = rows()
    mask = mask_of(1, KV_HEADS, SEQLEN, SEQLEN, visible=0.1)
    if kind == "tiles":
        bits, tiles = ops.pack_mask(mask, SEQLEN, SEQLEN, False, None, None)
        given = MaskTensors(bits, tiles)
    else:
        built = KeyLists.build(mask, SEQLEN)
        given = MaskTensors(None, None, None, built.kv_indices, built.kv_indptr, built.kv_row_bits)

    def moved(tensor):
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        return memory[1:].view(tensor.shape).copy_(tensor)

    there = MaskTensors(*(None if x is None else moved(x) for x in given))
    for ours, expected in zip(
        *(ops.attention_forward(*Arguments(*tensors, **masks._asdict())) for masks in (there, given))
    ):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("tile_rows", [1, 64, 128])
def test_key_lists_of_any_content_read_nothing_else(tile_rows):
    """Keys of a caller that are negative, too large or not sorted: rows may see wrong keys, but none outside."""
    query, *others = on_gpu(1, SEQLEN, 500, HEADS, KV_HEADS, 64)
    key, value = (surrounded(x, margin=8) for x in others)  # NaN on all sides
    indices = torch.randint(500, (1, 1, -(-SEQLEN // tile_rows), 40), dtype=torch.int32, device="cuda")
    built = KeyLists.from_indices(indices, SEQLEN, 500, tile_rows=tile_rows)
    for keys in (built.kv_indices.flip(0), built.kv_indices - 3, built.kv_indices + 490, built.kv_indices * 10**6):
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        out = flash_dmattn_func(*leaves, replace(built, kv_indices=keys.contiguous()))
        assert not out.isnan().any()
        assert not any(x.isnan().any() for x in torch.autograd.grad(out.sum(), leaves))
