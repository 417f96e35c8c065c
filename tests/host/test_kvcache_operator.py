"""flash_dmattn_with_kvcache as an operator, and how its composition reads the cache."""

import re

import pytest
import torch
from kvcaches import BATCHES, check, each_layout, each_window, make_call, make_sequences
from programs import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flash_dmattn import flash_dmattn_with_kvcache, kvcache_composed, ops


@pytest.mark.parametrize("window_size", [None, 8])
@pytest.mark.parametrize("batch", ["decoding", "mixed"])
@pytest.mark.parametrize("invariant", [False, True])
@each_layout
def test_opcheck(layout, batch, window_size, invariant):
    call = make_call(make_sequences(BATCHES[batch]), **layout)
    for cache in (call.k_cache, call.v_cache, call.arguments["bias_cache"]):
        cache.nan_to_num_()  # results are compared
    given = call.operator_arguments(window_size=window_size, batch_invariant=invariant)
    torch.library.opcheck(ops.attention_with_kvcache, given)


@each_layout
@pytest.mark.parametrize("batch", ["decoding", "mixed"])
def test_compiled(layout, batch):
    """Without a break of the graph; the cache is written as in eager mode."""
    sequences = make_sequences(BATCHES[batch])

    def function(query, k_cache, v_cache, **arguments):
        out, lse = flash_dmattn_with_kvcache(2 * query, k_cache, v_cache, return_lse=True, **arguments)
        return 2 * out, k_cache.nan_to_num() + 1, lse

    results = []
    for run in (function, torch.compile(function, fullgraph=True)):
        torch.manual_seed(1)
        call = make_call(sequences, **layout)
        results.append((*run(call.query, call.k_cache, call.v_cache, window_size=8, **call.arguments), call.k_cache))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@each_layout
@pytest.mark.parametrize("window_size", [None, 8])
@pytest.mark.parametrize("batch", ["decoding", "mixed"])
def test_flops(layout, window_size, batch):
    """4 D operations for each visible score of each head, masked keys included."""
    call = make_call(make_sequences(BATCHES[batch]), **layout)
    with FlopCounterMode(display=False) as counter:
        call(window_size=window_size)
    seen = [before + row + 1 for before, rows in BATCHES[batch] for row in range(rows)]
    visible = sum(seen) if window_size is None else sum(min(keys, window_size) for keys in seen)
    assert counter.get_total_flops() == 4 * 16 * 4 * visible


def test_flops_of_the_padded_head_dimension():
    """That of the wider of keys and values, rounded up to a multiple of 8: the kernels compute with it."""
    query, k_cache, v_cache = torch.zeros(1, 1, 4, 13), torch.zeros(1, 40, 2, 13), torch.zeros(1, 40, 2, 21)
    with FlopCounterMode(display=False) as counter:
        flash_dmattn_with_kvcache(query, k_cache, v_cache, cache_seqlens=40)
    assert counter.get_total_flops() == 4 * 24 * 4 * 40


def test_the_bounds_of_batch_invariant_calls_are_those_of_the_compiled_module():
    source = (ROOT / "csrc/torch/kvcache.cpp").read_text()
    for name in ("INVARIANT_ROWS", "INVARIANT_MIN_KEYS"):
        constant = "k" + name.title().replace("_", "")
        (value,) = re.findall(rf"\b{constant} = (\d+)\b", source)
        assert int(value) == getattr(kvcache_composed, name)


def test_no_rows_at_all():
    call = make_call(make_sequences([(40, 0), (3, 0)]), packed=True, page_size=16)
    assert call.arguments["max_seqlen_q"] == 0 and call(window_size=8).shape == (0, 4, 16)


def test_inference_mode():
    with torch.inference_mode():
        check(make_sequences(BATCHES["mixed"]), options={"window_size": 8}, page_size=16)


def test_autocast():
    """Under autocast the new tokens come in the cache's dtype, and their biases in that of bias_cache."""
    sequences = make_sequences(BATCHES["decoding"], dtype=torch.bfloat16)
    call = make_call(sequences)
    expected = call(window_size=8)
    given = call.arguments | {name: call.arguments[name].float() for name in ("key", "value")}
    given["bias"] = call.arguments["bias"].double()
    with torch.autocast("cpu", dtype=torch.float16):
        ours = flash_dmattn_with_kvcache(call.query.float(), call.k_cache, call.v_cache, window_size=8, **given)
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, expected)


def test_autocast_keeps_what_a_bias_masks():
    """finfo.min of bfloat16 is no minimum of the float32 cache."""
    rows, cache = torch.randn(1, 3, 2, 8), torch.zeros(1, 16, 2, 8)
    least = torch.finfo(torch.bfloat16).min
    biases = {"bias_cache": torch.zeros(1, 16, 2), "bias": torch.full((1, 3, 2), least, dtype=torch.bfloat16)}
    relative = {"relative_bias": torch.full((1, 1, 3), least, dtype=torch.bfloat16)}
    for given in (biases, relative):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, lse = flash_dmattn_with_kvcache(
                *(rows, cache.clone(), cache.clone(), rows, rows), cache_seqlens=0, return_lse=True, **given
            )
        assert not out.any() and (lse == -torch.inf).all()
    assert (biases["bias_cache"][:, :3] == -torch.inf).all()


def test_autocast_of_a_relative_bias_and_sinks():
    """Those of 16 bits are cast to the cache's dtype."""
    sequences = make_sequences(BATCHES["decoding"], dtype=torch.bfloat16)
    given = {"relative_bias": torch.randn(1, 1, 9).half(), "sinks": torch.randn(1).half()}
    expected = make_call(sequences)(**{name: x.bfloat16() for name, x in given.items()})
    call = make_call(sequences)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(call(**given), expected)


@each_layout
@pytest.mark.parametrize("window_size", [None, 20])
@pytest.mark.parametrize("sizes", [{}, {"head_dim": 13}], ids=str)
def test_head_dimensions_of_the_cpu(layout, sizes, window_size):
    """Values of a width of their own, and dimensions that the kernels do not have."""
    sequences = make_sequences(BATCHES["mixed"], **sizes)
    for sequence in sequences:
        sequence.values = torch.randn(*sequence.values.shape[:2], 21)
    check(sequences, options={"window_size": window_size}, **layout)


def test_nothing_at_all():
    rows, cache = torch.randn(0, 1, 4, 8), torch.randn(0, 5, 2, 8)
    out, lse = flash_dmattn_with_kvcache(rows, cache, cache, cache_seqlens=0, return_lse=True)
    assert out.shape == (0, 1, 4, 8) and lse.shape == (0, 4, 1)
    new = torch.randn(0, 1, 2, 8)
    assert flash_dmattn_with_kvcache(rows, cache, cache, new, new, cache_seqlens=0).shape == (0, 1, 4, 8)
    for room in (0, 5):
        query, cache = torch.randn(2, 3, 4, 8), torch.full((2, room, 2, 8), torch.nan)
        out, lse = flash_dmattn_with_kvcache(query, cache, cache, cache_seqlens=0, return_lse=True)
        assert out.eq(0).all() and lse.eq(-torch.inf).all() and lse.shape == (2, 4, 3)
    out = flash_dmattn_with_kvcache(
        *(torch.randn(0, 4, 8), torch.randn(3, 16, 2, 8), torch.randn(3, 16, 2, 8)),
        cache_seqlens=torch.zeros(0, dtype=torch.int32),
        block_table=torch.zeros(0, 2, dtype=torch.int32),
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
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


@each_layout
@pytest.mark.parametrize("batch", ["decoding", "mixed"])
def test_integers_that_are_views(layout, batch):
    sequences = make_sequences(BATCHES[batch])
    call = make_call(sequences, **layout)
    for name, x in call.arguments.items():
        if isinstance(x, torch.Tensor) and x.dtype == torch.int32:
            call.arguments[name] = torch.stack((x, -1 - x), dim=-1)[..., 0]
    check(sequences, call=call, options={"window_size": 8})


def test_heads_with_too_few_keys_gather_a_defined_one():
    """Bits may not depend on memory that nothing has written: in deterministic mode PyTorch fills it."""
    bias = torch.full((2, 100, 3), -torch.inf)
    bias[0, 7, 1] = bias[1, 90, 2] = bias[1, 40, 2] = 0.0
    torch.use_deterministic_algorithms(True)
    try:
        best, found = kvcache_composed.best_keys(bias, torch.tensor([100, 91]), 4)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.tolist() == [[0, 1, 0], [0, 0, 2]]
    zeros = [0, 0, 0, 0]
    assert best.tolist() == [[zeros, [7, 0, 0, 0], zeros], [zeros, zeros, [40, 90, 0, 0]]]


@pytest.mark.parametrize("window_size", [None, 8])
def test_a_cache_of_more_than_two_to_the_31_elements(window_size):
    """The memory of pages that nothing touches is never resident."""
    pages = 2**31 // (16 * 2 * 64) + 8
    sequences = make_sequences([(40, 1), (20, 1)], head_dim=64, dtype=torch.bfloat16)
    small = make_call(sequences, page_size=16, permute=False, spare=0)
    first = pages - small.k_cache.shape[0]

    def large(cache):
        room = torch.empty(pages, *cache.shape[1:], dtype=cache.dtype)
        room[first:] = cache
        return room

    call = make_call(sequences, page_size=16, permute=False, spare=0)
    call.k_cache, call.v_cache = large(small.k_cache), large(small.v_cache)
    call.arguments["bias_cache"] = large(small.arguments["bias_cache"])
    call.arguments["block_table"] += first
    assert call.k_cache.numel() > 2**31
    check(sequences, call=call, options={"window_size": window_size})
    small()
    assert torch.equal(call.k_cache[first:].nan_to_num(), small.k_cache.nan_to_num())


@each_layout
@pytest.mark.parametrize("rows", [1, 40])
def test_a_window_gathers_few_keys(layout, rows, monkeypatch):
    """At most w keys of the prefix and those of the new rows, however long the sequences are."""
    gathered = []
    attend = kvcache_composed.attend
    monkeypatch.setattr(
        kvcache_composed, "attend", lambda backend, call: gathered.append(call.key.shape[1]) or attend(backend, call)
    )
    check(make_sequences([(700, rows), (300, rows)]), options={"window_size": 8}, **layout)
    in_place = layout.get("spare") == 0 and rows == 1
    assert gathered == [701 if in_place else 8 + rows]


@each_layout
@each_window
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch invariant"])
@pytest.mark.parametrize("batch", BATCHES)
def test_without_reading_the_lengths(layout, options, batch, invariant, monkeypatch):
    """As on CUDA, where only the device knows them: packed keys have room at their end."""
    attend = kvcache_composed.attend

    def attend_without_room(backend, call):
        if call.varlen is not None:
            total, most = int(call.varlen.cu_seqlens_k[-1]), int(call.varlen.cu_seqlens_k.diff().max())
            assert most <= call.varlen.max_seqlen_k and not call.attn_bias.isnan().any()
            call.key, call.value, call.attn_bias = call.key[:total], call.value[:total], call.attn_bias[:total]
        return attend(backend, call)

    monkeypatch.setattr(kvcache_composed, "attend", attend_without_room)
    monkeypatch.setattr(kvcache_composed, "read", lambda lengths: None)
    if invariant:
        monkeypatch.setattr(kvcache_composed, "packs_rows", lambda given: True)
        monkeypatch.setattr(kvcache_composed, "one_by_one", kvcache_composed.attend_packed)
    check(make_sequences(BATCHES[batch]), options={**options, "batch_invariant": invariant}, **layout)


@pytest.mark.parametrize("window_size", [None, 8, 1000])
@pytest.mark.parametrize("batch", ["decoding", "mixed"])
@each_layout
def test_batch_invariant_as_on_cuda(layout, batch, window_size, monkeypatch):
    monkeypatch.setattr(kvcache_composed, "packs_rows", lambda given: True)
    monkeypatch.setattr(kvcache_composed, "one_by_one", kvcache_composed.attend_packed)
    options = {"window_size": window_size, "batch_invariant": True}
    sequences = make_sequences(BATCHES[batch])
    check(sequences, options=options, **layout)
    check(sequences, options={**options, "relative_bias": torch.randn(len(sequences), 2, 41)}, **layout)


@pytest.mark.parametrize("window_size", [None, 8])
def test_flops_of_unknown_lengths(window_size):
    """Fake tensors have no lengths: as for a cache that is full."""
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        query, cache = mode.from_tensor(torch.zeros(2, 3, 4, 16)), mode.from_tensor(torch.zeros(2, 40, 2, 16))
        biases = mode.from_tensor(torch.zeros(2, 40, 2))
        flash_dmattn_with_kvcache(query, cache, cache, bias_cache=biases, cache_seqlens=5, window_size=window_size)
    assert counter.get_total_flops() == 2 * 4 * 16 * 4 * (38 + 39 + 40 if window_size is None else 3 * 8)
