"""Attention within windows: masks and biases that repeat cyclically along the batch."""

import pytest
import torch
from helpers import inputs, rand_mask, reference, run
from torch.utils._python_dispatch import TorchDispatchMode

from flash_dmattn import KeyIntervalMask, flash_dmattn_func
from flash_dmattn.integrations.windows import window_attention

IMAGES, WINDOWS, LENGTH, HEADS = 3, 4, 49, 2
BATCH = IMAGES * WINDOWS


def repeated(query, key, value, mask=None, bias=None, **options):
    """The dense reference: entry b % nW for batch element b."""
    mask, bias = (None if x is None else x.repeat(query.shape[0] // x.shape[0], 1, 1, 1) for x in (mask, bias))
    return reference(query, key, value, mask, bias, **options)


def tensors_of(dtype=torch.float64, kv_heads=HEADS):
    return inputs(BATCH, LENGTH, LENGTH, HEADS, kv_heads, 16, dtype)


@pytest.mark.parametrize("masks", [WINDOWS, BATCH, 1, None])
@pytest.mark.parametrize("biases", [(WINDOWS, HEADS), (1, HEADS), (BATCH, 1), None], ids=str)
def test_entries_repeat(masks, biases):
    """Out, lse and all gradients; those of a bias are summed over the images."""
    tensors = tensors_of(kv_heads=1)
    mask = None if masks is None else rand_mask(masks, 1, LENGTH, LENGTH)
    bias = None if biases is None else torch.randn(*biases, LENGTH, LENGTH, dtype=torch.float64)
    results = torch.randn(BATCH, LENGTH, HEADS, 16), torch.randn(BATCH, HEADS, LENGTH)
    ours, wanted = (run(function, tensors, mask, bias, *results) for function in (window_attention, repeated))
    for x, y in zip(ours, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tables", [1, BATCH])
def test_relative_biases_of_a_grid(tables):
    tensors, mask = tensors_of(), rand_mask(WINDOWS, 1, LENGTH, LENGTH)
    table = torch.randn(tables, HEADS, 13, 13, dtype=torch.float64)
    results = torch.randn(BATCH, LENGTH, HEADS, 16), torch.randn(BATCH, HEADS, LENGTH)
    options = {"relative_bias": table, "grid": (7, 7)}
    ours, wanted = (
        run(function, tensors, mask, None, *results, **options) for function in (window_attention, repeated)
    )
    for x, y in zip(ours, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_blocks_are_another_order():
    """The same tensors in flash_dmattn_func: entry b // n for batch element b."""
    tensors, mask = tensors_of(), rand_mask(WINDOWS, 1, LENGTH, LENGTH)
    out = flash_dmattn_func(*tensors, mask)
    assert (out - window_attention(*tensors, mask)).abs().max() > 0.1
    torch.testing.assert_close(out, reference(*tensors, mask.repeat_interleave(IMAGES, dim=0)))


def test_options_reach_the_function():
    tensors, mask = tensors_of(), rand_mask(WINDOWS, 1, LENGTH, LENGTH)
    options = {"softmax_scale": 0.3, "is_causal": True, "softcap": 2.0, "deterministic": True}
    out = window_attention(*tensors, mask, None, *options.values(), sparse="lists")
    torch.testing.assert_close(out, repeated(*tensors, mask, **options))
    sinks = torch.randn(HEADS, dtype=torch.float64)
    out = window_attention(*tensors, mask, sinks=sinks)
    torch.testing.assert_close(out, repeated(*tensors, mask, sinks=sinks))
    with pytest.raises(ValueError, match="sparse"):
        window_attention(*tensors, mask, sparse="some")


class Largest(TorchDispatchMode):
    """Records the largest bool tensor and the largest other tensor of one element per score that operators return."""

    def __init__(self):
        super().__init__()
        self.elements = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.shape[-2:] == (LENGTH, LENGTH):
                self.elements[x.dtype] = max(self.elements.get(x.dtype, 0), x.numel())
        return out


def test_nothing_is_repeated():
    tensors = [x.requires_grad_() for x in tensors_of(torch.float32)]
    mask = rand_mask(WINDOWS, 1, LENGTH, LENGTH)
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, requires_grad=True)
    with Largest() as largest:
        window_attention(*tensors, mask, bias).sum().backward()
    assert largest.elements[torch.float32] <= bias.numel()  # the gradient of the bias
    assert largest.elements.get(torch.bool, 0) <= mask.numel()


def test_compiled():
    tensors, mask = tensors_of(torch.float32), rand_mask(WINDOWS, 1, LENGTH, LENGTH)
    compiled = torch.compile(window_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors, mask), window_attention(*tensors, mask))


def test_a_layer_of_swin():
    """Shifted windows of transformers' Swin, with its relative position bias and its mask of 0 and -100."""
    transformers = pytest.importorskip("transformers", "5.17")
    from transformers.models.swin.modeling_swin import SwinLayer

    config = transformers.SwinConfig(window_size=4, attn_implementation="eager", attention_probs_dropout_prob=0.0)
    layer = SwinLayer(config, 32, (8, 8), num_heads=2, shift_size=2).eval()
    torch.nn.init.normal_(layer.attention.relative_position_bias.relative_position_bias_table)
    shifted = layer.get_attn_mask(8, 8, torch.float32, torch.device("cpu"))
    windows = torch.randn(3 * len(shifted), 16, 32)
    wanted = layer.attention(windows, shifted)[0]

    attention = layer.attention
    query, key, value = (
        proj(windows).unflatten(-1, (2, 16)) for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    bias = attention.relative_position_bias()
    out = window_attention(query, key, value, (shifted == 0).unsqueeze(1), bias.view(1, 2, 16, 16))
    torch.testing.assert_close(attention.o_proj(out.flatten(2)), wanted, rtol=1e-4, atol=1e-5)

    table = attention.relative_position_bias.relative_position_bias_table.T.view(1, 2, 7, 7)
    by_table = window_attention(query, key, value, (shifted == 0).unsqueeze(1), relative_bias=table, grid=(4, 4))
    torch.testing.assert_close(by_table, out, rtol=1e-4, atol=1e-5)


MASK = torch.ones(WINDOWS, 1, LENGTH, LENGTH, dtype=torch.bool)


@pytest.mark.parametrize(
    ("masks", "error", "message"),
    [
        ((MASK[0],), ValueError, r"attn_mask must be \({B\|nW\|1}, .* with B = 12 and an nW that divides B, got shape"),
        ((MASK.repeat(2, 1, 1, 1),), ValueError, r"an nW that divides B, got shape \(8, 1, 49, 49\)"),
        ((MASK, torch.zeros(3, 1, 1, LENGTH)), ValueError, r"attn_bias must be .* nW = 4, got shape \(3, 1, 1, 49\)"),
        ((KeyIntervalMask.causal(LENGTH, LENGTH, device="cpu"),), TypeError, "attn_mask must be a torch.Tensor, got"),
    ],
    ids=["3 dimensions", "no divisor", "two numbers", "intervals"],
)
def test_errors(masks, error, message):
    with pytest.raises(error, match=message):
        window_attention(*tensors_of(torch.float32), *masks)


def test_batch_sizes_that_differ():
    query, key, value = tensors_of()
    with pytest.raises(ValueError, match=r"value must have .* query's batch size, got shape \(4, "):
        window_attention(query, key, value[:WINDOWS], MASK)
