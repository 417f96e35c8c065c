"""Doge on the interface of transformers, with its window of selected keys."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", "5.17")

from helpers import rand_mask  # noqa: E402
from small_models import (  # noqa: E402
    BATCH,
    CU_SEQLENS,
    NEW,
    PROMPT,
    SEQLEN,
    assert_same_step,
    build,
    labels_of,
    padding,
    step,
    switched,
    tokens,
)
from transformers import DynamicCache, StaticCache  # noqa: E402
from transformers.models.doge.modeling_doge import DogeAttention  # noqa: E402

from flash_dmattn import KeyIntervalMask  # noqa: E402
from flash_dmattn.integrations import doge  # noqa: E402
from flash_dmattn.integrations.transformers import use_flash_dmattn  # noqa: E402
from flash_dmattn.integrations.versions import CACHE  # noqa: E402


def test_doge_on_the_interface_alone():
    """Without use_flash_dmattn the kernels get Doge's own S x S bias."""
    model, ids = build("doge"), tokens()
    registered = copy.deepcopy(model)
    registered.set_attn_implementation("flash_dmattn")
    for real in (None, padding("left")):
        rows = padding("none" if real is None else "left").bool()
        batch = {"input_ids": ids, "attention_mask": real, "labels": labels_of("doge", ids, rows.long())}
        assert_same_step(step(registered, **batch), step(model, **batch), rows)


def test_doge_switches_back_and_forth():
    model, ids = build("doge"), tokens()
    expected = model(ids).logits
    ours = switched(model)
    assert all(type(layer.self_attn) is doge.DogeWindowAttention for layer in ours.model.layers)
    assert ours.state_dict().keys() == model.state_dict().keys()
    assert use_flash_dmattn(ours) is ours
    ours.set_attn_implementation("eager")
    torch.testing.assert_close(ours(ids).logits, expected, rtol=0, atol=0)
    copied = copy.deepcopy(use_flash_dmattn(ours))
    torch.testing.assert_close(copied(ids).logits, expected, rtol=1e-4, atol=2e-5)
    assert all(isinstance(layer.self_attn, DogeAttention) for layer in copied.model.layers)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("window", [3, 6, 9])
def test_doge_with_a_sliding_window(window, side):
    """Doge keeps 6 keys: in a larger sliding window, evicted keys may return."""
    model, ids, real = build("doge", sliding_window=window), tokens(), padding(side)
    batch = {"input_ids": ids, "attention_mask": real, "labels": labels_of("doge", ids, real)}
    assert_same_step(step(switched(model), **batch), step(model, **batch), real.bool())


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_doge_with_a_dense_mask(kind):
    model, ids = build("doge"), tokens()
    visible = rand_mask(BATCH, 1, SEQLEN, SEQLEN) | torch.eye(SEQLEN, dtype=torch.bool)
    mask = visible if kind == "bool" else torch.zeros(visible.shape).masked_fill(~visible, torch.finfo().min)
    torch.testing.assert_close(
        switched(model)(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits, rtol=1e-4, atol=2e-5
    )


def test_doge_selects_keys_within_each_packed_document():
    documents = torch.tensor([[0] * 9 + [1] * 4 + [2] * 8])
    bias = torch.randn(2, 3, 1, 21)
    bias[:, :, :, 5] = bias[:, :, :, 3]  # the later of equal ones
    bias[0, 0, 0, 15] = -torch.inf
    ranks = doge.ranks_by_document(bias, documents.expand(2, -1))
    mask = KeyIntervalMask.topk(ranks, 3) & KeyIntervalMask.documents(ids=documents)
    cu_seqlens = CU_SEQLENS.tolist()
    for first, last in zip(cu_seqlens, cu_seqlens[1:]):
        own = KeyIntervalMask.topk(bias[..., first:last].contiguous(), 3).to_dense()
        torch.testing.assert_close(mask.to_dense()[..., first:last, first:last], own)
    assert mask.to_dense()[..., 13:, :13].sum() == 0


def test_doge_with_a_static_cache_and_gradients():
    model, ids = build("doge"), tokens()
    ours = switched(model)
    caches = [StaticCache(config=model.config, max_cache_len=32) for _ in range(2)]
    logits = [m(ids, **{CACHE: cache}).logits for m, cache in zip((ours, model), caches)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_doge_makes_the_bias_of_a_key_once(cache):
    model, ids = switched(build("doge")).eval(), tokens(seqlen=PROMPT)
    rows = []
    for layer in model.model.layers:
        layer.self_attn.dt_proj.register_forward_hook(lambda module, given, out: rows.append(out.shape[1]))
    options = {"max_new_tokens": NEW, "cache_implementation": cache, "eos_token_id": None, "do_sample": False}
    model.generate(ids, attention_mask=padding("none", seqlen=PROMPT), **options)
    layers = len(model.model.layers)
    assert rows == [PROMPT] * layers + [1] * layers * (NEW - 1)


def test_doge_goes_on_with_a_cache_that_eager_began():
    model, ids = build("doge").eval(), tokens()
    ours, past = switched(model), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :12], **{CACHE: past})
        logits = ours(ids[:, 12:], **{CACHE: past}).logits
        torch.testing.assert_close(logits, model(ids).logits[:, 12:], rtol=1e-4, atol=2e-5)


def test_doge_with_a_cache_that_is_cut():
    """Assisted generation drops tokens from the cache, and their biases with them."""
    model, ids = switched(build("doge")).eval(), tokens()
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids.flip(1), **{CACHE: past})
        past.crop(-(SEQLEN - 8))
        logits = model(ids[:, 8:], **{CACHE: past}).logits
        together = torch.cat([ids.flip(1)[:, :8], ids[:, 8:]], dim=1)
        torch.testing.assert_close(logits, model(together).logits[:, 8:], rtol=1e-4, atol=2e-5)
