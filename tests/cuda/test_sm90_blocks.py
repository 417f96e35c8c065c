"""The dense sm90 kernels: more work tiles than CTAs, strides that TMA reads, and gradients of a shared bias."""

import functools

import pytest
import torch
from gpu_inputs import CAUSAL, intervals, mask_of, on_gpu, randn, takes_gpu_memory
from helpers import check, reference, surrounded
from sm90 import BIASES, bias_of, generations

from flash_dmattn import KeyLists, flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.hopper, pytest.mark.usefixtures("use")]


@takes_gpu_memory(12)
@CAUSAL
@BIASES
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_more_work_tiles_than_ctas(head_dim, pairs, causal):
    """At least twice as many: a CTA computes several work tiles, and its pipeline wraps around many times."""
    batch, heads, seqlen = 2, 16, 1800
    assert batch * heads * (seqlen // 192) > 2 * torch.cuda.get_device_properties(0).multi_processor_count
    tensors = on_gpu(batch, seqlen, seqlen, heads, heads // 2, head_dim)
    check(tensors, None, bias_of(pairs, 1, heads, seqlen, seqlen), is_causal=causal)


@takes_gpu_memory(12)
@pytest.mark.parametrize("mask_rows", [1, 1800])
def test_more_masked_work_tiles_than_ctas(mask_rows):
    mask = mask_of(2, 1, mask_rows, 1800)
    mask[1, :, :, 300:900] = False
    mask[0, :, :, 1000:] = True
    check(on_gpu(2, 1800, 1800, 16, 2, 64), mask, randn(2, 1, 1, 1800))


@pytest.mark.parametrize(
    "layout", ["heads before rows", "every other row", "part of the columns", "one batch, one head"]
)
def test_strides_that_tma_reads(layout):
    query, key, value = on_gpu(2, 200, 264, 4, 4, 64)
    bias, dout = randn(2, 4, 200, 264), torch.randn_like(query) / 8
    if layout == "heads before rows":
        query, key, value, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value, dout))
        bias = bias.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "every other row":
        query, key, value = (torch.cat([x, x], 1).unflatten(1, (-1, 2))[:, :, 1] for x in (query, key, value))
        bias = randn(2, 4, 400, 264)[:, :, ::2]
    elif layout == "part of the columns":
        query, key, value, bias = (surrounded(x, margin=8) for x in (query, key, value, bias))
    else:
        query, key, value, dout, bias = (
            query[:1, :, :1],
            key[1:, :, 1:2],
            value[:1, :, 3:],
            dout[1:, :, 2:3],
            bias[:1, :1],
        )
    check((query, key, value), mask_of(1, 1, 200, 264), bias, dout=dout, is_causal=True)


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_a_dense_bias_shared_by_batch_elements(head_dim, batch, heads):
    """Batch elements see different blocks, and no batch element sees some blocks."""
    tensors = on_gpu(batch, 300, 440, 4, 2, head_dim)
    mask = mask_of(batch, 2, 300, 440)
    mask[0, :, :, :256] = False
    mask[:, 1, 128:256] = False
    bias = randn(1, heads, 300, 440)
    *_, dbias = check(tensors, mask, bias, is_causal=True)
    if heads == 4:
        assert (dbias[0][~mask.any(0).repeat_interleave(2, 0)] == 0).all()
    check(tensors, None, bias)
    check(tensors, mask, bias, deterministic=True)
    check(tensors, intervals(batch, 1, 440, rows=300), bias, sparse="tiles", softcap=4.0)
    check(tensors, intervals(batch, 1, 440, rows=300), bias, sparse="tiles")
    check([x.half() for x in tensors], mask, bias.half())


@CAUSAL
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("batch, batches", [(3, 1), (8, 1), (6, 2)])
@pytest.mark.parametrize("head_dim, dtype", [(64, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)])
def test_the_gradient_of_a_shared_dense_bias_is_repeatable(head_dim, dtype, batch, batches, deterministic, causal):
    """Batch elements add to it in order, from CTAs that see different blocks and take different times."""
    tensors = (*on_gpu(batch, 700, 1000, 8, 4, head_dim), randn(batches, 8, 700, 1000))
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    mask = mask_of(batch, 1, 700, 1000)
    mask[1::2, :, :640] = False
    mask[::2, :, :, 300:900] = False
    out = flash_dmattn_func(*leaves[:3], mask, leaves[3], is_causal=causal, deterministic=deterministic)
    dout = torch.randn_like(out)
    first, *others = (torch.autograd.grad(out, leaves[3], dout, retain_graph=True)[0] for _ in range(10))
    assert first.isfinite().all() and first.any()
    assert all(torch.equal(first, x) for x in others)


def gradients_and_memory(out, leaves, dout):
    """The gradients, and the peak memory of the backward in addition to them, in MiB."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(out, leaves, dout)
    outputs = sum(x.numel() * x.element_size() for x in gradients)
    return gradients, (torch.cuda.max_memory_allocated() - before - outputs) / 2**20


@takes_gpu_memory(6)
def test_several_launches_with_a_dense_bias():
    """The gradients are those of calls with a few batch elements. One launch would take 256 MiB of sums."""
    tensors = (*on_gpu(32, 1024, 1024, 8, 8, 256), randn(32, 8, 1024, 1024))
    dout = torch.randn_like(tensors[0])

    def gradients(part):
        *leaves, bias = (x[part].detach().requires_grad_() for x in tensors)
        out = flash_dmattn_func(*leaves, None, bias, is_causal=True, deterministic=True)
        return gradients_and_memory(out, (*leaves, bias), dout[part])

    whole, mib = gradients(slice(None))
    assert mib < 128
    for first in range(0, 32, 4):
        part = slice(first, first + 4)
        assert all(torch.equal(ours[part], few) for ours, few in zip(whole, gradients(part)[0]))


@takes_gpu_memory(4)
@CAUSAL
@pytest.mark.parametrize(
    "batch, heads, kv_heads, deterministic, mib", [(1, 16, 16, True, 64), (2, 16, 8, True, 128), (1, 16, 16, False, 64)]
)
def test_long_sequences_take_their_heads_in_several_launches(batch, heads, kv_heads, deterministic, mib, causal):
    """The gradients are those of calls with a few heads, and the sums of dQ take less memory."""
    seqlen, some = 32768, 4
    leaves = [x.requires_grad_() for x in on_gpu(batch, seqlen, seqlen, heads, kv_heads, 64)]
    table = torch.randn(1, heads, 257, device="cuda").requires_grad_()
    call = functools.partial(flash_dmattn_func, is_causal=causal, deterministic=deterministic)
    out = call(*leaves, relative_bias=table)
    dout = torch.randn_like(out)
    gradients, added = gradients_and_memory(out, (*leaves, table), dout)
    assert added < mib

    group = some * kv_heads // heads
    for b in range(batch):
        for first in range(0, heads, some):
            keys = slice(first * kv_heads // heads, first * kv_heads // heads + group)
            parts = (slice(first, first + some), keys, keys)
            xs = [x.detach()[b : b + 1, :, part].requires_grad_() for x, part in zip(leaves, parts)]
            part = table.detach()[:, first : first + some].requires_grad_()
            got = torch.autograd.grad(
                call(*xs, relative_bias=part), (*xs, part), dout[b : b + 1, :, first : first + some]
            )
            for ours, single, heads_of in zip(gradients, got, parts):
                ours = ours[b : b + 1, :, heads_of]
                if deterministic:
                    assert torch.equal(ours, single)
                else:
                    torch.testing.assert_close(ours, single, rtol=2e-2, atol=1e-4)
            if deterministic and batch == 1:
                assert torch.equal(gradients[3][:, first : first + some], got[3])


@takes_gpu_memory(6)
@CAUSAL
@pytest.mark.parametrize("kv_heads, total, limit", [(16, 33000, 64), (8, 66000, 128)])
def test_packed_long_sequences_take_their_heads_in_several_launches(kv_heads, total, limit, causal):
    lengths = torch.tensor([0, 9000, 9001, total], dtype=torch.int32, device="cuda")
    query, key, value = (x[0] for x in on_gpu(1, total, total, 16, kv_heads, 64))
    dout = torch.randn_like(query)
    group = 16 // kv_heads

    def gradients(first, kv_heads):
        keys, heads = slice(first, first + kv_heads), slice(first * group, (first + kv_heads) * group)
        leaves = [x.detach().requires_grad_() for x in (query[:, heads], key[:, keys], value[:, keys])]
        options = {"max_seqlen_q": total - 9001, "max_seqlen_k": total - 9001, "is_causal": causal}
        out = flash_dmattn_varlen_func(
            *leaves, cu_seqlens_q=lengths, cu_seqlens_k=lengths, deterministic=True, **options
        )
        return gradients_and_memory(out, leaves, dout[:, heads])

    whole, mib = gradients(0, kv_heads)
    assert mib < limit
    for first in range(0, kv_heads, 4):
        keys, heads = slice(first, first + 4), slice(first * group, (first + 4) * group)
        few, _ = gradients(first, 4)
        assert all(torch.equal(ours[:, part], x) for ours, x, part in zip(whole, few, (heads, keys, keys)))


def test_gradients_of_lse_alone():
    leaves = [x.requires_grad_() for x in (*on_gpu(2, 200, 264, 4, 2, 64), randn(2, 4, 200, 264))]
    dlse = torch.randn(2, 4, 200, device="cuda")
    results = []
    for function, xs in ((flash_dmattn_func, leaves), (reference, [x.double() for x in leaves])):
        _, lse = function(*xs[:3], None, xs[3], return_lse=True, is_causal=True)
        results.append(torch.autograd.grad(lse, leaves, dlse.to(lse), allow_unused=True, materialize_grads=True))
    for ours, exact in zip(*results):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("least", [-1e9, -1e10, -2e38])
def test_rows_of_large_biases(least, batch, use):
    """Rows of large negative biases are not masked: the softmax is over the other parts of the scores."""
    bias = torch.full((1, 4, 200, 264), least, device="cuda", dtype=torch.bfloat16)
    bias[:, :, ::2, :100] = 0
    tensors = on_gpu(batch, 200, 264, 4, 4, 32)
    exact, exact_lse = reference(*(x.double() for x in tensors), None, bias.double(), return_lse=True)
    for architecture in ("sm80", "sm90"):
        use(architecture)
        out, lse = flash_dmattn_func(*tensors, None, bias, return_lse=True)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-4)
        # float32 loses what is added to such a bias: all keys have the same score.
        for rows, right in ((slice(0, None, 2), exact[:, ::2]), (slice(1, None, 2), tensors[2].double().mean(1, True))):
            torch.testing.assert_close(out[:, rows].double(), right.expand_as(out[:, rows]), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sparse", ["tiles", "lists"])
@pytest.mark.parametrize("large", [2e4, -2e4, -1e9, -2e38, 2e38])
def test_key_biases_that_are_too_large_to_start_the_scores_from(large, sparse):
    """Rows whose first blocks have such biases, whose last have, and that see nothing else."""
    query, key, value = on_gpu(1, 700, 1000, 4, 2, 64)
    bias = torch.randn(3, 2, 1, 1000, device="cuda")
    bias[0, 0, :, :140] = large
    bias[0, 1, :, 900:] = large
    bias[1] = large
    bias[2, 0, :, 500] = large
    bias[:, :, :, 300:330] = -torch.inf
    tensors = [x.expand(3, -1, -1, -1) for x in (query, key, value)]
    mask = torch.rand(3, 2, 700, 1000, device="cuda") < 0.9
    mask[0, 0, ::3, :140] = False
    mask[2, 1, :, 10:20] = False
    bias[2, 1, :, 10:20] = torch.nan
    attn_mask = KeyLists.build(mask, 700) if sparse == "lists" else mask
    out, lse = flash_dmattn_func(*tensors, attn_mask, bias, return_lse=True)

    finite = bias.double().masked_fill(bias.isnan(), 0)
    exact, exact_lse = reference(*(x.double() for x in tensors), mask, finite, return_lse=True)
    if abs(large) > 1e8:  # float32 loses what is added to such a bias: all keys have the same score
        zeros, same = torch.zeros_like(query).double(), torch.where(bias[1:2].isfinite(), 0.0, -torch.inf).double()
        exact[1] = reference(zeros, key.double(), value.double(), mask[1:2], same)[0]
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=2e-3)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("course", ["rising", "falling", "late"])
@CAUSAL
@BIASES
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_maxima_that_change_along_the_keys(head_dim, pairs, causal, course):
    """The forward computes exponentials with an earlier maximum, until a sum shows that it no longer serves."""
    query, key, value = on_gpu(2, 700, 1304, 4, 2, head_dim)
    factors = torch.linspace(0.01, 8, 1304, device="cuda")
    if course == "falling":
        factors = factors.flip(0)
    elif course == "late":
        factors = torch.ones_like(factors)
        factors[-3] = 20
    tensors = [query, (key * factors[:, None, None]).to(key), value]
    bias = bias_of(pairs, 2, 4, 700, 1304)
    exact, exact_lse = reference(
        *(x.double() for x in tensors), None, None if bias is None else bias.double(), is_causal=causal, return_lse=True
    )
    out, lse = flash_dmattn_func(*tensors, None, bias, is_causal=causal, return_lse=True)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "height, width",
    [
        (16, 16),
        (35, 16),
        (32, 32),
        (11, 48),
        (16, 64),
        (8, 80),
        (9, 96),
        (9, 112),
        (5, 128),
        (5, 192),
        (3, 256),
        (1, 512),
    ],
)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 192, 256])
def test_relative_biases_of_grids(head_dim, height, width, deterministic):
    """Blocks begin and end within a row of the grid, and in several."""
    tokens, tables = height * width, 1 if deterministic else 2
    bias = torch.randn(tables, 4, 2 * height - 1, 2 * width - 1, device="cuda")
    bias[:, 0, ::2] = -torch.inf
    bias[:, 0, height - 1] = 1.0  # every row sees keys
    options = {"relative_bias": bias, "grid": (height, width), "deterministic": deterministic}
    tensors = on_gpu(2, tokens, tokens, 4, 2, head_dim)
    assert generations(tensors, **options) == ({"sm90"}, {"sm90"})
    check(tensors, **options)
    check(tensors, mask_of(2, 1, tokens, tokens), is_causal=True, **options)


@pytest.mark.parametrize("height, width", [(11, 24), (2, 144), (1, 320)])
def test_widths_of_grids_that_use_the_sm80_kernels(height, width):
    """No multiple of 16; blocks of 64 or of 128 tokens that span more positions than a segment has."""
    options = {
        "relative_bias": torch.randn(1, 4, 2 * height - 1, 2 * width - 1, device="cuda"),
        "grid": (height, width),
    }
    tensors = on_gpu(2, height * width, height * width, 4, 2, 64)
    assert generations(tensors, **options) == ({"sm80"}, {"sm80"})
    check(tensors, **options)


@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_long_grids(head_dim):
    tensors = on_gpu(1, 64 * 128, 64 * 128, 2, 1, head_dim)
    bias = torch.randn(1, 2, 127, 255, device="cuda")
    bias[:, 1, :40] = bias[:, 1, 90:] = -torch.inf
    check(tensors, relative_bias=bias, grid=(64, 128))


@CAUSAL
@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_few_rows_of_many_keys(head_dim, is_relative, causal):
    """Four m_blocks, the last one partly filled, and a part of an n_block at the end."""
    tensors = on_gpu(1, 500, 8200, 4, 2, head_dim)
    bias = torch.randn(1, 4, 2 * 3000 + 1, device="cuda") if is_relative else None
    if is_relative:
        bias[:, 1, 3100:] = bias[:, 2, :2500] = -torch.inf  # m_blocks see other n_blocks
        bias[:, 3, :2900] = bias[:, 3, 3050:] = -torch.inf
    check(tensors, is_causal=causal, relative_bias=bias)


@takes_gpu_memory(8)
@CAUSAL
def test_more_work_tiles_of_long_sequences_than_ctas(causal, use):
    tensors = on_gpu(1, 8192, 8192, 16, 4, 128)
    ours = flash_dmattn_func(*tensors, is_causal=causal)
    assert torch.equal(flash_dmattn_func(*tensors, is_causal=causal), ours)
    use("sm80")
    torch.testing.assert_close(flash_dmattn_func(*tensors, is_causal=causal), ours, rtol=2e-2, atol=2e-3)


@takes_gpu_memory(16)
@pytest.mark.parametrize("which", ["rows", "keys"])
def test_rows_of_more_than_2_31_elements(which):
    """Sq or Sk x B x H x D > 2^31; the other is short."""
    many, few, heads, head_dim = 131136, 136, 64, 128
    rows, keys = (many, few) if which == "rows" else (few, many)
    assert 2 * many * heads * head_dim > 2**31

    def made(seqlen):
        return torch.empty(2, seqlen, heads, head_dim, dtype=torch.bfloat16, device="cuda").normal_()

    query = made(rows)
    key = made(keys)
    value = made(keys) if which == "rows" else key
    bias = randn(1, heads, 1, keys)
    out, lse = flash_dmattn_func(query, key, value, attn_bias=bias, return_lse=True)
    for batch, head, last in ((0, 0, slice(0, 70)), (1, heads - 1, slice(rows - 70, rows))):
        one = [query[batch, None, last, head, None], *(x[batch, None, :, head, None] for x in (key, value))]
        exact, exact_lse = reference(*(x.double() for x in one), None, bias[:, head, None].double(), return_lse=True)
        ours, atol = out[batch, None, last, head, None].double(), 2e-2 * exact.abs().max().item()
        torch.testing.assert_close(ours, exact, rtol=2e-2, atol=atol)
        torch.testing.assert_close(lse[batch, head, last].double(), exact_lse[0, 0], rtol=1e-4, atol=1e-3)


@takes_gpu_memory(20)
def test_a_dense_bias_of_more_than_2_31_elements():
    seqlen = 46408
    bias = torch.empty(1, 1, seqlen, seqlen, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    assert bias.numel() > 2**31
    leaves = [*(x.requires_grad_() for x in on_gpu(1, seqlen, seqlen, 1, 1, 32)), bias]
    dout = torch.randn_like(leaves[0])
    out = flash_dmattn_func(*leaves[:3], None, bias)
    dq, *_, dbias = torch.autograd.grad(out, leaves, dout)
    tail = slice(seqlen - 70, seqlen)
    inputs = [leaves[0][:, tail], *leaves[1:3], bias[:, :, tail]]
    exact_leaves = [x.detach().double().requires_grad_() for x in inputs]
    exact = reference(*exact_leaves[:3], None, exact_leaves[3])
    exact_dq, *_, exact_dbias = torch.autograd.grad(exact, exact_leaves, dout[:, tail].double())
    for ours, right in ((out[:, tail], exact), (dq[:, tail], exact_dq), (dbias[:, :, tail], exact_dbias)):
        torch.testing.assert_close(ours.double(), right, rtol=2e-2, atol=2e-2 * right.abs().max().item())
