"""flash_dmattn_with_kvcache on the GPU: CUDA graphs, no synchronization, checks on request, large caches."""

import os
import subprocess
import sys

import pytest
import torch
from gpu_inputs import NEEDS_CUDA, takes_gpu_memory
from kvcaches import (
    BATCHES,
    assert_same_counts,
    check,
    count_positions,
    each_layout,
    make_call,
    make_sequences,
    reference,
)

from flash_dmattn import kvcache_composed

pytestmark = NEEDS_CUDA
ON_GPU = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 64}
each_window_size = pytest.mark.parametrize("window_size", [None, 32, 1000])
each_invariance = pytest.mark.parametrize("invariant", [False, True], ids=["", "batch invariant"])


@each_layout
@each_window_size
@each_invariance
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_one_graph_serves_growing_lengths(layout, window_size, invariant, rows):
    """Each replay appends the new tokens of its inputs, and equals float64."""
    steps, starts = 4, (0, 15, 200)
    whole = make_sequences([(start, steps * rows) for start in starts], **ON_GPU)

    def at(step):
        """The sequences at a step, whose new rows are the last ones."""
        parts = make_sequences([(start + step * rows, rows) for start in starts], **ON_GPU)
        for part, s, start in zip(parts, whole, starts):
            keys = start + (step + 1) * rows
            part.query = s.query[step * rows : (step + 1) * rows]
            part.keys, part.values, part.biases = s.keys[:keys], s.values[:keys], s.biases[:keys]
        return parts

    call = make_call(at(0), room=400, packed=False, **layout)
    table = call.arguments.get("block_table")
    if table is not None:  # pages for all steps, behind those in use
        used = [-(-(start + rows) // call.k_cache.shape[1]) for start in starts]
        taken = {page for b, n in enumerate(used) for page in table[b, :n].tolist()}
        free = [page for page in range(call.k_cache.shape[0]) if page not in taken]
        for b, n in enumerate(used):
            for j in range(n, table.shape[1]):
                table[b, j] = free.pop()
    options = {"window_size": window_size, "batch_invariant": invariant, "return_lse": True}
    call(**options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(**options)
    for step in range(steps):
        sequences = at(step)
        given = make_call(sequences, room=400, packed=False, **layout)
        call.query.copy_(given.query)
        for name in ("key", "value", "bias", "cache_seqlens"):
            call.arguments[name].copy_(given.arguments[name])
        graph.replay()
        for b, s in enumerate(sequences):
            exact = reference(s, window_size=window_size)
            for x, y in zip(captured, exact):
                torch.testing.assert_close(x[b].double(), y.double(), rtol=3e-2, atol=3e-2)


@each_layout
@each_window_size
@each_invariance
@pytest.mark.parametrize("batch", ["decoding", "chunks", "mixed"])
def test_nothing_waits_for_the_device(layout, window_size, invariant, batch):
    call = make_call(make_sequences(BATCHES[batch], **ON_GPU), **layout)
    options = {"window_size": window_size, "batch_invariant": invariant}
    call(**options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(**options)
        call(**options, relative_bias=torch.zeros(1, 1, 9, device="cuda"), sinks=torch.zeros(1, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_invariance
@pytest.mark.parametrize("page_size", [None, 48, 64])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("head_major", [False, True], ids=["keys of heads", "heads of keys"])
def test_selection_from_long_sequences(head_major, bias_dtype, page_size, invariant):
    """Several loads in flight for each thread, up to 16 parts with batch_invariant, and NaN wherever no key is."""
    lengths = (40000, 8192, 4095, 17, 16384)
    sequences = make_sequences([(n, 1) for n in lengths], kv_heads=4, bias_dtype=bias_dtype, **ON_GPU)
    options = {"window_size": 700, "batch_invariant": invariant}

    def call_of(some):
        call = make_call(some, page_size=page_size, packed=False)
        if head_major:
            call.put_heads_first()
        return call

    together = check(sequences, call=call_of(sequences), options=options)
    if invariant:
        for s, (out, lse) in zip(sequences, together):
            alone_out, alone_lse = call_of([s])(return_lse=True, **options)
            assert torch.equal(alone_out[0], out) and torch.equal(alone_lse[0], lse)


LONG_PREFIXES = {
    "chunks": [(5000, 300), (0, 300), (700, 300)],
    "mixed": [(9000, 260), (40, 1), (0, 33), (300, 0), (2100, 700), (6000, 1)],
}


@pytest.mark.parametrize("layout", [{"page_size": 64}, {"page_size": 48}, {}, {"permute": False, "spare": 0}], ids=str)
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", LONG_PREFIXES.values(), ids=LONG_PREFIXES)
def test_one_operator_serves_chunks(lengths, bias_dtype, layout, monkeypatch):
    monkeypatch.setattr(kvcache_composed, "append", None)  # what other calls are composed of
    monkeypatch.setattr(kvcache_composed, "best_and_new_keys", None)
    sequences = make_sequences(lengths, bias_dtype=bias_dtype, **ON_GPU)
    check(sequences, options={"window_size": 500}, **layout)
    check(sequences, options={"window_size": 100, "sinks": torch.randn(4, device="cuda")}, **layout)


def ramp(sign):
    return lambda x: x.copy_((sign * 2**-16 * torch.arange(len(x), device=x.device))[:, None].expand_as(x))


def mask_keys(x):
    x[torch.rand(x.shape, device=x.device) < 0.5] = -torch.inf
    x[torch.rand(x.shape, device=x.device) < 0.3] = torch.finfo(x.dtype).min


# Each changes biases (keys, heads) in place, of about 2^-10.
DISTRIBUTIONS = {
    "random": lambda x: None,
    "few values": lambda x: x.copy_((2048 * x).round() / 2048),
    "both zeros": lambda x: x.copy_(torch.where(torch.rand(x.shape, device=x.device) < 0.5, 0.0, -0.0)),
    "one value": lambda x: x.fill_(-3.0),
    "masked keys": mask_keys,
    "no visible key": lambda x: x.fill_(-torch.inf),
    "ascending": ramp(1),
    "descending": ramp(-1),
}


@pytest.mark.parametrize("page_size", [None, 48])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("change", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize("lengths", [*LONG_PREFIXES.values(), [(40000, 200)]], ids=[*LONG_PREFIXES, "several loads"])
def test_chunks_select_their_keys(lengths, change, bias_dtype, page_size):
    """Windows smaller than an m_block, and larger than some sequences; ties between keys that stay, that are evicted
    and that are new."""
    sequences = make_sequences(lengths, bias_dtype=bias_dtype, **ON_GPU)
    count_positions(sequences)
    for s in sequences:
        s.biases.mul_(2**-10)
        change(s.biases)
    for window_size in (1, 100, 2000):
        call = make_call(sequences, page_size=page_size)
        if page_size is not None:  # read in place, otherwise copied
            call.put_heads_first()
        for s, (out, _) in zip(sequences, check(sequences, call=call, options={"window_size": window_size})):
            assert_same_counts(out, s, window_size)


def allocated_by(call, **options):
    """The bytes that a call allocates, beside what it did before."""
    call(**options)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(**options)
    return torch.cuda.max_memory_allocated() - before


def test_chunks_read_keys_and_values_in_place():
    """Copies of the selected keys and values would take five times as much memory."""
    call = make_call(make_sequences([(60_000, 100)], kv_heads=4, **ON_GPU), page_size=64)
    assert allocated_by(call, window_size=50_000) < 10e6


def test_chunks_of_very_long_sequences():
    """The best keys are selected once and gathered, since each m_block would read too many biases."""
    window = 50_000
    sequences = make_sequences([(300_000, 40)], heads=2, kv_heads=1, **ON_GPU)
    call = make_call(sequences, page_size=64)
    check(sequences, call=call, options={"window_size": window})
    assert allocated_by(call, window_size=window) > window * 2 * 64 * 2


def larger_pages_of_values(call):
    call.v_cache = torch.cat((call.v_cache, torch.full_like(call.v_cache, torch.nan)), dim=1)[:, :64]


def rows_first(call):
    call.k_cache, call.v_cache = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (call.k_cache, call.v_cache))


@each_invariance
@pytest.mark.parametrize("lengths", [[(500, 150)], [(500, 150), (90, 150)]], ids=["alone", "two sequences"])
@pytest.mark.parametrize("change", [larger_pages_of_values, rows_first])
def test_strides_of_caches(change, lengths, invariant):
    """Rows of K and V with different numbers are gathered, others have numbers in units of a common stride."""
    sequences = make_sequences(lengths, **ON_GPU)
    call = make_call(sequences, page_size=64)
    change(call)
    results = check(sequences, call=call, options={"window_size": 80, "batch_invariant": invariant})
    if not invariant:
        return
    alone = make_call(sequences[:1], page_size=64, permute=False, spare=0)
    change(alone)
    out, lse = alone(window_size=80, batch_invariant=True, return_lse=True)
    assert torch.equal(out[0], results[0][0]) and torch.equal(lse[0], results[0][1])


def test_offsets_of_a_slice():
    """cu_seqlens_q that begins behind the first rows, which belong to no sequence."""
    sequences = make_sequences([(300, 200), (70, 144), (500, 100)], **ON_GPU)
    call = make_call(sequences, page_size=64, packed=True)
    whole, _ = call(window_size=60, return_lse=True)
    call.arguments["cu_seqlens_q"] = call.arguments["cu_seqlens_q"][1:]
    for name in ("cache_seqlens", "block_table"):
        call.arguments[name] = call.arguments[name][1:]
    out, _ = call(window_size=60, return_lse=True)
    torch.testing.assert_close(out[200:], whole[200:])


@pytest.mark.parametrize("position", [70, 250], ids=["in the cache", "new"])
def test_a_nan_bias_of_a_chunk_fails(position):
    program = f"""
import torch
from flash_dmattn import flash_dmattn_with_kvcache
rows = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
biases, bias = rows(1, 400, 2), rows(1, 60, 2)
(biases[:, {position}] if {position} < 200 else bias[:, {position} - 200]).fill_(torch.nan)
flash_dmattn_with_kvcache(
    rows(1, 60, 4, 64), rows(1, 400, 2, 64), rows(1, 400, 2, 64), rows(1, 60, 2, 64), rows(1, 60, 2, 64),
    bias_cache=biases, bias=bias, cache_seqlens=200, cache_batch_idx=torch.zeros(1, device="cuda", dtype=torch.int32),
    window_size=30)
torch.cuda.synchronize()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode != 0 and "the bias to select by must not be NaN" in ran.stderr


@each_invariance
@pytest.mark.parametrize("layout", [{"page_size": 64}, {"page_size": 48}, {}], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=["no bias", "float32", "bfloat16"])
@pytest.mark.parametrize("lengths", LONG_PREFIXES.values(), ids=LONG_PREFIXES)
def test_one_operator_gathers_all_keys(lengths, bias_dtype, layout, invariant, monkeypatch):
    monkeypatch.setattr(kvcache_composed, "append", None)  # what other calls are composed of
    monkeypatch.setattr(kvcache_composed, "all_keys_packed", None)
    sequences = make_sequences(lengths, bias_dtype=bias_dtype, **ON_GPU)
    options = {"batch_invariant": invariant}
    for more in ({}, {"is_causal": False, "softcap": 5.0}, {"relative_bias": torch.randn(1, 4, 99, device="cuda")}):
        check(sequences, options=options | more, biased=bias_dtype is not None, **layout)


def test_lengths_and_pages_are_checked_on_request():
    program = """
import torch
from flash_dmattn import flash_dmattn_with_kvcache
rows = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
ints = lambda *values: torch.tensor(values, device="cuda", dtype=torch.int32)
cache, biases = rows(4, 16, 2, 64), rows(4, 16, 2)

def call(seqlens, table, **options):
    out = flash_dmattn_with_kvcache(
        rows(2, 1, 4, 64), cache, cache.clone(), rows(2, 1, 2, 64), rows(2, 1, 2, 64), bias_cache=biases,
        bias=rows(2, 1, 2), cache_seqlens=ints(*seqlens), block_table=ints(*table), **options)
    assert out.isfinite().all()

for options in ({}, {"window_size": 3}, {"batch_invariant": True}, {"window_size": 3, "batch_invariant": True}):
    call((3, 20), ((0, -1), (1, 2)), **options)
for seqlens, table in (((3, 32), ((0, -1), (1, 2))), ((3, 20), ((0, -1), (1, 4))), ((3, 3), ((0, 1), (0, 2)))):
    try:
        call(seqlens, table)
    except ValueError as error:
        print(str(error).split()[0])
"""
    environment = {**os.environ, "FLASH_DMATTN_CHECK": "1"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.stdout.split() == ["cache_seqlens", "block_table", "block_table"], ran.stderr


@takes_gpu_memory(12)
@pytest.mark.parametrize("window_size", [None, 8])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_cache_of_more_than_two_to_the_31_elements(window_size, invariant):
    pages = 2**31 // (16 * 2 * 64) + 8
    sequences = make_sequences([(40, 1), (20, 1)], **ON_GPU)
    call = make_call(sequences, page_size=16, permute=False, spare=0)
    first = pages - call.k_cache.shape[0]
    for name in ("k_cache", "v_cache"):
        small = getattr(call, name)
        large = torch.zeros(pages, *small.shape[1:], dtype=small.dtype, device="cuda")
        large[first:] = small
        setattr(call, name, large)
    biases = call.arguments["bias_cache"]
    call.arguments["bias_cache"] = torch.cat((biases.new_zeros(first, *biases.shape[1:]), biases))
    call.arguments["block_table"] += first
    assert call.k_cache.numel() > 2**31
    check(sequences, call=call, options={"window_size": window_size, "batch_invariant": invariant})
    assert not call.k_cache[:first].any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"head_dim": 60}, "k_cache must have query's head dimension and a multiple of 8 on CUDA"),
        ({"dtype": torch.float32}, "query must be float16 or bfloat16 on CUDA"),
    ],
)
def test_bad_caches(change, message):
    call = make_call(make_sequences([(40, 1)], **{**ON_GPU, **change}))
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_cache_is_not_copied_to_align_it():
    call = make_call(make_sequences([(40, 1)], **ON_GPU), permute=False, spare=0)
    memory = torch.zeros(call.k_cache.numel() + 1, dtype=torch.bfloat16, device="cuda")
    call.k_cache = memory[1:].view(call.k_cache.shape)
    with pytest.raises(ValueError, match="k_cache must be aligned to 16 bytes, in its storage and in all strides"):
        call()
