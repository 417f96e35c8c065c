"""The kernel that decodes over a cache (csrc/cuda/sm90/decode): selection, lengths and bits, against float64."""

import re
import subprocess
import sys

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from gpu_inputs import NEEDS_CUDA
from kvcaches import assert_same_counts, check, count_positions, make_call, make_sequences
from sm90 import names_of

from flash_dmattn import flash_dmattn_func, flash_dmattn_with_kvcache

pytestmark = [*NEEDS_CUDA, pytest.mark.hopper]

WINDOW = 512
LENGTHS = [0, 1, 15, 16, 17, WINDOW - 2, WINDOW - 1, WINDOW, 2047, 2048, 9000, 40000]
each_page_size = pytest.mark.parametrize("page_size", [None, 16, 48, 256])
each_bias_dtype = pytest.mark.parametrize("bias_dtype", [torch.float32, None], ids=["float32 bias", "bias"])


def sequences_of(lengths, rows=1, **sizes):
    return make_sequences([(n, rows) for n in lengths], **{"device": "cuda", "dtype": torch.bfloat16, **sizes})


def layout_of(page_size):
    return {} if page_size is None else {"page_size": page_size}


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window_size", [None, WINDOW])
def test_head_dims(head_dim, dtype, window_size):
    sequences = sequences_of([3, 700, 5000], head_dim=head_dim, dtype=dtype)
    check(sequences, options={"window_size": window_size}, page_size=64)


@each_page_size
@each_bias_dtype
@pytest.mark.parametrize("window_size", [1, WINDOW, 2048])
@pytest.mark.parametrize("appends", [True, False])
def test_lengths(page_size, bias_dtype, window_size, appends):
    sequences = sequences_of(LENGTHS, bias_dtype=bias_dtype, head_dim=64)
    check(sequences, options={"window_size": window_size}, appends=appends, **layout_of(page_size))


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (16, 2), (16, 1), (64, 1)])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_packed_query_heads(heads, rows):
    sequences = sequences_of([0, 33, 3000], rows, heads=heads[0], kv_heads=heads[1], head_dim=64)
    check(sequences, page_size=16)


def position(x):
    return torch.arange(len(x), device=x.device, dtype=torch.float32)[:, None].expand_as(x)


def sampled(x):
    """The runs of four keys that a kernel with 512 or 256 threads samples (decode/candidates.cuh). The last key is
    new, and not sampled."""
    keys = torch.arange(len(x) - 1, device=x.device)
    hit = ((keys % ((len(x) - 1) // 128) < 4) | (keys % ((len(x) - 1) // 64) < 4)) & (len(x) > 512)
    return torch.cat([hit, hit.new_zeros(1)])[:, None]


def scaled_down(x):
    """Visible biases times a power of 2, at most 2**-8, so that softmax weights are nearly equal. Masked ones stay."""
    visible = x > torch.finfo(x.dtype).min
    if not visible.any():
        return x
    largest = x[visible].abs().max().double().clamp(min=2.0**-100)
    return torch.where(visible, x.double() * 2.0 ** (-8 - largest.log2().ceil()), x)


DISTRIBUTIONS = {
    "ties": lambda x: (x * 2).round() / 2,
    "equal": torch.zeros_like,
    "masked": lambda x: x.masked_fill(torch.rand_like(x, dtype=torch.float32) < 0.9, -torch.inf),
    "lowest": lambda x: x.masked_fill(torch.rand_like(x, dtype=torch.float32) < 0.9, torch.finfo(x.dtype).min),
    "all masked": lambda x: torch.full_like(x, -torch.inf),
    "few visible": lambda x: torch.where(x > 3, x, torch.where(x > 0, torch.finfo(x.dtype).min, -torch.inf)),
    "near 1": lambda x: 1 + x.abs() * 1e-6,
    "negative": lambda x: -x.abs() * 1e-3,
    "both zeros": lambda x: x * 0,
    "rising": lambda x: position(x) / len(x),
    "falling": lambda x: -position(x) / len(x),
    "large in one place": lambda x: x + 8 * ((position(x) / len(x) - 0.4).abs() < 0.01),
    "smooth": lambda x: torch.sin(position(x) / 300) + x * 0.01,
    "many octaves": lambda x: torch.exp(4 * x.float()).clamp(max=6e4) * x.sign(),
    "outliers": lambda x: torch.where(x > 2.2, x * 1e4, x * 1e-4),
    "few positive": lambda x: x.clamp(min=1.5) - 1.5,
    "a sample too large": lambda x: x + 8 * sampled(x),
    "a sample too small": lambda x: x - 8 * sampled(x),
    "near the lowest": lambda x: torch.where(x > 1, x, torch.finfo(x.dtype).min * (0.6 + 0.4 * (x < -1).to(x.dtype))),
}


each_distribution = pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@each_distribution
@each_bias_dtype
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch invariant"])
@pytest.mark.parametrize("contiguous", ["heads", "keys"])
def test_distributions(distribution, bias_dtype, invariant, contiguous):
    sequences = sequences_of([600, 9000, 40000], bias_dtype=bias_dtype, head_dim=64)
    for sequence in sequences:
        sequence.biases = distribution(sequence.biases).to(sequence.biases.dtype)
    call = make_call(sequences, page_size=64)
    if contiguous == "keys":
        call.put_heads_first()
    check(sequences, call=call, options={"window_size": WINDOW, "batch_invariant": invariant})


def counting_sequences(lengths, distribution, dtype):
    sequences = sequences_of(lengths, dtype=dtype, head_dim=64)
    count_positions(sequences)
    for s in sequences:
        s.biases = scaled_down(distribution(s.biases)).to(dtype)
    return sequences


@each_distribution
@each_dtype
@pytest.mark.parametrize("page_size", [None, 24])
def test_every_selected_key(distribution, dtype, page_size):
    sequences = counting_sequences([511, 2000, 9001, 40007, 130000], distribution, dtype)
    call = make_call(sequences, page_size=page_size, room=131072)  # biases of a head are aligned
    call.put_heads_first()
    for s, (out, _) in zip(sequences, check(sequences, call=call, options={"window_size": WINDOW})):
        assert_same_counts(out, s, WINDOW)


@each_distribution
@each_dtype
@pytest.mark.parametrize("page_size", [None, 16])
def test_long_segments(distribution, dtype, page_size):
    """With so many sequences a warp has 4,096 keys, more than it waits for at first."""
    (sequence,) = counting_sequences([65000], distribution, dtype)
    call = make_call([sequence], page_size=page_size, appends=False, room=65536)  # biases of a head are aligned
    call.put_heads_first()
    copies = torch.cuda.get_device_properties(0).multi_processor_count // 2
    call.query = call.query.expand(copies, -1, -1, -1).contiguous()
    for name in {"cache_seqlens", "block_table", "cache_batch_idx"} & call.arguments.keys():
        call.arguments[name] = call.arguments[name].expand(copies, *call.arguments[name].shape[1:]).contiguous()
    out = call(window_size=WINDOW)
    assert_same_counts(out[0], sequence, WINDOW)
    assert torch.equal(out, out[:1].expand_as(out))


@each_dtype
@each_bias_dtype
def test_sixteen_warps(bias_dtype, dtype):
    """A sequence of so many keys gets CTAs of 16 warps."""
    sequences = sequences_of([500_000], heads=4, kv_heads=1, head_dim=128, dtype=dtype, bias_dtype=bias_dtype)
    call = make_call(sequences, page_size=64)
    call.put_heads_first()
    check(sequences, call=call, options={"window_size": 2048})
    assert re.search("decode_kernel<[^<>]*, 128, 16, (true|false)>", names_of(lambda: call(window_size=2048)))


@each_dtype
@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_sequences_that_write_to_one_page(bias, dtype):
    """All pages of all sequences are one, as in padded batches: new tokens are written where others read. Each key is
    the one token or the other."""
    batch, pages, page_size = 66, 4096, 16
    query, key, value = (torch.randn(batch, 1, h, 64, device="cuda").to(dtype) for h in (8, 2, 2))
    k_cache, v_cache = torch.zeros(2, 8, page_size, 2, 64, device="cuda", dtype=dtype)
    bias_cache = torch.zeros(8, 2, page_size, device="cuda", dtype=dtype).transpose(1, 2)
    arguments = {
        "key": key,
        "value": value,
        "bias_cache": bias_cache,
        "bias": bias * torch.randn(batch, 1, 2, device="cuda").to(dtype),
        "block_table": torch.zeros(batch, pages, device="cuda", dtype=torch.int32),
        "cache_seqlens": pages * page_size - 1 - torch.arange(batch, device="cuda", dtype=torch.int32),
    }
    for _ in range(5):
        out = flash_dmattn_with_kvcache(query, k_cache, v_cache, **arguments, window_size=WINDOW)
        assert out.abs().max() <= max(value.abs().max(), v_cache.abs().max()) * 1.01


@each_bias_dtype
def test_biases_with_neighbouring_keys(bias_dtype):
    """Memory in which a head's keys are neighbours is read 16 bytes at a time: the same bits."""
    sequences = sequences_of([600, 9000, 40000], bias_dtype=bias_dtype, head_dim=64)
    call = make_call(sequences, page_size=64)
    options = {"window_size": WINDOW, "return_lse": True}
    plain = call(**options)
    call.put_heads_first()
    for ours, expected in zip(call(**options), plain):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("window_size", [None, WINDOW])
def test_a_row_has_the_same_bits_beside_longer_chunks(window_size):
    options = {"window_size": window_size, "batch_invariant": True, "return_lse": True}
    sequences = make_sequences([(3000, 1), (100, 40), (20000, 1)], device="cuda", dtype=torch.bfloat16, head_dim=64)
    out, lse = make_call(sequences, page_size=64)(**options)
    for sequence, row in ((sequences[0], 0), (sequences[2], 41)):
        alone, own_lse = make_call([sequence], page_size=64, packed=False, room=50000)(**options)
        assert torch.equal(alone[0, 0], out[row]) and torch.equal(own_lse[0, :, 0], lse[:, row])


@pytest.mark.parametrize("window_size", [None, WINDOW])
@pytest.mark.parametrize("page_size", [None, 64])
def test_a_row_has_the_same_bits_from_every_kernel(window_size, page_size):
    """Calls of single rows whose biases have neighbouring keys have a kernel of their own."""
    options = {"window_size": window_size, "batch_invariant": True, "return_lse": True}
    sequences = make_sequences([(3000, 1), (100, 40), (20000, 1)], device="cuda", dtype=torch.bfloat16, head_dim=64)
    for number, row in ((0, 0), (2, 41)):
        results = []
        for heads_first in (False, True):
            alone, together = (
                make_call(given, page_size=page_size, room=24000) for given in ([sequences[number]], sequences)
            )
            if heads_first:
                alone.put_heads_first()
                together.put_heads_first()
            out, lse = alone(**options)
            results.append((out[0, 0], lse[0, :, 0]))
            out, lse = together(**options)
            results.append((out[row], lse[:, row]))
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.parametrize("window_size", [None, WINDOW])
def test_decoding_is_one_kernel(window_size):
    call = make_call(sequences_of([600, 9000], head_dim=64), page_size=64)
    call(window_size=window_size)
    names = names_of(lambda: call(window_size=window_size))
    assert names.count("decode_kernel") == 1 and names.count("kernel") == 1, names


@pytest.mark.parametrize("lengths", [None, [0, 40, 3000]])
@pytest.mark.parametrize("bias_heads", [1, 2])
def test_one_row_of_flash_dmattn_func_is_one_kernel(lengths, bias_heads):
    """The same kernel as for a cache: the same bits."""
    query, key, value = (torch.randn(3, n, h, 64, device="cuda").bfloat16() for n, h in ((1, 8), (3000, 2), (3000, 2)))
    bias = torch.randn(3, bias_heads, 1, 3000, device="cuda").bfloat16()
    seqlens = None if lengths is None else torch.tensor(lengths, device="cuda", dtype=torch.int32)
    options = {"is_causal": True, "window_size": WINDOW, "return_lse": True}

    def attend():
        return flash_dmattn_func(query, key, value, None, bias, cache_seqlens=seqlens, **options)

    bias_cache = bias.squeeze(2).transpose(1, 2).expand(3, 3000, 2)
    all_keys = 3000 if seqlens is None else seqlens
    expected = flash_dmattn_with_kvcache(query, key, value, bias_cache=bias_cache, cache_seqlens=all_keys, **options)
    for ours, theirs in zip(attend(), expected):
        assert torch.equal(ours, theirs)
    names = names_of(attend)
    assert names.count("decode_kernel") == 1 and names.count("kernel") == 1, names


@pytest.mark.parametrize("bias_heads", [1, 2, 8])
def test_one_row_with_gradients_or_a_bias_of_each_query_head(bias_heads):
    """No kernel decodes these: the same values from key lists."""
    query, key, value = (torch.randn(3, n, h, 64, device="cuda").bfloat16() for n, h in ((1, 8), (3000, 2), (3000, 2)))
    bias = torch.randn(3, bias_heads, 1, 3000, device="cuda").bfloat16()
    options = {"is_causal": True, "window_size": WINDOW}
    decoded = flash_dmattn_func(query, key, value, None, bias, **options)
    query.requires_grad_()
    out = flash_dmattn_func(query, key, value, None, bias, **options)
    torch.testing.assert_close(out, decoded, rtol=0.02, atol=0.02)
    (gradient,) = torch.autograd.grad(out.sum(), query)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("bits", [0x7FC0, -1], ids=["nan", "negative nan"])
@pytest.mark.parametrize("contiguous", ["heads", "keys"])
def test_a_nan_bias_is_refused_like_elsewhere(contiguous, bits):
    """As in topk_lists: a device assertion, which ends the process."""
    program = f"""
import torch
from flash_dmattn import flash_dmattn_with_kvcache
rows = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
bias = rows(1, 4096, 2) if "{contiguous}" == "heads" else rows(1, 2, 4096).transpose(1, 2)
bias.view(torch.int16)[0, 77, 1] = {bits}
flash_dmattn_with_kvcache(rows(1, 1, 4, 64), rows(1, 4096, 2, 64), rows(1, 4096, 2, 64), bias_cache=bias,
                          cache_seqlens=torch.tensor([4000], device="cuda", dtype=torch.int32), window_size=64)
torch.cuda.synchronize()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode != 0 and "the bias to select by must not be NaN" in ran.stdout + ran.stderr


def test_a_tangent_is_refused():
    """The decoding kernel, which is called without the dispatcher, would lose it."""
    tensors = [torch.randn(1, n, 2, 64, device="cuda", dtype=torch.bfloat16) for n in (1, 4096, 4096)]
    bias = torch.randn(1, 2, 1, 4096, device="cuda", dtype=torch.bfloat16)
    refused = pytest.raises(NotImplementedError, match="does not support forward-mode AD .* 'reference'")
    for i in range(3):
        with torch.no_grad(), forward_ad.dual_level(), refused:
            dual = forward_ad.make_dual(tensors[i], torch.ones_like(tensors[i]))
            given = [*tensors[:i], dual, *tensors[i + 1 :]]
            flash_dmattn_func(*given, None, bias, is_causal=True, window_size=64)
