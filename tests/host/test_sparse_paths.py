"""Interval masks and key lists on the CPU: garbage, window_size, expanded masks, compile, other backends."""

import pytest
import torch
from helpers import (
    check,
    inputs,
    masked_by,
    rand_intervals,
    rand_mask,
    run,
)
from sequences import Sequences, offsets

from flash_dmattn import (
    KeyIntervalMask,
    KeyLists,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_kvpacked_func,
    flash_dmattn_qkvpacked_func,
    flash_dmattn_varlen_func,
)
from flash_dmattn.backends import cpu

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


def by(sparse):
    """flash_dmattn_func with this argument `sparse`."""

    def function(*args, **options):
        return flash_dmattn_func(*args, **options, sparse=sparse)

    return function


def mask_of(kind, batch, heads, seqlen_q, seqlen_k):
    """A mask in which each row sees few keys, and some see none."""
    if kind == "intervals":
        return rand_intervals(batch, heads, seqlen_k, rows=seqlen_q, longest=max(seqlen_q // 3, 7))
    if kind == "bool":
        return rand_mask(batch, heads, max(seqlen_q, 1), seqlen_k, visible=0.05)
    return rand_mask(batch, heads, 1, seqlen_k, visible=0.4)


# Dense blocks with bool masks are in other files.
PATHS = {
    "intervals by tiles": ("intervals", "tiles"),
    "intervals by lists": ("intervals", "lists"),
    "bool by lists": ("bool", "lists"),
    "key by lists": ("key", "lists"),
}
every_path = pytest.mark.parametrize("kind, sparse", PATHS.values(), ids=PATHS)
every_list = pytest.mark.parametrize("kind", ["intervals", "bool", "key"])


@every_path
@pytest.mark.parametrize("garbage", [NAN, float("inf")])
@pytest.mark.parametrize("bias_rows", [1, 300], ids=["key", "dense"])
def test_garbage_that_no_row_sees_reaches_nothing(bias_rows, garbage, kind, sparse):
    """A list of 128 rows holds keys that most of its rows do not see: they do not affect these rows."""
    query, key, value = inputs(1, 300, 300, 4, 2, 16)
    mask = mask_of(kind, 1, 1, 300, 300)
    bias = torch.randn(1, 2, bias_rows, 300)
    dense = (mask.to_dense() if kind == "intervals" else mask).expand(1, 1, 300, 300).clone()
    blind = torch.zeros(300, dtype=torch.bool)
    blind[40:50] = True  # rows that would see garbage are themselves masked: their outputs are not compared
    dirty_keys = torch.zeros(300, dtype=torch.bool)
    dirty_keys[::17] = True
    seeing = (dense[0, 0] & dirty_keys).any(dim=1) | blind
    dout = torch.randn_like(query)
    dout[:, seeing] = 0
    dlse = torch.zeros(1, 4, 300)
    dirty = [x.masked_fill(dirty_keys[None, :, None, None], garbage) for x in (key, value)]
    clean = run(by(sparse), (query, key, value), mask, bias, dout, dlse)
    ours = run(by(sparse), (query, *dirty), mask, bias, dout, dlse)
    unseen = ~seeing
    torch.testing.assert_close(ours[0][:, unseen], clean[0][:, unseen], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1][..., unseen], clean[1][..., unseen], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[2][:, unseen], clean[2][:, unseen], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 300])
def test_no_keys_of_variable_length(rows):
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (rows, 0))
    tensors = [torch.randn(n, 2, 8) for n in (rows, 0, 0)]
    mask = torch.zeros(0, 2, dtype=torch.bool)
    out = flash_dmattn_varlen_func(*tensors, mask, None, cu_q, cu_k, rows, 0, sparse="lists")
    assert out.shape == (rows, 2, 8) and (out == 0).all()


@every_path
def test_lists_of_different_lengths(kind, sparse):
    """One row block sees everything, one nothing, the others one key."""
    if kind == "intervals":
        start = torch.zeros(1, 1, 700, dtype=torch.int32)
        end = torch.full_like(start, 128)
        end[..., 300] = 500
        mask = KeyIntervalMask(start, end)
    elif kind == "bool":
        mask = torch.zeros(1, 1, 500, 700, dtype=torch.bool)
        mask[..., :128, :] = True
        mask[..., 256:, 300] = True
    else:
        mask = torch.zeros(2, 2, 1, 700, dtype=torch.bool)
        mask[0, 0] = True
        mask[1, 1, :, 300] = True
    check(inputs(2, 500, 700, 4, 2, 16), mask, torch.randn(1, 1, 500, 700), function=by(sparse))


@every_list
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lists_made_once_serve_many_calls(causal, kind):
    mask = mask_of(kind, 1, 2, 300, 400)
    lists = KeyLists.build(mask, 300, 400, is_causal=causal)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = inputs(2, 300, 400, 4, 2, 16, dtype)
        bias = torch.randn(2, 4, 1, 400).to(dtype)
        check(tensors, lists, bias, is_causal=causal)
        out = flash_dmattn_func(*tensors, lists, bias, is_causal=causal)
        assert torch.equal(out, flash_dmattn_func(*tensors, mask, bias, is_causal=causal, sparse="lists"))
    if kind == "key":
        check(inputs(1, 9, 400, 4, 2, 16), lists, is_causal=True)


@pytest.mark.parametrize("window", [0, 1, 20, 300, 1000])
def test_window_size_makes_the_mask_in_the_call(window):
    tensors = inputs(2, 300, 300, 4, 2, 16)
    bias = torch.randn(2, 2, 1, 300)
    check(tensors, None, bias, is_causal=True, window_size=window)
    mask = KeyIntervalMask.topk(bias, window)
    out = flash_dmattn_func(*tensors, None, bias, is_causal=True, window_size=window)
    torch.testing.assert_close(out, flash_dmattn_func(*tensors, mask, bias))


def test_window_size_of_a_step_of_decoding():
    query, key, value = inputs(1, 1, 700, 4, 2, 16)
    bias = torch.randn(1, 2, 1, 700)
    visible = torch.zeros(1, 2, 1, 700, dtype=torch.bool).scatter(3, bias.topk(40).indices, True)
    got = flash_dmattn_func(query, key, value, None, bias, is_causal=True, window_size=40)
    torch.testing.assert_close(got, flash_dmattn_func(query, key, value, visible, bias))


def test_packed_forms_and_probabilities():
    qkv = torch.randn(1, 150, 3, 2, 16)
    bias = torch.randn(1, 2, 1, 150)
    mask = KeyIntervalMask.topk(bias, 10)
    options = {"is_causal": True, "return_attn_probs": True}
    out, lse, probs = flash_dmattn_func(*qkv.unbind(2), mask, bias, **options, sparse="lists")
    assert torch.equal(probs != 0, mask.to_dense())
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", probs, qkv[:, :, 2]), out)
    for got in (
        flash_dmattn_qkvpacked_func(qkv, mask, bias, **options, sparse="lists"),
        flash_dmattn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], KeyLists.build(mask, 150), bias, **options),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, (out, lse, probs)))


@pytest.mark.parametrize(
    "shape, expected",
    [((1, 1, 1, 70), (1, 1, 1, 70)), ((2, 1, 1, 70), (2, 1, 1, 70)), ((1, 4, 60, 70), (1, 4, 60, 70))],
    ids=["key", "key of each batch element", "dense"],
)
def test_an_expanded_mask_reaches_the_kernels_as_it_was(shape, expected, monkeypatch):
    seen = []
    attention = cpu.attention

    def spy(query, key, value, mask, *args, **options):
        seen.append(tuple(mask.mask.shape))
        return attention(query, key, value, mask, *args, **options)

    monkeypatch.setattr(cpu, "attention", spy)
    tensors, mask = inputs(2, 60, 70, 4, 2, 16), rand_mask(*shape)
    out = flash_dmattn_func(*tensors, mask.expand(2, 4, 60, 70), sparse="tiles")
    assert seen == [expected]
    assert torch.equal(out, flash_dmattn_func(*tensors, mask, sparse="tiles"))
    # The key dimension is not collapsed.
    flash_dmattn_func(*tensors, torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(2, 4, 60, 70), sparse="tiles")
    assert seen[-1] == (1, 1, 1, 70)


def test_an_expanded_mask_of_variable_length():
    cu = offsets([60, 10])
    rows, mask = torch.randn(70, 4, 16), rand_mask(70, 1)
    calls = [flash_dmattn_varlen_func(rows, rows, rows, x, None, cu, cu, 60, 60) for x in (mask, mask.expand(70, 4))]
    assert torch.equal(*calls)


def test_compile_with_an_expanded_mask():
    tensors, mask = inputs(2, 60, 60, 4, 2, 16), rand_mask(2, 1, 1, 60)

    def layer(query, key, value, mask):
        return flash_dmattn_func(query, key, value, mask.expand(-1, 4, 60, -1)).sin()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors, mask), layer(*tensors, mask))
    expanded = mask.expand(2, 4, 60, 60)
    torch.testing.assert_close(
        torch.compile(flash_dmattn_func, fullgraph=True, backend="aot_eager")(*tensors, expanded),
        flash_dmattn_func(*tensors, mask),
    )


@pytest.mark.parametrize("backend", ["reference", "flex"])
def test_other_backends_take_the_dense_form(backend):
    tensors = inputs(1, 130, 130, 2, 1, 16)
    bias = torch.randn(1, 1, 1, 130)
    mask = KeyIntervalMask.sliding_window(130, 130, 20)
    function = flash_dmattn_func_auto(backend)
    with torch.no_grad():
        expected = flash_dmattn_func(*tensors, mask, bias)
        for form in (mask, KeyLists.build(mask, 130), mask.to_dense()):
            torch.testing.assert_close(function(*tensors, form, bias), expected)
    with pytest.raises(
        ValueError, match=f"sparse='lists' is for the backends 'cuda' and 'cpu', got the .* '{backend}'"
    ):
        function(*tensors, mask, bias, sparse="lists")


@pytest.mark.parametrize("by", ["-inf", "least"])
@pytest.mark.parametrize("rows", [1, 130], ids=["key", "dense"])
def test_a_bias_that_masks_in_other_backends(rows, by):
    tensors = inputs(1, 130, 130, 2, 1, 16)
    masked = rand_mask(1, 1, rows, 130)
    masked[:, :, 5:7] |= rows > 1
    bias = masked_by(masked, torch.randn(1, 1, rows, 130), by)
    expected = flash_dmattn_func(*tensors, None, bias, return_lse=True)
    for backend in ("reference", "flex"):
        with torch.no_grad():
            torch.testing.assert_close(flash_dmattn_func_auto(backend)(*tensors, None, bias, return_lse=True), expected)


@pytest.mark.parametrize("sparse", ["tiles", "lists"])
@pytest.mark.parametrize("made", ["outside", "inside", "lists"])
def test_compile_fullgraph_with_dynamic_shapes(made, sparse):
    def layer(query, key, value, bias, mask):
        options = {"is_causal": True, "sparse": sparse}
        if made == "inside":
            return flash_dmattn_func(query * 2, key, value, None, bias.sin(), window_size=20, **options).cos()
        return flash_dmattn_func(query * 2, key, value, mask, bias.sin(), **options).cos()

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (150, 290):
        bias = torch.randn(1, 2, 1, seqlen)
        mask = KeyIntervalMask.topk(bias.sin(), 20)
        mask = KeyLists.build(mask, seqlen) if made == "lists" else mask
        results = []
        for function in (layer, compiled):
            leaves = [x.detach().requires_grad_() for x in (*inputs(1, seqlen, seqlen, 4, 2), bias)]
            torch.manual_seed(0)
            for x in leaves[:3]:
                x.data.normal_()
            out = function(*leaves, mask)
            results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)


def test_gradcheck():
    bias = torch.randn(1, 2, 1, 150, dtype=torch.float64)
    mask = rand_intervals(1, 2, 9, rows=140)
    leaves = [x.requires_grad_() for x in inputs(1, 140, 9, 2, 1, 8, torch.float64)]
    bias = bias[..., :9].clone().requires_grad_()
    dout = torch.randn(1, 140, 2, 8, dtype=torch.float64)

    def function(key, value, bias):
        out, lse = flash_dmattn_func(leaves[0], key, value, mask, bias, softcap=2.0, return_lse=True, sparse="lists")
        return (out * dout).sum() + lse.masked_fill(lse == -torch.inf, 0).sum()

    assert torch.autograd.gradcheck(function, (leaves[1], leaves[2], bias))


# Variable length


@every_list
def test_lists_of_variable_length(kind):
    s = Sequences()
    tensors = [torch.randn(n, h, 16) for n, h in ((s.total_q, 4), (s.total_k, 2), (s.total_k, 2))]
    lengths = (s.cu_q, s.cu_k, s.longest_q, s.longest_k)
    mask = s.mask(kind, 2)
    lists = KeyLists.build(mask, s.longest_q, s.longest_k, True, s.cu_q, s.cu_k)
    options = {"is_causal": True, "return_attn_probs": True}
    expected = flash_dmattn_varlen_func(*tensors, mask, None, *lengths, **options, sparse="tiles")
    for x, y in zip(flash_dmattn_varlen_func(*tensors, lists, None, *lengths, **options), expected):
        torch.testing.assert_close(x, y)
    with pytest.raises(ValueError, match="attn_mask holds lists of fixed length, got inputs of variable length"):
        flash_dmattn_varlen_func(*tensors, KeyLists.build(rand_mask(1, 1, 1, 9), 9), None, *lengths)
    shifted_q, shifted_k = s.cu_q.clone(), s.cu_k.clone()
    shifted_q[3] += 1
    shifted_k[1] -= 1
    if kind == "key":
        flash_dmattn_varlen_func(*tensors, lists, None, shifted_q, s.cu_k, s.longest_q + 1, s.longest_k, is_causal=True)
    else:
        with pytest.raises(ValueError, match="attn_mask holds lists of other sequences: cu_seqlens_q differs"):
            flash_dmattn_varlen_func(*tensors, lists, None, shifted_q, *lengths[1:], is_causal=True)
    with pytest.raises(ValueError, match="attn_mask holds lists of other sequences: cu_seqlens_k differs"):
        flash_dmattn_varlen_func(*tensors, lists, None, s.cu_q, shifted_k, *lengths[2:], is_causal=True)


def test_window_size_of_variable_length():
    cu = offsets([7, 150, 64])
    query, key, value = (torch.randn(221, h, 16) for h in (4, 2, 2))
    bias = torch.randn(221, 2)
    options = {"is_causal": True, "window_size": 9}
    together = flash_dmattn_varlen_func(query, key, value, None, bias, cu, cu, 150, 150, **options)
    for begin, end in zip(cu.tolist(), cu.tolist()[1:]):
        one = (x[None, begin:end] for x in (query, key, value))
        alone = flash_dmattn_func(*one, None, bias[begin:end].T[None, :, None], **options)
        torch.testing.assert_close(together[begin:end], alone[0])
