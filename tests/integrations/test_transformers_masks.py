"""The masks of transformers: patterns as visible keys, additive masks, padding, sinks."""

from types import SimpleNamespace

import pytest
import torch
from einops import rearrange

transformers = pytest.importorskip("transformers", "5.17")

from helpers import inputs, rand_mask  # noqa: E402
from small_models import BATCH, DECODERS, POSITIONS, build, by_softmax, one_call, padding, switched, tokens  # noqa: E402
from transformers import masking_utils  # noqa: E402

from flash_dmattn import KeyIntervalMask, flash_dmattn_func_auto  # noqa: E402
from flash_dmattn.integrations.transformers import attention  # noqa: E402
from flash_dmattn.integrations.visible_keys import VisibleKeys, visible_keys_mask  # noqa: E402


def offsets():
    """(q_length, kv_length, q_offset, kv_offset): training, decoding, chunks, static caches, sliding ones."""
    yield from [(9, 9, 0, 0), (1, 12, 11, 0), (4, 12, 8, 0), (9, 16, 0, 0), (1, 16, 7, 0), (3, 7, 9, 5), (1, 1, 0, 0)]
    yield from [(1, 16, torch.tensor(7), 0), (9, 16, torch.tensor(0), 0)]


PATTERNS = {
    "causal": masking_utils.causal_mask_function,
    "both ways": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks that hold all": masking_utils.chunked_causal_mask_function(64, torch.zeros(BATCH, dtype=torch.long)),
    "chunks behind padding": masking_utils.chunked_causal_mask_function(64, torch.tensor([2, 0])),
}
PADDINGS = ["", "all real", "left", "right", "beyond"]
# transformers counts chunks from the end of the padding.
SEEN = [(name, padded) for name in PATTERNS for padded in PADDINGS if "behind" not in name or padded == "left"]


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("sizes", list(offsets()), ids=str)
@pytest.mark.parametrize(("pattern", "padded"), SEEN)
def test_visible_keys_equal_the_dense_mask(pattern, sizes, padded, gradients):
    q_length, kv_length, q_offset, kv_offset = sizes
    seen = int(q_offset) + q_length
    real = None
    if padded:
        real = torch.ones(BATCH, kv_length + kv_offset if padded == "beyond" else seen, dtype=torch.bool)
        masked = {"left": slice(0, 2), "right": slice(seen - 2, None)}.get(padded, slice(0, 0))
        real[0, masked] = False
    call = {"batch_size": BATCH, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
    call |= {"kv_offset": kv_offset, "mask_function": PATTERNS[pattern], "attention_mask": real}
    expected = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False).expand(BATCH, 1, q_length, kv_length)

    with torch.set_grad_enabled(gradients):
        visible = visible_keys_mask(**call)
    assert isinstance(visible, VisibleKeys) and visible.shape == expected.shape
    torch.testing.assert_close(visible.to_dense(), expected)
    assert visible.cache_seqlens is None or not gradients

    # The kernels see the same keys.
    query, key, value = inputs(BATCH, q_length, kv_length, 2, 2, 8)
    by_head = [rearrange(x, "b s h d -> b h s d") for x in (query, key, value)]
    layer = SimpleNamespace(is_causal="both" in pattern)  # wrong, as in some models: the mask decides
    with torch.no_grad():
        exact = flash_dmattn_func_auto("reference")(query, key, value, expected)
        torch.testing.assert_close(attention(layer, *by_head, visible)[0], exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS[:-1])
def test_no_dense_mask_is_built(name, monkeypatch):
    """deepseek_v32 is left out: its indexer computes with the dense mask."""
    model, ids = switched(build(name)), tokens()
    monkeypatch.setattr(KeyIntervalMask, "to_dense", lambda *_: pytest.fail("a mask of pairs"))
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda *_, **__: pytest.fail("a mask of pairs"))
    model(ids, labels=ids).loss.backward()
    model(ids, attention_mask=padding("left"))
    model(ids[:1], position_ids=POSITIONS, use_cache=False)
    for implementation in ("static", "dynamic"):
        options = {"max_new_tokens": 3, "cache_implementation": implementation, "eos_token_id": None}
        model.generate(ids, attention_mask=padding("left"), do_sample=False, **options)


def test_other_patterns_become_a_dense_mask():
    either = masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: (q < 4) & (k < 4))
    call = {"batch_size": BATCH, "q_length": 9, "kv_length": 9, "mask_function": either}
    mask = visible_keys_mask(**call)
    torch.testing.assert_close(mask, masking_utils.sdpa_mask(**call, allow_is_causal_skip=False))
    assert mask.dtype == torch.bool and mask[0, 0, 1, 3] and not mask[0, 0, 1, 4]
    both = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k != 2)
    assert isinstance(visible_keys_mask(**call | {"mask_function": both}), torch.Tensor)
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.long))
    mask = visible_keys_mask(**call | {"mask_function": chunks})
    assert isinstance(mask, torch.Tensor) and not mask[0, 0, 5, 3]
    twice = masking_utils.and_masks(*[masking_utils.sliding_window_overlay(size) for size in (3, 2)])
    assert isinstance(visible_keys_mask(**call | {"mask_function": twice}), torch.Tensor)


def test_visible_keys_behave_as_a_bool_tensor():
    visible = visible_keys_mask(BATCH, q_length=4, kv_length=6, q_offset=2)
    dense = visible.to_dense()
    assert visible.dtype == torch.bool and visible.ndim == 4 and len(visible) == BATCH and visible.size(3) == 6
    for ours, expected in (
        (visible[..., :2], dense[..., :2]),
        (~visible, ~dense),
        (visible & ~dense, dense & ~dense),
        (~dense | visible, dense.new_ones(dense.shape)),
        (visible == 0, ~dense),
        (visible != visible, dense & ~dense),
        (torch.where(visible, 0.0, 1.0), torch.where(dense, 0.0, 1.0)),
        (dense.float().masked_fill(visible, 2), dense.float() * 2),
        (visible.float(), dense.float()),
        (visible.to(torch.float64), dense.double()),
    ):
        torch.testing.assert_close(ours, expected)
    moved = visible.to("meta")
    assert isinstance(moved, VisibleKeys) and moved.device.type == "meta"
    assert isinstance(visible.to("cpu", non_blocking=True), VisibleKeys)
    with pytest.raises(AttributeError):
        visible.no_such_thing  # noqa: B018


@pytest.mark.parametrize("shape", [(2, 1, 9, 11), (1, 4, 9, 11), (2, 1, 1, 11), (2, 4, 9, 14)])
def test_additive_masks_and_position_biases(shape):
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=11, heads=4, kv_heads=2)
    masked = ~rand_mask(*shape)
    masked[..., 0] = False
    mask = torch.randn(shape).masked_fill(masked, torch.finfo(torch.float32).min)
    bias = torch.randn(9, 11, 4).permute(2, 0, 1)[None].requires_grad_()  # as T5's
    leaves = [x.requires_grad_() for x in (*tensors, bias)]
    for given, added in ((mask, mask), (~masked, torch.zeros(shape).masked_fill(masked, -torch.inf))):
        ours, _ = attention(layer, *tensors, given, position_bias=bias, scaling=1.0, softcap=3.0)
        expected = by_softmax(*tensors, added[..., :11] + bias, scaling=1.0, softcap=3.0)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        weights = torch.randn_like(ours)
        gradients = (torch.autograd.grad((x * weights).sum(), leaves) for x in (ours, expected))
        for a, b in zip(*gradients):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_layers_share_the_copy_of_a_position_bias():
    """T5 passes all layers one bias, with the heads innermost: the backward keeps one copy."""
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=11, heads=4, kv_heads=2)
    weights = torch.randn(9, 11, 4, requires_grad=True)

    def bias():
        return (2 * weights).permute(2, 0, 1)[None]

    def call(bias):
        return attention(layer, *tensors, None, position_bias=bias, scaling=1.0)[0]

    kept = set()
    shared = bias()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.add(x.data_ptr()) if x.shape == shared.shape else None, lambda _: None
    ):
        call(shared), call(shared)
    assert len(kept) == 1

    (gradient,) = torch.autograd.grad(call(shared).square().sum() + call(shared).sum(), weights)
    (expected,) = torch.autograd.grad(call(bias()).square().sum() + call(bias()).sum(), weights)
    torch.testing.assert_close(gradient, expected)

    with torch.no_grad():
        before = call(shared)
        shared.mul_(0)
        assert not torch.equal(call(shared), before)
    torch.testing.assert_close(call(shared), call(None))  # the copy is not stale


def test_an_additive_mask_in_another_dtype_masks():
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=11)
    masked = ~rand_mask(2, 1, 9, 11)
    masked[0, 0, 0] = True
    mask = torch.zeros(2, 1, 9, 11, dtype=torch.bfloat16).masked_fill(masked, torch.finfo(torch.bfloat16).min)
    out = attention(layer, *tensors, mask)[0]
    torch.testing.assert_close(out, attention(layer, *tensors, ~masked)[0])
    assert out[0, 0].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_least_finite_number_masks_whatever_is_added(dtype):
    """40 more than the least float16 is another float16."""
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=11)
    tensors = [x.to(dtype) for x in tensors]
    masked = ~rand_mask(1, 1, 9, 11)
    masked[0, 0, 0] = True
    mask = torch.zeros(1, 1, 9, 11, dtype=dtype).masked_fill(masked, torch.finfo(dtype).min)
    bias = torch.full((1, 1, 9, 11), 40.0, dtype=dtype)
    expected = attention(layer, *tensors, ~masked)[0]
    for added in ((mask, bias), (bias, mask)):
        torch.testing.assert_close(attention(layer, *tensors, added[0], position_bias=added[1])[0], expected)
    narrow = torch.zeros(1, 1, 9, 11).masked_fill(masked, torch.finfo(torch.float16).min).half()
    out = attention(layer, *tensors, None, is_causal=False, position_bias=narrow)[0]
    torch.testing.assert_close(out, expected)


INDEXED_MASKS = {
    "none": lambda: None,
    "causal": lambda: None,
    "padding": lambda: padding("left", seqlen=13).bool(),
    "causal padding": lambda: padding("left", seqlen=13),
    "bool": lambda: rand_mask(BATCH, 1, 9, 14),
    "additive": lambda: torch.randn(1, 4, 9, 14),
    "visible keys": lambda: visible_keys_mask(BATCH, 9, 11, 2, mask_function=PATTERNS["window"]),
}


@pytest.mark.parametrize("kind", INDEXED_MASKS)
def test_an_indexer_restricts_every_mask(kind):
    layer, *tensors = one_call(batch=BATCH, seqlen_q=9, seqlen_k=11, heads=4, kv_heads=2)
    mask, is_causal = INDEXED_MASKS[kind](), "causal" in kind
    indices = torch.randint(11, (BATCH, 9, 5))
    added = torch.full((BATCH, 1, 9, 11), -torch.inf).scatter_(-1, indices[:, None], 0)
    if is_causal:
        added = added.masked_fill(~torch.ones(9, 11, dtype=torch.bool).tril(2), -torch.inf)
    if isinstance(mask, VisibleKeys):
        added = added.masked_fill(~mask.to_dense(), -torch.inf)
    elif mask is not None and mask.is_floating_point():
        added = added + mask[..., :11]
    elif mask is not None:
        visible = (mask[:, None, None] if mask.ndim == 2 else mask)[..., :11].bool()
        added = added.masked_fill(~visible, -torch.inf)
    ours = attention(layer, *tensors, mask, is_causal=is_causal, indices=indices)[0]
    torch.testing.assert_close(ours, by_softmax(*tensors, added).nan_to_num(0), rtol=1e-4, atol=1e-5)


def test_a_padding_mask_of_two_dimensions():
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=11)
    real = rand_mask(2, 13)
    out = attention(layer, *tensors, real.long())[0]
    torch.testing.assert_close(out, attention(layer, *tensors, real[:, None, None, :11])[0])


@pytest.mark.parametrize("shape", [(4,), (2, 4, 9, 1), (1, 4, 1, 1)], ids=str)
def test_sinks_take_part_of_the_softmax(shape):
    """One for each head, as in GPT-OSS, or for each head and row, as in Inkling 2."""
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=9, heads=4, kv_heads=2)
    sinks = torch.randn(shape)
    visible = torch.ones(9, 9, dtype=torch.bool).tril(-1)[None, None]  # the first row sees its sink alone
    leaves = [x.double().requires_grad_() for x in (*tensors, sinks)]
    ours, _ = attention(layer, *leaves[:3], visible, **{"s_aux" if len(shape) == 1 else "sinks": leaves[3]})
    expected = by_softmax(*leaves[:3], torch.zeros(9, 9).masked_fill(~visible, -torch.inf), sinks=leaves[3])
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)
    assert ours[:, 0].eq(0).all()
    weights = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), leaves) for x in (ours, expected))):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_a_sink_of_minus_infinity():
    """A sink of -inf and a row that sees nothing produce no NaN."""
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=9, heads=4, kv_heads=2)
    visible = torch.ones(9, 9, dtype=torch.bool).tril(-1)[None, None]
    leaves = [x.requires_grad_() for x in (*tensors, torch.full((4,), -torch.inf))]
    out, _ = attention(layer, *leaves[:3], visible, s_aux=leaves[3])
    torch.testing.assert_close(out, attention(layer, *tensors, visible)[0])
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), leaves))


def test_values_of_another_head_dimension():
    layer, query, key, _ = one_call(batch=2, seqlen_q=9, seqlen_k=9, head_dim=24)
    for value_dim in (16, 40):
        value = torch.randn(2, 2, 9, value_dim)
        out, _ = attention(layer, query, key, value, None)
        torch.testing.assert_close(out, by_softmax(query, key, value, 0.0), rtol=1e-4, atol=1e-5)
