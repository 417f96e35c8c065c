"""Key lists against dense masks, and the masks for which they are selected."""

from dataclasses import replace

import pytest
import torch
from helpers import inputs, rand_intervals, rand_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from lists import check_lists

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func, ops
from flash_dmattn.masks import Problem, as_mask, choice
from flash_dmattn.masks import lists as lists_module
from flash_dmattn.ops.list_sizes import walked_keys


def dense_of(mask, seqlen_q, seqlen_k, is_causal):
    """bool ({B|1}, {H|Hkv|1}, Sq, Sk)"""
    dense = mask.to_dense(seqlen_q) if isinstance(mask, KeyIntervalMask) else mask
    dense = dense.expand(-1, -1, seqlen_q, seqlen_k)
    return dense.tril(seqlen_k - seqlen_q) if is_causal else dense


def in_layout(tensor, layout):
    if layout == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "gaps":
        return torch.stack([tensor, ~tensor if tensor.dtype == torch.bool else -tensor], dim=-1)[..., 0]
    return tensor


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["intervals", "bool", "bool without keys"]),
    batch=st.integers(0, 2),
    heads=st.integers(1, 3),
    seqlen_q=st.sampled_from([0, 1, 5, 127, 128, 129, 300]),
    seqlen_k=st.sampled_from([0, 1, 3, 64, 65, 200]),
    is_causal=st.booleans(),
    layout=st.sampled_from(["plain", "transposed", "gaps"]),
    visible=st.sampled_from([0.0, 0.004, 0.1, 1.0]),
    seed=st.integers(0, 10_000),
)
def test_lists_hold_the_keys_that_their_rows_see(
    kind, batch, heads, seqlen_q, seqlen_k, is_causal, layout, visible, seed
):
    torch.manual_seed(seed)
    if kind == "intervals":
        mask = rand_intervals(batch, heads, seqlen_k, rows=seqlen_q, longest=40)
        mask = KeyIntervalMask(*(in_layout(x, layout) for x in (mask.start, mask.end)))
    else:
        shape = (batch, heads, max(seqlen_q, 2), 1 if kind == "bool without keys" else seqlen_k)
        mask = in_layout(rand_mask(*shape, visible=visible), layout)[:, :, :seqlen_q]
    if seqlen_q == 1 and kind != "intervals":
        is_causal = False  # one row is a key mask, whose lists leave causality to the kernels
    lists = KeyLists.build(mask, seqlen_q, seqlen_k, is_causal)
    check_lists(lists, dense_of(mask, seqlen_q, seqlen_k, is_causal))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_a_key_mask_has_one_list_for_all_rows(is_causal):
    mask = rand_mask(2, 3, 1, 200, visible=0.3)
    lists = KeyLists.build(mask, 300, is_causal=is_causal)
    assert lists.row_broadcast and lists.kv_row_bits is None and lists.num_m_blocks == 1
    check_lists(lists, mask)
    everything = KeyLists.build(torch.ones(1, 1, 1, 1, dtype=torch.bool), 300, 200)
    check_lists(everything, torch.ones(1, 1, 1, 200, dtype=torch.bool))


def test_a_bound_spares_reading_the_lengths():
    bias = torch.randn(2, 3, 1, 500)
    mask = KeyIntervalMask.topk(bias, 20)
    lists = KeyLists.build(mask, 500)
    # 128 rows see at most 20 + 127 keys, padded to 192.
    assert lists.kv_indices.shape[0] == 2 * 3 * 4 * 192
    check_lists(lists, mask.to_dense(500))
    without = KeyLists.build(KeyIntervalMask(mask.start, mask.end), 500)
    assert without.kv_indices.shape[0] == without.lengths().sum() < lists.kv_indices.shape[0]
    assert torch.equal(without.lengths(), lists.lengths())


def test_a_bound_that_is_wrong_is_refused():
    mask = KeyIntervalMask.causal(500, 500)
    mask = KeyIntervalMask(mask.start, mask.end, keys_per_row=1)
    message = "keys_per_row of the mask must bound .* room for 512 keys in all lists together, which hold 1280"
    with pytest.raises(ValueError, match=message):
        KeyLists.build(mask, 500)
    tensors = inputs(1, 500, 500)
    with pytest.raises(ValueError, match=message):
        flash_dmattn_func(*tensors, mask, sparse="lists")
    torch.testing.assert_close(flash_dmattn_func(*tensors, mask), flash_dmattn_func(*tensors, is_causal=True))


def test_a_bound_beyond_64_bits():
    tensors, bias = inputs(2, 20, 40), torch.randn(2, 2, 1, 40)
    expected = flash_dmattn_func(*tensors, None, bias, is_causal=True)
    for window_size in (2**63 - 1, 2**63):
        for sparse in ("auto", "tiles", "lists"):
            options = {"is_causal": True, "window_size": window_size, "sparse": sparse}
            torch.testing.assert_close(flash_dmattn_func(*tensors, None, bias, **options), expected)


def test_ascending_sorts_each_list():
    both = KeyLists.build(KeyIntervalMask.topk(torch.randn(2, 2, 400), 60), 400, is_causal=True)
    for lists in (both, both[0], both[1]):
        spans = lists.kv_indptr.flatten(1).T.tolist()
        mixed = torch.randint(400, both.kv_indices.shape, dtype=torch.int32)  # between lists anything
        for begin, end in spans:
            keys = lists.kv_indices[begin:end]
            count = int((keys >= 0).sum())
            mixed[begin:end] = torch.cat([keys[:count][torch.randperm(count)], keys[count:]])
        ordered = lists_module.ascending(replace(lists, kv_indices=mixed))
        assert all(torch.equal(ordered[slice(*span)], lists.kv_indices[slice(*span)]) for span in spans)
        listed = torch.zeros_like(mixed, dtype=torch.bool)
        for span in spans:
            listed[slice(*span)] = True
        assert (ordered[~listed] == -1).all()
        assert torch.equal(replace(lists, kv_indices=mixed).to("cpu").kv_indices, ordered)
    none = KeyLists.build(KeyIntervalMask.causal(0, 5), 0)
    assert torch.equal(lists_module.ascending(none), none.kv_indices)


def test_repr_lengths_density_and_dense_form():
    mask = KeyIntervalMask.sliding_window(300, 300, 10)
    lists = KeyLists.build(mask, 300, is_causal=True)
    assert "1 x 1 x 3 lists" in repr(lists) and "causal" in repr(lists) and "seqlen_q=300" in repr(lists)
    assert lists.lengths().tolist() == [[[128, 192, 64]]]
    assert lists.density() == pytest.approx(128 / 300)
    assert torch.equal(lists.to_dense(), mask.to_dense(300))
    assert lists.to("meta").kv_indices.device.type == "meta" and lists.to("meta").mask.start.device.type == "meta"
    bool_lists = KeyLists.build(mask.to_dense(300), 300)
    assert torch.equal(bool_lists.to_dense(), mask.to_dense(300)) and bool_lists.kv_row_bits.shape[1] == 4
    every_key = KeyLists.build(torch.ones(1, 1, 1, 300, dtype=torch.bool), 200, is_causal=True)
    assert torch.equal(every_key.to_dense()[0, 0], torch.ones(200, 300, dtype=torch.bool).tril(100))


def mask_with_dense_rows(begin, end):
    mask = torch.zeros(1, 1, 1024, 1024, dtype=torch.bool)
    mask[:, :, begin:end] = True
    return mask


CHOICES = {
    "a short window": (lambda: KeyIntervalMask.sliding_window(1024, 1024, 64), False, True),
    "short lists without a bound": (lambda: KeyIntervalMask.documents(ids=torch.arange(1024) // 99), False, True),
    "top-k of half the keys": (lambda: KeyIntervalMask.topk(torch.randn(1, 1, 1, 1024), 512), True, False),
    "causal": (lambda: KeyIntervalMask.causal(1024, 1024), True, False),
    "a sparse bool mask": (lambda: rand_mask(1, 1, 1024, 1024, visible=0.002), False, True),
    "a dense bool mask": (lambda: rand_mask(1, 1, 1024, 1024, visible=0.1), False, False),
    "a bool mask that is dense in the middle alone": (lambda: mask_with_dense_rows(400, 600), False, False),
    "a bool mask that is dense but in the middle": (lambda: ~mask_with_dense_rows(300, 700), False, True),
    "a sparse key mask": (lambda: rand_mask(1, 1, 1, 1024, visible=0.5), True, True),
    "a dense key mask": (lambda: rand_mask(1, 1, 1, 1024, visible=0.99), True, False),
    "nothing visible": (lambda: torch.zeros(1, 1, 1, 1024, dtype=torch.bool), True, False),
    "few keys": (lambda: rand_mask(1, 1, 1, 256, visible=0.1), False, False),
}


@pytest.mark.parametrize("case", CHOICES)
def test_masks_that_use_lists_on_the_cpu(case):
    make, is_causal, by_lists = CHOICES[case]
    mask = as_mask(make())
    keys = mask.shape[-1]

    def choose(mask, sparse):
        return choice.choose(mask, sparse, False, Problem(keys, keys, is_causal))

    chosen = choose(mask, "auto")
    assert isinstance(chosen, KeyLists) == by_lists and (by_lists or chosen is mask)
    assert choose(mask, "tiles") is mask
    lists = choose(mask, "lists")
    assert isinstance(lists, KeyLists)
    assert choose(lists, "auto") is lists
    assert all(a is b for a, b in zip(choose(lists, "tiles").operands(), mask.operands()))


def test_a_bound_decides_without_reading_lengths():
    short, long = (KeyIntervalMask.topk(torch.randn(1, 1, 1, 4096), w) for w in (512, 2200))
    assert choice.estimate_short(short, Problem(4096, 4096, True))
    assert not choice.estimate_short(long, Problem(4096, 4096, True))
    assert choice.estimate_short(long, Problem(4096, 4096, False))
    assert choice.estimate_short(long, Problem(1, 4096, True))
    assert not choice.estimate_short(KeyIntervalMask(short.start, short.end), Problem(4096, 4096, True))


def test_lists_are_selected_on_a_gpu_for_unstructured_masks(monkeypatch):
    monkeypatch.setattr(choice, "build_lists", lambda *args: "lists")

    def choose(mask, needs_gradients):
        keys = mask.shape[-1]
        return choice.choose(mask.to("meta"), "auto", needs_gradients, Problem(keys, keys, True))

    topk, window = KeyIntervalMask.topk(torch.randn(1, 1, 400), 300), KeyIntervalMask.sliding_window(400, 400, 30)
    assert choose(topk, False) == choose(topk & window, False) == choose(topk, True) == "lists"
    without_bound = KeyIntervalMask(topk.start, topk.end, unstructured=True)
    assert choose(window, True) != "lists" and choose(without_bound, True) != "lists"
    few = KeyIntervalMask.topk(torch.randn(1, 1, 100), 30)
    assert choose(few, True) == "lists" and choose(few, False) != "lists"


@pytest.mark.parametrize("rows, keys", [(1, 1), (300, 300), (200, 700), (700, 200), (1, 50)])
def test_walked_keys(rows, keys):
    height = min(rows, 128)
    assert walked_keys(rows, keys, False) == rows * keys / height
    pairs = torch.ones(rows, keys).tril(keys - rows).sum().item()
    assert walked_keys(rows, keys, True) == pairs / height


def lists_of(*shape, rows=5, is_causal=False):
    return KeyLists.build(torch.ones(shape, dtype=torch.bool), rows, 7, is_causal)


Q, K, V = inputs(2, 5, 7, 4, 2, 8)
CU = torch.tensor([0, 5], dtype=torch.int32)
ERRORS = {
    "lists for other rows": (
        lambda: flash_dmattn_func(Q, K, V, lists_of(1, 1, 6, 7, rows=6)),
        ValueError,
        "attn_mask holds lists for 6 rows and 7 keys, got 5 rows and 7 keys",
    ),
    "lists for other keys": (
        lambda: flash_dmattn_func(Q, K[:, 1:], V[:, 1:], lists_of(1, 1, 1, 7)),
        ValueError,
        "attn_mask holds lists for 5 rows and 7 keys, got 5 rows and 6 keys",
    ),
    "causal lists": (
        lambda: flash_dmattn_func(Q, K, V, lists_of(1, 1, 5, 7, is_causal=True)),
        ValueError,
        "built with is_causal=True, got a call with is_causal=False",
    ),
    "lists of other heads": (
        lambda: flash_dmattn_func(Q, K, V, lists_of(1, 3, 5, 7)),
        ValueError,
        r"attn_mask must be .*: dimension 1 must be 1 or 2 or 4, got shape \(1, 3, 5, 7\)",
    ),
    "lists of variable length": (
        lambda: flash_dmattn_func(Q, K, V, KeyLists.build(rand_mask(5, 1), 5, 5, False, CU, CU)),
        ValueError,
        "attn_mask holds lists of variable length, got inputs of fixed length",
    ),
    "lists on another device": (
        lambda: flash_dmattn_func(Q, K, V, lists_of(1, 1, 5, 7).to("meta")),
        RuntimeError,
        "attn_mask must be on query's device cpu, got meta",
    ),
    "intervals for other keys": (
        lambda: flash_dmattn_func(Q, K, V, KeyIntervalMask.causal(5, 6)),
        ValueError,
        r"attn_mask.start must be \({B\|1}, {H\|Hkv\|1}, Sk\): dimension 2 must be 7, got shape \(1, 1, 6\)",
    ),
    "intervals of variable length": (
        lambda: flash_dmattn_func(Q, K, V, KeyIntervalMask(CU[:, None], CU[:, None])),
        ValueError,
        r"attn_mask must be a KeyIntervalMask of fixed length \({B\|1}, {H\|Hkv\|1}, Sk\), got one of variable length "
        r"\(2, 1\): sequence\(first, last\) of it is the mask of one sequence$",
    ),
    "an integer as a mask": (
        lambda: flash_dmattn_func(Q, K, V, 3),
        TypeError,
        "attn_mask must be a bool torch.Tensor, a KeyIntervalMask or KeyLists, got int",
    ),
    "an unknown path": (
        lambda: flash_dmattn_func(Q, K, V, sparse="dense"),
        ValueError,
        "sparse must be one of auto, tiles, lists, got 'dense'",
    ),
    "lists without a mask": (
        lambda: flash_dmattn_func(Q, K, V, sparse="lists"),
        ValueError,
        "sparse='lists' needs attn_mask or window_size, got none",
    ),
    "lists without a mask, of variable length": (
        lambda: flash_dmattn_varlen_func(Q[0], Q[0], Q[0], None, None, CU, CU, 5, 5, sparse="lists"),
        ValueError,
        "sparse='lists' needs attn_mask or window_size, got none",
    ),
    "a window with a mask": (
        lambda: flash_dmattn_func(Q, K, V, rand_mask(1, 1, 1, 7), torch.zeros(1, 1, 1, 7), window_size=2),
        ValueError,
        "window_size makes a mask of its own, got attn_mask too",
    ),
    "a window that is not causal": (
        lambda: flash_dmattn_func(Q, K, V, None, torch.zeros(1, 1, 1, 7), window_size=2),
        ValueError,
        "window_size selects among the keys up to a row: it needs is_causal=True, got False",
    ),
    "a window without a bias": (
        lambda: flash_dmattn_func(Q, K, V, is_causal=True, window_size=2),
        ValueError,
        "window_size needs attn_bias of one number per key, .*, got none",
    ),
    "a window with a dense bias": (
        lambda: flash_dmattn_func(Q, K, V, None, torch.zeros(1, 1, 5, 7), is_causal=True, window_size=2),
        ValueError,
        r"window_size needs attn_bias of one number per key, \({2\|1}, {4\|2\|1}, 1, 7\), got shape \(1, 1, 5, 7\)",
    ),
    "lists of a float mask": (
        lambda: KeyLists.build(torch.zeros(1, 1, 5, 7), 5),
        TypeError,
        "mask must be a bool tensor or a KeyIntervalMask, got float32",
    ),
    "lists of a mask of 2 dimensions": (
        lambda: KeyLists.build(rand_mask(5, 7), 5),
        ValueError,
        r"mask must be of fixed length \({B\|B/n\|1}, {H\|Hkv\|1}, {Sq\|1}, {Sk\|1}\), got shape \(5, 7\): pass "
        r"mask\[None, None\]$",
    ),
    "lists of a mask (n, Sk)": (
        lambda: KeyLists.build(rand_mask(4, 7), 5),
        ValueError,
        r"mask must be of fixed length .*, got shape \(4, 7\)$",
    ),
    "lists of a mask of 4 dimensions of variable length": (
        lambda: KeyLists.build(rand_mask(1, 1, 5, 7), 5, 7, False, CU, CU),
        ValueError,
        r"mask must be of variable length \(total_k, {H\|Hkv\|1}\) or \(total_q, {H\|Hkv\|1}, max_seqlen_k\), got",
    ),
    "lists of intervals of fixed length for sequences": (
        lambda: KeyLists.build(KeyIntervalMask.causal(5, 5), 5, 5, False, CU, CU),
        ValueError,
        r"mask must be a KeyIntervalMask of variable length .*, got one of fixed length \(1, 1, 5\)",
    ),
    "lists of variable length without a length": (
        lambda: KeyLists.build(rand_mask(5, 1), 5, None, False, CU, CU),
        ValueError,
        "seqlen_k must be given for variable length, got None",
    ),
    "lists of a mask of other keys": (
        lambda: KeyLists.build(KeyIntervalMask.causal(4, 4), 4, 5),
        ValueError,
        r"mask must be of 5 keys \(seqlen_k\), got shape \(1, 1, 4\)",
    ),
    "half of the sequences": (
        lambda: KeyLists.build(rand_mask(5, 1), 5, 5, False, CU),
        ValueError,
        "cu_seqlens_q requires cu_seqlens_k, got cu_seqlens_q alone",
    ),
    "lists for a negative number of rows": (
        lambda: KeyLists.build(rand_mask(1, 1, 1, 7), -5),
        ValueError,
        "seqlen_q must not be negative, got -5",
    ),
    "lists for a float number of rows": (
        lambda: KeyLists.build(rand_mask(1, 1, 1, 7), 5.0),
        TypeError,
        "seqlen_q must be an int, got float",
    ),
    "lists for a float number of keys": (
        lambda: KeyLists.build(rand_mask(1, 1, 1, 1), 5, 7.0),
        TypeError,
        "seqlen_k must be an int, got float",
    ),
    "lists of sequences in a list": (
        lambda: KeyLists.build(rand_mask(5, 1), 5, 5, False, [0, 5], CU),
        TypeError,
        "cu_seqlens_q must be a torch.Tensor, got list",
    ),
    "lists of sequences that end behind the keys": (
        lambda: KeyLists.build(rand_mask(5, 1), 5, 5, False, CU, CU * 10_000_000),
        ValueError,
        r"cu_seqlens_k must be non-decreasing from 0 to 5, the keys of mask, got cu_seqlens_k\[-1\] = 50000000$",
    ),
    "lists of sequences that end behind the rows": (
        lambda: KeyLists.build(rand_mask(5, 1, 5), 50_000_000, 5, False, CU * 10_000_000, CU),
        ValueError,
        r"cu_seqlens_q must be non-decreasing from 0 to 5, the rows of mask, got cu_seqlens_q\[-1\] = 50000000$",
    ),
    "lists of sequences that are longer than the rows of a mask": (
        lambda: KeyLists.build(rand_mask(5, 1, 5), 5, None, False, CU, CU * 2),
        ValueError,
        "seqlen_k must be at least the longest sequence 10, got 5",
    ),
    "lists of sequences that do not go together": (
        lambda: KeyLists.build(rand_mask(5, 1), 5, 5, False, torch.tensor([0, 2, 5], dtype=torch.int32), CU),
        ValueError,
        r"cu_seqlens_q and cu_seqlens_k must both have B \+ 1 elements, got 3 and 2",
    ),
    "the dense form of variable length": (
        lambda: KeyLists.build(rand_mask(5, 1), 5, 5, False, CU, CU).to_dense(),
        ValueError,
        "to_dense is for lists of fixed length",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    function, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        function()


KERNEL_ERRORS = {
    "mask and intervals": (
        {"mask": rand_mask(1, 1, 5, 7), "intervals": torch.zeros(2, 1, 1, 7).int()},
        "mask and intervals cannot both be given",
    ),
    "intervals of the wrong shape": (
        {"intervals": torch.zeros(2, 1, 1, 6).int()},
        r"attn_mask.start must be \({B\|1}, {H\|Hkv\|1}, Sk\): dimension 2 must be 7, got shape \(1, 1, 6\)",
    ),
    "keys without spans": ({"kv_indices": torch.zeros(64).int()}, "kv_indices comes with kv_indptr"),
    "spans of too few dimensions": (
        {"kv_indices": torch.zeros(64).int(), "kv_indptr": torch.zeros(2, 3).long()},
        r"kv_indptr must be contiguous .*, got shape \(2, 3\)",
    ),
    "spans of other heads": (
        {"kv_indices": torch.zeros(64).int(), "kv_indptr": torch.zeros(2, 1, 3, 1).long()},
        "kv_indptr must be of 4, 2 or 1 heads, got 3",
    ),
    "spans of other rows": (
        {"kv_indices": torch.zeros(64).int(), "kv_indptr": torch.zeros(2, 1, 1, 2).long()},
        "kv_indptr must be of 1 m_blocks, got 2",
    ),
    "spans beyond the keys": (
        {
            "kv_indices": torch.zeros(64).int(),
            "kv_indptr": torch.tensor([0, 10**9]).view(2, 1, 1, 1),
        },
        "kv_indptr must lie within the 64 kv_indices, got a list from 0 to 1000000000",
    ),
    "spans without keys": ({"kv_indptr": torch.zeros(2, 1, 1, 1).long()}, "kv_indices comes with kv_indptr"),
    "rows of the wrong length": (
        {
            "kv_indices": torch.zeros(64).int(),
            "kv_indptr": torch.zeros(2, 1, 1, 1).long(),
            "kv_row_bits": torch.zeros(63, 4).int(),
        },
        "kv_row_bits must have shape",
    ),
}


@pytest.mark.parametrize("case", KERNEL_ERRORS)
def test_the_compiled_entry_points_check_their_arguments(case):
    masks, message = KERNEL_ERRORS[case]
    kernels = ops.compiled_module()
    with pytest.raises(ValueError, match=message):
        kernels.mha_fwd(Q, K, V, ops.MaskTensors(**masks), None, 1.0, 0.0, False)


def test_build_key_lists_checks_its_arguments():
    with pytest.raises(ValueError, match="exactly one of mask and intervals must be given"):
        both = rand_mask(1, 1, 5, 7), torch.zeros(2, 1, 1, 7).int()
        ops.build_key_lists(*both, 5, 7, False, None, None, None, None)
    with pytest.raises(TypeError, match="intervals must be int32, got float32"):
        ops.build_key_lists(None, torch.zeros(2, 1, 1, 7), 5, 7, False, None, None, None, None)
    with pytest.raises(ValueError, match=r"mask must be of 5 rows and 7 keys, got shape \(1, 1, 5, 6\)"):
        ops.build_key_lists(rand_mask(1, 1, 5, 6), None, 5, 7, False, None, None, None, None)


def test_strided_cu_seqlens():
    cu_q, cu_k = torch.tensor([0, 4, 10]).int(), torch.tensor([0, 5, 12]).int()
    mask = KeyIntervalMask.sliding_window_varlen(cu_q, cu_k, 12, 3)
    indices = torch.randint(0, 5, (10, 1, 2)).int()
    for build in (lambda *cu: KeyLists.build(mask, 6, 7, False, *cu), lambda *cu: index_lists(indices, *cu)):
        strided = (torch.stack([cu, -cu], dim=1)[:, 0] for cu in (cu_q, cu_k))
        expected, lists = build(cu_q, cu_k), build(*strided)
        assert torch.equal(lists.kv_indices, expected.kv_indices) and torch.equal(lists.kv_indptr, expected.kv_indptr)


def index_lists(indices, cu_q, cu_k):
    return KeyLists.from_indices(indices, 6, 7, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


@pytest.mark.parametrize("known", ["values", "totals"])
def test_lists_take_room_for_the_sequences_that_there_are(known, monkeypatch):
    """256 sequences of 16 keys: lists of max_seqlen 131072 each would take 3 GB."""
    monkeypatch.setattr(lists_module, "is_host_readable", lambda tensor: known == "values")
    cu = torch.arange(0, 4097, 16, dtype=torch.int32)
    mask = KeyIntervalMask.topk_varlen(torch.randn(4096, 1), 3000, cu)
    lists = KeyLists.build(mask, 131072, 131072, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert lists.kv_indices.shape[0] <= {"values": 256 * 64, "totals": 32 * (4096 + 256 * 63)}[known]
    assert (lists.seqlen_q, lists.seqlen_k) == (131072, 131072)
    rows = torch.randn(4096, 1, 8)
    ours = flash_dmattn_varlen_func(rows, rows, rows, lists, None, cu, cu, 131072, 131072)
    torch.testing.assert_close(ours, flash_dmattn_varlen_func(rows, rows, rows, mask, None, cu, cu, 16, 16))


@pytest.mark.parametrize("combine", [lambda a, b: a & b, lambda a, b: b & a, lambda a, b: a | b, lambda a, b: ~a])
@pytest.mark.parametrize("other", [KeyIntervalMask.causal(4, 4), torch.ones(4, 4, dtype=torch.bool)])
def test_lists_are_not_combined(combine, other):
    lists = KeyLists.build(KeyIntervalMask.causal(4, 4), 4)
    with pytest.raises(TypeError, match="KeyLists cannot be combined: combine masks|use ~lists.to_dense"):
        combine(lists, other)
