"""flash_dmattn_with_kvcache on every device: each sequence equals float64, and generation equals one pass."""

import pytest
import torch
from kvcaches import (
    BATCHES,
    WINDOWS,
    check,
    each_batch,
    each_layout,
    each_window,
    make_call,
    make_sequences,
    split,
)
from paths import DTYPES, HALVES, both, case, on

from flash_dmattn import flash_dmattn_func, flash_dmattn_with_kvcache, ops

on_devices = on(*both("none"))


def sequences_on(path, batch, **sizes):
    return make_sequences(batch, **{"device": path.device, "dtype": path.dtype, **sizes})


@pytest.mark.parametrize("appends", [True, False], ids=["append", "no append"])
@each_layout
@each_batch
@each_window
@on_devices
def test_equals_float64(path, layout, batch, options, appends):
    check(sequences_on(path, batch), options=options, appends=appends, **layout)


@each_layout
@pytest.mark.parametrize("packed", [False, True], ids=["fixed length", "packed"])
@pytest.mark.parametrize("window_size", [None, 64])
@on_devices
def test_long_sequences_beside_short_ones(path, packed, layout, window_size):
    """On the CPU each is gathered alone."""
    sequences = sequences_on(path, [(1500, 3), (2, 3), (1100, 3)])
    for options in ({}, {"sinks": torch.randn(4)}, {"relative_bias": torch.randn(3, 2, 9)}):
        options = {name: x.to(path.device) for name, x in options.items()}
        check(sequences, options={"window_size": window_size, **options}, packed=packed, **layout)


@each_layout
@each_batch
@each_window
@pytest.mark.parametrize("heads_first", [False, True], ids=["keys, heads", "heads, keys"])
@on_devices
def test_writes_the_new_tokens_and_nothing_else(path, heads_first, layout, batch, options):
    sequences = sequences_on(path, batch)
    torch.manual_seed(1)
    call = make_call(sequences, **layout)
    torch.manual_seed(1)
    filled = make_call(sequences, appends=False, **layout)
    if heads_first:
        call.put_heads_first()
    call(**options)
    for name, ours, expected in (
        ("k_cache", call.k_cache, filled.k_cache),
        ("v_cache", call.v_cache, filled.v_cache),
        ("bias_cache", call.arguments["bias_cache"], filled.arguments["bias_cache"]),
    ):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")


@each_layout
@pytest.mark.parametrize("batch", ["decoding", "mixed"])
@on_devices
def test_every_option(path, layout, batch):
    lengths = BATCHES[batch]
    sequences = sequences_on(path, lengths, heads=4, kv_heads=2)
    options = {
        "is_causal": {"is_causal": False},
        "softcap": {"softcap": 1.5},
        "softmax_scale": {"softmax_scale": 0.7},
        "sinks": {"sinks": torch.randn(4, device=path.device)},
        "sinks and window": {"sinks": torch.randn(1, device=path.device), "window_size": 20},
        "relative bias": {"relative_bias": path.randn(1, 4, 41)},
        "relative bias of each sequence": {"relative_bias": path.randn(len(lengths), 2, 41)},
        "relative bias and window": {"relative_bias": path.randn(1, 1, 101), "window_size": 20},
        "softcap and window": {"softcap": 1.5, "window_size": 20, "softmax_scale": 0.7},
    }
    for chosen in options.values():
        check(sequences, options=chosen, **layout)
    check(sequences, biased=False, **layout)


SIZES = [
    {"bias_dtype": torch.float32},
    {"heads": 3, "kv_heads": 1, "head_dim": 8},
    {"heads": 3, "kv_heads": 3, "head_dim": 256},
    {"heads": 8, "kv_heads": 2, "head_dim": 64},
    {"heads": 16, "kv_heads": 4, "head_dim": 128},
    {"heads": 2, "kv_heads": 2, "head_dim": 40},
]


@each_layout
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("window_size", [None, 20])
@pytest.mark.parametrize(
    "path, dtype", [case(path, dtype) for path in both("none") for dtype in (HALVES if path.on_cuda else DTYPES)]
)
def test_dtypes_and_sizes(path, dtype, layout, sizes, window_size):
    for batch in ("decoding", "mixed"):
        sequences = sequences_on(path, BATCHES[batch], dtype=dtype, **sizes)
        check(sequences, options={"window_size": window_size}, **layout)


@each_layout
@pytest.mark.parametrize("by", ["-inf", "least", "ties", "all masked"])
@pytest.mark.parametrize("batch", ["decoding", "chunks", "mixed"])
@on_devices
def test_masked_keys_and_ties(path, layout, by, batch):
    sequences = sequences_on(path, BATCHES[batch])
    for sequence in sequences:
        if by == "ties":
            sequence.biases.round_()
        else:
            masked = torch.rand(sequence.biases.shape, device=path.device) < (1 if by == "all masked" else 0.8)
            value = torch.finfo(sequence.biases.dtype).min if by == "least" else -torch.inf
            sequence.biases.masked_fill_(masked, value)
    for window_size in (None, 3, 30):
        check(sequences, options={"window_size": window_size}, **layout)


@each_layout
@pytest.mark.parametrize("batch", ["decoding", "chunks", "mixed"])
@pytest.mark.parametrize(
    "path, dtype", [case(path, dtype) for path in both("none") for dtype in (HALVES if path.on_cuda else DTYPES)]
)
def test_the_least_float32_bias_masks_beside_every_dtype(path, dtype, layout, batch):
    sequences = sequences_on(path, BATCHES[batch], dtype=dtype, bias_dtype=torch.float32)
    for sequence in sequences:
        masked = torch.rand(sequence.biases.shape, device=path.device) < 0.8
        sequence.biases.masked_fill_(masked, torch.finfo(torch.float32).min)
        sequence.biases[:3] = torch.finfo(torch.float32).min  # rows without visible keys
    for window_size in (None, 3):
        check(sequences, options={"window_size": window_size}, **layout)


@each_layout
@pytest.mark.parametrize("window_size", [None, 16])
@on_devices
def test_generation_equals_one_pass_over_the_whole_sequence(path, layout, window_size):
    """Prefill in chunks of different sizes, then decoding with steps of one and of several rows."""
    (sequence,) = sequences_on(path, [(0, 150)])
    query, keys, values = (x[None] for x in (sequence.query, sequence.keys, sequence.values))
    bias = sequence.biases.T[None, :, None]
    whole = flash_dmattn_func(query, keys, values, None, bias, is_causal=True, window_size=window_size)
    call = make_call(sequences_on(path, [(0, 0)]), room=160, **layout)
    table = call.arguments.get("block_table")
    if table is not None:
        table.copy_(torch.randperm(call.k_cache.shape[0])[: table.shape[1]])
    given = {name: call.arguments.get(name) for name in ("bias_cache", "cache_batch_idx", "block_table")}
    done = 0
    for rows in (50, 17, 1, 40, *[1] * 20, 16, 5, 1):
        part = slice(done, done + rows)
        out = flash_dmattn_with_kvcache(
            *(query[:, part], call.k_cache, call.v_cache, keys[:, part], values[:, part]),
            bias=sequence.biases[None, part],
            cache_seqlens=done,
            window_size=window_size,
            **given,
        )
        tolerance = 2e-2 if path.on_cuda else 1e-5
        torch.testing.assert_close(out, whole[:, part], rtol=tolerance, atol=tolerance)
        done += rows
    assert done == 150


@each_layout
@pytest.mark.parametrize("window_size", [None, 8])
@pytest.mark.parametrize("rows", [3, 20])
@on_devices
def test_more_rows_than_keys(path, layout, rows, window_size):
    """Without key the cache may hold fewer keys than there are rows: the first rows see none."""
    sequences = sequences_on(path, [(0, rows), (0, rows), (40, rows)])
    call = make_call(sequences, appends=False, **layout)
    call.arguments["cache_seqlens"] = torch.tensor([0, 2, 40 + rows], dtype=torch.int32, device=path.device)
    for b, keys in enumerate((0, 2)):
        s = sequences[b]
        s.keys, s.values, s.biases = s.keys[:keys], s.values[:keys], s.biases[:keys]
    results = check(sequences, call=call, options={"window_size": window_size})
    assert results[0][0].eq(0).all() and results[0][1].eq(-torch.inf).all()
    assert results[1][1][:, : rows - 2].eq(-torch.inf).all() and results[1][1][:, rows - 2 :].isfinite().all()


@on_devices
def test_sequences_share_pages(path):
    """Sequences with a common prefix read the same pages, and write into pages of their own."""
    sequences = sequences_on(path, [(32, 1), (32, 1)])
    for name in ("keys", "values", "biases"):
        getattr(sequences[1], name)[:32] = getattr(sequences[0], name)[:32]
    call = make_call(sequences, page_size=16)
    table = call.arguments["block_table"]
    for page in table[1, :2].tolist():
        call.k_cache[page] = call.v_cache[page] = torch.nan
    table[1, :2] = table[0, :2]
    for window_size in (None, 8):
        check(sequences, call=call, options={"window_size": window_size})


@pytest.mark.parametrize("window_size", [None, 8])
@pytest.mark.parametrize("bad", ["page", "length", "negative length", "all pages"])
@pytest.mark.parametrize("packed", [False, True])
@on_devices
def test_new_tokens_without_a_place_are_dropped(path, packed, bad, window_size):
    """CUDA checks neither lengths nor pages, and the CPU's composition does not rely on their check: no other place is
    written, and other sequences are right."""
    sequences = sequences_on(path, [(20, 2), (60, 2), (5, 2)])
    call = make_call(sequences, page_size=16, room=64, packed=packed, permute=False, spare=0)
    around = [torch.zeros(16, *x.shape[1:], dtype=x.dtype, device=x.device) for x in call.caches()]
    for memory, cache in zip(around, call.caches()):
        memory[2:14] = cache.nan_to_num()
    before = [x.clone() for x in around]
    call.k_cache, call.v_cache, call.arguments["bias_cache"] = (x[2:14] for x in around)
    seqlens, table = call.arguments["cache_seqlens"], call.arguments["block_table"]
    table.copy_(torch.arange(12).view(3, 4))
    if bad == "page":
        table[1, 3] = 12
    elif bad == "length":
        seqlens[1] = 2**31 - 1
    elif bad == "negative length":
        seqlens[1], table[1, 0] = -(2**31), -1
    else:
        table.fill_(-5)
    operator = ops.compose_attention_with_kvcache if path.on_cpu else ops.attention_with_kvcache
    result = operator(*call.operator_arguments(window_size=window_size))
    for memory, old in zip(around, before):
        written = (memory != old).flatten(2).any(-1).nonzero().tolist()
        assert written == ([] if bad == "all pages" else [[3, 4], [3, 5], [10, 5], [10, 6]])
    for b in (0, 2) if bad != "all pages" else ():
        (expected,) = check([sequences[b]], options={"window_size": window_size})
        tolerance = 2e-2 if path.on_cuda else 1e-5
        torch.testing.assert_close(split(result, sequences, packed)[b], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window_size", [None, 8])
@pytest.mark.parametrize(
    "batch, padding",
    [([(40, 1), (17, 1), (20, 0), (5, 0)], 2), ([(40, 3), (17, 5)], 2), ([(40, 30)], 10)],
    ids=["decoding", "chunks", "one sequence"],
)
@each_layout
@on_devices
def test_rows_after_the_last_sequence_are_padding(path, layout, batch, padding, window_size):
    """A CUDA graph has a fixed number of rows and of sequences. Padding may fill up max_seqlen_q in every sequence."""
    sequences = sequences_on(path, batch)
    call = make_call(sequences, packed=True, **layout)
    before = [x.clone() for x in call.caches()]
    total = call.query.shape[0]

    def padded(rows):
        return torch.cat((rows, torch.full_like(rows[:1], 7.0).expand(padding, *rows.shape[1:])))

    call.query = padded(call.query)
    call.arguments |= {name: padded(call.arguments[name]) for name in ("key", "value", "bias")}
    call.arguments["max_seqlen_q"] = (total + padding) // len(batch)
    for x in call.arguments.values():  # a page or element for what padding would write
        if isinstance(x, torch.Tensor) and x.dtype == torch.int32 and x.ndim == 2:
            x.clamp_(0, call.k_cache.shape[0] - 1)
    out, lse = call(window_size=window_size, return_lse=True)
    for b, result in enumerate(split((out[:total], lse[:, :total]), sequences, packed=True)):
        (expected,) = check([sequences[b]], options={"window_size": window_size}) if batch[b][1] else [result]
        tolerance = 2e-2 if path.on_cuda else 1e-5
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    for cache, old in zip(call.caches(), before):
        changed = ((cache != old) & ~(cache.isnan() & old.isnan())).flatten(2).any(-1)
        assert changed.sum() == total and not (cache == 7).any()


@pytest.mark.parametrize("window_size", [None, 8])
@pytest.mark.parametrize("batch", [[(40, 1), (17, 1)], [(60, 3), (90, 70), (20, 1)]], ids=["decoding", "mixed"])
@each_layout
@on_devices
def test_max_seqlen_q_far_above_all_sequences(path, layout, batch, window_size):
    call = make_call(sequences_on(path, batch), packed=True, **layout)
    expected = call(window_size=window_size, return_lse=True)
    results = call(window_size=window_size, return_lse=True, max_seqlen_q=2**31 - 2**17)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-2, atol=1e-2)


@on_devices
def test_autograd_learns_that_the_cache_is_written(path):
    call = make_call(sequences_on(path, [(40, 1)]))
    weight = torch.randn((), device=path.device, requires_grad=True)
    loss = (weight * call.k_cache.nan_to_num_()).sum()
    with torch.no_grad():
        call(key=None, value=None, bias=None)
    torch.autograd.grad(loss, weight, retain_graph=True)
    with torch.no_grad():
        call()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, weight)


INVARIANT = {
    **WINDOWS,
    "not causal": {"is_causal": False},
    "relative bias and window": {"relative_bias": torch.linspace(-1, 1, 61).expand(1, 4, 61), "window_size": 20},
}


@pytest.mark.parametrize("options", INVARIANT.values(), ids=INVARIANT)
@pytest.mark.parametrize("page_size", [None, 16])
@on_devices
def test_batch_invariant(path, options, page_size):
    """Bitwise the same alone and in batches of 1 to 9, at any position, with any order of pages and any room."""
    options = {name: x.to(path.device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    options |= {"batch_invariant": True, "return_lse": True}
    batch = [(3000, 1), (40, 1), (700, 30), (0, 5), (64, 1), (1, 300), (300, 16), (0, 1), (12, 0)]
    sequences = sequences_on(path, batch)

    def run(batch, **layout):
        call = make_call(batch, page_size=page_size, **layout)
        return split(call(**options), batch, "cu_seqlens_q" in call.arguments)

    alone = [run([s], permute=False, packed=False)[0] for s in sequences]
    for size in range(1, 10):
        order = torch.randperm(9)[:size].tolist()
        batch = [sequences[i] for i in order]
        for appends, room in ((True, None), (False, 4000)):
            for i, ours in zip(order, run(batch, packed=True, appends=appends, room=room), strict=True):
                for x, y in zip(ours, alone[i], strict=True):
                    assert torch.equal(x, y), f"sequence {i} of {sequences[i].rows} rows in a batch of {size}"
    decoding = [s for s in sequences if s.rows == 1]
    for ours, i in zip(run(decoding, packed=False), (0, 1, 4, 7), strict=True):
        assert torch.equal(ours[0], alone[i][0]) and torch.equal(ours[1], alone[i][1])
