"""flash_dmattn_with_kvcache on the CPU: caches, appended tokens, mixed batches, and what no call may read."""

import pytest
import torch
from kvcaches import check, make_call, make_sequence, make_sequences, split

from flash_dmattn import flash_dmattn_func, flash_dmattn_with_kvcache

LAYOUTS = {
    "contiguous": {"permute": False, "spare": 0},
    "batch elements": {},
    "pages of 16": {"page_size": 16},
    "pages of 64": {"page_size": 64},
}
BATCHES = {
    "decoding": [(40, 1), (0, 1), (299, 1), (64, 1)],
    "few rows": [(40, 5), (0, 5), (299, 5)],
    "chunks": [(100, 40), (0, 40), (7, 40)],
    "mixed": [(40, 1), (130, 30), (0, 17), (64, 1), (12, 0), (0, 0), (33, 4)],
    "packed decoding": [(40, 1), (0, 0), (299, 1)],
}
OPTIONS = {
    "dense": {},
    "window 8": {"window_size": 8},
    "window 64": {"window_size": 64},
    "window beyond": {"window_size": 1000},
    "window 0": {"window_size": 0},
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.mark.parametrize("appends", [True, False], ids=["append", "no append"])
@each_layout
@each_batch
@each_option
def test_equals_float64(layout, batch, options, appends):
    check(make_sequences(batch), options=options, appends=appends, **layout)


@each_layout
@each_batch
def test_writes_the_new_tokens_and_nothing_else(layout, batch):
    sequences = make_sequences(batch)
    torch.manual_seed(1)
    call = make_call(sequences, **layout)
    torch.manual_seed(1)
    filled = make_call(sequences, appends=False, **layout)
    call(window_size=8)
    for name, ours, expected in (
        ("k_cache", call.k_cache, filled.k_cache),
        ("v_cache", call.v_cache, filled.v_cache),
        ("bias_cache", call.arguments["bias_cache"], filled.arguments["bias_cache"]),
    ):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")


@each_layout
@pytest.mark.parametrize("batch", [BATCHES["decoding"], BATCHES["mixed"]], ids=["decoding", "mixed"])
def test_every_option(layout, batch):
    sequences = make_sequences(batch, heads=4, kv_heads=2)
    options = {
        "is_causal": {"is_causal": False},
        "softcap": {"softcap": 1.5},
        "softmax_scale": {"softmax_scale": 0.7},
        "sinks": {"sinks": torch.randn(4)},
        "sinks and window": {"sinks": torch.randn(1), "window_size": 20},
        "relative bias": {"relative_bias": torch.randn(1, 4, 41)},
        "relative bias a sequence": {"relative_bias": torch.randn(len(batch), 2, 41)},
        "relative bias and window": {"relative_bias": torch.randn(1, 1, 101), "window_size": 20},
        "softcap and window": {"softcap": 1.5, "window_size": 20, "softmax_scale": 0.7},
    }
    for chosen in options.values():
        check(sequences, options=chosen, **layout)
    check(sequences, biased=False, **layout)


@each_layout
@pytest.mark.parametrize(
    "sizes",
    [
        {"dtype": torch.float64},
        {"dtype": torch.float64, "bias_dtype": torch.float32},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "bias_dtype": torch.float32},
        {"dtype": torch.float16, "head_dim": 40},
        {"head_dim": 13},
        {"heads": 3, "kv_heads": 1, "head_dim": 8},
        {"heads": 3, "kv_heads": 3, "head_dim": 256},
    ],
    ids=str,
)
@pytest.mark.parametrize("window_size", [None, 20])
def test_dtypes_and_sizes(layout, sizes, window_size):
    for batch in (BATCHES["decoding"], BATCHES["mixed"]):
        check(make_sequences(batch, **sizes), options={"window_size": window_size}, **layout)


@each_layout
@pytest.mark.parametrize("window_size", [None, 20])
def test_values_of_another_head_dimension(layout, window_size):
    sequences = make_sequences(BATCHES["mixed"])
    for sequence in sequences:
        sequence.values = torch.randn(*sequence.values.shape[:2], 24)
    check(sequences, options={"window_size": window_size}, **layout)


@each_layout
@pytest.mark.parametrize("by", ["-inf", "least", "ties", "all hidden"])
@pytest.mark.parametrize("batch", [BATCHES["decoding"], BATCHES["chunks"], BATCHES["mixed"]], ids=str)
def test_hidden_keys_and_ties(layout, by, batch):
    sequences = make_sequences(batch)
    for sequence in sequences:
        if by == "ties":
            sequence.biases.round_()
        else:
            hidden = torch.rand_like(sequence.biases) < (1 if by == "all hidden" else 0.8)
            value = torch.finfo(torch.float32).min if by == "least" else -torch.inf
            sequence.biases.masked_fill_(hidden, value)
    for window_size in (None, 3, 30):
        check(sequences, options={"window_size": window_size}, **layout)


@each_layout
@pytest.mark.parametrize("window_size", [None, 16])
def test_generation_equals_one_pass_over_the_whole_sequence(layout, window_size):
    """Prefill in chunks of different sizes, then decoding with steps of one and of several rows."""
    torch.manual_seed(3)
    sequence = make_sequence(0, 150)
    query, keys, values = (x[None] for x in (sequence.query, sequence.keys, sequence.values))
    bias = sequence.biases.T[None, :, None]
    whole = flash_dmattn_func(query, keys, values, None, bias, is_causal=True, window_size=window_size)
    empty = make_sequence(0, 0)
    call = make_call([empty], room=160, **layout)
    table = call.arguments.get("block_table")
    if table is not None:
        table.copy_(torch.randperm(call.k_cache.shape[0])[: table.shape[1]])
    call.arguments = {name: call.arguments.get(name) for name in ("bias_cache", "cache_batch_idx", "block_table")}
    done = 0
    for rows in (50, 17, 1, 40, *[1] * 20, 16, 5, 1):
        part = slice(done, done + rows)
        out = flash_dmattn_with_kvcache(
            *(query[:, part], call.k_cache, call.v_cache, keys[:, part], values[:, part]),
            bias=sequence.biases[None, part],
            cache_seqlens=done,
            window_size=window_size,
            **call.arguments,
        )
        torch.testing.assert_close(out, whole[:, part], rtol=1e-5, atol=1e-5)
        done += rows
    assert done == 150


@pytest.mark.parametrize("window_size", [None, 8])
@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_more_rows_than_keys(layout, rows, window_size):
    """Without key the cache may hold fewer keys than there are rows: the first rows see none."""
    sequences = make_sequences([(0, rows), (0, rows), (40, rows)])
    call = make_call(sequences, appends=False, **layout)
    call.arguments["cache_seqlens"] = torch.tensor([0, 2, 40 + rows], dtype=torch.int32)
    for b, keys in enumerate((0, 2)):
        s = sequences[b]
        s.keys, s.values, s.biases = s.keys[:keys], s.values[:keys], s.biases[:keys]
    results = check(sequences, call=call, options={"window_size": window_size})
    assert results[0][0].eq(0).all() and results[0][1].eq(-torch.inf).all()
    assert results[1][1][:, : rows - 2].eq(-torch.inf).all() and results[1][1][:, rows - 2 :].isfinite().all()


def test_nothing_at_all():
    rows, cache = torch.randn(0, 1, 4, 8), torch.randn(0, 5, 2, 8)
    out, lse = flash_dmattn_with_kvcache(rows, cache, cache, cache_seqlens=0, return_lse=True)
    assert out.shape == (0, 1, 4, 8) and lse.shape == (0, 4, 1)
    for room in (0, 5):
        query, cache = torch.randn(2, 3, 4, 8), torch.full((2, room, 2, 8), torch.nan)
        out, lse = flash_dmattn_with_kvcache(query, cache, cache, cache_seqlens=0, return_lse=True)
        assert out.eq(0).all() and lse.eq(-torch.inf).all() and lse.shape == (2, 4, 3)
    offsets = torch.zeros(1, dtype=torch.int32)
    out = flash_dmattn_with_kvcache(
        *(torch.randn(0, 4, 8), torch.randn(3, 16, 2, 8), torch.randn(3, 16, 2, 8)),
        cache_seqlens=torch.zeros(0, dtype=torch.int32),
        block_table=torch.zeros(0, 2, dtype=torch.int32),
        cu_seqlens_q=offsets,
        max_seqlen_q=0,
    )
    assert out.shape == (0, 4, 8)


def test_views_of_caches():
    """Caches as views, such as keys and values of all layers in one tensor, are written in place."""
    sequences = make_sequences([(40, 1), (30, 1)])
    call = make_call(sequences, permute=False, spare=0)
    both = torch.stack((call.k_cache, call.v_cache), dim=2)  # (B, Sk, 2, Hkv, D)
    biases = call.arguments["bias_cache"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    viewed = make_call(sequences, permute=False, spare=0)
    viewed.k_cache, viewed.v_cache = both.unbind(dim=2)
    viewed.arguments["bias_cache"] = biases
    for window_size in (None, 8):
        check(sequences, call=viewed, options={"window_size": window_size})
    call()
    assert torch.equal(both[:, :, 0].nan_to_num(), call.k_cache.nan_to_num())
    assert torch.equal(biases.nan_to_num(), call.arguments["bias_cache"].nan_to_num())


def test_sequences_share_pages():
    """Sequences with a common prefix read the same pages, and write into pages of their own."""
    sequences = make_sequences([(32, 1), (32, 1)])
    for name in ("keys", "values", "biases"):
        getattr(sequences[1], name)[:32] = getattr(sequences[0], name)[:32]
    call = make_call(sequences, page_size=16)
    table = call.arguments["block_table"]
    for page in table[1, :2].tolist():
        call.k_cache[page] = call.v_cache[page] = torch.nan
    table[1, :2] = table[0, :2]
    for window_size in (None, 8):
        check(sequences, call=call, options={"window_size": window_size})


INVARIANT_OPTIONS = {
    **OPTIONS,
    "not causal": {"is_causal": False},
    "relative bias and window": {"relative_bias": torch.linspace(-1, 1, 61).expand(1, 4, 61), "window_size": 20},
}


@pytest.mark.parametrize("options", INVARIANT_OPTIONS.values(), ids=INVARIANT_OPTIONS)
@pytest.mark.parametrize("page_size", [None, 16])
def test_batch_invariant(options, page_size):
    """Bitwise the same alone and in batches of 1 to 9, at any position, with any order of pages and any room."""
    options = {**options, "batch_invariant": True, "return_lse": True}
    sequences = make_sequences([(3000, 1), (40, 1), (700, 30), (0, 5), (64, 1), (1, 300), (300, 16), (0, 1), (12, 0)])

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
