"""Packed sequences: packed forms, padding helpers, memory, invalid lengths."""

import re

import pytest
import torch
from helpers import IS_PYTORCH_2_9, rand_mask
from sequences import gradients, offsets

from flash_dmattn import (
    KeyIntervalMask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    flash_dmattn_varlen_kvpacked_func,
    flash_dmattn_varlen_qkvpacked_func,
    flash_dmattn_with_kvcache,
    pad_input,
    unpad_input,
)

# PyTorch 2.9 traces results whose sizes depend on values only with these options; later versions need none.
SIZES_FROM_VALUES = torch._dynamo.config.patch(
    {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True} if IS_PYTORCH_2_9 else {}
)


def test_packed_forms_are_the_same_function():
    cu, longest = offsets([7, 70, 3]), 70
    qkv = torch.randn(80, 3, 2, 16, requires_grad=True)
    bias = torch.randn(80, 2, 70)
    options = {"is_causal": True, "softcap": 3.0, "return_lse": True}
    expected = flash_dmattn_varlen_func(*qkv.unbind(1), None, bias, cu, cu, longest, longest, **options)
    for got in (
        flash_dmattn_varlen_qkvpacked_func(qkv, None, bias, cu, longest, **options),
        flash_dmattn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], None, bias, cu, cu, longest, longest, **options),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("window_size", [None, 4])
def test_offsets_that_are_a_view(window_size):
    both = torch.stack((offsets([3, 5]), offsets([6, 2])), dim=1)
    query, key, value = (torch.randn(8, 2, 8) for _ in range(3))
    options = {"attn_bias": torch.randn(8, 2), "is_causal": True, "window_size": window_size}
    sequences = {"max_seqlen_q": 5, "max_seqlen_k": 6}
    for name, offset in (("cu_seqlens_q", both[:, 0]), ("cu_seqlens_k", both[:, 1])):
        sequences[name] = offset
    ours = flash_dmattn_varlen_func(query, key, value, **options, **sequences)
    sequences |= {name: sequences[name].clone() for name in ("cu_seqlens_q", "cu_seqlens_k")}
    assert torch.equal(ours, flash_dmattn_varlen_func(query, key, value, **options, **sequences))


def test_probabilities():
    cu_q, cu_k = offsets([3, 5]), offsets([6, 2])
    query, key, value = (torch.randn(8, 2, 8) for _ in range(3))
    bias = torch.randn(8, 2)
    out, _, probs = flash_dmattn_varlen_func(
        query, key, value, None, bias, cu_q, cu_k, 5, 6, is_causal=True, return_attn_probs=True
    )
    assert probs.shape == (2, 2, 5, 6)
    torch.testing.assert_close(torch.einsum("hij,jhd->ihd", probs[0, :, :3], value[:6]), out[:3])
    torch.testing.assert_close(torch.einsum("hij,jhd->ihd", probs[1, :, :, :2], value[6:]), out[3:])
    assert (probs[1, :, :, 2:] == 0).all() and (probs[0, :, 3:] == 0).all()


def test_probabilities_with_a_relative_bias_per_sequence():
    cu = offsets([5, 0, 9])
    query, key, value = (torch.randn(14, 2, 8, dtype=torch.bfloat16) for _ in range(3))
    table = 4 * torch.randn(1, 2, 7, dtype=torch.bfloat16)
    table[..., 0] = torch.finfo(torch.bfloat16).min

    def probs(table):
        options = {"relative_bias": table, "return_attn_probs": True}
        return flash_dmattn_varlen_func(query, key, value, None, None, cu, cu, 9, 9, **options)[2]

    assert torch.equal(probs(table.repeat(3, 1, 1)), probs(table))


def test_unpadded_equals_padded():
    """A padded batch through unpad_input, attention and pad_input."""
    hidden = torch.randn(3, 50, 2, 16)
    real = torch.arange(50) < torch.tensor([[50], [0], [17]])
    tokens, indices, cu_seqlens, longest = unpad_input(hidden, real.long())
    assert cu_seqlens.tolist() == [0, 50, 50, 67] and longest == 50 and cu_seqlens.dtype == torch.int32
    out = flash_dmattn_varlen_func(tokens, tokens, tokens, None, None, cu_seqlens, cu_seqlens, longest, longest)
    padded = flash_dmattn_func(hidden, hidden, hidden, real[:, None, None, :])
    torch.testing.assert_close(pad_input(out, indices, 3, 50), padded.masked_fill(~real[..., None, None], 0))


@SIZES_FROM_VALUES
def test_unpadded_in_a_compiled_graph():
    """The longest length is known only when the graph runs."""

    def attention(hidden, real):
        tokens, indices, cu_seqlens, longest = unpad_input(hidden, real)
        out = flash_dmattn_varlen_func(tokens, tokens, tokens, None, None, cu_seqlens, cu_seqlens, longest, longest)
        return pad_input(out, indices, 2, 40)

    hidden, real = torch.randn(2, 40, 4, 8), torch.rand(2, 40) < 0.5
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, real), attention(hidden, real))


TOKENS, INDICES = torch.zeros(4, 3), torch.arange(4)
PADDING_ERRORS = {
    "shapes differ": (
        lambda: unpad_input(torch.zeros(2, 5, 3), torch.ones(2, 4, dtype=torch.bool)),
        ValueError,
        r"attention_mask must be \(B, S\).*got \(2, 4\).*\(2, 5, 3\)",
    ),
    "too few indices": (
        lambda: pad_input(TOKENS, INDICES[:3], 2, 3),
        ValueError,
        r"indices must have one entry for each of the 4 tokens, got \(3,\)",
    ),
    "mask is a list": (lambda: unpad_input(TOKENS, [1]), TypeError, "attention_mask must be a torch.Tensor, got list"),
    "float mask": (
        lambda: unpad_input(TOKENS, torch.ones(4, 3)),
        TypeError,
        "attention_mask must be bool or integers, got float32",
    ),
    "mask on another device": (
        lambda: unpad_input(TOKENS, torch.ones(4, 3, device="meta").bool()),
        RuntimeError,
        "attention_mask must be on hidden_states's device cpu, got meta",
    ),
    "no tokens": (lambda: unpad_input(None, INDICES), TypeError, "hidden_states must be a torch.Tensor, got NoneType"),
    "float indices": (
        lambda: pad_input(TOKENS, INDICES.float(), 2, 3),
        TypeError,
        "indices must be integers, got float32",
    ),
    "indices beyond the end": (
        lambda: pad_input(TOKENS, INDICES + 3, 2, 3),
        ValueError,
        r"indices must be from 0 to batch \* seqlen - 1 = 5, got 6",
    ),
    "indices below 0": (lambda: pad_input(TOKENS, INDICES - 1, 2, 3), ValueError, "indices must be from 0 .*, got -1"),
    "float batch": (lambda: pad_input(TOKENS, INDICES, 2.0, 3), TypeError, "batch must be an int, got float"),
}


@pytest.mark.parametrize("case", PADDING_ERRORS)
def test_padding_errors(case):
    function, error, message = PADDING_ERRORS[case]
    with pytest.raises(error, match=message):
        function()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 5)], ids=str)
def test_padding_of_batches_that_hold_nothing(shape):
    tokens, indices, cu_seqlens, longest = unpad_input(torch.randn(*shape, 3), torch.zeros(shape, dtype=torch.bool))
    assert tokens.shape == (0, 3) and cu_seqlens.tolist() == [0] * (shape[0] + 1) and longest == 0
    assert torch.equal(pad_input(tokens, indices, *shape), torch.zeros(*shape, 3))


def test_the_backward_allocates_for_existing_rows_only():
    """A long sequence beside many short ones: [sequences, longest, D] would be 839 GB."""
    longest, sequences = 1 << 14, 200_000
    cu_q = torch.cat([torch.tensor([0]), longest + torch.arange(sequences)]).int()
    query = torch.randn(cu_q[-1], 1, 64, requires_grad=True)
    key, value = (torch.randn(sequences, 1, 64, requires_grad=True) for _ in range(2))
    cu_k = torch.arange(sequences + 1, dtype=torch.int32)
    flash_dmattn_varlen_func(query, key, value, None, None, cu_q, cu_k, longest, 1).sum().backward()
    # Each row sees one key.
    rows = torch.cat([torch.tensor([longest]), torch.ones(sequences - 1)])[:, None, None]
    torch.testing.assert_close(value.grad, rows.expand_as(value))
    torch.testing.assert_close(query.grad, torch.zeros_like(query), rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["tiles", "key mask", "dense bias", "intervals", "lists", "window_size"])
def test_a_max_seqlen_far_above_the_sequences_costs_nothing(how):
    cu = offsets([16] * 40)
    tensors = [torch.randn(640, 2, 8) for _ in range(3)]
    dout, dlse = torch.randn(640, 2, 8), torch.randn(2, 640)
    key_bias, intervals = torch.randn(640, 1), KeyIntervalMask.topk_varlen(torch.randn(640, 1), 5, cu)
    options = {
        "tiles": (None, key_bias, {}),
        "key mask": (rand_mask(640, 1), key_bias, {"sparse": "lists"}),
        "dense bias": (None, torch.randn(640, 1, 1000), {}),
        "intervals": (intervals, key_bias, {"sparse": "auto"}),
        "lists": (intervals, key_bias, {"sparse": "lists"}),
        "window_size": (None, key_bias, {"window_size": 5, "is_causal": True, "sparse": "lists"}),
    }
    mask, bias, options = options[how]
    longest_k = 1000 if how == "dense bias" else 1 << 33
    ours, short = (
        gradients(
            flash_dmattn_varlen_func, tensors, mask, bias, dout, dlse, cu, cu, *lengths, return_lse=True, **options
        )
        for lengths in ((1 << 33, longest_k), (16, 1000 if how == "dense bias" else 16))
    )
    for x, y in zip(ours, short):
        assert torch.equal(x, y)


WRONG = {
    "beyond the end": (
        [0, 8, 4000],
        5000,
        "non-decreasing from 0 to 20, the ((rows|keys) of|number of keys)|at least the longest sequence 3992, got 20",
    ),
    "before the start": ([0, -500000, 20], 5000, "must be non-decreasing from 0"),
    "longer than max_seqlen": ([0, 18, 20], 15, "must be at least the longest sequence 18, got 15"),
}


@SIZES_FROM_VALUES
@pytest.mark.parametrize("how", ["tiles", "lists", "window_size"])
@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_sequences_are_refused_in_a_graph_too(wrong, which, how):
    """Tracing does not check the lengths; the operators do when they run."""
    values, longest, message = WRONG[wrong]
    right, wrong = torch.tensor([0, 8, 20], dtype=torch.int32), torch.tensor(values, dtype=torch.int32)
    cu = (wrong, right) if which == "q" else (right, wrong)
    rows, mask, bias = torch.randn(20, 2, 8), torch.ones(20, 1, dtype=torch.bool), torch.randn(20, 1)
    options = {"tiles": {}, "lists": {"sparse": "lists"}, "window_size": {"is_causal": True, "window_size": 3}}[how]
    mask = mask if how == "lists" else None

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(rows, cu_q, cu_k):
        return flash_dmattn_varlen_func(rows, rows, rows, mask, bias, cu_q, cu_k, longest, longest, **options)

    # The key selection may fail first.
    expected = (Exception, None) if how == "window_size" else (ValueError, message)
    with pytest.raises(expected[0], match=expected[1]):
        layer(rows, *cu)


CU = offsets([3, 2])


@pytest.mark.parametrize(
    "lengths, error, message",
    [
        ((CU, CU, 2**70, 3), ValueError, f"max_seqlen_q must fit in 64 bits, got {2**70}"),
        ((CU, CU, 3, 2**70), ValueError, f"max_seqlen_k must fit in 64 bits, got {2**70}"),
        ((CU, None, 3, 3), TypeError, "cu_seqlens_k is required, got None"),
        ((), TypeError, "cu_seqlens_q is required, got None"),
    ],
)
def test_lengths_that_are_none(lengths, error, message):
    with pytest.raises(error, match=message):
        flash_dmattn_varlen_func(*torch.randn(3, 5, 2, 8), None, None, *lengths)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_max_seqlen_as_a_tensor(dtype):
    longest = torch.tensor(3, dtype=dtype)
    rows, qkv, cache = torch.randn(5, 2, 8), torch.randn(5, 3, 2, 8), torch.randn(2, 9, 2, 8)
    lengths = torch.tensor([4, 5], dtype=torch.int32)
    for function in (
        lambda n: flash_dmattn_varlen_func(rows, rows, rows, None, None, CU, CU, n, n),
        lambda n: flash_dmattn_varlen_func(rows, rows, rows, None, torch.ones(5, 1, 3), CU, CU, n, n),
        lambda n: flash_dmattn_varlen_qkvpacked_func(qkv, None, torch.ones(5, 1, 3), CU, n),
        lambda n: flash_dmattn_with_kvcache(rows, cache, cache, cache_seqlens=lengths, cu_seqlens_q=CU, max_seqlen_q=n),
    ):
        assert torch.equal(function(longest), function(3))
        with pytest.raises(ValueError, match="max_seqlen(_q|) must not be negative, got -1"):
            function(torch.tensor(-1))
        for bad, got in ((torch.tensor(3.0), "float32 of shape ()"), (torch.tensor([3]), "int64 of shape (1,)")):
            error = f"must be an int, or outside of compiled graphs an integer tensor () on the CPU, got {got}"
            with pytest.raises(TypeError, match=f"max_seqlen(_q|) {re.escape(error)}"):
                function(bad)


def test_a_bound_beyond_64_bits():
    with pytest.raises(ValueError, match=f"max_seqlen must fit in 64 bits, got {2**70}"):
        flash_dmattn_varlen_qkvpacked_func(torch.randn(5, 3, 2, 8), None, None, CU, 2**70)
