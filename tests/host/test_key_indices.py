"""Key lists from an indexer's selection, against the bool masks that they stand for."""

import pytest
import torch
from helpers import check, inputs, rand_intervals, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from indices import dense_of, rand_indices

from flash_dmattn import (
    KeyIntervalMask,
    KeyLists,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
)
from flash_dmattn.ops.list_sizes import has_row_bits

TILE_ROWS = (1, 3, 32, 64, 96, 128, 192, 256, 1000)


def in_layout(indices, layout):
    if layout == "transposed":
        return indices.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "gaps":
        return torch.stack([indices, torch.full_like(indices, 1 << 30)], dim=-1)[..., 0]
    return indices


def listed(lists, index):
    """The keys of a list, and bool (rows, keys): the rows that see them; all True where the rows share the list."""
    begin, end = lists.kv_indptr.flatten(1)[:, index].tolist()
    assert begin % 64 == 0 and end % 64 == 0
    keys = lists.kv_indices[begin:end]
    size = int((keys >= 0).sum())
    assert end - begin == -(-size // 64) * 64 and (keys[size:] == -1).all()
    if not has_row_bits(lists.mask.tile_rows):
        assert lists.kv_row_bits.shape[0] == 0
        return keys[:size], torch.ones(32 * lists.kv_row_bits.shape[1], size, dtype=torch.bool)
    assert lists.kv_row_bits.shape == (lists.kv_indices.shape[0], 4)
    words = lists.kv_row_bits[begin : begin + size]
    assert (lists.kv_row_bits[begin + size : end] == 0).all()
    return keys[:size], torch.stack([words[:, i // 32] >> (i % 32) & 1 for i in range(128)]).bool()


def check_lists(lists, dense):
    """`dense`: bool (batch, heads, Sq, Sk). Rows that share a list see what any of them sees."""
    list_rows = 32 * lists.kv_row_bits.shape[1]
    assert lists.kv_indptr.shape[1:] == (*dense.shape[:2], -(-dense.shape[2] // list_rows))
    assert list_rows == 64 if lists.mask.tile_rows % 128 == 64 else list_rows == 128
    if not has_row_bits(lists.mask.tile_rows):
        shared = [part.any(2, keepdim=True).expand_as(part) for part in dense.split(lists.mask.tile_rows, dim=2)]
        dense = torch.cat([*shared, dense[:, :, :0]], dim=2)
    for index in range(lists.batches * lists.heads * lists.num_m_blocks):
        tile = dense.flatten(0, 1)[index // lists.num_m_blocks]
        tile = tile[index % lists.num_m_blocks * list_rows :][:list_rows]
        keys, rows = listed(lists, index)
        assert keys.tolist() == tile.any(dim=0).nonzero().flatten().tolist()
        assert torch.equal(rows[: tile.shape[0]], tile[:, keys])
        assert not has_row_bits(lists.mask.tile_rows) or not rows[tile.shape[0] :].any()


@settings(deadline=None, max_examples=80)
@given(
    batch=st.integers(0, 2),
    heads=st.integers(1, 3),
    seqlen_q=st.sampled_from([0, 1, 5, 127, 128, 129, 300]),
    seqlen_k=st.sampled_from([0, 1, 3, 64, 65, 200]),
    count=st.sampled_from([0, 1, 7, 80]),
    tile_rows=st.sampled_from(TILE_ROWS),
    is_causal=st.booleans(),
    layout=st.sampled_from(["plain", "transposed", "gaps"]),
    mask_heads=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 10_000),
)
def test_lists_hold_the_keys_that_their_rows_see(
    batch, heads, seqlen_q, seqlen_k, count, tile_rows, is_causal, layout, mask_heads, seed
):
    torch.manual_seed(seed)
    indices = in_layout(rand_indices(batch, heads, -(-seqlen_q // tile_rows), count, keys=seqlen_k), layout)
    mask = rand_intervals(1, mask_heads, seqlen_k, rows=seqlen_q, longest=90) if mask_heads % heads == 0 else None
    mask = None if mask_heads == 0 else mask
    lists = KeyLists.from_indices(indices, seqlen_q, seqlen_k, is_causal, tile_rows=tile_rows, mask=mask)
    dense = dense_of(indices, tile_rows, seqlen_q, seqlen_k, mask, is_causal)
    check_lists(lists, dense)
    assert torch.equal(lists.to_dense(), dense)


# The attention


def test_all_keys_are_dense_attention():
    tensors = inputs(1, 300, 200)
    every_key = torch.randperm(200, dtype=torch.int32).expand(1, 1, 5, 200)
    lists = KeyLists.from_indices(every_key, 300, 200, tile_rows=64)
    expected = flash_dmattn_func(*tensors, is_causal=True)
    torch.testing.assert_close(flash_dmattn_func(*tensors, lists, is_causal=True), expected)


@pytest.mark.parametrize("tile_rows", [1, 64, 192])
def test_intervals_of_the_largest_and_least_numbers(tile_rows):
    low, high = -(2**31), 2**31 - 1
    start = torch.tensor([low, low, high, 0, 200, low, 5, high], dtype=torch.int32).repeat(16).view(1, 1, 128)
    end = torch.tensor([low, high, low, low, high, 200, 130, high], dtype=torch.int32).repeat(16).view(1, 1, 128)
    indices = rand_indices(1, 1, -(-300 // tile_rows), 60, keys=128)
    lists = KeyLists.from_indices(indices, 300, 128, tile_rows=tile_rows, mask=KeyIntervalMask(start, end))
    dense = dense_of(indices, tile_rows, 300, 128, KeyIntervalMask(start, end))
    check_lists(lists, dense)
    check(inputs(1, 300, 128), lists, dense=dense)


def test_other_backends_take_the_dense_form():
    tensors = inputs(1, 130, 90)
    indices = rand_indices(1, 1, 130, 9, keys=90)
    lists = KeyLists.from_indices(indices, 130, 90, mask=KeyIntervalMask.sliding_window(130, 90, 30))
    expected, lse, probs = flash_dmattn_func(*tensors, lists, is_causal=True, return_attn_probs=True)
    dense = dense_of(indices, 1, 130, 90, KeyIntervalMask.sliding_window(130, 90, 30), True)
    assert torch.equal(probs != 0, dense.expand_as(probs))
    torch.testing.assert_close(flash_dmattn_func_auto("reference")(*tensors, lists, is_causal=True), expected)


def test_a_cache_that_is_filled_in_part():
    tensors = inputs(2, 1, 500, 4, 2)
    indices = rand_indices(2, 2, 1, 40, keys=500)
    lists, cache = KeyLists.from_indices(indices, 1, 500), torch.tensor([300, 77], dtype=torch.int32)
    ours = flash_dmattn_func(*tensors, lists, cache_seqlens=cache)
    dense = dense_of(indices, 1, 1, 500) & (torch.arange(500) < cache[:, None, None, None])
    torch.testing.assert_close(ours, reference(*tensors, dense))


# Variable length

ROWS, KEYS = [3, 0, 129, 1, 300], [5, 4, 65, 0, 200]


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("tile_rows, packed", [(1, True), (1, False), (50, False), (64, False), (128, False)])
def test_variable_length(tile_rows, packed, masked, is_causal):
    cu_q, cu_k = offsets(ROWS), offsets(KEYS)
    query, key, value = tensors = [
        torch.randn(n, h, 16, requires_grad=True) for n, h in ((sum(ROWS), 4), (sum(KEYS), 2), (sum(KEYS), 2))
    ]
    longest = -(-512 // tile_rows)  # above every sequence
    indices = torch.full((5, 2, longest, 12), -5, dtype=torch.int32)  # what lies beyond the rows may be anything
    for b, (rows, keys) in enumerate(zip(ROWS, KEYS)):
        used = -(-rows // tile_rows)
        indices[b, :, :used] = rand_indices(2, used, 12, keys=keys)
    given = torch.cat([indices[b, :, :n] for b, n in enumerate(ROWS)], 1).transpose(0, 1) if packed else indices
    mask = rand_intervals(sum(KEYS), 2, rows=300) if masked else None
    lists = KeyLists.from_indices(given, 512, 300, is_causal, cu_q, cu_k, tile_rows=tile_rows, mask=mask)
    out, lse, probs = flash_dmattn_varlen_func(
        *tensors, lists, None, cu_q, cu_k, 512, 300, is_causal=is_causal, return_attn_probs=True
    )
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, tensors, dout)
    for b, (rows, keys) in enumerate(zip(ROWS, KEYS)):
        q, k = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        own = None if mask is None else mask.sequence(k.start, k.stop)
        dense = dense_of(indices[b : b + 1], tile_rows, rows, keys, own, is_causal)
        alone = [x[s][None].detach().requires_grad_() for x, s in zip(tensors, (q, k, k))]
        expected, *others = reference(*alone, dense, is_causal=is_causal, return_attn_probs=True)
        torch.testing.assert_close(out[None, q], expected)
        torch.testing.assert_close((lse[None, :, q], probs[b : b + 1, :, :rows, :keys]), tuple(others))
        for x, y, s in zip(gradients, torch.autograd.grad(expected, alone, dout[None, q]), (q, k, k)):
            torch.testing.assert_close(x[None, s], y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("longest", [1, 5])
def test_steps_of_decoding_of_variable_length(longest):
    """One row per sequence, each with indices of its own, for any max_seqlen_q."""
    lengths, cu_q, cu_k = [70, 3, 130], torch.arange(4, dtype=torch.int32), offsets([70, 3, 130])
    query, key, value = torch.randn(3, 4, 8), torch.randn(203, 2, 8), torch.randn(203, 2, 8)
    indices = torch.cat([rand_indices(1, 2, 20, keys=keys) for keys in lengths])
    lists = KeyLists.from_indices(indices, longest, 130, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out = flash_dmattn_varlen_func(query, key, value, lists, None, cu_q, cu_k, longest, 130)
    for b, keys in enumerate(lengths):
        k = slice(*cu_k[b : b + 2].tolist())
        dense = dense_of(indices[b : b + 1, :, None], 1, 1, keys)
        torch.testing.assert_close(
            out[None, b : b + 1], reference(query[None, b : b + 1], key[None, k], value[None, k], dense)
        )


# Cost


def test_memory_does_not_grow_with_rows_times_keys():
    """131072 rows and keys: a bool for each pair would take 16 GiB."""
    length = 131072
    query, key, value = tensors = [torch.randn(1, length, 1, 8, requires_grad=True) for _ in range(3)]
    indices = rand_indices(1, 1, length // 128, 4, keys=length)
    lists = KeyLists.from_indices(indices, length, length, tile_rows=128)
    assert lists.kv_indices.shape[0] == length // 128 * 64 and lists.kv_row_bits.numel() == 0
    gradients = torch.autograd.grad(flash_dmattn_func(*tensors, lists).sum(), tensors)
    some = slice(128 * 700, 128 * 701)
    named = indices[0, 0, 700]
    named = named[named >= 0].unique().long()
    alone = reference(query[:, some], key[:, named], value[:, named])
    torch.testing.assert_close(flash_dmattn_func(*tensors, lists)[:, some], alone)
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize(
    "tile_rows, list_rows, lists, room", [(1, 128, 8, 640), (100, 128, 8, 64), (64, 64, 16, 64), (512, 128, 2, 64)]
)
def test_number_and_capacity_of_lists(tile_rows, list_rows, lists, room):
    made = KeyLists.from_indices(
        rand_indices(1, 1, -(-1000 // tile_rows), 5, keys=2000), 1000, 2000, tile_rows=tile_rows
    )
    assert made.kv_indices.shape[0] == lists * room and made.kv_indptr.shape[-1] == -(-1000 // list_rows)
    assert made.to("meta").mask.indices.device.type == "meta" and "seqlen_k=2000" in repr(made)


# Graphs


@pytest.mark.parametrize("tile_rows", [1, 64])
def test_compiled_with_the_indexer(tile_rows):
    def layer(query, key, value, scores):
        indices = scores.topk(20, dim=-1).indices.int()
        lists = KeyLists.from_indices(indices, query.shape[1], key.shape[1], is_causal=True, tile_rows=tile_rows)
        return flash_dmattn_func(query, key, value, lists, is_causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (300, 500, 700):
        leaves = [x.requires_grad_() for x in inputs(2, seqlen, seqlen, 4, 2)]
        scores = torch.randn(2, 1, -(-seqlen // tile_rows), seqlen)
        expected, ours = layer(*leaves, scores), compiled(*leaves, scores)
        torch.testing.assert_close(ours, expected)
        gradients = (torch.autograd.grad(out.sin().sum(), leaves) for out in (ours, expected))
        for x, y in zip(*gradients):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("tile_rows", [7, 2**31 - 1, 2**40])
def test_all_rows_share_their_indices(tile_rows):
    indices, seqlen_q, seqlen_k = rand_indices(2, 1, 1, 3, keys=7), 5, 7
    lists = KeyLists.from_indices(indices, seqlen_q, seqlen_k, tile_rows=tile_rows)
    assert torch.equal(lists.as_bool(seqlen_q), dense_of(indices, 5, seqlen_q, seqlen_k))
    tensors = inputs(2, seqlen_q, seqlen_k, 4, 2, 8)
    torch.testing.assert_close(
        flash_dmattn_func(*tensors, attn_mask=lists),
        flash_dmattn_func(*tensors, attn_mask=dense_of(indices, 5, seqlen_q, seqlen_k)),
    )


# Errors

INDICES = torch.zeros(1, 1, 5, 3, dtype=torch.int32)
Q, K, V = inputs(2, 5, 7, 4, 2, 8)
CU = torch.tensor([0, 5], dtype=torch.int32)


def made(indices=INDICES, seqlen_q=5, seqlen_k=7, *args, **options):
    return KeyLists.from_indices(indices, seqlen_q, seqlen_k, *args, **options)


ERRORS = {
    "an index beyond the keys": (
        lambda: made(torch.full_like(INDICES, 7)),
        ValueError,
        "indices must be from 0 to 6, or -1 for none, got 7",
    ),
    "a negative index": (
        lambda: made(torch.full_like(INDICES, -2)),
        ValueError,
        "indices must be from 0 to 6, or -1 for none, got -2",
    ),
    "an index beyond its sequence": (
        lambda: made(torch.full((5, 1, 1), 4, dtype=torch.int32), 5, 7, False, offsets([2, 3]), offsets([7, 4])),
        ValueError,
        "indices must be from 0 to 3, or -1 for none, got 4",
    ),
    "64-bit indices": (lambda: made(INDICES.long()), TypeError, "indices must be int32, got int64"),
    "a list of indices": (
        lambda: made([[0]]),
        TypeError,
        "indices must be a torch.Tensor, got list: pass torch.as_tensor",
    ),
    "NumPy's indices": (
        lambda: made(INDICES.numpy()),
        TypeError,
        r"indices must be a torch.Tensor, got ndarray: pass torch.as_tensor\(indices, dtype=torch.int32\)",
    ),
    "indices of three dimensions": (
        lambda: made(INDICES[0]),
        ValueError,
        r"indices must be \({B\|B/n\|1}, {H\|Hkv\|1}, rows, k\), got shape \(1, 5, 3\)",
    ),
    "indices of two dimensions, of variable length": (
        lambda: made(INDICES[0, 0], 5, 5, False, CU, CU),
        ValueError,
        r"indices must be \({B\|1}, {H\|Hkv\|1}, rows, k\) or \(total_q, {H\|Hkv\|1}, k\), got shape \(5, 3\)",
    ),
    "indices for other rows": (
        lambda: made(tile_rows=2),
        ValueError,
        r"indices must have 3 rows for 5 query rows, 2 of which share one, got shape \(1, 1, 5, 3\)",
    ),
    "too few rows, of variable length": (
        lambda: made(INDICES[:, :, :3], 5, 5, False, CU, CU),
        ValueError,
        "indices must have at least 5 rows for 5 query rows",
    ),
    "tiles of packed rows": (
        lambda: made(INDICES[0, 0][:, None], 5, 5, False, CU, CU, tile_rows=2),
        ValueError,
        r"tile_rows must be 1 for indices \(total_q, {H\|Hkv\|1}, k\), got 2",
    ),
    "tiles of more rows than query": (
        lambda: made(tile_rows=2**31 - 1),
        ValueError,
        "indices must have 1 rows for 5 query rows, 2147483647 of which share one",
    ),
    "tiles of no rows": (lambda: made(tile_rows=0), ValueError, "tile_rows must be positive and fit in 32 bits, got 0"),
    "tiles of a negative number of rows": (lambda: made(tile_rows=-1), ValueError, "tile_rows must not be negative"),
    "tiles of a float number of rows": (lambda: made(tile_rows=1.0), TypeError, "tile_rows must be an int, got float"),
    "a float number of keys": (lambda: made(INDICES, 5, 7.0), TypeError, "seqlen_k must be an int, got float"),
    "a negative number of rows": (lambda: made(INDICES, -5), ValueError, "seqlen_q must not be negative, got -5"),
    "causality in words": (lambda: made(INDICES, 5, 7, "yes"), TypeError, "is_causal must be a bool, got str"),
    "half of the sequences": (
        lambda: made(INDICES, 5, 7, False, CU),
        ValueError,
        "cu_seqlens_q requires cu_seqlens_k, got cu_seqlens_q alone",
    ),
    "sequences that end behind the rows": (
        lambda: made(INDICES[0, 0][:, None], 50, 50, False, CU * 2, CU),
        ValueError,
        r"cu_seqlens_q must be non-decreasing from 0 to 5, the rows of indices, got cu_seqlens_q\[-1\] = 10$",
    ),
    "a sequence that is too long": (
        lambda: made(INDICES, 5, 3, False, CU, CU),
        ValueError,
        "seqlen_k must be at least the longest sequence 5, got 3",
    ),
    "a bool mask": (
        lambda: made(mask=torch.ones(1, 1, 5, 7, dtype=torch.bool)),
        TypeError,
        "mask must be a KeyIntervalMask, got a bool tensor: set the indices of masked keys to -1",
    ),
    "a mask of other keys": (
        lambda: made(mask=KeyIntervalMask.padding(torch.tensor([3]), 8)),
        ValueError,
        r"mask must be \({B\|1}, {H\|Hkv\|1}, 7\), got shape \(1, 1, 8\)",
    ),
    "a mask of other rows": (
        lambda: made(mask=KeyIntervalMask.causal(6, 7)),
        ValueError,
        "mask was made for 6 query rows, got 5",
    ),
    "a mask of variable length": (
        lambda: made(mask=KeyIntervalMask(CU[:, None], CU[:, None])),
        ValueError,
        r"mask must be a KeyIntervalMask of fixed length .*, got one of variable length \(2, 1\)",
    ),
    "a mask of other heads": (
        lambda: made(INDICES.expand(1, 2, 5, 3), mask=rand_intervals(1, 3, 7, rows=5)),
        ValueError,
        r"mask must have a head count that divides or is a multiple of that of indices \(2\), got shape \(1, 3, 7\)",
    ),
    "a mask of other batch elements": (
        lambda: made(INDICES.expand(2, 1, 5, 3), mask=rand_intervals(4, 1, 7, rows=5)),
        ValueError,
        r"mask must have the batch size of indices \(2\) or 1, and a head count .* \(1\), got shape \(4, 1, 7\)",
    ),
    "a mask on another device": (
        lambda: made(mask=rand_intervals(1, 1, 7, rows=5).to("meta")),
        RuntimeError,
        "mask must be on indices's device cpu, got meta",
    ),
    "lists of other heads": (
        lambda: flash_dmattn_func(Q, K, V, made(INDICES.expand(1, 3, 5, 3))),
        ValueError,
        "attn_mask must hold lists of 2 batch elements, .* and of 4, 2 or 1 heads, got 1 and 3",
    ),
    "lists of other batch elements": (
        lambda: flash_dmattn_func(Q, K, V, made(INDICES.expand(3, 1, 5, 3))),
        ValueError,
        "attn_mask must hold lists of 2 batch elements, .* and of 4, 2 or 1 heads, got 3 and 1",
    ),
    "lists of other rows": (
        lambda: flash_dmattn_func(Q[:, 1:], K, V, made()),
        ValueError,
        "attn_mask holds lists for 5 rows and 7 keys, got 4 rows and 7 keys",
    ),
    "causal lists": (
        lambda: flash_dmattn_func(Q, K, V, made(INDICES, 5, 7, True)),
        ValueError,
        "built with is_causal=True, got a call with is_causal=False",
    ),
    "tiles": (
        lambda: flash_dmattn_func(Q, K, V, made(), sparse="tiles"),
        ValueError,
        "sparse='tiles' needs a mask, got attn_mask of KeyLists that were made from indices",
    ),
    "lists of variable length": (
        lambda: flash_dmattn_func(Q, K, V, made(INDICES, 5, 5, False, CU, CU)),
        ValueError,
        "attn_mask holds lists of variable length, got inputs of fixed length",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    function, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        function()


def test_indices_that_causality_masks_are_no_error():
    """torch.topk returns such indices where fewer than k keys are visible."""
    scores = torch.randn(1, 1, 100, 100).masked_fill_(~torch.ones(100, 100, dtype=torch.bool).tril(), -torch.inf)
    indices = scores.topk(10, dim=-1).indices.int()
    tensors = inputs(1, 100, 100)
    lists = KeyLists.from_indices(indices, 100, 100, True)
    check(tensors, lists, dense=dense_of(indices, 1, 100, 100), is_causal=True)
    visible = dense_of(indices, 1, 100, 100, is_causal=True)
    assert torch.equal(visible.sum(-1)[0, 0], torch.arange(1, 101).clamp(max=10))


# Training


class Layer(torch.nn.Module):
    """Attention over the keys that an indexer selects; the indexer learns from the attention probabilities."""

    def __init__(self, tokens: int, labels: int, dim: int, chosen: int, tile_rows: int):
        super().__init__()
        self.chosen, self.tile_rows = chosen, tile_rows
        self.token, self.label = torch.nn.Embedding(tokens, dim), torch.nn.Embedding(labels + 1, dim)
        self.query, self.key, self.value, self.index_query, self.index_key = (
            torch.nn.Linear(dim, dim, bias=False) for _ in range(5)
        )
        self.head = torch.nn.Linear(dim, labels)

    def forward(self, tokens, labels):
        """The logits of each row, and the KL divergence of the indexer's scores from the probabilities."""
        seqlen, x = tokens.shape[1], self.token(tokens)
        scores = self.index_query(x) @ self.index_key(x).mT / x.shape[-1] ** 0.5
        allowed = torch.ones(seqlen, seqlen, dtype=torch.bool).tril(-1)
        scores = scores.masked_fill(~allowed, -torch.inf)
        by_tile = torch.stack([tile.amax(1) for tile in scores.split(self.tile_rows, dim=1)], 1)
        indices = by_tile.topk(self.chosen, dim=-1).indices.int()[:, None]
        lists = KeyLists.from_indices(indices, seqlen, seqlen, is_causal=True, tile_rows=self.tile_rows)
        rows = [
            linear(y)[:, :, None] for linear, y in zip((self.query, self.key, self.value), (x, x, self.label(labels)))
        ]
        out, _, probs = flash_dmattn_func(*rows, lists, is_causal=True, return_attn_probs=True)
        seen = probs[:, 0] > 0
        log_index = scores.masked_fill(~(seen & allowed), -1e9).log_softmax(-1)
        kl = -(probs[:, 0] * log_index.masked_fill(~(seen & allowed), 0)).sum(-1).mean()
        return self.head(out[:, :, 0]), kl


@pytest.mark.parametrize("tile_rows, chosen", [(1, 8), (4, 12)])
def test_a_model_learns_with_its_indexer(tile_rows, chosen):
    """Tokens come with random labels, then again without: the indexer must find the first occurrence."""
    torch.manual_seed(0)
    tokens_of, labels_of, batch = 16, 4, 32
    model = Layer(tokens_of, labels_of, 32, chosen, tile_rows)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    share = 0.0
    for step in range(300):
        first, again = (torch.rand(batch, tokens_of).argsort(-1) for _ in range(2))
        labels = torch.randint(0, labels_of, (batch, tokens_of))
        unknown = torch.full_like(labels, labels_of)
        logits, kl = model(torch.cat([first, again], 1), torch.cat([labels, unknown], 1))
        wanted = labels.gather(1, first.argsort(-1).gather(1, again))
        loss = torch.nn.functional.cross_entropy(logits[:, tokens_of:].flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        (loss + kl).backward()
        optimizer.step()
        right = (logits[:, tokens_of:].argmax(-1) == wanted).float().mean().item()
        share = right if step == 0 else 0.9 * share + 0.1 * right
        if step == 0:
            assert right < 0.5
    assert share > 0.95, share


def test_gradcheck():
    indices = rand_indices(2, 2, 5, 3, keys=7)
    leaves = [x.requires_grad_() for x in inputs(2, 5, 7, 4, 2, 8, torch.float64)]
    lists = KeyLists.from_indices(indices, 5, 7)
    assert torch.autograd.gradcheck(lambda *x: flash_dmattn_func(*x, lists), leaves)
